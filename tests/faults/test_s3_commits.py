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
from tests.support.ledgers import OTHER, commit, steps, take
from tests.support.rules import Fault, Gate
from tests.support.systems import running_on

WAIT_S = 20.0


# ── an answer or a request is lost ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fault", "times", "requests"),
    [
        (Fault(drop_answer=True), 1, "PUT GET"),
        (Fault(drop_request=True), 2, "PUT GET PUT GET PUT GET"),
        (Fault(hold_answer=60.0), 1, "PUT GET"),  # after the read timeout
        (Fault(answer=answers.SLOW_DOWN), 3, "PUT PUT PUT PUT GET"),
        (Fault(answer=answers.CONDITIONAL_CONFLICT), 3, "PUT PUT PUT PUT GET"),
    ],
    ids=lambda it: "-".join(it.names()) if isinstance(it, Fault) else None,
)
def test_after_silence_the_number_is_read_first(place: Place, fault: Fault, times: int, requests: str) -> None:
    """P28, P32, P43: an answer or a request is lost, or never comes: the number is read, and a PUT follows if need be.

    A server that says that it did nothing is asked again at once, with the same bytes for the same number.
    """
    history = place.history(read_timeout=0.5)
    place.chaos.on(fault, operation="PutObject", key=LEDGER, times=times)
    assert commit(history, 5) == 1
    assert methods(place.of_entry(1)) == requests
    assert commits(place.truth) == [5]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(reset_request_at=0),
        Fault(reset_request_at=100),
        Fault(answer=answers.INTERNAL_ERROR),
        Fault(answer=answers.INTERNAL_ERROR, server_acts=True),
        Fault(answer=answers.SLOW_DOWN, server_acts=True),
        Fault(answer=answers.CONDITIONAL_CONFLICT, server_acts=True),
        Fault(answer=answers.PRECONDITION_FAILED, server_acts=True),
        Fault(answer=answers.PRECONDITION_FAILED_NAMED, server_acts=True),
        Fault(answer=answers.NO_SUCH_KEY),
        Fault(answer=answers.NO_SUCH_KEY, server_acts=True),
        Fault(answer=Answer(502, b"<html>Bad gateway</html>"), server_acts=True),
    ],
    ids=lambda fault: f"{'-'.join(fault.names())}-{fault.answer.status if fault.answer else ''}",
)
def test_whatever_is_said_what_lies_there_counts(place: Place, fault: Fault) -> None:
    """P32: a PUT that broke off, or that got the wrong answer, done or not: the commit is in the ledger once."""
    history = place.history()
    rule = place.chaos.on(fault, operation="PutObject", key=LEDGER, times=1)
    assert commit(history, 5) == 1
    assert rule.hits == 1
    assert commits(place.truth) == [5]
    assert steps(place.truth.head()) == [5]


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


# ── the number goes to somebody else ─────────────────────────────────────────────────────────────────────────────


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


@pytest.mark.parametrize("body", [b"", b"garbage", b"{}", b"\xff" * 5000])
@pytest.mark.parametrize("when", ["before the look", "before the put"])
def test_garbage_in_the_next_slot_is_passed_over(place: Place, body: bytes, when: str) -> None:
    """P33, P35: torn or foreign bytes in a number are nothing that happened: the next number is used, nobody stops."""
    history, gate = place.history(), Gate()
    if when == "before the look":
        place.past.put(ledger_name(1), body)
        assert history.head().damaged == (ledger_name(1),)
        assert commit(history, 5) == 2
    else:
        place.chaos.on(Fault(hold_request=gate), operation="PutObject", key=LEDGER, times=1)
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(commit, history, 5)
            assert gate.reached.wait(WAIT_S)
            place.past.put(ledger_name(1), body)
            gate.open()
            assert done.result(WAIT_S) == 2
    assert steps(place.truth.head()) == [5]
    assert place.past.get(ledger_name(1)) == body


# ── zombies ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_zombies_commit_that_arrives_after_a_take_over_is_nothing(place: Place) -> None:
    """P33: its PUT was under way while another process took the run: it gets FencedError, and no entry is changed."""
    zombie, gate = place.history(), Gate()
    place.chaos.on(Fault(hold_request=gate), operation="PutObject", key=LEDGER, times=1)
    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(commit, zombie, 5)
        assert gate.reached.wait(WAIT_S)
        take(place.truth, OTHER)
        assert commit(place.truth, 6, owner=OTHER) == 2
        gate.open()
        with pytest.raises(FencedError, match="owner epoch 2"):
            late.result(WAIT_S)
    assert commits(place.truth) == [6]
    assert steps(place.truth.head()) == [6]


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


def test_a_zombies_put_that_arrives_twice_changes_nothing(place: Place) -> None:
    """P33: a router sends the zombie's committed PUT again, after the take-over: every entry stays byte for byte."""
    zombie, gate = place.history(), Gate()
    doubled = place.chaos.on(Fault(duplicate=gate), operation="PutObject", key=LEDGER)
    assert [commit(zombie, step) for step in (5, 6)] == [1, 2]
    place.chaos.off(doubled)
    take(place.truth, OTHER)
    assert commit(place.truth, 7, owner=OTHER) == 4
    before = {n: place.past.get(ledger_name(n)) for n in range(5)}
    gate.open()
    place.chaos.settle()
    again = [one for one in place.chaos.log if one.duplicate]
    assert [one.server_status for one in again] == [412, 412]
    assert {n: place.past.get(ledger_name(n)) for n in range(5)} == before
    assert steps(place.truth.head()) == [5, 6, 7]


def test_a_put_that_its_sender_gave_up_arrives_after_its_second_try(place: Place) -> None:
    """P32, P33: no answer in time, nothing there, sent again, acknowledged: then the first one arrives, and is late."""
    zombie, gate = place.history(read_timeout=0.5), Gate()
    place.chaos.on(Fault(hold_request=gate), operation="PutObject", key=LEDGER, times=1)
    assert commit(zombie, 5) == 1
    assert methods(place.of_entry(1)) == "PUT GET PUT GET"
    take(place.truth, OTHER)
    before = place.past.get(ledger_name(1))
    gate.open()
    time.sleep(0.2)
    assert place.past.get(ledger_name(1)) == before
    assert commits(place.truth) == [5]
    with pytest.raises(FencedError):
        commit(zombie, 6)


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


# ── the store is overloaded, or gone ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("answer", [answers.SLOW_DOWN, answers.CONDITIONAL_CONFLICT], ids=["503", "409"])
def test_a_storm_ends_with_the_deadline(place: Place, answer: Answer) -> None:
    """P28, P43: refused for longer than the deadline: a clear error after one deadline, and nothing is committed."""
    history = place.history(deadline_s=1)
    storm = place.chaos.on(Fault(answer=answer), operation="PutObject", key=LEDGER)
    with pytest.raises(StoreError, match=rf"answered {answer.status}") as caught:
        commit(history, 5)
    assert caught.value.refused
    assert 3 < storm.hits < 100  # with a tenth of the pauses
    assert methods(place.of_entry(1)).count("GET") == 1
    assert commits(place.truth) == []
    place.chaos.off(storm)
    assert commit(history, 6) == 1
    assert commits(place.truth) == [6]


def test_a_store_that_is_gone_is_an_error_and_comes_back(place: Place) -> None:
    """P43: no request gets through: a StoreError after the deadline, and the same History goes on when it is back."""
    history = place.history(deadline_s=0.5)
    gone = place.chaos.on(Fault(drop_request=True))
    with pytest.raises(StoreError, match="no answer from the store") as caught:
        commit(history, 5)
    assert caught.value.transient
    place.chaos.off(gone)
    assert commit(history, 6) == 1
    assert commits(place.truth) == [6]
