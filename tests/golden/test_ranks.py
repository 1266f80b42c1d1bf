"""A run that three ranks wrote, kept as bytes: one process of today's code reads it, and every verb works on it.

What is in the run is said here once more, apart from tools/golden_ranks.py, which wrote it.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableSampler
from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.manifest import Manifest
from tests.golden.test_golden import contents, shipped_bytes
from tests.support.cli_runs import ckpt, flip, only
from tests.support.gang import run
from tests.support.roundtrip import assert_same
from tools.golden_ranks import state_at

HERE = Path(__file__).parent
RUNS = sorted(HERE.glob("v*/ranks"))
STEPS = (2, 3)
STILL = [[float(4 * row + column) for column in range(4)] for row in range(7)]  # of step 1, and never written again


@pytest.fixture(params=RUNS, ids=lambda run: run.parent.name)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a copy of a golden run: what is checked in is never written."""
    return Path(shutil.copytree(request.param, tmp_path / "run"))


def whole(step: int) -> dict[str, torch.Tensor]:
    """Return every whole tensor of the two modules."""
    ramp = torch.arange(1, 36).reshape(5, 7)  # the n-th value of the n-th parameter begins at n
    counts = torch.arange(24)
    return {
        "model/0.weight": torch.tensor(STILL),
        "model/1.weight": {2: ramp * 2.0, 3: ramp * 3.0}[step],
        "model/1.bias": {2: torch.tensor([4.0, 6, 8, 10, 12]), 3: torch.tensor([6.0, 9, 12, 15, 18])}[step],
        "replicated/weight": torch.ones(24),
        "replicated/bias": torch.zeros(24),
        "replicated/running_mean": {2: counts * 2.0, 3: counts * 3.0}[step],
        "replicated/running_var": torch.ones(24),
        "replicated/num_batches_tracked": torch.tensor(0),
    }


def target() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 7, bias=False), nn.Linear(7, 5))
    model[0].requires_grad_(False)
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model[1].parameters(), lr=1.0),
        "replicated": nn.BatchNorm1d(24),
        "tensors": None,
        "noise": torch.Generator(),
        "data": ResumableSampler(100, 9, seed=3),  # three ranks had three samples each
        "values": None,
    }


def check_state(state: dict[str, Any], step: int) -> None:
    found = {f"{group}/{name}": v for group in ("model", "replicated") for name, v in state[group].state_dict().items()}
    assert found.keys() == whole(step).keys()
    for key, expected in whole(step).items():
        assert_same(found[key], expected)
    for n, parameter in enumerate(state["model"][1].parameters()):
        held = state["optimizer"].state[parameter]
        assert_same(held["step"], torch.tensor({2: 2.0, 3: 3.0}[step]))
        assert_same(held["exp_avg"], torch.full(parameter.shape, n + {2: 0.5, 3: 0.75}[step]))
        assert_same(held["exp_avg_sq"], torch.full(parameter.shape, n + {2: 1.0, 3: 1.5}[step]))
    columns = torch.tensor([[5 * row + column for column in range(5)] for row in range(4)], dtype=torch.int32)
    assert_same(state["tensors"]["columns"], {2: columns * 2, 3: columns * 3}[step])
    row = {2: [[1.0, -2.0]], 3: [[1.5, -3.0]]}[step]  # one row on three ranks: two have none of it
    assert_same(state["tensors"]["row"], torch.tensor(row, dtype=torch.bfloat16))
    assert_same(state["tensors"]["empty"], torch.empty(0, 3))
    assert state["data"].state_dict()["samples"] == {2: 36, 3: 54}[step]
    assert state["values"] == {"step": step, "words": ["a", (1, None)]}


@pytest.mark.parametrize("step", STEPS)
def test_one_process_restores_what_three_ranks_saved(golden: Path, step: int) -> None:
    """P58, P59: sharded by rows and by columns, cut and whole replicas, an object of a pruned checkpoint: all bits."""
    state = target()
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(golden))) as checkpointer:
        assert checkpointer.restore(state, step=step) == step
        check_state(state, step)
        report = checkpointer.last_restore
        assert report is not None
        assert report.derived_streams
    assert not torch.distributed.is_initialized()


def draw(rank: int, size: int, run_dir: str) -> tuple[int, list[float], list[list[float]]]:
    """Restore step 3 in one of three ranks; return what its streams give, and its part of a tensor."""
    state = state_at(9, rank)
    with Checkpointer(CheckpointConfig(checkpoint_dir=run_dir, memory_dir=None)) as checkpointer:
        step = checkpointer.restore(state)
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002
    drawn.append(float(torch.rand((), generator=state["noise"])))
    return step, drawn, state["model"][1].weight.to_local().tolist()


def test_three_ranks_go_on_with_their_own_streams(golden: Path) -> None:
    """P12, P59: each rank gets the streams of its process, its own generator and its rows."""
    for rank, (step, drawn, rows) in enumerate(run(3, draw, str(golden))):
        assert step == 3
        seed = 30 + rank
        expected = [random.Random(seed).random(), float(np.random.RandomState(seed).rand())]
        expected += [float(torch.rand((), generator=torch.Generator().manual_seed(n))) for n in (seed, 300 + rank)]
        assert drawn == expected
        assert rows == whole(3)["model/1.weight"][2 * rank : 2 * rank + 2].tolist()


def test_the_run_goes_on_in_one_process(golden: Path) -> None:
    """P51, P59: a later save of one process stands beside what three ranks wrote."""
    state, before = target(), contents(golden)
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(golden), max_num_checkpoints=None)) as checkpointer:
        assert checkpointer.restore(state) == 3
        checkpointer.save(4, state)
        assert [c.step for c in checkpointer.checkpoints()] == [4, 3, 2]
    assert before.items() <= contents(golden).items()


# ── every verb ───────────────────────────────────────────────────────────────────────────────────────────────


def test_ls_and_show(golden: Path) -> None:
    """Two checkpoints are listed; the newest is of three ranks, and says where each object is."""
    listed = ckpt("ls", golden, "--json").data
    assert [(c["step"], c["metrics"]) for c in listed["checkpoints"]] == [(3, {"loss": 1 / 3}), (2, {"loss": 0.5})]
    assert listed["ledger"]["damaged"] == []
    shown = ckpt("show", golden, "--json").data
    assert (shown["step"], shown["world_size"]) == (3, 3)
    tensors = {group["name"]: group["tensors"] for group in shown["groups"]}
    expected = {"model": 3, "optimizer": 6, "replicated": 5, "tensors": 3, "noise": 3, "data": 0, "values": 0, "rng": 9}
    assert tensors == expected
    assert sum(name.startswith("checkpoint_000000000001/") for name in (one["name"] for one in shown["objects"])) == 3
    text = ckpt("show", golden).out
    assert "from 3 ranks" in text
    assert "golden-ranks step 3" in text


def test_verify(golden: Path) -> None:
    """P62: every byte verifies; a bit of one rank's shard is found, with the tensor and the bytes."""
    before = contents(golden)
    found = ckpt("verify", golden, "--json").data
    assert (found["good"], found["orphans"]) == (True, [])
    assert [c["step"] for c in found["checkpoints"] if c["good"]] == [3, 2]
    [new] = contents(golden).keys() - before.keys()
    assert new.startswith("ledger/"), "the result"
    assert contents(golden).items() >= before.items()
    shard = only(golden, "checkpoint_*3/*/model-00001-of-00003-0.safetensors")
    flip(shard, shard.stat().st_size - 1)
    answer = ckpt("verify", golden, "--json")
    assert answer.status == 1
    (fault,) = answer.data["checkpoints"][0]["faults"]
    assert fault.startswith("model/1.")
    assert "model-00001-of-00003-0" in fault
    assert answer.data["checkpoints"][1]["good"]


def test_diff(golden: Path) -> None:
    """Equal is equal, and of two steps every place that differs is named, of every rank's own streams too."""
    assert ckpt("diff", f"{golden}@3", f"{golden}@3").status == 0
    answer = ckpt("diff", f"{golden}@2", f"{golden}@3", "--json")
    assert answer.status == 1
    found = {one["place"]: (one["differing"], one["max_abs"]) for one in answer.data["differences"]}
    assert found["model/1.weight"] == (35, 35.0)
    assert found["tensors/columns"] == (19, 19)
    assert found["data/samples"][1] == 18
    assert "model/0.weight" not in found
    streams = ("noise/{}/state", "rng/{}/python/state/numbers", "rng/{}/torch/state")
    assert found.keys() >= {place.format(f"{rank:05d}") for rank in range(3) for place in streams}


@pytest.mark.parametrize("step", STEPS)
def test_export_is_one_plain_file(golden: Path, tmp_path: Path, step: int) -> None:
    """P58: of shards of three ranks, and of an older checkpoint, one safetensors file that others read."""
    out = tmp_path / "out.safetensors"
    exported = ckpt("export", f"{golden}@{step}", out, "--json").data
    assert (exported["tensors"], exported["left_out"], len(exported["files"])) == (8, [], 1)
    found = load_file(out)
    expected = {key.replace("/", "."): value for key, value in whole(step).items()}
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert_same(found[key], value)
    one = tmp_path / "model.safetensors"
    assert ckpt("export", f"{golden}@{step}", one, "--group", "model").status == 0
    assert_same(load_file(one)["1.bias"], whole(step)["model/1.bias"])


@pytest.mark.parametrize("verb", ["sync", "fork"])
def test_a_copy_is_whole_and_restores(golden: Path, tmp_path: Path, verb: str) -> None:
    """P59: a copy has what an older checkpoint wrote as well; it verifies, and restores to the same values."""
    before, to = contents(golden), tmp_path / "copy"
    assert ckpt(verb, golden, to, "--json").status == 0
    after = contents(golden)
    assert before.items() <= after.items()  # a lease of the copy came and went
    assert {name.partition("/")[0] for name in after.keys() - before.keys()} <= {"ledger"}
    assert ckpt("verify", to, "--json").data["good"]
    assert len([*to.glob("checkpoint_*1/*/*")]) == 3
    state = target()
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(to))) as checkpointer:
        assert [c.step for c in checkpointer.checkpoints()] == ([3, 2] if verb == "sync" else [3])
        assert checkpointer.restore(state) == 3
    check_state(state, 3)
    if verb == "sync":
        again = ckpt("sync", golden, to, "--json").data
        assert all(one["copied_bytes"] == 0 for one in again["checkpoints"])


def test_prune_keeps_what_is_reused_until_nothing_reuses_it(golden: Path) -> None:
    """P46: what three ranks wrote goes with its checkpoint, but for what a later one is made of; then that goes too."""
    pruned = ckpt("prune", golden, "--max-num-checkpoints", "1", "--json").data
    assert [(c["step"], c["verdict"]) for c in pruned["checkpoints"]] == [(3, "stays"), (2, "removed")]
    assert [*golden.glob("checkpoint_*2/*/*")] == []
    assert len([*golden.glob("checkpoint_*1/*/model-*-of-00003-1.safetensors")]) == 3
    assert ckpt("verify", golden, "--json").data["good"]
    state = target()
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(golden), max_num_checkpoints=1)) as checkpointer:
        assert checkpointer.restore(state) == 3
        check_state(state, 3)
        for step in (4, 5):
            checkpointer.save(step, state)
        checkpointer.prune()
        assert [c.step for c in checkpointer.checkpoints()] == [5]
    assert {path.parent.parent.name for path in golden.glob("checkpoint_*/*/*")} == {"checkpoint_000000000005"}
    assert ckpt("verify", golden, "--json").data["orphans"] == []


def test_who_wrote_it_is_said_by_the_manifest(golden: Path) -> None:
    """P59: what three ranks wrote has version 2, one tree for each rank of what is its own, and no reader of 1."""
    (name,) = golden.glob("checkpoint_*3/*/manifest.json")
    body = json.loads(name.read_bytes())
    assert (body["version"], body["world_size"]) == (2, 3)
    assert {group: len(one["trees"]) for group, one in body["groups"].items() if "trees" in one} == {
        "noise": 3,
        "rng": 3,
    }
    body["version"], body["groups"] = 1, {}
    data = json.dumps(body).encode()
    with pytest.raises(IntegrityError, match="version 1 is not that of its trees and 3 ranks"):
        Manifest.from_bytes(data, digest=digest_hex(data), name="manifest.json")


def test_the_golden_runs_are_shipped() -> None:
    """P59: nothing that keeps made files out of the source distribution keeps these out."""
    assert RUNS
    assert all(shipped_bytes(run) < 400_000 for run in RUNS)
