"""The table of runs below a root: a row for each run, made from its newest ledger entry and renewed with it.

A thread looks repeatedly while somebody uses the page, and sends no request otherwise. The time of a directory on a
disk shows that nothing was added to a ledger. A server is asked for the newest names of each ledger, at a rate that
does not grow with the number of runs.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckpt_tasks.errors import CkptError
from ckpt_tasks.format.keys import LEDGER_PREFIX
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.parsing import finite_json
from ckpt_tasks.format.records import Owner
from ckpt_tasks.ledger.history import History
from ckpt_tasks.process.processes import in_threads
from ckpt_tasks.reading.overview import Look, life_of, look_at, places_of
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.port import Store, unwrapped

_EVERY_S, _REQUESTS_PER_S = 1.0, 10
_ASKED_S = 30.0  # Without a request for this long, the thread pauses.
_FRESH_S = 2.0  # A file system's clock may be this coarse: a newer time proves nothing.
_AT_ONCE = 16
_PARAMS_SHOWN, _PARAM_LENGTH = 100, 200


@dataclass(frozen=True)
class Row:
    """A run's row; `sign` identifies the state of its ledger, `owner` is its owner until the release."""

    facts: Mapping[str, Any]
    sign: object
    owner: Owner | None
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
                "revision": self._revision,
                "complete": self._looks > 0,
                "runs": len(self._rows),
                "error": self.error,
                "rows": [row.facts for row in self._rows.values() if row.revision > revision],
                "gone": [name for name, at in self._gone.items() if at > revision],
            }

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

    def _watch(self) -> None:
        while True:
            began_s = time.monotonic()
            self.look()
            took_s = time.monotonic() - began_s
            least_s = _EVERY_S if self.root.near else len(self.stores) / _REQUESTS_PER_S
            with self._changed:
                # The first look reads only a part of long lists, so the second one follows at once.
                self._changed.wait(0 if self._looks == 1 else max(_EVERY_S, least_s, 3 * took_s))
                while time.monotonic() - self._asked_s > _ASKED_S:
                    self._changed.wait()

    def _look_at(self, name: str, store: Store, *, first: bool) -> None:
        known = self._rows.get(name)
        sign = _sign_of(store)
        if known is not None and sign is not None and sign == known.sign:
            if known.owner is not None:
                self._look_for_life(name, known, store)
            return
        look = look_at(name, store, whole=not first)
        if look is None:
            with self._changed:
                self._drop(name)
            return
        owner = look.state.owner
        alive = owner if look.summary.state in ("running", "silent") else None
        self._put(name, _facts(look), None if look.partial else sign, alive)

    def _look_for_life(self, name: str, known: Row, store: Store) -> None:
        try:
            state, why = life_of(History(store), State(owner=known.owner))
        except CkptError as error:
            state, why = "unreadable", str(error)
        self._put(name, {**known.facts, "state": state, "why": why}, known.sign, known.owner)

    def _put(self, name: str, facts: Mapping[str, Any], sign: object, owner: Owner | None) -> None:
        with self._changed:
            known = self._rows.get(name)
            is_new = known is None or known.facts != facts
            self._revision += is_new
            revision = self._revision if known is None or is_new else known.revision
            self._rows[name] = Row(facts, sign, owner, revision)
            self._gone.pop(name, None)

    def _drop(self, name: str) -> None:
        if self._rows.pop(name, None) is not None:
            self._revision += 1
            self._gone[name] = self._revision


def _sign_of(store: Store) -> object:
    """Return a value that changes with every new ledger entry; None if it is unknown, or changed a moment ago."""
    place = unwrapped(store)
    if not isinstance(place, LocalStore):
        return tuple(store.names(LEDGER_PREFIX, limit=1)) or None
    try:
        times = [Path(place.root, part).stat().st_mtime_ns for part in ("", LEDGER_PREFIX)]
    except OSError:
        return None
    return None if time.time() - max(times) / 1e9 < _FRESH_S else tuple(times)


def _facts(look: Look) -> dict[str, Any]:
    """Return the summary of a run as JSON data for its row."""
    summary, state = asdict(look.summary), look.state
    if look.partial:
        summary |= {"checkpoints": None, "size_bytes": None}
    params = dict(list(flat(state.params or {}).items())[:_PARAMS_SHOWN])
    host = state.owner.host if state.owner else None
    facts: dict[str, Any] = finite_json({**summary, "program": state.program, "host": host, "params": params})
    return facts


def flat(params: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested parameters as one dict with dotted names; cut long values."""
    dotted: dict[str, Any] = {}
    for name, value in params.items():
        if isinstance(value, Mapping) and value:
            dotted |= flat(value, f"{above}{name}.")
        else:
            short = value if isinstance(value, int | float | None) else str(value)[:_PARAM_LENGTH]
            dotted[f"{above}{name}"] = short
    return dotted
