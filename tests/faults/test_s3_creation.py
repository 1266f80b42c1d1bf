"""A run is made over S3: the store is tried first, through faults as well; a liar is refused, or used by one writer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.errors import ConfigError, ObjectExistsError, StoreError
from ckpt_tasks.format.keys import FORMAT_NAME
from ckpt_tasks.ledger.history import History
from ckpt_tasks.storage.locations import Location
from ckpt_tasks.storage.objects import ObjectStore
from ckpt_tasks.storage.retrying import RetryingStore
from tests.faults.s3_runs import Past, Place, is_state, state_of
from tests.servers.process import token
from tests.servers.s3 import S3Server
from tests.support import answers
from tests.support.chaos import Chaos
from tests.support.rules import Fault

PROBE = "/probe/"


def written(past: Past) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(past.get(FORMAT_NAME))
    return found


def probes(place: Place) -> int:
    return len(place.chaos.requests(operation="PutObject", key=PROBE))


# ── a good store through a bad line ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "fault",
    [
        Fault(drop_answer=True),
        Fault(answer=answers.PRECONDITION_FAILED, server_acts=True),
        Fault(answer=answers.CONDITIONAL_CONFLICT),
    ],
    ids=lambda fault: "-".join(fault.names()),
)
def test_a_good_store_is_not_refused_for_a_bad_line(place: Place, fault: Fault) -> None:
    """P33: a third of the answers to the trial's writes are lost or wrong: the store is found to do what it must."""
    rule = place.chaos.on(fault, operation="PutObject", key="/(twice|race-.)$", probability=0.33, seed=4)
    History(place.store()).create("run")
    assert rule.hits > 5
    assert written(place.past)["proved"] == {"put_if_absent": True, "read_after_write": True, "ordered_listing": True}
    assert place.past.names() == [FORMAT_NAME]


def test_the_answer_to_format_json_is_lost(place: Place) -> None:
    """P32: what was tried and written counts, whoever reads it next; a run is made once."""
    place.chaos.on(Fault(drop_answer=True), operation="PutObject", key=r"/format\.json$", times=1)
    history = History(place.store())
    history.create("run")
    assert history.check("run") == "run"
    before = place.past.get(FORMAT_NAME)
    history.create("run")
    assert place.past.get(FORMAT_NAME) == before


def test_a_server_without_conditions_is_refused(place: Place) -> None:
    """P33: 501 to every condition: the error says what to do, and nothing of a run is there."""
    place.chaos.on(Fault(answer=answers.NOT_IMPLEMENTED), operation="PutObject", headers={"if-none-match": r"\*"})
    with pytest.raises(StoreError, match=r"501 NotImplemented.*single_writer=True"):
        History(place.store(deadline_s=1)).create("run")
    assert place.past.names() == []
    History(place.store()).create("run", single_writer=True)
    assert written(place.past)["single_writer"] is True


def test_a_store_is_tried_again_when_its_endpoint_changes(place: Place) -> None:
    """P33: once for every endpoint that the run is reached through, and never in between."""
    History(place.store()).create("run")
    first = probes(place)
    assert first > 40
    for _ in range(3):
        History(place.store()).create("run")
    assert probes(place) == first
    assert written(place.past)["endpoint"] == place.chaos.endpoint
    straight = RetryingStore(ObjectStore(place.url, place.server.quick_options))
    History(straight).create("run")
    assert written(place.past)["endpoint"] == place.server.endpoint
    History(place.store()).create("run")
    assert probes(place) == 2 * first
    assert written(place.past)["endpoint"] == place.chaos.endpoint
    assert written(place.past)["run_key"] == "run"
    assert place.past.names() == [FORMAT_NAME]


def test_an_endpoint_that_lies_is_found_out_when_the_run_moves_there(place: Place) -> None:
    """P33: the same objects behind a gateway that drops the condition: the run is refused there and stays as it was."""
    straight = RetryingStore(ObjectStore(place.url, place.server.quick_options))
    History(straight).create("run")
    before = place.past.get(FORMAT_NAME)
    place.chaos.on(Fault(answer=answers.Answer(200)), operation="PutObject", headers={"if-none-match": r"\*"}, skip=1)
    with pytest.raises(ConfigError, match="second writer"):
        History(place.store()).create("run")
    assert place.past.get(FORMAT_NAME) == before
    assert [name for name in place.past.names() if not name.startswith("probe/")] == [FORMAT_NAME]


# ── a liar ───────────────────────────────────────────────────────────────────────────────────────────────────────

HEEDLESS = Fault(without=("if-none-match", "if-match"))


@pytest.fixture
def lying(ministack: S3Server) -> Iterator[Place]:
    """Return a place on a server that accepts conditions and heeds none."""
    with ministack.fresh_bucket() as bucket, Chaos(ministack.endpoint) as chaos:
        chaos.on(HEEDLESS)
        yield Place(ministack, chaos, bucket, token())


def run_on(lying: Place, *, single_writer: bool = False) -> Checkpointer:
    location = Location(lying.url, storage_options=lying.options(), single_writer=single_writer)
    return Checkpointer(CheckpointConfig(checkpoint_dir=location, memory_dir=None))


def test_a_liar_serves_a_single_writer(lying: Place) -> None:
    """P33: a server that heeds no condition is refused, with the way out: who vouches for being alone may use it.

    format.json says so, and later processes need not say it again.
    """
    past = Past(lying.server, lying.bucket, lying.prefix)
    with run_on(lying) as ckpt, pytest.raises(ConfigError, match=r"second writer.*single_writer=True"):
        ckpt.save(1, state_of(1))
    assert [name for name in past.names() if "probe/" not in name] == []
    with run_on(lying, single_writer=True) as ckpt:
        ckpt.save(1, state_of(1))
    assert written(past)["single_writer"] is True
    assert written(past)["proved"]["put_if_absent"] is False
    with run_on(lying) as ckpt:
        state = state_of(0)
        assert ckpt.restore(state) == 1
        ckpt.save(2, state_of(2))
    assert is_state(state, 1)
    assert [one.step for one in open_run(Location(lying.url, storage_options=lying.options())).checkpoints()] == [2, 1]


def test_a_single_writer_looks_before_it_writes(lying: Place) -> None:
    """P33: without a condition to ask for, a name that is taken is left alone, through lost answers too."""
    store = RetryingStore(ObjectStore(lying.url, lying.options()), deadline_s=5)
    store.assume_single_writer()
    lying.chaos.off()
    lying.chaos.on(replace(HEEDLESS, drop_answer=True), operation="PutObject", times=2)
    lying.chaos.on(HEEDLESS)
    store.put("a", [b"mine"])
    with pytest.raises(StoreError, match="no answer"):
        store.put_if_absent("b", b"mine")
    for name in ("a", "b"):
        with pytest.raises(ObjectExistsError):
            store.put_if_absent(name, b"other")
        assert store.get(name, 10) == b"mine"
