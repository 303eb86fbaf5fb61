"""A headless Chromium, driven over its debugging pipe: no port, no driver, no library."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WAIT_S = 60.0
# What the browser says of a script whose page has been left.
_LEFT = ("Inspected target navigated or closed", "Execution context was destroyed.", "Promise was collected")


class Tab:
    """One page of the browser.

    Attributes:
        complaints: What the browser has said against the page: uncaught errors, violations of its own policy.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self._loaded: set[str] = set()  # documents, with all that they include
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def call(self, method: str, **params: Any) -> Any:
        """Ask the browser for something and return its answer."""
        told = self._ask(method, **params)
        assert "error" not in told, told
        return told["result"]

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + WAIT_S
        while True:
            told = self._next(deadline_s)
            if told.get("id") == self._number:
                return told

    def _next(self, deadline_s: float) -> dict[str, Any]:
        """Return the browser's next answer or event, which is noted."""
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(deadline_s - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            part = os.read(self._from, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(text)
        method, params = told.get("method"), told.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif method == "Page.lifecycleEvent" and params["name"] == "load":
            self._loaded.add(params["loaderId"])
        return told

    def evaluate(self, script: str) -> Any:
        """Return what an expression, or the promise that it gives, comes to."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Return when an expression is true, on this page or on one that is on its way."""
        script = (
            "new Promise((done) => { const look = () => "
            f"{{ if ({condition}) done(true); else requestAnimationFrame(look); }}; look(); }})"
        )
        deadline_s = time.monotonic() + WAIT_S
        told = self._ask("Runtime.evaluate", expression=script, awaitPromise=True)
        while told.get("error", {}).get("message") in _LEFT:
            assert time.monotonic() < deadline_s, told
            told = self._ask("Runtime.evaluate", expression=script, awaitPromise=True)
        assert "error" not in told and "exceptionDetails" not in told["result"], told

    def open(self, url: str, *, width: int = 1280, is_dark: bool = False) -> None:
        """Show a page in a window of a width."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        # The page that is left goes on for a while, and it may have the same address.
        told, deadline_s = self.call("Page.navigate", url=url), time.monotonic() + WAIT_S
        assert "errorText" not in told, told
        while told["loaderId"] not in self._loaded:
            self._next(deadline_s)

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser_tab() -> Iterator[Tab]:
    """Run a browser of its own profile; yield its one tab."""
    assert CHROMIUM is not None
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    with tempfile.TemporaryDirectory(prefix="headrace-browser-", ignore_cleanup_errors=True) as profile:
        # The browser has its pipe under the numbers 3 and 4, whatever they are here.
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command += ["--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        shell = f'exec "$@" 3<&{to_read} 4>&{from_write}'
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(to_read, from_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(from_write)
        try:
            yield Tab(to_write, from_read)
        finally:
            os.close(to_write)
            os.close(from_read)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
