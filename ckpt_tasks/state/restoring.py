"""Restore of a state: compare everything, prepare everything, and only then change the state.

Invariants

1. `plan_restore` compares the whole state with the whole checkpoint before a tensor is read.
2. `RestorePlan.apply` first makes every new value and verifies every byte; a failure until then changes nothing.
3. Then load_state_dict of the user's objects runs, after a copy of their old states; if one call raises, all calls are
   undone. After these calls there are only copies and assignments.
4. The restore sets the random streams of the process last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ckpt_tasks.errors import FormatVersionError, StateError, StateMismatchError, UnsupportedStateError
from ckpt_tasks.format.kinds import RNG
from ckpt_tasks.objects.differences import Differences
from ckpt_tasks.objects.kinds import KINDS, Scope, kind_of, may_draw
from ckpt_tasks.objects.modules import Materialized
from ckpt_tasks.objects.parts import Guard, RestorePart, Saved
from ckpt_tasks.objects.plain import PlainPart
from ckpt_tasks.process.gc_pause import gc_paused
from ckpt_tasks.state.groups import Groups, flat
from ckpt_tasks.state.selection import Chosen, Selection, choose
from ckpt_tasks.tensors.copies import Copies
from ckpt_tasks.tensors.sources import Maker, Stored, TensorSource, needed_keys
from ckpt_tasks.tensors.streams import preserved_rng


class RestorePlan:
    """A planned restore, which has not changed the state.

    `keys` are the full keys of the tensors that it needs; `chosen` says what a loose restore takes and leaves.
    `replaced` has a text for each setting of a new optimizer or schedule that the restore will replace, and for each
    changed argument of the run's start. `lazy`: the tensors of lazy modules, which have shapes from the plan on.
    """

    def __init__(
        self,
        parts: Mapping[str, RestorePart],
        keys: frozenset[str],
        copies: Copies,
        chosen: Chosen,
        replaced: tuple[str, ...] = (),
        *,
        draws: bool,
        lazy: Materialized,
    ):
        self.keys = keys
        self.replaced = replaced
        self.chosen = chosen
        self._parts = dict(parts)
        self._copies = copies
        self._draws = draws
        self.lazy = lazy

    def apply(self, source: TensorSource, confirm: Callable[[], object] = lambda: None) -> None:
        """Restore the planned groups, with tensors from `source`.

        Calls `confirm` before any change, and again after the user's code has run; if `confirm` raises, the state is
        unchanged.

        Raises StateError if a load_state_dict of the user raised, StateMismatchError or IntegrityError if values do not
        fit or are damaged; the state is unchanged then. A plan can be applied only once.
        """
        parts, self._parts = self._parts, {}  # Free the parts and their new values at the end.
        with self.lazy.undone(), _preserved(self._draws), gc_paused():
            # All parts use one maker: groups that shared memory in the save share memory again.
            make = Maker(source)
            for part in parts.values():
                part.prepare(make)
            self._copies.prepare(source)
            source.fetch(self._copies.pairs)
            confirm()
            _write_guarded(parts, confirm)
            self._copies.write()
            for name, part in parts.items():
                if part.guard is None and name != RNG:
                    part.write()
        if RNG in parts:
            parts[RNG].write()


def _write_guarded(parts: Mapping[str, RestorePart], confirm: Callable[[], object]) -> None:
    guarded = [(name, part, part.guard) for name, part in parts.items() if part.guard is not None]
    for _, _, guard in guarded:
        guard.keep()
    for count, (name, part, _) in enumerate(guarded, start=1):
        try:
            part.write()
        except BaseException as error:
            faults = _undo_all([(other, guard) for other, _, guard in reversed(guarded[:count])])
            if not isinstance(error, Exception):
                raise
            if isinstance(error, StateMismatchError) and not faults:
                error.key = error.key or name
                raise  # The error says what differs.
            kept = f"nothing was changed, except: {'; '.join(faults)}" if faults else "nothing was changed"
            raise StateError(f"load_state_dict raised {error!r}; {kept}", key=name) from error
    try:
        confirm()
    except BaseException as error:
        for fault in _undo_all([(name, guard) for name, _, guard in reversed(guarded)]):
            error.add_note(fault)
        raise


def _undo_all(guards: list[tuple[str, Guard]]) -> list[str]:
    faults = []
    for name, guard in guards:
        try:
            guard.undo()
        except Exception as error:  # noqa: BLE001 (it is the user's code; the caller reports it with the first error)
            faults.append(f"{name} did not take its old state back ({error!r})")
    return faults


def plan_restore(
    state: Mapping[str, Any],
    groups: Mapping[str, Saved],
    tensors: Stored,
    *,
    partial: bool = False,
    rng: bool = True,
    selection: Selection | None = None,
    of_ranks: int | None = None,
    home: str | None = None,
) -> RestorePlan:
    """Compare a state with a checkpoint and plan the restore; change nothing and draw no random number.

    `tensors`: the dtype (torch's name) and shape of every stored tensor by full key. `partial`: restore only the groups
    that `state` names, and no random streams. `selection`: the part that a loose restore takes. `of_ranks`: the number
    of ranks of the save, if it differs. `home`: the identity of the checkpoint, if it is committed. Raises
    StateMismatchError with every difference, UnsupportedStateError if the state could not be saved, IntegrityError if a
    tree is malformed, FormatVersionError for a group of an unknown kind.
    """
    state = flat(state)
    differences = Differences(tensors)
    chosen, draws = Chosen(), any(may_draw(value) for value in state.values())
    with _preserved(draws), gc_paused():
        if selection is None:
            chosen.groups = _wanted(state, groups, differences, partial=partial, rng=rng)
        else:
            differences.loose = True
            chosen = choose(state, groups, selection, differences, rng=rng and not partial)
    wanted, differences.groups = chosen.groups, tuple(chosen.groups)
    foreign: list[str] = []
    for name, group in wanted.items():
        if group.kind not in KINDS:
            raise FormatVersionError(f"group {name} is of the unknown kind {group.kind!r}", key=name)
        if of_ranks is not None and (name in state.by_rank or (group.by_rank and not KINDS[group.kind].resizes)):
            differences.differ(name, f"each rank's own, of {of_ranks} ranks; here are more or fewer")
            foreign.append(name)
            differences.hint = f"To begin it anew: restore(state, leave={foreign})"
    trees = {
        name: group.trees if of_ranks is not None and KINDS[group.kind].gathers else [group.tree]
        for name, group in wanted.items()
    }
    keys = frozenset(key for name, some in trees.items() for tree in some for key in needed_keys(name, tree, tensors))
    copies, lazy = Copies(), Materialized()
    with lazy.undone(), _preserved(draws), gc_paused():
        for name, module in state.modules.items():
            if name in wanted and wanted[name].kind == "module":
                lazy.add(module, trees[name][0], tensors, chosen.kept.get(name, ()))
        try:
            parts = _parts(state, chosen, trees, differences, copies, home=home)
        except UnsupportedStateError as error:
            error.message = error.message.replace("cannot be stored", "cannot be restored into")
            raise
        for part in parts.values():
            part.compare(differences)
        for part in parts.values():
            if isinstance(part, PlainPart):
                part.compare_rest(differences)
        differences.raise_any()
    return RestorePlan(parts, keys, copies, chosen, tuple(differences.replaced), draws=draws, lazy=lazy)


def _preserved(draws: bool) -> AbstractContextManager[None]:
    # Reset streams only if foreign code may draw: a thread that trains meanwhile (AsyncCheckpointIO) would get numbers
    # twice.
    return preserved_rng() if draws else nullcontext()


def _wanted(
    state: Groups, groups: Mapping[str, Saved], differences: Differences, *, partial: bool, rng: bool
) -> dict[str, Saved]:
    """Choose the checkpoint's groups to restore; record groups that only one side has."""
    wanted = {name: groups[name] for name in state if name in groups}
    differences.missing += [name for name in state if name not in groups]
    if not partial:
        differences.unexpected += [name for name in groups if name not in state and name != RNG]
    if rng and not partial:
        differences.missing += [RNG] if RNG not in groups else []
        wanted |= {RNG: groups[RNG]} if RNG in groups else {}
    return wanted


def _parts(
    state: Groups,
    chosen: Chosen,
    trees: Mapping[str, Sequence[Any]],
    differences: Differences,
    copies: Copies,
    *,
    home: str | None,
) -> dict[str, RestorePart]:
    scope = Scope(state, state.modules, state.can_assign, home)
    parts: dict[str, RestorePart] = {}
    for name, group in chosen.groups.items():
        value = state.get(name)
        kind = RNG if name == RNG else kind_of(value)
        if kind != group.kind:
            why = f"{kind} ({type(value).__qualname__}) here, {group.kind} in the checkpoint"
            differences.differ(name, why)
            continue
        kept = chosen.kept.get(name, frozenset())
        tree = trees[name] if KINDS[kind].gathers else trees[name][0]
        parts[name] = KINDS[kind].part(value, name, tree, scope, copies, kept)
    return parts
