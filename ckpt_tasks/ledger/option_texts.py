"""The texts of `CheckpointConfig`'s options, read from its source, for docs/OPTIONS.md and `ckpt train --help`."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise

from ckpt_tasks.ledger import config

__all__ = ["option_texts"]


def option_texts() -> dict[str, str]:
    """Return the text below each field of `CheckpointConfig`, on one line."""
    tree = ast.parse(inspect.getsource(config))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "CheckpointConfig").body
    texts = {}
    for node, below in pairwise(body):
        match node, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(inspect.cleandoc(text).split())
    return texts
