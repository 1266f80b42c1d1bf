"""The forms of a loop, each killed at many a batch: it trains what a plain loop over the same batches trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any

import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableLoader, resumable
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.testing import MemoryStore, located
from tests.checkpoint.loop_forms import BEHIND, FORMS, OTHERS, REFUSED, TOLD
from tests.checkpoint.loop_runs import BATCHES, EPOCHS, PLAIN, Killed, Place, Plain, Run, data_of
from tests.support.sweeps import quick_first, sparse

PLACES: list[Place] = [(epoch, batch) for epoch in range(EPOCHS) for batch in (*range(BATCHES), None)]
FEW: list[Place] = [(0, 0), (0, 2), (0, None), (1, 3), (1, None)]  # One of each kind, one after the other.
KINDS = ("loader.epochs", "resumable")


def start(  # noqa: PLR0917
    kind: str, form: str, run: Run, config: Any, workers: int = 0, kill: Place | None = None, epochs: int = EPOCHS
) -> None:
    """Start the program, which goes on from what is saved, or ends at `kill`."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    loader, run.other, run.kill = data_of(1, len(run.order[0]), workers), OTHERS.get(form, lambda: None)(), kill
    state: dict[str, Any] = {"optimizer": optimizer}
    state |= {"other": run.other} if isinstance(run.other, ResumableLoader) else {}
    if kind == "resumable":
        ours, loop = resumable(config, loader, epochs, **state)
        run.step, run.report = lambda: loop.step, optimizer.step
        try:
            FORMS[form](loop, ours, run)
        finally:
            loop.leave()
        return
    state["data"] = loader
    with Checkpointer(config) as ckpt:
        ckpt.restore(state)
        run.step, run.report = lambda: ckpt.position, lambda: ckpt.step(ckpt.position + 1, state)
        FORMS[form](loader.epochs(epochs), loader, run)


def plain(form: str) -> Run:
    """Return what the form trains in a loop without us."""
    other = OTHERS.get(form, lambda: None)()
    run = Run(Plain(other, each_pass=True) if isinstance(other, ResumableLoader) else other)
    FORMS[form](PLAIN.epochs(), PLAIN, run)
    return run


def check(kind: str, form: str, workers: int, kills: list[Place]) -> None:
    """Kill the form at each place in turn, go on, and start the ended run once more: it trains as the plain loop."""
    run, expected, config = Run(), plain(form), located_config()
    for kill in kills:
        with suppress(Killed), by_length_refused(form):
            start(kind, form, run, config, workers, kill)
    with by_length_refused(form) as refused:
        start(kind, form, run, config, workers)
    if refused:
        assert run.trained.items() <= expected.trained.items()
        return
    assert (run.trained, run.measured) == (expected.trained, expected.measured)
    calls = run.calls
    with by_length_refused(form):
        start(kind, form, run, config, workers)
    assert run.calls == calls, "the run has ended"


def located_config() -> CheckpointConfig:
    return CheckpointConfig(checkpoint_dir=located(MemoryStore()), step_interval=1, memory_dir=None)


@contextmanager
def by_length_refused(form: str) -> Iterator[list[str]]:
    """Let range(len(loader)) be refused in a restored epoch, with an error that says what to write."""
    refused: list[str] = []
    if form != "by_next_of_its_length":
        yield refused
        return
    try:
        yield refused
    except StopIteration as error:
        refused.append(str(error))
    assert all("range(loader.batch, len(loader))" in told for told in refused)


@pytest.mark.parametrize(("form", "kind"), quick_first(product(FORMS, KINDS), 5))
def test_a_loop_of_any_form_goes_on_as_the_plain_loop(form: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Killed at the beginning, in and at the end of an epoch it trains as a plain loop, or its first save raises."""
    if form in REFUSED or (form in BEHIND and kind != "resumable"):
        with pytest.raises(ConfigError, match=r"a resume would train other samples|it would not leave it"):
            start(kind, form, Run(), located_config())
        return
    if form in TOLD:
        start(kind, form, run := Run(), located_config())
        assert run.trained == plain(form).trained
    else:
        check(kind, form, 0, [])
        check(kind, form, 0, FEW)
    assert "counts from 0 again" not in caplog.text
    assert "enumerate begins" not in caplog.text


@pytest.mark.parametrize(
    ("place", "form", "kind"), quick_first(product(product(range(4), (1, 2)), sorted(TOLD), KINDS), 11)
)
def test_a_count_that_no_source_shows_is_told(
    place: Place, form: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop whose way to leave an epoch is unknown is told once if it counts anew in an epoch that was restored."""
    config, run = located_config(), Run()
    run.order = Plain(data_of(1, 2 * BATCHES)).order
    with suppress(Killed):
        start(kind, form, run, config, kill=place, epochs=4)
    assert "counts from 0 again" not in caplog.text
    run.trained = {}  # It trains other samples.
    start(kind, form, run, config, epochs=4)
    assert caplog.text.count("The loop leaves an epoch after 4 batches") == 1


@pytest.mark.parametrize(("form", "kind"), quick_first(product(["sliced", "measured_inside"], KINDS), 3))
def test_workers_change_no_form(form: str, kind: str) -> None:
    """With batches that two workers have read ahead, a loop goes on as the plain loop does."""
    check(kind, form, 2, [(1, 2)])


@pytest.mark.parametrize(
    ("form", "kind", "workers"),
    # An odd step meets every kind with every number of workers.
    sparse(product([form for form in FORMS if form not in REFUSED | BEHIND | TOLD], KINDS, (0, 2)), 11),
)
def test_every_form_at_every_place(form: str, kind: str, workers: int) -> None:
    """Killed once, at any place, or at one after the other, every form goes on as the plain, also with two workers."""
    for places in [*([place] for place in PLACES), PLACES]:
        check(kind, form, workers, places)
