"""The processes of a site on this host, recorded in a file that survives the processes and a reboot.

A process is identified by its id, its start time and the boot, so that after a reboot, or if the id is reused, another
process is not mistaken for it.
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

_LOOK_S = 0.2
_RUN = b"PREFECT__FLOW_RUN_ID="


@dataclass(frozen=True, kw_only=True)
class SiteProcess:
    """A process that was started here; `boot` and `start` distinguish it from others with the same id."""

    pid: int
    start: str
    boot: str

    @classmethod
    def of(cls, pid: int) -> SiteProcess:
        """Describe a process that is running now."""
        return cls(pid=pid, start=process_start(pid) or "", boot=boot_id())

    @property
    def lives(self) -> bool:
        """True if this process still runs."""
        return self.start != "" and self.boot == boot_id() and process_start(self.pid) == self.start

    def send(self, number: int) -> None:
        """Send the process a signal if it still runs."""
        if self.lives:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass(frozen=True, kw_only=True)
class Site:
    """A site: its API, its processes on this host (by part name: server, worker, keeper), and its password file."""

    url: str
    started: Mapping[str, SiteProcess] = field(default_factory=dict)
    password_file: str = ""  # Empty: no password, or the password of the user's settings.


def read_site(path: Path) -> Site | None:
    """Return the site in a file; None if the file is missing; raise SiteError if it cannot be read."""
    try:
        said = json.loads(path.read_text("utf-8"))
        started = {name: SiteProcess(**one) for name, one in said["started"].items()}
        return Site(url=said["url"], started=started, password_file=said.get("password_file", ""))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SiteError(f"{path} cannot be read: {error}", hint="Delete it, and end what it named by hand.") from error


def write_site(path: Path, site: Site) -> None:
    """Replace the file atomically: after a kill the file is the old one or the new one."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(asdict(site), indent=2) + "\n", "utf-8")
    new.replace(path)


@dataclass(frozen=True, kw_only=True)
class FlowRunProcess:
    """A flow run's topmost process, and `trains`, the process that ends properly at SIGTERM; they may be the same."""

    flow_run_id: str
    top: SiteProcess
    trains: SiteProcess


def site_processes(mark: str) -> tuple[list[SiteProcess], list[FlowRunProcess]]:
    """Return the workers of a site and the processes of its flow runs, found by `mark` in their environment.

    An empty `mark` is every site's, and then there are no workers. Processes inherit a worker's environment, so a flow
    run is found even if its worker was killed.
    """
    parents: dict[int, int] = {}
    ids: dict[int, str] = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # The process has ended, or belongs to another user.
            environment = (place / "environ").read_bytes().split(b"\0")
            if os.fsencode(mark) in environment or (not mark and any(item.startswith(_RUN) for item in environment)):
                parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
                ids |= {int(place.name): item[len(_RUN) :].decode() for item in environment if item.startswith(_RUN)}
    tops = [pid for pid in ids if parents[pid] not in ids]
    workers = [SiteProcess.of(pid) for pid in parents if pid not in ids]
    return workers, [
        FlowRunProcess(flow_run_id=ids[top], top=SiteProcess.of(top), trains=SiteProcess.of(_trainer(top, parents)))
        for top in tops
    ]


def _trainer(top: int, parents: Mapping[int, int]) -> int:
    """Return the process that may get SIGTERM: `top`, or its engine if `top` is `prefect flow-run execute`.

    That command kills its engine if the engine does not end within 1 s of a SIGTERM.
    """
    with suppress(OSError):
        if b"\0flow-run\0execute\0" in Path(f"/proc/{top}/cmdline").read_bytes():
            return next((pid for pid, parent in parents.items() if parent == top), top)
    return top


def end_all(processes: Iterable[SiteProcess], patience_s: float, *, tell: Iterable[SiteProcess] | None = None) -> None:
    """Send SIGTERM to all (or only to those in `tell`), wait at most `patience_s` seconds, then kill the rest."""
    waited_for = [process for process in processes if process.lives]
    for process in waited_for if tell is None else tell:
        process.send(signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while any(process.lives for process in waited_for) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    for process in waited_for:
        process.send(signal.SIGKILL)
