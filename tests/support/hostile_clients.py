"""Readers and writers at a server, in a process of their own: they know a token, and do their worst with it.

They call every method with fields of any value, with wrong bytes and half frames, many calls at a time. They send at
bounded rates, since they share the machine with the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hellos import hello_of_nobody, hello_of_writer
from mutated_structs import Mutator
from raw_peer import call_frame
from set_embeddings import delta_of, request_of
from thrift_values import METHODS, example

from headrace.schemas.errors import ProtocolError
from headrace.schemas.idl import idl
from headrace.schemas.messages import EXCEPTION, decode_header, decode_struct
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec

__all__ = ["Worst", "hostile_clients_at"]

_TURN_S = 0.2  # between two bursts of a client
_BURST = 12  # calls, at most
_OF_ROLE = {
    idl.Role.READER: ["getEmbeddings", "findRows", "digestRows", "fetchUpdates", "fetchSnapshot", "status", "hello"],
    idl.Role.WRITER: ["setEmbeddings", "setEmbeddings", "hello", "getEmbeddings"],
}
_ANSWER_S = 3.0  # for all answers to a burst; some calls wait for long
_STATES = (StateSpec(name="sum", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1),)
_ROWS = np.arange(64)


@dataclass
class Worst:
    """What the clients have seen; complete at the end of the block.

    Attributes:
        codes: Answers by method and outcome: `answered`, an `ErrorCode`'s name, `closed` or `late`.
        messages: Texts of errors, each once.
    """

    codes: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)


class _Client:
    """One connection after the other of one client."""

    def __init__(self, address: tuple[str, int], token: str, role: int, number: int, known: list[str]) -> None:
        self._address, self._token, self._role, self._number = address, token, role, number
        self._name = f"worst{number}"  # of its run, too
        self._spec = TableSpec(
            fqn=self._name, num_rows=10_000, dim=8, dtype=DType.FLOAT32, states=_STATES, has_identities=True
        )
        # Writers do not name the tables of others: they may write them.
        self._tables = known if role == idl.Role.READER else [self._name]
        self._mutator = Mutator(1000 * number + role, texts=self._tables)
        self._server_id, self._seq, self._epoch = "", 0, 1
        self.worst, self._seen = Worst(), set[str]()

    async def run(self) -> None:
        await asyncio.sleep(_TURN_S * self._number / 10)
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                reader, writer = await asyncio.open_connection(*self._address)
                try:
                    await self._come_in(reader, writer)
                    await self._go_on(reader, writer)
                finally:
                    writer.transport.abort()
            await asyncio.sleep(_TURN_S)

    async def _go_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        may_go_on = True
        while may_go_on:
            may_go_on = await self._burst(reader, writer)
            await asyncio.sleep(_TURN_S)

    async def _come_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(call_frame("hello", 1, self._hello()))
        async with asyncio.timeout(_ANSWER_S):
            result = _result_of(await _frame_of(reader))
        if result is None or result.success is None:
            self._note("hello at first", result)
            return
        self._server_id, self._seq = result.success.server_id, result.success.last_client_seq

    async def _burst(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Send some calls at once and read the answers; return whether the connection may go on."""
        chance = self._mutator.random
        names = chance.choices([*METHODS, *_OF_ROLE[self._role] * 6], k=chance.randint(1, _BURST))
        frames = [frame for name in names if (frame := self._frame(name)) is not None]
        for frame in frames:
            writer.write(frame)
        if chance.random() < 0.1:  # half a frame, and then nothing or the end
            writer.write(self._frame("status")[:10])
            await asyncio.sleep(_TURN_S)
            return False
        if chance.random() < 0.1:  # leave, with all answers on their way
            return False
        try:
            async with asyncio.timeout(_ANSWER_S):
                await writer.drain()
                for _ in frames:
                    message = await _frame_of(reader)
                    self._note(decode_header(memoryview(message)).name, _result_of(message))
        except TimeoutError:
            self.worst.codes["late"] += 1
        except (OSError, asyncio.IncompleteReadError):
            self.worst.codes["closed"] += 1
            return False
        return True

    def _frame(self, name: str) -> bytes | None:
        """Return a call, or None if its fields cannot be sent."""
        chance = self._mutator.random
        request = self._request(name)
        if request is not None and chance.random() < 0.9:
            self._mutator.mutate(request)
        try:
            frame = call_frame(name, chance.randrange(2**31), request)
        except ProtocolError:
            return None
        if chance.random() < 0.1:
            message = self._mutator.mutate_bytes(frame[4:])
            frame = struct.pack(">I", len(message)) + message
        return frame

    def _hello(self) -> Any:
        known = {"token": self._token}
        if self._role == idl.Role.READER:
            return hello_of_nobody(**known)
        return hello_of_writer(self._spec, run=self._name, epoch=self._epoch, **known)

    def _batch(self) -> Any:
        self._seq += 1
        delta = delta_of(self._spec, _ROWS, float(self._seq), identities=(_ROWS + 1).tobytes())
        return request_of(delta, run=self._name, epoch=self._epoch, client_seq=self._seq)

    def _request(self, name: str) -> Any:
        """Return a request that could be right."""
        if name == "hello":
            return self._hello()
        if name == "setEmbeddings":
            return self._batch()
        request = getattr(example(getattr(idl.ParameterServer, f"{name}_args")), "request", None)
        fqn = self._mutator.random.choice(self._tables)
        known: dict[str, Any] = {"server_id": self._server_id, "fqn": fqn, "row_ids": _ROWS.tobytes(), "more": None}
        known |= {"identities": _ROWS.tobytes(), "from_seq": 1, "body_offset": None, "wait_ms": 0, "first_row": 0}
        known |= {"end_row": 10_000, "column_offset": 0, "width": 8, "max_buckets": 10, "max_bytes": 100_000}
        known |= {"name": "", "path": "", "offset": 0}
        for field_name, value in known.items():
            if hasattr(request, field_name):
                setattr(request, field_name, value)
        return request

    def _note(self, name: str, result: Any) -> None:
        error = getattr(result, "error", None)
        code = "no method" if result is None else "answered" if error is None else str(error.code)
        self.worst.codes[f"{name}: {idl.ErrorCode._VALUES_TO_NAMES.get(error.code, code) if error else code}"] += 1
        if error is not None and error.expected_seq is not None:
            self._seq = error.expected_seq - 1
        if error is not None and error.epoch is not None:
            self._epoch = min(error.epoch + 1, 2**62)
        if error is not None and error.message not in self._seen:
            self._seen.add(error.message)
            self.worst.messages.append(f"{name}: {error.message}")


async def _frame_of(reader: asyncio.StreamReader) -> bytes:
    (length,) = struct.unpack(">I", await reader.readexactly(4))
    return await reader.readexactly(length)


def _result_of(message: bytes) -> Any:
    header = decode_header(memoryview(message))
    if header.kind == EXCEPTION:
        return None
    return decode_struct(getattr(idl.ParameterServer, f"{header.name}_result"), memoryview(message), header.body_offset)


async def _run(address: tuple[str, int], role: int, number: int, seed: int, known: list[str]) -> None:
    clients = [_Client(address, os.environ["HOSTILE_TOKEN"], role, seed + n, known) for n in range(number)]
    tasks = [asyncio.create_task(client.run()) for client in clients]
    print("begun", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    failed = [task.exception() for task in tasks if task.done()]
    for task in tasks:
        task.cancel()
    if failed:
        raise failed[0] or AssertionError("a client has ended")
    codes = sum((client.worst.codes for client in clients), Counter[str]())
    messages = sorted({message for client in clients for message in client.worst.messages})
    print(json.dumps({"codes": codes, "messages": messages}), flush=True)


@contextlib.contextmanager
def hostile_clients_at(
    address: tuple[str, int], *, role: int, token: str, number: int, seed: int, known: list[str]
) -> Iterator[Worst]:
    """Have clients of a role at a server inside the block, whose readers know the names of some tables.

    They yield to everybody else on this machine: elsewhere, they would have machines of their own.
    """
    host, port = address
    with subprocess.Popen(
        [sys.executable, __file__, host, str(port), str(role), str(number), str(seed), *known],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "HOSTILE_TOKEN": token},
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        worst = Worst()
        try:
            yield worst
            process.stdin.close()
            told = json.loads(process.stdout.readline())
            worst.codes.update(told["codes"])
            worst.messages += told["messages"]
        except BaseException:
            process.kill()
            raise


if __name__ == "__main__":
    os.nice(19)
    asyncio.run(
        _run((sys.argv[1], int(sys.argv[2])), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), sys.argv[6:])
    )
