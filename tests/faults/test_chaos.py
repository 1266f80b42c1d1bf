"""The chaos proxy changes no byte, breaks off exactly where its faults say, and keeps answers back.

What the other faults do is seen by the tests of S3 that use them: each fails without its fault. Those of an answer that
is lost or late would not.
"""

from __future__ import annotations

import gc
import http.client
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import BotoCoreError, ClientError, ReadTimeoutError

from tests.servers.s3 import S3Server
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


@contextmanager
def raw_get(client: Any, bucket: str, key: str) -> Iterator[http.client.HTTPResponse]:
    """Send a GET over a bare connection, which hands out what came before an error too."""
    parts = urlsplit(client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": key}))
    with closing(http.client.HTTPConnection(parts.netloc, timeout=20)) as connection:
        connection.request("GET", f"{parts.path}?{parts.query}")
        with connection.getresponse() as answer:
            yield answer


# ── nothing is changed by standing between ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size_bytes", [0, 9_000_001])
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
        with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
            stranger.get_object(Bucket=bucket, Key="a b/ü+?")


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("at", [0, 100_000])
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


@pytest.mark.parametrize("torn", [True, False], ids=["torn", "ended"])
@pytest.mark.parametrize("at", [0, 262_144])
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


def test_a_dropped_answer_leaves_the_object(client: Any, chaos: Chaos, medium: Medium) -> None:
    """The server has stored the object; its client learns nothing but that the connection broke."""
    chaos.on(Fault(drop_answer=True), operation="PutObject")
    with pytest.raises(BotoCoreError):
        client.put_object(Bucket=medium.bucket, Key="a", Body=DATA)
    assert medium.read("a") == DATA
    assert [(put.status, put.server_status) for put in chaos.requests()] == [(None, 200)]


def test_an_answer_may_come_too_late(ministack: S3Server, chaos: Chaos, medium: Medium) -> None:
    """An answer that is held longer than its client waits is a time-out there, and a success at the server."""
    chaos.on(Fault(hold_answer=60.0), operation="PutObject")
    hasty = ministack.through(chaos.endpoint).client(read_timeout=0.5)
    with pytest.raises(ReadTimeoutError):
        hasty.put_object(Bucket=medium.bucket, Key="a", Body=DATA)
    assert medium.read("a") == DATA


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
