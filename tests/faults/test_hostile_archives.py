"""Archives that contradict themselves: refused or read as the library reads them, within bounds, before any write."""

from __future__ import annotations

import os
import re
import shutil
import warnings
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from safetensors import safe_open
from safetensors.torch import save_file

from ckpt_tasks import open_run
from ckpt_tasks.checkpoint.importing import ImportedRun
from ckpt_tasks.checkpoint.transfer.importing.plan import plan_import
from ckpt_tasks.checkpoint.transfer.importing.sources import Source, SourceTensor, open_source
from ckpt_tasks.errors import CkptError, IntegrityError
from ckpt_tasks.state.tensors.tensors import same_bits
from tests.faults.archives import BOMBS, PLACES, bomb, safetensors_files, torch_files, unzipped, zipped
from tests.faults.judged import judged
from tests.support.cli_runs import config
from tests.support.sweeps import quick_first, strides


def imported(source: Path, run_dir: Path) -> str:
    """Import; an error of ours is an answer, and leaves nothing behind."""
    warnings.simplefilter("ignore")
    try:
        plan = plan_import(source)
        ImportedRun(config(run_dir, memory_dir=None)).add(plan)
    except CkptError as error:
        return f"{type(error).__name__}: {error}" + (", and a run was begun" if run_dir.exists() else "")
    compare(open_source(source), source)
    return "imported"


def compare(source: Source, path: Path) -> None:
    """Fail if the library of its format reads anything else."""
    values = source.values
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as opened:
            theirs: Any = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        values = {name: values[name] for name in theirs}  # without the names of ties
    else:
        theirs = torch.load(path, weights_only=True, map_location="cpu")
    same(source, values, theirs)


def same(source: Source, ours: Any, theirs: Any) -> None:
    if isinstance(ours, SourceTensor):
        assert bytes(ours.file.read(ours.begin, ours.end)) == bytes(
            theirs.contiguous().reshape(-1).view(torch.uint8).tolist()
        )
    elif isinstance(theirs, torch.Tensor):
        dense = theirs.layout is torch.strided
        assert type(ours) is type(theirs)
        assert same_bits(source.copied(ours), theirs) if dense else torch.equal(ours.to_dense(), theirs.to_dense())
    elif isinstance(theirs, Mapping):
        assert [*map(repr, ours)] == [*map(repr, theirs)]
        for one, other in zip(ours.values(), theirs.values(), strict=True):
            same(source, one, other)
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            same(source, one, other)
    else:
        assert type(ours) is type(theirs)
        assert repr(ours) == repr(theirs)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("archives")


def answer(place: Path, data: bytes, suffix: str) -> str:
    """Write a file to a directory of its own, and import it."""
    shutil.rmtree(place / "run", ignore_errors=True)
    source = place / f"a.{suffix}"
    source.write_bytes(data)
    told = judged(lambda: imported(source, place / "run"))
    assert "a run was begun" not in told
    return told


@settings(max_examples=settings().max_examples // 2)
@given(data=torch_files())
def test_a_zip_file_that_contradicts_itself(place: Path, data: bytes) -> None:
    """P21: a drawn torch.save file is refused in an error of ours, or is what `torch.load` reads."""
    answer(place, data, "pt")


@settings(max_examples=settings().max_examples // 2)
@given(data=safetensors_files())
def test_a_header_that_contradicts_itself(place: Path, data: bytes) -> None:
    """P21: a drawn safetensors file is refused in an error of ours, or is what safetensors reads."""
    answer(place, data, "safetensors")


# What no other bound would stop at this size.
REFUSED = {"deep lists": "a cycle of them"} | dict.fromkeys(("keys of one hash", "a set of one hash"), "have one hash")


@pytest.mark.parametrize("where", PLACES)
@strides(11)
def test_a_few_bytes_that_stand_for_many(place: Path, where: str, stride: int) -> None:
    """P42: a pickle of some hundred kilobytes takes neither minutes nor gigabytes, wherever its value stands."""
    version = {"name": "a/version", "data": b"3"}
    some = [*BOMBS][[*PLACES].index(where) % stride :: stride]
    for name in {*some, *(REFUSED if where == "value" else ())}:
        told = answer(place, zipped([{"name": "a/data.pkl", "data": bomb(name, where, 50)}, version]), "pt")
        if where == "value" and name in REFUSED:
            assert REFUSED[name] in told


WRONG: dict[str, tuple[str, Any, str]] = {
    "shorter": ("a/data/0", lambda entry: {"data": entry["data"][:-4]}, "not the 12 that its pickle says"),
    "longer": ("a/data/0", lambda entry: {"data": entry["data"] + bytes(4)}, "not the 12 that its pickle says"),
    "other bytes": ("a/data/1", lambda entry: {"data": bytes(20), "crc": zlib.crc32(entry["data"])}, "a/data/1|data/1"),
    "another pickle": ("a/data.pkl", lambda entry: {"crc": 7}, "CRC"),
    "another order": ("a/byteorder", lambda entry: {"data": b"big", "crc": zlib.crc32(b"little")}, "CRC"),
    "no CRC": ("a/data/0", lambda entry: {"crc": 0}, ""),
    "two directories": ("", lambda entry: {}, "no single directory at its end"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_record_is_what_the_file_says(tmp_path: Path, run_dir: Path, wrong: str) -> None:
    """A record shorter than its pickle claims, with another CRC, or that one reader alone sees, is not imported.

    A CRC of 0 is what torch writes with `set_crc32_options(False)`.
    """
    name, change, words = WRONG[wrong]
    torch.save({"bias": torch.ones(3), "weight": torch.arange(5.0)}, tmp_path / "a.pt")
    entries = unzipped((tmp_path / "a.pt").read_bytes())
    changed = [e | change(e) if e["name"] == name else e for e in entries]
    (tmp_path / "a.pt").write_bytes(zipped(changed, wrong))
    told = imported(tmp_path / "a.pt", run_dir)
    assert re.search(words, told)
    assert told.startswith("imported") is not bool(words)


@pytest.mark.parametrize("suffix", quick_first(["pt", "safetensors"]))
def test_a_source_that_is_cut_meanwhile(tmp_path: Path, run_dir: Path, suffix: str) -> None:
    """A file that another process cuts while it is imported is an error of ours, whenever: no signal, no commit."""
    weights = {name: torch.ones(1 << 18) for name in "abc"}
    source = tmp_path / f"a.{suffix}"

    def look(late: int) -> str:
        plan = plan_import(source)
        reads = iter(range(1000))
        try:
            ImportedRun(config(run_dir, memory_dir=None)).add(plan, lambda _: cut() if next(reads) == late else None)
        except IntegrityError as error:
            return str(error)
        return "imported"

    def cut() -> None:
        os.truncate(source, 4096)

    for late in range(1, 12, 3):  # 9 records of a torch.save file are compared before any is written
        (torch.save if suffix == "pt" else save_file)(weights, source)
        assert "a." in judged(partial(look, late))
        assert not run_dir.exists() or open_run(str(run_dir)).checkpoints() == []
