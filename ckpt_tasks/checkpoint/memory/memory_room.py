"""How much memory this process may still take, given the machine and the process's container.

Shared memory counts towards a container's limit: a process that fills /dev/shm beyond it is killed, even if /dev/shm
has free space.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (it is not a temporary file: that it outlives the process is the point)
_ROOM = 1.05  # Free memory must be this many times the size of two snapshots.
_V1_NO_LIMIT_BYTES = 1 << 62  # Version 1 writes "no limit" as the largest number of whole pages.


def available_bytes(root: Path = _ROOT) -> int:
    """Return the bytes available on the machine, or less if a control group of this process allows less.

    Returns 0 without /proc, which is the only source.
    """
    try:
        with open(root / "proc/meminfo", encoding="ascii") as lines:
            machine = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except OSError:
        return 0
    return max(0, min([machine, *_left_by_groups(root)]))


def default_directory(size_bytes: int) -> Path | None:
    """Return /dev/shm if it, the machine and the container have room for two snapshots of this size, else None."""
    if not SHARED_MEMORY.is_dir():
        return None
    status = os.statvfs(SHARED_MEMORY)
    free_bytes = min(status.f_bavail * status.f_frsize, available_bytes())
    return SHARED_MEMORY if free_bytes > _ROOM * size_bytes * 2 else None


def _left_by_groups(root: Path) -> Iterator[int]:
    """Yield the bytes left in every control group with a limit; page cache that the group can drop counts as left."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit, used, droppable = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            droppable = "total_inactive_file"
        else:
            continue
        # In a container the group itself may be mounted at `mount`, whatever its path on the host.
        group = mount / path.lstrip("/")
        for directory in [group, *group.parents]:
            if directory.is_relative_to(mount):
                most = _text(directory / limit).strip()
                if most.isdigit() and int(most) < _V1_NO_LIMIT_BYTES:
                    yield int(most) - _number(directory / used) + _field(directory / "memory.stat", droppable)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # This system has no such control groups.


def _number(path: Path) -> int:
    text = _text(path).strip()
    return int(text) if text.isdigit() else 0


def _field(path: Path, name: str) -> int:
    for line in _text(path).splitlines():
        field, _, value = line.partition(" ")
        if field == name and value.isdigit():
            return int(value)
    return 0
