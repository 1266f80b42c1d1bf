"""The data of many ranks: each sample comes once, and ranks of one model get the same ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from ckpt_tasks import Checkpointer, ResumableLoader
from ckpt_tasks.errors import ConfigError
from tests.checkpoint.ranks.training import build, config
from tests.support.gang import run

SAMPLES = 53


def take_in_batches_of(rank: int, size: int, root: str, batch_size: int, steps: int) -> tuple[list[int], list[str]]:
    """Train under DDP from where the last gang stopped; return the samples, and what is said of the batch size."""
    loader = ResumableLoader(range(SAMPLES), batch_size, shuffle=True)  # type: ignore[arg-type]
    state = {"model": build("ddp", size), "data": loader}
    taken: list[int] = []
    with Checkpointer(config(root, step_interval=1)) as ckpt:
        start = ckpt.restore(state)
        for step, batch in zip(range(start + 1, start + steps + 1), loader, strict=False):
            taken += batch.tolist()
            ckpt.save(step, state)
        return taken, [said.partition(".")[0] for said in ckpt.last_restore.replaced] if ckpt.last_restore else []


def test_another_batch_size_under_ddp_goes_on_at_the_same_sample(tmp_path: Path) -> None:
    """P26: two ranks with batches of 4, then of 3, then of 5: each sample comes once in the epoch; a line says so."""
    plan = ((4, 2), (3, 4), (5, 99))
    legs = [run(2, take_in_batches_of, str(tmp_path), batch_size, steps) for batch_size, steps in plan]
    assert Counter(sample for leg in legs for taken, _ in leg for sample in taken) == Counter(range(SAMPLES))
    lines = [[], ["samples in a step: 8 → 6"], ["samples in a step: 6 → 10"]]
    assert [[said for _, said in leg] for leg in legs] == [[line] * 2 for line in lines]


DEALT = [("2d", "numbers"), ("tp", ""), ("tp", "mesh"), ("fsdp", ""), ("hsdp", ""), ("ddp", "")]


def deal(rank: int, size: int, root: str, kind: str, given: str) -> Any:
    """Save and restore a model and a loader; return the error by its key, or each rank's samples."""
    model = build(kind, size)
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    places: dict[str, dict[str, Any]] = {"mesh": {"mesh": mesh["dp"]}, "numbers": {"rank": rank // 2, "world_size": 2}}
    loader = ResumableLoader(range(SAMPLES), 4, shuffle=True, **places.get(given, {}))  # type: ignore[arg-type]
    state = {"model": model, "data": [loader]}
    found = []
    for call in ("restore", "save"):
        with Checkpointer(config(f"{root}/{call}")) as ckpt:
            try:
                assert ckpt.restore(state) == 0 if call == "restore" else ckpt.save(1, state)
            except ConfigError as error:
                found.append((error.key, "ResumableLoader gives every rank other samples" in str(error)))
    return found or [sorted(batch.tolist()) for batch in loader]


@pytest.mark.parametrize(
    ("kind", "given"),
    [("2d", ""), ("2d", "mesh"), *(pytest.param(kind, given, marks=pytest.mark.slow) for kind, given in DEALT)],
)
def test_ranks_of_one_model_get_the_same_samples(tmp_path: Path, kind: str, given: str) -> None:
    """P26: under tensor parallelism a loader is told the mesh, or refused; FSDP2, HSDP and DDP need nothing."""
    ranks = run(4, deal, str(tmp_path), kind, given)
    if given or kind in {"fsdp", "hsdp", "ddp"}:
        groups = [ranks[0], ranks[2]] if given else ranks
        assert Counter(sample for batches in groups for batch in batches for sample in batch) == Counter(range(SAMPLES))
        assert not given or (ranks[0] == ranks[1] and ranks[2] == ranks[3])
    else:
        assert ranks == [[("0.weight", True)] * 2] * 4
