"""Files that want to run code, lead out of their directory, or take all memory: refused, with nothing written."""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckpt_tasks.checkpoint.transfer.importing.plan import plan_import
from ckpt_tasks.errors import CkptError, ConfigError, IntegrityError, UnsupportedStateError
from tests.support.cli_runs import ckpt
from tests.support.sweeps import quick_first

WEIGHTS = {"weight": torch.arange(77, dtype=torch.float32), "bias": torch.ones(3)}


class Command:
    """Pickled, it is a call that makes a file."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def refused(source: Path, run_dir: Path, error: type[CkptError], *words: str) -> None:
    """Import a source; it must be refused by this error, before the run directory is made."""
    before = sorted(source.parent.rglob("*"))
    with pytest.raises(error) as caught:
        plan_import(source)
    assert [word for word in words if word not in str(caught.value)] == []
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
    mark, source = tmp_path / "mark", tmp_path / "a" / "weights.pt"
    source.parent.mkdir()
    torch.save({"model": WEIGHTS, "more": Command(mark)}, source)
    refused(source, run_dir, UnsupportedStateError, "posix.system", "weights.pt")
    assert not mark.exists()
    torch.load(source, weights_only=False)  # the file is what it is said to be
    assert mark.exists()


def header(entries: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def f32(begin: int, end: int, shape: list[int]) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def about(metadata: object) -> bytes:
    return header({"__metadata__": metadata, "a": f32(0, 4, [1])}, bytes(4))


SAFETENSORS = {
    "a header of 2⁶³ bytes": (struct.pack("<Q", 1 << 63) + b'{"a":1}', "claims"),
    "a header over the bound": (struct.pack("<Q", (16 << 20) + 1) + b'{"a":1}' + b" " * (16 << 20), "claims"),
    "offsets past the end": (header({"a": f32(0, 400, [100])}, bytes(40)), "end at"),
    "offsets that overlap": (header({"a": f32(0, 8, [2]), "b": f32(4, 12, [2])}, bytes(12)), "overlap"),
    "a gap": (header({"a": f32(0, 8, [2]), "b": f32(12, 20, [2])}, bytes(20)), "gap"),
    "another size than its shape": (header({"a": f32(0, 8, [1 << 60])}, bytes(8)), "does not have"),
    "negative offsets": (header({"a": f32(-8, 0, [2])}), "malformed"),
    "more dimensions than torch has": (header({"a": f32(0, 4, [1] * 70)}, bytes(4)), "does not have"),
    "JSON that nests": (struct.pack("<Q", 20000) + b'{"a":' + b"[" * 19995 + bytes(8), "malformed"),
    "metadata that are no texts": (about({"a": 0}), "malformed"),
    "ties that are a number": (about({"ckpt_tasks": "7"}), "malformed"),
    "a view that it is not": (about({"ckpt_tasks": '{"tied":{},"dtypes":{"a":"complex128"}}'}), "complex128"),
}


@pytest.mark.parametrize("case", quick_first(SAFETENSORS, 2))
def test_a_safetensors_file_that_lies(tmp_path: Path, run_dir: Path, case: str) -> None:
    """P42: a header that says what cannot be is an error before memory is taken for it."""
    data, word = SAFETENSORS[case]
    (tmp_path / "a.safetensors").write_bytes(data)
    refused(tmp_path / "a.safetensors", run_dir, IntegrityError, word)


INDEXES = {
    **{
        json.dumps({"weight_map": {"weight": name, "bias": name}}): "not a file beside it"
        for name in ("../secret.safetensors", "/etc/passwd", "sub/b.safetensors", "..", "", "a\0b")
    },
    **dict.fromkeys(["[]", '{"weight_map": 7}', "[" * 100_000, '{"weight_map": {"a": "b"}}', "\xff"], "index"),
    '{"weight_map": {"weight": "a.safetensors", "more": "a.safetensors"}}': "more",
    " " * ((64 << 20) + 1): "more than",
}


@pytest.mark.parametrize("number", quick_first(range(len(INDEXES)), 2))
def test_an_index_that_leads_elsewhere(tmp_path: Path, run_dir: Path, number: int) -> None:
    """P42: an index is one, of bounded size, and names files beside it only that have what it says."""
    directory = tmp_path / "model"
    (directory / "sub").mkdir(parents=True)
    for place in (tmp_path / "secret", directory / "sub" / "b", directory / "a"):
        save_file(WEIGHTS, place.with_suffix(".safetensors"))
    body, word = [*INDEXES.items()][number]
    (directory / "model.safetensors.index.json").write_text(body, encoding="latin-1")
    refused(directory, run_dir, IntegrityError, word)


def scripted(path: Path) -> None:
    made: Any = torch.jit.script(torch.nn.Linear(2, 2))
    made.save(path)


OTHERS: dict[str, tuple[Callable[[Path], Any], type[CkptError], str]] = {
    "a class": (lambda at: torch.save({"args": io.BytesIO, **WEIGHTS}, at), UnsupportedStateError, "_io.BytesIO"),
    "a huge tensor": (lambda at: torch.save({"a": torch.ones(1).expand(1 << 50)}, at), IntegrityError, "claim"),
    "a pipe": (os.mkfifo, ConfigError, "not a regular file"),
    "a text": (lambda at: at.write_bytes(b"weights " * 9), ConfigError, "neither"),
    "an old format": (
        lambda at: torch.save(WEIGHTS, at, _use_new_zipfile_serialization=False), ConfigError, "before 1.6",
    ),
    "TorchScript": (scripted, ConfigError, "TorchScript"),
    "a list": (lambda at: torch.save([1, 2], at), ConfigError, "a value of type list"),
    "nothing": (lambda at: at.write_bytes(header({})), ConfigError, "nothing"),
}  # fmt: skip


@pytest.mark.parametrize("what", quick_first(OTHERS, 2))
def test_what_is_no_file_of_weights(tmp_path: Path, run_dir: Path, what: str) -> None:
    """A pipe is not waited for, a class is named, and what is neither format is said to be neither."""
    make, error, word = OTHERS[what]
    source = tmp_path / ("a.safetensors" if what == "nothing" else "a.pt")
    make(source)
    refused(source, run_dir, error, word)
