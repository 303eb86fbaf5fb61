"""One shard process, as its supervisor sees it."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import os
import signal
import sys
import termios
from collections.abc import AsyncIterator, Sequence

from headrace.paramserver.shard.shard_channel import ShardOrder, ShardReport

__all__ = ["SHARD_COMMAND", "ShardChild", "describe_exit", "run_child"]

SHARD_COMMAND = (sys.executable, "-m", "headrace.paramserver.shard.shard_process")
_MAX_REPORT_BYTES = 2**16
_NUDGE = b"\n"


class ShardChild:
    """A running shard process, made by `run_child`.

    Attributes:
        pid: Its process id.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, reports: asyncio.StreamReader, telling: asyncio.WriteTransport
    ) -> None:
        """Use `run_child`."""
        self.pid = process.pid
        self._process = process
        self._reports = reports
        self._telling = telling

    async def next_report(self) -> ShardReport | None:
        """Return the process's next report; None when it has ended, or closed its pipe on the way there.

        Cancellation: no report is lost.

        Raises:
            ProtocolError: What it sent is no report.
        """
        line = await self._reports.readline()
        return ShardReport.decode(line) if line else None

    def nudge(self) -> bool:
        """Put a byte into the process's stdin if there is none, and return whether there was none.

        The event loop of a process that serves takes what is there. So a byte that is there at the next nudge, too,
        tells that the loop has not run in between, whatever the process is busy with. No answer is asked for: it would
        have to come through a pipe that may be full, and would hold up a process whose supervisor does not read.
        """
        if self._telling.is_closing():
            return True  # the process is gone; its reports tell so
        if self._telling.get_write_buffer_size() or _num_unread(self._telling):
            return False
        self._telling.write(_NUDGE)
        return True

    async def wait(self) -> int:
        """Return the exit code once the process has ended: -N when signal N killed it.

        Cancellation: harmless.
        """
        return await self._process.wait()

    def terminate(self) -> None:
        """Ask it to drain and end; harmless when it has ended."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it now; harmless when it has ended."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            # It may have ended with its watcher not yet told.
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


@contextlib.asynccontextmanager
async def run_child(
    order: ShardOrder, *, inherit_fds: Sequence[int], report_pipe: tuple[int, int], command: Sequence[str]
) -> AsyncIterator[ShardChild]:
    """Start a shard process; at the end it is gone, killed if need be, and reaped.

    Args:
        order: What it is told. Its `report_fd` is the second of `report_pipe`.
        inherit_fds: File descriptors that it gets under the same numbers, besides the pipe's.
        report_pipe: Reading and writing end of a fresh pipe; both are closed here.
        command: Program and arguments.

    Raises:
        OSError: The process cannot be started.

    Cancellation: the process is killed.
    """
    loop = asyncio.get_running_loop()
    read_fd, write_fd = report_pipe
    async with contextlib.AsyncExitStack() as stack:
        reading = stack.enter_context(os.fdopen(read_fd, "rb", buffering=0))
        try:
            # Of our own, for asyncio's may be a pair of sockets, which does not tell what is unread at the other end.
            stdin_fd, order_fd = os.pipe()
            try:
                # Closed when the process is gone: its end is a command to stop.
                telling, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(order_fd, "wb", buffering=0))
                stack.callback(telling.close)
                # A session of its own: Ctrl-C in the terminal goes to the supervisor alone, which says what to do.
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=stdin_fd,
                    pass_fds=(*inherit_fds, write_fd),
                    start_new_session=True,
                )
            finally:
                os.close(stdin_fd)
        finally:
            os.close(write_fd)  # the process has the only other one: when it ends, reading does
        stack.push_async_callback(_end, process)
        reports = asyncio.StreamReader(limit=_MAX_REPORT_BYTES)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reports), reading)
        stack.callback(transport.close)
        telling.write(order.encode())  # a process that is gone already is seen by `wait`
        yield ShardChild(process, reports, telling)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    # Shielded: a killed process ends at once, and must not become a zombie because we are cancelled too.
    await asyncio.shield(process.wait())


def _num_unread(pipe: asyncio.WriteTransport) -> int:
    """Return how many bytes of a pipe its reader has not taken; Linux tells it at the writing end, too."""
    count = array.array("i", [0])
    fcntl.ioctl(pipe.get_extra_info("pipe").fileno(), termios.FIONREAD, count)
    return count[0]


def describe_exit(exit_code: int) -> str:
    """Say how a process ended, from its exit code: -N stands for signal N."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
