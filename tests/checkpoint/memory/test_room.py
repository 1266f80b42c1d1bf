"""How much memory a process may take: the machine's, and what is left of each limit of its container."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tasks.checkpoint.memory.memory import PrivateMemory
from ckpt_tasks.checkpoint.memory.memory_room import available_bytes
from ckpt_tasks.errors import StoreError

GIB = 1 << 30


def root_of(tmp_path: Path, files: dict[str, str], *, groups: str) -> Path:
    """Make the files of a machine with 64 GiB available, in which this process is in some control groups."""
    files = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {64 << 20} kB\n", "proc/self/cgroup": groups, **files}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def v2(group: str, limit: str, used_gib: int, **stat_gib: int) -> dict[str, str]:
    """Return the files of a control group of version 2."""
    place = f"sys/fs/cgroup{group}"
    stat = "".join(f"{name} {size * GIB}\n" for name, size in stat_gib.items())
    files = {f"{place}/memory.max": f"{limit}\n", f"{place}/memory.current": f"{used_gib * GIB}\n"}
    return files | ({f"{place}/memory.stat": stat} if stat else {})


V1 = "sys/fs/cgroup/memory/memory"
CASES: dict[str, tuple[str, dict[str, str], int]] = {
    "no group: the machine's": ("", {}, 64),
    "no limit": ("0::/a\n", v2("/a", "max", 1), 64),
    "version 1 without a limit": ("4:memory:/\n", {f"{V1}.limit_in_bytes": "9223372036854771712\n"}, 64),
    "files could be dropped, shared memory not": ("0::/\n", v2("", f"{8 * GIB}", 7, shmem=3, inactive_file=2), 3),
    "a group that is not seen from inside": ("0::/kubepods/c1\n", v2("", f"{8 * GIB}", 7, inactive_file=2), 3),
    "the tightest group above": ("0::/pod/c1\n", v2("/pod", f"{4 * GIB}", 3) | v2("/pod/c1", f"{16 * GIB}", 1), 1),
    "version 1 in a container": (
        "9:name=systemd:/\n4:memory:/docker/0123\n0::/\n",
        {
            f"{V1}.limit_in_bytes": f"{4 * GIB}\n",
            f"{V1}.usage_in_bytes": f"{2 * GIB}\n",
            f"{V1}.stat": f"cache 5\ntotal_inactive_file {GIB}\n",
        },
        3,
    ),
    "full, its limit was lowered": ("0::/\n", v2("", f"{GIB}", 2), 0),
}


@pytest.mark.parametrize("case", CASES)
def test_the_tightest_limit_counts(tmp_path: Path, case: str) -> None:
    """The limit less what is used; what the kernel keeps of files could be dropped. Without /proc nobody knows."""
    groups, files, gib = CASES[case]
    assert available_bytes(tmp_path) == 0
    assert available_bytes(root_of(tmp_path, files, groups=groups)) == gib * GIB


def test_private_memory_that_cannot_be_had_is_an_error_of_ours() -> None:
    """More than there are addresses: a StoreError that says how much was wanted, and what to give the process."""
    with pytest.raises(StoreError, match=r"no memory for a snapshot of 4611686018427387904 bytes.*ulimit -v"):
        PrivateMemory().take("a", {"x": 1 << 62})
