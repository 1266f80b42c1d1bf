"""dcp.save and dcp.load over a run, in one process."""

from __future__ import annotations

import contextlib
import io
import pickle
import pickletools
import warnings
import zipfile
from collections import OrderedDict, defaultdict, deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.dcp import CkptReader, CkptWriter
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.integrations.dcp.holding import held_run
from tests.crash.forked import forked
from tests.integrations.dcp.states import emptied, same, state_of, trained, values
from tests.support.cli_runs import ckpt
from tests.support.roundtrip import assert_same
from tests.support.sweeps import quick_first

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def run_dir(fast_dir: Path, request: pytest.FixtureRequest) -> Any:
    """Return the path of a run that does not exist yet; it is released afterwards."""
    run = fast_dir / request.node.name.replace("[", "-").replace("]", "")
    yield run
    held_run(CheckpointConfig(checkpoint_dir=run)).end()


def write(run: Path, state: dict[str, Any], step: int, **options: Any) -> None:
    save(
        state, storage_writer=CkptWriter(CheckpointConfig(checkpoint_dir=run, **options)), checkpoint_id=f"step-{step}"
    )


def test_a_state_comes_back_as_it_was(run_dir: Path) -> None:
    """Tensors are equal bit for bit, and what DCP would pickle has its value and its type."""
    state = state_of(*trained(), **values())
    write(run_dir, state, 100)
    found = emptied(state)
    load(found, storage_reader=CkptReader(run_dir))
    state["nested"]["ordered"] = dict(state["nested"]["ordered"])
    assert same(found, state)


def test_it_is_a_checkpoint_like_any_other(run_dir: Path) -> None:
    """Ls, show, verify, diff and report know it, and its groups are those of a Checkpointer."""
    state = state_of(*trained(), epoch=1)
    write(run_dir, state, 1)
    state["model"]["0.bias"].add_(1)
    write(run_dir, state, 2)
    place = str(run_dir)
    assert [row["step"] for row in ckpt("ls", place, "--json").data["checkpoints"]] == [2, 1]
    assert ckpt("verify", place).status == 0
    shown = ckpt("show", place, "--json").data["groups"]
    assert {group["name"]: group["kind"] for group in shown} == {
        "model": "module",
        "optimizer": "optimizer",
        "epoch": "plain",
    }
    assert "model/0.bias" in ckpt("diff", f"{place}@1", f"{place}@2").out
    assert ckpt("report", place, "--out", f"{place}.html").status == 0


def test_a_checkpointer_restores_it_by_name(run_dir: Path) -> None:
    """A model and an optimizer are restored into live objects, and their training goes on as a run of ours."""
    model, optimizer = trained()
    write(run_dir, state_of(model, optimizer, epoch=4), 7)
    held_run(CheckpointConfig(checkpoint_dir=run_dir)).end()
    other, moments = trained(1)
    state = {"model": other, "optimizer": moments, "epoch": 0}
    with Checkpointer(CheckpointConfig(checkpoint_dir=run_dir)) as ckpt_:
        assert ckpt_.restore(state, leave=["rng"], missing="keep") == 7
        ckpt_.save(8, state)
    assert state["epoch"] == 4
    assert same(state_of(other, moments), state_of(model, optimizer))


class Hidden:
    """A class of the user's without a state of its own."""


class Bytes(DefaultSavePlanner):
    """A planner of the user's, which pickles in a way of its own."""

    def transform_object(self, write_item: WriteItem, value: Any) -> io.BytesIO:
        return io.BytesIO(pickle.dumps(value))


def test_what_cannot_be_stored_is_refused_by_key(run_dir: Path) -> None:
    """Of one process nothing is written then: neither an object of a class, nor the bytes of a planner."""
    state = {"w": torch.ones(2), "nested": {"deep": (1, 2)}}
    with pytest.raises(CheckpointException, match=r"Bytes has made bytes of cannot be stored \(at nested\.deep"):
        save(state, storage_writer=CkptWriter(run_dir, step=1), planner=Bytes())
    with pytest.raises(CheckpointException, match="nested/deep"):
        write(run_dir, {"w": torch.ones(2), "nested": {"deep": (1, Hidden())}}, 1)
    assert open_run(run_dir).checkpoints() == []


def test_nothing_that_is_stored_is_a_pickle(run_dir: Path) -> None:
    """No object of the run is a pickle or a zip file, or holds one; the reader makes its own in memory."""
    write(run_dir, state_of(*trained(), **(values() | {"bytes": b""})), 1)
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        data = path.read_bytes()
        assert not zipfile.is_zipfile(path), path
        assert pickles_in(data) == [], path
    assert pickles_in(b"abc" + pickle.dumps({"a": [1, 2], "b": "c"})) == [3]


def pickles_in(data: bytes) -> list[int]:
    """Return where a pickle begins: a header of protocol 2 to 5 after which more than a few opcodes lead to a STOP."""
    found = []
    for at in range(len(data) - 1):
        if data[at] == 0x80 and data[at + 1] in range(2, 6):
            with (
                contextlib.suppress(ValueError, IndexError, UnicodeDecodeError),
                warnings.catch_warnings(action="ignore"),
            ):
                if len([*pickletools.genops(data[at:])]) > 8:  # fewer are there by chance
                    found.append(at)
    return found


@pytest.mark.parametrize("kind", quick_first([*AsyncCheckpointerType]))
def test_async_save_commits_what_there_was(run_dir: Path, kind: AsyncCheckpointerType, gloo: None) -> None:
    """In a thread and in a process: the state at the call is committed, not what training made of it since."""
    state: dict[str, Any] = {"w": torch.arange(1000.0), "epoch": 1}
    future = async_save(state, storage_writer=CkptWriter(run_dir, step=1), async_checkpointer_type=kind)
    state["w"].zero_()
    assert isinstance(future, Future)
    future.result()
    found: dict[str, Any] = {"w": torch.zeros(1000), "epoch": 0}
    load(found, storage_reader=CkptReader(run_dir))
    assert found["epoch"] == 1
    assert torch.equal(found["w"], torch.arange(1000.0))


def test_a_writer_and_a_reader_are_pickled(run_dir: Path) -> None:
    """Also once they are used: DCP's process executor sends the writer, with what this process has loaded."""
    reader = CkptReader(run_dir)
    write(run_dir, {"w": torch.ones(2)}, 1)
    load({"w": torch.zeros(2)}, storage_reader=reader)
    sent = pickle.dumps(CkptWriter(run_dir, step=2))
    held_run(CheckpointConfig(checkpoint_dir=run_dir)).end()
    assert forked(lambda: save({"w": torch.ones(2)}, storage_writer=pickle.loads(sent)) and None)() is None
    assert [one.step for one in open_run(run_dir).checkpoints()] == [2, 1]
    load({"w": torch.zeros(2)}, storage_reader=pickle.loads(pickle.dumps(reader)))


@pytest.mark.parametrize("place", [20, -1000])
def test_a_flipped_bit_changes_no_target(run_dir: Path, place: int) -> None:
    """It is noticed before anything is read into the state, in a file's header and in its tensors."""
    state = {"a": torch.randn(200), "b": torch.randn(200_000)}
    write(run_dir, state, 1)
    (shard,) = run_dir.rglob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[place] ^= 1
    shard.write_bytes(data)
    found = emptied(state)
    with pytest.raises(CheckpointException, match="have changed"):
        load(found, storage_reader=CkptReader(run_dir))
    assert not found["a"].any()
    assert not found["b"].any()


def test_steps_go_up(run_dir: Path) -> None:
    """A step that has been saved is refused, and so is a writer without a step, or with a number that is none."""
    write(run_dir, {"w": torch.ones(1)}, 5)
    with pytest.raises(CheckpointException, match="step 5 is not after step 5"):
        write(run_dir, {"w": torch.ones(1)}, 5)
    with pytest.raises(CheckpointException, match="needs its step"):
        save({"w": torch.ones(1)}, storage_writer=CkptWriter(run_dir))
    with pytest.raises(CheckpointException, match="a step is a whole number"):
        save({"w": torch.ones(1)}, storage_writer=CkptWriter(run_dir), checkpoint_id="at-20261127150000")


def test_who_has_not_loaded_does_not_commit(run_dir: Path) -> None:
    """MUST 12 of the format holds for DCP: who writes to a run with checkpoints loads it first."""
    write(run_dir, {"w": torch.ones(1)}, 5)
    held_run(CheckpointConfig(checkpoint_dir=run_dir)).end()

    def another_process() -> None:
        with pytest.raises(CheckpointException, match=r"holds checkpoints up to step 5"):
            write(run_dir, {"w": torch.ones(1)}, 6)
        load({"w": torch.ones(1)}, storage_reader=CkptReader(run_dir))
        write(run_dir, {"w": torch.ones(1)}, 6)

    assert forked(another_process)() is None
    newest, before = open_run(run_dir).checkpoints()
    assert newest.parent == before.manifest_digest


def test_ranks_that_save_alone_are_refused(run_dir: Path) -> None:
    """Each would have a checkpoint of its own: nothing is written."""
    with pytest.raises((CheckpointException, ConfigError), match="no common checkpoint"):
        save({"w": torch.ones(1)}, storage_writer=CkptWriter(run_dir, step=1), use_collectives=False)
    assert not run_dir.exists()


class Losses(NamedTuple):
    """A container that training changes in place."""

    tensor: torch.Tensor
    array: np.ndarray[Any, Any]


def test_what_containers_hold_is_copied_before_training_goes_on(run_dir: Path) -> None:
    """P1: async_save stores the values of its call, in every container that can be stored, and nothing later."""
    tensors, arrays = [torch.ones(3) for _ in range(4)], [np.ones(3) for _ in range(2)]
    buffer, grown = io.BytesIO(b"before"), bytearray(b"before")
    kept: dict[str, Any] = {
        "named": Losses(tensors[0], arrays[0]),
        "deque": deque([tensors[1], Losses(tensors[2], arrays[1])], maxlen=5),
        "ordered": OrderedDict(a=tensors[3]),
        "counted": defaultdict(list, {"a": [1]}),
        "buffer": buffer,
        "bytes": grown,
    }
    done = async_save(kept, storage_writer=CkptWriter(run_dir, step=1))
    for tensor in tensors:
        tensor += 1  # noqa: PLW2901 (in place)
    for array in arrays:
        array += 1  # noqa: PLW2901 (in place)
    kept["counted"]["a"].append(2)
    buffer.write(b"AFTER!")
    grown[:] = b"after!"
    assert isinstance(done, Future)
    done.result()
    found = {**dict.fromkeys(kept), "ordered": {"a": torch.zeros(3)}, "counted": {"a": None}}
    load(found, storage_reader=CkptReader(run_dir))
    ones, expected = torch.ones(3), np.ones(3)
    assert_same(
        found,
        {
            "named": Losses(ones, expected),
            "deque": deque([ones, Losses(ones, expected)], maxlen=5),
            "ordered": {"a": ones},  # DCP flattens a dict
            "counted": {"a": [1]},
            "buffer": io.BytesIO(b"before"),
            "bytes": bytearray(b"before"),
        },
    )


@pytest.mark.parametrize("shared", quick_first([False, True]), ids=["a writer each", "one writer"])
def test_saves_under_way_at_once_are_made_one_after_the_other(run_dir: Path, shared: bool) -> None:
    """Seven calls of async_save in a row: seven checkpoints, each with its own values."""
    one = CkptWriter(CheckpointConfig(checkpoint_dir=run_dir, max_num_checkpoints=None))
    weights, under_way = torch.zeros(1 << 16), []
    for step in range(1, 8):
        weights.fill_(step)
        writer = one if shared else CkptWriter(CheckpointConfig(checkpoint_dir=run_dir, max_num_checkpoints=None))
        under_way.append(async_save({"weights": weights}, storage_writer=writer, checkpoint_id=f"step-{step}"))
    for done in under_way:
        assert isinstance(done, Future)
        done.result()
    assert [one.step for one in open_run(run_dir).checkpoints()] == [7, 6, 5, 4, 3, 2, 1]
    for step in range(1, 8):
        found = {"weights": torch.zeros(1 << 16)}
        load(found, storage_reader=CkptReader(run_dir, step=step))
        assert bool((found["weights"] == step).all())


def test_no_save_frees_the_copy_of_another_one(run_dir: Path) -> None:
    """Three copies wait for one writer, the first is saved, and the memory of the others is not used for a fourth."""
    writer = CkptWriter(CheckpointConfig(checkpoint_dir=run_dir))
    copies = [writer.stage({"weights": torch.full((1 << 16,), float(step))}) for step in (1, 2, 3)]
    save(copies[0], storage_writer=writer, checkpoint_id="step-1")
    writer.stage({"weights": torch.full((1 << 16,), 4.0)})
    assert [copy["weights"].unique().tolist() for copy in copies] == [[1.0], [2.0], [3.0]]


def test_a_save_that_fails_in_a_thread_lets_the_next_one_begin(run_dir: Path) -> None:
    """The turn of a save that was refused is over with it."""
    bad = async_save({"weights": object()}, storage_writer=CkptWriter(run_dir, step=1))
    assert isinstance(bad, Future)
    with pytest.raises(CheckpointException):
        bad.result()
    good = async_save({"weights": torch.ones(2)}, storage_writer=CkptWriter(run_dir, step=2))
    assert isinstance(good, Future)
    good.result()
    write(run_dir, {"weights": torch.ones(2)}, 3)
    assert [one.step for one in open_run(run_dir).checkpoints()] == [3, 2]


@pytest.mark.slow
def test_a_cached_plan_is_that_of_its_planner(run_dir: Path) -> None:
    """A save without a cache lies between two saves with one: the later full save holds all of the state."""
    full, alone = {"weights": torch.ones(2), "moments": torch.ones(3)}, {"weights": torch.ones(2)}

    def planner() -> DefaultSavePlanner:
        return DefaultSavePlanner(enable_plan_caching=True)

    for step, state, plans in (
        (1, full, planner()),
        (2, alone, None),
        (3, full, planner()),
        (4, alone, planner()),
        (5, full, planner()),
    ):
        save(
            state,
            storage_writer=CkptWriter(CheckpointConfig(checkpoint_dir=run_dir, max_num_checkpoints=None), step=step),
            planner=plans,
        )
        found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        load(found, storage_reader=CkptReader(run_dir, step=step))
        assert same(found, state), step
        assert CkptReader(run_dir, step=step).read_metadata().state_dict_metadata.keys() == state.keys()


@pytest.mark.slow
def test_planners_are_told_what_they_are_told_by_dcp(run_dir: Path) -> None:
    """The metadata has DCP's version and says which checkpoint it is; a save tells its planner which one it writes."""
    told: list[StorageMeta | None] = []

    class Asking(DefaultSavePlanner):
        def set_up_planner(
            self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
        ) -> None:
            told.append(storage_meta)
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    save({"a": torch.ones(1)}, storage_writer=CkptWriter(run_dir), checkpoint_id="step-7", planner=Asking())
    assert told[0] is not None
    assert (told[0].checkpoint_id, told[0].save_id) == ("step-7", "7")
    reader = CkptReader(run_dir)
    reader.reset("step-7")
    metadata = reader.read_metadata()
    assert getattr(metadata, "version", None) == getattr(filesystem, "CURRENT_DCP_VERSION", None)  # none in torch 2.6
    assert metadata.storage_meta == StorageMeta("step-7", "7", reader.load_id)
