"""What servers do with preconditions: facts about them, none about us, on which the protocol on object stores rests.

Where the answer of a server changes, the test says that a rule of the protocol has lost its reason, or its ground.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPResponse
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError

from tests.servers.s3 import S3Server

WRITERS = 16
PART = bytes(5 << 20)  # the smallest part that may be followed by another one


class Answered(NamedTuple):
    status: int
    document: bytes


class Request(NamedTuple):
    """A signed request, to be sent by hand."""

    method: str
    address: str
    headers: dict[str, str]
    body: bytes


def race(requests: list[Request]) -> list[Answered]:
    """Send every request but for its last byte, then all the last bytes at once; return the answers in their order.

    Writers that start together spread over milliseconds before they reach the server; these are within microseconds.
    """
    with ExitStack() as stack:
        sockets = []
        for request in requests:
            parts = urlsplit(request.address)
            fields = {"Host": parts.netloc, **request.headers, "Content-Length": str(len(request.body))}
            fields["Connection"] = "close"
            lines = [f"{request.method} {parts.path}?{parts.query} HTTP/1.1"]
            lines += [f"{name}: {value}" for name, value in fields.items()]
            head = "\r\n".join([*lines, "", ""]).encode()
            sock = stack.enter_context(socket.create_connection((parts.hostname, parts.port), timeout=60))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(head + request.body[:-1])
            sockets.append((sock, request.body[-1:]))
        for sock, last in sockets:
            sock.sendall(last)
        return [_answer(sock) for sock, _ in sockets]


def _answer(sock: socket.socket) -> Answered:
    with HTTPResponse(sock) as response:
        response.begin()
        return Answered(response.status, response.read())


def signing_client(server: S3Server) -> Any:
    """Return a client that signs addresses as it signs requests; its default for them is an older way."""
    return server.client(signature_version="s3v4")


def put_request(client: Any, bucket: str, key: str, body: bytes) -> Request:
    """Return a PUT that wants the key to be new."""
    given = {"Bucket": bucket, "Key": key, "IfNoneMatch": "*"}
    return Request("PUT", client.generate_presigned_url("put_object", Params=given), {"If-None-Match": "*"}, body)


def upload_request(client: Any, bucket: str, key: str, body: bytes) -> Request:
    """Upload a large object's parts; return the request that completes it and wants the key to be new."""
    at = {"Bucket": bucket, "Key": key}
    at["UploadId"] = client.create_multipart_upload(**at)["UploadId"]
    tags = [client.upload_part(**at, PartNumber=n, Body=part)["ETag"] for n, part in enumerate((PART, body), 1)]
    parts = "".join(f"<Part><PartNumber>{n}</PartNumber><ETag>{tag}</ETag></Part>" for n, tag in enumerate(tags, 1))
    document = (
        f'<CompleteMultipartUpload xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{parts}</CompleteMultipartUpload>'
    )
    address = client.generate_presigned_url("complete_multipart_upload", Params={**at, "IfNoneMatch": "*"})
    return Request("POST", address, {"If-None-Match": "*"}, document.encode())


def content(client: Any, bucket: str, key: str) -> bytes:
    read: bytes = client.get_object(Bucket=bucket, Key=key)["Body"].read()
    return read


def assert_one_winner_a_round(server: S3Server, bucket: str, rounds: int) -> None:
    client = signing_client(server)
    for n in range(rounds):
        bodies = [b"writer %2d of round %d" % (writer, n) * 100 for writer in range(WRITERS)]
        answers = race([put_request(client, bucket, f"slot/{n}", body) for body in bodies])
        assert Counter(answer.status for answer in answers) == {200: 1, 412: WRITERS - 1}, f"round {n}"
        (winner,) = (body for body, answer in zip(bodies, answers, strict=True) if answer.status == 200)
        assert content(client, bucket, f"slot/{n}") == winner, f"round {n}"


@pytest.fixture
def ceph_bucket(ceph: S3Server) -> Iterator[str]:
    with ceph.fresh_bucket() as name:
        yield name


def test_one_of_sixteen_writers_wins(ministack: S3Server, bucket: str) -> None:
    """ministack: of writers that create one object at once exactly one is told so, and its bytes lie there."""
    assert_one_winner_a_round(ministack, bucket, rounds=30)


@pytest.mark.slow
def test_one_of_sixteen_writers_wins_every_time(ministack: S3Server, bucket: str) -> None:
    """ministack: the same two hundred times."""
    assert_one_winner_a_round(ministack, bucket, rounds=200)


@pytest.mark.slow
def test_one_of_sixteen_writers_wins_on_a_real_server(ceph: S3Server, ceph_bucket: str) -> None:
    """Ceph: of writers that create one object at once exactly one is told so, and its bytes lie there."""
    assert_one_winner_a_round(ceph, ceph_bucket, rounds=100)


@pytest.mark.slow
def test_a_multipart_upload_creates_over_what_is_there(ceph: S3Server, ceph_bucket: str) -> None:
    """Ceph ignores If-None-Match where an upload is completed: all sixteen are told that they created the object.

    This is why what has to be created only once is never larger than a single PUT.
    """
    client = signing_client(ceph)
    client.put_object(Bucket=ceph_bucket, Key="slot", Body=b"the first one")
    requests = [upload_request(client, ceph_bucket, "slot", b"writer %2d" % writer) for writer in range(WRITERS)]
    answers = race(requests)
    assert [answer.status for answer in answers] == [200] * WRITERS
    assert content(client, ceph_bucket, "slot").startswith(PART + b"writer")


def test_a_liar_accepts_every_condition(liar: S3Server) -> None:
    """rclone says yes to whoever creates what is there already: a probe that only sees one yes proves nothing."""
    client = signing_client(liar)
    with liar.fresh_bucket() as bucket:
        for body in (b"first", b"second"):
            assert client.put_object(Bucket=bucket, Key="a", Body=body, IfNoneMatch="*")["ETag"]
        assert content(client, bucket, "a") == b"second"
        answers = race([put_request(client, bucket, "b", b"writer %2d" % writer) for writer in range(WRITERS)])
        assert Counter(answer.status for answer in answers)[200] > 1


def refusal(server: S3Server, bucket: str) -> ClientError:
    client = server.client()
    client.put_object(Bucket=bucket, Key="taken", Body=b"1", IfNoneMatch="*")
    with pytest.raises(ClientError) as caught:
        client.put_object(Bucket=bucket, Key="taken", Body=b"2", IfNoneMatch="*")
    assert content(client, bucket, "taken") == b"1"
    return caught.value


def test_a_refusal_does_not_name_its_condition(ministack: S3Server, bucket: str) -> None:
    """ministack's 412 has no `<Condition>`, by which s3fs knows a lost race: we go by the status alone."""
    assert_unnamed_refusal(refusal(ministack, bucket))


@pytest.mark.slow
def test_a_real_servers_refusal_does_not_name_its_condition(ceph: S3Server, ceph_bucket: str) -> None:
    """Nor has Ceph's."""
    assert_unnamed_refusal(refusal(ceph, ceph_bucket))


def assert_unnamed_refusal(error: ClientError) -> None:
    response: dict[str, Any] = dict(error.response)
    assert response["ResponseMetadata"]["HTTPStatusCode"] == 412
    assert response["Error"]["Code"] == "PreconditionFailed"
    assert "Condition" not in response["Error"]
