"""The seal of a snapshot: read back equal, or refused: what is damaged, foreign or newer vouches for nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ckpt_tasks.errors import FormatVersionError, IntegrityError
from ckpt_tasks.format.digests import canonical_json, digest_hex
from ckpt_tasks.format.records import SEAL_VERSION, Seal
from tests.support.ledgers import made

SEAL = Seal(
    run_key="lm",
    checkpoint=replace(made(7, 4, "6@3", metrics={"loss": 0.5}), n=-1),
    newest="6@3",
    in_flight=None,
)


def sealed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """Change a seal's body and give it a fitting digest, as a newer writer or an attacker would."""
    body = json.loads(SEAL.to_bytes())
    del body["digest"]
    change(body)
    return canonical_json({**body, "digest": digest_hex(canonical_json(body))})


def test_a_seal_comes_back_equal() -> None:
    """What it says of a snapshot that no ledger has yet is read back as it was."""
    assert Seal.from_bytes(SEAL.to_bytes()) == SEAL
    assert Seal.from_bytes(sealed(lambda body: None)) == SEAL


def test_every_flipped_bit_is_damage() -> None:
    """P49: a seal with any one bit flipped vouches for no snapshot, unless it says the same."""
    data = SEAL.to_bytes()
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        try:
            again = Seal.from_bytes(bytes(flipped))
        except IntegrityError:
            continue
        assert again == SEAL


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{}", b'{"digest":1}', b"\xff", b"[" * 100_000])
def test_torn_bytes_are_damage(data: bytes) -> None:
    """P49: bytes that are no seal are an error of ours."""
    with pytest.raises(IntegrityError):
        Seal.from_bytes(data)


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
        Seal.from_bytes(sealed(change))


def test_a_newer_seal_says_upgrade() -> None:
    """P59: a seal of a newer version is not damage."""
    with pytest.raises(FormatVersionError, match="Upgrade"):
        Seal.from_bytes(sealed(lambda body: body.update(version=SEAL_VERSION + 1)))
