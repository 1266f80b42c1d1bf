"""A store that is away: a deployment's flow run crashes and is resumed, and everything else is as it was."""

from __future__ import annotations

from uuid import UUID

import httpx
import pytest
from prefect import Flow, flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.flow_engine import run_flow
from prefect.states import AwaitingRetry, Scheduled

from ckpt_tasks.errors import CommitUncertainError, FencedError, StoreError
from ckpt_tasks.flows.prefect.endings import crashes_while_the_api_is_away, crashes_while_the_store_is_away
from tests.support.sweeps import quick_first

pytestmark = pytest.mark.usefixtures("harness")


class Answer(Exception):  # noqa: N818 (a stand-in for a client's exception, told by its `status`)
    """What a server said."""

    def __init__(self, status: int, code: str = ""):
        super().__init__(f"{status} {code}")
        self.status = status
        self.error_code = code


def away(answer: Answer | None = None) -> StoreError:
    error = StoreError("no answer")
    error.transient = True
    error.__cause__ = answer
    return error


def training(error: Exception, *, reached: bool = True) -> Flow[[], None]:
    @flow(name="train", persist_result=False)
    def train() -> None:
        with crashes_while_the_store_is_away(reached=reached):
            raise error

    return train


def deployed(train: Flow[[], None], starts: int = 1) -> State:
    """Run a flow as a worker would, as a flow run of a deployment, started so often; return how it ends."""
    with get_client(sync_client=True) as client:
        deployment: UUID = client.create_deployment(flow_id=client.create_flow(train), name="outage")
        made = client.create_flow_run_from_deployment(deployment, state=Scheduled())
        for start in range(starts):
            if start:
                client.set_flow_run_state(made.id, AwaitingRetry(), force=True)
            with pytest.raises(BaseException):  # noqa: B017, PT011 (which one is told by the state)
                run_flow(train, flow_run=client.read_flow_run(made.id))
        ended = client.read_flow_run(made.id).state
    assert ended is not None
    return ended


@pytest.mark.parametrize(
    ("error", "crashed"),
    quick_first(
        [
            (away(), True),
            (away(Answer(503)), True),
            (CommitUncertainError("no answer to the question either"), True),
            (StoreError("denied"), False),
            (FencedError("taken"), False),
            (OSError(), False),
            (away(Answer(400, "ExpiredToken")), False),
            (away(Answer(507, "XMinioStorageFull")), False),
        ],
        4,
    ),
)
def test_what_another_try_may_mend_is_a_crash(error: Exception, crashed: bool) -> None:
    """A deployment's flow run that ends because the store is overloaded or silent has crashed, and says why.

    Refusals, expired credentials, a full store, and what is nothing of the store's, fail and are told at once.
    """
    ended = deployed(training(error))
    assert (ended.is_crashed(), ended.is_failed()) == (crashed, not crashed), ended
    assert not crashed or "no answer" in (ended.message or "")


def test_a_store_that_never_answered_is_an_outage_only_for_who_was_there() -> None:
    """A flow run's first start fails where the endpoint may be misspelled; a later one is in an outage."""
    train = training(away(), reached=False)
    assert deployed(train).is_failed()
    assert deployed(train, starts=2).is_crashed()


def test_without_a_deployment_the_error_is_what_it_was() -> None:
    """Nobody resumes a flow run without a deployment: its caller gets the error, also from within a deployed flow."""
    with pytest.raises(StoreError, match="no answer"):
        training(away())()

    @flow(name="above", persist_result=False)
    def above() -> None:
        training(away())()

    assert deployed(above).is_failed()


def answer(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://127.0.0.1/api/flow_run_states/filter")
    return httpx.HTTPStatusError(str(status), request=request, response=httpx.Response(status))


@pytest.mark.parametrize(
    ("error", "resumed"),
    quick_first(
        [
            (httpx.ConnectError("refused"), True),
            (answer(503), True),
            (answer(403), False),
            (OSError("of something else"), False),
        ],
        3,
    ),
)
def test_an_api_that_is_away_is_a_crash(error: Exception, resumed: bool) -> None:
    """Where Prefect's API does not answer at a start, the flow run crashes and is resumed; a refusal fails."""

    @flow(name="train", persist_result=False)
    def train() -> None:
        with crashes_while_the_api_is_away():
            raise error

    ended = deployed(train)
    assert (ended.is_crashed(), ended.is_failed()) == (resumed, not resumed), ended
    with pytest.raises(type(error)):
        train()
