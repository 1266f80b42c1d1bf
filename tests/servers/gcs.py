"""gcp-storage-emulator: Google's storage protocol as far as reading goes; it ignores the conditions of a write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from tests.servers.process import on_free_port, tied, token, wait_until
from tests.servers.s3 import program


@dataclass(frozen=True, kw_only=True)
class GcsServer:
    """Where the emulator answers; it lets everybody in."""

    endpoint: str
    pid: int

    @property
    def storage_options(self) -> dict[str, Any]:
        """Options for gcsfs."""
        return {"endpoint_url": self.endpoint, "token": "anon", "project": "test"}

    def fresh_bucket(self) -> str:
        """Make a bucket that nobody has used."""
        name = f"test-{token()}"
        body = f'{{"name": "{name}"}}'.encode()
        header = {"Content-Type": "application/json"}
        urlopen(Request(f"{self.endpoint}/storage/v1/b?project=test", body, header), timeout=20).close()
        return name

    def stored(self, bucket: str, name: str) -> bytes | None:
        """Read an object past every Google library; None where there is none."""
        path = f"{self.endpoint}/download/storage/v1/b/{bucket}/o/{quote(name, safe='')}?alt=media"
        try:
            with urlopen(path, timeout=20) as answer:
                content: bytes = answer.read()
                return content
        except HTTPError as error:
            if error.code != 404:
                raise
            return None


def gcs(place: Path) -> AbstractContextManager[GcsServer]:
    """Run the emulator over memory."""
    return on_free_port(partial(_gcs, program("gcp-storage-emulator"), place))


@contextmanager
def _gcs(path: Path, place: Path, port: int) -> Iterator[GcsServer]:
    log = place / "gcs.log"
    with tied([path, "start", "--host=127.0.0.1", f"--port={port}", "--in-memory"], log=log) as process:
        endpoint = f"http://127.0.0.1:{port}"
        wait_until(
            lambda: urlopen(f"{endpoint}/storage/v1/b?project=test", timeout=10).close(), process, log, timeout_s=60
        )
        yield GcsServer(endpoint=endpoint, pid=process.pid)
