"""Wait for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(true: Callable[[], object], timeout_s: float = 120, *, pause_s: float = 0.01) -> None:
    """Ask again and again until it is true; AssertionError if the time is over before."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"waited for {timeout_s:g} s in vain"
        time.sleep(pause_s)
