"""A training whose ranks kill themselves at a named moment, and what it tells the test before."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ckpt_tasks import Checkpointer
from ckpt_tasks.ledger.history import History
from ckpt_tasks.ranks.exchange import StoreExchange
from ckpt_tasks.saving.committer import Committer
from ckpt_tasks.saving.rank_saver import RankSaver
from ckpt_tasks.storage.local import LocalStore
from tests.ranks.training import train
from tests.support.gang import report

PHASES = ("step", "snapshot", "put", "hand-over", "commit")
STEPS = 8
DEADLINE_S = 3.0
_DURING_S = 0.002


class Death(NamedTuple):
    """Which ranks die: at which phase, the how-manieth time that they come to it, and when of it."""

    ranks: tuple[int, ...]
    phase: str
    time: int
    when: str  # before, during or after
    waits: bool  # for every commit; else training goes on, and newer snapshots take the place of older ones


def choose(seed: int, size: int, phase: str) -> Death:
    """Draw one rank, some, or all; only rank 0 commits."""
    rng = random.Random(f"{seed}/{size}/{phase}")
    ranks = set(rng.sample(range(size), rng.choice([1, 1, rng.randint(1, size), size])))
    if phase == "commit" and 0 not in ranks:
        ranks = {0} | (ranks if len(ranks) > 1 else set())
    waits = rng.random() < 0.5
    times = STEPS - 1 if waits or phase in ("step", "snapshot") else 2
    when = rng.choice(["before", "during", "after"])
    return Death((*sorted(ranks),), phase, rng.randint(1, 3 * times if phase == "put" else times), when, waits)


def train_and_die(rank: int, size: int, kind: str, root: str, death: Death) -> Any:
    """Train; report every commit, and the moment of the death right before it."""
    telling = threading.Lock()

    def tell(what: str, value: Any) -> None:
        with telling:
            report((what, value))

    _after(Committer, "commit", lambda _, committer: tell("commit", committer.line.last_commit.step))
    if death.waits:
        _after(Checkpointer, "step", lambda taken, ckpt: ckpt.wait())
    if rank in death.ranks:
        moment = _Moment(death, tell)
        for owner, name, is_it in _CALLS[death.phase]:
            moment.wrap(owner, name, is_it)
    return train(rank, size, kind, root, (STEPS, {"step_interval": 1, "flush_timeout_s": DEADLINE_S}))


def _after(owner: type, name: str, call: Callable[[Any, Any], None]) -> None:
    real = getattr(owner, name)

    @functools.wraps(real)
    def wrapped(*args: Any, **options: Any) -> Any:
        result = real(*args, **options)
        call(result, args[0])
        return result

    setattr(owner, name, wrapped)


class _Moment:
    """Count the calls of a phase, and kill this process at one of them."""

    def __init__(self, death: Death, tell: Callable[[str, Any], None]):
        self._death = death
        self._tell = tell
        self._count = 0
        self._lock = threading.Lock()

    def wrap(self, owner: type, name: str, is_it: Callable[..., bool]) -> None:
        real = getattr(owner, name)

        @functools.wraps(real)
        def wrapped(*args: Any, **options: Any) -> Any:
            if not is_it(*args, **options) or not self._reached():
                return real(*args, **options)
            self._tell("hit", (self._death.phase, name))
            if self._death.when == "before":
                self._die()
            if self._death.when == "during":
                threading.Thread(target=self._die_soon, daemon=True).start()
            result = real(*args, **options)
            self._die()
            return result

        setattr(owner, name, wrapped)

    def _reached(self) -> bool:
        with self._lock:
            self._count += 1
            return self._count == self._death.time

    def _die_soon(self) -> None:
        time.sleep(random.uniform(0, _DURING_S))
        self._die()

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def _always(*args: Any, **options: Any) -> bool:
    return True


def _of_a_save(self: object, name: str, *args: Any, **options: Any) -> bool:
    return name.startswith(("save/", "checkpoint_"))


def _of_a_commit(self: object, event: dict[str, Any], *args: Any, **options: Any) -> bool:
    return bool(event["kind"] == "commit")


# The methods that are a phase, each with what says which of their calls are.
_CALLS: dict[str, list[tuple[type, str, Callable[..., bool]]]] = {
    "step": [(torch.optim.AdamW, "step", _always)],
    "snapshot": [(RankSaver, "fill", _always)],
    "put": [(LocalStore, "put", _of_a_save)],
    "hand-over": [(StoreExchange, "agree", _of_a_save)],
    "commit": [(History, "append", _of_a_commit)],
}
