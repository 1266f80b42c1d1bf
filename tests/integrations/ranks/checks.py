"""What the legs of a training in ranks are compared with: the same training, without a stop."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.legs import Lines, assert_equal, begins, compared, within

EPOCH = 6  # steps


def killed_twice(job: str, folder: Path, options: dict[str, Any], stops: Sequence[int]) -> tuple[Lines, list[Lines]]:
    """Train in two ranks, without a stop and killed at two steps; assert that they are equal; return their lines."""
    reference, legs, statuses = compared(job, folder, options, within(stops))
    assert statuses == [0, -9, -9, 0]
    assert begins(legs) == [0, *stops]
    assert_equal(reference, legs)
    return reference, legs


def by_step(lines: Lines, what: str) -> dict[int, list[int]]:
    """Return the samples of all ranks by step."""
    found: dict[int, list[int]] = defaultdict(list)
    for name, step, value in lines:
        if name.partition(" of rank ")[0] == what:
            found[step] += ast.literal_eval(value)
    return {step: sorted(samples) for step, samples in found.items()}


def begun_otherwise(reference: Lines, before: Lines, leg: Lines) -> list[str]:
    """Return the ranks that begin with other tensors than the leg before had, which this one continues."""
    states = {step: value for lines in (reference, before) for what, step, value in lines if what == "state"}
    begun = [(what, step, value) for what, step, value in leg if what.startswith("begin state")]
    return [what for what, step, value in begun if value != states[step]]


def sampled_otherwise(reference: Lines, leg: Lines) -> list[str]:
    """Return the steps of a leg that train other samples than without a stop; a killed leg's last step is left out."""
    was, now = by_step(reference, "samples"), by_step(leg, "samples")
    begin = next(step for what, step, _ in leg if what == "begin")
    found = []
    for step in range(begin, max(now) + (leg[-1][0].startswith("end"))):
        # The last step of an epoch has 6 samples; accelerate makes them 12, but not on one rank.
        alike = now.get(step) == was[step] or (step % EPOCH == EPOCH - 1 and {*now[step]} < {*was[step]})
        found += [] if alike else [f"step {step}: {now.get(step)}, was {was[step]}"]
    return found
