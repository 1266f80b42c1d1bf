"""When to save: at the same steps whether the run was interrupted or not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.format.policy.cadence import SavePoint, SavePolicy


def at(step: int, epoch: int | None = None, clock_s: float = 0.0) -> SavePoint:
    return SavePoint(step=step, epoch=epoch, clock_s=clock_s)


def saves(policy: SavePolicy, start: SavePoint, points: list[SavePoint]) -> list[int]:
    last, found = start, []
    for now in points:
        if policy.due(last, now):
            found.append(now.step)
            last = now
    return found


@given(st.integers(1, 20), st.integers(0, 100), st.lists(st.integers(1, 15), min_size=1, max_size=20))
def test_a_resumed_run_saves_at_the_steps_of_an_uninterrupted_one(
    interval: int, start: int, strides: list[int]
) -> None:
    """P73: the grid counts from step 0: a save comes with the first report on or after each multiple."""
    steps = [start + sum(strides[: n + 1]) for n in range(len(strides))]
    before = dict(zip(steps, [start, *steps[:-1]], strict=True))
    expected = [step for step in steps if step // interval > before[step] // interval]
    assert saves(SavePolicy(step_interval=interval), at(start), [at(step) for step in steps]) == expected


def test_epochs_count_when_they_are_completed() -> None:
    """P27: the first save comes when epoch 1 is reported, then at each multiple; without an epoch none is due."""
    points = [at(step, step // 10) for step in range(1, 50)]
    assert saves(SavePolicy(epoch_interval=1), at(0), points) == [10, 20, 30, 40]
    assert saves(SavePolicy(epoch_interval=2), at(20, 2), points[20:]) == [40]
    assert saves(SavePolicy(epoch_interval=1), at(0), [at(step) for step in range(1, 30)]) == []


def test_seconds_count_from_the_last_save() -> None:
    """P53, P75: whatever rule made the last save; never by a clock gone back, and never for a step that is saved."""
    points = [at(step, clock_s=float(step)) for step in range(1, 35)]
    assert saves(SavePolicy(save_interval_secs=10.0), at(0), points) == [10, 20, 30]
    assert saves(SavePolicy(save_interval_secs=10.0, step_interval=7), at(0), points) == [7, 14, 21, 28]
    assert not SavePolicy(save_interval_secs=10.0).due(at(1, clock_s=100.0), at(2, clock_s=-1e6))
    every = SavePolicy(step_interval=1, epoch_interval=1, save_interval_secs=0.1)
    assert not any(every.due(at(10, 1), at(step, 2, 99.0)) for step in (9, 10))
