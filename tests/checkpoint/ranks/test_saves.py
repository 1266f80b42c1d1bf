"""Saves of many ranks that do not all go well: every rank raises, the error names the rank, and the run stays good."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from ckpt_tasks import ByRank, Checkpointer
from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.errors import ConfigError, SpikeError
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.ledger.ownership import acquire, identify
from ckpt_tasks.run.upkeep.verifying import orphans
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.system import System, use
from ckpt_tasks.testing import look, settle
from tests.checkpoint.ranks.training import attempt, config, put, refuse, state_of, steps_of
from tests.support.gang import run
from tests.support.sweeps import quick_first

Undo = Callable[[], object]
Trouble = Callable[[int, Checkpointer, dict[str, Any]], Undo | None]


# ── what a rank does before the second save; what it is given may be changed, and what is returned is done after it ──


def cannot_be_stored(rank: int, ckpt: Checkpointer, given: dict[str, Any]) -> Undo | None:
    given["state"] = {**given["state"], "extra": object() if rank == 1 else 1}
    return None


def is_not_finite(rank: int, ckpt: Checkpointer, given: dict[str, Any]) -> Undo | None:
    given["metrics"] = {"loss": float("nan") if rank == 1 else 1.0}
    return None


def saves_another_step(rank: int, ckpt: Checkpointer, given: dict[str, Any]) -> Undo | None:
    given["step"] += rank
    return None


def has_a_full_disk(rank: int, ckpt: Checkpointer, given: dict[str, Any]) -> Undo | None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    given["state"] = {**given["state"], "large": ByRank(torch.full((1 << 20,), 2.0))}
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def puts_by(how: Any) -> Trouble:
    """Let rank 1 put objects in another way; where it takes long, the next save waits until that is over."""

    def trouble(rank: int, ckpt: Checkpointer, given: dict[str, Any]) -> Undo:
        LocalStore.put = how if rank == 1 else put  # type: ignore[method-assign]
        return end

    def end() -> None:
        LocalStore.put = put  # type: ignore[method-assign]
        time.sleep(8 if how is slowly else 0)

    return trouble


def slowly(self: LocalStore, name: str, parts: Any) -> None:
    if not name.startswith("heartbeat"):
        time.sleep(2)
    put(self, name, parts)


def takes_a_step_of_its_own(rank: int, ckpt: Checkpointer, given: dict[str, Any]) -> Undo:
    model, optimizer = given["state"]["model"], given["state"]["optimizer"]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    if rank == 1:
        optimizer.step()

    def broadcast() -> None:  # as the error says
        for tensor in (*model.parameters(), *(one for held in optimizer.state.values() for one in held.values())):
            dist.broadcast(tensor.data, 0)

    return broadcast


def another_owner(ckpt: Checkpointer) -> History:
    other = History(LocalStore(ckpt.run.history.store.url))
    acquire(other, identify(None), take_over=True, timeout_s=30)
    return other


def is_fenced_between_saves(rank: int, ckpt: Checkpointer, given: dict[str, Any]) -> Undo | None:
    if rank == 0:
        another_owner(ckpt)
        look(ckpt)
    return None


def is_fenced_while_it_commits(rank: int, ckpt: Checkpointer, given: dict[str, Any]) -> Undo | None:
    sizes = LocalStore.sizes

    def swept(store: LocalStore, names: Sequence[str]) -> list[int]:
        """Let another owner delete what all ranks have written."""
        LocalStore.sizes = sizes  # type: ignore[method-assign]
        for name in orphans(store, another_owner(ckpt).head().state):
            store.delete(name)
        return sizes(store, names)

    if rank == 0:
        LocalStore.sizes = swept  # type: ignore[method-assign,assignment]
    return None


def has_forked(rank: int, ckpt: Checkpointer, given: dict[str, Any]) -> Undo | None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            ckpt.save(**given)
        except ConfigError:
            status = 7
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    return None


class Case(NamedTuple):
    """What the second save of three raises in every rank, and the steps that are left; a fenced rank saves no third."""

    trouble: Trouble
    error: str
    words: str = ""
    left: tuple[int, ...] = (1, 3)
    options: dict[str, Any] = {}  # noqa: RUF012 (not changed)


CASES = {
    "a value that cannot be stored": Case(cannot_be_stored, "UnsupportedStateError", "extra"),
    "a metric that is not finite": Case(is_not_finite, "NonFiniteError", options={"on_non_finite": "stop"}),
    "another step": Case(saves_another_step, "StateError", "rank 1 saves step 3, and rank 0 step 2", left=(1, 4)),
    "a full disk": Case(has_a_full_disk, "StoreError", "rank 1|File too large", options={"memory_dir": None}),
    "a store that refuses": Case(puts_by(refuse), "StoreError", "rank 1: no space left"),
    "a store that is slow": Case(
        puts_by(slowly), "StoreError", "rank 1 said nothing|rank 0", options={"flush_timeout_s": 3}
    ),
    "a step of its own": Case(
        takes_a_step_of_its_own,
        "StateError",
        "rank 1 and rank 0 have different values.*at (model|optimizer)/.*"
        "broadcast the parameters and the optimizer's tensors from rank 0 before every save",
    ),
    "another owner between saves": Case(is_fenced_between_saves, "FencedError", left=(1,)),
    "another owner while it commits": Case(is_fenced_while_it_commits, "FencedError", left=(1,)),
    "a forked child": Case(has_forked, "None", left=(1, 2, 3)),
}
SLOW = ["a store that is slow"]
FIRST = ["a value that cannot be stored"]


def each_saves(rank: int, size: int, root: str, names: list[str], first: bool) -> list[list[tuple[str, str]]]:
    """Go through the cases, each with a run of its own."""
    return [saves(rank, size, f"{root}/{name}", CASES[name], first) for name in names]


def saves(rank: int, size: int, root: str, case: Case, first: bool) -> list[tuple[str, str]]:
    state = state_of("ddp", size)
    ckpt = Checkpointer(config(root, max_num_checkpoints=None, **case.options))
    said = [] if first else [attempt(ckpt.save, 1, state)]
    given: dict[str, Any] = {"step": 2, "state": state}
    undo = case.trouble(rank, ckpt, given)
    said.append(attempt(ckpt.save, **given))
    if undo:
        undo()
    if first:
        assert not Path(root).exists()
    if case.left != (1,):
        said.append(attempt(ckpt.save, case.left[-1], state, metrics={"loss": 3.0 + rank}))
    ckpt.close()
    return said


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ([name for name in CASES if name not in SLOW], False),
        (FIRST, True),
        pytest.param(SLOW, False, marks=pytest.mark.slow),
    ],
)
def test_what_one_rank_cannot_save_no_rank_has_saved(tmp_path: Path, names: list[str], first: bool) -> None:
    """P7, P47, P76: whatever is wrong in one rank, all raise the same error, and the next save counts again.

    Nothing of the save is left, and before the first one nothing is written. Of metrics rank 0's are kept.
    """
    ranks = run(2, each_saves, str(tmp_path), names, first)
    for number, name in enumerate(names):
        case, root = CASES[name], tmp_path / name
        for said in (rank[number] for rank in ranks):
            assert [kind for kind, _ in said] == [*["None"] * (not first), case.error, "None"][: len(said)], name
            assert re.search(case.words, said[1 - first][1], re.DOTALL), said
        assert steps_of(root) == [*case.left][first:], name
        if case.left != (1,):  # what is left by a rank that was fenced is the other owner's to delete
            left = "manifest.json" if name in SLOW else "*"  # an object that comes late is the next pruning's to delete
            assert 2 in case.left or not [*root.glob(f"checkpoint_000000000002/*/{left}")], name
            assert open_run(root).checkpoints()[0].metrics == {"loss": 3.0}


# ── saves in the background ──────────────────────────────────────────────────────────────────────────────────────────


LAST = {"late": 12, "refused": 3}


def in_background(rank: int, size: int, root: str, how: str) -> list[int]:
    """Save every step while rank 1 is slow, or cannot write one; return the steps that this rank saw committed."""

    def late(self: LocalStore, name: str, body: Any) -> None:
        time.sleep(0.1 * name.startswith("checkpoint"))
        put(self, name, body)

    state, seen = state_of("fsdp", size), []
    with Checkpointer(config(root, step_interval=1, on_flush_failure="warn", max_num_checkpoints=None)) as ckpt:
        ckpt.restore(state)
        for step in range(1, LAST[how] + 1):
            fails = how == "refused" and step == 2
            LocalStore.put = put if rank == 0 else refuse if fails else late  # type: ignore[method-assign,assignment]
            ckpt.step(step, state)
            if how == "refused":
                settle(ckpt)
            seen.append(ckpt.last_commit.step if ckpt.last_commit else 0)
        ckpt.wait()
        assert ckpt.last_commit is not None
        return [*seen, ckpt.last_commit.step]


@pytest.mark.parametrize("how", quick_first(["late", "refused"]))
def test_what_one_rank_leaves_out_all_leave_out(tmp_path: Path, how: str) -> None:
    """P44, P47: steps are superseded where a rank cannot keep up, and one that it cannot write is a note.

    All ranks go on, the newest step is committed, and every commit is whole.
    """
    seen = run(2, in_background, str(tmp_path), how)
    committed = steps_of(tmp_path)
    assert committed[-1] == LAST[how]
    assert len(committed) < LAST[how]
    assert all({*steps} - {0} <= {*committed} for steps in seen)
    history = History(LocalStore(tmp_path))
    events = [history.read_entry(n)[0].event for n in range(history.head().next_n)]
    if how == "late":
        assert any(event.get("superseded") for event in events)
    else:
        assert 2 not in committed
        [failed] = [event for event in events if event.get("note") == "flush_failed"]
        assert (failed["step"], "rank 1: no space left" in failed["why"]) == (2, True)


class Paced(System):
    """A System whose clock says that steps take a tenth of a second: so rank 0 grants few of them ahead."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s


def one_spikes(rank: int, size: int, root: str) -> list[tuple[int, int, int]]:
    """Train until a restore after a spike in rank 0; rank 1's own loss spikes earlier. Return what the error says."""
    use(paced := Paced())
    state = state_of("ddp", size)
    ckpt = Checkpointer(config(root, on_spike="loss", step_interval=50))
    step = ckpt.restore(state)
    while True:
        step += 1
        paced.ahead_s += 0.1
        loss = 99.0 if step in ((120, 121, 122) if rank == 0 else (110, 111, 112)) else float(step % 5)
        try:
            ckpt.step(step, state, metrics={"loss": loss})
            if step == 100:
                ckpt.wait()  # It is there to go back to.
        except SpikeError as error:
            done = [(error.began or 0, error.step or 0, ckpt.restore(state)), (0, step, ckpt.position)]
            ckpt.close()
            return done


def test_a_spike_in_rank_0_stops_all_at_one_step(tmp_path: Path) -> None:
    """Rank 0's loss decides: all raise SpikeError at the same step, and go back to the same checkpoint."""
    first, second = run(2, one_spikes, str(tmp_path))
    assert first == second
    (began, last, to), (_, raised_at, position) = first
    assert (began, last, to, position) == (120, 122, 100, 100)
    assert raised_at >= 122
