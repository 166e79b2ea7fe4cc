"""Headless Chromium over its debugging pipe, with nothing but the standard library."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BINARY = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
TIMEOUT = 60.0


class Page:
    """One tab: evaluate JavaScript, press keys, take screenshots; whatever it complains of is in `complaints`."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer, self._number, self._session = b"", 0, ""
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def attach(self) -> None:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call one method of the DevTools protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._number:
                assert "error" not in found, f"{method}: {found['error']}"
                return found["result"]
            self._note(found)

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._answers, 1 << 20)
            assert part, "the browser is gone"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"]))
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif event["method"] == "Page.javascriptDialogOpening":
            self.complaints.append(f"dialog: {params['message']}")
        elif event["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, path: Path, *, width: int = 1024, height: int = 900, dark: bool = False) -> None:
        """Load a file at a width, and wait for its script."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState === 'complete' && document.documentElement.dataset.ready === '1'")

    def wait(self, condition: str) -> None:
        """Until a JavaScript expression is true."""
        deadline = time.monotonic() + TIMEOUT
        while not self.run(condition):
            assert time.monotonic() < deadline, f"still false: {condition}; {self.complaints}"
            time.sleep(0.05)

    def press(self, key: str, code: int, *, modifiers: int = 0) -> None:
        """One key, down and up, as a reader presses it."""
        for kind in ("rawKeyDown", "keyUp"):
            facts = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
            self.send("Input.dispatchKeyEvent", type=kind, **facts)

    def mouse(self, kind: str, x: float, y: float) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def screenshot(self, path: Path) -> bytes:
        """The whole page as PNG."""
        content = base64.b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"])
        path.write_bytes(content)
        return content

    def pdf(self) -> bytes:
        return base64.b64decode(self.send("Page.printToPDF", printBackground=True)["data"])


@contextmanager
def browser() -> Iterator[Page]:
    """A browser of its own, gone afterwards."""
    assert BINARY is not None
    to_read, commands = os.pipe()
    answers, to_write = os.pipe()
    # The browser reads its commands from descriptor 3 and answers on 4; the shell puts the pipes there.
    wiring = f'exec "$@" 3<&{to_read} 4>&{to_write}'
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [BINARY, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--hide-scrollbars", "--no-first-run", f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        process = subprocess.Popen(
            ["bash", "-c", wiring, "bash", *command],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        try:
            page = Page(commands, answers)
            page.attach()
            yield page
        finally:
            process.kill()
            process.wait()
            os.close(commands)
            os.close(answers)
