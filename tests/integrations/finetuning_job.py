"""Fine-tuning as people do it, as a job whose legs are killed: the libraries and what they train are options."""

from __future__ import annotations

import ast
import inspect
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import bitsandbytes
import peft
import schedulefree
import tokenizers
import torch
import torchao.optim
import transformers
import trl
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from datasets import Dataset
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, TrainingArguments

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.integrations.huggingface import CkptMixin, CkptTrainer, state_of
from ckpt_tasks.integrations.huggingface_adapters import AdaLoraRanks, without_base
from tests.integrations.huggingface_job import scale
from tests.integrations.ranks.launching import launched
from tests.support.legs import Leg

LAST = 12  # steps of a training
QV: Any = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
ADAPTERS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=4, lora_dropout=0.2, **QV),
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, modules_to_save=["norm"], **QV),
    "ia3": lambda: peft.IA3Config(feedforward_modules=["v_proj"], **QV),
    "adalora": lambda: peft.AdaLoraConfig(
        init_r=4, target_r=2, total_step=LAST, tinit=1, tfinal=3, deltaT=2, beta1=0.9, beta2=0.9, **QV
    ),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    "two": lambda: peft.LoraConfig(r=4, init_lora_weights=False, **QV),
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda own: torch.optim.AdamW(own, 0.01),
    "schedulefree": lambda own: schedulefree.AdamWScheduleFree(own, 0.01, warmup_steps=4),
    "radam_schedulefree": lambda own: schedulefree.RAdamScheduleFree(own, 0.01),
    "sgd_schedulefree": lambda own: schedulefree.SGDScheduleFree(own, 0.1, warmup_steps=4),
    "bnb_adamw8bit": lambda own: bitsandbytes.optim.AdamW8bit(own, 0.01),
    "bnb_paged": lambda own: bitsandbytes.optim.PagedAdamW8bit(own, 0.01),
    "bnb_lion8bit": lambda own: bitsandbytes.optim.Lion8bit(own, 0.01),
    "ao_8bit": lambda own: torchao.optim.AdamW8bit(own, 0.01),
    "ao_4bit": lambda own: torchao.optim.AdamW4bit(own, 0.01),
    "ao_fp8": lambda own: torchao.optim.AdamWFp8(own, 0.01),
}


def lines() -> list[str]:
    """Return texts to train on: docstrings' neighbours, lines of Python's own library."""
    return [line.strip() for line in inspect.getsource(ast).splitlines() if len(line.strip()) > 8][:160]


def tokenizer() -> PreTrainedTokenizerFast:
    plain = tokenizers.ByteLevelBPETokenizer()
    plain.train_from_iterator(lines(), 400, special_tokens=["<pad>", "<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=plain._tokenizer, pad_token="<pad>", eos_token="<eos>")  # type: ignore[no-untyped-call]


def base() -> LlamaForCausalLM:
    """Make a Llama of 128 tensors' width: torchao keeps fewer than 4,096 numbers as they are."""
    transformers.set_seed(7)
    heads: Any = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    shape = LlamaConfig(vocab_size=400, hidden_size=64, intermediate_size=64, pad_token_id=0, eos_token_id=1, **heads)
    return LlamaForCausalLM(shape)


def adapted(kind: str | None) -> Any:
    model = base()
    if kind is None:
        return model
    config = ADAPTERS[kind]()
    own = peft.get_peft_model(model, config)
    if kind == "two":
        own.add_adapter("second", config)
    return own


def batches(begin: int) -> Iterator[torch.Tensor]:
    """Yield the batches from a step on, which are drawn from training's own stream."""
    for _ in range(begin, LAST):
        yield torch.randint(0, 400, (2, 12))


def config(leg: Leg) -> CheckpointConfig:
    return CheckpointConfig(
        checkpoint_dir=leg.folder / "run", memory_dir=leg.folder / "memory", step_interval=1, max_num_checkpoints=None
    )


def loop(leg: Leg) -> None:
    """Train in a plain loop: an adapter, or all weights, with any of the optimizers."""
    warnings.filterwarnings("ignore")
    kind, order = leg.options.get("adapter"), leg.options.get("order", "after")
    model = adapted(kind)
    trained = [p for name, p in model.named_parameters() if p.requires_grad or "lora" in name]
    optimizer = OPTIMIZERS[leg.options.get("optimizer", "adamw")](trained)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if kind == "adalora":
        state["ranks"] = AdaLoraRanks(model)
    if "base" in leg.options:
        state |= without_base(model, leg.options["base"])
    modes = hasattr(optimizer, "train")
    with Checkpointer(config(leg)) as ckpt:
        leg.settle = ckpt.wait
        if modes and order == "before":
            optimizer.train()
        step = ckpt.restore(state)
        if modes and order == "after":
            optimizer.train()
        leg.record("begin", step, "")
        for ids in batches(step):
            if kind == "two" and step == 4:
                model.set_adapter("second")
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            leg.within(step)
            optimizer.step()
            if kind == "adalora":
                model.base_model.update_and_allocate(step)
            optimizer.zero_grad()
            step += 1
            leg.record("loss", step, loss.item())
            if modes and step % 3 == 0:  # An evaluation, whose mode is that of the save in every other one.
                optimizer.eval()
                leg.record("average", step, float(sum(p.detach().double().sum() for p in trained)))
                if step % 6 or order == "before":
                    optimizer.train()
            ckpt.step(step, state)
            if modes:
                optimizer.train()
    leg.end(step, model.state_dict().values())
    if kind == "two":
        leg.record("active", step, str(model.active_adapters))


def accelerated(leg: Leg) -> None:
    """Train with all that an Accelerator prepares: a loader too, which shuffles, and gradients of two batches."""
    warnings.filterwarnings("ignore")
    transformers.set_seed(7)
    modes = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16" if leg.options.get("scaled") else "no",
        gradient_accumulation_steps=2,
        dataloader_config=modes,
    )
    if leg.options.get("scaled"):
        scale(accelerator)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    loader = DataLoader(TensorDataset(torch.randn(18, 4)), batch_size=4, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(net, optimizer, schedule, loader)
    with Checkpointer(config(leg)) as ckpt:
        leg.settle = ckpt.wait
        state = state_of(accelerator)
        step = ckpt.restore(state)
        leg.record("begin", step, "")
        while step < 4 * len(loader):
            for (x,) in loader:
                with accelerator.accumulate(model):
                    loss = model(x + random.random()).square().mean()
                    accelerator.backward(loss)
                    leg.within(step)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                step += 1
                leg.record("loss", step, loss.item())
                leg.record("rate", step, schedule.get_last_lr()[0])
                if accelerator.sync_gradients or accelerator.num_processes == 1:  # Before, ranks have unlike gradients.
                    ckpt.step(step, state)
    leg.end(step, model.state_dict().values())


class Recording(TrainerCallback):
    """Records what is logged, and gets killed between the gradients and the optimizer."""

    def __init__(self, leg: Leg):
        self.leg = leg

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.leg.record("begin", state.global_step, "")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        for name, value in logs.items():
            if "time" not in name and "runtime" not in name and "per_second" not in name and name != "train_loss":
                self.leg.record(name, state.global_step, float(value))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.leg.within(state.global_step)


class Sft(CkptMixin, trl.SFTTrainer):  # type: ignore[misc]
    """TRL's own class with a run."""


class Dpo(CkptMixin, trl.DPOTrainer):  # type: ignore[misc]
    """TRL's own class with a run."""


class Grpo(CkptMixin, trl.GRPOTrainer):  # type: ignore[misc]
    """TRL's own class with a run."""


def trainer(leg: Leg) -> None:
    """Train by one of the trainers, with or without an adapter."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    options = leg.options
    what, texts, kind = options["trainer"], lines(), options.get("adapter")
    args: dict[str, Any] = {
        "output_dir": str(leg.folder / "out"), "max_steps": LAST, "per_device_train_batch_size": 4, "use_cpu": True,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "learning_rate": 0.01, "logging_steps": 5,
        **({} if what == "trainer" else {"bf16": False}),
        **options.get("args", {}),
    }  # fmt: skip
    more: dict[str, Any] = {"callbacks": [Recording(leg)], "checkpoint": config(leg), "base": options.get("base")}
    if what != "trainer":
        more |= {"processing_class": tokenizer(), "peft_config": kind and ADAPTERS[kind]()}
    model = adapted(kind) if what == "trainer" else base()
    if what == "trainer":
        rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 400, (30, 12))]
        own: Any = CkptTrainer(model=model, args=TrainingArguments(**args), train_dataset=rows, **more)
    elif what == "sft":
        rows = Dataset.from_list([{"text": text} for text in texts])
        own = Sft(model, args=trl.SFTConfig(packing=True, max_length=24, **args), train_dataset=rows, **more)
    elif what == "dpo":
        rows = Dataset.from_list(
            [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in zip(*[iter(texts[:150])] * 3, strict=True)]
        )
        more |= {} if kind else {"ref_model": base()}
        own = Dpo(model, args=trl.DPOConfig(max_length=48, **args), train_dataset=rows, **more)
    else:
        rows = Dataset.from_list([{"prompt": text[:12]} for text in texts])
        args |= {"num_generations": 2, "max_completion_length": 6, **options["args"]}
        more["reward_funcs"] = lambda completions, **_: [float(len({*one})) for one in completions]
        own = Grpo(model, args=trl.GRPOConfig(**args), train_dataset=rows, **more)
    leg.settle = own.ckpt.wait
    own.train()
    held = [v for one in own.optimizer.state.values() for v in one.values()]
    leg.end(own.state.global_step, [*own.model.state_dict().values(), *held])


def ranks(leg: Leg) -> None:
    """Train in ranks: by a trainer, or with all that an Accelerator prepares."""
    launched(leg, lambda leg, size: trainer(leg) if "trainer" in leg.options else accelerated(leg))
