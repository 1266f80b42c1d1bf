"""Hugging Face: a run that is started again with other arguments says what differs, and trains no sample in silence."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import ExportableState

from ckpt_tasks import CheckpointConfig
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
    **options: Any,
) -> tuple[list[int], Any]:
    """Train two epochs of 24 samples from the run in `folder`; return the samples of this start, and its trainer."""
    given = {"num_train_epochs": 2, "per_device_train_batch_size": 4, "learning_rate": 0.001, **options}
    args = TrainingArguments(
        str(folder / "out"), save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=1, **given
    )
    set_seed(args.seed)
    net = Net(most)
    trainer = kind(
        model=net,
        args=args,
        train_dataset=data or rows(),
        callbacks=[Stopping(stop), *(callbacks or [])],
        checkpoint=CheckpointConfig(checkpoint_dir=folder / "run", step_interval=1),
    )
    try:
        trainer.train()
    except Stop:
        assert stop is not None
    return net.seen, trainer


class Counting(TrainerCallback, ExportableState):
    """A callback with a state."""

    def __init__(self, count: int):
        self.count = count

    def state(self) -> dict[str, Any]:
        return {"args": {"count": 0}, "attributes": {"count": self.count}}


class OtherCounting(Counting):
    pass


# What the second start is given; what the block of lines says of it (the first one is begun with the defaults above).
CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"learning_rate": 0.5}, "optimizer lr: 0.001 → 0.5. 0.001 is restored."),
    ({"weight_decay": 0.1}, "optimizer weight_decay of param group 0: 0.0 → 0.1. 0.0 is restored."),
    ({"seed": 7}, "data_seed, or seed: 42 → 7. The run's is restored, and with it the order"),
    ({"data_seed": 7}, "data_seed, or seed: 42 → 7. The run's is restored, and with it the order"),
    ({"data": rows(32)}, "data: '24 samples (8d5ce86f)' → '32 samples ("),
    ({"data": rows()[::-1]}, "data: '24 samples (8d5ce86f)' → '24 samples ("),
    ({"num_train_epochs": 3}, "num_train_epochs: 2 → 3. Training ends there, and a schedule"),
    ({"max_steps": 9}, "max_steps: -1 → 9. Training ends there, and a schedule"),
    ({"lr_scheduler_type": "cosine"}, "lr_scheduler: 'linear' → 'cosine'. The new one goes on at the run's step"),
    ({"warmup_steps": 3}, "warmup_steps: 0 → 3. The schedule with this one"),
    ({"max_grad_norm": 0.5}, "max_grad_norm: 1.0 → 0.5. It counts from this step on."),
    ({"per_device_train_batch_size": 8}, "samples in a step: 4 → 8. The run goes on behind the samples"),
    ({"gradient_accumulation_steps": 2}, "samples in a step: 4 → 8. The run goes on behind the samples"),
    ({"train_sampling_strategy": "sequential"}, "sampler: 'SeedableRandomSampler' → 'SequentialSampler'. The epoch"),
    ({"callbacks": [Counting(0)]}, "callbacks: [] → ['Counting']. States are restored by class"),
]
QUICK = {0, 2, 5, 6, 8, 11}


@pytest.mark.parametrize(
    ("change", "says"),
    [pytest.param(*one, marks=[] if n in QUICK else [pytest.mark.slow]) for n, one in enumerate(CHANGES)],
    ids=[says.partition(":")[0] for _, says in CHANGES],
)
def test_what_differs_is_said(
    change: dict[str, Any], says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each changed argument is one line of one warning: what it was, what it is, and what that does; and no other is.

    Started once more with what the second start had, the run says nothing of it; of a restored value it says it again.
    """
    start(tmp_path, stop=2)
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        start(tmp_path, stop=4, **change)
        (block,) = caplog.messages
        lines = [line for line in block.splitlines() if line.startswith("  ")]
        assert len(lines) == 1
        assert lines[0].startswith(f"  {says}")
        caplog.clear()
        start(tmp_path, stop=6, **change)
    assert len(caplog.messages) == ("is restored" in says)
