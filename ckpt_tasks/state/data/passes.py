"""One pass of a loop over a loader, and what stands between the two: enumerate, zip, islice, a progress bar.

A restored epoch begins in its middle, but `enumerate(loader)`, `islice(loader, n)` and `zip(loader, other)` begin anew.
With the iterators that refer to a pass, and the source of its loop, a pass knows its form at its first batch: it
shortens an islice, warns of numbers from 0, and has a fault if a resume would give other samples, which a save raises.
"""

from __future__ import annotations

import dis
import gc
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import accumulate, count, cycle, islice, pairwise, repeat, zip_longest
from operator import length_hint
from types import FrameType, GeneratorType
from typing import Any, NamedTuple

from torch.utils.data.dataloader import _BaseDataLoaderIter

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.state.data.loops import at_multiples, counted_breaks, loops_around, loops_at, made_anew, takes_fewer

_BARS = ("tqdm", "ckpt_tasks.checkpoint.")
_SIZED: tuple[Any, ...] = ([], (), {}, {}.values(), {}.items(), "", b"")
_FIXED = tuple(type(iter(one)) for one in _SIZED)
_RANGE: Any = type(iter(range(0)))
_ZIPS: tuple[Any, ...] = (zip, zip_longest)
_CONSUMERS: tuple[Any, ...] = (accumulate, cycle, enumerate, islice, map, pairwise, *_ZIPS)
_BY_NUMBER = "Write `for number, batch in enumerate(loader, loader.batch):`, and `if number == n: break` above the step"

_ONE_OTHER = (
    "Make one data set of both. Or put a ResumableLoader over the other data into the state, make one endless iterator "
    "over it above the epochs, and call next() on it for each batch"
)


CYCLED = (
    "cycle() repeats the batches that it has seen, which in a restored epoch are those of its rest",
    "Loop over loader.epochs(n), or call next() on an endless generator: `while True: yield from loader`",
)


class EpochEndedError(ConfigError, StopIteration):
    """A restored epoch has no more batches; a `for` loop ends with it, and a `next()` shows what it says."""

    def __init__(self, message: str, **more: Any):
        super().__init__(message, **more)
        StopIteration.__init__(self, message)
        self.value = None  # What `yield from loader` returns.


class Form(NamedTuple):
    """The form of a loop over a loader.

    `breaks` holds the lines of a `break` that depends on a number of batches, `multiples` those at multiples of steps.
    """

    from_nought: bool  # An enumerate() begins at 0.
    most: int | None  # An islice() ends the pass after so many batches.
    fault: tuple[str, str] | None  # Why a resume gives other samples, and what to write.
    code: Any
    line: int
    breaks: list[int]
    multiples: list[int]


class Pass(Iterator[Any]):
    """One pass over a loader. `behind`: the number of batches of the epoch before it; `total`: of the whole epoch.

    `look` gets the frame of the loop at the first batch, and returns how many batches the loop takes at most.
    `on_next` runs before each batch but the first, `on_batch` with each.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        look: Callable[[Pass, FrameType | None], int | None] | None = None,
        *,
        behind: int = 0,
        total: int | None = None,
        is_plain: bool = False,
    ):
        self._batches, self._look, self._behind, self.total, self.is_plain = batches, look, behind, total, is_plain
        self.count = 0  # The number of batches that this pass has yielded.
        self.in_for = False  # True if a `for` statement takes the batches, with nothing in Python between the two.
        self.is_open = True
        self.is_direct = _is_for_statement(inspect.currentframe())
        self.form: Form | None = None
        self._left: int | None = None
        self.on_next: Callable[[], None] | None = None
        self.on_batch: Callable[[], None] | None = None

    def __next__(self) -> Any:
        if not self.is_open:
            raise StopIteration
        if self.count and self.on_next:
            self.on_next()
        elif self._look:
            look, self._look = self._look, None
            # Keep no frame in a variable: it would hold this pass until the next garbage collection.
            self.in_for = _is_in_for(getattr(inspect.currentframe(), "f_back", None))
            self._left = look(self, getattr(inspect.currentframe(), "f_back", None))
        if self.count == self._left:
            self.is_open = False
            raise StopIteration
        try:
            batch = next(self._batches)
        except StopIteration:
            self.is_open = False
            if self._behind:
                raise EpochEndedError(
                    f"the restored epoch had {self.count} batches left, behind the {self._behind} before them",
                    hint="len(loader) counts those of a whole epoch: write range(loader.batch, len(loader)).",
                ) from None
            raise
        self.count += 1
        if self.on_batch:
            self.on_batch()
        return batch


def form_of(one: Pass, caller: FrameType | None, batches: int | None) -> Form:
    """Return the form of a pass at its first batch; `batches`: the number of them in an epoch, if it is known."""
    chain, loop = _consumers(one, caller), loop_frame(caller)
    from_nought = any(type(consumer) is enumerate and consumer.__reduce__()[1][1] == 0 for consumer in chain)
    stops = [_slice_of(consumer)[1] for consumer in chain if type(consumer) is islice]
    most, fault = min((stop for stop in stops if stop is not None), default=None), None
    found = loops_around(loop)
    made = made_anew(found) if any(type(consumer) in _ZIPS for consumer in chain) else set()
    for below, consumer in pairwise([one, *chain]):
        zipped, others = _zipped(consumer, below) if type(consumer) in _ZIPS else ((), [])
        from_nought |= any(type(zipped[number]) in (_RANGE, count) for number in others)
        fault = _fault_of(consumer, zipped, others, batches, made) or fault
    breaks = counted_breaks(found, loop, batches) if loop is not None and batches else []
    if not chain and loop is not None and batches and takes_fewer(loop, batches):
        fault = ("the loop takes a number of batches by next(), also of a restored epoch's rest", _BY_NUMBER)
    code, line = (loop.f_code, loop.f_lineno) if loop is not None else (None, 0)
    return Form(from_nought, most, fault, code, line, breaks, at_multiples(found))


def _zipped(consumer: Any, below: Any) -> tuple[tuple[Any, ...], list[int]]:
    """Return what a zip() iterates, and the places of all but the pass."""
    zipped = next(held for held in gc.get_referents(consumer) if type(held) is tuple and _is_in(below, held))
    return zipped, [number for number, other in enumerate(zipped) if other is not below]


def _fault_of(
    consumer: Any, zipped: tuple[Any, ...], others: list[int], batches: int | None, made: set[int]
) -> tuple[str, str] | None:
    """Return why an iterator over a pass gives other items in a restored epoch, and what to do; None if it does not."""
    if type(consumer) is islice:
        start, _, step = _slice_of(consumer)
        if start or step != 1:
            return "islice() counts from the begin of a restored epoch's rest", _BY_NUMBER
    elif type(consumer) is cycle:
        return CYCLED
    elif type(consumer) in (accumulate, pairwise):
        return f"{type(consumer).__name__}() begins anew in the middle of a restored epoch", _BY_NUMBER
    elif any(_begins_anew(zipped, number, batches, is_new=number in made) for number in others):
        return "zip() begins the others anew in the middle of a restored epoch, or ends with the shortest", _ONE_OTHER
    return None


def check_form(form: Form, *, numbered: bool, here: FrameType | None) -> None:
    """Raise ConfigError if a loop of this form would go on with other samples after a save at `here`."""
    fault = form.fault
    if form.breaks and not numbered:
        fault = ("the loop leaves its epochs by a number of batches that begins anew in a restored epoch", _BY_NUMBER)
    if fault and not numbered:
        raise ConfigError(f"{fault[0]}: a resume would train other samples", key="loader", hint=f"{fault[1]}.")
    while (form.breaks or form.multiples) and here is not None and here.f_code is not form.code:
        here = here.f_back
    # If the loop stands at its own line, `resumable` saves where it asks for its next batch.
    if here is not None and any(line > here.f_lineno > form.line for line in (*form.breaks, *form.multiples)):
        raise ConfigError(
            "the loop saves a step, and then leaves the epoch by a number of batches: restored at that step, it would "
            "not leave it",
            key="loader",
            hint=f"{_BY_NUMBER}.",
        )


def _consumers(one: Any, caller: FrameType | None) -> list[Any]:
    """Return the iterators between a pass and its loop, the innermost first."""
    chain: list[Any] = []
    if one.is_direct:
        return chain
    while True:
        holders = gc.get_referrers(one)
        tuples = [holder for holder in holders if type(holder) is tuple]
        holders += [holder for holder in gc.get_referrers(*tuples) if type(holder) in _ZIPS] if tuples else []
        next_one = next((holder for holder in holders if type(holder) in _CONSUMERS), None)
        if next_one is None and caller is not None and _is_bar(caller):
            # A running generator does not refer to what it iterates over. Do not ask gc.get_objects(): a reference to a
            # tuple that another thread is making breaks that thread.
            generators = [holder for holder in gc.get_referrers(caller.f_code) if type(holder) is GeneratorType]
            next_one, caller = next((one for one in generators if one.gi_frame is caller), None), caller.f_back
        if next_one is None:
            return chain
        chain.append(one := next_one)


def _slice_of(one: Any) -> tuple[int, int | None, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        reduced = one.__reduce__()
    start, stop, step = reduced[1][1:] if len(reduced[1]) == 4 else (0, 0, 1)
    return start, stop, step


def _begins_anew(zipped: tuple[Any, ...], number: int, batches: int | None, *, is_new: bool) -> bool:
    """Return True if an iterator in a zip() begins anew at a resume, or would end the epoch before its loader does."""
    # What else refers to an iterator may hold it for longer than an epoch, or restore it.
    is_new |= _references(zipped, number) == _ALONE
    other = zipped[number]
    if isinstance(other, Pass):
        return other.total != batches
    if type(other) is _RANGE:
        return batches is not None and length_hint(other) + 1 < batches
    if isinstance(other, _BaseDataLoaderIter):
        return type(other).__module__.startswith("torch.")
    if type(other) in (cycle, *_FIXED):
        return True
    return is_new and type(other) not in (count, repeat) and not _may_resume(other)


def _references(held: tuple[Any, ...], number: int) -> int:
    return sys.getrefcount(held[number])


_ALONE = _references((iter(()),), 0)  # The references of an iterator that its zip() alone holds.


def _may_resume(one: Any, depth: int = 3) -> bool:
    """Return True if an iterator is over an object that has a state, such as another ResumableLoader."""
    if isinstance(one, Pass) or (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
        return True
    parts: list[Any] = gc.get_referents(one) if type(one).__module__ in ("builtins", "itertools") else []
    if isinstance(one, GeneratorType):
        parts = [*one.gi_frame.f_locals.values()] if one.gi_frame else []
    elif hasattr(one, "__dict__"):
        parts = [*vars(one).values()]
    return depth > 0 and any(_may_resume(part, depth - 1) for part in parts)


def _is_in(one: object, held: tuple[Any, ...]) -> bool:
    return any(one is other for other in held)


def _is_bar(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_globals.get("__name__", "").startswith(_BARS)


def loop_frame(caller: FrameType | None) -> FrameType | None:
    """Return the frame of the loop behind the frames of progress bars."""
    while _is_bar(caller):
        caller = caller and caller.f_back
    return caller


def loop_place(caller: FrameType | None) -> tuple[Any, int] | None:
    """Return the code and the line of the loop that takes a batch; keep no frame, which would keep the batch."""
    loop = loop_frame(caller)
    return None if loop is None else (loop.f_code, loop.f_lineno)


def is_within(place: tuple[Any, int] | None, here: FrameType | None, but: tuple[Any, int] | None = None) -> bool:
    """Return True if a loop around `here` has this place in it, a loop other than `but`."""
    code, line = place or (None, 0)
    while here is not None and here.f_code is not code:
        here = here.f_back
    loops = [loop for loop in loops_at(here) if (code, loop.lineno) != but]
    return any(loop.lineno <= line <= (loop.end_lineno or 0) for loop in loops)


def _is_in_for(caller: FrameType | None) -> bool:
    """Return True if a `for` statement asks for a batch, itself or through enumerate(), outside of a generator."""
    if caller is None or caller.f_code.co_flags & inspect.CO_GENERATOR:
        return False
    return caller.f_code.co_code[caller.f_lasti] == dis.opmap["FOR_ITER"]


def _is_for_statement(here: FrameType | None) -> bool:
    """Return True if a `for` statement has asked for this iterator: nothing is between the two."""
    while here is not None and here.f_globals.get("__name__", "").startswith("ckpt_tasks."):
        here = here.f_back
    return here is not None and not _is_bar(here) and here.f_code.co_code[here.f_lasti] == dis.opmap["GET_ITER"]
