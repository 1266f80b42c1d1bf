"""The forecast of room is an upper bound of what retention keeps at any time, and is reached."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.format.policy.retention import RetentionPolicy
from ckpt_tasks.format.policy.space import CheckpointSize, Forecast, forecast, gib
from tests.format.policy.test_retention import Fact, plan

MIB = 1 << 20


def peak(policy: RetentionPolicy, live: list[Fact], pinned: set[str], losses: list[float]) -> int:
    """Save once for each loss, retire after each commit; return the most checkpoints that were there at once."""
    most, step = 0, max((one.step for one in live), default=0)
    for loss in losses:
        step += 1
        most = max(most, len(live) + 1)  # the one that is being written
        live = [Fact(step, f"d{step}", {"loss": loss}), *live]
        newest = live[0].manifest_digest
        verdicts = plan(
            live, policy, pins=dict.fromkeys(pinned, "pinned"), verified=frozenset({newest}), restored_from=newest
        )
        kept = {verdict.manifest_digest for verdict in verdicts if verdict.keep}
        live = [one for one in live if one.manifest_digest in kept]
    return most


@given(
    limit=st.integers(1, 5),
    best=st.integers(0, 3),
    there=st.lists(st.floats(0, 9), max_size=6),
    pins=st.sets(st.integers(1, 6)),
    losses=st.lists(st.floats(0, 9), max_size=20),
    free=st.integers(0, 100 * MIB),
)
def test_the_peak_is_never_above_the_forecast(  # noqa: PLR0917 (Hypothesis gives them by name)
    limit: int, best: int, there: list[float], pins: set[int], losses: list[float], free: int
) -> None:
    """P37: whatever is saved, retention never has more checkpoints at once, nor more bytes, than was forecast."""
    policy = RetentionPolicy(max_num_checkpoints=limit, keep_best=best, best_metric="loss")
    live = [Fact(step, f"d{step}", {"loss": loss}) for step, loss in reversed([*enumerate(there, start=1)])]
    pinned = {f"d{step}" for step in pins if step <= len(there)}
    size = CheckpointSize(2 * MIB, 3 * MIB)
    found = forecast(policy, live, pinned=pinned, size=size, free_bytes=free)
    most = peak(policy, live, pinned, losses)
    assert most <= found.most
    more_bytes = (most - len(live)) * size.own_bytes + (0 if live else size.shared_bytes)
    assert not losses or more_bytes <= found.needed_bytes
    assert found.fits == (found.needed_bytes <= free)


@pytest.mark.parametrize("limit", [1, 3])
def test_the_peak_is_reached(limit: int) -> None:
    """A fresh run of many saves has at its peak as many as were forecast: the newest, and the one being written."""
    policy = RetentionPolicy(max_num_checkpoints=limit)
    found = forecast(policy, [], pinned=(), size=CheckpointSize(MIB), free_bytes=0)
    assert found.most == limit + 1 == peak(policy, [], set(), [1.0] * 9)
    assert found.needed_bytes == (limit + 1) * MIB


@pytest.mark.parametrize(
    "policy",
    [RetentionPolicy(max_num_checkpoints=None), RetentionPolicy(max_num_checkpoints=1, keep_every_n_steps=1)],
)
def test_a_run_that_grows_wants_room_for_a_few_more(policy: RetentionPolicy) -> None:
    """A policy that keeps ever more fits no disk for ever: it is said while there is room for fewer than three more."""
    size = CheckpointSize(MIB)
    found = [forecast(policy, [], pinned=(), size=size, free_bytes=n * MIB) for n in (2, 3)]
    assert [one.fits for one in found] == [False, True]
    assert "room for 2 more checkpoints of 1.0 MiB, and the policy keeps ever more" in found[0].words


def test_without_a_policy_as_many_stay() -> None:
    """Where the policy is not known, the run is taken to keep as many as it has: one more is written."""
    found = forecast(
        None, [Fact(2, "d2"), Fact(1, "d1")], pinned={"d1"}, size=CheckpointSize(MIB, 9 * MIB), free_bytes=MIB
    )
    assert found == Forecast(most=3, grows=False, own_bytes=MIB, needed_bytes=MIB, free_bytes=MIB)
    assert found.words == "1.0 MiB free, 1.0 MiB more needed: up to 3 checkpoints of 1.0 MiB at once"
    assert [gib(size) for size in (3 << 29, 5 << 20, 3 << 10)] == ["1.5 GiB", "5.0 MiB", "3 KiB"]
