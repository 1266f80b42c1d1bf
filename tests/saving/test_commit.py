"""What a save is about to write is read first, as a restore reads it: nothing that would be refused is committed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ckpt_tasks.errors import CkptError, IntegrityError
from ckpt_tasks.format.index import Index
from ckpt_tasks.saving.commit import prepare_checkpoint
from ckpt_tasks.saving.parts import RankPart, Saving, digest_image, encode_groups, joined, new_attempt
from ckpt_tasks.snapshot.snapshot import ImageSet, plan_snapshot
from ckpt_tasks.state.capture import capture
from tests.support.ledgers import owner_of


def parts_of() -> tuple[Saving, RankPart]:
    captured = capture({"x": {"w": torch.zeros(5), "v": torch.zeros(2, 3)}, "seen": [1]})
    plan = plan_snapshot(captured.tensors, captured.frozen)
    images = ImageSet(plan, {name: memoryview(bytearray(size)) for name, size in plan.sizes.items()})
    owner = owner_of(1)
    attempt = new_attempt(1, owner, 1)
    saving = Saving(attempt=attempt, run_key="run", owner=owner, groups=encode_groups(captured), metrics={})
    return saving, joined([digest_image(attempt, image, lambda: False) for image in images.images])


HOLES: dict[str, Callable[[RankPart], RankPart]] = {
    "a region is missing": lambda part: replace(part, index=Index.of(part.index.rows[1:])),
    "a region is there twice": lambda part: replace(part, index=Index.of((part.index.rows[0], *part.index.rows))),
    "an object is missing": lambda part: replace(part, objects=part.objects[1:]),
    "an object ends earlier": lambda part: replace(
        part, objects=tuple(record._replace(size_bytes=record.size_bytes - 1) for record in part.objects)
    ),
    "another rank": lambda part: replace(part, rank=1),
}


@pytest.mark.parametrize("what", HOLES)
def test_what_has_holes_is_refused(what: str) -> None:
    """P47: a save whose parts do not make whole tensors and objects ends before index and manifest are written."""
    saving, part = parts_of()
    with pytest.raises(IntegrityError):
        prepare_checkpoint(saving, [HOLES[what](part)])


def test_a_manifest_that_no_reader_takes_is_refused() -> None:
    """P47: what the reader of a manifest would refuse is refused before it is written, whatever made it so."""
    saving, part = parts_of()
    with pytest.raises(CkptError):
        prepare_checkpoint(replace(saving, groups={"no group!": {"kind": "plain", "tree": 1}}), [part])
