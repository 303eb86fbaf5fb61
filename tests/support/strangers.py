"""Strangers at a server's door, in a process of their own: connections without a token that do their worst.

There are as many of each kind of `KINDS`. They send at bounded rates, since they share the machine with the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

__all__ = ["KINDS", "strangers_at"]

_TURN_S = 2.0  # between two connections of a stranger
_DRIP_S = 0.02
_HELLO_BYTES = 2**20  # the longest
_NUM_ELEMENTS = 47_000


def _framed(message: bytes) -> bytes:
    return struct.pack(">I", len(message)) + message


def _call(name: bytes, body: bytes) -> bytes:
    return struct.pack(">HxBI", 0x8001, 1, len(name)) + name + struct.pack(">I", 1) + body


def _long_hello() -> bytes:
    """Return the frame of a hello without a token, of a megabyte, of as many shards as there is room for."""
    shard = b"\x08\x00\x01" + bytes(4) + b"\x0b\x00\x02" + bytes(4) + b"\x08\x00\x03" + bytes(4) + b"\0"
    shards = b"\x0f\x00\x10\x0c" + struct.pack(">I", _NUM_ELEMENTS) + shard * _NUM_ELEMENTS
    frame = _framed(_call(b"hello", b"\x0c\x00\x01" + shards + b"\x00\x00"))
    assert len(frame) < _HELLO_BYTES
    return frame


def _false_tokens() -> bytes:
    """Return the first 64 KiB of a hello with as many false tokens as there is room for."""
    token = b"\x0b\x00\x09" + struct.pack(">I", 4096) + b"x" * 4096
    return struct.pack(">I", _HELLO_BYTES) + _call(b"hello", b"\x0c\x00\x01" + token * 16)


_STATUS = _framed(_call(b"status", b"\x00"))
_Act = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def _hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(_LONG_HELLO)
    await reader.read()


async def _guess(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(_FALSE_TOKENS)
    await reader.read()


async def _announce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(struct.pack(">I", _HELLO_BYTES))
    await reader.read()


async def _drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for byte in _LONG_HELLO:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(_DRIP_S)


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(_STATUS)
        (length,) = struct.unpack(">I", await reader.readexactly(4))
        await reader.readexactly(length)


KINDS: dict[str, _Act] = {
    "long hellos": _hello,
    "false tokens": _guess,
    "four bytes": _announce,
    "slow bytes": _drip,
    "refused calls": _ask,
}


async def _stranger(
    address: tuple[str, int], kind: str, delay_s: float, counts: Counter[str], tls: ssl.SSLContext | None
) -> None:
    await asyncio.sleep(delay_s)
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(*address, ssl=tls)
            counts[kind] += 1
            try:
                await KINDS[kind](reader, writer)
            finally:
                writer.transport.abort()
        await asyncio.sleep(_TURN_S)


async def _run(address: tuple[str, int], number: int, tls: ssl.SSLContext | None) -> None:
    counts: Counter[str] = Counter()
    kinds = [*KINDS] * (number // len(KINDS))
    tasks = [
        asyncio.create_task(_stranger(address, kind, _TURN_S * n / number, counts, tls)) for n, kind in enumerate(kinds)
    ]
    while counts.total() < len(kinds):  # noqa: ASYNC110 (of many tasks)
        await asyncio.sleep(0.05)
    print("begun", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for task in tasks:
        task.cancel()
    print(json.dumps(counts), flush=True)


@contextlib.contextmanager
def strangers_at(address: tuple[str, int], number: int, *, is_tls: bool = False) -> Iterator[Counter[str]]:
    """Have strangers at a server inside the block; the counter then has how many connections each kind has made.

    The block begins when as many have connected.

    They yield to everybody else on this machine: elsewhere, they would have machines of their own.
    """
    host, port = address
    with subprocess.Popen(
        [sys.executable, __file__, host, str(port), str(number), *(["tls"] if is_tls else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        counts: Counter[str] = Counter()
        try:
            yield counts
        finally:
            process.stdin.close()
            counts.update(json.loads(process.stdout.readline()))


if __name__ == "__main__":
    os.nice(19)
    _LONG_HELLO, _FALSE_TOKENS = _long_hello(), _false_tokens()
    _tls = ssl.create_default_context() if sys.argv[4:] else None
    if _tls is not None:
        _tls.check_hostname, _tls.verify_mode = False, ssl.CERT_NONE
    asyncio.run(_run((sys.argv[1], int(sys.argv[2])), int(sys.argv[3]), _tls))
