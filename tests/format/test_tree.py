"""The state tree as JSON: every type comes back exactly, everything else is refused by path."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.errors import CkptError, FormatVersionError, IntegrityError, UnsupportedStateError
from ckpt_tasks.format.tree import (
    KINDS,
    MAX_DEPTH,
    MAX_INT_BITS,
    MAX_OF_ONE_HASH,
    Typed,
    decode,
    encode,
)


def through_json(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


def _cycle(make: Callable[[], Any], tie: Callable[[Any], None]) -> Any:
    value = make()
    tie(value)
    return value


@pytest.mark.parametrize(
    "cyclic",
    [
        _cycle(list, lambda v: v.append(v)),
        _cycle(dict, lambda v: v.update(a=v)),
        _cycle(dict, lambda v: v.update({0: v})),
        _cycle(deque, lambda v: v.append(v)),
        _cycle(list, lambda v: v.append((v,))),
        _cycle(OrderedDict, lambda v: v.update({0: v})),
    ],
    ids=["list", "dict", "int keys", "deque", "tuple", "OrderedDict"],
)
def test_a_cycle_is_refused_also_deep_in_a_call_stack(cyclic: Any) -> None:
    """P7: a cycle ends in a clear refusal, not in a RecursionError, also where many calls are open already."""

    def deep(frames: int) -> Any:
        return encode(cyclic, "x") if frames == 0 else deep(frames - 1)

    with pytest.raises(UnsupportedStateError, match="cycle"):
        deep(350)


def test_the_deepest_tree_comes_back_and_a_deeper_one_is_refused() -> None:
    """P42: what can just be written can be read; the bound holds, and not the recursion limit of the reader."""
    value: Any = 1
    for _ in range(MAX_DEPTH + 1):
        value = (value,)
    assert through_json(value) == value
    node: Any = 1
    for _ in range(MAX_DEPTH + 4):
        node = [node]
    with pytest.raises(IntegrityError, match="too deep"):
        decode(node)


def test_many_keys_of_many_hashes_come_back() -> None:
    """Only keys of one hash are counted: a large dict, and one with as many alike as there may be, are stored."""
    alike = [n * (2**61 - 1) for n in range(1, MAX_OF_ONE_HASH + 1)]
    for keys in (range(1000), [*alike, 1]):
        assert through_json(dict.fromkeys(keys)) == dict.fromkeys(keys)


def test_a_set_has_one_form_whatever_the_hash_seed() -> None:
    """The same set gives the same bytes in every process, sets of sets too."""
    code = (
        "import json; from ckpt_tasks.format.tree import encode;"
        "print(json.dumps(encode({frozenset({'a', 'bb', 'c'}), frozenset({'x', 'y', 'a'}), 'm', 1, (1, 2)})))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3", "4")
    }
    assert len(texts) == 1


TAGS = [*sorted({row.tag for row in KINDS}), "~os.system"]
jsons = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inside: (
        st.lists(inside, max_size=4)
        | st.dictionaries(st.text(max_size=3), inside, max_size=2)
        | st.tuples(
            st.sampled_from(TAGS),
            inside,
        ).map(lambda pair: dict([pair]))
    ),
    max_leaves=12,
)


@given(jsons)
def test_hostile_json_gives_a_value_or_an_error_of_ours(node: Any) -> None:
    """P21: whatever JSON stands where a tree should be, decoding runs nothing and raises nothing but our errors."""
    try:
        value = decode(node)
    except CkptError:
        return
    encode(value)  # … and what it gives is made of the vocabulary alone


WRONG: dict[str, list[Any]] = {
    "int8": [128, -129, 1.0, True, "1", None],
    "uint8": [256, -1],
    "int64": [2**63, -(2**63) - 1],
    "float64": [1, True, "1", [1.0]],
    "bool": [1, "true"],
    "complex64": [1.0, 1],
    "object": ["x", None, [1]],
}
NO_SCALARS = [(dtype, value) for dtype, values in WRONG.items() for value in values]


MALFORMED: dict[str, list[Any]] = {
    "~tensor": [["key", []], ["key", {"stride": 5}], ["key", {"stride": [1e999]}], 3],
    "~dict": [[[1]], 3, [[[1], 2]]],
    "~set": [[[1]]],
    "~float": ["1e5", []],
    "~bytes": ["?", "äöü"],
    "~complex": [[1]],
    "~datetime": ["yesterday"],
    "~timedelta": [[10**20, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8]],
    "~deque": [[-1, []]],
    "~torch": [["module", "os"], ["size", ["a"]], ["size", [math.inf]]],
    "~numpy": [[], *([dtype, value] for dtype, value in NO_SCALARS)],
    "~counter": [[[1, 2, 3]]],
    "~defaultdict": [["os.system", []]],
    "~enum": [["a:b"]],
    "~named": [3],
    "": [2**MAX_INT_BITS, -(2**MAX_INT_BITS), math.inf, math.nan],
}


@pytest.mark.parametrize("tag", MALFORMED)
def test_a_malformed_entry_is_an_integrity_error(tag: str) -> None:
    """P21, P49: what `encode` cannot have written is refused, whatever it does to the reader of that entry."""
    for node in MALFORMED[tag]:
        with pytest.raises(IntegrityError):
            decode({"a": [{tag: node} if tag else node]})


@pytest.mark.parametrize("tag", ["~tuple", "~complex", "~numpy", "~dict", "~deque", "[", "{"])
def test_nesting_without_end_is_an_integrity_error(tag: str) -> None:
    """A tree that nests without end is refused before the stack is gone, through every kind of entry."""
    node: Any = 1
    for _ in range(5000):
        match tag:
            case "[":
                node = [node]
            case "{":
                node = {"a": node}
            case "~dict":
                node = {tag: [[0, node]]}
            case "~numpy":
                node = {tag: ["float64", node]}
            case "~deque":
                node = {tag: [None, [node]]}
            case _:
                node = {tag: [node, 0]}
    with pytest.raises(IntegrityError):
        decode(node)


def test_the_largest_numbers_come_back() -> None:
    """The bounds refuse what is beyond them and nothing else."""
    heads = [("int8", -128), ("int8", 127), ("uint64", 2**64 - 1)]
    scalars = [Typed("~numpy", head, {}) for head in heads]
    value = [2**MAX_INT_BITS - 1, -(2**MAX_INT_BITS) + 1, *scalars]
    assert decode(encode(value)) == value
    with pytest.raises(UnsupportedStateError):
        encode(2**MAX_INT_BITS)


def test_an_unknown_entry_is_a_newer_format() -> None:
    """P59: an entry that this version has no word for is never skipped or taken for a dict."""
    with pytest.raises(FormatVersionError, match="upgrade"):
        decode({"a": [{"~quaternion": [1, 2, 3, 4]}]})
