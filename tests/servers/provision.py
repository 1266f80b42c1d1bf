"""Fetch the servers that only `make test-all` uses; nothing is installed into the system, nothing needs root.

`python -m tests.servers.provision DIRECTORY` unpacks Ceph's Debian packages, and those that they need and this machine
lacks, into DIRECTORY/root.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = ["ceph-mon", "ceph-osd", "radosgw"]


def missing_packages() -> list[str]:
    """Return what an installation would bring: apt plays it through, and changes nothing."""
    command = ["apt-get", "install", "--simulate", "-qq", "--no-install-recommends", *PACKAGES]
    played = subprocess.run(command, check=False, capture_output=True, text=True)
    if played.returncode != 0:
        sys.exit(f"{played.stderr}apt does not know Ceph's packages: is this Debian, and has it had `apt-get update`?")
    lines = (line.split() for line in played.stdout.splitlines())
    return [words[1] for words in lines if words[0] == "Inst"]


def fetch_ceph(place: Path) -> None:
    """Download the packages, checked by apt against its signed lists, and unpack them."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        sys.exit("Ceph comes from Debian's packages, and apt-get and dpkg-deb are not here: use `make test`")
    debs, root = place / "debs", place / "root"
    for directory in (debs, root):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    # Ours first: they are wanted even where the system has them.
    names = sorted({*PACKAGES, *missing_packages()})
    subprocess.run(["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=", *names], check=True, cwd=debs)
    for deb in sorted(debs.glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", deb, root], check=True)
    # One of them is sudo: nobody may become root through a file that a test run has unpacked.
    subprocess.run(["chmod", "-R", "a-s", root], check=True)
    shutil.rmtree(debs)


if __name__ == "__main__":
    fetch_ceph(Path(sys.argv[1]))
