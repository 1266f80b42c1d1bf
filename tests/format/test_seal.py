"""The seal of a snapshot: read back equal, or refused: what is damaged, foreign or newer vouches for nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ckpt_tasks.errors import FormatVersionError, IntegrityError
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.ledger import Entry
from ckpt_tasks.format.manifest import Manifest
from ckpt_tasks.format.records import SEAL_VERSION, Seal
from tests.format.test_ledger import FULL, entry
from tests.support.ledgers import made, resealed

SEAL = Seal(
    run_key="lm",
    checkpoint=replace(made(7, 4, "6@3", metrics={"loss": 0.5}), n=-1),
    newest="6@3",
    in_flight=None,
)


def test_a_seal_comes_back_equal() -> None:
    """What it says of a snapshot that no ledger has yet is read back as it was."""
    assert Seal.from_bytes(SEAL.to_bytes()) == SEAL
    assert Seal.from_bytes(resealed(SEAL.to_bytes(), lambda body: None)) == SEAL


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(run_key=None),
        lambda body: body.update(run_key=["lm"]),
        lambda body: body.update(newest=3),
        lambda body: body.update(in_flight=3),
        lambda body: body.update(more=1),
        lambda body: body.update(version="1"),
        lambda body: body.update(checkpoint=None),
        lambda body: body["checkpoint"].update(step=8),
        lambda body: body["checkpoint"].update(n=-2),
        lambda body: body["checkpoint"].update(manifest="../manifest.json"),
        *(
            lambda body, name=name: body.pop(name)
            for name in ("run_key", "checkpoint", "newest", "in_flight", "version")
        ),
    ],
)
def test_a_seal_that_nobody_wrote_is_damage(change: Callable[[dict[str, Any]], object]) -> None:
    """P49: missing and foreign fields, and values of other types: damage, even where the digest fits."""
    with pytest.raises(IntegrityError):
        Seal.from_bytes(resealed(SEAL.to_bytes(), change))


def test_a_newer_seal_says_upgrade() -> None:
    """P59: a seal of a newer version is not damage."""
    with pytest.raises(FormatVersionError, match="Upgrade"):
        Seal.from_bytes(resealed(SEAL.to_bytes(), lambda body: body.update(version=SEAL_VERSION + 1)))


# ── bytes that nobody wrote, in the place of an entry, a seal or a manifest ──────────────────────────────────────

READERS: dict[str, Callable[[bytes], Any]] = {
    "entry": lambda data: Entry.from_bytes(data, "x")[0],
    "seal": Seal.from_bytes,
    "manifest": lambda data: Manifest.from_bytes(data, digest=digest_hex(data), name="x"),
}
TORN = [b"", b"null", b"[]", b"{", b"{}", b'{"digest":1}', b'{"version":1}', b"\xff", b"\0" * 500, b"[" * 100_000]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("data", TORN, ids=lambda data: repr(data[:12]))
def test_torn_bytes_are_damage(reader: str, data: bytes) -> None:
    """P35, P49: a cut, zero-filled or foreign object is damage, which counts as "nothing happened"."""
    with pytest.raises(IntegrityError):
        READERS[reader](data)


@pytest.mark.parametrize(
    ("reader", "data", "value"),
    [("entry", entry(FULL).to_bytes()[0], entry(FULL)), ("seal", SEAL.to_bytes(), SEAL)],
    ids=["entry", "seal"],
)
def test_every_flipped_bit_is_damage_or_means_the_same(reader: str, data: bytes, value: Any) -> None:
    """P49: with any one bit flipped an entry or a seal is refused, unless it still says exactly the same."""
    refused = 0
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        try:
            again = READERS[reader](bytes(flipped))
        except IntegrityError:
            refused += 1
        else:
            assert again == value
    assert refused > 0.98 * len(data)
