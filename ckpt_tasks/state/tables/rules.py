"""Optimizers of a lookup table: a rule changes only the rows of a batch and their slots.

The formulas are those of torch's SGD, Adagrad and SparseAdam for sparse gradients. `update` is the number of the
table's update, from 1 on, whichever rows earlier updates changed. A checkpoint has a rule's options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar, Protocol

import numpy as np

from ckpt_tasks.state.tables.table_rows import Floats


class RowRule(Protocol):
    """An update of rows by their gradients; `slots` names the values that the rule keeps for each row."""

    slots: ClassVar[tuple[str, ...]]
    lr: float

    def apply(self, update: int, row: Floats, slots: Sequence[Floats], gradient: Floats) -> None:
        """Change rows and their slots in place."""


@dataclass(kw_only=True)
class SGD:
    """Subtract `lr` times the gradient; has no slots."""

    slots: ClassVar[tuple[str, ...]] = ()
    lr: float = 0.01

    def apply(self, update: int, row: Floats, slots: Sequence[Floats], gradient: Floats) -> None:
        row -= self.lr * gradient


@dataclass(kw_only=True)
class Adagrad:
    """Divide each step by the square root of the sum of the row's squared gradients so far."""

    slots: ClassVar[tuple[str, ...]] = ("sum",)
    lr: float = 0.01
    lr_decay: float = 0.0
    eps: float = 1e-10

    def apply(self, update: int, row: Floats, slots: Sequence[Floats], gradient: Floats) -> None:
        (squares,) = slots
        squares += gradient * gradient
        row -= self.lr / (1 + (update - 1) * self.lr_decay) * (gradient / (np.sqrt(squares) + self.eps))


@dataclass(kw_only=True)
class Adam:
    """Use moving averages of the gradient and its square; the averages of rows outside the batch stay."""

    slots: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def apply(self, update: int, row: Floats, slots: Sequence[Floats], gradient: Floats) -> None:
        mean, square = slots
        mean += (gradient - mean) * (1 - self.beta1)
        square += (gradient * gradient - square) * (1 - self.beta2)
        step_size = self.lr * sqrt(1 - self.beta2**update) / (1 - self.beta1**update)
        row -= step_size * (mean / (np.sqrt(square) + self.eps))


RULES: dict[str, type[RowRule]] = {rule.__name__: rule for rule in (SGD, Adagrad, Adam)}
