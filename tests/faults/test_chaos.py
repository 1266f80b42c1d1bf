"""The chaos proxy does what its faults say, each one seen from both sides: by the client, and in the server's store."""

from __future__ import annotations

import gc
import http.client
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import BotoCoreError, ClientError, ReadTimeoutError

from tests.servers.s3 import S3Server
from tests.support import answers
from tests.support.chaos import Chaos
from tests.support.rules import Fault, Gate

DATA = bytes(n * n % 251 for n in range(300_001))


class Medium:
    """The server's store, seen past the proxy."""

    def __init__(self, server: S3Server, bucket: str):
        self.client, self.bucket = server.client(), bucket

    def names(self) -> list[str]:
        return [held["Key"] for held in self.client.list_objects_v2(Bucket=self.bucket).get("Contents", [])]

    def read(self, key: str) -> bytes:
        content: bytes = self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read()
        return content

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=key, Body=data)


@pytest.fixture
def medium(ministack: S3Server, bucket: str) -> Medium:
    return Medium(ministack, bucket)


@pytest.fixture
def client(ministack: S3Server, chaos: Chaos) -> Any:
    """A client that reaches ministack through the proxy, sends each request once, and checks no digests of answers."""
    return ministack.through(chaos.endpoint).client(response_checksum_validation="when_required")


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def answered(call: Callable[..., Any], **arguments: Any) -> tuple[int, str]:
    """Return the status and the error code of a call that fails with an answer."""
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    response = caught.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]


@contextmanager
def raw_get(client: Any, bucket: str, key: str) -> Iterator[http.client.HTTPResponse]:
    """Send a GET over a bare connection, which hands out what came before an error too."""
    parts = urlsplit(client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": key}))
    with closing(http.client.HTTPConnection(parts.netloc, timeout=20)) as connection:
        connection.request("GET", f"{parts.path}?{parts.query}")
        with connection.getresponse() as answer:
            yield answer


# ── nothing is changed by standing between ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size_bytes", [0, 1, 300_001, 9_000_001])
def test_bytes_pass_unchanged(client: Any, medium: Medium, size_bytes: int) -> None:
    """Without a rule, a body of any size is the same on the other side, both ways."""
    data = (DATA * 31)[:size_bytes]
    client.put_object(Bucket=medium.bucket, Key="a", Body=data)
    assert medium.read("a") == data
    assert client.get_object(Bucket=medium.bucket, Key="a")["Body"].read() == data
    assert client.head_object(Bucket=medium.bucket, Key="a")["ContentLength"] == size_bytes


def test_signatures_stay_valid(liar: S3Server) -> None:
    """A server that verifies signatures, which cover the Host field, accepts what comes through, and nothing else."""
    with Chaos(liar.endpoint) as proxy, liar.fresh_bucket() as bucket:
        client = liar.through(proxy.endpoint).client()
        client.put_object(Bucket=bucket, Key="a b/ü+?", Body=DATA)
        assert client.get_object(Bucket=bucket, Key="a b/ü+?")["Body"].read() == DATA
        assert proxy.log[-1].key == "a b/ü+?"
        assert f"http://{proxy.log[-1].headers['host']}" == proxy.endpoint
        stranger = S3Server(name="", endpoint=proxy.endpoint, key=liar.key, secret="guessed", pid=0).client()
        assert answered(stranger.get_object, Bucket=bucket, Key="a b/ü+?") == (403, "SignatureDoesNotMatch")


def test_requests_are_logged_by_their_name(client: Any, chaos: Chaos, bucket: str) -> None:
    """Every request is in the log once, in order, under S3's name for it, with what was answered."""
    at = {"Bucket": bucket, "Key": "many"}
    client.put_object(Bucket=bucket, Key="one", Body=b"1")
    upload = {**at, "UploadId": client.create_multipart_upload(**at)["UploadId"]}
    part = client.upload_part(**upload, PartNumber=1, Body=b"2")
    client.list_multipart_uploads(Bucket=bucket)
    client.list_parts(**upload)
    client.complete_multipart_upload(**upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]})
    client.copy_object(Bucket=bucket, Key="copy", CopySource=f"{bucket}/one")
    client.head_object(**at)
    client.get_object(**at)
    client.list_objects_v2(Bucket=bucket, Prefix="o/ü")
    client.delete_object(**at)
    client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "one"}]})
    client.abort_multipart_upload(**at, UploadId=client.create_multipart_upload(**at)["UploadId"])
    assert answered(client.get_object, **at) == (404, "NoSuchKey")
    assert [exchange.operation for exchange in chaos.log] == [
        "PutObject",
        "CreateMultipartUpload",
        "UploadPart",
        "ListMultipartUploads",
        "ListParts",
        "CompleteMultipartUpload",
        "CopyObject",
        "HeadObject",
        "GetObject",
        "ListObjects",
        "DeleteObject",
        "DeleteObjects",
        "CreateMultipartUpload",
        "AbortMultipartUpload",
        "GetObject",
    ]
    assert {exchange.bucket for exchange in chaos.log} == {bucket}
    assert [exchange.status for exchange in chaos.log][-1] == 404
    assert chaos.log[0].sent_bytes == chaos.log[8].received_bytes == 1
    (listing,) = chaos.requests(operation="ListObjects", query={"prefix": "^o/ü$"})
    assert (listing.key, listing.status, listing.server_status) == ("", 200, 200)
    assert len(chaos.requests(key="^many$", method="POST")) == 3


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_dropped_request_never_arrives(client: Any, chaos: Chaos, medium: Medium) -> None:
    """The client's connection breaks, and the server has seen nothing."""
    chaos.on(Fault(drop_request=True), operation="PutObject")
    with pytest.raises(BotoCoreError):
        client.put_object(Bucket=medium.bucket, Key="a", Body=DATA)
    assert medium.names() == []
    (put,) = chaos.requests(operation="PutObject")
    assert (put.status, put.server_status, put.sent_bytes) == (None, None, len(DATA))


def test_a_held_request_arrives_after_its_sender_gave_up(ministack: S3Server, chaos: Chaos, medium: Medium) -> None:
    """What a gate holds reaches the server when the gate opens, whoever still waits for the answer."""
    gate = Gate()
    chaos.on(Fault(hold_request=gate), operation="PutObject")
    hasty = ministack.through(chaos.endpoint).client(read_timeout=0.5)
    with pytest.raises(ReadTimeoutError):
        hasty.put_object(Bucket=medium.bucket, Key="late", Body=DATA * 40)  # more than is kept in memory
    assert gate.reached.is_set()
    assert medium.names() == []
    gate.open()
    chaos.settle()
    assert medium.read("late") == DATA * 40


def test_a_held_request_is_answered_when_it_was_let_through(
    client: Any, chaos: Chaos, medium: Medium, background: ThreadPoolExecutor
) -> None:
    """A sender that waits gets the answer of the server as it is then: here, that somebody was faster."""
    gate = Gate()
    chaos.on(Fault(hold_request=gate), operation="PutObject")
    put = background.submit(answered, client.put_object, Bucket=medium.bucket, Key="a", Body=b"2", IfNoneMatch="*")
    assert gate.reached.wait(60)
    medium.put("a", b"1")
    gate.open()
    assert put.result(60) == (412, "PreconditionFailed")
    assert medium.read("a") == b"1"


@pytest.mark.parametrize("at", [0, 1, 100_000, 300_000])
def test_a_request_is_reset_in_its_body(client: Any, chaos: Chaos, medium: Medium, at: int) -> None:
    """Exactly so many bytes of the body go on before both connections are torn down; the server stores nothing."""
    chaos.on(Fault(reset_request_at=at), operation="PutObject")
    with pytest.raises(BotoCoreError):
        client.put_object(Bucket=medium.bucket, Key="a", Body=DATA)
    assert [put.sent_bytes for put in chaos.requests()] == [at]
    assert medium.names() == []


def test_a_duplicate_undoes_what_came_after(client: Any, chaos: Chaos, medium: Medium) -> None:
    """A PUT is sent again when its gate opens: an unconditional one writes its bytes over newer ones."""
    gate = Gate()
    chaos.on(Fault(duplicate=gate), operation="PutObject", times=1)
    client.put_object(Bucket=medium.bucket, Key="a", Body=DATA * 40)
    client.put_object(Bucket=medium.bucket, Key="a", Body=b"newer")
    assert medium.read("a") == b"newer"
    gate.open()
    chaos.settle()
    assert medium.read("a") == DATA * 40
    assert [put.duplicate for put in chaos.log] == [False, False, True]
    assert len(chaos.requests()) == 2


def test_a_conditional_duplicate_is_refused(client: Any, chaos: Chaos, medium: Medium) -> None:
    """A duplicate by time carries the fields of the first one: If-None-Match makes it harmless."""
    chaos.on(Fault(duplicate=0.01), operation="PutObject")
    client.put_object(Bucket=medium.bucket, Key="a", Body=b"1", IfNoneMatch="*")
    chaos.settle()
    assert [(put.duplicate, put.server_status, put.status) for put in chaos.log] == [
        (False, 200, 200),
        (True, 412, None),
    ]


def test_a_slow_body_comes_in_small_pieces(client: Any, chaos: Chaos, medium: Medium) -> None:
    """A throttled body is handed on bit by bit, and whole in the end, both ways."""
    chaos.on(Fault(throttle_bytes_per_s=100_000))
    client.put_object(Bucket=medium.bucket, Key="a", Body=DATA[:30_000])
    assert medium.read("a") == DATA[:30_000]
    with raw_get(client, medium.bucket, "a") as answer:
        first = answer.read(1)
        assert chaos.log[-1].received_bytes < 30_000  # without the fault it would be one piece
        assert first + answer.read() == DATA[:30_000]


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_dropped_answer_leaves_the_object(client: Any, chaos: Chaos, medium: Medium) -> None:
    """The server has stored the object; its client learns nothing but that the connection broke."""
    chaos.on(Fault(drop_answer=True), operation="PutObject")
    with pytest.raises(BotoCoreError):
        client.put_object(Bucket=medium.bucket, Key="a", Body=DATA)
    assert medium.read("a") == DATA
    assert [(put.status, put.server_status) for put in chaos.requests()] == [(None, 200)]


def test_a_held_answer_comes_when_the_gate_opens(
    client: Any, chaos: Chaos, medium: Medium, background: ThreadPoolExecutor
) -> None:
    """The server has acted while its client still waits."""
    gate = Gate()
    chaos.on(Fault(hold_answer=gate), operation="PutObject")
    put = background.submit(client.put_object, Bucket=medium.bucket, Key="a", Body=DATA)
    assert gate.reached.wait(60)
    assert medium.read("a") == DATA
    assert not put.done()
    gate.open()
    assert put.result(60)["ResponseMetadata"]["HTTPStatusCode"] == 200


def test_an_answer_may_come_too_late(ministack: S3Server, chaos: Chaos, medium: Medium) -> None:
    """An answer that is held longer than its client waits is a time-out there, and a success at the server."""
    chaos.on(Fault(hold_answer=60.0), operation="PutObject")
    hasty = ministack.through(chaos.endpoint).client(read_timeout=0.5)
    with pytest.raises(ReadTimeoutError):
        hasty.put_object(Bucket=medium.bucket, Key="a", Body=DATA)
    assert medium.read("a") == DATA


@pytest.mark.parametrize("torn", [True, False], ids=["torn", "ended"])
@pytest.mark.parametrize("at", [0, 1, 262_144, 300_000])
def test_an_answer_ends_early(client: Any, chaos: Chaos, medium: Medium, at: int, torn: bool) -> None:
    """Exactly so many bytes of the body come before the connection is torn down, or ends in good order."""
    medium.put("a", DATA)
    chaos.on(Fault(reset_answer_at=at) if torn else Fault(truncate_answer_at=at), operation="GetObject")
    with raw_get(client, medium.bucket, "a") as answer:
        assert answer.status == 200
        assert answer.length == len(DATA)
        assert answer.read(at) == DATA[:at]
        with pytest.raises(ConnectionResetError if torn else http.client.IncompleteRead):
            answer.read()


@pytest.mark.parametrize("at", [0, 150_000, 300_000])
def test_a_bit_of_an_answer_is_turned(client: Any, chaos: Chaos, medium: Medium, at: int) -> None:
    """One bit of the body differs, nothing says so, and the object itself is whole."""
    medium.put("a", DATA)
    chaos.on(Fault(flip_answer_at=at), operation="GetObject")
    got = client.get_object(Bucket=medium.bucket, Key="a")["Body"].read()
    assert [(n, was ^ now) for n, (was, now) in enumerate(zip(DATA, got, strict=True)) if was != now] == [(at, 1)]
    assert medium.read("a") == DATA


def test_a_bit_of_a_range_is_turned(client: Any, chaos: Chaos, medium: Medium) -> None:
    """In a ranged read the byte is counted from the start of the range."""
    medium.put("a", DATA)
    chaos.on(Fault(flip_answer_at=5), headers={"range": "=1000-"})
    got = client.get_object(Bucket=medium.bucket, Key="a", Range="bytes=1000-1999")["Body"].read()
    assert got == DATA[1000:1005] + bytes([DATA[1005] ^ 1]) + DATA[1006:2000]


CANNED = {
    answers.SLOW_DOWN: (503, "SlowDown"),
    answers.INTERNAL_ERROR: (500, "InternalError"),
    answers.CONDITIONAL_CONFLICT: (409, "ConditionalRequestConflict"),
    answers.PRECONDITION_FAILED: (412, "PreconditionFailed"),
    answers.PRECONDITION_FAILED_NAMED: (412, "PreconditionFailed"),
    answers.NO_SUCH_KEY: (404, "NoSuchKey"),
    answers.NOT_IMPLEMENTED: (501, "NotImplemented"),
    answers.EXPIRED_TOKEN: (400, "ExpiredToken"),
    answers.EXPIRED_TOKEN_403: (403, "ExpiredToken"),
    answers.ACCESS_DENIED: (403, "AccessDenied"),
    answers.TIME_TOO_SKEWED: (403, "RequestTimeTooSkewed"),
}


@pytest.mark.parametrize("server_acts", [False, True])
@pytest.mark.parametrize("answer", CANNED, ids=lambda answer: "{}-{}".format(*CANNED[answer]))
def test_an_answer_is_invented(
    client: Any, chaos: Chaos, medium: Medium, answer: answers.Answer, server_acts: bool
) -> None:
    """The client is told what the server never said: instead of its acting, or after it."""
    status, code = CANNED[answer]
    chaos.on(Fault(answer=answer, server_acts=server_acts), operation="PutObject", times=1)
    assert answered(client.put_object, Bucket=medium.bucket, Key="a", Body=DATA) == (status, code)
    assert medium.names() == (["a"] if server_acts else [])
    assert [(put.status, put.server_status) for put in chaos.requests()] == [(status, 200 if server_acts else None)]
    client.put_object(Bucket=medium.bucket, Key="b", Body=DATA)  # over the same connection
    assert medium.read("b") == DATA


def test_only_one_of_the_two_refusals_names_its_condition() -> None:
    """S3 says in `<Condition>` which condition failed, other servers do not: both kinds are at hand."""
    assert b"<Condition>If-None-Match</Condition>" in answers.PRECONDITION_FAILED_NAMED.document
    assert b"Condition>" not in answers.PRECONDITION_FAILED.document


def test_an_invented_answer_to_head_has_no_body(client: Any, chaos: Chaos, medium: Medium) -> None:
    """HEAD gets the status alone, and the connection stays in step."""
    chaos.on(Fault(answer=answers.SLOW_DOWN), operation="HeadObject")
    assert answered(client.head_object, Bucket=medium.bucket, Key="a")[0] == 503
    client.put_object(Bucket=medium.bucket, Key="a", Body=b"1")
    assert medium.names() == ["a"]


@pytest.mark.parametrize("server_acts", [False, True])
def test_an_upload_fails_after_its_status_was_sent(
    client: Any, chaos: Chaos, medium: Medium, server_acts: bool
) -> None:
    """CompleteMultipartUpload is answered with 200 and an error document; the object may be there all the same."""
    chaos.on(Fault(answer=answers.FAILED_AFTER_200, server_acts=server_acts), operation="CompleteMultipartUpload")
    at = {"Bucket": medium.bucket, "Key": "a"}
    at["UploadId"] = client.create_multipart_upload(**at)["UploadId"]
    part = client.upload_part(**at, PartNumber=1, Body=DATA)
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    assert answered(client.complete_multipart_upload, **at, MultipartUpload=parts)[1] == "InternalError"
    assert medium.names() == (["a"] if server_acts else [])
    assert chaos.requests(operation="CompleteMultipartUpload")[0].status == 200


def test_an_old_listing_is_given_again(client: Any, chaos: Chaos, medium: Medium) -> None:
    """The first listing of a prefix is repeated, whatever was written since; other prefixes are listed anew."""
    medium.put("x/1", b"1")
    rule = chaos.on(Fault(replay=True), operation="ListObjects")

    def listed(prefix: str) -> list[str]:
        found = client.list_objects_v2(Bucket=medium.bucket, Prefix=prefix)
        return [held["Key"] for held in found.get("Contents", [])]

    assert listed("x/") == ["x/1"]
    medium.put("x/2", b"2")
    assert listed("x/") == ["x/1"]
    assert listed("x") == ["x/1", "x/2"]
    chaos.off(rule)
    assert listed("x/") == ["x/1", "x/2"]


def test_who_hangs_up_is_not_forgotten() -> None:
    """A request whose sender has hung up is carried out to its end, whatever the garbage collector does meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as upstream:
        with Chaos(f"http://127.0.0.1:{upstream.getsockname()[1]}") as chaos:
            with socket.create_connection(("127.0.0.1", urlsplit(chaos.endpoint).port or 0)) as sender:
                sender.sendall(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
                server, _ = upstream.accept()
            with server:
                server.recv(1 << 16)
                time.sleep(0.2)  # until the proxy has seen that nobody waits
                gc.collect()
                server.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                chaos.settle()
        assert [exchange.server_status for exchange in chaos.log] == [200]
