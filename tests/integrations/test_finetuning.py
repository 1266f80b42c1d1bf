"""Fine-tuning with PEFT: what is stored of a frozen base, and what is exported of an adapter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments, set_seed

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.copying.export import write_export
from ckpt_tasks.copying.export_peft import plan_peft_export
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.integrations.huggingface import CkptTrainer
from ckpt_tasks.integrations.huggingface_adapters import AdapterConfigs

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")  # of PEFT and Transformers

HEADER_BYTES = 4096  # What a header is padded to: it shows only in the smallest files.
KINDS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=8, target_modules=["q_proj", "embed_tokens"]),
    "dora": lambda: peft.LoraConfig(r=8, target_modules=["q_proj"], use_dora=True, modules_to_save=["norm"]),
    "loha": lambda: peft.LoHaConfig(r=8, target_modules=["q_proj"]),
    "lokr": lambda: peft.LoKrConfig(r=8, target_modules=["q_proj"]),
    "ia3": lambda: peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


def base() -> Any:
    torch.manual_seed(5)
    heads: Any = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=256, **heads))


def scattered(model: Any) -> Any:
    """Give what trains other values, as training does."""
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p))
    return model


def saved(model: Any, place: Path, **more: Any) -> None:
    with Checkpointer(CheckpointConfig(checkpoint_dir=place, memory_dir=None)) as ckpt:
        ckpt.save(1, {"model": model, **more})


def export(place: Path, out: Path, **how: Any) -> Any:
    run = open_run(place)
    return write_export(run.history.store, plan_peft_export(run.history.store, run.find("latest"), out, **how))


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("kind", KINDS)
def test_from_pretrained_loads_an_exported_adapter(kind: str, tmp_path: Path) -> None:
    """An exported adapter has PEFT's names and configuration, its values bit for bit, and 1.2 x its size at most."""
    model = scattered(peft.get_peft_model(base(), KINDS[kind]()))
    saved(model, tmp_path / "run", adapters=AdapterConfigs(model))
    report = export(tmp_path / "run", tmp_path / "out")
    model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)

    name = "adapter_model.safetensors"
    assert equal(load_file(tmp_path / "out" / name), load_file(tmp_path / "theirs" / name))
    configs = [json.loads((tmp_path / one / "adapter_config.json").read_text()) for one in ("out", "theirs")]
    for config in configs:
        config["target_modules"].sort()  # a set, which PEFT does not sort
    assert configs[0] == configs[1]
    loaded = peft.PeftModel.from_pretrained(base(), str(tmp_path / "out"))
    assert equal(loaded.state_dict(), model.state_dict())
    assert all(key.startswith("model/") for key in report.left_out)
    assert (tmp_path / "out" / name).stat().st_size <= 1.2 * (tmp_path / "theirs" / name).stat().st_size + HEADER_BYTES


def test_an_adapter_that_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    """Without a configuration, or for a kind whose tensors lack the adapter's name, nothing is written."""
    model = peft.get_peft_model(base(), KINDS["lora"]())
    saved(model, tmp_path / "without")
    with pytest.raises(ConfigError, match=r"no configuration.*AdapterConfigs\(model\)"):
        export(tmp_path / "without", tmp_path / "out")
    tuned = peft.get_peft_model(base(), peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    saved(tuned, tmp_path / "tuned", adapters=AdapterConfigs(tuned))
    with pytest.raises(ConfigError, match=r"PROMPT_TUNING.*save_pretrained"):
        export(tmp_path / "tuned", tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Waiting(TrainerCallback):
    """Waits for each save, so that none replaces another."""

    def __init__(self, of: Any):
        self.of = of

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.of.ckpt.wait()


def trainer(model: Any, place: Path, steps: int) -> Any:
    set_seed(1)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (64, 8))]
    args = TrainingArguments(
        str(place / "out"), max_steps=steps, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
        per_device_train_batch_size=8,
    )  # fmt: skip
    config = CheckpointConfig(checkpoint_dir=place / "run", step_interval=1, max_num_checkpoints=None)
    own = CkptTrainer(model=model, args=args, train_dataset=rows, checkpoint=config)
    own.add_callback(Waiting(own))
    return own


def test_a_trainer_stores_a_frozen_base_once(tmp_path: Path) -> None:
    """Eight saves of CkptTrainer, with a resume between them, store the frozen base once; the run is exported."""
    model: Any = None
    for steps in (5, 8):
        model = peft.get_peft_model(base(), KINDS["dora"]())
        trainer(model, tmp_path, steps).train()
    run = open_run(tmp_path / "run")
    assert [one.step for one in run.checkpoints()] == [8, 7, 6, 5, 4, 3, 2, 1]
    files = [path for path in (tmp_path / "run").rglob("*.safetensors") if path.stat().st_size >= 1 << 20]
    assert len(files) == 1
    assert files[0].stat().st_size > sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    export(tmp_path / "run", tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(base(), str(tmp_path / "adapter"))
    assert equal(loaded.state_dict(), model.state_dict())
