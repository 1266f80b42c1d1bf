"""The table of runs below a root: one row for each run, made from its newest ledger entry.

While somebody uses the page, a thread looks at the runs repeatedly; otherwise it sends no request. On a disk, the time
of a directory shows whether its ledger is unchanged. In an object store, the thread lists the newest name of each
ledger, at a rate that does not grow with the number of runs.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_tasks.errors import CkptError, StoreError
from ckpt_tasks.format.keys import LEDGER_PREFIX
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.parsing import finite_json
from ckpt_tasks.process import in_threads
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.overview import Look, life_of, live_facts, look_at, places_of
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.port import Store, inner_store

_EVERY_S, _REQUESTS_PER_S = 1.0, 10
_ASKED_S = 30.0  # Without a request for this long, the thread pauses.
_FRESH_S = 2.0  # Ignore a directory's time if it is newer than this: a file system's clock may be so coarse.
_AT_ONCE = 16
_PARAMS_SHOWN, _PARAM_LENGTH = 100, 200


@dataclass(frozen=True)
class Row:
    """A run's row; `sign` identifies the state of its ledger.

    `look.state` has only the results of checks, and the owner if it may be alive.
    """

    facts: Mapping[str, Any]
    sign: object
    look: Look
    revision: int


class RunTable:
    """The rows of all runs; `since` answers from memory while a separate thread looks at the runs."""

    def __init__(self, root: Store):
        self.root, self.error = root, ""
        self.stores: dict[str, Store] = {}
        self._id = secrets.token_hex(8)
        self._rows: dict[str, Row] = {}
        self._gone: dict[str, int] = {}
        self._revision, self._looks = 0, 0
        self._changed = threading.Condition()
        self._asked_s = time.monotonic()

    def start(self) -> None:
        """Start the thread that looks at the runs."""
        threading.Thread(target=self._watch, name="ckpt-serve-table", daemon=True).start()

    def since(self, revision: int) -> dict[str, Any]:
        """Return the rows that changed after a revision, and the names of runs that no longer exist."""
        with self._changed:
            self._asked_s = time.monotonic()
            self._changed.notify_all()
            return {
                "server": self._id,
                "root": self.root.url,
                "missing": self.root.near and not Path(self.root.url).is_dir(),
                "revision": self._revision,
                "complete": self._looks > 0,
                "runs": len(self._rows),
                "error": self.error,
                "rows": [row.facts for row in self._rows.values() if row.revision > revision],
                "gone": [name for name, at in self._gone.items() if at > revision],
            }

    def looks(self, most_s: float) -> dict[str, Look]:
        """Return the newest summary of each run; if the thread has paused, wait up to `most_s` seconds for a look.

        Raises StoreError if no look has ended yet, or if the root cannot be listed.
        """
        with self._changed:
            rested = not self._looks or time.monotonic() - self._asked_s > _ASKED_S
            looks, self._asked_s = self._looks, time.monotonic()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not rested or self._looks > looks, most_s)
            if self.error or not self._looks:
                raise StoreError(self.error or "the runs have not been looked at yet")
            return {name: row.look for name, row in self._rows.items()}

    def look(self) -> None:
        """Look at every run once; if the store does not answer, keep the rows as they are and report it."""
        try:
            stores = places_of(self.root)
        except CkptError as error:
            self.error = str(error)
            return
        self.error, self.stores = "", {**stores}
        first = self._looks == 0
        threads = 1 if self.root.near else _AT_ONCE
        in_threads(lambda name: self._look_at(name, stores[name], first=first), stores, threads, "ckpt-serve")
        with self._changed:
            for name in self._rows.keys() - stores.keys():
                self._drop(name)
            self._looks += 1
            self._changed.notify_all()

    def pause_s(self, took_s: float) -> float:
        """Return how many seconds to wait after a look of `took_s` seconds: a store must get few requests a second."""
        # A look lists the root twice and each run once, and reads the heartbeat of an owner that may be alive.
        requests = 2 + sum(1 + (row.look.state.owner is not None) for row in [*self._rows.values()])
        return max(_EVERY_S, 0 if self.root.near else requests / _REQUESTS_PER_S, 3 * took_s)

    def _watch(self) -> None:
        while True:
            began_s = time.monotonic()
            self.look()
            took_s = time.monotonic() - began_s
            # The first look reads only a part of long lists, so the second one follows at once.
            due_s = began_s + took_s + (0 if self._looks == 1 else self.pause_s(took_s))
            with self._changed:
                while (now_s := time.monotonic()) < due_s or now_s - self._asked_s > _ASKED_S:
                    self._changed.wait(due_s - now_s if now_s < due_s else None)

    def _look_at(self, name: str, store: Store, *, first: bool) -> None:
        known = self._rows.get(name)
        sign = _sign_of(store)
        if known is not None and sign is not None and sign == known.sign:
            if known.look.state.owner is not None:
                self._look_for_life(name, known, store)
            return
        look = look_at(name, store, whole=not first)
        if look is None:
            with self._changed:
                self._drop(name)
            return
        facts, about = _facts(look), look.summary.state
        owner = look.state.owner if about in ("running", "silent") else None
        kept = State(owner=owner, checks=look.state.checks)
        again = look.partial or about == "unreadable"
        self._put(name, facts, None if again else sign, look._replace(state=kept))

    def _look_for_life(self, name: str, known: Row, store: Store) -> None:
        try:
            state, why = life_of(History(store), known.look.state)
        except CkptError as error:
            state, why = "unreadable", str(error)
        live = {"live_step": None, "live": {}} | live_facts(store, known.look.state, state, known.look.summary.step)
        look = known.look._replace(summary=replace(known.look.summary, state=state, why=why, **live))
        self._put(name, {**known.facts, "state": state, "why": why, **live}, known.sign, look)

    def _put(self, name: str, facts: Mapping[str, Any], sign: object, look: Look) -> None:
        with self._changed:
            known = self._rows.get(name)
            is_new = known is None or known.facts != facts
            self._revision += is_new
            revision = self._revision if known is None or is_new else known.revision
            self._rows[name] = Row(facts, sign, look, revision)
            self._gone.pop(name, None)

    def _drop(self, name: str) -> None:
        if self._rows.pop(name, None) is not None:
            self._revision += 1
            self._gone[name] = self._revision


def _sign_of(store: Store) -> object:
    """Return a value that changes with every new ledger entry; None if it is unknown, or changed a moment ago."""
    place = inner_store(store)
    try:
        if not isinstance(place, LocalStore):
            return tuple(store.names(LEDGER_PREFIX, limit=1)) or None
        times = [Path(place.root, part).stat().st_mtime_ns for part in ("", LEDGER_PREFIX)]
    except (OSError, CkptError):
        return None
    return None if time.time() - max(times) / 1e9 < _FRESH_S else tuple(times)


def _facts(look: Look) -> dict[str, Any]:
    """Return the summary of a run as JSON data for its row."""
    summary, state = asdict(look.summary), look.state
    if look.partial:
        summary |= {"checkpoints": None, "size_bytes": None}
    params = dict(list(flat_row(state.params or {}).items())[:_PARAMS_SHOWN])
    host = state.owner.host if state.owner else None
    facts: dict[str, Any] = finite_json({**summary, "program": state.program, "host": host, "params": params})
    return facts


def flat_row(params: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested parameters as one dict with dotted names; cut long values."""
    dotted: dict[str, Any] = {}
    for name, value in params.items():
        if isinstance(value, Mapping) and value:
            dotted |= flat_row(value, f"{above}{name}.")
        else:
            short = value if isinstance(value, int | float | None) else str(value)[:_PARAM_LENGTH]
            dotted[f"{above}{name}"] = short
    return dotted
