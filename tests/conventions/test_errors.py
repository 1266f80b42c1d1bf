"""The exception tree: drawn as it is, whole after pickling, readable."""

from __future__ import annotations

import inspect
import pickle
import re
from typing import Any

import pytest

from ckpt_tasks import errors
from ckpt_tasks.errors import CkptError

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
    """Every class stands in the drawing below its own parent, and `__all__` lists them."""
    real = {
        cls.__name__: next((base.__name__ for base in cls.__bases__ if issubclass(base, CkptError)), "")
        for cls in CLASSES
    }
    assert drawn() == real
    assert errors.__all__ == sorted(real)


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
    many = str(errors.StateMismatchError("it differs", missing=tuple(f"model/{n}" for n in range(10_000))))
    assert "and 9994 more" in many
    assert len(many) < 200


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
