"""A gang of two ranks: what it trains, what ends it, and what goes on."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.errors import ConfigError, NonFiniteError, ProgramError, RankError
from ckpt_tasks.flows.gang.gang_session import GangSession
from ckpt_tasks.flows.gang.messages import Begin
from ckpt_tasks.flows.gang.processes import Gang
from ckpt_tasks.flows.session.session import Progress, watcher
from ckpt_tasks.system import host_name
from tests.support.agents import MARK, PARALLEL, KeptGang, config_of, kept, left, main, train, trained
from tests.support.children import Child
from tests.support.ledgers import is_released, newest_step
from tests.support.waiting import until

TOTAL = 18


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], list[str]]:
    """Return what a gang of two that nobody disturbs has trained."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert train(config_of(run_dir), {}, TOTAL) == []
    return trained(run_dir)


def test_whatever_ends_a_rank_is_named_and_nothing_is_lost(
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: tuple[int, dict[str, Any], list[str]],
) -> None:
    """A rank that raises, is killed, exits or crashes ends the gang at once, by its name; the next gang goes on.

    The end is bit-equal to that of a gang that nobody disturbed, metrics of every step included; no process is left.
    """
    monkeypatch.setenv(MARK, str(tmp_path))
    plan = [(3, 1, "raise"), (7, 0, "kill"), (9, 1, "exit"), (12, 1, "segv")]
    failures = train(config_of(run_dir), {"plan": plan, "folder": str(tmp_path)}, TOTAL)
    wanted = (
        r"rank 1 failed after step 2: RuntimeError: injected in step 3",
        r"rank 0 was killed by SIGKILL",
        r"rank 1 failed after step 8: SystemExit: 0",
        r"rank 1 was killed by SIGSEGV",
    )
    assert [type(failure) for failure in failures] == [RankError] * 4
    assert [text for text, failure in zip(wanted, failures, strict=True) if not re.match(text, str(failure))] == []
    assert "_interfere" in failures[0].__notes__[0]
    table, stacks = failures[3].__notes__
    assert re.fullmatch(r"rank  process  last step\n   0 +\d+ +\d+  runs\n   1 +\d+ +\d+  was killed by SIGSEGV", table)
    assert "Segmentation fault" in stacks
    assert trained(run_dir) == whole
    notes = [note for note in open_run(str(run_dir)).notes() if note["note"] == "failure"]
    assert [note["attempt"] for note in notes] == [4, 3, 2, 1]
    assert left(str(tmp_path)) == []


@pytest.mark.slow
def test_a_rank_that_does_not_go_on_is_found(run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A rank that completes no step within `flush_timeout_s` ends the gang; the log has the stacks of the others.

    So does one whose thread goes on logging. A first step may take longer: it compiles. When the error is raised no
    rank runs any more, and none is left as a zombie.
    """
    pids: list[int] = []
    token = watcher.set(lambda progress: pids.extend(rank.pid for rank in kept.ranks))
    config = config_of(run_dir, flush_timeout_s=8.0)
    plan = [(1, 1, "slow"), (3, 1, "stop"), (7, 0, "slow")]
    try:
        stopped, slow = train(config, {"plan": plan, "folder": str(tmp_path), "logs": True, "step_s": 0.25}, 10)
    finally:
        watcher.reset(token)
    assert re.match(r"rank 1 is stopped \(SIGSTOP, or a debugger\): no step for \d+ s", str(stopped))
    assert re.match(r"rank 0 makes no progress, and rank 1 waits for it in a collective: no step for \d+ s", str(slow))
    stacks = [record.getMessage() for record in caplog.records if "stacks of rank 0" in record.getMessage()]
    assert "train_step" in stacks[0]
    assert trained(run_dir)[0] == 10
    assert len({*pids}) == 6
    assert [pid for pid in {*pids} - {rank.pid for rank in kept.ranks} if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_the_end_of_the_fork_server_is_named_and_not_a_rank(run_dir: Path, tmp_path: Path) -> None:
    """The kernel kills all ranks with their fork server: the error says so of all of them; the next gang goes on.

    The row of the gang has the step at which it was lost.
    """
    params = {"plan": [(4, 1, "server")], "folder": str(tmp_path), "step_s": 0.1}
    with GangSession(config_of(run_dir), PARALLEL, params, ranks=2, engine=Gang()) as session:
        session.restore()
        with pytest.raises(
            RankError, match=r"^rank 0, 1 is lost: the fork server, which holds them, has ended \(step 3"
        ):
            session.run(9)
        assert session.gangs[0]["steps"] == "0 to 3"
        session.discard()
        session.restore()
        session.run(9)
        session.save(9)
    assert trained(run_dir)[0] == 9


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_process_with_many_open_files_has_ranks(run_dir: Path) -> None:
    """Descriptors above 1,023, which select() refuses, are as good as any: a loader or a store may hold the others."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(4096, most[0]), most[1]))
    with ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, most)
        while held.enter_context(Path(os.devnull).open("rb")).fileno() < 1024:
            pass
        with GangSession(config_of(run_dir), PARALLEL, {}, ranks=2, engine=Gang()) as session:
            session.restore()
            session.run(4)
            session.save(4)
    assert trained(run_dir)[0] == 4


@pytest.mark.slow
def test_a_metric_that_is_not_finite_rolls_the_gang_back(
    run_dir: Path, tmp_path: Path, whole: tuple[int, dict[str, Any], list[str]]
) -> None:
    """P20, P73: any rank's metric counts; the next gang goes back to an older checkpoint each time, as one process."""
    plan = [(7, 1, "nan"), (8, 0, "nan"), (14, 0, "nan")]
    config = config_of(run_dir, on_non_finite="rollback", step_interval=100)
    failures = train(config, {"plan": plan, "folder": str(tmp_path)}, TOTAL)
    assert [(type(failure), failure.step, failure.key) for failure in failures] == [
        (NonFiniteError, 7, "loss"),
        (NonFiniteError, 8, "loss"),
        (NonFiniteError, 14, "loss"),
    ]
    notes = [note for note in open_run(str(run_dir)).notes() if note["note"] == "rollback"]
    assert [(note["step"], note["failed"]) for note in notes] == [(10, 14), (0, 8), (5, 7)]
    assert trained(run_dir)[:2] == whole[:2]


@pytest.mark.slow
def test_a_right_program_is_quiet(
    run_dir: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two ranks that shard a model log no warning, and write nothing to the terminal."""
    caplog.set_level(logging.INFO)
    assert train(config_of(run_dir), {"kind": "fsdp"}, 8) == []
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert any("is saved in" in record.getMessage() for record in caplog.records)  # of rank 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_an_agent_that_is_interrupted_releases_the_run(run_dir: Path) -> None:
    """An exception in the agent in the middle of a batch kills the ranks, and the run that they held is released."""
    pids: list[int] = []

    def interrupt(progress: Progress) -> None:
        pids.extend(rank.pid for rank in kept.ranks)
        raise KeyboardInterrupt

    token = watcher.set(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(config_of(run_dir), {}, 1000, batch=1000)
    finally:
        watcher.reset(token)
    assert is_released(run_dir)
    assert len(pids) == 2
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


class _Ported(KeptGang):
    """An engine that remembers where rank 0 listens."""

    port = 0

    def __init__(self) -> None:
        super().__init__()
        kept.prepare()
        self._server = kept._server

    def start(self, begin: Begin) -> int:
        self.port = super().start(begin)
        return self.port


@pytest.mark.slow
def test_another_program_of_the_host_does_not_hit_upon_the_keys_of_a_gang(run_dir: Path) -> None:
    """All keys of a gang's store are below a prefix, which only its ranks have; the next gang has another prefix."""
    c10d: Any = dist
    seen = set()
    gang = _Ported()
    with GangSession(config_of(run_dir), PARALLEL, ranks=2, engine=gang) as session:
        for end in (3, 6):
            session.restore()
            stranger = c10d.TCPStore("127.0.0.1", gang.port, is_master=False, wait_for_workers=False)
            [prefix] = {key.partition("/")[0] for key in stranger.list_keys() if not key.startswith("init/")}
            for name in ("name", f"processes/{host_name()}"):
                stranger.set(f"ckpt-tasks/1/{name}", b"\xff\xfe")
            session.run(end)
            session.save(end)
            seen.add(prefix)
            session.discard()
    assert ([len(prefix) for prefix in seen], trained(run_dir)[0]) == ([64, 64], 6)


def test_two_equal_trainings_are_refused(run_dir: Path) -> None:
    """A program that is started on two ranks and shares nothing between them is refused before anything is written."""
    with (
        GangSession(config_of(run_dir), "tests.support.parallel:Alone", ranks=2, engine=kept) as session,
        pytest.raises(ConfigError, match="the program holds no DistributedDataParallel, FSDP or DTensor: 2 ranks"),
    ):
        session.restore()
    assert not run_dir.exists()


@pytest.mark.slow
def test_a_program_that_initialises_torch_again_is_told_what_to_write(run_dir: Path) -> None:
    """The first line of a torchrun script, `init_process_group()`, fails in a rank: the error says how to keep it."""
    with (
        GangSession(config_of(run_dir), "tests.support.parallel:Initialising", ranks=2, engine=kept) as session,
        pytest.raises(ProgramError, match=r"twice!.*if not dist\.is_initialized\(\): dist\.init_process_group\(\)"),
    ):
        session.restore()


def agent(run_dir: Path, batch: int = 5, **params: Any) -> Child:
    options = {"run": str(run_dir), "mark": str(run_dir), "params": params, "total": TOTAL, "batch": batch}
    return Child(main, [json.dumps(options)], run_dir.with_name("agent.log"))


def until_nothing_is_left(mark: str) -> None:
    until(lambda: not left(mark))


def test_no_rank_outlives_its_agent(
    run_dir: Path, tmp_path: Path, whole: tuple[int, dict[str, Any], list[str]]
) -> None:
    """After SIGKILL of the agent its ranks end; the next agent goes on at once, from memory, to a bit-equal end."""
    with agent(run_dir, plan=[(7, 1, "agent")], folder=str(tmp_path), step_s=0.01) as killed:
        assert killed.wait() == -signal.SIGKILL
    until_nothing_is_left(str(run_dir))
    assert train(config_of(run_dir), {}, TOTAL) == []
    assert trained(run_dir) == whole


@pytest.mark.parametrize(
    ("what", "step_s"),
    [("terminate", 0.1), *(pytest.param(*row, marks=pytest.mark.slow) for row in (("terminate", 0.0), ("term", 0.1)))],
)
def test_a_signal_is_one_commit_at_one_step(
    run_dir: Path, tmp_path: Path, what: str, step_s: float, whole: tuple[int, dict[str, Any], list[str]]
) -> None:
    """SIGTERM to the agent, or to one rank: all ranks commit one step and release the run; the agent ends by it.

    Also where the ranks may go on to the end of their batch before they hear of it: the end is committed then.
    """
    trace = tmp_path / "trace"
    batch = TOTAL if step_s else 5  # where the ranks hear of it in time they do not train their batch to its end
    params = {"plan": [(3, 1, what)], "folder": str(tmp_path), "step_s": step_s, "trace": str(trace)}
    with agent(run_dir, batch, **params) as told:
        assert told.wait() == -signal.SIGTERM
    until_nothing_is_left(str(run_dir))
    assert is_released(run_dir)
    last = int(trace.read_text().splitlines()[-1].split()[2])
    assert 3 <= newest_step(run_dir) == last < TOTAL
    assert train(config_of(run_dir), {}, TOTAL) == []
    assert trained(run_dir) == whole


class Small(KeptGang):
    """A place for one rank at first, and for more once it was asked for their room three times."""

    def __init__(self, size: int = 1):
        super().__init__()
        kept.prepare()
        self._server = kept._server
        self._size, self.asked = size, 0
        self.kept_to: list[int | None] = []

    def start(self, begin: Begin) -> int:
        return super().start(replace(begin, size=self._size, local_size=self._size))

    def keep_to(self, ranks: int | None) -> bool:
        self.kept_to.append(ranks)
        if ranks is None or ranks == self._size:
            return False
        self._size = ranks
        return True

    def has_room(self) -> bool:
        self.asked += bool(self.kept_to)
        return self.asked == 0 or self.asked > 3


@pytest.mark.slow
def test_a_state_of_each_rank_waits_for_as_many_ranks(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With room for fewer than those that have each saved their own, a start waits for them, and says so once.

    It has not failed then, and training goes on where it was. A state that any number of ranks can restore waits for
    nothing.
    """
    program = "tests.support.parallel:Owned"
    for engine, wanted in ((Small(2), 5), (Small(), 10)):
        with GangSession(config_of(run_dir), program, ranks=2, engine=engine, flow_run_id="a flow run") as session:
            assert session.restore() == wanted - 5
            session.run(wanted)
            session.save(wanted)
            assert session.ranks == 2
    assert (engine.kept_to, engine.asked) == ([2], 4)
    [said] = [record.getMessage() for record in caplog.records if "waited for" in record.getMessage()]
    assert "own (each rank's own, of 2 ranks" in said
    assert said.endswith("Now 2 ranks are waited for.")
    assert [note["note"] for note in open_run(str(run_dir)).notes() if note["note"] == "failure"] == []
    free = run_dir.with_name("free")
    for engine in (Small(2), Small()):
        with GangSession(config_of(free), PARALLEL, ranks=2, engine=engine, flow_run_id="a flow run") as session:
            session.save(session.restore() or 1)
        assert engine.kept_to == []


@pytest.mark.slow
def test_a_start_that_waits_for_ranks_hears_a_signal(run_dir: Path) -> None:
    """SIGTERM ends the wait at once."""

    class Never(Small):
        def has_room(self) -> bool:
            if self.kept_to:
                signal.raise_signal(signal.SIGTERM)
            return not self.kept_to

    program = "tests.support.parallel:Owned"
    with GangSession(config_of(run_dir), program, ranks=2, engine=Small(2), flow_run_id="a flow run") as session:
        session.restore()
        session.run(1)
        session.save(1)
    before = signal.signal(signal.SIGTERM, lambda number, frame: (_ for _ in ()).throw(InterruptedError(number)))
    try:
        with (
            pytest.raises(InterruptedError),
            GangSession(config_of(run_dir), program, ranks=2, engine=Never(), flow_run_id="a flow run") as session,
        ):
            session.restore()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert is_released(run_dir)
