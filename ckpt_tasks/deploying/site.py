"""A site on this machine: server, work pool, deployments, automations and worker, brought up and taken down."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import Worker
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

from ckpt_tasks.deploying.automations import apply, build_automations
from ckpt_tasks.deploying.parts import Process, Site, end_all, flow_runs, read_site, write_site
from ckpt_tasks.deploying.server import answers, api_url, end_of, start_server
from ckpt_tasks.errors import SiteError

__all__ = ["POOL", "SitePart", "Up", "bring_up", "take_down"]

POOL = "ckpt-tasks"
_HERE = Path(__file__).parent
_PATIENCE_S = 180  # a busy machine imports Prefect slowly
_PREEMPTED_S = 120  # a flow run ends its step and commits: the time that the templates of pools give, too
_STOP_S = 30
_LOOK_S = 0.5
_DEPLOYED = re.compile(r"Deployment '([^']+)' successfully created")


@dataclass(frozen=True, kw_only=True)
class SitePart:
    """A part of the site and its status, in words for people."""

    name: str
    status: str
    about: str


@dataclass(frozen=True, kw_only=True)
class Up:
    """A site that answers: its API and page, its parts, and the names of the deployments."""

    url: str
    page: str
    parts: tuple[SitePart, ...]
    deployments: tuple[str, ...]


def bring_up(directory: Path, port: int | None = None) -> Up:
    """Start what does not run yet, deploy `directory`'s prefect.yaml, or the example, and wait until all answer.

    The server is the one that PREFECT_API_URL names, if that is set and is not this machine's own. Raises SiteError.
    """
    home = get_current_settings().home
    with _alone(home):
        path = home / "ckpt-up.json"
        url = _url(port)
        site = read_site(path) or Site(url=url)
        if site.url != url:
            if any(item.lives for item in site.started.values()):
                raise SiteError(f"a site is up already, at {site.url}", hint="End it with ckpt down, or use its port.")
            site = Site(url=url)
        site, server = _server(site, home, port)
        write_site(path, site)
        with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
            pool = _pool(client)
            deployments, file = _deploy(directory, url)
            outcomes = apply(build_automations())
            changed = sum(item.status != "as it was" for item in outcomes)
            automations = SitePart(
                name="automations",
                status="applied" if changed else "as they were",
                about="crashed and silent runs are started again",
            )
            site, worker = _worker(site, home, client, path)
        deployed = SitePart(name="deployments", status="applied", about=f"{len(deployments)} from {file}")
        parts = (server, pool, deployed, automations, worker)
        return Up(url=url, page=url.removesuffix("/api"), parts=parts, deployments=deployments)


def take_down() -> tuple[SitePart, ...]:
    """End what `bring_up` started and still runs: the worker, its flow runs after a commit, the server."""
    home = get_current_settings().home
    with _alone(home):
        path = home / "ckpt-up.json"
        site = read_site(path)
        if site is None:
            return ()
        parts = []
        for name in ("worker", "server"):
            process = site.started.get(name)
            status, about = "not started here", ""
            if process is not None:
                about = f"process {process.pid}"
                status = "ended" if process.lives else "was gone"
                if name == "worker":
                    about += _end_worker(process, _mark(home))
                else:
                    end_all([process], _STOP_S)
            parts.append(SitePart(name=name, status=status, about=about))
        path.unlink()
        (home / "server.pid").unlink(missing_ok=True)
        return tuple(parts)


def _end_worker(worker: Process, mark: str) -> str:
    """Stop the worker; its flow runs finish their step, commit, and are scheduled again for the next worker."""
    worker.send(signal.SIGSTOP)  # so that it starts no more flow runs
    runs = flow_runs(mark, worker)
    worker.send(signal.SIGKILL)
    end_all(runs, _PREEMPTED_S)
    return f"; flow runs that go on with the next worker: {len(runs)}" if runs else ""


def _mark(home: Path) -> str:
    """Return the mark in the environment of this site's worker and of what it starts."""
    return f"CKPT_SITE={home}"


def _url(port: int | None) -> str:
    settings = get_current_settings()
    own = api_url(settings.server.api.host, port or settings.server.api.port)
    return own if port is not None else (settings.api.url or own).rstrip("/")


def _server(site: Site, home: Path, port: int | None) -> tuple[Site, SitePart]:
    settings = get_current_settings().server.api
    host, port = settings.host, port or settings.port
    process = site.started.get("server")
    if answers(site.url):
        ours = process is not None and process.lives
        status = "as it was" if ours else "runs already, not started here"
        return site, SitePart(name="server", status=status, about=site.url)
    if site.url != api_url(host, port):
        raise SiteError(
            f"no server answers at {site.url}", hint="PREFECT_API_URL names it: start it, or unset the variable."
        )
    if process is not None:
        end_all([process], _STOP_S)  # it runs, but does not answer
    pid = start_server(host, port)
    assert pid is not None  # nothing answered a moment ago, and we hold the site
    site = replace(site, started={**site.started, "server": Process.of(pid)})
    return site, SitePart(name="server", status="started", about=f"{site.url}, log {home / 'server.log'}")


def _pool(client: SyncPrefectClient) -> SitePart:
    try:
        client.read_work_pool(POOL)
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        return SitePart(name="work pool", status="created", about=POOL)
    return SitePart(name="work pool", status="as it was", about=POOL)


def _deploy(directory: Path, url: str) -> tuple[tuple[str, ...], Path]:
    """Deploy with Prefect's own command; return the names, and the file that they come from."""
    file = directory / "prefect.yaml"
    file = file if file.exists() else _HERE / "prefect.yaml"
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(file)]
    environment = {**os.environ, "PREFECT_API_URL": url, "COLUMNS": "500"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    names = tuple(dict.fromkeys(_DEPLOYED.findall(done.stdout)))
    if done.returncode or not names:
        raise SiteError(f"{file} cannot be deployed:\n{(done.stdout + done.stderr).strip()[-2000:]}")
    return names, file


def _worker(site: Site, home: Path, client: SyncPrefectClient, path: Path) -> tuple[Site, SitePart]:
    log_path = home / "worker.log"
    about = f"takes runs of {POOL}, log {log_path}"
    process = site.started.get("worker")
    if process is not None and process.lives:
        return site, SitePart(name="worker", status="as it was", about=about)
    name = f"ckpt up on {socket.gethostname()}"
    before = _sign_of_life(client, name)
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process", "--name", name]
    with log_path.open("ab") as log:
        begin = log.tell()
        worker = subprocess.Popen(
            command,
            env={**os.environ, "PREFECT_API_URL": site.url, "CKPT_SITE": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # closing the terminal does not end it
        )
    site = replace(site, started={**site.started, "worker": Process.of(worker.pid)})
    write_site(path, site)  # before waiting for it: a kill here must not leave an unknown worker
    deadline = time.monotonic() + _PATIENCE_S
    while _sign_of_life(client, name) == before:
        if worker.poll() is not None:
            raise SiteError(f"the worker ended with status {worker.returncode}:\n{end_of(log_path, begin)}")
        if time.monotonic() > deadline:
            raise SiteError(f"the worker has not reported within {_PATIENCE_S} s; see {log_path}")
        time.sleep(_LOOK_S)
    return site, SitePart(name="worker", status="started", about=about)


def _sign_of_life(client: SyncPrefectClient, name: str) -> object:
    workers: list[Worker] = client.read_workers_for_work_pool(POOL)
    return next((worker.last_heartbeat_time for worker in workers if worker.name == name), None)


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Hold the site for this process; two at once would start everything twice."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / "ckpt-up.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SiteError("another ckpt up or ckpt down is at work", hint="Wait for it.") from None
        yield
