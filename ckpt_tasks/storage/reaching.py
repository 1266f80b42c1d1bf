"""The first answer of a far store, waited for as long as a person at a command line waits.

A run waits out an outage of minutes. A person has more often misspelled a name, or lacks credentials; and some clients
(Google's) search for credentials by themselves for minutes before they make a request.
"""

from __future__ import annotations

import threading
import time

from ckpt_tasks.errors import CkptError, ConfigError, StoreError
from ckpt_tasks.format.keys import FORMAT_NAME
from ckpt_tasks.storage.port import Store

__all__ = ["await_first_answer"]

_PAUSE_S = 0.5
_HINT = "Check its name, its endpoint, the credentials and the network; docs/STORES.md says where they come from."


def await_first_answer(store: Store, limit_s: float) -> None:
    """Return when a store has answered one small question, also with a refusal.

    Raises StoreError if it does not answer within `limit_s` seconds, ConfigError if it cannot be asked.
    """
    given_up, failure = threading.Event(), list[CkptError]()

    def ask() -> None:
        until_s = time.monotonic() + limit_s / 2
        while True:
            try:
                store.size(FORMAT_NAME)
            except CkptError as error:
                transient = isinstance(error, StoreError) and error.transient
                if not transient or time.monotonic() > until_s:
                    failure.append(error)
                    return
            else:
                return
            if given_up.wait(_PAUSE_S):
                return

    # A daemon: no client can be stopped while it searches, and the process ends without it.
    thread = threading.Thread(target=ask, name="ckpt-first-answer", daemon=True)
    thread.start()
    thread.join(limit_s)
    given_up.set()
    if thread.is_alive():
        raise StoreError(f"{store.url} did not answer within {limit_s:.0f} s", hint=_HINT)
    for error in failure:
        if isinstance(error, ConfigError):
            raise error
        if isinstance(error, StoreError) and error.transient:
            raise StoreError(f"{store.url} does not answer: {error.message}", hint=_HINT) from error
