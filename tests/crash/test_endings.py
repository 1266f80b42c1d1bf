"""Every way a process can end, on every store: what is committed, released and restored afterwards."""

from __future__ import annotations

import json
import os
import signal
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.storage.locations import Location
from tests.crash.ender import SIZE
from tests.support.interpreters import Python, python
from tests.support.sweeps import SLOW, SOAK

ORDERLY = ("return", "exception", "sys.exit")
SIGNALS = {
    "SIGTERM": [signal.SIGTERM],
    "SIGINT": [signal.SIGINT],
    "SIGINT twice": [signal.SIGINT, signal.SIGINT],
    "SIGKILL": [signal.SIGKILL],
}
WAYS = (*ORDERLY, "os._exit", "daemon thread", *SIGNALS)
STYLES = ("with", "close", "alone")
STATUS = {"return": 0, "exception": 1, "sys.exit": 3, "os._exit": 4, "daemon thread": 0}
STORES = ("local", "local, no memory", "s3", "s3, no memory", "s3 single_writer", "s3 and local_dir")
ANY_STORE = (*STORES, "ceph", "azurite", "gcs")


@dataclass(frozen=True)
class Case:
    """Where a run lies: the options of its configuration, and what its memory's and its copies' names begin with."""

    location: Location
    config: dict[str, Any]
    hosts: tuple[str, ...]


@pytest.fixture
def case(request: pytest.FixtureRequest, tmp_path: Path, memory: Path) -> Iterator[Case]:
    store: str = request.param
    kept: dict[str, Any] = {"memory_dir": None if "no memory" in store else str(memory)}
    if "local_dir" in store:
        kept = {"local_dir": str(tmp_path / "copies"), "memory_dir": None}
    hosts = tuple(place for place in kept.values() if place)
    if store.startswith("local"):
        yield Case(Location(str(tmp_path / "run")), kept, hosts)
        return
    server = request.getfixturevalue({"s3": "ministack"}.get(store[:2], store))
    alone = "single_writer" in store
    with ExitStack() as stack:
        if store == "azurite":
            url = f"az://{stack.enter_context(server.fresh_container())}/run"
        elif store == "gcs":  # its emulator ignores the condition of a write
            url, alone = f"gs://{server.fresh_bucket()}/run", True
        else:
            url = f"s3://{stack.enter_context(server.fresh_bucket())}/run"
        yield Case(Location(url, storage_options=server.storage_options, single_writer=alone), kept, hosts)


def ended(case: Case, way: str, style: str) -> tuple[int, int, str]:
    """Run a process to its end; return its status, the last step that it has reported, and what it said on stderr."""
    case_json = json.dumps(vars(case.location)), json.dumps(case.config)
    said: list[str] = []
    with Python("-m", "tests.crash.ender", *case_json, way, style, whole_end=True) as process:
        if way in SIGNALS:
            for line in process.stdout:
                said.append(line)
                if line == "ready\n":
                    break
            for number in SIGNALS[way]:
                process.send(number)
                if style == "with" and len(SIGNALS[way]) > 1:
                    process.stdout.readline()  # it has seen the first
                    time.sleep(2.1)  # the same signal again within 2 s is one signal
        done = process.ends()
    said += done.stdout.splitlines()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # no process of its session is left
    steps = [int(line.split()[1]) for line in said if line.startswith("step ")]
    return done.returncode, steps[-1], done.stderr


def expected_status(way: str) -> int:
    return -SIGNALS[way][0] if way in SIGNALS else STATUS[way]


def check(case: Case, way: str, style: str) -> None:
    status, reported, err = ended(case, way, style)
    assert status == expected_status(way), err
    in_block = style == "with" and way in ("SIGTERM", "SIGINT")  # the signal waits for the next step, which is saved
    last = reported + 1 if in_block else reported

    run = open_run(case.location)
    live = [checkpoint.step for checkpoint in run.checkpoints()]
    owner = run.head().state.owner
    # Python ends no process without atexit but by these.
    cut_off = way in ("os._exit", "SIGKILL") or (way == "SIGTERM" and style != "with")
    # The second Ctrl-C may come while the interpreter ends: it waits no longer then, and says what is not committed.
    cut_short = way == "SIGINT twice" and style == "alone" and "is not committed" in err
    orderly = style == "close" or not (cut_off or cut_short)
    assert owner is not None
    if way == "daemon thread":
        assert live[0] in (reported, reported + 1)
        last = live[0]
    elif orderly:
        assert live[0] == last, err
    else:
        assert live == [] or live[0] <= last
    assert owner.released is orderly
    assert ("is not committed" in err) is cut_short

    with Checkpointer(CheckpointConfig(checkpoint_dir=case.location, **case.config)) as ckpt:
        state: dict[str, Any] = {"weights": torch.zeros(SIZE), "step": 0}
        restored = ckpt.restore(state)
        source = ckpt.last_restore.source if ckpt.last_restore else ""
    if way == "daemon thread" or not case.hosts:
        assert restored == max(live, default=0)
    elif orderly or "local_dir" not in case.config:
        assert restored == last
    else:  # a copy is made behind a step, as a commit is
        assert max(live, default=0) <= restored <= last
    assert state["step"] == restored
    assert torch.equal(state["weights"], torch.full((SIZE,), float(restored)))
    # In order, nothing is left in memory; copies in a local directory stay.
    clean = "local_dir" not in case.config and (style == "close" or (style == "with" and way == "return"))
    if restored:
        assert source.startswith(case.hosts if case.hosts and not clean else case.location.url), source


# Ends that tests/checkpoint/save/test_pipeline.py and tests/storage/test_progress.py have on a local disk are not here,
# nor those with copies of tests/checkpoint/memory/test_local_copies.py.
QUICK = [("local", "SIGTERM", "with"), ("s3", "daemon thread", "alone")]


# A thread that goes on after close() takes the directory again.
ALL = [ends for ends in product(ANY_STORE, WAYS, STYLES) if ends[1:] != ("daemon thread", "close")]


def marks(store: str, way: str, style: str) -> tuple[pytest.MarkDecorator, ...]:
    """Leave to `make test-all` a Latin square of each way: every pair of two of the three is in it."""
    here = (ANY_STORE.index(store) + WAYS.index(way) + STYLES.index(style)) % 3 == 0
    return () if (store, way, style) in QUICK else SLOW if here else SOAK


@pytest.mark.parametrize(
    ("case", "way", "style"),
    [pytest.param(*ends, marks=marks(*ends)) for ends in ALL],
    indirect=["case"],
)
def test_what_a_process_leaves_at_its_end(case: Case, way: str, style: str) -> None:
    """P69, P72: the last step is committed and the run released, or the next start has it from memory.

    The same for each way of ending, with a block, with close() and with neither, on each store.
    """
    check(case, way, style)


AFTER_MAIN = """
    import threading, torch
    from ckpt_tasks import CheckpointConfig, Checkpointer

    def train():
        threading.main_thread().join()
        ckpt = Checkpointer(CheckpointConfig(checkpoint_dir={run!r}, step_interval=1, memory_dir={memory!r},
                                             max_num_checkpoints=1))
        for step in (1, 2, 3):
            ckpt.step(step, {{"weights": torch.full((12 << 20,), float(step))}})

    threading.Thread(target=train).start()
"""


def test_a_thread_may_train_after_the_main_one(tmp_path: Path, memory: Path) -> None:
    """P72: when the main thread has returned, Python's executors refuse work; saves that copy in threads go on."""
    code = textwrap.dedent(AFTER_MAIN).format(run=str(tmp_path / "run"), memory=str(memory))
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (0, f"ckpt: Step 1 is saved in {tmp_path / 'run'}\n")
    run = open_run(str(tmp_path / "run"))
    assert run.checkpoints()[0].step == 3
    assert (owner := run.head().state.owner) is not None
    assert owner.released
