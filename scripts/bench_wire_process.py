"""The processes of `headrace bench wire`: each contender's server and client has its own.

A process takes one JSON order a line on stdin and answers with one JSON line on stdout; it ends when stdin does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from headrace.schemas.errors import UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, encode_message
from headrace.scripts.bench_wire_peers import CLIENTS, SERVERS, WriteShape, hello_request

__all__ = ["WireProcess", "main"]

_Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class WireProcess:
    """A process of the bench, as its parent sees it."""

    def __init__(self, process: subprocess.Popen[str], name: str) -> None:
        """Use `start`."""
        self.pid = process.pid
        self._process = process
        self._name = name

    @classmethod
    @contextlib.contextmanager
    def start(cls, *arguments: str) -> Iterator[WireProcess]:
        """Run `main` with arguments in a process of its own; at the end it is gone."""
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace.scripts.bench_wire_process", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            yield cls(process, " ".join(arguments))
        finally:
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()

    def ask(self, **order: Any) -> dict[str, Any]:
        """Send an order and wait for its answer.

        Raises:
            UnavailableError: The process has died; its traceback is on stderr.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise UnavailableError(f"the bench's process `{self._name}` has died; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main(arguments: list[str]) -> None:
    """Run `serve NAME ROWS DIM`, `drive NAME PORT ROWS DIM` or `idle PORT`; rows and columns are those of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    match arguments:
        case ["serve", name, *shape]:
            asyncio.run(_serve(name, WriteShape(*map(int, shape))))
        case ["drive", name, port, *shape]:
            asyncio.run(_drive(name, int(port), WriteShape(*map(int, shape))))
        case ["idle", port]:
            asyncio.run(_idle(int(port)))


async def _serve(name: str, shape: WriteShape) -> None:
    port = await SERVERS[name](shape)

    async def answer(order: dict[str, Any]) -> dict[str, Any]:
        return {"port": port, "memory_bytes": _memory_bytes(), "cpu_s": time.process_time()}

    await _obey(answer)
    # Not by way of the interpreter's end: gRPC's server complains when it is collected without a loop.
    sys.stdout.flush()
    os._exit(0)


async def _drive(name: str, port: int, shape: WriteShape) -> None:
    client = await CLIENTS[name](port, shape)

    async def answer(order: dict[str, Any]) -> dict[str, Any]:
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        await (client.write if order["do"] == "write" else client.read)(order["num_calls"], order["in_flight"])
        return {"seconds": time.perf_counter() - started_s, "cpu_s": time.process_time() - started_cpu_s}

    await _obey(answer)
    await client.close()


async def _idle(port: int) -> None:
    """Open connections that say hello and then nothing."""
    args = idl.ParameterServer.hello_args(request=hello_request(idl.Role.READER))
    message = b"".join(encode_message("hello", CALL, 1, args))
    frame = struct.pack(">I", len(message)) + message
    socks: list[socket.socket] = []

    async def answer(order: dict[str, Any]) -> dict[str, Any]:
        for _ in range(order["num_connections"]):
            sock = socket.create_connection(("127.0.0.1", port), timeout=10)
            socks.append(sock)
            sock.sendall(frame)
            (length,) = struct.unpack(">I", sock.recv(4, socket.MSG_WAITALL))
            assert len(sock.recv(length, socket.MSG_WAITALL)) == length
        return {"num_connections": len(socks)}

    await _obey(answer)
    for sock in socks:
        sock.close()


async def _obey(answer: _Answer) -> None:
    """Answer orders until there are no more; the loop goes on meanwhile."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await answer(json.loads(line))), flush=True)


def _memory_bytes() -> int:
    """Return the memory that is this process's alone."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))


if __name__ == "__main__":
    main(sys.argv[1:])
