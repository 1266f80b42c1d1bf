"""The facts that each rank knows of its run: the line of checkpoints, and the current ownership (tenure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ckpt_tasks.checkpoint.save.parts import Saving, Stored, new_attempt
from ckpt_tasks.errors import CkptError
from ckpt_tasks.format.records import Checkpoint, Owner
from ckpt_tasks.run.ledger.metrics import checked_metrics
from ckpt_tasks.run.ledger.ownership import Heartbeat
from ckpt_tasks.run.opening import open_checkpoint
from ckpt_tasks.state.groups import objects_of
from ckpt_tasks.state.kinds.started import Started
from ckpt_tasks.storage.port import Store
from ckpt_tasks.system import system

if TYPE_CHECKING:
    from ckpt_tasks.checkpoint.extension import Attached
    from ckpt_tasks.checkpoint.restore.restore import RestoreReport
    from ckpt_tasks.checkpoint.save.commit import Committer


class Spent(NamedTuple):
    """The seconds of all steps since a restore, without saves; of them, those that waited for data; and of one step."""

    steps_s: float = 0.0
    data_s: float = 0.0
    step_s: float | None = None

    def since(self, before: Spent) -> dict[str, float]:
        """Return what was added since an earlier moment, as fields of a commit's event."""
        data_s = max(0.0, self.data_s - before.data_s)
        trained_s = max(0.0, self.steps_s - before.steps_s - data_s)
        fields = {"step_s": self.step_s, "trained_s": trained_s, "data_s": data_s or None}
        return {name: round(value, 6) for name, value in fields.items() if value is not None}


@dataclass
class Line:
    """The line of checkpoints that this process continues; it outlives an ownership.

    `parent`: the checkpoint that was restored or committed last; the next checkpoint follows it. `known_n`: the number
    of the newest commit that this process knows. `spent`: the time of the steps up to `parent`. `unsure`: a save of
    many ranks failed in this rank but may have been committed, so other ranks may have another parent.
    """

    parent: Checkpoint | None = None
    last_commit: Checkpoint | None = None
    known_n: int = -1
    spent: Spent = field(default_factory=Spent)
    unsure: bool = False
    # The digest of a manifest, and the objects of its checkpoint: at least those of this rank.
    stored: tuple[str, Stored] | None = None

    @property
    def digest(self) -> str | None:
        """The identity of `parent`."""
        return self.parent.manifest_digest if self.parent is not None else None

    @property
    def known_parent(self) -> str | None:
        """The identity of `parent` if all ranks know the same parent, so that the next save may reuse its objects."""
        return None if self.unsure else self.digest

    @property
    def step(self) -> int:
        """The step of `parent`; -1 without a parent."""
        return self.parent.step if self.parent is not None else -1

    def reusable(self, store: Store) -> Stored | None:
        """Return the parent's objects for reuse; None if not all ranks know a parent, or it cannot be read.

        All ranks have the same parent, since they agree on every commit before they write the next snapshot.
        """
        if self.parent is None or self.unsure:
            return None
        if self.stored is None or self.stored[0] != self.parent.manifest_digest:
            try:
                opened = open_checkpoint(store, self.parent)
            except CkptError:
                return None  # The save reuses nothing, and writes every object.
            self.stored = self.parent.manifest_digest, Stored.of(opened.manifest.objects, opened.index)
        return self.stored[1]

    def follow(self, parent: Checkpoint | None) -> None:
        """Set the parent of the next checkpoint, which is the same in all ranks; None if it has no parent."""
        self.parent, self.unsure, self.spent = parent, False, Spent()

    def committed(self, checkpoint: Checkpoint, stored: Stored) -> None:
        """Continue from a checkpoint that this process has committed; `stored` holds this rank's objects of it."""
        self.stored = checkpoint.manifest_digest, stored
        self.follow(checkpoint)
        self.last_commit = checkpoint
        self.known_n = checkpoint.n


class Resume:
    """The time that each part of a resume takes, from the start of the process to the end of its first step.

    The event of the next commit has these times, in seconds (docs/REPORT.md).
    """

    def __init__(self) -> None:
        self.owner_s: float | None = None  # The process waited this long for the run directory; None after a restore.
        self.brought: dict[str, float] = {}  # What extensions did as the run was taken took this long, by its part.
        # The first and the last step that training repeats; None after the commit.
        self.again: tuple[int, int] | None = None
        self.first_s: float | None = None  # The first step of this tenure took this long.
        self.parts: Mapping[str, float] = {}  # Empty before the first step, and after the commit.
        self._at_s = system().monotonic()
        self._state: Mapping[str, object] = {}
        self._parts: dict[str, float] = {}

    def restored(self, report: RestoreReport, state: Mapping[str, object], began_s: float) -> Resume:
        """Begin with a restore that was called at `began_s`; the first one of a tenure also has the process's start."""
        now_s = system().monotonic()
        rest_s = now_s - max(began_s, self._at_s)
        parts = {"read_s": rest_s - report.verify_s - report.copy_s, "verify_s": report.verify_s}
        self._parts = {**parts, "copy_s": report.copy_s}
        if self.owner_s is not None:
            self._parts |= {"start_s": system().age_s() - self.owner_s - rest_s, "owner_s": self.owner_s}
            self._parts |= {**self.brought, "read_s": self._parts["read_s"] - sum(self.brought.values())}
        self.owner_s, self._at_s, self._state, self.parts = None, now_s, state, {}
        return self

    def untold(self) -> dict[str, object]:
        """Return what the event of the next commit tells, by its fields."""
        return {"resumed": self.parts, "again": self.again}

    def tell(self, event: Mapping[str, object]) -> None:
        """Forget what a committed event tells; the first step may have ended during the commit, for the next one."""
        self.parts = {} if "resumed" in event else self.parts
        self.again = None if "again" in event else self.again

    def begun(self) -> Resume:
        """Begin without a restore, because the run has no checkpoint."""
        self._at_s = system().monotonic()
        return self

    def stepped(self) -> float:
        """End the resume, as its first step is done; return the seconds of that step."""
        step_s = system().monotonic() - self._at_s
        if self.first_s is None:
            self.first_s = step_s
        if not self._parts:
            return step_s  # Nothing was restored.
        data = [value.found_s for value in objects_of(self._state) if isinstance(value, Started)]
        data_s = sum(found_s for found_s in data if found_s is not None)
        self._parts |= {"data_s": data_s} if any(data) else {}
        self._parts["step_s"] = step_s - data_s
        self.parts, self._state = {name: round(max(0.0, part), 6) for name, part in self._parts.items()}, {}
        return step_s - data_s


@dataclass(eq=False)
class Tenure:
    """One ownership of a run directory, as each rank of the training sees it.

    Only rank 0 has the `committer` and the `heartbeat`. `damaged`: the names of unreadable ledger entries, which are
    older than the owner's own entry. `fenced`: a save has failed because another process owns the directory.
    `failed_saves`: the number of failed saves since the last commit.
    """

    owner: Owner
    run_key: str
    line: Line
    world_size: int = 1
    committer: Committer | None = None
    damaged: tuple[str, ...] = ()
    heartbeat: Heartbeat | None = None
    fenced: bool = False
    saves: int = 0
    failed_saves: int = 0
    resume: Resume = field(default_factory=Resume)

    def new_saving(
        self,
        step: int,
        groups: Mapping[str, Mapping[str, object]],
        *,
        metrics: Mapping[str, float] | None,
        epochs: int | None,
        interim: bool,
        why: str = "",
        attached: Sequence[Attached] = (),
    ) -> Saving:
        """Name a new attempt to save a step, and collect the facts of this save."""
        number = self.next_number()
        return Saving(
            attempt=new_attempt(step, self.owner, number),
            run_key=self.run_key,
            owner=self.owner,
            groups=groups,
            metrics=checked_metrics(metrics or {}),
            epochs=epochs,
            interim=interim,
            why=why,
            world_size=self.world_size,
            number=number,
            attached=attached,
        )

    def next_number(self) -> int:
        """Return the number of the next save, which is the same in all ranks."""
        self.saves += 1
        return self.saves

    def topic(self, number: int) -> str:
        """Return the name under which the ranks agree on a save."""
        return f"save/{self.owner.epoch}/{number}"

    def check(self) -> None:
        """Raise FencedError if the heartbeat has seen another owner; the save of the other ranks then fails as well."""
        if self.heartbeat is not None and self.heartbeat.fenced is not None:
            raise self.heartbeat.fenced

    def beat(self) -> None:
        """In rank 0, restart the heartbeat if `quiet` has stopped it."""
        if self.heartbeat is None and self.committer is not None:
            self.heartbeat = self.committer.heartbeat()

    def quiet(self) -> None:
        """Stop the heartbeat, so that other processes may take the directory after the timeout."""
        if self.heartbeat is not None:
            self.heartbeat.stop()
            self.heartbeat = None

    def owning(self) -> AbstractContextManager[None]:
        """Return `Committer.owning` in rank 0; the other ranks raise the errors of rank 0."""
        return nullcontext() if self.committer is None else self.committer.owning()

    def release(self) -> bool:
        """In rank 0, release the run directory; return False if another process owns it."""
        return not self.fenced if self.committer is None else self.committer.release()
