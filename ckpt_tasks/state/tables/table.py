"""A lookup table, from ids to rows and optimizer slots, as an nn.Module.

The rows are in host memory, outside of autograd: a forward pass copies the rows of its batch, and the table keeps a
batch's gradients until `step` applies them. `step` adds the gradients of an id as float64, in the order of passes,
ranks and positions in the batch, and rounds the sum once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ckpt_tasks.checked import checked
from ckpt_tasks.errors import ConfigError, StateError
from ckpt_tasks.state.tables.rows import RowStore, new_rows
from ckpt_tasks.state.tables.rules import RULES, SGD, RowRule
from ckpt_tasks.state.tables.sharding import Shards
from ckpt_tasks.state.tables.table_files import Chain
from ckpt_tasks.state.tables.table_rows import Floats, Ids

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_MOST_SEED = 2**63 - 1
_MOST_NUMBERS = 1 << 16


class _Batch(NamedTuple):
    """The gradients of one forward pass: its number, its distinct ids, and the sum of gradients for each id."""

    number: int
    ids: Ids
    sums: npt.NDArray[np.float64]


class LookupTable(nn.Module):
    """Map int64 ids to rows of `dim` float32 numbers; training creates and changes the rows.

    `slots` is the optimizer, a rule of `ckpt_tasks.tables` (SGD, Adagrad, Adam); the rule says which values the
    table keeps for each row. Call `step()` after backward; it changes only the rows of the batches since its last call.
    A new id gets a row that depends on the id and `seed`, uniform within ±`spread` (default: dim ** -0.5). In eval mode
    the table returns such a row for an unknown id, but does not add it.

    With torch.distributed each rank holds the ids whose hashes belong to it, and all ranks must take part in each
    forward pass and `step`. The result is as if one process had the batches of all ranks, with gradients averaged over
    the ranks as in DistributedDataParallel. In a state the table is a group of its own::

        state = {"model": model, "users": model.users}
    """

    @checked
    def __init__(
        self,
        dim: int,
        *,
        slots: RowRule | None = None,
        seed: int = 0,
        spread: float | None = None,
        process_group: ProcessGroup | None = None,
    ):
        super().__init__()
        dim, seed = int(dim), int(seed)
        if not 1 <= dim <= _MOST_NUMBERS:
            raise ConfigError(f"dim is the length of a row, from 1 to {_MOST_NUMBERS}, not {dim!r:.40}")
        if not 0 <= seed <= _MOST_SEED:
            raise ConfigError(f"seed is a whole number from 0 to {_MOST_SEED}, not {seed!r:.40}")
        if spread is not None and not 0 <= spread < inf:
            raise ConfigError(f"spread is a positive number, not {spread!r:.40}")
        rule = SGD() if slots is None else slots
        if type(rule) not in RULES.values():
            hint = "Give slots=Adam(lr=0.001), of ckpt_tasks.tables."
            raise ConfigError(f"slots is one of {', '.join(RULES)}, not {rule!r:.40}", hint=hint)
        self.dim, self.seed, self.rule = dim, seed, rule
        self.spread = dim**-0.5 if spread is None else float(spread)
        self.updates = 0  # The number of calls of `step` so far.
        self.store = RowStore(dim, len(rule.slots))
        self.chain = Chain()
        self.shards = Shards(process_group)
        self._passes = 0
        self._waiting: list[_Batch] = []

    @property
    def count(self) -> int:
        """The number of ids that this rank holds."""
        return self.store.count

    @property
    def ids(self) -> torch.Tensor:
        """The ids that this rank holds, sorted."""
        return torch.from_numpy(np.sort(self.store.ids[self.store.used]))

    def extra_repr(self) -> str:
        """Describe the table for print(model)."""
        return f"{self.dim}, slots={self.rule}, count={self.count}"

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows for ids of any shape, with one more dimension, on the device of `ids`.

        Raises ConfigError if the ids are not int64.
        """
        if ids.dtype is not torch.int64:
            raise ConfigError(f"ids are int64, not {ids.dtype}")
        once, places = np.unique(ids.detach().cpu().numpy().reshape(-1), return_inverse=True)
        asked = self.shards.ask(once)
        rows = torch.from_numpy(self.shards.answer(self._rows(asked.ids), asked))
        self._passes += 1
        batch = rows[torch.from_numpy(places.reshape(-1))].reshape(*ids.shape, self.dim).to(ids.device)
        if not torch.is_grad_enabled() or not self.training:
            return batch
        anchor = torch.empty((), requires_grad=True)
        about = self._passes, once, places.reshape(-1)
        taken: torch.Tensor = _Taken.apply(anchor, batch, self._waiting, about)  # type: ignore[no-untyped-call]
        return taken

    @torch.no_grad()
    def step(self) -> None:
        """Apply the gradients since the last call to the rows; with many ranks, all ranks must call it."""
        batches, self._waiting[:] = sorted(self._waiting, key=lambda batch: batch.number), []
        self.updates += 1
        ids, sums = _summed(
            np.concatenate([np.empty(0, np.int64), *(batch.ids for batch in batches)]),
            np.concatenate([np.empty((0, self.dim)), *(batch.sums for batch in batches)]),
        )
        asked = self.shards.ask(ids)
        ids, sums = _summed(asked.ids, self.shards.send(sums, asked))
        places = self.store.find(ids)
        known = places >= 0  # The program may have deleted an id after the forward pass.
        places, gradient = places[known], (sums[known] / self.shards.size).astype(np.float32)
        row, *slots = (values[places] for values in self.store.values)
        self.rule.apply(self.updates, row, slots, gradient)
        for values, changed in zip(self.store.values, (row, *slots), strict=True):
            values[places] = changed
        self.store.steps[places] = self.updates
        self.store.touched[places] = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no `step` has applied."""
        super().zero_grad(set_to_none)
        self._waiting.clear()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return a state without rows if a module that contains the table asks.

        Raises StateError if the table alone is asked: its rows would be lost.
        """
        if not args and "destination" not in kwargs:
            hint = "Give the table itself to a Checkpointer: state={..., 'users': users}."
            raise StateError("the rows of a LookupTable are in no state_dict", hint=hint)
        return super().state_dict(*args, **kwargs)

    @checked
    def delete(self, ids: torch.Tensor) -> int:
        """Delete ids, and return how many this rank had; with many ranks, pass the same ids in each rank."""
        return self.store.delete(ids.reshape(-1).tolist())

    @checked
    def evict(self, updates: int) -> int:
        """Delete the ids that the last `updates` updates have not changed; return how many this rank had."""
        used = self.store.used
        return self.store.delete(self.store.ids[used[self.store.steps[used] <= self.updates - updates]].tolist())

    def _rows(self, ids: Ids) -> Floats:
        """Return the rows of ids, which may repeat, in this rank's part; in training, add rows for unknown ids."""
        places = self.store.find(ids)
        if (places >= 0).all():
            return self.store.values[0][places]
        unknown = np.unique(ids[places < 0])
        rows = new_rows(unknown, self.dim, self.seed, self.spread)
        if self.training:
            self.store.add(unknown, rows)
            return self.store.values[0][self.store.find(ids)]
        known, answer = places >= 0, np.empty((len(ids), self.dim), np.float32)
        answer[known] = self.store.values[0][places[known]]
        answer[~known] = rows[np.searchsorted(unknown, ids[~known])]
        return answer


def table_settings(table: LookupTable) -> dict[str, Any]:
    """Return the settings of a table: everything except its rows."""
    return {
        "dim": table.dim,
        "rule": type(table.rule).__name__,
        "slots": [*table.rule.slots],
        "options": asdict(table.rule),  # type: ignore[call-overload]
        "seed": table.seed,
        "spread": table.spread,
        "updates": table.updates,
        "count": table.count,
        "shards": table.shards.size,
    }


def replace_all(table: LookupTable, settings: Mapping[str, Any], store: RowStore, chain: Chain) -> None:
    """Replace the settings, rows and files of a table, only by assignments, which cannot fail."""
    options = settings["options"]
    for field in fields(table.rule):  # type: ignore[arg-type]
        setattr(table.rule, field.name, options.get(field.name, getattr(table.rule, field.name)))
    table.seed, table.spread, table.updates = settings["seed"], settings["spread"], settings["updates"]
    table.store, table.chain = store, chain
    table.zero_grad()


class _Taken(torch.autograd.Function):
    """The rows of a table in the forward pass; the backward pass collects their gradients for `step`."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, rows: torch.Tensor, waiting: list[_Batch], batch: Any) -> torch.Tensor:
        """Return the rows; `batch`: the number of the pass, its distinct ids, and the index of each row's id."""
        ctx.waiting, ctx.batch = waiting, batch
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Add up the gradients of each id, and keep the sums for `step`."""
        number, ids, places = ctx.batch
        flat = gradients[0].detach().cpu().reshape(len(places), gradients[0].shape[-1]).double().numpy()
        ctx.waiting.append(_Batch(number, ids, _sums(places, flat)))
        return None, None, None, None


def _summed(ids: Ids, values: npt.NDArray[np.float64]) -> tuple[Ids, npt.NDArray[np.float64]]:
    """Return the distinct ids, and the sum of the values of each id."""
    if (ids[1:] > ids[:-1]).all():
        return ids, values  # They are distinct and sorted, as those of one pass of one process.
    once, places = np.unique(ids, return_inverse=True)
    return once, _sums(places.reshape(-1), values)


def _sums(places: Ids, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Add up the values of each index, in their order; the indices go from 0 to the highest without a gap."""
    order = np.argsort(places, kind="stable")
    firsts = np.flatnonzero(np.diff(places[order], prepend=-1))
    return values[order] if len(firsts) == len(order) else np.add.reduceat(values[order], firsts, axis=0)
