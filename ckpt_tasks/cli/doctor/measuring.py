"""Try what a store can do.

Everything is written below `probe/`, which no run uses: a run in the same directory is neither read nor changed. All
objects are deleted at the end, even after an error. Requests are not retried, so that failures are seen.
"""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from ckpt_tasks.cli.doctor.findings import EXCLUSIVE, Ability, Disk, Findings
from ckpt_tasks.errors import ConfigError, IntegrityError, ObjectExistsError, ObjectNotFoundError, StoreError
from ckpt_tasks.format.digests import digest_bytes
from ckpt_tasks.process import in_threads
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.port import Store
from ckpt_tasks.storage.probe import prove
from ckpt_tasks.storage.retrying import RetryingStore

_SMALL_BYTES = 4096
_LARGE_BYTES = 64 << 20
_PIECE_BYTES = 16 << 20  # A restore reads this much at once; larger objects need several requests to upload.
_IN_FLIGHT = 8
_PATIENCE_S = 10.0
_ROOM = 16  # Require free space for this many large objects: a run in the same directory may need space, too.


class _StoppedError(Exception):
    """The caller has stopped the trial."""


def try_store(
    store: Store, *, large_bytes: int = _LARGE_BYTES, on_progress: Callable[[str], None] = lambda doing: None
) -> Findings:
    """Test a store; `on_progress` gets the name of each test.

    Ctrl-C ends the trial between two requests. The objects, and the directories created for a local store, are
    deleted even then. Raises ConfigError if the store cannot be used at all.
    """
    trial = _Trial(store, large_bytes, on_progress)
    with ThreadPoolExecutor(1, thread_name_prefix="ckpt-measure") as thread:
        running = thread.submit(trial.run)
        try:
            return running.result()
        except KeyboardInterrupt:
            trial.stop.set()
            # Wait for requests under way, which could create objects after the deletion; stop a large upload at once.
            with suppress(StoreError):
                store.drop_unfinished(trial.is_ours)
            raise


class _Trial:
    """One run of all tests; all objects are below `place`."""

    def __init__(self, store: Store, large_bytes: int, on_progress: Callable[[str], None]):
        self.store = store
        self.patient = RetryingStore(store, deadline_s=_PATIENCE_S)  # Retry requests whose answers the tests need.
        self.place = f"probe/{secrets.token_hex(8)}"
        self.stop = threading.Event()
        self._large_bytes = large_bytes
        self._on_progress = on_progress
        self._written: list[str] = []
        self._abilities: dict[str, Ability] = {}

    def is_ours(self, name: str) -> bool:
        """Return True if a name is below this trial's `place`."""
        return name.startswith(f"{self.place}/")

    def run(self) -> Findings:
        """Run all tests of the store, then delete what they wrote."""
        made = _missing(self.store.root) if isinstance(self.store, LocalStore) else []
        disk = None
        left: tuple[str, ...] = ()
        try:
            if self._basics() and self._exclusive():
                disk = self._disk()
                self._large(disk)
        finally:
            left = self._tidy(made)
        return Findings(
            url=self.store.url,
            endpoint=self.store.endpoint,
            abilities=self._abilities,
            disk=disk,
            left=left,
        )

    # ── what it can do ───────────────────────────────────────────────────────────────────────────────────────

    def _basics(self) -> bool:
        """Test the abilities that every checkpoint needs, in order of dependence; stop at the first failure."""
        self._doing("trying what it can do")
        checks: list[tuple[str, Callable[[], bool]]] = [
            ("list", lambda: self.store.names(f"{self.place}/") == []),
            ("write", self._writes),
            ("delete", self._deletes),
            ("read", self._reads),
            ("ordered listing", self._lists),
            ("ranged reads", self._ranges),
        ]
        return all(self._try(name, check) for name, check in checks)

    def _try(self, name: str, check: Callable[[], bool]) -> bool:
        self._pause()
        try:
            works, seen = check(), ""
        except (StoreError, IntegrityError) as error:
            works, seen = False, error.message
        self._abilities[name] = Ability(works, seen)
        return works

    def _writes(self) -> bool:
        self.store.replace(self._new("first"), b"first")
        return True

    def _deletes(self) -> bool:
        name = self._new("short-lived")
        self.patient.replace(name, b"here")
        self.patient.delete(name)
        self.patient.delete(name)
        try:
            self.patient.size(name)
        except ObjectNotFoundError:
            return name not in self.patient.names(f"{self.place}/")
        return False

    def _reads(self) -> bool:
        for n in range(8):
            name, body = self._new(f"read-{n}"), f"{n}".encode()
            self.patient.replace(name, body)
            if self.patient.get(name, 16) != body or self.patient.size(name) != len(body):
                return False
        return True

    def _lists(self) -> bool:
        names = [self._new(f"listed/{n}") for n in (9, 10, 2, 0, 11)]
        for name in names:
            self.patient.replace(name, b"x")
        below = f"{self.place}/listed/"
        return self.patient.names(below) == sorted(names) and self.patient.names(below, limit=1) == sorted(names)[:1]

    def _ranges(self) -> bool:
        body, name = os.urandom(100_000), self._new("ranged")
        self.patient.replace(name, body)
        for begin, end in ((0, 1), (1, 4097), (4096, 50_001), (99_999, 100_000)):
            part = bytearray(end - begin)
            self.patient.read(name, begin, memoryview(part))
            if part != body[begin:end]:
                return False
        return True

    def _exclusive(self) -> bool:
        """Test that only one of two writers of a name wins; if both do, continue as a single writer."""
        self._pause()
        try:
            prove(self.patient, single_writer=False)
        except ConfigError:
            seen = "a second writer replaces what the first one wrote"
        except StoreError as error:
            if error.transient:
                raise  # The error does not show what the store can do.
            seen = error.message
        else:
            self._abilities[EXCLUSIVE] = Ability(True)
            return True
        self._abilities[EXCLUSIVE] = Ability(False, seen)
        self.store.assume_single_writer()
        return self._try("read", self._proves_alone)

    def _proves_alone(self) -> bool:
        try:
            return prove(self.patient, single_writer=True)["read_after_write"]
        except ConfigError:
            return False

    def _large(self, disk: Disk | None) -> None:
        """Test whether a large object comes back as it was."""
        if disk is not None and disk.free_bytes < _ROOM * self._large_bytes:
            self._abilities["large objects"] = Ability(None, f"not tried: only {disk.free_bytes >> 20} MiB are free")
            return
        # mmap aligns this memory like a save's images.
        body, back = (memoryview(mmap.mmap(-1, self._large_bytes)) for _ in "ab")
        for piece in _pieces(body):
            piece[:] = os.urandom(piece.nbytes)
        self._doing("trying a large object")

        def there_and_back() -> bool:
            name = self._new("large")
            self.store.put(name, [body])
            self._read_large(name, back)
            if digest_bytes(back) != digest_bytes(body):
                return False
            self.patient.delete(name)
            return True

        if self._try("large objects", there_and_back):
            self._conditional_multipart(body[: _PIECE_BYTES + 1])

    def _read_large(self, name: str, into: memoryview) -> None:
        begins = range(0, self._large_bytes, _PIECE_BYTES)
        reads = [*zip(begins, _pieces(into), strict=True)]
        in_threads(lambda read: self.store.read(name, *read), reads, _IN_FLIGHT, "ckpt-measure")

    def _conditional_multipart(self, body: memoryview) -> None:
        """Test whether a second large object of the same name is refused; commits do not need it."""
        if isinstance(self.store, LocalStore) or not self._abilities[EXCLUSIVE].works or len(body) <= _PIECE_BYTES:
            return
        self._doing("trying a second large object of one name")
        name = self._new("twice")

        def refused() -> bool:
            self.store.put(name, [body])
            try:
                self.store.put(name, [body])
            except ObjectExistsError:
                return True
            return False

        if not self._try("conditional multipart", refused):
            seen = self._abilities["conditional multipart"].seen or "a second one takes the place of the first"
            self._abilities["conditional multipart"] = Ability(False, seen)

    # ── a directory ──────────────────────────────────────────────────────────────────────────────────────────

    def _disk(self) -> Disk | None:
        if not isinstance(self.store, LocalStore):
            return None
        self._doing("trying O_DIRECT and link")
        directory = self.store.root / self.place
        a, b = (directory / f".tmp-{secrets.token_hex(8)}" for _ in "ab")
        try:
            a.touch(0o600)
            return Disk(_takes_direct(a), _takes_link(a, b), shutil.disk_usage(directory).free)
        finally:
            for path in (a, b):
                path.unlink(missing_ok=True)

    # ── private helpers ──────────────────────────────────────────────────────────────────────────────────────

    def _new(self, what: str) -> str:
        name = f"{self.place}/{what}"
        self._written.append(name)
        return name

    def _doing(self, what: str) -> None:
        self._pause()
        self._on_progress(what)

    def _pause(self) -> None:
        if self.stop.is_set():
            raise _StoppedError

    def _tidy(self, made: Sequence[Path]) -> tuple[str, ...]:
        """Delete all written objects, and created directories; return the names that could not be deleted."""
        self._on_progress("tidying up")
        left = list(self._written)
        for name in self._written:
            try:
                self.patient.delete(name)
            except StoreError as error:
                if error.transient:
                    break  # Do not send a hundred more requests to a store that does not answer.
            else:
                left.remove(name)
        for directory in made:
            with suppress(OSError):  # Keep a directory into which another process has put a file.
                directory.rmdir()
        return tuple(left)


def _pieces(body: memoryview) -> list[memoryview]:
    return [body[begin : begin + _PIECE_BYTES] for begin in range(0, body.nbytes, _PIECE_BYTES)]


def _missing(directory: Path) -> list[Path]:
    """Return the missing directories on the path to this one, innermost first."""
    return [place for place in (directory, *directory.parents) if not place.exists()]


def _takes_direct(path: Path) -> Ability:
    """Test whether a file can be written without the page cache."""
    if not hasattr(os, "O_DIRECT"):
        return Ability(False, "this system has none")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
        try:
            os.pwrite(fd, mmap.mmap(-1, _SMALL_BYTES), 0)
        finally:
            os.close(fd)
    except OSError as error:
        return Ability(False, error.strerror or str(error))
    return Ability(True)


def _takes_link(path: Path, other: Path) -> Ability:
    """Test whether a file can get a second name (a hard link): a ledger entry gets its name this way."""
    try:
        os.link(path, other)
    except OSError as error:
        return Ability(False, error.strerror or str(error))
    return Ability(True)
