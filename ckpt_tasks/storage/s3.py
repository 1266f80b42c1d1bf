"""Requests to an S3 server, each sent once, directly from and to the caller's memory.

s3fs manages session, credentials and regions; requests use its client directly, so that no hidden code retries. This
module retries only the parts of a large upload: a part is invisible until the upload is complete. A commit is a single
PUT with `If-None-Match: *`, which AWS, Ceph and the emulators obey; some servers ignore this condition on a multipart
upload, so commits avoid multipart uploads.
"""

from __future__ import annotations

import io
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

from ckpt_tasks.errors import ConfigError, IntegrityError, StoreError
from ckpt_tasks.storage.answers import answer_of, as_ours, is_expired
from ckpt_tasks.storage.loop import each, failed, in_flight, slices
from ckpt_tasks.storage.port import moved
from ckpt_tasks.storage.retrying import is_transient, tried_again

_log = logging.getLogger("ckpt_tasks")

PART_BYTES = 16 << 20
_COPIED_BYTES = 256 << 20  # A server copies this many bytes within the timeout of a request.
_MOST_PARTS = 10_000
_PAGE = 1000
_NO_COPIES = ("NotImplemented", "MethodNotAllowed")
_UNKNOWN = ("NotImplemented", "MethodNotAllowed", "NoSuchUpload")  # Codes of stores that cannot list uploads.
_NOT_KNOWN = (400, 405, 411, 501)  # Status codes of stores that do not support a request.
# In an answer about several keys, each key has a code but no status; this table adds the status.
_STATUS = {"AccessDenied": 403, "InternalError": 500, "SlowDown": 503}
_WORDLESS = ((400, ""), (403, ""))  # The answer to a HEAD has no code: expired credentials look forbidden.


class S3Requests:
    """The requests to one bucket; `fs` is an s3fs.S3FileSystem, and every method runs on its event loop."""

    def __init__(self, fs: Any, bucket: str):
        self._fs = fs
        self._bucket = bucket
        self._deletes_one = False  # True once the store has refused to delete several objects at once.

    async def put(self, key: str, body: Sequence[memoryview], *, absent: bool) -> None:
        """Write an object, a large one in parallel parts; it becomes visible when it is complete."""
        size_bytes = sum(piece.nbytes for piece in body)
        condition = {"IfNoneMatch": "*"} if absent else {}
        if size_bytes <= PART_BYTES:
            data = next(slices(body, size_bytes), io.BytesIO())
            await self._call("put_object", Key=key, Body=data, **condition)
            return
        part_bytes = max(PART_BYTES, -(-size_bytes // _MOST_PARTS))
        async with self._uploading(key, condition) as (upload, parts):
            pieces = enumerate(slices(body, part_bytes), 1)
            parts.extend(await in_flight(self._send(upload, number, data) for number, data in pieces))

    async def copy(self, bucket: str, source: str, key: str, size_bytes: int) -> bool:
        """Have the server copy an object, a large one in parallel parts; return False if it cannot copy."""
        answer = await self._call("head_object", Bucket=bucket, Key=source)
        if answer["ContentLength"] != size_bytes:
            raise IntegrityError(f"the object has {answer['ContentLength']} bytes of {size_bytes}", key=source)
        origin = {"CopySource": {"Bucket": bucket, "Key": source}, "CopySourceIfMatch": answer["ETag"]}
        try:
            if size_bytes <= _COPIED_BYTES:
                await self._call("copy_object", Key=key, **origin)
            else:
                await self._copy_parts(key, origin, size_bytes)
        except Exception as error:
            if answer_of(error)[1] not in _NO_COPIES:
                raise
            return False
        return True

    async def get(self, key: str, max_bytes: int) -> bytes:
        """Return a whole object; raise IntegrityError if it is larger than `max_bytes`."""
        answer = await self._call("get_object", Key=key)
        async with answer["Body"] as body:
            size_bytes = answer["ContentLength"]
            if size_bytes > max_bytes:
                raise IntegrityError(f"the object has {size_bytes} bytes, more than {max_bytes}", key=key)
            data = bytearray(size_bytes)
            await _receive(body, memoryview(data), key)
            return bytes(data)

    async def read(self, key: str, begin: int, into: memoryview) -> None:
        """Fill a buffer from one range of an object."""
        end = begin + into.nbytes
        answer = await self._call("get_object", Key=key, Range=f"bytes={begin}-{end - 1}")
        async with answer["Body"] as body:
            # Do not trust the status: rclone answers 200, and still sends only the range.
            first = answer.get("ContentRange", "bytes 0-").removeprefix("bytes ").partition("-")[0]
            if first != str(begin) or answer["ContentLength"] > into.nbytes:
                raise StoreError("the store ignores which range of an object is wanted", key=key)
            if answer["ContentLength"] < into.nbytes:
                missing = into.nbytes - answer["ContentLength"]
                raise IntegrityError(f"the object ends {missing} bytes too early", key=key)
            await _receive(body, into, key)

    async def size(self, key: str) -> int:
        """Return an object's size in bytes."""
        try:
            answer = await self._call("head_object", Key=key)
        except Exception as error:
            if answer_of(error) not in _WORDLESS:
                raise
            answer = await self._call("get_object", Key=key)  # The store refuses this request, too, and says why.
            answer["Body"].close()
        return int(answer["ContentLength"])

    async def sizes(self, keys: Sequence[str]) -> dict[str, int | BaseException]:
        """Return the sizes of objects in bytes, or errors, by key; list a directory once for all its keys."""
        sizes: dict[str, int | BaseException] = {}
        for folder, count in Counter(key.rpartition("/")[0] for key in keys).items():
            if count > 1:
                sizes |= await self.keys(f"{folder}/", lambda keys: False, _PAGE)
        alone = [key for key in keys if key not in sizes]  # They are alone in a directory, or missing in its listing.
        sizes |= await each(self.size, alone)
        return {key: sizes[key] for key in keys}

    async def keys(self, prefix: str, enough: Callable[[Iterable[str]], bool], page: int) -> dict[str, int]:
        """List keys and sizes below a prefix in the server's order until `enough(keys)`; ask for `page` at first."""
        sizes: dict[str, int] = {}
        more: dict[str, Any] = {"MaxKeys": min(page, _PAGE)}
        while True:
            answer = await self._call("list_objects_v2", Prefix=prefix, **more)
            sizes |= {entry["Key"]: entry["Size"] for entry in answer.get("Contents", ())}
            if not answer.get("IsTruncated") or enough(sizes):
                return sizes
            more = {"ContinuationToken": answer["NextContinuationToken"]}

    async def folders(self, prefix: str) -> list[str]:
        """List the folders directly below a prefix, each with the prefix and a slash."""
        names: list[str] = []
        more: dict[str, Any] = {}
        while True:
            answer = await self._call("list_objects_v2", Prefix=prefix, Delimiter="/", **more)
            names += [entry["Prefix"] for entry in answer.get("CommonPrefixes", ())]
            if not answer.get("IsTruncated"):
                return names
            more = {"ContinuationToken": answer["NextContinuationToken"]}

    async def delete(self, key: str) -> None:
        """Delete an object; a missing one is not an error."""
        await self._call("delete_object", Key=key)

    async def delete_all(self, keys: Sequence[str]) -> dict[str, BaseException]:
        """Delete objects, up to a thousand with one request; return the errors by key."""
        refused: dict[str, BaseException] = {}
        for begin in range(0, len(keys), _PAGE):
            page = keys[begin : begin + _PAGE]
            answer = await self._delete_page(page) if len(page) > 1 else None
            refused |= failed(await each(self.delete, page)) if answer is None else answer
        return refused

    async def _delete_page(self, keys: Sequence[str]) -> dict[str, BaseException] | None:
        """Delete up to a thousand keys with one request; return the errors, or None if the store cannot do this."""
        if self._deletes_one:
            return None
        try:
            answer = await self._call("delete_objects", Delete={"Objects": [{"Key": key} for key in keys]})
        except Exception as error:
            ours = as_ours(error, "")
            if answer_of(error)[0] not in _NOT_KNOWN or getattr(ours, "transient", False):
                raise
            _log.info("%s: it cannot delete several objects at once (%s): each is a request", self._bucket, ours)
            self._deletes_one = True
            return None
        gone = {entry["Key"] for entry in answer.get("Deleted", ())}
        errors = {entry["Key"]: entry for entry in answer.get("Errors", ())}
        unsaid = [key for key in keys if key not in gone and key not in errors]
        return {key: RefusedKeyError(entry) for key, entry in errors.items()} | failed(await each(self.delete, unsaid))

    async def abort_uploads(self, prefix: str, dead: Callable[[str], bool]) -> None:
        """Abort unfinished multipart uploads of keys for which `dead(key)` is True, if the store can list uploads."""
        more: dict[str, Any] = {}
        while True:
            try:
                answer = await self._call("list_multipart_uploads", Prefix=prefix, **more)
            except Exception as error:
                if answer_of(error)[1] in _UNKNOWN:
                    return
                raise
            for upload in answer.get("Uploads", ()):
                if dead(upload["Key"]):
                    await self._abort({"Key": upload["Key"], "UploadId": upload["UploadId"]})
            if not answer.get("IsTruncated"):
                return
            more = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    @asynccontextmanager
    async def _uploading(
        self, key: str, condition: Mapping[str, str] = MappingProxyType({})
    ) -> AsyncIterator[tuple[dict[str, str], list[dict[str, Any]]]]:
        """Begin an upload in parts, and complete it with the parts that the block adds; abort it after an error."""
        started = await self._call("create_multipart_upload", Key=key)
        upload, parts = {"Key": key, "UploadId": started["UploadId"]}, list[dict[str, Any]]()
        try:
            yield upload, parts
            answer = await self._call(
                "complete_multipart_upload", MultipartUpload={"Parts": parts}, **upload, **condition
            )
            # The status 200 is sent before the upload is complete: only the body shows success.
            if not answer.get("ETag") and not answer.get("Key"):
                raise _short("the store broke off while it put the parts together", key)
        except BaseException:
            await self._abort(upload)
            raise

    async def _send(self, upload: dict[str, str], number: int, data: io.BytesIO) -> dict[str, Any]:
        async def once() -> dict[str, Any]:
            data.seek(0)  # An earlier try has moved the position.
            return await self._call("upload_part", PartNumber=number, Body=data, **upload)

        answer = await send_part(upload["Key"], once)
        moved()
        named = {name: answer[name] for name in ("ETag", "ChecksumCRC32") if answer.get(name)}
        return {"PartNumber": number, **named}

    async def _copy_parts(self, key: str, origin: dict[str, Any], size_bytes: int) -> None:
        part_bytes = max(_COPIED_BYTES, -(-size_bytes // _MOST_PARTS))
        async with self._uploading(key) as (upload, parts):

            async def part(number: int, begin: int) -> dict[str, Any]:
                span = f"bytes={begin}-{min(begin + part_bytes, size_bytes) - 1}"
                request = {"PartNumber": number, "CopySourceRange": span, **origin, **upload}
                answer = await send_part(key, lambda: self._call("upload_part_copy", **request))
                return {"PartNumber": number, "ETag": answer["CopyPartResult"]["ETag"]}

            parts.extend(await in_flight(part(n, at) for n, at in enumerate(range(0, size_bytes, part_bytes), 1)))

    async def _abort(self, upload: dict[str, str]) -> None:
        try:
            await self._call("abort_multipart_upload", **upload)
        except Exception:  # noqa: BLE001 (the caller raises the earlier error; a later owner aborts this upload)
            return

    async def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        await self._fs.set_session()
        client = await self._fs.get_s3(self._bucket)
        answer: dict[str, Any] = await getattr(client, method)(**{"Bucket": self._bucket, **arguments})
        return answer


class RefusedKeyError(Exception):
    """The error of one key in an answer about several keys, in the form of botocore's error for a single request."""

    def __init__(self, said: dict[str, Any]):
        super().__init__(said.get("Message", ""))
        code = said.get("Code", "")
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": _STATUS.get(code, 400)}}


def sending_once() -> type:
    """Return an HTTP session class that never resends: aiohttp's own resends a PUT after a broken connection.

    Raises ConfigError if this version of aiohttp cannot be told.
    """
    import aiohttp
    from aiobotocore.httpsession import AIOHTTPSession  # type: ignore[import-untyped]

    if "_retry_connection" not in getattr(aiohttp.ClientSession, "ATTRS", ()):
        raise ConfigError(
            f"aiohttp {aiohttp.__version__} is unknown: it may send a commit twice", hint="pip install 'aiohttp<3.15'"
        )

    class SendingOnce(AIOHTTPSession):  # type: ignore[misc]
        async def _get_session(self, proxy_url: str | None) -> Any:
            session = await super()._get_session(proxy_url)
            session._retry_connection = False  # aiohttp has no option for this; its own tests set this attribute.
            return session

    return SendingOnce


async def _receive(body: Any, into: memoryview, key: str) -> None:
    """Copy the body of an answer into a buffer as it arrives."""
    at = 0
    async for data in body.raw_stream.content.iter_any():
        if at + len(data) > into.nbytes:
            raise IntegrityError("the store sent more bytes than it said", key=key)
        into[at : at + len(data)] = data
        at += len(data)
    if at < into.nbytes:
        raise _short(f"the answer ended {into.nbytes - at} bytes too early", key)


def _short(message: str, key: str) -> StoreError:
    failure = StoreError(message, key=key)
    failure.transient = True
    return failure


async def send_part(key: str, request: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    """Send one part of a large upload; retry this part alone."""

    async def once() -> dict[str, Any]:
        try:
            return await request()
        except Exception as error:
            if answer_of(error)[1] in _NO_COPIES:
                raise
            raise as_ours(error, key) from error

    return await tried_again(once, lambda error: is_transient(error) and not is_expired(error))
