"""A real S3 server: Ceph's RADOS gateway over one monitor and one memory store, from packages that are only unpacked.

It verifies signatures, leaves `<Condition>` out of its 412, and ignores preconditions of multipart uploads.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from urllib.request import urlopen

from tests.servers.process import NotProvisionedError, StartError, free_port, on_free_port, tied, token, wait_until
from tests.servers.s3 import S3Server, answers_us

ROOT = Path(sys.prefix, "ceph", "root")
_MACHINE = f"{os.uname().machine}-linux-gnu"
_LIBRARIES = ROOT / "usr/lib" / _MACHINE
# One of everything, nobody to authenticate between them, no autoscaling, deleted objects' memory given back at once.
_CONFIG = """[global]
fsid = {fsid}
mon_host = [v2:127.0.0.1:{mon_port}]
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_ipv6 = false
ms_bind_msgr1 = false
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
ms_mon_client_mode = crc
ms_mon_service_mode = crc
ms_mon_cluster_mode = crc
ms_client_mode = crc
ms_service_mode = crc
ms_cluster_mode = crc
mon_data = {place}/mon
mon_data_avail_crit = 1
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
osd_data = {place}/osd
osd_objectstore = memstore
memstore_device_bytes = 4294967296
osd_crush_chooseleaf_type = 0
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_pool_default_pgp_num = 8
osd_pool_default_pg_autoscale_mode = off
rgw_data = {place}/rgw
rgw_frontends = beast endpoint=127.0.0.1:{port}
rgw_gc_obj_min_wait = 1
rgw_gc_processor_period = 5
run_dir = {place}
admin_socket =
log_file = {place}/$name.log
plugin_dir = {libraries}/ceph
erasure_code_dir = {libraries}/ceph/erasure-code
osd_class_dir = {libraries}/rados-classes
"""


def ceph(place: Path) -> AbstractContextManager[S3Server]:
    """Run the gateway; it answers after ten seconds or so."""
    if not (ROOT / "usr/bin/radosgw").exists():
        raise NotProvisionedError(f"{ROOT} holds no Ceph: `make servers` brings it")
    return on_free_port(partial(_ceph, place))


@contextmanager
def _ceph(parent: Path, port: int) -> Iterator[S3Server]:
    place, mon_port = parent / str(port), free_port()
    for part in ("mon", "osd", "rgw"):
        (place / part).mkdir(parents=True)
    fsid, key, secret = str(uuid.uuid4()), token(), token()
    config = _CONFIG.format(fsid=fsid, place=place, port=port, mon_port=mon_port, libraries=_LIBRARIES)
    (place / "ceph.conf").write_text(config)
    libraries = f"{_LIBRARIES}:{_LIBRARIES}/ceph:{ROOT}/lib/{_MACHINE}"
    environment = {"CEPH_CONF": f"{place}/ceph.conf", "LD_LIBRARY_PATH": libraries}
    run = partial(_run, place, environment)
    # The maps of a cluster that has its monitor and its store already, so no command has to add them.
    run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v2:127.0.0.1:{mon_port}]", f"{place}/monmap")
    run("osdmaptool", "--createsimple", "1", f"{place}/osdmap")
    run("ceph-mon", "--mkfs", "-i", "a", "--monmap", f"{place}/monmap", "--osdmap", f"{place}/osdmap")
    with ExitStack() as stack:

        def start(name: str, *arguments: str) -> subprocess.Popen[bytes]:
            command = [ROOT / "usr/bin" / name, *arguments, "-f"]
            return stack.enter_context(tied(command, log=place / f"{name}.out", environment=environment))

        start("ceph-mon", "-i", "a")
        run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", str(uuid.uuid4()))
        start("ceph-osd", "-i", "0")
        gateway, log = start("radosgw", "-n", "client.rgw.a"), place / "client.rgw.a.log"
        endpoint = f"http://127.0.0.1:{port}"
        wait_until(lambda: urlopen(endpoint, timeout=10).close(), gateway, log, timeout_s=180)
        run(
            "radosgw-admin",
            "user",
            "create",
            "--uid=t",
            "--display-name=t",
            f"--access-key={key}",
            f"--secret={secret}",
        )
        server = S3Server(name="Ceph RADOS gateway", endpoint=endpoint, key=key, secret=secret, pid=gateway.pid)
        wait_until(partial(answers_us, server), gateway, log, timeout_s=60)
        yield server


def _run(place: Path, environment: dict[str, str], name: str, *arguments: str) -> None:
    done = subprocess.run(
        [ROOT / "usr/bin" / name, *arguments],
        cwd=place,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode != 0:
        raise StartError(f"{name}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
