"""Retry-aware hooks: any object with a state becomes resumable with one decorator."""

from __future__ import annotations

import asyncio
import functools
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import TaskRun
from prefect.states import Failed

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run, resumable_task
from ckpt_tasks.errors import ConfigError, FencedError, NoProgressError, OwnedError, StateMismatchError
from ckpt_tasks.flows.prefect.attempts import AttemptHooks, TaskAttempt
from ckpt_tasks.flows.prefect.endings import PERMANENT
from tests.support.sweeps import quick_first

pytestmark = pytest.mark.usefixtures("harness")


class Tally:
    """No training: words counted so far, behind the two methods that make anything a state."""

    def __init__(self) -> None:
        self.words: dict[str, int] = {}

    def count(self, text: str) -> None:
        for word in text.split():
            self.words[word] = self.words.get(word, 0) + 1

    def state_dict(self) -> dict[str, Any]:
        return {"words": dict(self.words)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.words = dict(state["words"])


class Failing:
    """Fail on the calls that are named, counting from 1."""

    def __init__(self, *calls: int, error: Callable[[], BaseException] = lambda: RuntimeError("injected")):
        self.calls = 0
        self._fail = calls
        self._error = error

    def __call__(self) -> None:
        self.calls += 1
        if self.calls in self._fail:
            raise self._error()


def checkpointer(run_dir: Path, **options: Any) -> Checkpointer:
    return Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir)), **options)


def test_a_retry_goes_on_from_the_last_committed_attempt(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed attempt leaves nothing behind: its retry finds the state of the last committed one.

    A task that follows a good one restores nothing, and each retry restores once.
    """
    tally, failing = Tally(), Failing(2, 3)
    restored: list[dict[str, Any]] = []

    def load(state: dict[str, Any]) -> None:
        restored.append(state)
        Tally.load_state_dict(tally, state)

    monkeypatch.setattr(tally, "load_state_dict", load)
    with checkpointer(run_dir) as ckpt:

        @resumable_task(ckpt, {"tally": tally}, retries=2, retry_delay_seconds=0)
        def count(text: str) -> int:
            tally.count(text)
            failing()
            return len(tally.words)

        @flow
        def reading() -> list[int]:
            return [count("a b a"), count("b c")]

        assert reading() == [2, 3]
        assert tally.words == {"a": 2, "b": 2, "c": 1}
        assert [one.step for one in ckpt.checkpoints()] == [2, 1, 0]
    assert (failing.calls, len(restored)) == (4, 2)
    notes = [note for note in open_run(str(run_dir)).notes() if note["note"] == "failure"]
    assert [(note["attempt"], note["step"], note["why"]) for note in notes] == [
        (2, 1, "RuntimeError: injected"),
        (1, 1, "RuntimeError: injected"),
    ]


def test_another_process_goes_on(run_dir: Path) -> None:
    """A new Checkpointer with a new object restores before the first body, and the body sees where it stands."""
    for texts, words in (("a a", {"a": 2}), ("a b", {"a": 3, "b": 1})):
        tally = Tally()
        with checkpointer(run_dir) as ckpt:

            @resumable_task(ckpt, {"tally": tally}, retries=0)
            def count(text: str, tally: Tally = tally) -> None:
                tally.count(text)

            count(texts)
        assert tally.words == words


def test_reported_steps_are_the_position(run_dir: Path) -> None:
    """A body that reports its steps is committed at the last of them, not at the position + 1."""
    state: dict[str, Any] = {"sum": 0}
    with checkpointer(run_dir) as ckpt:

        @resumable_task(ckpt, state)
        def add(until: int) -> None:
            while ckpt.position < until:
                state["sum"] += ckpt.position + 1
                ckpt.step(ckpt.position + 1, state)

        add(10)
        add(20)
        assert [one.step for one in ckpt.checkpoints()] == [20, 10, 0]
        assert state["sum"] == 210


@pytest.mark.slow
def test_users_hooks_run_at_the_same_points(run_dir: Path) -> None:
    """A user's hooks see the attempt's number, the position, and why the last attempt ended, in the order of events."""
    seen: list[tuple[str, TaskAttempt]] = []
    failing = Failing(1)
    with checkpointer(run_dir) as ckpt:
        hooks = AttemptHooks(
            before_attempt=lambda attempt: seen.append(("before", attempt)),
            after_attempt=lambda attempt: seen.append(("after", attempt)),
            after_failure=lambda attempt: seen.append(("failed", attempt)),
        )

        @resumable_task(ckpt, {"n": 1}, retries=1, retry_delay_seconds=0, hooks=hooks)
        def work() -> None:
            failing()

        work()
    why = "RuntimeError: injected"
    assert seen == [
        ("before", TaskAttempt(1, 0)),
        ("failed", TaskAttempt(1, 0, why)),
        ("before", TaskAttempt(2, 0, why)),
        ("after", TaskAttempt(2, 1, why)),
    ]


@pytest.mark.parametrize("point", quick_first(["before_attempt", "after_attempt"]))
def test_a_hooks_failure_is_the_attempts_failure(run_dir: Path, point: str) -> None:
    """A hook that raises fails the attempt, and Prefect retries it; a hook that Prefect swallows would not."""
    failing = Failing(1)
    with checkpointer(run_dir) as ckpt:
        hooks = AttemptHooks(**{point: lambda attempt: failing()})
        state = {"n": 0}

        @resumable_task(ckpt, state, retries=1, retry_delay_seconds=0, hooks=hooks)
        def work() -> int:
            state["n"] += 1
            return state["n"]

        work()
        assert failing.calls == 2
        # after_attempt comes when the attempt is committed: its failure makes another one, from there
        assert (ckpt.position, state["n"]) == ((1, 1) if point == "before_attempt" else (2, 2))


@pytest.mark.parametrize(
    "error", quick_first([FencedError, OwnedError, ConfigError, StateMismatchError, NoProgressError], 3)
)
def test_what_cannot_be_mended_is_not_retried(run_dir: Path, error: type[Exception]) -> None:
    """An error that another attempt would meet again, or must not risk, ends the task at once, also as a cause."""
    for wrapped in (False, True):
        calls = 0
        with checkpointer(run_dir) as ckpt:

            @resumable_task(ckpt, {"n": 1}, retries=3, retry_delay_seconds=0)
            def work(wrapped: bool = wrapped) -> None:
                nonlocal calls
                calls += 1
                if wrapped:
                    raise RuntimeError("the user's own") from error("no")
                raise error("no")

            with pytest.raises(RuntimeError if wrapped else error):
                work()
        assert calls == 1
    assert issubclass(error, PERMANENT)


def refuse(task: Any, task_run: TaskRun, state: Any) -> bool:
    return task_run.run_count < 2


async def later(task: Any, task_run: TaskRun, state: Any) -> bool:
    await asyncio.sleep(0)
    return True


@pytest.mark.slow
def test_a_users_condition_narrows_ours(run_dir: Path) -> None:
    """A user's plain function is asked as well: here it allows one retry of three.

    A partial or a coroutine function Prefect would silently never call: they are a ConfigError.
    """
    failing = Failing(1, 2, 3, 4)
    with checkpointer(run_dir) as ckpt:
        state = {"n": 1}
        how: Any = {"retries": 3, "retry_delay_seconds": 0}

        @resumable_task(ckpt, state, **how, retry_condition_fn=refuse)
        def work() -> None:
            failing()

        with pytest.raises(RuntimeError):
            work()
        for condition in (functools.partial(refuse), later):
            wrong: Any = condition
            with pytest.raises(ConfigError, match="plain function"):
                resumable_task(ckpt, state, retry_condition_fn=wrong)(lambda: None)
    assert failing.calls == 2


def test_what_cannot_be_resumed_is_refused(run_dir: Path) -> None:
    """An async function, a generator, a cache, or a second state under one Checkpointer is a ConfigError."""

    async def asynchronous() -> None:
        await asyncio.sleep(0)

    def generator() -> Any:
        yield 1

    state = {"n": 1}
    with checkpointer(run_dir) as ckpt:
        decorate = resumable_task(ckpt, state)
        for function in (asynchronous, generator):
            with pytest.raises(ConfigError):
                decorate(function)
        for options in (
            {"cache_key_fn": refuse},
            {"retry_jitter_factor": 3},
            {"retries": 51},
            {"retry_delay_seconds": -1},
        ):
            with pytest.raises(ConfigError):
                resumable_task(ckpt, state, **options)(lambda: None)
        with pytest.raises(ConfigError, match="another state"):
            resumable_task(ckpt, {"n": 1})


def test_the_task_is_built_for_long_runs(run_dir: Path) -> None:
    """No cache key, no kept result; the first retry comes at once, later ones within a minute, with jitter."""
    with checkpointer(run_dir) as ckpt:
        task_state = {"n": 1}
        task = resumable_task(ckpt, task_state, retries=8, name="mine")(lambda: None)
        kept = resumable_task(ckpt, task_state, persist_result=True)(lambda: None)
    assert task.name == "mine"
    assert task.retry_delay_seconds == [0, 2, 4, 8, 16, 32, 60, 60]
    assert task.retry_jitter_factor == 1.0
    assert task.persist_result is False
    assert (task.cache_policy, kept.cache_policy) == (NO_CACHE, NO_CACHE)
    assert kept.persist_result is True
    assert task.tags == set()


def test_memory_of_a_failed_attempt_is_free_before_the_retry(run_dir: Path) -> None:
    """What a failed attempt's frames held is freed before the next one begins, without the garbage collector."""
    alive: list[weakref.ref[Tally]] = []
    found: list[list[bool]] = []
    failing = Failing(1, 2)
    with checkpointer(run_dir) as ckpt:

        def inner() -> None:
            big = Tally()
            alive.append(weakref.ref(big))
            try:
                failing()
            except RuntimeError as error:
                kept = ValueError("from within")  # a frame that holds its own error holds itself
                raise kept from error

        @resumable_task(ckpt, {"n": 1}, retries=2, retry_delay_seconds=0)
        def work() -> None:
            found.append([ref() is None for ref in alive])
            inner()

        gc.disable()
        try:
            work()
        finally:
            gc.enable()
    assert found == [[], [True], [True, True]]


def test_a_failed_state_is_a_failed_attempt(run_dir: Path) -> None:
    """A task that returns Prefect's Failed state commits nothing, and is retried from the last commit."""
    state, calls = {"n": 0}, 0
    with checkpointer(run_dir) as ckpt:

        @resumable_task(ckpt, state, retries=1, retry_delay_seconds=0)
        def work() -> object:
            nonlocal calls
            calls += 1
            state["n"] += 1
            return Failed(message="not good enough") if calls == 1 else state["n"]

        found: object = work()
        assert (found, calls, ckpt.position) == (1, 2, 1)


def test_no_progress_ends_the_resuming(run_dir: Path) -> None:
    """Attempt after attempt of one flow run without a new step ends with NoProgressError; another flow run may try."""
    state = {"n": 0}

    def attempt(flow_run_id: str) -> None:
        with checkpointer(run_dir, flow_run_id=flow_run_id) as ckpt:

            @resumable_task(ckpt, state, retries=1, retry_delay_seconds=0, max_stalled_attempts=5)
            def work() -> None:
                raise RuntimeError("always")

            work()

    for _ in range(2):
        with pytest.raises(RuntimeError):
            attempt("one")
    with pytest.raises(NoProgressError, match="5 starts and failures in a row"):
        attempt("one")
    with pytest.raises(RuntimeError):
        attempt("two")


def test_an_interrupt_in_a_body_leaves_no_trust(run_dir: Path) -> None:
    """P69: a KeyboardInterrupt may come in the middle of a step, so the next task restores."""
    tally, failing = Tally(), Failing(2, error=KeyboardInterrupt)
    ckpt = checkpointer(run_dir)  # not as a context manager: nothing holds the signal back

    @resumable_task(ckpt, {"tally": tally}, retries=0)
    def count() -> None:
        tally.count("a")
        failing()

    count()
    with pytest.raises(KeyboardInterrupt):
        count()
    count()
    ckpt.close()
    assert tally.words == {"a": 2}


def test_tasks_of_one_run_share_what_is_dirty(run_dir: Path) -> None:
    """What one task's failure made dirty, the next task over the same state restores."""
    tally, state = Tally(), {}
    state["tally"] = tally
    with checkpointer(run_dir) as ckpt:

        @resumable_task(ckpt, state, retries=0)
        def good() -> None:
            tally.count("good")

        @resumable_task(ckpt, state, retries=0)
        def bad() -> None:
            tally.count("bad")
            raise RuntimeError("injected")

        @flow
        def reading() -> None:
            good()
            with pytest.raises(RuntimeError):
                bad()
            good()

        reading()
    assert tally.words == {"good": 2}
