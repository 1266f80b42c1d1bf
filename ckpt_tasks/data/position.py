"""A position in the data, of a loader or a sampler: the epoch, the samples of it, and a count of restores and skips."""

from __future__ import annotations


class Position:
    """A position in the data that a ResumableLoader moves, of samples by number or of a stream.

    `moves` counts restores and skips: after one, a running iterator starts again at the new position.
    """

    def __init__(self) -> None:
        self._epoch = self._samples = self.moves = 0

    @property
    def epoch(self) -> int:
        """The number of completed epochs, which is also the number of the next batch's epoch."""
        return self._epoch

    @property
    def samples(self) -> int:
        """The number of samples of this epoch that all ranks together (for a stream, this rank) have received."""
        return self._samples
