"""Retention: what is never removed whatever the policy, what the rules keep, and that every verdict has its reason."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.format.policy.retention import RetentionPolicy, Verdict, plan_retention, rank_best


@dataclass(frozen=True)
class Fact:
    """What retention knows of a checkpoint."""

    step: int
    manifest_digest: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    abandoned: bool = False
    interim: bool = False
    saved_at_s: float | None = None


def plan(facts: list[Fact], policy: RetentionPolicy, **more: Any) -> list[Verdict]:
    nothing: dict[str, Any] = {"pins": {}, "leased": {}, "verified": frozenset(), "restored_from": None, "metrics": {}}
    return plan_retention(facts, policy, **nothing | more)


def kept(verdicts: list[Verdict]) -> list[int]:
    return [verdict.step for verdict in verdicts if verdict.keep]


def line(*steps: int, **losses: float) -> list[Fact]:
    return [Fact(step, f"d{step}", {"loss": losses[f"s{step}"]} if f"s{step}" in losses else {}) for step in steps]


policies = st.builds(
    RetentionPolicy,
    max_num_checkpoints=st.none() | st.integers(1, 4),
    keep_every_n_steps=st.none() | st.integers(1, 4),
    keep_best=st.integers(0, 3),
    best_metric=st.sampled_from([None, "loss"]),
    best_mode=st.sampled_from(["min", "max"]),
)
facts_of_runs = st.lists(
    st.tuples(st.integers(0, 20), st.none() | st.floats(), st.booleans()), min_size=1, max_size=8
).map(
    lambda found: [
        Fact(step, f"d{place}", {} if loss is None else {"loss": loss}, abandoned and place > 0)
        for place, (step, loss, abandoned) in enumerate(found)
    ]
)
digests = st.sets(st.sampled_from([f"d{place}" for place in range(8)]))


@given(facts_of_runs, policies, st.fixed_dictionaries(dict.fromkeys(("pins", "leased", "verified"), digests)))
def test_some_are_never_removed_whatever_the_policy(
    facts: list[Fact], policy: RetentionPolicy, held: dict[str, set[str]]
) -> None:
    """P60, P61, P64, P66: the newest, the newest verified, pinned, leased and restored-from ones always stay."""
    *_, oldest = (fact.manifest_digest for fact in facts)
    verdicts = plan(
        facts,
        policy,
        pins=dict.fromkeys(held["pins"], "mine"),
        leased=dict.fromkeys(held["leased"], "eval"),
        verified=frozenset(held["verified"]),
        restored_from=oldest,
    )
    stay = {facts[0].manifest_digest, oldest, *held["pins"], *held["leased"]}
    stay.add(next((fact.manifest_digest for fact in facts if fact.manifest_digest in held["verified"]), oldest))
    assert [verdict.manifest_digest for verdict in verdicts] == [fact.manifest_digest for fact in facts]
    assert all((verdict.keep or verdict.manifest_digest not in stay) and all(verdict.reasons) for verdict in verdicts)


@given(facts_of_runs, policies)
def test_what_no_rule_wants_goes(facts: list[Fact], policy: RetentionPolicy) -> None:
    """P53, P60, P63: what stays is among the newest, on the grid, or among the best, however long ago it was saved."""
    best = {fact.manifest_digest for fact in rank_best(facts, policy, {})}
    limit, every = policy.max_num_checkpoints, policy.keep_every_n_steps
    again = [any(new.step == fact.step and not new.abandoned for new in facts[:n]) for n, fact in enumerate(facts)]
    counted = [*(n for n, known in enumerate(again) if not known), *(n for n, known in enumerate(again) if known)]
    wanted = [
        limit is None
        or n in (0, *counted[:limit])
        or (every is not None and fact.step % every == 0 and not fact.abandoned and not again[n])
        or fact.manifest_digest in best
        for n, fact in enumerate(facts)
    ]
    assert [verdict.keep for verdict in plan(facts, policy)] == wanted
    aged = [replace(fact, saved_at_s=-3e7 * n) for n, fact in enumerate(facts)]
    assert [verdict.keep for verdict in plan(aged, policy)] == wanted


@given(facts_of_runs, policies)
def test_nan_is_never_best_and_ties_go_to_the_older(facts: list[Fact], policy: RetentionPolicy) -> None:
    """P62: the best are the k best finite numbers; of equal ones the older: there it was measured."""
    ranked = rank_best(facts, policy, {})
    if policy.best_metric is None:
        assert ranked == []
        return
    assert all(math.isfinite(fact.metrics["loss"]) for fact in ranked)
    sign = 1 if policy.best_mode == "min" else -1
    numbers = [
        (sign * fact.metrics["loss"], -place)
        for place, fact in enumerate(facts)
        if "loss" in fact.metrics and math.isfinite(fact.metrics["loss"])
    ]
    assert [[fact.manifest_digest for fact in facts].index(fact.manifest_digest) for fact in ranked] == [
        -place for _, place in sorted(numbers)[: policy.keep_best]
    ]


def test_the_best_does_not_push_the_newest_out() -> None:
    """P61, P62: an older and better one stays beside the newest; an evaluation stands above the metric of the save."""
    policy = RetentionPolicy(max_num_checkpoints=1, keep_best=1, best_metric="loss")
    assert [fact.step for fact in rank_best(line(30, 20, 10, s30=1.0, s20=1.0, s10=2.0), policy, {})] == [20]
    facts = line(30, 20, 10, s30=3.0, s20=1.0, s10=2.0)
    verdicts = plan(facts, policy)
    assert [verdict.reasons for verdict in verdicts if verdict.keep] == [
        ("newest", "one of the newest 1"),
        ("number 1 by loss",),
    ]
    assert verdicts[2].reasons == ("older than the newest 1",)
    assert kept(plan(facts, policy, metrics={"d10": {"loss": 0.5}})) == [30, 10]
    assert kept(plan(facts, policy, metrics={"d20": {"loss": math.nan}})) == [30, 10]


def test_a_step_on_a_line_that_was_left_goes_first() -> None:
    """P71: a step grid keeps nothing of a line that training left, and the reason says so."""
    facts = [Fact(15, "d15"), Fact(10, "d10"), Fact(20, "d20", abandoned=True)]
    verdicts = plan(facts, RetentionPolicy(max_num_checkpoints=2, keep_every_n_steps=10))
    assert kept(verdicts) == [15, 10]
    assert verdicts[2].reasons == ("on a line that was left",)


def test_a_step_that_is_saved_again_pushes_no_other_step_out() -> None:
    """P60: a finished training that is started again and again, and saves its last step each time, keeps the others."""
    policy = RetentionPolicy(max_num_checkpoints=3, keep_every_n_steps=10)
    facts = [Fact(40, "d40c"), Fact(40, "d40b"), Fact(40, "d40a"), Fact(35, "d35"), Fact(25, "d25"), Fact(15, "d15")]
    verdicts = plan(facts, policy)
    assert [verdict.manifest_digest for verdict in verdicts if verdict.keep] == ["d40c", "d35", "d25"]
    assert verdicts[1].reasons == ("saved again since",)
    ended = [Fact(40, "batch", interim=True), *facts[2:5]]  # a batch that ends at a step takes nothing from it
    assert [v.manifest_digest for v in plan(ended, policy) if v.keep] == ["batch", "d40a", "d35", "d25"]


def test_all_reasons_are_given() -> None:
    """A checkpoint that several rules keep says all of them, with who pins and who leases it."""
    [verdict] = plan(
        line(10, s10=0.5),
        RetentionPolicy(keep_every_n_steps=5, keep_best=1, best_metric="loss"),
        pins={"d10": "the paper"},
        leased={"d10": "nightly"},
        verified=frozenset({"d10"}),
        restored_from="d10",
    )
    assert verdict.reasons == (
        "newest",
        "all are kept",
        "every 5 steps",
        "number 1 by loss",
        "pinned: the paper",
        "leased by nightly",
        "newest verified",
        "training was restored from it",
    )
