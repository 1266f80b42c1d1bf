"""What every test stands on: one thread, no server of the developer's, the same random numbers on every run.

The environment is set before anything imports torch or Prefect, and the processes that tests start inherit it.
PYTHONHASHSEED is left alone on purpose: code that depends on the order of a set must fail here, not after a restart.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import certifi
import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from tests.servers.s3 import BUCKETS
from tests.support import interpreters, processes, workers

# Servers, each started by the first test that asks for it.
pytest_plugins = ["tests.servers.fixtures", "tests.servers.prefect"]

# A home of its own: a test never sees, writes or upgrades the developer's Prefect profile and database.
_PREFECT_HOME = tempfile.TemporaryDirectory(prefix="ckpt-tasks-prefect-")

# One authority that nothing here asks for: to read all of certifi's takes 30 ms for each client of Prefect or S3.
_AUTHORITY = Path(_PREFECT_HOME.name, "authority.pem")
_END = "-----END CERTIFICATE-----\n"
_AUTHORITY.write_text(Path(certifi.where()).read_text(encoding="utf-8").partition(_END)[0] + _END, encoding="utf-8")

for _name in [name for name in os.environ if name.startswith(("PREFECT_", "CKPT_", "AWS_", "FSSPEC_"))]:
    del os.environ[_name]

os.environ |= {
    # Two workers on two cores: more threads would only wait for each other, and change the order of sums.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TZ": "UTC",
    "COLUMNS": "120",
    "NO_COLOR": "1",
    "PREFECT_HOME": _PREFECT_HOME.name,
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # Nor the developer's keys and buckets: what a test reaches has keys of its own.
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
    **dict.fromkeys(("PREFECT_API_SSL_CERT_FILE", "SSL_CERT_FILE", "AWS_CA_BUNDLE"), str(_AUTHORITY)),
    "FSSPEC_CONFIG_DIR": os.devnull,
    # Read when gcsfs is imported, by whichever test is first; else it asks for layouts, of which the emulator knows
    # nothing, for 110 s each time.
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}

# A shell that starts the tests in the background ignores SIGINT (&) or SIGHUP (nohup): every child would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Slow file systems and two busy cores say nothing about the code: no test has a deadline, only pytest's timeout.
# `make soak` draws new examples; everywhere else they are the same for everybody, and what is red is so for everybody.
settings.register_profile("soak", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=1000)
settings.register_profile("all", settings.get_profile("soak"), derandomize=True, print_blob=True, max_examples=100)
settings.register_profile("quick", settings.get_profile("all"), max_examples=25)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

_LONG_FORM_S = 3000.0
# Folders whose tests are about a disk; the others save hundreds of times, and would wait for its fsyncs.
_OF_DISKS = {"crash", "e2e", "faults", "memory", "save", "servers", "storage"}
_MEMORY = "/dev/shm"
_IN_MEMORY = f"ckpt-tasks-test-{os.getpid()}-"  # other test processes have directories there too
_MANY_OBJECTS = 20_000  # looked through in some 1 ms, as a step of a training does many times
_SERVERS = ("prefect_home", "ministack")  # fixtures of servers that take long to start
_PARSED = "tests/conventions/"  # its tests read all sources, which takes seconds in each process
_UNKNOWN_S, _SHORT_S = 100.0, 3.0  # what a file may take that has not run yet; what fills up a share


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "keep how long each file took in tests/durations*.json: with several workers the longest begin first"
    parser.addoption("--keep-durations", action="store_true", help=told)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give the long forms more than the ten minutes of `make test`, unless they say themselves how long they take."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_LONG_FORM_S))
    if hasattr(config, "workerinput"):
        items[:] = _dealt(items, config.workerinput["workercount"])


def _dealt(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Deal the files to the workers, each of which first gets as many tests as the others; later they take from them.

    The tests of a server go to one worker, which begins with them: another would start another server. So do those that
    read all sources. The shares take alike, by what is known of their files, and begin with what takes longest: at the
    end nobody has much left.
    """
    took = json.loads(_durations(any(item.get_closest_marker("slow") for item in items)).read_text(encoding="utf-8"))
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    servers = {server: n % workers for n, server in enumerate((*_SERVERS, _PARSED))}
    shares: list[list[pytest.Item]] = [[] for _ in range(workers)]
    sums_s, short = [0.0] * workers, list[pytest.Item]()

    def order(file: str) -> tuple[bool, float]:
        return server_of(file) is None, -took.get(file, _UNKNOWN_S)

    def server_of(file: str) -> str | None:
        asked = {name for item in files[file] for name in getattr(item, "fixturenames", ())}
        return next((server for server in _SERVERS if server in asked), _PARSED if file.startswith(_PARSED) else None)

    for file in sorted(files, key=order):
        took_s, server = took.get(file, _UNKNOWN_S), server_of(file)
        if server is None and took_s < _SHORT_S:
            short += files[file]
            continue
        most = len(items) // workers - len(files[file])
        room = [n for n in range(workers) if len(shares[n]) <= most] or range(workers)
        to = min(room, key=lambda n: sums_s[n]) if server is None else servers[server]
        shares[to] += files[file]
        sums_s[to] += took_s
    dealt: list[pytest.Item] = []
    for n, share in enumerate(shares):
        size = (len(items) - len(dealt)) // (workers - n)  # as xdist will cut it
        number = max(0, size - len(share))
        dealt += share + short[:number]
        del short[:number]
    return dealt + short


def _durations(slow: bool) -> Path:
    """Return the file with the seconds that each file of tests took when they were last kept."""
    return Path(__file__).with_name("durations_all.json" if slow else "durations.json")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        interpreters.share()
        config.option.tx = [workers.COMMAND if spec == "popen" else spec for spec in config.option.tx]
    if config.getoption("--keep-durations") and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(_Durations(), "ckpt-tasks-durations")


class _Durations:
    """Sums up what the tests of each file take, setup and teardown too, and keeps it for the files that ran."""

    def __init__(self) -> None:
        self._took: dict[str, float] = {}
        self._slow = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._slow |= "slow" in report.keywords
        file = report.nodeid.partition("::")[0]
        self._took[file] = self._took.get(file, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        kept = _durations(self._slow)
        before = json.loads(kept.read_text(encoding="utf-8"))
        there = {file: took for file, took in before.items() if (kept.parents[1] / file).exists()}
        whole = there | {file: round(took, 1) for file, took in self._took.items()}
        kept.write_text(json.dumps(dict(sorted(whole.items())), indent=0) + "\n", encoding="utf-8")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without the garbage collector: it would look through all that is imported, again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Take what was imported and collected out of the garbage collector's sight.

    It is a million objects, hardly any of them garbage, and tests look through all objects thousands of times: each
    save does once, for loaders, and so do training loops and sessions that end.
    """
    gc.freeze()


@pytest.fixture(autouse=True)
def _what_stays_is_not_looked_at() -> Iterator[None]:
    """Do the same where a test has imported something large (a compiler, a server): it stays until the end."""
    yield
    if len(gc.get_objects()) > _MANY_OBJECTS:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Let no module of tests leave this process other than it was: which tests come after it is chance."""
    before = _surroundings()
    yield
    until_s = time.monotonic() + 60
    while (writing := _writing()) and time.monotonic() < until_s:
        time.sleep(0.01)  # What a test has left stuck, and freed at its end, would write into the next one's world.
    assert writing == []
    while gc.isenabled() != before["garbage collector"] and time.monotonic() < until_s:
        time.sleep(0.01)  # A thread behind a commit may still read what it prunes.
    after = _surroundings()
    if any(before[name] != after.get(name) for name in before):
        gc.collect()  # A loop that an error has left ends with its frame, which a circle may still hold.
        after = _surroundings()
    ours = {name for name in after if name.startswith(("$PREFECT_", "$CKPT_", "$AWS_"))}  # foreign packages add others
    differing = {name for name in before.keys() | ours if before.get(name) != after.get(name)}
    assert {name: (before.get(name), after.get(name)) for name in differing} == {}


def _writing() -> list[str]:
    """Return the names of the threads that write into a run."""
    ours = ("ckpt-flush", "ckpt-prune", "ckpt-seal", "ckpt-take")
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(ours)]


def _surroundings() -> dict[str, object]:
    """Return what tests change of a process and others count on."""
    os.umask(umask := os.umask(0o022))
    found: dict[str, object] = {
        "directory": os.getcwd(),
        "umask": umask,
        "sys.path": [place for place in sys.path if "/site-packages/ray/" not in place],  # Ray adds folders of its own
        "garbage collector": gc.isenabled(),
        "timeout of sockets": socket.getdefaulttimeout(),
        "level of all": logging.getLogger().level,
        "level of ours": logging.getLogger("ckpt_tasks").level,
        "SIGINT": signal.getsignal(signal.SIGINT),
        "SIGTERM": signal.getsignal(signal.SIGTERM),
    }
    found |= {f"${name}": text for name, text in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    if (torch := sys.modules.get("torch")) is not None:
        found["dtype"] = torch.get_default_dtype()
        found["deterministic"] = torch.are_deterministic_algorithms_enabled()
        found["gradients"] = torch.is_grad_enabled()
    if (prefect := sys.modules.get("prefect.settings")) is not None:
        found["Prefect's server"] = prefect.get_current_settings().api.url
    return found


@pytest.fixture(scope="session", autouse=True)
def _temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let every temporary directory of this session, and of its processes, be below pytest's own."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(tmp_path_factory.mktemp("temporary"))
    os.environ["RAY_TMPDIR"] = "/tmp"  # Ray's sockets need short names.
    yield
    tempfile.tempdir = None
    del os.environ["TMPDIR"], os.environ["RAY_TMPDIR"]


@pytest.fixture(scope="session", autouse=True)
def _no_snapshots_left(_temporary: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Leave no snapshot of a test's run in shared memory, and nothing else; name the run of each that is there."""
    yield
    assert [url for _, url in _snapshots(tmp_path_factory)] == []
    for place in Path(_MEMORY).glob(f"{_IN_MEMORY}*"):
        shutil.rmtree(place, ignore_errors=True)  # a process that was being killed wrote while it was removed
    assert [str(place) for place in Path(_MEMORY).glob(f"{_IN_MEMORY}*")] == []


@pytest.fixture(scope="session", autouse=True)
def _no_processes_left(_temporary: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Leave no process at work in a directory of this session: it would write there, and slow down what comes next."""
    yield
    until_s = time.monotonic() + 30
    ours = (f"{_MEMORY}/{_IN_MEMORY}", str(tmp_path_factory.getbasetemp()))
    while (left := processes.in_directory(*ours)) and time.monotonic() < until_s:
        time.sleep(0.1)  # What was told to end is ending.
    assert left == {}


@pytest.fixture(scope="module", autouse=True)
def _snapshots_are_freed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Free what killed processes leave in shared memory: their runs are never started again."""
    yield
    for place, _ in _snapshots(tmp_path_factory):
        shutil.rmtree(place, ignore_errors=True)


def _snapshots(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, str]]:
    """List the snapshots in shared memory of this session's runs: where they are, and the run directory."""
    ours = (str(tmp_path_factory.getbasetemp()), f"{_MEMORY}/{_IN_MEMORY}", f"s3://{BUCKETS}")
    found = []
    for lock in Path(_MEMORY).glob(f"ckpt-tasks-{os.getuid()}/*/lock"):
        with contextlib.suppress(FileNotFoundError):  # another session's process ends
            url = os.fsdecode(lock.read_bytes()[:4096].rstrip(b"\0"))
            found += [(lock.parent, url)] if url.startswith(ours) else []
    return found


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Seed every global generator, so that a failure can be had again."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (NumPy's global generator is part of the state that is saved)
    if (torch := sys.modules.get("torch")) is not None:  # not imported for tests that do without it
        torch.set_num_threads(1)
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _same_handlers() -> Iterator[None]:
    """Put SIGTERM's handler back: a Checkpointer's block around a flow that retries ends with Prefect's."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def fast_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a directory on a memory file system, where an fsync costs nothing, or an ordinary one if there is none."""
    if not os.access(_MEMORY, os.W_OK):
        yield tmp_path_factory.mktemp("fast")
        return
    with tempfile.TemporaryDirectory(prefix=_IN_MEMORY, dir=_MEMORY) as made:
        yield Path(made)


@pytest.fixture
def tmp_path(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Return a directory of the test's own, in memory where the test is about no disk."""
    if request.path.parent.name in _OF_DISKS or not os.access(_MEMORY, os.W_OK):
        yield tmp_path
        return
    made = tempfile.TemporaryDirectory(prefix=_IN_MEMORY, dir=_MEMORY, ignore_cleanup_errors=True)
    with made as place:
        yield Path(place)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each `python -m …` be a fork of a process that has imported torch, which takes seconds."""
    monkeypatch.setattr(subprocess, "Popen", interpreters.Forked)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return the path of a run directory that does not exist yet."""
    return tmp_path / "run"
