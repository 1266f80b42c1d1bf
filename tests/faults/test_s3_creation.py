"""A run is made over S3: the store is tried first, through faults as well; a liar is refused, or used by one writer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.errors import ConfigError, ObjectExistsError, StoreError
from ckpt_tasks.format.keys import FORMAT_NAME
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.storage.locations import Location
from ckpt_tasks.storage.objects import ObjectStore
from ckpt_tasks.storage.retrying import RetryingStore
from tests.faults.s3_runs import Place, is_state, named, state_of
from tests.support import answers
from tests.support.rules import Fault
from tests.support.sweeps import quick_first

CONDITION = {"if-none-match": r"\*"}
HEEDLESS = Fault(without=("if-none-match", "if-match"))  # a server that accepts conditions and heeds none


def written(place: Place) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(place.past.get(FORMAT_NAME))
    return found


@pytest.mark.parametrize(
    "fault",
    quick_first([Fault(drop_answer=True), Fault(answer=answers.PRECONDITION_FAILED, server_acts=True)]),
    ids=named,
)
def test_a_good_store_is_not_refused_for_a_bad_line(place: Place, fault: Fault) -> None:
    """P32, P33: a third of the answers to the trial's writes are lost or wrong: the store does what it must.

    The answer to format.json is lost as well: what was tried and written counts, and a run is made once.
    """
    rule = place.chaos.on(fault, operation="PutObject", key="/(twice|race-.)$", probability=0.33, seed=4)
    lost = place.chaos.on(Fault(drop_answer=True), operation="PutObject", key=r"/format\.json$", times=1)
    history = History(place.store())
    history.create("run")
    assert rule.hits > 5
    assert lost.hits == 1
    assert written(place)["proved"] == {"put_if_absent": True, "read_after_write": True, "ordered_listing": True}
    assert place.past.names() == {FORMAT_NAME}
    before = place.past.get(FORMAT_NAME)
    history.create("run")
    assert place.past.get(FORMAT_NAME) == before


def test_a_store_is_tried_again_when_its_endpoint_changes(place: Place) -> None:
    """P33: once for every endpoint that the run is reached through, and never in between.

    Behind one that drops the condition the run is refused, and stays as it was.
    """
    History(place.store()).create("run")
    first = place.asked(key="/probe/").count("PutObject")
    assert first > 40
    History(place.store()).create("run")
    assert place.asked(key="/probe/").count("PutObject") == first
    assert written(place)["endpoint"] == place.chaos.endpoint
    History(RetryingStore(ObjectStore(place.url, place.server.quick_options))).create("run")
    assert written(place)["endpoint"] == place.server.endpoint
    before = place.past.get(FORMAT_NAME)
    place.chaos.on(Fault(answer=answers.Answer(200)), operation="PutObject", headers=CONDITION, skip=1)
    with pytest.raises(ConfigError, match="second writer"):
        History(place.store()).create("run")
    assert place.past.get(FORMAT_NAME) == before


def run_on(place: Place, *, single_writer: bool = False) -> Checkpointer:
    location = Location(place.url, storage_options=place.options(), single_writer=single_writer)
    return Checkpointer(CheckpointConfig(checkpoint_dir=location, memory_dir=None))


def test_a_liar_serves_a_single_writer(place: Place) -> None:
    """P33: a server that knows or heeds no condition is refused, with the way out: who vouches for being alone.

    format.json says so, and later processes need not say it again.
    """
    unknown = place.chaos.on(Fault(answer=answers.NOT_IMPLEMENTED), operation="PutObject", headers=CONDITION)
    with pytest.raises(StoreError, match=r"501 NotImplemented.*single_writer=True"):
        History(place.store(deadline_s=1)).create("run")
    assert place.past.names() == set()
    place.chaos.off(unknown)
    place.chaos.on(HEEDLESS)
    with run_on(place) as ckpt, pytest.raises(ConfigError, match=r"second writer.*single_writer=True"):
        ckpt.save(1, state_of(1))
    assert [name for name in place.past.names() if "probe/" not in name] == []
    with run_on(place, single_writer=True) as ckpt:
        ckpt.save(1, state_of(1))
    assert written(place)["single_writer"] is True
    assert written(place)["proved"]["put_if_absent"] is False
    with run_on(place) as ckpt:
        state = state_of(0)
        assert ckpt.restore(state) == 1
        ckpt.save(2, state_of(2))
    assert is_state(state, 1)
    assert [one.step for one in open_run(Location(place.url, storage_options=place.options())).checkpoints()] == [2, 1]


def test_a_single_writer_looks_before_it_writes(place: Place) -> None:
    """P33: without a condition to ask for, a name that is taken is left alone, through lost answers too."""
    store = RetryingStore(ObjectStore(place.url, place.options()), deadline_s=5)
    store.assume_single_writer()
    place.chaos.on(replace(HEEDLESS, drop_answer=True), operation="PutObject", times=2)
    place.chaos.on(HEEDLESS)
    store.put("a", [b"mine"])
    with pytest.raises(StoreError, match="no answer"):
        store.put_if_absent("b", b"mine")
    for name in ("a", "b"):
        with pytest.raises(ObjectExistsError):
            store.put_if_absent(name, b"other")
        assert store.get(name, 10) == b"mine"
