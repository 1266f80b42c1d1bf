"""An owner that is stopped, and goes on when another one has the run: it is fenced, commits and deletes nothing."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.errors import OwnedError
from ckpt_tasks.format.keys import ledger_name, parse_attempt
from tests.crash import zombie
from tests.support.chaos import Chaos
from tests.support.children import Child
from tests.support.places import LocalPlace, Place, S3Place
from tests.support.rules import Fault, Gate
from tests.support.runs import UNTOUCHED, faults_of, head_of, opened, unnamed
from tests.support.sweeps import quick_first

_TIMEOUT_S = 1.5
_THIRD_COMMIT = ledger_name(3)  # after the owner's entry and two commits

# Where the save of step 3 is stopped: for the calls of a local store and the requests to S3.
_CALLS = {
    "in mid-upload": ("pwrite", "/checkpoint_000000000003", 2),
    "before the commit": ("open", "/ledger/.tmp-", 4),
    "in the commit": ("link", _THIRD_COMMIT, 1),
    "in a prune": ("unlink", "/checkpoint_000000000001", 3),
}
_REQUESTS: dict[str, dict[str, Any]] = {
    "in mid-upload": {"operation": "UploadPart", "key": "checkpoint_000000000003", "skip": 1},
    "before the commit": {"operation": "PutObject", "key": "checkpoint_000000000003/.*/manifest.json"},
    "in the commit": {"operation": "PutObject", "key": _THIRD_COMMIT},
    "in a prune": {"operation": "DeleteObjects", "skip": 1},  # the first one is the probe's
}


@pytest.fixture(params=quick_first(["local", "s3"]))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "local":
        return LocalPlace(tmp_path / "run")
    made: Place = request.getfixturevalue("s3_place")
    return made


@contextmanager
def stopped(place: Place, moment: str, size_bytes: int, output: Path) -> Iterator[tuple[Child, Callable[[], None]]]:
    """Run a trainer up to a moment in its third save; yield it, stopped, and what lets it go on."""
    if isinstance(place, S3Place):
        with Chaos(place.server.endpoint) as chaos:
            gate = Gate()
            fault = Fault(hold_answer=gate) if moment == "before the commit" else Fault(hold_request=gate)
            chaos.on(fault, times=1, **_REQUESTS[moment])
            with trainer(place.through(chaos.endpoint), size_bytes, output) as child:
                assert child.until(gate.reached.is_set)
                child.send(signal.SIGSTOP)
                assert child.until(lambda: child.stopped)

                def go_on() -> None:
                    gate.open()  # what was on its way arrives before its sender can do anything
                    time.sleep(0.1)
                    child.send(signal.SIGCONT)

                yield child, go_on
    else:
        with trainer(place, size_bytes, output, "--stop-before", json.dumps(_CALLS[moment])) as child:
            assert child.until(lambda: child.stopped)
            yield child, lambda: child.send(signal.SIGCONT)


def trainer(place: Place, size_bytes: int, output: Path, *more: str) -> Child:
    given = {
        "--storage-options": place.options_json,
        "--ballast-bytes": str(size_bytes),
        "--owner-timeout-s": str(_TIMEOUT_S),
    }
    return Child(zombie.main, [place.url, *(word for pair in given.items() for word in pair), *more], output)


def taken_over(place: Place, how: str, size_bytes: int) -> Checkpointer:
    """Take the run from an owner that may be alive, and restore."""
    ckpt = opened(place, take_over=how == "told to", owner_timeout_s=_TIMEOUT_S)
    target = zombie.laden(UNTOUCHED, size_bytes)
    while True:
        try:
            step = ckpt.restore(target)
        except OwnedError:
            assert how == "its silence"
            time.sleep(0.1)
            continue
        zombie.check_laden(target, step)
        return ckpt


def lasting(place: Place) -> dict[str, bytes]:
    """Return what lies there but for signs of life and the temporary names of one process."""
    names = (name for name in place.names() if "heartbeat/" not in name and "/." not in name)
    return {name: place.get(name) for name in names}


_SHORT = {("in mid-upload", "its silence")}


@pytest.mark.parametrize(
    ("moment", "how"),
    [
        pytest.param(moment, how, marks=() if (moment, how) in _SHORT else pytest.mark.slow)
        for moment in _CALLS
        for how in ("told to", "its silence")
    ],
)
def test_a_stopped_owner_is_fenced_and_deletes_nothing(place: Place, moment: str, how: str, tmp_path: Path) -> None:
    """P33, P64: stopped in a save, taken over, pruned, continued: FencedError, and nothing of the new owner changes."""
    size_bytes = zombie.LARGE if isinstance(place, S3Place) and moment == "in mid-upload" else 1 << 10
    with stopped(place, moment, size_bytes, tmp_path / "output") as (child, go_on):
        ckpt = taken_over(place, how, size_bytes)
        first = ckpt.position
        assert first == (3 if moment == "in a prune" else 2)
        for step in range(first + 1, first + 4):
            ckpt.save(step, zombie.laden(step, size_bytes))
        ckpt.prune()
        before, state = lasting(place), head_of(place)
        assert [c.step for c in state.live] == [first + 2, first + 3]

        go_on()
        assert child.wait() == 0
        lines = child.said().splitlines()
        assert lines[: first + 1] == ["restored 0", *(f"saved {n}" for n in range(1, first + 1))]
        assert len(lines) == first + 5
        assert [line for line in lines[first + 1 :] if not line.startswith("FencedError")] == []

    after = lasting(place)
    assert {name: after.get(name) for name in before} == before
    new = {name: parse_attempt(name) for name in after.keys() - before.keys()}
    assert {name: one for name, one in new.items() if one is None or (one.step, one.epoch) != (3, 1)} == {}
    assert head_of(place) == state
    assert faults_of(place) == {}

    ckpt.close()
    with taken_over(place, how, size_bytes) as fresh:  # what the zombie left is swept by the next owner
        assert fresh.position == first + 3
        fresh.save(first + 4, zombie.laden(first + 4, size_bytes))
    assert unnamed(place) == set()
    assert faults_of(place) == {}
    if isinstance(place, S3Place):
        assert place.uploads() == []
