"""Followers of a shard's log, over real loopback: order, long polls, gaps, leases and what ends a follower's place."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from held_ports import hold_ports
from hellos import hello_of_writer

from headrace.paramserver.config.shard_config import ShardConfig
from headrace.paramserver.reading.follower import ShardFollower
from headrace.paramserver.reading.shard_link import Dial, ShardLink
from headrace.paramserver.rpc.admission import ServerLimits
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.rpc_server import ThriftServer
from headrace.paramserver.shard.log_retention import trim_log
from headrace.paramserver.shard.shard import Shard, open_shard
from headrace.schemas.errors import GoneError, ProtocolError, RequestError, SetBackError, UnauthorizedError
from headrace.schemas.idl import idl
from headrace.schemas.messages import decode_header, decode_struct
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="items.weight", num_rows=0, dim=4, dtype=DType.FLOAT32)
WAIT_S = 60.0


def shard_config(directory: Path, **changes: Any) -> ShardConfig:
    directory.mkdir(exist_ok=True)
    config = ShardConfig(
        directory=directory,
        shard=0,
        server_id="a-server",
        addresses=(("127.0.0.1", 7601),),
        block_cache_bytes=32 << 20,
        memtable_bytes=6 << 20,
    )
    return dataclasses.replace(config, **changes)


class Served:
    """A shard on a port, a writer connected to it, and what following it takes."""

    def __init__(self, shard: Shard, host: str, port: int, client: ParamServerClient) -> None:
        self.shard = shard
        self.host, self.port = host, port
        self.client = client
        self._client_seq = 0

    async def write(self, rows: list[int], value: float) -> int:
        """Write rows as the writer's next batch; return its seq in the log."""
        self._client_seq += 1
        delta = idl.TableDelta(
            fqn=SPEC.fqn,
            fingerprint=SPEC.fingerprint,
            column_offset=0,
            width=SPEC.dim,
            row_ids=np.array(rows, "<i8"),
            weights=np.full((len(rows), SPEC.dim), value, "<f4"),
            states=[],
        )
        reply = await self.client.set_embeddings(
            idl.SetEmbeddingsRequest(
                run="run",
                client="rank0",
                epoch=1,
                client_seq=self._client_seq,
                step=self._client_seq,
                time_us=1,
                ends_step=True,
                is_exact_cut=True,
                deltas=[delta],
            )
        )
        return int(reply.seq)

    @asynccontextmanager
    async def follow(self, from_seq: int = 1, **settings: Any) -> AsyncIterator[ShardFollower]:
        """A follower on a connection of its own."""
        dial = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=60.0)
        link = ShardLink(dial, self.host, self.port)
        await link.refresh()
        try:
            yield ShardFollower(link, from_seq=from_seq, **settings)
        finally:
            await link.close()


@asynccontextmanager
async def serving(config: ShardConfig, *, port: int = 0, says_hello: bool = True) -> AsyncIterator[Served]:
    async with open_shard(config) as shard:
        server = ThriftServer(shard, limits=ServerLimits(max_frame_bytes=config.max_frame_bytes))
        with socket.create_server(("127.0.0.1", port)) as sock:
            host, port = sock.getsockname()
            await server.start(sock)
            try:
                async with await ParamServerClient.connect(host, port) as client:
                    if says_hello:
                        await client.hello(hello_of_writer(SPEC))
                    yield Served(shard, host, port, client)
            finally:
                shard.begin_drain()
                await server.close(drain_s=5)


def fetch_request(from_seq: int, **changes: Any) -> Any:
    fields = {"server_id": "a-server", "max_bytes": 1 << 20, "wait_ms": 0} | changes
    return idl.FetchUpdatesRequest(from_seq=from_seq, **fields)


def values_of(body: memoryview) -> tuple[list[int], float]:
    """Row ids and the value of a batch written by `Served.write`."""
    args = decode_struct(idl.ParameterServer.setEmbeddings_args, body, decode_header(body).body_offset)
    (delta,) = args.request.deltas
    return np.frombuffer(delta.row_ids, "<i8").tolist(), float(np.frombuffer(delta.weights, "<f4")[0])


async def test_every_record_comes_once_and_in_order(tmp_path: Path) -> None:
    """A follower from seq 1 gets the hello with its tables, then each batch with the bytes that were written."""
    async with serving(shard_config(tmp_path)) as served:
        for i in range(1, 21):
            await served.write([i, i + 100], float(i))
        async with served.follow(max_bytes=600) as follower:
            updates = []
            while follower.next_seq <= 21:
                updates += await follower.fetch()
    assert [update.seq for update in updates] == list(range(1, 22))
    assert updates[0].kind == idl.UpdateKind.HELLO and updates[0].header["tables"][0][0] == SPEC.fqn
    assert {update.kind for update in updates[1:]} == {idl.UpdateKind.BATCH}
    assert [values_of(update.body) for update in updates[1:]] == [([i, i + 100], float(i)) for i in range(1, 21)]
    assert [update.header["step"] for update in updates[1:]] == list(range(1, 21))


async def test_a_long_poll_waits_for_the_next_record_and_blocks_nobody(tmp_path: Path) -> None:
    """While a hundred followers wait, a writer writes; then all of them are answered."""
    async with serving(shard_config(tmp_path)) as served:
        request = fetch_request(2, wait_ms=60_000)
        waiting = [asyncio.create_task(served.client.fetch_updates(request)) for _ in range(100)]
        async with asyncio.timeout(WAIT_S):
            while served.shard.feed.num_waiting < 100:
                await served.client.status()
            assert not any(task.done() for task in waiting)
            await served.write([7], 1.0)
            for task in waiting:
                assert [record.seq for record in (await task).records] == [2]


async def test_a_long_poll_ends_without_a_record(tmp_path: Path) -> None:
    """After its wait, and when the shard is about to stop, a follower is answered with nothing and keeps its place."""
    async with serving(shard_config(tmp_path)) as served, served.follow(2, wait_s=0.05) as follower:
        assert await follower.fetch() == [] and follower.next_seq == 2
        async with served.follow(2, wait_s=60.0) as patient:
            task = asyncio.create_task(patient.fetch())
            async with asyncio.timeout(WAIT_S):
                while not served.shard.feed.num_waiting:
                    await served.client.status()
                served.shard.begin_drain()
                assert await task == []


async def test_a_follower_goes_on_after_the_shard_was_restarted(tmp_path: Path) -> None:
    """It connects again by itself and gets what comes next, nothing twice."""
    config = shard_config(tmp_path)
    port = hold_ports()
    async with serving(config, port=port) as served:
        link = ShardLink(Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=60.0), served.host, port)
        await link.refresh()
        follower = ShardFollower(link, from_seq=1, wait_s=1.0)
        await served.write([1], 1.0)
        assert [update.seq for update in await follower.fetch()] == [1, 2]
    async with serving(config, port=port) as served:
        served._client_seq = 1
        await served.write([2], 2.0)
        async with asyncio.timeout(WAIT_S):
            assert [values_of(update.body) for update in await follower.fetch()] == [([2], 2.0)]
        await link.close()


async def test_another_store_at_the_address_ends_the_place(tmp_path: Path) -> None:
    """The same address with another server id: the follower is told to start over."""
    port = hold_ports()
    async with serving(shard_config(tmp_path / "a"), port=port) as served:
        link = ShardLink(Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=60.0), served.host, port)
        await link.refresh()
        follower = ShardFollower(link, from_seq=1, wait_s=0.0)
        await follower.fetch()
    async with serving(shard_config(tmp_path / "b", server_id="another"), port=port) as served:
        with pytest.raises(GoneError, match="another"):
            await follower.fetch()
        # Also when the connection does not tell: by the request's own field.
        with pytest.raises(GoneError, match="this is store another, not a-server"):
            await served.client.fetch_updates(fetch_request(1))
        await link.close()


async def test_a_place_beyond_the_log_is_gone(tmp_path: Path) -> None:
    """A store that was set back, with its log, does not pretend to go on where the follower was."""
    config = shard_config(tmp_path)
    async with serving(config) as served:
        for i in range(3):
            await served.write([i], 1.0)
    shutil.rmtree(tmp_path / "log")
    shutil.rmtree(tmp_path / "store")
    async with serving(config) as served:
        with pytest.raises(SetBackError, match="the log ends at seq 1, seq 3 is not in it"):
            await served.client.fetch_updates(fetch_request(4))


@asynccontextmanager
async def _set_back(
    directory: Path, *, num_taken: int, num_written: int
) -> AsyncIterator[tuple[Served, ShardFollower]]:
    """Serve a store that was set back to three records, and others behind them, to one that follows it from before."""
    config, port = shard_config(directory / "data"), hold_ports()
    async with serving(config) as served:
        for row in (1, 2):
            await served.write([row], 1.0)
    shutil.copytree(directory / "data", directory / "older")
    async with serving(config, port=port) as served:
        served._client_seq = 2
        await served.write([3], 1.0)
        link = ShardLink(Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=60.0), served.host, port)
        await link.refresh()
        follower = ShardFollower(link, from_seq=num_taken, wait_s=0.0, max_bytes=1)
        assert [update.seq for update in await follower.fetch()] == [num_taken]
    shutil.rmtree(directory / "data")
    shutil.copytree(directory / "older", directory / "data")
    async with serving(config, port=port) as served:
        served._client_seq = 2
        for row in range(num_written):
            await served.write([row + 10], 2.0)
        try:
            yield served, follower
        finally:
            await link.close()


@pytest.mark.parametrize("num_written", [0, 1, 5], ids=["its log ends before", "at the place", "beyond it"])
async def test_a_place_in_a_log_that_was_set_back_is_gone(tmp_path: Path, num_written: int) -> None:
    """However far the log has gone on since, a follower that has a record which is not there any more is told so."""
    async with _set_back(tmp_path, num_taken=4, num_written=num_written) as (_, follower):
        follower._name = "replica"
        for ask in (follower.fetch, follower.register):
            with pytest.raises(SetBackError, match="start over"):
                await ask()
        assert follower.next_seq == 5


async def test_a_place_that_is_in_the_older_copy_too_goes_on(tmp_path: Path) -> None:
    """A follower that was not beyond the copy that was put back has lost nothing, and gets what comes."""
    async with _set_back(tmp_path, num_taken=3, num_written=1) as (_, follower):
        (update,) = await follower.fetch()
        assert (update.seq, values_of(update.body)) == (4, ([10], 2.0))
        assert await follower.fetch() == []


async def test_a_record_of_which_a_part_has_come_is_not_mixed_with_another() -> None:
    """A server that was set back between two parts of a record does not end in a record of both."""
    marks = iter([7, 8])

    class Link:
        address = "somewhere:1"
        hello = idl.HelloReply(server_id="s")

        async def fetch_updates(self, request: Any) -> Any:
            fields = {"epoch": 1, "kind": 1, "header": b"\x80", "body_size_bytes": 6}
            records = [idl.UpdateRecord(seq=1, body=memoryview(b"abc"), **fields)]
            return idl.FetchUpdatesReply(records=records, first_seq=1, last_seq=1, mark=next(marks))

    with pytest.raises(SetBackError, match="record 1 is another"):
        await ShardFollower(Link(), from_seq=1).fetch()  # type: ignore[arg-type]


async def test_the_last_part_of_a_record_may_bring_others() -> None:
    """A server that sends records behind it tells the mark of the last of them: it is not taken for the part's."""
    replies = iter([([(1, b"abc")], 7), ([(1, b"def"), (2, b"ghi")], 8)])

    class Link:
        address = "somewhere:1"
        hello = idl.HelloReply(server_id="s")

        async def fetch_updates(self, request: Any) -> Any:
            parts, mark = next(replies)
            fields = {"epoch": 1, "kind": 1, "header": b"\x80", "body_size_bytes": 6}
            records = [idl.UpdateRecord(seq=seq, body=memoryview(body), **fields) for seq, body in parts]
            return idl.FetchUpdatesReply(records=records, first_seq=1, last_seq=2, mark=mark)

    follower = ShardFollower(Link(), from_seq=1)  # type: ignore[arg-type]
    (update,) = await follower.fetch()
    assert (update.body, follower.next_seq) == (b"abcdef", 2)


async def test_a_server_that_tells_no_marks_is_followed() -> None:
    """A server of before there were marks, and one that has removed the record before, are believed."""
    replies = iter([(None, 5, [1]), (None, None, [2]), (6, 6, [3]), (None, 7, [4]), (8, None, [])])

    class Link:
        address = "somewhere:1"
        hello = idl.HelloReply(server_id="s")

        async def fetch_updates(self, request: Any) -> Any:
            before, mark, seqs = next(replies)
            records = [idl.UpdateRecord(seq=s, epoch=1, kind=1, header=b"\x80", body=memoryview(b"")) for s in seqs]
            return idl.FetchUpdatesReply(records=records, first_seq=1, last_seq=9, mark_before=before, mark=mark)

    follower = ShardFollower(Link(), from_seq=1)  # type: ignore[arg-type]
    for mark in (5, None, 6, 7):
        await follower.fetch()
        assert follower.mark == mark
    with pytest.raises(SetBackError, match="record 4 is another"):
        await follower.fetch()


async def test_removed_records_are_gone(tmp_path: Path) -> None:
    """A follower that asks for what retention has removed is told where the log begins."""
    config = shard_config(tmp_path, log_segment_bytes=1 << 20)
    async with serving(config) as served:
        for i in range(8):
            await served.write(list(range(20_000)), float(i))
        await served.shard.applied()
        trim_log(served.shard.log, 9, None, dataclasses.replace(config, log_retention_bytes=1 << 20))
        first_seq = served.shard.log.first_seq
        assert first_seq > 1
        with pytest.raises(GoneError, match=f"begins at seq {first_seq}"):
            await served.client.fetch_updates(fetch_request(1))
        reply = await served.client.fetch_updates(fetch_request(first_seq))
        assert reply.records[0].seq == reply.first_seq == first_seq


async def test_copies_of_one_name_hold_the_log_each_for_itself(tmp_path: Path) -> None:
    """Two replicas that were given one name: the fast one's place does not cost the slow one its own."""
    config = shard_config(tmp_path, log_segment_bytes=1 << 20, log_retention_bytes=1 << 20)
    async with (
        serving(config) as served,
        served.follow(2, name="replica", copy_id="slow") as slow,
        served.follow(name="replica", copy_id="fast", max_bytes=1 << 24) as fast,
        served.follow(9, name="replica") as other,
    ):
        for i in range(8):
            await served.write(list(range(20_000)), float(i))
        await slow.register()
        while fast.next_seq <= 9:
            await fast.fetch()
        await fast.register()
        await other.register()  # one that does not tell copies apart, as before there were copy ids
        await served.shard.applied()
        await asyncio.to_thread(served.shard._store.flush)
        await served.shard._retention.trim()
        assert [lease.seq for lease in served.shard.feed.followers.held()] == [2, 10, 9]
        assert (await slow.fetch())[0].seq == 2


async def test_a_record_larger_than_a_reply_comes_in_parts(tmp_path: Path) -> None:
    """A batch as long as the longest frame is fetched whole, in replies that are no longer than that."""
    config = shard_config(tmp_path, max_frame_bytes=1 << 16)
    rows = list(range(2600))
    async with serving(config) as served:
        await served.write(rows, 1.5)
        async with served.follow(2, max_bytes=10_000) as follower:
            (update,) = await follower.fetch()
    assert len(update.body) > 62_000 and values_of(update.body) == (rows, 1.5)


async def test_records_before_and_behind_one_that_comes_in_parts(tmp_path: Path) -> None:
    """The last part of a record comes alone, wherever the next one lies: its reply's mark is of its own segment."""
    sizes = [10, 40_000, 6_000, 10]
    async with serving(shard_config(tmp_path, log_segment_bytes=1 << 20)) as served:
        for i, size in enumerate(sizes):
            await served.write(list(range(size)), float(i))
        log = served.shard.log
        assert log.mark_of(3) != log.mark_of(4)
        size_bytes = next(log.read(3)).body.nbytes
        reply = await served.client.fetch_updates(fetch_request(3, body_offset=size_bytes - 10))
        assert [record.seq for record in reply.records] == [3]
        async with served.follow(2, max_bytes=600_000) as follower:
            updates = []
            while follower.next_seq <= 5:
                updates += await follower.fetch()
    assert [values_of(update.body) for update in updates] == [(list(range(size)), i) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("change", [{"from_seq": 0}, {"max_bytes": 0}, {"wait_ms": -1}, {"body_offset": -1}])
async def test_a_bad_request_is_refused(tmp_path: Path, change: dict[str, int]) -> None:
    """Fields out of range are an error that names them, not a hang."""
    async with serving(shard_config(tmp_path)) as served:
        with pytest.raises(RequestError):
            await served.client.fetch_updates(fetch_request(**{"from_seq": 1} | change))
        with pytest.raises(RequestError, match="offset 99999"):
            await served.client.fetch_updates(fetch_request(1, body_offset=99_999))


async def test_a_gap_is_noticed() -> None:
    """A shard that leaves a record out is not believed."""

    class Link:
        address = "somewhere:1"
        hello = idl.HelloReply(server_id="s")

        async def fetch_updates(self, request: Any) -> Any:
            records = [idl.UpdateRecord(seq=s, epoch=1, kind=1, header=b"\x80", body=memoryview(b"")) for s in (1, 3)]
            return idl.FetchUpdatesReply(records=records, first_seq=1, last_seq=3)

    follower = ShardFollower(Link(), from_seq=1)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="record 3 where 2 was expected"):
        await follower.fetch()
    assert follower.next_seq == 1


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([(1, b"abc"), (1, b"")], "do not fit together"),
        ([(1, b"abc"), (1, b"defgh")], "do not fit together"),
        ([(1, b"abc"), None], "has not come"),
        ([(1, b"abc"), (2, b"def")], "has not come"),
    ],
    ids=["an empty part", "too much", "no part", "of another record"],
)
async def test_a_record_that_does_not_come_whole_is_not_handed_on(
    parts: list[tuple[int, bytes] | None], reason: str
) -> None:
    """A shard that does not send the rest of a record it has begun is not believed, nor asked for ever."""
    asked = []

    class Link:
        address = "somewhere:1"
        hello = idl.HelloReply(server_id="s")

        async def fetch_updates(self, request: Any) -> Any:
            asked.append(request.body_offset)
            part = parts[len(asked) - 1]
            fields = {"epoch": 1, "kind": 1, "header": b"\x80", "body_size_bytes": 6}
            records = [idl.UpdateRecord(seq=part[0], body=memoryview(part[1]), **fields)] if part else []
            return idl.FetchUpdatesReply(records=records, first_seq=1, last_seq=1)

    follower = ShardFollower(Link(), from_seq=1)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match=reason):
        await follower.fetch()
    assert (follower.next_seq, asked) == (1, [None, 3])


@pytest.mark.parametrize("size_bytes", [-1, 2**30 + 1, 2**62])
async def test_a_record_of_no_possible_size_takes_no_memory(size_bytes: int) -> None:
    """A shard that announces a body which no log holds is not believed."""

    class Link:
        address = "somewhere:1"
        hello = idl.HelloReply(server_id="s")

        async def fetch_updates(self, request: Any) -> Any:
            body = {"body": memoryview(b"abc"), "body_size_bytes": size_bytes}
            records = [idl.UpdateRecord(seq=1, epoch=1, kind=1, header=b"\x80", **body)]
            return idl.FetchUpdatesReply(records=[] if request.body_offset else records, first_seq=1, last_seq=1)

    with pytest.raises(ProtocolError, match=f"record 1 of {size_bytes} bytes"):
        await ShardFollower(Link(), from_seq=1).fetch()  # type: ignore[arg-type]


async def test_following_takes_the_role_of_a_reader(tmp_path: Path) -> None:
    """A connection that has not said hello may not follow where the server asks for tokens."""
    from headrace.paramserver.rpc.security import AccessPolicy, Token

    access = AccessPolicy(Token("secret-secret-secret"))
    access.check_call(idl.Role.READER, "fetchUpdates")
    with pytest.raises(UnauthorizedError):
        access.check_call(None, "fetchUpdates")
