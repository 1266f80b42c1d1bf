"""`ResumableLoader`: the length of a whole epoch, a position that a restore sets, and random numbers of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableLoader
from ckpt_tasks.errors import ConfigError, StateMismatchError
from ckpt_tasks.format.tree import decode, encode
from tests.support.sweeps import quick_first

# What a bar around a loader is: a generator in a module called tqdm.
BARS: dict[str, Any] = {"__name__": "tqdm.std"}
exec("def bar(of, **options):\n    for one in of:\n        yield one", BARS)
SAMPLES = 22  # 6 batches of 4, the last one of 2


class Noisy(Dataset[torch.Tensor]):
    """Every sample draws from all three global streams, and from generators of its own and of its transforms."""

    def __init__(self, seed: int = 3) -> None:
        self.crops = [{"random": np.random.default_rng(seed)}]
        self.blur, self.flip = np.random.RandomState(seed), random.Random(seed)
        self.noise = torch.Generator().manual_seed(seed)

    def own(self) -> list[float]:
        own = [self.crops[0]["random"].random(), self.blur.random_sample(), self.flip.random()]
        return [*own, torch.rand((), generator=self.noise).item()]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        legacy = np.random.random()  # noqa: NPY002 (a global stream)
        own = [random.random(), legacy, torch.rand(()).item(), *self.own()]
        return torch.tensor([index, *own], dtype=torch.float64)


def loader(workers: int = 0, **options: Any) -> ResumableLoader:
    return ResumableLoader(Noisy(), batch_size=4, shuffle=True, num_workers=workers, **options)


def trained(one: ResumableLoader, batches: int) -> list[list[list[float]]]:
    """Take batches as a loop over epochs does."""
    taken: list[list[list[float]]] = []
    while len(taken) < batches:
        for batch in one:
            taken.append(batch.tolist())
            if len(taken) == batches:
                break
    return taken


def streams() -> tuple[Any, Any, bytes]:
    legacy = np.random.get_state()  # noqa: NPY002 (a global stream)
    return random.getstate(), repr(legacy), torch.get_rng_state().numpy().tobytes()


@pytest.mark.parametrize("workers", [0, 2])
def test_it_goes_on_twice_with_the_same_samples(workers: int) -> None:
    """P23: restored in an epoch, and restored again from there, every batch is that of a loader without a stop."""
    expected = trained(loader(), 18)
    first = loader(workers)
    seen = trained(first, 4)
    second = loader(workers)
    second.load_state_dict(decode(encode(first.state_dict())))
    seen += trained(second, 9)  # over the end of an epoch
    third = loader(workers)
    third.load_state_dict(decode(encode(second.state_dict())))
    assert (third.epoch, seen + trained(third, 5)) == (2, expected)
    assert (len(first), len(loader(drop_last=True))) == (6, 5)


def test_generators_of_a_data_set_keep_their_seeds_and_states() -> None:
    """P23: every batch and each of the generators draws other numbers, of another seed too, and moves none of them."""
    one, other = Noisy(), Noisy(seed=4)
    batches = [*ResumableLoader(one, batch_size=4), *ResumableLoader(other, batch_size=4)]
    drawn = torch.cat(batches)[:, 4:].flatten().tolist()
    assert len({*drawn}) == len(drawn) == 2 * 4 * SAMPLES
    assert (one.own(), other.own()) == (Noisy().own(), Noisy(seed=4).own())


@pytest.mark.parametrize("workers", quick_first([0, 2]))
def test_it_leaves_the_global_streams_alone(workers: int) -> None:
    """P24: neither `iter` nor a data set that draws moves a stream, and what is in the streams changes no sample."""
    expected = trained(loader(), 7)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002 (a global stream)
    torch.manual_seed(5)
    before = streams()
    assert trained(loader(workers), 7) == expected
    assert streams() == before


def test_an_epoch_ends_with_its_loop() -> None:
    """P23: saved at an epoch's last batch, it goes on at the end of that epoch, with what a loop does there.

    A framework, which counts epochs itself, goes on with the next epoch's batches; a loop that ends early begins one.
    """
    one, whole = loader(), trained(loader(), 12)
    trained(one, 6)
    saved = decode(encode(one.state_dict()))
    resumed, framework = loader(), loader()
    resumed.load_state_dict(saved)
    assert [(epoch, [batch.tolist() for batch in resumed]) for epoch in resumed.epochs(2)] == [(0, []), (1, whole[6:])]
    assert [*resumed.epochs(2)] == []
    framework.load_state_dict(saved)
    assert [batch.tolist() for batch in framework] == [batch.tolist() for batch in one] == whole[6:]
    early, inside = loader(), loader()
    assert [batch.tolist() for batch in islice(early, 2)] == whole[:2]
    inside.load_state_dict(early.state_dict())
    assert [batch.tolist() for batch in islice(early, 2)] == whole[6:8]
    assert [batch.tolist() for batch in inside] == whole[2:6]
    skipping = loader()
    skipping.load_state_dict(loader().state_dict() | {"samples": SAMPLES})
    skipping.skip_batches(4)
    left = [[batch.tolist() for batch in skipping] for _ in skipping.epochs(2)]
    assert left == [[], whole[10:]]


@pytest.mark.parametrize("workers", quick_first([0, 2]))
def test_batches_are_skipped_within_a_loop_too(workers: int) -> None:
    """A rollback leaves them out when their turn comes: in the middle of an epoch, over its end, and at its end."""
    whole = trained(loader(), 18)
    for at, skipped in ((2, 2), (4, 3), (6, 4)):
        one, seen = loader(workers), []
        while one.epoch < 2:
            for batch in one:
                seen.append(batch.tolist())
                if len(seen) == at:
                    one.skip_batches(skipped)
        assert seen == whole[:at] + whole[at + skipped : 12]
    one = loader()
    seen, position = [], one.state_dict()
    while one.epoch < 2:
        for batch in one:
            seen.append(batch.tolist())
            if len(seen) == 3:
                position = one.state_dict()
            if len(seen) == 8:  # a loop that goes back by itself, after a loss that is not finite
                one.load_state_dict(position)
    assert seen == whole[:8] + whole[3:12]


# Loops that go on right: each has what a restored loader and the number of its epoch need. Then loops that do not.
def by_the_loader(one: ResumableLoader, at: int) -> None:
    for _ in one.epochs(3):
        for _ in one:
            pass


def by_its_epoch(one: ResumableLoader, at: int) -> None:
    for _ in range(one.epoch, 3):
        for _ in one:
            pass


def by_a_count_of_ones_own(one: ResumableLoader, at: int) -> None:
    for epoch in range(at, 3):
        for _ in one:
            assert epoch == one.sampler.epoch - (one.sampler.samples == 0)


def with_a_break(one: ResumableLoader, at: int) -> None:
    step = 6 * at
    for _ in range(1000):
        for _ in one:
            step += 1
        if step >= 18:
            break


def with_passes_within(one: ResumableLoader, at: int) -> None:
    for _ in range(at, 3):
        for _ in range(2):
            for _ in one:
                pass


def anew(one: ResumableLoader, at: int) -> None:
    for _ in range(3):
        for _ in one:
            pass


def anew_with_bars(one: ResumableLoader, at: int) -> None:
    for _ in BARS["bar"](range(3), disable=True):
        for _ in BARS["bar"](one, disable=True):
            pass


RIGHT = [by_the_loader, by_its_epoch, by_a_count_of_ones_own, with_a_break, with_passes_within]


@pytest.mark.parametrize("workers", quick_first([0, 2]))
@pytest.mark.parametrize("loop", [*RIGHT, anew, anew_with_bars], ids=lambda loop: loop.__name__)
def test_a_loop_that_counts_its_epochs_anew_is_told(
    loop: Callable[[ResumableLoader, int], None], workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop over range(N) would train the epochs again that are done, and is told once; loops that know are not.

    In the first epoch nothing is done yet: every loop is right.
    """
    for at in (0, 2):
        one = loader(workers)
        one.load_state_dict(loader().state_dict() | {"epoch": at, "samples": 0 if at else 8})
        caplog.clear()
        loop(one, at)
        assert len(caplog.messages) == (at > 0 and loop not in RIGHT)
        assert all("restored position is in epoch 2" in told and "loader.epochs(N)" in told for told in caplog.messages)


@pytest.mark.parametrize("sizes", [(3, 8), (8, 3), (4, 4)], ids=str)
def test_another_batch_size_is_told_and_goes_on_at_the_same_sample(
    sizes: tuple[int, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every sample of the epoch comes once, in its order, whatever the batch size was; a line says what differs."""
    data: Any = [*range(SAMPLES)]
    before, after = (ResumableLoader(data, size, shuffle=True) for size in sizes)
    order = [n for batch in ResumableLoader(data, 1, shuffle=True) for n in batch.tolist()]
    seen = [n for batch in islice(before, 2) for n in batch.tolist()]
    with Checkpointer(CheckpointConfig(checkpoint_dir=tmp_path / "run", memory_dir=None)) as ckpt:
        ckpt.save(2, {"data": before})
        ckpt.restore({"data": after})
    assert seen + [n for batch in after for n in batch.tolist()] == order
    line = f"samples in a step: {sizes[0]} → {sizes[1]}. The epoch continues behind the samples"
    assert [line in told for told in caplog.messages] == [True] * (sizes[0] != sizes[1])


def test_a_start_with_nothing_left_to_train_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another fold in the same directory trains nothing, and a warning says so; a phase that is over does not.

    Saved at the last batch the end of the epoch is done again, and nothing is trained either.
    """

    def fold(name: str, phases: list[int], interval: int = 4) -> list[str]:
        caplog.clear()
        one = loader()
        state, config = {"data": one}, CheckpointConfig(checkpoint_dir=tmp_path / name, step_interval=interval)
        with Checkpointer(config) as ckpt:
            step = ckpt.restore(state)
            for count in phases:
                for _ in one.epochs(count):
                    for _ in one:
                        step += 1
                        ckpt.step(step, state)
            ckpt.save(step, state)
        return caplog.messages

    for name, interval in (("saved", 100), ("reported", 6)):
        assert fold(name, [2], interval) == []
        (told,) = fold(name, [2], interval)
        assert f"Nothing was left to train: the run in {tmp_path / name} has ended at step 12. To train on," in told
        assert fold(name, [2, 3], interval) == []


@pytest.mark.parametrize("batches", [1, 3])
def test_batches_taken_before_and_behind_the_epochs_move_nothing(batches: int) -> None:
    """A look at some batches before the loop, and a pass behind it, leave every epoch to the loop, restored or not."""
    whole = trained(loader(), 18)
    for at, position in ((0, {}), (2, {"samples": 8}), (6, {"epoch": 1})):
        one = loader()
        one.load_state_dict(loader().state_dict() | position)
        assert [batch.tolist() for batch in islice(one, batches)] == whole[at : at + batches][: 6 - at or None]
        assert [batch.tolist() for _ in one.epochs(3) for batch in one] == whole[at:]
        assert [batch.tolist() for batch in one] == whole[12:]
        assert (one.state_dict()["epoch"], [*one.epochs(4)]) == (3, [3])


@pytest.mark.parametrize("by_epochs", [False, True])
def test_an_epoch_that_is_left_early_is_numbered_from_its_begin(by_epochs: bool) -> None:
    """`loader.batch` is the number of the batch with which the next pass begins, also behind a `break`."""
    data: Any = [*range(12)]
    one, numbers = ResumableLoader(data, 2, seed=1), []
    for _ in one.epochs(3) if by_epochs else range(3):
        for number, _ in enumerate(one, one.batch):
            if number == 4:
                break
            numbers.append(number)
    assert numbers == [0, 1, 2, 3] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_is_saved_in_a_second_pass_is_refused(stream: bool, tmp_path: Path) -> None:
    """Only the first pass of an epoch goes on where it was: a save in another one raises, one behind it does not."""
    data: Any = Rows() if stream else [*range(8)]
    one = ResumableLoader(data, 2)
    state, step = {"data": one}, 0
    with Checkpointer(CheckpointConfig(checkpoint_dir=tmp_path / "run", memory_dir=None)) as ckpt:
        for _ in one.epochs(1):
            for _ in one:
                assert [batch.tolist() for batch in one] == [[0, 1], [2, 3], [4, 5], [6, 7]]
                ckpt.save(step := step + 1, state)
            for _ in one:
                with pytest.raises(ConfigError, match="second pass"):
                    ckpt.save(step, state)
            ckpt.save(step, state)


class Rows(IterableDataset[int]):
    """A stream with a state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 8:
            self.at += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Endless(IterableDataset[int]):
    """It has no length."""

    def __iter__(self) -> Iterator[int]:
        return count()


def test_what_it_cannot_do_is_refused() -> None:
    """P50: a stream without a state, a sampler of one's own, and a position of another data set."""
    with pytest.raises(ConfigError, match="no state_dict and load_state_dict"):
        ResumableLoader(Endless())
    with pytest.raises(ConfigError, match="generator"):
        loader(generator=torch.Generator())
    other = ResumableLoader(torch.utils.data.TensorDataset(torch.zeros(9)), batch_size=4, shuffle=True)
    with pytest.raises(StateMismatchError):
        loader().load_state_dict(other.state_dict())


def test_epochs_that_are_over_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """A second loop over as many epochs yields nothing, and says so; after a restore of an ended run it is right."""
    loader = ResumableLoader(range(4), 2)  # type: ignore[arg-type]
    for _ in loader.epochs(2):
        list(loader)
    ended = loader.state_dict()
    assert caplog.messages == []
    assert list(loader.epochs(2)) == []
    assert [message.partition(":")[0] for message in caplog.messages] == ["epochs(2) yields nothing"]
    loader.load_state_dict(ended)
    assert list(loader.epochs(2)) == []
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("now", [20, 28])
def test_a_data_set_that_changes_in_the_loop_is_refused(now: int) -> None:
    """An epoch over more rows, or fewer, than the loader was made for begins with no batch: some would never come."""
    rows = [torch.zeros(1)] * 24
    one = ResumableLoader(rows, batch_size=4)  # type: ignore[arg-type]  # a list is a data set
    assert len([*one]) == 6
    rows[:] = [torch.zeros(1)] * now
    with pytest.raises(ConfigError, match=f"has {now} samples, and had 24 when the loader was made"):
        next(iter(one))
