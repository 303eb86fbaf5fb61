"""Messages between supervisor and shard process."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.paramserver.config.server_settings import ServerConfig, ShardConfig
from headrace.paramserver.shard.control_channel import ShardOrder, ShardReport
from headrace.schemas.errors import ProtocolError


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
