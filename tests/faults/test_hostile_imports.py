"""Files that want to run code, lead out of their directory, or take all memory: refused, with nothing written."""

from __future__ import annotations

import io
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckpt_tasks.errors import CkptError, ConfigError, IntegrityError, UnsupportedStateError
from ckpt_tasks.importing.plan import plan_import
from tests.support.cli_runs import ckpt

WEIGHTS = {"weight": torch.arange(77, dtype=torch.float32), "bias": torch.ones(3)}


class Command:
    """Pickled, it is a call that makes a file."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def header(entries: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def f32(begin: int, end: int, shape: list[int]) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def refused(source: Path, run_dir: Path, error: type[CkptError], *words: str) -> None:
    """Import a source; it must be refused by this error, before the run directory is made."""
    before = sorted(source.parent.rglob("*"))
    with pytest.raises(error) as caught:
        plan_import(source)
    for word in words:
        assert word in str(caught.value)
    answer = ckpt("import", source, run_dir)
    assert answer.status == 1
    assert "error:" in answer.err
    assert not run_dir.exists()
    assert sorted(source.parent.rglob("*")) == before


@pytest.mark.parametrize("forced", [False, True])
def test_a_pickle_that_calls_something(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch, forced: bool
) -> None:
    """P21: the global that a pickle names is in the error, and is not called, whatever torch's environment says."""
    if forced:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    mark = tmp_path / "mark"
    source = tmp_path / "a" / "weights.pt"
    source.parent.mkdir()
    torch.save({"model": WEIGHTS, "more": Command(mark)}, source)
    refused(source, run_dir, UnsupportedStateError, "posix.system", "weights.pt")
    assert not mark.exists()
    torch.load(source, weights_only=False)  # the file is what it is said to be
    assert mark.exists()


def test_a_class_of_somebody_is_named(tmp_path: Path, run_dir: Path) -> None:
    """A harmless class is refused by its name, too, and the hint says what to save instead."""
    source = tmp_path / "a.pt"
    torch.save({"model": WEIGHTS, "args": io.BytesIO}, source)
    refused(source, run_dir, UnsupportedStateError, "_io.BytesIO", "state_dict")


SAFETENSORS = {
    "a header of 2⁶³ bytes": (struct.pack("<Q", 1 << 63) + b'{"a":1}', "claims"),
    "a header over the bound": (struct.pack("<Q", (16 << 20) + 1) + b'{"a":1}' + b" " * (16 << 20), "claims"),
    "a header that ends late": (struct.pack("<Q", 4096) + b'{"a":1}', "claims 4096"),
    "offsets past the end": (header({"a": f32(0, 400, [100])}, bytes(40)), "end at"),
    "offsets that overlap": (header({"a": f32(0, 8, [2]), "b": f32(4, 12, [2])}, bytes(12)), "overlap"),
    "a gap": (header({"a": f32(0, 8, [2]), "b": f32(12, 20, [2])}, bytes(20)), "gap"),
    "another size than its shape": (header({"a": f32(0, 8, [1 << 60])}, bytes(8)), "does not have"),
    "negative offsets": (header({"a": f32(-8, 0, [2])}), "malformed"),
    "more dimensions than torch has": (header({"a": f32(0, 4, [1] * 70)}, bytes(4)), "does not have"),
    "JSON that nests": (struct.pack("<Q", 20000) + b'{"a":' + b"[" * 19995 + bytes(8), "malformed"),
    "no tensors": (header({}), "nothing"),
    "ties that are a number": (
        header({"__metadata__": {"ckpt_tasks": "7"}, "a": f32(0, 4, [1])}, bytes(4)),
        "malformed",
    ),
    "a view that it is not": (
        header(
            {"__metadata__": {"ckpt_tasks": '{"tied":{},"dtypes":{"a":"complex128"}}'}, "a": f32(0, 4, [1])}, bytes(4)
        ),
        "complex128",
    ),
}


@pytest.mark.parametrize("case", SAFETENSORS)
def test_a_safetensors_file_that_lies(tmp_path: Path, run_dir: Path, case: str) -> None:
    """A header that says what cannot be is an error before memory is taken for it."""
    data, word = SAFETENSORS[case]
    source = tmp_path / "a.safetensors"
    source.write_bytes(data)
    refused(source, run_dir, ConfigError if case == "no tensors" else IntegrityError, word)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/b.safetensors", "..", "", "a\0b"])
def test_an_index_that_leads_elsewhere(tmp_path: Path, run_dir: Path, name: str) -> None:
    """An index names files beside it only; a path in it is an error, also where there is such a file."""
    save_file(WEIGHTS, tmp_path / "secret.safetensors")
    directory = tmp_path / "model"
    (directory / "sub").mkdir(parents=True)
    save_file(WEIGHTS, directory / "sub" / "b.safetensors")
    index = {"metadata": {}, "weight_map": {"weight": name, "bias": name}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(directory, run_dir, IntegrityError, "not a file beside it")


@pytest.mark.parametrize("body", ["[]", "{}", '{"weight_map": 7}', "[" * 100_000, '{"weight_map": {"a": "b"}}', "\xff"])
def test_an_index_that_is_none(tmp_path: Path, run_dir: Path, body: str) -> None:
    """An index of another form, or one that names what is not there, is an error."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors.index.json").write_text(body, encoding="latin-1")
    refused(tmp_path / "model", run_dir, IntegrityError, "index")


def test_an_index_of_any_size(tmp_path: Path, run_dir: Path) -> None:
    """An index above the bound is refused before it is read."""
    (tmp_path / "model").mkdir()
    with (tmp_path / "model" / "model.safetensors.index.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    refused(tmp_path / "model", run_dir, IntegrityError, "more than")


def test_an_index_whose_tensor_is_elsewhere(tmp_path: Path, run_dir: Path) -> None:
    """A shard that lacks a tensor which the index says it has is an error that names both."""
    directory = tmp_path / "model"
    directory.mkdir()
    save_file({"weight": torch.ones(2)}, directory / "a.safetensors")
    index = {"weight_map": {"weight": "a.safetensors", "bias": "a.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(directory, run_dir, IntegrityError, "bias", "a.safetensors")


def test_a_pickle_of_a_huge_tensor(tmp_path: Path, run_dir: Path) -> None:
    """A tensor that repeats one element 2⁵⁰ times claims more than the file has."""
    source = tmp_path / "a.pt"
    torch.save({"a": torch.ones(1).expand(1 << 50)}, source)
    refused(source, run_dir, IntegrityError, "claim")


def test_what_is_no_file(tmp_path: Path, run_dir: Path) -> None:
    """A pipe is not waited for, and what is neither format is said to be neither."""
    os.mkfifo(tmp_path / "a.pt")
    refused(tmp_path / "a.pt", run_dir, ConfigError, "not a regular file")
    (tmp_path / "b.pt").write_bytes(b"weights " * 9)
    refused(tmp_path / "b.pt", run_dir, ConfigError, "neither")
    torch.save(WEIGHTS, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    refused(tmp_path / "old.pt", run_dir, ConfigError, "before 1.6")
    scripted: Any = torch.jit.script(torch.nn.Linear(2, 2))
    scripted.save(tmp_path / "script.pt")
    refused(tmp_path / "script.pt", run_dir, ConfigError, "TorchScript")
    torch.save([1, 2], tmp_path / "list.pt")
    refused(tmp_path / "list.pt", run_dir, ConfigError, "a value of type list")
