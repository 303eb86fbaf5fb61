"""One shard's channel against a fake shard over loopback: exactly once, in order, over any failures of connections."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_shard import WAIT_S, FakeShard, FakeStore, Fault
from trainer_tables import WRITER, Submitted, Trained

from headrace.paramserver.rpc.admission import ServerLimits
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.resolver import Resolver
from headrace.paramserver.rpc.shard_places import ShardPlace, ShardPlaces
from headrace.schemas.errors import (
    ConfigError,
    FencedError,
    HeadraceError,
    NonFiniteError,
    OverloadedError,
    RowRangeError,
    SequenceGapError,
    StorageError,
    UnauthorizedError,
    UnavailableError,
)
from headrace.schemas.idl import idl
from headrace.schemas.partition_map import PartitionMap
from headrace.streamer.config import StreamerConfig
from headrace.streamer.delivery.channel import ShardChannel, _decisive
from headrace.streamer.delivery.rendezvous import Rendezvous
from headrace.streamer.flush.layout import Flush

FAST = {"retry_min_s": 0.001, "retry_max_s": 0.01}


class Channel:
    """A running channel to shard 0 of a fake store."""

    def __init__(self, store: FakeStore, channel: ShardChannel, table: Trained) -> None:
        self.store, self.channel = store, channel
        self.shard: FakeShard = store.shards[0]
        self.submitted = Submitted([table])
        self.table = table
        self.task: asyncio.Task[Any] = asyncio.create_task(channel.run())
        self.durable: list[int] = []
        self.losses: list[int | None] = []
        self.changed = asyncio.Event()

    def on_durable(self, flush: Flush) -> None:
        self.durable.append(flush.step)
        self.changed.set()

    def on_loss(self, shard: int | None) -> int:
        self.losses.append(shard)
        return len(self.losses)

    def send(self, step: int, rows: range = range(50)) -> None:
        """Enqueue a flush of some rows, each worth the step's number."""
        self.table.update(rows, float(step))
        self.submitted.flusher.on_step(step)
        self.channel.enqueue(self.submitted.flushes[-1])

    async def deliver(self, step: int) -> None:
        """Send a flush, and wait until it is durable."""
        self.send(step)
        await self.until(lambda: self.durable[-1:] == [step])

    def replace_store(self) -> None:
        """Have another store, which is empty, at the same address."""
        self.shard.forget()
        self.store.server_id = "store-2"
        self.shard.drop_connections()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that an ack or the channel's end makes true."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                if self.task.done():
                    self.task.result()
                self.changed.clear()
                waiter = asyncio.create_task(self.changed.wait())
                await asyncio.wait([waiter, self.task], timeout=0.01, return_when=asyncio.FIRST_COMPLETED)
                waiter.cancel()

    async def error(self) -> BaseException:
        """Return the error that ends the channel."""
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(HeadraceError) as caught:
                await self.task
        return caught.value

    def sent_steps(self) -> list[int]:
        return [batch.step for batch in self.shard.received]


@asynccontextmanager
async def channel_to(
    store: FakeStore, *, resolver: Callable[[int], Resolver] | None = None, **settings: Any
) -> AsyncIterator[Channel]:
    table = Trained(num_rows=400, dim=60)
    config = StreamerConfig.load(environ={}, **{**FAST, **settings})
    connect = functools.partial(ParamServerClient.connect, timeout_s=WAIT_S)
    async with store:
        host, port = "127.0.0.1", store.shards[0].port
        rendezvous = Rendezvous(connect, timeout_s=WAIT_S, random=lambda: 0.5)
        found = await rendezvous.find_store([(host, port)], WRITER)
        await rendezvous.open_session(found.shards, WRITER, [table.tapped.spec])
        running: Channel | None = None
        channel = ShardChannel(
            found.shards[0],
            writer=WRITER,
            config=config,
            connect=connect,
            random=lambda: 0.5,
            on_durable=lambda flush: running.on_durable(flush) if running else None,
            on_loss=lambda shard: running.on_loss(shard) if running else 0,
            resolver=None if resolver is None else resolver(port),
        )
        channel.add_tables([table.tapped.spec])
        running = Channel(store, channel, table)
        try:
            yield running
        finally:
            running.task.cancel()
            await asyncio.wait([running.task])


async def test_flushes_arrive_in_order_and_are_acked() -> None:
    """Batches are numbered from 1 without a gap, in the order of the flushes."""
    async with channel_to(FakeStore()) as to:
        to.send(1)
        to.send(2)
        await to.until(lambda: to.durable == [1, 2])
        assert to.sent_steps() == [1, 2]
        assert [batch.client_seq for batch in to.shard.received] == [1, 2]
        assert to.channel.acked_seq == 2
        assert to.channel.num_reconnects == 0


@pytest.mark.parametrize("takes_effect", [False, True])
@pytest.mark.parametrize("at", [0, 1, 4])
async def test_dropped_connection_loses_and_repeats_nothing(takes_effect: bool, at: int) -> None:
    """A connection that breaks before or after a batch took effect costs a reconnect and nothing else."""
    async with channel_to(FakeStore(), message_bytes=16 * 1024) as to:
        to.shard.faults.extend([None] * at)
        to.shard.faults.append(Fault(takes_effect=takes_effect))
        to.send(1, range(400))
        to.send(2, range(400))
        await to.until(lambda: to.durable == [1, 2])
        seqs = [batch.client_seq for batch in to.shard.received]
        assert seqs == list(range(1, len(seqs) + 1))
        assert len(seqs) >= 12
        assert sum(batch.ends_step for batch in to.shard.received) == 2
        assert to.channel.num_reconnects >= 1
        assert to.channel.last_error is None


@pytest.mark.parametrize("takes_effect", [False, True])
async def test_compressed_batches_are_sent_again(takes_effect: bool) -> None:
    """With `compression`, a broken connection loses and repeats nothing either; both sizes count what is resent."""
    pytest.importorskip("zstandard", reason="needs the extra zstd")
    async with channel_to(FakeStore(compressions=["zstd"]), message_bytes=16 * 1024, compression="zstd") as to:
        to.shard.faults.extend([None, None, Fault(takes_effect=takes_effect)])
        to.send(1, range(400))
        to.send(2, range(400))
        await to.until(lambda: to.durable == [1, 2])
        assert [batch.client_seq for batch in to.shard.received] == list(range(1, len(to.shard.received) + 1))
        assert to.shard.num_packed == to.shard.num_requests
        assert 2 * to.channel.packed_bytes < to.channel.plain_bytes  # all elements of these rows are the same
        assert to.channel.plain_bytes > 2 * 400 * (60 * 4 + 8)


@pytest.mark.parametrize("settings", [{"compression": "zstd"}, {}])
async def test_a_shard_that_knows_no_compression_gets_plain_batches(settings: dict[str, Any]) -> None:
    """So does one that does, by default."""
    async with channel_to(FakeStore(compressions=None if settings else ["zstd"]), **settings) as to:
        await to.deliver(1)
        assert (to.shard.num_requests, to.shard.num_packed) == (1, 0)
        assert (to.channel.plain_bytes, to.channel.packed_bytes) == (0, 0)


async def test_the_last_message_of_a_step_tells_what_streaming_costs() -> None:
    """Of a flush in several messages, the one with the step mark has the flush's cost, and no other has any."""
    async with channel_to(FakeStore(), message_bytes=4096) as to:
        to.submitted.flusher.pace.cost_percent, to.submitted.flusher.pace.has_waited = 2.5, True
        await to.deliver(1)
        *others, last = to.shard.received
        assert others and all(batch.cost == (None, None) for batch in others)
        assert last.ends_step and last.cost == (2.5, True)


async def test_what_hello_says_is_durable_is_not_sent_again() -> None:
    """A batch that took effect before its connection broke is acked by the next hello alone."""
    async with channel_to(FakeStore()) as to:
        to.shard.faults.append(Fault(takes_effect=True))
        await to.deliver(1)
        assert to.shard.num_requests == 1


def test_decisive_of_several_errors_decides() -> None:
    """A bug decides before a refusal, a refusal before an overload, and a gap only if there is nothing else."""
    gap = SequenceGapError("batch 3, expected 2", expected_seq=2)
    lost, full = UnavailableError("lost"), OverloadedError("full", retry_after_s=1)
    refused, bug = RowRangeError("row 9"), ZeroDivisionError()
    order: list[Exception] = [gap, lost, full, refused, bug]
    for last in range(len(order)):
        assert _decisive(order[: last + 1]) is order[last]
        assert _decisive(order[last::-1]) is order[last]


async def test_many_faults_in_a_row() -> None:
    """Drops, refusals and stalls in any mix yield the same batches as without."""
    async with channel_to(FakeStore(), message_bytes=8 * 1024) as to:
        faults = [
            Fault(takes_effect=True),
            Fault(OverloadedError("full")),
            Fault(),
            None,
            Fault(UnavailableError("stopping")),
        ]
        to.shard.faults.extend(faults * 6)
        for step in range(1, 3):
            to.send(step, range(400))
        await to.until(lambda: to.durable == [1, 2])
        seqs = [batch.client_seq for batch in to.shard.received]
        assert seqs == list(range(1, len(seqs) + 1))
        rows = [row for batch in to.shard.received for row in batch.rows.get("t.weight", [])]
        assert sorted(rows) == sorted([*range(400), *range(400)])


async def test_overload_is_waited_for() -> None:
    """An overloaded shard gets the same batch again after the time that it asks for."""
    async with channel_to(FakeStore()) as to:
        to.shard.faults.append(Fault(OverloadedError("full", retry_after_s=0.05)))
        began_s = asyncio.get_running_loop().time()
        await to.deliver(1)
        assert asyncio.get_running_loop().time() - began_s >= 0.05
        assert to.shard.num_requests == 2


async def test_gap_is_filled() -> None:
    """A shard that never saw a batch refuses the later ones, and gets all of them in order."""
    async with channel_to(FakeStore(), message_bytes=8 * 1024) as to:
        # The first is refused once it has been sent with the others: these then find a gap.
        to.shard.faults.append(Fault(HeadraceError("the disk hiccups")))
        to.send(1, range(400))
        await to.until(lambda: to.durable == [1])
        seqs = [batch.client_seq for batch in to.shard.received]
        assert seqs == list(range(1, len(seqs) + 1))
        assert to.shard.num_requests > len(seqs)


@pytest.mark.parametrize(
    ("settings", "limits", "most"),
    [
        ({"window_messages": 3}, {}, 3),
        ({}, {"max_client_requests": 2}, 2),
        ({"window_bytes": 20 * 1024}, {}, 2),
        ({}, {"max_client_bytes": 20 * 1024, "max_frame_bytes": 16 * 1024, "max_hello_bytes": 16 * 1024}, 2),
    ],
)
async def test_window_bounds_what_is_unacked(settings: dict[str, Any], limits: dict[str, int], most: int) -> None:
    """Unanswered batches and bytes stay within the settings and the shard's limits."""
    store = FakeStore()
    store.shards = [FakeShard(store, 0)]
    store.shards[0].limits = ServerLimits(**limits)
    async with channel_to(store, message_bytes=8 * 1024, **settings) as to:
        to.shard.gate.clear()
        to.send(1, range(400))
        await to.until(lambda: to.shard.num_inflight == most)
        assert to.channel.describe().startswith(f"{to.channel.shard} has not acked {most} batches")
        to.shard.gate.set()
        await to.until(lambda: to.durable == [1])
        assert to.shard.max_inflight == most


async def test_stalled_shard_is_left_after_the_deadline() -> None:
    """A shard that does not answer in time gets a new connection, and acks its batches there."""
    async with channel_to(FakeStore(), request_timeout_s=0.05) as to:
        to.shard.gate.clear()
        to.send(1)
        await to.until(lambda: to.channel.last_error is not None)
        assert isinstance(to.channel.last_error, UnavailableError)
        to.shard.gate.set()
        await to.until(lambda: to.durable == [1])
        assert len(to.shard.received) == 1


def standing_by(
    standby: FakeStore, server_id: str, has_taken_over: asyncio.Event
) -> tuple[tuple[str, int], Callable[[int], Resolver]]:
    """Return a standby's place, and what makes a resolver that knows it; it answers once it has taken over."""
    place = "127.0.0.1", standby.shards[0].port
    standby.shards[0].term = 1  # type: ignore[attr-defined]

    async def ask(host: str, port: int) -> Any:
        if not has_taken_over.is_set():
            raise UnavailableError("a standby")
        places = [idl.ShardAddress(shard=0, host=host, port=port, term=1)]
        return idl.HelloReply(server_id=server_id, shard=0, shards=places, term=1)

    def resolver(port: int) -> Resolver:
        known = ShardPlaces(server_id, [ShardPlace("127.0.0.1", port)], standbys=[(0, *place)])
        return Resolver(known, [place], ask)

    return place, resolver


async def test_a_shard_that_falls_silent_is_left_for_its_standby(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that vanished closes no connection; long before a request times out the channel asks who took over."""
    monkeypatch.setattr("headrace.streamer.delivery.channel._SILENT_S", 0.05)
    store, standby = FakeStore(), FakeStore()
    has_taken_over = asyncio.Event()

    async with standby:
        place, resolver = standing_by(standby, store.server_id, has_taken_over)
        async with channel_to(store, resolver=resolver) as to:
            to.send(1)
            await to.until(lambda: to.durable == [1])
            to.shard.gate.clear()
            to.send(2)
            await to.until(lambda: len(to.shard.received) == 2)
            standby.shards[0].sessions = to.shard.sessions  # it has followed
            has_taken_over.set()
            await to.until(lambda: to.durable == [1, 2])
            assert to.channel.shard.port == place[1]


async def test_a_shard_with_standbys_is_looked_for_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long pauses are by then, a standby that has taken over is found soon."""
    monkeypatch.setattr("headrace.streamer.delivery.channel._SEARCH_S", 0.05)
    store, standby = FakeStore(), FakeStore()
    has_taken_over = asyncio.Event()

    async with standby:
        place, resolver = standing_by(standby, store.server_id, has_taken_over)
        async with channel_to(store, resolver=resolver, retry_max_s=3600) as to:
            to.send(1)
            await to.until(lambda: to.durable == [1])
            standby.shards[0].sessions = to.shard.sessions  # it has followed
            to.channel._backoff._ceiling_s = 3600  # after a long while
            await to.shard.stop()
            to.send(2)
            await to.until(lambda: to.channel.last_error is not None)
            has_taken_over.set()
            await to.until(lambda: to.durable == [1, 2])
            assert to.channel.shard.port == place[1]


async def test_a_shard_that_moves_is_awaited_where_it_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who hears from the owner where a shard moves to goes there, and asks nobody else."""
    monkeypatch.setattr("headrace.streamer.delivery.channel._MOVE_S", WAIT_S)
    store, standby = FakeStore(), FakeStore()
    async with standby:
        place, resolver = standing_by(standby, store.server_id, asyncio.Event())
        async with channel_to(store, resolver=resolver, retry_min_s=0.02, retry_max_s=3600) as to:
            to.send(1)
            await to.until(lambda: to.durable == [1])
            standby.shards[0].sessions = to.shard.sessions  # it has followed
            to.channel._backoff._ceiling_s = 3600
            moves_to = idl.ShardAddress(shard=0, host=place[0], port=place[1])
            to.shard.faults.append(Fault(UnavailableError("shard 0 moves", moves_to=moves_to)))
            standby.shards[0].refusals.append(UnavailableError("a standby"))
            to.send(2)
            await to.until(lambda: to.durable == [1, 2])
            assert to.channel.shard.port == place[1]
            assert not standby.shards[0].refusals


async def test_outage_and_return() -> None:
    """While the shard is away, the channel waits and describes that; then it delivers."""
    async with channel_to(FakeStore()) as to:
        await to.deliver(1)
        await to.shard.stop()
        to.send(2)
        await to.until(lambda: to.channel.last_error is not None)
        assert "not connected for" in to.channel.describe()
        await to.shard.start()
        await to.until(lambda: to.durable == [1, 2])
        assert to.sent_steps() == [1, 2]


async def test_credentials_that_have_served_are_shown_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server with a changed token or an expired certificate is away until it accepts the credentials again.

    The log warns of it once, even after a warning of the lost connection.
    """
    num_refused = 0

    async def refuse(*_: Any) -> Any:
        nonlocal num_refused
        num_refused += 1
        raise UnauthorizedError("the token is wrong for role writer")

    async with channel_to(FakeStore()) as to:
        await to.deliver(1)
        await to.shard.stop()
        to.send(2)
        await to.until(lambda: isinstance(to.channel.last_error, UnavailableError))
        with monkeypatch.context() as patched:
            patched.setattr(to.shard, "hello", refuse)
            await to.shard.start()
            await to.until(lambda: num_refused > 2)
            assert "the token is wrong" in str(to.channel.last_error)
            await to.shard.stop()
        await to.shard.start()
        await to.until(lambda: to.durable == [1, 2])
    ours = [record for record in caplog.records if record.name == "headrace.streamer.delivery.channel"]
    warnings = [record.getMessage() for record in ours if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert "the token is wrong" in warnings[1]


@pytest.mark.parametrize(
    "refusal", [FencedError("epoch 2 has taken over", epoch=2), RowRangeError("row 9"), NonFiniteError("row 3 is NaN")]
)
async def test_refusal_is_fatal(refusal: HeadraceError) -> None:
    """A refusal that no retry would mend ends the channel with the shard's message, also when gaps follow it."""
    async with channel_to(FakeStore(), message_bytes=8 * 1024) as to:
        to.shard.faults.append(Fault(refusal))
        to.send(1, range(400))
        error = await to.error()
        assert type(error) is type(refusal)
        assert str(error) == str(refusal)


async def test_newer_epoch_fences() -> None:
    """A trainer that returns after a newer one has taken over is fenced, and changes nothing."""
    async with channel_to(FakeStore()) as to:
        await to.deliver(1)
        to.shard.sessions[WRITER.run, WRITER.client].epoch = 2
        to.shard.drop_connections()
        to.send(2)
        assert isinstance(await to.error(), FencedError)
        assert to.sent_steps() == [1]


async def test_lost_acked_data_is_told() -> None:
    """A store that has lost acked batches is noticed at the next hello."""
    async with channel_to(FakeStore()) as to:
        to.send(1)
        to.send(2)
        await to.until(lambda: to.durable == [1, 2])
        to.shard.sessions[WRITER.run, WRITER.client].last_client_seq = 1
        to.shard.drop_connections()
        to.submitted.release()
        to.send(3)
        error = await to.error()
        assert isinstance(error, StorageError)
        assert "has lost acked data: it had acked batch 2, and now holds batches up to 1" in str(error)


@pytest.mark.parametrize(("mode", "is_archived"), [("resend", False), ("auto", True)])
async def test_a_shard_that_was_set_back_gets_its_rows_again(mode: str, is_archived: bool) -> None:
    """Batches continue after the shard's last one; no mark counts before a flush that has all rows of the shard."""
    async with channel_to(FakeStore(), on_set_back=mode) as to:
        to.shard.is_archived = is_archived
        for step in (1, 2, 3):
            await to.deliver(step)
            to.submitted.release()
        to.shard.set_back(WRITER, last_client_seq=1)
        to.send(4, range(10))
        await to.until(lambda: to.durable == [1, 2, 3, 4])
        assert to.losses == [0]
        assert to.channel.acked_seq == 2
        to.submitted.release()
        to.submitted.flusher.mark_partitions(PartitionMap.first(1).owners == 0, num_losses=1)
        to.send(5, range(1))
        await to.until(lambda: to.durable[-1] == 5)
        after = to.shard.received[3:]
        assert [(batch.client_seq, batch.step, batch.ends_step) for batch in after] == [(2, 4, False), (3, 5, True)]
        assert len(after[-1].rows["t.weight"]) == 400


async def test_a_shard_that_is_set_back_twice_gets_its_rows_twice() -> None:
    """What was sent again and is lost again counts as lost."""
    async with channel_to(FakeStore(), on_set_back="resend") as to:
        for step in (1, 2):
            await to.deliver(step)
            to.submitted.release()
        for step in (3, 4):
            to.shard.set_back(WRITER, last_client_seq=0)
            await to.deliver(step)
            to.submitted.release()
        assert to.losses == [0, 0]
        assert [batch.client_seq for batch in to.shard.received[2:]] == [1, 1]
        assert not any(batch.ends_step for batch in to.shard.received[2:])


@pytest.mark.parametrize(("mode", "is_archived"), [("auto", False), ("raise", True)])
async def test_a_shard_that_was_set_back_is_told(mode: str, is_archived: bool) -> None:
    """Where nothing else is set, only a server with an archive is expected to be set back."""
    async with channel_to(FakeStore(), on_set_back=mode) as to:
        to.shard.is_archived = is_archived
        await to.deliver(1)
        to.shard.set_back(WRITER, last_client_seq=0)
        to.send(2)
        error = await to.error()
        assert isinstance(error, StorageError)
        assert "on_set_back='resend'" in str(error)


async def test_another_store_is_told() -> None:
    """Another store at the same address ends the channel; nothing is sent to it."""
    async with channel_to(FakeStore()) as to:
        await to.deliver(1)
        to.replace_store()
        to.send(2)
        error = await to.error()
        assert isinstance(error, StorageError)
        assert "another store" in str(error)
        assert not to.shard.received


async def test_resync_starts_over_with_another_store() -> None:
    """Under `resync` the new store gets batches from 1, no mark of the old ones, and every row is asked for."""
    async with channel_to(FakeStore(), on_new_store="resync") as to:
        await to.deliver(1)
        to.replace_store()
        to.send(2, range(10))
        await to.until(lambda: to.durable == [1, 2])
        assert (to.losses, to.channel.server_id) == ([None], "store-2")
        to.submitted.release()
        to.submitted.flusher.mark_all(num_losses=1)
        to.send(3, range(1))
        await to.until(lambda: to.durable == [1, 2, 3])
        assert [(b.client_seq, b.step, b.ends_step) for b in to.shard.received] == [(1, 2, False), (2, 3, True)]
        assert len(to.shard.received[1].rows["t.weight"]) == 400


@pytest.mark.parametrize("reconnects", [False, True])
async def test_trainer_of_the_same_name_is_found_out(reconnects: bool) -> None:
    """A batch that was never sent and yet is durable can only be another trainer's: no ack, no hello is believed."""
    async with channel_to(FakeStore()) as to:
        await to.deliver(1)
        to.shard.sessions[WRITER.run, WRITER.client].last_client_seq = 3 if reconnects else 2
        if reconnects:
            to.shard.drop_connections()
        to.send(2)
        error = await to.error()
        assert isinstance(error, FencedError)
        assert "another trainer writes under the same name" in str(error)
        assert to.durable == [1]


async def test_resharded_server_is_told() -> None:
    """A server that has come back with another number of shards ends the channel: rows live elsewhere now."""
    async with channel_to(FakeStore()) as to:
        await to.deliver(1)
        to.store.shards.append(to.shard)
        to.shard.drop_connections()
        to.send(2)
        error = await to.error()
        assert isinstance(error, StorageError)
        assert "is now shard 0 of 2" in str(error)
        to.store.shards.pop()


async def test_lowered_frame_limit_is_told() -> None:
    """A server that has come back with shorter frames than a batch that is cut already says which setting it is."""
    async with channel_to(FakeStore()) as to:
        to.shard.gate.clear()
        to.send(1, range(400))
        await to.until(lambda: to.shard.num_inflight == 1)
        to.shard.limits = ServerLimits(max_frame_bytes=64 * 1024, max_hello_bytes=32 * 1024)
        to.shard.sessions[WRITER.run, WRITER.client].last_client_seq = 0
        to.shard.drop_connections()
        error = await to.error()
        assert isinstance(error, ConfigError)
        assert "now reads frames of 65536 bytes" in str(error)
