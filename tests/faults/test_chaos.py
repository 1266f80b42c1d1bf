"""The chaos proxy changes no byte, strikes the requests that a rule means, and says when it missed.

What most faults do is seen by the tests of S3 that use them: each fails without its fault. Those of an answer that is
lost or late would not.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from tests.servers.s3 import S3Server
from tests.support import answers
from tests.support.chaos import Chaos, MissedError
from tests.support.rules import Fault
from tests.support.sweeps import quick_first

DATA = bytes(n * n % 251 for n in range(300_001))
SLOW = Fault(answer=answers.SLOW_DOWN)


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
        assert proxy.log[-1].key == "a b/ü+?"
        stranger = S3Server(name="", endpoint=proxy.endpoint, key=liar.key, secret="guessed", pid=0).client()
        with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
            read(stranger, bucket, "a b/ü+?")


@pytest.mark.parametrize("fault", quick_first([Fault(drop_answer=True), Fault(hold_answer=60.0)]), ids=["lost", "late"])
def test_an_answer_that_never_comes_leaves_the_object(
    ministack: S3Server, chaos: Chaos, bucket: str, fault: Fault
) -> None:
    """The server has stored the object; its client learns nothing but that the connection broke, or took too long."""
    chaos.on(fault, operation="PutObject")
    with pytest.raises(BotoCoreError):
        ministack.through(chaos.endpoint).client(read_timeout=0.5).put_object(Bucket=bucket, Key="a", Body=DATA)
    assert read(ministack.client(), bucket) == DATA
    assert [(put.status, put.server_status) for put in chaos.requests()] == [(None, 200)]


def test_a_rule_means_what_it_says(ministack: S3Server, chaos: Chaos, bucket: str) -> None:
    """Method, key, fields, count and chance choose the request; the first rule that matches strikes."""
    client = ministack.through(chaos.endpoint).client()

    def struck(keys: str, **more: Any) -> str:
        hit = ""
        for key in keys:
            try:
                client.put_object(Bucket=bucket, Key=key, Body=b"1", **more)
            except ClientError as error:
                hit += key if error.response["Error"]["Code"] == "SlowDown" else "?"
        return hit

    chaos.on(SLOW, method="PUT", bucket=bucket, key="^[bcd]$", headers={"if-none-match": "[*]"})
    chaos.on(SLOW, bucket="elsewhere")
    assert (struck("abcde"), struck("c", IfNoneMatch="*")) == ("", "c")
    chaos.off()
    first = chaos.on(Fault(answer=answers.INTERNAL_ERROR), operation="PutObject", skip=2, times=1)
    second = chaos.on(SLOW, times=1)
    assert (struck("abcdefgh"), first.hits, second.hits) == ("a?", 1, 1)
    chaos.off()
    hits = []
    for seed in (1, 1, 2):
        rule = chaos.on(SLOW, operation="PutObject", probability=0.5, seed=seed)
        hits.append(struck("abcdefghijklmnop"))
        chaos.off(rule)
    assert hits[0] == hits[1] != hits[2]


@pytest.mark.parametrize(
    "fault", quick_first([Fault(flip_answer_at=3), Fault(truncate_answer_at=3)]), ids=["flip", "cut"]
)
def test_a_fault_that_misses_is_an_error(ministack: S3Server, bucket: str, fault: Fault) -> None:
    """A byte that the body does not have fails the test that asked for it."""
    ministack.client().put_object(Bucket=bucket, Key="a", Body=b"123")

    def fetch() -> None:
        with Chaos(ministack.endpoint) as proxy, suppress(BotoCoreError):
            proxy.on(fault, operation="GetObject")
            read(ministack.through(proxy.endpoint).client(), bucket)

    with pytest.raises(MissedError):
        fetch()
