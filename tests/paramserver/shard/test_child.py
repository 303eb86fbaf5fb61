"""A shard process as its supervisor sees it: messages and hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.paramserver.config.server_settings import ServerConfig, ShardConfig
from headrace.paramserver.shard.child import HangDetector, ShardOrder, ShardReport
from headrace.schemas.errors import ProtocolError


def test_ten_looks_in_a_row_are_a_hang() -> None:
    """A look at which the loop has run resets the count, and so does a hang."""
    detector = HangDetector(300.0)
    assert detector.interval_s == 30.0
    looks = [False] * 9 + [True] + [False] * 20
    assert [detector.look(has_run=has_run) for has_run in looks] == [False] * 19 + [True] + [False] * 9 + [True]


@pytest.mark.parametrize("timeout_s", [0, 0.0])
def test_a_timeout_of_zero_detects_nothing(timeout_s: float) -> None:
    assert HangDetector(timeout_s).interval_s is None


def _order() -> ShardOrder:
    config = ShardConfig.of_server(
        ServerConfig(data=Path("/d")),
        directory=Path("/d/s\n0"),
        shard=0,
        server_id="x",
        addresses=(("::1", 1), ("gate", 2)),
    )
    return ShardOrder(config=config, socket_fd=5, report_fd=6, log_level="info", log_format="json")


def test_order_round_trip() -> None:
    """An order is one line and decodes to itself."""
    line = _order().encode()
    assert line.count(b"\n") == 1
    assert ShardOrder.decode(line) == _order()


@pytest.mark.parametrize("report", [ShardReport(is_ready=True), ShardReport(error="a\nb"), ShardReport()])
def test_report_round_trip(report: ShardReport) -> None:
    """A report is one line and decodes to itself."""
    assert report.encode().count(b"\n") == 1
    assert ShardReport.decode(report.encode()) == report


@pytest.mark.parametrize("line", [b"", b"{}", b"[]", b"\xff", b'{"config": {}}', b'{"config": 3}'])
def test_wrong_order(line: bytes) -> None:
    """A line that is no order is a ProtocolError."""
    with pytest.raises(ProtocolError):
        ShardOrder.decode(line)


@pytest.mark.parametrize("line", [b"", b"[]", b"\xff", b'{"ready": 1}', b"ready"])
def test_wrong_report(line: bytes) -> None:
    """A line that is no report is a ProtocolError."""
    with pytest.raises(ProtocolError):
        ShardReport.decode(line)
