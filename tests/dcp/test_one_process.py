"""dcp.save and dcp.load over a run, in one process."""

from __future__ import annotations

import contextlib
import io
import pickle
import pickletools
import warnings
import zipfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from ckpt_tasks import CheckpointConfig, Checkpointer, LookupTable, open_run
from ckpt_tasks.dcp import CkptReader, CkptWriter
from ckpt_tasks.dcp.holding import held_run, store_of
from ckpt_tasks.dcp.shards import write_portions
from ckpt_tasks.dcp.staging import stage
from ckpt_tasks.errors import ConfigError, StateError
from tests.crash.forked import forked
from tests.dcp.states import emptied, same, state_of, trained, values
from tests.support.cli_runs import ckpt
from tests.support.waiting import until

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


def test_dcp_loads_what_a_checkpointer_saved(run_dir: Path) -> None:
    """Keys are the group and its keys, and with a group those of the group alone."""
    model, optimizer = trained()
    with Checkpointer(CheckpointConfig(checkpoint_dir=run_dir)) as ckpt_:
        ckpt_.save(5, {"model": model, "optimizer": optimizer, "epoch": 2})
    other, moments = trained(1)
    found = state_of(other, moments, epoch=0)
    load(found, storage_reader=CkptReader(run_dir))
    set_state_dict(other, moments, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    assert found["epoch"] == 2
    assert same(state_of(other, moments), state_of(model, optimizer))
    weights = emptied(dict(model.state_dict()))
    load(weights, storage_reader=CkptReader(run_dir, group="model"))
    assert same(weights, dict(model.state_dict()))


def test_names_of_every_form_come_back(run_dir: Path) -> None:
    """A flat model beside objects (torchtitan's form), names that no group can have, and names that would collide."""
    forms: list[dict[str, Any]] = [
        {"layers.0.w": torch.ones(2), "norm": torch.zeros(1), "optimizer": {"state.layers.0.w.step": torch.ones(())}},
        {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}, "rng": {"x": torch.ones(2)}, "7": 7},
        {"model": {"a": {"b": torch.ones(1)}, "n": 1}, "x.y": torch.zeros(2), "dcp": 3},
        {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.0), "list": [[torch.ones(1)], {"x": 1}]},
    ]
    for step, state in enumerate(forms, start=1):
        write(run_dir, state, step)
        found = emptied(state)
        load(found, storage_reader=CkptReader(run_dir, step=step))
        assert same(found, state), step


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


def test_a_lookup_table_beside_dcp(run_dir: Path) -> None:
    """DCP loads what is beside a table and its files as bytes, diff tells the rows; a save by DCP is refused."""
    model, users = torch.nn.Linear(4, 1), LookupTable(4)
    with Checkpointer(CheckpointConfig(checkpoint_dir=run_dir)) as ckpt_:
        for step in (1, 2):
            model(users(torch.arange(step * 10))).sum().backward()
            users.step()
            ckpt_.save(step, {"model": model, "users": users})
    place = str(run_dir)
    metadata = CkptReader(run_dir).read_metadata().state_dict_metadata
    assert {"users.count", "users.files.0", "model.weight"} <= metadata.keys()
    found = {"model": emptied(dict(model.state_dict())), "users": {"count": 0}}
    load(found, storage_reader=CkptReader(run_dir))
    assert same(found, {"model": dict(model.state_dict()), "users": {"count": 20}})
    assert "users/count" in ckpt("diff", f"{place}@1", f"{place}@2").out
    with pytest.raises(StateError, match="in no state_dict"):
        save({"model": model, "users": users}, storage_writer=CkptWriter(run_dir, step=3))


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


@pytest.mark.parametrize("kind", [*AsyncCheckpointerType])
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


def test_staged_memory_is_used_again_when_it_is_written() -> None:
    """Not before: of two saves under way each has memory of its own."""
    (first, staged), more = stage({"w": torch.ones(9)}), {"w": torch.zeros(9)}
    staged.free()
    second, third = stage(more)[0], stage(more)[0]
    assert second["w"].data_ptr() == first["w"].data_ptr() != third["w"].data_ptr()


def test_a_save_begun_anew_is_not_committed(run_dir: Path) -> None:
    """Of two saves under way at once the older one is given up, and says so."""
    held = held_run(CheckpointConfig(checkpoint_dir=run_dir))
    older, newer = held.begin(1, 1, None), held.begin(2, 1, None)
    for saving, text in ((older, "this save has not begun here"), (newer, None)):
        part = write_portions(
            store_of(CheckpointConfig(checkpoint_dir=run_dir)),
            saving.attempt,
            [],
            rank=0,
            world_size=1,
            total_bytes=0,
            total_items=0,
        )
        with pytest.raises(ConfigError, match=text) if text else contextlib.nullcontext():
            held.commit(saving, [part])
    assert [one.step for one in open_run(run_dir).checkpoints()] == [2]


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


class Narrow(DefaultLoadPlanner):
    """A planner of the user's, which gives a target that has another shape than its plan says."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor: torch.Tensor = super().resolve_tensor(read_item)
        return tensor[:2]


def test_a_target_of_another_shape_is_refused_by_name(run_dir: Path) -> None:
    """Nothing is read into it, nor into another target."""
    write(run_dir, {"a": torch.ones(3), "b": torch.ones(3)}, 1)
    found = {"a": torch.zeros(3), "b": torch.zeros(3)}
    with pytest.raises(CheckpointException, match=r"the target has \(2,\) of \(3,\) \(at a\)"):
        load(found, storage_reader=CkptReader(run_dir), planner=Narrow())
    assert same(found, {"a": torch.zeros(3), "b": torch.zeros(3)})


def test_retention_is_that_of_the_configuration(run_dir: Path) -> None:
    """Older checkpoints are retired by the same rules."""
    for step in range(1, 6):
        write(run_dir, {"w": torch.full((3,), float(step))}, step, max_num_checkpoints=2)
    until(lambda: [one.step for one in open_run(run_dir).checkpoints()] == [5, 4])


def test_steps_go_up(run_dir: Path) -> None:
    """A step that has been saved is refused, and so is a writer without a step, or with a number that is none."""
    write(run_dir, {"w": torch.ones(1)}, 5)
    with pytest.raises(CheckpointException, match="step 5 is not after step 5"):
        write(run_dir, {"w": torch.ones(1)}, 5)
    with pytest.raises(CheckpointException, match="needs its step"):
        save({"w": torch.ones(1)}, storage_writer=CkptWriter(run_dir))
    with pytest.raises(CheckpointException, match="a step is a whole number"):
        save({"w": torch.ones(1)}, storage_writer=CkptWriter(run_dir), checkpoint_id="at-20261127150000")


def test_ranks_that_save_alone_are_refused(run_dir: Path) -> None:
    """Each would have a checkpoint of its own: nothing is written."""
    with pytest.raises((CheckpointException, ConfigError), match="no common checkpoint"):
        save({"w": torch.ones(1)}, storage_writer=CkptWriter(run_dir, step=1), use_collectives=False)
    assert not run_dir.exists()


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
