"""Trainings whose ranks kill themselves at a named moment, drawn from a seed, and what they tell the test before."""

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
from ckpt_tasks.checkpoint.ranks.exchange import StoreExchange
from ckpt_tasks.checkpoint.save.commit import Committer
from ckpt_tasks.checkpoint.save.rank_saver import RankSaver
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.storage.local import LocalStore
from tests.checkpoint.ranks.training import train
from tests.support.gang import report

PHASES = ("step", "snapshot", "put", "hand-over", "commit")
ANY_MOMENT, TWO_GANGS = "any moment", "two gangs"
STEPS = 8
_LONG_S, _SHORT_S = 60.0, 15.0  # that busy cores keep; where survivors have to end by themselves, they wait for it
_DURING_S = 0.002


class Death(NamedTuple):
    """Which ranks die: at which phase, the how-manieth time that they come to it, and when of it."""

    ranks: tuple[int, ...]
    phase: str
    time: int = 0
    when: str = ""  # before, during or after


class Life(NamedTuple):
    """How a gang trains until it is killed, or ends.

    `after_s`: at `ANY_MOMENT`, the test kills the ranks so long after the start.
    """

    death: Death
    waits: bool = False  # for every commit; else training goes on, and newer snapshots take the place of older ones
    pause_s: float = 0.0  # after every step
    keeps: int | None = None  # how many checkpoints
    takes_over: bool = False
    after_s: float = 0.0
    deadline_s: float = _LONG_S


class Plan(NamedTuple):
    """What happens to a run: the lives of its gangs, at once if there are `TWO_GANGS`, else one after the other."""

    seed: int
    size: int
    kind: str
    phase: str
    launcher: bool  # kills the others when one has died, as torchrun does; without one they must end by themselves
    lives: tuple[Life, ...]


def plan(seed: int) -> Plan:
    """Draw a run: every phase with two ranks and with four in each 14 seeds, a second death in every fourth run."""
    rng = random.Random(seed)
    every = (*PHASES, ANY_MOMENT, TWO_GANGS)
    phase, size = every[seed % len(every)], (2, 4)[seed // len(every) % 2]
    kind = rng.choice(["fsdp", "ddp"] if size == 2 else ["2d", "hsdp", "fsdp"])
    keeps = rng.choice([None, 2])
    launcher = phase == ANY_MOMENT or rng.random() < 0.75  # before the group is there, nobody else ends the others
    lives = [choose(rng, size, phase)]
    if phase == TWO_GANGS:
        lives = [life._replace(pause_s=0.2) for life in lives]
        lives.append(choose(rng, size, rng.choice(PHASES))._replace(takes_over=True))
    elif rng.random() < 0.25:
        lives.append(choose(rng, size, rng.choice(PHASES)))
    deadline_s = _LONG_S if launcher else _SHORT_S
    lives = [life._replace(keeps=keeps, deadline_s=deadline_s) for life in lives]
    return Plan(seed, size, kind, phase, launcher, tuple(lives))


def choose(rng: random.Random, size: int, phase: str) -> Life:
    """Draw one rank, some, or all; only rank 0 commits."""
    ranks = set(rng.sample(range(size), rng.choice([1, 1, rng.randint(1, size), size])))
    if phase == ANY_MOMENT:
        return Life(Death((*sorted(ranks),), phase), waits=rng.random() < 0.5, pause_s=0.1, after_s=rng.uniform(0, 2))
    phase = rng.choice(PHASES) if phase == TWO_GANGS else phase
    if phase == "commit" and 0 not in ranks:
        ranks = {0} | (ranks if len(ranks) > 1 else set())
    waits = rng.random() < 0.5
    times = STEPS - 1 if waits or phase in ("step", "snapshot") else 2
    when = rng.choice(["before", "during", "after"])
    return Life(Death((*sorted(ranks),), phase, rng.randint(1, 3 * times if phase == "put" else times), when), waits)


def train_and_die(rank: int, size: int, kind: str, root: str, life: Life) -> Any:
    """Train; report every commit, and the moment of the death right before it."""
    telling = threading.Lock()

    def tell(what: str, value: Any) -> None:
        with telling:
            report((what, value))

    _after(Committer, "commit", lambda committed, _: tell("commit", committed.entry.state.live[-1].step))
    if life.waits:
        _after(Checkpointer, "step", lambda taken, ckpt: ckpt.wait())
    _after(Checkpointer, "step", lambda taken, ckpt: time.sleep(life.pause_s))
    if rank in life.death.ranks and life.death.phase != ANY_MOMENT:
        moment = _Moment(life.death, tell)
        for owner, name, is_it in _CALLS[life.death.phase]:
            moment.wrap(owner, name, is_it)
    options = {"step_interval": 1, "flush_timeout_s": life.deadline_s, "max_num_checkpoints": life.keeps}
    return train(rank, size, kind, root, (STEPS, {**options, "take_over": life.takes_over}))


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
    return name.startswith("checkpoint_")


def _in_a_save(self: object, topic: str, *args: Any, **options: Any) -> bool:
    return "/save/" in topic


def _of_a_commit(self: object, event: dict[str, Any], *args: Any, **options: Any) -> bool:
    return bool(event["kind"] == "commit")


# The methods that are a phase, each with what says which of their calls are.
_CALLS: dict[str, list[tuple[type, str, Callable[..., bool]]]] = {
    "step": [(torch.optim.AdamW, "step", _always)],
    "snapshot": [(RankSaver, "fill", _always)],
    "put": [(LocalStore, "put", _of_a_save)],
    "hand-over": [(StoreExchange, "send", _in_a_save), (StoreExchange, "collect", _in_a_save)],
    "commit": [(History, "append", _of_a_commit)],
}
