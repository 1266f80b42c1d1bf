"""Nobody is there, and a run has many ranks: whatever dies, it completes, as if nothing had happened."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import pytest

from ckpt_tasks.checkpoint.transfer.comparison import compare_checkpoints
from ckpt_tasks.run.ledger.timeline import read_timeline
from ckpt_tasks.run.upkeep.verifying import verify_run_directory
from tests.e2e.site import Site
from tests.support import processes

_log = logging.getLogger(__name__)

STEPS = 160
PARALLEL = "tests.support.parallel:Parallel"
# What happens in which step, once: (step, rank, what); each is in a batch of its own, of 20 steps.
TABLE = [
    (5, 1, "kill", "rank 1 was killed by SIGKILL"),
    (25, 0, "kill", "rank 0 was killed by SIGKILL"),
    (45, 1, "exit", "SystemExit: 0"),
    (65, 1, "full", "File too large"),
    (85, 0, "server", "was killed by SIGKILL"),
    (105, 1, "stop", "rank 1 is stopped"),
    (125, 1, "agent", ""),
]


def train(site: Site, run_key: str, ranks: int, **params: Any) -> Any:
    """Start a training of ranks."""
    checkpoint = {"flush_timeout_s": 20.0}
    return site.train(run_key, STEPS, program=PARALLEL, ranks=ranks, checkpoint=checkpoint, step_s=0.02, **params)


def check(site: Site, run_key: str, reference: str) -> None:
    """The run is complete, equal to one that nothing happened to, whole, and was one gang's at a time."""
    run, other = site.run(run_key), site.run(reference)
    newest = run.checkpoints()[0]
    assert newest.step == STEPS
    found = compare_checkpoints(run.history.store, newest, other.history.store, other.find(STEPS))
    assert found.equal, found.differences
    assert verify_run_directory(run.history).good
    owner = run.head().state.owner
    assert owner is not None
    assert owner.released
    steps = site.steps(run_key)
    spans: dict[int, list[float]] = {}
    for one in steps:
        spans.setdefault(one.pid, []).append(one.at_s)
    ordered = sorted((times[0], times[-1]) for times in spans.values())
    assert all(before[1] < after[0] for before, after in pairwise(ordered)), "two gangs trained at once"
    assert {one.step for one in steps} == {*range(1, STEPS + 1)}


@pytest.mark.parametrize("ranks", [2, 4])
def test_whatever_happens_to_a_gang(site: Site, ranks: int) -> None:
    """A rank, rank 0, the fork server, the agent, and then server, worker and agent at once are killed.

    A rank exits in mid-batch, is stopped, has a full disk. Nobody is there; the end is that of an undisturbed run.
    """
    name, reference = f"gang-{ranks}", f"undisturbed-{ranks}"
    site.until_state(train(site, reference, ranks), "Completed", seconds=600)
    plan = [list(event[:3]) for event in TABLE]
    run = train(site, name, ranks, plan=plan, folder=str(site.home), seed=0)
    site.until_step(name, 140, seconds=900)
    site.kill(site.server)
    processes.kill(site.engines(run))
    site.kill(site.worker)
    site.start_server()
    site.start_worker()
    site.until_state(run, "Completed", seconds=600)
    check(site, name, reference)
    site.until(lambda: not site.engines(run), 60, "no process is left")
    moments = read_timeline(site.run(name).history).moments
    whys = "\n".join(moment.text for moment in moments if moment.kind == "failure")
    for _, _, what, why in TABLE:
        assert why in whys, f"{what}: {whys}"
    for done in site.home.glob("*-[0-9]-*"):
        done.unlink()
