"""`python -m tools.breaks SEED COUNT DIRECTORY` draws protections of `ckpt_tasks`; a patch takes each one out."""

from __future__ import annotations

import ast
import difflib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.sources import ROOT, files, parse

_ORDER = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_GUARDING = (
    "check",
    "verify",
    "fsync",
    "sync",
    "refuse",
    "lock",
    "unlock",
    "acquire",
    "release",
    "flush",
    "wait",
    "join",
    "close",
    "discard",
)


class Break(NamedTuple):
    """One protection: the node's place in its file, and the text that stands there instead."""

    path: Path
    node: ast.expr | ast.stmt
    text: str
    what: str

    def patch(self) -> str:
        """Return the break as a unified diff against the checkout."""
        old = self.path.read_text(encoding="utf-8")
        lines = old.encode().splitlines(keepends=True)
        node = self.node
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        before, after = lines[node.lineno - 1][: node.col_offset], lines[node.end_lineno - 1][node.end_col_offset :]
        new = b"".join(
            [*lines[: node.lineno - 1], before, self.text.encode(), after, *lines[node.end_lineno :]]
        ).decode()
        name = str(self.path.relative_to(ROOT))
        return "".join(
            difflib.unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{name}", f"b/{name}")
        )


def _name(call: ast.expr) -> str:
    function = call.func if isinstance(call, ast.Call) else call
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _leaves(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], (ast.Raise, ast.Return, ast.Continue, ast.Break))


def breaks(path: Path) -> Iterator[Break]:
    """Yield every break of one file, in the order of the tree."""
    for node in ast.walk(parse(path)):
        match node:
            case ast.If(test=test, body=body) if _leaves(body) and _name(test) != "TYPE_CHECKING":
                yield Break(path, test, "False", "a guard never holds")
            case ast.Compare(ops=[op], left=left, comparators=[right]) if type(op) in _ORDER:
                yield Break(
                    path, node, f"{ast.unparse(left)} {_ORDER[type(op)]} {ast.unparse(right)}", "a bound is off by one"
                )
            case ast.BoolOp(op=op, values=values):
                for at in range(len(values)):
                    rest = ast.BoolOp(op, values[:at] + values[at + 1 :]) if len(values) > 2 else values[1 - at]
                    yield Break(path, node, f"({ast.unparse(rest)})", f"without `{ast.unparse(values[at])}`")
            case ast.Expr(value=ast.Call() as call) if _name(call).lstrip("_").startswith(_GUARDING):
                yield Break(path, node, "pass", "a call is left out")
            case ast.With(items=[ast.withitem(context_expr=lock, optional_vars=None)]) if "lock" in _name(lock):
                yield Break(path, lock, "__import__('contextlib').nullcontext()", "without the lock")
            case ast.Try(finalbody=[first, *_]):
                yield Break(path, first, "pass", "not undone")
            case ast.Call(func=ast.Name(id="min" | "max"), args=[first, _]):
                yield Break(path, node, ast.unparse(first), "a bound is left out")


def main(seed: int, count: int, directory: Path) -> None:
    """Write `count` patches, and print where each one is."""
    every = [found for path in sorted(files("ckpt_tasks")) for found in breaks(path)]
    directory.mkdir(parents=True, exist_ok=True)
    for number, drawn in enumerate(random.Random(seed).sample(every, count), 1):
        (directory / f"{number:03}.patch").write_text(drawn.patch(), encoding="utf-8")
        sys.stdout.write(f"{number:03} {drawn.path.relative_to(ROOT)}:{drawn.node.lineno} {drawn.what}\n")
    sys.stdout.write(f"of {len(every)}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
