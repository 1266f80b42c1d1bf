"""A run lives through anything, beside a plain model of it: the form is icechunk's stateful test.

The model knows what was committed after what. What it asks of the disk after every step: each live checkpoint
verifies unless the model damaged it, everything that is named is there, and everything that is there is named (by a
live checkpoint or by the ledger as retired) or belongs to an attempt that is known to have failed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.errors import CheckpointNotFoundError, CkptError, FencedError, NoGoodCheckpointError
from ckpt_tasks.format.keys import parse_attempt
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.run.upkeep.verifying import verify_checkpoint
from ckpt_tasks.testing import Fate, FaultyStore, die, settle
from tests.support.places import LocalPlace, MemoryPlace, Place
from tests.support.runs import (
    EXPECTED,
    UNTOUCHED,
    fingerprint,
    head_of,
    named_by,
    on_disk,
    opened,
    prefix_of,
    run_of,
    state_of,
)
from tests.support.sweeps import SLOW, SOAK, quick_first

LAST_STEP = max(EXPECTED)


@dataclass
class Known:
    """A checkpoint as the model knows it: `parent` is the one that its training went on from."""

    step: int
    parent: str | None
    n: int
    good: bool = True


class RunMachine(RuleBasedStateMachine):
    """One run directory, the process that holds it, one that may have lost it, and the model."""

    def __init__(self) -> None:
        super().__init__()
        self.place = self.new_place()
        self.ckpt: Checkpointer | None = None
        self.zombie: Checkpointer | None = None
        self.known: dict[str, Known] = {}
        self.last: str | None = None  # the commit that the run's line ends with
        self.at: str | None = None  # the checkpoint that the present process trains from
        self.position = 0
        self.pins: set[str] = set()
        self.crashed = False  # attempts of dead processes may lie about until the next owner sweeps
        self.had_good = False
        self.options: dict[str, Any] = {}

    def new_place(self) -> Place:
        raise NotImplementedError

    @initialize(most=st.sampled_from([1, 2, 3, None]), every=st.sampled_from([None, 5]))
    def begin(self, most: int | None, every: int | None) -> None:
        self.options = {"max_num_checkpoints": most, "keep_every_n_steps": every}

    # ── the model ────────────────────────────────────────────────────────────────────────────────────────

    def live(self) -> dict[str, Checkpoint]:
        return {c.manifest_digest: c for c in head_of(self.place).live}

    def line(self) -> list[str]:
        """Return the run's line, newest first, as the model knows it."""
        found, at = [], self.last
        while at is not None:
            found.append(at)
            at = self.known[at].parent
        return found

    def order(self) -> list[str]:
        """Return what is live in the order in which a restore must try it."""
        live, line = self.live(), self.line()
        rest = sorted((d for d in live if d not in line), key=lambda d: -self.known[d].n)
        return [digest for digest in line if digest in live] + rest

    def learn(self) -> None:
        """Take up a commit that the model has not seen: a process may die before it can say that it committed."""
        new = [c for digest, c in self.live().items() if digest not in self.known]
        assert len(new) <= 1
        for checkpoint in new:
            assert checkpoint.parent == self.at
            self.known[checkpoint.manifest_digest] = Known(checkpoint.step, checkpoint.parent, checkpoint.n)
            self.last = checkpoint.manifest_digest

    def took(self, checkpoint: Checkpoint) -> None:
        self.learn()
        assert checkpoint.manifest_digest == self.last
        self.at, self.position = self.last, checkpoint.step

    def process(self) -> Checkpointer:
        """Return the process that holds the directory; a new one restores first, as every process must."""
        if self.ckpt is None:
            self.ckpt = self.open()
            self.restore_into(self.ckpt)
        return self.ckpt

    def restore_into(self, ckpt: Checkpointer) -> None:
        good = [digest for digest in self.order() if self.known[digest].good] if on_disk(self.place) else []
        target = state_of(UNTOUCHED)
        if not good and self.live():
            with pytest.raises(NoGoodCheckpointError):
                ckpt.restore(target)
            assert fingerprint(target) == fingerprint(state_of(UNTOUCHED))
            self.start_anew()
            return
        step = ckpt.restore(target)
        if good:
            assert ckpt.last_restore is not None
            assert step == self.known[good[0]].step
            assert fingerprint(target) == EXPECTED[step]
            skipped = self.order()[: self.order().index(good[0])]
            assert [passed for passed, _ in ckpt.last_restore.skipped] == [self.known[d].step for d in skipped]
        self.at, self.position = (good[0] if good else None), step

    def start_anew(self) -> None:
        """Give up a run of which nothing is left."""
        self.abandon()
        self.place.remove()
        self.known, self.pins = {}, set()
        self.last = self.at = self.zombie = None
        self.position, self.crashed, self.had_good = 0, False, False
        self.ckpt = self.open()
        assert self.ckpt.restore(state_of(UNTOUCHED)) == 0

    def abandon(self) -> None:
        """Let the process die: nothing is released."""
        if self.ckpt is not None:
            die(self.ckpt)
        self.ckpt = None

    def open(self, *, take_over: bool = False) -> Checkpointer:
        """Open the run, over a store whose requests may fail."""
        self.store = FaultyStore(self.place.store)
        return opened(self.place, store=self.store, take_over=take_over, **self.options)

    # ── what happens ─────────────────────────────────────────────────────────────────────────────────────

    @rule(stride=st.integers(0, 3))
    def save(self, stride: int) -> None:
        ckpt = self.process()
        step = min(self.position + stride, LAST_STEP)
        saved = ckpt.save(step, state_of(step))
        settle(ckpt)  # it goes on behind: what follows would be another story each time
        self.took(saved)

    # Several threads write the data, so that a count over all calls would not mean the same call twice.
    @rule(
        stride=st.integers(1, 3),
        n=st.integers(1, 14),
        below=st.sampled_from(["^checkpoint_", "^ledger"]),
        fate=st.sampled_from(["refused", "unanswered"]),
    )
    def crash_while_saving(self, stride: int, n: int, below: str, fate: Fate) -> None:
        ckpt = self.process()
        self.store.on(fate, verb="put put_if_absent delete", name=below, skip=n - 1, times=1)
        step = min(self.position + stride, LAST_STEP)
        try:
            ckpt.save(step, state_of(step))
        except CkptError:
            self.crashed = True
        settle(ckpt)
        self.learn()
        self.abandon()

    @rule()
    def die_and_restore(self) -> None:
        self.abandon()
        self.process()

    @rule()
    def close(self) -> None:
        self.process().close()
        self.ckpt = None

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        ckpt = self.process()
        steps = sorted({c.step for digest, c in self.live().items() if self.known[digest].good})
        if not steps:
            return
        step = data.draw(st.sampled_from(steps), label="step")
        first = next(digest for digest in self.order() if self.known[digest].step == step)
        target = state_of(UNTOUCHED)
        if not self.known[first].good:  # a step that was saved twice: the newer one was asked for, and it is damaged
            with pytest.raises(NoGoodCheckpointError):
                ckpt.restore(target, step=step)
            return
        assert ckpt.restore(target, step=step) == step
        assert fingerprint(target) == EXPECTED[step]
        self.at, self.position = first, step

    @rule(step=st.integers(0, LAST_STEP))
    def ask_for_what_is_not_there(self, step: int) -> None:
        ckpt = self.process()
        if step in {c.step for c in self.live().values()}:
            return
        target = state_of(UNTOUCHED)
        with pytest.raises(CheckpointNotFoundError):
            ckpt.restore(target, step=step)
        assert fingerprint(target) == fingerprint(state_of(UNTOUCHED))

    @rule()
    def prune(self) -> None:
        ckpt = self.process()
        ckpt.acquire()
        verdicts = ckpt.prune()
        live = self.live()
        kept = {verdict.manifest_digest for verdict in verdicts if verdict.keep}
        assert kept <= live.keys()
        assert all(verdict.reasons for verdict in verdicts)

    @rule()
    def plan_to_prune(self) -> None:
        ckpt = self.process()
        before = on_disk(self.place)
        ckpt.prune(dry_run=True)
        assert on_disk(self.place) == before

    @precondition(lambda self: self.known)
    @rule(data=st.data(), on=st.booleans())
    def pin(self, data: st.DataObject, on: bool) -> None:
        ckpt = self.process()
        if not self.live():
            return
        step = data.draw(st.sampled_from(sorted({c.step for c in self.live().values()})), label="step")
        first = next(digest for digest in self.order() if self.known[digest].step == step)
        ckpt.acquire()
        if on:
            ckpt.pin(step, "by the test")
            self.pins.add(first)
        else:
            ckpt.unpin(step)
            self.pins.discard(first)

    @rule()
    def take_over(self) -> None:
        self.zombie = self.process()
        self.ckpt = fresh = self.open(take_over=True)
        self.restore_into(fresh)

    @precondition(lambda self: self.zombie is not None)
    @rule(verb=st.sampled_from(["save", "prune", "pin", "note"]))
    def the_zombie_wakes(self, verb: str) -> None:
        zombie = self.zombie
        assert zombie is not None
        if self.ckpt is zombie or not self.live():
            return
        before, live = on_disk(self.place), self.live()
        verbs: dict[str, Callable[[], object]] = {
            "save": lambda: zombie.save(LAST_STEP, state_of(LAST_STEP)),
            "prune": zombie.prune,
            "pin": lambda: zombie.pin(next(iter(live.values())).step),
            "note": lambda: zombie.note("failure"),
        }
        with pytest.raises(FencedError):
            verbs[verb]()
        assert self.live() == live
        assert before <= on_disk(self.place)
        written = on_disk(self.place) - before
        if verb == "save" and not isinstance(self.place, LocalPlace):
            # Its last look at a server may be younger than the loss (decision 0084).
            assert len({parse_attempt(name) for name in written}) <= 1
            assert not any(name.startswith(prefix_of(checkpoint)) for name in written for checkpoint in live.values())
            self.crashed = self.crashed or bool(written)
        else:
            assert not written

    @precondition(lambda self: self.last is not None)
    @rule(data=st.data())
    def damage_the_newest(self, data: st.DataObject) -> None:
        newest = self.live().get(self.order()[0]) if self.live() else None
        if newest is None or not self.known[newest.manifest_digest].good:
            return
        name = data.draw(st.sampled_from(sorted(named_by(self.place, newest))), label="file")
        body = bytearray(self.place.get(name))
        body[data.draw(st.integers(0, 10**6), label="byte") % len(body)] ^= 16
        self.place.put(name, bytes(body))
        for digest, checkpoint in self.live().items():  # what has not changed is shared
            if digest == newest.manifest_digest or name in checkpoint.reuses or name.startswith(prefix_of(checkpoint)):
                self.known[digest].good = False
        self.had_good = any(self.known[digest].good for digest in self.live())
        self.abandon()

    # ── what always holds ────────────────────────────────────────────────────────────────────────────────

    @invariant()
    def what_is_live_is_whole(self) -> None:
        store = self.place.store
        for digest, checkpoint in self.live().items():
            assert (verify_checkpoint(store, checkpoint) == []) is self.known[digest].good

    @invariant()
    def what_lies_there_is_named(self) -> None:
        state = head_of(self.place)
        prefixes = tuple(prefix_of(checkpoint) for checkpoint in state.live)
        data = {name for name in on_disk(self.place) if parse_attempt(name)}
        unnamed = {name for name in data if not name.startswith(prefixes or ("-",))} - set(state.retired)
        unnamed -= {name for checkpoint in state.live for name in checkpoint.reuses}
        assert self.crashed or not unnamed
        for checkpoint in state.live:
            if self.known[checkpoint.manifest_digest].good:
                named = named_by(self.place, checkpoint)
                assert named <= data
                own = {name for name in data if name.startswith(prefix_of(checkpoint))}
                shared = {name for other in state.live for name in other.reuses} | set(state.retired)
                assert own - shared <= named == (named & own) | set(checkpoint.reuses)

    @invariant()
    def what_must_stay_stays(self) -> None:
        live = self.live()
        if self.last is None:
            return
        assert self.last in live  # the newest, always
        assert self.pins <= live.keys()
        assert self.at is None or self.ckpt is None or self.at in live
        most = self.options["max_num_checkpoints"]
        assert most is not None or live.keys() == self.known.keys()
        good = any(self.known[digest].good for digest in live)
        assert good or not self.had_good  # only damage takes the last good one, never pruning
        self.had_good = good

    @invariant()
    def the_order_is_the_models(self) -> None:
        if self.live():
            assert [c.manifest_digest for c in run_of(self.place).checkpoints()] == self.order()

    def teardown(self) -> None:
        self.abandon()
        if self.zombie is not None:
            die(self.zombie)
        self.place.remove()


@pytest.mark.timeout(1800)  # a failure is made small before it is shown, which may take minutes
@pytest.mark.parametrize(
    ("examples", "steps"), [(6, 20), pytest.param(40, 50, marks=SLOW), pytest.param(200, 50, marks=SOAK)]
)
@pytest.mark.parametrize("where", quick_first(["directory", "object store"]))
def test_a_run_lives_through_anything(fast_dir: Path, where: str, examples: int, steps: int) -> None:
    """P30, P31, P33, P60, P61, P66, P71: saves, crashes, returns, pruning, pins, take-overs, damage, in any order."""

    class Machine(RunMachine):
        def new_place(self) -> Place:
            return LocalPlace(Path(tempfile.mkdtemp(dir=fast_dir)) / "run") if where == "directory" else MemoryPlace()

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
