"""Runs that earlier versions wrote, kept as bytes: today's code reads them to the exact values that were saved.

What is in a run is said here once more, apart from tools/golden.py, which wrote it.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections import Counter, OrderedDict, deque
from datetime import date, datetime, timedelta, timezone
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hatchling.builders.sdist import SdistBuilder
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer, LookupTable, ReplayBuffer, ResumableSampler, open_run
from ckpt_tasks.errors import FormatVersionError
from ckpt_tasks.format import tree
from ckpt_tasks.format.digests import canonical_json, digest_hex
from ckpt_tasks.format.live import write_segment
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.upkeep.verifying import verify_run_directory
from ckpt_tasks.state.tables.rules import Adagrad
from ckpt_tasks.storage.local import LocalStore
from tests.golden.kinds import OF_TORCHAO, flattened, kinds_at, wrapped
from tests.support.roundtrip import assert_same
from tools.sources import ROOT

HERE = Path(__file__).parent
RUNS = sorted(HERE.glob("v*/run"))
MANY = sorted(HERE.glob("v*/many"))
FIRST = [-0.35907042026519775, 0.3797091245651245]  # the row with which the id 3 of the seed 7 begins


@pytest.fixture(params=RUNS, ids=lambda run: run.parent.name)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a copy of a golden run: what is checked in is never written."""
    return Path(shutil.copytree(request.param, tmp_path / "run"))


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def target() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
        "data": ResumableSampler(100, 8, seed=3),
        "noise": torch.Generator(),
        "tensors": None,
        "values": None,
    }


MODEL = {
    9: {
        "0.weight": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
        "0.bias": [1.0, 2.0],
        "1.weight": [2.0, 3.0],
        "1.bias": [3.0, 4.0],
        "1.running_mean": [4.0, 5.0],
        "1.running_var": [5.0, 6.0],
        "1.num_batches_tracked": 6,
    },
    10: {
        "0.weight": [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]],
        "0.bias": [2.0, 4.0],
        "1.weight": [4.0, 6.0],
        "1.bias": [6.0, 8.0],
        "1.running_mean": [8.0, 10.0],
        "1.running_var": [10.0, 12.0],
        "1.num_batches_tracked": 12,
    },
}
# step → (step count, exp_avg and exp_avg_sq of the n-th parameter beyond n, lr, scheduler steps, position in the data)
OPTIMIZER = {9: (3.0, 0.25, 0.5, 0.125, 2, 40), 10: (6.0, 0.5, 1.0, 0.0625, 4, 80)}


def check_tensors(found: dict[str, Any], k: int) -> None:
    bits = {1: [0x3F00, -0x8000, 0x3F80, 0x4040], 2: [0x3F80, -0x8000, 0x4000, 0x40C0]}
    assert_same(found["bf16"], torch.tensor(bits[k], dtype=torch.int16).view(torch.bfloat16))
    assert found["tied"] is found["bf16"]
    assert_same(found["complex128"], torch.tensor([k + 2j * k, complex(0, -3.5 * k)], dtype=torch.complex128))
    assert_same(found["bool"], torch.tensor([[True, False, {1: True, 2: False}[k]]]))
    assert_same(found["rank 0"], torch.tensor({1: -7, 2: -14}[k]))
    assert_same(found["empty"], torch.zeros((0, 3), dtype=torch.float64))
    assert_same(found["fp8"], torch.tensor({1: [0x30, 0x40], 2: [0x38, 0x48]}[k]).byte().view(torch.float8_e4m3fn))
    assert_same(found["uint16"], torch.tensor({1: [0, -2], 2: [0, -3]}[k], dtype=torch.int16).view(torch.uint16))
    assert found["transposed"].tolist() == {1: [[0, 3], [1, 4], [2, 5]], 2: [[0, 6], [2, 8], [4, 10]]}[k]
    assert found["transposed"].stride() == (1, 3)
    assert found["transposed"].dtype is torch.int32
    assert found["leaf"].requires_grad
    assert_same(found["leaf"].detach(), torch.tensor([float("nan"), float(k)]))
    assert_same(found["array"], np.array({1: [[1, 2], [3, 4]], 2: [[2, 4], [6, 8]]}[k], dtype=np.int8))


def expected_values(k: int) -> dict[str, Any]:
    two = k == 2
    return {
        "plain": [None, True, False, 0, -2 * 10**30 if two else -(10**30), 0.1, "\xfc\n", ""],
        "floats": [float("nan"), float("inf"), float("-inf"), -0.0],
        "keys": {"0": "text", 0: "number", None: 2 if two else 1, (1, "a"): []},
        "~tilde": {"~tensor": "no tensor"},
        "tuple": (1, (2, ())),
        "sets": [{1, 2, 3}, frozenset({("b", 2 if two else 1), "a"})],
        "deque": deque([1, 2, 3], maxlen=5 if two else 4),
        "ordered": OrderedDict({"b": 1, "a": 2 if two else 1}),
        "counter": Counter(["x", "x", "y", "y"] if two else ["x", "x", "y"]),
        "complex": complex("1+infj"),
        "bytes": b"\x00\xff\x00\xff" if two else b"\x00\xff",
        "times": [
            datetime.fromisoformat("2024-02-29T12:30:01.000005"),
            datetime(2024, 2, 29, tzinfo=timezone(timedelta(minutes=330))),
            date.fromisoformat("1970-01-02" if two else "1970-01-01"),
            timedelta(microseconds=-86_399_999_998 if two else -86_399_999_999),
        ],
        "torch": [torch.bfloat16, torch.device("cpu"), torch.Size((2, 0, 2 if two else 1))],
        "numpy": [np.float32("0.1"), np.int64(-2 if two else -1), np.bool_(1)],
    }


def check_state(state: dict[str, Any], step: int) -> None:
    """Compare everything but the streams of the process with what the run's maker put into it."""
    assert {name: value.tolist() for name, value in state["model"].state_dict().items()} == MODEL[step]
    assert state["model"].state_dict()["1.num_batches_tracked"].dtype is torch.int64
    count, average, square, rate, scheduled, position = OPTIMIZER[step]
    for n, parameter in enumerate(state["model"].parameters()):
        held = state["optimizer"].state[parameter]
        assert_same(held["step"], torch.tensor(count))
        assert_same(held["exp_avg"], torch.full(parameter.shape, n + average))
        assert_same(held["exp_avg_sq"], torch.full(parameter.shape, n + square))
    (group,) = state["optimizer"].param_groups
    assert (group["lr"], group["initial_lr"], group["betas"], group["weight_decay"]) == (rate, 0.25, (0.9, 0.999), 0.5)
    assert (state["scheduler"].last_epoch, state["scheduler"].get_last_lr()) == (scheduled, [rate])
    data = state["data"].state_dict()
    assert {name: data[name] for name in ("epoch", "samples", "seed")} == {"epoch": 0, "samples": position, "seed": 3}
    twin = torch.Generator().manual_seed({9: 10, 10: 20}[step])
    assert torch.equal(torch.rand(3, generator=state["noise"]), torch.rand(3, generator=twin))
    check_tensors(state["tensors"], step - 8)
    assert_same(state["values"], expected_values(step - 8))


@pytest.mark.parametrize("step", [9, 10])
def test_a_golden_run_is_restored_to_the_values_that_were_saved(golden: Path, step: int) -> None:
    """P59: every kind of value that the format has, written by an earlier version, comes back exactly."""
    state = target()
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(golden), run_key="golden")) as ckpt:
        assert ckpt.restore(state, step=step) == step
        drawn = (random.random(), float(np.random.rand()), torch.rand(3).tolist())  # noqa: NPY002
        check_state(state, step)
    twins = (random.Random(step - 8), np.random.RandomState(step - 8), torch.Generator().manual_seed(step - 8))
    assert drawn == (twins[0].random(), float(twins[1].rand()), torch.rand(3, generator=twins[2]).tolist())


@pytest.mark.filterwarnings("ignore:.*(quantize|Sparse|sparse|rototype|deprecated).*")
@pytest.mark.parametrize("step", [1, 2])
def test_values_in_parts_are_restored_to_what_was_saved(step: int, tmp_path: Path) -> None:
    """P9, P59: values with parts come back exactly, their classes found by name."""
    shutil.copytree(HERE / "v1" / "kinds", tmp_path / "run")
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(tmp_path / "run"))) as ckpt:
        state: dict[str, Any] = {"values": {}}
        assert ckpt.restore(state, step=step) == step
    assert_same(state["values"], kinds_at(step))


@pytest.mark.framework
def test_tensors_made_of_others_are_restored_to_what_was_saved(tmp_path: Path) -> None:
    """P59: torchao's tensors of few bits come back by their parts."""
    shutil.copytree(HERE / "v1" / "wrappers", tmp_path / "run")
    own = [wrapped(bits, 1) for bits in OF_TORCHAO]
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(tmp_path / "run"))) as ckpt:
        state: dict[str, Any] = {"values": []}
        assert ckpt.restore(state) == 1
    assert [*map(flattened, state["values"])] == [*map(flattened, own)]


def test_buffers_are_restored_to_what_was_saved(tmp_path: Path) -> None:
    """P59: the bytes of an `io.BytesIO` come back, and the position in it."""
    shutil.copytree(HERE / "v1" / "buffers", tmp_path / "run")
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(tmp_path / "run"))) as ckpt:
        state: dict[str, Any] = {"values": []}
        assert ckpt.restore(state) == 1
    assert_same(state["values"], [BytesIO(b"golden"), BytesIO()])


def test_a_lookup_table_is_restored_to_what_was_saved(tmp_path: Path) -> None:
    """P59: a table has a base and a delta, the ledger names the base as reused, and new ids begin as ever."""
    shutil.copytree(HERE / "v1" / "tables", tmp_path / "run")
    users = LookupTable(2, slots=Adagrad(lr=0.1))
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(tmp_path / "run"))) as ckpt:
        for step, ids in ((1, [0, 2, 3, 4, 5]), (2, [0, 3, 4, 5])):
            assert ckpt.restore({"users": users}, step=step) == step
            assert users.ids.tolist() == ids
    assert (users.seed, users.updates, users.rule) == (7, 2, Adagrad(lr=0.5))
    # Adagrad's first step is its learning rate, whatever the gradient.
    first = LookupTable(2, slots=Adagrad(), seed=7).eval()(torch.tensor([3, 4, 5]))
    torch.testing.assert_close(users.eval()(torch.tensor([3, 4, 5])), first - 0.5)
    torch.testing.assert_close(first[0], torch.tensor(FIRST), rtol=0, atol=0)


def test_a_golden_replay_buffer_is_read_to_its_rows(tmp_path: Path) -> None:
    """P59: three files are read to their rows, also one with overwritten rows, and a save goes on."""
    shutil.copytree(HERE / "v1" / "replay", tmp_path / "run")
    replay = ReplayBuffer(5, at=(torch.float32, (2,)), action=torch.int64, done=bool)
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(tmp_path / "run"), max_num_checkpoints=None)) as ckpt:
        for step, rows in ((1, range(3)), (2, range(4)), (3, range(2, 7))):
            assert ckpt.restore({"replay": replay}, step=step) == step
            held = replay.values[[n % 5 for n in rows]]
            assert (replay.added, held["action"].tolist()) == (rows.stop, [-n for n in rows])
            assert held["at"].tolist() == [[n, n / 2] for n in rows]
            assert held["done"].tolist() == [n % 2 == 1 for n in rows]
        ckpt.save(4, {"replay": replay})
    assert len([*(tmp_path / "run").glob("*/*/*.arrow")]) == 4 + 3, "indexes, and the files of three saves"


def test_a_golden_run_goes_on(golden: Path) -> None:
    """P51, P59: the newest is step 10, not 9, and what today's code adds stands beside what was there."""
    state, before = target(), contents(golden)
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(golden), max_num_checkpoints=None)) as ckpt:
        assert ckpt.restore(state) == 10
        ckpt.save(11, state)
        assert [c.step for c in ckpt.checkpoints()] == [11, 10, 9]
    assert before.items() <= contents(golden).items()


def test_a_golden_run_is_listed_and_verifies(golden: Path) -> None:
    """P59, P62: steps, metrics, evaluations, pins and notes are as they were, and every byte verifies."""
    before, run = contents(golden), open_run(str(golden), "golden")
    listed = run.checkpoints()
    assert [(c.step, c.epochs, c.abandoned, c.n) for c in listed] == [(10, 2, False, 2), (9, 1, False, 1)]
    assert [repr(c.metrics) for c in listed] == ["{'loss': 0.25}", "{'loss': nan}"]
    assert listed[0].parent == listed[1].manifest_digest
    assert run.head().state.pins == {listed[1].manifest_digest: "golden"}
    assert [note["note"] for note in run.notes()] == ["verify", "drill", "made"]
    assert [(check.kind, check.fault, check.figures) for check in run.head().state.checks] == [
        ("drill", "killed", {"step": 10, "ranks": 1}),
        ("verify", None, {"checkpoints": 2, "damaged_checkpoints": 0, "damaged_records": 0}),
    ]
    (evaluation,) = run.evaluations()
    assert (evaluation.step, evaluation.suite) == (10, "quick")
    assert evaluation.metrics == {"accuracy": 0.75, "loss": float("inf")}
    assert run.find("best", metric="accuracy", mode="max").step == 10
    faults = verify_run_directory(run.history)
    assert faults.good, faults
    assert len(faults.checkpoints) == 2
    assert faults.orphans == ()
    assert contents(golden) == before


@pytest.mark.parametrize("source", MANY, ids=lambda path: path.parent.name)
def test_a_golden_ledger_of_many_goes_on(source: Path, tmp_path: Path) -> None:
    """P59: a long list of checkpoints is read, its segments too, and the next entry goes on from it."""
    shutil.copytree(source, tmp_path / "run")
    store = LocalStore(tmp_path / "run")
    of_each_time = [History(store).read_entry(n)[0].state for n in (201, 202, 203)]
    expected = [[*range(1, 151), *range(202, n + 1)] for n in (201, 202, 203)]
    assert [[c.step for c in state.live] for state in of_each_time] == expected
    assert [c.n for c in of_each_time[0].live] == list(range(1, 151))
    assert [c.step for c in of_each_time[0].live if c.abandoned] == list(range(3, 151, 10))
    assert [c.step for c in of_each_time[2].live if math.isnan(c.metrics["loss"])] == [50, 100, 150]
    before, history = contents(tmp_path / "run"), History(store)
    history.append({"kind": "note", "note": "more"}, lambda state, n: state, owner=None)
    assert before.items() <= contents(tmp_path / "run").items()
    assert len(contents(tmp_path / "run")) == len(before) + 1
    assert write_segment(History(store).head().state.live) == write_segment(of_each_time[2].live)


def test_the_golden_runs_hold_every_word_of_the_tree() -> None:
    """P9, P59: what the vocabulary has a word for is in a golden run, so that no kind of value goes unread."""
    text = "".join(path.read_text() for path in HERE.rglob("manifest.json"))
    assert {row.tag for row in tree.KINDS if f'{{"{row.tag}":' not in text} == set()
    text = "".join(path.read_text() for path in RUNS[-1].rglob("manifest.json"))
    assert '"array":true' in text
    assert '"stride":[1,3]' in text
    assert '"requires_grad":true' in text


def raised(data: bytes) -> bytes:
    """Raise the version of a JSON object beyond every known one, with a fitting digest if it has one of its own."""
    body = json.loads(data)
    body["version"] += 8
    if "digest" not in body:
        return json.dumps(body).encode()
    del body["digest"]
    return canonical_json({**body, "digest": digest_hex(canonical_json(body))})


@pytest.mark.parametrize("what", ["format.json", "ledger/*08.json", "checkpoint_*10/*/manifest.json"])
def test_a_run_of_a_newer_version_is_refused(golden: Path, what: str) -> None:
    """P59: where any object says a newer version, the error says upgrade, the target and the run are untouched."""
    (path,) = golden.glob(what)
    old = path.read_bytes()
    path.write_bytes(raised(old))
    if path.name == "manifest.json":  # whoever wrote it also committed it
        (entry,) = golden.glob("ledger/*08.json")
        body = json.loads(entry.read_bytes().replace(digest_hex(old).encode(), digest_hex(path.read_bytes()).encode()))
        del body["digest"]
        entry.write_bytes(canonical_json({**body, "digest": digest_hex(canonical_json(body))}))
    before, state = contents(golden), target()
    weights = state["model"][0].weight.detach().clone()
    with (
        pytest.raises(FormatVersionError, match="Upgrade"),
        Checkpointer(CheckpointConfig(checkpoint_dir=str(golden))) as ckpt,
    ):
        ckpt.restore(state)
    assert torch.equal(state["model"][0].weight, weights)
    assert state["values"] is None
    after = contents(golden)
    assert before.items() <= after.items()
    added = {name.partition("/")[0] for name in after.keys() - before.keys()}
    # The ledger and format.json are read before the directory is taken, a manifest after it.
    assert added == ({"ledger", "heartbeat", ".ckpt-reserve"} if path.name == "manifest.json" else set())


def test_the_golden_runs_are_shipped() -> None:
    """P59: nothing that keeps made files out of the checkout or of the source distribution keeps these out."""
    shipped = {file.distribution_path for file in SdistBuilder(str(ROOT)).recurse_included_files()}
    for run in HERE.glob("v*/*"):
        files = [path for path in run.rglob("*") if path.is_file()]
        assert {str(path.relative_to(ROOT)) for path in files} <= shipped
        assert sum(path.stat().st_size for path in files) < 400_000
