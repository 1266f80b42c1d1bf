"""The evaluate flow: what it restores, what it records, and that it does so once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.errors import CheckpointNotFoundError, ConfigError, IntegrityError, ProgramError, RunMismatchError
from ckpt_tasks.orchestration.evaluate import EvaluationResult
from flows.evaluate import evaluate
from tests.flows.tiny import Tiny

pytestmark = pytest.mark.usefixtures("harness")
TINY = "tests.flows.tiny:Tiny"


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
    result: EvaluationResult = evaluate(**{**defaults, **options})
    return result


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


def test_a_damaged_checkpoint_is_not_evaluated(trained: Path) -> None:
    """P49: a flipped bit in the model is an error that names the tensor; nothing is recorded."""
    run = open_run(str(trained))
    shard = next((trained / run.find(6).manifest).parent.glob("model-*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(IntegrityError, match="model/"):
        evaluated(trained)
    assert run.evaluations() == []


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
