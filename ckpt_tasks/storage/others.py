"""Requests to Azure, Google and fsspec's memory file system, by fsspec's own methods."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from ckpt_tasks.errors import IntegrityError, StoreError
from ckpt_tasks.storage.loop import each, failed, slices

_T = TypeVar("_T")


class OtherRequests:
    """Requests with the methods of `S3Requests`; `put` holds the whole body in memory."""

    def __init__(self, fs: Any, bucket: str):
        self._fs = fs
        self._bucket = bucket
        if (log := logging.getLogger("gcsfs")).level == logging.NOTSET:
            log.setLevel(logging.CRITICAL)  # It logs a traceback for each of its tries; our error has its words.

    async def put(self, key: str, body: Sequence[memoryview], *, absent: bool) -> None:
        size_bytes = sum(piece.nbytes for piece in body)
        data = next(slices(body, size_bytes), io.BytesIO()).getvalue()
        await self._do("pipe_file", self._path(key), data, mode="create" if absent else "overwrite")

    async def copy(self, bucket: str, source: str, key: str, size_bytes: int) -> bool:
        """Return False, so that the caller sends the bytes: each of these stores would need its own copy request."""
        return False

    async def get(self, key: str, max_bytes: int) -> bytes:
        size_bytes = await self.size(key)
        if size_bytes > max_bytes:
            raise IntegrityError(f"the object has {size_bytes} bytes, more than {max_bytes}", key=key)
        return bytes(await self._do("cat_file", self._path(key))) if size_bytes else b""

    async def read(self, key: str, begin: int, into: memoryview) -> None:
        data = await self._do("cat_file", self._path(key), start=begin, end=begin + into.nbytes)
        if len(data) != into.nbytes:
            raise IntegrityError(f"the object ends {into.nbytes - len(data)} bytes too early", key=key)
        into[:] = data

    async def size(self, key: str) -> int:
        info = await self._do("info", self._path(key))
        if info["type"] != "file":
            raise FileNotFoundError(key)
        return int(info["size"])

    async def sizes(self, keys: Sequence[str]) -> dict[str, int | BaseException]:
        return await self._each(self.size, keys)

    async def keys(self, prefix: str, enough: Callable[[Iterable[str]], bool], page: int) -> list[str]:
        try:
            names = await self._do("find", self._path(prefix))
        except FileNotFoundError:
            return []
        cut = len(self._path(""))
        return [path.lstrip("/")[cut:] for path in names]

    async def folders(self, prefix: str) -> list[str]:
        entries = await self._do("ls", self._path(prefix.rstrip("/")), detail=True)
        cut = len(self._path(""))
        return [entry["name"].lstrip("/")[cut:] for entry in entries if entry["type"] == "directory"]

    async def delete(self, key: str) -> None:
        await self._do("rm_file", self._path(key))

    async def delete_all(self, keys: Sequence[str]) -> dict[str, BaseException]:
        return failed(await self._each(self.delete, keys))

    async def _each(self, ask: Any, keys: Sequence[str]) -> dict[str, Any]:
        if self._fs.async_impl:
            return await each(ask, keys)
        said: dict[str, Any] = {}
        for key in keys:  # Only fsspec's memory file system is synchronous, and it never waits.
            try:
                said[key] = await ask(key)
            except Exception as error:  # noqa: BLE001 (the caller gets each key's error)
                said[key] = error
        return said

    async def abort_uploads(self, prefix: str, dead: Callable[[str], bool]) -> None:
        """Do nothing: an unfinished upload is invisible, and these stores delete it themselves."""

    def _path(self, key: str) -> str:
        return f"{self._bucket}/{key}"

    async def _do(self, verb: str, *arguments: Any, **options: Any) -> Any:
        if self._fs.async_impl:
            return await getattr(self._fs, f"_{verb}")(*arguments, **options)
        return getattr(self._fs, verb)(*arguments, **options)


def drive(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine that never waits; raise StoreError if it waits."""
    try:
        work.send(None)
    except StopIteration as done:
        result: _T = done.value
        return result
    raise StoreError("a store without requests waits for something")
