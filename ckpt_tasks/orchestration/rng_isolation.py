"""Give the libraries that run in threads beside training random numbers of their own.

Prefect's event client pings its server every 20 s, in a thread, with a payload from `random.getrandbits`: from the
stream of the process, which is a part of training's state [found with Prefect 3.8.8 and websockets 16.1].
"""

from __future__ import annotations

import random
import sys

__all__ = ["keep_threads_out_of_streams"]

_LIBRARIES = frozenset({"prefect", "websockets"})
_OWN = random.Random()  # it has the functions of the module, on a stream of its own


def keep_threads_out_of_streams() -> None:
    """Let every loaded module of theirs that uses Python's `random` use a generator of their own from now on."""
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] in _LIBRARIES and vars(module).get("random") is random:
            module.random = _OWN  # type: ignore[attr-defined]
