"""A run directory is anybody's: whatever lies in it ends in a clear error, and nothing outside of it is touched.

Every directory has fitting digests up to its ledger entry, as an attacker would make it, and is met by a verb in a fork
with an end to its memory and its time. Named cases say what must come of them; of drawn ones anything may, but well.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from tests.faults import hostile_cases, hostile_memory
from tests.faults.hostile import NEWEST, Hostile, train
from tests.faults.hostile_cases import Case
from tests.faults.hostile_values import Change, drawn, drawn_header, drawn_index
from tests.faults.hostile_verbs import ALL, CHANGING, VERBS, Told, canaries, copied, meet
from tests.support.sweeps import SLOW, SOAK, quick_first, strides

CASES = [
    *hostile_cases.documents(), *hostile_cases.files(), *hostile_cases.regions(), *hostile_memory.cases(),
]  # fmt: skip
assert len(CASES) == len({case.name for case in CASES})


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
    went_on = lines.get("continue", {})
    if went_on.get("end") == "well" and not went_on["right"] and case.harm != "values":
        yield f"step {went_on['step']} came back with other values"
    if lines.get("remember", {}).get("end") == "well":
        remembered = lines["remember"]
        from_memory = "/memory/" in remembered["source"]
        if (remembered["step"], remembered["right"], from_memory) != (hostile_memory.NEXT, True, case.harm == "any"):
            yield f"with that memory came back {remembered}"
    if case.harm in ("checkpoint", "entry"):
        yield from unseen(case, lines)


def unseen(case: Case, lines: dict[str, Told]) -> Iterator[str]:
    """Say who did not see the damage that there is."""
    checked, went_on = lines.get("verify", {}), lines.get("continue", {})
    told = json.loads(checked["out"]) if checked.get("end") == "well" else {}
    if checked and (not told or checked["status"] != 1):
        yield f"verify says {checked}"
    if case.harm == "entry":
        if told and not any("ledger/" in name for name in told["damaged"]):
            yield f"verify does not name the entry: {told}"
        if went_on and not went_on.get("damaged"):
            yield f"restored without a word: {went_on}"
        return
    if told and [one["step"] for one in told["checkpoints"] if not one["good"]] != [NEWEST]:
        yield f"verify finds {told['checkpoints']}"
    if went_on and (went_on.get("step"), [step for step, _ in went_on.get("skipped", ())]) != (2, [NEWEST]):
        yield f"restored {went_on}"
    for verb in ("show", "export", "part", "diff", "evaluate"):
        if lines.get(verb, {}).get("end") == "refused" and not lines[verb]["key"]:
            yield f"{verb} names nothing: {lines[verb]['says']}"


@strides(17, 4)
@pytest.mark.parametrize("share", quick_first(range(3)))
@pytest.mark.timeout(3000)
def test_a_hostile_directory_ends_in_a_clear_error(place: Path, share: int, stride: int) -> None:
    """P21, P42, P49, P56: names, links, files that are none, headers, JSON, trees, numbers, regions, memory.

    Every verb of `ckpt`, a restore, saves that go on from it and an evaluation end well or with an error of ours that
    names what is wrong; never with a crash, a hang, all memory, or something changed outside of the directory. The
    quick form takes every fifty-first case, and of its verbs one in turn and one that restores.
    """
    ends: Counter[str] = Counter()
    for number, case in enumerate(CASES[share * stride :: 3 * stride]):
        wanted = {case.verbs[number % len(case.verbs)], "remember", "verify", "continue" if number % 2 else "part"}
        verbs = [verb for verb in case.verbs if stride == 1 or verb in wanted]
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
        ends += Counter(one["end"] for one in told.values())
    assert min(ends["well"], ends["refused"]) > 0


def taken(shard: Path) -> bool:
    """Say whether safetensors takes the header of a shard."""
    try:
        with safe_open(shard, framework="pt") as opened:
            return bool(opened.keys())
    except SafetensorError:
        return False


@pytest.mark.parametrize("examples", [5, pytest.param(200, marks=SLOW), pytest.param(3000, marks=SOAK)])
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
