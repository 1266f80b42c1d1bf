"""Wait for what another thread or process does."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path


def until(true: Callable[[], object], timeout_s: float = 120, *, pause_s: float = 0.01) -> None:
    """Ask again and again until it is true, after a while less often; AssertionError if the time is over before."""
    began = time.monotonic()
    while not true():
        waited_s = time.monotonic() - began
        assert waited_s < timeout_s, f"waited for {timeout_s:g} s in vain"
        time.sleep(max(pause_s, min(waited_s / 20, 50 * pause_s)))


def until_taken(pid: int, number: signal.Signals) -> None:
    """Wait until a process has taken a signal that was sent to it: its main thread hears of it next."""

    def pending() -> int:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return sum(
            1 << number - 1 & int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))
        )

    until(lambda: not pending())
