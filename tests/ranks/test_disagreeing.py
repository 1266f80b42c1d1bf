"""Ranks that do not do the same: every rank raises, says which rank differs in what, and the run stays good."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt_tasks import ByRank, CheckpointConfig, Checkpointer
from ckpt_tasks.checkpoint import agreement
from ckpt_tasks.errors import CkptError, SpikeError
from ckpt_tasks.ranks.exchange import find_exchange
from ckpt_tasks.system import System, use
from tests.ranks.test_failures import state_of, steps_of
from tests.ranks.training import config
from tests.support.gang import Gang, report, run

Said = list[tuple[str, str]]


def attempt(call: Any, *arguments: Any, **options: Any) -> tuple[str, str]:
    """Return the name of what a call raises, and its words; of None where it raises nothing."""
    try:
        call(*arguments, **options)
    except CkptError as error:
        return type(error).__name__, str(error)
    return "None", ""


def one_cannot_capture(rank: int, size: int, root: str, first: bool) -> Said:
    """Save with a value in rank 1 that cannot be stored; `first` is the first save of the run."""
    state = state_of("fsdp", size)
    ckpt = Checkpointer(config(root))
    said = [] if first else [attempt(ckpt.save, 1, state)]
    said.append(attempt(ckpt.save, 2, {**state, "extra": object() if rank == 1 else 1}))
    if first:
        assert not [*Path(root).iterdir()]
    said.append(attempt(ckpt.save, 3, {**state, "extra": 1}))
    ckpt.close()
    return said


@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_rank_that_cannot_save_stops_the_save_of_all(tmp_path: Path, first: bool) -> None:
    """P7: one rank has a value that cannot be stored: all raise its key, and the next save is as any other.

    Before the first save nothing is written, in no rank.
    """
    for said in run(2, one_cannot_capture, str(tmp_path), first):
        assert [kind for kind, _ in said] == ["None"] * (not first) + ["UnsupportedStateError", "None"]
        assert "extra" in said[-2][1]
    assert steps_of(tmp_path) == ([3] if first else [1, 3])
    assert not [*tmp_path.glob("checkpoint_000000000002/*/*")]


def one_diverges(rank: int, size: int, root: str) -> Said:
    state = state_of("ddp", size)
    ckpt = Checkpointer(config(root, on_non_finite="stop"))
    said = [attempt(ckpt.save, 1, state, metrics={"loss": 1.0})]
    said.append(attempt(ckpt.save, 2, state, metrics={"loss": float("nan") if rank == 1 else 1.0}))
    said.append(attempt(ckpt.save, 3, state, metrics={"loss": 3.0 + rank}))
    ckpt.close()
    return said


def test_a_metric_that_is_not_finite_in_one_rank_stops_all(tmp_path: Path) -> None:
    """NaN in rank 1, on a step that is saved: both raise NonFiniteError. Of other metrics rank 0's are kept."""
    for said in run(2, one_diverges, str(tmp_path)):
        assert [kind for kind, _ in said] == ["None", "NonFiniteError", "None"]
    assert steps_of(tmp_path) == [1, 3]
    newest = Checkpointer(config(str(tmp_path))).checkpoints()[0]
    assert newest.metrics == {"loss": 3.0}


def another_step(rank: int, size: int, root: str) -> Said:
    state = state_of("fsdp", size)
    ckpt = Checkpointer(config(root))
    said = [attempt(ckpt.save, step, state) for step in (1, 2 + rank, 4)]
    ckpt.close()
    return said


def test_ranks_that_save_at_other_steps_are_named(tmp_path: Path) -> None:
    """Rank 1 saves step 3 where rank 0 saves step 2: both raise, with both steps; step 4 is committed."""
    for said in run(2, another_step, str(tmp_path)):
        assert [kind for kind, _ in said] == ["None", "StateError", "None"]
        assert "rank 1 saves step 3, and rank 0 step 2" in said[1][1]
    assert steps_of(tmp_path) == [1, 4]


def another_config(rank: int, size: int, root: str) -> Said:
    options = CheckpointConfig(checkpoint_dir=root, step_interval=2 + rank, flush_timeout_s=60)
    return [attempt(Checkpointer(options).restore, state_of("ddp", size))]


def test_ranks_of_another_configuration_are_refused(tmp_path: Path) -> None:
    """Rank 1 saves every third step, rank 0 every second: the first restore raises ConfigError in both."""
    for [(kind, words)] in run(2, another_config, str(tmp_path)):
        assert kind == "ConfigError"
        assert "rank 1 and rank 0 have different values of step_interval" in words
    assert not [*tmp_path.iterdir()]


def mistaken(rank: int, size: int, root: str, how: str) -> Said:
    """Save as if one rank had made a Checkpointer more, worked elsewhere, or cut a tensor over a mesh of its own."""
    value = torch.zeros(8)
    if how == "directories":
        Path(root, str(rank)).mkdir()
        os.chdir(f"{root}/{rank}")
    if how == "meshes":
        meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
        value = distribute_tensor(value, meshes[rank // 2], [Shard(0)])
    directory = "run" if how == "directories" else root
    made = [Checkpointer(config(directory, flush_timeout_s=3)) for _ in range(1 + (how == "Checkpointers" and rank))]
    return [attempt(made[-1].save, 1, {"x": {"value": value}})]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("directories", "rank 1: this rank does not find the run that rank 0 has taken. Give all ranks one directory"),
        ("meshes", "x/value: its regions leave a hole, overlap.*cut a tensor over one mesh"),
        pytest.param("Checkpointers", "made another number of Checkpointers", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_of_one_rank_is_named(tmp_path: Path, how: str, words: str) -> None:
    """Every rank is told what the ranks have not in common, and what to do; nothing is committed."""
    for [(_, said)] in run(4 if how == "meshes" else 2, mistaken, str(tmp_path), how):
        assert re.search(words, said), said
    assert how == "directories" or steps_of(tmp_path) == []


def some_restore(rank: int, size: int, root: str, who: int) -> Said:
    state = state_of("ddp", size)
    # On a slow machine c10d's own store answers late: that is no silent rank.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "find_exchange", lambda group, timeout_s: find_exchange(group, 60))
        ckpt = Checkpointer(config(root, flush_timeout_s=1, owner_timeout_s=1))
    said = [attempt(ckpt.restore, state)] if rank == who else []
    torch.distributed.barrier()
    ckpt.close()
    with Checkpointer(config(root)) as again:
        said.append(attempt(again.save, 1, state))
    return said


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_restore_that_one_rank_alone_calls_does_not_hang(tmp_path: Path, who: int) -> None:
    """The rank that calls it raises StoreError with the silent rank's name, and does not hold the directory."""
    found = run(2, some_restore, str(tmp_path), who)
    kind, words = found[who][0]
    assert kind == "StoreError"
    assert f"rank {1 - who} said nothing" in words
    assert [said[-1] for said in found] == [("None", "")] * 2
    assert steps_of(tmp_path) == [1]


def one_disk_is_full(rank: int, size: int, root: str) -> Said:
    state = state_of("ddp", size)
    large = torch.zeros(1 << 20)
    state["large"] = ByRank(large)
    ckpt = Checkpointer(config(root, memory_dir=None))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    said = []
    for step in (1, 2, 3):
        large.fill_(step)
        if rank == 1:
            limit = 1 << 16 if step == 2 else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        said.append(attempt(ckpt.save, step, state))
    ckpt.close()
    return said


def test_a_full_disk_in_one_rank_fails_the_save_in_all(tmp_path: Path) -> None:
    """P47: the system lets rank 1 write no more than 64 KiB: both raise StoreError, and nothing of it is left."""
    for said in run(2, one_disk_is_full, str(tmp_path)):
        assert [kind for kind, _ in said] == ["None", "StoreError", "None"]
        assert "rank 1" in said[1][1] or "File too large" in said[1][1]
    assert steps_of(tmp_path) == [1, 3]
    assert not [*tmp_path.glob("checkpoint_000000000002/*/*")]


def raises_between_steps(rank: int, size: int, root: str) -> str:
    state = state_of("ddp", size)
    try:
        with Checkpointer(config(root)) as ckpt:
            ckpt.restore(state)
            for step in range(1, 20):
                if rank == 1 and step == 7:
                    raise ValueError("bad batch")
                torch.distributed.all_reduce(torch.ones(1))
                ckpt.step(step, state)
                ckpt.wait()
    except (ValueError, RuntimeError, CkptError) as error:
        report(type(error).__name__)
        raise SystemExit(3) from error
    return "ended"


def test_an_exception_in_one_rank_ends_all(tmp_path: Path) -> None:
    """Rank 1 raises between two steps, rank 0 fails in its collective: both end, and what was committed is there."""
    with Gang(2, raises_between_steps, str(tmp_path)) as gang:
        said = dict(one for one in gang.follow(60) if one[1] is not None)
        assert gang.end(60) == [3, 3]
    assert said[1] == ("report", "ValueError")
    assert said[0][1] in {"RuntimeError", "DistBackendError"}
    assert steps_of(tmp_path) == [2, 4, 6]


def saves_until_it_fails(rank: int, size: int, root: str) -> tuple[int, str, str]:
    state = state_of("ddp", size)
    ckpt = Checkpointer(config(root, flush_timeout_s=4))
    for step in range(1, 10_000):
        if step == 2:
            report("saved")
        kind, words = attempt(ckpt.save, step, state)
        if kind != "None":
            return step, kind, words
        time.sleep(0.01)
    return 0, "None", ""


@pytest.mark.parametrize("stopped", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_is_stopped_fails_the_save_of_the_others(tmp_path: Path, stopped: int) -> None:
    """SIGSTOP holds one rank, also the one that holds the process group's store: the other one raises StoreError."""
    with Gang(2, saves_until_it_fails, str(tmp_path)) as gang:
        assert [gang.said(rank)[1] for rank in (0, 1)] == ["saved"] * 2
        gang.send(stopped, signal.SIGSTOP)
        kind, (_, error, words) = gang.said(1 - stopped, 60)
        assert (kind, error) == ("result", "StoreError"), words
        assert f"rank {stopped}" in words or "cannot reach" in words
    assert steps_of(tmp_path)[0] >= 1


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
