"""Find renamed parts of a module by their shapes, for the hint of an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["renamed_places"]

Described = tuple[str, tuple[int, ...]]  # dtype and shape
_MOST = 4


def renamed_places(
    here: Mapping[str, Described],
    missing: Sequence[str],
    unexpected: Sequence[str],
    stored: Mapping[str, Described],
    groups: Sequence[str],
) -> dict[str, str]:
    """Return the argument for `restore(state, only=…)` if parts of modules were only renamed, else {}.

    `here` has the tensors of the state's modules that the checkpoint lacks; `groups` are all that a restore takes. The
    unmatched tensors of both sides must fit one to one, by shape, dtype and the last part of the name.
    """
    pairs: dict[str, str] = {}
    left = [name for name in unexpected if name in stored]
    for name, described in here.items():
        fits = [key for key in left if stored[key] == described and _last(key) == _last(name)]
        if len(fits) != 1:
            return {}
        left.remove(fits[0])
        pairs |= dict([_prefixes(name, fits[0])])
    optimizers = {name.partition("/")[0] for name in missing if name not in here}
    if left or not pairs or len(pairs) > _MOST or not _is_of(here, missing):
        return {}
    parts = {f"{key}/{new}": f"{key}/{old}" for key in sorted(optimizers) for new, old in pairs.items()}
    return {**pairs, **parts, **{name: name for name in groups}}


def _is_of(here: Mapping[str, Described], missing: Sequence[str]) -> bool:
    """Say whether all other missing entries are optimizer state of exactly these parameters."""
    rest = [name for name in missing if name not in here]
    return all(name.partition("/")[2] in here for name in rest)


def _prefixes(new: str, old: str) -> tuple[str, str]:
    """Cut the common end off two names: model/top.weight and model/head.weight become model/top and model/head."""
    while "." in new and "." in old and _last(new) == _last(old):
        new, old = new.rpartition(".")[0], old.rpartition(".")[0]
    return new, old


def _last(name: str) -> str:
    return name.rpartition(".")[2]
