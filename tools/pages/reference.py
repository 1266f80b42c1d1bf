"""`python -m tools.pages.reference` writes docs/REFERENCE.md from the docstrings of every exported name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import ckpt_tasks
from ckpt_tasks import testing
from tools.sources import ROOT

PAGE = ROOT / "docs" / "REFERENCE.md"
_HEAD = """# Reference

Every name that `ckpt_tasks` exports, with its docstring; the classes that exported functions return follow at the end,
and then `ckpt_tasks.testing`.
`python -m tools.pages.reference` writes this page. The errors are drawn at the head of
[errors.py](../ckpt_tasks/errors.py), the options of `CheckpointConfig` are in [OPTIONS.md](OPTIONS.md), and
`ckpt --help` lists the verbs of the command.
"""
_MODULES = re.compile(r"ckpt_tasks\.[\w.]*\.|collections\.abc\.|typing\.|os\.(?=PathLike)")
_FUNCTION = re.compile(r"<function \S+ at 0x\w+>")  # as a default
# A field's type is shown without its bounds.
_BOUNDED = re.compile(r"(?<=: )(?:(Step|Count|Epoch)|(Seconds|Number)|Annotated\[(\w+), Meta\([^)]*\)\])(?=[ ,])")
_MOST_COLUMNS = 120


def written() -> str:
    """Return the page."""
    names = [name for name in ckpt_tasks.__all__ if name != "errors"]
    parts = [part for name in names for part in _about(name, getattr(ckpt_tasks, name))]
    parts += [part for kind in _returned(names) for part in _about(kind.__name__, kind)]
    parts += [part for name in testing.__all__ if name != "Fate" for part in _about(name, getattr(testing, name))]
    page = _FUNCTION.sub("…", "\n".join([_HEAD, *parts]))
    return _BOUNDED.sub(lambda found: "int" if found[1] else found[3] or "float", page)


def _returned(names: list[str]) -> list[type]:
    """List the classes that exported functions return and that are not exported themselves, in order."""
    functions = [value for name in names if inspect.isfunction(value := getattr(ckpt_tasks, name))]
    kinds = [
        inspect.unwrap(function).__globals__.get(inspect.signature(function).return_annotation)
        for function in functions
    ]
    return [kind for kind in dict.fromkeys(kinds) if inspect.isclass(kind) and kind.__name__ not in names]


def _about(name: str, value: Any) -> Iterator[str]:
    yield f"## {name}\n"
    yield from _entry(name, value, value.__init__ if inspect.isclass(value) else value)
    if not inspect.isclass(value):
        return
    ours = [kind for kind in value.__mro__ if kind.__module__.startswith("ckpt_tasks.")]
    members = {method: function for kind in reversed(ours) for method, function in vars(kind).items()}
    for method, function in members.items():
        of_ours = str(getattr(getattr(function, "fget", function), "__module__", None)).startswith("ckpt_tasks.")
        if of_ours and not method.startswith(("_", "block_")):
            yield f"### {name}.{method}\n"
            yield from _entry(method, function, function)


def _entry(name: str, value: Any, called: Any) -> Iterator[str]:
    ours = not inspect.isclass(value) or called.__module__ == value.__module__
    if inspect.isfunction(called) and ours and name != "CheckpointConfig":  # its table is docs/OPTIONS.md
        yield f"```text\n{name}{_signature(called)}\n```\n"
    for paragraph in (inspect.getdoc(value) or "").split("\n\n"):
        if paragraph.startswith("    "):
            yield f"```text\n{inspect.cleandoc(paragraph)}\n```\n"
        else:
            yield " ".join(paragraph.split()).removesuffix("::") + (":\n" if paragraph.endswith("::") else "\n")


def _signature(function: Any) -> str:
    """Return (parameters) -> type, a parameter a line if it is long."""
    signature = inspect.signature(function)
    params = [p.replace(annotation=_Text(p.annotation)) for p in signature.parameters.values() if p.name != "self"]
    returns = signature.return_annotation
    arrow = f" -> {returns}" if returns not in (inspect.Signature.empty, "None", None) else ""
    signature = signature.replace(return_annotation=inspect.Signature.empty)
    text = _MODULES.sub("", f"{signature.replace(parameters=params)}{arrow}")
    if len(text) <= _MOST_COLUMNS:
        return text
    lines = [_MODULES.sub("", str(signature.replace(parameters=[p]))[1:-1]).removeprefix("*, ") for p in params]
    first_named = next((n for n, p in enumerate(params) if p.kind is p.KEYWORD_ONLY), None)
    if first_named is not None:
        lines.insert(first_named, "*")
    return "(\n" + "".join(f"    {line},\n" for line in lines) + f"){_MODULES.sub('', arrow)}"


class _Text(str):
    """An annotation as it stands in the source, without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
