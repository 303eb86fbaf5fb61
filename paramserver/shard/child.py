"""One shard process as seen by its supervisor: start it, read its reports, notice when it hangs, end it.

Messages go down on the process's stdin: the `ShardOrder`, one line of JSON. Then the pipe stays open. Its end means
that the supervisor is gone, and the process shows that its event loop runs by reading a byte now and then. Up, on a
second pipe: each `ShardReport`, one line of JSON. Finally, the exit code says whether a restart makes sense.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import sys
import termios
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Self

from headrace.paramserver.config.server_settings import ShardConfig
from headrace.schemas.errors import ProtocolError

__all__ = [
    "EXIT_CONFIG",
    "EXIT_DISK_FULL",
    "EXIT_ERROR",
    "EXIT_FENCED",
    "EXIT_INTERRUPTED",
    "EXIT_OK",
    "EXIT_STORAGE",
    "EXIT_TAKEN_OVER",
    "SHARD_COMMAND",
    "HangDetector",
    "ShardChild",
    "ShardOrder",
    "ShardReport",
    "describe_exit",
    "run_child",
]

EXIT_OK = 0
EXIT_ERROR = 1  # a restart may help
EXIT_CONFIG = 2  # the configuration cannot work, so a restart does not help
EXIT_STORAGE = 3  # the disk failed or its data is damaged; a restart does not help and may harm
EXIT_FENCED = 4  # another process has taken over the shard's log; a restart would take it back
EXIT_TAKEN_OVER = 5  # as EXIT_FENCED, and the log can be followed: a restart that waits for silence takes nothing
EXIT_DISK_FULL = 6  # the disk has no room; a restart helps once it has
EXIT_INTERRUPTED = 130  # a second signal ended the drain


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardOrder:
    """What a shard process needs to start: its configuration, the inherited file descriptors, and how to log."""

    config: ShardConfig
    socket_fd: int
    report_fd: int
    log_level: str
    log_format: str

    def encode(self) -> bytes:
        """Return one line."""
        fields = {name: getattr(self, name) for name in ("socket_fd", "report_fd", "log_level", "log_format")}
        return json.dumps({"config": self.config.to_json(), **fields}).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Self:
        """Decode a line; `ProtocolError` if it is not an order, `ConfigError` if a setting is out of range."""
        try:
            values = json.loads(line)
            return cls(**{**values, "config": ShardConfig.from_json(values["config"])})
        except (ValueError, TypeError, KeyError) as exc:
            raise ProtocolError(f"not an order from a supervisor of this version: {exc!r}") from exc


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardReport:
    """A report of a shard process: that it serves, or stands by; or with `error`, why it is about to end."""

    is_ready: bool = False
    is_standby: bool = False
    error: str | None = None

    def encode(self) -> bytes:
        """Return one line."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Self:
        """Decode a line; `ProtocolError` if it is not a report."""
        try:
            return cls(**json.loads(line))
        except (ValueError, TypeError) as exc:
            raise ProtocolError(f"not a report of a shard process: {line[:80]!r}") from exc


SHARD_COMMAND = (sys.executable, "-m", "headrace.paramserver.shard.process")
_MAX_REPORT_BYTES = 2**16
_NUDGE = b"\n"
_NUM_LOOKS = 10


class ShardChild:
    """A running shard process, made by `run_child`."""

    def __init__(
        self, process: asyncio.subprocess.Process, reports: asyncio.StreamReader, stdin: asyncio.WriteTransport
    ) -> None:
        """Use `run_child`."""
        self.pid = process.pid
        self._process, self._reports, self._stdin = process, reports, stdin

    async def next_report(self) -> ShardReport | None:
        """Return the next report, or None at the end; `ProtocolError` for anything else. Cancelled, it loses none."""
        line = await self._reports.readline()
        return ShardReport.decode(line) if line else None

    def nudge(self) -> bool:
        """Put a byte into the process's empty stdin; return False if the previous byte is still there.

        The event loop of a serving process reads its stdin. So a byte that stays until the next nudge means that the
        loop has not run in between. A reply through a pipe was rejected: a full pipe would block the process whenever
        its supervisor does not read.
        """
        if self._stdin.is_closing():
            return True  # the process is gone; its reports end
        if self._stdin.get_write_buffer_size() or _num_unread(self._stdin):
            return False
        self._stdin.write(_NUDGE)
        return True

    async def wait(self) -> int:
        """Wait for the end and return the exit code, -N after signal N. Cancellation: harmless."""
        return await self._process.wait()

    def terminate(self) -> None:
        """Ask the process to drain and end; harmless after its end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process now; harmless after its end."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            # It may have ended a moment ago, which asyncio does not know yet.
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


@contextlib.asynccontextmanager
async def run_child(
    order: ShardOrder, *, inherit_fds: Sequence[int], report_pipe: tuple[int, int], command: Sequence[str]
) -> AsyncIterator[ShardChild]:
    """Start a shard process; when the block ends, kill it if it still runs, and reap it.

    The process inherits `inherit_fds` and the write end of `report_pipe`, which the order names. Both ends of that
    pipe are closed here.

    Raises:
        OSError: The process cannot be started.

    Cancellation: the process is killed.
    """
    loop = asyncio.get_running_loop()
    read_fd, write_fd = report_pipe
    async with contextlib.AsyncExitStack() as stack:
        reading = stack.enter_context(os.fdopen(read_fd, "rb", buffering=0))
        try:
            # Our own pipe: asyncio may use a socket pair, which does not show how much is unread at the other end.
            stdin_fd, order_fd = os.pipe()
            try:
                # Stays open until the process is gone: its end is a command to stop.
                stdin, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(order_fd, "wb", buffering=0))
                stack.callback(stdin.close)
                # Its own session, so that Ctrl-C in the terminal reaches only the supervisor.
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=stdin_fd, pass_fds=(*inherit_fds, write_fd), start_new_session=True
                )
            finally:
                os.close(stdin_fd)
        finally:
            os.close(write_fd)  # only the process has it now, so reading ends with the process
        stack.push_async_callback(_end, process)
        reports = asyncio.StreamReader(limit=_MAX_REPORT_BYTES)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reports), reading)
        stack.callback(transport.close)
        stdin.write(order.encode())  # if the process is gone already, `wait` shows it
        yield ShardChild(process, reports, stdin)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    # Shielded: a killed process ends at once, and must not stay a zombie when we are cancelled, too.
    await asyncio.shield(process.wait())


def _num_unread(pipe: asyncio.WriteTransport) -> int:
    """Return how many bytes of a pipe are unread; Linux reports it at the write end, too."""
    count = array.array("i", [0])
    fcntl.ioctl(pipe.get_extra_info("pipe").fileno(), termios.FIONREAD, count)
    return count[0]


class HangDetector:
    """Decides from looks at a process whether it hangs: after ten in a row between which its event loop did not run.

    It counts looks, not seconds. After a suspend, or while the supervisor itself did not run, much time is gone at once
    in which the process could not run either; that is still one look. It does no I/O and reads no clock.
    """

    def __init__(self, timeout_s: float) -> None:
        """Expect a look every `interval_s`; a timeout of 0 detects nothing, and the interval is None."""
        self.interval_s = timeout_s / _NUM_LOOKS or None
        self._num_missed = 0

    def look(self, *, has_run: bool) -> bool:
        """Return whether the process hangs, given whether its loop ran since the last look; True resets the count."""
        self._num_missed = 0 if has_run else self._num_missed + 1
        if self._num_missed < _NUM_LOOKS:
            return False
        self._num_missed = 0
        return True


def describe_exit(exit_code: int) -> str:
    """Describe how a process ended by its exit code; -N stands for signal N."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
