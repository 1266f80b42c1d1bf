"""A store that is away: a deployment's flow run crashes and is resumed, and everything else is as it was."""

from __future__ import annotations

from uuid import UUID

import pytest
from prefect import Flow, flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.flow_engine import run_flow
from prefect.states import Scheduled

from ckpt_tasks.errors import CkptError, CommitUncertainError, FencedError, ObjectNotFoundError, StoreError
from ckpt_tasks.orchestration.outage import crashes_while_the_store_is_away

pytestmark = pytest.mark.usefixtures("harness")


def away() -> StoreError:
    error = StoreError("no answer")
    error.transient = True
    return error


def training(error: Exception) -> Flow[[], None]:
    @flow(name="train", persist_result=False)
    def train() -> None:
        with crashes_while_the_store_is_away():
            raise error

    return train


def deployed(train: Flow[[], None]) -> State:
    """Run a flow as a worker would, as a flow run of a deployment; return the state that it ends in."""
    with get_client(sync_client=True) as client:
        deployment: UUID = client.create_deployment(flow_id=client.create_flow(train), name="outage")
        made = client.create_flow_run_from_deployment(deployment, state=Scheduled())
        with pytest.raises(BaseException):  # noqa: B017, PT011 (which one is told by the state)
            run_flow(train, flow_run=made)
        ended = client.read_flow_run(made.id).state
    assert ended is not None
    return ended


@pytest.mark.parametrize("error", [away(), CommitUncertainError("no answer, and none to the question")])
def test_what_another_try_may_mend_is_a_crash(error: CkptError) -> None:
    """A deployment's flow run that ends because the store does not answer has crashed, and says why."""
    ended = deployed(training(error))
    assert ended.is_crashed(), ended
    assert "no answer" in (ended.message or "")


@pytest.mark.parametrize("error", [StoreError("denied"), ObjectNotFoundError("gone"), FencedError("taken"), OSError()])
def test_what_no_other_try_mends_is_a_failure(error: Exception) -> None:
    """What a person has to look at, or is nothing of the store's, ends a flow run as it always did: failed."""
    assert deployed(training(error)).is_failed()


def test_without_a_deployment_the_error_is_what_it_was() -> None:
    """Nobody resumes a flow run without a deployment: its caller gets the error."""
    with pytest.raises(StoreError, match="no answer"):
        training(away())()
