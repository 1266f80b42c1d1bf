"""The evaluate flow: what it restores, what it records, and that it does so once."""

from __future__ import annotations

import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from prefect.task_runners import ProcessPoolTaskRunner
from safetensors.torch import load_file

from ckpt_tasks import Checkpoint, CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.checkpoint.restore.reading import Run
from ckpt_tasks.errors import CheckpointNotFoundError, ConfigError, IntegrityError, ProgramError, RunMismatchError
from ckpt_tasks.flows.evaluate import evaluate
from ckpt_tasks.flows.prefect.evaluate import EvaluationResult, Evaluator
from ckpt_tasks.storage.locations import Location
from tests.support.cli_runs import flip
from tests.support.sweeps import quick_first
from tests.support.tiny import Tiny
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("harness")
TINY = "tests.support.tiny:Tiny"
DRAWING = "tests.flows.test_evaluate:Drawing"
PRUNING = "tests.flows.test_evaluate:Pruning"


@pytest.fixture(scope="module")
def trained_once(fast_dir: Path) -> Path:
    """Return the directory of a run with checkpoints of the steps 2, 4 and 6; the best loss is that of step 4."""
    program, run_dir = Tiny(), fast_dir / "run"
    best = {"keep_best": 1, "best_metric": "loss"}
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), run_key="tiny", **best)) as ckpt:  # type: ignore[arg-type]
        for step in range(1, 7):
            program.train_step()
            if step % 2 == 0:
                ckpt.save(step, program.state, metrics={"loss": abs(step - 4.0)})
    return run_dir


@pytest.fixture
def trained(trained_once: Path, run_dir: Path) -> Path:
    return shutil.copytree(trained_once, run_dir)


def evaluated(run_dir: Path, **options: Any) -> dict[int, EvaluationResult]:
    """Evaluate the newest checkpoint, or what the options choose; return the results by step."""
    defaults = {"run_key": "tiny", "checkpoint_dir": str(run_dir), "program": TINY, "retries": 0}
    results: list[EvaluationResult] = evaluate(**{**defaults, **options})
    return {one.step: one for one in results}


def pending(run_dir: Path, **options: Any) -> dict[int, EvaluationResult]:
    return evaluated(run_dir, which="pending", **options)


def evaluator(run_dir: Path, holder: str = "test") -> Evaluator:
    return Evaluator(run_key="tiny", location=Location(str(run_dir)), program=TINY, suite="quick", holder=holder)


def damage(run_dir: Path, step: int) -> None:
    """Flip one bit of a checkpoint's weights."""
    shard = next((run_dir / open_run(str(run_dir)).find(step).manifest).parent.glob("model-*.safetensors"))
    flip(shard, -1)


def test_an_evaluation_happens_once_per_checkpoint_and_suite(trained: Path) -> None:
    """P75: the model alone is restored, the result lies beside the checkpoint, and a second flow run returns it.

    It builds no program, and writes nothing; another suite, or another checkpoint by any name, is new.
    """
    first = evaluated(trained)[6]
    same, at = Tiny(seed=5), open_run(str(trained))
    at.restore(at.find(6), {"model": same.model}, partial=True)
    assert first.new
    assert first.metrics == {"built_with_steps": 0, "heldout_loss": same.evaluate("quick")["heldout_loss"]}
    [recorded] = at.evaluations()
    assert (recorded.step, recorded.suite, recorded.metrics) == (6, "quick", first.metrics)
    assert recorded.manifest_digest == at.find(6).manifest_digest
    before = at.head().next_n
    second = evaluated(trained, program="nowhere:Tiny")[6]
    assert (second.metrics, second.new, at.head().next_n) == (first.metrics, False, before)
    for which, suite, step in (("latest", "full", 6), ("best", "quick", 4), ("2", "quick", 2), (2, "full", 2)):
        assert evaluated(trained, which=which, suite=suite)[step].new


def test_the_lease_ends_with_the_evaluation(trained: Path) -> None:
    """P64: a checkpoint is leased while it is evaluated, and not longer, also where the evaluation fails."""
    run = open_run(str(trained))
    evaluated(trained)
    with pytest.raises(RuntimeError, match="always fails"):
        evaluated(trained, suite="broken")
    assert run.head().state.leases == ()
    events = [run.history.read_entry(n)[0].event for n in range(run.head().next_n)]
    assert [bool(one.get("ended")) for one in events if one["kind"] == "lease"] == [False, True, False, True]


@pytest.mark.parametrize(
    ("options", "error"),
    quick_first(
        [
            ({"which": 3}, CheckpointNotFoundError),
            ({"which": "newest"}, ConfigError),
            ({"program": "nowhere:Tiny"}, ProgramError),
            ({"program": "tests.flows.test_evaluate:Untested"}, ProgramError),
            ({"run_key": "other"}, RunMismatchError),
            ({"checkpoint_dir": "/nowhere/{run_key}"}, CheckpointNotFoundError),
            ({"suite": "no/suite"}, ConfigError),
            ({"which": "pending", "limit": 0}, ConfigError),
            ({"which": "latest", "limit": 1}, ConfigError),
            ({"which": "latest", "follow_s": 1.0}, ConfigError),
            ({"promote_params": {"a": 1}}, ConfigError),
            ({"which": "pending", "follow_s": -1.0}, ConfigError),
            ({"which": "pending", "promote": "promoted"}, ConfigError),
            ({"which": "pending", "promote": "nowhere:promoted"}, ConfigError),
            ({"which": "pending", "promote": "tests.flows.test_evaluate:missing"}, ConfigError),
        ],
        5,
    ),
)
def test_bad_input_is_refused(trained: Path, options: dict[str, Any], error: type[Exception]) -> None:
    """A wrong checkpoint, program, run, suite, bound or promotion is an error of our tree, and nothing is recorded."""
    with pytest.raises(error):
        evaluated(trained, **options)
    assert open_run(str(trained)).evaluations() == []


class Untested(Tiny):
    """A program without an evaluation."""

    evaluate = None  # type: ignore[assignment]


def test_pending_are_those_that_the_suite_has_not_seen(trained: Path) -> None:
    """P75: every committed checkpoint is taken once per suite; a second look, or a doubled event, changes nothing."""
    evaluated(trained, which=4)
    assert {step: one.outcome for step, one in pending(trained).items()} == {6: "recorded", 2: "recorded"}
    before = open_run(str(trained)).head().next_n
    assert pending(trained) == {}
    assert open_run(str(trained)).head().next_n == before
    assert pending(trained, suite="full", limit=2).keys() == {6, 4}
    assert pending(trained, suite="full", limit=2).keys() == {2}


@pytest.mark.slow
def test_what_is_committed_meanwhile_is_evaluated_too(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flow run that follows takes what comes as soon as it is committed, and ends soon after the run's owner has."""
    monkeypatch.setattr("ckpt_tasks.flows.prefect.evaluate._RELEASED_S", 3.0)

    def train_on() -> None:
        until(lambda: open_run(str(trained)).evaluations() != [])  # the other one is at work
        program = Tiny()
        kept = CheckpointConfig(checkpoint_dir=str(trained), run_key="tiny", max_num_checkpoints=None)
        with Checkpointer(kept) as ckpt:  # else it may prune what is not evaluated yet
            ckpt.restore(program.state)
            ckpt.save(8, program.state)

    with ThreadPoolExecutor(1) as beside:
        other = beside.submit(train_on)
        assert pending(trained, follow_s=600.0).keys() == {2, 4, 6, 8}
        other.result()


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_side_by_side_is_as_alone(trained: Path, runner: str) -> None:
    """P11: evaluations in threads or processes measure what each measures alone, and leave training's streams alone."""
    program = Tiny()
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(trained), run_key="tiny")) as ckpt:
        ckpt.restore(program.state)
        expected = torch.rand(3)
        alone = {
            step: evaluated(trained, which=step, suite="drawing", program=DRAWING)[step].metrics for step in (2, 4, 6)
        }
        ckpt.restore(program.state)
        state = torch.get_rng_state()
        pool: Any = {} if runner == "threads" else {"task_runner": ProcessPoolTaskRunner(max_workers=2)}
        together = evaluate.with_options(**pool)(
            run_key="tiny", checkpoint_dir=str(trained), program=DRAWING, which="pending", suite="drawn_again"
        )
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(torch.rand(3), expected)
    assert {one.step: one.metrics for one in together} == alone


def test_one_that_fails_does_not_stop_the_others(trained: Path) -> None:
    """P49: the flow evaluates what can be evaluated, and fails at its end with what could not, by step."""
    damage(trained, 4)
    with pytest.raises(ExceptionGroup, match="suite quick: step 4: ") as failed:
        pending(trained)
    assert [type(error) for error in failed.value.exceptions] == [IntegrityError]
    assert {one.step for one in open_run(str(trained)).evaluations()} == {2, 6}


def test_a_checkpoint_is_not_pruned_under_its_evaluator(trained: Path) -> None:
    """P64: retention that runs meanwhile spares what is being evaluated, and takes what is not.

    What it has taken between the look and the lease is skipped: that is no failure, and nothing is recorded of it.
    """
    run = open_run(str(trained))
    gone = run.find(4)
    assert evaluated(trained, which=2, program=PRUNING, params={"run_dir": str(trained)})[2].new
    assert [one.step for one in run.checkpoints()] == [6, 2]
    assert evaluator(trained).evaluate(gone).outcome == "pruned"
    assert evaluated(trained, which=gone.manifest_digest) == {}  # an event may name it so
    assert [one.step for one in run.evaluations()] == [2]


def test_two_evaluators_at_once_record_one(trained: Path) -> None:
    """P75: of two that evaluate the same checkpoint at the same time one records, and both say the same."""
    run, both = open_run(str(trained)), Barrier(2)

    def one(name: str) -> EvaluationResult:
        both.wait()
        return evaluator(trained, name).evaluate(run.find(6))

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
    for _ in range(2):
        pending(trained, **hook)
        assert (tmp_path / "said").read_text() == "4 quick leased\n"
    evaluated(trained, which="best", **hook)  # by name it is called again: what a killed process did not do is made up
    assert (tmp_path / "said").read_text() == "4 quick leased\n" * 2


@pytest.mark.slow
def test_a_promotion_that_fails_fails_the_flow_and_not_the_record(trained: Path, tmp_path: Path) -> None:
    """Its own error ends the flow after its retries; what was measured is recorded, and the next one exports the best.

    The hook that comes along writes the weights as one file that safetensors opens.
    """
    out = tmp_path / "no folder" / "said"
    with pytest.raises(ExceptionGroup, match="promotion: ") as failed:
        pending(trained, promote="tests.flows.test_evaluate:promoted", promote_params={"out": str(out)})
    assert [type(error) for error in failed.value.exceptions] == [FileNotFoundError]
    at = open_run(str(trained))
    assert {one.step for one in at.evaluations()} == {2, 4, 6}
    hook = {"promote": "ckpt_tasks.flows.prefect.evaluate:export_best"}
    evaluated(trained, which="best", **hook, promote_params={"out": str(tmp_path / "best" / "{run_key}.safetensors")})
    found, best = load_file(tmp_path / "best" / "tiny.safetensors"), Tiny(seed=3)
    at.restore(at.find(4), {"model": best.model}, partial=True)
    assert all(torch.equal(found[name], value) for name, value in best.model.state_dict().items())


@pytest.mark.slow
def test_promotion_needs_to_know_what_the_best_is(run_dir: Path) -> None:
    """A run that does not say by which metric a checkpoint is the best is refused before anything is evaluated.

    Where no run is yet there is nothing to evaluate, and nothing fails.
    """
    assert pending(run_dir) == {}
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), run_key="tiny")) as ckpt:
        ckpt.save(1, Tiny().state)
    with pytest.raises(ConfigError, match="best_metric"):
        pending(run_dir, promote="tests.flows.test_evaluate:promoted")


def promoted(run: Run, checkpoint: Checkpoint, result: EvaluationResult, out: str) -> None:
    """Say what is promoted; for the tests of promotion."""
    leased = any(lease.manifest_digest == checkpoint.manifest_digest for lease in run.head().state.leases)
    with Path(out).open("a") as said:
        said.write(f"{result.step} {result.suite} {'leased' if leased else 'free'}\n")


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
