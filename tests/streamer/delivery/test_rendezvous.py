"""Finding the store, and taking an epoch that nobody else has."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_shard import WAIT_S, FakeStore
from shard_servers import serve_shards
from spent_deadline import spent_deadline
from trainer_tables import WRITER

from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.shard_places import STANDBY, ShardPlace, ShardPlaces
from headrace.schemas.errors import HeadraceError, ProtocolError, StorageError, UnavailableError
from headrace.schemas.tables import DType, TableSpec
from headrace.schemas.version import last_epoch_after
from headrace.streamer.delivery.rendezvous import Rendezvous, Store, _gather

CONNECT = functools.partial(ParamServerClient.connect, timeout_s=WAIT_S)


def _rendezvous() -> Rendezvous:
    return Rendezvous(CONNECT, timeout_s=WAIT_S, random=lambda: 0.5)


async def test_trainers_that_start_together_get_epochs_of_their_own() -> None:
    """Trainers that see the same highest epoch each try on until they hold an epoch alone."""
    async with FakeStore() as store:
        host, port = "127.0.0.1", store.shards[0].port
        found = await _rendezvous().find_store([(host, port)], WRITER)
        writers = await asyncio.gather(*(_rendezvous().acquire_epoch(found, WRITER.with_epoch(0)) for _ in range(5)))
    epochs = [writer.epoch for writer in writers]
    assert sorted(epochs) == [found.highest_epoch + i for i in range(1, 6)]


@pytest.mark.parametrize("shard", [0, 2])
async def test_an_epoch_that_was_made_up_on_one_shard_stops_no_trainer(tmp_path: Path, shard: int) -> None:
    """Shards far behind the highest epoch are raised to it, whichever shard has seen it."""
    async with serve_shards(tmp_path, 3) as ports:
        for _ in range(2):  # the highest that is accepted, and then the highest again
            async with await CONNECT("127.0.0.1", ports[shard]) as client:
                reached = (await client.hello(WRITER.with_epoch(0).hello(()))).highest_epoch
                await client.hello(WRITER.with_epoch(last_epoch_after(reached)).hello(()))
        found = await _rendezvous().find_store([("127.0.0.1", ports[0])], WRITER)
        assert found.highest_epoch == last_epoch_after(0) + 2**20
        writer = await _rendezvous().acquire_epoch(found, WRITER)
        for _ in range(2):  # a second time after a lost connection
            replies = await _rendezvous().open_session(found.shards, writer, ())
        assert writer.epoch == found.highest_epoch + 1
        assert [reply.highest_epoch for reply in replies] == [writer.epoch] * 3


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
async def test_shards_that_listen_everywhere_are_where_the_first_was_found(host: str) -> None:
    """Shards that listen on all addresses are reached at the address of the first."""
    async with FakeStore(num_shards=2, host=host) as store:
        found = await _rendezvous().find_store([("127.0.0.1", store.shards[1].port)], WRITER)
        expected = [("127.0.0.1", shard.port) for shard in store.shards]
    assert [(shard.host, shard.port) for shard in found.shards] == expected


async def test_a_shard_that_is_not_where_its_server_says_is_told_as_that() -> None:
    """If the server answers through a forwarded port, the error blames the host that it advertises."""
    async with FakeStore(num_shards=2) as store:
        port = store.shards[0].port
        store.host = "127.0.0.9"
        expected = (
            rf"^the server at 127\.0\.0\.1:{port} answers, and its shard 0 at 127\.0\.0\.9:{port} does not: no "
            r"connection to .*: Connection refused.*; start the server with an --advertise-host that leads there"
        )
        with spent_deadline(), pytest.raises(UnavailableError, match=expected):
            await _rendezvous().find_store([("127.0.0.1", port)], WRITER)
        silent = r"shard 0 at 127\.0\.0\.9:\d+ does not: no answer within 0\.25 s; start"
        with (
            socket.create_server(("127.0.0.9", port), backlog=0),
            socket.create_connection(("127.0.0.9", port)),
            pytest.raises(UnavailableError, match=silent),
        ):
            places = ShardPlaces("store", [ShardPlace("127.0.0.9", port)])
            hasty = Rendezvous(CONNECT, timeout_s=0.5, random=lambda: 0.5)
            # Asked by itself: the server that names it has answered already, and takes none of so short a time.
            await hasty._ask_named(0, places, ("127.0.0.1", port), WRITER.hello(()))


async def test_a_standby_tells_where_the_shards_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer whose only address is a standby's finds all shards."""
    async with FakeStore(num_shards=2) as store, FakeStore(num_shards=2) as others:
        standby = others.shards[0]
        hello = store.shards[0].hello

        async def tell(call: Any, request: Any) -> Any:
            assert request.asks_places and not request.epoch
            reply = await hello(call, request)
            reply.shard = STANDBY
            return reply

        await standby.stop()
        monkeypatch.setattr(standby, "hello", tell)
        await standby.start()
        found = await _rendezvous().find_store([("127.0.0.1", standby.port)], WRITER)
    assert [shard.port for shard in found.shards] == [shard.port for shard in store.shards]


async def test_a_shard_that_is_down_is_no_matter_of_its_address() -> None:
    """If the host is the one that was reached, the error does not suggest another --advertise-host."""
    async with FakeStore(num_shards=2) as store:
        port = store.shards[0].port
        await store.shards[1].stop()
        told = r"answers, and its shard 1 at .*: no connection to"
        with spent_deadline(), pytest.raises(UnavailableError, match=told) as raised:
            await _rendezvous().find_store([("127.0.0.1", port)], WRITER)
    assert "--advertise-host" not in str(raised.value)


async def test_shard_0_hears_last_that_a_rank_writes_no_more() -> None:
    """While another shard has not heard it, the one that decides on owners does not know it either."""
    async with FakeStore(num_shards=2) as store:
        found = await _rendezvous().find_store([("127.0.0.1", store.shards[0].port)], WRITER)
        await store.shards[1].stop()
        heard = store.shards[0].num_hellos
        with spent_deadline(), pytest.raises(UnavailableError):
            await _rendezvous().end_run(found.shards, WRITER)
        assert store.shards[0].num_hellos == heard
        await store.shards[1].start()
        await _rendezvous().end_run(found.shards, WRITER)
        assert store.shards[0].num_hellos == heard + 1


async def test_a_store_is_what_all_of_its_shards_say(tmp_path: Path) -> None:
    """Tables of any shard are known, and frames are as short as the strictest shard requires."""
    async with serve_shards(tmp_path, 2) as ports:
        async with await CONNECT("127.0.0.1", ports[1]) as client:
            await client.hello(WRITER.hello([TableSpec(fqn="items", num_rows=9, dim=2, dtype=DType.FLOAT32)]))
        found = await _rendezvous().find_store([("127.0.0.1", ports[0])], WRITER)
    assert found.tables.keys() == {"items"}
    shards = [
        dataclasses.replace(shard, max_frame_bytes=size) for shard, size in zip(found.shards, (9, 7), strict=True)
    ]
    assert dataclasses.replace(found, shards=tuple(shards)).max_frame_bytes == 7


async def test_no_call_goes_on_behind_an_error() -> None:
    """When one shard refuses, the calls to the others have ended before the error is raised."""
    has_ended = asyncio.Event()

    async def refuse() -> None:
        raise StorageError("the disk is on fire")

    async def answer() -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        has_ended.set()

    with pytest.raises(StorageError):
        await _gather([refuse(), answer()])
    assert has_ended.is_set()


def _lose_first(store: FakeStore) -> None:
    del store.shards[0]


def _swap_ports(store: FakeStore) -> None:
    first, second = store.shards
    first.port, second.port = second.port, first.port


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        (_lose_first, ProtocolError, "has an incomplete shard map"),
        (lambda store: store.shards.clear(), ProtocolError, "has an incomplete shard map"),
        (lambda store: store.shards.append(store.shards[1]), ProtocolError, "has an incomplete shard map"),
        (_swap_ports, StorageError, "says that it is shard 1 of 2"),
    ],
    ids=["lost", "empty", "twice", "swapped"],
)
async def test_a_shard_map_that_contradicts_itself_is_refused(
    change: Callable[[FakeStore], None], error: type[HeadraceError], reason: str
) -> None:
    """A shard map must name all shards, each once, and each must confirm its number."""
    async with FakeStore(num_shards=2) as store:
        shards, ports = list(store.shards), [shard.port for shard in store.shards]
        change(store)
        try:
            with pytest.raises(error, match=reason):
                await _rendezvous().find_store([("127.0.0.1", ports[0])], WRITER)
        finally:
            store.shards[:] = shards


@pytest.mark.parametrize(
    ("tables", "owners", "model"),
    [
        ([], {}, "ctr"),
        (["old"], {}, "default"),  # nobody's: backfilled
        (["old"], {"old": "ctr"}, "default"),
        (["old"], {"old": "other"}, "ctr"),
        (["old", "ctr:new"], {"ctr:new": "ctr"}, "ctr"),
        (["old", "ctr:new"], {"old": "ctr", "ctr:new": "ctr"}, "default"),
    ],
)
def test_a_run_goes_on_with_the_model_of_its_tables(tables: list[str], owners: dict[str, str], model: str) -> None:
    """A run that names no model goes on with its tables; those of nobody are its own only if it has no others."""
    specs = {name: TableSpec(fqn=name, num_rows=9, dim=2, dtype=DType.FLOAT32) for name in tables}
    store = Store(shards=(), highest_epoch=0, tables=specs, owners=owners)
    assert store.model_of("ctr") == model
