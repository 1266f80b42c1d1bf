"""The records of a ledger entry: each field has its type and its bounds, whatever digest the entry has."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from ckpt_tasks.format.keys import MAX_EPOCH, MAX_LEDGER_NUMBER, MAX_STEP, evaluation_name
from ckpt_tasks.format.records import Checkpoint, Evaluation, Lease, Origin, Owner, RunCheck
from tests.format.test_documents import DOCUMENTS, FAR, FIRST, MANIFEST, OUT, TEXT, WHOLE, refuses

FLAG, FLOAT, NAMED = [None, 0, 1, "yes"], ["1", True, [1], 2e300], [None, [1], {"loss": "low"}, {"loss": None}]
# Each record of an entry: the way to it, and what each of its fields must not be.
RECORDS: dict[type, tuple[tuple[Any, ...], dict[str, list[Any]]]] = {
    Owner: (
        ("state", "owner"),
        {
            **dict.fromkeys(
                ("id", "host", "machine_id", "boot_id", "pid_namespace", "process_start", "taken_at"), TEXT
            ),
            "epoch": [*WHOLE, MAX_EPOCH + 1],
            "pid": [*WHOLE, 2**31],
            "flow_run_id": [3],
            "released": FLAG,
        },
    ),
    Checkpoint: (
        ("state", "live", 0),
        {
            "step": [*WHOLE, 2, MAX_STEP + 1],
            "n": [*WHOLE, 4, MAX_LEDGER_NUMBER + 1],
            "metrics": [*NAMED, {"a": FAR}],
            "attempt": [*TEXT, "e000001-0123456789abcdef"],
            "manifest": [*OUT, *(FIRST.manifest.replace("manifest.json", end) for end in ("", "index.arrow"))],
            "parent": [3],
            "cost_s": [*FLOAT, None, 2e9, -2e9],
            "epochs": WHOLE[:-1],
            "abandoned": FLAG,
            "interim": FLAG,
            **{name: [*WHOLE, 1 << 63] for name in ("size_bytes", "objects")},
            "reuses": [None, 3, [3], [None], ["../x"], [FIRST.manifest]],
            "why": TEXT[1:],  # Older checkpoints lack it.
            **dict.fromkeys(("manifest_digest", "saved_at"), TEXT),
        },
    ),
    Lease: (
        ("state", "leases", 0),
        {"expires_at": [*FLOAT, None], **dict.fromkeys(("id", "manifest_digest", "holder"), TEXT)},
    ),
    Evaluation: (
        ("state", "evaluations", 0),
        {
            "step": [*WHOLE, 2, MAX_STEP + 1],
            "suite": [*TEXT, "other"],
            "metrics": NAMED,
            "table": [*OUT, evaluation_name(2, "quick", "0" * 16), MANIFEST.objects[0].name],
            **dict.fromkeys(("manifest_digest", "table_digest", "evaluated_at"), TEXT),
        },
    ),
    Origin: (
        ("state", "origin"),
        {
            "step": [*WHOLE, MAX_STEP + 1],
            "set": ["lr", 3, [["lr", 1]]],
            "params": ["lr", 3, [["lr", 1]]],
            **dict.fromkeys(("url", "run_key", "manifest_digest", "identity"), TEXT),
        },
    ),
    RunCheck: (
        ("state", "checks", 0),
        {
            "kind": [*TEXT, "verify", "teleport"],
            "fault": [3],
            "figures": [None, [], {"step": 1}, {"step": 1.5, "ranks": 1}, {"step": 1, "ranks": 1, "start_s": "1"}],
            **dict.fromkeys(("at", "host"), TEXT),
        },
    ),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_a_field_of_another_type_or_out_of_bounds_is_refused(kind: type) -> None:
    """P49: a text for a number, a true for a one, a number that is too large: damage; each field is tried."""
    way, values = RECORDS[kind]
    assert {*values} == {field.name for field in fields(kind)}
    for name, wrong in values.items():
        refuses(DOCUMENTS["entry"], (*way, name), wrong)
