"""Unfinished uploads: whose are aborted, and what a store costs that does not list them."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from ckpt_tasks.format.keys import INDEX_NAME, MANIFEST_NAME, Attempt, attempt_prefix
from tests.support import answers
from tests.support.chaos import Chaos
from tests.support.places import S3Place
from tests.support.rules import Fault
from tests.support.runs import check_run, head_of, opened, restored, state_of, train, unnamed
from tests.support.sweeps import quick_first


def put_all(place: S3Place, objects: Mapping[str, bytes]) -> None:
    with ThreadPoolExecutor(16) as threads:
        [*threads.map(lambda name: place.put(name, objects[name]), objects)]


def names_of(attempts: Iterable[Attempt], shards: int) -> list[str]:
    parts = [INDEX_NAME, MANIFEST_NAME, *(f"model-{n:05d}-of-{shards:05d}-0.safetensors" for n in range(shards))]
    return [attempt_prefix(attempt) + part for attempt in attempts for part in parts]


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
