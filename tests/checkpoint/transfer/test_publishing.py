"""Files for others get their name when they are whole: whatever fails, and whatever is there already."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.checkpoint.transfer import publishing
from ckpt_tasks.checkpoint.transfer.export import plan_export, write_export
from ckpt_tasks.errors import ConfigError, StoreError, UnsupportedStateError
from ckpt_tasks.format.layout import image
from ckpt_tasks.storage import local_fs
from tests.support.cli_runs import only, save, tree
from tests.support.exports import INDEX, about, export, loaded


class FailingSystem:
    """The module `os`, whose n-th call that changes the disk finds it full; `log` has the calls and their paths."""

    def __init__(self, n: int):
        self.failed = ""
        self.log: list[tuple[str, str]] = []
        self._left = n

    def __getattr__(self, name: str) -> Any:
        call = getattr(os, name)
        if name not in ("open", "pwrite", "fsync", "replace", "rename", "mkdir"):
            return call

        def counted(*arguments: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                self.failed = name
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            path = os.readlink(f"/proc/self/fd/{arguments[0]}") if type(arguments[0]) is int else str(arguments[-1])
            self.log.append((name, path if name != "open" else str(arguments[0])))
            return call(*arguments)

        return counted


def use(monkeypatch: pytest.MonkeyPatch, system: FailingSystem) -> None:
    monkeypatch.setattr(publishing, "os", system)
    monkeypatch.setattr(local_fs, "os", system)


@pytest.mark.parametrize("out", ["new.safetensors", "new", "old.safetensors", "old"])
def test_whichever_call_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    """P30, P37: with the n-th call failing, for every n: a clear error, nothing left over, never a part of a model."""
    run = save(tmp_path / "run", {"model": nn.Linear(4, 3)})
    digest = open_run(str(run)).find("latest").manifest_digest
    older = save(tmp_path / "older", {"w": {name: torch.zeros(1) for name in ("weight", "bias")}})
    how = {} if "." in out else {"max_shard_bytes": 16}
    n, failing = 0, FailingSystem(0)
    while n == 0 or failing.failed:
        n, failing = n + 1, FailingSystem(n + 1)
        rmtree(tmp_path / "out", ignore_errors=True)
        (tmp_path / "out").mkdir()
        if out.startswith("old"):
            export(older, tmp_path / "out" / out, groups=["w"])
        before = tree(tmp_path / "out")
        use(monkeypatch, failing)
        assert fails(lambda: export(run, tmp_path / "out" / out, overwrite=True, **how)) is bool(failing.failed)
        monkeypatch.undo()
        assert [*(tmp_path / "out").rglob(".*")] == []
        if tree(tmp_path / "out") != before:
            check_whole(tmp_path / "out" / out, digest, failing.failed)
    assert n > 5
    check_whole(tmp_path / "out" / out, digest, "")


def fails(call: Callable[[], object]) -> bool:
    """Say whether a call fails; if it does, then with an error that says what to do."""
    try:
        call()
    except StoreError as error:
        return error.errno == errno.ENOSPC and "Free space" in str(error)
    return False


def check_whole(out: Path, digest: str, failed: str) -> None:
    """Assert that an export is all of the new one; in a directory that was there, shards without an index may do."""
    if out.name == "old" and not (out / INDEX).exists():
        return
    assert failed in ("", "fsync", "open")  # of the directory that the new name is in
    files = [out] if out.is_file() else [*out.glob("*.safetensors")]
    assert {about(file)["manifest_digest"] for file in files} == {digest}
    nn.Linear(4, 3).load_state_dict(loaded(out))


def test_a_name_comes_after_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P35: files and their directory are fsynced before the rename, and the directory of the new name after it."""
    run = save(tmp_path / "run", {"model": nn.Linear(4, 3)})
    for out in (tmp_path / "m.safetensors", tmp_path / "m"):
        watching = FailingSystem(0)
        use(monkeypatch, watching)
        export(run, out)
        monkeypatch.undo()
        renamed = next(n for n, (name, _) in enumerate(watching.log) if name in ("rename", "replace"))
        made = {path for name, path in watching.log[:renamed] if name in ("open", "mkdir")}
        assert made == {path for name, path in watching.log[:renamed] if name == "fsync"}
        assert watching.log[renamed][1] == str(out)
        assert watching.log[-1] == ("fsync", str(tmp_path))


@pytest.fixture
def model_run(run_dir: Path) -> Path:
    return save(run_dir, {"model": nn.Linear(2, 2), "note": {"a": 1}})


@pytest.mark.parametrize("out", ["m.safetensors", "m"])
def test_what_is_there_is_not_overwritten_unasked(tmp_path: Path, model_run: Path, out: str) -> None:
    """P36: a name that is taken is refused, and what has it stays; asked to overwrite, it is replaced."""
    export(model_run, tmp_path / out)
    before = tree(tmp_path)
    run = open_run(str(model_run))
    with pytest.raises(ConfigError, match="exists"):  # before anything is read
        plan_export(run.history.store, run.find("latest"), tmp_path / out)
    assert tree(tmp_path) == before
    export(model_run, tmp_path / out, overwrite=True)
    assert tree(tmp_path) == before
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ConfigError):
        export(model_run, tmp_path / "link")


def test_weights_in_a_directory_are_replaced_and_the_rest_stays(tmp_path: Path, model_run: Path) -> None:
    """A directory with a model keeps its config; no shard and no single file of the old weights is left."""
    out = tmp_path / "out"
    export(model_run, out, max_shard_bytes=8)
    assert len([*out.glob("model-*")]) == 2
    (out / "config.json").write_text("{}")
    (out / "model-of-mine.safetensors").write_text("")
    (out / "model.safetensors").write_bytes((out / "model-00001-of-00002.safetensors").read_bytes())
    export(model_run, out, overwrite=True)
    mine = {"config.json", "model-of-mine.safetensors"}
    assert {p.name for p in out.iterdir()} == {"model-00001-of-00001.safetensors", INDEX} | mine


def test_the_run_directory_is_no_place_for_an_export(tmp_path: Path, model_run: Path) -> None:
    """P36: no export is written over what it reads from, also not through a link."""
    shard = only(model_run, "checkpoint_*/*/model-*")
    (tmp_path / "link").symlink_to(model_run)
    (tmp_path / "file.safetensors").symlink_to(shard)
    before = tree(model_run)
    for out in (
        shard,
        model_run,
        model_run / "new",
        tmp_path / "link" / "new.safetensors",
        tmp_path / "file.safetensors",
    ):
        with pytest.raises(ConfigError, match="run directory"):
            export(model_run, out, overwrite=True)
    assert tree(model_run) == before


@pytest.mark.parametrize(
    ("out", "how", "says"),
    [
        ("m.safetensors", {"groups": ["modle"]}, r"no group 'modle'.*It has model \(module\), note \(plain\), rng"),
        ("m.safetensors", {"groups": ["note"]}, "no tensors in note.*model"),
        ("m.safetensors", {"max_shard_bytes": 100}, "not cut into shards"),
        ("m", {"max_shard_bytes": 0}, "0 bytes are no size"),
        ("nowhere/m", {}, "is not a directory.*Create it"),
        ("folder.safetensors", {"overwrite": True}, "is a directory.*makes one file"),
        ("file", {"overwrite": True}, "is a file.*makes one file"),
    ],
)
def test_what_cannot_be_done_as_asked(tmp_path: Path, model_run: Path, out: str, how: Any, says: str) -> None:
    """A bad argument is a ConfigError that says what there is, and nothing is written."""
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=says):
        export(model_run, tmp_path / out, **how)
    assert sorted(tmp_path.rglob("*")) == before


def test_more_names_than_one_file_holds(tmp_path: Path, model_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P42: a header over the limit is refused with what to do."""
    monkeypatch.setattr(image, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(UnsupportedStateError, match=r"2 tensors need a header.*directory"):
        export(model_run, tmp_path / "m.safetensors")


@pytest.mark.parametrize("out", ["m.safetensors", "m"])
def test_a_name_that_is_taken_meanwhile_is_not_overwritten(tmp_path: Path, model_run: Path, out: str) -> None:
    """P36: between the plan and the end of the copy somebody else may take the name: it is theirs."""
    run = open_run(str(model_run))
    plan = plan_export(run.history.store, run.find("latest"), tmp_path / out)

    def take(_size_bytes: int) -> None:
        (tmp_path / out).write_text("theirs")

    with pytest.raises(ConfigError, match="exists"):
        write_export(run.history.store, plan, take)
    assert (tmp_path / out).read_text() == "theirs"
    assert sorted(tmp_path.iterdir()) == sorted([model_run, tmp_path / out])
