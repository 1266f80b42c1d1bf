"""When evaluations no longer get better: the rule, and what must not disturb it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.format.policy.stopping import EarlyStop, kept, standing

numbers = st.one_of(
    st.floats(-8, 8).map(lambda value: round(value, 1)), st.sampled_from([math.nan, math.inf, -math.inf])
)
values_by_step = st.dictionaries(st.integers(0, 40), numbers, max_size=20)
rules = st.builds(
    EarlyStop,
    metric=st.just("loss"),
    patience=st.integers(1, 5),
    mode=st.sampled_from(["min", "max"]),
    min_delta=st.sampled_from([0.0, 0.5]),
)


def rule(**options: Any) -> EarlyStop:
    return EarlyStop(**{"metric": "loss", "patience": 2, **options})


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ([3.0, 2.0, 1.0], {}, (1.0, 2, 0)),
        ([3.0, 1.0, 2.0, 1.0], {}, (1.0, 1, 2)),
        ([3.0, 1.0, 2.0, 4.0], {"mode": "max"}, (4.0, 3, 0)),
        ([3.0, 2.9, 2.8, 2.7], {"min_delta": 0.25}, (2.7, 3, 0)),
        ([3.0, 2.9, 2.8], {"min_delta": 0.25}, (3.0, 0, 2)),
        ([math.nan, 3.0, math.nan], {}, (3.0, 1, 1)),
        ([math.nan, math.nan], {}, (None, None, 2)),
        ([math.inf, 3.0], {}, (3.0, 1, 0)),
        ([-math.inf, -math.inf], {}, (-math.inf, 0, 1)),
        ([], {}, (None, None, 0)),
    ],
)
def test_what_counts_as_better(
    values: list[float], options: dict[str, Any], expected: tuple[float | None, int | None, int]
) -> None:
    """Better by more than min_delta, in the direction of the mode; slow progress adds up; NaN is never better."""
    found = standing(dict(enumerate(values)), rule(**options))
    assert (found.best, found.best_step, found.since) == expected


@given(values=values_by_step, rule=rules, go_on=st.integers(-1, 45))
def test_the_best_is_followed_by_none_that_is_better(values: dict[int, float], rule: EarlyStop, go_on: int) -> None:
    """Nothing after the best is better by more than min_delta; the count is of those after it, and after a go-on.

    The newest checkpoint may be evaluated first: only the steps say which evaluation came after which.
    """
    found = standing(values, rule, let_go_on_at=go_on)
    assert found == standing(dict(reversed(values.items())), rule, let_go_on_at=go_on)
    sign = 1 if rule.mode == "min" else -1
    after = {step: value for step, value in values.items() if found.best_step is None or step > found.best_step}
    assert not any(found.best is not None and sign * v < sign * found.best - rule.min_delta for v in after.values())
    assert found.since == sum(step > go_on for step in after)


@given(values=values_by_step, later=values_by_step, rule=rules, go_on=st.integers(-1, 45))
def test_what_is_kept_says_the_same(
    values: dict[int, float], later: dict[int, float], rule: EarlyStop, go_on: int
) -> None:
    """A summary of the past stands for it: later evaluations lead to the same best and the same count."""
    last = max(values, default=0)
    later = {step + last + 1: value for step, value in later.items()}
    assert standing(kept(values, rule) | later, rule, let_go_on_at=go_on) == standing(
        values | later, rule, let_go_on_at=go_on
    )


BAD: dict[str, list[Any]] = {
    "patience": [0, 1.5, True],
    "mode": ["least"],
    "min_delta": [-0.1, math.nan],
    "metric": [""],
    "suite": [3],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_rule_that_means_nothing_is_refused(name: str, value: Any) -> None:
    """Every option is checked when the rule is made, by name."""
    with pytest.raises(ConfigError, match=name):
        rule(**{name: value})
