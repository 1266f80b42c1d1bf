"""The HTTP server of `ckpt serve`: a page, its files, and the data that it requests. It answers GET only.

No part of a request becomes a path: a file is a row of `_FILES`, and a run is a name in the table. Texts of a
run reach the browser only as JSON, and the page's security policy allows no scripts but the server's own.
"""

from __future__ import annotations

import json
import logging
import math
import socket
import sys
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from ckpt_tasks.cli.serving.access import Access
from ckpt_tasks.cli.serving.run_table import RunTable
from ckpt_tasks.cli.serving.runs import OpenRuns
from ckpt_tasks.errors import CheckpointNotFoundError, CkptError
from ckpt_tasks.run.ledger.goodput import Course
from ckpt_tasks.run.overview import Look
from ckpt_tasks.run.report.prometheus import Runs

_JSON, _TEXT = "application/json", "text/plain; charset=utf-8"
_FILES = {
    "/": ("cli.serving", "page.html", "text/html; charset=utf-8"),
    "/page.js": ("cli.serving", "page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("cli.serving", "page.css", "text/css; charset=utf-8"),
    "/chart.js": ("run.report", "chart.js", "text/javascript; charset=utf-8"),
    "/chart.css": ("run.report", "chart.css", "text/css; charset=utf-8"),
    "/uPlot.js": ("run.report", "uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/uPlot.css": ("run.report", "uPlot.min.css", "text/css; charset=utf-8"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_MOST_POINTS, _MOST_METRICS = 1_000_000, 64  # All points of a metric, for a CSV file.
_IDLE_S = 60.0
# Read whole ledgers for this long before each answer to Prometheus, which waits for 10 s, and after the answer.
_SCRAPE_S, _AFTER_S = 1.0, 5.0

_log = logging.getLogger("ckpt_tasks")


class PageServer(ThreadingHTTPServer):
    """Serve the runs of a table; port 0 selects any free port. Raises OSError if the address cannot be used."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, table: RunTable, host: str, port: int, token: str | None):
        self.table, self.runs = table, OpenRuns()
        super().__init__((host, port), _Request)
        self.access = Access(host, self.server_address[1], token)
        self.measured = Runs(lambda: table.looks(_SCRAPE_S), self._course)
        self.metrics = CollectorRegistry(auto_describe=False)
        self.metrics.register(self.measured)

    def _course(self, name: str, look: Look) -> Course:
        store = self.table.stores.get(name)
        if store is None:
            raise CheckpointNotFoundError(f"the run {name!r:.200} is gone")
        return self.runs.ask(name, store, lambda run: run.course(), keep=look.summary.state == "running")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over a client that leaves before its answer; report anything else as the base class does."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def server_bind(self) -> None:
        """Bind the socket; the standard library would also look up the host's name, which can take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()


class _Request(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        try:
            query = {name: values[-1] for name, values in parse_qs(url.query, max_num_fields=20).items()}
        except ValueError:
            self._answer(400, _TEXT, b"the question has more than 20 fields")
            return
        access = self.server.access
        refused = access.refusal(self.headers, query.get("token"))
        if refused is not None:
            self._answer(refused[0], _TEXT, refused[1].encode())
        elif url.path == "/" and access.token is not None and "token" in query:
            cookie = f"{access.cookie}={quote(access.token, safe='')}; HttpOnly; SameSite=Strict; Path=/"
            self._answer(303, _TEXT, b"", {"Location": "/", "Set-Cookie": cookie})
        elif url.path in _FILES:
            package, name, kind = _FILES[url.path]
            self._answer(200, kind, files(f"ckpt_tasks.{package}").joinpath("page", name).read_bytes())
        elif url.path == "/metrics":
            self._measure()
        elif url.path in _QUESTIONS:
            self._ask(_QUESTIONS[url.path], query)
        else:
            self._answer(404, _TEXT, b"there is no such page")

    def _ask(
        self, question: Callable[[PageServer, Mapping[str, str]], dict[str, Any]], query: Mapping[str, str]
    ) -> None:
        try:
            status, answer = 200, question(self.server, query)
        except KeyError as error:
            status, answer = 404, {"error": f"there is no run {error.args[0]!r:.200}"}
        except (ValueError, RecursionError) as error:
            status, answer = 400, {"error": f"the question makes no sense: {error!s:.200}"}
        except CkptError as error:
            status, answer = 503, {"error": str(error)}
        self._answer(status, _JSON, json.dumps(answer, allow_nan=False, separators=(",", ":")).encode())

    def _measure(self) -> None:
        """Return the metrics known now; then continue reading, so that the next answer has more."""
        try:
            looks = self.server.table.looks(_SCRAPE_S)
            self.server.measured.read(looks, _SCRAPE_S)
            body = generate_latest(self.server.metrics)
        except CkptError as error:
            self._answer(503, _TEXT, str(error).encode())
            return
        self._answer(200, CONTENT_TYPE_LATEST, body)
        self.server.measured.read(looks, _AFTER_S)

    def _answer(self, status: int, kind: str, body: bytes, more: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **(more or {}), "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "ckpt"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base class names it so)
        _log.debug(format, *args)


def _runs(server: PageServer, query: Mapping[str, str]) -> dict[str, Any]:
    return server.table.since(int(query.get("since", "-1")))


def _about(server: PageServer, query: Mapping[str, str]) -> dict[str, Any]:
    name = query.get("run", "")
    return server.runs.ask(name, server.table.stores[name], lambda run: run.about())


def _curves(server: PageServer, query: Mapping[str, str]) -> dict[str, Any]:
    name, by = query.get("run", ""), query.get("by", "step")
    names = json.loads(query.get("metrics", "[]"))
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names) or by not in ("step", "time"):
        raise ValueError("metrics is a list of names, and by is step or time")
    low, high = float(query.get("low", "-inf")), float(query.get("high", "inf"))
    most = min(_MOST_POINTS, max(2, int(query.get("most", "1000"))))
    if math.isnan(low) or math.isnan(high):
        raise ValueError("low and high are numbers")
    return server.runs.ask(
        name,
        server.table.stores[name],
        lambda run: run.curves(names[:_MOST_METRICS], by=by, low=low, high=high, most=most),
    )


_QUESTIONS: dict[str, Callable[[PageServer, Mapping[str, str]], dict[str, Any]]] = {
    "/api/runs": _runs,
    "/api/run": _about,
    "/api/curves": _curves,
}
