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
from tests.golden.test_golden import contents
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


# ── every verb ───────────────────────────────────────────────────────────────────────────────────────────────


def test_every_verb_reads_it(golden: Path, tmp_path: Path) -> None:
    """P58, P59, P62: it is listed, shown, compared, exported as one plain file, and every byte verifies.

    A bit of one rank's shard is found, with the tensor and the object.
    """
    before = contents(golden)
    shown = ckpt("show", golden, "--json").data
    assert (shown["step"], shown["world_size"]) == (3, 3)
    tensors = {group["name"]: group["tensors"] for group in shown["groups"]}
    expected = {
        "model": 3,
        "optimizer": 6,
        "replicated": 11,
        "tensors": 3,
        "noise": 3,
        "data": 0,
        "values": 0,
        "rng": 9,
    }
    assert tensors == expected
    assert "from 3 ranks" in ckpt("show", golden).out
    answer = ckpt("diff", f"{golden}@2", f"{golden}@3", "--json")
    differences = {one["place"]: (one["differing"], one["max_abs"]) for one in answer.data["differences"]}
    assert differences["model/1.weight"] == (35, 35.0)
    assert "model/0.weight" not in differences
    streams = ("noise/{}/state", "rng/{}/python/state/numbers", "rng/{}/torch/state")
    assert differences.keys() >= {place.format(f"{rank:05d}") for rank in range(3) for place in streams}
    out = tmp_path / "out.safetensors"
    assert ckpt("export", f"{golden}@3", out, "--json").data["tensors"] == 8
    found, same = load_file(out), {key.replace("/", "."): value for key, value in whole(3).items()}
    assert found.keys() == same.keys()
    for key, value in same.items():
        assert_same(found[key], value)
    assert contents(golden) == before
    verified = ckpt("verify", golden, "--json").data
    assert [(c["step"], c["good"]) for c in verified["checkpoints"]] == [(3, True), (2, True)]
    shard = only(golden, "checkpoint_*3/*/model-00001-of-00003-0.safetensors")
    flip(shard, shard.stat().st_size - 1)
    answer = ckpt("verify", golden, "--json")
    (fault,) = answer.data["checkpoints"][0]["faults"]
    assert fault.startswith("model/1.")
    assert "model-00001-of-00003-0" in fault
    assert (answer.status, answer.data["checkpoints"][1]["good"]) == (1, True)


@pytest.mark.parametrize("verb", ["sync", "fork"])
def test_a_copy_is_whole_and_restores(golden: Path, tmp_path: Path, verb: str) -> None:
    """P59: a copy has what an older checkpoint wrote as well; it verifies, and restores to the same values."""
    to = tmp_path / "copy"
    assert ckpt(verb, golden, to, "--json").status == 0
    assert ckpt("verify", to, "--json").data["good"]
    assert len([*to.glob("checkpoint_*1/*/*")]) == 3
    state = target()
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(to))) as checkpointer:
        assert [c.step for c in checkpointer.checkpoints()] == ([3, 2] if verb == "sync" else [3])
        assert checkpointer.restore(state) == 3
    check_state(state, 3)


def test_prune_keeps_what_is_reused_until_nothing_reuses_it(golden: Path) -> None:
    """P46, P51, P59: one process goes on from what three ranks wrote.

    That goes with its checkpoint, but for what a later one is made of; then that goes too.
    """
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
    """P59: what three ranks wrote has one tree for each rank of what is its own."""
    (name,) = golden.glob("checkpoint_*3/*/manifest.json")
    body = json.loads(name.read_bytes())
    assert (body["version"], body["world_size"]) == (1, 3)
    assert {group: len(one["trees"]) for group, one in body["groups"].items() if "trees" in one} == {
        "noise": 3,
        "rng": 3,
    }
