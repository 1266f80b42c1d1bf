"""The units by which systemd keeps a site's server and worker; `ckpt up --systemd` prints them.

A unit runs `python -m ckpt_tasks.flows.site.systemd PART`, which reads the site's password from its file and becomes
the part: no unit holds a secret. systemd starts a part again that has died, and both after a reboot.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

from prefect.settings import get_current_settings

from ckpt_tasks.errors import SiteError
from ckpt_tasks.flows.site.prefect_server import await_answer, make_password, read_password, server_start
from ckpt_tasks.flows.site.site import client_of, end_workers, prepare, worker_start
from ckpt_tasks.flows.site.site_parts import Site

_UNIT = """\
[Unit]
Description=Prefect {part} of ckpt-tasks
{order}
[Service]
WorkingDirectory={directory}
Environment="PREFECT_HOME={home}" "PREFECT_API_URL={url}"
Environment="PATH={path}"
ExecStart={python} -m ckpt_tasks.flows.site.systemd {part}
{stop}Restart=always
RestartSec=2

[Install]
WantedBy=default.target
"""
_AFTER = "After=ckpt-server.service\nWants=ckpt-server.service\n"
# Training ends its step and commits at SIGTERM; the worker must not get one, since it would kill its flow runs.
_STOP = "ExecStop={python} -m ckpt_tasks.flows.site.systemd stop\nKillMode=mixed\nTimeoutStopSec=180\n"


def units(directory: Path, url: str) -> dict[str, str]:
    """Return the texts of the units of a site whose deployments are in `directory`, by their file names."""
    facts = {
        "directory": directory,
        "home": get_current_settings().home,
        "url": url,
        "path": os.environ.get("PATH", os.defpath),
        "python": sys.executable,
    }
    stop = _STOP.format(**facts)
    return {
        "ckpt-server.service": _UNIT.format(part="server", order="", stop="", **facts),
        "ckpt-worker.service": _UNIT.format(part="worker", order=_AFTER, stop=stop, **facts),
    }


def main(part: str) -> None:
    """Become the server or the worker, or end the worker's flow runs after a commit and then the worker (`stop`).

    Raises SiteError if the worker's server does not answer.
    """
    settings = get_current_settings()
    home, url = settings.home, str(settings.api.url)
    home.mkdir(parents=True, exist_ok=True)
    site = Site(url=url, password_file=str(make_password(home)))
    if part == "stop":
        end_workers(home, site)
        return
    if part == "server":
        place = urlsplit(url)
        password = read_password(Path(site.password_file))
        command, environment = server_start(place.hostname or "127.0.0.1", place.port or 4200, password=password)
    else:
        if not await_answer(url):
            raise SiteError(f"no server answers at {url}", hint="systemctl --user status ckpt-server")
        with client_of(site) as client:
            prepare(Path.cwd(), site, client)
        command, environment = worker_start(site, home)
    os.execve(command[0], command, environment)  # noqa: S606 (no shell; systemd watches this process)


if __name__ == "__main__":
    main(sys.argv[1])
