"""The segments of a long list of live checkpoints (format/live.py) as objects in a store.

Segments never change, so they are cached while they are in use.
"""

from __future__ import annotations

from contextlib import suppress

from ckpt_tasks.errors import IntegrityError, ObjectExistsError, ObjectNotFoundError, StateError
from ckpt_tasks.format.ledger import MAX_ENTRY_BYTES
from ckpt_tasks.format.live import Segment, read_segment, write_segment
from ckpt_tasks.process import in_threads
from ckpt_tasks.storage.port import Store

_AT_ONCE, _FEW = 16, 4  # Send this many requests at once to a remote store; send up to _FEW one by one.


class Segments:
    """Reads and puts the segments of one run directory."""

    def __init__(self, store: Store):
        self._store = store
        self._known: dict[str, Segment] = {}

    def read(self, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        """Return segments with their checkpoints; raise IntegrityError if one is missing or damaged."""
        known = self._known
        missing = [segment for segment in segments if segment.digest not in known]
        alone = self._store.near or len(missing) < _FEW
        read = in_threads(self._get, missing, 1 if alone else _AT_ONCE, "ckpt-ledger")
        if len(known) > 2 * len(segments) + _FEW:  # Drop the segments of older entries.
            known = {segment.digest: known[segment.digest] for segment in segments if segment.digest in known}
        self._known = known = known | {segment.digest: segment for segment in read}
        return tuple(known[segment.digest] for segment in segments)

    def put(self, segments: tuple[Segment, ...]) -> None:
        """Put new segments of a list of live checkpoints; raise StateError for one that readers would refuse."""
        for segment in segments:
            if segment.digest in self._known:
                continue
            data = write_segment(segment.checkpoints)
            try:
                if len(data) > MAX_ENTRY_BYTES:
                    raise IntegrityError(f"{len(data)} bytes are more than the {MAX_ENTRY_BYTES} that are read")
                # Readers check every bound, so check the segment as they do.
                read_segment(data, digest=segment.digest, name=segment.name)
            except IntegrityError as error:
                raise StateError(f"the list of live checkpoints could not be read back: {error}") from error
            with suppress(ObjectExistsError):  # Its digest is its name: every writer writes the same bytes.
                self._store.put_if_absent(segment.name, data)
            self._known = self._known | {segment.digest: segment}

    def _get(self, segment: Segment) -> Segment:
        try:
            data = self._store.get(segment.name, MAX_ENTRY_BYTES)
        except ObjectNotFoundError as error:  # The entry exists, but is useless without this segment.
            raise IntegrityError("the list of checkpoints is gone", key=segment.name) from error
        return Segment(segment.digest, read_segment(data, digest=segment.digest, name=segment.name))
