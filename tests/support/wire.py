"""HTTP/1.1 as it goes over the wire: heads that are kept as they came, bodies that are never held in memory."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from collections.abc import AsyncIterator
from dataclasses import dataclass

PIECE_BYTES = 1 << 18


@dataclass(frozen=True)
class Head:
    """The first line and the header fields of a message; names keep their case, signatures are over the values."""

    first: str
    fields: tuple[tuple[str, str], ...]

    def get(self, name: str) -> str:
        """Return a field's value, "" where there is none."""
        return next((value for key, value in self.fields if key.lower() == name), "")

    def replacing(self, *names: str, by: tuple[tuple[str, str], ...] = ()) -> Head:
        """Return the head without these fields (lower case), and with others at its end."""
        return Head(self.first, (*(field for field in self.fields if field[0].lower() not in names), *by))

    @property
    def status(self) -> int:
        return int(self.first.split(" ", 2)[1])

    def to_bytes(self) -> bytes:
        lines = [self.first, *(f"{key}: {value}" for key, value in self.fields), "", ""]
        return "\r\n".join(lines).encode("latin-1")


async def read_head(reader: StreamReader) -> Head | None:
    """Read a head; None where the connection ended between two messages."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except IncompleteReadError as error:
        if error.partial:
            raise
        return None
    first, *lines = raw[:-4].decode("latin-1").split("\r\n")
    fields = (line.partition(":") for line in lines)
    return Head(first, tuple((key, value.strip()) for key, _, value in fields))


class Body:
    """What follows a head: so many bytes, chunks, everything up to the end of the connection, or nothing."""

    def __init__(self, reader: StreamReader, head: Head, *, to_the_end: bool = False, empty: bool = False):
        self._reader = reader
        self.chunked = not empty and "chunked" in head.get("transfer-encoding").lower()
        length = "0" if empty else head.get("content-length")
        self.to_the_end = to_the_end and not length and not self.chunked
        self._left = int(length or 0)
        self._trailer = b""

    async def pieces(self, most: int = PIECE_BYTES) -> AsyncIterator[bytes]:
        """Yield the content in pieces of at most `most` bytes; IncompleteReadError if the sender stops short."""
        if self.to_the_end:
            while piece := await self._reader.read(most):
                yield piece
        elif not self.chunked:
            async for piece in self._exactly(self._left, most):
                yield piece
        else:
            while size := int((await self._reader.readline()).partition(b";")[0], 16):
                async for piece in self._exactly(size, most):
                    yield piece
                await self._reader.readexactly(2)
            while (line := await self._reader.readline()).strip():
                self._trailer += line  # checksums that the sender computed while it sent

    async def _exactly(self, left: int, most: int) -> AsyncIterator[bytes]:
        while left:
            piece = await self._reader.read(min(left, most))
            if not piece:
                raise IncompleteReadError(b"", left)
            left -= len(piece)
            yield piece

    def framed(self, piece: bytes) -> bytes:
        """Return a piece as it is sent on: the message keeps its kind of framing."""
        return b"%x\r\n%b\r\n" % (len(piece), piece) if self.chunked else piece

    def end(self) -> bytes:
        """Return what is sent after the last piece."""
        return b"0\r\n%b\r\n" % self._trailer if self.chunked else b""


async def send(writer: StreamWriter, data: bytes) -> None:
    """Write, and wait until the kernel has everything: what follows may tear the connection down."""
    if data:
        writer.write(data)
        await writer.drain()


async def delivered(writer: StreamWriter) -> None:
    """Wait until the other side's kernel has all that was sent: a reset throws away what is still on the way."""
    raw = writer.get_extra_info("socket")
    # Nothing tells when the kernel's queue is empty: it has to be asked.
    while not writer.is_closing() and fcntl.ioctl(raw.fileno(), termios.TIOCOUTQ, bytes(4)) != bytes(4):  # noqa: ASYNC110
        await asyncio.sleep(0.002)


def reset(writer: StreamWriter) -> None:
    """Tear a connection down: the other side gets ECONNRESET, not an orderly end."""
    raw = writer.get_extra_info("socket")
    if raw is not None and raw.fileno() >= 0:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
