"""A stream engine in memory that delays, loses, repeats, refuses and lies where the real one may.

Three servers hold one stream. One of them leads: it takes proposals, and commits them a little later. When it is
killed, paused or cut off, what it had not committed is lost, but for what the others had already got. A leader that
was paused or cut off goes on answering from its old state, with its old last seq, proposals included. A message that
was committed stays for good (`lose_tail` is the engine that breaks its own promise).

Everything runs on the event loop, and all chance comes from one generator: one seed, one schedule.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.paramserver.log.jetstream.engine import (
    PeerState,
    PublishOutcome,
    PublishReply,
    StoredMessage,
    StreamState,
)
from headrace.schemas.errors import ConfigError, GoneError, UnavailableError
from headrace.schemas.messages import Segment

__all__ = ["CALM", "ScriptedConnection", "ScriptedEngine", "ScriptedStream", "Weather"]

MAX_MESSAGE_BYTES = (1 << 20) - 1024
_MAX_READ = 200
_TIMEOUT_S = 1.0
_APART_S = 1e-7


@dataclass(frozen=True, kw_only=True, slots=True)
class Weather:
    """How a schedule's network and servers behave: seconds, and probabilities.

    Attributes:
        delay_s: Least and most of one way.
        spike: That a message takes up to `spike_s` instead.
        spike_s: See `spike`.
        commit_s: Most from proposal to commit.
        lose_request: That a publish never reaches the leader.
        lose_reply: That an answer is lost.
        duplicate: That a publish reaches the leader twice.
        late: That what was on its way when its connection was closed arrives all the same, up to `late_s` later.
        late_s: See `late`.
        behind: That a server answers a read from an older state.
        missing: That a single get finds nothing, though it is there.
        misroute: That a publish is led to a leader of before.
    """

    delay_s: tuple[float, float] = (0.0, 0.0)
    spike: float = 0.0
    spike_s: float = 0.0
    commit_s: float = 0.0
    lose_request: float = 0.0
    lose_reply: float = 0.0
    duplicate: float = 0.0
    late: float = 0.0
    late_s: float = 0.0
    behind: float = 0.0
    missing: float = 0.0
    misroute: float = 0.0


CALM = Weather()


@dataclass(slots=True, eq=False)
class _Proposal:
    first_seq: int
    payloads: Sequence[bytes]
    reply: Callable[[PublishReply], None]


@dataclass(slots=True, eq=False)
class _Leadership:
    """A server's time as the leader. `last_seq` counts proposals; `committed_seq` is frozen once it is over."""

    server: int
    last_seq: int
    committed_seq: int
    first_seq: int
    is_current: bool = True
    is_committing: bool = False
    proposals: list[_Proposal] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Server:
    name: str
    is_down: bool = False  # refuses connections
    silent_until_s: float = 0.0  # paused: accepts, and says nothing
    stale: _Leadership | None = None  # answers as the leader that it was
    connections: list[ScriptedConnection] = field(default_factory=list)


class ScriptedStream:
    """The servers, their stream, and what befalls them.

    Attributes:
        history: Every message that was ever committed, by seq.
        first_seq: Oldest message.
        last_seq: Last committed message.
        num_rewritten: Seqs that were given to a second message.
        sends: When each message was sent, by its bytes.
        num_sent_after_loss: Publishes that left over a connection that was lost before.
        num_moved: Purges beyond the last message.
        is_full: Refuse every publish.
        on_propose: Called with the leadership after each proposal.
        on_commit: Called with seq and bytes of each committed message.
    """

    def __init__(self, *, rng: random.Random | None = None, weather: Weather = CALM, begin_seq: int = 1) -> None:
        """Make an empty stream that begins at `begin_seq`, on the loop that runs."""
        self.loop = asyncio.get_running_loop()
        self.rng, self.weather = rng or random.Random(0), weather
        self.history: dict[int, bytes] = {}
        self.first_seq, self.last_seq = begin_seq, begin_seq - 1
        self.num_rewritten = self.num_sent_after_loss = self.num_moved = 0
        self.sends: dict[bytes, list[float]] = {}
        self.is_full = False
        self.on_propose: Callable[[_Leadership], None] | None = None
        self.on_commit: Callable[[int, bytes], None] = lambda seq, payload: None
        self.servers = [_Server(f"n{number}") for number in range(3)]
        self.leader: _Leadership | None = None
        self._is_held = False
        self._lead(0)

    # What befalls the servers.

    def hold(self) -> None:
        """Commit nothing until `release`."""
        self._is_held = True

    def release(self) -> None:
        """Undo `hold`."""
        self._is_held = False
        if self.leader is not None:
            self._commit_soon(self.leader)

    def lose_tail(self, count: int) -> None:
        """Lose committed messages, and all proposals: what an engine must never do."""
        self.last_seq -= count
        for server in self.servers:
            server.stale = None
        leader = self.leader
        assert leader is not None
        leader.proposals.clear()
        leader.last_seq = leader.committed_seq = self.last_seq

    def kill_leader(self, *, down_s: float, election_s: float) -> None:
        """Kill the leading server: its connections are lost, and it is back after `down_s`."""
        if (leader := self._depose(election_s)) is not None:
            self.kill_server(leader.server, down_s=down_s)

    def kill_server(self, number: int, *, down_s: float) -> None:
        """Kill one server."""
        server = self.servers[number]
        server.is_down, server.stale = True, None
        self.drop_connections(number)
        self.loop.call_later(down_s, lambda: setattr(server, "is_down", False))

    def pause_leader(self, *, pause_s: float, stale_s: float, election_s: float) -> None:
        """Stop the leading server; once it goes on it answers from its old state for `stale_s`."""
        if (leader := self._depose(election_s)) is None:
            return
        server = self.servers[leader.server]
        server.silent_until_s = self.loop.time() + pause_s
        self._make_stale(server, leader, pause_s + stale_s)

    def cut_leader(self, *, cut_s: float, election_s: float) -> None:
        """Cut the leading server off from the others, and not from its clients."""
        if (leader := self._depose(election_s)) is not None:
            self._make_stale(self.servers[leader.server], leader, cut_s)

    def elect(self, *, election_s: float) -> None:
        """Let another server lead; the old one knows at once."""
        self._depose(election_s)

    def drop_connections(self, number: int | None = None) -> None:
        """Close connections, all or those of one server."""
        for index, server in enumerate(self.servers):
            if number in (None, index):
                for connection in list(server.connections):
                    connection.lose("the server closed it")

    def heal(self) -> None:
        """Let all servers be well, with a leader, and calm weather."""
        self.weather, self.is_full, self._is_held = CALM, False, False
        for server in self.servers:
            server.is_down, server.silent_until_s, server.stale = False, 0.0, None
        if self.leader is None:
            self._lead(self.rng.randrange(3))

    def _make_stale(self, server: _Server, leader: _Leadership, for_s: float) -> None:
        server.stale = leader

        def end() -> None:
            if server.stale is leader:
                server.stale = None

        self.loop.call_later(for_s, end)

    def _depose(self, election_s: float) -> _Leadership | None:
        """End a leadership; of its proposals the first few survive it."""
        leader, self.leader = self.leader, None
        if leader is None:
            return None
        leader.is_current, leader.committed_seq, leader.first_seq = False, self.last_seq, self.first_seq
        survivors = leader.proposals[: self.rng.randint(0, len(leader.proposals))]
        self.loop.call_later(election_s, self._elected, leader.server, survivors)
        return leader

    def _elected(self, before: int, survivors: Sequence[_Proposal]) -> None:
        if self.leader is None:
            for proposal in survivors:
                self._store(proposal)  # nobody tells its writer
            self._lead(self.rng.choice([number for number in range(3) if number != before]))

    def _lead(self, server: int) -> None:
        self.leader = _Leadership(server, self.last_seq, self.last_seq, self.first_seq)
        self.servers[server].stale = None

    # What the leader does.

    def propose(
        self,
        leader: _Leadership,
        payloads: Sequence[bytes],
        expected: int | None,
        reply: Callable[[PublishReply], None],
    ) -> None:
        """Take a publish, or refuse it."""
        if expected is not None and expected != leader.last_seq:
            reply(PublishReply(PublishOutcome.WRONG_LAST, leader.last_seq, "wrong last sequence"))
        elif leader.is_current and self.is_full:
            reply(PublishReply(PublishOutcome.FULL, 0, "maximum bytes exceeded"))
        elif max(map(len, payloads)) > MAX_MESSAGE_BYTES:
            reply(PublishReply(PublishOutcome.TOO_LARGE, 0, "maximum payload exceeded"))
        else:
            first_seq = leader.last_seq + 1
            leader.last_seq += len(payloads)
            if leader.is_current:  # what a leader of before takes is never committed, and never answered
                leader.proposals.append(_Proposal(first_seq, payloads, reply))
                self._commit_soon(leader)
                if self.on_propose is not None:
                    self.on_propose(leader)

    def _commit_soon(self, leader: _Leadership) -> None:
        if not leader.is_committing:
            leader.is_committing = True
            self.loop.call_later(self.rng.uniform(0, self.weather.commit_s), self._commit, leader)

    def _commit(self, leader: _Leadership) -> None:
        leader.is_committing = False
        if not leader.is_current or self._is_held:
            return
        proposals, leader.proposals = leader.proposals, []
        for proposal in proposals:
            last_seq = self._store(proposal)
            proposal.reply(PublishReply(PublishOutcome.ACKED, last_seq))
        leader.committed_seq = self.last_seq

    def _store(self, proposal: _Proposal) -> int:
        assert proposal.first_seq == self.last_seq + 1
        for seq, payload in enumerate(proposal.payloads, proposal.first_seq):
            self.num_rewritten += seq in self.history
            self.history[seq] = payload
            self.last_seq = seq
            self.on_commit(seq, payload)
        return self.last_seq

    def purge(self, before_seq: int) -> None:
        """Remove messages; beyond the last one, move the last seq forward, as the real engine does."""
        self.first_seq = max(self.first_seq, before_seq)
        if before_seq > self.last_seq + 1:
            self.num_moved += 1

    # What a server answers.

    def leader_of(self, number: int) -> _Leadership | None:
        """Return the leader that a server knows; it may be one of before."""
        server = self.servers[number]
        if server.stale is not None:
            return server.stale
        if self.rng.random() < self.weather.misroute:
            stale = [each.stale for each in self.servers if each.stale is not None and not self.is_silent(each)]
            if stale:
                return self.rng.choice(stale)
        return self.leader

    def is_silent(self, server: _Server) -> bool:
        """Return whether a server is paused."""
        return self.loop.time() < server.silent_until_s

    def state(self, leader: _Leadership) -> StreamState:
        """Return what a leader says of the stream."""
        peers = tuple(
            PeerState(server.name, is_current=True, is_offline=server.is_down and leader.is_current, lag=0)
            for number, server in enumerate(self.servers)
            if number != leader.server
        )
        first_seq = self.first_seq if leader.is_current else leader.first_seq
        return StreamState(
            first_seq=first_seq,
            last_seq=self.last_seq if leader.is_current else leader.committed_seq,
            size_bytes=0,
            max_bytes=1 << 30,
            leader=self.servers[leader.server].name,
            peers=peers,
        )

    def delay_s(self) -> float:
        """Draw how long one way takes."""
        weather = self.weather
        if weather.spike and self.rng.random() < weather.spike:
            return self.rng.uniform(0, weather.spike_s)
        least, most = weather.delay_s
        return self.rng.uniform(least, most) if most else 0.0


class ScriptedConnection:
    """A connection to one server. Implements `StreamConnection`."""

    def __init__(self, stream: ScriptedStream, number: int) -> None:
        self.lost: asyncio.Future[str] = stream.loop.create_future()
        self.max_message_bytes = MAX_MESSAGE_BYTES
        self._stream, self._number = stream, number
        self._arrival_s = 0.0  # of the last publish: they do not overtake each other
        self._is_broken = False
        self._drops: bool | None = None  # what was on its way when the connection was lost; drawn then
        stream.servers[number].connections.append(self)

    @property
    def server(self) -> str:
        return self._stream.servers[self._number].name

    def lose(self, reason: str) -> None:
        if not self._is_broken:
            self._is_broken = True
            self._stream.servers[self._number].connections.remove(self)
            self._drops = self._stream.rng.random() >= self._stream.weather.late
            self._tell(reason)

    def _tell(self, reason: str) -> None:
        self.lost.set_result(reason)

    async def close(self) -> None:
        self.lose("closed")

    def _check(self) -> None:
        if self.lost.done():
            raise UnavailableError(f"the connection to {self.server} is lost: {self.lost.result()}")

    def publish(
        self, message: Sequence[Segment], *, expected_last: int | None, on_reply: Callable[[PublishReply], None]
    ) -> None:
        self._check()
        self.put_on_the_wire([b"".join(message)], expected_last, on_reply)

    def put_on_the_wire(
        self, payloads: Sequence[bytes], expected: int | None, on_reply: Callable[[PublishReply], None]
    ) -> None:
        """Send a publish on its way."""
        stream, weather = self._stream, self._stream.weather
        stream.num_sent_after_loss += self._is_broken
        for payload in payloads:
            stream.sends.setdefault(payload, []).append(stream.loop.time())
        if weather.lose_request and stream.rng.random() < weather.lose_request:
            return
        has_answered = False

        def reply(answer: PublishReply) -> None:
            if weather.lose_reply and stream.rng.random() < weather.lose_reply:
                return
            stream.loop.call_later(stream.delay_s(), answered, answer)

        def answered(answer: PublishReply) -> None:
            nonlocal has_answered
            if not self.lost.done() and not has_answered and not stream.is_silent(stream.servers[self._number]):
                has_answered = True
                on_reply(answer)

        # Timers of one time fire in any order.
        self._arrival_s = max(self._arrival_s + _APART_S, stream.loop.time() + stream.delay_s())
        stream.loop.call_at(self._arrival_s, self._arrive, payloads, expected, reply)
        if weather.duplicate and stream.rng.random() < weather.duplicate:
            stream.loop.call_later(3 * stream.delay_s(), self._arrive, payloads, expected, reply)

    def _arrive(self, payloads: Sequence[bytes], expected: int | None, reply: Callable[[PublishReply], None]) -> None:
        stream = self._stream
        server = stream.servers[self._number]
        if self._drops:
            return
        if self._drops is False and not server.is_down:
            stream.loop.call_later(stream.rng.uniform(0, stream.weather.late_s), self._lead, payloads, expected, reply)
        elif stream.is_silent(server):  # it reads its sockets when it goes on
            stream.loop.call_at(server.silent_until_s, self._lead, payloads, expected, reply)
        else:
            self._lead(payloads, expected, reply)

    def _lead(self, payloads: Sequence[bytes], expected: int | None, reply: Callable[[PublishReply], None]) -> None:
        stream = self._stream
        if stream.servers[self._number].is_down:
            return
        if (leader := stream.leader_of(self._number)) is not None:
            stream.propose(leader, payloads, expected, reply)
        elif stream.rng.random() < 0.7:
            reply(PublishReply(PublishOutcome.AWAY, 0, "no responders"))

    async def publish_batch(self, messages: Sequence[bytes], *, expected_last: int) -> PublishReply:
        self._check()
        stream = self._stream
        replied: asyncio.Future[PublishReply] = stream.loop.create_future()

        def on_reply(reply: PublishReply) -> None:
            if not replied.done():
                replied.set_result(reply)

        self.put_on_the_wire(list(messages), expected_last, on_reply)
        await asyncio.wait((replied, self.lost), timeout=_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not replied.done():
            raise UnavailableError(f"{self.server}: no answer to a batch")
        return replied.result()

    async def _ask(self) -> ScriptedStream:
        """Let a request and its answer travel; raise if there is none."""
        self._check()
        stream = self._stream
        server = stream.servers[self._number]
        delay_s = stream.delay_s()
        if stream.is_silent(server) or delay_s >= _TIMEOUT_S or stream.rng.random() < stream.weather.lose_reply:
            await asyncio.sleep(_TIMEOUT_S)
            raise UnavailableError(f"{self.server}: no answer")
        await asyncio.sleep(delay_s)
        self._check()
        return stream

    async def get(self, seq: int) -> StoredMessage | None:
        stream = await self._ask()
        leader = self._known_leader(stream)
        last_seq = stream.last_seq if leader.is_current else leader.committed_seq
        first_seq = stream.first_seq if leader.is_current else leader.first_seq
        is_here = first_seq <= seq <= last_seq and stream.rng.random() >= stream.weather.missing
        return self._message(seq) if is_here else None

    def _message(self, seq: int) -> StoredMessage:
        return StoredMessage(seq, memoryview(self._stream.history[seq]))

    def _known_leader(self, stream: ScriptedStream) -> _Leadership:
        if (leader := stream.leader_of(self._number)) is None:
            raise UnavailableError(f"{self.server}: no leader")
        return leader

    async def read(self, from_seq: int, *, max_bytes: int) -> list[StoredMessage]:
        stream = await self._ask()
        stale = stream.servers[self._number].stale
        last_seq = stream.last_seq if stale is None else stale.committed_seq
        first_seq = stream.first_seq if stale is None else stale.first_seq
        if from_seq < first_seq:
            raise GoneError(f"messages before {first_seq} were removed")
        if stream.weather.behind and stream.rng.random() < stream.weather.behind:
            last_seq -= stream.rng.randint(1, 5)
        messages: list[StoredMessage] = []
        for seq in range(from_seq, min(last_seq, from_seq + _MAX_READ - 1) + 1):
            messages.append(self._message(seq))
            max_bytes -= len(messages[-1].payload)
            if max_bytes <= 0:
                break
        return messages

    async def state(self) -> StreamState:
        stream = await self._ask()
        return stream.state(self._known_leader(stream))

    async def purge(self, before_seq: int) -> None:
        stream = await self._ask()
        if self._known_leader(stream).is_current:
            stream.purge(before_seq)


class ScriptedEngine:
    """One client's way to the servers. Implements `StreamEngine`.

    Attributes:
        is_cut: Refuse to connect.
        is_unwelcome: Refuse our credentials.
        connections: Those that are open.
    """

    connection_type = ScriptedConnection

    def __init__(self, stream: ScriptedStream) -> None:
        self.is_cut = self.is_unwelcome = False
        self.connections: list[ScriptedConnection] = []
        self._stream = stream
        self._next = stream.rng.randrange(3)

    async def connect(self) -> ScriptedConnection:
        stream = self._stream
        self._next = (self._next + 1) % len(stream.servers)
        number = self._next
        await asyncio.sleep(stream.delay_s())
        server = stream.servers[number]
        if self.is_unwelcome:
            raise ConfigError(f"{server.name} refuses our credentials")
        if self.is_cut or server.is_down:
            raise UnavailableError(f"{server.name} refuses the connection")
        if stream.is_silent(server):
            await asyncio.sleep(_TIMEOUT_S)
            raise UnavailableError(f"{server.name} says nothing")
        connection = self.connection_type(stream, number)
        self.connections = [each for each in self.connections if not each.lost.done()]
        self.connections.append(connection)
        return connection

    def lose(self, reason: str = "the client is gone") -> None:
        """Lose all connections, as a process does that dies."""
        for connection in self.connections:
            connection.lose(reason)
