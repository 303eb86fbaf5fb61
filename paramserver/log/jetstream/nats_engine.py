"""The replicated log's engine on NATS JetStream: conditional appends, reads by seq, and what the stream's leader says.

Only what this server's answers prove is told apart. What a server says may be old: see `engine.py`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from nats.aio.msg import Msg

from headrace.paramserver.log.jetstream.engine import (
    PeerState,
    PublishOutcome,
    PublishReply,
    StoredMessage,
    StreamState,
)
from headrace.paramserver.log.jetstream.nats_address import NatsAccess, subject_of
from headrace.paramserver.log.jetstream.nats_client import API, MAX_HEADERS_BYTES, NatsClient, status_of
from headrace.schemas.errors import GoneError, RequestError, UnavailableError
from headrace.schemas.messages import Segment, size_of_segments

__all__ = ["NatsConnection", "NatsEngine"]

_EXPECTED_LAST = "Nats-Expected-Last-Sequence"
_SEQUENCE = "Nats-Sequence"
_END_OF_BATCH, _NOT_FOUND = 204, 404
# The server's codes, which are stable; its words are not, but for the number that code 10071 gives nowhere else.
_WRONG_LAST, _NO_MESSAGE, _STORE_REFUSES, _MESSAGE_TOO_LARGE = 10071, 10037, 10077, 10054
_NO_ROOM = {10002, 10023, 10047}  # an account's limit, a server's resources, a server's disk
_LAST_SEQ = re.compile(r"wrong last sequence: (\d+)")
_MAX_BATCH = 1000  # of the server, for reads and atomic batches alike
_READ_TIMEOUT_S = 2.0
_PURGE_TIMEOUT_S = 10.0
# How often a reader that finds nothing asks the leader whether its place was purged.
_LOOK_EVERY_S = 1.0
_ASK_AGAIN_S = 0.3


def _reply_of(message: Msg) -> PublishReply:
    """Return what the server says of a publish."""
    if status := status_of(message):
        return PublishReply(PublishOutcome.AWAY, reason=f"status {status}")
    try:
        answer = json.loads(message.data)
        error = answer.get("error")
        if error is None:
            return PublishReply(PublishOutcome.ACKED, seq=int(answer["seq"]))
        code, reason = int(error["err_code"]), str(error.get("description", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return PublishReply(PublishOutcome.AWAY, reason="an answer that is none")
    if code == _WRONG_LAST and (match := _LAST_SEQ.search(reason)):
        return PublishReply(PublishOutcome.WRONG_LAST, seq=int(match[1]), reason=reason)
    if code in _NO_ROOM or (code == _STORE_REFUSES and "exceeded" in reason):
        return PublishReply(PublishOutcome.FULL, reason=reason)
    if code == _MESSAGE_TOO_LARGE:
        return PublishReply(PublishOutcome.TOO_LARGE, reason=reason)
    return PublishReply(PublishOutcome.AWAY, reason=f"{reason} ({code})")


class _Read:
    """A batch of messages that is on its way."""

    def __init__(self, from_seq: int) -> None:
        self.from_seq, self.number = from_seq, 0
        self.messages: list[StoredMessage] = []
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def take(self, message: Msg) -> None:
        """Take a message, or the status that ends the batch."""
        if self.status.done():
            return
        if status := status_of(message):
            self.status.set_result(status)
        else:
            seq = int((message.headers or {})[_SEQUENCE])
            self.messages.append(StoredMessage(seq, memoryview(message.data)))


class NatsConnection:
    """A connection to one server, for one stream; see `StreamConnection`.

    Attributes:
        max_message_bytes: The most that `publish` takes.
    """

    def __init__(self, client: NatsClient, stream: str) -> None:
        """Use a client for the messages of a stream."""
        self.max_message_bytes = client.max_payload_bytes - MAX_HEADERS_BYTES
        self._client = client
        self._stream, self._subject = stream, subject_of(stream)
        self._looked_s = 0.0
        self._ahead: _Read | None = None

    @property
    def server(self) -> str:
        """Name and address of the server."""
        return self._client.server

    @property
    def lost(self) -> asyncio.Future[str]:
        """See `StreamConnection`."""
        return self._client.lost

    def publish(
        self, message: Sequence[Segment], *, expected_last: int, on_reply: Callable[[PublishReply], None]
    ) -> None:
        """See `StreamConnection.publish`."""

        def take(reply: Msg) -> None:
            client.forget(number)
            on_reply(_reply_of(reply))

        client = self._client
        if (size_bytes := size_of_segments(message)) > self.max_message_bytes:
            client.check_connected()
            reason = f"{size_bytes} bytes, the server takes {self.max_message_bytes}"
            self._answer_soon(on_reply, PublishReply(PublishOutcome.TOO_LARGE, reason=reason))
            return
        number, reply_to = client.expect(take)
        try:
            headers = ((_EXPECTED_LAST, str(expected_last)),)
            client.send(self._subject, message, reply=reply_to, headers=headers)
        except UnavailableError:
            client.forget(number)
            raise

    def _answer_soon(self, on_reply: Callable[[PublishReply], None], reply: PublishReply) -> None:
        """Answer as the server would: later, and not once the connection is lost."""

        def answer() -> None:
            if not self.lost.done():
                on_reply(reply)

        asyncio.get_running_loop().call_soon(answer)

    async def publish_batch(self, messages: Sequence[bytes], *, expected_last: int) -> PublishReply:
        """See `StreamConnection.publish_batch`; at most 1000 messages.

        Cancellation: all of them may have been appended, or none.
        """
        if not 1 <= len(messages) <= _MAX_BATCH:
            raise RequestError(f"a batch has 1 to {_MAX_BATCH} messages, not {len(messages)}")
        if (size_bytes := max(map(len, messages))) > self.max_message_bytes:
            return PublishReply(PublishOutcome.TOO_LARGE, reason=f"{size_bytes} bytes")
        batch = secrets.token_hex(16)
        headers = [
            [("Nats-Batch-Id", batch), ("Nats-Batch-Sequence", str(number))] for number in range(1, len(messages) + 1)
        ]
        headers[0].append((_EXPECTED_LAST, str(expected_last)))
        headers[-1].append(("Nats-Batch-Commit", "1"))
        for message, of_message in zip(messages[:-1], headers[:-1], strict=True):
            self._client.send(self._subject, [message], headers=of_message)
        # Nothing is appended before the commit, and nothing but its answer counts.
        return _reply_of(await self._client.request(self._subject, [messages[-1]], headers=headers[-1]))

    async def get(self, seq: int) -> StoredMessage | None:
        """See `StreamConnection.get`."""
        answer = await self._client.ask("STREAM.MSG.GET", self._stream, {"seq": seq})
        if (error := answer.get("error")) is not None:
            if error.get("err_code") == _NO_MESSAGE:
                return None
            raise self._unavailable("STREAM.MSG.GET", error)
        found = answer["message"]
        if found["seq"] != seq:
            return None
        return StoredMessage(seq, memoryview(base64.b64decode(found.get("data", ""))))

    async def read(self, from_seq: int, *, max_bytes: int) -> list[StoredMessage]:
        """See `StreamConnection.read`. Behind a full answer the next one is asked for at once, and kept in memory."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.from_seq != from_seq:
            self._client.forget(ahead.number)
            ahead = None
        messages = await self._finish(ahead) if ahead is not None else []
        if not messages:  # what was asked for a while ago says nothing about now
            messages = await self._finish(self._begin_read(from_seq, max_bytes))
        if messages and messages[0].seq == from_seq:
            if 2 * sum(each.payload.nbytes for each in messages) >= max_bytes and not self.lost.done():
                self._ahead = self._begin_read(messages[-1].seq + 1, max_bytes)
            return messages
        now_s = time.monotonic()
        if not messages and now_s - self._looked_s < _LOOK_EVERY_S:
            return []
        self._looked_s = now_s
        return await self._explain_missing(from_seq, messages)

    def _begin_read(self, from_seq: int, max_bytes: int) -> _Read:
        """Ask any server for messages."""
        read = _Read(from_seq)
        read.number, reply_to = self._client.expect(read.take)
        order = json.dumps({"seq": from_seq, "batch": _MAX_BATCH, "max_bytes": max_bytes}).encode()
        try:
            self._client.send(f"{API}.DIRECT.GET.{self._stream}", [order], reply=reply_to)
        except UnavailableError:
            self._client.forget(read.number)
            raise
        return read

    async def _finish(self, read: _Read) -> list[StoredMessage]:
        """Return messages without a gap, perhaps from a later seq on."""
        try:
            status = await self._wait_end(read)
        except UnavailableError:
            if not read.messages:
                raise
            status = _END_OF_BATCH  # what has come is good: without it, who reads over a bad link would never get on
        finally:
            self._client.forget(read.number)
        if status not in (_END_OF_BATCH, _NOT_FOUND):
            raise UnavailableError(f"{self.server}: a read ended with status {status}")
        messages = read.messages
        for at, message in enumerate(messages):
            if message.seq != messages[0].seq + at:
                return messages[:at]  # this server has lost the one between; the next read says so
        return messages

    async def _wait_end(self, read: _Read) -> int:
        """Return the status that ends a batch; a slow link may take long, as long as messages come."""
        while True:
            num_messages = len(read.messages)
            try:
                return await self._client.wait(asyncio.shield(read.status), _READ_TIMEOUT_S, "a read")
            except UnavailableError:
                if self.lost.done() or len(read.messages) == num_messages:
                    raise

    async def _explain_missing(self, from_seq: int, messages: list[StoredMessage]) -> list[StoredMessage]:
        """Return nothing, or raise, when a server has nothing at `from_seq`, but perhaps later ones."""
        # A new leader answers at once, and the reader keeps its connection.
        state = await self._ask_state(again_s=_ASK_AGAIN_S)
        if from_seq < state.first_seq:
            raise GoneError(f"stream {self._stream} begins at {state.first_seq}; {from_seq} was purged")
        if messages:
            raise UnavailableError(
                f"{self.server}: {from_seq} to {messages[0].seq - 1} of stream {self._stream} are missing there"
            )
        # A server that is cut off from the others answers reads for ever, and has nothing new.
        if state.leader is None:
            raise UnavailableError(f"{self.server}: stream {self._stream} has no leader there")
        return []

    async def state(self) -> StreamState:
        """See `StreamConnection.state`."""
        return await self._ask_state()

    async def _ask_state(self, *, again_s: float | None = None) -> StreamState:
        answer = await self._client.ask("STREAM.INFO", self._stream, again_s=again_s)
        if (error := answer.get("error")) is not None:
            raise self._unavailable("STREAM.INFO", error)
        state, cluster = answer["state"], answer.get("cluster")
        return StreamState(
            first_seq=state["first_seq"] if state["messages"] else state["last_seq"] + 1,
            last_seq=state["last_seq"],
            size_bytes=state["bytes"],
            max_bytes=answer["config"]["max_bytes"],
            # A server without a cluster leads its streams itself.
            leader=self.server if cluster is None else cluster.get("leader") or None,
            peers=tuple(_peer_of(peer) for peer in (cluster or {}).get("replicas") or ()),
        )

    async def purge(self, before_seq: int) -> None:
        """See `StreamConnection.purge`. Cancellation: it may be done all the same."""
        # Beyond the last message a purge would move the last seq forward. An old leader's state only keeps more.
        order = {"seq": min(before_seq, (await self.state()).last_seq + 1)}
        answer = await self._client.ask("STREAM.PURGE", self._stream, order, timeout_s=_PURGE_TIMEOUT_S)
        if (error := answer.get("error")) is not None:
            raise self._unavailable("STREAM.PURGE", error)

    def _unavailable(self, what: str, error: dict[str, Any]) -> UnavailableError:
        return UnavailableError(f"{self.server}: {what} of {self._stream}: {error.get('description')}")

    async def close(self) -> None:
        """See `StreamConnection.close`."""
        await self._client.close()


def _peer_of(peer: dict[str, Any]) -> PeerState:
    return PeerState(
        name=str(peer.get("name", "")),
        is_current=bool(peer.get("current")),
        is_offline=bool(peer.get("offline")),
        lag=int(peer.get("lag", 0)),
    )


class NatsEngine:
    """The servers that hold one stream; see `StreamEngine`."""

    def __init__(self, access: NatsAccess, stream: str) -> None:
        """Name the servers and the stream; `connect` connects."""
        self.stream = stream
        self._access = access
        # The shards' first connections are spread over the servers.
        self._next = random.randrange(len(access.address.servers))

    async def connect(self) -> NatsConnection:
        """See `StreamEngine.connect`. The stream itself is not asked for: it can be read without a leader."""
        servers = self._access.address.servers
        host, port = servers[self._next % len(servers)]
        self._next += 1
        return NatsConnection(await NatsClient.connect(self._access, host, port), self.stream)
