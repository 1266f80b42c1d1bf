"""Say in our words what is wrong with a command line: one line on stderr, or JSON, and the exit status 2."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import typer

from ckpt_tasks.cli.output import Output, print_error
from ckpt_tasks.errors import ConfigError

_UsageError: Any = typer.BadParameter.__mro__[1]  # Typer has an own copy of click in newer versions.
# Of pydantic, and of click: what a value should have been.
_RULE = re.compile(r"(?:Input should be|is not) (.*?)(?:, unable.*|, got.*)?$", re.DOTALL)
_KINDS = {"integer": "a whole number", "float": "a number", "valid number": "a number"}


class _Mistake(typer.BadParameter):
    """A mistake in a command line, which is printed as every other error of the command."""

    def __init__(self, error: ConfigError, *, as_json: bool):
        super().__init__(str(error))
        self._error, self._as_json = error, as_json

    def show(self, file: Any = None) -> None:
        print_error(self._error, Output(self._as_json))


@contextmanager
def explained(command: str, args: Sequence[str]) -> Iterator[None]:
    """Replace an error of the block, which parses the arguments of `command`, by one that says what to write."""
    given = [*args]  # The parser takes words out of the list.
    try:
        yield
    except _UsageError as error:
        if isinstance(error, _Mistake) or type(error).__name__ == "NoArgsIsHelpError":  # `ckpt` prints its help.
            raise
        raise _Mistake(_error(command, error, given), as_json="--json" in given) from None


def _error(command: str, error: Any, given: Sequence[str]) -> ConfigError:
    param = getattr(error, "param", None)
    name = "" if param is None else (param.opts[0] if param.param_type_name == "option" else param.metavar)
    message, hint = error.format_message().rstrip("."), f"`{command} --help` lists them all."
    if type(error).__name__ == "NoSuchOption":
        alike = difflib.get_close_matches(error.option_name, {*(error.possibilities or ())} - {"--help"}, n=1)
        return ConfigError(
            f"there is no option {error.option_name}", hint=f"Did you mean {alike[0]}?" if alike else hint
        )
    if type(error).__name__ == "MissingParameter" and param is not None:
        return ConfigError(f"{command} needs {name}: {param.help}", hint=f"`{command} --help` has an example.")
    if param is not None and (rule := _RULE.search(error.message)):
        must = next((words for kind, words in _KINDS.items() if kind in rule[1]), rule[1].rstrip("."))
        return ConfigError(f"{name} must be {must}, not {_value(name, given)!r:.80}", hint=f"See `{command} --help`.")
    return ConfigError(message[:1].lower() + message[1:], hint=hint)


def _value(name: str, given: Sequence[str]) -> str:
    """Return the value that a command line gives to an option; "" if it is not known."""
    after = dict(pairwise(given)) | dict(w.split("=", 1) for w in given if "=" in w)
    return after.get(name, "")
