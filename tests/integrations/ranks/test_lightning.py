"""Lightning in ranks: the sums of an epoch, and what CkptCallback says or refuses on another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.legs import compared, within

pytestmark = pytest.mark.framework
slow = pytest.mark.slow
JOB = "tests.integrations.ranks.lightning_job:ranks"


@pytest.mark.parametrize("then", [[3, 1], pytest.param([1, 4], marks=slow)], ids=str)
def test_the_sums_of_an_epoch_are_of_all_its_ranks(then: list[int], tmp_path: Path) -> None:
    """What an epoch logs over steps on 2, 3 and 1 ranks is the mean, sum, maximum and metric of all samples."""
    options = {"strategy": "ddp", "frozen": True, "then": then}
    reference, legs, _ = compared(JOB, tmp_path, options, within([2, 4]))
    names = {"of all", "sum", "mean", "max", "cat"}
    whole, now = (
        {what: float.fromhex(str(value)) for what, step, value in lines if step == 6 and what in names}
        for lines in (reference, legs[-1])
    )
    assert whole.keys() == names
    assert now == pytest.approx(whole, rel=1e-5)


@slow
def test_a_loader_that_counts_batches_is_told_of_other_ranks(tmp_path: Path) -> None:
    """A loader other than ResumableLoader trains other samples on another number of ranks, and a warning says so."""
    _, legs, statuses = compared(JOB, tmp_path, {"strategy": "ddp", "stateful": True, "then": [3]}, within([8]))
    (told,) = (value for what, _, value in legs[1] if what == "warned" and "come twice, or not at all" in value)
    assert statuses == [0, -9, 0]
    assert "ranks: 2 → 3" in told


@slow
def test_another_strategy_is_refused(tmp_path: Path) -> None:
    """A strategy that may keep the model in its own way is refused before training, by its name."""
    reference, _, _ = compared(JOB, tmp_path, {"strategy": "other"}, [])
    refused = [value for what, _, value in reference if what == "refused"]
    assert refused == [value for value in refused if "cannot save with the strategy Other" in value] != []
