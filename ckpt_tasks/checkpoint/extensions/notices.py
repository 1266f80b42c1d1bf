"""Notices that a cloud will take this host away: AWS, Google Cloud and Azure give them by HTTP instead of a signal.

A thread asks the host's metadata server; at a notice the thread sends this process SIGTERM, with the usual effect. The
addresses, answers and intervals come from the clouds' documentation. A missing, slow or wrong answer does not affect
training: the thread logs it once, and asks again.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import signal
import threading
from collections.abc import Mapping
from email.message import Message
from typing import Any, NamedTuple, Protocol
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from ckpt_tasks.checkpoint.extension import Extension
from ckpt_tasks.process import start_thread

_TIMEOUT_S = 2.0
_WAIT_S = 30  # Google's server delays its answer up to this long, until a change.
_AFTER_FAILURE_S = 5.0
_LINK_LOCAL = "http://169.254.169.254"
_direct = build_opener(ProxyHandler({}))  # A proxy would answer for another host.
_log = logging.getLogger("ckpt_tasks")
_heard: set[str] = set()  # If a handler of SIGTERM lets training continue, do not repeat the notice.


class Notice(NamedTuple):
    """A notice of a cloud; `ends`: the cloud takes this host away."""

    text: str
    ends: bool = True


class _Cloud(Protocol):
    every_s: float

    def look(self) -> list[Notice]:
        """Ask for the notices of this host. Raises OSError, HTTPException, and errors of parsing a foreign answer."""


class SpotNotices(Extension):
    """Asks the metadata server of the cloud `spot_notices` in a thread, while this process holds signals back.

    Only the first rank of each host asks. Sends this process SIGTERM at a notice.
    """

    _stop: threading.Event | None = None

    def holding(self, holds: bool) -> None:
        """Begin to ask, or let the thread end after its current request."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None
        if holds and os.environ.get("LOCAL_RANK", "0") == "0":
            self._stop = threading.Event()
            start_thread(_watch, str(self.config.spot_notices), self._stop, name="ckpt-notices")


def _watch(name: str, stop: threading.Event) -> None:
    cloud, fails = CLOUDS[name](), False
    while not stop.is_set():
        pause_s = cloud.every_s
        try:
            notices = cloud.look()
            fails = False
        except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as error:
            if not fails:
                _log.warning(
                    "The metadata server of %s cannot be asked (%s). Training continues without its notices, and it is "
                    "asked again every %g s",
                    name,
                    error,
                    _AFTER_FAILURE_S,
                )
            notices, fails, pause_s = [], True, _AFTER_FAILURE_S
        for notice in notices:
            if notice.text not in _heard and not stop.is_set():
                _heard.add(notice.text)
                _log.warning("%s: %s", name, notice.text)
                if notice.ends:
                    os.kill(os.getpid(), signal.SIGTERM)
        stop.wait(pause_s)


class _Aws:
    """Notices of AWS: Spot interruptions and rebalance recommendations, by IMDSv2 (docs.aws.amazon.com)."""

    every_s = 5.0

    def __init__(self) -> None:
        self._root = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", _LINK_LOCAL).rstrip("/") + "/latest"
        self._token = ""

    def look(self) -> list[Notice]:
        """Return the notices of this instance: an interruption, or a recommendation to leave it."""
        if not self._token:
            lives = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
            self._token = _ask(f"{self._root}/api/token", lives, method="PUT")[0]
        notices = []
        if action := self._read("spot/instance-action"):
            text = f"this spot instance gets the action {action['action']!r} at {action['time']}"
            notices.append(Notice(f"{text}: the run ends after this step"))
        if advice := self._read("events/recommendations/rebalance"):
            since = advice["noticeTime"]
            notices.append(Notice(f"an interruption has become likely since {since}; training continues", ends=False))
        return notices

    def _read(self, path: str) -> Any:
        try:
            return _object(_ask(f"{self._root}/meta-data/{path}", {"X-aws-ec2-metadata-token": self._token})[0])
        except HTTPError as error:
            if error.code == http.client.UNAUTHORIZED:
                self._token = ""  # The token has expired.
            if error.code == http.client.NOT_FOUND:  # No notice exists.
                return None
            raise


class _Google:
    """Notices of Google Cloud: `preempted` in a Spot VM's metadata (cloud.google.com: wait_for_change, last_etag)."""

    every_s = 1.0

    def __init__(self) -> None:
        host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
        self._url = f"http://{host}/computeMetadata/v1/instance/preempted"
        self._etag = ""

    def look(self) -> list[Notice]:
        """Return the preemption of this instance; each call but the first waits up to 30 s for it."""
        query = f"?wait_for_change=true&timeout_sec={_WAIT_S}&last_etag={self._etag}" if self._etag else ""
        answer, headers = _ask(
            self._url + query, {"Metadata-Flavor": "Google"}, timeout_s=_TIMEOUT_S + (_WAIT_S if query else 0)
        )
        self._etag = headers.get("ETag", "")
        if answer not in ("TRUE", "FALSE"):
            raise ValueError(f"neither TRUE nor FALSE: {answer!r:.80}")
        return [Notice("this instance is preempted: the run ends after this step")] if answer == "TRUE" else []


class _Azure:
    """Notices of Azure: Scheduled Events of type Preempt, by the instance's name (learn.microsoft.com).

    Do not acknowledge an event (StartRequests): Azure would then evict the host at once, for other programs too.
    """

    every_s = 1.0

    def __init__(self) -> None:
        self._root = os.environ.get("AZURE_POD_IDENTITY_AUTHORITY_HOST", _LINK_LOCAL).rstrip("/") + "/metadata"
        self._name = ""

    def look(self) -> list[Notice]:
        """Return the evictions of this machine; in a scale set, events name other machines as well."""
        if not self._name:
            self._name = self._read("instance/compute/name?api-version=2021-02-01&format=text")
        document = _object(self._read("scheduledevents?api-version=2020-07-01"))
        return [
            Notice(f"this machine is evicted, not before {event['NotBefore'] or 'now'}: the run ends after this step")
            for event in document["Events"]
            if event["EventType"] == "Preempt" and self._name in event["Resources"]
        ]

    def _read(self, path: str) -> str:
        return _ask(f"{self._root}/{path}", {"Metadata": "true"})[0]


CLOUDS: Mapping[str, type[_Cloud]] = {"aws": _Aws, "google": _Google, "azure": _Azure}


def _ask(
    url: str, headers: Mapping[str, str], *, method: str = "GET", timeout_s: float = _TIMEOUT_S
) -> tuple[str, Message]:
    request = Request(url, headers=dict(headers), method=method)  # noqa: S310 (each caller's URL begins with http)
    with _direct.open(request, timeout=timeout_s) as answer:
        return answer.read(1 << 16).decode().strip(), answer.headers


def _object(text: str) -> dict[str, Any]:
    """Read a JSON object; raise ValueError or TypeError for any other text."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise TypeError(f"not a JSON object: {text!r:.80}")
    return value
