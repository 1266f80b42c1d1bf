"""What counts as a good object: every bit of it is covered by a digest that fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.copying.transfer import Transfer, changes
from ckpt_tasks.errors import ObjectNotFoundError, StateError
from ckpt_tasks.format.keys import MAX_FOLDED
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.manifest import ObjectRecord
from ckpt_tasks.reading.opening import open_checkpoint
from ckpt_tasks.storage.local import LocalStore
from tests.support.syncs import train


@pytest.fixture(scope="module")
def shard(fast_dir: Path) -> tuple[ObjectRecord, Any, bytes]:
    """Return one shard: its record, its rows and its bytes."""
    run = train(fast_dir / "shard", 1)
    found = open_checkpoint(run.history.store, run.find(1))
    (record,) = (record for record in found.manifest.objects if "/x-" in record.name)
    rows = [row for row in found.rows if row.object == record.name]
    return record, rows, run.history.store.get(record.name, 1 << 20)


@given(at=st.integers(0), bit=st.integers(0, 7))
def test_any_changed_bit_is_a_change(shard: tuple[ObjectRecord, Any, bytes], at: int, bit: int) -> None:
    """P47: whatever bit of an object is turned, its header's included, it is not what was written."""
    record, rows, data = shard
    assert changes(record, rows, memoryview(data)) == []
    turned = bytearray(data)
    turned[at % len(data)] ^= 1 << bit
    assert changes(record, rows, memoryview(turned))


def test_bytes_without_a_digest_are_no_good(shard: tuple[ObjectRecord, Any, bytes]) -> None:
    """P47: an object of which a part has no digest cannot be verified, and is not copied."""
    record, rows, data = shard
    (fault,) = changes(record, rows[:-1], memoryview(data))
    assert "have no digest" in fault


def test_a_folded_name_that_was_given_up(fast_dir: Path) -> None:
    """MUST 8: an object of any rank that the target's ledger or its notes give up in one name is refused."""
    folded = f"checkpoint_000000000001/e000001-00000000000000aa/x-[0-{MAX_FOLDED - 1}]-of-09999999-{{}}.safetensors"
    state, store = State(retired=(folded.format(0),)), LocalStore(fast_dir / "given up")
    with Transfer(store, store, state, lambda size_bytes: None, frozenset({folded.format(1)})) as transfer:
        for part, error in ((0, StateError), (1, StateError), (2, ObjectNotFoundError)):
            name = folded.format(part).replace(f"[0-{MAX_FOLDED - 1}]", "00007")
            with pytest.raises(error):
                transfer.bring(ObjectRecord(name, 1, "00" * 16, 1), ())
