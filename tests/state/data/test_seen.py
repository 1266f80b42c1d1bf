"""The record of the samples that were handed out, against a training that notes each of them in its state."""

from __future__ import annotations

import copy
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt_tasks.state.data.sampler import ResumableSampler
from ckpt_tasks.state.data.seen import ids_in, order_in, outside, spans_of, times_seen

SIZE = 23


class Training:
    """Ranks that train, and note each sample of all of them in the state that they save."""

    def __init__(self, shuffle: bool) -> None:
        self.shuffle = shuffle
        self.noted: list[tuple[int, int]] = []
        self.saved: list[tuple[Any, Any]] = []
        self.build(1, 4, True)

    def build(self, world_size: int, batch_size: int, drop_last: bool) -> None:
        """Begin anew, as processes do; `restore` comes next."""
        self.ranks = [
            ResumableSampler(
                SIZE, batch_size, seed=5, shuffle=self.shuffle, drop_last=drop_last, rank=rank, world_size=world_size
            )
            for rank in range(world_size)
        ]

    def train(self, count: int) -> None:
        for _ in range(count):
            epoch, batches = self.ranks[0].epoch, [next(iter(rank), []) for rank in self.ranks]
            longest = max(map(len, batches))
            dealt = [batch[at] for at in range(longest) for batch in batches if at < len(batch)]
            self.noted += [(epoch, sample) for sample in dealt]
            for rank in self.ranks:
                rank.advance()

    def save(self) -> None:
        self.saved.append((self.ranks[0].state_dict(), copy.deepcopy(self.noted)))

    def restore(self, which: int) -> None:
        """Go back to a checkpoint: those after it are undone."""
        del self.saved[which + 1 :]
        state, noted = self.saved[-1]
        self.noted = [*noted]
        for rank in self.ranks:
            rank.load_state_dict(copy.deepcopy(state))

    def each(self, method: str, *arguments: int) -> None:
        for rank in self.ranks:
            getattr(rank, method)(*arguments)


def noted_in(state: dict[str, Any]) -> list[tuple[int, int]]:
    """Return what the record says, in order."""
    return [
        (epoch, sample) for epoch, spans in spans_of(state).items() for sample in order_in(state, epoch, spans).tolist()
    ]


def check(state: dict[str, Any], noted: list[tuple[int, int]]) -> None:
    """Compare all that the record answers with what was noted."""
    assert noted_in(state) == noted
    ranges = {epoch: ids_in(state, epoch, spans) for epoch, spans in spans_of(state).items()}
    for epoch, found in ranges.items():
        ids = [sample for first, end in found.tolist() for sample in range(first, end)]
        assert ids == sorted(sample for of, sample in noted if of == epoch)
        assert all(a[1] < b[0] for a, b in pairwise(found)), "ranges touch"
        rest = [sample for first, end in outside(found, SIZE).tolist() for sample in range(first, end)]
        assert sorted([*ids, *rest]) == [*range(SIZE)]
    times = Counter(sample for _, sample in noted)
    said = {
        i: n for n, found in times_seen(ranges.values(), SIZE).items() for a, b in found.tolist() for i in range(a, b)
    }
    assert said == {sample: times[sample] for sample in range(SIZE)}


ACTIONS = st.one_of(
    st.tuples(st.just("train"), st.integers(1, 12)),
    st.tuples(st.just("skip_batches"), st.integers(0, 9)),
    st.tuples(st.just("begin_epoch")),
    st.tuples(st.just("save")),
    st.tuples(st.just("restore"), st.integers(0, 9)),
    st.tuples(st.just("build"), st.integers(1, 3), st.integers(1, 7), st.booleans()),
)


# The epoch before was left at the place where this one is resumed.
LEFT: list[Any] = [("train", 2), ("begin_epoch",), ("train", 2), ("save",), ("restore", 1), ("train", 1)]


@given(shuffle=st.booleans(), actions=st.lists(ACTIONS, max_size=25))
@example(shuffle=True, actions=LEFT)
def test_the_record_is_what_training_has_seen(shuffle: bool, actions: list[Any]) -> None:
    """P24: over epochs, left early or not, resumes with other ranks and batches, rollbacks and skipped batches."""
    training = Training(shuffle)
    training.save()
    for name, *arguments in actions:
        if name == "train":
            training.train(*arguments)
        elif name == "save":
            training.save()
        elif name == "restore":
            training.restore(arguments[0] % len(training.saved))
        elif name == "build":
            training.build(*arguments)
            training.restore(len(training.saved) - 1)
        else:
            training.each(name, *arguments)
        states = [rank.state_dict() for rank in training.ranks]
        assert all(state == states[0] for state in states)
        check(states[0], training.noted)


@given(cuts=st.lists(st.integers(1, 9), max_size=12), skip=st.integers(0, 4), shuffle=st.booleans())
def test_where_a_run_was_resumed_does_not_show(cuts: list[int], skip: int, shuffle: bool) -> None:
    """P23: the state of a run that was resumed anywhere equals that of one that was not, record included."""
    whole, cut = Training(shuffle), Training(shuffle)
    for count in cuts:
        for training in (whole, cut):
            training.train(count)
            training.each("skip_batches", skip)
        cut.save()
        cut.build(1, 4, True)
        cut.restore(len(cut.saved) - 1)
        assert cut.ranks[0].state_dict() == whole.ranks[0].state_dict()


def test_many_epochs_are_one_row() -> None:
    """The record of a training without skips does not grow."""
    training = Training(True)
    training.train(5 * 40 + 2)
    assert training.ranks[0].state_dict()["seen"] == {"since": [0, 0], "rows": [[0, 40, 0, 20], [40, 1, 0, 8]]}


@pytest.mark.parametrize(("samples", "since"), [(8, [3, 8]), (SIZE, [4, 0])])
def test_a_state_without_a_record_is_taken(samples: int, since: list[int]) -> None:
    """A checkpoint of an older version goes on; the record says from where on it is one."""
    training = Training(True)
    state = training.ranks[0].state_dict()
    del state["seen"]
    training.ranks[0].load_state_dict({**state, "epoch": 3, "samples": samples})
    training.train(2)
    found = training.ranks[0].state_dict()
    assert found["seen"]["since"] == since
    assert noted_in(found) == training.noted
