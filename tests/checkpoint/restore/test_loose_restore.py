"""A loose restore: what it takes, what it leaves, what it says about that, and what it never does silently."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks import Checkpointer, open_run
from ckpt_tasks.errors import ConfigError, IntegrityError, StateMismatchError
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.testing import FaultyStore, located
from tests.support.cli_runs import config, flip, only

State = dict[str, Any]


class OwnCode(torch.nn.Linear):
    """A module whose own code takes part in a restore."""

    loaded = 0

    def load_state_dict(self, *args: Any, **more: Any) -> Any:
        type(self).loaded += 1
        return super().load_state_dict(*args, **more)


def make(
    width: int = 4, *, adapter: bool = False, seed: int = 1, kind: type[torch.nn.Linear] = torch.nn.Linear
) -> State:
    """Return a model of an encoder and a head, its optimizer with moments, and a count."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential()
    model.add_module("encoder", kind(8, 8))
    model.add_module("head", torch.nn.Linear(8, width))
    if adapter:
        model.add_module("adapter", torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "seen": seed}


def bits(state: State) -> dict[str, Any]:
    """Return copies of every value of a state by name."""
    found = {f"model/{name}": value.clone() for name, value in state["model"].state_dict().items()}
    names = [name for name, _ in state["model"].named_parameters()] if "optimizer" in state else []
    for name, parameter in zip(names, state["model"].parameters(), strict=False):
        found[f"optimizer/model/{name}"] = state["optimizer"].state[parameter]["exp_avg"].clone()
    return found | ({"seen": torch.tensor(state["seen"])} if "seen" in state else {})


def same(a: dict[str, Any], b: dict[str, Any], *names: str) -> None:
    wanted = [name for name in a if not names or name.startswith(names)]
    assert wanted
    assert [name for name in wanted if not torch.equal(a[name], b[name])] == []


@pytest.fixture
def saved(run_dir: Path) -> State:
    state = make(seed=3)
    with Checkpointer(config(run_dir, memory_dir=None)) as ckpt:
        ckpt.save(5, state)
    return bits(state)


def restore(run_dir: Path, state: State, **how: Any) -> tuple[tuple[str, ...], ...]:
    run = open_run(run_dir)
    report = run.restore(run.find("latest"), state, **how)
    return report.taken, report.left, report.new


def test_a_new_layer_keeps_its_values(run_dir: Path, saved: State) -> None:
    """P50: with missing="keep" a layer that the checkpoint lacks, and its moments, stay; all else is restored."""
    state = make(adapter=True)
    before = bits(state)
    with pytest.raises(StateMismatchError, match=r"restore\(state, only=\[…\], missing='keep'\)"):
        restore(run_dir, state)  # strict is the default
    taken, left, new = restore(run_dir, state, missing="keep")
    assert left == ()
    assert new == tuple(
        f"{group}/adapter.{name}" for group in ("model", "optimizer/model") for name in ("weight", "bias")
    )
    assert "seen" in taken
    after = bits(state)
    same(saved, after)
    same(before, after, "model/adapter", "optimizer/model/adapter")


def test_a_part_is_taken_by_name(run_dir: Path, saved: State) -> None:
    """Only what `only` names changes: a group, or keys of it; the random streams stay as well."""
    state = make()
    before, streams = bits(state), torch.get_rng_state()
    assert restore(run_dir, state, only=["model/encoder"]) == (
        ("model/encoder.weight", "model/encoder.bias"),
        ("model/head.weight", "model/head.bias", "optimizer", "seen", "rng"),
        ("model/head.weight", "model/head.bias", "optimizer", "seen"),
    )
    after = bits(state)
    same(saved, after, "model/encoder")
    same(before, after, "model/head", "optimizer", "seen")
    assert torch.equal(streams, torch.get_rng_state())


def test_parts_are_taken_under_other_names(run_dir: Path, saved: State) -> None:
    """A mapping takes a group, or the keys below a prefix, for what has another name here."""
    whole = {"net": make()["model"]}
    assert restore(run_dir, whole, only={"net": "model"})[0] == ("net",)
    same({name: value for name, value in saved.items() if name.startswith("model/")}, bits({"model": whole["net"]}))
    for how in ({"backbone": "model/encoder"}, {"backbone/": "model/encoder."}):
        inner = {"backbone": make()["model"].encoder}
        assert restore(run_dir, inner, only=how)[0] == ("backbone",)
        assert torch.equal(inner["backbone"].weight, saved["model/encoder.weight"])


def test_a_width_that_changed_is_an_error_until_it_is_left_out(run_dir: Path, saved: State) -> None:
    """P50: another shape is never taken and never passed over; named in `leave` it is, with its moments."""
    state = make(width=6)
    before = bits(state)
    with pytest.raises(StateMismatchError) as caught:
        restore(run_dir, state, missing="keep")
    assert "model/head.weight (float32[6, 8] here, float32[4, 8] in the checkpoint)" in caught.value.different
    assert "leave=" in str(caught.value)
    same(before, bits(state))
    _, left, new = restore(run_dir, state, leave=["model/head"])
    heads = ("model/head.weight", "model/head.bias", "optimizer/model/head.weight", "optimizer/model/head.bias")
    assert left == new == heads
    same(saved, bits(state), "model/encoder", "optimizer/model/encoder", "seen")
    same(before, bits(state), "model/head", "optimizer/model/head")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"only": ["modle"]}, "only names 'modle', and there is nothing of that name in the state"),
        ({"only": {"model": "net"}}, "only names 'net', and there is nothing of that name in the checkpoint"),
        ({"leave": ["model/haed"]}, "There are encoder.weight, encoder.bias, head.weight, head.bias."),
        ({"leave": ["model/enc"]}, "leave names 'model/enc'"),  # half a name
        ({"only": "model"}, "Write only=['model']"),
        ({"missing": "ignore"}, "missing must be 'error' or 'keep', not 'ignore'"),
        ({"only": [3]}, "3 is not the name of a group or a key"),
    ],
)
def test_a_name_that_stands_for_nothing_is_an_error(run_dir: Path, saved: State, how: State, said: str) -> None:
    """A misspelled name takes nothing silently: it is an error that lists what there is."""
    state = make()
    before = bits(state)
    with pytest.raises(ConfigError) as caught:
        restore(run_dir, state, **how)
    assert said in str(caught.value)
    same(before, bits(state))


def test_nothing_at_all_is_no_restore(run_dir: Path, saved: State) -> None:
    """A state of which the checkpoint has nothing is an error, whatever may be missing."""
    with pytest.raises(StateMismatchError, match="not in the checkpoint: net; only in the checkpoint: model"):
        restore(run_dir, {"net": make()["model"]}, missing="keep")
    other = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(StateMismatchError, match="none of its keys is in the checkpoint"):
        restore(run_dir, {"model": other, "seen": 0}, missing="keep")


def test_all_or_nothing(run_dir: Path, saved: State) -> None:
    """P49: a bit that flipped in what is taken leaves the state as it was; one in what is left does no harm."""
    flip(only(run_dir, "checkpoint_*/*/optimizer-*.safetensors"), -1)
    state = make(adapter=True)
    before = bits(state)
    with pytest.raises(IntegrityError):
        restore(run_dir, state, missing="keep")
    same(before, bits(state))
    restore(run_dir, state, only=["model"], missing="keep")
    same(saved, bits(state), "model/")


def test_a_modules_own_code_sees_a_whole_state(run_dir: Path) -> None:
    """A module with a load_state_dict of its own gets its kept values with the stored ones."""
    state = make(seed=3, kind=OwnCode)
    with Checkpointer(config(run_dir, memory_dir=None)) as ckpt:
        ckpt.save(5, state)
    target = make(adapter=True, kind=OwnCode)
    before = bits(target)
    restore(run_dir, target, missing="keep")
    same(bits(state), bits(target))
    same(before, bits(target), "model/adapter", "optimizer/model/adapter")


@pytest.mark.parametrize("loose", [False, True])
def test_what_was_read_in_part_is_not_known_to_be_good(run_dir: Path, saved: State, loose: bool) -> None:
    """P60: after a loose restore the checkpoint is still read as a whole before another one is removed."""
    with Checkpointer(config(run_dir, memory_dir=None, max_num_checkpoints=None)) as ckpt:
        ckpt.restore(make())
        ckpt.save(6, make())
    store = FaultyStore(LocalStore(run_dir))
    limited = config(run_dir, memory_dir=None, max_num_checkpoints=1)
    with Checkpointer(replace(limited, checkpoint_dir=located(store))) as ckpt:
        ckpt.restore(make(), only=["model"] if loose else None)
        assert ckpt.last_restore is not None
        assert ckpt.last_restore.taken == (("model",) if loose else ())
        store.log.clear()
        ckpt.prune()
        assert [one.step for one in ckpt.checkpoints()] == [6]
        assert any(verb == "read" for verb, _ in store.log) == loose


def test_a_checkpointer_goes_on_from_what_it_took(run_dir: Path, saved: State) -> None:
    """Training goes on from the step, with memory too, and its next checkpoint holds the whole new state."""
    state = make(adapter=True)
    with Checkpointer(config(run_dir)) as ckpt:
        assert ckpt.restore(state, missing="keep") == 5
        ckpt.save(6, state)
    target = make(adapter=True, seed=2)
    with Checkpointer(config(run_dir)) as ckpt:
        assert ckpt.restore(target, missing="keep") == 6
        assert ckpt.last_restore is not None
        assert (ckpt.last_restore.left, ckpt.last_restore.new) == ((), ())
    same(bits(state), bits(target))
