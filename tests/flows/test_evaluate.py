"""The evaluate flow: what it restores, what it records, and that it does so once."""

from __future__ import annotations

import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from prefect.task_runners import ProcessPoolTaskRunner
from safetensors.torch import load_file

from ckpt_tasks import Checkpoint, CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.errors import CheckpointNotFoundError, ConfigError, IntegrityError, ProgramError, RunMismatchError
from ckpt_tasks.flows.evaluate import evaluate
from ckpt_tasks.orchestration.evaluate import EvaluationResult, Evaluator
from ckpt_tasks.reading.reading import Run
from ckpt_tasks.storage.locations import Location
from tests.support.cli_runs import ckpt, flip
from tests.support.tiny import Tiny

pytestmark = pytest.mark.usefixtures("harness")
TINY = "tests.support.tiny:Tiny"
DRAWING = "tests.flows.test_evaluate:Drawing"
PRUNING = "tests.flows.test_evaluate:Pruning"


@pytest.fixture
def trained(run_dir: Path) -> Path:
    """Return the directory of a run with checkpoints of the steps 2, 4 and 6; the best loss is that of step 4."""
    program = Tiny()
    best = {"keep_best": 1, "best_metric": "loss"}
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), run_key="tiny", **best)) as ckpt:  # type: ignore[arg-type]
        for step in range(1, 7):
            program.train_step()
            if step % 2 == 0:
                ckpt.save(step, program.state, metrics={"loss": abs(step - 4.0)})
    return run_dir


def evaluated(run_dir: Path, **options: Any) -> EvaluationResult:
    defaults = {"run_key": "tiny", "checkpoint_dir": str(run_dir), "program": TINY, "retries": 0}
    results: list[EvaluationResult] = evaluate(**{**defaults, **options})
    [result] = results
    return result


def pending(run_dir: Path, **options: Any) -> dict[int, EvaluationResult]:
    defaults = {"run_key": "tiny", "checkpoint_dir": str(run_dir), "program": TINY, "which": "pending", "retries": 0}
    results: list[EvaluationResult] = evaluate(**{**defaults, **options})
    return {one.step: one for one in results}


def damage(run_dir: Path, step: int) -> None:
    """Flip one bit of a checkpoint's weights."""
    shard = next((run_dir / open_run(str(run_dir)).find(step).manifest).parent.glob("model-*.safetensors"))
    flip(shard, -1)


def test_an_evaluation_restores_the_model_only_and_is_recorded(trained: Path) -> None:
    """The model is the checkpoint's, the rest is as the program is built; the result lies beside the checkpoint."""
    result = evaluated(trained)
    same = Tiny(seed=5)
    at = open_run(str(trained))
    at.restore(at.find(6), {"model": same.model}, partial=True)
    assert result.step == 6
    assert result.new
    assert result.metrics["heldout_loss"] == same.evaluate("quick")["heldout_loss"]
    assert result.metrics["built_with_steps"] == 0
    recorded = at.evaluations()
    assert [(one.step, one.suite, one.metrics) for one in recorded] == [(6, "quick", result.metrics)]
    assert recorded[0].manifest_digest == at.find(6).manifest_digest


def test_an_evaluation_happens_once_per_checkpoint_and_suite(trained: Path) -> None:
    """P75: a second flow run returns what is recorded, builds no program, and writes nothing; another suite is new."""
    first = evaluated(trained)
    before = open_run(str(trained)).head().next_n
    second = evaluated(trained, program="nowhere:Tiny")
    assert (second.metrics, second.new) == (first.metrics, False)
    assert open_run(str(trained)).head().next_n == before
    assert evaluated(trained, suite="full").new
    assert evaluated(trained, which=4).new


@pytest.mark.parametrize(("which", "step"), [("latest", 6), ("best", 4), (2, 2), ("2", 2)])
def test_any_checkpoint_can_be_named(trained: Path, which: int | str, step: int) -> None:
    """`latest`, `best` by the metrics saved, and a step, also as the text that a command line sends."""
    assert evaluated(trained, which=which).step == step


def test_the_lease_ends_with_the_evaluation(trained: Path) -> None:
    """P64: a checkpoint is leased while it is evaluated, and not longer, also where the evaluation fails."""
    run = open_run(str(trained))
    evaluated(trained)
    with pytest.raises(RuntimeError, match="always fails"):
        evaluated(trained, suite="broken")
    assert run.head().state.leases == ()
    events = [run.history.read_entry(n)[0].event for n in range(run.head().next_n)]
    leases = [event for event in events if event["kind"] == "lease"]
    assert [bool(event.get("ended")) for event in leases] == [False, True, False, True]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"which": 3}, CheckpointNotFoundError),
        ({"which": "newest"}, ConfigError),
        ({"program": "nowhere:Tiny"}, ProgramError),
        ({"program": "tests.flows.test_evaluate:Untested"}, ProgramError),
        ({"run_key": "other"}, RunMismatchError),
        ({"checkpoint_dir": "/nowhere/{run_key}"}, CheckpointNotFoundError),
        ({"suite": "no/suite"}, ConfigError),
    ],
)
def test_bad_input_is_refused(trained: Path, options: dict[str, Any], error: type[Exception]) -> None:
    """A wrong checkpoint, program, run or suite is an error of our tree, and nothing is recorded."""
    with pytest.raises(error):
        evaluated(trained, **options)
    assert open_run(str(trained)).evaluations() == []


class Untested(Tiny):
    """A program without an evaluation."""

    evaluate = None  # type: ignore[assignment]


def test_an_evaluation_draws_nothing_from_the_training_stream(trained: Path) -> None:
    """P11: building and evaluating a program seeds the global stream; a training that goes on restores its own."""
    program = Tiny()
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(trained), run_key="tiny")) as ckpt:
        ckpt.restore(program.state)
        expected = torch.rand(3)
        evaluated(trained)
        ckpt.restore(program.state)
        assert torch.equal(torch.rand(3), expected)


def test_pending_are_those_that_the_suite_has_not_seen(trained: Path) -> None:
    """P75: every committed checkpoint is taken once per suite; a second look, or a doubled event, changes nothing."""
    evaluated(trained, which=4)
    assert {step: one.outcome for step, one in pending(trained).items()} == {6: "recorded", 2: "recorded"}
    before = open_run(str(trained)).head().next_n
    assert pending(trained) == {}
    assert open_run(str(trained)).head().next_n == before
    assert pending(trained, suite="full", limit=2).keys() == {6, 4}
    assert pending(trained, suite="full", limit=2).keys() == {2}


def test_what_is_committed_meanwhile_is_evaluated_too(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flow run that follows takes what comes as soon as it is committed, and ends soon after the run's owner has."""
    monkeypatch.setattr("ckpt_tasks.orchestration.evaluate._RELEASED_S", 3.0)
    saved_s: list[float] = []

    def train_on() -> None:
        while not open_run(str(trained)).evaluations():  # the other one is at work
            time.sleep(0.05)
        program = Tiny()
        kept = CheckpointConfig(checkpoint_dir=str(trained), run_key="tiny", max_num_checkpoints=None)
        with Checkpointer(kept) as ckpt:  # else it may prune what is not evaluated yet
            ckpt.restore(program.state)
            ckpt.save(8, program.state)
            saved_s.append(time.time())

    thread = Thread(target=train_on)
    thread.start()
    found = pending(trained, follow_s=600.0)
    assert time.time() - saved_s[0] < 300  # it did not wait for follow_s
    thread.join()
    assert found.keys() == {2, 4, 6, 8}
    assert moment(open_run(str(trained)).evaluations()[-1].evaluated_at) - saved_s[0] < 5


@pytest.mark.slow
def test_a_run_that_begins_later_is_waited_for(run_dir: Path) -> None:
    """A flow run that follows may be there before the run; what it cannot follow is nothing, at once."""

    def begin() -> None:
        time.sleep(2)
        with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), run_key="tiny")) as ckpt:
            ckpt.save(1, Tiny().state)

    assert pending(run_dir) == {}
    thread = Thread(target=begin)
    thread.start()
    found = pending(run_dir, follow_s=6.0)
    thread.join()
    assert found.keys() == {1}


@pytest.mark.parametrize("options", [{"limit": 0}, {"follow_s": -1.0}])
def test_bounds_that_mean_nothing_are_refused(trained: Path, options: dict[str, Any]) -> None:
    """A limit of nothing, or a time before now, is an error by its name."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        pending(trained, **options)


def test_side_by_side_is_as_alone(trained: Path) -> None:
    """P11: evaluations in threads of one process measure what each measures alone, and leave its streams alone."""
    suites = ("drawing", "drawn_again")
    alone = {step: evaluated(trained, which=step, suite=suites[0], program=DRAWING).metrics for step in (2, 4, 6)}
    state = torch.get_rng_state()
    together = pending(trained, suite=suites[1], program=DRAWING)
    assert torch.equal(torch.get_rng_state(), state)
    assert {step: one.metrics for step, one in together.items()} == alone


def test_one_that_fails_does_not_stop_the_others(trained: Path) -> None:
    """P49: the flow evaluates what can be evaluated, and fails at its end with what could not, by step."""
    damage(trained, 4)
    with pytest.raises(ExceptionGroup, match="suite quick: step 4: ") as failed:
        pending(trained)
    assert [type(error) for error in failed.value.exceptions] == [IntegrityError]
    assert {one.step for one in open_run(str(trained)).evaluations()} == {2, 6}


def test_a_checkpoint_is_not_pruned_under_its_evaluator(trained: Path) -> None:
    """P64: retention that runs meanwhile spares what is being evaluated, and takes what is not."""
    result = evaluated(trained, which=2, program=PRUNING, params={"run_dir": str(trained)})
    assert result.new
    assert [one.step for one in open_run(str(trained)).checkpoints()] == [6, 2]


def test_a_checkpoint_that_was_pruned_meanwhile_is_skipped(trained: Path) -> None:
    """P64: between the look and the lease it may go; that is not a failure, and nothing is recorded of it."""
    run = open_run(str(trained))
    gone = run.find(2)
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(trained), run_key="tiny", max_num_checkpoints=1)) as ckpt:
        ckpt.acquire()
        ckpt.prune()
    evaluator = Evaluator(run_key="tiny", location=Location(str(trained)), program=TINY, suite="quick", holder="test")
    assert evaluator.evaluate(gone).outcome == "pruned"
    named = evaluate(run_key="tiny", checkpoint_dir=str(trained), program=TINY, which=gone.manifest_digest)
    assert named == []  # an event may name it so
    assert run.evaluations() == []


def test_two_evaluators_at_once_record_one(trained: Path) -> None:
    """P75: of two that evaluate the same checkpoint at the same time one records, and both say the same."""
    run = open_run(str(trained))
    both = Barrier(2)

    def one(name: str) -> EvaluationResult:
        both.wait()
        evaluator = Evaluator(run_key="tiny", location=Location(str(trained)), program=TINY, suite="quick", holder=name)
        return evaluator.evaluate(run.find(6))

    with ThreadPoolExecutor(2) as threads:
        results = [*threads.map(one, ("one", "other"))]
    assert sorted(result.outcome for result in results) == ["known", "recorded"]
    assert results[0].metrics == results[1].metrics
    assert len(run.evaluations()) == 1
    assert run.head().state.leases == ()


def test_a_promotion_is_called_with_a_new_best_one(trained: Path, tmp_path: Path) -> None:
    """Called when the best one is among those that were looked at, with its evaluation, leased; else not."""
    hook = {"promote": "tests.flows.test_evaluate:promoted", "promote_params": {"out": str(tmp_path / "said")}}
    evaluated(trained, which=6, **hook)
    assert not (tmp_path / "said").exists()
    pending(trained, **hook)
    assert (tmp_path / "said").read_text() == "4 quick leased\n"
    pending(trained, **hook)
    assert (tmp_path / "said").read_text() == "4 quick leased\n"
    evaluated(trained, which="best", **hook)  # by name it is called again: what a killed process did not do is made up
    assert (tmp_path / "said").read_text() == "4 quick leased\n" * 2


def test_a_promotion_that_fails_fails_the_flow_and_not_the_record(trained: Path, tmp_path: Path) -> None:
    """Its own error ends the flow after its retries; what was measured is recorded all the same."""
    out = tmp_path / "no folder" / "said"
    with pytest.raises(ExceptionGroup, match="promotion: ") as failed:
        pending(trained, promote="tests.flows.test_evaluate:promoted", promote_params={"out": str(out)})
    assert [type(error) for error in failed.value.exceptions] == [FileNotFoundError]
    assert {one.step for one in open_run(str(trained)).evaluations()} == {2, 4, 6}


def test_the_best_one_is_exported(trained: Path, tmp_path: Path) -> None:
    """The hook that comes along writes the best checkpoint's weights as one file that safetensors opens."""
    hook = "ckpt_tasks.orchestration.evaluate:export_best"
    pending(trained, promote=hook, promote_params={"out": str(tmp_path / "best" / "{run_key}.safetensors")})
    found = load_file(tmp_path / "best" / "tiny.safetensors")
    best = Tiny(seed=3)
    at = open_run(str(trained))
    at.restore(at.find(4), {"model": best.model}, partial=True)
    assert all(torch.equal(found[name], value) for name, value in best.model.state_dict().items())


@pytest.mark.parametrize("name", ["promoted", "nowhere:promoted", "tests.flows.test_evaluate:missing"])
def test_a_promotion_that_cannot_be_found_is_refused_first(trained: Path, name: str) -> None:
    """A wrong name is an error before anything is evaluated."""
    with pytest.raises(ConfigError):
        pending(trained, promote=name)
    assert open_run(str(trained)).evaluations() == []


def test_promotion_needs_to_know_what_the_best_is(run_dir: Path) -> None:
    """A run that does not say by which metric a checkpoint is the best is refused before anything is evaluated."""
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), run_key="tiny")) as ckpt:
        ckpt.save(1, Tiny().state)
    with pytest.raises(ConfigError, match="best_metric"):
        pending(run_dir, promote="tests.flows.test_evaluate:promoted")


@pytest.mark.slow
def test_processes_measure_the_same(trained: Path) -> None:
    """Another task runner, here Prefect's process pool, evaluates the same, and at the same time."""
    alone = {step: evaluated(trained, which=step, suite="drawing", program=DRAWING).metrics for step in (2, 4, 6)}
    in_processes = evaluate.with_options(task_runner=ProcessPoolTaskRunner(max_workers=2))  # type: ignore[arg-type]
    results = in_processes(
        run_key="tiny", checkpoint_dir=str(trained), program=DRAWING, which="pending", suite="drawn_again"
    )
    assert {one.step: one.metrics for one in results} == alone


@pytest.mark.slow
def test_pending_on_a_terminal(trained: Path) -> None:
    """The command shows what was evaluated, then that nothing is left, and ends with 1 where something failed."""
    command = ("evaluate", TINY, "--run-key", "tiny", "--checkpoint-dir", trained, "--which", "pending")
    some = ckpt(*command, "--limit", "2")
    assert some.status == 0
    assert "Evaluations by quick" in some.out
    assert re.findall(r"^.\s+(\d+) .* recorded", some.out, re.MULTILINE) == ["4", "6"]
    assert ckpt(*command).status == 0
    again = ckpt(*command)
    assert again.status == 0
    assert "Nothing to evaluate by quick." in again.out
    damage(trained, 4)
    failed = ckpt(*command, "--suite", "full")
    assert failed.status == 1
    assert "step 4: " in failed.err


def promoted(run: Run, checkpoint: Checkpoint, result: EvaluationResult, out: str) -> None:
    """Say what is promoted; for the tests of promotion."""
    leased = any(lease.manifest_digest == checkpoint.manifest_digest for lease in run.head().state.leases)
    with Path(out).open("a") as said:
        said.write(f"{result.step} {result.suite} {'leased' if leased else 'free'}\n")


def moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


class Drawing(Tiny):
    """A program whose evaluation draws from every stream, and takes a while."""

    def evaluate(self, suite: str) -> dict[str, float]:
        found = {}
        for turn in range(20):
            time.sleep(0.005)
            noise = torch.randn(4, 4)
            found[f"loss_{turn}"] = self.model(noise).sum().item() + random.random()
        return found


class Pruning(Tiny):
    """A program whose evaluation has the run pruned to its newest checkpoint."""

    def __init__(self, run_dir: str):
        super().__init__()
        self._run_dir = run_dir

    def evaluate(self, suite: str) -> dict[str, float]:
        config = CheckpointConfig(checkpoint_dir=self._run_dir, run_key="tiny", max_num_checkpoints=1)
        with Checkpointer(config) as ckpt:
            ckpt.acquire()
            ckpt.prune()
        return super().evaluate(suite)
