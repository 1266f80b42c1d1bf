"""The position in the data of a loader or a sampler: an epoch, samples of it, and a count of restores and skips."""

from __future__ import annotations


class Position:
    """A position in numbered samples or in a stream, which a ResumableLoader moves.

    `moves` counts restores and skips: after each, a running iterator starts again at the new position.
    """

    def __init__(self) -> None:
        self._epoch = self._samples = self.moves = 0

    @property
    def epoch(self) -> int:
        """The number of completed epochs, and so the number of the next batch's epoch."""
        return self._epoch

    @property
    def samples(self) -> int:
        """The number of samples of this epoch that all ranks together have received; for a stream, this rank."""
        return self._samples
