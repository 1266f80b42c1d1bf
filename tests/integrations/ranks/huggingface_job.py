"""Trainer and accelerate in several ranks, as jobs whose legs are killed; the last leg may have another number of them.

Recorded are the samples of each rank, and a digest of model and optimizer after each step and where a leg begins.
"""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableLoader
from ckpt_tasks.integrations.huggingface import CkptTrainer, state_of
from ckpt_tasks.integrations.huggingface_program import TrainerProgram
from tests.integrations.huggingface_job import scale
from tests.integrations.ranks.launching import IN_A_STEP, SAMPLES, digest, launched, refusing
from tests.support.legs import Leg


def base(dropout: float) -> LlamaForCausalLM:
    heads: Any = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    shape = LlamaConfig(vocab_size=97, hidden_size=12, intermediate_size=10, attention_dropout=dropout, **heads)
    return LlamaForCausalLM(shape)


def on_cpu() -> None:
    """Let accelerate shard: on a CPU it takes its FSDP plugin for nothing."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU


class Recording(TrainerCallback):
    def __init__(self, leg: Leg):
        self.leg = leg

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.leg.record("begin", state.global_step, "")
        self.held("begin state", state.global_step, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.leg.options.get("program") and ("train_loss" in logs or not state.global_step):
            return  # A flow stops before Trainer sums up, and evaluates a checkpoint in a fresh program.
        for name in logs.keys() & {"loss", "grad_norm", "learning_rate", "eval_loss", "train_loss"}:
            self.leg.record(name, state.global_step, float(logs[name]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.held("state", state.global_step, **kwargs)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.leg.within(state.global_step)

    def held(self, what: str, step: int, model: Any, optimizer: Any, **kwargs: Any) -> None:
        self.leg.record(what, step, digest(model, optimizer.optimizer))


class Sharded(CkptTrainer):
    leg: Leg
    of_step: int = -1
    taken: list[int]
    own_sums: Any = None

    def create_accelerator_and_postprocess(self) -> None:
        if self.args.fsdp:
            on_cpu()
        super().create_accelerator_and_postprocess()
        if self.args.fp16:
            scale(self.accelerator)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        step = self.state.global_step
        self.taken = [*(self.taken if self.of_step == step else []), *inputs["input_ids"][:, 0].tolist()]
        self.of_step = step
        if self.accelerator.sync_gradients:
            self.leg.record("samples", step, str(self.taken))
        loss = super().training_step(model, inputs, *args, **kwargs)
        if self.own_sums is not None:
            self.own_sums["loss"] += loss.item()
        return loss


def trainer_of(leg: Leg, size: int, **more: Any) -> Sharded:
    """Make the Trainer of a small Llama with random weights, for 3 epochs."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    options = leg.options
    transformers.set_seed(7)
    model: Any = base(0 if options.get("frozen") else 0.1)
    if options.get("adapter"):
        model = get_peft_model(model, LoraConfig(r=3, lora_dropout=0.2, target_modules=["q_proj", "v_proj"]))
    rows = [[n, *torch.randint(0, 97, (6,)).tolist()] for n in range(SAMPLES)]
    data = Dataset.from_dict({"input_ids": rows, "labels": rows}).with_format("torch")
    args = TrainingArguments(
        str(leg.folder / "out"),
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        eval_strategy="epoch",
        logging_steps=4,
        num_train_epochs=3,
        learning_rate=0 if options.get("frozen") else 0.01,
        per_device_train_batch_size=options.get("each") or IN_A_STEP // size // options.get("accumulates", 1),
        gradient_accumulation_steps=options.get("accumulates", 1),
        **(options.get("args", {}) if "RANK" in os.environ else {}),  # A process without ranks cannot shard.
    )
    trainer = Sharded(
        model=model,
        args=args,
        train_dataset=data,
        eval_dataset=data.select(range(12)),
        callbacks=[Recording(leg)],
        base=options.get("base"),
        **more,
    )
    trainer.leg = leg
    if options.get("sums"):
        trainer.own_sums = defaultdict(float)
    return trainer


def train(leg: Leg, size: int) -> None:
    """Train 3 epochs in a script."""
    with refusing(leg):
        config = CheckpointConfig(
            checkpoint_dir=leg.folder / "run",
            step_interval=1,
            memory_dir=leg.folder / "memory",
            on_non_finite="stop",
        )
        trainer = trainer_of(leg, size, checkpoint=config)
        leg.settle = trainer.ckpt.wait
        trainer.train()
        if not leg.options.get("program"):
            leg.end(trainer.state.global_step, [])


def loop(leg: Leg, size: int) -> None:
    """Train a loop of one's own with accelerate."""
    transformers.set_seed(7)
    plugin = None
    if leg.options.get("sharded"):
        on_cpu()
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    net = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Dropout(0.5), torch.nn.Linear(7, 1))
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    model, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
    numbered = torch.cat([torch.arange(float(SAMPLES))[:, None], torch.randn(SAMPLES, 3)], 1)
    loader = ResumableLoader(TensorDataset(numbered), batch_size=IN_A_STEP // size, shuffle=True)
    config = CheckpointConfig(checkpoint_dir=leg.folder / "run", step_interval=1, memory_dir=leg.folder / "memory")
    with Checkpointer(config) as ckpt:
        leg.settle = ckpt.wait
        state = {**state_of(accelerator), "data": loader}
        step = ckpt.restore(state)
        leg.record("begin", step, "")
        leg.record("begin state", step, digest(model, optimizer.optimizer))
        while loader.epoch < 3:
            for (x,) in loader:
                leg.record("samples", step, str(x[:, 0].int().tolist()))
                accelerator.backward(model(x / SAMPLES).square().mean())
                leg.within(step)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                step += 1
                leg.record("state", step, digest(model, optimizer.optimizer))
                ckpt.step(step, state)
    leg.end(step, [])


class Flow(Leg):
    """A leg in a rank of a flow: its last rank is killed once in the step `lost`, and with the flow at the moment."""

    is_killed = True

    def within(self, step: int) -> None:
        lost = self.folder / "lost"
        if self.is_killed and step == self.options.get("lost") and not lost.exists():
            lost.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().within(step)


def training() -> TrainerProgram:
    """Make the Trainer of a leg of `huggingface_program_job`, as a program."""
    rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    folder, log, *about, flow = json.loads(os.environ["LEG"])
    leg = Flow(Path(folder), Path(log), *about)
    leg.label = f" of rank {rank}" if rank else ""
    leg.settle = partial(os.kill, flow, signal.SIGKILL)
    leg.is_killed = rank == size - 1
    if not leg.is_killed:
        leg.spare()
    return TrainerProgram(trainer_of(leg, size))


def ranks(leg: Leg) -> None:
    """Train in ranks, by a Trainer or by a loop."""
    launched(leg, loop if leg.options.get("loop") else train)
