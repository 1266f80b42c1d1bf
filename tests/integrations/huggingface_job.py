"""A Hugging Face user's script, as a job whose legs are killed: what it trains is chosen by options."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from datasets import Dataset
from torch.utils.data import TensorDataset
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableLoader
from ckpt_tasks.integrations.huggingface import CkptTrainer, state_of
from tests.support.legs import Leg

SAMPLES = 46  # 12 batches of 4, the last one of 2


class Recording(TrainerCallback):
    """Records what is logged, and gets killed between the gradients and the optimizer."""

    def __init__(self, leg: Leg):
        self.leg = leg

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.leg.record("begin", state.global_step, "")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        for name, value in logs.items():
            if name in {"loss", "grad_norm", "learning_rate", "eval_loss", "train_loss"}:
                self.leg.record(name, state.global_step, float(value))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.leg.within(state.global_step)


def train(leg: Leg) -> None:
    """Train three epochs of a tiny GPT-2 with random weights."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
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
    callbacks = [Recording(leg), *([EarlyStoppingCallback(1, 0.02)] if options.get("early") else [])]
    trainer = CkptTrainer(
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
    leg.settle = trainer.ckpt.wait
    trainer.train()
    assert trainer.optimizer is not None
    held = [v for one in trainer.optimizer.state.values() for v in one.values()]
    leg.end(trainer.state.global_step, [*model.state_dict().values(), *held])


def loop(leg: Leg) -> None:
    """Train a loop of one's own with accelerate."""
    transformers.set_seed(7)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    loader = ResumableLoader(TensorDataset(torch.randn(SAMPLES, 4)), batch_size=4, shuffle=True)
    config = CheckpointConfig(checkpoint_dir=leg.folder / "run", step_interval=1, memory_dir=leg.folder / "memory")
    with Checkpointer(config) as ckpt:
        leg.settle = ckpt.wait
        state = {**state_of(accelerator), "data": loader}
        step = ckpt.restore(state)
        leg.record("begin", step, "")
        while loader.epoch < 3:
            for (x,) in loader:
                loss = model(x).square().mean()
                accelerator.backward(loss)
                leg.within(step)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                step += 1
                leg.record("loss", step, loss.item())
                ckpt.step(step, state, metrics={"loss": loss.item()})
    leg.end(step, [*model.state_dict().values()])
