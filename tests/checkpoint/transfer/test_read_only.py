"""A run that this process may read and not write: forks and copies of it, and what the doctor says."""

from __future__ import annotations

import ctypes
import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckpt_tasks import open_run
from ckpt_tasks.checkpoint.restore.leasing import renewed_lease
from ckpt_tasks.errors import StoreError
from ckpt_tasks.run.upkeep.verifying import verify_run_directory
from tests.support.cli_runs import ckpt, save_steps

_STRANGER = 65534


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a directory that another user reaches, and temporary ones; pytest's own are for one user alone."""
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    with tempfile.TemporaryDirectory(prefix="ckpt-tasks-read-only-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


@contextmanager
def as_reader(run_dir: Path, target: Path) -> Iterator[None]:
    """Let the kernel refuse this thread every write to the run while the block runs, also where root runs the tests."""
    for path in (run_dir, *run_dir.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    target.mkdir(mode=0o777)
    target.chmod(0o777)
    root = os.geteuid() == 0
    libc = ctypes.CDLL(None, use_errno=True)
    if root:
        libc.setfsuid(_STRANGER)  # of this thread, and of those that it starts
    try:
        with pytest.raises(PermissionError):
            (run_dir / "ledger" / "new").touch()
        yield
    finally:
        if root:
            libc.setfsuid(0)
        for path in (run_dir, *run_dir.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)


def test_a_source_that_cannot_be_written_is_read(place: Path) -> None:
    """A fork and a copy of it are whole, both say that there was no lease, and nothing of the source has changed.

    It is verified too, and the answer says that the run does not keep the result.
    """
    run_dir = save_steps(place / "run", 1, 2)
    ckpt("fork", run_dir, place / "warm")  # modules are imported as root
    ckpt("sync", run_dir, place / "warmer")
    before = {str(path): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    with as_reader(run_dir, place / "to"):
        forked = ckpt("fork", f"{run_dir}@2", place / "to" / "fork")
        copied = ckpt("sync", run_dir, place / "to" / "copy")
        told = ckpt("sync", run_dir, place / "to" / "json", "--json")
        verified = ckpt("verify", run_dir)
    assert (forked.status, copied.status) == (0, 0), forked.err + copied.err
    assert "read without a lease" in forked.out
    assert "read without a lease" in copied.out
    assert told.data["leased"] is False
    assert verified.status == 0, verified.err
    assert "The run does not keep this result: " in verified.out
    for name in ("fork", "copy"):
        assert verify_run_directory(open_run(str(place / "to" / name)).history).good
    assert {c.step for c in open_run(str(place / "to" / "copy")).checkpoints()} == {1, 2}
    assert {str(path): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    assert "lease" not in ckpt("sync", run_dir, place / "to" / "again").out


def test_only_a_denied_lease_is_done_without(place: Path) -> None:
    """A store that fails otherwise is an error: its checkpoint could be pruned while it is read."""
    run = open_run(str(save_steps(place / "run", 1)))
    checkpoint = run.find("latest")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # EFBIG
    try:
        with pytest.raises(StoreError), renewed_lease(run, checkpoint, "a test"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not run.read_only
