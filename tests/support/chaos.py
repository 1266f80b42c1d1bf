"""An HTTP/1.1 proxy before an S3 server that loses, holds, cuts, alters and invents what passes through it.

It runs in a thread of the test. Bodies are passed on piece by piece; only a request that is held is kept,
beyond 8 MiB in a file. The Host field goes on as it came, so signatures stay valid. Every request to the server has a
connection of its own: no fault can be blamed on one that went stale.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http import HTTPStatus
from types import TracebackType
from typing import IO, Any, Self
from urllib.parse import urlsplit

from tests.support.answers import Answer
from tests.support.rules import Exchange, Fault, Gate, Match, Rule
from tests.support.wire import PIECE_BYTES, Body, Head, delivered, read_head, reset, send

_Request = tuple[Head, Body]
_Connection = tuple[StreamReader, StreamWriter]
_MEMORY_BYTES = 8 << 20
_HOP = ("connection", "keep-alive", "expect")


class MissedError(AssertionError):
    """A fault names a byte that the body does not have: the test proves nothing."""


class _TornError(Exception):
    """The connection to the client is to be torn down."""


class _EndedError(Exception):
    """The connection to the client is to be ended in good order, whatever is still owed."""


class Chaos:
    """Stand between clients and the server at `upstream`; a context manager that starts and stops the proxy.

    On leaving, it raises what went wrong in the proxy itself, MissedError among others.
    """

    def __init__(self, upstream: str):
        parts = urlsplit(upstream)
        assert parts.hostname is not None
        self.upstream = parts.hostname, parts.port or 80
        self.endpoint = ""
        self.log: list[Exchange] = []  # in the order in which the requests came
        self._rules: tuple[Rule, ...] = ()
        self._remembered: dict[str, tuple[Head, bytes]] = {}
        self._busy = 0  # requests that are under way
        # Nobody else holds a client that has hung up while the server is asked.
        self._tasks: set[asyncio.Task[None] | None] = set()
        self._errors: list[Exception] = []
        self._started = threading.Event()

    # ── for tests ────────────────────────────────────────────────────────────────────────────────────────────

    def on(self, fault: Fault, **rule: Any) -> Rule:
        """Add a rule (`Rule` and `Match` say by what to choose); of several that match, the first one added strikes."""
        self._rules = (*self._rules, Rule(fault, **rule))
        return self._rules[-1]

    def off(self, *rules: Rule) -> None:
        """Remove these rules, or all."""
        self._rules = tuple(rule for rule in self._rules if rules and rule not in rules)

    def requests(self, **match: Any) -> list[Exchange]:
        """Return the requests so far that match."""
        return [*filter(Match(**match), self.log)]

    def settle(self, timeout_s: float = 60) -> None:
        """Wait until the server has answered every request that came in; gates must be open.

        It is then known what the server did, also with a request whose sender gave up.
        """

        async def nothing_under_way() -> None:
            while self._busy:  # noqa: ASYNC110 (counted by tasks that begin and end all the time)
                await asyncio.sleep(0.002)

        asyncio.run_coroutine_threadsafe(asyncio.wait_for(nothing_under_way(), timeout_s), self._loop).result()

    # ── start and stop ───────────────────────────────────────────────────────────────────────────────────────

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._errors:
            raise self._errors[0]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        if self._errors and error is None:
            raise self._errors[0]
        if self._errors and error is not None:
            error.add_note(f"in the proxy: {self._errors[0]!r}")

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # noqa: BLE001 (raised by the thread that waits for the start, or on leaving)
            self._errors.append(error)
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._client, "127.0.0.1", 0, limit=PIECE_BYTES, backlog=256)
        self.endpoint = "http://{}:{}".format(*server.sockets[0].getsockname())
        self._started.set()
        await self._stop.wait()
        for listening in server.sockets:
            self._loop.remove_reader(listening.fileno())
        # Closed at once, asyncio would leave open the connection of whom it has accepted and not yet served.
        for _ in range(10):
            await asyncio.sleep(0)
        server.close()

    # ── one client, one request ──────────────────────────────────────────────────────────────────────────────

    async def _client(self, reader: StreamReader, writer: StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(0)  # so that `drain` waits for the kernel
        self._tasks.add(task := asyncio.current_task())
        try:
            while (head := await read_head(reader)) is not None:
                with self._counted():
                    if not await self._exchange(head, reader, writer):
                        break
        except _EndedError:
            pass  # closed below: what was sent so far arrives
        except (_TornError, ConnectionError, IncompleteReadError, asyncio.CancelledError):
            # Cancelled when the proxy stops, and ends as usual: Python 3.11 logs a cancelled client as an error.
            reset(writer)
        except Exception as error:  # noqa: BLE001 (raised on leaving: the proxy's mistake, or the test's)
            self._errors.append(error)
            reset(writer)
        finally:
            writer.close()
            self._tasks.discard(task)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1

    async def _exchange(self, head: Head, reader: StreamReader, writer: StreamWriter) -> bool:
        """Carry out one request; return whether the connection can be used for another."""
        exchange = Exchange.of(head)
        exchange.fault = next((rule.fault for rule in self._rules if rule.strikes(exchange)), None)
        fault = exchange.fault or Fault()
        self.log.append(exchange)
        if head.get("expect"):
            await send(writer, b"HTTP/1.1 100 Continue\r\n\r\n")
        body = Body(reader, head)
        if fault.drop_request or (fault.answer is not None and not fault.server_acts):
            async for piece in _paced(body, fault):
                exchange.sent_bytes += len(piece)
            await _hold(fault.hold_request)
            if fault.answer is None:
                raise _TornError
            await _say(writer, exchange, fault.answer)
            reusable = True
        else:
            reusable = await self._through(exchange, fault, (head, body), writer)
        return reusable and head.get("connection").lower() != "close"

    async def _through(self, exchange: Exchange, fault: Fault, request: _Request, writer: StreamWriter) -> bool:
        """Send a request to the server and its answer to the client, with what the fault does to them."""
        if fault.replay and exchange.target in self._remembered:
            await _retell(writer, exchange, *self._remembered[exchange.target])
            return True
        with ExitStack() as connected:
            kept = connected.enter_context(tempfile.SpooledTemporaryFile(_MEMORY_BYTES))
            up = await self._connect(connected)
            answer = await _ask(exchange, fault, request, up, kept)
            if fault.replay:
                content = b"".join([piece async for piece in _content(exchange, answer, up[0]).pieces()])
                await _retell(writer, exchange, *self._remembered.setdefault(exchange.target, (answer, content)))
                return True
            await _hold(fault.hold_answer)
            if fault.drop_answer:
                raise _TornError
            if fault.answer is not None:
                await _say(writer, exchange, fault.answer)
                return True
            return await _pass_on(exchange, fault, answer, up[0], writer)

    async def _connect(self, connected: ExitStack) -> _Connection:
        reader, writer = await asyncio.open_connection(*self.upstream, limit=PIECE_BYTES)
        writer.transport.set_write_buffer_limits(0)
        connected.callback(reset, writer)
        return reader, writer


async def _hold(until: Gate | float | None) -> None:
    if isinstance(until, Gate):
        until.reached.set()
        while not until.opened.is_set():  # noqa: ASYNC110 (set by a thread of the test, before or after this loop exists)
            await asyncio.sleep(0.002)
    elif until is not None:
        await asyncio.sleep(until)


async def _paced(body: Body, fault: Fault) -> AsyncIterator[bytes]:
    """Yield a body's pieces, not faster than the fault allows."""
    rate = fault.throttle_bytes_per_s
    async for piece in body.pieces(PIECE_BYTES if rate is None else max(1, min(PIECE_BYTES, rate // 20))):
        if rate is not None:
            await asyncio.sleep(len(piece) / rate)
        yield piece


async def _from(kept: IO[bytes]) -> AsyncIterator[bytes]:
    kept.seek(0)
    while piece := kept.read(PIECE_BYTES):
        yield piece


async def _ask(exchange: Exchange, fault: Fault, request: _Request, up: _Connection, kept: IO[bytes]) -> Head:
    """Send a request to the server and return the head of its answer."""
    head, body = request
    pieces = _paced(body, fault)
    if fault.hold_request is not None:
        async for piece in pieces:
            kept.write(piece)
        await _hold(fault.hold_request)
        pieces = _from(kept)
    listening = await _push(up[1], head.replacing(*_HOP, *fault.without, by=(("Connection", "close"),)).to_bytes())
    async for piece in pieces:
        if fault.reset_request_at is not None and exchange.sent_bytes + len(piece) > fault.reset_request_at:
            rest = piece[: fault.reset_request_at - exchange.sent_bytes]
            exchange.sent_bytes += len(rest)
            await _push(up[1], body.framed(rest) if rest else b"")
            raise _TornError
        exchange.sent_bytes += len(piece)
        listening = listening and await _push(up[1], body.framed(piece))
    if fault.reset_request_at is not None:
        raise MissedError(f"{exchange.target}: reset at {fault.reset_request_at} of {exchange.sent_bytes} bytes")
    if listening:
        await _push(up[1], body.end())
    while (answer := await read_head(up[0])) is not None:
        if answer.status >= 200:
            exchange.server_status = answer.status
            return answer
    raise _TornError


async def _push(writer: StreamWriter, data: bytes) -> bool:
    """Send to the server; return whether it still listens: it may have answered already and hung up."""
    try:
        await send(writer, data)
    except ConnectionError:
        return False
    return True


def _content(exchange: Exchange, answer: Head, reader: StreamReader) -> Body:
    empty = exchange.method == "HEAD" or answer.status in (204, 304)
    return Body(reader, answer, to_the_end=True, empty=empty)


async def _pass_on(exchange: Exchange, fault: Fault, answer: Head, reader: StreamReader, writer: StreamWriter) -> bool:
    """Send the server's answer to the client; return whether the connection can be used again afterwards."""
    body = _content(exchange, answer, reader)
    exchange.status = answer.status
    closing = (("Connection", "close"),) if body.to_the_end else ()
    await send(writer, answer.replacing(*_HOP, by=closing).to_bytes())
    if answer.status >= 300:  # the bytes that the test has in mind are those of an object or of a listing
        fault = replace(fault, reset_answer_at=None, truncate_answer_at=None, flip_answer_at=None)
    cuts = [at for at in (fault.reset_answer_at, fault.truncate_answer_at) if at is not None]
    async for piece in _paced(body, fault):
        start = exchange.received_bytes
        exchange.received_bytes += len(piece)
        for at in cuts:
            if at < exchange.received_bytes:
                await send(writer, body.framed(piece[: at - start]) if at > start else b"")
                await delivered(writer)
                raise _EndedError if fault.reset_answer_at is None else _TornError
        await send(writer, body.framed(_flipped(piece, fault.flip_answer_at, start)))
    for at in [*cuts, *([] if fault.flip_answer_at is None else [fault.flip_answer_at])]:
        if at >= exchange.received_bytes:
            raise MissedError(f"{exchange.target}: {fault.names()} at {at} of {exchange.received_bytes} bytes")
    await send(writer, body.end())
    return not body.to_the_end


def _flipped(piece: bytes, at: int | None, start: int) -> bytes:
    if at is None or not start <= at < start + len(piece):
        return piece
    changed = bytearray(piece)
    changed[at - start] ^= 1
    return bytes(changed)


async def _say(writer: StreamWriter, exchange: Exchange, answer: Answer) -> None:
    """Give an answer that is not the server's."""
    exchange.status = answer.status
    fields = (*answer.fields, ("Content-Length", str(len(answer.document))))
    head = Head(f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}", fields)
    await send(writer, head.to_bytes() + (b"" if exchange.method == "HEAD" else answer.document))


async def _retell(writer: StreamWriter, exchange: Exchange, head: Head, content: bytes) -> None:
    """Give an answer of the server that was remembered."""
    exchange.status, exchange.received_bytes = head.status, len(content)
    length = () if exchange.method == "HEAD" else (("Content-Length", str(len(content))),)
    dropped = _HOP if exchange.method == "HEAD" else (*_HOP, "transfer-encoding", "content-length")
    await send(writer, head.replacing(*dropped, by=length).to_bytes() + content)
