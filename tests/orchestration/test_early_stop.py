"""Early stop: what counts, who goes on, and the whole way from a commit's event to a suspended flow run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from uuid import uuid4

import pytest
import yaml  # type: ignore[import-untyped]
from prefect import flow, get_client
from prefect.exceptions import ParameterTypeError
from prefect.states import Suspended

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.errors import StoreError
from ckpt_tasks.flows.train import TrainResult, train
from ckpt_tasks.orchestration import early_stop as stopping
from ckpt_tasks.orchestration.early_stop import EarlyStopping
from ckpt_tasks.policy.stopping import EarlyStop
from ckpt_tasks.session.session import Progress, watcher
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.testing import located
from tests.support.histories import ReadEntries

ROOT = Path(__file__).parents[2]
PREFECT = str(Path(sys.prefix, "bin", "prefect"))
RULE = EarlyStop(metric="loss", patience=2)


@contextmanager
def evaluated(run_dir: Path, losses: Mapping[int, float]) -> Iterator[None]:
    """Record an evaluation of each commit one step after it, as another process would; pruned ones as well."""
    seen: set[int] = set()

    def record(progress: Progress) -> None:
        run = open_run(str(run_dir))
        newest = run.find("latest")
        if newest.step in losses and newest.step not in seen:
            seen.add(newest.step)
            run.record_evaluation(newest, "quick", {"loss": losses[newest.step]})

    token = watcher.set(record)
    try:
        yield
    finally:
        watcher.reset(token)


def trained(run_dir: Path, **options: Any) -> TrainResult:
    defaults: dict[str, Any] = {
        "run_key": "tiny",
        "total_steps": 60,
        "program": "tests.support.tiny:Tiny",
        "batch_steps": 5,
    }
    checkpoint = {"checkpoint_dir": str(run_dir), "max_num_checkpoints": 1}
    early_stop = {"metric": "loss", "patience": 2, **options}
    result: TrainResult = train(**{**defaults, "checkpoint": checkpoint, "early_stop": early_stop})
    return result


@pytest.mark.usefixtures("harness")
def test_a_run_that_gets_no_better_is_stopped(run_dir: Path) -> None:
    """Two evaluations without a better loss end the run at a batch's end, committed and released, with the reason.

    The best checkpoint is pruned by then, and counts all the same. Started again, the run goes on, with as much
    patience again.
    """
    losses = {5: 1.0, 10: 0.5, 15: 0.6, 20: 0.7, 25: 0.9, 30: 0.9, 35: 0.9}
    with evaluated(run_dir, losses):
        result = trained(run_dir)
    assert result.step == 25
    assert (
        result.stopped_because == "stopped at step 25: 2 evaluations by quick without a better loss than 0.5 at step 10"
    )
    state = open_run(str(run_dir)).head().state
    assert [one.step for one in state.live] == [25]
    assert state.owner is not None
    assert state.owner.released
    with evaluated(run_dir, losses):
        again = trained(run_dir)
    assert (again.step, again.trained) == (40, 15)
    assert trained(run_dir).stopped_because is None  # nothing new is evaluated


@pytest.mark.usefixtures("harness")
def test_a_run_that_gets_better_is_not_stopped(run_dir: Path) -> None:
    """Slow progress is progress; another suite's and another metric's values are none of its business."""
    with evaluated(run_dir, {step: 1 / (1 + step) for step in range(0, 60, 5)}):
        assert trained(run_dir).step == 60
    with evaluated(run_dir, dict.fromkeys(range(0, 60, 5), 1.0)):
        assert trained(run_dir, suite="full").stopped_because is None


@pytest.mark.usefixtures("harness")
@pytest.mark.parametrize("options", [{"min_dleta": 1}, {"patience": 0}, {"mode": "least"}, {"metric": None}])
def test_a_wrong_rule_is_refused_before_anything_runs(run_dir: Path, options: dict[str, Any]) -> None:
    """A misspelled or meaningless option is refused with the flow's parameters."""
    with pytest.raises(ParameterTypeError):
        trained(run_dir, **options)
    assert not run_dir.exists()


@pytest.mark.usefixtures("harness")
def test_a_stop_of_which_prefect_was_not_told_is_not_forgotten(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends between its note and *Suspended* leaves the stop to the next one of the same flow run.

    Once the flow run was suspended for it, whoever resumed it wants it to go on.
    """
    with get_client(sync_client=True) as client, Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir))) as ckpt:
        run = client.create_flow_run(train, parameters={}).id
        monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(run))
        unimproved(ckpt, run_dir)
        first, second, resumed = (EarlyStopping(ckpt, RULE) for _ in range(3))
        assert first.check()
        assert second.check()
        assert first.why == "stopped at step 3: 2 evaluations by quick without a better loss than 1 at step 1"
        assert second.why == first.why
        client.set_flow_run_state(run, Suspended(pause_key="early stop at step 3"), force=True)
        assert not resumed.check()
        monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(uuid4()))
        assert not EarlyStopping(ckpt, RULE).check()


class Away(LocalStore):
    """A store that does not answer while it is away."""

    away = False

    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        if self.away:
            raise StoreError("the store does not answer")
        return super().names(prefix, limit)


@pytest.mark.usefixtures("harness")
def test_a_store_that_is_away_stops_nothing(run_dir: Path) -> None:
    """Where the ledger cannot be read at the end of a batch, the run goes on, and is stopped later."""

    @flow
    def looks() -> list[bool]:
        store = Away(str(run_dir))
        with Checkpointer(CheckpointConfig(checkpoint_dir=located(store))) as ckpt:
            unimproved(ckpt, run_dir)
            stopping = EarlyStopping(ckpt, RULE)
            store.away = True
            away = stopping.check()
            store.away = False
            return [away, stopping.check()]

    assert looks() == [False, True]


def unimproved(ckpt: Checkpointer, run_dir: Path) -> None:
    for step in (1, 2, 3):
        ckpt.save(step, {"value": step})
        run = open_run(str(run_dir))
        run.record_evaluation(run.find("latest"), "quick", {"loss": 1.0})


def test_no_start_reads_the_whole_history(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note sums up what older entries say: a new process reads some hundreds of entries, and knows the same best."""
    monkeypatch.setattr(stopping, "_NOTE_EVERY", 16)
    rule = EarlyStop(metric="loss", patience=1000)
    config = CheckpointConfig(checkpoint_dir=str(run_dir), run_key="long", max_num_checkpoints=1)
    with Checkpointer(config) as ckpt:
        watching = EarlyStopping(ckpt, rule)
        for step in range(1, 41):
            ckpt.save(step, {"value": step})
            run = open_run(str(run_dir))
            run.record_evaluation(run.find("latest"), "quick", {"loss": 0.25 if step == 3 else 0.5})
            assert not watching.check()
        ckpt.run.history.store = store = ReadEntries(ckpt.run.history.store)
        fresh, before = EarlyStopping(ckpt, replace(rule, patience=37)), open_run(str(run_dir)).head().next_n
        assert fresh.check()
        assert len(store.numbers) < 40 < before - 40
        assert str(fresh.why).endswith("37 evaluations by quick without a better loss than 0.25 at step 3")


def test_what_comes_between_the_look_and_the_note_is_not_lost(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P75: an evaluation that is recorded while the note is written is in neither, and is read all the same."""
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), run_key="raced", max_num_checkpoints=None)) as ckpt:
        for step in (1, 2, 3, 4):
            ckpt.save(step, {"value": step})
        run, note, rule = open_run(str(run_dir)), ckpt.note, replace(RULE, patience=1)
        for step in (1, 2):
            run.record_evaluation(run.find(step), "quick", {"loss": 0.5})

        def meanwhile(*what: Any, **fields: Any) -> None:
            run.record_evaluation(run.find(3), "quick", {"loss": 0.25})
            note(*what, **fields)

        monkeypatch.setattr(ckpt, "note", meanwhile)
        assert EarlyStopping(ckpt, rule).check()
        monkeypatch.undo()
        ckpt.save(5, {"value": 5})
        run.record_evaluation(run.find(5), "quick", {"loss": 0.5})
        fresh = EarlyStopping(ckpt, rule)
        assert fresh.check()
        assert str(fresh.why).endswith("1 evaluation by quick without a better loss than 0.25 at step 3")


# ── the whole way ─────────────────────────────────────────────────────────────────────────────────────────────────────


def deployments(run_dir: Path) -> dict[str, Any]:
    """Return a run that is to stop early, and the deployment that we ship to evaluate what any run commits."""
    shipped = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())["deployments"]
    following = next(one for one in shipped if one["name"] == "following")
    return {
        "name": "followed",
        "deployments": [
            {
                "name": "followed",
                "entrypoint": "flows/train.py:train",
                "tags": ["ckpt-tasks"],
                "work_pool": {"name": "following", "job_variables": {}},
                "parameters": {
                    "run_key": "followed",
                    "total_steps": 2000,
                    "program": "tests.support.tiny:Tiny",
                    "params": {"step_s": 0.1},
                    "batch_steps": 20,
                    "checkpoint": {"checkpoint_dir": str(run_dir)},
                    "early_stop": {"metric": "heldout_loss", "patience": 4, "min_delta": 10.0},
                },
            },
            {**following, "work_pool": {**following["work_pool"], "name": "following"}},
        ],
    }


@pytest.mark.slow
def test_from_the_event_of_a_commit_to_a_suspended_run(tmp_path: Path, run_dir: Path, server: dict[str, str]) -> None:
    """The deployment that we ship is there for the first commit; the run is suspended, and goes on if resumed.

    Both of its triggers give it the run's own parameters. Prints the seconds from commits to their evaluations' leases.
    """
    environment = {**server, "PREFECT_WORKER_QUERY_SECONDS": "1"}

    def prefect(*arguments: str) -> None:
        done = subprocess.run(
            [PREFECT, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    (tmp_path / "prefect.yaml").write_text(yaml.safe_dump(deployments(run_dir)))
    prefect("work-pool", "create", "following", "--type", "process")
    prefect("--no-prompt", "deploy", "--all", "--prefect-file", str(tmp_path / "prefect.yaml"))
    with (tmp_path / "worker.log").open("wb") as log:
        command = [PREFECT, "worker", "start", "--pool", "following"]
        worker = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        prefect("deployment", "run", "train/followed")
        first = until(lambda: suspended(server))
        assert "without a better heldout_loss" in first["state"]["message"]
        # The server takes events in their order, and may be behind: the second trigger's run comes when it comes.
        started = until(lambda: found if len(found := following(server)) > 1 else None)
        assert set(started) == {"be there when a run starts", "evaluate what is committed"}
        for parameters in started.values():
            assert parameters["checkpoint_dir"] == str(run_dir)
            assert (parameters["program"], parameters["params"]) == ("tests.support.tiny:Tiny", {"step_s": 0.1})
        begin_s, follow_s = followed_s(run_dir)
        print(f"the first evaluation began after {begin_s:.1f} s, others {median(follow_s):.1f} s after their commits")  # noqa: T201
        assert median(follow_s) < 5
        ask(server, f"/flow_runs/{first['id']}/resume", {})
        again = until(lambda: suspended(server, but=first["state"]["message"]))
        assert again["id"] == first["id"]
        notes = [note for note in open_run(str(run_dir)).notes() if note["note"] == "early_stop"]
        assert [note["step"] > 0 for note in notes] == [True, True]
        assert notes[0]["step"] >= notes[1]["step"] + 4 * 20  # patience is counted anew
    finally:
        worker.terminate()
        worker.wait(60)


def followed_s(run_dir: Path) -> tuple[float, list[float]]:
    """Return the seconds from the first commit to the first lease, and from each later lease's commit to the lease."""
    history = open_run(str(run_dir)).history
    committed: dict[int, float] = {}
    leases: list[tuple[int, float]] = []
    for n in range(history.head().next_n):
        entry = history.read_entry(n)[0]
        at_s = datetime.fromisoformat(entry.at).timestamp()
        if entry.event["kind"] == "commit":
            committed[entry.event["step"]] = at_s
        elif entry.event["kind"] == "lease" and not entry.event.get("ended"):
            leases.append((entry.event["step"], at_s))
    first_s = leases[0][1] - min(committed.values())
    return first_s, [at_s - committed[step] for step, at_s in leases if committed[step] > leases[0][1]]


def following(server: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the parameters of the evaluations that triggers have started, by the trigger's name."""
    runs = [one for one in ask(server, "/flow_runs/filter", {}) if one["parameters"].get("run_key") == "followed"]
    return {one["created_by"]["display_value"]: one["parameters"] for one in runs if one["created_by"]}


def suspended(server: Mapping[str, str], but: str = "") -> dict[str, Any] | None:
    asked = {"flow_runs": {"state": {"name": {"any_": ["Suspended"]}}}}
    found: list[dict[str, Any]] = [
        one for one in ask(server, "/flow_runs/filter", asked) if one["name"].startswith("followed")
    ]
    return next((one for one in found if one["state"]["message"] != but), None)


def ask(server: Mapping[str, str], path: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = Request(server["PREFECT_API_URL"] + path, json.dumps(body).encode(), headers)
    for _ in range(20):
        with suppress(HTTPError, TimeoutError), urlopen(request, timeout=60) as answer:  # its database is busy
            return json.load(answer)
        time.sleep(0.5)
    raise TimeoutError(f"{path} was asked for in vain")


def until(found: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    deadline = time.monotonic() + 240
    while (one := found()) is None:
        assert time.monotonic() < deadline, "this was waited for in vain"
        time.sleep(0.5)
    return one
