"""The engine on real NATS servers: appends, reads, and what it says when servers die, pause, or are full."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from nats_cluster import Links, access_of, append_surely, needs_nats_server
from nats_servers import NatsServers

from headrace.paramserver.log.jetstream import nats_engine
from headrace.paramserver.log.jetstream.engine import PublishOutcome, PublishReply
from headrace.paramserver.log.jetstream.nats_address import NatsAccess, NatsLogAddress
from headrace.paramserver.log.jetstream.nats_client import NatsClient
from headrace.paramserver.log.jetstream.nats_engine import NatsConnection, NatsEngine
from headrace.schemas.errors import GoneError, RequestError, UnavailableError

pytestmark = needs_nats_server
_DEADLINE_S = 40.0


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for an answer for as long as a busy server takes; a log asks another one after two seconds."""
    for ask in (NatsClient.request, NatsClient.ask):
        monkeypatch.setitem(ask.__kwdefaults__, "timeout_s", _DEADLINE_S)
    monkeypatch.setattr(nats_engine, "_READ_TIMEOUT_S", _DEADLINE_S)


@asynccontextmanager
async def connected(engine: NatsEngine) -> AsyncIterator[NatsConnection]:
    """Connect to whichever server answers."""
    connection: NatsConnection | None = None
    async with asyncio.timeout(_DEADLINE_S):
        while connection is None:
            with contextlib.suppress(UnavailableError):
                connection = await engine.connect()
    try:
        yield connection
    finally:
        await connection.close()


async def publish_all(connection: NatsConnection, messages: list[Any], expected_last: int) -> list[PublishReply]:
    """Publish messages without waiting, each behind the one before, and return the replies."""
    replies, done = list[PublishReply](), asyncio.Event()

    def take(reply: PublishReply) -> None:
        replies.append(reply)
        if len(replies) == len(messages):
            done.set()

    for expected, message in enumerate(messages, expected_last):
        segments = [message] if isinstance(message, (bytes, memoryview)) else message
        connection.publish(segments, expected_last=expected, on_reply=take)
    await asyncio.wait_for(done.wait(), _DEADLINE_S)
    return replies


async def publish(connection: NatsConnection, message: Any, expected_last: int) -> PublishReply:
    """Publish one message and return the reply."""
    (reply,) = await publish_all(connection, [message], expected_last)
    return reply


async def read_all(connection: NatsConnection, num_messages: int, from_seq: int = 1) -> list[bytes]:
    """Read until there are so many messages; check that they have no gap."""
    messages: list[bytes] = []
    async with asyncio.timeout(_DEADLINE_S):
        while len(messages) < num_messages:
            found = await connection.read(from_seq + len(messages), max_bytes=1 << 20)
            assert [each.seq for each in found] == [from_seq + len(messages) + at for at in range(len(found))]
            messages += [bytes(each.payload) for each in found]
    return messages


@pytest.mark.usefixtures("patient")
class TestPublish:
    async def test_acks_at_the_next_seq_and_refuses_any_other(self, open_stream: Any) -> None:
        """A message gets in only directly behind the expected one; a refusal names the last seq."""
        async with connected(await open_stream()) as connection:
            assert await publish(connection, b"a", 0) == PublishReply(PublishOutcome.ACKED, 1)
            assert await publish(connection, [b"b", memoryview(b"cd"), b""], 1) == PublishReply(PublishOutcome.ACKED, 2)
            for wrong in (0, 1, 7):
                reply = await publish(connection, b"x", wrong)
                assert (reply.outcome, reply.seq) == (PublishOutcome.WRONG_LAST, 2)
            assert await read_all(connection, 2) == [b"a", b"bcd"]

    async def test_pipelined_messages_are_acked_in_order(self, open_stream: Any) -> None:
        """A window of messages is sent without waiting; nothing of it gets in behind a refused one."""
        async with connected(await open_stream()) as connection:
            replies = await publish_all(connection, [b"x"] * 5, 1)
            assert {reply.outcome for reply in replies} == {PublishOutcome.WRONG_LAST}
            messages = [b"%d" % number + bytes(10_000) for number in range(100)]
            replies = await publish_all(connection, messages, 0)
            assert replies == [PublishReply(PublishOutcome.ACKED, seq) for seq in range(1, 101)]
            assert await read_all(connection, 100) == messages

    async def test_largest_message_gets_in_and_a_larger_one_keeps_the_connection(self, open_stream: Any) -> None:
        """A message of `max_message_bytes` is acked; one byte more is refused here, before the server hangs up."""
        async with connected(await open_stream()) as connection:
            assert connection.max_message_bytes == (1 << 20) - 1024
            body = bytes(connection.max_message_bytes)
            reply = await publish(connection, [body, b"x"], 0)
            assert reply.outcome is PublishOutcome.TOO_LARGE
            assert (await publish(connection, body, 0)).outcome is PublishOutcome.ACKED
            # No server may have it yet.
            assert await read_all(connection, 1) == [body]

    async def test_full_stream_refuses_and_takes_again_after_a_purge(self, open_stream: Any) -> None:
        """A full stream says so, nothing behind the refused message gets in, and a purge makes room."""
        async with connected(await open_stream(max_bytes=2_000_000)) as connection:
            body, last = bytes(900_000), 0
            while (reply := await publish(connection, body, last)).outcome is PublishOutcome.ACKED and last < 10:
                last = reply.seq
            assert reply.outcome is PublishOutcome.FULL
            assert (await publish(connection, b"behind", last + 1)).outcome is PublishOutcome.WRONG_LAST
            await connection.purge(last)
            async with asyncio.timeout(_DEADLINE_S):  # replicas purge one after the other
                while (reply := await publish(connection, body, last)).outcome is PublishOutcome.FULL:
                    pass
            assert reply == PublishReply(PublishOutcome.ACKED, last + 1)

    async def test_missing_stream_is_away(self, cluster: NatsServers) -> None:
        """Nobody answers for a stream that does not exist; that proves nothing about the message."""
        async with connected(NatsEngine(access_of(cluster), "none")) as connection:
            assert (await publish(connection, b"x", 0)).outcome is PublishOutcome.AWAY
            with pytest.raises(UnavailableError, match="stream not found"):
                await connection.state()
            with pytest.raises(UnavailableError, match="503"):
                await connection.read(1, max_bytes=1)

    async def test_error_of_the_reply_handler_is_reported(self, open_stream: Any) -> None:
        """What a reply handler raises reaches the loop's exception handler, and the connection goes on."""
        seen: list[BaseException] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context["exception"]))

        def fail(reply: PublishReply) -> None:
            raise ValueError("planted")

        async with connected(await open_stream()) as connection:
            connection.publish([b"x"], expected_last=0, on_reply=fail)
            assert (await publish(connection, b"y", 1)).outcome is PublishOutcome.ACKED
        assert [str(exc) for exc in seen] == ["planted"]


@pytest.mark.usefixtures("patient")
class TestPublishBatch:
    async def test_all_or_none_get_in(self, open_stream: Any) -> None:
        """A batch goes directly behind the expected seq as a whole, or not at all."""
        async with connected(await open_stream()) as connection:
            first = await connection.publish_batch([b"a", b"b", b"c"], expected_last=0)
            assert first == PublishReply(PublishOutcome.ACKED, 3)
            for wrong in (1, 2, 9):
                reply = await connection.publish_batch([b"x", b"y"], expected_last=wrong)
                assert (reply.outcome, reply.seq) == (PublishOutcome.WRONG_LAST, 3)
            assert await connection.publish_batch([b"d"], expected_last=3) == PublishReply(PublishOutcome.ACKED, 4)
            assert await read_all(connection, 4) == [b"a", b"b", b"c", b"d"]

    async def test_two_writers_cannot_both_win(self, open_stream: Any) -> None:
        """Of two batches behind the same seq one gets in, and nothing of the other."""
        engine = await open_stream()
        async with connected(engine) as one, connected(engine) as other:
            for last in range(0, 160, 16):
                replies = await asyncio.gather(
                    one.publish_batch([b"one"] * 16, expected_last=last),
                    other.publish_batch([b"other"] * 16, expected_last=last),
                )
                assert sorted(reply.outcome.value for reply in replies) == ["acked", "wrong last seq"]
            messages = await read_all(one, 160)
            assert all(len(set(messages[at : at + 16])) == 1 for at in range(0, 160, 16))

    async def test_size_is_checked_before_anything_is_sent(self, open_stream: Any) -> None:
        """An empty batch, too many messages and a message that is too large send nothing."""
        async with connected(await open_stream()) as connection:
            for messages in ([], [b""] * 1001):
                with pytest.raises(RequestError):
                    await connection.publish_batch(messages, expected_last=0)
            reply = await connection.publish_batch([b"x", bytes(2 << 20)], expected_last=0)
            assert reply.outcome is PublishOutcome.TOO_LARGE
            assert (await connection.publish_batch([b""] * 1000, expected_last=0)).seq == 1000


@pytest.mark.usefixtures("patient")
class TestReading:
    async def test_get_asks_the_leader(self, open_stream: Any) -> None:
        """An acked message is there at once; a seq without one is None."""
        async with connected(await open_stream(first_seq=100)) as connection:
            assert (await publish(connection, b"x" * 1000, 99)).seq == 100
            found = await connection.get(100)
            assert found is not None
            assert (found.seq, bytes(found.payload)) == (100, b"x" * 1000)
            assert await connection.get(101) is None
            assert await connection.get(99) is None

    async def test_reads_are_bounded_by_bytes(self, open_stream: Any) -> None:
        """A read returns about the bytes that were asked for, and the next one goes on behind them."""
        async with connected(await open_stream()) as connection:
            reply = await connection.publish_batch([bytes(100_000)] * 8, expected_last=0)
            assert reply.seq == 8
            await read_all(connection, 8)
            found = await connection.read(1, max_bytes=250_000)
            assert 2 <= len(found) <= 4
            assert await connection.read(9, max_bytes=1) == []

    async def test_what_was_read_ahead_is_used_where_it_fits(self, open_stream: Any) -> None:
        """Reading goes on, back and ahead over full answers; what was asked for too early does not hide what is new."""
        async with connected(await open_stream()) as connection:
            await connection.publish_batch([b"%d" % number + bytes(50_000) for number in range(12)], expected_last=0)
            await read_all(connection, 12)
            for from_seq in (1, 3, 1, 9, 10, 12, 2):
                found = await connection.read(from_seq, max_bytes=100_000)
                assert found
                assert [each.seq for each in found] == list(range(from_seq, from_seq + len(found)))
                numbers = [each.seq - 1 for each in found]
                assert [bytes(each.payload) for each in found] == [b"%d" % each + bytes(50_000) for each in numbers]
            # A full answer at the end: the next one was asked for before there was anything.
            while (await connection.read(11, max_bytes=100_000))[-1].seq < 12:
                pass
            await connection.publish_batch([b"new"], expected_last=12)
            assert await read_all(connection, 1, from_seq=13) == [b"new"]

    async def test_slow_link_takes_its_time(
        self, open_stream: Any, cluster: NatsServers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A read goes on while messages come, however long it takes; when the link breaks, it returns those."""
        engine = await open_stream()
        messages = [b"%d" % number + bytes(100_000) for number in range(36)]
        async with connected(engine) as connection:
            for at in range(0, 36, 9):
                await connection.publish_batch(messages[at : at + 9], expected_last=at)
            await read_all(connection, 36)
        monkeypatch.setattr(nats_engine, "_READ_TIMEOUT_S", 2.5)  # the read takes longer
        with Links(cluster.servers) as links:
            links.slow_down(1 << 20)
            through = NatsEngine(NatsAccess(address=NatsLogAddress.parse(links.url)), engine.stream)
            async with connected(through) as connection:
                found = await connection.read(1, max_bytes=4 << 20)
                assert [bytes(each.payload) for each in found] == messages
            take = nats_engine._Read.take

            def take_some(read: Any, message: Any) -> None:
                take(read, message)
                if len(read.messages) == 4:
                    links.cut()

            monkeypatch.setattr(nats_engine._Read, "take", take_some)
            async with connected(through) as connection:
                found = await connection.read(1, max_bytes=4 << 20)
                assert 4 <= len(found) < 36
                assert [bytes(each.payload) for each in found] == messages[: len(found)]

    async def test_purged_messages_are_gone(self, open_stream: Any) -> None:
        """A read below the first message says so, also when nothing is left; the last seq survives."""
        async with connected(await open_stream()) as connection:
            await connection.publish_batch([b"a"] * 10, expected_last=0)
            await read_all(connection, 10)
            await connection.purge(6)
            state = await connection.state()
            assert (state.first_seq, state.last_seq) == (6, 10)
            await self._read_until_gone(connection, 5, "begins at 6")
            await connection.purge(1_000)
            state = await connection.state()
            assert (state.first_seq, state.last_seq) == (11, 10)
            await self._read_until_gone(connection, 10, "begins at 11")
            assert (await publish(connection, b"b", 10)).seq == 11

    async def _read_until_gone(self, connection: NatsConnection, seq: int, text: str) -> None:
        async with asyncio.timeout(_DEADLINE_S):  # a follower purges a moment later
            with pytest.raises(GoneError, match=text):
                while True:
                    await connection.read(seq, max_bytes=1 << 20)

    async def test_state_names_leader_and_peers(self, open_stream: Any, cluster: NatsServers) -> None:
        """The state has the stream's bound, its leader, and the other replicas."""
        engine = await open_stream(max_bytes=5 << 20)
        async with connected(engine) as connection, asyncio.timeout(_DEADLINE_S):
            while not (state := await connection.state()).is_healthy:
                await connection.get(1)  # a round trip
        assert state.max_bytes == 5 << 20
        assert state.leader is not None
        assert {state.leader, *(peer.name for peer in state.peers)} == {"n1", "n2", "n3"}


class TestConnection:
    async def test_closed_connection_answers_nothing(self, open_stream: Any) -> None:
        """After `close` every call says so at once, `lost` is done, and closing again does nothing."""
        async with connected(await open_stream()) as connection:
            await connection.close()
            await connection.close()
            assert connection.lost.result() == "closed"
            with pytest.raises(UnavailableError, match="closed"):
                connection.publish([b"x"], expected_last=0, on_reply=pytest.fail)
            for call in (connection.state(), connection.get(1), connection.read(1, max_bytes=1)):
                with pytest.raises(UnavailableError, match="closed"):
                    await call

    async def test_lost_connection_ends_what_waits(self, open_stream: Any, cluster: NatsServers) -> None:
        """When its server is killed, requests fail at once and no reply comes any more."""
        engine, replies = await open_stream(), list[PublishReply]()
        async with connected(engine) as connection:
            server = next(each for each in cluster.servers if each.name == connection.server.split()[0])
            server.pause()
            try:
                connection.publish([b"x"], expected_last=0, on_reply=replies.append)
                asking = connection._client.ask("STREAM.MSG.GET", engine.stream, {"seq": 1}, timeout_s=_DEADLINE_S)
                waiting = asyncio.ensure_future(asking)
                await asyncio.sleep(0)
            finally:
                server.kill()
            try:
                async with asyncio.timeout(_DEADLINE_S):
                    lost = await connection.lost
                    assert "connection lost" in lost and "stale" not in lost  # known at once, not by a missing answer
                    with pytest.raises(UnavailableError, match="connection lost"):
                        await waiting
                with pytest.raises(UnavailableError, match="connection lost"):
                    connection.publish([b"x"], expected_last=0, on_reply=replies.append)
                assert replies == []
            finally:
                server.start()
                server.wait_ready()

    async def test_servers_take_turns(self, open_stream: Any) -> None:
        """Each connection is to the next server, and a server that is away costs one attempt."""
        engine = await open_stream()
        names = []
        for _ in range(3):
            async with connected(engine) as connection:
                names.append(connection.server.split()[0])
        assert sorted(names) == ["n1", "n2", "n3"]

    async def test_paused_server_costs_one_deadline(self, open_stream: Any, cluster: NatsServers) -> None:
        """A paused server accepts connections and says nothing: connecting fails within its deadline."""
        engine, paused = await open_stream(), cluster.servers[0]
        paused.pause()
        try:
            async with asyncio.timeout(_DEADLINE_S):
                with pytest.raises(UnavailableError, match="says nothing"):
                    for _ in range(3):
                        await (await engine.connect()).close()
        finally:
            paused.resume()

    async def test_server_that_turns_silent_is_noticed(self, open_stream: Any, cluster: NatsServers) -> None:
        """A connection on which nothing comes any more is lost within seconds, also with unsent bytes."""
        engine = await open_stream()
        with Links(cluster.servers) as links:
            through = NatsEngine(NatsAccess(address=NatsLogAddress.parse(links.url)), engine.stream)
            async with connected(through) as connection:
                links.silence()
                for number in range(32):
                    connection.publish([bytes(1 << 19)], expected_last=number, on_reply=lambda _: None)
                with pytest.raises(UnavailableError, match="no answer"):
                    await connection.get(1)
                async with asyncio.timeout(_DEADLINE_S):
                    assert "stale" in await connection.lost

    async def test_nothing_of_an_ended_connection_is_sent_later(self, open_stream: Any, cluster: NatsServers) -> None:
        """What a connection has not sent when it is closed never reaches the stream."""
        engine = await open_stream()
        with Links(cluster.servers) as links:
            through = NatsEngine(NatsAccess(address=NatsLogAddress.parse(links.url)), engine.stream)
            async with connected(through) as connection:
                links.silence()
                for number in range(64):  # more than the sockets between take
                    connection.publish([b"old", bytes(1_000_000)], expected_last=number, on_reply=lambda _: None)
                async with asyncio.timeout(_DEADLINE_S):
                    await connection.close()
            links.mend()
            async with connected(through) as connection, connected(engine) as direct:
                assert (await connection.state()).last_seq < 64
                # All that is on its way comes before the answer to this: a full round over the same links.
                last = (await direct.state()).last_seq
                reply = await publish(direct, b"new", last)
                while reply.outcome is PublishOutcome.WRONG_LAST:
                    assert reply.seq < 64
                    reply = await publish(direct, b"new", reply.seq)
                assert (await connection.state()).last_seq < 65


class TestFaults:
    async def test_who_asks_again_is_answered_by_the_next_leader(self, open_stream: Any, cluster: NatsServers) -> None:
        """A question about a stream that comes while nobody leads it is never answered."""
        engine = await open_stream()
        await append_surely(engine, b"before", 0)
        leader = cluster.wait_leader(engine.stream)
        other = next(server for server in cluster.servers if server is not leader)
        client = await NatsClient.connect(access_of(cluster), other.host, other.port)
        leader.kill()
        try:
            answer: Any = {}
            while answer.get("cluster", {}).get("leader") is None:  # nobody leads it yet
                answer = await client.ask("STREAM.INFO", engine.stream, timeout_s=_DEADLINE_S, again_s=0.1)
            assert answer["cluster"]["leader"] != leader.name
        finally:
            await client.close()
            leader.start()
            leader.wait_ready()

    async def test_without_a_majority_nothing_is_acked(self, open_stream: Any, cluster: NatsServers) -> None:
        """With two of three servers paused, a message has no ack; it may get in later."""
        engine = await open_stream()
        leader = cluster.wait_leader(engine.stream)
        only = NatsAccess(address=NatsLogAddress.parse(f"nats://{leader.address}"))
        paused = [server for server in cluster.servers if server is not leader]
        replies: list[PublishReply] = []
        async with connected(NatsEngine(only, engine.stream)) as connection:
            for server in paused:
                server.pause()
            try:
                connection.publish([b"x"], expected_last=0, on_reply=replies.append)
                with pytest.raises(UnavailableError):
                    await connection.publish_batch([b"y"], expected_last=1)
                assert [reply for reply in replies if reply.outcome is PublishOutcome.ACKED] == []
            finally:
                for server in paused:
                    server.resume()
        # It may have got in after all; then it is at its place, and what comes next goes behind it.
        async with connected(engine) as connection:
            found = await connection.read(1, max_bytes=1)
            assert [bytes(each.payload) for each in found[:1]] in ([], [b"x"])
