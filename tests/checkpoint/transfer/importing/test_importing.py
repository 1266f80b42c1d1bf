"""Import: what others wrote, as a checkpoint that a restore takes bit for bit; and what is not guessed."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from ckpt_tasks import Checkpointer, open_run
from ckpt_tasks.checkpoint.importing import ImportedRun
from ckpt_tasks.checkpoint.transfer.importing.plan import ImportPlan, plan_import
from ckpt_tasks.errors import ConfigError, IntegrityError, StateError, StateMismatchError
from tests.support.cli_runs import config, save
from tests.support.exports import equal, export


def imported(source: Path, run_dir: Path, **how: Any) -> ImportPlan:
    plan = plan_import(source, **how)
    ImportedRun(config(run_dir, memory_dir=None)).add(plan)
    return plan


def restored(run_dir: Path, state: dict[str, Any], **how: Any) -> dict[str, Any]:
    """Restore the newest checkpoint strictly, as a training does."""
    with Checkpointer(config(run_dir, memory_dir=None)) as ckpt:
        ckpt.restore(state, **how)
    return state


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def trained() -> dict[str, Any]:
    """Train a little net with everything that a loop has."""
    torch.manual_seed(3)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    state["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(5):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        state["scheduler"].step()
    return state


def fresh() -> dict[str, Any]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


def dicts(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.state_dict() for name, value in state.items()}


def test_a_loops_file_restores_strictly(tmp_path: Path, run_dir: Path) -> None:
    """A file as the tutorials write it: model, optimizer, schedule and values are restored bit for bit."""
    state = trained()
    named = {f"{name}_state_dict": value.state_dict() for name, value in state.items()}
    torch.save({**named, "epoch": 3, "global_step": 12, "args": {"lr": 0.01}}, tmp_path / "a.pt")
    plan = imported(tmp_path / "a.pt", run_dir)
    assert (plan.step, dict(plan.left)) == (12, {})
    assert [one.group for one in plan.taken] == ["model", "optimizer", "scheduler", "epoch", "global_step", "args"]
    target = restored(run_dir, {**fresh(), "epoch": 0, "global_step": 0, "args": {"lr": 0.0}})
    assert equal(dicts({name: target[name] for name in state}), dicts(state))
    assert (target["epoch"], target["args"]) == (3, {"lr": 0.01})
    checkpoint = open_run(str(run_dir)).find("latest")
    assert checkpoint.step == 12


@pytest.mark.parametrize("prefix", ["", "module._orig_mod."])
def test_weights_alone_become_one_group(tmp_path: Path, run_dir: Path, prefix: str) -> None:
    """A state_dict, wrapped or not, is the group model, or the one that is asked for; only= and missing= take it."""
    model = net()
    torch.save(OrderedDict((prefix + name, value) for name, value in model.state_dict().items()), tmp_path / "w.pt")
    imported(tmp_path / "w.pt", run_dir, groups=["encoder"], step=7)
    target = restored(run_dir, {"encoder": net()})
    assert equal(dicts(target), {"encoder": dict(model.state_dict())})
    other = restored(run_dir, {"net": net(), "head": nn.Linear(2, 2)}, only={"net": "encoder"}, missing="keep")
    assert equal(other["net"].state_dict(), model.state_dict())


def every_dtype() -> dict[str, torch.Tensor]:
    kinds = ["float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int64", "bool"]
    found = {f"of_{kind}": torch.arange(-3, 5).to(getattr(torch, kind)) for kind in kinds}
    found |= {f"complex{bits}": torch.randn(3, dtype=getattr(torch, f"complex{bits}")) for bits in (64, 128)}
    found |= {"nan": torch.tensor([float("nan"), -0.0]), "scalar": torch.tensor(7), "empty": torch.ones(0, 4)}
    return found | {"sliced": torch.arange(12.0).reshape(3, 4)[:, 1:3], "turned": torch.arange(6.0).reshape(2, 3).T}


def test_every_dtype_and_layout(tmp_path: Path, run_dir: Path) -> None:
    """P49: bits, dtypes and shapes of what torch.save wrote are those of the checkpoint; a tie stays one."""
    tensors = every_dtype()
    tensors["again"] = tensors["of_float64"]
    torch.save(tensors, tmp_path / "a.pt")
    plan = imported(tmp_path / "a.pt", run_dir)
    assert plan.taken[0].tensors == len(tensors) - 1
    target = {name: torch.empty_like(value) for name, value in tensors.items()}
    holder = nn.Module()
    for name, value in target.items():
        holder.register_buffer(name, value)
    torch.manual_seed(5)
    restored(run_dir, {"model": holder})
    assert equal(target, tensors)
    drawn = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(3)), "no file has all streams: they are those of seed 0"


def test_safetensors_files_and_our_exports(tmp_path: Path, run_dir: Path) -> None:
    """What safetensors, save_model and `ckpt export` write comes back, with ties and dtypes that were views."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("phase", torch.randn(3, dtype=torch.complex128))

    model = Tied()
    run = save(tmp_path / "own", {"model": model})
    export(run, tmp_path / "one.safetensors")
    export(run, tmp_path / "many", max_shard_bytes=100)
    for source in ("one.safetensors", "many"):
        imported(tmp_path / source, tmp_path / f"run-{source}")
        target = restored(tmp_path / f"run-{source}", {"model": Tied()})
        assert equal(dicts(target)["model"], model.state_dict())
    simple = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    simple[1].weight = simple[0].weight
    save_model(simple, str(tmp_path / "simple.safetensors"))
    imported(tmp_path / "simple.safetensors", run_dir)
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    other[1].weight = other[0].weight
    restored(run_dir, {"model": other})
    assert equal(other.state_dict(), simple.state_dict())


class Tied(nn.Module):
    """Its file has one name for its two weights, as save_pretrained writes it."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_a_file_with_one_name_of_tied_weights(tmp_path: Path, run_dir: Path) -> None:
    """A restore takes the one stored name for every name of tied weights, and reports all of the model as taken.

    Weights of their own are not guessed from a file that lacks them, nor is a tied name taken that is left.
    """
    model = Tied()
    save_file({"embed.weight": model.embed.weight.detach()}, tmp_path / "model.safetensors")
    imported(tmp_path / "model.safetensors", run_dir)
    with Checkpointer(config(run_dir, memory_dir=None)) as ckpt:
        for how in ({}, {"only": ["model"], "missing": "keep"}):
            target = Tied()
            ckpt.restore({"model": target}, **how)  # type: ignore[arg-type]
            assert ckpt.last_restore is not None
            assert not how or ckpt.last_restore.taken == ("model",)
            assert not ckpt.last_restore.new
            assert torch.equal(target.head.weight, model.embed.weight)
            assert target.head.weight is target.embed.weight
        with pytest.raises(StateMismatchError, match=r"not in the checkpoint: model/head\.weight"):
            ckpt.restore({"model": Tied(tied=False)})
        ckpt.restore({"model": Tied()}, leave=["model/head"])
        assert ckpt.last_restore is not None
        assert ckpt.last_restore.new == ("model/head.weight",)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_directory_with_an_index(tmp_path: Path, run_dir: Path, suffix: str) -> None:
    """A directory as save_pretrained writes it, one of links into a cache, too; other states in it are listed."""
    model, directory, cache = net(), tmp_path / "hub", tmp_path / "blobs"
    directory.mkdir()
    cache.mkdir()
    weight_map = {}
    for n, (name, value) in enumerate(model.state_dict().items()):
        file = f"model-{n}.{suffix}"
        (save_file if suffix == "safetensors" else torch.save)({name: value}, cache / file)
        (directory / file).symlink_to(cache / file)
        weight_map[name] = file
    stem = "model.safetensors" if suffix == "safetensors" else "pytorch_model.bin"
    (directory / f"{stem}.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    (directory / "config.json").write_text("{}")
    torch.save({}, directory / "optimizer.pt")
    plan = imported(directory, run_dir)
    assert [*plan.left] == ["optimizer.pt"]
    assert equal(dicts(restored(run_dir, {"model": net()}))["model"], model.state_dict())


@pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")  # Lightning, of torch
@pytest.mark.framework
def test_a_lightning_checkpoint(tmp_path: Path, run_dir: Path) -> None:
    """What Lightning's Trainer saves: weights, optimizer and schedule by name, and its own state is listed as left."""
    from lightning.pytorch import LightningModule, Trainer  # seconds of imports

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch).sum()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    module = Module()
    data: Any = torch.randn(8, 3)
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(max_epochs=2, accelerator="cpu", default_root_dir=tmp_path, **quiet)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    plan = imported(tmp_path / "last.ckpt", run_dir)
    assert (plan.source.kind, plan.step) == ("Lightning checkpoint", 4)
    assert {"loops", "callbacks"} <= plan.left.keys()
    other = Module()
    optimizer = torch.optim.AdamW(other.parameters())
    state: dict[str, Any] = {"model": other, "optimizer": optimizer, "epoch": 0}
    state["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    restored(run_dir, state)
    assert equal(other.state_dict(), module.state_dict())
    assert equal(optimizer.state_dict(), trainer.optimizers[0].state_dict())
    assert state["scheduler"].last_epoch == 2


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def test_a_frozen_part_and_a_buffer_are_told_apart(tmp_path: Path, run_dir: Path) -> None:
    """Only the order of the shapes says which parameters an optimizer has: where it fits in one way, it is taken."""
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    torch.save(stepped(model, optimizer), tmp_path / "a.pt")
    plan = plan_import(tmp_path / "a.pt")
    assert "more than one way" in plan.left["optimizer"]  # 0.bias has the shape of 1.weight and 1.bias
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    torch.save(stepped(model, optimizer), tmp_path / "b.pt")
    imported(tmp_path / "b.pt", run_dir)
    other = nn.Sequential(nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 2))
    own = torch.optim.AdamW(other[1:].parameters())
    restored(run_dir, {"model": other, "optimizer": own})
    assert equal(own.state_dict()["state"], optimizer.state_dict()["state"])


def test_an_optimizer_that_names_its_parameters(tmp_path: Path, run_dir: Path) -> None:
    """Two param groups with names, in another order than the model's, reach their parameters by name."""
    model = net()
    groups: list[dict[str, Any]] = [
        {"params": [*model[2].named_parameters(prefix="2")], "lr": 0.5},
        {"params": [*model[0].named_parameters("0")]},
    ]
    optimizer = torch.optim.AdamW(groups)
    torch.save(stepped(model, optimizer), tmp_path / "a.pt")
    plan = imported(tmp_path / "a.pt", run_dir)
    assert dict(plan.left) == {}
    other = net()
    own = torch.optim.AdamW([{"params": [*other[2].parameters()]}, {"params": [*other[0].parameters()]}])
    restored(run_dir, {"model": other, "optimizer": own})
    here, there = (dict(one.named_parameters()) for one in (model, other))
    for name in ("2.weight", "0.bias"):
        assert equal(optimizer.state[here[name]], own.state[there[name]])
    assert own.param_groups[0]["lr"] == 0.5


def test_what_cannot_be_stored_is_listed(tmp_path: Path, run_dir: Path) -> None:
    """A sparse tensor, a stray value among the weights and odd names are listed; the rest is taken."""
    weights = {**net().state_dict(), "sparse": torch.eye(3).to_sparse(), "version": 3}
    torch.save({"model": weights, "a b": 1, 7: 2, "blob": bytearray(3), "rng": torch.ones(2)}, tmp_path / "a.pt")
    plan = imported(tmp_path / "a.pt", run_dir)
    assert {name: why.partition(" cannot")[0] for name, why in plan.left.items()} == {
        "7": "no group can have this name",
        "model/sparse": "a tensor of layout torch.sparse_coo",
        "model/version": "it is not a tensor",
    }
    assert [one.group for one in plan.taken] == ["model", "a_b", "blob", "rng_state"]


def test_groups_are_chosen(tmp_path: Path, run_dir: Path) -> None:
    """GROUP=NAME takes one object under another name; the rest is listed; a wrong name says what there is."""
    state = trained()
    torch.save(
        {"net": state["model"].state_dict(), "opt": state["optimizer"].state_dict(), "epoch": 3}, tmp_path / "a.pt"
    )
    plan = imported(tmp_path / "a.pt", run_dir, groups=["model=net", "optimizer=opt"])
    assert dict(plan.left) == {"epoch": "it was not asked for"}
    target = fresh()
    restored(run_dir, {"model": target["model"], "optimizer": target["optimizer"]})
    assert equal(target["optimizer"].state_dict(), state["optimizer"].state_dict())
    for wrong in (["model"], ["model=nett"], ["no good=net"], ["model=net", "model=opt"], ["rng=net"]):
        with pytest.raises(ConfigError):
            plan_import(tmp_path / "a.pt", groups=wrong)


def test_several_files_are_one_history(tmp_path: Path, run_dir: Path) -> None:
    """Files of rising steps follow each other in a run; once it is trained, nothing is imported into it."""
    torch.save(net().state_dict(), tmp_path / "a.pt")
    for step in (1, 5):
        imported(tmp_path / "a.pt", run_dir, step=step)
    five, one = open_run(str(run_dir)).checkpoints()
    assert (five.step, one.step, five.parent) == (5, 1, one.manifest_digest)
    for step in (5, 3):
        with pytest.raises(ConfigError, match="step 5"):
            imported(tmp_path / "a.pt", run_dir, step=step)
    with Checkpointer(config(run_dir, memory_dir=None)) as ckpt:
        state = {"model": net()}
        ckpt.restore(state)
        ckpt.save(9, state)
    with pytest.raises(StateError, match="trained"):
        imported(tmp_path / "a.pt", run_dir, step=20)
    assert [one.step for one in open_run(str(run_dir)).checkpoints()] == [9, 5, 1]


def test_a_file_that_changes_meanwhile(tmp_path: Path, run_dir: Path) -> None:
    """P49: bytes that are not those that were digested are seen when they are read back; nothing is committed."""
    source = tmp_path / "a.safetensors"
    save_file({"weight": torch.zeros(1000)}, source)
    plan = plan_import(source)

    def change(_: int) -> None:
        with source.open("r+b") as file:
            file.seek(-4, 2)
            file.write(b"\1\2\3\4")

    with pytest.raises(IntegrityError, match=r"another process write a\.safetensors"):
        ImportedRun(config(run_dir, memory_dir=None)).add(plan, change)
    assert open_run(str(run_dir)).checkpoints() == []
    assert [*run_dir.glob("checkpoint_*/*/*")] == []
    imported(source, run_dir)
