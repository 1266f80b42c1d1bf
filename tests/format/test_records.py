"""The records of a ledger entry: each field has its type and its bounds, whatever digest the entry has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest

from ckpt_tasks.format.keys import (
    MANIFEST_NAME,
    MAX_EPOCH,
    MAX_LEDGER_NUMBER,
    MAX_STEP,
    Attempt,
    attempt_prefix,
    evaluation_name,
    shard_name,
)
from ckpt_tasks.format.parsing import MALFORMED
from ckpt_tasks.format.records import (
    Lease,
    Origin,
    read_checkpoint,
    read_evaluation,
    read_lease,
    read_origin,
    read_owner,
)
from tests.support.ledgers import evaluation_of, made, owner_of

NONCE = "0123456789abcdef"
SHARD = attempt_prefix(Attempt(1, 1, NONCE)) + shard_name("model", 0, 1, 0)
GOOD: dict[str, Any] = {
    "owner": owner_of(1),
    "checkpoint": made(1, 2, "0@1", metrics={"loss": 0.5}, epochs=1.5, reuses=(SHARD,)),
    "lease": Lease(id="a", manifest_digest="1@2", holder="eval", expires_at=100.0),
    "evaluation": evaluation_of(made(1, 2), loss=0.5),
    "origin": Origin(
        url="/runs/a", run_key="a", step=1, manifest_digest="1@2", identity="1@3", set={"lr": 1}, params={"lr": 2}
    ),
}
READERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "owner": read_owner,
    "checkpoint": read_checkpoint,
    "lease": read_lease,
    "evaluation": read_evaluation,
    "origin": read_origin,
}

TEXT: list[Any] = [None, 3, True, ["a"], {}]
OPTIONAL = TEXT[1:]
FLAG = [None, 0, 1, "yes"]
NUMBER = ["1", True, float("nan"), float("inf"), [1]]
WHOLE = ["1", None, True, 1.0, -1, [1]]
METRICS: list[Any] = [None, [1], {"loss": "low"}, {"loss": None}, {"loss": []}]
BAD: dict[str, dict[str, list[Any]]] = {
    "owner": {
        "epoch": [*WHOLE, MAX_EPOCH + 1],
        "pid": [*WHOLE, 2**31],  # it becomes a path below /proc
        "flow_run_id": OPTIONAL,
        "released": FLAG,
        **dict.fromkeys(("id", "host", "machine_id", "boot_id", "pid_namespace", "process_start", "taken_at"), TEXT),
    },
    "checkpoint": {
        "step": [*WHOLE, 2, MAX_STEP + 1],
        "attempt": [*TEXT, f"e000001-{NONCE}"],
        "manifest": [
            *TEXT,
            made(2, 2).manifest,
            made(1, 3).manifest,
            made(1, 2).manifest.replace("manifest.json", "index.arrow"),
            made(1, 2).manifest.removesuffix("/manifest.json"),
            "../manifest.json",
        ],
        "n": [*WHOLE, MAX_LEDGER_NUMBER + 1],
        "metrics": METRICS,
        "size_bytes": [*WHOLE, 1 << 63],
        "objects": [*WHOLE, 1 << 63],
        "parent": OPTIONAL,
        "cost_s": [*NUMBER, None, 2e9, -2e9],
        "epochs": [*NUMBER, 2e300],
        "abandoned": FLAG,
        "interim": FLAG,
        "reuses": [None, 3, [3], [None], ["../x"], [SHARD, made(1, 2).manifest]],
        **dict.fromkeys(("manifest_digest", "saved_at"), TEXT),
    },
    "lease": {
        "expires_at": [*NUMBER, None, 2e300],
        **dict.fromkeys(("id", "manifest_digest", "holder"), TEXT),
    },
    "evaluation": {
        "step": [*WHOLE, 2, MAX_STEP + 1],
        "suite": [*TEXT, "other"],
        "table": [*TEXT, evaluation_name(2, "quick", NONCE), "../x", SHARD],
        "metrics": METRICS,
        **dict.fromkeys(("manifest_digest", "table_digest", "evaluated_at"), TEXT),
    },
    "origin": {
        "step": [*WHOLE, MAX_STEP + 1],
        "set": ["lr", 3, [["lr", 1]]],
        "params": ["lr", 3, [["lr", 1]]],
        **dict.fromkeys(("url", "run_key", "manifest_digest", "identity"), TEXT),
    },
}


def cases() -> Iterator[Any]:
    for record, fields in BAD.items():
        for field, values in fields.items():
            yield pytest.param(record, field, values, id=f"{record}-{field}")


@pytest.mark.parametrize("record", GOOD)
def test_every_record_comes_back_and_each_of_its_fields_is_tried(record: str) -> None:
    """What is written is read back equal; the next test names every field that there is."""
    item = asdict(GOOD[record])
    assert READERS[record](item) == GOOD[record]
    assert BAD[record].keys() == item.keys()


@pytest.mark.parametrize(("record", "field", "values"), [*cases()])
def test_a_field_of_another_type_or_out_of_bounds_is_refused(record: str, field: str, values: list[Any]) -> None:
    """P49: a text for a number, a true for a one, a number that is too large: the record is malformed."""
    item = asdict(GOOD[record])
    for value in values:
        with pytest.raises(MALFORMED):
            READERS[record]({**item, field: value})


def test_the_largest_values_are_read() -> None:
    """The bounds refuse what is beyond them and nothing else."""
    most = replace(
        made(MAX_STEP, MAX_LEDGER_NUMBER), size_bytes=2**63 - 1, objects=2**63 - 1, cost_s=1e9, epochs=10**300
    )
    most = replace(
        most, attempt=f"e000001-{NONCE}", manifest=attempt_prefix(Attempt(MAX_STEP, 1, NONCE)) + MANIFEST_NAME
    )
    assert read_checkpoint(asdict(most)) == most
    owner = owner_of(MAX_EPOCH, pid=2**31 - 1)
    assert read_owner(asdict(owner)) == owner
