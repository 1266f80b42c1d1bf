"""`ckpt import` of DCP's own directories, and `ckpt export --format dcp`."""

from __future__ import annotations

import io
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.dcp import CkptReader
from tests.integrations.dcp.states import emptied, same, state_of, trained
from tests.integrations.dcp.test_many_ranks import state_of as state_of_ranks
from tests.support.cli_runs import ckpt
from tests.support.gang import run
from tests.support.sweeps import quick_first

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
VALUES: dict[str, Any] = {"epoch": 3, "pair": (torch.ones(2), "x"), "set": {1, 2}, "big": 2**70, "none": None}


def test_a_directory_goes_in_and_out(tmp_path: Path) -> None:
    """What DCP loads of the export is what it was given, bit for bit; a Checkpointer goes on from the import."""
    model, optimizer = trained()
    state = state_of(model, optimizer, **VALUES)
    source, place, out = (str(tmp_path / name) for name in ("step-12", "run", "out"))
    save(state, checkpoint_id=source)
    done = ckpt("import", source, place, "--json")
    assert done.status == 0, done.err
    assert done.data["step"] == 12
    assert done.data["left"] == {}
    assert ckpt("verify", place).status == 0
    assert ckpt("export", place, out, "--format", "dcp").status == 0
    for options in ({"checkpoint_id": out}, {"storage_reader": CkptReader(place)}):
        found = emptied(state)
        load(found, **options)
        assert same(found, state)
    other, moments = trained(1)
    with Checkpointer(CheckpointConfig(checkpoint_dir=place)) as ckpt_:
        ckpt_.restore({"model": other, "optimizer": moments}, leave=[*VALUES])
    assert same(state_of(other, moments), state_of(model, optimizer))


def of_ranks(rank: int, size: int, place: str) -> None:
    warnings.simplefilter("ignore")
    save(state_of_ranks(rank, size, 4), storage_writer=FileSystemWriter(place))


def test_a_directory_of_three_ranks(tmp_path: Path) -> None:
    """Tensors are put together from the parts of all ranks; the export of a checkpoint of ours is one process's."""
    source, place, out = (str(tmp_path / name) for name in ("step-4", "run", "out"))
    run(3, of_ranks, source)
    assert ckpt("import", source, place).status == 0
    assert ckpt("export", place, out, "--format", "dcp").status == 0
    wanted = {**state_of_ranks(0, 1, 4), "own1": 1, "own2": 2}
    found = emptied(wanted)
    load(found, checkpoint_id=out)
    assert same(found, wanted)


class Hidden:
    """A class of the user's; whoever unpickles one makes a directory."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def test_nothing_in_it_is_executed(tmp_path: Path) -> None:
    """A value of a class is left, with the reason; metadata that names anything but DCP's own is refused."""
    source, place, hidden = tmp_path / "dcp", str(tmp_path / "run"), Hidden(tmp_path / "executed")
    save({"w": torch.ones(2), "h": hidden}, checkpoint_id=source)
    done = ckpt("import", source, place, "--json")
    assert list(done.data["left"]) == ["h"]
    (source / ".metadata").write_bytes(pickle.dumps(hidden, protocol=4))
    done = ckpt("import", source, str(tmp_path / "other"))
    assert done.status != 0
    assert "names posix.mkdir, which is not DCP's" in " ".join(done.err.split())
    assert not hidden.trace.exists()
    assert not (tmp_path / "other").exists()


def test_a_damaged_directory_is_refused(tmp_path: Path) -> None:
    """A bit that has flipped fails the CRC before anything is written."""
    source, other = tmp_path / "dcp", tmp_path / "run"
    save({"w": torch.arange(5000.0)}, checkpoint_id=source)
    (file,) = source.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    done = ckpt("import", source, other)
    assert done.status != 0
    assert "CRC" in done.err
    assert not other.exists()


Chunk = tuple[int, int, torch.Tensor | str]  # offset, length, and the record that the storage has for it
HALVES = torch.arange(4.0), torch.arange(4.0, 8.0)
GOOD: list[Chunk] = [(0, 4, HALVES[0]), (4, 4, HALVES[1])]
TAMPERED: dict[str, list[Chunk]] = {
    "chunks that overlap": [(0, 4, HALVES[0]), (2, 4, HALVES[1])],
    "a part shorter than its chunk": [GOOD[0], (4, 4, torch.ones(3))],
    "an empty part": [GOOD[0], (4, 4, torch.ones(0))],
    "a part longer than its chunk": [(0, 4, torch.ones(6)), GOOD[1]],
    "a part of other dimensions": [GOOD[0], (4, 4, torch.ones(2, 2))],
    "another tensor's record": [GOOD[0], (4, 4, "other")],
    "the same record twice": [GOOD[0], (4, 4, "w")],
    "a negative offset": [GOOD[0], (-4, 4, HALVES[1])],
    "one chunk listed twice": [GOOD[0], GOOD[0]],
    "a gap": [GOOD[0], (6, 2, torch.ones(2))],
}


def put(directory: Path, chunks: list[Chunk], file_name: str = "__0_0.distcp") -> None:
    """Write a DCP directory with a tensor "other" of 4 elements and a tensor "w" of 8, in these chunks of a file."""
    directory.mkdir(exist_ok=True)
    properties = TensorProperties(dtype=torch.float32)
    records: dict[str, _StorageInfo] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    with (directory / file_name).open("wb") as file:
        for number, (offset, _, record) in enumerate([(0, 4, torch.full((4,), 9.0)), *chunks]):
            name = "w" if number else "other"
            if isinstance(record, str):
                info = records[record]
            else:
                data = io.BytesIO()
                torch.save(record, data)
                info = _StorageInfo(file_name, file.tell(), len(data.getvalue()))
                file.write(data.getvalue())
                records.setdefault(name, info)
            storage[MetadataIndex(name, torch.Size([offset]))] = info
    listed = [ChunkStorageMetadata(torch.Size([offset]), torch.Size([length])) for offset, length, _ in chunks]
    whole = [ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))]
    described = {
        "other": TensorStorageMetadata(properties, torch.Size([4]), whole),
        "w": TensorStorageMetadata(properties, torch.Size([8]), listed),
    }
    metadata = Metadata(described, planner_data={"w": ("w",), "other": ("other",)}, storage_data=storage)  # type: ignore[arg-type]
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.slow
def test_a_directory_of_chunks_is_taken(tmp_path: Path) -> None:
    """The control of the next test: two chunks that tile a tensor are its values, for DCP and for an import."""
    put(tmp_path / "dcp", GOOD)
    found = {"w": torch.zeros(8)}
    load(found, checkpoint_id=tmp_path / "dcp")
    assert found["w"].tolist() == [*range(8)]
    assert ckpt("import", tmp_path / "dcp", tmp_path / "run").status == 0
    out = tmp_path / "w.safetensors"
    assert ckpt("export", tmp_path / "run", out).status == 0
    (values,) = (one for name, one in load_file(out).items() if name.endswith("w"))
    assert values.tolist() == [*range(8)]


@pytest.mark.parametrize("what", quick_first(TAMPERED, 2))
def test_parts_that_do_not_make_up_their_tensor_are_refused(what: str, tmp_path: Path) -> None:
    """No element comes from memory that was never written, from a neighbour's part or from another tensor."""
    put(tmp_path / "dcp", TAMPERED[what])
    done = ckpt("import", tmp_path / "dcp", tmp_path / "run")
    assert done.status != 0
    assert "Traceback" not in done.err
    assert any(word in done.err for word in ("make up the tensor", "not what its metadata says", "share the bytes"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["../outside", "inner/file"])
def test_metadata_that_leads_out_is_refused(name: str, tmp_path: Path) -> None:
    """P21: metadata names files beside it alone; a part in another directory is not read, though it is whole."""
    (tmp_path / "dcp" / "inner").mkdir(parents=True)
    put(tmp_path / "dcp", GOOD, name)
    done = ckpt("import", tmp_path / "dcp", tmp_path / "run")
    assert done.status != 0
    assert f"its metadata names {name!r}, which is no file beside it" in done.err
    assert not (tmp_path / "run").exists()
