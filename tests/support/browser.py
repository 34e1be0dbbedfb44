"""A headless Chromium that opens a file and reports console messages, requests, and the content of the page.

Pipes with the DevTools protocol control the browser, which has a separate profile and no background networking.
"""

from __future__ import annotations

import base64
import json
import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed (apt-get install chromium)")
"""Mark for tests that open a browser."""
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions",
    "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip
_SECONDS = 60.0
_LOUD = ("error", "warning", "assert")

_CHART_NAMES = "[...document.querySelectorAll('.chart')].map(chart => chart.getAttribute('aria-label'))"
_WATCH_FOCUS = """
var controls = document.querySelectorAll("a[href], input, select, button, summary, [tabindex]");
var waiting = new Set([...controls].filter(control => control.checkVisibility()));
document.addEventListener("focusin", event => waiting.delete(event.target));
document.activeElement.blur();
window.scrollTo(0, 0);
"""


class Page:
    """A page in the browser."""

    def __init__(self, commands: int, answers: int) -> None:
        """Connect to the browser. `commands` and `answers` are ends of pipes."""
        self._commands, self._answers, self._number, self._session = commands, answers, 0, ""
        self._selector, self._rest = selectors.DefaultSelector(), b""
        self._selector.register(answers, selectors.EVENT_READ)
        self.complaints: list[str] = []
        """Exceptions of the page, and errors and warnings of the console."""
        self.requests: list[str] = []
        """Addresses of requests of the page, without `data:` and `blob:`."""
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the protocol and return the result. Raises AssertionError if the command fails or exceeds
        the time limit."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == self._number:
                assert "result" in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result
        raise AssertionError(f"no answer to {method}")

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression is true. Raises AssertionError after a time limit."""
        until = time.monotonic() + _SECONDS
        while not self.value(expression):
            assert time.monotonic() < until, (expression, self.complaints)
            self.value("new Promise(done => setTimeout(done, 50))")

    def value(self, expression: str) -> Any:
        """Evaluate a JavaScript expression and return its value in JSON types. Promises are awaited."""
        answer = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, path: Path, *, width: int = 1300, height: int = 900, dark: bool = False) -> None:
        """Load a file in a window of the given size in pixels."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self.command("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.readyState === 'complete'")

    def press(self, key: str) -> None:
        """Press and release a key."""
        codes = {"Tab": 9, "ArrowRight": 39, " ": 32}
        for kind in ("keyDown", "keyUp"):
            self.command("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def charts(self) -> dict[str, int]:
        """Return the number of marks (lines, points, bars) of each chart by name. Each chart is scrolled into view,
        because charts are drawn only when they are visible. Raises AssertionError if a chart is not drawn."""
        return {name: self._marks(at) for at, name in enumerate(self.value(_CHART_NAMES))}

    def _marks(self, at: int) -> int:
        chart = f"document.querySelectorAll('.chart')[{at}]"
        self.value(f"{chart}.scrollIntoView()")
        self.wait_for(f"{chart}.querySelector('.main-svg') !== null")
        return int(self.value(f"{chart}.querySelectorAll('.js-line, .js-fill, .points path').length"))

    def out_of_reach(self) -> list[str]:
        """Return the controls that Tab does not reach from the top of the page."""
        self.value(_WATCH_FOCUS)
        for _ in range(int(self.value("waiting.size")) + 1):
            self.press("Tab")
        controls: list[str] = self.value("[...waiting].map(element => element.outerHTML.slice(0, 200))")
        return controls

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write a PNG of the window, or of the complete page with `whole`."""
        answer = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Return the answers of the browser until the time limit. Events are recorded."""
        until = time.monotonic() + _SECONDS
        while time.monotonic() < until:
            *messages, self._rest = self._rest.split(b"\0")
            for at, message in enumerate(messages):
                answer = json.loads(message)
                self._note(answer.get("method"), answer.get("params", {}))
                if "id" in answer:
                    self._rest = b"\0".join([*messages[at + 1 :], self._rest])
                    yield answer
                    return
            if self._selector.select(until - time.monotonic()):
                self._rest += os.read(self._answers, 2**20)

    def _note(self, event: str | None, parameters: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and parameters["type"] in _LOUD:
            self.complaints.append(json.dumps(parameters["args"]))
        elif event == "Log.entryAdded" and parameters["entry"]["level"] in _LOUD:
            self.complaints.append(parameters["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            address = parameters["request"]["url"]
            self.requests += [] if address.startswith(("data:", "blob:")) else [address]


@contextmanager
def browser(folder: Path, options: Sequence[str] = ()) -> Iterator[Page]:
    """Start a browser with its profile in `folder` and yield a page. The browser ends with the block."""
    assert PROGRAM is not None
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    command = [PROGRAM, *_OPTIONS, *options, f"--user-data-dir={folder}", "about:blank"]
    # The browser reads commands from descriptor 3 and writes to descriptor 4, which must be open at its start.
    script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", *command], pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Page(ours_out, ours_in)
    finally:
        process.kill()
        process.wait()
        os.close(ours_out)
        os.close(ours_in)
