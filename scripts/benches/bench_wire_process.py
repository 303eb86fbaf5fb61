"""The processes of `headrace bench wire`: each contender's server and client has its own.

The first order of a server is `serve` and is answered with its port; that of a client is `drive`, and that of one who
only connects is `idle`.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, encode_message
from headrace.scripts.benches.bench_child import give_answer, orders
from headrace.scripts.benches.bench_wire_peers import CLIENTS, SERVERS, WriteShape, hello_request

__all__: list[str] = []

_Orders = Iterator[dict[str, Any]]
_Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def _main() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    match next(given := orders()):
        case {"do": "serve", "name": name, "shape": shape}:
            asyncio.run(_serve(given, name, WriteShape(**shape)))
        case {"do": "drive", "name": name, "port": port, "shape": shape}:
            asyncio.run(_drive(given, name, port, WriteShape(**shape)))
        case {"do": "idle", "port": port}:
            asyncio.run(_idle(given, port))


async def _serve(given: _Orders, name: str, shape: WriteShape) -> None:
    give_answer({"port": await SERVERS[name](shape)})

    async def answer(order: dict[str, Any]) -> dict[str, Any]:
        return {"memory_bytes": _memory_bytes(), "cpu_s": time.process_time()}

    await _obey(given, answer)
    # Not by way of the interpreter's end: gRPC's server complains when it is collected without a loop.
    sys.stdout.flush()
    os._exit(0)


async def _drive(given: _Orders, name: str, port: int, shape: WriteShape) -> None:
    client = await CLIENTS[name](port, shape)
    give_answer({})

    async def answer(order: dict[str, Any]) -> dict[str, Any]:
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        await (client.write if order["do"] == "write" else client.read)(order["num_calls"], order["in_flight"])
        return {"seconds": time.perf_counter() - started_s, "cpu_s": time.process_time() - started_cpu_s}

    await _obey(given, answer)
    await client.close()


async def _idle(given: _Orders, port: int) -> None:
    """Open connections that say hello and then nothing."""
    args = idl.ParameterServer.hello_args(request=hello_request(idl.Role.READER))
    message = b"".join(encode_message("hello", CALL, 1, args))
    frame = struct.pack(">I", len(message)) + message
    socks: list[socket.socket] = []
    give_answer({})

    async def answer(order: dict[str, Any]) -> dict[str, Any]:
        for _ in range(order["num_connections"]):
            sock = socket.create_connection(("127.0.0.1", port), timeout=10)
            socks.append(sock)
            sock.sendall(frame)
            (length,) = struct.unpack(">I", sock.recv(4, socket.MSG_WAITALL))
            assert len(sock.recv(length, socket.MSG_WAITALL)) == length
        return {"num_connections": len(socks)}

    await _obey(given, answer)
    for sock in socks:
        sock.close()


async def _obey(given: _Orders, answer: _Answer) -> None:
    """Answer orders until there are no more; the loop goes on meanwhile."""
    while (order := await asyncio.to_thread(next, given, None)) is not None:
        give_answer(await answer(order))


def _memory_bytes() -> int:
    """Return the memory that is this process's alone."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))


if __name__ == "__main__":
    _main()
