"""A process on S3 killed within each request of its life that changes something: what it left is put in order."""

from __future__ import annotations

import signal
import time
from itertools import count
from pathlib import Path

import pytest

from tests.crash import victim
from tests.support.chaos import Chaos
from tests.support.children import Child
from tests.support.places import S3Place
from tests.support.rules import Fault, Gate
from tests.support.runs import check_run, head_of, named_by, train

_FEWEST = {"PUT": 9, "POST": 0, "DELETE": 0}  # a sweep that ends before has not swept a whole save
_FOREIGN = {"README.md": b"mine", "checkpoint_000000000001/notes.txt": b"mine", "models/a.bin": b"mine"}


@pytest.fixture
def s3_run(s3_place: S3Place, chaos: Chaos) -> tuple[S3Place, Chaos]:
    """Make a run with steps 1, 2, 3, two of which are to be kept, and files of others in its directory."""
    train(s3_place.through(chaos.endpoint), 1, 2, 3)
    for name, data in _FOREIGN.items():
        s3_place.put(name, data)
    return s3_place, chaos


def fault_of(fate: str, gate: Gate) -> Fault:
    if fate == "is answered to nobody":
        return Fault(hold_answer=gate)
    return Fault(hold_request=gate, drop_request=fate == "is lost")


FATES = ("is lost", "is answered to nobody", "arrives late")


@pytest.mark.parametrize(
    ("method", "fate", "every"),
    [
        ("POST", "is lost", 1),
        *(pytest.param(method, fate, 1, marks=pytest.mark.slow) for method in _FEWEST for fate in FATES),
    ],
)
def test_killed_within_any_request_the_run_goes_on(
    s3_run: tuple[S3Place, Chaos], tmp_path: Path, method: str, fate: str, every: int
) -> None:
    """P30, P60, P64, P67: the next owner restores exactly, deletes what a killed prune or save left, and no more.

    The process takes the run, saves, commits, retires one checkpoint of three, and deletes it with one request.
    """
    base, chaos = s3_run
    beside = base.everything()
    for n in count(step=every):
        place, gate = base.copied(), Gate()
        rule = chaos.on(fault_of(fate, gate), method=method, skip=n, times=1)
        options = place.through(chaos.endpoint).options_json
        with Child(victim.save_fourth, [place.url, options], tmp_path / "output") as child:
            came_to_it = child.until(gate.reached.is_set)
            if came_to_it:
                child.send(signal.SIGKILL)
            assert child.wait() == (-signal.SIGKILL if came_to_it else 0)
        if fate == "arrives late":  # before the next owner comes, or when it has taken the run and put all in order
            check_late(chaos, gate, place, after=n % 2 == 1)
        else:
            gate.open()
            check_next_owner(place)
        chaos.off(rule)
        place.remove()
        if not came_to_it:
            break
    assert n > _FEWEST[method]
    assert base.everything() == beside


def check_late(chaos: Chaos, gate: Gate, place: S3Place, *, after: bool) -> None:
    if after:
        check_next_owner(place)
    gate.open()
    deadline = time.monotonic() + 20
    while any(exchange.fault and exchange.server_status is None for exchange in chaos.log):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    if after:
        state = head_of(place)
        assert all(named_by(place, checkpoint) <= place.names() for checkpoint in state.live)
        check_run(place, max(c.step for c in state.live), 6)
    else:
        check_next_owner(place)


def check_next_owner(place: S3Place) -> None:
    newest = max(head_of(place).live, key=lambda c: c.n).step
    assert newest in (3, 4)
    check_run(place, newest)
    assert {name: place.get(name) for name in _FOREIGN} == _FOREIGN
    assert place.uploads() == []
