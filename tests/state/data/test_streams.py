"""`ResumableLoader` over a stream: the samples after a resume are those of a loop without a stop, or it refuses."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from itertools import count, product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableLoader, ShuffleBuffer, resumable
from ckpt_tasks.errors import ConfigError, StateMismatchError
from tests.support.roundtrip import restore, save
from tests.support.streams import OPERATIONS, batches_of, library, rows, write_shards
from tests.support.sweeps import sparse

FILES = ("parquet", "json", "arrow")
NAMES = (*OPERATIONS, *FILES)
EPOCHS = 2


class Numbers(IterableDataset[Any]):
    """Numbers in order, without a state."""

    def __init__(self, size: int = 24):
        self.size = size

    def __iter__(self) -> Iterator[dict[str, int]]:
        return ({"a": number} for number in range(self.size))


def resumed(stream: Any, whole: list[Any], stop: int, **options: Any) -> list[Any]:
    """Stop a loop after some batches, save, and go on in new objects; return what the second one gives."""
    loader = ResumableLoader(stream(), 4, **options)
    assert batches_of(loader, EPOCHS, stop) == whole[:stop]
    saved = save({"data": loader})
    second = ResumableLoader(stream(), 4, **options)
    restore(saved, {"data": second})
    return batches_of(second, EPOCHS)


@pytest.mark.parametrize("name", ["interleave by chance", "shuffle of a map's shards", "buffer of a map"])
@pytest.mark.framework
def test_a_stream_goes_on_at_its_next_sample(name: str) -> None:
    """P22: at the first, a middle and the last batch of an epoch; it gives the batches that torch's loader gives."""
    stream = OPERATIONS[name]
    whole = batches_of(ResumableLoader(stream(), 4), EPOCHS)
    first = sum(epoch == 0 for epoch, _ in whole)
    assert [batch for _, batch in whole[:first]] == [[*map(int, b["a"])] for b in DataLoader(stream(), batch_size=4)]
    for stop in (first, len(whole) - 2):
        assert resumed(stream, whole, stop) == whole[stop:]


@pytest.mark.framework
def test_workers_go_on_each_in_its_part() -> None:
    """P25: with two workers that persist, stopped between the turns of one and the other, in a later epoch too."""
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
    stream = OPERATIONS["shuffle of shards"]
    whole = batches_of(ResumableLoader(stream(), 4, **options), EPOCHS)
    loader = DataLoader(stream(), batch_size=4, num_workers=2)
    assert [batch for epoch, batch in whole if epoch == 0] == [[*map(int, b["a"])] for b in loader]
    assert resumed(stream, whole, 9, **options) == whole[9:]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "workers"), [*product(NAMES, [0]), *sparse(product(NAMES, [2]), 4)])
@pytest.mark.framework
def test_every_operation_goes_on(name: str, workers: int, tmp_path: Path) -> None:
    """P22: each operation of datasets, stopped after each batch; with two workers, at the edges of the epochs."""
    if name in FILES:
        files = write_shards(tmp_path)[name]

        def stream() -> Any:
            return library().load_dataset(
                name, data_files=files, split="train", streaming=True, cache_dir=str(tmp_path / "cache")
            )
    else:
        stream = OPERATIONS[name]
    for persistent in {False, workers > 0}:
        options: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent}
        whole = batches_of(ResumableLoader(stream(), 4, **options), EPOCHS)
        first = sum(epoch == 0 for epoch, _ in whole)
        edges = {1, first - 1, first, first + 1, len(whole) - 1}
        for stop in range(1, len(whole)) if not workers else sorted(edges):
            assert resumed(stream, whole, stop, **options) == whole[stop:], stop


@pytest.mark.framework
def test_batches_of_a_stream_are_skipped() -> None:
    """A rollback leaves them out when their turn comes, over the end of an epoch too, and a checkpoint knows it."""
    whole = batches_of(ResumableLoader(rows(), 4), 3)
    for at, skipped in ((2, 2), (6, 3), (4, 5)):
        loader = ResumableLoader(rows(), 4)
        taken = batches_of(loader, 3, at)
        loader.skip_batches(skipped)
        second = ResumableLoader(rows(), 4)
        second.load_state_dict(loader.state_dict())
        assert taken + batches_of(second, 3) == whole[:at] + whole[at + skipped :]


@pytest.mark.framework
def test_the_last_batch_of_an_epoch_is_known() -> None:
    """P23: saved at it, the epoch comes once more without batches, so that what a loop does at its end is repeated."""
    loader = ResumableLoader(rows(), 4)
    assert [loader.is_ending for _ in loader] == [False] * 5 + [True]
    assert (loader.epoch, loader.batch, loader.is_ending) == (1, 0, False)
    batches = iter(loader)
    for _ in range(6):
        next(batches)
    second = ResumableLoader(rows(), 4)
    second.load_state_dict(loader.state_dict())
    assert [(epoch, len([*second])) for epoch in second.epochs(3)] == [(1, 0), (2, 6)]
    with pytest.raises(TypeError, match="no length"):
        len(second)


@pytest.mark.framework
def test_two_lines_resume_a_stream(tmp_path: Path) -> None:
    """P22: a DataLoader over a stream in `resumable`, left in the middle of an epoch, goes on with the next batch."""

    def loop(stop: int | None) -> list[Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        plain = DataLoader(rows(), batch_size=4)
        loader, epochs = resumable(
            CheckpointConfig(checkpoint_dir=str(tmp_path), step_interval=1, memory_dir=None),
            plain,
            range(EPOCHS),
            model=model,
            optimizer=optimizer,
        )
        seen = []
        for epoch in epochs:
            for batch in loader:
                seen.append((epoch, batch["a"].tolist()))
                model(batch["a"].float()[:, None]).square().mean().backward()
                optimizer.step()
                if len(seen) == stop:
                    epochs.save()
                    epochs.leave()
                    return seen
        return seen

    whole = batches_of(ResumableLoader(rows(), 4), EPOCHS)
    assert loop(5) + loop(3) + loop(None) == whole


class Drawing(Numbers):
    """Each sample draws from the streams of Python and torch."""

    def __iter__(self) -> Iterator[dict[str, int]]:
        for number in range(self.size):
            yield {"a": number * 1000 + random.randrange(30) + int(torch.randint(30, ()))}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_without_state_is_read_again(workers: int) -> None:
    """P23, P24, P25: with `replay`, samples and the numbers that they draw are the same, and training's streams stay.

    Stopped before the second worker has given its first batch, too.
    """
    options: dict[str, Any] = {"replay": True, "num_workers": workers}
    torch.manual_seed(7)
    before = torch.get_rng_state()
    whole = batches_of(ResumableLoader(Drawing(), 4, **options), EPOCHS)
    torch.rand(9)
    for stop in (1, 2, 7):
        assert resumed(Drawing, whole, stop, **options) == whole[stop:]
    torch.manual_seed(7)
    assert torch.equal(torch.get_rng_state(), before)
    batches_of(ResumableLoader(Drawing(), 4, **options), EPOCHS)
    assert torch.equal(torch.get_rng_state(), before)


class Shuffled(Numbers):
    """Each reading has another order, as with a shuffle that is seeded by the clock."""

    def __iter__(self) -> Iterator[dict[str, int]]:
        return ({"a": number} for number in random.Random(next(_CLOCK)).sample(range(self.size), self.size))


_CLOCK = count()


class Changed(Numbers):
    """An early sample has changed."""

    def __iter__(self) -> Iterator[dict[str, int]]:
        return ({"a": number + 100 * (number == 4)} for number in range(self.size))


def test_a_stream_that_is_read_otherwise_each_time_is_refused_at_its_start() -> None:
    """P50: `replay` is believed only if the first batch is the same twice; a resume compares every batch."""
    with pytest.raises(StateMismatchError, match="does not come back"):
        next(iter(ResumableLoader(Shuffled(), 4, replay=True)))
    loader = ResumableLoader(Numbers(), 4, replay=True)
    batches_of(loader, 1, 4)
    state = loader.state_dict()
    second = ResumableLoader(Changed(), 4, replay=True)
    second.load_state_dict(state)
    with pytest.raises(StateMismatchError, match="batch 3 of worker 0 in epoch 0"):
        next(iter(second))
    with pytest.raises(StateMismatchError, match="replayed is 4 in the checkpoint and 6 here"):
        ResumableLoader(Numbers(), 6, replay=True).load_state_dict(state)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # WebDataset leaves its tars to the collector.
@pytest.mark.filterwarnings("ignore:WebDataset.shardshuffle:UserWarning")
@pytest.mark.framework
def test_a_webdataset_is_taken_unless_it_shuffles(tmp_path: Path) -> None:
    """WebDataset in order resumes at its next sample, with `shardshuffle=False` too; a shuffle is refused."""
    import webdataset

    for shard in range(2):
        with webdataset.TarWriter(str(tmp_path / f"{shard}.tar")) as tar:
            for number in range(shard * 12, shard * 12 + 12):
                tar.write({"__key__": f"{number:03}", "a.txt": str(number)})

    def tars(**options: Any) -> Any:
        urls = sorted(map(str, tmp_path.glob("*.tar")))
        return webdataset.WebDataset(urls, **options).decode().map(lambda sample: {"a": int(sample["a.txt"])})

    whole = batches_of(ResumableLoader(Numbers(), 4, replay=True), EPOCHS)
    for options in ({"shardshuffle": False}, {"shardshuffle": 0}, {}):
        assert resumed(lambda options=options: tars(**options), whole, 7, replay=True) == whole[7:]
    for stream in (tars(shardshuffle=2), tars(shardshuffle=2, detshuffle=True), tars(shardshuffle=False).shuffle(9)):
        with pytest.raises(ConfigError, match="Its shuffles count epochs"):
            ResumableLoader(stream, replay=True)
    gc.collect()


@pytest.mark.framework
def test_what_cannot_go_on_is_refused_before_training() -> None:
    """P50: a stream without a state, a buffer that is not in the state, an iterator, and what no stream has."""
    with pytest.raises(ConfigError, match=r"type Numbers has no state_dict.*replay=True"):
        ResumableLoader(Numbers())
    shuffled = rows().shuffle(seed=1, buffer_size=9).map(lambda row: row)
    with pytest.raises(ConfigError, match=r"buffer of shuffle\(\).*ShuffleBuffer"):
        ResumableLoader(library().interleave_datasets([rows(), shuffled]))
    with pytest.raises(ConfigError, match="has no state_dict"):
        ResumableLoader(ShuffleBuffer(Numbers(), 3))
    with pytest.raises(ConfigError, match="read only once"):
        ResumableLoader(cast(Any, count()), replay=True)
    with pytest.raises(ConfigError, match="ShuffleBuffer"):
        ResumableLoader(rows(), shuffle=True)
    with pytest.raises(ConfigError, match="each rank its part"):
        ResumableLoader(rows(), rank=1, world_size=2)
    with pytest.raises(ConfigError, match="in_order"):
        ResumableLoader(rows(), num_workers=2, in_order=False)
    with pytest.raises(ConfigError, match="no stream"):
        ResumableLoader(cast(Any, [1, 2, 3]), replay=True)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.framework
def test_a_stream_that_comes_back_otherwise_is_refused(workers: int) -> None:
    """P22: in one of the workers: no batch is handed out, not even by those that are right; so for another seed."""

    def shuffled(seed: int) -> ResumableLoader:
        return ResumableLoader(rows(48).shuffle(seed=seed, buffer_size=1), 4, num_workers=workers)

    loader = shuffled(1)
    batches_of(loader, 1, 3)
    state = loader.state_dict()
    for place in state["places"]:
        right, place["mark"] = place["mark"], "4 of other samples"
        second = shuffled(1)
        second.load_state_dict(state)
        with pytest.raises(StateMismatchError, match="does not come back as it was"):
            next(iter(second))
        place["mark"] = right
    with pytest.raises(StateMismatchError, match="give each shuffle a seed"):
        shuffled(2).load_state_dict(state)
    told = rf"same num_workers.*workers is {workers} in the checkpoint and 1 here"
    others: list[tuple[dict[str, Any], str]] = [
        ({"num_workers": 1}, told),
        ({"num_workers": workers, "seed": 1}, "seed"),
    ]
    for other, said in others:
        with pytest.raises(StateMismatchError, match=said):
            ResumableLoader(rows(48).shuffle(seed=1, buffer_size=1), 4, **other).load_state_dict(state)


@pytest.mark.framework
def test_another_batch_size_goes_on_at_the_same_sample(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P22: no sample is lost or repeated, and a line says what differs."""
    config = CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=None)
    loader = ResumableLoader(OPERATIONS["map of batches"](), 4)
    taken = batches_of(loader, 1, 4)
    with Checkpointer(config) as ckpt:
        ckpt.save(4, {"data": loader})
    second = ResumableLoader(OPERATIONS["map of batches"](), 6)
    with Checkpointer(config) as ckpt:
        ckpt.restore({"data": second})
        taken += batches_of(second, 1)
    whole = batches_of(ResumableLoader(OPERATIONS["map of batches"](), 4), 1)
    assert [a for _, batch in taken for a in batch] == [a for _, batch in whole for a in batch]
    assert "samples in a step" in caplog.text
