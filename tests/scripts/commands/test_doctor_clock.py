"""`headrace doctor --metrics`: whose clock is off, and by how much, whichever of the two is ahead."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.scripts.commands import doctor_checks
from headrace.scripts.commands.doctor import check_clock

NOW_S = 1_700_000_000.0


class _Metrics(HTTPServer):
    """A metrics port whose clock shows what it is told to."""

    time_s = NOW_S


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, _Metrics) and self.path == "/status.json"
        body = json.dumps({"time_s": self.server.time_s}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def metrics() -> Iterator[_Metrics]:
    """A port that answers."""
    with _Metrics(("127.0.0.1", 0), _Page) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield server
        finally:
            server.shutdown()
            serving.join()


@pytest.mark.parametrize(
    ("ahead_s", "level", "text"),
    [
        (0.0, "ok", "are less than 0.001 s apart"),
        (0.75, "ok", "are 0.750 s apart"),
        (-0.75, "ok", "are 0.750 s apart"),
        (1.25, "problem", "are 1.250 s apart"),
        (-1.25, "problem", "are 1.250 s apart"),
        (3600.0, "problem", "are 3600.000 s apart"),
        (-3600.0, "problem", "are 3600.000 s apart"),
    ],
)
def test_a_clock_that_is_off_either_way(
    metrics: _Metrics, monkeypatch: pytest.MonkeyPatch, ahead_s: float, level: str, text: str
) -> None:
    """A server that is ahead of this machine by more than a second is a problem, and so is one that is behind."""
    monkeypatch.setattr("headrace.scripts.commands.doctor.time", SimpleNamespace(time=lambda: NOW_S))
    metrics.time_s = NOW_S + ahead_s
    finding = check_clock(f"127.0.0.1:{metrics.server_port}")
    assert (finding.level, text in finding.text) == (doctor_checks.Level(level), True), finding
    assert bool(finding.advice) == (level == "problem")
