"""When to save: at the same steps whether the run was interrupted or not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.policy.cadence import SavePoint, SavePolicy


def at(step: int, epoch: int | None = None, clock_s: float = 0.0) -> SavePoint:
    return SavePoint(step=step, epoch=epoch, clock_s=clock_s)


def saves(policy: SavePolicy, start: SavePoint, points: list[SavePoint]) -> list[int]:
    last, found = start, []
    for now in points:
        if policy.due(last, now):
            found.append(now.step)
            last = now
    return found


@given(st.integers(1, 20), st.integers(0, 100), st.integers(1, 60))
def test_a_resumed_run_saves_at_the_steps_of_an_uninterrupted_one(interval: int, start: int, count: int) -> None:
    """P73: the grid counts from step 0, so whatever step the run resumed from, it saves at multiples."""
    points = [at(step) for step in range(start + 1, start + count + 1)]
    policy = SavePolicy(step_interval=interval)
    assert saves(policy, at(start), points) == [point.step for point in points if point.step % interval == 0]


@given(st.integers(1, 20), st.lists(st.integers(1, 15), min_size=1, max_size=20))
def test_strides_save_whenever_they_cross_the_grid(interval: int, strides: list[int]) -> None:
    """Steps reported in larger strides save at the first report on or after each multiple."""
    steps = [sum(strides[: n + 1]) for n in range(len(strides))]
    before = dict(zip(steps, [0, *steps[:-1]], strict=True))
    expected = [step for step in steps if step // interval > before[step] // interval]
    assert saves(SavePolicy(step_interval=interval), at(0), [at(step) for step in steps]) == expected


def test_no_rule_never_saves() -> None:
    """With every rule off only `save()` saves."""
    assert saves(SavePolicy(), at(0), [at(step, step, 1e9 * step) for step in range(1, 50)]) == []


def test_a_step_that_is_saved_is_not_saved_again() -> None:
    """P75: reporting the same step again, or an older one, is never due."""
    policy = SavePolicy(step_interval=1, epoch_interval=1, save_interval_secs=0.1)
    assert not policy.due(at(10, 1, 0.0), at(10, 2, 99.0))
    assert not policy.due(at(10, 1, 0.0), at(9, 2, 99.0))


def test_epochs_count_when_they_are_completed() -> None:
    """P27: epoch 0 is a real epoch: the first save comes when epoch 1 is reported, then at each multiple."""
    points = [at(step, step // 10) for step in range(1, 50)]
    assert saves(SavePolicy(epoch_interval=1), at(0), points) == [10, 20, 30, 40]
    assert saves(SavePolicy(epoch_interval=2), at(0), points) == [20, 40]
    assert saves(SavePolicy(epoch_interval=2), at(20, 2), points[20:]) == [40]


def test_a_report_without_an_epoch_crosses_none() -> None:
    """A step that is reported without its epoch is not due by epochs."""
    assert saves(SavePolicy(epoch_interval=1), at(0), [at(step) for step in range(1, 30)]) == []


def test_seconds_count_from_the_last_save() -> None:
    """A save is due when the seconds have passed since the last one, whatever rule made that."""
    policy = SavePolicy(save_interval_secs=10.0)
    assert saves(policy, at(0), [at(step, clock_s=float(step)) for step in range(1, 35)]) == [10, 20, 30]
    both = SavePolicy(save_interval_secs=10.0, step_interval=7)
    assert saves(both, at(0), [at(step, clock_s=float(step)) for step in range(1, 35)]) == [7, 14, 21, 28]


def test_a_clock_that_goes_back_is_not_due() -> None:
    """P53: a clock that jumps back delays a save by seconds and never makes one due."""
    assert not SavePolicy(save_interval_secs=10.0).due(at(1, clock_s=100.0), at(2, clock_s=-1e6))
