"""Who lives in a simulated run directory: trainers that follow and fence each other, evaluators, readers.

All of them use the project's own code from the facade down (`Checkpointer`, `Run`): what it says and raises is compared
with what the witness saw at that moment.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.restore.reading import Run
from ckpt_tasks.errors import (
    CheckpointNotFoundError,
    CkptError,
    CommitUncertainError,
    FencedError,
    IntegrityError,
    NoGoodCheckpointError,
    OwnedError,
    StateError,
    StoreError,
)
from ckpt_tasks.format.keys import ledger_name
from ckpt_tasks.format.ledger import lineage
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.upkeep.verifying import orphans
from ckpt_tasks.storage.port import Store
from ckpt_tasks.storage.retrying import RetryingStore
from ckpt_tasks.testing import InjectedError, located, under_way
from tests.property.disk import Connection, Disk
from tests.property.schedules import Process, Schedule
from tests.property.simulated import SimulatedSystem, alone
from tests.property.witness import Listening, Witness
from tests.support.systems import running_on

__all__ = ["Ablation", "Outcome", "play"]

Ablation = Callable[[pytest.MonkeyPatch, Schedule], None]

KEY = "run"
_FOREIGN = {
    "README.md": b"whose run this is",
    "checkpoint_000000000001/notes.txt": b"not ours",
    "checkpoint_000000000001/e1-0/model.safetensors": b"not ours either",
    "ledger/README.md": b"do not edit",
    "models/e000001-0123456789abcdef/manifest.json": b"{}",
}
_LAST_LOOKS = 8  # one schedule in so many is looked at once more when all is over: it takes a third of its time again
_QUIET = 0.9  # of the schedules nothing goes wrong before the first commit, or many would end before anything could
_REUSED_BYTES = 1 << 20  # of these an object must have, or later checkpoints do not reuse it
_ROUNDS = 5  # how often a program begins again after an error


@dataclass(frozen=True)
class Outcome:
    """What became of a schedule: what went wrong, what happened, request by request, and what came of it."""

    wrongs: tuple[str, ...]
    trace: tuple[tuple[float, str, str, str, str], ...]
    commits: int
    retired: int
    epochs: int
    told: int  # so many entries somebody was told of
    retried: bool  # whether requests that failed were made again, after waits that are drawn


class Place:
    """One run directory on one schedule, who watches it, and what has been saved there: tag → the frozen half."""

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self.rng = schedule.rng
        self.disk = Disk()
        self.disk.objects.update(_FOREIGN)
        self.witness = Witness(self.disk, lambda: schedule.now_s)
        self.disk.watcher = self.witness
        self.saved: dict[int, tuple[int, float]] = {}
        # A server stores all of an object or nothing, and requests are made again to servers only.
        whole = "torn" not in schedule.profile.fates["put"] and not schedule.profile.tardy
        self.retrying = whole and schedule.rng.random() < 0.3
        self.near = schedule.rng.random() < 0.5  # a disk; else a server, whose ledger its owner looks at less

    def store(self) -> Store:
        """Return a way to the run directory, with or without requests that are made again."""
        connection = Connection(self.disk, self.schedule, near=self.near)
        return RetryingStore(connection, deadline_s=self.schedule.profile.tick_s * 100) if self.retrying else connection

    def tag(self, step: int, frozen: float) -> int:
        """Number a state that is about to be saved."""
        tag = len(self.saved) + 1
        self.saved[tag] = (step, frozen)
        return tag

    def read(self, state: dict[str, Any], step: int, who: str) -> None:
        """Check that a restored state is one that was saved, and all of it the same one."""
        model = state["model"]
        tags, frozen = {*model["trained"].tolist()}, {extreme.item() for extreme in model["frozen"].aminmax()}
        tag = next(iter(tags))
        whole = len(tags) == len(frozen) == 1 and self.saved.get(int(tag)) == (step, next(iter(frozen)))
        self.witness.check(whole, f"{who} read a state of step {step} that nobody saved: {tags}, {frozen}")
        self.witness.check(state.get("tag", tag) == tag, f"{who} read the tag {state.get('tag')} beside {tag}")

    def missed(self, error: CkptError, checkpoint: Checkpoint, who: str) -> None:
        """Check that a checkpoint which could not be read has been retired meanwhile, or that a request failed."""
        if isinstance(error, InjectedError) or isinstance(error.__cause__, InjectedError):
            return
        live = self.witness.is_live(checkpoint.manifest_digest)
        self.witness.check(not live, f"{who} could not read step {checkpoint.step}, which is live: {error}")


def fresh() -> dict[str, Any]:
    """Return a state: one half that is trained, one that hardly ever changes, and a number."""
    model = nn.ParameterDict({
        "frozen": nn.Parameter(torch.zeros(_REUSED_BYTES, dtype=torch.uint8), requires_grad=False),
        "trained": nn.Parameter(torch.zeros(2)),
    })  # fmt: skip
    return {"model": model, "tag": 0}


class Trainer:
    """A process that takes the run directory, restores, trains and saves, until it is fenced or done."""

    def __init__(self, place: Place, *, last: bool = False):
        self._place, self._rng = place, (rng := place.rng)
        self._last = last
        self.restored: str | None = None
        self._state = fresh()
        self._begins_s = 0.0 if last else place.schedule.profile.tick_s * rng.choice((0, 100, 400)) * rng.random()
        self._steps = 1 if last else rng.randint(1, 6)
        hasty = place.schedule.profile.tardy or rng.random() < 0.2
        self._changes = rng.choice((0.2, 0.5, 1.0))  # how often the half changes that hardly ever does
        self._waits = 0.0 if hasty else rng.choice((0.0, 0.5, 1.0))  # how often training waits for a save
        self._upkeep = 0.0 if hasty else 0.1  # how often it prunes and pins by itself
        # How often it goes back to an older checkpoint, which an entry that arrives late may retire.
        self._goes_back = 0.5 if hasty else 0.02
        self._config = CheckpointConfig(
            checkpoint_dir=located(place.store()),
            run_key=KEY,
            step_interval=1,
            max_num_checkpoints=1 if hasty else rng.choice((1, 1, 2)),
            keep_best=rng.choice((0, 0, 1)),
            best_metric="loss",
            memory_dir=None,
            owner_timeout_s=place.schedule.profile.tick_s * rng.choice((200.0, 1000.0)),
            on_flush_failure=rng.choice(("raise", "warn")),
            flush_timeout_s=1e9,  # whoever waits for a flush waits for its end, however long its process has stopped
        )

    def __call__(self, process: Process) -> None:
        self._place.schedule.sleep(self._begins_s)
        for _ in range(_ROUNDS):
            ckpt = Checkpointer(
                self._config,
                take_over=self._last or self._rng.random() < 0.7,
                flow_run_id=self._rng.choice((None, "flow")),
            )
            try:
                if self._attempts(ckpt, process):
                    return
            except FencedError:
                self._check_fenced(ckpt, process)
                return
            except OwnedError:
                self._place.schedule.sleep(self._config.owner_timeout_s / 2)

    def prune(self) -> None:
        """Take the run directory only to prune."""
        ckpt = Checkpointer(self._config, take_over=True)
        ckpt.acquire()
        ckpt.prune()
        ckpt.close()

    def _attempts(self, ckpt: Checkpointer, process: Process) -> bool:
        """Train in one Checkpointer, again after errors; return whether there is nothing left to do."""
        for _ in range(_ROUNDS):
            try:
                if not self._last and self._rng.random() < 0.15:
                    ckpt.acquire()
                    ckpt.prune()  # as `ckpt prune` does, which restores nothing
                else:
                    self._train(ckpt, process)
                ckpt.close()
            except (CommitUncertainError, StoreError, StateError, IntegrityError) as error:
                if not self._expected(error, ckpt, process):
                    return True
            else:
                return True
        return False

    def _restore(self, ckpt: Checkpointer, process: Process, step: int | None = None) -> int:
        self._state = fresh()
        step = ckpt.restore(self._state, step=step)
        self.restored = under_way(ckpt).parent
        if ckpt.last_restore is not None and self._state["tag"]:
            self._place.read(self._state, step, process.name)
            skipped = ckpt.last_restore.skipped
            self._place.witness.check(
                not (skipped and self._holds(ckpt, process)), f"{process.name} passed over {skipped}"
            )
        return step

    def _train(self, ckpt: Checkpointer, process: Process) -> None:
        rng, step = self._rng, self._restore(ckpt, process)
        for _ in range(self._steps):
            if rng.random() < self._goes_back and not self._last:
                older = [one.step for one in ckpt.run.checkpoints() if one.step < step]
                with suppress(CheckpointNotFoundError):
                    step = self._restore(ckpt, process, rng.choice(older)) if older else step
            step += 1
            self._move(step)
            metrics = rng.choice(({}, {"loss": 0.1}, {"loss": 0.2}))
            if rng.random() < self._waits or self._last:
                saved = ckpt.save(step, self._state, metrics=metrics)
                n = self._place.witness.committed.get(saved.manifest_digest)
                self._place.witness.check(n == saved.n, f"step {step} was saved as entry {saved.n}, and is {n}")
            else:
                ckpt.step(step, self._state, metrics=metrics)
                # Faster than its store for a while, and then not: snapshots wait for each other, or have it alone.
                self._place.schedule.sleep(self._place.schedule.profile.tick_s * rng.choice((3, 120)))
            if rng.random() >= self._upkeep and not self._last:
                continue
            if rng.random() < 0.5 or self._last:
                ckpt.prune()
            else:
                with suppress(CheckpointNotFoundError):
                    rng.choice((ckpt.pin, ckpt.unpin))(step - 1)

    def _move(self, step: int) -> None:
        model, rng = self._state["model"], self._rng
        with torch.no_grad():
            if rng.random() < self._changes:
                model["frozen"].fill_(1 - model["frozen"][0].item())
            self._state["tag"] = self._place.tag(step, model["frozen"][0].item())
            model["trained"].fill_(self._state["tag"])

    def _holds(self, ckpt: Checkpointer, process: Process) -> bool:
        owner = under_way(ckpt).owner
        return owner is not None and self._place.witness.holds(process.name, owner)

    def _check_fenced(self, ckpt: Checkpointer, process: Process) -> None:
        self._place.witness.check(not self._holds(ckpt, process), f"{process.name} was fenced and is the owner")

    def _expected(self, error: CkptError, ckpt: Checkpointer, process: Process) -> bool:
        """Check that an error has its reason; return whether another attempt makes sense."""
        witness = self._place.witness
        if isinstance(error, NoGoodCheckpointError):
            # Either nothing that names a checkpoint could be read, and people must look; or it is another's by now.
            fenced = under_way(ckpt).owner is not None and not self._holds(ckpt, process)
            witness.check(fenced or witness.unreadable, f"{process.name} gave up: {error}")
            return fenced
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, InjectedError):
            cause = cause.__cause__
        retired = isinstance(error, StateError) and "retired" in str(error)
        fine = cause is not None or retired or not self._holds(ckpt, process)
        witness.check(fine, f"{process.name}, the owner, met {type(error).__name__}: {error}")
        return True


class Evaluator:
    """A process that leases checkpoints, reads them, and records what it found."""

    def __init__(self, place: Place):
        self._place, self._rng = place, place.rng

    def __call__(self, process: Process) -> None:
        place = self._place
        tick_s = place.schedule.profile.tick_s
        run = Run(History(place.store()), KEY)
        for _ in range(4):
            place.schedule.sleep(tick_s * self._rng.choice((10, 150)) * self._rng.random())
            with suppress(StoreError, CommitUncertainError, CheckpointNotFoundError, IntegrityError):
                found = run.checkpoints()
                if found:
                    self._evaluate(run, self._rng.choice(found), process, tick_s * self._rng.choice((30, 1000)))

    def _evaluate(self, run: Run, checkpoint: Checkpoint, process: Process, expires_s: float) -> None:
        place = self._place
        with run.lease(checkpoint, process.name, expires_s) as lease:
            for _ in range(2):
                state = fresh()
                try:
                    run.restore(checkpoint, {"model": state["model"]}, partial=True)
                except (IntegrityError, StoreError) as error:
                    if place.schedule.now_s < lease.expires_at:
                        place.witness.check(
                            isinstance(error, InjectedError) or isinstance(error.__cause__, InjectedError),
                            f"{process.name} could not read step {checkpoint.step}, which it has leased: {error}",
                        )
                    continue
                place.read({"model": state["model"]}, checkpoint.step, process.name)
            run.record_evaluation(checkpoint, self._rng.choice(("quick", "full")), {"loss": self._rng.random()})


class Reader:
    """A process that restores the newest checkpoint, and the next older one where it is gone meanwhile."""

    def __init__(self, place: Place):
        self._place, self._rng = place, place.rng

    def __call__(self, process: Process) -> None:
        place = self._place
        run = Run(History(place.store()), KEY)
        for _ in range(4):
            place.schedule.sleep(place.schedule.profile.tick_s * self._rng.choice((10, 150)) * self._rng.random())
            with suppress(StoreError):
                for checkpoint in run.checkpoints():
                    state = fresh()
                    try:
                        run.restore(checkpoint, state, partial=False)
                    except (IntegrityError, StoreError) as error:
                        place.missed(error, checkpoint, process.name)
                        continue
                    place.read(state, checkpoint.step, process.name)
                    break


def play(seed: int, ablation: Ablation | None = None) -> Outcome:
    """Play the schedule of a seed to its end, with a part of the code taken out or without."""
    schedule = Schedule(seed)
    place, rng = Place(schedule), schedule.rng
    patching = pytest.MonkeyPatch.context()
    with alone(), running_on(SimulatedSystem(schedule)), Listening(place.witness), patching as patch:
        if ablation is not None:
            ablation(patch, schedule)
        for number in range(rng.choice((2, 2, 3, 4))):
            schedule.start(f"trainer-{number}", Trainer(place))
        for number in range(rng.randint(0, 2)):
            schedule.start(f"evaluator-{number}", Evaluator(place))
        if rng.random() < 0.5:
            schedule.start("reader", Reader(place))
        try:
            if rng.random() < _QUIET:
                rough, schedule.profile = schedule.profile, schedule.profile.calm()
                schedule.run(lambda: not place.witness.committed)
                schedule.profile = rough
            _foreign_entry(place)
            schedule.run(lambda: not place.witness.wrongs)
            schedule.settle()
            place.witness.at_the_end()
            if not place.witness.wrongs and seed % _LAST_LOOKS == 0:
                _last_look(place)
        except Exception as error:  # noqa: BLE001 (whatever a process lets through is wrong, and told with its schedule)
            place.witness.wrong("".join(traceback.format_exception(error)))
        finally:
            schedule.end()
    witness, owner = place.witness, place.witness.state.owner
    epochs = owner.epoch if owner else 0
    trace, retried = tuple(schedule.trace), place.retrying
    return Outcome(
        tuple(witness.wrongs), trace, len(witness.committed), witness.given_up, epochs, witness.told, retried
    )


def _foreign_entry(place: Place) -> None:
    """Some time, in some schedules, let something that is not an entry take the next number of the ledger."""

    def put() -> None:
        with suppress(StoreError):
            place.disk.put_if_absent(ledger_name(place.witness.next_n), place.rng.choice((b"", b"{}", b"not an entry")))

    for _ in range(place.rng.choice((0, 0, 0, 1, 3))):
        place.schedule.later(put)


def _last_look(place: Place) -> None:
    """When all is over and quiet, let one more trainer come, save and prune; then everything there is accounted for.

    Its last prune may be cancelled when it closes: one more owner deletes the rest.
    """
    witness, disk = place.witness, place.disk
    before = [one.manifest_digest for one in lineage(witness.state.live)]
    trainer = Trainer(place, last=True)

    def life(process: Process) -> None:
        trainer(process)
        if witness.state.live:
            trainer.prune()

    place.schedule.start("last", life)
    place.schedule.run(lambda: not witness.wrongs)
    if witness.unreadable and not witness.state.live:
        return  # nobody may begin anew over a ledger that cannot be read
    witness.check(trainer.restored == (before[0] if before else None), "the last trainer restored something else")
    left = [name for name in witness.state.retired if name in disk.objects]
    witness.check(not left, f"retired objects are left: {left}")
    left = orphans(disk, witness.state)
    witness.check(not left, f"nothing names these: {left}")
