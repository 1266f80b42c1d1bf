"""Training on S3, killed within any request and anywhere between: it ends as if nothing had happened."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.checkpoint.transfer.comparison import compare_checkpoints
from ckpt_tasks.run.upkeep.verifying import verify_run_directory
from tests.crash import plain_loop
from tests.support.chaos import Chaos
from tests.support.children import Child
from tests.support.places import S3Place
from tests.support.recording import committed
from tests.support.rules import Fault, Gate
from tests.support.runs import run_of
from tests.support.waiting import until

# Each save is one upload in two parts (the ballast), a few single objects, and a commit; the newest three are kept.
_STEPS, _INTERVAL = 18, 3
_LOOP = ["--steps", str(_STEPS), "--interval", str(_INTERVAL), "--ballast-mib", "20", "--private"]

_REQUESTS: list[Mapping[str, Any]] = [
    {"operation": "CreateMultipartUpload"},
    {"operation": "UploadPart"},
    {"operation": "CompleteMultipartUpload"},
    {"operation": "PutObject", "key": r"safetensors$"},
    {"operation": "PutObject", "key": r"(index\.arrow|manifest\.json)$"},
    {"operation": "PutObject", "key": r"/ledger/"},
    {"operation": "DeleteObjects"},
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train once, in a directory, without a kill."""
    root = tmp_path_factory.mktemp("uninterrupted") / "run"
    with Child(plain_loop.main, [str(root), f"{root}.ids", *_LOOP], root.parent / "output") as child:
        assert child.wait(240) == 0
    return root


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_any_request_training_ends_as_if_nothing_had_happened(
    uninterrupted: Path, s3_place: S3Place, chaos: Chaos, tmp_path: Path, kills: int
) -> None:
    """P22, P30, P31, P67, P73: weights, optimizer and data are the uninterrupted run's; no commit is lost, none torn.

    What a kill leaves under way is lost, or done and not heard of, or arrives after the death. Nothing of it lasts:
    behind a last commit, or a prune, there are neither orphans nor unfinished uploads.
    """
    dice, killed, round_ = random.Random(kills), 0, 0
    while killed < kills:
        place, ids, round_ = replace(s3_place, prefix=f"run-{round_}"), tmp_path / f"{round_}.ids", round_ + 1
        killed += train_and_kill(place, chaos, ids, dice, kills - killed)
        check_end(place, uninterrupted, ids)
        place.remove()


def train_and_kill(place: S3Place, chaos: Chaos, ids: Path, dice: random.Random, kills: int) -> int:
    """Train until the run is complete, with so many kills at most; return how many there were."""
    options = place.through(chaos.endpoint).options_json
    arguments = [place.url, str(ids), *_LOOP, "--storage-options", options]
    acknowledged: dict[int, int] = {}  # step by ledger entry
    for killed in range(kills + 1):
        with Child(plain_loop.main, arguments, ids.with_suffix(".output")) as child:
            if killed < kills:
                kill_somewhere(child, chaos, dice)
            status = child.wait(120)
            said = child.said().splitlines()
        assert status in (0, -signal.SIGKILL), said
        assert not any("Error" in line or "passed over" in line for line in said), said
        restored = [int(line.split()[1]) for line in said if line.startswith("restored ")]
        assert all(step >= max(acknowledged.values(), default=0) for step in restored)
        acknowledged |= dict(acknowledgements(said))
        if acknowledged:
            check_commits(place, acknowledged)
        if status == 0:
            # Only a commit prunes, and the owner of the last one may have died.
            if not any(line.startswith("committed ") for line in said):
                with Checkpointer(CheckpointConfig(checkpoint_dir=place.location, memory_dir=None)) as ckpt:
                    ckpt.acquire()
                    ckpt.prune()
            return killed
    raise AssertionError("the run does not end")


def kill_somewhere(child: Child, chaos: Chaos, dice: random.Random) -> None:
    """Send SIGKILL around a snapshot, or while a request is on its way."""
    if dice.random() < 0.3:
        steps = dice.randint(1, 3) * _INTERVAL
        child.until(lambda: child.said().count("step ") >= steps - 1)
        time.sleep(dice.uniform(0, 0.1))
        if child.alive:
            child.send(signal.SIGKILL)
        child.wait()
        return
    gate = Gate()
    fault = dice.choice(
        [Fault(hold_request=gate, drop_request=True), Fault(hold_request=gate), Fault(hold_answer=gate)]
    )
    rule = chaos.on(fault, skip=dice.randint(0, 4), times=1, **dice.choice(_REQUESTS))
    child.until(gate.reached.is_set)
    time.sleep(dice.uniform(0, 0.05))
    if child.alive:
        child.send(signal.SIGKILL)
    child.wait()
    gate.open()
    if rule.hits and not fault.drop_request:
        [exchange] = [exchange for exchange in chaos.log if exchange.fault is fault]
        until(lambda: exchange.server_status is not None)
    chaos.off(rule)


def acknowledgements(said: list[str]) -> Iterator[tuple[int, int]]:
    """Read what a process knew to be committed: (entry, step)."""
    for line in said:
        if line.startswith("committed "):
            _, step, _, _, entry = line.split()
            yield int(entry), int(step)


def check_commits(place: S3Place, acknowledged: Mapping[int, int]) -> None:
    """See that every commit that was acknowledged stands in the ledger, and that all that is live is whole."""
    run = run_of(place)
    for n, step in acknowledged.items():
        entry, _ = run.history.read_entry(n)
        assert (entry.event["kind"], entry.event["step"]) == ("commit", step)
    assert run.checkpoints()[0].step >= max(acknowledged.values())
    assert verify_run_directory(run.history).good


def check_end(place: S3Place, uninterrupted: Path, ids: Path) -> None:
    here, there = run_of(place), open_run(str(uninterrupted))
    one, other = here.find("latest"), there.find("latest")
    assert one.step == other.step == _STEPS
    assert compare_checkpoints(here.history.store, one, there.history.store, other).differences == ()
    assert committed(ids) == committed(Path(f"{uninterrupted}.ids"))
    found = verify_run_directory(here.history)
    assert found.good
    assert found.orphans == ()
    assert place.uploads() == []
