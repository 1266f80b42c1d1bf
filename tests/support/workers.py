"""A worker of a test run, forked from the nursery: it begins with what each would import in 15 s of processor time.

xdist starts `python -m tests.support.workers -u -c CODE` for each worker, and speaks with it by its standard streams.
"""

from __future__ import annotations

import os
import signal
import sys

from tests.support.interpreters import fork

COMMAND = f"popen//python={sys.executable} -m {__name__}"  # what stands for "popen" among xdist's --tx

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # xdist ends its workers, and then this process.
    _, ended = fork(sys.argv[2:], (1, 2), None, [0], False)
    sys.exit(os.waitstatus_to_exitcode(int(os.read(ended, 64))))
