"""A shuffle buffer for streams whose order a resume can restore.

Sample number n of the stream comes in the order of n + d(n), where d(n) is a number below `size` that depends on (seed,
epoch, n) alone. So a sample moves by less than `size` places, fewer than `size` samples are held, and what is held is
known without the past: a resume reads the stream from a state at most two buffers back, and drops what was given.
"""

from __future__ import annotations

import copy
import heapq
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Self

from torch.utils.data import IterableDataset

from ckpt_tasks.checked import checked
from ckpt_tasks.data.drawing import mixed, seed_of
from ckpt_tasks.data.libraries import copy_of, return_state, why_inexact
from ckpt_tasks.data.sampler import check_count
from ckpt_tasks.errors import StateMismatchError

_STATES = 4  # Keep this many states of the stream for each buffer's length.
_START = (-1, -1)


class ShuffleBuffer(IterableDataset[Any]):
    """Shuffle a stream within a buffer of at most `size` samples; a restore of its state refills the buffer.

    ::

        stream = ShuffleBuffer(datasets.load_dataset(…, streaming=True), 10_000, seed=7)
        loader = ResumableLoader(stream, batch_size=32, num_workers=2)

    A sample moves by less than `size` places, by a quarter of that on average. Each epoch has another order
    (`set_epoch`). The state is small: it has a state of the stream and numbers, no samples. After a restore at most 2 ×
    `size` samples are read again. Raises ConfigError for a size below 1.
    """

    @checked
    def __init__(self, stream: Any, size: int, *, seed: int = 0):
        check_count("size", size, least=1, most=2**62)
        self.stream, self.size, self.seed = stream, size, seed
        self._epoch = 0
        self._loaded: Mapping[str, Any] | None = None  # The state from which the next `iter` begins.
        self._last = _START  # The place in the order, and the number, of the last sample yielded.
        self._states: deque[tuple[int, Any]] = deque([(0, None)])  # Numbers of samples read, and the stream's states.

    def __copy__(self) -> Self:
        new = type(self).__new__(type(self))
        vars(new).update(vars(self), stream=copy_of(self.stream), _states=deque(self._states))
        return new

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffled order of an epoch; pass the epoch on to the stream."""
        self._epoch = epoch
        if callable(tell := getattr(self.stream, "set_epoch", None)):
            tell(epoch)

    def why_inexact(self) -> str | None:
        """Return why a resume cannot restore the samples (the stream has no state); None if it can."""
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
            place = (number + mixed((key + number) % 2**64) % self.size, number)
            if place > first:
                heapq.heappush(held, (place, sample))
            while held and held[0][0][0] <= number:  # Samples read from here on come after it.
                yield self._give(held)
            if stateful and (number + 1) % every == 0:
                self._states.append((number + 1, self.stream.state_dict()))
        while held:
            yield self._give(held)

    def _give(self, held: list[tuple[tuple[int, int], Any]]) -> Any:
        self._last, sample = heapq.heappop(held)
        # Samples in the buffer, and later ones, have higher numbers than this.
        oldest = self._last[0] - self.size
        while len(self._states) > 1 and self._states[1][0] <= oldest + 1:
            self._states.popleft()
        return sample

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last sample yielded."""
        if self._loaded is not None:
            return copy.deepcopy(dict(self._loaded))
        read, state = self._states[0]
        return {"size": self.size, "seed": self.seed, "read": read, "stream": state, "last": [*self._last]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the place where the next `iter` begins. Raises StateMismatchError for another size or seed."""
        own = {"size": self.size, "seed": self.seed}
        if different := tuple(
            f"{name}: {state_dict.get(name)!r}, not {own[name]!r}" for name in own if state_dict.get(name) != own[name]
        ):
            raise StateMismatchError("the buffer shuffles in another order", different=different)
        self._loaded = copy.deepcopy(dict(state_dict))
