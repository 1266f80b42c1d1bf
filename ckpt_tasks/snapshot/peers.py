"""The memory of a run on one host, as the agents of a gang see it: sealed snapshots, and copies from other hosts.

A copy has the place and the form of the rank's own memory on this host. So a rank that starts on this host after its
own host was lost finds and verifies the copy like its own memory. The caller chooses how to send the bytes.

Invariants

1. No rank waits for a copy. A slot is read without its lock; the bytes are used only if its seal has not changed.
2. A copy is sealed last, after all of its bytes have matched their digests.
3. An older copy is removed once all ranks of its host have copies of one newer attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from ckpt_tasks.errors import CkptError, IntegrityError, StoreError
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.keys import is_table
from ckpt_tasks.format.records import SEAL_NAME, Seal
from ckpt_tasks.ledger.config import CheckpointConfig
from ckpt_tasks.reading.opening import by_object, check_header, merge_runs, read_index_of, verify_run
from ckpt_tasks.snapshot.cache import SnapshotCache
from ckpt_tasks.snapshot.memory import ORIGIN_NAME, SLOTS, MemoryDirectory
from ckpt_tasks.snapshot.rank_snapshot import Part, manifest_of
from ckpt_tasks.snapshot.slot import SlotStore
from ckpt_tasks.tensors.placements import World

_BLOCK_BYTES = 8 << 20
_log = logging.getLogger("ckpt_tasks")


@dataclass(frozen=True)
class Offer:
    """A rank's sealed slot on some host: its seal, and the size of each of its files."""

    rank: int
    slot: str
    seal: bytes
    sizes: Mapping[str, int]
    attempt: str  # The manifest's name, which is the same for all ranks.
    saved_at: str

    @property
    def size_bytes(self) -> int:
        """The size of all files together."""
        return sum(self.sizes.values())


class Piece(NamedTuple):
    """A range of bytes of a file in a slot."""

    name: str
    begin: int
    size_bytes: int


class Source(Protocol):
    """The memory of another host."""

    host: str

    def offers(self, ranks: Collection[int]) -> list[Offer]:
        """List the slots that these ranks have sealed on that host."""

    def read(self, offer: Offer, pieces: list[Piece]) -> list[bytes] | None:
        """Return the bytes of these pieces of the offered files.

        Returns None if the slot has been sealed again since the offer, or cannot be read.
        """


class HostMemory:
    """A run's memory on this host: of its own ranks and, as copies, of ranks on other hosts."""

    def __init__(self, config: CheckpointConfig, size: int):
        store = config.location.resolve(config.run_key).open()
        self._cache = SnapshotCache(store, config.memory_dir, world=World(0, size))
        self.size = size
        self.is_there = self._cache.locate()

    def offers(self, ranks: Iterable[int]) -> list[Offer]:
        """List the slots that ranks have sealed on this host."""
        offers = []
        for rank in ranks if self.is_there else ():
            memory = self._cache.slots_of(rank)
            for slot in SLOTS:
                with suppress(OSError, CkptError):  # The slot is empty, or is being refilled.
                    if (data := memory.sealed(slot)) is not None:
                        of = Seal.from_bytes(data).checkpoint
                        offers.append(Offer(rank, slot, data, memory.sizes(slot), of.manifest, of.saved_at))
        return offers

    def read(self, offer: Offer, pieces: list[Piece]) -> list[bytes] | None:
        """Return the bytes of these pieces of the offered files.

        Returns None if the slot has been sealed again since the offer, or cannot be read.
        """
        memory = self._cache.slots_of(offer.rank)
        with suppress(OSError, StoreError):
            data = [memory.read(offer.slot, *piece) for piece in pieces]
            return data if memory.sealed(offer.slot) == offer.seal else None
        return None

    def follow(
        self,
        source: Source,
        ranks: Collection[int],
        check: Callable[[], None],
        *,
        own: Collection[int] = (),
        before: Collection[str] = (),
    ) -> bool:
        """Copy the newest attempt that all `ranks` of a source have sealed; return False if there is nothing new.

        Attempts in `before` are not new: this host's `own` ranks may be about to restore them. After the first new
        copy, the memory of all ranks but `own` and `ranks` is removed. `check` is called between requests and may
        raise. Raises CkptError, and keeps the older copy, if the new one is damaged or the source refills its slots.
        """
        newest, here = newest_of(source.offers(ranks), ranks), newest_of(self.offers(ranks), ranks)
        if not newest or newest[0].attempt in before or [o.seal for o in newest] == [o.seal for o in here]:
            return False
        self._retain(ranks, here)
        for offer in newest:
            self.copy(offer, source, check)
        self._retain(ranks, newest)
        self._remove({*range(self.size)} - {*own} - {*ranks})
        return True

    def copy(self, offer: Offer, source: Source, check: Callable[[], None]) -> None:
        """Copy one rank's part into the slot that is empty or has the older snapshot. Raises as `follow` does."""
        if not self._cache.has_room(offer.size_bytes):
            raise StoreError("this host has no room for a copy of another one's memory")
        memory = self._cache.memory_of(offer.rank)
        try:
            before = {here.slot: here for here in self.offers([offer.rank])}
            if any(here.seal == offer.seal for here in before.values()):
                return
            slot = min(SLOTS, key=lambda slot: before[slot].saved_at if slot in before else "")
            memory.clear(slot)
            try:
                self._copy(memory, slot, offer, source, check)
            except BaseException:
                memory.clear(slot)
                raise
        finally:
            memory.close(keep=True)

    def copy_each(
        self, offers: Iterable[Offer], source: Source, check: Callable[[], None]
    ) -> list[tuple[Offer, CkptError | OSError]]:
        """Copy parts of a source, each whatever becomes of the others; return those that failed, and why."""
        failed = list[tuple[Offer, CkptError | OSError]]()
        for offer in offers:
            try:
                self.copy(offer, source, check)
            except (CkptError, OSError) as error:
                failed.append((offer, error))
        return failed

    def _copy(
        self, memory: MemoryDirectory, slot: str, offer: Offer, source: Source, check: Callable[[], None]
    ) -> None:
        if any(Path(name).name != name or name in (SEAL_NAME, ORIGIN_NAME) for name in offer.sizes):
            raise IntegrityError("a peer names a file that no slot has")
        taken = memory.take(slot, offer.sizes)
        for pieces in _requests(offer.sizes):
            check()
            data = source.read(offer, pieces)
            if data is None:
                raise StoreError(f"{source.host} has refilled a slot of rank {offer.rank} before it was copied")
            for piece, part in zip(pieces, data, strict=True):
                taken[piece.name][piece.begin : piece.begin + len(part)] = part
        _verify(SlotStore(memory, slot, self._cache.store), offer, check)
        tables = {name: taken[name] for name in offer.sizes if is_table(name)}  # Sealing removes all other tables.
        origin = f"{digest_hex(offer.seal)} {source.host}".encode()
        memory.seal(slot, {**tables, ORIGIN_NAME: origin}, offer.seal)

    def _retain(self, ranks: Iterable[int], kept: Iterable[Offer]) -> None:
        """Empty all slots of `ranks`, except slots that hold `kept` snapshots."""
        seals = {offer.rank: offer.seal for offer in kept}
        for rank in ranks:
            memory = self._cache.memory_of(rank)
            for slot in SLOTS:
                if rank not in seals or memory.sealed(slot) != seals[rank]:
                    memory.clear(slot)
            memory.close(keep=True)

    def release(self, own: Iterable[int]) -> None:
        """Remove the copies if the run has ended: then the `own` ranks of this host have removed their memory."""
        if self.is_there and not any(self._cache.slots_of(rank).path.is_dir() for rank in own):
            self._remove(range(self.size))

    def _remove(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if self._cache.slots_of(rank).path.is_dir():
                with suppress(StoreError):  # Another process of this host holds the memory.
                    self._cache.memory_of(rank).close(keep=False)


def newest_of(offers: Iterable[Offer], ranks: Collection[int]) -> list[Offer]:
    """Return the offers of the newest attempt that all `ranks` offer, in the order of ranks; [] if there is none."""
    by_attempt: dict[str, dict[int, Offer]] = {}
    for offer in offers:
        by_attempt.setdefault(offer.attempt, {}).setdefault(offer.rank, offer)
    whole = [parts for parts in by_attempt.values() if parts.keys() == {*ranks}]
    newest = max(whole, key=lambda parts: max(part.saved_at for part in parts.values()), default={})
    return [newest[rank] for rank in sorted(newest)]


def _requests(sizes: Mapping[str, int]) -> Iterator[list[Piece]]:
    """Yield the pieces of files for each request; they are large, because a request costs as much as some MiB."""
    pieces, room_bytes = list[Piece](), _BLOCK_BYTES
    for name, size_bytes in sizes.items():
        begin = 0
        while begin < size_bytes:
            pieces.append(Piece(name, begin, min(room_bytes, size_bytes - begin)))
            begin += pieces[-1].size_bytes
            room_bytes -= pieces[-1].size_bytes
            if not room_bytes:
                yield pieces
                pieces, room_bytes = [], _BLOCK_BYTES
    if pieces:
        yield pieces


def _verify(store: SlotStore, offer: Offer, check: Callable[[], None]) -> None:
    """Verify all bytes of a copy; raise IntegrityError. Older files of a table may exist only in storage."""
    part = Part(Seal.from_bytes(offer.seal), store)
    manifest = manifest_of(part)
    rows = by_object(read_index_of(part.store, manifest).rows)
    for record in manifest.objects:
        if record.name.rpartition("/")[2] not in offer.sizes and is_table(record.name):
            continue
        check_header(store, record)
        data = store.map(record.name)
        for run in merge_runs(rows.get(record.name, [])):
            check()
            if faults := verify_run(run, data[run[0].begin : run[-1].end]):
                raise IntegrityError(f"a copy of a peer's memory is damaged: {faults[0]}")
