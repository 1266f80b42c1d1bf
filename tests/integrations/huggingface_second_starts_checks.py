"""Hugging Face: a run that is started again with other arguments says what differs, and trains no sample in silence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Sampler, WeightedRandomSampler
from transformers import TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import ExportableState

from ckpt_tasks import CheckpointConfig
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.integrations.huggingface import CkptTrainer

SAMPLES = 24
Rows = list[dict[str, Any]]


class Stop(Exception):  # noqa: N818 (no error)
    """Ends a training as a kill does, after a step."""


class Net(nn.Module):
    """A model that remembers the samples of each batch that it has trained."""

    def __init__(self, most: int | None = None):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[int] = []
        self.most = most  # samples that fit into memory

    def forward(self, number: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.most is not None and len(number) > self.most:
            raise RuntimeError("CUDA out of memory.")
        self.seen += map(int, number)
        return {"loss": self.layer(number[:, None].float()).square().mean()}


class Stopping(TrainerCallback):
    def __init__(self, after: int | None):
        self.after = after

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.after:
            raise Stop


def rows(count: int = SAMPLES) -> Rows:
    return [{"number": number} for number in range(count)]


def start(
    folder: Path,
    *,
    stop: int | None = None,
    data: Rows | None = None,
    callbacks: list[Any] | None = None,
    kind: type[CkptTrainer] = CkptTrainer,
    most: int | None = None,
    step_size: int | None = None,
    **options: Any,
) -> tuple[list[int], Any]:
    """Train two epochs of 24 samples from the run in `folder`; return the samples of this start, and its trainer."""
    given = {"num_train_epochs": 2, "per_device_train_batch_size": 4, "learning_rate": 0.001, **options}
    args = TrainingArguments(
        str(folder / "out"), save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=1, **given
    )
    set_seed(args.seed)
    net = Net(most)
    optimizer = torch.optim.SGD(net.parameters(), 0.001)
    schedule = StepLR(optimizer, step_size) if step_size else None
    trainer = kind(
        model=net,
        args=args,
        train_dataset=data or rows(),
        callbacks=[Stopping(stop), *(callbacks or [])],
        optimizers=(optimizer, schedule) if schedule else (None, None),
        checkpoint=CheckpointConfig(checkpoint_dir=folder / "run", step_interval=1),
    )
    try:
        trainer.train()
    except Stop:
        assert stop is not None
    return net.seen, trainer


WHOLE: dict[int, list[int]] = {}


def whole(folder: Path, epochs: int = 2) -> list[int]:
    """Return the samples of a training that nobody stops, in their order."""
    if epochs not in WHOLE:
        WHOLE[epochs] = start(folder / "whole", num_train_epochs=epochs)[0]
    return WHOLE[epochs]


class Counting(TrainerCallback, ExportableState):
    """A callback with a state."""

    def __init__(self, count: int):
        self.count = count

    def state(self) -> dict[str, Any]:
        return {"args": {"count": 0}, "attributes": {"count": self.count}}


class OtherCounting(Counting):
    pass


class NewCounting(Counting):
    pass


# What the second start is given (the first one has the defaults above), and the lines of the block that tells of it.
CHANGES: list[tuple[dict[str, Any], list[str]]] = [
    (
        {
            "learning_rate": 0.5,
            "data_seed": 7,
            "num_train_epochs": 3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 3,
            "max_grad_norm": 0.5,
            "gradient_accumulation_steps": 2,
            "callbacks": [Counting(0)],
        },
        [
            "optimizer lr: 0.001 → 0.5. 0.001 is restored.",
            "data_seed, or seed: 42 → 7. The run's is restored, and with it the order",
            "num_train_epochs: 2 → 3. Training ends there, and a schedule",
            "lr_scheduler: 'linear' → 'cosine'. The new one continues at the run's step",
            "warmup_steps: 0 → 3. The schedule with this one",
            "max_grad_norm: 1.0 → 0.5. It counts from this step on.",
            "samples in a step: 4 → 8. The run continues behind the samples",
            "callbacks: [] → ['Counting']. States are restored by class",
        ],
    ),
    (
        {"max_steps": 9, "per_device_train_batch_size": 8, "seed": 7, "weight_decay": 0.1, "data": rows(32)},
        [
            "max_steps: -1 → 9. Training ends there, and a schedule",
            "optimizer weight_decay of param group 0: 0.0 → 0.1. 0.0 is restored.",
            "samples in a step: 4 → 8. The run continues behind the samples",
            "data_seed, or seed: 42 → 7. The run's is restored, and with it the order",
            "data: '24 samples (8d5ce86f)' → '32 samples (",
        ],
    ),
    (
        {"train_sampling_strategy": "sequential", "data": rows()[::-1]},
        [
            "sampler: 'SeedableRandomSampler' → 'SequentialSampler'. The epoch",
            "data: '24 samples (8d5ce86f)' → '24 samples (",
        ],
    ),
]


def lines(message: str) -> list[str]:
    return sorted(line.strip() for line in message.splitlines() if line.startswith("  "))


@pytest.mark.parametrize(("change", "says"), CHANGES, ids=["options", "sizes", "order"])
def test_what_differs_is_said(
    change: dict[str, Any], says: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each changed argument is one line of one warning: what it was, what it is, and what that does; and no other is.

    Started once more with what the second start had, the run says nothing of it; of a restored value it says it again.
    """
    first, _ = start(tmp_path, stop=2)
    again = [line for line in says if "is restored" in line]
    for stop, expected in ((4, says), (6, again)):
        with caplog.at_level(logging.WARNING, "ckpt_tasks"):
            seen, _ = start(tmp_path, stop=stop, **change)
        told = [line for message in caplog.messages for line in lines(message)]
        assert len(caplog.messages) == bool(expected)
        assert len(told) == len(expected), told
        assert all(one.startswith(other) for one, other in zip(told, sorted(expected), strict=True)), told
        caplog.clear()
        if stop == 4 and "data" not in change:
            assert first + seen == whole(tmp_path)[: len(first + seen)]


def test_sizes_that_never_train_are_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`auto_find_batch_size` tries sizes that do not fit: only what differs in the size that trains is told, once."""
    args = {"per_device_train_batch_size": 16, "auto_find_batch_size": True, "save_strategy": "no", "use_cpu": True}
    for epochs, differs in ((2, []), (2, []), (3, ["num_train_epochs: 2 → 3."])):
        caplog.clear()
        set_seed(1)
        options: Any = {**args, "num_train_epochs": epochs, "report_to": [], "disable_tqdm": True}
        trainer = CkptTrainer(
            model=Net(4),
            args=TrainingArguments(str(tmp_path / "out"), remove_unused_columns=False, **options),
            train_dataset=rows(),
            checkpoint=CheckpointConfig(checkpoint_dir=tmp_path / "run", step_interval=1),
        )
        with caplog.at_level(logging.WARNING, "ckpt_tasks"):
            trainer.train()
        told = [line for message in caplog.messages for line in message.splitlines() if " → " in line]
        assert [line.strip()[:24] for line in told if "was → is" not in line] == differs
        assert not said(caplog, "An earlier process")


def said(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [message for message in caplog.messages if text in message]


SIZES = [(8, 1, 2), (4, 2, 8), (5, 1, 3)]
MORE_SIZES = [(1, 4, 7), (7, 3, 10), (24, 1, 6)]


@pytest.mark.parametrize(
    ("batch", "accumulation", "step"), [*SIZES, *(pytest.param(*size, marks=pytest.mark.slow) for size in MORE_SIZES)]
)
def test_another_batch_size_goes_on_at_the_same_sample(
    batch: int, accumulation: int, step: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each sample of an epoch is trained once, whatever a step has; if a step does not fit, samples are named.

    Training ends with the last epoch: neither before, because the steps made so far were smaller, nor after it.
    """
    first, _ = start(tmp_path, stop=step)
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        second, trainer = start(tmp_path, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation)
    done = 4 * step % SAMPLES
    again = done % (batch * accumulation)
    assert first == whole(tmp_path)[: 4 * step]
    assert second == whole(tmp_path)[4 * step - again :]
    assert trainer.state.global_step == trainer.state.max_steps
    words = f"the samples {done - again} to {done - 1} of the epoch's order are trained twice"
    assert len(said(caplog, words)) == len(said(caplog, "twice")) == bool(again)
    assert len(said(caplog, "samples in a step: 4 → ")) == (batch * accumulation != 4)


def test_a_batch_size_that_is_found_goes_on_at_the_same_sample(tmp_path: Path) -> None:
    """`auto_find_batch_size` begins with eight in each start, and comes to three: each sample is trained once."""
    options: dict[str, Any] = {"auto_find_batch_size": True, "per_device_train_batch_size": 8, "most": 3}
    first, _ = start(tmp_path, stop=3, **options)
    second, trainer = start(tmp_path, **options)
    assert len(first) == 9
    assert first + second == whole(tmp_path)
    assert trainer.state.global_step == 16


def test_an_order_that_depends_on_the_batch_size_is_refused(tmp_path: Path) -> None:
    """Within an epoch that was ordered by batches another size is an error; where an epoch begins it is none."""
    options: dict[str, Any] = {
        "train_sampling_strategy": "group_by_length",
        "data": [{"number": number, "input_ids": [0] * (1 + number % 5)} for number in range(SAMPLES)],
    }
    start(tmp_path, stop=2, **options)
    with pytest.raises(ConfigError, match=r"LengthGroupedSampler makes another order with 8 .* Keep 4 in all"):
        start(tmp_path, per_device_train_batch_size=8, **options)
    start(tmp_path, stop=6, **options)
    second, _ = start(tmp_path, per_device_train_batch_size=8, **options)
    assert sorted(second) == [*range(SAMPLES)]


@pytest.mark.parametrize("first", [pytest.param({}, marks=pytest.mark.slow), {"max_steps": 8}], ids=str)
def test_a_run_that_has_ended_goes_on_with_more_epochs(
    first: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ended at its last epoch or in the middle of one, a run trains what is left of more epochs.

    Started again as it was, it trains nothing, and says so, with the step, the directory, and what to do.
    """
    seen, ended = start(tmp_path, **first)
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        assert start(tmp_path, **first)[0] == []
    (message,) = caplog.messages
    assert message.startswith(
        f"Nothing was left to train: the run in {tmp_path / 'run'} has ended at step {ended.state.global_step}."
    )
    assert "Another training (another fold or seed) needs a directory of its own" in message
    more, trainer = start(tmp_path, num_train_epochs=3)
    assert seen + more == whole(tmp_path, 3)
    assert trainer.state.global_step == 18


def test_a_schedule_of_the_users_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A schedule that is given to Trainer is restored as it was, and a setting that it has lost by that is said."""
    _, reference = start(tmp_path / "whole", step_size=4)
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        for stop in (3, 7):
            start(tmp_path, stop=stop, step_size=4)
        assert caplog.messages == []
        _, trainer = start(tmp_path, step_size=9)
    assert said(caplog, "\n  schedule step_size: 4 → 9. 4 is restored.\n") == caplog.messages
    assert trainer.lr_scheduler.get_last_lr() == reference.lr_scheduler.get_last_lr() != [0.001]
    assert torch.equal(trainer.model.layer.weight, reference.model.layer.weight)


def test_an_early_stop_stays_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that a callback has stopped trains nothing when it is started again, and says that it has stopped early."""

    class Early(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step >= 3

    start(tmp_path, callbacks=[Early()])
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        assert start(tmp_path)[0] == []
    assert said(caplog, "has stopped early at step 3")


def test_callbacks_are_matched_by_class(tmp_path: Path) -> None:
    """A callback that came or went does not take the state of another one; two of a class keep their order."""
    start(tmp_path, stop=2, callbacks=[Counting(1), OtherCounting(2), Counting(3)])
    now = [OtherCounting(0), NewCounting(0), Counting(0), Counting(0), Counting(0)]
    start(tmp_path, stop=3, callbacks=now)
    assert [one.count for one in now] == [2, 0, 1, 3, 0]


class ByNumPy(Sampler[int]):
    """A sampler of a user, with a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.permutation(SAMPLES).tolist())


SAMPLERS: dict[str, Callable[[], Sampler[int]]] = {
    "weighted, global": lambda: WeightedRandomSampler([1.0 + n for n in range(SAMPLES)], SAMPLES),
    "numpy": ByNumPy,
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_with_a_generator_goes_on(name: str, tmp_path: Path) -> None:
    """What a sampler draws its order from is state: its own generator, or the streams of the process.

    Stopped in each epoch and at the end of one, and ended and begun again with one more epoch, a run trains the samples
    of a run without a stop.
    """

    class Own(CkptTrainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return SAMPLERS[name]()

    options: dict[str, Any] = {"kind": Own, "lr_scheduler_type": "constant"}
    expected, reference = start(tmp_path / "whole", num_train_epochs=3, **options)
    assert expected[:SAMPLES] != expected[SAMPLES : 2 * SAMPLES]
    seen: list[int] = []
    for stop in (2, 6, None):
        seen += start(tmp_path / "stopped", stop=stop, **options)[0]
    more, trainer = start(tmp_path / "stopped", num_train_epochs=3, **options)
    assert seen + more == expected
    assert torch.equal(trainer.model.layer.weight, reference.model.layer.weight)
