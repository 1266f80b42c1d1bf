"""The whole protocol under thousands of schedules: nothing that was committed is lost, torn, or taken while in use.

Each schedule lets trainers that fence each other, evaluators and readers loose on one run directory whose requests
fail, get lost, arrive late and arrive twice. `play(seed)` plays one again.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections import Counter
from itertools import chain, count
from typing import Any

import pytest

from ckpt_tasks.checkpoint.save import commit, pruning
from ckpt_tasks.checkpoint.save.commit import Commit, Committer, discard
from ckpt_tasks.checkpoint.save.parts import Saving
from ckpt_tasks.errors import CommitUncertainError, ObjectExistsError, StoreError
from ckpt_tasks.format.keys import ledger_name, parse_attempt
from ckpt_tasks.format.ledger import Entry, State
from ckpt_tasks.format.policy.retention import Verdict, plan_retention
from ckpt_tasks.format.records import Checkpoint, Owner
from ckpt_tasks.run.ledger import history
from ckpt_tasks.run.ledger.history import Head, History
from ckpt_tasks.run.upkeep import retiring, verifying
from ckpt_tasks.storage.port import Store
from tests.property.protocol import Ablation, Outcome, play
from tests.property.schedules import Schedule
from tests.support.sweeps import SOAK, quick_first

SHORT = 20
LONG = 20_000
BLOCK = 1_000  # some ten minutes
ALL = range(100)  # of `make test-all`
ENOUGH = 2_000  # schedules, in which every part of the protocol that is taken out must be missed


def told(seed: int, outcome: Outcome, most: int = 60) -> str:
    """Tell what went wrong in a schedule, and what led to it."""
    lines = [f"seed {seed}: {'; '.join(outcome.wrongs)}"]
    for at_s, process, what, name, fate in outcome.trace[-most:]:
        lines.append(f"{at_s:9.2f} {process:12} {what:13} {name[-70:]:70} {'' if fate == 'done' else fate}")
    return "\n".join(lines)


def first_wrong(seeds: range, ablation: Ablation | None = None) -> tuple[int, Outcome] | None:
    """Return the first seed whose schedule goes wrong, and how."""
    for seed in seeds:
        if seed % 50 == 0:
            gc.collect()  # by itself it comes too seldom: a schedule leaves 2 MiB in cycles, and a block 2 GiB
        outcome = play(seed, ablation)
        if outcome.wrongs:
            return seed, outcome
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds",
    [ALL, *(pytest.param(range(n, n + BLOCK), marks=pytest.mark.soak) for n in range(ALL.stop, LONG, BLOCK))],
    ids=str,
)
def test_no_schedule_breaks_the_protocol(seeds: range) -> None:
    """P30, P32, P33, P64, P65: what was acknowledged is in the ledger once, and what is live is whole, always."""
    found = first_wrong(seeds)
    assert found is None, told(*found)


def test_a_few_schedules_are_rough_and_break_nothing() -> None:
    """P30, P32, P33, P64, P65: twenty schedules lose and tear nothing, and what is to be survived happens in them.

    Take-overs, deaths, every fate of every request, leases and evaluations. In another process a seed gives the same
    requests with the same outcomes.
    """
    outcomes = [play(seed) for seed in range(SHORT)]
    assert [told(seed, outcome) for seed, outcome in enumerate(outcomes) if outcome.wrongs] == []
    fates = Counter((what, fate) for outcome in outcomes for _, _, what, _, fate in outcome.trace)
    assert sum(outcome.commits for outcome in outcomes) > 75
    assert sum(outcome.told for outcome in outcomes) > 250
    assert sum(outcome.retired for outcome in outcomes) > 20
    assert sum(outcome.epochs > 3 for outcome in outcomes) > 4
    committing = {fate for what, fate in fates if what == "put_if_absent"}
    assert committing == {"done", "refused", "unanswered", "exists", "late", "twice", "torn"}
    assert {("put", "torn"), ("put", "late"), ("delete", "late"), ("get", "refused"), ("names", "refused")} <= {*fates}
    evaluators = Counter(name for outcome in outcomes for _, name, _, _, _ in outcome.trace)
    assert evaluators["evaluator-0"] > 100
    played = enumerate(chain(outcomes, map(play, count(SHORT))))
    seed, rough = next((n, one) for n, one in played if one.retried and one.commits > 5 and "refused" in str(one))
    trace = f"import sys; sys.path.insert(0, '.'); from tests.property.protocol import play; print(play({seed}).trace)"
    again = subprocess.run([sys.executable, "-c", trace], env={}, capture_output=True, text=True, check=True)
    assert again.stdout.strip() == str(rough.trace)


# ── parts of the protocol, taken out ─────────────────────────────────────────────────────────────────────────


def nobody_checks_the_owner(patch: pytest.MonkeyPatch, schedule: Schedule) -> None:
    patch.setattr(history, "check_owner", lambda found, mine: None)


def answers_are_believed(patch: pytest.MonkeyPatch, schedule: Schedule) -> None:
    def read_back(self: History, entry: Entry) -> bool:
        for _ in range(3):
            try:
                self.store.put_if_absent(ledger_name(entry.n), entry.to_bytes()[0])
            except ObjectExistsError:
                return False
            except StoreError:
                continue
            return True
        raise CommitUncertainError("no answer")

    patch.setattr(History, "_read_back", read_back)


def what_is_retired_may_be_named(patch: pytest.MonkeyPatch, schedule: Schedule) -> None:
    patch.setattr(commit, "refuse_retired", lambda state, prepared: None)


def objects_go_before_the_entry(patch: pytest.MonkeyPatch, schedule: Schedule) -> None:
    def retire(
        history: History, owner: Owner, retirement: retiring.Retirement, standing: Checkpoint | None
    ) -> tuple[str, ...]:
        for checkpoint in history.head().state.live:
            if checkpoint.manifest_digest in retirement.checkpoints:
                retiring.delete_retired(
                    history.store, history.store.names(checkpoint.manifest.rpartition("/")[0] + "/")
                )
        return retiring.retire(history, owner, retirement)

    patch.setattr(pruning, "retire", retire)


def leases_are_ignored(patch: pytest.MonkeyPatch, schedule: Schedule) -> None:
    def plan(*arguments: Any, leased: object, **options: Any) -> list[Verdict]:
        return plan_retention(*arguments, leased={}, **options)

    patch.setattr(verifying, "plan_retention", plan)


def shared_objects_are_nobodys(patch: pytest.MonkeyPatch, schedule: Schedule) -> None:
    def keeps(state: State, name: str) -> bool:
        attempt = parse_attempt(name)
        return attempt is not None and any((c.step, c.attempt) == (attempt.step, attempt.name) for c in state.live)

    patch.setattr(State, "keeps", keeps)


def attempts_of_the_present_owner_are_swept(patch: pytest.MonkeyPatch, schedule: Schedule) -> None:
    def orphans(store: Store, state: State) -> list[str]:
        return [name for name in store.names("") if parse_attempt(name) is not None and not state.keeps(name)]

    patch.setattr(pruning, "orphans", orphans)


def a_failed_commit_is_cleaned_up(patch: pytest.MonkeyPatch, schedule: Schedule) -> None:
    real = Committer.commit

    def tidy(self: Committer, admitted: tuple[Head, State], saving: Saving, *given: Any, **options: Any) -> Commit:
        try:
            return real(self, admitted, saving, *given, **options)
        except (StoreError, CommitUncertainError):
            discard(self.history.store, saving.attempt)
            raise

    patch.setattr(Committer, "commit", tidy)


ABLATIONS = [
    nobody_checks_the_owner,
    answers_are_believed,
    objects_go_before_the_entry,
    leases_are_ignored,
    shared_objects_are_nobodys,
    attempts_of_the_present_owner_are_swept,  # is missed in few schedules
    a_failed_commit_is_cleaned_up,
]
RARE = pytest.param(what_is_retired_may_be_named, marks=SOAK)  # is missed in nearly all schedules


@pytest.mark.parametrize("ablation", [*quick_first(ABLATIONS), RARE], ids=lambda ablation: ablation.__name__)
def test_no_part_can_be_left_out(ablation: Ablation) -> None:
    """Without any one of its parts the protocol breaks, and these schedules notice it."""
    found = first_wrong(range(ENOUGH), ablation)
    assert found is not None
