"""Azurite, Microsoft's stand-in for Azure's blob storage; it runs on Node.js and keeps everything in memory."""

from __future__ import annotations

import base64
import hashlib
import hmac
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tests.servers.process import NotProvisionedError, NotReadyError, on_free_port, tied, token, wait_until

PROGRAM = Path(sys.prefix, "azurite", "node_modules", ".bin", "azurite-blob")
_VERSION = "2021-12-02"
_EMPTY = 12 * "\n"  # fields that the signature covers and that we do not send: lengths, digests, dates, conditions


@dataclass(frozen=True, kw_only=True)
class AzureServer:
    """Where the server answers, and its only account."""

    endpoint: str
    account: str
    key: str = field(repr=False)
    pid: int

    @property
    def storage_options(self) -> dict[str, Any]:
        """Options for adlfs."""
        connection = (
            f"DefaultEndpointsProtocol=http;AccountName={self.account};AccountKey={self.key};"
            f"BlobEndpoint={self.endpoint}/{self.account};"
        )
        return {"connection_string": connection, "use_listings_cache": False, "skip_instance_cache": True}

    def request(self, method: str, path: str = "", query: str = "") -> bytes:
        """Send one signed request (Shared Key) past every Azure library; return the answer's body.

        `path` is `container/name`, as it stands in the address. Raises HTTPError, OSError.
        """
        fields = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _VERSION}
        listed = "".join(f"{name}:{value}\n" for name, value in sorted(fields.items()))
        # The account stands there twice: as the account, and as the first part of the path that Azurite answers at.
        asked = "".join(f"\n{part.replace('=', ':')}" for part in sorted(query.split("&")) if part)
        signed = f"{method}{_EMPTY}{listed}/{self.account}/{self.account}/{path}{asked}"
        digest = hmac.digest(base64.b64decode(self.key), signed.encode(), hashlib.sha256)
        fields["Authorization"] = f"SharedKey {self.account}:{base64.b64encode(digest).decode()}"
        address = f"{self.endpoint}/{self.account}/{path}{'?' if query else ''}{query}"
        with urlopen(Request(address, method=method, headers=fields), timeout=20) as answer:
            content: bytes = answer.read()
            return content

    @contextmanager
    def fresh_container(self) -> Iterator[str]:
        """Make a container that nobody has used; on leaving, delete it with all it holds."""
        name = f"test-{token()}"
        self.request("PUT", name, "restype=container")
        yield name
        self.request("DELETE", name, "restype=container")


def azurite(place: Path) -> AbstractContextManager[AzureServer]:
    """Run Azurite's blob service."""
    if not PROGRAM.exists():
        raise NotProvisionedError(f"{PROGRAM} is missing: `make servers` brings it")
    return on_free_port(partial(_azurite, place))


@contextmanager
def _azurite(place: Path, port: int) -> Iterator[AzureServer]:
    account, key = f"a{token()[:20]}", base64.b64encode(token().encode()).decode()
    command = [PROGRAM, "--silent", "--loose", "--skipApiVersionCheck", "--disableTelemetry", "--inMemoryPersistence"]
    command += ["--blobHost", "127.0.0.1", "--blobPort", str(port)]
    log = place / "azurite.log"

    with tied(command, environment={"AZURITE_ACCOUNTS": f"{account}:{key}"}, log=log) as process:
        server = AzureServer(endpoint=f"http://127.0.0.1:{port}", account=account, key=key, pid=process.pid)

        def ready() -> None:
            try:
                server.request("GET", "", "comp=list")
            except HTTPError as error:  # somebody else's server, which does not know the account
                raise NotReadyError(error.read().decode(errors="replace")) from error

        wait_until(ready, process, log, timeout_s=60)
        yield server
