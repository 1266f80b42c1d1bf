"""What the source of a loop tells: by which numbers it leaves an epoch, and what each epoch makes anew."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from types import FrameType
from typing import Any

_PLAIN = (ast.expr_context, ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp)
_PARTS = (ast.cmpop, ast.boolop, ast.operator, ast.unaryop, ast.Call, ast.NamedExpr, ast.Subscript)
_CALLS = frozenset({"abs", "float", "int", "len", "max", "min", "range", "round"})
_LEAVING = (ast.Break, ast.Return)
_GROWING = frozenset({"add", "append", "appendleft"})
_MOST_COUNTS = 100_000  # Try at most so many numbers of a batch in the condition of a `break`.

# Match no loop with a `break` or a `return`: it may end early.
_WHOLE_RANGE = re.compile(r"for .+ in .*range\((?:[01], )?[^,]*?(?:\)|, \w+=).*:\n(?!(?:.*\n)* +(?:break|return)\b)")


def loops_around(frame: FrameType | None) -> list[ast.For | ast.While]:
    """Return the loops around the statement that takes a batch; the last is the loop over the loader."""
    loops = loops_at(frame)
    return loops if frame is not None and loops and loops[-1].lineno == frame.f_lineno else []


def loops_at(frame: FrameType | None) -> list[ast.For | ast.While]:
    """Return the loops around the statement that a frame is at, the outermost first."""
    return [node for node in _around(frame) if isinstance(node, ast.For | ast.While)]


def counts_anew(frame: FrameType | None) -> bool:
    """Return True if all loops around the loop over the loader are over range(N): a restore does not shorten them."""
    loops = loops_around(frame)
    return len(loops) > 1 and all(_WHOLE_RANGE.match(ast.unparse(loop)) for loop in loops[:-1])


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


def made_anew(loops: list[ast.For | ast.While]) -> set[int]:
    """Return the places in a zip() of those variables that each epoch makes anew."""
    if len(loops) < 2:
        return set()
    before = _assigned_before(loops)
    made = [getattr(loops[-1], "iter", loops[-1]), *before.values()]
    calls = [node for one in made for node in ast.walk(one) if isinstance(node, ast.Call)]
    zips = [call.args for call in calls if ast.unparse(call.func) in ("zip", "zip_longest")]
    return {place for args in zips for place, one in enumerate(args) if isinstance(one, ast.Name) and one.id in before}


def counted_breaks(loops: list[ast.For | ast.While], frame: FrameType, batches: int) -> list[int]:
    """Return the lines at which some number of a batch ends the last loop, by `break` or `return`."""
    if not loops or not isinstance(loop := loops[-1], ast.For):
        return []
    counters, sized = _counters(loops, loop)
    conditions = [node for node in _within(loop) if isinstance(node, ast.If) and _names(node.test) & counters]
    lines = []
    variables = {**frame.f_globals, **frame.f_locals}
    for node in conditions:
        inner = [inner for part in node.body for inner in _within(part)]
        for test, nodes in ((node.test, inner), (ast.UnaryOp(ast.Not(), node.test), node.orelse)):
            ends = [one.lineno for one in nodes if isinstance(one, _LEAVING)]
            if ends and _comes_true(test, _names(node.test) & counters, sized, variables, batches):
                lines += ends
    return lines


def at_multiples(loops: list[ast.For | ast.While]) -> list[int]:
    """Return the lines at which the last loop ends at each multiple of a number that it counts."""
    nodes = [*_within(loops[-1])] if loops else []
    counted = {name for node in nodes if isinstance(node, ast.AugAssign) for name in _names(node.target)}
    modulos = [
        node
        for node in nodes
        if isinstance(node, ast.If) and isinstance(node.body[-1], _LEAVING)
        for part in ast.walk(node.test)
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod) and _names(part.left) & counted
    ]
    return [node.body[-1].lineno for node in modulos]


def takes_fewer(frame: FrameType, batches: int) -> bool:
    """Return True for a loop that calls next() for a number of batches, fewer than a new iterator has."""
    loops = loops_at(frame)
    if len(loops) < 2 or (loop := loops[-1]) not in loops[-2].body:
        return False
    values = _assigned_before(loops).values()
    made = [one for value in values for one in ast.walk(value) if isinstance(one, ast.Call)]
    if not any(ast.unparse(one.func) == "iter" for one in made):
        return False
    variables = {**frame.f_globals, **frame.f_locals}
    if isinstance(loop, ast.While):
        counters, sized = _counters(loops, loop)
        ended = ast.UnaryOp(ast.Not(), loop.test)
        return _comes_true(ended, _names(loop.test) & counters, sized, variables, batches)
    numbers = next(_values(loop.iter, variables, [{}]), None)
    return isinstance(numbers, range) and len(numbers) < batches


def _counters(loops: list[ast.For | ast.While], loop: ast.For | ast.While) -> tuple[set[str], set[str]]:
    """Return the names that count the batches of the last loop, and those of them that do so by their length."""
    counters: set[str] = set()
    sized: set[str] = set()
    if isinstance(loop, ast.For) and isinstance(loop.target, ast.Tuple):
        calls = [node for node in ast.walk(loop.iter) if isinstance(node, ast.Call)]
        if any(ast.unparse(call.func) == "enumerate" for call in calls):
            counters |= _names(loop.target.elts[0])
    if len(loops) > 1:
        nodes = [*_within(loop)]
        counting = [node for node in nodes if isinstance(node, ast.AugAssign | ast.NamedExpr)]
        counted = {name for node in counting for name in _names(node.target)}
        growing = [node.func for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
        at_start = _assigned_before(loops).keys()
        sized = at_start & {name for one in growing if one.attr in _GROWING for name in _names(one.value)}
        counters |= (counted & at_start) | sized
    return counters, sized


def _assigned_before(loops: list[ast.For | ast.While]) -> dict[str, ast.expr]:
    """Return the names that an epoch assigns before its loop over the loader, with the values of the statements."""
    values: dict[str, ast.expr] = {}
    for node in loops[-2].body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and node.lineno < loops[-1].lineno:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            values |= {name: node.value for target in targets for name in _names(target)}
    return values


def _around(frame: FrameType | None) -> list[ast.stmt]:
    """Return the statements around the one that a frame is at, the outermost first; none if the source is not there."""
    if frame is None:
        return []
    statements = _statements("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    return [node for node in statements if node.lineno <= frame.f_lineno <= (node.end_lineno or 0)]


@lru_cache(maxsize=4)
def _statements(source: str) -> list[ast.stmt]:
    try:
        return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    except (SyntaxError, ValueError):  # The source is not Python.
        return []


def _within(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and what is in it, without the loops and functions in it."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.For | ast.While | ast.FunctionDef | ast.ClassDef | ast.Lambda):
            yield from _within(child)


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _comes_true(test: ast.expr, counters: set[str], sized: set[str], variables: dict[str, Any], batches: int) -> bool:
    """Return True if a condition is true for the number of some batch but the last; False if that is not known."""
    by_number = any(isinstance(one, ast.Subscript) and _names(one) & counters for one in ast.walk(test))
    numbers = range(min(batches - 1, _MOST_COUNTS))
    given = ({name: range(number) if name in sized else number for name in counters} for number in numbers)
    return bool(counters) and not by_number and any(_values(test, variables, given))


def _values(expression: ast.expr, variables: dict[str, Any], given: Iterable[dict[str, Any]]) -> Iterator[Any]:
    """Yield an expression's value for each set of given variables; nothing if it calls functions of the program."""
    nodes = [*ast.walk(expression)]
    calls = {ast.unparse(one.func) for one in nodes if isinstance(one, ast.Call)}
    if not all(isinstance(one, (*_PLAIN, *_PARTS)) for one in nodes) or calls & variables.keys() or calls - _CALLS:
        return
    code = compile(ast.fix_missing_locations(ast.Expression(expression)), "<condition>", "eval")
    with suppress(Exception):  # Whatever a foreign value raises: the value is not known.
        yield from (eval(code, variables, own) for own in given)  # noqa: S307 (the loop's own expression)
