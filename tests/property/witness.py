"""What must hold of a run directory at every moment, checked whenever an object appears or goes.

The witness stands beside the disk and not beside the code: it sees objects, and what the code says to have done. It
reads the ledger entry by entry, and takes each for true only as the one change that its event allows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from ckpt_tasks.errors import IntegrityError, StoreError
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.keys import (
    FORMAT_NAME,
    LEDGER_PREFIX,
    MANIFEST_NAME,
    ledger_name,
    parse_attempt,
    parse_ledger_name,
)
from ckpt_tasks.format.ledger import Entry, State, lineage
from ckpt_tasks.format.manifest import Manifest
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.run.opening import open_checkpoint
from ckpt_tasks.run.upkeep.verifying import verify_checkpoint
from tests.property.disk import Disk

__all__ = ["Listening", "Witness"]


class Witness:
    """Follow a run from object to object; `wrongs` says what must not have happened.

    `state` is what is true after the newest entry; `committed` says which entry committed a checkpoint.
    """

    def __init__(self, disk: Disk, now_s: Callable[[], float]):
        self.wrongs: list[str] = []
        self.state = State()
        self.committed: dict[str, int] = {}
        self.unreadable = False  # at some time the ledger named no checkpoint, and had entries that cannot be read
        self.given_up = 0
        self.told = 0
        self.next_n = 0
        self._disk = disk
        self._now_s = now_s
        self._digest: str | None = None
        self._nonces: dict[str, int] = {}
        self._objects: dict[str, frozenset[str]] = {}  # of every checkpoint that was ever committed
        self._needed: dict[str, str] = {}  # what is live needs these: name → whose
        self._retired: set[str] = set()  # what was ever named by a retire entry
        self._ours: set[str] = set()
        self._deleted: set[str] = set()
        self._back: set[str] = set()  # deleted, and there again by a request that came late
        self._foreign = {name: bytes(data) for name, data in disk.objects.items()}

    def wrong(self, what: str) -> None:
        self.wrongs.append(what)

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong(what)

    def is_live(self, digest: str) -> bool:
        return any(one.manifest_digest == digest for one in self.state.live)

    def holds(self, host: str, owner_id: str | None = None) -> bool:
        """Say whether a process has the run directory."""
        owner = self.state.owner
        return owner is not None and owner.host == host and owner_id in (None, owner.id)

    # ── what the code says ───────────────────────────────────────────────────────────────────────────────────

    def acknowledged(self, n: int, kind: str, nonce: str) -> None:
        """Somebody was told that this entry stands."""
        self.told += 1
        try:
            found, _ = Entry.from_bytes(self._disk.objects.get(ledger_name(n), b""), ledger_name(n))
        except IntegrityError:
            self.wrong(f"entry {n} was acknowledged and is not there")
            return
        self.check(found.nonce == nonce, f"entry {n} was acknowledged and is another one's")
        self.check(found.event["kind"] == kind, f"entry {n} was acknowledged and says something else")
        self.check(self._nonces.get(nonce) == n, f"entry {n} was acknowledged for another number")

    # ── what happens to the objects ──────────────────────────────────────────────────────────────────────────

    def landed(self, name: str, data: bytes) -> None:
        """An object is there."""
        self._ours.add(name)
        if name in self._deleted:
            self._back.add(name)
        n = parse_ledger_name(name)
        if n is None:
            return
        self.check(n == self.next_n, f"entry {n} was put where {self.next_n} is the next one")
        self.next_n = n + 1
        try:
            entry, digest = Entry.from_bytes(data, name)
        except IntegrityError:
            self.unreadable = self.unreadable or not self.state.live
            return
        self._entry(entry, digest)

    def deleted(self, name: str) -> None:
        """An object is gone."""
        attempt, owner = parse_attempt(name), self.state.owner
        self._deleted.add(name)
        self.check(name in self._ours, f"{name}, which is not ours, was deleted")
        self.check(name != FORMAT_NAME and not name.startswith(LEDGER_PREFIX), f"{name} was deleted")
        self.check(name not in self._needed, f"{name} of the live checkpoint {self._needed.get(name)} was deleted")
        self.check(all(name != one.table for one in self.state.evaluations), f"{name} of a live evaluation was deleted")
        if attempt is None or name in self._retired:
            return
        known = any(name in objects for objects in self._objects.values())
        self.check(not known, f"{name} was deleted, and no entry of the ledger had retired it")
        # Of an attempt that came to nothing: by whoever made it. A later owner gives it up first, as all else.
        self.check(owner is not None and attempt.epoch <= owner.epoch, f"{name} of an owner to come was deleted")

    # ── the ledger ───────────────────────────────────────────────────────────────────────────────────────────

    def _entry(self, entry: Entry, digest: str) -> None:
        before, after, kind = self.state, entry.state, entry.event["kind"]
        where = f"entry {entry.n} ({kind})"
        self.check(entry.previous == self._digest, f"{where} was made from a state that is not the newest")
        self.check(entry.nonce not in self._nonces, f"{where} says once more what {self._nonces.get(entry.nonce)} says")
        self._nonces[entry.nonce] = entry.n
        self.state, self._digest = after, digest
        epoch = before.owner.epoch if before.owner else 0
        if kind == "owner":
            self.check(
                after.owner is not None and after.owner.epoch == epoch + 1, f"{where}: the epoch is not the next"
            )
        elif kind == "release":
            self.check(after.owner == before.released().owner, f"{where}: another owner was let go")
        else:
            self.check(after.owner == before.owner, f"{where} changes the owner")
        if kind in ("commit", "retire", "release", "pin", "note"):
            self.check(entry.epoch == epoch, f"{where} of owner epoch {entry.epoch} landed in epoch {epoch}")
        if kind == "commit":
            self._commit(before, after, entry, where)
        elif kind == "retire":
            self._retire(before, after, where)
        else:
            self.check(after.live == before.live, f"{where} changes which checkpoints there are")
        if kind == "release":
            self._struck_off(before, after, where)
        elif kind not in ("commit", "retire"):
            self.check(after.retired == before.retired, f"{where} changes what is retired")
        self._keeps_facts(before, after, entry, where)
        self._needed = {
            name: f"of step {one.step}" for one in after.live for name in self._objects.get(one.manifest_digest, ())
        }
        lost = self._needed.keys() & set(after.retired)
        self.check(not lost, f"{where}: live checkpoints need what is retired: {sorted(lost)}")

    def _commit(self, before: State, after: State, entry: Entry, where: str) -> None:
        new = after.live[-1]
        digest, attempt = new.manifest_digest, parse_attempt(new.manifest)
        self.check(digest not in self.committed, f"{where}: entry {self.committed.get(digest)} had committed it")
        self.check(new.n == entry.n, f"{where} says that it is entry {new.n}")
        self.check(attempt is not None and attempt.epoch == entry.epoch, f"{where} is of another owner's attempt")
        self.committed[digest] = entry.n
        try:
            manifest = open_checkpoint(self._disk, new).manifest
        except (IntegrityError, StoreError) as error:
            self.wrong(f"{where}: step {new.step} is not whole: {error}")
            return
        # What was once put is never changed, so that an object which has its size is the one that was written.
        sizes = {name: len(self._disk.objects.get(name, b"")) for name, *_ in manifest.objects}
        whole = sizes == {record.name: record.size_bytes for record in manifest.objects}
        self.check(whole, f"{where}: step {new.step} is not whole: {sizes}")
        self._objects[digest] = frozenset((new.manifest, manifest.index.name, *sizes))
        self._retire(before, after, where, new)

    def _retire(self, before: State, after: State, where: str, new: Checkpoint | None = None) -> None:
        """Check what an entry retires, which may be the commit of `new` too: that marks which lines are abandoned."""
        kept = {one.manifest_digest for one in after.live}
        gone = [one for one in before.live if one.manifest_digest not in kept]
        self.given_up += len(gone)
        stays, old = [one for one in before.live if one not in gone], [one for one in after.live if one != new]
        if new is not None:
            stays, old = ([replace(one, abandoned=False) for one in part] for part in (stays, old))
        self.check(stays == old, f"{where} changes what stays")
        self.check(bool(after.live) or not before.live, f"{where} takes the last checkpoint")
        for one in gone:
            step, digest = one.step, one.manifest_digest
            newest = new.parent if new else lineage(before.live)[0].manifest_digest
            self.check(digest != newest, f"{where} takes step {step}, the newest")
            self.check(digest not in before.pins, f"{where} takes step {step}, which is pinned")
            self.check(not self.leased(before, digest), f"{where} takes step {step}, which is leased")
        needed = {name for digest in kept for name in self._objects.get(digest, ())}
        given_up = {name for one in gone for name in self._objects.get(one.manifest_digest, ())} - needed
        given_up -= self._maybe_committed(after)
        self.check(given_up <= set(after.retired), f"{where} does not name {sorted(given_up - set(after.retired))}")
        self._retired |= set(after.retired)
        self._struck_off(before, after, where)

    def _maybe_committed(self, state: State) -> set[str]:
        """Name what checkpoints are made of that only an entry which cannot be read may have committed."""
        names: set[str] = set()
        for name, data in self._disk.objects.items():
            attempt = parse_attempt(name)
            if attempt and attempt.epoch <= state.spared_epochs and name.endswith(f"/{MANIFEST_NAME}"):
                with suppress(IntegrityError):  # torn: no entry names it
                    manifest = Manifest.from_bytes(bytes(data), digest=digest_hex(bytes(data)), name=name)
                    names |= {record.name for record in manifest.objects}
        return names

    def _struck_off(self, before: State, after: State, where: str) -> None:
        off = set(before.retired) - set(after.retired)
        left = sorted((off & self._disk.objects.keys()) - self._back)
        self.check(not left, f"{where} forgets that these are to be deleted: {left}")

    def _keeps_facts(self, before: State, after: State, entry: Entry, where: str) -> None:
        live = {one.manifest_digest for one in after.live}
        held = {one.id for one in before.leases if one.manifest_digest in live and one.expires_at > self._now_s()}
        ended = 1 if entry.event.get("ended") else 0
        self.check(len(held - {one.id for one in after.leases}) <= ended, f"{where} forgets a lease")
        known = [one for one in before.evaluations if one.manifest_digest in live]
        new = 1 if entry.event["kind"] == "evaluation" else 0
        self.check([*after.evaluations][: len(known)] == known, f"{where} forgets an evaluation")
        self.check(len(after.evaluations) == len(known) + new, f"{where} makes up an evaluation")
        suites = [(one.manifest_digest, one.suite) for one in after.evaluations]
        self.check(len(suites) == len(set(suites)), f"{where} records a suite for the second time")
        kept = {digest: why for digest, why in before.pins.items() if digest in live}
        if entry.event["kind"] != "pin":
            self.check(after.pins == kept, f"{where} changes what is pinned")
        self.check(after.pins.keys() <= live, f"{where}: what is pinned is gone")

    def leased(self, state: State, digest: str) -> bool:
        """Say whether somebody holds a lease on a checkpoint now."""
        return any(one.manifest_digest == digest and one.expires_at > self._now_s() for one in state.leases)

    # ── in the end ───────────────────────────────────────────────────────────────────────────────────────────

    def at_the_end(self) -> None:
        """Check once more all that was checked when it changed, from the objects alone."""
        for name, data in self._foreign.items():
            self.check(self._disk.objects.get(name) == data, f"{name}, which is not ours, has changed")
        for one in self.state.live:
            faults = verify_checkpoint(self._disk, one)
            self.check(not faults, f"step {one.step} is not whole at the end: {faults[:2]}")
        for evaluation in self.state.evaluations:
            self.check(evaluation.table in self._disk.objects, f"{evaluation.table} is not there")
        ever: list[str] = []
        for n in range(self.next_n):
            try:
                entry, _ = Entry.from_bytes(self._disk.objects.get(ledger_name(n), b""), ledger_name(n))
            except IntegrityError:
                continue
            if entry.event["kind"] == "commit":
                ever.append(entry.state.live[-1].manifest_digest)
        self.check(sorted(ever) == sorted(self.committed), "the ledger's commits are not those that were seen")


class Listening(logging.Handler):
    """Tell the witness of each entry that a process believes to stand in the ledger; print nothing else."""

    def __init__(self, witness: Witness):
        super().__init__()
        self._witness = witness
        self._log = logging.getLogger("ckpt_tasks")

    def __enter__(self) -> None:
        self._before = self._log.level, self._log.propagate
        self._log.addHandler(self)
        self._log.setLevel(logging.DEBUG)
        self._log.propagate = False

    def __exit__(self, *_: object) -> None:
        self._log.removeHandler(self)
        level, self._log.propagate = self._before
        self._log.setLevel(level)  # loggers remember which levels are enabled until this is called

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == "Entry %d stands: %s (%s)" and isinstance(record.args, tuple):
            self._witness.acknowledged(*record.args)  # type: ignore[arg-type]
