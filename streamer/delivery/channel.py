"""One shard's channel: it connects, says hello, sends within a window, and resumes where the shard says.

Batches of a client are numbered 1, 2, 3 … within (run, client, epoch) on each shard. A batch is kept until it is acked.
After a lost connection the hello tells which batches are durable. The others are sent again, in order and with their
numbers, and the shard acks again what it has already. So nothing is lost, and nothing takes effect twice.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.outages import Backoff
from headrace.paramserver.rpc.resolver import Resolver
from headrace.paramserver.rpc.shard_places import ShardPlaces, StaleTermError
from headrace.paramserver.system.event_loop import task_group
from headrace.paramserver.system.text import format_size
from headrace.schemas.errors import (
    ConfigError,
    FencedError,
    HeadraceError,
    OverloadedError,
    OwnedError,
    ProtocolError,
    SequenceGapError,
    StorageError,
    UnauthorizedError,
    UnavailableError,
)
from headrace.schemas.idl import idl
from headrace.schemas.tables import TableSpec
from headrace.streamer.config import StreamerConfig
from headrace.streamer.delivery.rendezvous import Connect, StoreShard, Writer
from headrace.streamer.flush.layout import Flush, Message

__all__ = ["ShardChannel"]

_log = logging.getLogger(__name__)

# Longer than a shard with standbys takes to act, shorter than anybody waits for a request.
_SILENT_S = 4.0
# Longest pause of who looks for a shard with standbys, in place of `retry_max_s`: one of them soon has it. A resolver
# does not ask more often.
_SEARCH_S = 1.0
# How long a shard is awaited where it says that it moves to.
_MOVE_S = 3.0
# Longest pause while the shard is on its way to another place; that takes under a second.
_MOVING_S = 0.1


@dataclass(slots=True)
class _ShardFlush:
    """The part of a flush for this shard."""

    flush: Flush
    messages: Iterator[Message] | None = None
    num_unacked: int = 0
    is_split: bool = False  # into messages, all of which have numbers


@dataclass(slots=True)
class _Batch:
    client_seq: int
    message: Message
    origin: _ShardFlush
    num_sends: int = 0
    is_acked: bool = False


class ShardChannel:
    """Delivers flushes to one shard, in order.

    Thread: the sender's loop. The attributes may be read from any thread.

    Attributes:
        server_id: Identity of the present store.
        acked_seq: Last batch that is durable, as all before it are.
        place: (client seq, seq in the shard's log) of the last batch whose ack told the latter; (0, 0) before any.
        last_error: The error that ended the last connection; None once batches are acked again.
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
        on_loss: Callable[[int | None], int],
        resolver: Resolver | None = None,
    ) -> None:
        """Prepare; `run` connects. `random` returns numbers in [0, 1), for the pauses.

        A `resolver`, shared by the shards' channels, finds the shard again when it is not where it was.

        `on_durable` is called once for each flush, when this shard has all of its part. `on_loss` is called when rows
        must be sent again: those of a shard that was set back, or all of them (None) because an empty store is in its
        place. It returns the least `Flush.num_losses` of flushes that are made after they were marked.
        """
        self.shard, self.server_id = shard, shard.server_id
        self.acked_seq, self.place = 0, (0, 0)
        self.num_reconnects, self.is_connected = 0, False
        self.last_error: HeadraceError | None = None
        self._writer, self._config, self._connect = writer, config, connect
        self._on_durable, self._on_loss = on_durable, on_loss
        self._resolver, self._is_lost = resolver, False
        self._moves_to: tuple[str, int] | None = None
        self._moves_until_s = -math.inf
        self._backoff = Backoff(min_s=config.retry_min_s, max_s=config.retry_max_s, random=random)
        # Of its own: a pause of `_backoff` would be longer than the move.
        self._moving = Backoff(min_s=min(config.retry_min_s, _MOVING_S), max_s=_MOVING_S, random=random)
        self._tables: list[TableSpec] = []
        self._after_step = -1
        self._updated_only: frozenset[str] = frozenset()
        self._names_bytes = len(writer.run.encode()) + len(writer.client.encode())
        self._flushes: deque[_ShardFlush] = deque()
        self._unacked: deque[_Batch] = deque()  # the first `_num_sent` are sent on this connection
        self._num_sent = self._sent_bytes = self._last_sent_seq = self._generation = 0
        self._next_batch: _Batch | None = None
        self._next_seq = 1
        self._limits: Any = None
        self._wake = asyncio.Event()
        self._has_connected, self._disconnected_s = False, time.monotonic()

    def add_tables(
        self, specs: list[TableSpec], *, after_step: int = -1, updated_only: frozenset[str] = frozenset()
    ) -> None:
        """Name registered tables in every hello from now on; all but the `updated_only` are sent whole after a step."""
        self._tables += specs
        self._updated_only |= updated_only
        self._after_step = max(self._after_step, after_step)

    def enqueue(self, flush: Flush) -> None:
        """Deliver a flush after all earlier ones. Its columns must not change before `on_durable`."""
        self._flushes.append(_ShardFlush(flush))
        self._wake.set()

    def name_tables_of(self, other: ShardChannel) -> None:
        """Name the tables that a channel to a shard of the server before has named, as they were registered."""
        self.add_tables(other._tables, after_step=other._after_step, updated_only=other._updated_only)

    @property
    def tables(self) -> list[TableSpec]:
        """Registered tables."""
        return list(self._tables)

    @property
    def num_behind(self) -> int:
        """Flushes and batches that this shard has not acked."""
        return len(self._unacked) + len(self._flushes)

    @property
    def is_away(self) -> bool:
        """Whether there is no connection, and it is not that the first one is still to come."""
        return not self.is_connected and (self._has_connected or self.last_error is not None)

    def describe(self) -> str:
        """Say how far behind this shard is, in one line without a full stop."""
        size = format_size(sum(batch.message.size_bytes for batch in self._unacked))
        text = f"{self.shard} has not acked {len(self._unacked)} batches ({size})"
        if self._flushes:
            text += f" and waits for {len(self._flushes)} flushes"
        if not self.is_connected:
            text += f", not connected for {time.monotonic() - self._disconnected_s:.0f} s"
        return text + (f": {self.last_error}" if self.last_error else "")

    def other_writer_error(self, client_seq: int) -> FencedError:
        """Return the error for a batch of another trainer with this name and epoch: neither could trust its acks."""
        writer = self._writer
        return FencedError(
            f"{self.shard} already has batch {client_seq} of client {writer.client!r} of run {writer.run!r} in epoch "
            f"{writer.epoch}: another trainer writes under the same name; stop one, and start the other again",
            epoch=writer.epoch,
        )

    async def run(self) -> NoReturn:
        """Deliver forever, over as many connections as it takes; raise what another connection would not mend.

        That is a newer epoch (`FencedError`), a store that is another one or has lost acked data (`StorageError`), a
        server that has a successor (`ReshardedError`), or a refused batch. Cancellation: the next call, or the next
        hello of the same client in the same epoch, resumes.
        """
        while True:
            try:
                await self._run_connection()
            except HeadraceError as exc:
                # The shard accepted these credentials before, so its certificate has expired or its token has changed.
                # Both are mended at the server; until then this is an outage like any other.
                was_authorized = self._has_connected and isinstance(exc, UnauthorizedError)
                if not (_is_transient(exc) or was_authorized):
                    self.last_error = exc
                    raise
                self._note_failure(exc)
                self._is_lost |= isinstance(exc, StaleTermError)
                if self._is_lost and self._resolver is not None:
                    self._resolver.lost(self.shard.shard, (self.shard.host, self.shard.port))
                at_most_s, at_least_s = math.inf, exc.retry_after_s if isinstance(exc, OverloadedError) else 0
                if self._resolver is not None and self._resolver.places.standbys:
                    at_most_s = _SEARCH_S
                if isinstance(exc, UnavailableError) and exc.moves_to is not None:
                    self._moves_to = (exc.moves_to.host, exc.moves_to.port)
                    self._moves_until_s = time.monotonic() + _MOVE_S
                backoff = self._moving if time.monotonic() < self._moves_until_s else self._backoff
                await asyncio.sleep(backoff.next_s(at_least_s=at_least_s, at_most_s=at_most_s))

    async def _run_connection(self) -> NoReturn:
        await self._find_again()
        self._is_lost = True  # until the shard has said hello there
        async with await self._connect(self.shard.host, self.shard.port) as client:
            client.places = None if self._resolver is None else self._resolver.places
            try:
                request = self._writer.hello(self._tables, after_step=self._after_step, updated_only=self._updated_only)
                reply = await client.hello(request, timeout_s=self._config.connect_timeout_s)
            except OwnedError as exc:  # the tables were this run's when it attached them
                raise FencedError(f"a table was taken over: {exc}", epoch=self._writer.epoch) from exc
            if reply.server_id != self.server_id:
                await self._check_place(reply)
            self._resume(reply)
            self._is_lost, self._moves_until_s = False, -math.inf
            try:
                await self._send_all(client)
            finally:
                self.is_connected, self._disconnected_s = False, time.monotonic()

    async def _find_again(self) -> None:
        """Ask where the shard is by now, if it was not where it should be."""
        resolver = self._resolver
        if resolver is None or resolver.places.server_id != self.server_id:
            return
        if self._moves_to is not None and time.monotonic() < self._moves_until_s:
            host, port = self._moves_to
        else:
            if self._is_lost:
                await resolver.refresh()
            host, port = resolver.places[self.shard.shard].address
        if (host, port) != (self.shard.host, self.shard.port):
            self.shard = replace(self.shard, host=host, port=port)
            _log.warning("%s has moved", self.shard)

    async def _check_place(self, reply: Any) -> None:
        """Another store answers here: raise `UnavailableError` if ours is elsewhere now, and else take the new one."""
        resolver = self._resolver
        if resolver is None or resolver.places.server_id != self.server_id:
            return
        here = (self.shard.host, self.shard.port)
        resolver.lost(self.shard.shard, here)
        await resolver.refresh()
        if resolver.places[self.shard.shard].address != here:
            raise UnavailableError(f"{self.shard}: another server has this address now; the shard has moved")
        if self._config.on_new_store == "resync":
            resolver.places = ShardPlaces.of_hello(reply, *here)

    def _note_failure(self, exc: HeadraceError) -> None:
        # Warn once per outage, not per attempt; the statistics have the rest. Warn again when the shard refuses the
        # credentials: somebody has to act.
        is_refusal = isinstance(exc, UnauthorizedError) and not isinstance(self.last_error, UnauthorizedError)
        level = logging.WARNING if self.last_error is None or is_refusal else logging.DEBUG
        _log.log(level, "%s: %s; trying again", self.shard, exc)
        self.last_error = exc

    def _resume(self, reply: Any) -> None:
        """Continue where the shard is: drop the batches that it has, send the others again."""
        if reply.shard != self.shard.shard or len(reply.shards) != self.shard.num_shards:
            raise StorageError(
                f"{self.shard} of {self.shard.num_shards} is now shard {reply.shard} of {len(reply.shards)}: "
                "the server was set up again; restart the trainer"
            )
        durable_seq = reply.last_client_seq
        if reply.server_id != self.server_id:
            self._begin_anew(reply.server_id, durable_seq)
        if durable_seq < self.acked_seq:
            self._go_back(durable_seq, is_expected=bool(reply.may_be_set_back))
        if durable_seq > self._last_sent_seq:
            raise self.other_writer_error(durable_seq)
        self._num_sent = self._sent_bytes = 0
        while self._unacked and self._unacked[0].client_seq <= durable_seq:
            self._ack_first()
        self._limits = reply.limits
        self.num_reconnects += self._has_connected
        self._has_connected = self.is_connected = True

    def _begin_anew(self, server_id: str, durable_seq: int) -> None:
        """Continue with an empty store in place of the old one."""
        if self._config.on_new_store != "resync" or durable_seq:
            raise StorageError(
                f"{self.shard} is another store than before ({server_id}, was {self.server_id}): what was acked is "
                "not there; restart the trainer, or set on_new_store to resync to send every row again"
            )
        _log.warning("%s is another store than before: sending every row again", self.shard)
        # First, so that whoever sees the new store's identity or place also sees that it is new.
        self._generation = self._on_loss(None)
        self.server_id = server_id
        self._number_again(after_seq=0)

    def _go_back(self, durable_seq: int, *, is_expected: bool) -> None:
        """Continue with a shard that lacks batches it had acked, because it was restored or set back."""
        mode = self._config.on_set_back
        what = f"{self.shard} has lost acked data: it had acked batch {self.acked_seq}, and now holds batches up to "
        what += str(durable_seq)
        if mode == "raise" or (mode == "auto" and not is_expected):
            raise StorageError(
                f"{what}: was its directory set back to an older copy? Put the newer one back, or start the "
                "trainer again, from a checkpoint with load_state_dict or with publish='all', to send what is needed; "
                "with on_set_back='resend' a trainer sends the shard's rows again and goes on"
            )
        _log.warning("%s: sending all rows of the shard again", what)
        # First, as for a new store.
        self._generation = self._on_loss(self.shard.shard)
        self._number_again(after_seq=durable_seq)

    def _number_again(self, *, after_seq: int) -> None:
        """Number what is not acked anew, from the last batch that the shard has."""
        self.place, self._next_seq = (0, 0), after_seq + 1
        self.acked_seq = self._last_sent_seq = after_seq
        for batch in (*self._unacked, self._next_batch):
            if batch is not None:
                batch.client_seq, batch.num_sends, batch.is_acked = self._next_seq, 0, False
                self._next_seq += 1
                self._strip_step_mark(batch)

    def _strip_step_mark(self, batch: _Batch) -> None:
        """Remove a step mark that is not true of a shard that has lost rows: they come with later flushes."""
        if batch.origin.flush.num_losses < self._generation:
            batch.message.ends_step = batch.message.is_exact_cut = False

    async def _send_all(self, client: ParamServerClient) -> NoReturn:
        async with task_group(_decisive) as sends:
            sends.create_task(self._watch_end(client))
            if self._resolver is not None and self._resolver.places.standbys:
                sends.create_task(self._watch_silence(self._resolver))
            while True:
                batch = self._take_next()
                if batch is None:
                    self._wake.clear()
                    await self._wake.wait()
                else:
                    sends.create_task(self._send(client, batch))

    async def _watch_end(self, client: ParamServerClient) -> NoReturn:
        """Connect again at once when the connection ends: with nothing to send, nothing else would tell of a move."""
        raise await client.wait_closed()

    async def _watch_silence(self, resolver: Resolver) -> NoReturn:
        """Ask whether a standby has taken over while the shard does not answer: a host that vanished closes nothing."""
        while True:
            acked_seq = self.acked_seq
            await asyncio.sleep(_SILENT_S)
            if not self._num_sent or self.acked_seq > acked_seq:
                continue
            await resolver.refresh()
            place = resolver.places[self.shard.shard]
            if place.address != (self.shard.host, self.shard.port):
                raise StaleTermError(f"{self.shard} does not answer, and a standby has taken over in term {place.term}")

    def _take_next(self) -> _Batch | None:
        """Return the next batch to send on this connection; None if there is none, or no room in the window."""
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
        # One message always fits, or a small window would never open.
        if self._num_sent and (self._num_sent >= max_messages or self._sent_bytes + size_bytes > max_bytes):
            return None
        if not is_resent:
            self._unacked.append(batch)
            self._next_batch = None
        self._num_sent += 1
        self._sent_bytes += size_bytes
        return batch

    def _number_next(self) -> _Batch | None:
        """Return the first batch that was never sent, split off the oldest flush."""
        while self._next_batch is None and self._flushes:
            origin = self._flushes[0]
            if origin.messages is None:
                limits = self._limits
                max_bytes = min(self._config.message_bytes, limits.max_frame_bytes, limits.max_inflight_bytes)
                origin.messages = origin.flush.messages(self.shard.shard, max_bytes - self._names_bytes)
            message = next(origin.messages, None)
            if message is None:
                self._flushes.popleft()
                origin.is_split = True
                self._settle(origin)
            else:
                origin.num_unacked += 1
                self._next_batch = _Batch(self._next_seq, message, origin)
                self._strip_step_mark(self._next_batch)
                self._next_seq += 1
        return self._next_batch

    async def _send(self, client: ParamServerClient, batch: _Batch) -> None:
        message, writer, flush = batch.message, self._writer, batch.origin.flush
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
            cost_percent=flush.cost_percent if message.ends_step else None,
            is_cost_bound=flush.is_cost_bound if message.ends_step else None,
            num_unstreamed=(flush.num_unstreamed or None) if message.ends_step else None,
            oldest_us=message.oldest_us,
            is_recorded=True if message.is_exact_cut and flush.mark is not None and flush.mark.is_recorded else None,
        )
        batch.num_sends += 1
        self._last_sent_seq = max(self._last_sent_seq, batch.client_seq)
        reply = await client.set_embeddings(request, timeout_s=self._config.request_timeout_s)
        if reply.is_duplicate and batch.num_sends == 1:
            raise self.other_writer_error(batch.client_seq)
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
        self._moving.reset()
        self.last_error = None
        self._wake.set()

    def _ack_first(self) -> None:
        batch = self._unacked.popleft()
        self.acked_seq = batch.client_seq
        batch.origin.num_unacked -= 1
        self._settle(batch.origin)

    def _settle(self, origin: _ShardFlush) -> None:
        if origin.is_split and not origin.num_unacked:
            self._on_durable(origin.flush)

    def _wire_bytes(self, batch: _Batch) -> int:
        return batch.message.size_bytes + self._names_bytes


def _is_transient(exc: HeadraceError) -> bool:
    """Return whether another connection may succeed."""
    # A plain HeadraceError is an internal failure of the shard; its supervisor restarts it.
    is_order = isinstance(exc, SequenceGapError | ProtocolError)
    return exc.retriable or is_order or type(exc) is HeadraceError


def _decisive(errors: Sequence[BaseException]) -> BaseException:
    """Return the error that decides how to continue. A refusal makes gaps of all later batches, so gaps decide last."""
    ours = [exc for exc in errors if isinstance(exc, HeadraceError)]
    bugs = [exc for exc in errors if not isinstance(exc, HeadraceError)]
    refusals = [exc for exc in ours if not _is_transient(exc)]
    overloads = [exc for exc in ours if isinstance(exc, OverloadedError)]
    others = [exc for exc in ours if not isinstance(exc, SequenceGapError)]
    return (bugs or refusals or overloads or others or ours)[0]
