"""Keep the parts of a site running: restart those that died, until `ckpt down` has removed the site's file.

Prefect's worker ends if the API answers 429 for a minute, and Prefect does not restart it (3.8.8). The keeper is not
the parent of the site's parts, and holds none of their pipes: they outlive the keeper, and `ckpt up` restarts it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from ckpt_tasks.flows.site.site_parts import read_site

_LOOK_S, _LONGEST_S = 2.0, 60.0
_SET_BACK_S = 60.0
_RESTART = "import sys; from ckpt_tasks.flows.site.site import restart; sys.exit(restart(deploy={}))"


def keep(path: Path) -> None:
    """Keep the parts running that the file names; deploy again if the clock was set back: this renews the schedules."""
    pause_s, clock_s = _LOOK_S, _clock_s()
    while (site := read_site(path)) is not None:
        set_back, clock_s = _clock_s() < clock_s - _SET_BACK_S, _clock_s()
        if set_back or not all(part.lives for part in site.started.values()):
            done = subprocess.run([sys.executable, "-c", _RESTART.format(set_back)], check=False)
            pause_s = min(2 * pause_s, _LONGEST_S) if done.returncode else _LOOK_S
        time.sleep(pause_s)


def _clock_s() -> float:
    return time.time() - time.monotonic()


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
