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
from ckpt_tasks.checkpoint.transfer.export import write_export
from ckpt_tasks.checkpoint.transfer.export_peft import plan_peft_export
from ckpt_tasks.errors import ConfigError, StateError, StateMismatchError, UnsupportedStateError
from ckpt_tasks.integrations.huggingface import CkptTrainer
from ckpt_tasks.integrations.huggingface_adapters import AdapterConfigs, without_base
from tests.support.cli_runs import ckpt

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


def saved(place: Path, **state: Any) -> None:
    with Checkpointer(CheckpointConfig(checkpoint_dir=place, memory_dir=None)) as own:
        own.save(1, state)


def stored(place: Path) -> list[Path]:
    return [*place.rglob("*.safetensors")]


def export(place: Path, out: Path, **how: Any) -> Any:
    run = open_run(place)
    return write_export(run.history.store, plan_peft_export(run.history.store, run.find("latest"), out, **how))


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("kind", KINDS)
def test_from_pretrained_loads_an_exported_adapter(kind: str, tmp_path: Path) -> None:
    """`ckpt export RUN@STEP DIR --format peft`: PEFT's names and configuration, its values, 1.2 x its size at most."""
    model = scattered(peft.get_peft_model(base(), KINDS[kind]())).eval()
    saved(tmp_path / "run", model=model, adapters=AdapterConfigs(model))
    answer = ckpt("export", f"{tmp_path / 'run'}@1", tmp_path / "out", "--format", "peft", "--json")
    assert answer.status == 0, answer.err
    names = ["adapter_model.safetensors", "adapter_config.json"]
    assert [Path(file["path"]).name for file in answer.data["files"]] == names
    assert all(key.startswith("model/") for key in answer.data["left_out"])
    model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)

    ours, theirs = (tmp_path / one / names[0] for one in ("out", "theirs"))
    assert equal(load_file(ours), load_file(theirs))
    assert ours.stat().st_size <= 1.2 * theirs.stat().st_size + HEADER_BYTES
    configs = [json.loads((tmp_path / one / names[1]).read_text()) for one in ("out", "theirs")]
    for config in configs:
        config["target_modules"].sort()  # a set, which PEFT does not sort
    assert configs[0] == configs[1]
    loaded = peft.PeftModel.from_pretrained(base(), str(tmp_path / "out")).eval()
    assert equal(loaded.state_dict(), model.state_dict())
    ids = torch.arange(12)[None]
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)


def test_an_adapter_that_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    """Without a configuration, or for a kind whose tensors lack the adapter's name, nothing is written."""
    model = peft.get_peft_model(base(), KINDS["lora"]())
    saved(tmp_path / "without", model=model)
    with pytest.raises(ConfigError, match=r"no configuration.*AdapterConfigs\(model\)"):
        export(tmp_path / "without", tmp_path / "out")
    tuned = peft.get_peft_model(base(), peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    saved(tmp_path / "tuned", model=tuned, adapters=AdapterConfigs(tuned))
    with pytest.raises(ConfigError, match=r"PROMPT_TUNING.*save_pretrained"):
        export(tmp_path / "tuned", tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Waiting(TrainerCallback):
    """Waits for each save, so that none replaces another."""

    def __init__(self, of: Any):
        self.of = of

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.of.ckpt.wait()


def trainer(model: Any, place: Path, steps: int, **how: Any) -> Any:
    set_seed(1)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (64, 8))]
    args = TrainingArguments(
        str(place / "out"), max_steps=steps, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
        per_device_train_batch_size=8,
    )  # fmt: skip
    config = CheckpointConfig(checkpoint_dir=place / "run", step_interval=1, max_num_checkpoints=None)
    own = CkptTrainer(model=model, args=args, train_dataset=rows, checkpoint=config, **how)
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
    files = [path for path in stored(tmp_path / "run") if path.stat().st_size >= 1 << 20]
    assert len(files) == 1
    assert files[0].stat().st_size > sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    export(tmp_path / "run", tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(base(), str(tmp_path / "adapter"))
    assert equal(loaded.state_dict(), model.state_dict())


def test_a_base_that_is_named_is_not_stored(tmp_path: Path) -> None:
    """Of a model whose base is named only adapters are stored, under their names; a restore brings them back."""
    model = scattered(peft.get_peft_model(base(), KINDS["dora"]()))
    saved(tmp_path / "run", **without_base(model, "a/base@1"))
    run = open_run(tmp_path / "run")
    assert sum(path.stat().st_size for path in stored(tmp_path / "run")) < 1 << 17
    fresh = scattered(peft.get_peft_model(base(), KINDS["dora"]()))
    state = without_base(fresh, "elsewhere/base")
    run.restore(run.find("latest"), state)
    assert equal(fresh.state_dict(), model.state_dict())
    saved(tmp_path / "next", **state)  # The restore has not written the base.
    export(tmp_path / "run", tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(base(), str(tmp_path / "adapter"))
    assert equal(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize("bits", [4, 8])
def test_a_base_of_few_bits_is_named(bits: int, tmp_path: Path) -> None:
    """QLoRA goes on exactly with a base that is named; stored, one of 8 bits goes on as well, one of 4 is refused."""
    layers = pytest.importorskip("bitsandbytes").nn

    def trained(run: str, last: int, *, named: bool = True) -> list[torch.Tensor]:
        torch.manual_seed(1)
        first = layers.LinearNF4(64, 64) if bits == 4 else layers.Linear8bitLt(64, 64, has_fp16_weights=False)
        net = torch.nn.Sequential(first, torch.nn.ReLU(), torch.nn.Linear(64, 64)).to("cpu")
        model = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["0", "2"], lora_dropout=0.1))
        model(torch.ones(2, 64))
        adapters = [p for p in model.parameters() if p.requires_grad]
        state: dict[str, Any] = without_base(model, "a/base@1") if named else {"model": model}
        state["optimizer"] = torch.optim.AdamW(adapters, 0.01)
        with Checkpointer(CheckpointConfig(checkpoint_dir=tmp_path / run, memory_dir=None)) as own:
            for _ in range(own.restore(state), last):
                model(torch.randn(4, 64)).square().mean().backward()
                state["optimizer"].step()
                state["optimizer"].zero_grad()
            own.save(last, state)
        return [p.detach().clone() for p in adapters]

    whole = trained("whole", 6)
    assert all(map(torch.equal, whole, [trained("run", last) for last in (2, 4, 6)][-1]))
    if bits == 4:
        with pytest.raises(UnsupportedStateError, match=r"four bits.*without_base"):
            trained("stored", 1, named=False)
    else:
        assert all(map(torch.equal, whole, [trained("stored", last, named=False) for last in (2, 4, 6)][-1]))


LAYERS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "8bit": ("Linear8bitLt", {"has_fp16_weights": False}, None),
    "8bit of floats": ("Linear8bitLt", {"has_fp16_weights": True}, None),
    "stable embedding": ("StableEmbedding", {}, None),
    "embedding": ("Embedding", {}, None),
    **{kind: (kind, {}, "four bits.*without_base") for kind in ("Linear4bit", "LinearNF4", "LinearFP4")},
    **{
        kind: (kind, {}, "cannot be saved.*not implemented.*modules that train")
        for kind in ("Embedding8bit", "Embedding4bit", "EmbeddingNF4", "EmbeddingFP4")
    },
}


@pytest.mark.parametrize(("name", "how", "refusal"), LAYERS.values(), ids=LAYERS)
def test_each_layer_of_bitsandbytes_comes_back_or_is_refused(
    name: str, how: dict[str, Any], refusal: str | None, tmp_path: Path
) -> None:
    """A layer is restored, also into one that has computed and once more after it, or the first save refuses it."""
    layers = pytest.importorskip("bitsandbytes").nn
    given = torch.arange(4) if "Embedding" in name else torch.ones(2, 64)

    def made(seed: int, *, used: bool) -> Any:
        torch.manual_seed(seed)
        layer = getattr(layers, name)(64, 64, **how).to("cpu")
        if used:
            layer(given)
        return layer

    for used in (False, True):
        layer = made(1, used=used)
        if refusal:
            with pytest.raises(UnsupportedStateError, match=refusal):
                saved(tmp_path / f"refused-{used}", model=layer)
            assert stored(tmp_path) == []
            continue
        saved(tmp_path / f"run-{used}", model=layer)
        run = open_run(tmp_path / f"run-{used}")
        for into in (made(2, used=False), made(3, used=True)):
            for _ in range(2):
                run.restore(run.find("latest"), {"model": into})
                assert torch.equal(into(given), layer(given))


@pytest.mark.parametrize("trained", [False, True], ids=["in a loop", "by CkptTrainer"])
def test_another_base_is_refused(trained: bool, tmp_path: Path) -> None:
    """A restore onto another base raises before anything changes, and names the run's; so does a base that changes."""

    def made(change: float = 0.0) -> Any:
        model = peft.get_peft_model(base(), KINDS["lora"]())
        with torch.no_grad():
            model.base_model.model.lm_head.weight[0, 0] += change
        return model

    model = made(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if trained:
        trainer(made(), tmp_path, 1, base="a/base@1").train()
        with pytest.raises(StateMismatchError, match=r"b/base@2.*a/base@1"):
            trainer(model, tmp_path, 2, base="b/base@2").train()
        assert [one.step for one in open_run(tmp_path / "run").checkpoints()] == [1]
    else:
        saved(tmp_path / "run", **without_base(scattered(made()), "a/base@1"))
        config = CheckpointConfig(checkpoint_dir=tmp_path / "run", memory_dir=None)
        with Checkpointer(config) as own, pytest.raises(StateMismatchError, match=r"b/base@2.*a/base@1"):
            own.restore(without_base(model, "b/base@2"))
    assert max(path.stat().st_size for path in stored(tmp_path / "run")) < 1 << 18
    assert equal(before, model.state_dict())
    state = without_base(model, "b/base@2")
    with torch.no_grad():
        model.base_model.model.lm_head.weight[0, 0] += 1
    with pytest.raises(StateError, match="has changed"):
        saved(tmp_path / "changed", **state)
    with pytest.raises(ConfigError, match="no frozen base"):
        without_base(base(), "a/base@1")
