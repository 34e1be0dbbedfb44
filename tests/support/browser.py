"""A headless Chromium that opens a file and says what happened: messages of the console, requests, what stands there.

Driven by the DevTools protocol over two pipes, with a profile of its own and no background networking.
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
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium (apt-get install chromium)")
"""For tests that open one."""
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
        """`commands`, `answers`: ends of pipes."""
        self._commands, self._answers, self._number, self._session = commands, answers, 0, ""
        self._selector, self._rest = selectors.DefaultSelector(), b""
        self._selector.register(answers, selectors.EVENT_READ)
        self.complaints: list[str] = []
        """Exceptions of the page, and errors and warnings of the console."""
        self.requests: list[str] = []
        """Addresses that the page asked for, `data:` and `blob:` aside."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **given: Any) -> dict[str, Any]:
        """The answer to a command of the protocol. Raises AssertionError where it fails, or takes too long."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": given}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        for told in self._told():
            if told.get("id") == self._number:
                assert "result" in told, (method, told)
                found: dict[str, Any] = told["result"]
                return found
        raise AssertionError(f"no answer to {method}")

    def wait_for(self, expression: str) -> None:
        """Until JavaScript holds. Raises AssertionError where it does not."""
        until = time.monotonic() + _SECONDS
        while not self.value(expression):
            assert time.monotonic() < until, (expression, self.complaints)
            self.value("new Promise(done => setTimeout(done, 50))")

    def value(self, expression: str) -> Any:
        """What JavaScript evaluates to, in JSON's types; promises are awaited."""
        told = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def open(self, path: Path, *, width: int = 1300, height: int = 900, dark: bool = False) -> None:
        """Load a file, in a window of so many pixels."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.readyState === 'complete'")

    def press(self, key: str) -> None:
        """A key, down and up."""
        codes = {"Tab": 9, "ArrowRight": 39, " ": 32}
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def charts(self) -> dict[str, int]:
        """The number of marks (lines, points, bars) of each chart by name. Each is scrolled into view, where it is
        drawn. Raises AssertionError where one is not."""
        return {name: self._marks(at) for at, name in enumerate(self.value(_CHART_NAMES))}

    def _marks(self, at: int) -> int:
        chart = f"document.querySelectorAll('.chart')[{at}]"
        self.value(f"{chart}.scrollIntoView()")
        self.wait_for(f"{chart}.querySelector('.main-svg') !== null")
        return int(self.value(f"{chart}.querySelectorAll('.js-line, .js-fill, .points path').length"))

    def out_of_reach(self) -> list[str]:
        """Controls that Tab does not come to, from the top of the page."""
        self.value(_WATCH_FOCUS)
        for _ in range(int(self.value("waiting.size")) + 1):
            self.press("Tab")
        found: list[str] = self.value("[...waiting].map(element => element.outerHTML.slice(0, 200))")
        return found

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of the window, or of the `whole` page."""
        told = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(told["data"]))

    def _told(self) -> Iterator[dict[str, Any]]:
        """Messages of the browser, those of events noted, until none comes in time."""
        until = time.monotonic() + _SECONDS
        while time.monotonic() < until:
            *messages, self._rest = self._rest.split(b"\0")
            for at, message in enumerate(messages):
                told = json.loads(message)
                self._note(told.get("method"), told.get("params", {}))
                if "id" in told:
                    self._rest = b"\0".join([*messages[at + 1 :], self._rest])
                    yield told
                    return
            if self._selector.select(until - time.monotonic()):
                self._rest += os.read(self._answers, 2**20)

    def _note(self, event: str | None, given: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(given["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and given["type"] in _LOUD:
            self.complaints.append(json.dumps(given["args"]))
        elif event == "Log.entryAdded" and given["entry"]["level"] in _LOUD:
            self.complaints.append(given["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            address = given["request"]["url"]
            self.requests += [] if address.startswith(("data:", "blob:")) else [address]


@contextmanager
def browser(folder: Path, options: Sequence[str] = ()) -> Iterator[Page]:
    """A page of a new browser with its profile in `folder`, which ends with the block."""
    assert PROGRAM is not None
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    words = [PROGRAM, *_OPTIONS, *options, f"--user-data-dir={folder}", "about:blank"]
    # The browser reads commands from descriptor 3 and writes to 4, which its program is to find open.
    script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", *words], pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL
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
