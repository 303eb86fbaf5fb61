"""One shard's channel: connects, says hello, sends within a window, and resumes where the shard says.

Batches of a client are numbered 1, 2, 3 … within (run, client, epoch) on each shard. A batch is kept until it is acked.
After a lost connection the hello tells which batches are durable; the others are sent again, in order and with their
numbers, and the shard acks again what it has already. So nothing is lost, and nothing takes effect twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from headrace.paramserver.process.task_group import task_group
from headrace.paramserver.rpc.backoff import Backoff
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.schemas.errors import (
    ConfigError,
    FencedError,
    HeadraceError,
    OverloadedError,
    ProtocolError,
    SequenceGapError,
    StorageError,
    UnauthorizedError,
)
from headrace.schemas.idl import idl
from headrace.schemas.sizes import format_size
from headrace.schemas.tables import TableSpec
from headrace.streamer.config import StreamerConfig
from headrace.streamer.delivery.rendezvous import Connect, StoreShard, Writer
from headrace.streamer.flush.flush import Flush, Message

__all__ = ["ShardChannel"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Delivery:
    """A flush on its way to this shard."""

    flush: Flush
    messages: Iterator[Message] | None = None
    num_unacked: int = 0
    is_cut: bool = False


@dataclass(slots=True)
class _Batch:
    """A message with its number."""

    client_seq: int
    message: Message
    delivery: _Delivery
    num_sends: int = 0
    is_acked: bool = False


class ShardChannel:
    """Delivers flushes to one shard, in order.

    Thread: the sender's loop. The attributes may be read from any thread.

    Attributes:
        shard: Which shard, and where it is.
        server_id: Identity of the store that it delivers to.
        acked_seq: Last batch that is durable, with all before it.
        place: Client seq of the last batch of whose ack came its seq in the shard's log, and that; 0 and 0 before any.
        num_reconnects: Connections made after the first.
        is_connected: A session is open now.
        last_error: What ended the last connection; None once batches are acked again.
    """

    def __init__(
        self,
        shard: StoreShard,
        *,
        writer: Writer,
        config: StreamerConfig,
        connect: Connect,
        random: Callable[[], float],
        on_durable: Callable[[Flush], None],
        on_new_store: Callable[[], int],
    ) -> None:
        """Prepare; `run` connects.

        Args:
            shard: Which shard, and where it is.
            writer: Who writes, in which epoch.
            config: The streamer's settings.
            connect: Opens a connection.
            random: Source of numbers in [0, 1), for the pauses.
            on_durable: Called once for each flush, when all that this shard gets of it is durable.
            on_new_store: Called, under `on_new_store="resync"`, when an empty store has taken the shard's place; has
                all rows sent again, and returns the `Flush.generation` from which on flushes know of it.
        """
        self.shard = shard
        self.server_id = shard.server_id
        self.acked_seq = 0
        self.place = (0, 0)
        self.num_reconnects = 0
        self.is_connected = False
        self.last_error: HeadraceError | None = None
        self._writer, self._config, self._connect = writer, config, connect
        self._on_durable, self._on_new_store = on_durable, on_new_store
        self._backoff = Backoff(min_s=config.retry_min_s, max_s=config.retry_max_s, random=random)
        self._tables: list[TableSpec] = []
        self._names_bytes = len(writer.run.encode()) + len(writer.client.encode())
        self._deliveries: deque[_Delivery] = deque()
        self._unacked: deque[_Batch] = deque()  # the first `_num_sent` of them are sent on this connection
        self._num_sent = self._sent_bytes = 0
        self._next_batch: _Batch | None = None
        self._next_seq = 1
        self._last_sent_seq = 0
        self._generation = 0
        self._limits: Any = None
        self._wake = asyncio.Event()
        self._has_connected = False
        self._disconnected_s = time.monotonic()

    def add_tables(self, specs: list[TableSpec]) -> None:
        """Name tables in every hello from now on; they are registered already."""
        self._tables += specs

    def enqueue(self, flush: Flush) -> None:
        """Take a flush after all before it. Its columns must not change before `on_durable`."""
        self._deliveries.append(_Delivery(flush))
        self._wake.set()

    @property
    def num_behind(self) -> int:
        """Flushes and batches that this shard has not acked."""
        return len(self._unacked) + len(self._deliveries)

    def describe(self) -> str:
        """Say how far behind this shard is; one line without an end."""
        behind = [batch.message.size_bytes for batch in self._unacked]
        text = f"{self.shard} has not acked {len(behind)} batches ({format_size(sum(behind))})"
        if self._deliveries:
            text += f" and waits for {len(self._deliveries)} flushes"
        if not self.is_connected:
            text += f", not connected for {time.monotonic() - self._disconnected_s:.0f} s"
        return text + (f": {self.last_error}" if self.last_error else "")

    def impostor(self, client_seq: int) -> FencedError:
        """Return the error that tells of another trainer that writes under our name."""
        # Two trainers that start at the same moment may find the same epoch free. The shard cannot tell their batches
        # apart, and each would take the other's acks for its own.
        writer = self._writer
        return FencedError(
            f"{self.shard} already has batch {client_seq} of client {writer.client!r} of run {writer.run!r} in epoch "
            f"{writer.epoch}: another trainer writes under the same name; stop one, and start the other again",
            epoch=writer.epoch,
        )

    async def run(self) -> NoReturn:
        """Deliver for ever, over as many connections as it takes.

        Cancellation: resumable by the next hello of the same client in the same epoch.

        Raises:
            FencedError: A newer epoch holds the run.
            RequestError: The shard refused a batch; sending it again would not help.
            StorageError: The shard is another store, or has lost what it had acked.
            HeadraceError: Or anything else that another connection would not mend.
        """
        while True:
            try:
                await self._run_connection()
            except HeadraceError as exc:
                # It has let us in before: its certificate has expired, or its token is another one. Both are mended
                # there, and until then this is an outage like any other.
                is_refused_anew = self._has_connected and isinstance(exc, UnauthorizedError)
                if not (_is_passing(exc) or is_refused_anew):
                    raise
                self._note_failure(exc)
                pause_s = self._backoff.next_s(at_least_s=exc.retry_after_s if isinstance(exc, OverloadedError) else 0)
                await asyncio.sleep(pause_s)

    async def _run_connection(self) -> NoReturn:
        async with await self._connect(self.shard.host, self.shard.port) as client:
            reply = await client.hello(self._writer.hello(self._tables), timeout_s=self._config.connect_timeout_s)
            self._resume(reply)
            try:
                await self._send_all(client)
            finally:
                self.is_connected = False
                self._disconnected_s = time.monotonic()

    def _note_failure(self, exc: HeadraceError) -> None:
        # Once an outage, not once an attempt: the rest is in the statistics. That we are let in no more is another
        # thing than the end of the connection that came before it, and waits for somebody to do something.
        is_refusal = isinstance(exc, UnauthorizedError) and not isinstance(self.last_error, UnauthorizedError)
        level = logging.WARNING if self.last_error is None or is_refusal else logging.DEBUG
        _log.log(level, "%s: %s; trying again", self.shard, exc)
        self.last_error = exc

    def _resume(self, reply: Any) -> None:
        """Take up where the shard is: drop what it has, send the rest again."""
        if reply.shard != self.shard.shard or len(reply.shards) != self.shard.num_shards:
            raise StorageError(
                f"{self.shard} of {self.shard.num_shards} is now shard {reply.shard} of {len(reply.shards)}: "
                "the server was set up anew; restart the trainer"
            )
        durable_seq = reply.last_client_seq
        if reply.server_id != self.server_id:
            self._begin_anew(reply.server_id, durable_seq)
        if durable_seq < self.acked_seq:
            raise StorageError(
                f"{self.shard} has lost acked data: it had acked batch {self.acked_seq}, and now holds batches up to "
                f"{durable_seq}: was its directory set back to an older copy? Put the newer one back, or start the "
                "trainer again, from a checkpoint with load_state_dict or with publish='all', to send what is needed"
            )
        if durable_seq > self._last_sent_seq:
            raise self.impostor(durable_seq)
        self._num_sent = self._sent_bytes = 0
        while self._unacked and self._unacked[0].client_seq <= durable_seq:
            self._ack_first()
        self._limits = reply.limits
        self.num_reconnects += self._has_connected
        self._has_connected = self.is_connected = True

    def _begin_anew(self, server_id: str, durable_seq: int) -> None:
        """Go on with an empty store in the place of the old one."""
        if self._config.on_new_store != "resync" or durable_seq:
            raise StorageError(
                f"{self.shard} is another store than before ({server_id}, was {self.server_id}): what was acked is "
                "not there; restart the trainer, or set on_new_store to resync to send every row again"
            )
        _log.warning("%s is another store than before: sending every row again", self.shard)
        # First: who sees the new store's identity or place sees that it is new.
        self._generation = self._on_new_store()
        self.server_id = server_id
        self.acked_seq = self._last_sent_seq = 0
        self.place = (0, 0)
        self._next_seq = 1
        waiting = [*self._unacked, *([self._next_batch] if self._next_batch else [])]
        for batch in waiting:
            batch.client_seq, batch.num_sends, batch.is_acked = self._next_seq, 0, False
            self._next_seq += 1
            self._strip_mark(batch)

    def _strip_mark(self, batch: _Batch) -> None:
        """Take back what a message claims to complete, if the claim was made of the old store."""
        if batch.delivery.flush.generation < self._generation:
            batch.message.ends_step = batch.message.is_exact_cut = False

    async def _send_all(self, client: ParamServerClient) -> NoReturn:
        """Keep the window full."""
        async with task_group(_gravest) as sends:
            while True:
                batch = self._take_next()
                if batch is None:
                    self._wake.clear()
                    await self._wake.wait()
                else:
                    sends.create_task(self._send(client, batch))

    def _take_next(self) -> _Batch | None:
        """Return the batch to send next on this connection; None when there is none, or no room in the window."""
        is_resent = self._num_sent < len(self._unacked)
        batch = self._unacked[self._num_sent] if is_resent else self._number_next()
        if batch is None:
            return None
        limits, config, size_bytes = self._limits, self._config, self._wire_bytes(batch)
        if size_bytes > limits.max_frame_bytes:
            raise ConfigError(
                f"{self.shard} now reads frames of {limits.max_frame_bytes} bytes, a batch has {size_bytes}"
            )
        max_bytes = min(config.window_bytes, limits.max_inflight_bytes)
        max_messages = min(config.window_messages, limits.max_inflight_requests)
        # One message is always let through, or a small window would close for good.
        if self._num_sent and (self._num_sent >= max_messages or self._sent_bytes + size_bytes > max_bytes):
            return None
        if not is_resent:
            self._unacked.append(batch)
            self._next_batch = None
        self._num_sent += 1
        self._sent_bytes += size_bytes
        return batch

    def _number_next(self) -> _Batch | None:
        """Return the first batch that has never been sent, cut from the oldest flush."""
        while self._next_batch is None and self._deliveries:
            delivery = self._deliveries[0]
            if delivery.messages is None:
                limits = self._limits
                max_bytes = min(self._config.message_bytes, limits.max_frame_bytes, limits.max_inflight_bytes)
                delivery.messages = delivery.flush.messages(self.shard.shard, max_bytes - self._names_bytes)
            message = next(delivery.messages, None)
            if message is None:
                self._deliveries.popleft()
                delivery.is_cut = True
                self._settle(delivery)
            else:
                delivery.num_unacked += 1
                self._next_batch = _Batch(self._next_seq, message, delivery)
                self._strip_mark(self._next_batch)
                self._next_seq += 1
        return self._next_batch

    async def _send(self, client: ParamServerClient, batch: _Batch) -> None:
        message, writer = batch.message, self._writer
        request = idl.SetEmbeddingsRequest(
            run=writer.run,
            client=writer.client,
            epoch=writer.epoch,
            client_seq=batch.client_seq,
            step=message.step,
            time_us=message.time_us,
            ends_step=message.ends_step,
            is_exact_cut=message.is_exact_cut,
            deltas=message.deltas,
        )
        batch.num_sends += 1
        self._last_sent_seq = max(self._last_sent_seq, batch.client_seq)
        reply = await client.set_embeddings(request, timeout_s=self._config.request_timeout_s)
        if reply.is_duplicate and batch.num_sends == 1:
            raise self.impostor(batch.client_seq)
        if not reply.is_duplicate:
            self.place = max(self.place, (batch.client_seq, reply.seq))
        self._on_ack(batch)

    def _on_ack(self, batch: _Batch) -> None:
        batch.is_acked = True
        while self._unacked and self._unacked[0].is_acked:
            self._num_sent -= 1
            self._sent_bytes -= self._wire_bytes(self._unacked[0])
            self._ack_first()
        self._backoff.reset()
        self.last_error = None
        self._wake.set()

    def _ack_first(self) -> None:
        batch = self._unacked.popleft()
        self.acked_seq = batch.client_seq
        batch.delivery.num_unacked -= 1
        self._settle(batch.delivery)

    def _settle(self, delivery: _Delivery) -> None:
        if delivery.is_cut and not delivery.num_unacked:
            self._on_durable(delivery.flush)

    def _wire_bytes(self, batch: _Batch) -> int:
        return batch.message.size_bytes + self._names_bytes


def _is_passing(exc: HeadraceError) -> bool:
    """Say whether another connection may mend it."""
    # A plain HeadraceError is the shard's own failure (INTERNAL), which its supervisor restarts it for.
    return exc.retriable or isinstance(exc, SequenceGapError | ProtocolError) or type(exc) is HeadraceError


def _gravest(errors: Sequence[BaseException]) -> BaseException:
    """Return, of what ended a connection's sends, what decides how to go on.

    The first refusal makes gaps of all batches after it, so the gap is the last thing to look at.
    """
    bugs = [exc for exc in errors if not isinstance(exc, HeadraceError)]
    if bugs:
        return bugs[0]
    ours = [exc for exc in errors if isinstance(exc, HeadraceError)]
    refusals = [exc for exc in ours if not _is_passing(exc)]
    overloads = [exc for exc in ours if isinstance(exc, OverloadedError)]
    others = [exc for exc in ours if not isinstance(exc, SequenceGapError)]
    return (refusals or overloads or others or ours)[0]
