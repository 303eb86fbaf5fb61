"""Shards on a replicated log: how they open, follow, take over, step down, and what they answer meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hellos import hello_of_nobody, hello_of_writer
from machines import admin_dial
from memory_stream import MemoryStream, StreamLog
from set_embeddings import delta_of, request_of
from waiting import WAIT_S, until

from headrace.paramserver.config.server_settings import ShardConfig
from headrace.paramserver.ingest.pipeline import Ingest
from headrace.paramserver.log.interface import LogRecord, is_housekeeping, note_header, note_of
from headrace.paramserver.log.jetstream.engine import PeerState, StreamState
from headrace.paramserver.rpc.address import format_address
from headrace.paramserver.rpc.admission import ServerLimits
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.server import ThriftServer
from headrace.paramserver.rpc.shard_places import STANDBY
from headrace.paramserver.shard import service
from headrace.paramserver.shard.follower_service import FollowingShard
from headrace.paramserver.shard.service import Shard, open_shard
from headrace.paramserver.snapshots.remote import create_snapshot
from headrace.schemas.errors import (
    ConfigError,
    CorruptionError,
    HeadraceError,
    LogFencedError,
    OverloadedError,
    RequestError,
    SetBackError,
    UnavailableError,
)
from headrace.schemas.idl import idl
from headrace.schemas.log_records import pack_header
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="items.weight", num_rows=0, dim=4, dtype=DType.FLOAT32)


class Place:
    """A process's part of a shard: it stands by, and then serves, at one port."""

    def __init__(self, stream: MemoryStream, path: Path, **changes: Any) -> None:
        self.stream, self.log = stream, stream.log()
        self.has_opened = False
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.port = self.sock.getsockname()[1]
        path.mkdir(parents=True, exist_ok=True)
        (path / "log").mkdir(exist_ok=True)
        self.config = ShardConfig(
            **{
                "directory": path,
                "shard": 0,
                "server_id": "a-server",
                "addresses": (("127.0.0.1", self.port),),
                "block_cache_bytes": 32 << 20,
                "memtable_bytes": 6 << 20,
                "log": "nats://stream",
                **changes,
            }
        )
        self.standby: FollowingShard | None = None
        self.opened = asyncio.Event()
        self.shard: Shard | None = None
        self.serves = asyncio.Event()
        self._ends = asyncio.Event()
        self._task: asyncio.Task[HeadraceError | None] | None = None

    def start(self) -> Place:
        self._task = asyncio.create_task(self._run())
        return self

    async def stop(self) -> None:
        self._ends.set()
        assert self._task is not None
        if not self.serves.is_set():
            self._task.cancel()
        await asyncio.wait([self._task])
        self.sock.close()

    async def stands(self) -> None:
        """Wait until it follows another owner."""
        async with asyncio.timeout(WAIT_S):
            await self.opened.wait()
            assert self.standby is not None
            await self.standby.stands.wait()

    async def failure(self) -> HeadraceError:
        """Wait until the process ends by itself; return why."""
        assert self._task is not None
        async with asyncio.timeout(WAIT_S):
            error = await self._task
        assert error is not None
        return error

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[ParamServerClient]:
        async with await ParamServerClient.connect("127.0.0.1", self.port) as client:
            yield client

    async def write(self, *client_seqs: int, epoch: int = 1) -> None:
        """Write rows as batches of one client."""
        async with self.client() as client:
            await client.hello(hello_of_writer(SPEC))
            for client_seq in client_seqs:
                request = request_of(delta_of(SPEC, [client_seq], float(client_seq)), client_seq=client_seq)
                await client.set_embeddings(request)

    async def read(self, *row_ids: int) -> list[float]:
        async with self.client() as client:
            await client.hello(hello_of_nobody())
            return await _read(client, *row_ids)

    async def _run(self) -> HeadraceError | None:
        try:
            async with open_shard(self.config, stand_by=self._stand_by) as shard:
                self.shard = shard
                server = shard.sampler.server = ThriftServer(shard, limits=ServerLimits())
                await server.start(self.sock.dup())
                self.serves.set()
                waiting = [asyncio.create_task(self._ends.wait()), asyncio.create_task(shard.wait_failed())]
                try:
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    return waiting[1].result() if waiting[1].done() else None  # type: ignore[return-value]
                finally:
                    for task in waiting:
                        task.cancel()
                    shard.begin_drain()
                    await server.close(drain_s=1)
        except HeadraceError as exc:
            return exc

    @contextlib.asynccontextmanager
    async def _stand_by(self, standby: FollowingShard) -> AsyncIterator[None]:
        self.standby = standby
        server = ThriftServer(standby, limits=ServerLimits())
        await server.start(self.sock.dup())
        self.opened.set()
        try:
            yield
        finally:
            await server.close(drain_s=0)


async def _read(client: ParamServerClient, *row_ids: int) -> list[float]:
    ids = np.array(row_ids, "<i8").tobytes()
    request = idl.GetEmbeddingsRequest(fqn=SPEC.fqn, row_ids=ids, with_states=False, with_versions=False)
    reply = await client.get_embeddings(request)
    return [float(value) for value in np.frombuffer(reply.weights, "<f4")[::4]]


@pytest.fixture
async def places(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Return a function that starts a place on a stream, at a path."""
    opened: dict[Path, Place] = {}
    made: list[Place] = []

    async def follow(settings: Any, directory: Path, **_: Any) -> StreamLog:
        place = opened[directory]
        if place.has_opened:  # a shard that begins anew opens it again
            place.log = place.stream.log()
        place.has_opened = True
        return place.log

    monkeypatch.setattr(service, "open_follower", follow)

    def start(stream: MemoryStream, path: Path, **changes: Any) -> Place:
        place = Place(stream, path, **changes)
        opened[place.config.directory / "log"] = place
        made.append(place)
        return place.start()

    yield start
    for place in made:
        await place.stop()


async def _waits(event: asyncio.Event) -> None:
    async with asyncio.timeout(WAIT_S):
        await event.wait()


async def _serving(places: Any, stream: MemoryStream, path: Path) -> Place:
    """Return a place that serves the shard."""
    place: Place = places(stream, path / "a")
    await _waits(place.serves)
    return place


async def test_a_new_shard_opens_at_once_and_serves_in_the_logs_term(places: Any, tmp_path: Path) -> None:
    """The node of a shard opens a log that nobody has owned, and every reply has the term of the log."""
    place = await _serving(places, MemoryStream(), tmp_path)
    await place.write(1, 2)
    assert await place.read(1, 2) == [1.0, 2.0]
    async with place.client() as client:
        hello = await client.hello(hello_of_nobody())
        assert (hello.term, hello.shards[0].term) == (1, 1)
    assert is_housekeeping(next(place.log.read(1)).header)


async def test_a_standby_has_what_was_acked_and_opens_when_the_owner_is_silent(places: Any, tmp_path: Path) -> None:
    """A standby follows, sends everybody to the owner, and takes over only in silence; the owner is fenced."""
    stream = MemoryStream()
    owner = await _serving(places, stream, tmp_path)
    await owner.write(1)
    standby = places(stream, tmp_path / "b", is_standby=True, copies=((0, "127.0.0.1", owner.port, "a"),))
    await standby.stands()
    async with standby.client() as client:
        with pytest.raises(UnavailableError, match=f"standby of shard 0, .* its owner is at 127.0.0.1:{owner.port}"):
            await client.hello(hello_of_nobody())
        with pytest.raises(UnavailableError, match="standby"):
            await client.hello(hello_of_writer(SPEC))
        for request in (hello_of_nobody(idl.Role.ADMIN), hello_of_nobody(asks_places=True)):
            hello = await client.hello(request)
            assert (hello.shard, hello.shards[0].port, hello.shards[0].term) == (-1, owner.port, 1)
    await owner.write(1, 2)
    stream.fall_silent()
    await _waits(standby.serves)
    assert await standby.read(1, 2) == [1.0, 2.0]
    await standby.write(2, 3)
    assert isinstance(await owner.failure(), LogFencedError)
    assert stream.term == 2


async def test_a_standby_answers_readers_that_take_copies(
    places: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers them from its own rows and records, nobody else, and says how old what it knows is."""
    stream = MemoryStream()
    owner, standby = await _pair(places, stream, tmp_path)

    async def engine_state() -> StreamState:
        return StreamState(first_seq=1, last_seq=stream.last_seq, size_bytes=0, max_bytes=1, leader="n1", peers=())

    monkeypatch.setattr(standby.log, "engine_state", engine_state)
    async with standby.client() as client:
        assert (await client.hello(hello_of_nobody(asks_places=True))).shard == STANDBY
        with pytest.raises(UnavailableError, match="copy"):  # whoever was sent to the owner gets no rows here
            await _read(client, 1)
        hello = await client.hello(hello_of_nobody(reads_copies=True, asks_places=True))
        assert (hello.shard, hello.shards[0].port, hello.term) == (0, standby.port, 1)
        with pytest.raises(UnavailableError, match="standby"):
            await client.hello(hello_of_writer(SPEC, reads_copies=True))
        next_seq = standby.standby.log.last_seq + 1
        fetch = idl.FetchUpdatesRequest(server_id="a-server", from_seq=next_seq, max_bytes=1 << 20, wait_ms=20_000)
        fetching = asyncio.create_task(client.fetch_updates(fetch))
        await owner.write(1, 2)
        records = (await fetching).records
        assert (records[0].seq, records[0].header) == (next_seq, pack_header(next(owner.log.read(next_seq)).header))
        await until(lambda: standby.standby._ingest.submitted_seq == stream.last_seq)
        assert await _read(client, 1, 2) == [1.0, 2.0]
        with pytest.raises(SetBackError):
            await client.fetch_updates(
                idl.FetchUpdatesRequest(server_id="a-server", from_seq=99, max_bytes=1, wait_ms=0)
            )
        status = (await client.status()).following
        assert (status.source, status.failure) == (f"127.0.0.1:{owner.port}", None)
        assert status.source_seq == stream.last_seq
        assert [each.fqn for each in (await client.hello(hello_of_nobody(reads_copies=True))).tables] == [SPEC.fqn]

        async def is_known() -> bool:
            stream.beat()
            return bool((await client.hello(hello_of_nobody(reads_copies=True))).knowledge_age_ms < 1000 * WAIT_S)

        await until(is_known)  # it asks each second
        monkeypatch.setattr("headrace.paramserver.shard.standby._BEAT_S", 0.0)

        async def is_doubted() -> bool:  # no record comes: a leader that says so may have lost the others
            return bool((await client.hello(hello_of_nobody(reads_copies=True))).knowledge_age_ms > 1800)

        await until(is_doubted)


async def test_a_standby_tells_no_position_beyond_its_rows(
    places: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read its log further than it has applied it: a copy that is made of its rows goes on from what they have.

    A replica that noted the log's end would lack what is in between for ever.
    """
    stream = MemoryStream()
    owner, standby = await _pair(places, stream, tmp_path)
    await owner.write(1)
    await until(lambda: standby.standby._ingest.submitted_seq == stream.last_seq)

    async def waits(_: Ingest) -> int:
        await asyncio.Event().wait()
        return 0

    monkeypatch.setattr(Ingest, "recover", waits)
    await owner.write(1, 2)
    async with standby.client() as client:
        await client.hello(hello_of_nobody(reads_copies=True))
        noted_seq = (await client.status()).log_seq
        assert noted_seq < standby.standby.log.last_seq
        request = idl.GetEmbeddingsRequest(
            fqn=SPEC.fqn, row_ids=np.array([2], "<i8").tobytes(), with_states=False, with_versions=False
        )
        assert (await client.get_embeddings(request)).seq == noted_seq


async def test_a_standby_that_lacks_what_the_stream_has_removed_begins_anew(places: Any, tmp_path: Path) -> None:
    """Its owner makes a snapshot, which takes the place of what was there; the records behind it follow.

    The owner's own copy of the log may lead on from an older snapshot; the stream does not.
    """
    stream = MemoryStream()
    owner = await _serving(places, stream, tmp_path)
    await owner.write(1)
    await create_snapshot(f"127.0.0.1:{owner.port}", dial=admin_dial(), at_step=False, timeout_s=WAIT_S)
    await owner.write(2, 3)
    await owner.shard.applied()
    stream.purge(stream.last_seq)
    owner.log.first_mirrored_seq = 1
    standby = places(stream, tmp_path / "b", is_standby=True, copies=((0, "127.0.0.1", owner.port, "a"),))
    await standby.stands()
    assert (await standby.standby.sampler.status()).following.num_restarts == 2
    await owner.write(4)
    stream.fall_silent()
    await _waits(standby.serves)
    assert await standby.read(1, 2, 3, 4) == [1.0, 2.0, 3.0, 4.0]


async def test_the_log_decides_what_a_higher_claim_means(
    places: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a taker's claim its predecessor may hear before the log tells it; while that says nothing, it still owns."""
    monkeypatch.setattr(service, "_LEASE_S", 0.01)
    stream = MemoryStream()
    owner = await _serving(places, stream, tmp_path)
    shard = owner.shard
    assert await shard._word_of_log() is None  # a copy that was made beside this log has the claim
    asked = asyncio.Event()

    def check_owned() -> None:
        asked.set()
        raise UnavailableError("no append was acked for too long")

    monkeypatch.setattr(owner.log, "check_owned", check_owned)
    waiting = asyncio.create_task(shard._word_of_log())
    await _waits(asked)
    assert not waiting.done()
    standby = places(stream, tmp_path / "b", is_standby=True)
    await standby.stands()
    stream.fall_silent()
    await _waits(standby.serves)
    await standby.write(1)
    async with asyncio.timeout(WAIT_S):
        assert isinstance(await waiting, LogFencedError)
    assert shard.was_taken_over


async def test_a_standby_does_not_open_a_log_that_nobody_has_owned(places: Any, tmp_path: Path) -> None:
    """The first to open a shard is its own node, however long that takes to start."""
    stream = MemoryStream()
    standby = places(stream, tmp_path / "b", is_standby=True)
    await standby.stands()
    stream.fall_silent()
    await _serving(places, stream, tmp_path)
    assert not standby.serves.is_set()


async def test_a_standby_waits_for_a_stream_that_is_not_as_it_must_be(
    places: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that somebody has changed ends an owner's start, with what to do; a standby tries again."""
    follow, faults = service.open_follower, [ConfigError("stream s: num_replicas is 1")] * 2

    async def follow_later(settings: Any, directory: Path, **more: Any) -> Any:
        if faults:
            raise faults.pop()
        return await follow(settings, directory, **more)

    monkeypatch.setattr(service, "open_follower", follow_later)
    stream = MemoryStream()
    assert isinstance(await places(stream, tmp_path / "a").failure(), ConfigError)
    standby = places(stream, tmp_path / "b", is_standby=True)
    await standby.stands()
    assert not faults


async def test_a_start_takes_nothing_from_a_living_owner(places: Any, tmp_path: Path) -> None:
    """A node that comes back while another has its shard follows until that one is silent."""
    stream = MemoryStream()
    first = await _serving(places, stream, tmp_path)
    await first.write(1)
    second = places(stream, tmp_path / "b")
    await second.stands()
    stream.beat()
    await first.write(1, 2)
    assert not second.serves.is_set()
    stream.fall_silent()
    await _waits(second.serves)
    assert await second.read(1, 2) == [1.0, 2.0]


class _SlowLog(StreamLog):
    """Has read the stream once it was left alone for half a second, counted from the first wait for a record.

    Opening the store, which comes before, may take longer than that.
    """

    def __init__(self, stream: MemoryStream) -> None:
        super().__init__(stream)
        self.num_interruptions = 0
        self._seen_seq = 0
        self._reading: asyncio.TimerHandle | None = None

    def _begin_reading(self) -> None:
        self._reading = asyncio.get_running_loop().call_later(0.5, self._have_read)

    def _have_read(self) -> None:
        self._seen_seq = 1 << 62
        self._wake()

    @property
    def last_seq(self) -> int:
        return min(super().last_seq, self._seen_seq)

    @property
    def term(self) -> int:
        return super().term if self._seen_seq else 0

    def read(self, from_seq: int, *, past_cache: bool = False) -> Iterator[LogRecord]:
        return super().read(from_seq) if self._seen_seq else iter(())

    async def wait_beyond(self, seq: int) -> None:
        if self._reading is None:
            self._begin_reading()
        await super().wait_beyond(seq)

    async def take_over(self, applied_seq: int, *, owner: str, above_term: int = 0) -> bool:
        if not self._seen_seq:
            self.num_interruptions += 1
            if self._reading is not None:
                self._reading.cancel()
                self._begin_reading()
        return await super().take_over(applied_seq, owner=owner, above_term=above_term) if self._seen_seq else False


@pytest.mark.parametrize("is_told", [False, True])
async def test_a_start_with_nothing_reads_a_long_log_in_peace(places: Any, tmp_path: Path, is_told: bool) -> None:
    """A node that has lost its directory does not know that its shard was ever owned, and asks before it tries."""
    stream = MemoryStream()
    first = await _serving(places, stream, tmp_path)
    await first.write(1, 2)
    log = _SlowLog(stream)
    if is_told:
        log.state = StreamState(first_seq=1, last_seq=stream.last_seq, size_bytes=0, max_bytes=1, leader="n1", peers=())
    stream._logs.append(log)
    stream.log = lambda: log  # type: ignore[method-assign]
    second = places(stream, tmp_path / "b")
    await second.stands()
    assert log.num_interruptions == (0 if is_told else 1)
    stream.fall_silent()
    await _waits(second.serves)
    assert await second.read(1, 2) == [1.0, 2.0]


async def test_an_answer_that_was_computed_before_a_pause_is_refused_after_it(
    places: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads, hellos and fetches are checked after they were computed; a status is answered always."""
    stream = MemoryStream()
    place = await _serving(places, stream, tmp_path)
    await place.write(1)
    async with place.client() as client:
        await client.hello(hello_of_nobody())
        read_many = place.shard._applier.read_many

        async def paused(*args: Any, **kwargs: Any) -> Any:
            found = await read_many(*args, **kwargs)
            place.log.is_lease_over = True  # the process stops for a while, here
            return found

        monkeypatch.setattr(place.shard._applier, "read_many", paused)
        with pytest.raises(UnavailableError, match="does not own"):
            await _read(client, 1)
        with pytest.raises(UnavailableError, match="does not own"):
            await client.hello(hello_of_nobody())
        fetch = idl.FetchUpdatesRequest(server_id="a-server", from_seq=1, max_bytes=1 << 20, wait_ms=0)
        with pytest.raises(UnavailableError, match="does not own"):
            await client.fetch_updates(fetch)
        assert (await client.status()).term == 1
        place.log.is_lease_over = False
        monkeypatch.undo()
        assert await _read(client, 1) == [1.0]


async def test_the_store_passes_what_the_log_writes_for_itself(places: Any, tmp_path: Path) -> None:
    """Heartbeats and void records move the position, and change nothing else, in owner and standby alike."""
    stream = MemoryStream()
    owner = places(stream, tmp_path / "a")
    standby = places(stream, tmp_path / "b", is_standby=True)
    await _waits(owner.serves)
    await owner.write(1)
    stream.beat()
    stream.add(7, {"kind": 1, "run": "run", "client": "rank0"}, b"garbage", term=0, mark=9)  # of an owner before
    await owner.write(1, 2)
    stream.beat()
    await until(lambda: owner.shard._ingest.submitted_seq >= stream.last_seq)
    sessions = list(owner.shard._ingest.sessions)
    assert [(session.run, session.last_client_seq) for session in sessions] == [("run", 2)]
    stream.fall_silent()
    await _waits(standby.serves)
    assert next(iter(standby.shard._ingest.sessions)).last_client_seq == 2
    assert await standby.read(1, 2) == [1.0, 2.0]


async def test_a_store_of_another_stream_is_refused(places: Any, tmp_path: Path) -> None:
    """A stream with another mark at the store's position is another history: the message names the way on."""
    stream = MemoryStream()
    first = await _serving(places, stream, tmp_path)
    await first.write(1)
    await first.shard.applied()
    await first.stop()
    other = MemoryStream()
    for _ in range(stream.last_seq):
        other.add(1, note_header("padding"), b"", term=0, mark=99)
    error = await places(other, tmp_path / "a").failure()
    assert isinstance(error, CorruptionError)
    assert "different histories" in str(error)
    assert "headrace restore" in str(error)


async def test_a_shard_that_nobody_has_a_snapshot_of_is_refused(places: Any, tmp_path: Path) -> None:
    """A store behind the stream's first record, of a shard that no other copy can have, says how to make it anew."""
    stream = MemoryStream()
    owner = await _serving(places, stream, tmp_path)
    await owner.write(1, 2)
    await owner.stop()
    stream.purge(stream.last_seq)
    error = await places(stream, tmp_path / "b").failure()
    assert isinstance(error, CorruptionError)
    assert "headrace restore" in str(error)


async def test_a_shard_moves_while_it_is_written(places: Any, tmp_path: Path) -> None:
    """The owner offers it and answers nobody; the standby opens without waiting for silence, and nothing is lost."""
    stream = MemoryStream()
    owner, standby = await _pair(places, stream, tmp_path)
    await owner.write(1)
    async with owner.client() as client:
        await client.hello(hello_of_nobody(idl.Role.ADMIN))
        stream.is_held = True
        moving = asyncio.create_task(client.promote_shard(_move(standby)))
        await asyncio.sleep(0)
        await until(lambda: owner.shard._ingest.closed is not None)
        for refused in (owner.write(1, 2), owner.read(1)):
            with pytest.raises(UnavailableError, match="shard 0 moves") as caught:
                await refused
            assert _move(standby).to == format_address(caught.value.moves_to.host, caught.value.moves_to.port)
        stream.is_held = False
        owner.log.commit()
        assert (await moving).term == 1
    await _waits(standby.serves)
    await standby.write(1, 2)
    assert await standby.read(1, 2) == [1.0, 2.0]
    assert isinstance(await owner.failure(), LogFencedError)


async def test_an_offer_that_nobody_takes_is_withdrawn(places: Any, tmp_path: Path) -> None:
    """The owner goes on when its time is over, and a standby that reads the offer later finds it withdrawn."""
    stream = MemoryStream()
    owner, standby = await _pair(places, stream, tmp_path)
    await standby.stop()
    async with owner.client() as client:
        await client.hello(hello_of_nobody(idl.Role.ADMIN))
        await client.promote_shard(_move(standby, hold_ms=1))
        await until(lambda: owner.shard._ingest.closed is None)
        await owner.write(1)
        for wrong in (_move(standby, shard=1), _move(standby, hold_ms=0), _move(standby, to="127.0.0.1:1")):
            with pytest.raises((RequestError, UnavailableError)):
                await client.promote_shard(wrong)
    late = places(stream, tmp_path / "b", is_standby=True)
    await late.stands()
    stream.beat()
    await until(lambda: late.standby._ingest.submitted_seq == stream.last_seq)
    assert not late.serves.is_set()


async def test_a_move_that_the_log_has_no_room_for_closes_nothing(
    places: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner whose offer is refused goes on at once; one whose withdrawal is refused goes on once there is room."""
    stream = MemoryStream()
    owner, standby = await _pair(places, stream, tmp_path)
    append, refused = owner.log.append, ["offer", "withdrawal", "withdrawal"]

    def append_or_refuse(**record: Any) -> Any:
        if refused and note_of(record["header"]) == refused[0]:
            refused.pop(0)
            raise OverloadedError("the engine has no room for the log", retry_after_s=0.01)
        return append(**record)

    monkeypatch.setattr(owner.log, "append", append_or_refuse)
    async with owner.client() as client:
        await client.hello(hello_of_nobody(idl.Role.ADMIN))
        with pytest.raises(OverloadedError, match="no room"):
            await client.promote_shard(_move(standby))
        await owner.write(1)
        await standby.stop()
        await client.promote_shard(_move(standby, hold_ms=1))
        await until(lambda: owner.shard._ingest.closed is None)
    assert not refused
    await owner.write(1, 2)
    assert await owner.read(1, 2) == [1.0, 2.0]


async def _pair(places: Any, stream: MemoryStream, path: Path) -> tuple[Place, Place]:
    """Start an owner and a standby that know of each other."""
    standby = places(stream, path / "b", is_standby=True)
    owner = places(stream, path / "a", copies=((0, "127.0.0.1", standby.port, "b"),))
    await _waits(owner.serves)
    await standby.stands()
    return owner, standby


def _move(standby: Place, **changes: Any) -> Any:
    return idl.PromoteShardRequest(**{"shard": 0, "to": f"127.0.0.1:{standby.port}", "hold_ms": 20_000, **changes})


def test_retention_keeps_the_log_within_its_stream(tmp_path: Path) -> None:
    """A stream that is smaller than the bounds of retention would fill up, with log that nobody needs."""
    config = ShardConfig(directory=tmp_path, shard=0, server_id="s", addresses=(("h", 1),), log="nats://n")
    mib = 1 << 20
    for max_bytes, expected in (
        (64 << 30, (8 << 30, 16 << 30, 256 * mib)),
        (64 * mib, (32 * mib, 48 * mib, 4 * mib)),
        (mib, (mib, mib, mib)),
    ):
        bounded = service._within_stream(dataclasses.replace(config, log_max_bytes=max_bytes))
        assert (bounded.log_retention_bytes, bounded.log_hold_bytes, bounded.log_segment_bytes) == expected


async def test_a_stream_that_ends_before_the_store_is_refused_once_all_servers_are_well(
    places: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is away, or behind, proves nothing; a healthy stream that lacks what was applied does."""
    monkeypatch.setattr("headrace.paramserver.shard.standby._REACH_S", 0.05)
    stream = MemoryStream()
    first = await _serving(places, stream, tmp_path)
    await first.write(1)
    await first.shard.applied()
    await first.stop()
    place = places(MemoryStream(), tmp_path / "a")
    await _waits(place.opened)
    await asyncio.wait([place._task], timeout=0.3)  # its servers do not answer
    assert not place._task.done()
    peers = (PeerState("n2", is_current=True, is_offline=False, lag=0),)
    place.log.state = StreamState(first_seq=1, last_seq=0, size_bytes=0, max_bytes=1, leader="n1", peers=peers)
    error = await place.failure()
    assert isinstance(error, CorruptionError)
    assert "its stream ends at seq 0, with all servers well" in str(error)
