"""What saves and restores uses no executor: Python shuts executors down before the last save of a process."""

from __future__ import annotations

from tests.house.sources import ROOT, files, imports, parse

# Commands, which end before the interpreter does.
COMMANDS = {"checkpoint/syncing.py", "checkpoint/transfer.py", "checkpoint/timeline.py", "storage/measuring.py"}
PROBE = "storage/probe.py"  # before a run's directory is made


def test_a_save_needs_no_executor() -> None:
    """P72: no module that a save, a restore or the interpreter's end goes through imports an executor."""
    found = {
        str(path.relative_to(ROOT / "ckpt_tasks"))
        for path in files("ckpt_tasks/checkpoint", "ckpt_tasks/state", "ckpt_tasks/storage")
        for _, name in imports(parse(path))
        if name.endswith("ThreadPoolExecutor")
    }
    assert found == {*COMMANDS, PROBE}
