"""When to save: the position and the speed of training, and the decision of the policy or the cadence."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import SupportsIndex

from ckpt_tasks.checkpoint.save.tenure import Resume, Spent
from ckpt_tasks.errors import StateError
from ckpt_tasks.format.keys import MAX_STEP
from ckpt_tasks.format.ledger import Entry
from ckpt_tasks.format.policy.cadence import SavePoint
from ckpt_tasks.format.policy.retention import Save
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.ledger.observing import LearningCadence
from ckpt_tasks.state.groups import objects_of
from ckpt_tasks.state.kinds.started import Started
from ckpt_tasks.system import system

_STEPS = 20


class TrainingPosition:
    """The position of one training: which steps are completed, restored and saved.

    `step`: the number of completed steps, as last restored or reported. `saved_step`: the newest step that was restored
    or has a snapshot. `last`: the point at which the present interval between saves began.
    """

    def __init__(self) -> None:
        self.restored(0, None)
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        self.has_trained = False  # True if a step was reported behind the restored one.

    @property
    def step_s(self) -> float | None:
        """The median seconds of the last 20 steps; None before the second one."""
        return median(self._seconds) if self._seconds else None

    @property
    def unsaved(self) -> str:
        """The steps since the last save, as "11 to 13"; "" if there are none.

        The end of a `with` block does not save these steps: an evaluation or a fetched batch may have changed the state
        since step(), and only the program knows whether the state still belongs to the last step.
        """
        return f"{self.saved_step + 1} to {self.step}" if self.step > self.saved_step else ""

    def restored(self, step: int, epoch: int | None, resume: Resume | None = None) -> None:
        """Continue from a checkpoint, or from the beginning; the next step ends the `resume`."""
        self.step = self.saved_step = step
        self.last, self._resume = point(step, epoch), resume
        self._since: SavePoint | None = None  # The point at which the current step began.
        self._steps_s, self._steps, self._first_s = 0.0, 0, 0.0

    def saves(self, now: SavePoint) -> tuple[Save, Save]:
        """Return the save at `now` and the previous save, as retention rules take them."""
        at_s = system().time()
        return Save(now.step, at_s), Save(self.last.step, at_s - now.clock_s + self.last.clock_s)

    def stepped(self, now: SavePoint) -> None:
        """Record that training has completed a step."""
        self.has_trained |= now.step > self.step
        self.step = now.step
        if self._resume is not None:
            self._first_s = self._resume.stepped()
            self._resume = None
        if self._since is not None and now.step > self._since.step:
            took_s, steps = now.clock_s - self._since.clock_s, now.step - self._since.step
            self._steps_s, self._steps = self._steps_s + took_s, self._steps + steps
            self._seconds.append(took_s / steps)
        self._since = now

    def spent(self, state: Mapping[str, object]) -> Spent:
        """Return the time of the steps so far; the loaders in the state know how long training has waited for data.

        The first step also starts workers and compiles code: it counts as long as the mean of the steps after it.
        """
        mean_s = self._steps_s / self._steps if self._steps else self._first_s
        self._steps_s, self._first_s = self._steps_s + min(self._first_s, mean_s), 0.0
        data = [value for value in objects_of(state) if isinstance(value, Started)]
        data_s = sum(value.waited_s - (value.found_s or 0.0) for value in data)
        return Spent(self._steps_s, data_s, self.step_s)

    def saved(self, step: int, epoch: int | None, *, interim: bool) -> None:
        """Record a save; an interim save does not begin a new interval."""
        self.step = self.saved_step = step
        self._since = point(step, epoch)
        if not interim:
            self.last = self._since

    def waited(self) -> None:
        """Measure the next step from now on, because training has waited for a commit."""
        if self._since is not None:
            self._since = replace(self._since, clock_s=system().monotonic())


def point(step: int, epoch: int | None) -> SavePoint:
    """Return a step, an epoch and the present time as a SavePoint."""
    return SavePoint(step=step, epoch=epoch, clock_s=system().monotonic())


class SaveSchedule:
    """Decides when a snapshot is due, by the policy or by the automatic cadence.

    `cadence` is None until the first step: a loop that never calls step() does not read the history.
    """

    def __init__(self, history: History, config: CheckpointConfig):
        self.cadence: LearningCadence | None = None
        self._history = history
        self._automatic = config.automatic
        self._policy = config.save_policy
        self._steady = replace(self._policy, save_interval_secs=None)

    def steady(self, last: SavePoint, now: SavePoint) -> bool:
        """Return True if a save is due at `now` by steps or epochs, as in every other rank; `last` is the last save."""
        return self._steady.due(last, now)

    def due(self, last: SavePoint, now: SavePoint) -> bool:
        """Return True if a save is due at `now` by steps, epochs or time. `last` is the last save."""
        if self._automatic and self.cadence is None:
            self.cadence = LearningCadence(self._history)
        timely = self.cadence is not None and self.cadence.due(last, now)
        return timely or self._policy.due(last, now)

    def learn(self, entry: Entry) -> None:
        """Learn the cost of a save from a commit."""
        if self.cadence is not None:
            self.cadence.learn(entry)


def check_epoch(epoch: SupportsIndex | None) -> int | None:
    """Return an epoch as an int, or None; raise StateError if it is not a number of completed epochs."""
    if epoch is None:
        return None
    try:
        number = operator.index(epoch)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_STEP:
        raise StateError(f"an epoch is a whole number of completed epochs from 0 on, not {epoch!r:.80}")
    return number


def check_step(step: SupportsIndex, position: int) -> int:
    """Return a step as an int; raise StateError if it is not a step number, or is below `position`."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)  # NumPy integers are valid steps, too.
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_STEP:
        raise StateError(f"a step is a whole number of completed optimizer steps from 0 on, not {step!r:.80}")
    if number < position:
        raise StateError(
            f"step {number} comes after step {position}",
            hint="Steps count on over all epochs; to go back, restore an older checkpoint.",
        )
    return number
