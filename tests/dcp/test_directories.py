"""`ckpt import` of DCP's own directories, and `ckpt export --format dcp`."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.dcp import CkptReader
from tests.dcp.states import emptied, same, state_of, trained
from tests.dcp.test_many_ranks import state_of as state_of_ranks
from tests.support.cli_runs import ckpt
from tests.support.gang import run

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
