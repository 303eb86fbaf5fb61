"""One shard's channel against a fake shard over loopback: exactly once, in order, over any failures of connections."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from fake_shard import WAIT_S, FakeShard, FakeStore, Fault
from text_scripts import Script, scripts
from trainer_tables import WRITER, Submitted, Trained

from headrace.paramserver.rpc.admission import ServerLimits
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.resolver import Resolver
from headrace.paramserver.rpc.shard_places import ShardPlace, ShardPlaces
from headrace.schemas.errors import (
    FencedError,
    HeadraceError,
    NonFiniteError,
    OverloadedError,
    RowRangeError,
    SequenceGapError,
    UnauthorizedError,
    UnavailableError,
)
from headrace.schemas.idl import idl
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

    def send(self, step: int, rows: Iterable[int] = range(50)) -> None:
        """Enqueue a flush of some rows, each worth the step's number."""
        self.table.update(rows, float(step))
        self.submitted.flusher.on_step(step)
        self.channel.enqueue(self.submitted.flushes[-1])

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


class _Script:
    """Commands of `testdata/channel.txt`: a channel, which `open` opens, and its shard."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def open(self, **settings: Any) -> None:
        self.to = await self._stack.enter_async_context(channel_to(FakeStore(), **settings))
        self.shard, self.session_of = self.to.shard, self.to.shard.sessions[WRITER.run, WRITER.client]

    def fault(self, kind: str | None, *, effect: bool = False) -> None:
        if kind == "drop":
            self.shard.faults.append(Fault(takes_effect=effect))
        else:
            self.shard.faults.append(None if kind is None else Fault(_ERRORS[kind]))

    def send(self, step: int, rows: int | list[int] = 49) -> None:
        self.to.send(step, rows if isinstance(rows, list) else range(rows + 1))

    async def durable(self, steps: int | list[int]) -> None:
        """Wait until just these steps are."""
        steps = steps if isinstance(steps, list) else [steps]
        await self.to.until(lambda: self.to.durable == steps)

    async def ends(self) -> str:
        """Wait for the error that ends the channel."""
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(HeadraceError) as caught:
                await self.to.task
        return f"{type(caught.value).__name__}: {self._public(str(caught.value))}"

    async def troubled(self) -> str:
        """Wait for a connection's error."""
        await self.to.until(lambda: self.to.channel.last_error is not None)
        return type(self.to.channel.last_error).__name__

    def described(self) -> str:
        return re.sub("for .*", "for some time", self._public(self.to.channel.describe()))

    async def inflight(self, number: int) -> None:
        await self.to.until(lambda: self.shard.num_inflight == number)

    def received(self) -> str:
        """Tell of the batches that took effect."""
        lines = []
        for each in self.shard.received:
            num_rows = sum(map(len, each.rows.values()))
            lines.append(f"{each.client_seq}: step {each.step}, {num_rows} rows{' ends it' * each.ends_step}")
        return "\n".join(lines)

    def batches(self) -> str:
        """Tell, where they are many, that they came once and in order, how many rows and which ends."""
        batches = self.shard.received
        assert [each.client_seq for each in batches] == [*range(1, len(batches) + 1)]
        rows = [(each.step, row) for each in batches for row in each.rows.get("t.weight", [])]
        assert len({*rows}) == len(rows)
        return f"{len(rows)} rows, ends {[each.step for each in batches if each.ends_step]}"

    def costs(self) -> str:
        others = {each.cost for each in self.shard.received if not each.ends_step}
        return f"{others} {[each.cost for each in self.shard.received if each.ends_step]}"

    def requests(self) -> str:
        return str(self.shard.num_requests)

    def reconnects(self) -> str:
        return str(self.to.channel.num_reconnects)

    def acked(self) -> str:
        return str(self.to.channel.acked_seq)

    def losses(self) -> str:
        """Tell which shard's rows were asked for, of each time; None: all rows."""
        return str(self.to.losses)

    def store(self) -> str:
        return self.to.channel.server_id

    def release(self) -> None:
        self.to.submitted.release()

    def again(self, *, shard: bool = False) -> None:
        """Mark all rows again, or the shard's."""
        flusher, num_losses = self.to.submitted.flusher, len(self.to.losses)
        if shard:
            flusher.mark_shards([0], num_losses=num_losses)
        else:
            flusher.mark_all(num_losses=num_losses)

    def cost(self, percent: float) -> None:
        pace = self.to.submitted.flusher.pace
        pace.cost_percent, pace.has_waited = percent, True

    def hold(self) -> None:
        self.shard.gate.clear()

    def answer(self) -> None:
        self.shard.gate.set()

    def drop(self) -> None:
        self.shard.drop_connections()

    async def stop(self) -> None:
        await self.shard.stop()

    async def start(self) -> None:
        await self.shard.start()

    def session(self, *, last: int | None = None, epoch: int | None = None) -> None:
        """Change what the shard knows of the trainer."""
        if last is not None:
            self.session_of.last_client_seq = last
        if epoch is not None:
            self.session_of.epoch = epoch

    def set_back(self, last: int) -> None:
        self.shard.set_back(WRITER, last_client_seq=last)

    def archive(self) -> None:
        self.shard.may_be_set_back = True

    def replace(self) -> None:
        """Have another store, which is empty, at the same address."""
        self.shard.forget()
        self.to.store.server_id = "store-2"
        self.shard.drop_connections()

    def grow(self) -> None:
        self.to.store.shards.append(self.shard)
        self._stack.callback(self.to.store.shards.pop)

    def frames(self, size_bytes: int) -> None:
        self.shard.limits = ServerLimits(max_frame_bytes=size_bytes, max_hello_bytes=size_bytes // 2)

    def _public(self, text: str) -> str:
        return text.replace(str(self.shard.port), "PORT")


_ERRORS: dict[str, HeadraceError] = {
    "FencedError": FencedError("epoch 2 has taken over", epoch=2),
    "HeadraceError": HeadraceError("the disk hiccups"),
    "NonFiniteError": NonFiniteError("row 3 is NaN"),
    "OverloadedError": OverloadedError("full"),
    "RowRangeError": RowRangeError("row 9"),
    "UnavailableError": UnavailableError("stopping"),
}


@scripts(__file__, "channel")
async def test_scripts(script: Script) -> None:
    """Whatever breaks, batches come once and in order, or the channel ends with a reason."""
    async with AsyncExitStack() as stack:
        await script.run_async(_Script(stack))


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


async def test_a_channel_with_nothing_to_send_connects_again() -> None:
    """A channel whose connection ends says hello anew, so that it hears where its shard is by now."""
    async with channel_to(FakeStore()) as to:
        to.send(1)
        await to.until(lambda: to.durable == [1])
        to.shard.drop_connections()
        await to.until(lambda: to.channel.num_reconnects == 1)


def test_decisive_of_several_errors_decides() -> None:
    """A bug decides before a refusal, a refusal before an overload, and a gap only if there is nothing else."""
    gap = SequenceGapError("batch 3, expected 2", expected_seq=2)
    lost, full = UnavailableError("lost"), OverloadedError("full", retry_after_s=1)
    refused, bug = RowRangeError("row 9"), ZeroDivisionError()
    order: list[Exception] = [gap, lost, full, refused, bug]
    for last in range(len(order)):
        assert _decisive(order[: last + 1]) is order[last]
        assert _decisive(order[last::-1]) is order[last]


async def test_overload_is_waited_for() -> None:
    """An overloaded shard gets the same batch again after the time that it asks for."""
    async with channel_to(FakeStore()) as to:
        to.shard.faults.append(Fault(OverloadedError("full", retry_after_s=0.5)))
        began_s = asyncio.get_running_loop().time()
        to.send(1)
        await to.until(lambda: to.durable == [1])
        assert asyncio.get_running_loop().time() - began_s >= 0.5
        assert to.shard.num_requests == 2


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
        to.send(1)
        await to.until(lambda: to.durable == [1])
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
