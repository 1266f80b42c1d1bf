"""torchdata's StatefulDataLoader is a data position too, as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.support.roundtrip import restore, save


class Ids(Dataset[int]):
    """Samples that are their own ids."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("before", [0, 3, 10])
def test_it_goes_on_from_a_saved_state(shuffle: bool, num_workers: int, before: int) -> None:
    """P22: a StatefulDataLoader, its generator's tensor included, is saved and goes on with exactly the other ids."""

    def build() -> Any:
        options: dict[str, Any] = {"prefetch_factor": 4} if num_workers else {}
        generator = torch.Generator().manual_seed(7)
        return StatefulDataLoader(
            Ids(), batch_size=4, shuffle=shuffle, num_workers=num_workers, generator=generator, **options
        )

    expected = [batch.tolist() for batch in build()]
    assert sorted(sample for batch in expected for sample in batch) == list(range(40))
    loader = build()
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(before)] == expected[:before]
    resumed = build()
    restore(save({"data": loader}), {"data": resumed})
    # At the end of an epoch the loader's own way is an empty rest, and the whole next time.
    assert [batch.tolist() for batch in resumed] == expected[before:]
