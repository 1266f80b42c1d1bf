"""Keep Prefect out of training: its threads out of the random streams, its state out of forked processes.

Prefect's event client pings its server every 20 s, in a thread, with a payload from `random.getrandbits`: from the
stream of the process, which is a part of training's state [found with Prefect 3.8.8 and websockets 16.1].

Prefect clears its background services in a forked child but leaves their exit hooks, which then fail on what was
cleared: every worker ends with exit code 1, and the DataLoader raises "worker exited unexpectedly" in the parent
[measured with 3.8.8: five of five loaders with `num_workers=2` within a task].
"""

from __future__ import annotations

import os
import random
import sys
import threading
from functools import cache
from typing import Any

__all__ = ["keep_prefect_out_of_forks", "keep_threads_out_of_streams"]

_LIBRARIES = frozenset({"prefect", "websockets"})
_OWN = random.Random()  # it has the functions of the module, on a stream of its own


def keep_threads_out_of_streams() -> None:
    """Let every loaded module of theirs that uses Python's `random` use a generator of their own from now on."""
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] in _LIBRARIES and vars(module).get("random") is random:
            module.random = _OWN  # type: ignore[attr-defined]


@cache
def keep_prefect_out_of_forks() -> None:
    """Forget, in every child that is forked from now on, the exit hooks of Prefect's services; the parent runs them."""
    os.register_at_fork(after_in_child=_forget_exit_hooks)


def _forget_exit_hooks() -> None:
    # threading has no public way to take a hook back; where the list is gone, its hooks are as well.
    hooks: list[Any] = getattr(threading, "_threading_atexits", [])
    hooks[:] = [hook for hook in hooks if not _is_prefects(hook)]


def _is_prefects(hook: Any) -> bool:
    # __class__, not type(): Prefect's services may stand behind proxies
    owners = [getattr(function, "__self__", None) for function in _called_by(hook)]
    return any(str(getattr(getattr(one, "__class__", None), "__module__", "")).startswith("prefect.") for one in owners)


def _called_by(hook: Any) -> list[Any]:
    """Return the functions behind a hook: Python 3.11 wraps one into a partial, 3.12 and newer into a lambda."""
    return [getattr(hook, "func", hook), *(cell.cell_contents for cell in getattr(hook, "__closure__", None) or ())]
