"""A lookup table trains like torch's sparse embedding, and grows by what an id and a seed say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckpt_tasks import LookupTable
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.state.tables.rules import SGD, Adagrad, Adam, RowRule

_PAIRS: list[tuple[RowRule, Callable[[Any], torch.optim.Optimizer]]] = [
    (SGD(lr=0.1), lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    (Adagrad(lr=0.1, lr_decay=0.01), lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, lr_decay=0.01)),
    (Adam(lr=0.1), lambda parameters: torch.optim.SparseAdam(parameters, lr=0.1)),
]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(("rule", "make"), _PAIRS, ids=lambda one: type(one).__name__)
def test_each_rule_is_the_optimizer_of_torch(rule: RowRule, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """SGD, Adagrad and Adam change the rows of a batch, with ids in it several times, as torch's optimizers do."""
    generator = torch.Generator().manual_seed(1)
    users, every = LookupTable(8, slots=rule), torch.arange(50)
    model = torch.nn.Embedding(50, 8, sparse=True)
    with torch.no_grad():
        model.weight.copy_(users(every))
    optimizer = make(model.parameters())
    for _ in range(20):
        ids = torch.randint(0, 50, (4, 8), generator=generator)
        weight = torch.randn(4, 8, 8, generator=generator)
        for one in (users, model):
            (one(ids) * weight).sum().backward()
        users.step()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(users.eval()(every), model.weight.detach(), rtol=1e-5, atol=1e-6)


def test_a_row_begins_with_what_its_id_and_the_seed_say() -> None:
    """The first row of an id does not depend on the order in which ids come, and another seed gives another one."""
    one, other = LookupTable(4, seed=1), LookupTable(4, seed=1)
    ids = torch.tensor([5, -1, 2**63 - 1, -(2**63), 0])
    rows = one(ids)
    other(torch.arange(100, 200))
    assert torch.equal(other(ids.flip(0)).flip(0), rows)
    assert not torch.equal(LookupTable(4, seed=2)(ids), rows)
    assert rows.unique().numel() == rows.numel()
    assert rows.abs().max() <= 0.5
    spread = LookupTable(64, spread=1.0)(torch.arange(1000))
    assert abs(float(spread.detach().mean())) < 0.01
    assert abs(float(spread.detach().std()) - 3**-0.5) < 0.01


def test_an_evaluation_adds_no_row() -> None:
    """In eval mode an unknown id has the row that it would begin with, and the table stays as it is."""
    users = LookupTable(4)
    users(torch.arange(3))
    rows = users.eval()(torch.tensor([1, 9]))
    assert users.count == 3
    assert torch.equal(users.train()(torch.tensor([1, 9])), rows)
    assert users.count == 4


def test_gradients_of_one_id_are_added_exactly() -> None:
    """2²⁴ and three ones, a sum that float32 lacks, are added without loss over the passes before a step.

    A batch without ids, and a step without a batch, add nothing.
    """
    users = LookupTable(1, slots=SGD(lr=1.0), spread=0.0)
    weights = torch.tensor([2.0**24, 1.0, 1.0, 1.0, 0.0, -(2.0**24)])
    users.step()
    for part in (weights[:0], weights[:5], weights[5:]):
        (users(torch.zeros(len(part), dtype=torch.int64)).squeeze(1) * part).sum().backward()
    users.step()
    assert users(torch.tensor([0])).item() == -3.0


@pytest.mark.parametrize(
    "given", [{"dim": 0}, {"dim": "4"}, {"dim": 4, "slots": 2}, {"dim": 4, "seed": -1}, {"dim": 4, "spread": -1.0}]
)
def test_a_wrong_setting_is_refused(given: dict[str, Any]) -> None:
    """A setting that no table can have is an error when the table is made."""
    with pytest.raises(ConfigError):
        LookupTable(**given)
    with pytest.raises(ConfigError, match="int64"):
        LookupTable(4)(torch.arange(3).float())
