"""The chaos proxy changes no byte, strikes the requests that a rule means, and says when it missed.

What most faults do is seen by the tests of S3 that use them: each fails without its fault. Those of an answer that is
lost or late would not.
"""

from __future__ import annotations

import gc
import socket
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from tests.servers.s3 import S3Server
from tests.support import answers
from tests.support.chaos import Chaos, MissedError
from tests.support.rules import Fault

DATA = bytes(n * n % 251 for n in range(300_001))
SLOW = Fault(answer=answers.SLOW_DOWN)


@pytest.fixture
def past(ministack: S3Server) -> Any:
    """A client that does not go through the proxy."""
    return ministack.client()


@pytest.fixture
def client(ministack: S3Server, chaos: Chaos) -> Any:
    """A client that reaches ministack through the proxy, sends each request once, and checks no digests of answers."""
    return ministack.through(chaos.endpoint).client(response_checksum_validation="when_required")


def read(client: Any, bucket: str, key: str = "a") -> bytes:
    content: bytes = client.get_object(Bucket=bucket, Key=key)["Body"].read()
    return content


def test_bytes_and_signatures_pass_unchanged(liar: S3Server) -> None:
    """A server that verifies signatures, which cover the Host field, accepts what comes through, and nothing else."""
    with Chaos(liar.endpoint) as proxy, liar.fresh_bucket() as bucket:
        client = liar.through(proxy.endpoint).client()
        for data in (b"", DATA * 31):
            client.put_object(Bucket=bucket, Key="a b/ü+?", Body=data)
            assert read(client, bucket, "a b/ü+?") == data == read(liar.client(), bucket, "a b/ü+?")
            assert client.head_object(Bucket=bucket, Key="a b/ü+?")["ContentLength"] == len(data)
        assert proxy.log[-1].key == "a b/ü+?"
        stranger = S3Server(name="", endpoint=proxy.endpoint, key=liar.key, secret="guessed", pid=0).client()
        with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
            read(stranger, bucket, "a b/ü+?")


@pytest.mark.parametrize("fault", [Fault(drop_answer=True), Fault(hold_answer=60.0)], ids=["lost", "late"])
def test_an_answer_that_never_comes_leaves_the_object(
    ministack: S3Server, past: Any, chaos: Chaos, bucket: str, fault: Fault
) -> None:
    """The server has stored the object; its client learns nothing but that the connection broke, or took too long."""
    chaos.on(fault, operation="PutObject")
    with pytest.raises(BotoCoreError):
        ministack.through(chaos.endpoint).client(read_timeout=0.5).put_object(Bucket=bucket, Key="a", Body=DATA)
    assert read(past, bucket) == DATA
    assert [(put.status, put.server_status) for put in chaos.requests()] == [(None, 200)]


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


def struck(client: Any, bucket: str, keys: str, **more: Any) -> str:
    """Put an object under each letter; return the letters whose request was struck."""
    hit = ""
    for key in keys:
        try:
            client.put_object(Bucket=bucket, Key=key, Body=b"1", **more)
        except ClientError as error:
            hit += key if error.response["Error"]["Code"] == "SlowDown" else "?"
    return hit


def test_a_rule_means_what_it_says(client: Any, chaos: Chaos, bucket: str) -> None:
    """Method, bucket, key, query, fields, count and chance choose the request; the first rule that matches strikes."""
    chaos.on(SLOW, method="PUT", bucket=bucket, key="^[bcd]$", headers={"if-none-match": "[*]"})
    chaos.on(SLOW, bucket="elsewhere")
    chaos.on(SLOW, query={"prefix": "^x"})
    assert struck(client, bucket, "abcde") == ""
    assert struck(client, bucket, "c", IfNoneMatch="*") == "c"
    assert read(client, bucket, "c") == b"1"
    assert client.list_objects_v2(Bucket=bucket, Prefix="y")["KeyCount"] == 0
    with pytest.raises(ClientError):
        client.list_objects_v2(Bucket=bucket, Prefix="x/")
    chaos.off()
    first = chaos.on(Fault(answer=answers.INTERNAL_ERROR), operation="PutObject", skip=2, times=1)
    second = chaos.on(SLOW, times=1)
    assert (struck(client, bucket, "abcdefgh"), first.hits, second.hits) == ("a?", 1, 1)
    chaos.off()
    hits = []
    for seed in (1, 1, 2):
        rule = chaos.on(SLOW, operation="PutObject", probability=0.5, seed=seed)
        hits.append(struck(client, bucket, "abcdefghijklmnop"))
        chaos.off(rule)
    assert hits[0] == hits[1] != hits[2]
    for nothing in (Fault(), Fault(server_acts=True)):
        with pytest.raises(AssertionError):
            chaos.on(nothing)


MISSES = [Fault(flip_answer_at=3), Fault(reset_answer_at=3), Fault(truncate_answer_at=3), Fault(reset_request_at=0)]


@pytest.mark.parametrize("fault", MISSES, ids=lambda fault: fault.names()[0])
def test_a_fault_that_misses_is_an_error(ministack: S3Server, past: Any, bucket: str, fault: Fault) -> None:
    """A byte that the body does not have fails the test that asked for it; an error that it caused has it as a note."""
    past.put_object(Bucket=bucket, Key="a", Body=b"123")
    for caught in (True, False):
        proxy = Chaos(ministack.endpoint)

        def fetch(proxy: Chaos = proxy) -> None:
            proxy.on(fault, operation="GetObject")
            read(ministack.through(proxy.endpoint).client(), bucket)

        with pytest.raises((MissedError, BotoCoreError)) as told, proxy, suppress(*[BotoCoreError] * caught):
            fetch()
        assert isinstance(told.value, MissedError) or "MissedError" in told.value.__notes__[0]
