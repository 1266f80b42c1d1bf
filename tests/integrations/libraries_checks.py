"""What classes of other libraries keep outside of their state; each test skips where its library is not installed."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.errors import IntegrityError, StateMismatchError
from ckpt_tasks.format.tree import Typed
from ckpt_tasks.integrations.huggingface import CkptMixin, CkptTrainer, state_of
from ckpt_tasks.integrations.huggingface_adapters import AdaLoraRanks
from ckpt_tasks.state.tensors.value_kinds import build
from tests.golden.kinds import OF_TORCHAO, flattened, wrapped

ADAPTIVE = {"use_adaptive_entropy": True, "entropy_target": 5.0, "entropy_coef_delta": 0.1}


class Stop(Exception):  # noqa: N818 (no error)
    """Ends a training as a kill does."""


class Recording(TrainerCallback):
    def __init__(self, stop: int | None):
        self.stop = stop
        self.logs: list[Any] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.stop:
            raise Stop

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        kept = {name: value for name, value in logs.items() if "time" not in name and "per_second" not in name}
        self.logs.append((state.global_step, kept))


@pytest.fixture(autouse=True)
def _no_trainer_is_left() -> Iterator[None]:
    """A trainer of an earlier test, which only the collector frees, would be warned of."""
    yield
    gc.collect()


def trained(trainer: Any, recording: Recording) -> tuple[list[Any], list[torch.Tensor]]:
    """Train until the end or the stop; return what was logged, and the weights."""
    with suppress(Stop):
        trainer.train()
    return recording.logs, [p.detach() for p in trainer.model.parameters()]


def check_stops(train: Callable[..., tuple[list[Any], list[torch.Tensor]]], *stops: int) -> None:
    """A run that is stopped at these steps logs what a whole one logs, and ends with its weights."""
    logs, weights = train("whole")
    legs = [train("run", stop) for stop in (*stops, None)]
    # The last line is that of one call of train().
    assert [line for lines, _ in legs for line in lines][:-1] == logs[:-1]
    assert all(map(torch.equal, weights, legs[-1][1]))


def tokenizer() -> PreTrainedTokenizerFast:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: n for n, word in enumerate(["<pad>", "<eos>", *"abcdefgh"])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")  # type: ignore[no-untyped-call]


@pytest.mark.filterwarnings("ignore")  # of TRL
@pytest.mark.parametrize(
    "more",
    [{"steps_per_generation": 4}, ADAPTIVE],
)
def test_generations_that_are_used_again_are_state(more: dict[str, Any], tmp_path: Path) -> None:
    """TRL's GRPO, stopped while generations are reused, goes on with the same ones: losses and weights are equal.

    So does its adaptive entropy, which TRL keeps in a file of its own.
    """
    trl = pytest.importorskip("trl")

    class Grpo(CkptMixin, trl.GRPOTrainer):  # type: ignore[misc, name-defined]
        pass

    def train(run: str, stop: int | None = None) -> tuple[list[Any], list[torch.Tensor]]:
        set_seed(1)
        shape = GPT2Config(vocab_size=10, n_positions=32, n_embd=8, n_layer=1, n_head=1, bos_token_id=1, eos_token_id=1)
        options = {
            "per_device_train_batch_size": 2,
            "num_generations": 2,
            "logging_steps": 1,
            **more,
        }
        args = trl.GRPOConfig(
            str(tmp_path / "out"), max_steps=8, max_completion_length=4, save_strategy="no", report_to=[],
            disable_tqdm=True, use_cpu=True, bf16=False, learning_rate=0.01, **options,
        )  # fmt: skip
        recording = Recording(stop)
        trainer = Grpo(
            GPT2LMHeadModel(shape),
            args=args,
            reward_funcs=lambda completions, **_: [float(len(set(one.split()))) for one in completions],
            train_dataset=Dataset.from_list([{"prompt": f"{a} {b}"} for a in "abcd" for b in "efgh"]),
            processing_class=tokenizer(),
            callbacks=[recording],
            checkpoint=CheckpointConfig(checkpoint_dir=tmp_path / run, step_interval=1),
        )
        return trained(trainer, recording)

    check_stops(train, 1, 3, 6)


def adaptive() -> Any:
    """Return a small model whose ranks AdaLoRA takes away in 12 steps."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    ranks: Any = {"init_r": 4, "target_r": 2, "total_step": 12, "tinit": 1, "tfinal": 3, "deltaT": 2}
    config = peft.AdaLoraConfig(**ranks, beta1=0.9, beta2=0.9, target_modules=["0", "2"])
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    return peft.get_peft_model(net, config)


def adapted(place: Path, last: int, how: str = "") -> list[torch.Tensor]:
    """Train an AdaLoRA model in a loop; `how` says what puts its ranks into the state."""
    model = adaptive()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.05)
    if how == "state_of":
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        state = state_of(accelerator)
    else:
        state = {"model": model, "optimizer": optimizer, **({} if how == "without" else {"ranks": AdaLoraRanks(model)})}
    with Checkpointer(CheckpointConfig(checkpoint_dir=place, memory_dir=None)) as ckpt:
        for step in range(ckpt.restore(state) + 1, last + 1):
            x = torch.randn(16, 4)
            (model(x) - x.flip(1)).square().mean().backward()
            optimizer.step()
            model.base_model.update_and_allocate(step)
            optimizer.zero_grad()
        ckpt.save(last, state)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("how", ["", "state_of"])
def test_adalora_takes_the_same_ranks_away(tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str) -> None:
    """With its ranks in the state AdaLoRA goes on exactly, with accelerate too; without them a warning says so."""
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        whole = adapted(tmp_path / "whole", 12, how)
        legs = [adapted(tmp_path / "run", last, how) for last in (3, 5, 8, 10, 12)]
    assert all(map(torch.equal, whole, legs[-1]))
    assert caplog.messages == []
    adapted(tmp_path / "without", 3, "without")
    assert "'ranks': AdaLoraRanks(model)" in caplog.text


class Allocating(Recording):
    """Takes ranks away after each step, as PEFT's documentation has it."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.base_model.update_and_allocate(state.global_step + 1)


class Reversing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.adapted = adaptive()
        self.base_model = self.adapted.base_model

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.adapted(x) - x.flip(1)).square().mean()}


def test_adalora_in_a_trainer_takes_the_same_ranks_away(tmp_path: Path) -> None:
    """CkptTrainer has AdaLoRA's ranks in its state: weights and losses after three stops are those without one."""

    def train(run: str, stop: int | None = None) -> tuple[list[Any], list[torch.Tensor]]:
        set_seed(1)
        args = TrainingArguments(
            str(tmp_path / "out"), max_steps=12, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
            logging_steps=1, learning_rate=0.05, per_device_train_batch_size=4,
        )  # fmt: skip
        recording = Allocating(stop)
        trainer: Any = CkptTrainer(
            model=Reversing(),
            args=args,
            train_dataset=[{"x": row} for row in torch.randn(32, 4, generator=torch.Generator().manual_seed(3))],
            callbacks=[recording],
            checkpoint=CheckpointConfig(checkpoint_dir=tmp_path / run, step_interval=1),
        )
        return trained(trainer, recording)

    check_stops(train, 3, 6, 9)


@pytest.mark.parametrize("switch", ["disable", "scale"])
def test_an_adapter_that_training_disables_or_scales_stays_so(switch: str, tmp_path: Path) -> None:
    """A loop that disables PEFT's adapters from step 4 to 6, or scales them at step 4, goes on so, bit for bit."""
    peft = pytest.importorskip("peft")

    def train(run: str, last: int, back: int = 0) -> list[torch.Tensor]:
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
        model = peft.get_peft_model(net, config)
        net[2].requires_grad_(True)
        trains = [p for p in model.parameters() if p.requires_grad]
        state: dict[str, Any] = {"optimizer": torch.optim.AdamW(trains, 0.05), "model": model}
        config = CheckpointConfig(checkpoint_dir=tmp_path / run, memory_dir=None, max_num_checkpoints=None)
        with Checkpointer(config) as ckpt:
            for step in range(ckpt.restore(state) + 1, last + 1):
                if step == 4 and switch == "disable":
                    model.base_model.disable_adapter_layers()
                elif step == 4:
                    model.base_model.model[0].scale_layer(0.5)
                elif step == 6 and switch == "disable":
                    model.base_model.enable_adapter_layers()
                model(torch.randn(16, 4)).square().mean().backward()
                state["optimizer"].step()
                state["optimizer"].zero_grad()
                ckpt.save(step, state)
            if back:
                ckpt.restore(state, step=back)
            layer = model.base_model.model[0]
            assert (layer.disable_adapters, layer.scaling["default"]) == (
                (switch == "disable" and 4 <= (back or last) < 6),
                2 if switch == "scale" and (back or last) >= 4 else 4,
            )
        return [p.detach().clone() for p in model.parameters()]

    whole = train("whole", 8)
    legs = [train("run", last) for last in (3, 4, 5, 7, 8)]
    assert all(map(torch.equal, whole, legs[-1]))
    train("whole", 8, back=2)


def test_an_adapter_that_training_chooses_stays_chosen(tmp_path: Path) -> None:
    """A loop that calls PEFT's set_adapter at one step goes on with that adapter after a resume, bit for bit."""
    peft = pytest.importorskip("peft")

    def train(run: str, last: int) -> tuple[list[torch.Tensor], Any]:
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
        model = peft.get_peft_model(net, config, adapter_name="first")
        model.add_adapter("second", config)
        adapters = [p for name, p in model.named_parameters() if "lora" in name]
        state: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(adapters, 0.05)}
        with Checkpointer(CheckpointConfig(checkpoint_dir=tmp_path / run, memory_dir=None)) as ckpt:
            for step in range(ckpt.restore(state) + 1, last + 1):
                if step == 4:
                    model.set_adapter("second")
                model(torch.randn(16, 4)).square().mean().backward()
                state["optimizer"].step()
                state["optimizer"].zero_grad()
            ckpt.save(last, state)
        return [p.detach().clone() for p in model.parameters()], (model.active_adapter, model.active_adapters)

    whole, chosen = train("whole", 8)
    legs = [train("run", last) for last in (3, 5, 6, 8)]
    assert [one for _, one in legs] == [("first", ["first"]), chosen, chosen, ("second", ["second"])]
    assert all(map(torch.equal, whole, legs[-1][0]))


@pytest.mark.parametrize("bits", OF_TORCHAO)
def test_a_tensor_that_is_made_of_others_comes_back_as_it_was(bits: str, tmp_path: Path) -> None:
    """P9: codes, scales, maps and what else torchao's tensors of few bits hold; none is stored twice or decoded."""
    pytest.importorskip("torchao")
    value = wrapped(bits, 1)
    with Checkpointer(CheckpointConfig(checkpoint_dir=tmp_path / "run", memory_dir=None)) as ckpt:
        ckpt.save(1, {"it": [value]})
    with Checkpointer(CheckpointConfig(checkpoint_dir=tmp_path / "run", memory_dir=None)) as ckpt:
        state: dict[str, Any] = {"it": [wrapped(bits, -1)]}
        ckpt.restore(state)
    assert flattened(state["it"][0]) == flattened(value)


def test_bytes_cannot_name_another_class_of_tensors() -> None:
    """Only the classes of the table are looked for, and only in modules that the program has imported."""
    pytest.importorskip("torchao")
    codes = wrapped("8bit", 1).codes
    for name in ("torch:Tensor", "os:system", "torchao.optim.subclass_8bit:OptimState4bit"):
        with pytest.raises(IntegrityError, match="no class of such tensors"):
            build(Typed("~wrapper", (name,), {}), {"codes": codes, "": []}, None)
    path = "torchao.optim.subclass_8bit:OptimState8bit"
    parts = {"codes": codes.float(), "scale": torch.ones(4), "qmap": torch.ones(256), "": [True, torch.float32]}
    with pytest.raises(IntegrityError):  # other dtypes than its own
        build(Typed("~wrapper", (path,), {}), parts, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "torchao.optim.subclass_8bit")
        with pytest.raises(StateMismatchError, match="has not imported"):
            build(Typed("~wrapper", (path,), {}), {"": []}, None)
