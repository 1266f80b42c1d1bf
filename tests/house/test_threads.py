"""What saves and restores uses no executor: Python shuts executors down before the last save of a process."""

from __future__ import annotations

from tests.house.sources import ROOT, files, imports, parse

# Commands, which end before the interpreter does.
COMMANDS = {
    "copying/syncing.py",
    "copying/transfer.py",
    "ledger/timeline.py",
    "reading/overview.py",
    "storage/measuring.py",
}
ROOMS = ("storage", "state", "ledger", "reading", "snapshot", "upkeep", "copying", "saving", "checkpoint")
PROBE = "storage/probe.py"  # before a run's directory is made


def test_a_save_needs_no_executor() -> None:
    """P72: no module that a save, a restore or the interpreter's end goes through imports an executor."""
    found = {
        str(path.relative_to(ROOT / "ckpt_tasks"))
        for path in files(*(f"ckpt_tasks/{room}" for room in ROOMS))
        for _, name in imports(parse(path))
        if name.endswith("ThreadPoolExecutor")
    }
    assert found == {*COMMANDS, PROBE}
