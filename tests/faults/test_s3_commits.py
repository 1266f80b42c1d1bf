"""A commit over S3: its one PUT is lost, held, doubled, refused or misreported, and the ledger stays true."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from ckpt_tasks.errors import CommitUncertainError, FencedError, StoreError
from ckpt_tasks.format.keys import ledger_name
from ckpt_tasks.system import System
from tests.faults.s3_runs import LEDGER, Place, commits, methods, state_of
from tests.support import answers
from tests.support.answers import Answer
from tests.support.ledgers import commit, steps
from tests.support.rules import Fault, Gate
from tests.support.systems import running_on

WAIT_S = 20.0


def named(fault: Fault) -> str:
    return f"{'-'.join(fault.names())}-{fault.answer.status if fault.answer else ''}"


@pytest.mark.parametrize(
    ("fault", "times", "requests"),
    [
        # Silence: the number is read, and a PUT follows if need be.
        (Fault(drop_answer=True), 1, "PUT GET"),
        (Fault(drop_request=True), 2, "PUT GET PUT GET PUT GET"),
        (Fault(hold_answer=60.0), 1, "PUT GET"),  # after the read timeout
        (Fault(reset_request_at=0), 1, ""),
        (Fault(reset_request_at=100), 1, ""),
        # A server that says that it did nothing is asked again at once, with the same bytes for the same number.
        (Fault(answer=answers.SLOW_DOWN), 3, "PUT PUT PUT PUT GET"),
        (Fault(answer=answers.CONDITIONAL_CONFLICT), 3, "PUT PUT PUT PUT GET"),
        # Whatever is said, done or not, what lies there counts.
        *(
            (Fault(answer=answer, server_acts=True), 1, "")
            for answer in (
                answers.INTERNAL_ERROR,
                answers.SLOW_DOWN,
                answers.CONDITIONAL_CONFLICT,
                answers.PRECONDITION_FAILED,
                answers.PRECONDITION_FAILED_NAMED,
                answers.NO_SUCH_KEY,
                Answer(502, b"<html>Bad gateway</html>"),
            )
        ),
        (Fault(answer=answers.INTERNAL_ERROR), 1, ""),
        (Fault(answer=answers.NO_SUCH_KEY), 1, ""),
    ],
    ids=lambda it: named(it) if isinstance(it, Fault) else None,
)
def test_a_commit_is_in_the_ledger_once(place: Place, fault: Fault, times: int, requests: str) -> None:
    """P28, P32, P43: a PUT is lost, broken off, answered late or wrong: the commit stands once, and the number is its.

    Only a request whose fate is not known is looked for before it is made again.
    """
    history = place.history(read_timeout=0.5)
    rule = place.chaos.on(fault, operation="PutObject", key=LEDGER, times=times)
    assert commit(history, 5) == 1
    assert rule.hits == times
    assert requests in ("", methods(place.of_entry(1)))
    assert commits(place.truth) == steps(place.truth.head()) == [5]


def test_a_done_that_nobody_can_see_is_uncertain(place: Place) -> None:
    """P32: told that it is done, and there is nothing: CommitUncertainError, never a silent success."""
    history = place.history()
    place.chaos.on(Fault(answer=Answer(200)), operation="PutObject", key=LEDGER, times=1)
    with pytest.raises(CommitUncertainError, match="cannot be seen"):
        commit(history, 5)
    assert commit(history, 6) == 1
    assert commits(place.truth) == [6]


def test_what_cannot_be_read_back_is_uncertain_and_stands(place: Place) -> None:
    """P32: the entry has landed and the network is gone: CommitUncertainError; the next start goes on from it."""
    history = place.history(deadline_s=0.3)
    place.chaos.on(Fault(drop_answer=True), operation="PutObject", key=LEDGER, times=1)
    gone = place.chaos.on(Fault(drop_request=True), operation="GetObject", key=ledger_name(1))
    with pytest.raises(CommitUncertainError, match="cannot be known"):
        commit(history, 5)
    assert methods(place.of_entry(1)).startswith("PUT GET")
    assert methods(place.of_entry(1)).count("PUT") == 1
    place.chaos.off(gone)
    assert steps(history.head()) == [5]
    assert commit(history, 6) == 2
    assert commits(place.truth) == [5, 6]


@pytest.mark.parametrize(
    "answer",
    [
        None,  # as ministack says it: 412 without <Condition>
        answers.PRECONDITION_FAILED,
        answers.PRECONDITION_FAILED_NAMED,
        answers.CONDITIONAL_CONFLICT,
        answers.NO_SUCH_KEY,
        answers.INTERNAL_ERROR,
    ],
    ids=lambda answer: str(answer and (answer.status, len(answer.document))),
)
def test_whoever_loses_a_number_takes_the_next(place: Place, answer: Answer | None) -> None:
    """P33: an evaluator's entry came between look and PUT; however the server says so, the commit goes on top of it."""
    history, gate = place.history(), Gate()
    fault = Fault(hold_request=gate, answer=answer, server_acts=answer is not None)
    place.chaos.on(fault, operation="PutObject", key=LEDGER, times=1)
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(commit, history, 2)
        assert gate.reached.wait(WAIT_S)
        assert commit(place.truth, 1, owner=None) == 1
        gate.open()
        assert done.result(WAIT_S) == 2
    assert commits(place.truth) == [1, 2]
    assert steps(place.truth.head()) == [1, 2]


class Later(System):
    """This machine, some time on."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s


@pytest.mark.parametrize("later_s", [0.0, 31.0])
def test_an_owner_that_was_taken_over_between_two_saves(place: Place, later_s: float) -> None:
    """P33: it looks by itself only if its last look is a beat ago, and then writes nothing; it is fenced either way."""
    machine = Later()
    with running_on(machine), suppress(FencedError), place.run(owner_timeout_s=120) as zombie:
        zombie.save(1, state_of(1))
        with place.run(take_over=True) as ckpt:
            ckpt.restore(state_of(0))
            ckpt.save(2, state_of(2))
        there, machine.ahead_s = {*place.past.names()}, later_s
        with pytest.raises(FencedError, match="owner epoch 2"):
            zombie.save(3, state_of(3))
        written = {name for name in {*place.past.names()} - there if "heartbeat" not in name}
        assert bool(written) is not bool(later_s)
        assert [name for name in written if not name.startswith("checkpoint_000000000003/e000001-")] == []
        with pytest.raises(FencedError):
            zombie.save(4, state_of(4))
    assert commits(place.truth) == [1, 2]


def test_a_put_that_was_given_up_for_good_may_still_arrive(place: Place) -> None:
    """P32: every PUT hangs: an error; one arrives later and is a valid commit, on which the next one stands."""
    history, gate = place.history(read_timeout=0.3), Gate()
    held = place.chaos.on(Fault(hold_request=gate), operation="PutObject", key=LEDGER)
    with pytest.raises((StoreError, CommitUncertainError)):
        commit(history, 5)
    place.chaos.off(held)
    assert commits(place.truth) == []
    gate.open()
    while not commits(place.truth):
        time.sleep(0.01)
    assert commit(history, 6) == 2
    assert commits(place.truth) == [5, 6]
    assert steps(place.truth.head()) == [5, 6]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (Fault(answer=answers.SLOW_DOWN), "answered 503"),
        (Fault(answer=answers.CONDITIONAL_CONFLICT), "answered 409"),
        (Fault(drop_request=True), "no answer from the store"),
    ],
    ids=lambda it: named(it) if isinstance(it, Fault) else "",
)
def test_a_storm_ends_with_the_deadline(place: Place, fault: Fault, says: str) -> None:
    """P28, P43: refused, or gone, for longer than the deadline: a clear error after one deadline, and no commit.

    The same History goes on when the store is back.
    """
    history = place.history(deadline_s=1)
    storm = place.chaos.on(fault, operation="PutObject" if fault.answer else "", key=LEDGER if fault.answer else "")
    with pytest.raises(StoreError, match=says) as caught:
        commit(history, 5)
    assert caught.value.transient
    assert caught.value.refused is bool(fault.answer)
    assert 3 < storm.hits < 100  # with a tenth of the pauses
    assert not fault.answer or methods(place.of_entry(1)).count("GET") == 1
    assert commits(place.truth) == []
    place.chaos.off(storm)
    assert commit(history, 6) == 1
    assert commits(place.truth) == [6]
