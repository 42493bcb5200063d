"""Headless Chromium, driven over its DevTools protocol: enough to open a file, act on it and look."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--remote-debugging-port=0",
)
START_S, ANSWER_S = 60, 60


def find() -> str | None:
    """The path of a browser of the Chromium family; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. ``messages`` are the console's and the exceptions'; ``requests`` the URLs that were asked for."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._events: list[dict[str, Any]] = []
        self.messages: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._socket.recv(timeout=ANSWER_S))
        params = answer.get("params", {})
        if answer.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.messages.append(details.get("exception", {}).get("description", details["text"]))
        elif answer.get("method") == "Log.entryAdded":
            self.messages.append(params["entry"]["text"])
        elif answer.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        if "method" in answer:
            self._events.append(answer)
        return answer

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        scale = 2 if phone else 1
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)

    def open(self, path: Path) -> None:
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression. Raises AssertionError with its exception."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def mouse(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def tap(self, x: float, y: float) -> None:
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def pdf(self, path: Path) -> None:
        reply = self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        path.write_bytes(base64.b64decode(reply["data"]))


@contextmanager
def page(browser: str) -> Iterator[Page]:
    """A fresh browser with a fresh profile and one tab; both are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="pdlab-browser-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [browser, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port, path = _endpoint(Path(profile), process)
            with connect(f"ws://127.0.0.1:{port}{path}", max_size=None) as whole:
                whole.send(json.dumps({"id": 1, "method": "Target.getTargets"}))
                while "result" not in (answer := json.loads(whole.recv(timeout=ANSWER_S))):
                    pass
                target = next(t["targetId"] for t in answer["result"]["targetInfos"] if t["type"] == "page")
            with connect(f"ws://127.0.0.1:{port}/devtools/page/{target}", max_size=None) as socket:
                yield Page(socket)
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _endpoint(profile: Path, process: subprocess.Popen[bytes]) -> tuple[str, str]:
    """Port and path from the file that the browser writes when it listens."""
    until = time.monotonic() + START_S
    file = profile / "DevToolsActivePort"
    while time.monotonic() < until:
        assert process.poll() is None, f"the browser ended with {process.returncode}"
        lines = file.read_text().split() if file.exists() else []
        if len(lines) == 2:
            return lines[0], lines[1]
        time.sleep(0.05)
    raise AssertionError(f"the browser did not listen within {START_S} s")
