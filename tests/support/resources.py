"""What a process holds: counted by the kernel, once threads of ours that are about to end have ended."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Held(NamedTuple):
    """`files` are open ones; `buffers` what mmap(-1) and map_memory() map; `maps` of files in a directory."""

    files: int
    threads: int
    buffers: int
    buffer_bytes: int
    maps: int
    stored: int
    stored_bytes: int
    resident_bytes: int


def settled() -> None:
    """Wait for the threads of saves: they end by themselves, a moment after what they did was waited for."""
    gc.collect()
    until = time.monotonic() + 60
    while left := [t for t in threading.enumerate() if t.name.startswith(("ckpt-seal", "ckpt-flush", "ckpt-take"))]:
        assert time.monotonic() < until, left
        time.sleep(0.001)


def held(directory: Path | None = None) -> Held:
    """Count what this process holds, and what it maps of a directory and stores there."""
    settled()
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    buffers = list(_buffers(Path("/proc/self/smaps").read_text(encoding="utf-8")))
    stored = [path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file()] if directory else []
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return Held(
        files=len(os.listdir("/proc/self/fd")),
        threads=_number("Threads", status),
        buffers=len(buffers),
        buffer_bytes=sum(buffers),
        maps=sum(f" {directory}/" in line for line in lines),
        stored=len(stored),
        stored_bytes=sum(stored),
        resident_bytes=_number("VmRSS", status) << 10,
    )


def _buffers(smaps: str) -> Iterator[int]:
    """Yield the sizes of mappings that are shared anonymous memory, or that have no file and are not for children."""
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.MULTILINE):
        if mapping:
            span, *rest = mapping.partition("\n")[0].split()
            begin, end = (int(text, 16) for text in span.split("-"))
            not_for_children = re.search(r"^VmFlags:.* dc\b", mapping, flags=re.MULTILINE)
            if "/dev/zero" in rest[-1] or (not_for_children and len(rest) < 5):
                yield end - begin


def _number(field: str, status: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+)", status, flags=re.MULTILINE)
    assert found is not None
    return int(found[1])
