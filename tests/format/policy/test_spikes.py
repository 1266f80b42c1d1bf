"""The rule for a spike of a loss: what is one, and what is none."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.format.policy.spikes import FACTOR, SEEN, STREAK, WINDOW, is_spike

LOSSES = st.floats(-1e6, 1e6, allow_nan=False)


def middle(values: list[Fraction]) -> Fraction:
    ranked = sorted(values)
    return (ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) / 2


@given(st.lists(st.integers(-50, 50), min_size=WINDOW, max_size=WINDOW), st.integers(-50, 900))
def test_the_rule_is_the_sentence(before: list[int], loss: int) -> None:
    """Median plus 10 times the median absolute deviation, in exact numbers, decides; at the edge it is no spike."""
    usual = middle([Fraction(one) for one in before])
    spread = middle([abs(one - usual) for one in before])
    wanted = spread > 0 and loss > usual + Fraction(FACTOR) * spread
    assert is_spike([*before, *[loss] * STREAK]) == wanted


@given(st.lists(LOSSES, min_size=SEEN, max_size=SEEN), st.lists(LOSSES, max_size=9), st.integers(1, STREAK))
def test_one_usual_loss_of_the_last_is_enough(losses: list[float], older: list[float], at: int) -> None:
    """Older losses than 103 do not count, fewer are no spike, and neither is one with a loss at most the median."""
    assert is_spike([*older, *losses]) == is_spike(losses)
    assert not is_spike(losses[1:])
    losses[-at] = sorted(losses[:WINDOW])[WINDOW // 2 - 1]
    assert not is_spike(losses)
