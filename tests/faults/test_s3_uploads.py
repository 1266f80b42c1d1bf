"""Objects on their way to S3, in one piece and in parts: lost, torn, slow, and misreported at the end."""

from __future__ import annotations

import pytest

from ckpt_tasks.errors import ObjectExistsError, StoreError
from ckpt_tasks.storage import s3
from ckpt_tasks.storage.port import Store
from tests.faults.s3_runs import Place, named
from tests.storage.conformance import pattern
from tests.support import answers
from tests.support.answers import Answer
from tests.support.rules import Fault
from tests.support.sweeps import quick_first

NAME = "checkpoint_000000000005/e000001-0123456789abcdef/model.safetensors"
LARGE = pattern(1_000_003)
PARTS = 16


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send an object of a megabyte in 16 parts; a real part has 16 MiB."""
    monkeypatch.setattr(s3, "PART_BYTES", 1 << 16)


def put(store: Store, body: bytes = LARGE, name: str = NAME) -> None:
    store.put(name, [memoryview(body)[:100], memoryview(body)[100:]])


WHOLE = [  # … and whether the object is there when the first request has ended
    (Fault(drop_answer=True), True),
    (Fault(drop_request=True), False),
    (Fault(reset_request_at=500_000), False),
    (Fault(answer=answers.INTERNAL_ERROR), False),
    (Fault(answer=answers.SLOW_DOWN, server_acts=True), True),
    (Fault(answer=answers.CONDITIONAL_CONFLICT), False),
    (Fault(hold_answer=60.0), True),  # after the read timeout
]


@pytest.mark.parametrize(("fault", "there"), quick_first(WHOLE, 5), ids=named)
def test_an_object_arrives_whole_and_is_sent_twice_only_where_it_is_not_there(
    place: Place, fault: Fault, there: bool
) -> None:
    """P30, P32, P43: whatever happens to the first request, `put` returns and every byte lies there."""
    rule = place.chaos.on(fault, operation="PutObject", times=1)
    put(place.store(read_timeout=0.5) if fault.hold_answer else place.store())
    assert rule.hits == 1
    assert place.past.get(NAME) == LARGE
    assert place.asked(operation="PutObject").count("Put") == (1 if there else 2)


def test_somebody_elses_object_is_not_taken_for_ours(place: Place) -> None:
    """P31, P32: told that the name is taken, after a lost request too: our bytes are done, others stay as they are."""
    place.chaos.on(Fault(answer=answers.PRECONDITION_FAILED, server_acts=True), operation="PutObject", times=1)
    put(place.store())
    for theirs, times in ((LARGE[:-1] + b"?", 0), (b"somebody else's", 1)):
        place.past.put(NAME, theirs)
        place.chaos.on(Fault(drop_request=True), operation="PutObject", times=times)
        with pytest.raises(ObjectExistsError):
            put(place.store())
        assert place.past.get(NAME) == theirs


def test_a_slow_line_is_no_failure(place: Place) -> None:
    """P43: an object may take longer than the read timeout, and its deadline begins with the first failure."""
    slow = place.chaos.on(Fault(throttle_bytes_per_s=1_000_000, drop_request=True), times=1)
    put(place.store(deadline_s=0.5))
    assert slow.hits == 1
    assert place.past.get(NAME) == LARGE
    since = len(place.chaos.log)
    place.chaos.on(Fault(throttle_bytes_per_s=1_000_000))
    assert place.store(read_timeout=0.5).get(NAME, len(LARGE)) == LARGE
    assert len(place.chaos.log) == since + 1


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    "fault",
    quick_first([None, Fault(drop_request=True), Fault(drop_answer=True), Fault(reset_request_at=1000)], 2),
    ids=named,
)
def test_a_part_that_fails_is_sent_again_alone(place: Place, fault: Fault | None) -> None:
    """P30, P42: of a large object a quarter of the parts fail: those are sent again, the others are not."""
    rule = place.chaos.on(fault, operation="UploadPart", probability=0.25, seed=3) if fault else None
    put(place.store())
    assert place.past.get(NAME) == LARGE
    asked = place.asked()
    assert asked.count("UploadPart") == PARTS + (rule.hits if rule else 0)
    assert asked.count("CreateMultipartUpload") == asked.count("CompleteMultipartUpload") == 1
    assert rule is None or rule.hits > 1
    place.chaos.off()
    with pytest.raises(ObjectExistsError):
        put(place.store(), LARGE[::-1])
    assert place.past.get(NAME) == LARGE
    assert place.past.uploads() == []


ENDS = [  # the fault, and whether the object is there all the same
    (Fault(answer=answers.INTERNAL_ERROR), False),
    (Fault(answer=answers.FAILED_AFTER_200), False),
    (Fault(answer=answers.FAILED_AFTER_200, server_acts=True), True),
    (Fault(answer=answers.NO_SUCH_UPLOAD), False),
    (Fault(answer=answers.NO_SUCH_UPLOAD, server_acts=True), True),
    (Fault(answer=answers.PRECONDITION_FAILED, server_acts=True), True),
    (Fault(answer=Answer(200, b"")), False),
    (Fault(drop_answer=True), True),
    (Fault(drop_request=True), False),
    (Fault(truncate_answer_at=10), True),
]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    ("operation", "fault", "there"),
    quick_first(
        [
            ("CreateMultipartUpload", Fault(drop_answer=True), False),
            *(("CompleteMultipartUpload", *end) for end in ENDS),
        ],
        4,
    ),
    ids=named,
)
def test_the_beginning_or_the_end_of_an_upload_goes_wrong(
    place: Place, operation: str, fault: Fault, there: bool
) -> None:
    """P30, P32: errors, also after 200, also after success: the object is there once, whole, and no parts are left."""
    rule = place.chaos.on(fault, operation=operation, times=1)
    put(place.store())
    assert rule.hits == 1
    assert place.past.get(NAME) == LARGE
    assert len(place.past.uploads()) <= (operation == "CreateMultipartUpload")
    if there:
        assert place.asked().count("CreateMultipartUpload") == 1, "what lies there was sent again"


@pytest.mark.usefixtures("small_parts")
def test_an_upload_that_is_given_up_leaves_no_parts(place: Place) -> None:
    """P37, P67: parts fail for ever: an error after the deadline, and the parts are freed.

    Where the freeing fails as well, `drop_unfinished` frees what dead owners left, and nothing else.
    """
    down = place.chaos.on(Fault(answer=answers.SLOW_DOWN), operation="UploadPart", query={"partNumber": "^7$"})
    with pytest.raises(StoreError, match="503 SlowDown"):
        put(place.store(deadline_s=0.1))
    assert place.past.names() == {*place.past.uploads()} == set()
    lost = place.chaos.on(Fault(drop_request=True), operation="AbortMultipartUpload")
    store, other = place.store(deadline_s=0.1), NAME.replace("e000001", "e000002")
    for name in (NAME, other):
        with pytest.raises(StoreError):
            put(store, name=name)
    place.chaos.off(down, lost)
    assert {*place.past.uploads()} == {NAME, other}
    flaky = place.chaos.on(Fault(answer=answers.SLOW_DOWN), operation="ListMultipartUploads", times=2)
    place.store().drop_unfinished(lambda name: "e000001" in name)
    assert flaky.hits == 2
    assert {*place.past.uploads()} == {other}
