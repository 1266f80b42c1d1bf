"""A real Chromium, driven through its DevTools protocol; a test that needs one skips where it is not installed."""

from __future__ import annotations

import base64
import itertools
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect
from websockets.sync.connection import Connection

_PATIENCE_S = 60.0


class Page:
    """One page of a browser: go somewhere, evaluate an expression, wait until one is true, press and drag."""

    def __init__(self, line: Connection):
        self._line, self._numbers = line, itertools.count(1)
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        self._line.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(self._line.recv(timeout=_PATIENCE_S))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self._hear(answer)

    def _hear(self, event: Any) -> None:
        params = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    def go(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url="about:blank")  # Otherwise another part after # would only move within the page.
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def until(self, expression: str) -> Any:
        """Evaluate an expression until it is true, and return its value."""
        last, until_s = None, time.monotonic() + _PATIENCE_S
        while time.monotonic() < until_s:
            last = self.value(f"(() => {{ try {{ return {expression}; }} catch (error) {{ return null; }} }})()")
            if last:
                return last
            time.sleep(0.05)
        raise AssertionError(
            f"never true: {expression}; {last!r}; {self.errors}; {self.value('document.body.innerText')[:600]}"
        )

    def mouse(self, kind: str, x: float, y: float) -> None:
        pressed = {"button": "left", "buttons": 1, "clickCount": 1} if kind != "mouseMoved" else {}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **pressed)

    def drag(self, x: float, y: float, to_x: float) -> None:
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y)
        for n in range(1, 6):
            at_x = x + (to_x - x) * n / 5
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=at_x, y=y, button="left", buttons=1)
        self.mouse("mouseReleased", to_x, y)

    def key(self, name: str) -> None:
        text = {"text": name} if len(name) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, code=name, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name, code=name)

    def box(self, selector: str) -> dict[str, float]:
        """Return where an element is: x, y, width and height, after it was scrolled into sight."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{found}.scrollIntoView({{block: 'center'}})")
        place: dict[str, float] = self.value(f"{found}.getBoundingClientRect().toJSON()")
        return place

    def picture(self, place: Path) -> None:
        place.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browser(directory: Path) -> Iterator[Page]:
    """Start a browser with a profile in this directory, and yield its page."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("chromium is not installed: apt install chromium")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0"]
    profile = directory / "profile"
    started = subprocess.Popen(
        [program, *options, f"--user-data-dir={profile}", "about:blank"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert started.stderr is not None
        lines = iter(started.stderr.readline, "")
        port = next(match[1] for line in lines if (match := re.search(r"ws://127\.0\.0\.1:(\d+)/", line)))
        with connect(_page_of(port), max_size=None, proxy=None, ping_interval=None) as line:
            yield Page(line)
    finally:
        started.kill()
        started.communicate()


def _page_of(port: str) -> str:
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=_PATIENCE_S) as answer:
        [page, *_] = [one for one in json.load(answer) if one["type"] == "page"]
    url: str = page["webSocketDebuggerUrl"]
    return url
