"""The chaos proxy strikes the requests that a rule means, says when it missed, and keeps no body that passes."""

from __future__ import annotations

import asyncio
from asyncio import IncompleteReadError, StreamReader
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError
from hypothesis import given
from hypothesis import strategies as st

from tests.servers.s3 import S3Server
from tests.support import answers
from tests.support.chaos import Chaos, MissedError
from tests.support.rules import Fault
from tests.support.wire import Body, Head

SLOW = Fault(answer=answers.SLOW_DOWN)


@pytest.fixture
def client(ministack: S3Server, chaos: Chaos) -> Any:
    return ministack.through(chaos.endpoint).client()


def struck(client: Any, bucket: str, keys: str, **more: Any) -> str:
    """Put an object under each letter; return the letters whose request was struck."""
    hit = ""
    for key in keys:
        try:
            client.put_object(Bucket=bucket, Key=key, Body=b"1", **more)
        except ClientError as error:
            hit += key if error.response["Error"]["Code"] == "SlowDown" else "?"
    return hit


def test_a_rule_counts(client: Any, chaos: Chaos, bucket: str) -> None:
    """It leaves the first ones that match alone, strikes so many, and then no more."""
    rule = chaos.on(SLOW, operation="PutObject", skip=2, times=3)
    assert struck(client, bucket, "abcdefgh") == "cde"
    assert rule.hits == 3


def test_a_rule_means_what_it_says(client: Any, chaos: Chaos, bucket: str) -> None:
    """Method, bucket, key, query and fields choose the request; all of them have to match."""
    chaos.on(SLOW, method="PUT", bucket=bucket, key="^[bcd]$", headers={"if-none-match": "[*]"})
    chaos.on(SLOW, bucket="elsewhere")
    chaos.on(SLOW, query={"prefix": "^x"})
    assert struck(client, bucket, "abcde") == ""
    assert struck(client, bucket, "c", IfNoneMatch="*") == "c"
    assert client.get_object(Bucket=bucket, Key="c")["Body"].read() == b"1"
    assert client.list_objects_v2(Bucket=bucket, Prefix="y")["KeyCount"] == 0
    with pytest.raises(ClientError):
        client.list_objects_v2(Bucket=bucket, Prefix="x/")
    chaos.off()
    assert client.list_objects_v2(Bucket=bucket, Prefix="x/")["KeyCount"] == 0


def test_the_first_rule_that_matches_strikes(client: Any, chaos: Chaos, bucket: str) -> None:
    """Rules are asked in the order in which they came; one that is used up lets the next one have its turn."""
    first = chaos.on(Fault(answer=answers.INTERNAL_ERROR), times=1)
    second = chaos.on(SLOW, times=1)
    for status in (500, 503):
        with pytest.raises(ClientError) as caught:
            client.put_object(Bucket=bucket, Key="a", Body=b"1")
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == status
    assert (first.hits, second.hits) == (1, 1)
    assert struck(client, bucket, "abc") == ""


def test_chance_can_be_had_again(client: Any, chaos: Chaos, bucket: str) -> None:
    """The same seed strikes the same requests, another one others."""
    keys = "abcdefghijklmnopqrstuvwxyz"
    hits = []
    for seed in (1, 1, 2):
        rule = chaos.on(SLOW, operation="PutObject", probability=0.5, seed=seed)
        hits.append(struck(client, bucket, keys))
        chaos.off(rule)
    assert hits[0] == hits[1] != hits[2]
    assert 0 < len(hits[0]) < len(keys)


def test_faults_add_up(client: Any, chaos: Chaos, bucket: str) -> None:
    """A request may be sent twice, and its answer lost."""
    chaos.on(Fault(duplicate=0.0, drop_answer=True), times=1)
    with pytest.raises(BotoCoreError):
        client.put_object(Bucket=bucket, Key="a", Body=b"1")
    chaos.settle()
    assert [(put.status, put.server_status) for put in chaos.log] == [(None, 200), (None, 200)]


@pytest.mark.parametrize("fault", [Fault(), Fault(server_acts=True)])
def test_a_fault_does_something(fault: Fault) -> None:
    """A fault that changes nothing is refused when its rule is made."""
    with pytest.raises(AssertionError):
        Chaos("http://127.0.0.1:1").on(fault)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(flip_answer_at=3),
        Fault(reset_answer_at=3),
        Fault(truncate_answer_at=3),
        Fault(reset_request_at=0),
    ],
    ids=lambda fault: fault.names()[0],
)
def test_a_fault_that_misses_is_an_error(ministack: S3Server, bucket: str, fault: Fault) -> None:
    """A byte that the body does not have fails the test that asked for it, instead of proving nothing."""
    ministack.client().put_object(Bucket=bucket, Key="a", Body=b"123")
    proxy = Chaos(ministack.endpoint)

    def fetch() -> None:
        with proxy, suppress(BotoCoreError):
            proxy.on(fault, operation="GetObject")
            ministack.through(proxy.endpoint).client().get_object(Bucket=bucket, Key="a")["Body"].read()
            proxy.settle()

    with pytest.raises(MissedError):
        fetch()


def test_a_mistake_of_the_proxy_is_told_with_the_error_that_it_caused(ministack: S3Server, bucket: str) -> None:
    """Where the client's error leaves the block, what went wrong in the proxy is noted on it."""

    def put() -> None:
        with Chaos(ministack.endpoint) as proxy:
            proxy.on(Fault(reset_request_at=9))
            ministack.through(proxy.endpoint).client().put_object(Bucket=bucket, Key="a", Body=b"123")

    with pytest.raises(BotoCoreError) as caught:
        put()
    assert "MissedError" in caught.value.__notes__[0]


# ── bodies on the wire ───────────────────────────────────────────────────────────────────────────────────────────


def parsed(head: Head, sent: bytes, most: int, **how: bool) -> tuple[list[bytes], bytes]:
    """Read a body from its bytes on the wire; return its pieces, and the bytes with which it is sent on."""

    async def read() -> tuple[list[bytes], bytes]:
        reader = StreamReader()
        reader.feed_data(sent)
        reader.feed_eof()
        body = Body(reader, head, **how)
        pieces = [piece async for piece in body.pieces(most)]
        return pieces, b"".join(map(body.framed, pieces)) + body.end()

    return asyncio.run(read())


@given(st.binary(max_size=300), st.lists(st.integers(0, 300)), st.integers(1, 64), st.sampled_from([b"", b"a: b\r\n"]))
def test_chunks_are_passed_on_as_chunks(data: bytes, cuts: list[int], most: int, trailer: bytes) -> None:
    """However a body is cut into chunks, its content and its trailer come out, and again from what is sent on."""
    head = Head("PUT / HTTP/1.1", (("Transfer-Encoding", "chunked"),))
    ends = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    chunks = b"".join(b"%X;note=1\r\n%b\r\n" % (end - start, data[start:end]) for start, end in pairwise(ends))
    end = b"0\r\n" + trailer + b"\r\n"
    pieces, onward = parsed(head, chunks + end, most)
    assert b"".join(pieces) == data
    assert all(len(piece) <= most for piece in pieces)
    assert onward.endswith(end)
    assert b"".join(parsed(head, onward, most)[0]) == data


def test_a_body_knows_its_end() -> None:
    """Without a length a request has no body, and an answer goes on to the end of the connection."""
    bare, sized = Head("", ()), Head("", (("content-length", "3"),))
    assert parsed(bare, b"123", 9) == ([], b"")
    assert parsed(bare, b"123", 9, to_the_end=True) == ([b"123"], b"123")
    assert parsed(sized, b"123next", 9, to_the_end=True) == ([b"123"], b"123")
    assert parsed(sized, b"", 9, empty=True) == ([], b"")
    with pytest.raises(IncompleteReadError):
        parsed(sized, b"12", 9)
