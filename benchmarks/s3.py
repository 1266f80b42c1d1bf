"""One large object up to an S3 server and down again, by us and by the clients that others use.

The server runs on this machine and shares its cores, so the time that a client takes from the cores counts twice. Every
client has its bytes in memory before the clock starts and has them there when it stops; parts and ranges of 16 MiB,
eight in flight, for those where that can be said.
"""

from __future__ import annotations

import io
import random
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import obstore
import s3fs
import torch
from boto3.s3.transfer import TransferConfig
from botocore.client import Config

from benchmarks.apart import summary
from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.storage.locations import Location
from ckpt_tasks.storage.objects import ObjectStore
from tests.servers import s3 as servers
from tests.servers.ceph import ceph
from tests.servers.process import NotProvisionedError
from tests.servers.s3 import REGION, S3Server

__all__ = ["measure"]

_STALL = "training waits for a save"
_PART_BYTES = 16 << 20
_IN_FLIGHT = 8


class Client:
    """Move bytes between memory and one object."""

    def __init__(self, server: S3Server, bucket: str):
        self.server = server
        self.bucket = bucket

    def upload(self, data: bytes) -> None:
        raise NotImplementedError

    def download(self, size_bytes: int) -> Any:
        raise NotImplementedError


class Ours(Client):
    def __init__(self, server: S3Server, bucket: str):
        super().__init__(server, bucket)
        self.store = ObjectStore(f"s3://{bucket}/ours", server.storage_options)

    def upload(self, data: bytes) -> None:
        self.store.delete("object")
        self.store.put("object", [data])

    def download(self, size_bytes: int) -> Any:
        into = memoryview(bytearray(size_bytes))
        with ThreadPoolExecutor(_IN_FLIGHT) as threads:
            for done in [
                threads.submit(self.store.read, "object", at, into[at : at + _PART_BYTES])
                for at in range(0, size_bytes, _PART_BYTES)
            ]:
                done.result()
        return into


class S3fs(Client):
    def __init__(self, server: S3Server, bucket: str):
        super().__init__(server, bucket)
        self.fs = s3fs.S3FileSystem(**server.storage_options)

    def upload(self, data: bytes) -> None:
        self.fs.pipe_file(f"{self.bucket}/s3fs", data, chunksize=_PART_BYTES, max_concurrency=_IN_FLIGHT)

    def download(self, size_bytes: int) -> Any:
        starts = [*range(0, size_bytes, _PART_BYTES)]
        ends = [min(start + _PART_BYTES, size_bytes) for start in starts]
        return b"".join(self.fs.cat_ranges([f"{self.bucket}/s3fs"] * len(starts), starts, ends))


class Boto3(Client):
    def __init__(self, server: S3Server, bucket: str):
        super().__init__(server, bucket)
        self.client = boto3.session.Session().client(
            "s3",
            endpoint_url=server.endpoint,
            aws_access_key_id=server.key,
            aws_secret_access_key=server.secret,
            region_name=REGION,
            config=Config(max_pool_connections=2 * _IN_FLIGHT),
        )
        self.config = TransferConfig(
            multipart_threshold=_PART_BYTES, multipart_chunksize=_PART_BYTES, max_concurrency=_IN_FLIGHT
        )

    def upload(self, data: bytes) -> None:
        self.client.upload_fileobj(io.BytesIO(data), self.bucket, "boto3", Config=self.config)

    def download(self, size_bytes: int) -> Any:
        into = io.BytesIO()
        self.client.download_fileobj(self.bucket, "boto3", into, Config=self.config)
        return into.getbuffer()


class Obstore(Client):
    def __init__(self, server: S3Server, bucket: str):
        super().__init__(server, bucket)
        self.store = obstore.store.S3Store(
            bucket,
            endpoint=server.endpoint,
            access_key_id=server.key,
            secret_access_key=server.secret,
            region=REGION,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )

    def upload(self, data: bytes) -> None:
        obstore.put(self.store, "obstore", data, chunk_size=_PART_BYTES, max_concurrency=_IN_FLIGHT)

    def download(self, size_bytes: int) -> Any:
        starts = [*range(0, size_bytes, _PART_BYTES)]
        ends = [min(start + _PART_BYTES, size_bytes) for start in starts]
        return b"".join(obstore.get_ranges(self.store, "obstore", starts=starts, ends=ends, coalesce=0))


_CLIENTS: dict[str, Callable[[S3Server, str], Client]] = {
    "ckpt-tasks": Ours,
    "s3fs": S3fs,
    "boto3, multipart": Boto3,
    "obstore": Obstore,
}


def measure(directory: Path, *, tiny: bool, rounds: int, device: str = "cpu") -> dict[str, Any]:
    """Time every client `rounds` times, in random order, against Ceph, or ministack where Ceph is not installed.

    Rows: seconds up, seconds down, the client's processor time for both, and how long training waits for a save, here
    and to a local directory.
    """
    size_bytes = (1 << 20) if tiny else (256 << 20)
    data = np.random.default_rng(0).bytes(size_bytes)
    names = ("S3 upload", "S3 download", "S3 upload, CPU", "S3 download, CPU")
    rows: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    with tempfile.TemporaryDirectory() as place, _server(Path(place)) as server, server.fresh_bucket() as bucket:
        clients = {name: make(server, bucket) for name, make in _CLIENTS.items()}
        for round_ in range(rounds + 1):
            for name in random.sample([*clients], len(clients)):
                up, up_cpu, _ = _timed(clients[name].upload, data)
                down, down_cpu, found = _timed(clients[name].download, size_bytes)
                assert found == data, name
                if round_:  # the first one opens connections
                    for row, seconds in zip(rows, (up, down, up_cpu, down_cpu), strict=True):
                        rows[row].setdefault(name, []).append(seconds)
        rows[_STALL] = stalls(
            {"a local directory": str(directory), "ckpt-tasks to S3": f"s3://{bucket}"}, server, data, rounds
        )
    return {
        "size_bytes": size_bytes,
        "rounds": rounds,
        "device": server.name,
        "rows": {row: {name: summary(times) for name, times in cells.items()} for row, cells in rows.items()},
    }


def stalls(places: dict[str, str], server: S3Server, data: bytes, rounds: int) -> dict[str, list[float]]:
    """Time how long `step()` takes when it saves, with one state and two places that take turns."""
    state = {"weights": torch.frombuffer(bytearray(data), dtype=torch.uint8)}
    found: dict[str, list[float]] = {name: [] for name in places}
    with ExitStack() as stack:
        runs = {}
        for name, place in places.items():
            options = server.storage_options if place.startswith("s3:") else None
            location = Location(f"{place}/stall", storage_options=options)
            config = CheckpointConfig(checkpoint_dir=location, step_interval=1, max_num_checkpoints=2)
            runs[name] = stack.enter_context(Checkpointer(config))
        for step in range(1, rounds + 3):
            for name in random.sample([*runs], len(runs)):
                state["weights"].add_(1)
                began = time.perf_counter()
                runs[name].step(step, state)
                waited_s = time.perf_counter() - began
                runs[name].wait()
                if step > 2:  # both images have been touched by then
                    found[name].append(waited_s)
    return found


def _server(place: Path) -> AbstractContextManager[S3Server]:
    try:
        return ceph(place)
    except NotProvisionedError:
        return servers.ministack(place)


def _timed(work: Callable[[Any], Any], about: Any) -> tuple[float, float, Any]:
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    found = work(about)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, found
