"""What a site has started: a process is known by more than its number, and the end of all is the end of all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from ckpt_tasks.errors import SiteError
from ckpt_tasks.flows.site.site_parts import Site, SiteProcess, end_all, read_site, site_processes, write_site
from tests.support import processes
from tests.support.waiting import until

DEAF = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); sys.stdin.read()"


@pytest.fixture
def deaf() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process that SIGTERM does not end."""
    process = subprocess.Popen([sys.executable, "-S", "-c", DEAF], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    with suppress(ProcessLookupError):
        process.kill()
    process.communicate()


def test_a_process_of_another_boot_or_start_is_not_taken_for_ours() -> None:
    """A number that another process has now, or had before a reboot, is no life, and is sent no signal."""
    me = SiteProcess.of(os.getpid())
    assert me.lives
    for change in ({"boot": "another"}, {"start": "1"}, {"pid": 2**22 + 1}, {"start": ""}):
        other = replace(me, **change)
        assert not other.lives
        other.send(signal.SIGKILL)


def test_the_end_waits_and_then_insists(deaf: subprocess.Popen[bytes]) -> None:
    """What does not end at SIGTERM is killed after its time; what is gone already is no trouble."""
    process = SiteProcess.of(deaf.pid)
    end_all([process, replace(process, boot="another")], patience_s=0.3)
    assert deaf.wait(60) == -signal.SIGKILL
    assert not process.lives
    end_all([process], patience_s=0.0)


def test_a_flow_run_is_found_although_its_worker_is_gone() -> None:
    """Workers and the topmost processes of flow runs are found, also orphaned ones; below `execute`, the engine."""
    here = uuid4().hex  # another run of the tests may be on this machine
    mark, script = f"CKPT_SITE={here}", "sleep 600 & echo $$ $!; wait"
    environment = {**os.environ, "CKPT_SITE": here, "SCRIPT": script}
    shell = ["bash", "-c", 'PREFECT__FLOW_RUN_ID=$0 bash -c "$SCRIPT" flow-run execute x & wait']
    with (
        subprocess.Popen([*shell, "run-1"], env=environment, stdout=subprocess.PIPE, start_new_session=True) as worker,
        subprocess.Popen([*shell, "run-2"], env=environment, stdout=subprocess.PIPE, start_new_session=True) as dead,
    ):
        try:
            found = []
            for process in (worker, dead):
                assert process.stdout is not None
                found.append([int(pid) for pid in process.stdout.readline().split()])
            dead.kill()
            dead.wait()
            # A process that is becoming another program shows no mark.
            until(lambda: len(processes.with_variable(mark)) == 5)
            workers, runs = site_processes(mark)
            assert [one.pid for one in workers] == [worker.pid]
            assert sorted((one.flow_run_id, one.top.pid, one.trains.pid) for one in runs) == [
                ("run-1", *found[0]),
                ("run-2", *found[1]),
            ]
            assert site_processes("CKPT_SITE=elsewhere") == ([], [])
        finally:
            for group in (worker, dead):
                os.killpg(group.pid, signal.SIGKILL)


def test_the_file_says_what_was_started(tmp_path: Path) -> None:
    """What is written is read again; without a file there is nothing, and one that is broken is an error."""
    path = tmp_path / "ckpt-up.json"
    assert read_site(path) is None
    site = Site(url="http://127.0.0.1:1/api", started={"server": SiteProcess.of(os.getpid())})
    write_site(path, site)
    assert read_site(path) == site
    assert [*tmp_path.iterdir()] == [path]
    for broken in ("", "[]", '{"url": "x"}', '{"url": "x", "started": {"server": {"pid": 1}}}'):
        path.write_text(broken)
        with pytest.raises(SiteError, match=r"ckpt-up.json cannot be read: .*Delete it"):
            read_site(path)
