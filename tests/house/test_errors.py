"""The exception tree: drawn as it is, whole after pickling, readable."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
from typing import Any

import pytest

from ckpt_tasks import errors
from ckpt_tasks.errors import CkptError
from tools.sources import files, parse, walk

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, CkptError)]
# What a class has beyond message, key, step and hint, with a value that an empty default cannot pass for.
SPECIAL: dict[str, Any] = {
    "missing": ("model/a", "model/b"),
    "unexpected": ("model/c",),
    "different": ("model/d: (2,) here, (3,) in the checkpoint",),
    "reasons": ((7, "cut short"), (3, "digest differs")),
}
COMMON: dict[str, Any] = {"key": "model/weight", "step": 0, "hint": "Do this"}


def filled(cls: type[CkptError]) -> CkptError:
    """Build an error with every argument of its constructor given."""
    names = inspect.signature(cls).parameters.keys() - {"message"}
    return cls("it failed", **{name: {**COMMON, **SPECIAL}[name] for name in names})


def drawn() -> dict[str, str]:
    """Return class → parent as the tree in the module's docstring draws them."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"    ((?:[│ ]   )*)(?:[├└]── )?([A-Z]\w+)", line):
            depth = (match.start(2) - 4) // 4
            path[depth:] = [match[2]]
            parents[match[2]] = path[depth - 1] if depth else ""
    return parents


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    """Every class stands in the drawing below its own parent, and the drawing has no other."""
    real = {
        cls.__name__: next((base.__name__ for base in cls.__bases__ if issubclass(base, CkptError)), "")
        for cls in CLASSES
    }
    assert drawn() == real


def test_every_class_is_listed() -> None:
    """`__all__` is the list of the classes, sorted."""
    assert errors.__all__ == sorted(cls.__name__ for cls in CLASSES)


def test_no_text_for_people_names_a_page_of_the_checkout() -> None:
    """A wheel has no docs/: what we print names a command, not a page."""
    named = [
        f"{path.name}:{node.lineno}"
        for path in files("ckpt_tasks")
        for node in walk(parse(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"\w+/\w+\.md\b", node.value)
        if len(node.value) < 200 and "\n" not in node.value and not node.value.startswith("Where the run lives")
    ]
    assert named == []


def test_an_error_comes_out_of_a_pickle_whole() -> None:
    """P29: an error that crosses a process boundary keeps its class, its fields and its text."""
    for error in map(filled, CLASSES):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert again.__dict__ == error.__dict__
        assert {*COMMON, "message"} <= {*again.__dict__}
        assert (again.args, str(again)) == (error.args, str(error))


def test_an_error_says_where_and_what_to_do() -> None:
    """P27: the text names the key, the step (0 is a real one), everything else that was given, and the hint."""
    for cls in CLASSES:
        text = str(filled(cls))
        assert text.startswith("it failed (step 0, at model/weight). Do this")
        for name in inspect.signature(cls).parameters.keys() & SPECIAL.keys():
            for item in SPECIAL[name]:
                parts = item if isinstance(item, tuple) else (item,)
                assert all(str(part) in text for part in parts), (cls, name)


def test_long_lists_are_cut() -> None:
    """A mismatch of ten thousand keys is still a text that can be read."""
    keys = tuple(f"model/{number}" for number in range(10_000))
    text = str(errors.StateMismatchError("it differs", missing=keys))
    assert "model/0" in text
    assert "and 9994 more" in text
    assert len(text) < 200


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.UnsupportedStateError, TypeError),
        (errors.CheckpointNotFoundError, LookupError),
        (errors.StoreError, OSError),
    ],
)
def test_ordinary_handlers_catch_ours(cls: type[CkptError], builtin: type[Exception]) -> None:
    """Code that knows nothing of us catches what it expects: a bad option is a ValueError, and so on."""
    with pytest.raises(builtin, match="it failed"):
        raise filled(cls)


def test_no_article_stands_before_a_word_that_varies() -> None:
    """No message says "a object" or "an string": it says "of type …", or chooses its words otherwise."""
    wrong = []
    for path in files("ckpt_tasks"):
        for node in walk(parse(path)):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            for part, following in zip(parts, [*parts[1:], None], strict=True):
                text = part.value if isinstance(part, ast.Constant) else None
                if not isinstance(text, str):
                    continue
                varies = isinstance(following, ast.FormattedValue) and re.search(r"\b[Aa]n? ['\"`]?$", text)
                if varies or re.search(r"\b[Aa]n? ['\"`]?(%s|%r|\{\w*\})", text):
                    wrong.append(f"{path.name}:{node.lineno}: {text}")  # type: ignore[attr-defined]
    assert not wrong


def test_a_message_is_a_clause_and_a_hint_is_a_sentence() -> None:
    """A message ends without a stop, since its key and step follow it; a hint ends as a sentence does."""
    wrong = []
    for path in files("ckpt_tasks"):
        for call in (node for node in walk(parse(path)) if isinstance(node, ast.Call)):
            if not (isinstance(call.func, ast.Name) and call.func.id in errors.__all__ and call.args):
                continue
            hints = [keyword.value for keyword in call.keywords if keyword.arg == "hint"]
            ends = [end for end in map(_end, call.args[:1]) if end.endswith(".")]
            ends += [end for end in map(_end, hints) if end and not end.endswith((".", "?", "…"))]
            wrong += [f"{path.name}:{call.lineno}: {end}" for end in ends]
    assert not wrong


def _end(text: ast.expr) -> str:
    """Return the last literal part of a text; "" if a value ends it."""
    last = text.values[-1] if isinstance(text, ast.JoinedStr) and text.values else text
    return last.value if isinstance(last, ast.Constant) and isinstance(last.value, str) else ""
