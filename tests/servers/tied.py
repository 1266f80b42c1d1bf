"""Become another program that the kernel kills as soon as the process that wanted it is gone.

`python -I tests/servers/tied.py PID PROGRAM ARGUMENT…`, where PID is the process that starts this. A test run that is
killed cannot tidy up; the kernel does it: PR_SET_PDEATHSIG is kept over exec. A launcher, not a `preexec_fn`: that runs
between fork and exec, where the locks of torch's and Prefect's threads may be held for ever.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent, then become the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the line above: the signal will never come
        sys.exit(f"process {parent} is gone")
    os.execvp(program[0], program)


if __name__ == "__main__":
    main()
