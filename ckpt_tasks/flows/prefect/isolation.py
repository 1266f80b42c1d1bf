"""Separate Prefect from training: its threads from the random streams, its state from forked processes.

Prefect's event client pings its server every 20 s from a thread. It draws a ping's payload with `random.getrandbits`
(found with Prefect 3.8.8, websockets 16.1).

Prefect clears its background services in a forked child but leaves their exit hooks, which then fail. So every
DataLoader worker ends with exit code 1, and the parent raises "worker exited unexpectedly" (measured with 3.8.8: five
of five loaders with `num_workers=2` within a task).
"""

from __future__ import annotations

import os
import threading
from functools import cache
from typing import Any

from ckpt_tasks.system import keep_out_of_streams


def keep_threads_out_of_streams() -> None:
    """Give Prefect's modules random numbers of their own; see `keep_out_of_streams`."""
    keep_out_of_streams("prefect", "websockets")


@cache
def keep_prefect_out_of_forks() -> None:
    """Remove the exit hooks of Prefect's services in every child that is forked from now on; the parent keeps them."""
    os.register_at_fork(after_in_child=_forget_exit_hooks)


def _forget_exit_hooks() -> None:
    # threading has no public way to remove a hook; a Python without this list has no such hooks.
    hooks: list[Any] = getattr(threading, "_threading_atexits", [])
    hooks[:] = [hook for hook in hooks if not is_prefects(hook)]


def is_prefects(hook: Any) -> bool:
    """Return True if a hook at the interpreter's exit calls a method of a Prefect object, also through a wrapper."""
    # Use __class__ instead of type(): Prefect's services may be behind proxies.
    owners = [getattr(function, "__self__", None) for function in _functions_of(hook)]
    return any(
        str(getattr(getattr(owner, "__class__", None), "__module__", "")).startswith("prefect.") for owner in owners
    )


def _functions_of(hook: Any) -> list[Any]:
    """Return the functions behind a hook: Python 3.11 wraps them in a partial, 3.12 and newer in a lambda."""
    return [getattr(hook, "func", hook), *(cell.cell_contents for cell in getattr(hook, "__closure__", None) or ())]
