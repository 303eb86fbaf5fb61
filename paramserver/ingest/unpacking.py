"""Compressed batches become the messages that they hold, in the order in which they came, within bounds of their own.

A batch has its place in line before it has room and before a thread decompresses it, so those behind it wait. It takes
room for the whole message from bounds as large as those of requests in flight; these hold what came, and go on holding
it, so a batch that waits here cannot stand in the way of one that frees room.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from weakref import WeakValueDictionary

from headrace.paramserver.rpc.admission import Account, Admission, ServerLimits, Ticket
from headrace.paramserver.rpc.dispatch import Call, Peer
from headrace.paramserver.rpc.frames import Frame
from headrace.schemas.errors import OverloadedError, ProtocolError, RequestError
from headrace.schemas.idl import idl
from headrace.schemas.messages import decode_header, decode_struct
from headrace.schemas.packed_messages import size_of_packed, unpack_message

__all__ = ["Unpacker"]

# Up to here the event loop decompresses by itself: some 0.1 ms, about what a turn of a thread costs.
_LOOP_BYTES = 64 * 2**10


class Unpacker:
    """Decompresses the batches of all clients, one at a time of each. Thread: the loop's.

    Memory, at most: `max_inflight_bytes` of the limits for messages, and while threads decompress, as much again as a
    message of each client.
    """

    def __init__(self, limits: ServerLimits) -> None:
        """Admit messages of up to `max_frame_bytes`, and as many of a client and of all as requests."""
        self._limits = limits
        self._admission = Admission(
            max_requests=limits.max_inflight_requests,
            max_bytes=limits.max_inflight_bytes,
            max_account_requests=limits.max_client_requests,
            max_account_bytes=limits.max_client_bytes,
        )
        self._turns: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    @property
    def size_bytes(self) -> int:
        """Bytes of decompressed messages in use."""
        return self._admission.size_bytes

    async def wait_turn(self, peer: Peer) -> None:
        """Wait until all batches of a client that came before are decompressed. Cancellation: harmless."""
        if (turn := self._turns.get(peer.who)) is not None:
            async with turn:
                pass

    @asynccontextmanager
    async def unpacked(self, call: Call, packed: Any) -> AsyncIterator[tuple[Call, Any]]:
        """Return a call with the message that a `SetPackedRequest` holds as its frame, and the message's request.

        Use it as `async with`: no other batch of the client gets into the body before this one does.

        Raises:
            RequestError: What it holds is not a `setEmbeddings` message, or too long.
            OverloadedError: There was no room in time.

        Cancellation: harmless; a thread may finish its work first.
        """
        who = call.peer.who
        if (turn := self._turns.get(who)) is None:
            turn = self._turns[who] = asyncio.Lock()
        account = self._admission.open_account(who)
        try:
            async with turn:
                with _refusing(call):
                    size_bytes = size_of_packed(packed, max_bytes=self._limits.max_frame_bytes)
                    ticket = await self._admit(account, size_bytes)
                    frame = await self._unpack(call, packed, size_bytes, ticket)
            plain, release = call.with_frame(frame)
            try:
                with _refusing(call):
                    request = _request_in(frame.data)
                yield plain, request
            finally:
                release()
                ticket.release()
        finally:
            self._admission.close_account(account)

    async def _admit(self, account: Account, size_bytes: int) -> Ticket:
        granted: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        admitted = self._admission.admit(account, size_bytes, granted.set_result)
        if isinstance(admitted, Ticket):
            return admitted
        try:
            async with asyncio.timeout(self._limits.admission_timeout_s):
                return await asyncio.shield(granted)
        except BaseException as exc:
            if granted.done():
                _release(granted.result())
            else:
                self._admission.cancel(admitted)
                granted.cancel()
            if isinstance(exc, TimeoutError):
                problem = "no room for the message in a compressed batch"
                raise OverloadedError(problem, retry_after_s=self._limits.retry_after_s) from exc
            raise

    async def _unpack(self, call: Call, packed: Any, size_bytes: int, ticket: Ticket) -> Frame[Ticket]:
        try:
            if size_bytes <= _LOOP_BYTES:
                message = unpack_message(packed, size_bytes)
            else:
                unpacking = asyncio.get_running_loop().run_in_executor(None, unpack_message, packed, size_bytes)
                release = call.hold()
                unpacking.add_done_callback(lambda _: release())
                message = await asyncio.shield(unpacking)
        except BaseException:
            _release(ticket)
            raise
        return Frame(message, ticket, None, None)


@contextmanager
def _refusing(call: Call) -> Iterator[None]:
    try:
        yield
    except ProtocolError as exc:
        raise RequestError(f"a compressed batch of client {call.peer.client!r}: {exc}") from exc


def _request_in(message: memoryview) -> Any:
    header = decode_header(message)
    if header.name != "setEmbeddings":
        raise ProtocolError(f"it holds a call of {header.name!r}")
    request = decode_struct(idl.ParameterServer.setEmbeddings_args, message, header.body_offset).request
    if request is None:
        raise ProtocolError("it holds no request")
    return request


def _release(ticket: Ticket) -> None:
    ticket.release_bytes()
    ticket.release()
