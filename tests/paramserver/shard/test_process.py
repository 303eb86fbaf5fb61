"""The shard process: its reports, its exit code and how it stops."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import pytest
from held_ports import hold_ports

from headrace.paramserver.config.server_settings import ServerConfig, ShardConfig
from headrace.paramserver.shard.child import (
    EXIT_CONFIG,
    EXIT_DISK_FULL,
    EXIT_ERROR,
    EXIT_FENCED,
    EXIT_OK,
    EXIT_STORAGE,
    EXIT_TAKEN_OVER,
    ShardOrder,
    ShardReport,
)

FAKE = Path(__file__).parents[2] / "support" / "shard_process_with_fake.py"


@dataclass
class _Started:
    process: subprocess.Popen[bytes]
    reports: IO[bytes]
    address: tuple[str, int]

    def next_report(self) -> ShardReport | None:
        line = self.reports.readline()
        return ShardReport.decode(line) if line else None

    def next_line(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def wait(self) -> int:
        return self.process.wait(60)


@contextlib.contextmanager
def _started(tmp_path: Path, behaviour: str) -> Iterator[_Started]:
    read_fd, write_fd = os.pipe()
    # The port is held, so that nobody else listens there once the process has closed it.
    with socket.create_server(("127.0.0.1", hold_ports())) as sock, open(read_fd, "rb") as reports:
        address = sock.getsockname()
        order = ShardOrder(
            config=ShardConfig.of_server(
                ServerConfig(data=tmp_path), directory=tmp_path, shard=0, server_id="x", addresses=(address,)
            ),
            socket_fd=sock.fileno(),
            report_fd=write_fd,
            log_level="debug",
            log_format="json",
        )
        with subprocess.Popen(
            [sys.executable, str(FAKE), behaviour],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(sock.fileno(), write_fd),
        ) as process:
            os.close(write_fd)
            sock.close()  # now only the process has it
            try:
                stdin = cast(IO[bytes], process.stdin)
                stdin.write(order.encode())
                stdin.flush()
                yield _Started(process, reports, address)
            finally:
                process.kill()


@pytest.mark.parametrize("how", ["SIGTERM", "stdin"])
def test_serves_until_stopped(tmp_path: Path, how: str) -> None:
    """It reports when it is ready; on SIGTERM or the end of stdin it closes socket and shard and ends."""
    with _started(tmp_path, "serves") as started:
        assert started.next_report() == ShardReport(is_ready=True)
        socket.create_connection(started.address, timeout=30).close()
        _end(started, how)
        assert started.wait() == EXIT_OK
        assert (started.next_line(), started.next_line()) == (b"opening\n", b"closed\n")
        assert started.next_report() is None
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(started.address, timeout=30)


def test_stops_while_it_opens(tmp_path: Path) -> None:
    """A stop cancels a shard that is still opening."""
    with _started(tmp_path, "never opens") as started:
        assert started.next_line() == b"opening\n"
        _end(started, "SIGTERM")
        assert started.wait() == EXIT_OK
        assert started.next_report() is None


def _end(started: _Started, how: str) -> None:
    if how == "stdin":
        cast(IO[bytes], started.process.stdin).close()
    else:
        started.process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("behaviour", "exit_code", "error"),
    [
        ("fails", EXIT_STORAGE, "log record 7 is rotten"),
        ("full", EXIT_DISK_FULL, "no room"),
        ("fenced", EXIT_FENCED, "another process has the log"),
        ("taken over", EXIT_TAKEN_OVER, "another process has the log"),
        ("wrong", EXIT_CONFIG, "no such policy"),
        ("away", EXIT_ERROR, "try again"),
        ("bug", EXIT_ERROR, "ZeroDivisionError: by zero"),
    ],
)
def test_reports_its_error(tmp_path: Path, behaviour: str, exit_code: int, error: str) -> None:
    """Its last report is the error, and the exit code says whether a restart may help."""
    with _started(tmp_path, behaviour) as started:
        reports = [report for report in iter(started.next_report, None) if report is not None]
        assert reports[-1] == ShardReport(error=error)
        assert started.wait() == exit_code


def test_ends_without_an_order() -> None:
    """If the supervisor is gone before its order, the process ends quietly."""
    done = subprocess.run(
        [sys.executable, "-m", "headrace.paramserver.shard.process"], input=b"", capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (EXIT_OK, b"", b"")
