"""Objects on their way to S3, in one piece and in parts: lost, torn, stalled, slow, and misreported at the end."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ckpt_tasks.errors import ObjectExistsError, StoreError
from ckpt_tasks.storage import s3
from ckpt_tasks.storage.port import Store
from tests.faults.s3_runs import Place
from tests.storage.conformance import pattern
from tests.support import answers
from tests.support.answers import Answer
from tests.support.rules import Fault

NAME = "checkpoint_000000000005/e000001-0123456789abcdef/model.safetensors"
LARGE = pattern(1_000_003)
PARTS = 16


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send an object of a megabyte in 16 parts; a real part has 16 MiB."""
    monkeypatch.setattr(s3, "PART_BYTES", 1 << 16)


def sent(place: Place, operation: str) -> int:
    return len(place.chaos.requests(operation=operation))


def put(store: Store, body: bytes = LARGE) -> None:
    store.put(NAME, [memoryview(body)[:100], memoryview(body)[100:]])


# ── one request ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "fault",
    [
        Fault(drop_answer=True),
        Fault(drop_request=True),
        Fault(reset_request_at=0),
        Fault(reset_request_at=500_000),
        Fault(answer=answers.INTERNAL_ERROR),
        Fault(answer=answers.INTERNAL_ERROR, server_acts=True),
        Fault(answer=answers.SLOW_DOWN, server_acts=True),
        Fault(answer=answers.CONDITIONAL_CONFLICT),
        Fault(hold_answer=60.0),  # after the read timeout
    ],
    ids=lambda fault: f"{'-'.join(fault.names())}-{fault.answer.status if fault.answer else ''}",
)
def test_an_object_arrives_whole_and_is_sent_twice_only_where_it_is_not_there(place: Place, fault: Fault) -> None:
    """P30, P32, P43: whatever happens to the first request, `put` returns and every byte lies there."""
    rule = place.chaos.on(fault, operation="PutObject", times=1)
    put(place.store(read_timeout=0.5) if fault.hold_answer else place.store())
    assert rule.hits == 1
    assert place.past.get(NAME) == LARGE
    there_at_once = fault.drop_answer or fault.server_acts or fault.hold_answer
    assert sent(place, "PutObject") == (1 if there_at_once else 2)


def test_somebody_elses_object_is_not_taken_for_ours(place: Place) -> None:
    """P31, P32: told that the name is taken, after a lost request too: our bytes are done, others stay as they are."""
    place.chaos.on(Fault(answer=answers.PRECONDITION_FAILED, server_acts=True), operation="PutObject", times=1)
    put(place.store())
    for theirs, lost in ((LARGE[:-1] + b"?", False), (b"somebody else's", True)):
        place.past.put(NAME, theirs)
        if lost:
            place.chaos.on(Fault(drop_request=True), operation="PutObject", times=1)
        with pytest.raises(ObjectExistsError):
            put(place.store())
        assert place.past.get(NAME) == theirs


def test_a_slow_line_is_no_failure(place: Place) -> None:
    """P43: at 1 MB/s an object takes longer to come down than the read timeout, and nothing is tried again."""
    place.chaos.on(Fault(throttle_bytes_per_s=1_000_000))
    put(place.store())
    store = place.store(read_timeout=0.5)
    assert store.get(NAME, len(LARGE)) == LARGE
    part = bytearray(800_000)
    store.read(NAME, 7, memoryview(part))
    assert part == LARGE[7:800_007]
    assert [one.method for one in place.chaos.requests()] == ["PUT", "GET", "GET"]


def test_the_deadline_begins_with_the_first_failure(place: Place) -> None:
    """P43: an upload that took longer than the deadline and then failed is not given up without a second try."""
    place.chaos.on(Fault(throttle_bytes_per_s=1_000_000, drop_request=True), times=1)
    put(place.store(deadline_s=0.5))
    assert place.past.get(NAME) == LARGE


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("small_parts")
def test_a_large_object_goes_up_in_parts(place: Place) -> None:
    """P42: without faults, every part is sent once, and the bytes are those that were given."""
    put(place.store())
    assert place.past.get(NAME) == LARGE
    assert [one.operation for one in place.chaos.requests()].count("UploadPart") == PARTS
    assert len(place.chaos.log) == PARTS + 2
    with pytest.raises(ObjectExistsError):
        put(place.store(), LARGE[::-1])
    assert place.past.get(NAME) == LARGE
    assert place.past.uploads() == []


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    "fault",
    [
        Fault(drop_request=True),
        Fault(drop_answer=True),
        Fault(reset_request_at=1000),
        Fault(answer=answers.SLOW_DOWN),
        Fault(answer=answers.INTERNAL_ERROR, server_acts=True),
    ],
    ids=lambda fault: "-".join(fault.names()),
)
def test_a_part_that_fails_is_sent_again_alone(place: Place, fault: Fault) -> None:
    """P30: of a large object a quarter of the parts fail: those are sent again, the others are not."""
    rule = place.chaos.on(fault, operation="UploadPart", probability=0.25, seed=3)
    put(place.store())
    assert place.past.get(NAME) == LARGE
    assert rule.hits > 1
    assert sent(place, "UploadPart") == PARTS + rule.hits
    assert sent(place, "CreateMultipartUpload") == sent(place, "CompleteMultipartUpload") == 1


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    ("operation", "fault"),
    [
        ("CreateMultipartUpload", Fault(drop_answer=True)),
        ("CreateMultipartUpload", Fault(drop_request=True)),
        ("CreateMultipartUpload", Fault(answer=answers.SLOW_DOWN)),
        ("CompleteMultipartUpload", Fault(answer=answers.INTERNAL_ERROR)),
        ("CompleteMultipartUpload", Fault(answer=answers.INTERNAL_ERROR, server_acts=True)),
        ("CompleteMultipartUpload", Fault(answer=answers.FAILED_AFTER_200)),
        ("CompleteMultipartUpload", Fault(answer=answers.FAILED_AFTER_200, server_acts=True)),
        ("CompleteMultipartUpload", Fault(answer=answers.NO_SUCH_UPLOAD, server_acts=True)),
        ("CompleteMultipartUpload", Fault(answer=answers.NO_SUCH_UPLOAD)),
        ("CompleteMultipartUpload", Fault(answer=answers.CONDITIONAL_CONFLICT)),
        ("CompleteMultipartUpload", Fault(answer=answers.PRECONDITION_FAILED, server_acts=True)),
        ("CompleteMultipartUpload", Fault(drop_answer=True)),
        ("CompleteMultipartUpload", Fault(drop_request=True)),
        ("CompleteMultipartUpload", Fault(reset_answer_at=10)),
        ("CompleteMultipartUpload", Fault(truncate_answer_at=10)),
        ("CompleteMultipartUpload", Fault(answer=Answer(200, b""))),
    ],
    ids=lambda it: it if isinstance(it, str) else f"{'-'.join(it.names())}-{it.answer.status if it.answer else ''}",
)
def test_the_beginning_or_the_end_of_an_upload_goes_wrong(place: Place, operation: str, fault: Fault) -> None:
    """P30, P32: errors, also after 200, also after success: the object is there once, whole, and no parts are left."""
    rule = place.chaos.on(fault, operation=operation, times=1)
    put(place.store())
    assert rule.hits == 1
    assert place.past.get(NAME) == LARGE
    started, left = sent(place, "CreateMultipartUpload"), len(place.past.uploads())
    assert left <= (operation == "CreateMultipartUpload" and fault.drop_answer)
    done = fault.drop_answer or fault.server_acts or fault.reset_answer_at or fault.truncate_answer_at
    if operation == "CompleteMultipartUpload" and done:
        assert started == 1, "what lies there was sent again"


@pytest.mark.usefixtures("small_parts")
def test_an_upload_that_is_given_up_leaves_no_parts(place: Place) -> None:
    """P37: parts fail for ever: an error after the deadline; nothing is seen, and the parts are freed."""
    place.chaos.on(Fault(answer=answers.SLOW_DOWN), operation="UploadPart", query={"partNumber": "^7$"})
    with pytest.raises(StoreError, match="503 SlowDown"):
        put(place.store(deadline_s=0.1))
    assert place.past.names() == []
    assert place.past.uploads() == []


@pytest.mark.usefixtures("small_parts")
def test_parts_whose_freeing_failed_are_freed_by_a_later_owner(place: Place) -> None:
    """P67: the abort is lost as well: `drop_unfinished` frees what dead owners left, and nothing else."""
    down = place.chaos.on(Fault(drop_request=True), operation="UploadPart", query={"partNumber": "^7$"})
    lost = place.chaos.on(Fault(drop_request=True), operation="AbortMultipartUpload")
    store = place.store(deadline_s=0.1)
    for name in (NAME, NAME.replace("e000001", "e000002")):
        with pytest.raises(StoreError):
            store.put(name, [LARGE])
    place.chaos.off(down, lost)
    assert len(place.past.uploads()) >= 2
    store = place.store()
    flaky = place.chaos.on(Fault(answer=answers.SLOW_DOWN), operation="ListMultipartUploads", times=2)
    store.drop_unfinished(lambda name: "e000001" in name)
    assert flaky.hits == 2
    left = {one["Key"].removeprefix(f"{place.prefix}/") for one in place.past.uploads()}
    assert left == {NAME.replace("e000001", "e000002")}


@pytest.mark.slow
def test_parts_of_their_real_size_through_a_bad_line(place: Place) -> None:
    """P30, P42: 80 MiB in parts of 16 MiB, of whose requests a fifth is lost and a fifth torn in the middle."""
    place.chaos.on(Fault(drop_request=True), operation="UploadPart", probability=0.2, seed=1)
    place.chaos.on(Fault(reset_request_at=5 << 20), operation="UploadPart", probability=0.2, seed=2)
    body = random.Random(0).randbytes(80 << 20)
    put(place.store(), body)
    assert place.past.get(NAME) == body
    down: list[Any] = [bytearray(16 << 20) for _ in range(5)]
    store = place.store()
    for n, part in enumerate(down):
        store.read(NAME, n * (16 << 20), memoryview(part))
    assert b"".join(down) == body
