"""A team's site: a Prefect server with a database of its own, a worker, our deployments, and ways to break them."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.request import urlopen
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_CLIENT_RETRY_EXTRA_CODES,
    temporary_settings,
)

from ckpt_tasks import Checkpoint, open_run
from ckpt_tasks.checkpoint.restore.reading import Run
from ckpt_tasks.errors import CkptError
from tests.servers.process import free_port
from tests.support import processes

__all__ = ["ROOT", "Site", "Step"]

ROOT = Path(__file__).parents[2]
_LOST_S = 45  # an automation would have acted by now
_LOOK_S = 1.0  # the cores are needed
_log = logging.getLogger(__name__)
_PREFECT = str(Path(sys.prefix, "bin", "prefect"))


class Step(NamedTuple):
    """One trained step: when it ended, in seconds since 1970, in which process, and how much memory that had."""

    at_s: float
    pid: int
    step: int
    rss_bytes: int


class Site:
    """Everything below `home`; `database` is a connection URL, None for the server's own SQLite."""

    def __init__(self, home: Path, database: str | None = None):
        self.home = home
        self.runs = home / "runs"
        self._port = free_port()
        self.api = f"http://127.0.0.1:{self._port}/api"
        self.environment = {
            **os.environ,
            # `prefect flow-run execute` is found by its name, as it is where a worker's environment is active.
            "PATH": f"{Path(sys.prefix, 'bin')}{os.pathsep}{os.environ['PATH']}",
            "PREFECT_HOME": str(home / "prefect"),
            "PREFECT_API_URL": self.api,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            # Leases in memory go with the server, and healthy runs with them.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "OMP_NUM_THREADS": "1",
            **({"PREFECT_API_DATABASE_CONNECTION_URL": database} if database else {}),
        }
        self.server: subprocess.Popen[bytes] | None = None
        self.worker: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with ExitStack() as started:
            started.push(self)  # What has been started ends, should the rest fail.
            self.start_server()
            self.prefect("work-pool", "create", "ckpt-tasks", "--type", "process")
            self.prefect("--no-prompt", "deploy", "--all", "--prefect-file", "deployments/prefect.yaml")
            self.python("-m", "deployments.automations", "apply")
            started.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        processes.kill(processes.with_variable(f"PREFECT_HOME={self.environment['PREFECT_HOME']}"))
        for process in (self.worker, self.server):
            if process is not None:
                process.wait(30)

    # ── its parts ────────────────────────────────────────────────────────────────────────────────────────────

    def start_server(self) -> None:
        """Start the server (again, on the same port and database) and wait until it answers."""
        command = (sys.executable, "-m", "ckpt_tasks.flows.site.serving", "server", "start")  # as `ckpt up` does
        self.server = self._spawn("server", *command, "--host", "127.0.0.1", "--port", str(self._port))
        self.until(self._healthy, 120, "the server answers")

    def start_worker(self) -> None:
        """Start a process worker; it and what it starts is a process group of its own."""
        self.worker = self._spawn("worker", _PREFECT, "worker", "start", "--pool", "ckpt-tasks")

    def kill(self, process: subprocess.Popen[bytes] | None, signum: int = signal.SIGKILL) -> None:
        """Send a signal to one process of the site, and not to its children; wait until it is gone."""
        assert process is not None
        os.kill(process.pid, signum)
        process.wait(60)

    def engines(self, flow_run: UUID) -> list[int]:
        """List the processes of one flow run, the one that computes last."""
        return [*processes.with_variable(f"PREFECT__FLOW_RUN_ID={flow_run}")]

    # ── what is done at it ───────────────────────────────────────────────────────────────────────────────────

    def prefect(self, *arguments: str) -> str:
        """Run one command of Prefect's; return what it prints."""
        return self._command(_PREFECT, *arguments)

    def python(self, *arguments: str) -> str:
        """Run Python at the top of the checkout; return what it prints."""
        return self._command(sys.executable, *arguments)

    def train(
        self,
        run_key: str,
        total_steps: int,
        *,
        place: str = "",
        step_interval: int = 10,
        batch_steps: int = 20,
        program: str = "tests.e2e.trouble:Trouble",
        ranks: int = 1,
        checkpoint: Mapping[str, Any] | None = None,
        **params: Any,
    ) -> UUID:
        """Start a training run of our small program by its deployment; return the flow run's id.

        `place` is where its checkpoints go, if not below `runs`.
        """
        parameters = {
            "run_key": run_key,
            "total_steps": total_steps,
            "program": program,
            "ranks": ranks,
            "params": {**params, "trace": str(self.home / f"{run_key}.steps")},
            "batch_steps": batch_steps,
            "checkpoint": {
                "checkpoint_dir": place or str(self.runs / "{run_key}"),
                "step_interval": step_interval,
                **(checkpoint or {}),
            },
        }
        return self.start("train/byte-lm", **parameters)

    def start(self, deployment: str, **parameters: Any) -> UUID:
        """Start a flow run by its deployment."""
        with self.client() as client:
            found = client.read_deployment_by_name(deployment)
            return client.create_flow_run_from_deployment(found.id, parameters=parameters).id

    def execute(self, flow_run: UUID) -> subprocess.Popen[bytes]:
        """Start one more process for a flow run, as two reports of one crash do."""
        return self._spawn("second", _PREFECT, "flow-run", "execute", str(flow_run))

    @contextmanager
    def client(self) -> Iterator[SyncPrefectClient]:
        """Give a client of the server; it is patient: 503 or 500 is what is answered while an SQLite is locked."""
        settings = {
            PREFECT_API_URL: self.api,
            PREFECT_CLIENT_MAX_RETRIES: 8,  # each waits twice as long: some eight minutes in all
            PREFECT_CLIENT_RETRY_EXTRA_CODES: "500",
        }
        with temporary_settings(settings), get_client(sync_client=True) as client:
            yield client

    def flow_run(self, flow_run: UUID) -> FlowRun:
        """Read a flow run."""
        with self.client() as client:
            return client.read_flow_run(flow_run)

    def state(self, flow_run: UUID) -> State:
        """Return the state of a flow run."""
        found = self.flow_run(flow_run).state
        assert found is not None
        return found

    def states(self, flow_run: UUID) -> list[str]:
        """List the names of all states that a flow run has had."""
        return [state["name"] for state in self.history(flow_run)]

    def history(self, flow_run: UUID) -> list[dict[str, Any]]:
        """List all states that a flow run has had."""
        with self.client() as client:
            states: list[dict[str, Any]] = client.request(
                "GET", "/flow_run_states/", params={"flow_run_id": str(flow_run)}
            ).json()
        return states

    def logs(self, flow_run: UUID) -> str:
        """Return all that a flow run has logged."""
        with self.client() as client:
            body = {"logs": {"flow_run_id": {"any_": [str(flow_run)]}}, "limit": 200, "sort": "TIMESTAMP_ASC"}
            return "\n".join(one["message"] for one in client.request("POST", "/logs/filter", json=body).json())

    # ── what came of it ──────────────────────────────────────────────────────────────────────────────────────

    def run(self, run_key: str) -> Run:
        """Open a run directory."""
        return open_run(str(self.runs / run_key))

    def newest(self, run_key: str) -> int:
        """Return the newest step that is committed; 0 before the first."""
        with suppress(CkptError):
            return max((one.step for one in self.checkpoints(run_key)), default=0)
        return 0

    def checkpoints(self, run_key: str) -> list[Checkpoint]:
        """List a run's checkpoints."""
        return self.run(run_key).checkpoints()

    def steps(self, run_key: str) -> list[Step]:
        """List every step that was trained, in the order of their ends, those that were lost too."""
        trace = self.home / f"{run_key}.steps"
        lines = trace.read_text().splitlines() if trace.exists() else []
        return [Step(float(at), int(pid), int(step), int(rss)) for at, pid, step, rss in map(str.split, lines)]

    def until(self, true: Callable[[], Any], seconds: float, what: str) -> Any:
        """Wait until something is true, and return it; else raise TimeoutError with what the site has printed."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = true()
            if found:
                return found
            time.sleep(_LOOK_S)
        printed = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.home.glob("*.log")))
        raise TimeoutError(f"not within {seconds} s: {what}\n{printed}")

    def until_step(self, run_key: str, step: int, seconds: float = 120) -> None:
        """Wait until a step is committed."""
        self.until(lambda: self.newest(run_key) >= step, seconds, f"{run_key} commits step {step}")

    def until_state(self, flow_run: UUID, *names: str, seconds: float = 240) -> State:
        """Wait until a flow run is in one of these states; another final one is an error at once."""

        def there() -> State | None:
            state = self.state(flow_run)
            if state.is_crashed() and (datetime.now(UTC) - state.timestamp).total_seconds() > _LOST_S:
                self.watch()
            return state if state.name in names or (state.is_final() and not state.is_crashed()) else None

        state: State = self.until(there, seconds, f"{flow_run} is {' or '.join(names)}")
        assert state.name in names, f"{state.name}: {state.message}\n{self.logs(flow_run)}"
        return state

    def watch(self) -> None:
        """Do what the deployment `watch` does every five minutes, now: its worker is busy enough."""
        _log.warning("an automation has missed a crash")
        self.python("-c", f"from ckpt_tasks.flows.watch import watch; watch(crashed_s={_LOST_S})")

    def _healthy(self) -> bool:
        try:
            with urlopen(f"{self.api}/health", timeout=5):
                return True
        except OSError:
            return False

    def _spawn(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        self.home.mkdir(parents=True, exist_ok=True)
        with (self.home / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command, cwd=self.home, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def _command(self, *command: str) -> str:
        done = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
