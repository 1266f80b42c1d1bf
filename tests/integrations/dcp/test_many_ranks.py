"""dcp.save and dcp.load of many ranks over a run."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckpt_tasks import open_run
from ckpt_tasks.dcp import CkptReader, CkptWriter
from ckpt_tasks.integrations.dcp.holding import store_of
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.ledger.ownership import acquire, identify
from ckpt_tasks.run.upkeep.verifying import verify_checkpoint
from tests.checkpoint.ranks.test_uneven import state_of as uneven_state
from tests.support.gang import Gang, distributed, report, run
from tests.support.sweeps import drawn

ROWS = 37


def tensor_of(size: int, dim: int = 0, *, zeros: bool = False, add: int = 0) -> torch.Tensor:
    whole = (torch.arange(ROWS * 40.0).reshape(ROWS, 40) + add) * (not zeros)
    if size == 1:
        return whole
    return distributed(whole, init_device_mesh("cpu", (size,)), [Shard(dim)])


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def state_of(rank: int, size: int, step: int, *, zeros: bool = False) -> dict[str, Any]:
    """Return sharded tensors, a replicated one, an empty one, values, and a value that one rank alone has."""
    values = {"epoch": None if zeros else step, "pair": None if zeros else (torch.ones(2), "x")}
    return {
        "model": {"rows": tensor_of(size, zeros=zeros, add=step), "columns": tensor_of(size, 1, zeros=zeros, add=step)},
        "same": torch.full((1000,), 0.0 if zeros else step),
        "none": torch.zeros(0, 3),
        f"own{rank}": None if zeros else rank,
        **values,
    }


def saving(rank: int, size: int, root: str, step: int) -> None:
    warnings.simplefilter("ignore")
    save(state_of(rank, size, step), storage_writer=CkptWriter(root, step=step))


def loading(rank: int, size: int, root: str, step: int) -> bool:
    warnings.simplefilter("ignore")
    found = state_of(rank, size, step, zeros=True)
    if rank > 1:
        del found[f"own{rank}"]  # two ranks have saved
    load(found, storage_reader=CkptReader(root))
    wanted = state_of(0, 1, step)
    good = all(torch.equal(full(found["model"][name]), wanted["model"][name]) for name in wanted["model"])
    good = good and torch.equal(found["same"], wanted["same"]) and found["epoch"] == step
    return good and torch.equal(found["pair"][0], torch.ones(2)) and (rank > 1 or found[f"own{rank}"] == rank)


def test_two_ranks_save_and_one_and_three_load(tmp_path: Path) -> None:
    """Shards, replicated and empty tensors and the values of each rank come back on another number of ranks."""
    root = str(tmp_path / "run")
    run(2, saving, root, 5)
    (checkpoint,) = open_run(root).checkpoints()
    assert verify_checkpoint(open_run(root).history.store, checkpoint) == []
    assert run(1, loading, root, 5) == [True]
    assert run(3, loading, root, 5) == [True] * 3


class Hidden:
    """A class of the user's without a state of its own."""


def refused(rank: int, size: int, root: str) -> str:
    warnings.simplefilter("ignore")
    state = {"w": tensor_of(size), "own0": 1, "own1": Hidden() if rank else 0}
    text = ""
    try:
        save({name: state[name] for name in ("w", f"own{rank}")}, storage_writer=CkptWriter(root, step=1))
    except CheckpointException as error:
        text = str(error)
    report([path.name for path in Path(root).rglob("*.safetensors")] if rank == 0 else [])
    dist.barrier()
    save({"w": state["w"]}, storage_writer=CkptWriter(root, step=2))
    return text


def test_what_one_rank_cannot_store_is_refused_in_all(tmp_path: Path) -> None:
    """Each rank reads the key, nothing is committed, and the next save leaves nothing of it."""
    root = tmp_path / "run"
    with Gang(2, refused, str(root)) as gang:
        _, left = gang.said(0)
        assert [name.partition("-")[0] for name in left] == ["model"], "rank 0 has written before rank 1 was refused"
        assert all("own1" in text and "UnsupportedStateError" in text for text in gang.results())
    (checkpoint,) = open_run(root).checkpoints()
    assert checkpoint.step == 2
    assert len([*root.rglob("*.safetensors")]) == 2
    assert len([*root.glob("checkpoint_*")]) == 1


def uneven(rank: int, size: int, root: str) -> str:
    warnings.simplefilter("ignore")
    try:
        save({"model": uneven_state((3, 2), 7)["model"].state_dict()}, storage_writer=CkptWriter(root, step=1))
    except CheckpointException as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_rows_that_dcp_would_lose_are_refused(tmp_path: Path) -> None:
    """P58: FSDP over tensor parallelism with seven rows, where dcp.save alone loses one and says nothing."""
    assert all("0.weight" in text and "cannot be stored" in text for text in run(6, uneven, str(tmp_path / "run")))


def damaged(rank: int, size: int, root: str) -> tuple[bool, bool]:
    """Load what has a flipped bit in the rows of the last rank; say whether it raises and whether all is untouched."""
    warnings.simplefilter("ignore")
    found = {"model": state_of(rank, size, 1, zeros=True)["model"]}
    try:
        load(found, storage_reader=CkptReader(root))
    except CheckpointException as error:
        return "have changed" in str(error), not any(full(one).any() for one in found["model"].values())
    return False, False


def test_a_flipped_bit_changes_no_ranks_target(tmp_path: Path) -> None:
    """One rank alone reads the byte; every rank raises, and no rank's target has changed."""
    root = tmp_path / "run"
    run(2, saving, str(root), 1)
    (shard,) = root.rglob("model-00001-of-00002-0.safetensors")
    data = bytearray(shard.read_bytes())
    data[-4] ^= 1
    shard.write_bytes(data)
    assert run(2, damaged, str(root)) == [(True, True)] * 2


def cached_plans(rank: int, size: int, root: str) -> list[bool]:
    warnings.simplefilter("ignore")
    good = []
    for step in (1, 2, 3):
        state = {"w": tensor_of(size, add=step)}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        save(state, storage_writer=CkptWriter(root, step=step), planner=planner)
        found = {"w": tensor_of(size, zeros=True)}
        load(found, storage_reader=CkptReader(root))
        good.append(torch.equal(full(found["w"]), full(state["w"])))
    return good


@pytest.mark.slow
def test_a_planner_that_caches_its_plans(tmp_path: Path) -> None:
    """Ranks that send no plan, since it has not changed, write into the new attempt all the same."""
    assert run(2, cached_plans, str(tmp_path / "run")) == [[True] * 3] * 2


class Loses(CkptWriter):
    """Lose the run to another process in mid-save: when the coordinator has begun, and nothing is committed."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        if dist.get_rank() == 0:
            acquire(History(store_of(self._config)), identify(None), take_over=True, timeout_s=60)
        return super().write_data(plan, planner)


def fenced(rank: int, size: int, root: str) -> list[str]:
    """Save, lose the run in mid-save once the test says so, and save again."""
    warnings.simplefilter("ignore")
    save({"same": torch.zeros(1000)}, storage_writer=CkptWriter(root, step=1))
    report("holds")
    while not os.path.exists(f"{root}-go"):
        time.sleep(0.05)
    texts = []
    for writer in (Loses(root, step=2), CkptWriter(root, step=3)):
        try:
            save({"same": torch.zeros(1000)}, storage_writer=writer)
            texts.append("saved")
        except CheckpointException as error:
            texts.append(str(error))
    return texts


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_second_writer_is_refused_and_a_first_one_is_fenced(tmp_path: Path) -> None:
    """Of two trainings on one run the second gets OwnedError; who loses it in mid-save FencedError, in every rank."""
    root = tmp_path / "run"
    with Gang(2, fenced, str(root)) as gang:
        assert gang.said(0) == ("report", "holds")
        load({"same": torch.zeros(1000)}, storage_reader=CkptReader(root))
        with pytest.raises(CheckpointException, match="OwnedError"):
            save({"same": torch.ones(1000)}, storage_writer=CkptWriter(root, step=9))
        Path(f"{root}-go").touch()
        assert all("FencedError" in text for texts in gang.results() for text in texts)
    assert [one.step for one in open_run(root).checkpoints()] == [1]


# ── killed ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def saves_for_ever(rank: int, size: int, root: str, begin: int) -> None:
    warnings.simplefilter("ignore")
    if begin:
        load({"same": torch.zeros(1000)}, storage_reader=CkptReader(root))
    for step in range(begin + 1, begin + 200):
        save(state_of(rank, size, step), storage_writer=CkptWriter(root, step=step))
        report(step)


@pytest.mark.slow
@pytest.mark.parametrize("seed", drawn(8, 200))
def test_killed_in_mid_save_the_last_commit_is_whole(tmp_path: Path, seed: int) -> None:
    """SIGKILL of one rank or both, at any moment of a save: what was committed loads, bit for bit, and it goes on."""
    draw, root = random.Random(seed), tmp_path / "run"
    for _ in range(2):
        live = open_run(root).checkpoints() if root.exists() else []
        begin = live[0].step if live else 0
        with Gang(2, saves_for_ever, str(root), begin) as gang:
            last = begin
            for _ in range(draw.randint(1, 4)):
                kind, last = gang.said(0)
                assert kind == "report", last
            time.sleep(draw.random() * 0.1)
            gang.send(draw.randrange(2), signal.SIGKILL)
            gang.kill()
        newest = open_run(root).checkpoints()[0]
        assert newest.step >= last
        assert verify_checkpoint(open_run(root).history.store, newest) == []
        assert run(1, loading, str(root), newest.step) == [True]
