"""A Hugging Face user's script, as a job whose legs are killed: what it trains is chosen by options."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from ckpt_tasks import CheckpointConfig
from ckpt_tasks.integrations.huggingface import CkptTrainer
from tests.support.legs import Leg

SAMPLES = 46  # 12 batches of 4, the last one of 2


class Recording(TrainerCallback):
    """Records what is logged, and gets killed between the gradients and the optimizer."""

    trainer: Any

    def __init__(self, leg: Leg):
        self.leg = leg

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.leg.record("begin", state.global_step, "")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        for name, value in logs.items():
            if name in {"loss", "grad_norm", "learning_rate", "eval_loss", "train_loss"}:
                self.leg.record(name, state.global_step, float(value))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.leg.within(state.global_step, self.trainer.ckpt.wait)


def train(leg: Leg) -> None:
    """Train three epochs of a tiny GPT-2 with random weights."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    options = leg.options
    transformers.set_seed(7)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    rows = Dataset.from_dict({"input_ids": torch.randint(0, 32, (SAMPLES, 8)).tolist()})
    rows = rows.map(lambda row: {"labels": row["input_ids"]}).with_format("torch")
    stream = rows.to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=8) if options.get("stream") else None
    args = TrainingArguments(
        str(leg.folder / "out"),
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        save_strategy=options.get("their_saves", "no"),
        logging_steps=options.get("logging", 1),
        num_train_epochs=3,
        max_steps=30 if stream else -1,
        per_device_train_batch_size=4,
        eval_strategy="epoch",
        **options.get("args", {}),
    )
    recording = Recording(leg)
    callbacks = [recording, *([EarlyStoppingCallback(1, 0.02)] if options.get("early") else [])]
    recording.trainer = trainer = CkptTrainer(
        model=model,
        args=args,
        train_dataset=stream or rows,
        eval_dataset=rows.select(range(8)),
        callbacks=callbacks,
        checkpoint=CheckpointConfig(
            checkpoint_dir=leg.folder / "run",
            step_interval=options.get("interval", 1),
            memory_dir=leg.folder / "memory",
        ),
    )
    trainer.train()
    held = [v for one in trainer.optimizer.state.values() for v in one.values()]
    leg.end(trainer.state.global_step, [*model.state_dict().values(), *held])
