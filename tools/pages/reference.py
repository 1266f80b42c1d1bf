"""`python -m tools.pages.reference` writes docs/REFERENCE.md from the docstrings of every exported name."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import ckpt_tasks
from ckpt_tasks import testing
from ckpt_tasks.storage.port import Store
from tools.sources import ROOT

PAGE = ROOT / "docs" / "REFERENCE.md"
_HEAD = """# Reference

Every name that `ckpt_tasks` exports, the classes that exported functions return, and `ckpt_tasks.testing`.
`python -m tools.pages.reference` writes this page from the docstrings. The errors are drawn at the head of
[errors.py](../ckpt_tasks/errors.py); [OPTIONS.md](OPTIONS.md) has the options of `CheckpointConfig`, and
[FORMAT.md](internals/FORMAT.md#state) the fields of a `Checkpoint`, [COMMANDS.md](COMMANDS.md) the verbs of `ckpt`. An
object for a state has `state_dict` and `load_state_dict`.
"""
_MODULES = re.compile(r"ckpt_tasks\.[\w.]*\.|collections\.abc\.|typing\.|os\.(?=PathLike)")
_FUNCTION = re.compile(r"<function \S+ at 0x\w+>")  # as a default
# A type is shown without its bounds.
_BOUNDED = re.compile(
    r"\b(?:(Step|Count|Epoch)|(Seconds|Number)|(Digest|Name|Time)|Annotated\[(\w+), Meta\([^)]*\)\])(?=[ ,\]])"
)
_MOST_COLUMNS = 120
_UNBROKEN = "\N{NO-BREAK SPACE}"
# Other parts of the package call these, or torch does.
_INNER = frozenset(
    {
        *("CheckpointConfig.has_interval", "CheckpointConfig.automatic", "CheckpointConfig.save_policy"),
        *("CheckpointConfig.retention_policy", "CheckpointConfig.location", "LookupTable.extra_repr"),
        *(
            "ResumableLoader.is_ending",
            "ResumableLoader.is_in_for",
            "ResumableLoader.batch_size",
            "ResumableSampler.iterate",
        ),
        *("ResumableSampler.whole", "ResumableSampler.end_epoch", "ResumableSampler.name_epochs"),
        *("Checkpointer.record_failure", "Checkpointer.record_program", "Location.resolve", "SyncPlan.chosen"),
        *("ShuffleBuffer.why_inexact", "FaultyStore.fate_of", "FaultyStore.later", "FaultyStore.part_of"),
        *("FaultRule.strikes", "Run.head", "Fate", "images_of", "look", "seal", "under_way"),
    }
)
_IN_WORDS = frozenset({"CheckpointConfig", "Checkpoint"})  # Their fields are tables of OPTIONS.md and FORMAT.md.
_GIVEN = frozenset({"Run", "FaultRule"})  # Functions return them; users do not make them.
_STATEFUL = frozenset({"state_dict", "load_state_dict"})


def written() -> str:
    """Return the page."""
    names = [name for name in ckpt_tasks.__all__ if name != "errors"]
    parts = [part for name in names for part in _about(name, getattr(ckpt_tasks, name))]
    parts += [part for kind in _returned(names) for part in _about(kind.__name__, kind)]
    of_tests = {name: getattr(testing, name) for name in testing.__all__ if name not in _INNER}
    parts += [part for name, value in of_tests.items() if inspect.isclass(value) for part in _about(name, value)]
    functions = {name: value for name, value in of_tests.items() if not inspect.isclass(value)}
    parts.append("## Functions of ckpt_tasks.testing\n")
    parts.append("\n".join([*(_line(f"{name}{_names_only(value)}", value) for name, value in functions.items()), ""]))
    return _FUNCTION.sub("…", "\n".join([_HEAD, *parts]))


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
    called = value.__init__ if inspect.isclass(value) else value
    ours = not inspect.isclass(value) or called.__module__ == value.__module__
    if inspect.isfunction(called) and ours and name not in _IN_WORDS | _GIVEN:
        yield f"```text\n{name}{_signature(called)}\n```\n"
    yield from _paragraphs(inspect.getdoc(value) or "")
    if inspect.isclass(value):
        members = [*_methods(name, value)]
        yield from ["\n".join(members) + "\n"] if members else []


def _methods(name: str, kind: type) -> Iterator[str]:
    """Yield a line for each method and property that users call."""
    ours = [one for one in kind.__mro__ if one.__module__.startswith("ckpt_tasks.")]
    members = {method: function for one in reversed(ours) for method, function in vars(one).items()}
    for method, function in members.items():
        inner = getattr(function, "fget", function)
        of_ours = str(getattr(inner, "__module__", None)).startswith("ckpt_tasks.")
        text = inspect.getdoc(function) if of_ours and not method.startswith(("_", "block_")) else None
        of_interface = method in _STATEFUL or (hasattr(kind, "put_if_absent") and hasattr(Store, method))
        if text and not of_interface and f"{name}.{method}" not in _INNER:
            called = f"{method}{_names_only(function)}" if inspect.isfunction(function) else method
            yield _line(called, function)


def _line(called: str, value: Any) -> str:
    return f"- `{called}`: {' '.join((inspect.getdoc(value) or '').split())}"


def _paragraphs(doc: str) -> Iterator[str]:
    for paragraph in doc.split("\n\n"):
        if paragraph.startswith("    "):
            yield f"```text\n{textwrap.dedent(paragraph)}\n```\n"
        elif paragraph.startswith("* "):
            yield paragraph + "\n"
        elif paragraph.strip() != "::":
            yield " ".join(paragraph.split()).removesuffix("::") + (":\n" if paragraph.endswith("::") else "\n")


def _names_only(function: Any) -> str:
    """Return the parameters without their types, and the type of the result."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"]
    returns = signature.return_annotation
    arrow = f" -> {_MODULES.sub('', str(returns))}" if returns not in (inspect.Signature.empty, "None", None) else ""
    return f"{inspect.Signature(bare)}{arrow}"


def _signature(function: Any) -> str:
    """Return (parameters) -> type; a line ends between two parameters."""
    signature = inspect.signature(function)
    params = [p.replace(annotation=_Text(p.annotation)) for p in signature.parameters.values() if p.name != "self"]
    returns = signature.return_annotation
    arrow = f" -> {returns}" if returns not in (inspect.Signature.empty, "None", None) else ""
    words = [_plain(str(inspect.Signature([p]))[1:-1]).removeprefix("*, ") for p in params]
    first_named = next((n for n, p in enumerate(params) if p.kind is p.KEYWORD_ONLY), None)
    if first_named is not None:
        words.insert(first_named, "*")
    text = _plain(f"({', '.join(one.replace(' ', _UNBROKEN) for one in words)}){arrow}")
    how: dict[str, Any] = {"width": _MOST_COLUMNS, "subsequent_indent": "    ", "break_on_hyphens": False}
    return textwrap.fill(text, **how).replace(_UNBROKEN, " ")


def _plain(text: str) -> str:
    """Return a signature without the modules and the bounds of its types."""
    return _BOUNDED.sub(_unbounded, _MODULES.sub("", f"{text} ")).rstrip()


def _unbounded(found: re.Match[str]) -> str:
    return "int" if found[1] else "float" if found[2] else "str" if found[3] else found[4]


class _Text(str):
    """An annotation as it stands in the source, without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
