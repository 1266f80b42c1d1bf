"""The processes of a site that were started here, in a file that survives them and a reboot.

A process is identified by its id, its start time and the boot, so after a reboot, or when the id is reused, no other
process is mistaken for it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ckpt_tasks.errors import SiteError
from ckpt_tasks.system import boot_id, process_start

__all__ = ["Process", "Site", "end_all", "flow_runs", "read_site", "write_site"]

_LOOK_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process that was started here; `boot` and `start` distinguish it from others with the same id."""

    pid: int
    start: str
    boot: str

    @classmethod
    def of(cls, pid: int) -> Process:
        """Describe a process that runs now."""
        return cls(pid=pid, start=process_start(pid) or "", boot=boot_id())

    @property
    def lives(self) -> bool:
        """Whether it still runs."""
        return self.start != "" and self.boot == boot_id() and process_start(self.pid) == self.start

    def send(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.lives:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass(frozen=True, kw_only=True)
class Site:
    """The API of a site, and the processes that were started here, by name of the part."""

    url: str
    started: Mapping[str, Process] = field(default_factory=dict)


def read_site(path: Path) -> Site | None:
    """Return what the file says, None without one; raise SiteError if it says nothing that can be read."""
    try:
        said = json.loads(path.read_text("utf-8"))
        return Site(url=said["url"], started={name: Process(**one) for name, one in said["started"].items()})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SiteError(f"{path} cannot be read: {error}", hint="Delete it, and end what it named by hand.") from error


def write_site(path: Path, site: Site) -> None:
    """Replace the file atomically: after a kill it is the old one or the new one."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(asdict(site), indent=2) + "\n", "utf-8")
    new.replace(path)


def flow_runs(mark: str, worker: Process) -> list[Process]:
    """Return the processes of flow runs: the topmost ones with `mark` in their environment, except the worker.

    Processes inherit a worker's environment, so a flow run is found even if its worker was killed.
    """
    parents: dict[int, int] = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if os.fsencode(mark) in (place / "environ").read_bytes().split(b"\0"):
                parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
    parents.pop(worker.pid, None)
    processes = [Process.of(pid) for pid, parent in parents.items() if parent not in parents]
    return [process for process in processes if process.lives]


def end_all(processes: Iterable[Process], patience_s: float) -> None:
    """Send SIGTERM to all, wait at most `patience_s` seconds, then kill the rest."""
    waited_for = [process for process in processes if process.lives]
    for process in waited_for:
        process.send(signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while any(process.lives for process in waited_for) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    for process in waited_for:
        process.send(signal.SIGKILL)
