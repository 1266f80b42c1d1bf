"""Two processes of one flow run: the one that is fenced, or comes second, says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from prefect import flow
from prefect.exceptions import Abort
from prefect.runtime import flow_run

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.errors import FencedError
from ckpt_tasks.flows.prefect.endings import ends_quietly_for_a_sibling
from tests.support.owner_child import OwnerChild
from tests.support.sweeps import quick_first
from tests.support.systems import Hurried, running_on

pytestmark = pytest.mark.usefixtures("harness")


def fence(place: Path, successor: str | None) -> None:
    """Lose the run directory, within a flow run whose id is "mine", to a process of another or the same flow run."""
    config = CheckpointConfig(checkpoint_dir=str(place), run_key="run", memory_dir=None)
    state = {"weights": torch.zeros(4)}

    @flow(name="train", persist_result=False)
    def train() -> None:
        first = Checkpointer(config, flow_run_id="mine")
        with ends_quietly_for_a_sibling(config, "mine"):
            first.save(1, state)
            with Checkpointer(config, flow_run_id=successor, take_over=True) as second:
                second.restore(state)
                second.save(2, state)
            first.save(2, state)

    train()


def test_a_sibling_goes_on(tmp_path: Path) -> None:
    """Fenced by the same flow run: Prefect is told to leave the state alone."""
    with pytest.raises(Abort, match="another process continues"):
        fence(tmp_path / "run", "mine")


@pytest.mark.parametrize("successor", quick_first([None, "another"]))
def test_a_stranger_took_it(tmp_path: Path, successor: str | None) -> None:
    """Fenced by anybody else: the flow run fails, and says why."""
    with pytest.raises(FencedError):
        fence(tmp_path / "run", successor)


def test_started_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first process trains on; the second one of the same flow run says so, sets no state, and is not retried."""
    started: list[int] = []

    @flow(name="twice", persist_result=False, retries=2)
    def twice() -> None:
        started.append(1)
        first = OwnerChild(tmp_path / "run", flow_run.id)
        try:
            assert first.ask("save 1") == "ok 1"
            config = CheckpointConfig(checkpoint_dir=str(tmp_path / "run"), memory_dir=None)
            with running_on(Hurried(100)):
                Checkpointer(config, flow_run_id=flow_run.id).restore({"x": 0})
        finally:
            assert first.ask("save 2") == "ok 2"
            first.kill()

    with pytest.raises(Abort, match="already executes this flow run"):
        twice()
    assert started == [1]
    assert "Another process continues with this flow run, and this one ends" in caplog.text
