"""How much memory a process may take: the machine's, and what is left of each limit of its container."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tasks.errors import StoreError
from ckpt_tasks.snapshot.memory import PrivateMemory
from ckpt_tasks.snapshot.room import available_bytes

GIB = 1 << 30


def root_of(tmp_path: Path, files: dict[str, str], *, groups: str) -> Path:
    """Make the files of a machine with 64 GiB available, in which this process is in some control groups."""
    files = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {64 << 20} kB\n", "proc/self/cgroup": groups, **files}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_without_limits_it_is_what_the_machine_has(tmp_path: Path) -> None:
    """No control group, one without a limit, and version 1's largest number leave the machine's memory."""
    assert available_bytes(root_of(tmp_path / "none", {}, groups="")) == 64 * GIB
    files = {"sys/fs/cgroup/a/memory.max": "max\n", "sys/fs/cgroup/a/memory.current": "5\n"}
    assert available_bytes(root_of(tmp_path / "v2", files, groups="0::/a\n")) == 64 * GIB
    files = {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}
    assert available_bytes(root_of(tmp_path / "v1", files, groups="4:memory:/\n")) == 64 * GIB


@pytest.mark.parametrize("groups", ["0::/\n", "0::/kubepods/pod1/c1\n"])
def test_a_containers_limit_counts(tmp_path: Path, groups: str) -> None:
    """Version 2: the limit less what is used, shared memory included; what it keeps of files could be dropped."""
    files = {
        "sys/fs/cgroup/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{7 * GIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon 1\nshmem {3 * GIB}\ninactive_file {2 * GIB}\n",
    }
    assert available_bytes(root_of(tmp_path, files, groups=groups)) == 3 * GIB


def test_the_tightest_group_above_counts(tmp_path: Path) -> None:
    """A pod's limit holds for its containers, also where these have more or none of their own."""
    files = {
        "sys/fs/cgroup/pod/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/pod/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/pod/c1/memory.max": f"{16 * GIB}\n",
        "sys/fs/cgroup/pod/c1/memory.current": f"{1 * GIB}\n",
    }
    assert available_bytes(root_of(tmp_path, files, groups="0::/pod/c1\n")) == GIB


def test_version_1_counts_as_well(tmp_path: Path) -> None:
    """Version 1 has other names, a mount of its own, and in a container a path that is only the host's."""
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/memory.stat": f"cache 5\ntotal_inactive_file {GIB // 2}\n",
    }
    root = root_of(tmp_path, files, groups="9:name=systemd:/\n4:memory:/docker/0123\n0::/\n")
    assert available_bytes(root) == GIB + GIB // 2


def test_a_group_that_is_full_leaves_nothing(tmp_path: Path) -> None:
    """Above its limit (it was lowered meanwhile) a group has nothing left, and not less than that."""
    files = {"sys/fs/cgroup/memory.max": f"{GIB}\n", "sys/fs/cgroup/memory.current": f"{2 * GIB}\n"}
    assert available_bytes(root_of(tmp_path, files, groups="0::/\n")) == 0


def test_without_proc_nobody_knows(tmp_path: Path) -> None:
    """In a chroot without /proc no shared memory is taken, and that is no error."""
    assert available_bytes(tmp_path) == 0


def test_private_memory_that_cannot_be_had_is_an_error_of_ours() -> None:
    """More than there are addresses: a StoreError that says how much was wanted, and what to give the process."""
    with pytest.raises(StoreError, match=r"no memory for a snapshot of 4611686018427387904 bytes.*ulimit -v"):
        PrivateMemory().take("a", {"x": 1 << 62})
