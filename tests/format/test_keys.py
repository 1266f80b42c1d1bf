"""Names: built and parsed in one place, foreign ones never misread."""

from __future__ import annotations

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


@given(st.integers(0, 10**20 - 1))
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


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint-final",
        "checkpoint_5",
        "checkpoint_000000000005",
        "checkpoint_000000000005/",
        "checkpoint_1e3000000000/e000001-" + NONCE,
        "checkpoint_000000000005/e1-" + NONCE,
        "checkpoint_000000000005/e0000001-" + NONCE,
        "checkpoint_000000000005/e000001-" + NONCE.upper(),
        "checkpoint_000000000005/e000001-" + NONCE + ".tmp",
        "checkpoint_000000000005/e000001-" + NONCE + "\n",
        "checkpoint_0000000000055/e000001-" + NONCE,
        "checkpoint_00000000000\N{ARABIC-INDIC DIGIT FIVE}/e000001-" + NONCE,
        " checkpoint_000000000005/e000001-" + NONCE,
        "x/checkpoint_000000000005/e000001-" + NONCE,
        ".DS_Store",
        "007",
        "1e3",
        "",
    ],
)
def test_a_foreign_name_is_no_attempt(name: str) -> None:
    """P51: names of other programs, near misses, other digits and trailing slashes are ignored, not misread."""
    assert parse_attempt(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "ledger/99999999999999999987-00000000000000000013.json",  # the two numbers disagree
        "ledger/12.json",
        "ledger/99999999999999999987-00000000000000000012.json.tmp",
        "ledger/99999999999999999987-00000000000000000012.json\n",
        "ledger/.tmp-0011223344556677",
        "ledger/99999999999999999987_00000000000000000012.json",
        "99999999999999999987-00000000000000000012.json",
        "ledger/\N{ARABIC-INDIC DIGIT NINE}9999999999999999987-00000000000000000012.json",
    ],
)
def test_a_foreign_name_is_no_ledger_entry(name: str) -> None:
    """P51: only a name that we would have written ourselves is an entry."""
    assert parse_ledger_name(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/",
        "/etc/passwd",
        "..",
        "../run/ledger",
        "ledger/../../x",
        "ledger//x",
        "ledger/",
        "./x",
        ".hidden",
        "a/.hidden",
        "-rf",
        "simplecache::http://169.254.169.254/latest",
        "http://host/x",
        "C:\\x",
        "a\\b",
        "a b",
        "a\0b",
        "a\nb",
        "name\n",
        "ä",
        "a/b/c/d/e",
        "x" * 201,
        "~",
        "a*",
    ],
)
def test_a_way_out_is_no_object_name(name: str) -> None:
    """P42: dots first, slashes, URLs, protocols, control characters, other alphabets, long names: none is a name."""
    assert not is_object_name(name)


def test_our_own_names_are_object_names() -> None:
    """Every name that we build passes the check that a store makes."""
    names = [live_list_name("f" * 32), evaluation_name(0, "quick", NONCE), heartbeat_name(0), shard_name("m", 0, 1, 0)]
    assert all(is_object_name(name) for name in names)


@pytest.mark.parametrize(
    ("name", "good"),
    [
        *((name, True) for name in ("model", "M0_x", "a" * 64)),
        *((name, False) for name in ("_x", "0x", "a-b", "a.b", "a/b", "", "a" * 65, "ä", "model\n")),
    ],
)
def test_a_group_is_a_plain_word(name: str, good: bool) -> None:
    """A group becomes part of a file's name, so it is a letter, then letters, digits and underscores."""
    assert is_group(name) is good


PREFIX = attempt_prefix(Attempt(5, 1, NONCE))
SHARD = shard_name("model", 0, 1, 0)
OTHERS = ["", "format.json", "ledger/x", "../x", f"{PREFIX}", PREFIX.rstrip("/"), f"x/{PREFIX}{SHARD}", SHARD]


@pytest.mark.parametrize(
    "name",
    [*OTHERS, *(PREFIX + end for end in ("../x", "a/../../../x", ".hidden", "/x", "a//b", "a/b/c", "x\n", "a b"))],
)
def test_only_what_lies_below_an_attempt_is_its_object(name: str) -> None:
    """P42: what is deleted with an attempt lies below it: not the directory itself, nothing outside, nothing hidden."""
    assert is_attempt_object(PREFIX + "index.arrow")
    assert is_attempt_object(PREFIX + "some/table")
    assert not is_attempt_object(name)


@pytest.mark.parametrize(
    "name",
    [
        *OTHERS,
        *(PREFIX + end for end in ("index.arrow", "manifest.json", f"a/{SHARD}", f"../{SHARD}", f"{SHARD}\n")),
        *(PREFIX + end for end in ("model-0-of-1-0.safetensors", "-00000-of-00001-0.safetensors", f"{SHARD}.tmp")),
        *(
            PREFIX + end
            for end in ("a-b-00000-of-00001-0.safetensors", SHARD.replace("0-of", "\N{ARABIC-INDIC DIGIT ONE}-of"))
        ),
    ],
)
def test_only_a_shard_directly_below_an_attempt_is_one(name: str) -> None:
    """P42: a manifest and an index name shards, and no other object of any attempt."""
    assert is_shard(PREFIX + SHARD)
    assert not is_shard(name)


@pytest.mark.parametrize(
    "name",
    [
        evaluation_name(6, "quick", NONCE),
        evaluation_name(5, "other", NONCE),
        evaluation_name(5, "quick", NONCE.upper()),
        evaluation_name(5, "quick", NONCE) + "\n",
        "x/" + evaluation_name(5, "quick", NONCE),
        "evals/5-quick-" + NONCE + ".arrow",
        PREFIX + SHARD,
        "",
    ],
)
def test_an_evaluation_names_the_table_of_its_own_step_and_suite(name: str) -> None:
    """P42: a table of another step or suite, and any other object, is none of this evaluation."""
    assert is_evaluation(evaluation_name(5, "quick", NONCE), 5, "quick")
    assert not is_evaluation(name, 5, "quick")


@pytest.mark.parametrize("digest", ["f" * 31, "f" * 33, "F" * 32, "../" + "f" * 32, "f" * 32 + "\n", "g" * 32, ""])
def test_a_live_list_is_named_by_a_digest(digest: str) -> None:
    """P42: what stands where a digest should makes no name of a list."""
    assert is_live_list(live_list_name("0123456789abcdef" * 2))
    assert not is_live_list(live_list_name(digest))
    assert not is_live_list("x" + live_list_name("f" * 32))


@pytest.mark.parametrize(
    "key", ["", ".", "..", ".hidden", "-rf", "a/b", "a b", "a\n", "ä", "x" * 201, "a\\b", "a:b", "~"]
)
def test_a_run_key_is_one_flat_part(key: str) -> None:
    """P42: a run's key becomes a directory's name, with no way out of the place where runs lie."""
    assert is_run_key("lm-7.b_2")
    assert not is_run_key(key)
