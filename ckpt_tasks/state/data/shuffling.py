"""A shuffle buffer for streams, with an order that a resume can restore.

The buffer yields sample n of the stream in the order of n + d(n), where d(n) is a number below `size` that depends only
on (seed, epoch, n). So a sample moves by less than `size` positions, and the buffer holds fewer than `size` samples,
which follow from the position alone: a resume reads the stream from a state at most two buffers back, and drops samples
that were yielded before the save.
"""

from __future__ import annotations

import copy
import heapq
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Self

from torch.utils.data import IterableDataset

from ckpt_tasks.checked import checked
from ckpt_tasks.errors import StateMismatchError
from ckpt_tasks.state.data.drawing import mixed_seed, seed_of
from ckpt_tasks.state.data.libraries import copy_of, return_state, why_inexact
from ckpt_tasks.state.data.sampler import check_count

_STATES = 4  # Keep this many states of the stream for each `size` samples.
_START = (-1, -1)


class ShuffleBuffer(IterableDataset[Any]):
    """Shuffle a stream within a buffer of at most `size` samples; a restore refills the buffer.

    ::

        stream = ShuffleBuffer(datasets.load_dataset(…, streaming=True), 10_000, seed=7)
        loader = ResumableLoader(stream, batch_size=32, num_workers=2)

    A sample moves by less than `size` positions, and by a quarter of `size` on average. Each epoch has another order
    (`set_epoch`). The state has a state of the stream and numbers, but no samples. A restore reads at most 2 × `size`
    samples again. Raises ConfigError for a size below 1.
    """

    @checked
    def __init__(self, stream: Any, size: int, *, seed: int = 0):
        check_count("size", size, least=1, most=2**62)
        self.stream, self.size, self.seed = stream, size, seed
        self._epoch = 0
        self._loaded: Mapping[str, Any] | None = None  # The state at which the next `iter` begins.
        self._last = _START  # Position in the order, and number, of the last yielded sample.
        self._states: deque[tuple[int, Any]] = deque([(0, None)])  # Counts of read samples, with the stream's states.

    def __copy__(self) -> Self:
        new = type(self).__new__(type(self))
        vars(new).update(vars(self), stream=copy_of(self.stream), _states=deque(self._states))
        return new

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch; also pass the epoch to the stream."""
        self._epoch = epoch
        if callable(tell := getattr(self.stream, "set_epoch", None)):
            tell(epoch)

    def why_inexact(self) -> str | None:
        """Return why a resume cannot restore the samples (for example, the stream has no state); None if it can."""
        return why_inexact(self.stream)

    def __iter__(self) -> Iterator[Any]:
        start, self._loaded = self._loaded or {"read": 0, "stream": None, "last": _START}, None
        if start["stream"] is not None:
            return_state(self.stream, start["stream"])
        read, first = start["read"], (start["last"][0], start["last"][1])
        self._states, self._last = deque([(read, start["stream"])]), first
        every, held = max(1, self.size // _STATES), list[tuple[tuple[int, int], Any]]()
        key, stateful = seed_of(f"{self.seed}/{self._epoch}/shuffle"), why_inexact(self.stream) is None
        for number, sample in enumerate(self.stream, read):
            place = (number + mixed_seed((key + number) % 2**64) % self.size, number)
            if place > first:
                heapq.heappush(held, (place, sample))
            while held and held[0][0][0] <= number:  # All samples not read yet come later.
                yield self._give(held)
            if stateful and (number + 1) % every == 0:
                self._states.append((number + 1, self.stream.state_dict()))
        while held:
            yield self._give(held)

    def _give(self, held: list[tuple[tuple[int, int], Any]]) -> Any:
        self._last, sample = heapq.heappop(held)
        # Samples that are not yielded yet have higher numbers than this.
        oldest = self._last[0] - self.size
        while len(self._states) > 1 and self._states[1][0] <= oldest + 1:
            self._states.popleft()
        return sample

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last yielded sample."""
        if self._loaded is not None:
            return copy.deepcopy(dict(self._loaded))
        read, state = self._states[0]
        return {"size": self.size, "seed": self.seed, "read": read, "stream": state, "last": [*self._last]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the position at which the next `iter` begins. Raises StateMismatchError for another size or seed."""
        own = {"size": self.size, "seed": self.seed}
        if different := tuple(
            f"{name}: {state_dict.get(name)!r}, not {own[name]!r}" for name in own if state_dict.get(name) != own[name]
        ):
            raise StateMismatchError("the buffer shuffles in another order", different=different)
        self._loaded = copy.deepcopy(dict(state_dict))
