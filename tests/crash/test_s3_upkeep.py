"""Upkeep where a listing has many pages: the newest entry is found, and what is dead goes, and nothing else."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from ckpt_tasks.format.keys import INDEX_NAME, MANIFEST_NAME, Attempt, attempt_prefix, ledger_name
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.upkeep.verifying import orphans
from tests.support import answers
from tests.support.chaos import Chaos
from tests.support.places import S3Place
from tests.support.rules import Fault
from tests.support.runs import check_run, faults_of, head_of, opened, restored, state_of, train, unnamed
from tests.support.sweeps import quick_first

_DAMAGED = 20  # more entries than are looked at before all are listed


def put_all(place: S3Place, objects: Mapping[str, bytes]) -> None:
    with ThreadPoolExecutor(16) as threads:
        [*threads.map(lambda name: place.put(name, objects[name]), objects)]


def names_of(attempts: Iterable[Attempt], shards: int) -> list[str]:
    parts = [INDEX_NAME, MANIFEST_NAME, *(f"model-{n:05d}-of-{shards:05d}-0.safetensors" for n in range(shards))]
    return [attempt_prefix(attempt) + part for attempt in attempts for part in parts]


@pytest.mark.slow
def test_a_run_of_five_thousand_objects(s3_place: S3Place) -> None:
    """P51, P54, P67: over pages and pages names are whole and in order, the newest entry is found, orphans are swept.

    The ledger alone has more entries than a page, objects of others lie between, and in the end so many of the newest
    entries are damaged that all must be listed to find one that is good.
    """
    train(s3_place, 1, 2)  # owner epoch 1
    train(s3_place, 3)  # 2
    history = History(s3_place.store)
    newest, _ = history.read_entry(history.head().next_n - 1)
    ledger = {
        ledger_name(n): replace(newest, n=n, nonce=secrets.token_hex(16), previous=None).to_bytes()[0]
        for n in range(newest.n + 1, newest.n + 1501)
    }
    dead = names_of((Attempt(step, 1, secrets.token_hex(8)) for step in range(4, 54)), 22)
    foreign = [f"samples/{n:05d}.txt" for n in range(1200)] + [f"checkpoint_000000000004/a{n}" for n in range(1100)]
    put_all(s3_place, {**ledger, **dict.fromkeys(dead, b"dead"), **dict.fromkeys(foreign, b"not ours")})
    everything = s3_place.names()
    assert len(everything) > 5000

    assert s3_place.store.names("") == sorted(everything)
    assert s3_place.store.names("ledger/") == sorted(name for name in everything if name.startswith("ledger/"))
    assert s3_place.store.names("ledger/", limit=16) == [ledger_name(newest.n + 1500 - n) for n in range(16)]
    assert s3_place.store.names("", limit=2500) == sorted(everything)[:2500]
    assert history.head().next_n == newest.n + 1501
    assert sorted(orphans(s3_place.store, head_of(s3_place))) == sorted(dead)

    step, ckpt = restored(s3_place)
    assert step == 3
    ckpt.prune()
    ckpt.close()
    left = s3_place.names()
    assert everything - left == {*dead, "heartbeat/000002.json"}
    assert unnamed(s3_place) == set()
    assert faults_of(s3_place) == {}

    last = head_of(s3_place)
    entries = sorted(name for name in left if name.startswith("ledger/"))
    put_all(s3_place, dict.fromkeys(entries[:_DAMAGED], b"torn"))
    head = History(s3_place.store).head()  # who has read the newest before goes on from that
    assert head.entry is not None
    assert ledger_name(head.entry.n) == entries[_DAMAGED]
    assert (sorted(head.damaged), head.next_n) == (entries[:_DAMAGED], head.entry.n + _DAMAGED + 1)
    assert head.state.live == last.live


@pytest.mark.parametrize("uploads", [20, pytest.param(2100, marks=pytest.mark.slow)])
def test_uploads_of_dead_owners_are_aborted(s3_place: S3Place, uploads: int) -> None:
    """P67: a new owner aborts the unfinished uploads of all before it, also over pages; other ones are not its own."""
    train(s3_place, 1)
    dead = names_of((Attempt(2, 1, secrets.token_hex(8)) for _ in range(uploads // 10)), 8)
    own = attempt_prefix(Attempt(2, 2, secrets.token_hex(8))) + INDEX_NAME
    later = attempt_prefix(Attempt(2, 3, secrets.token_hex(8))) + INDEX_NAME
    others = [own, later, "samples.tar", "checkpoint_000000000002/samples.tar"]
    beside = replace(s3_place, prefix=f"{s3_place.prefix}-2")
    with ThreadPoolExecutor(16) as threads:
        [*threads.map(s3_place.begin_upload, [*dead, *others])]
    beside.begin_upload(dead[0])
    assert len(s3_place.uploads()) == len(dead) + len(others)
    step, ckpt = restored(s3_place)
    assert step == 1
    ckpt.save(2, state_of(2))
    ckpt.prune()  # `close` would leave to the next owner what takes long
    ckpt.close()
    assert sorted(s3_place.uploads()) == sorted(others)
    assert beside.uploads() == [dead[0]]


@pytest.mark.parametrize(
    "answer", quick_first([answers.ACCESS_DENIED, answers.NOT_IMPLEMENTED]), ids=["denied", "unknown"]
)
def test_where_uploads_cannot_be_listed_the_rest_is_still_pruned(
    s3_place: S3Place, chaos: Chaos, caplog: pytest.LogCaptureFixture, answer: answers.Answer
) -> None:
    """P60, P67: a store that does not list uploads, or not to us, costs what they hold, not what retention deletes."""
    place = s3_place.through(chaos.endpoint)
    rule = chaos.on(Fault(answer=answer), operation="ListMultipartUploads")
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        train(place, 1, 2, 3, 4)
    assert [c.step for c in head_of(place).live] == [3, 4]
    assert unnamed(place) == set()
    assert rule.hits == 1  # asked once
    said = [record.message for record in caplog.records if "upload" in record.message]
    assert bool(said) == (answer is answers.ACCESS_DENIED)  # a store that knows no uploads keeps none
    dead = names_of([Attempt(9, 1, secrets.token_hex(8))], 3)
    put_all(place, dict.fromkeys(dead, b"dead"))
    check_run(place, 4)
    with opened(place) as ckpt:
        ckpt.acquire()
        ckpt.prune()
    assert unnamed(place) == set()
