"""torchdata's StatefulDataLoader is a data position too, as it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_tasks.format.tree import decode, encode


class Ids(Dataset[int]):
    """Samples that are their own ids."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("before", [0, 3, 10])
def test_its_state_goes_through_the_format(num_workers: int, before: int) -> None:
    """P22: a StatefulDataLoader's state survives the format's tree, and a new loader goes on with the right ids."""

    def build() -> Any:
        options: dict[str, Any] = {"prefetch_factor": 4} if num_workers else {}
        return StatefulDataLoader(Ids(), batch_size=4, num_workers=num_workers, **options)

    loader, expected = build(), [list(range(i, i + 4)) for i in range(0, 40, 4)]
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(before)] == expected[:before]
    resumed = build()
    resumed.load_state_dict(decode(json.loads(json.dumps(encode(loader.state_dict())))))
    rest = [batch.tolist() for batch in resumed]
    # At the end of an epoch the loader's own way is an empty rest, and the whole next time.
    assert rest == expected[before:]
