"""Object stores keep the contract of `storage/port.py`, looked at with a second client."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from urllib.error import HTTPError
from urllib.parse import quote

import aiohttp
import fsspec
import pytest

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.storage import s3
from ckpt_tasks.storage.objects import ObjectStore
from ckpt_tasks.storage.port import Store
from tests.servers.azurite import AzureServer
from tests.servers.gcs import GcsServer
from tests.servers.s3 import S3Server
from tests.storage.conformance import StoreConformance


class TestMemory(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return ObjectStore(f"memory://test/{secrets.token_hex(8)}")

    def again(self, store: Store) -> Store:
        return ObjectStore(store.url)

    def stored(self, store: Store, name: str) -> bytes | None:
        try:
            return bytes(fsspec.filesystem("memory").cat_file(f"{store.url}/{name}"))
        except FileNotFoundError:
            return None


class TestS3(StoreConformance):
    """P31, P33: Amazon's protocol, as ministack speaks it."""

    many = 230
    server: S3Server

    @pytest.fixture
    def store(self, ministack: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.setattr(s3, "_PAGE", 50)  # as many as it is asked for: thousands take their time
        self.server = ministack
        return ObjectStore(f"s3://{bucket}/runs/a", ministack.quick_options)

    def again(self, store: Store) -> Store:
        return ObjectStore(store.url, self.server.quick_options)

    def stored(self, store: Store, name: str) -> bytes | None:
        bucket, _, prefix = store.url.removeprefix("s3://").partition("/")
        client = self.server.client()
        try:
            data: bytes = client.get_object(Bucket=bucket, Key=f"{prefix}/{name}")["Body"].read()
        except client.exceptions.NoSuchKey:
            return None
        return data


@pytest.mark.slow
class TestCeph(TestS3):
    """P31, P33: a real S3 server, whose 412 has no `<Condition>`, and whose pages are as long as they can be."""

    many = 1100

    @pytest.fixture
    def store(self, ceph: S3Server) -> Iterator[Store]:
        self.server = ceph
        with ceph.fresh_bucket() as bucket:
            yield ObjectStore(f"s3://{bucket}/runs/a", ceph.storage_options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # aiohttp's, at Azure's client
class TestAzure(StoreConformance):
    """P31, P33: Azure's blob protocol, as Azurite speaks it."""

    server: AzureServer

    @pytest.fixture
    def store(self, azurite: AzureServer) -> Iterator[Store]:
        self.server = azurite
        with azurite.fresh_container() as container:
            yield ObjectStore(f"az://{container}/runs/a", azurite.storage_options)

    def again(self, store: Store) -> Store:
        return ObjectStore(store.url, self.server.storage_options)

    def stored(self, store: Store, name: str) -> bytes | None:
        container, _, prefix = store.url.removeprefix("az://").partition("/")
        try:
            return self.server.request("GET", f"{container}/{quote(f'{prefix}/{name}')}")
        except HTTPError as error:
            if error.code != 404:
                raise
            return None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
class TestGoogle(StoreConformance):
    """Google's storage protocol, as far as its emulator is honest: it ignores the condition of a write."""

    server: GcsServer

    @pytest.fixture
    def store(self, gcs: GcsServer) -> Store:
        self.server = gcs
        return ObjectStore(f"gs://{gcs.fresh_bucket()}/runs/a", gcs.storage_options)

    def again(self, store: Store) -> Store:
        return ObjectStore(store.url, self.server.storage_options)

    def stored(self, store: Store, name: str) -> bytes | None:
        bucket, _, prefix = store.url.removeprefix("gs://").partition("/")
        return self.server.stored(bucket, f"{prefix}/{name}")

    def test_of_racing_threads_one_wins(self, store: Store) -> None:
        """The emulator lets several writers win, so a run is refused there: the same request, seen by the probe."""
        with pytest.raises(ConfigError, match="second writer"):
            History(store).create("run")

    @pytest.mark.parametrize("verb", ["put", "put_if_absent"])
    def test_a_name_that_is_taken_stays_what_it_was(self, store: Store, verb: str) -> None:
        """With a single writer, who looks first, a name that is taken stays what it was here as well."""
        store.assume_single_writer()
        other = self.again(store)
        other.assume_single_writer()
        self.again = lambda _: other  # type: ignore[method-assign, assignment]
        super().test_a_name_that_is_taken_stays_what_it_was(store, verb)


def test_an_unknown_aiohttp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of aiohttp that cannot be kept from sending a commit twice is named before a request; others work."""
    monkeypatch.setattr(aiohttp.ClientSession, "ATTRS", frozenset())
    with pytest.raises(ConfigError, match=rf"aiohttp {aiohttp.__version__} is unknown"):
        ObjectStore("s3://bucket/runs/a").get("x", 1)
    assert ObjectStore(f"memory://test/{secrets.token_hex(8)}").names("") == []
