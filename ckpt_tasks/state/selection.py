"""Choice of the part of a checkpoint that a loose restore takes, by names alone; it reads no tensor.

A *place* is the path of a value: a group ("model"), a key of a module ("model/encoder.weight") or a parameter of an
optimizer ("optimizer/model/encoder.weight"). A prefix ends at a / or a dot, so "model/enc" is not a prefix of
"model/encoder.weight".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.format.saved_kinds import RNG
from ckpt_tasks.state.groups import Groups
from ckpt_tasks.state.kinds.differences import Differences
from ckpt_tasks.state.kinds.group_parts import GroupState, Saved
from ckpt_tasks.state.kinds.kinds import kind_of
from ckpt_tasks.state.kinds.names import module_state, named_parameters, parameter_names, tied_names
from ckpt_tasks.state.kinds.optimizers import optimizer_names, parameters_in

Only = Iterable[str] | Mapping[str, str]

_MISSING = ("error", "keep")
_IN_PART = ("module", "optimizer")
_SHOWN = 12


@dataclass(frozen=True)
class Selection:
    """The part of a checkpoint to take: `only` maps places of the state to places of the checkpoint; None: take all.

    `keep`: places that the checkpoint lacks keep their values, and places that the state lacks are ignored. `leave`:
    places of the state or the checkpoint that the restore does not take.
    """

    only: Mapping[str, str] | None
    keep: bool
    leave: tuple[str, ...]

    @classmethod
    def of(cls, only: Only | None, missing: str, leave: Iterable[str]) -> Selection | None:
        """Return the selection for the arguments of a restore; None for a strict restore of everything.

        Raises ConfigError for an invalid value or name.
        """
        if missing not in _MISSING:
            raise ConfigError(f"missing must be 'error' or 'keep', not {missing!r:.80}")
        for name, value in (("only", only), ("leave", leave)):
            if isinstance(value, str):
                raise ConfigError(f"{name} is a list of names, not a text", hint=f"Write {name}=[{value!r:.80}].")
            if not isinstance(value, Iterable) and (value is not None or name == "leave"):
                raise ConfigError(f"{name} is a list of names, not {value!r:.80}")
        if only is not None and not isinstance(only, Mapping):
            only = {place: place for place in only}
        left = tuple(leave)
        places = [*left, *(only or {}), *(only or {}).values()]
        wrong = [place for place in places if not isinstance(place, str) or not place]
        if wrong:
            raise ConfigError(f"{wrong[0]!r:.80} is not the name of a group or a key")
        if only is None and missing == "error" and not left:
            return None
        return cls(only, missing == "keep", left)

    def source_of(self, place: str) -> str | None:
        """Return the checkpoint's place for a place of the state; None if the selection does not take it."""
        if _is_in(place, self.leave):
            return None
        if self.only is None:
            return place
        for prefix, source in self.only.items():
            if _begins(place, prefix):
                rest = place[len(prefix) :].lstrip("/.")
                return f"{source}{_separator(source, rest)}{rest}"
        return None

    def covers(self, source: str) -> bool:
        """Return True if the selection takes a place of the checkpoint."""
        return not _is_in(source, self.leave) and (self.only is None or _is_in(source, self.only.values()))


@dataclass
class Chosen:
    """The groups to restore, by their names in the state; `kept` maps a group to its keys that keep their values.

    `taken` and `new` (not restored) are places of the state, `left` of the checkpoint; a whole group has its name.
    """

    groups: dict[str, Saved] = field(default_factory=dict)
    kept: dict[str, frozenset[str]] = field(default_factory=dict)
    taken: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    new: tuple[str, ...] = ()


def choose(
    state: Groups, groups: Mapping[str, Saved], selection: Selection, differences: Differences, *, rng: bool
) -> Chosen:
    """Choose what to restore into a flat state; record missing and unexpected places in `differences`.

    Raises ConfigError for a name that matches nothing.
    """
    chooser = _Chooser(state, groups, selection, differences)
    for name in state:
        chooser.group(name)
    chooser.streams(wanted=rng and (selection.only is None or RNG in selection.only))
    return chooser.finish()


class _Chooser:
    def __init__(self, state: Groups, groups: Mapping[str, Saved], selection: Selection, differences: Differences):
        self._state, self._groups = state, groups
        self._selection, self._differences = selection, differences
        self._parameters = parameter_names(named_parameters(state.modules))
        self._chosen = Chosen()
        self._here: dict[str, list[str]] = {}  # The places of the state in each group.
        self._there = {name: _places(name, group) for name, group in groups.items()}
        self._taken: set[str] = set()  # The places of the state that are restored.
        self._used: set[str] = set()  # The places of the checkpoint that are restored.

    def group(self, name: str) -> None:
        """Choose the part of the checkpoint for one group of the state."""
        kind = kind_of(self._state[name])
        if kind == "module":
            self._module(name)
        elif kind == "optimizer":
            self._optimizer(name)
        else:
            self._whole(name)

    def streams(self, *, wanted: bool) -> None:
        """Choose the random streams, if they are wanted."""
        if not wanted:
            return
        if RNG in self._groups:
            self._chosen.groups[RNG] = self._groups[RNG]
            self._use(RNG, RNG)
        elif not self._selection.keep:
            self._differences.missing.append(RNG)
        self._here[RNG] = [RNG]

    def finish(self) -> Chosen:
        """Record unexpected places and return the choice; raise ConfigError for a name that matches nothing."""
        self._check_names()
        if not self._taken - {RNG}:
            self._differences.missing += [name for name in self._here if name != RNG]
            self._differences.unexpected += [name for name in self._there if name != RNG]
        elif not self._selection.keep:
            for name, places in self._there.items():
                self._differences.unexpected += [place for place in places if self._is_unexpected(name, place)]
        chosen = self._chosen
        chosen.taken = _summed(self._here, self._taken)
        everywhere = {place for places in self._here.values() for place in places}
        chosen.new = _summed(self._here, everywhere - self._taken)
        there = {place for places in self._there.values() for place in places}
        chosen.left = _summed(self._there, there - self._used)
        return chosen

    def _is_unexpected(self, name: str, place: str) -> bool:
        """Return True if the selection takes a place of the checkpoint, but the state has no place for it."""
        # If `leave` names parameters, their optimizer state is not restored either.
        parameter = place.partition("/")[2] if self._groups[name].kind == "optimizer" else ""
        of_left = _is_in(parameter, self._selection.leave)
        return place not in self._used and self._selection.covers(place) and not of_left

    def _module(self, name: str) -> None:
        tree: dict[str, Any] = {}
        missing: dict[str, str | None] = {}
        here = self._here[name] = []
        met = False
        state = module_state(self._state[name], name)
        for key in state:
            place = f"{name}/{key}"
            here.append(place)
            source = self._selection.source_of(place)
            saved, value = self._find(source, "module", place)
            met = met or saved is not None
            if saved is None or value is _ABSENT:
                missing[key] = source
            else:
                tree[key] = value
                self._use(place, source)
        for key, stored in tied_names(state, tree).items():
            if missing[key] is not None:
                del missing[key]
                tree[key] = tree[stored]
                self._taken.add(f"{name}/{key}")
        for key, source in missing.items():
            self._lack(f"{name}/{key}", source)
        if tree:
            self._chosen.groups[name], self._chosen.kept[name] = GroupState("module", tree), frozenset(missing)
        elif met:
            self._differences.differ(name, "none of its keys is in the checkpoint")

    def _optimizer(self, name: str) -> None:
        members = optimizer_names(self._state[name], self._parameters, name)
        parameters = [parameter for names in members for parameter in names]
        here = self._here[name] = [f"{name}/{parameter}" for parameter in parameters]
        source_group, sources = self._optimizer_sources(name, parameters)
        saved = self._saved_optimizer(name, source_group) if sources else None
        if saved is None:
            return
        known = {one: n for n, group in enumerate(saved.tree["param_groups"]) for one in group["params"]}
        taken = {parameter: source for parameter, source in sources.items() if source in known}
        for place, parameter in zip(here, parameters, strict=True):
            if parameter in taken:
                self._use(place, f"{source_group}/{taken[parameter]}")
                self._check_shape(place, parameter, taken[parameter])
            else:
                self._lack(place, f"{source_group}/{sources[parameter]}" if parameter in sources else None)
        if taken:
            self._chosen.groups[name] = GroupState("optimizer", _of_taken(saved.tree, taken, known))
            self._chosen.kept[name] = frozenset(parameters) - taken.keys()

    def _optimizer_sources(self, name: str, parameters: list[str]) -> tuple[str, dict[str, str]]:
        """Return the checkpoint's group for an optimizer, and the checkpoint's name for each parameter to take."""
        source_group, sources = "", {}
        for parameter in parameters:
            source = self._selection.source_of(f"{name}/{parameter}")
            if source is None or _is_in(parameter, self._selection.leave):
                continue
            group, _, there = source.partition("/")
            source_group = source_group or group
            sources[parameter] = self._selection.source_of(parameter) or there
        return source_group, sources

    def _saved_optimizer(self, name: str, source_group: str) -> Saved | None:
        """Return the checkpoint's optimizer to restore; if the checkpoint has none, record that and return None."""
        saved = self._groups.get(source_group)
        if saved is not None and saved.kind == "optimizer":
            return saved
        if saved is not None:
            self._differences.differ(name, f"optimizer here, {saved.kind} in the checkpoint")
        elif not self._selection.keep:
            self._differences.missing.append(name)
        return None

    def _check_shape(self, place: str, here: str, source: str) -> None:
        """Record a difference if the checkpoint's parameter has another shape."""
        group, _, key = here.partition("/")
        live = self._state[group].state_dict().get(key) if group in self._state.modules else None
        stored = self._differences.stored.get(source)
        if live is not None and stored is not None and tuple(live.shape) != tuple(stored[1]):
            self._differences.differ(place, f"{[*live.shape]} here, {[*stored[1]]} in the checkpoint")

    def _whole(self, name: str) -> None:
        self._here[name] = [name]
        source = self._selection.source_of(name)
        if source is not None and source in self._groups:
            self._chosen.groups[name] = self._groups[source]
            self._use(name, source)
        else:
            self._lack(name, source)

    def _find(self, source: str | None, kind: str, place: str) -> tuple[Saved | None, Any]:
        """Return the checkpoint's group for a place, and the value at that place (_ABSENT if the group lacks it).

        If the group has another kind, returns None and records the difference.
        """
        group, _, key = (source or "").partition("/")
        saved = self._groups.get(group)
        if saved is not None and saved.kind != kind:
            group_here = place.partition("/")[0]
            said = f"{group_here} ({kind} here, {saved.kind} in the checkpoint)"
            if said not in self._differences.different:
                self._differences.different.append(said)
            return None, _ABSENT
        return saved, _ABSENT if saved is None else saved.tree.get(key, _ABSENT)

    def _use(self, place: str, source: str | None) -> None:
        self._taken.add(place)
        self._used.add(source or "")

    def _lack(self, place: str, source: str | None) -> None:
        """Record a place of the state for which the checkpoint has no value, if that is an error."""
        if source is not None and not self._selection.keep:
            self._differences.missing.append(place)

    def _check_names(self) -> None:
        here = [place for places in self._here.values() for place in places] + [RNG]
        there = [place for places in self._there.values() for place in places]
        for prefix, source in (self._selection.only or {}).items():
            if not any(_begins(place, prefix) for place in here):
                raise _named_nothing("only", prefix, "state", self._here)
            if not any(_begins(place, source) for place in there):
                raise _named_nothing("only", source, "checkpoint", self._there)
        for prefix in self._selection.leave:
            if not any(_begins(place, prefix) for place in (*here, *there)):
                raise _named_nothing("leave", prefix, "state", self._here)


_ABSENT: Any = object()


def _named_nothing(argument: str, name: str, side: str, places: Mapping[str, list[str]]) -> ConfigError:
    group = name.partition("/")[0]
    known = [place.partition("/")[2] for place in places[group]] if group in places and "/" in name else [*places]
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    where = f"{group} in the {side}" if group in places and "/" in name else f"the {side}"
    hint = f"There {'are' if len(known) != 1 else 'is'} {', '.join(known[:_SHOWN]) or 'none'}{more}."
    return ConfigError(f"{argument} names {name!r:.200}, and there is nothing of that name in {where}", hint=hint)


def _places(name: str, group: Saved) -> list[str]:
    if group.kind == "module":
        return [f"{name}/{key}" for key in group.tree]
    if group.kind == "optimizer":
        return [f"{name}/{one}" for one in parameters_in(group.tree)]
    return [name]


def _of_taken(tree: Mapping[str, Any], taken: Mapping[str, str], known: Mapping[str, int]) -> dict[str, Any]:
    """Reduce an optimizer's tree to the taken parameters, by their names in the state."""
    groups = [
        {"params": [one for one, source in taken.items() if known[source] == n], "options": members["options"]}
        for n, members in enumerate(tree["param_groups"])
    ]
    parts = {
        part: {one: tree[part][source] for one, source in taken.items() if source in tree[part]}
        for part in ("state", "shapes")
    }
    return {**tree, **parts, "param_groups": groups}


def _summed(places: Mapping[str, list[str]], chosen: set[str]) -> tuple[str, ...]:
    names: list[str] = []
    for name, all_of_it in places.items():
        some = [place for place in all_of_it if place in chosen]
        names += [name] if some and len(some) == len(all_of_it) else some
    return tuple(names)


def _begins(place: str, prefix: str) -> bool:
    return place == prefix or (place.startswith(prefix) and (prefix[-1] in "/." or place[len(prefix)] in "/."))


def _is_in(place: str, prefixes: Iterable[str]) -> bool:
    return any(_begins(place, prefix) for prefix in prefixes)


def _separator(source: str, rest: str) -> str:
    if not rest or source[-1] in "/.":
        return ""
    return "." if "/" in source else "/"
