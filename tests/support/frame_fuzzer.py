"""Attacks on a running server: malformed frames without end, and a well-behaved client that must not notice.

`FrameFuzzer` makes the bytes, `attack` sends them, `SteadyClient` writes and reads meanwhile and checks what it reads.
Every byte follows from a seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from hellos import hello_of_nobody
from set_embeddings import delta_of, request_of
from thrift_values import METHODS, call, example, nasty_messages

from headrace.paramserver.rpc.client import ParamServerClient
from headrace.schemas.errors import HeadraceError
from headrace.schemas.idl import idl, spec_to_idl
from headrace.schemas.messages import CALL, encode_message
from headrace.schemas.tables import DType, TableSpec

__all__ = ["DEADLINE_S", "FrameFuzzer", "SteadyClient", "attack", "count_refused", "flood", "memory_bytes"]

DEADLINE_S = 60.0
"""A connection that the server neither answers nor closes by then is a failure."""
_MAX_REFUSED = 8
_SPEC = TableSpec(fqn="steady.weight", num_rows=10_000, dim=16, dtype=DType.FLOAT32, states=(), has_identities=False)
_I32 = struct.Struct(">i")


def _framed(message: bytes) -> bytes:
    return struct.pack(">I", len(message)) + message


def _message(name: str, request: Any = None, *, seqid: int = 1) -> bytes:
    args = getattr(idl.ParameterServer, f"{name}_args")
    body = args(request=request) if request is not None else args()
    return b"".join(bytes(segment) for segment in encode_message(name, CALL, seqid, body))


def _hello(token: str | None, **fields: Any) -> Any:
    return hello_of_nobody(token=token, **({"role": idl.Role.WRITER} | fields))


class FrameFuzzer:
    """Bytes for connections: some frames that are Thrift and make no sense, then one that is not even that."""

    def __init__(self, seed: int, token: str | None) -> None:
        """Make the same bytes for the same seed; `token` opens the session of half of the connections."""
        self._random = random.Random(seed)
        self._nasty = [message for _, message in nasty_messages()]
        self._hello = _framed(_message("hello", _hello(token)))
        # Without the token: a mutated hello that registers tables or takes an epoch would change the store for good.
        self._real = [_message(name, _nonsense(name)) for name in METHODS] + [
            _message("setEmbeddings", _batch(seq=1, rows=np.arange(40), value=1.0, epoch=1)),
            _message("getEmbeddings", _read(np.arange(40))),
        ]
        self._refused = [_framed(message) for message in self._real] + [
            _framed(call(b"noSuchMethod", b"\0")),
            _framed(_message("hello", _hello("w" * 32))),
            _framed(_message("hello", _hello(None, role=77))),
            _framed(_message("getEmbeddings", _read(np.array([-1, 2**62])))),
        ]

    def connection(self) -> tuple[bytes, int]:
        """Return what to send over one connection, and how many frames that is, the hello not counted."""
        refused = self._random.choices(self._refused, k=self._random.randint(0, _MAX_REFUSED))
        start = self._hello if self._random.random() < 0.5 else b""
        return start + b"".join(refused) + self._malformed(), len(refused) + 1

    def _malformed(self) -> bytes:
        chance = self._random
        kind = chance.randrange(8)
        if kind == 0:
            return _framed(chance.choice(self._nasty))
        if kind == 1:  # a frame's length that is no length, or promises what does not come
            length = chance.choice([0, 2**32 - 1, 2**31, 2**30, 2**26 + 1, 2**20 + 1, 2**20, 70_000, 20_000])
            return struct.pack(">I", length) + chance.randbytes(chance.randrange(200))
        if kind == 2:
            return _framed(chance.randbytes(chance.randrange(1, 300)))
        message = bytearray(chance.choice(self._real))
        if kind == 3:  # cut
            del message[chance.randrange(1, len(message)) :]
        elif kind == 4:  # a length or a count somewhere inside
            at = chance.randrange(len(message) - 3)
            _I32.pack_into(message, at, chance.choice([-1, -(2**31), 2**31 - 1, 65_537, 0, len(message)]))
        elif kind == 5:  # a piece twice, or elsewhere
            start = chance.randrange(len(message))
            piece = message[start : start + chance.randrange(1, 60)]
            at = chance.randrange(len(message))
            message[at:at] = piece
        else:
            for _ in range(chance.randint(1, 6)):
                message[chance.randrange(len(message))] = chance.randrange(256)
        return _framed(bytes(message))


def _nonsense(name: str) -> Any:
    """Return a request with something in every field, or None where a method has none."""
    args = example(getattr(idl.ParameterServer, f"{name}_args"))
    request = getattr(args, "request", None)
    if name == "hello":
        request.token = None
    return request


def _batch(*, seq: int, rows: Any, value: float, epoch: int) -> Any:
    return request_of(delta_of(_SPEC, rows, value), run="steady", epoch=epoch, client_seq=seq)


def _read(rows: Any) -> Any:
    row_ids = np.asarray(rows, np.int64).tobytes()
    return idl.GetEmbeddingsRequest(fqn=_SPEC.fqn, row_ids=row_ids, with_states=False, with_versions=False)


def attack(address: tuple[str, int], data: bytes, *, source: str = "127.0.0.1") -> None:
    """Send bytes over a connection of their own, say that no more come, and wait until the server has closed it.

    `source` is an address of the loopback to come from. Raises `TimeoutError` if the server does not close it.
    """
    with socket.socket() as sock, contextlib.suppress(ConnectionError):  # closed, with some of the bytes unread
        sock.settimeout(DEADLINE_S)
        sock.bind((source, 0))
        sock.connect(address)
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65_536):
                pass
        except OSError as exc:  # by `shutdown`, when it was closed before
            if exc.errno != errno.ENOTCONN:
                raise


@contextlib.contextmanager
def flood(address: tuple[str, int], number: int, data: bytes) -> Iterator[list[socket.socket]]:
    """Open connections, send the same bytes over each, and leave them so: peers that are half there."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.create_connection(address, timeout=DEADLINE_S)) for _ in range(number)]
        for sock in socks:
            sock.sendall(data)
        yield socks


async def count_refused(address: tuple[str, int], token: str | None) -> int:
    """Return how many requests and connections the shard says that it has refused."""
    async with await ParamServerClient.connect(*address, timeout_s=DEADLINE_S) as client:
        await client.hello(_hello(token, role=idl.Role.READER))
        return int((await client.status()).num_refused)


def memory_bytes(pid: int) -> int:
    """Return the memory of a process that is resident and not of files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


class SteadyClient:
    """Writes and reads all the time, in a thread, and checks that every read gives what was acked last.

    Attributes:
        num_calls: Writes and reads that were right.
        worst_s: Longest call, seconds.
        error: What went wrong; None as long as nothing has.
    """

    def __init__(self, address: tuple[str, int], token: str | None) -> None:
        """Start with `with`."""
        self.num_calls = 0
        self.worst_s = 0.0
        self.error: BaseException | None = None
        self._address = address
        self._token = token
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait(DEADLINE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(DEADLINE_S)

    def check(self) -> None:
        """Raise what went wrong, if anything."""
        if self.error is not None:
            raise AssertionError(f"the well-behaved client failed after {self.num_calls} calls") from self.error

    def _run(self) -> None:
        try:
            asyncio.run(self._work())
        except (HeadraceError, AssertionError) as exc:
            self.error = exc
        finally:
            self._ready.set()

    async def _work(self) -> None:
        rows = np.arange(50)
        async with await ParamServerClient.connect(*self._address, timeout_s=DEADLINE_S) as client:
            epoch = (await client.hello(_hello(self._token))).highest_epoch + 1
            hello = _hello(self._token, run="steady", client="rank0", epoch=epoch, tables=[spec_to_idl(_SPEC)])
            seq = (await client.hello(hello)).last_client_seq
            is_last = False
            while not is_last:
                is_last = self._stopping.is_set()  # so that it has made calls after whatever it is stopped after
                seq += 1
                await self._timed(client.set_embeddings(_batch(seq=seq, rows=rows, value=seq, epoch=epoch)))
                reply = await self._timed(client.get_embeddings(_read(rows)))
                assert (np.frombuffer(reply.weights, np.float32) == np.float32(seq)).all(), f"after batch {seq}"
                self.num_calls += 2
                self._ready.set()
                await asyncio.sleep(0.005)

    async def _timed(self, call_: Any) -> Any:
        started_s = time.monotonic()
        reply = await asyncio.wait_for(call_, DEADLINE_S)
        self.worst_s = max(self.worst_s, time.monotonic() - started_s)
        return reply
