"""Names: built and parsed in one place, foreign ones never misread."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.format.keys import (
    MAX_STEP,
    Attempt,
    attempt_prefix,
    evaluation_name,
    heartbeat_name,
    is_attempt_object,
    is_evaluation,
    is_group,
    is_live_list,
    is_object_name,
    is_run_key,
    is_shard,
    ledger_name,
    live_list_name,
    parse_attempt,
    parse_ledger_name,
    shard_name,
)

NONCE = "0123456789abcdef"
attempts = st.builds(Attempt, st.integers(0, MAX_STEP), st.integers(0, 10**7), st.just(NONCE))


@given(st.integers(0, 2**63 - 1))
def test_a_ledger_number_comes_back_from_its_name(n: int) -> None:
    """A ledger entry's number is read back from its name, which is an object's name."""
    assert parse_ledger_name(ledger_name(n)) == n
    assert is_object_name(ledger_name(n))


@given(st.integers(0, 10**18), st.integers(0, 10**18))
def test_the_newest_ledger_entry_lists_first(a: int, b: int) -> None:
    """P51: sorted as text, ledger names run from the highest number down: 10 comes before 9."""
    assert (ledger_name(a) < ledger_name(b)) == (a > b)


@given(attempts, attempts)
def test_attempts_come_back_and_sort_by_step(one: Attempt, other: Attempt) -> None:
    """P51: an attempt is read back from any name below it, and directories sort as numbers do: 9 before 10."""
    for attempt in (one, other):
        assert parse_attempt(attempt_prefix(attempt)) == attempt
        assert parse_attempt(attempt_prefix(attempt) + "manifest.json") == attempt
        assert is_object_name(attempt_prefix(attempt) + shard_name("model", 7, 8, 12))
    if one.step != other.step:
        assert (attempt_prefix(one) < attempt_prefix(other)) == (one.step < other.step)


def test_two_tries_of_one_step_have_different_names() -> None:
    """P32: a retry writes to names of its own, whatever the first attempt left."""
    assert Attempt(5, 1, NONCE).name != Attempt(5, 1, NONCE[::-1]).name
    assert Attempt(5, 1, NONCE).name != Attempt(5, 2, NONCE).name


PREFIX = attempt_prefix(Attempt(5, 1, NONCE))
SHARD = shard_name("model", 0, 1, 0)
EVALUATION = evaluation_name(5, "quick", NONCE)
LIVE = live_list_name("0123456789abcdef" * 2)
ENTRY = "ledger/99999999999999999987-00000000000000000012.json"
INDIC = "\N{ARABIC-INDIC DIGIT FIVE}"
OTHERS = ("", "format.json", "ledger/x", "../x", PREFIX, PREFIX.rstrip("/"), f"x/{PREFIX}{SHARD}", SHARD)
# Each kind of name: what tells it, those that are, and those that are not.
NAMES: dict[str, tuple[Callable[[str], object], tuple[str, ...], tuple[str, ...]]] = {
    "attempt": (
        parse_attempt,
        (PREFIX, PREFIX + "x"),
        (
            *("checkpoint-final", "checkpoint_5", "checkpoint_000000000005", "checkpoint_000000000005/", ".DS_Store"),
            *(f"checkpoint_1e3000000000/e000001-{NONCE}", f"checkpoint_0000000000055/e000001-{NONCE}", "007", "1e3"),
            *(f"checkpoint_000000000005/{name}-{NONCE}" for name in ("e1", "e0000001")),
            *(f"checkpoint_000000000005/e000001-{end}" for end in (NONCE.upper(), f"{NONCE}.tmp", f"{NONCE}\n")),
            *(f"checkpoint_00000000000{INDIC}/e000001-{NONCE}", f" {PREFIX}", f"x/{PREFIX}", ""),
        ),
    ),
    "ledger entry": (
        lambda name: parse_ledger_name(name) is not None,
        (ENTRY,),
        (
            ENTRY.replace("12.json", "13.json"),  # the two numbers disagree
            *(ENTRY + ".tmp", ENTRY + "\n", ENTRY.replace("-", "_"), ENTRY.removeprefix("ledger/"), "ledger/12.json"),
            *("ledger/.tmp-0011223344556677", ENTRY.replace("87", f"8{INDIC}")),
        ),
    ),
    "object": (
        is_object_name,
        (LIVE, EVALUATION, heartbeat_name(0), ENTRY, PREFIX + SHARD),
        (
            *("", "/", "/etc/passwd", "..", "../run/ledger", "ledger/../../x", "ledger//x", "ledger/", "./x", "-rf"),
            *(".hidden", "a/.hidden", "simplecache::http://169.254.169.254/latest", "http://host/x", "C:\\x", "a\\b"),
            *("a b", "a\0b", "a\nb", "name\n", "ä", "a/b/c/d/e", "x" * 201, "~", "a*"),
        ),
    ),
    "group": (
        is_group,
        ("model", "M0_x", "a" * 64),
        ("_x", "0x", "a-b", "a.b", "a/b", "", "a" * 65, "ä", "model\n"),
    ),
    "object of an attempt": (
        is_attempt_object,
        (PREFIX + "index.arrow", PREFIX + "some/table"),
        (*OTHERS, *(PREFIX + end for end in ("../x", "a/../../../x", ".hidden", "/x", "a//b", "a/b/c", "x\n", "a b"))),
    ),
    "shard": (
        is_shard,
        (PREFIX + SHARD,),
        (
            *OTHERS,
            *(PREFIX + end for end in ("index.arrow", "manifest.json", f"a/{SHARD}", f"../{SHARD}", f"{SHARD}\n")),
            *(PREFIX + end for end in ("model-0-of-1-0.safetensors", "-00000-of-00001-0.safetensors", f"{SHARD}.tmp")),
            *(PREFIX + end for end in ("a-b-00000-of-00001-0.safetensors", SHARD.replace("0-of", f"{INDIC}-of"))),
        ),
    ),
    "evaluation of step 5 by quick": (
        lambda name: is_evaluation(name, 5, "quick"),
        (EVALUATION,),
        (
            *(evaluation_name(6, "quick", NONCE), evaluation_name(5, "other", NONCE), EVALUATION.upper(), SHARD),
            *("x/" + EVALUATION, EVALUATION + "\n", "evals/5-quick-" + NONCE + ".arrow", PREFIX + SHARD, ""),
        ),
    ),
    "list of checkpoints": (
        is_live_list,
        (LIVE,),
        (*map(live_list_name, ("f" * 31, "f" * 33, "F" * 32, "../" + "f" * 32, "f" * 32 + "\n", "g" * 32)), "x" + LIVE),
    ),
    "run": (
        is_run_key,
        ("lm-7.b_2",),
        ("", ".", "..", ".hidden", "-rf", "a/b", "a b", "a\n", "ä", "x" * 201, "a\\b", "a:b", "~"),
    ),
}


@pytest.mark.parametrize("kind", NAMES)
def test_a_foreign_name_is_never_misread(kind: str) -> None:
    """P42, P51: near misses, other digits, URLs and every way out are none; what we write ourselves is one."""
    tells, good, bad = NAMES[kind]
    assert [name for name in good if not tells(name)] == []
    assert [name for name in bad if tells(name)] == []
