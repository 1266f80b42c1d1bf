"""The metadata server of a cloud's host, with the answers that its documentation has, and with wrong ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

VARIABLES = {
    "aws": "AWS_EC2_METADATA_SERVICE_ENDPOINT",
    "google": "GCE_METADATA_HOST",
    "azure": "AZURE_POD_IDENTITY_AUTHORITY_HOST",
}
CLOUDS = tuple(VARIABLES)
TIMES = "2026-01-05T18:02:00Z"
NAME = "trainer_7"


class Metadata:
    """What the server knows of its host, and what it was asked; `wrong` is a status or a text to answer with."""

    def __init__(self) -> None:
        self.port = 0
        self.asked: list[str] = []
        self.refused: list[str] = []  # Requests without what the cloud demands.
        self.preempted = threading.Event()
        self.likely = False
        self.events: list[dict[str, Any]] = []
        self.token = "token 1"
        self.wrong: int | str | None = None
        self.go = threading.Event()  # If cleared, nothing is answered.
        self.go.set()

    def environment(self, cloud: str) -> dict[str, str]:
        """Return what leads to this server instead of the host's own."""
        host = f"127.0.0.1:{self.port}"
        return {VARIABLES[cloud]: host if cloud == "google" else f"http://{host}"}

    def preempt(self, machine: str = NAME) -> None:
        """Announce that the host, or another machine of its set, is taken away."""
        self.events.append(
            {
                "EventId": "A123BC45-1234-5678-AB90-ABCDEF123456",
                "EventStatus": "Scheduled",
                "EventType": "Preempt",
                "ResourceType": "VirtualMachine",
                "Resources": [machine],
                "NotBefore": "Mon, 05 Jan 2026 18:02:00 GMT",
                "Description": "",
                "EventSource": "Platform",
                "DurationInSeconds": -1,
            }
        )
        if machine == NAME:
            self.preempted.set()

    def answer(self, method: str, path: str, query: dict[str, list[str]], headers: Any) -> tuple[int, str, str]:
        """Return the status, the text and the ETag for a request."""
        if self.wrong is not None:
            return (self.wrong, "", "") if isinstance(self.wrong, int) else (200, self.wrong, "")
        if path == "/latest/api/token":
            fits = method == "PUT" and headers["X-aws-ec2-metadata-token-ttl-seconds"] == "21600"
            return (200, self.token, "") if fits else (400, "", "")
        if path.startswith("/latest/"):
            if headers["X-aws-ec2-metadata-token"] != self.token:
                return 401, "", ""
            if path.endswith("/spot/instance-action") and self.preempted.is_set():
                return 200, json.dumps({"action": "terminate", "time": TIMES}), ""
            if path.endswith("/events/recommendations/rebalance") and self.likely:
                return 200, json.dumps({"noticeTime": TIMES}), ""
            return 404, "", ""
        if path == "/computeMetadata/v1/instance/preempted":
            return self._google(query, headers)
        if headers["Metadata"] != "true":
            return 400, "", ""
        if path == "/metadata/instance/compute/name":
            return 200, NAME, ""
        if path == "/metadata/scheduledevents" and query["api-version"] == ["2020-07-01"]:
            return 200, json.dumps({"DocumentIncarnation": 1 + len(self.events), "Events": self.events}), ""
        return 404, "", ""

    def _google(self, query: dict[str, list[str]], headers: Any) -> tuple[int, str, str]:
        if headers["Metadata-Flavor"] != "Google":
            return 403, "", ""
        if query.get("wait_for_change") == ["true"] and query["last_etag"] == [self._etag()]:
            self.preempted.wait(float(query["timeout_sec"][0]))
        return 200, "TRUE" if self.preempted.is_set() else "FALSE", self._etag()

    def _etag(self) -> str:
        return f"etag{int(self.preempted.is_set())}"


@contextmanager
def metadata() -> Iterator[Metadata]:
    """Run a metadata server in this process."""
    known = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            known.asked.append(f"{self.command} {self.path}")
            known.go.wait()
            status, text, etag = known.answer(self.command, url.path, parse_qs(url.query), self.headers)
            if status not in (200, 404):
                known.refused.append(f"{status} {self.path}")
            try:
                self.send_response(status)
                if etag:
                    self.send_header("ETag", etag)
                self.end_headers()
                self.wfile.write(text.encode())
            except OSError:  # The process that had asked has ended.
                self.close_connection = True

        do_PUT = do_GET  # noqa: N815 (a name of http.server)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    known.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield known
    finally:
        known.go.set()
        known.preempted.set()
        server.shutdown()
        thread.join()
        server.server_close()
