"""One pass of a loop over a loader, and what stands between the two: enumerate, zip, islice, a progress bar.

A restored epoch begins in its middle, but `enumerate(loader)`, `islice(loader, n)` and `zip(loader, other)` begin anew.
With the iterators that refer to a pass, and the source of its loop, a pass knows its form at its first batch: it
shortens an islice, warns of numbers from 0, and has a fault if a resume would give other samples, which a save raises.
"""

from __future__ import annotations

import ast
import dis
import gc
import inspect
import linecache
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import accumulate, count, islice, pairwise, repeat, zip_longest
from operator import length_hint
from types import FrameType, GeneratorType
from typing import Any, NamedTuple

from torch.utils.data.dataloader import _BaseDataLoaderIter

from ckpt_tasks.errors import ConfigError

_BARS = ("tqdm", "ckpt_tasks.checkpoint.")
_SIZED: tuple[Any, ...] = ([], (), {}, {}.values(), {}.items(), "", b"")
_FIXED = tuple(type(iter(one)) for one in _SIZED)
_RANGE: Any = type(iter(range(0)))
_ZIPS: tuple[Any, ...] = (zip, zip_longest)
_CONSUMERS: tuple[Any, ...] = (accumulate, enumerate, islice, map, pairwise, *_ZIPS)
_PLAIN = (ast.expr_context, ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp)
_PARTS = (ast.cmpop, ast.boolop, ast.operator, ast.unaryop, ast.Call, ast.NamedExpr, ast.Subscript)
_CALLS = frozenset({"abs", "float", "int", "len", "max", "min", "range", "round"})
_LEAVING = (ast.Break, ast.Return)
_MOST_COUNTS = 100_000  # Try at most so many numbers of a batch in the condition of a `break`.
_BY_NUMBER = "Write `for number, batch in enumerate(loader, loader.batch):`, and `if number == n: break` above the step"

# Match no loop with a `break` or a `return`: it may end early.
_WHOLE_RANGE = re.compile(r"for .+ in .*range\((?:[01], )?[^,]*?(?:\)|, \w+=).*:\n(?!(?:.*\n)* +(?:break|return)\b)")
_ONE_OTHER = (
    "Make one data set of both. Or put a ResumableLoader over the other data into the state, make one endless iterator "
    "over it above the epochs, and call next() on it for each batch"
)


class EpochEndedError(ConfigError, StopIteration):
    """A restored epoch has no more batches; a `for` loop ends with it, and a `next()` shows what it says."""

    def __init__(self, message: str, **more: Any):
        super().__init__(message, **more)
        StopIteration.__init__(self, message)
        self.value = None  # What `yield from loader` returns.


class Form(NamedTuple):
    """The form of a loop over a loader; `breaks` holds the lines of a `break` that depends on a number of batches."""

    from_nought: bool  # An enumerate() begins at 0.
    most: int | None  # An islice() ends the pass after so many batches.
    fault: tuple[str, str] | None  # Why a resume gives other samples, and what to write.
    code: Any
    line: int
    breaks: list[int]


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
    for below, consumer in pairwise([one, *chain]):
        zipped, others = _zipped(consumer, below) if type(consumer) in _ZIPS else ((), [])
        from_nought |= any(type(zipped[number]) in (_RANGE, count) for number in others)
        fault = _fault_of(consumer, zipped, others, batches) or fault
    found = loops_around(loop)
    breaks = _counted_breaks(found, loop, batches) if loop is not None and batches else []
    if not chain and loop is not None and batches and _takes_fewer(loop, batches):
        fault = ("the loop takes a number of batches by next(), also of a restored epoch's rest", _BY_NUMBER)
    return Form(from_nought, most, fault, loop and loop.f_code, loop.f_lineno if loop else 0, breaks)


def _zipped(consumer: Any, below: Any) -> tuple[tuple[Any, ...], list[int]]:
    """Return what a zip() iterates, and the places of all but the pass."""
    zipped = next(held for held in gc.get_referents(consumer) if type(held) is tuple and _is_in(below, held))
    return zipped, [number for number, other in enumerate(zipped) if other is not below]


def _fault_of(consumer: Any, zipped: tuple[Any, ...], others: list[int], batches: int | None) -> tuple[str, str] | None:
    """Return why an iterator over a pass gives other items in a restored epoch, and what to do; None if it does not."""
    if type(consumer) is islice:
        start, _, step = _slice_of(consumer)
        if start or step != 1:
            return "islice() counts from the begin of a restored epoch's rest", _BY_NUMBER
    elif type(consumer) in (accumulate, pairwise):
        return f"{type(consumer).__name__}() begins anew in the middle of a restored epoch", _BY_NUMBER
    elif any(_begins_anew(zipped, number, batches) for number in others):
        return "zip() begins the others anew in the middle of a restored epoch, or ends with the shortest", _ONE_OTHER
    return None


def check_form(form: Form, *, numbered: bool, here: FrameType | None) -> None:
    """Raise ConfigError if a loop of this form would go on with other samples after a save at `here`."""
    fault = form.fault
    if form.breaks and not numbered:
        fault = ("the loop leaves its epochs by a number of batches that begins anew in a restored epoch", _BY_NUMBER)
    if fault and not numbered:
        raise ConfigError(f"{fault[0]}: a resume would train other samples", key="loader", hint=f"{fault[1]}.")
    while form.breaks and here is not None and here.f_code is not form.code:
        here = here.f_back
    # If the loop stands at its own line, `resumable` saves where it asks for its next batch.
    if here is not None and any(line > here.f_lineno > form.line for line in form.breaks):
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


def _begins_anew(zipped: tuple[Any, ...], number: int, batches: int | None) -> bool:
    """Return True if an iterator in a zip() begins anew at a resume, or would end the epoch before its loader does."""
    # What else refers to an iterator may hold it for longer than an epoch, or restore it.
    is_new = _references(zipped, number) == _ALONE
    other = zipped[number]
    if isinstance(other, Pass):
        return other.total != batches
    if type(other) is _RANGE:
        return batches is not None and length_hint(other) + 1 < batches
    if isinstance(other, _BaseDataLoaderIter):
        return type(other).__module__.startswith("torch.")
    if type(other) in _FIXED:
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


def _is_for_statement(here: FrameType | None) -> bool:
    """Return True if a `for` statement has asked for this iterator: nothing is between the two."""
    while here is not None and here.f_globals.get("__name__", "").startswith("ckpt_tasks."):
        here = here.f_back
    return here is not None and not _is_bar(here) and here.f_code.co_code[here.f_lasti] == dis.opmap["GET_ITER"]


def loops_around(frame: FrameType | None) -> list[ast.For | ast.While]:
    """Return the loops around the statement that takes a batch; the last is the loop over the loader."""
    loops = [node for node in _around(frame) if isinstance(node, ast.For | ast.While)]
    return loops if frame is not None and loops and loops[-1].lineno == frame.f_lineno else []


def may_train(leaving: FrameType | None) -> bool:
    """Return False if the `with` block that calls `leaving` uses its object neither in a loop nor as an argument."""
    block = leaving and leaving.f_back
    blocks = [node for node in _around(block) if isinstance(node, ast.With)]
    if block is None or not blocks or block.f_globals.get("__name__", "").startswith("ckpt_tasks."):
        return True
    names = {ast.unparse(name) for item in blocks[-1].items for name in (item.optional_vars, item.context_expr) if name}
    inner = [node for statement in blocks[-1].body for node in ast.walk(statement)]
    used: list[ast.AST] = [node for node in inner if isinstance(node, ast.For | ast.While)]
    used += [argument for node in inner if isinstance(node, ast.Call) for argument in (*node.args, *node.keywords)]
    return any(
        ast.unparse(n) in names for one in used for n in ast.walk(one) if isinstance(n, ast.Name | ast.Attribute)
    )


def _around(frame: FrameType | None) -> list[ast.stmt]:
    """Return the statements around the one that a frame is at, the outermost first; none if the source is not there."""
    if frame is None:
        return []
    try:
        source = ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    except (SyntaxError, ValueError):  # The source is not Python.
        return []
    statements = [node for node in ast.walk(source) if isinstance(node, ast.stmt)]
    return [node for node in statements if node.lineno <= frame.f_lineno <= (node.end_lineno or 0)]


def counts_anew(frame: FrameType | None) -> bool:
    """Return True if all loops around the loop over the loader are over range(N): a restore does not shorten them."""
    loops = loops_around(frame)
    return len(loops) > 1 and all(_WHOLE_RANGE.match(ast.unparse(loop)) for loop in loops[:-1])


def _counted_breaks(loops: list[ast.For | ast.While], frame: FrameType, batches: int) -> list[int]:
    """Return the lines at which some number of a batch ends the last loop, by `break` or `return`."""
    if not loops or not isinstance(loop := loops[-1], ast.For):
        return []
    counters = _counters(loops, loop)
    conditions = [node for node in _within(loop) if isinstance(node, ast.If) and _names(node.test) & counters]
    lines = []
    variables = {**frame.f_globals, **frame.f_locals}
    for node in conditions:
        inner = [inner for part in node.body for inner in _within(part)]
        for test, nodes in ((node.test, inner), (ast.UnaryOp(ast.Not(), node.test), node.orelse)):
            ends = [one.lineno for one in nodes if isinstance(one, _LEAVING)]
            if ends and _comes_true(test, _names(node.test) & counters, variables, batches):
                lines += ends
    return lines


def _counters(loops: list[ast.For | ast.While], loop: ast.For) -> set[str]:
    """Return the names that count the batches of the last loop: by enumerate, or from a number before it."""
    calls = [node for node in ast.walk(loop.iter) if isinstance(node, ast.Call)]
    counters: set[str] = set()
    if any(ast.unparse(call.func) == "enumerate" for call in calls) and isinstance(loop.target, ast.Tuple):
        counters |= _names(loop.target.elts[0])
    if len(loops) > 1:
        counting = [node for node in _within(loop) if isinstance(node, ast.AugAssign | ast.NamedExpr)]
        counted = {name for node in counting for name in _names(node.target)}
        at_start = (node for node in loops[-2].body if isinstance(node, ast.Assign) and node.lineno < loop.lineno)
        counters |= counted & {name for node in at_start for target in node.targets for name in _names(target)}
    return counters


def _takes_fewer(frame: FrameType, batches: int) -> bool:
    """Return True for a loop over range(n) that calls next() for fewer batches than a new iterator has."""
    loops = [node for node in _around(frame) if isinstance(node, ast.For | ast.While)]
    if len(loops) < 2 or not isinstance(loop := loops[-1], ast.For) or loop not in loops[-2].body:
        return False
    before = [node.value for node in loops[-2].body if isinstance(node, ast.Assign) and node.lineno < loop.lineno]
    if not any(isinstance(made, ast.Call) and ast.unparse(made.func) == "iter" for made in before):
        return False
    numbers = next(_values(loop.iter, {**frame.f_globals, **frame.f_locals}, [{}]), None)
    return isinstance(numbers, range) and len(numbers) < batches


def _within(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and what is in it, without the loops and functions in it."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.For | ast.While | ast.FunctionDef | ast.ClassDef | ast.Lambda):
            yield from _within(child)


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _comes_true(test: ast.expr, counters: set[str], variables: dict[str, Any], batches: int) -> bool:
    """Return True if a condition is true for the number of some batch but the last; False if that is not known."""
    by_number = any(isinstance(one, ast.Subscript) and _names(one) & counters for one in ast.walk(test))
    numbers = range(min(batches - 1, _MOST_COUNTS))
    return not by_number and any(_values(test, variables, (dict.fromkeys(counters, one) for one in numbers)))


def _values(expression: ast.expr, variables: dict[str, Any], given: Iterable[dict[str, Any]]) -> Iterator[Any]:
    """Yield an expression's value for each set of given variables; nothing if it calls functions of the program."""
    nodes = [*ast.walk(expression)]
    calls = {ast.unparse(one.func) for one in nodes if isinstance(one, ast.Call)}
    if not all(isinstance(one, (*_PLAIN, *_PARTS)) for one in nodes) or calls & variables.keys() or calls - _CALLS:
        return
    code = compile(ast.fix_missing_locations(ast.Expression(expression)), "<condition>", "eval")
    with suppress(Exception):  # Whatever a foreign value raises: the value is not known.
        yield from (eval(code, variables, own) for own in given)  # noqa: S307 (the loop's own expression)
