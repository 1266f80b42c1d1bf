"""A commit over S3: its one PUT is lost, held, broken off, refused or misreported, and the ledger stays true.

What the protocol makes of requests that are lost or late, tests/property shows of every schedule; here it is the real
client that has to tell silence, a refusal and a lie apart.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from ckpt_tasks.errors import CommitUncertainError
from ckpt_tasks.format.keys import ledger_name
from tests.faults.s3_runs import LEDGER, Place, commits, named
from tests.support import answers
from tests.support.answers import Answer
from tests.support.ledgers import commit, steps
from tests.support.rules import Fault, Gate
from tests.support.sweeps import quick_first


@pytest.mark.parametrize(
    ("fault", "times", "requests"),
    quick_first([
        # Silence: the number is read, and a PUT follows if need be.
        (Fault(drop_answer=True), 1, "PUT GET"),
        (Fault(drop_request=True), 2, "PUT GET PUT GET PUT GET"),
        (Fault(hold_answer=60.0), 1, "PUT GET"),  # after the read timeout
        (Fault(reset_request_at=100), 1, ""),
        # A server that says that it did nothing is asked again at once, with the same bytes for the same number.
        (Fault(answer=answers.SLOW_DOWN), 3, "PUT PUT PUT PUT GET"),
        (Fault(answer=answers.CONDITIONAL_CONFLICT), 3, "PUT PUT PUT PUT GET"),
        # Whatever is said, done or not, what lies there counts.
        (Fault(answer=answers.INTERNAL_ERROR), 1, ""),
        *((Fault(answer=answer, server_acts=True), 1, "") for answer in (
            answers.INTERNAL_ERROR, answers.CONDITIONAL_CONFLICT, answers.PRECONDITION_FAILED_NAMED,
            answers.NO_SUCH_KEY, Answer(502, b"<html>Bad gateway</html>"),
        )),
    ], 4),
    ids=named,
)  # fmt: skip
def test_a_commit_is_in_the_ledger_once(place: Place, fault: Fault, times: int, requests: str) -> None:
    """P28, P32, P43: a PUT is lost, broken off, answered late or wrong: the commit stands once, and the number is its.

    Only a request whose fate is not known is looked for before it is made again.
    """
    history = place.history(read_timeout=0.5)
    rule = place.chaos.on(fault, operation="PutObject", key=LEDGER, times=times)
    assert commit(history, 5) == 1
    assert rule.hits == times
    assert requests in ("", " ".join(one.method for one in place.of_entry(1)))
    assert commits(place.truth) == steps(place.truth.head()) == [5]


def test_a_commit_that_cannot_be_seen_is_uncertain(place: Place) -> None:
    """P32: told that it is done, with nothing there, or the network gone before it is read back: never called done.

    The next commit stands on what is really there.
    """
    history = place.history(deadline_s=0.3)
    place.chaos.on(Fault(answer=Answer(200)), operation="PutObject", key=LEDGER, times=1)
    with pytest.raises(CommitUncertainError, match="cannot be seen"):
        commit(history, 5)
    place.chaos.on(Fault(drop_answer=True), operation="PutObject", key=LEDGER, times=1)
    gone = place.chaos.on(Fault(drop_request=True), operation="GetObject", key=ledger_name(1))
    with pytest.raises(CommitUncertainError, match="cannot be known"):
        commit(history, 6)
    place.chaos.off(gone)
    assert commit(history, 7) == 2
    assert commits(place.truth) == [6, 7]


@pytest.mark.parametrize("answer", quick_first([None, answers.PRECONDITION_FAILED_NAMED, answers.NO_SUCH_KEY], 2))
def test_whoever_loses_a_number_takes_the_next(place: Place, answer: Answer | None) -> None:
    """P33: an evaluator's entry came between look and PUT; however the server says so, the commit goes on top of it."""
    history, gate = place.history(), Gate()
    fault = Fault(hold_request=gate, answer=answer, server_acts=answer is not None)
    place.chaos.on(fault, operation="PutObject", key=LEDGER, times=1)
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(commit, history, 2)
        assert gate.reached.wait(20)
        assert commit(place.truth, 1, owner=None) == 1
        gate.open()
        assert done.result(20) == 2
    assert commits(place.truth) == steps(place.truth.head()) == [1, 2]
