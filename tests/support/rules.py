"""What the chaos proxy does to which request: faults, and rules that choose by operation, key, count and chance."""

from __future__ import annotations

import random
import re
import threading
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import parse_qs, unquote

from tests.support.answers import Answer
from tests.support.wire import Head

_BY_QUERY = {
    ("PUT", "partNumber"): "UploadPart",
    ("POST", "uploads"): "CreateMultipartUpload",
    ("POST", "uploadId"): "CompleteMultipartUpload",
    ("DELETE", "uploadId"): "AbortMultipartUpload",
    ("POST", "delete"): "DeleteObjects",
    ("GET", "uploads"): "ListMultipartUploads",
    ("GET", "uploadId"): "ListParts",
}
_BY_LEVEL = {
    ("GET", "bucket"): "ListObjects",
    ("HEAD", "bucket"): "HeadBucket",
    ("PUT", "bucket"): "CreateBucket",
    ("DELETE", "bucket"): "DeleteBucket",
    ("GET", "object"): "GetObject",
    ("HEAD", "object"): "HeadObject",
    ("PUT", "object"): "PutObject",
    ("DELETE", "object"): "DeleteObject",
}


class Gate:
    """Hold a request until the test lets it go: `reached` says that it is there."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def open(self) -> None:
        self.opened.set()


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one request and its answer; several at once are possible.

    A request that is held has been taken in whole: it goes on to the server even if its sender gave up meanwhile.
    """

    drop_request: bool = False  # the server never sees it, the client gets a reset connection
    hold_request: Gate | float | None = None  # it reaches the server when the gate opens, or so many seconds later
    reset_request_at: int | None = None  # both connections are torn down after so many bytes of the request's body
    without: tuple[str, ...] = ()  # fields of its head, in lower case; only for servers that check no signature
    throttle_bytes_per_s: int | None = None  # both bodies
    answer: Answer | None = None  # said instead of the server's answer …
    server_acts: bool = False  # … which has done what it was asked for
    replay: bool = False  # the first answer is remembered, and given to every later request for the same target
    hold_answer: Gate | float | None = None  # the server has acted, its answer is late
    drop_answer: bool = False  # the server has acted, the client gets a reset connection
    reset_answer_at: int | None = None  # the client's connection is torn down after so many bytes of the answer's body
    truncate_answer_at: int | None = None  # it ends in good order there, short of its announced length
    flip_answer_at: int | None = None  # the lowest bit of this byte of the answer's body is turned

    def names(self) -> list[str]:
        return [option.name for option in fields(self) if getattr(self, option.name) != option.default]


@dataclass(kw_only=True)
class Exchange:
    """One request and how it was answered, as far as that has come."""

    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str] = field(repr=False)  # names in lower case
    target: str  # path and query as they were sent
    fault: Fault | None = None
    status: int | None = None  # what the client was told; None: nothing (yet)
    server_status: int | None = None  # what the server said; None: it was not asked, or did not answer (yet)
    sent_bytes: int = 0  # of the request's body
    received_bytes: int = 0  # of the answer's body

    @classmethod
    def of(cls, head: Head) -> Exchange:
        method, target, _ = head.first.split(" ", 2)
        path, _, query = target.partition("?")
        bucket, _, key = path.removeprefix("/").partition("/")
        return cls(
            method=method,
            bucket=unquote(bucket),
            key=unquote(key),
            query={name: values[0] for name, values in parse_qs(query, keep_blank_values=True).items()},
            headers={name.lower(): value for name, value in head.fields},
            target=target,
        )

    @property
    def operation(self) -> str:
        """S3's name of what is asked for; ListObjects stands for both versions."""
        for (method, name), operation in _BY_QUERY.items():
            if method == self.method and name in self.query:
                return operation
        if "x-amz-copy-source" in self.headers:
            return "CopyObject"
        level = "object" if self.key else "bucket" if self.bucket else "service"
        return _BY_LEVEL.get((self.method, level), f"{self.method} {level}")


@dataclass(frozen=True, kw_only=True)
class Match:
    """Which requests are meant; what is left empty matches everything. Patterns are searched for, not anchored."""

    operation: str = ""
    method: str = ""
    bucket: str = ""
    key: str = ""  # pattern
    query: dict[str, str] = field(default_factory=dict)  # name → pattern
    headers: dict[str, str] = field(default_factory=dict)  # name in lower case → pattern

    def __call__(self, exchange: Exchange) -> bool:
        return (
            self.operation in ("", exchange.operation)
            and self.method in ("", exchange.method)
            and self.bucket in ("", exchange.bucket)
            and re.search(self.key, exchange.key) is not None
            and _found(self.query, exchange.query)
            and _found(self.headers, exchange.headers)
        )


def _found(patterns: dict[str, str], values: dict[str, str]) -> bool:
    return all(name in values and re.search(pattern, values[name]) for name, pattern in patterns.items())


class Rule:
    """Strike the requests that match: not the first `skip`, then at most `times`, each with this probability."""

    def __init__(
        self,
        fault: Fault,
        *,
        skip: int = 0,
        times: int | None = None,
        probability: float = 1.0,
        seed: int = 0,
        **match: Any,
    ):
        assert fault.names(), "a fault that does nothing"
        assert fault.answer is not None or not fault.server_acts
        self.fault = fault
        self.match = Match(**match)
        self.hits = 0
        self._skip, self._times, self._probability = skip, times, probability
        self._dice = random.Random(seed)

    def strikes(self, exchange: Exchange) -> bool:
        """Decide, and count: called once for each request, by the proxy's thread alone."""
        if not self.match(exchange) or self.hits == self._times:
            return False
        if self._skip:
            self._skip -= 1
            return False
        if self._dice.random() >= self._probability:
            return False
        self.hits += 1
        return True
