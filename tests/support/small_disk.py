"""Small file systems that can be filled up to the last byte, or the last file."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest

__all__ = ["fill_with_bytes", "fill_with_files", "small_disk"]


@contextmanager
def small_disk(at: Path, kind: str = "tmpfs", *, size: str = "8m", nr_inodes: int = 400) -> Iterator[Path]:
    """Mount a file system of that size for the block; skip the test where this user may not."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    at.mkdir()
    if kind == "ext4":
        image = at.with_suffix(".image")
        made = ["mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0", "-N", str(nr_inodes), str(image), size]
        if subprocess.run(made, capture_output=True, check=False).returncode:
            pytest.skip("no mkfs.ext4 here")
        command = ["mount", "-o", "loop", str(image), str(at)]
    else:
        command = ["mount", "-t", kind, "-o", f"size={size},nr_inodes={nr_inodes}", kind, str(at)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", at], check=True)


def fill_with_bytes(disk: Path) -> None:
    """Write to a new file until not one byte more fits."""
    number = next(n for n in count() if not (disk / f"ballast-{n}").exists())
    fd = os.open(disk / f"ballast-{number}", os.O_CREAT | os.O_WRONLY)
    for piece in (1 << 20, 1 << 16, 4096, 1):
        with suppress(OSError):
            while True:
                os.write(fd, bytes(piece))
                os.fsync(fd)
    os.close(fd)


def fill_with_files(disk: Path) -> None:
    """Make empty files until there is room for none."""
    (disk / "empty").mkdir()
    with suppress(OSError):
        for n in count():
            (disk / f"empty/{n}").touch()
