"""Print an error of ours, or a Ctrl-C in our code, that nobody has caught: first what it says, then the user's lines.

Python would print hundreds of lines of this package, and the message below them. CKPT_TRACEBACK=1 shows those.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType

_OURS = f"{Path(__file__).parent}{os.sep}"
_ALL = "CKPT_TRACEBACK"


def show_briefly(ours: type[BaseException]) -> None:
    """Print errors of this class, and a Ctrl-C in our code, by `_print`, unless the program has a hook of its own."""
    if sys.excepthook is sys.__excepthook__ and os.environ.get(_ALL, "") in ("", "0"):
        sys.excepthook = partial(_print, ours)


def _print(
    ours: type[BaseException], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    stopped = isinstance(error, KeyboardInterrupt) and any(
        one.filename.startswith(_OURS) for one in traceback.extract_tb(trace)
    )
    if not (stopped or isinstance(error, ours)):
        sys.__excepthook__(kind, error, trace)
        return
    try:
        sys.stderr.write("".join(_lines(error)))
    except (OSError, ValueError, AttributeError):  # stderr is closed, full or missing.
        return


def _lines(error: BaseException) -> Iterator[str]:
    yield from traceback.format_exception_only(error)
    yield from _frames(error)
    cause, seen = error.__cause__, {id(error)}
    while cause is not None and id(cause) not in seen:
        if not isinstance(cause, type(error)) and (frames := [*_frames(cause)]):  # Code of the program has raised it.
            yield from ("\nIts cause: ", *traceback.format_exception_only(cause), *frames)
        seen.add(id(cause))
        cause = cause.__cause__
    yield f"\n({_ALL}=1 shows the frames of ckpt_tasks, too.)\n"


def _frames(error: BaseException) -> Iterator[str]:
    """Yield the frames of the program: those above the first one of ours, and those of its code that we have called."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(_OURS)]
    if any(not one.filename.startswith((sys.prefix, sys.base_prefix, "<frozen")) for one in frames):
        yield from traceback.format_list(frames)
