"""A run directory is anybody's: whatever lies in it ends in a clear error, and nothing outside of it is touched.

Every directory has fitting digests up to its ledger entry, as an attacker would make it, and is met by a verb in a fork
with an end to its memory and its time. Named cases say what must come of them; of drawn ones anything may, but well.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from tests.faults import hostile_cases, hostile_memory, hostile_tensors
from tests.faults.hostile import NEWEST, Hostile, train
from tests.faults.hostile_cases import Case
from tests.faults.hostile_values import Change, drawn, drawn_header, drawn_index
from tests.faults.hostile_verbs import ALL, CHANGING, VERBS, Told, canaries, copied, meet

_MAKERS = (
    hostile_cases.files, hostile_cases.documents, hostile_tensors.regions, hostile_memory.cases,
)  # fmt: skip
CASES = [case for make in _MAKERS for case in make()]
CASES.append(Case("files that change while they are read", lambda h: None, "any", verbs=("race",)))
assert len(CASES) == len({case.name for case in CASES})
_SHARES = 8  # of the long form


@pytest.fixture(scope="module")
def place(fast_dir: Path) -> Path:
    """Make the good run, which every verb takes well, here: what it imports a fork has then."""
    (made := fast_dir / "hostile").mkdir()
    canaries(made)
    train(made / "base")
    for verb in (*ALL, "listed"):
        VERBS[verb](copied(made), made)
    return made


def wrong(case: Case, lines: dict[str, Told]) -> Iterator[str]:
    """Say what did not come of a case that must."""
    checked, went_on = lines.get("verify", {}), lines.get("go on", {})
    if went_on.get("end") == "well" and not went_on["right"] and case.harm != "values":
        yield f"step {went_on['step']} came back with other values"
    yield from ill_remembered(case, lines.get("remember", {}))
    if case.harm in ("any", "values", "memory"):
        return
    if checked and checked["end"] != "well":
        yield f"verify ended with {checked['says']}"
        return
    told = json.loads(checked["out"]) if checked else {}
    if told and (checked["status"] != 1 or not re.search(case.named, checked["out"])):
        yield f"verify says {checked['status']}, {told}"
    if case.harm == "entry" and told and not any("ledger/" in name for name in told["damaged"]):
        yield f"verify does not name the entry: {told}"
    if case.harm == "checkpoint":
        if told and [one["step"] for one in told["checkpoints"] if not one["good"]] != [NEWEST]:
            yield f"verify finds {told['checkpoints']}"
        skipped = [step for step, _ in went_on.get("skipped", ())]
        if went_on and (went_on.get("step"), skipped) != (2, [NEWEST]):
            yield f"restored {went_on}"
        for verb in ("show", "export", "part", "diff", "evaluate"):
            told = lines.get(verb, {})
            if told.get("end") == "refused" and not told["key"]:
                yield f"{verb} names nothing: {told['says']}"
    elif case.harm == "entry" and went_on and not went_on.get("damaged"):
        yield f"restored without a word: {went_on}"


def ill_remembered(case: Case, told: Told) -> Iterator[str]:
    """Say what a process took, or did not take, from the memory that it found, and should have done otherwise."""
    if told.get("end") != "well":
        return
    if (told["step"], told["right"]) != (hostile_memory.NEXT, True):
        yield f"with that memory came back {told}"
    if ("/memory/" in told["source"]) != (case.harm == "any"):
        yield f"restored from {told['source']}"


def quick(case: Case, number: int) -> tuple[str, ...]:
    """Choose the verbs of the short form: one of its own in turn, and one that restores."""
    wanted = {case.verbs[number % len(case.verbs)], "remember", "race", "go on" if number % 2 else "part"}
    if case.harm != "any":
        wanted.add("verify")
    return tuple(verb for verb in case.verbs if verb in wanted)


def check(place: Path, case: Case, verbs: tuple[str, ...]) -> Counter[str]:
    """Let verbs meet a case one after the other, those that change it with a copy of their own."""
    h: Hostile | None = None
    told: dict[str, Told] = {}
    for verb in verbs:
        if h is None or verb in CHANGING:
            case.make(h := copied(place))
        try:
            told[verb] = meet(h, place, verb)
        except BaseException as error:
            error.add_note(f"{verb} met: {case.name}")
            raise
    assert [f"{case.name}: {word}" for word in wrong(case, told)] == []
    return Counter(one["end"] for one in told.values())


def test_a_hostile_directory_ends_in_a_clear_error(place: Path) -> None:
    """P21, P42, P49, P56: names, links, files that are none, headers, Arrow, JSON, trees, numbers, memory, races.

    Every verb of `ckpt`, a restore, saves that go on from it and an evaluation end well or with an error of ours that
    names what is wrong; never with a crash, a hang, all memory, or something changed outside of the directory.
    """
    ends: Counter[str] = Counter()
    for number, case in enumerate([case for case in CASES if not case.slow][::11]):
        ends += check(place, case, quick(case, number))
    assert ends["well"] > 15
    assert ends["refused"] > 5


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("share", range(_SHARES))
def test_every_hostile_directory_and_every_verb(place: Path, share: int) -> None:
    """P21, P42, P49, P56: what takes its time to make as well, and every verb for all of them."""
    for case in CASES[share::_SHARES]:
        check(place, case, case.verbs)


def taken(shard: Path) -> bool:
    """Say whether safetensors takes the header of a shard."""
    try:
        with safe_open(shard, framework="pt") as opened:
            return bool(opened.keys())
    except SafetensorError:
        return False


@pytest.mark.parametrize("examples", [10, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", ["manifest", "entry", "index", "header"])
def test_every_change_with_fitting_digests(place: Path, what: str, examples: int) -> None:
    """P21, P42, P49: drawn values in drawn places of every object of a run: it is read, or refused by our errors.

    Names, numbers, JSON that nests, words of the vocabulary, other kinds of value, what is gone or there twice. A shard
    that safetensors does not take is not good for `verify` either.
    """
    good = copied(place)
    changes: dict[str, st.SearchStrategy[Change]] = {
        "manifest": drawn(good.manifest(), Hostile.put_manifest),
        "entry": drawn(good.entry(), Hostile.put_entry),
        "index": drawn_index(good.index_path().read_bytes()),
        "header": drawn_header(good.header("extra")),
    }

    @settings(max_examples=examples)
    @given(changes[what])
    def check_one(change: Change) -> None:
        change(h := copied(place))
        told = meet(h, place, {"entry": "listed", "header": "verify"}.get(what, "met"))
        assert what != "header" or told["status"] == 1 or taken(h.root / h.shard("extra"))

    check_one()
