"""A shard process without a shard, for tests of the supervisor: answers each connection with its pid.

Its argument says how it behaves:

    serve       as it should
    storage N   as it should, but from shard N on ends with a storage error instead of serving
    full PATH   serves; shard 0 first ends as one whose disk is full, once for each line of PATH, which it removes
    broken      ends at once, each time
    stubborn    serves, and heeds neither SIGTERM nor the end of stdin
    babble      reports something that is no report
    taken PATH  serves, and ends as one whose log was taken over; when told to wait, makes PATH and stands by
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

from headrace.paramserver.shard.child import (
    EXIT_DISK_FULL,
    EXIT_ERROR,
    EXIT_FENCED,
    EXIT_STORAGE,
    EXIT_TAKEN_OVER,
    ShardOrder,
    ShardReport,
)


async def _serve(order: ShardOrder, *, is_stubborn: bool, ends: bool = False) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: None if is_stubborn else stopping.set())

    def on_stdin() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            if not is_stubborn:
                stopping.set()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"{os.getpid()}\n".encode())
        writer.close()
        await writer.wait_closed()

    loop.add_reader(0, on_stdin)
    server = await asyncio.start_server(answer, sock=socket.socket(fileno=order.socket_fd))
    os.write(order.report_fd, ShardReport(is_ready=True, is_standby=order.config.waits).encode())
    if ends:
        os.write(order.report_fd, ShardReport(error="another process has the log").encode())
        return
    async with server:
        await stopping.wait()


def main(behaviour: str, *arguments: str) -> int:
    order = ShardOrder.decode(sys.stdin.buffer.readline())
    if behaviour == "full" and order.config.shard == 0 and (lines := Path(arguments[0]).read_text().splitlines()):
        Path(arguments[0]).write_text("\n".join(lines[1:]))
        os.write(order.report_fd, ShardReport(error="no room").encode())
        return EXIT_DISK_FULL
    if behaviour == "storage" and order.config.shard >= int(arguments[0]):
        os.write(order.report_fd, ShardReport(error="log record 7 is rotten").encode())
        return EXIT_STORAGE
    if behaviour == "fenced" and order.config.shard >= int(arguments[0]):
        os.write(order.report_fd, ShardReport(error="another process has the log").encode())
        return EXIT_FENCED
    if behaviour in ("taken", "left") and order.config.shard == 0:
        if not order.config.waits:
            asyncio.run(_serve(order, is_stubborn=False, ends=True))
            return EXIT_TAKEN_OVER
        Path(arguments[0]).touch()
    if behaviour == "broken":
        os.write(order.report_fd, ShardReport(error="the wheel is stuck").encode())
        return EXIT_ERROR
    if behaviour == "babble":
        os.write(order.report_fd, b"hello\n")
    asyncio.run(_serve(order, is_stubborn=behaviour == "stubborn"))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
