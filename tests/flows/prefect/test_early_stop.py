"""Early stop: what counts, who goes on, and the whole way from an evaluation to the end of the flow run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect import flow, get_client
from prefect.exceptions import ParameterTypeError

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.errors import StoreError
from ckpt_tasks.flows.prefect import early_stop as stopping
from ckpt_tasks.flows.prefect.early_stop import EarlyStopping
from ckpt_tasks.flows.session.session import Progress, watcher
from ckpt_tasks.flows.train import TrainResult, train
from ckpt_tasks.format.policy.stopping import EarlyStop
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.testing import located
from tests.support.histories import ReadEntries

RULE = EarlyStop(metric="loss", patience=2)


@contextmanager
def evaluated(run_dir: Path, losses: Mapping[int, float]) -> Iterator[None]:
    """Record an evaluation of each commit one step after it, as another process would; pruned ones as well."""
    seen: set[int] = set()

    def record(progress: Progress) -> None:
        run = open_run(str(run_dir))
        newest = run.find("latest")
        if newest.step in losses and newest.step not in seen:
            seen.add(newest.step)
            run.record_evaluation(newest, "quick", {"loss": losses[newest.step]})

    token = watcher.set(record)
    try:
        yield
    finally:
        watcher.reset(token)


def trained(run_dir: Path, **options: Any) -> TrainResult:
    defaults: dict[str, Any] = {
        "run_key": "tiny",
        "total_steps": 60,
        "program": "tests.support.tiny:Tiny",
        "batch_steps": 5,
    }
    checkpoint = {"checkpoint_dir": str(run_dir), "max_num_checkpoints": 1}
    early_stop = {"metric": "loss", "patience": 2, **options}
    result: TrainResult = train(**{**defaults, "checkpoint": checkpoint, "early_stop": early_stop})
    return result


@pytest.mark.usefixtures("harness")
def test_a_run_that_gets_no_better_is_stopped(run_dir: Path) -> None:
    """Two evaluations without a better loss end the run at a batch's end, committed and released, with the reason.

    The best checkpoint is pruned by then, and counts all the same. Started again, the run goes on, with as much
    patience again.
    """
    losses = {0: 1.2, 5: 1.0, 10: 0.5, 15: 0.6, 20: 0.7, 25: 0.9, 30: 0.9, 35: 0.9}
    with evaluated(run_dir, losses):
        result = trained(run_dir)
    assert result.step == 25
    assert (
        result.stopped_because == "stopped at step 25: 2 evaluations by quick without a better loss than 0.5 at step 10"
    )
    state = open_run(str(run_dir)).head().state
    assert [one.step for one in state.live] == [25]
    assert state.owner is not None
    assert state.owner.released
    with evaluated(run_dir, losses):
        again = trained(run_dir)
    assert (again.step, again.trained) == (40, 15)
    assert trained(run_dir, suite="full").stopped_because is None  # another suite's values are none of its business


@pytest.mark.usefixtures("harness")
@pytest.mark.parametrize("options", [{"min_dleta": 1}, {"patience": 0}, {"mode": "least"}, {"metric": None}])
def test_a_wrong_rule_is_refused_before_anything_runs(run_dir: Path, options: dict[str, Any]) -> None:
    """A misspelled or meaningless option is refused with the flow's parameters."""
    with pytest.raises(ParameterTypeError):
        trained(run_dir, **options)
    assert not run_dir.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("harness")
def test_a_stop_is_not_undone_by_a_start_of_the_same_flow_run(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends between its note and the end of its flow run leaves the stop to the flow run's next process.

    Another flow run trains on.
    """
    with get_client(sync_client=True) as client, Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir))) as ckpt:
        run = client.create_flow_run(train, parameters={}).id
        monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(run))
        unimproved(ckpt, run_dir)
        first, second = (EarlyStopping(ckpt, RULE) for _ in range(2))
        assert first.check()
        assert second.check()
        assert first.why == "stopped at step 3: 2 evaluations by quick without a better loss than 1 at step 1"
        assert second.why == first.why
        monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(uuid4()))
        assert not EarlyStopping(ckpt, RULE).check()


class Away(LocalStore):
    """A store that does not answer while it is away."""

    away = False

    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        if self.away:
            raise StoreError("the store does not answer")
        return super().names(prefix, limit)


@pytest.mark.slow
@pytest.mark.usefixtures("harness")
def test_a_store_that_is_away_stops_nothing(run_dir: Path) -> None:
    """Where the ledger cannot be read at the end of a batch, the run goes on, and is stopped later."""

    @flow
    def looks() -> list[bool]:
        store = Away(str(run_dir))
        with Checkpointer(CheckpointConfig(checkpoint_dir=located(store))) as ckpt:
            unimproved(ckpt, run_dir)
            stopping = EarlyStopping(ckpt, RULE)
            store.away = True
            away = stopping.check()
            store.away = False
            return [away, stopping.check()]

    assert looks() == [False, True]


def unimproved(ckpt: Checkpointer, run_dir: Path) -> None:
    for step in (1, 2, 3):
        ckpt.save(step, {"value": step})
        run = open_run(str(run_dir))
        run.record_evaluation(run.find("latest"), "quick", {"loss": 1.0})


def test_no_start_reads_the_whole_history(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note sums up what older entries say: a new process reads some hundreds of entries, and knows the same best."""
    monkeypatch.setattr(stopping, "_NOTE_EVERY", 16)
    rule = EarlyStop(metric="loss", patience=1000)
    config = CheckpointConfig(checkpoint_dir=str(run_dir), run_key="long", max_num_checkpoints=1)
    with Checkpointer(config) as ckpt:
        watching = EarlyStopping(ckpt, rule)
        for step in range(1, 41):
            ckpt.save(step, {"value": step})
            run = open_run(str(run_dir))
            run.record_evaluation(run.find("latest"), "quick", {"loss": 0.25 if step == 3 else 0.5})
            assert not watching.check()
        ckpt.run.history.store = store = ReadEntries(ckpt.run.history.store)
        fresh, before = EarlyStopping(ckpt, replace(rule, patience=37)), open_run(str(run_dir)).head().next_n
        assert fresh.check()
        assert len(store.numbers) < 40 < before - 40
        assert str(fresh.why).endswith("37 evaluations by quick without a better loss than 0.25 at step 3")


def test_what_comes_between_the_look_and_the_note_is_not_lost(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P75: an evaluation that is recorded while the note is written is in neither, and is read all the same."""
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), run_key="raced", max_num_checkpoints=None)) as ckpt:
        for step in (1, 2, 3, 4):
            ckpt.save(step, {"value": step})
        run, note, rule = open_run(str(run_dir)), ckpt.note, replace(RULE, patience=1)
        for step in (1, 2):
            run.record_evaluation(run.find(step), "quick", {"loss": 0.5})

        def meanwhile(*what: Any, **fields: Any) -> None:
            run.record_evaluation(run.find(3), "quick", {"loss": 0.25})
            note(*what, **fields)

        monkeypatch.setattr(ckpt, "note", meanwhile)
        assert EarlyStopping(ckpt, rule).check()
        monkeypatch.undo()
        ckpt.save(5, {"value": 5})
        run.record_evaluation(run.find(5), "quick", {"loss": 0.5})
        fresh = EarlyStopping(ckpt, rule)
        assert fresh.check()
        assert str(fresh.why).endswith("1 evaluation by quick without a better loss than 0.25 at step 3")
