"""What meets hostile bytes: it runs in a fork with an end to its memory, its computing and its waiting."""

from __future__ import annotations

import os
import resource
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

CPU_S = 60
LATE_S = 200  # the machine may be busy
MOST_KIB = 700 << 10
MORE_BYTES = 3 << 30  # of address space, beside what the process has: 256 MiB of text and what JSON makes of it


def judged(look: Callable[[], str], most_kib: int = MOST_KIB) -> str:
    """Return what a forked child answers, with bounded memory and time; a signal or a traceback fails the test."""
    out, into = os.pipe()
    if (child := os.fork()) == 0:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + MORE_BYTES, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LATE_S)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with os.fdopen(into, "w") as pipe:
            try:
                pipe.write(look())
                more_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
                assert more_kib < most_kib, f"it took {more_kib} KiB"
            except BaseException:  # noqa: BLE001 (a fork of pytest must end here)
                pipe.write(traceback.format_exc()[-60000:])
                pipe.flush()
                os._exit(1)
        os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as pipe:
        told = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"{signal.Signals(-status).name if status < 0 else status}: {told[-4000:]}"
    return told
