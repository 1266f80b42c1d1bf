"""Start and stop a site on this machine: server, work pool, deployments, automations, worker and keeper."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import Worker
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, get_current_settings, temporary_settings

from ckpt_tasks.errors import SiteError
from ckpt_tasks.flows.prefect.abandoned import start_again
from ckpt_tasks.flows.prefect.events import client_without_retries
from ckpt_tasks.flows.prefect.starts import crash_lost_trainings
from ckpt_tasks.flows.site.automations import apply, build_automations
from ckpt_tasks.flows.site.prefect_server import (
    answers,
    api_url,
    end_of,
    local_url,
    make_password,
    read_password,
    start_apart,
    start_server,
)
from ckpt_tasks.flows.site.site_parts import Site, SiteProcess, end_all, read_site, site_processes, write_site
from ckpt_tasks.run.report.words import printable

POOL = "ckpt-tasks"
_HERE = Path(__file__).parent
_PATIENCE_S = 180  # A busy machine imports Prefect slowly.
_PREEMPTED_S = 120  # A flow run ends its step and commits within this time, as the pools' templates require.
_REPORTED_S = 10  # The process that started a flow run reports the flow run's end within this time.
_STOP_S = 30
_ANSWER_S = 30.0
_LOOK_S = 0.5
_ROOM_BYTES = 16 << 20  # A server with less room for its database and log fails in many ways.
_DEPLOYED = re.compile(r"Deployment '([^']+)' successfully created")


@dataclass(frozen=True, kw_only=True)
class SitePart:
    """A part of the site and its status, in words for people."""

    name: str
    status: str
    about: str


@dataclass(frozen=True, kw_only=True)
class Up:
    """A running site: its API and page, the page of trainings, its password file, its parts, its deployments' names."""

    url: str
    page: str
    trainings: str
    password_file: str
    parts: tuple[SitePart, ...]
    deployments: tuple[str, ...]


def bring_up(directory: Path, port: int | None = None, say: Callable[[str], None] = lambda _: None) -> Up:
    """Start the parts that do not run yet, deploy `directory`'s prefect.yaml, or the example, and wait for all parts.

    Without a `port`, PREFECT_API_URL names the server, if it is set; this starts only a server of this machine. `say`
    gets a line before each step that takes seconds. Raises SiteError.
    """
    home = get_current_settings().home
    with _needs_room(home), _alone(home):
        path = home / "ckpt-up.json"
        url = _url(port)
        site = read_site(path) or Site(url=url)
        if site.url != url:
            if any(item.lives for item in site.started.values()):
                raise SiteError(f"a site is up already, at {site.url}", hint="End it with ckpt down, or use its port.")
            site = Site(url=url)
        say("Prefect's server …")
        site, server = _server(site, home, port)
        write_site(path, site)
        with client_of(site) as client:
            crash_lost_trainings(client)
            say("Its deployments …")
            deployments, applied = prepare(directory, site, client)
            trainings = client.create_flow_from_name("train")  # It returns the flow that exists.
            say("Its worker …")
            site, worker = _worker(site, home, client, path)
        parts = (server, *applied, worker, _keeper(site, home, path))
        page = url.removesuffix("/api")
        return Up(
            url=url,
            page=page,
            trainings=f"{page}/runs?flow={trainings}",
            password_file=site.password_file,
            parts=parts,
            deployments=deployments,
        )


def prepare(directory: Path, site: Site, client: SyncPrefectClient) -> tuple[tuple[str, ...], tuple[SitePart, ...]]:
    """Make the work pool, the deployments and the automations; return the deployments' names, and the parts."""
    pool, (deployments, file) = _pool(client), _deploy(directory, site)
    changed = sum(item.status != "as it was" for item in apply(build_automations()))
    deployed = SitePart(name="deployments", status="applied", about=f"{len(deployments)} from {file}")
    automations = SitePart(
        name="automations",
        status="applied" if changed else "as they were",
        about="crashed and silent runs are started again",
    )
    return deployments, (pool, deployed, automations)


def restart(*, deploy: bool = False) -> str | None:
    """Restart the parts that died since `bring_up`; do nothing after `take_down`. Return the reason of a failure."""
    home = get_current_settings().home
    try:
        with _alone(home):
            path = home / "ckpt-up.json"
            site = read_site(path)
            if site is None:
                return None
            site, _ = _server(site, home, urlsplit(site.url).port)
            write_site(path, site)
            with client_of(site) as client:
                if deploy:
                    _deploy(Path.cwd(), site)
                _worker(site, home, client, path)
    except (SiteError, httpx.HTTPError, PrefectException) as error:
        return f"{type(error).__name__}: {error}"
    return None


def take_down(say: Callable[[str], None] = lambda _: None) -> tuple[SitePart, ...]:
    """End the processes that `bring_up` started: keeper, worker, the worker's flow runs after a commit, server.

    `say` gets a line before each step that takes seconds.
    """
    home = get_current_settings().home
    with _needs_room(home), _alone(home, _PATIENCE_S):  # The keeper may be restarting a part.
        path = home / "ckpt-up.json"
        site = read_site(path)
        if site is None:
            return ()
        parts = []
        for name in ("keeper", "worker", "server"):
            process = site.started.get(name)
            status, about = "not started here", ""
            if process is not None:
                about = f"process {process.pid}"
                status = "ended" if process.lives else "was gone"
                if name == "worker":
                    say("The worker, and its trainings, which finish their step and commit …")
                    about += end_workers(home, site)
                else:
                    say(f"The {name} …")
                    end_all([process], _STOP_S)
            parts.append(SitePart(name=name, status=status, about=about))
        path.unlink()
        if "server" in site.started:  # `prefect server stop` ends another server by this file.
            (home / "server.pid").unlink(missing_ok=True)
        return tuple(parts)


def end_workers(home: Path, site: Site) -> str:
    """Let the flow runs finish their step and commit, then end the workers, and schedule the flow runs again."""
    workers, _ = site_processes(_mark(home))
    try:
        for worker in workers:
            # A stopped worker starts no more flow runs, and keeps the pipes of their output open.
            worker.send(signal.SIGSTOP)
        runs = site_processes(_mark(home))[1]
        end_all([run.trains for run in runs], _PREEMPTED_S)
        end_all([run.top for run in runs], _REPORTED_S, tell=())
    finally:
        for worker in workers:
            worker.send(signal.SIGKILL)
    if not runs:
        return ""
    try:
        with client_of(site) as client:
            asked = [UUID(run.flow_run_id) for run in runs]
            again = [client.read_flow_run(one).name for one in asked if schedule_again(client, one)]
    except (SiteError, httpx.HTTPError, PrefectException) as error:
        return f"; flow runs ended: {len(runs)}; Prefect's server does not take that they continue: {error}"
    number = "" if len(again) == len(runs) else f" ({len(again)} of {len(runs)})"
    return f"; flow runs that the next worker resumes{number}: {', '.join(map(printable, again)) or 'none'}"


def schedule_again(client: SyncPrefectClient, flow_run_id: UUID) -> bool:
    """Schedule a flow run again; return True if it is scheduled now, also by its own supervisor, as most are."""
    start_again(client, flow_run_id, "Its site was taken down.")
    state = client.read_flow_run(flow_run_id).state
    return state is not None and state.is_scheduled()


def _mark(home: Path) -> str:
    """Return the mark in the environment of this site's worker, which its processes inherit."""
    return f"CKPT_SITE={home}"


def _url(port: int | None) -> str:
    return local_url(port) if port is not None else (get_current_settings().api.url or local_url(port)).rstrip("/")


def _server(site: Site, home: Path, port: int | None) -> tuple[Site, SitePart]:
    settings = get_current_settings().server.api
    host, port = settings.host, port or settings.port
    process = site.started.get("server")
    ours = process is not None and process.lives  # Look before the question: ours can end right after its answer.
    if answers(site.url):
        if not ours:  # The keeper must not restart what has died here.
            site = replace(site, started={name: part for name, part in site.started.items() if name != "server"})
        status = "as it was" if ours else "runs already, not started here"
        open_to_all = ours and not _password(site)
        about = f"{site.url}, without a password: ckpt down, then ckpt up makes one" if open_to_all else site.url
        return site, SitePart(name="server", status=status, about=about)
    if site.url != api_url(host, port):
        raise SiteError(
            f"no server answers at {site.url}", hint="PREFECT_API_URL names it: start it, or unset the variable."
        )
    if process is not None:
        end_all([process], _STOP_S)  # The server runs, but does not answer.
    # A site without a password gets one only if none of its processes runs: a running process would be locked out.
    if not settings.auth_string and not site.password_file and not any(site_processes(_mark(home))):
        site = replace(site, password_file=str(make_password(home)))
    pid = start_server(host, port, password=_password(site))
    assert pid is not None  # No server answered just now, and we hold the site.
    site = replace(site, started={**site.started, "server": SiteProcess.of(pid)})
    return site, SitePart(name="server", status="started", about=f"{site.url}, log {home / 'server.log'}")


def _pool(client: SyncPrefectClient) -> SitePart:
    try:
        client.read_work_pool(POOL)
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        return SitePart(name="work pool", status="created", about=POOL)
    return SitePart(name="work pool", status="as it was", about=POOL)


def _deploy(directory: Path, site: Site) -> tuple[tuple[str, ...], Path]:
    """Deploy with Prefect's own command; return the deployments' names, and the file that declares them."""
    file = directory / "prefect.yaml"
    file = file if file.exists() else _HERE / "prefect.yaml"
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(file)]
    patient = {"PREFECT_CLIENT_MAX_RETRIES": "8"}  # A busy server on SQLite answers 503.
    environment = {**os.environ, **patient, **_entry(site), "COLUMNS": "500"}
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
    server = site.started.get("server")
    command, environment = worker_start(site, home)
    before = _sign_of_life(client, name := command[-1])
    worker, begin = start_apart(command, log_path, environment)
    site = replace(site, started={**site.started, "worker": SiteProcess.of(worker.pid)})
    write_site(path, site)  # Write before the wait: a kill here must not leave an unknown worker.
    deadline = time.monotonic() + _PATIENCE_S
    with client_without_retries(_ANSWER_S) as asking:
        while not _reports(asking, name, before):
            if server is not None and not server.lives:
                raise SiteError("the server has ended while its worker started", hint=f"See {home / 'server.log'}.")
            if worker.poll() is not None:
                raise SiteError(f"the worker ended with status {worker.returncode}:\n{end_of(log_path, begin)}")
            if time.monotonic() > deadline:
                raise SiteError(f"the worker has not reported within {_PATIENCE_S} s; see {log_path}")
            time.sleep(_LOOK_S)
    return site, SitePart(name="worker", status="started", about=about)


def worker_start(site: Site, home: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts the site's worker, whose last word is its name, and its environment."""
    name = f"ckpt up on {socket.gethostname()}"
    # Jobs call `prefect`, which is on the path only if this environment is active.
    search_path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process", "--name", name]
    return command, {"DO_NOT_TRACK": "1", **os.environ, "PATH": search_path, **_entry(site), "CKPT_SITE": str(home)}


def _keeper(site: Site, home: Path, path: Path) -> SitePart:
    log_path = home / "keeper.log"
    about = f"starts again what dies, log {log_path}"
    if (process := site.started.get("keeper")) is not None and process.lives:
        return SitePart(name="keeper", status="as it was", about=about)
    keeper, _ = start_apart([sys.executable, "-m", "ckpt_tasks.flows.site.keeper", str(path)], log_path, os.environ)
    write_site(path, replace(site, started={**site.started, "keeper": SiteProcess.of(keeper.pid)}))
    return SitePart(name="keeper", status="started", about=about)


@contextmanager
def client_of(site: Site) -> Iterator[SyncPrefectClient]:
    """Yield a client of the site's server. Raises SiteError if the server asks for another password."""
    names = {PREFECT_API_URL.name: PREFECT_API_URL, PREFECT_API_AUTH_STRING.name: PREFECT_API_AUTH_STRING}
    settings = {names[name]: value for name, value in _entry(site).items()}
    try:
        with temporary_settings(settings), get_client(sync_client=True) as client:
            yield client
    except httpx.HTTPStatusError as error:
        if error.response.status_code != 401:
            raise
        raise SiteError(
            f"the server at {site.url} asks for a password",
            hint="Set PREFECT_API_AUTH_STRING to it. If it is not yours, start one beside it: ckpt up --port 4201.",
        ) from error


def _entry(site: Site) -> dict[str, str]:
    """Return the environment in which a client reaches the server and has its password."""
    password = _password(site)
    return {"PREFECT_API_URL": site.url, **({"PREFECT_API_AUTH_STRING": password} if password else {})}


def _password(site: Site) -> str:
    """Return the site's password: from its file, or from the user's settings if we started the server."""
    if site.password_file:
        return read_password(Path(site.password_file))
    given = get_current_settings().server.api.auth_string
    return given.get_secret_value() if given and "server" in site.started else ""


def _sign_of_life(client: SyncPrefectClient, name: str) -> object:
    workers: list[Worker] = client.read_workers_for_work_pool(POOL)
    return next((worker.last_heartbeat_time for worker in workers if worker.name == name), None)


def _reports(client: SyncPrefectClient, name: str, before: object) -> bool:
    """Return True if the worker has given a newer sign of life; False also if the server does not answer now."""
    try:
        return _sign_of_life(client, name) != before
    except httpx.HTTPError:
        return False


@contextmanager
def _needs_room(home: Path) -> Iterator[None]:
    """Raise SiteError for a home that cannot be written, and name a full disk, whatever has failed because of it."""
    try:
        yield
    except OSError as error:
        raise SiteError(
            f"{error.filename or home}: {error.strerror}", hint="PREFECT_HOME names the directory of the site."
        ) from error
    except SiteError as error:
        free = shutil.disk_usage(home).free
        if free < _ROOM_BYTES:
            raise SiteError(f"the disk of {home} is full: {free >> 10} KiB are free\n{error.message}") from error
        raise


@contextmanager
def _alone(home: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Lock the site for this process: two processes at once would start everything twice."""
    home.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + patience_s
    with (home / "ckpt-up.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise SiteError("another ckpt up or ckpt down is at work", hint="Wait for it.") from None
                time.sleep(_LOOK_S)
        yield
