"""A fork as a program: it runs what Python would run for its arguments, and ends as an interpreter does."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any


def code_of(arguments: list[str]) -> tuple[CodeType, dict[str, Any]]:
    """Return what Python runs for these arguments, and the names of its main module; sets sys.argv."""
    kind, what, *rest = arguments
    sys.modules["__main__"] = main = ModuleType("__main__")
    sys.argv[:] = [kind, *rest]
    if kind == "-c":
        return compile(what, "<string>", "exec"), vars(main)
    spec = importlib.util.find_spec(what)
    assert spec is not None
    assert spec.origin is not None
    main.__spec__, main.__file__, sys.argv[0] = spec, spec.origin, spec.origin
    return compile(Path(spec.origin).read_text(encoding="utf-8"), spec.origin, "exec"), vars(main)


def _free(names: dict[str, Any]) -> None:
    sys.last_type = sys.last_value = sys.last_traceback = None
    names.clear()
    gc.collect()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()


def status_of(end: SystemExit) -> int:
    """Return the status with which an interpreter ends."""
    return end.code if isinstance(end.code, int) else int(end.code is not None)


def run(arguments: list[str], whole_end: bool) -> None:
    """Run a program; unless the whole end of an interpreter is to follow, do what it would do, and end the process.

    As an interpreter does, it frees the frames of an uncaught error after the exit functions.
    """
    code, names = code_of(arguments)
    if whole_end:
        if "triton" in sys.modules:  # A CUDA build of torch: Triton 3.9 prints what Python does not free at the end.
            atexit.register(gc.unfreeze)
        exec(code, names)
        return
    status = 0
    try:
        exec(code, names)
    except SystemExit as error:
        status = status_of(error)
        if not isinstance(error.code, int | None):
            sys.stderr.write(f"{error.code}\n")
    except BaseException as error:  # noqa: BLE001 (as at the end of an interpreter)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(sys.last_type, sys.last_value, sys.last_traceback)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    joining = threading._shutdown  # type: ignore[attr-defined]
    for end in (joining, atexit._run_exitfuncs, lambda: _free(names), _flush):
        try:
            end()
        except BaseException:  # noqa: BLE001 (the interpreter tells of it, and goes on)
            traceback.print_exc()
    if status < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)
