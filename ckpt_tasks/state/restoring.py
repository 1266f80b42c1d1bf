"""Restore of a state: compare everything, prepare everything, and only then change the state.

Invariants

1. `plan_restore` compares the whole state with the whole checkpoint before a tensor is read.
2. `RestorePlan.apply` first makes every new value, and reads and verifies its bytes; a failure until then changes
   nothing.
3. Then load_state_dict of the objects that have one runs, after a copy of their old states; if one call raises, all
   calls are undone. After these calls there are only copies and assignments.
4. The bytes of live tensors are read once, into their places, and verified there. If they are damaged, the state is
   half restored until another restore overwrites it all (docs/internals/decisions/0127). Where a load_state_dict is
   foreign code, and in a restore of a part, these bytes are verified in step 2, and read twice.
5. The restore sets the random streams of the process last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from operator import setitem
from typing import Any

from ckpt_tasks.errors import FormatVersionError, StateError, StateMismatchError, UnsupportedStateError
from ckpt_tasks.format.saved_kinds import RNG
from ckpt_tasks.gc_pause import gc_paused
from ckpt_tasks.state.groups import Groups, flat
from ckpt_tasks.state.kinds.differences import Differences
from ckpt_tasks.state.kinds.group_parts import GroupState, Guard, RestorePart, Saved
from ckpt_tasks.state.kinds.kinds import KINDS, kind_of, may_draw
from ckpt_tasks.state.kinds.modules import Materialized
from ckpt_tasks.state.kinds.names import Scope
from ckpt_tasks.state.kinds.plain import PlainPart
from ckpt_tasks.state.selection import Chosen, Selection, choose
from ckpt_tasks.state.tensors.copies import Copies
from ckpt_tasks.state.tensors.packing import pack, unpack
from ckpt_tasks.state.tensors.random_streams import preserved_rng
from ckpt_tasks.state.tensors.tensor_sources import HeldTensors, Maker, Stored, TensorSource, needed_keys
from ckpt_tasks.state.tensors.tensors import DTYPES, TensorSet


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

    @property
    def is_simple(self) -> bool:
        """True if no foreign code runs in the restore, so that another restore overwrites all of it."""
        return not any(part.guard is not None and part.guard.foreign for part in self._parts.values())

    def apply(
        self,
        source: TensorSource,
        confirm: Callable[[], object] = lambda: None,
        writing: Callable[[], object] | None = None,
    ) -> None:
        """Restore the planned groups, with tensors from `source`.

        Calls `confirm` before any change, and again after the user's code has run; if `confirm` raises, the state is
        unchanged.

        With `writing`, the bytes of live tensors are read once: it is called before the first of them changes, and a
        failure after that leaves the state half restored. Raises StateError if a load_state_dict of the user raised,
        StateMismatchError or IntegrityError if values do not fit or are damaged; the state is unchanged then, unless
        `writing` was called. A plan can be applied only once.
        """
        parts, self._parts = self._parts, {}  # Free the parts and their new values at the end.
        with self.lazy.undone(), _preserved(self._draws), gc_paused():
            # All parts use one maker: groups that shared memory in the save share memory again.
            make = Maker(source)
            for part in parts.values():
                part.prepare(make)
            self._copies.prepare(source)
            source.fetch(self._copies.pairs, verify=writing is None)
            confirm()
            _write_guarded(parts, confirm)
            if writing is not None:
                writing()
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


class _OthersPart:
    """Restores a ByRank that another number of ranks has saved, as its `others` says; `place` is (rank, ranks)."""

    def __init__(self, state: Groups, name: str, kind: str, trees: Sequence[Any], place: tuple[int, int]):
        self.guard = Guard(state[name], name, state[name].state_dict()) if kind == "stateful" else None
        self._state, self._name, self._kind = state, name, kind
        self._trees, self._place = trees, place

    def compare(self, differences: Differences) -> None:
        """Record nothing: `prepare` compares what `others` makes."""

    def prepare(self, make: Maker) -> None:
        """Read the values of all ranks, have `others` make this rank's, and plan the restore of that."""
        rank, ranks = self._place
        others, made = self._state.others[self._name], TensorSet(None)
        saved = [unpack(tree, partial(make, now=True)) for tree in self._trees]
        if callable(others):
            value = others(saved, rank, ranks)
        else:
            value = saved[rank] if rank < len(saved) else deepcopy(others)
        group = GroupState(self._kind, pack(value, self._name, made))
        stored = {key: (DTYPES[tensor.dtype], tuple(tensor.shape)) for key, tensor in made.tensors.items()}
        own = Groups()
        own.add(self._name, self._state[self._name], partial(setitem, self._state, self._name))
        self._plan = plan_restore(own, {self._name: group}, stored, partial=True)
        self._source = HeldTensors(made.tensors)

    def write(self) -> None:
        """Restore the value that `prepare` has made."""
        self._plan.apply(self._source)


def plan_restore(
    state: Mapping[str, Any],
    groups: Mapping[str, Saved],
    tensors: Stored,
    *,
    partial: bool = False,
    rng: bool = True,
    selection: Selection | None = None,
    of_ranks: int | None = None,
    place: tuple[int, int] = (0, 1),
    home: str | None = None,
) -> RestorePlan:
    """Compare a state with a checkpoint and plan the restore; change nothing and draw no random number.

    `tensors`: the dtype (torch's name) and shape of every stored tensor by full key. `partial`: restore only the groups
    that `state` names, and no random streams. `selection`: the part that a loose restore takes. `of_ranks`: the number
    of ranks of the save, if it differs from that of `place`, (rank, ranks). `home`: the identity of the checkpoint, if
    it is committed. Raises StateMismatchError with every difference, UnsupportedStateError if the state could not be
    saved, IntegrityError if a tree is malformed, FormatVersionError for a group of an unknown kind.
    """
    state = flat(state)
    differences = Differences(tensors)
    draws = any(map(may_draw, state.values()))
    with _preserved(draws), gc_paused():
        chosen = _chosen(state, groups, selection, differences, partial=partial, rng=rng)
    wanted, differences.groups = chosen.groups, tuple(chosen.groups)
    others = {name for name in state.others if of_ranks is not None and name in wanted}
    _check_kinds(wanted)
    if of_ranks is not None:
        _refuse_foreign({name: wanted[name] for name in wanted if name not in others}, state, differences, of_ranks)
    gathered = {name for name, group in wanted.items() if of_ranks is not None and KINDS[group.kind].gathers} | others
    trees = {name: group.trees if name in gathered else [group.tree] for name, group in wanted.items()}
    keys = _needed(trees, tensors)
    copies, lazy = Copies(), Materialized()
    with lazy.undone(), _preserved(draws), gc_paused():
        for name in (name for name in state.modules if name in wanted and wanted[name].kind == "module"):
            lazy.add(state.modules[name], trees[name][0], tensors, chosen.kept.get(name, ()))
        try:
            parts = _parts(state, chosen, trees, differences, copies, home=home)
            parts |= {n: _OthersPart(state, n, wanted[n].kind, trees[n], place) for n in others & parts.keys()}
        except UnsupportedStateError as error:
            error.message = error.message.replace("cannot be stored", "cannot be restored into")
            raise
        _compare(parts.values(), differences)
    return RestorePlan(parts, keys, copies, chosen, tuple(differences.replaced), draws=draws, lazy=lazy)


def _chosen(
    state: Groups,
    groups: Mapping[str, Saved],
    selection: Selection | None,
    differences: Differences,
    *,
    partial: bool,
    rng: bool,
) -> Chosen:
    if selection is not None:
        differences.loose = True
        return choose(state, groups, selection, differences, rng=rng and not partial)
    chosen = Chosen()
    chosen.groups = _wanted(state, groups, differences, partial=partial, rng=rng)
    return chosen


def _needed(trees: Mapping[str, Sequence[Any]], tensors: Stored) -> frozenset[str]:
    return frozenset(key for name, some in trees.items() for tree in some for key in needed_keys(name, tree, tensors))


def _check_kinds(wanted: Mapping[str, Saved]) -> None:
    for name, group in wanted.items():
        if group.kind not in KINDS:
            raise FormatVersionError(f"group {name} is of the unknown kind {group.kind!r}", key=name)


def _compare(parts: Collection[RestorePart], differences: Differences) -> None:
    """Compare every part with the checkpoint; raise StateMismatchError with all differences."""
    for part in parts:
        part.compare(differences)
    for part in parts:
        if isinstance(part, PlainPart):
            part.compare_rest(differences)
    differences.raise_any()


def _refuse_foreign(wanted: Mapping[str, Saved], state: Groups, differences: Differences, of_ranks: int) -> None:
    """Record the groups of which each of `of_ranks` ranks has saved its own, and which other ranks cannot restore."""
    foreign = [
        n for n, group in wanted.items() if n in state.by_rank or (group.by_rank and not KINDS[group.kind].resizes)
    ]
    for name in foreign:
        differences.differ(name, f"each rank's own, of {of_ranks} ranks; here are more or fewer")
        anew = f"begin it anew: restore(state, leave={foreign})"
        differences.of_ranks = of_ranks
        differences.hint = f"Say what other ranks get, ByRank(value, others=…), or {anew}"


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
