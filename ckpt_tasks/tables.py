"""Lookup tables, and the optimizers of their rows."""

from ckpt_tasks.state.tables.rules import SGD, Adagrad, Adam
from ckpt_tasks.state.tables.table import LookupTable

__all__ = ["SGD", "Adagrad", "Adam", "LookupTable"]
