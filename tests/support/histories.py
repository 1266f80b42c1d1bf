"""Ledgers with times of our choosing: real entries in a real directory, for what is read out of a run's history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from ckpt_tasks.format.keys import ledger_name, parse_ledger_name
from ckpt_tasks.format.ledger import Entry, State
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.port import Store, WrappedStore
from tests.support.ledgers import made, owner_of

LOST = "its owner, process 7 on this host, is gone"


class Told:
    """A run that is told entry by entry; `after` lets seconds pass before the next one."""

    def __init__(self, run_dir: Path, run_key: str = "lm-7", *, ago_s: float | None = None):
        self.history = History(LocalStore(run_dir))
        self.history.create(run_key)
        self.entries: list[Entry] = []
        self.metrics: Mapping[str, float] = {}  # Of each commit from now on.
        self._at = datetime(2026, 1, 1, tzinfo=UTC) if ago_s is None else datetime.now(UTC) - timedelta(seconds=ago_s)
        self._epoch = 0

    @property
    def state(self) -> State:
        return self.entries[-1].state if self.entries else State()

    def after(self, seconds: float) -> Told:
        self._at += timedelta(seconds=seconds)
        return self

    def taken(self, because: str = "it has had no owner") -> Told:
        before, self._epoch = self._epoch, self._epoch + 1
        owned = self.state.with_owner(owner_of(self._epoch), None, "min")
        return self._put({"kind": "owner", "because": because}, owned, before)

    def released(self) -> Told:
        return self._put({"kind": "release"}, self.state.released(), self._epoch)

    def commit(self, step: int, **observed: Any) -> Told:
        parent = self.state.live[-1].manifest_digest if self.state.live else None
        at = self._at.isoformat(timespec="milliseconds")
        checkpoint = replace(made(step, len(self.entries), parent), saved_at=at, metrics=self.metrics)
        kept = State(**{**vars(self.state), "live": self.state.live[-2:]})
        return self._put(
            {"kind": "commit", "step": step, **observed}, kept.with_checkpoint(checkpoint, frozenset()), self._epoch
        )

    def noted(self, what: str = "failure") -> Told:
        return self._put({"kind": "note", "note": what}, self.state, self._epoch)

    def evaluated(self) -> Told:
        return self._put({"kind": "evaluation", "suite": "quick", "step": 1}, self.state, self._epoch)

    def _put(self, event: Mapping[str, Any], state: State, epoch: int) -> Told:
        n = len(self.entries)
        entry = Entry(
            n=n,
            epoch=epoch,
            nonce=f"{n:032x}",
            previous=None,
            at=self._at.isoformat(timespec="milliseconds"),
            event=event,
            state=state,
        )
        self.history.store.put_if_absent(ledger_name(n), entry.to_bytes()[0])
        self.entries.append(entry)
        return self


def trained(told: Told, commits: int, *, every_s: float, steps: int, **observed: Any) -> Told:
    """Let a run commit so many times, a fixed time and number of steps apart."""
    first = told.state.live[-1].step if told.state.live else 0
    for n in range(1, commits + 1):
        told.after(every_s).commit(first + n * steps, **observed)
    return told


class ReadEntries(WrappedStore):
    """A store that writes down the numbers of the ledger entries that are read."""

    def __init__(self, inner: Store):
        super().__init__(inner)
        self.numbers: list[int] = []

    def get(self, name: str, max_bytes: int) -> bytes:
        n = parse_ledger_name(name)
        if n is not None:
            self.numbers.append(n)
        return super().get(name, max_bytes)
