"""Rows on their way to the shards of a running server: cut, bounded, and sent until they are there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from chaos_proxy import FrameProxy, Route, Trouble
from fake_shard import FakeStore
from set_embeddings import delta_of
from shard_servers import serve_shards

from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.schemas.errors import OwnedError, UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.tables import DType, TableSpec
from headrace.scripts.table_io import server_writer
from headrace.scripts.table_io.server_writer import ServerWriter, ShardWriter, TargetServer

SPEC = TableSpec(fqn="long.weight", num_rows=500, dim=64, dtype=DType.FLOAT32, has_identities=True)
ROWS = np.arange(500)
VALUES = np.arange(500 * 64, dtype="<f4").reshape(500, 64)


async def test_a_bad_network_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of a long batch arrive, cut, over connections that are reset, with frames that come twice or late."""
    monkeypatch.setattr(server_writer, "_LONGEST_PAUSE_S", 0.05)  # many connections fail before one is good
    async with serve_shards(tmp_path / "target", 2, advertise_host="127.0.0.2") as ports:
        with FrameProxy([Route("127.0.0.2", "127.0.0.1", ports)], seed=5) as proxy:
            target = TargetServer(host="127.0.0.1", port=ports[0])
            resolver = target.resolver((await target.ask())[1])
            # The order of the frames is not the seed's alone, but among some hundred, one is reset and one reordered.
            proxy.make(Trouble(reset=0.05, duplicate=0.1, reorder=0.1))
            writing = ServerWriter(target, resolver, "run", [SPEC], max_bytes=1000, epoch=1)
            delta = delta_of(SPEC, ROWS, VALUES, identities=(ROWS * 7).tobytes())
            delta.row_ids, delta.weights = delta.row_ids.tobytes(), delta.weights.tobytes()
            async with writing.sending() as writer:
                assert await writer.put([delta], step=0, time_us=1) == (500, 0)
            proxy.make(Trouble())
            again = ServerWriter(target, resolver, "run", [SPEC], max_bytes=1000, epoch=1)
            async with again.sending() as writer:
                assert await writer.put([delta], step=0, time_us=1) == (0, 500), "they are there"
            async with await EmbeddingReader.connect(f"127.0.0.1:{ports[0]}") as reader:
                found = await reader.get(SPEC.fqn, ROWS)
    assert found.presence.all() and found.weights.tobytes() == VALUES.tobytes()
    assert found.identities is not None and (found.identities == ROWS * 7).all()
    assert proxy.counts["reset"] > 0 and proxy.counts["reorder"] > 0


def test_one_attempt_is_shorter_than_all() -> None:
    """One attempt takes at most ten seconds, or less if the whole timeout is shorter."""
    for timeout_s, attempt_s in ((600.0, 10.0), (0.5, 0.5)):
        assert TargetServer(host="h", port=1, timeout_s=timeout_s).connect_timeout_s == attempt_s


async def test_what_is_on_its_way_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches and bytes that wait for a shard's ack are bounded; a larger batch goes alone."""
    monkeypatch.setattr(server_writer, "_WINDOW_MESSAGES", 3)
    monkeypatch.setattr(server_writer, "_WINDOW_BYTES", 1000)
    writer = ShardWriter(cast("Any", None), cast("Any", None), 0, "run", [], epoch=1)
    puts: list[asyncio.Task[bool]] = []

    async def num_sent(*sizes: int, acked: int) -> int:
        for size in sizes:
            delta = idl.TableDelta(row_ids=bytes(size), weights=b"", states=[])
            puts.append(asyncio.create_task(writer.put(idl.SetEmbeddingsRequest(deltas=[delta]))))
        for _ in range(5):
            await asyncio.sleep(0)
        writer._take_acks(acked)
        for _ in range(5):
            await asyncio.sleep(0)
        return sum(put.done() for put in puts)

    writer._take_acks(0)  # its hello
    assert await num_sent(10, 10, 10, 10, acked=0) == 3
    assert [await num_sent(acked=acked) for acked in (1, 4)] == [4, 4]
    assert await num_sent(600, 400, 1, acked=4) == 6
    assert await num_sent(acked=5) == 7
    assert await num_sent(5000, acked=6) == 7
    assert await num_sent(acked=7) == 8
    assert await num_sent(1, acked=7) == 8
    assert await num_sent(acked=8) == 9


async def test_who_is_refused_a_table_reaches_no_other_shard() -> None:
    """Shard 0 decides between two writers of a table: the others hear only of the one that it lets in."""
    async with FakeStore(num_shards=2) as store:
        target = TargetServer(host="127.0.0.1", port=store.shards[0].port)
        places = (await target.ask())[1]
        writer = ServerWriter(target, target.resolver(places), "b", [SPEC], max_bytes=1 << 20, epoch=1)
        store.shards[0].refusals += [UnavailableError("not now"), OwnedError("another backfill has it")]
        with pytest.raises(OwnedError):
            async with writer.sending():
                raise AssertionError("it was let in")
        assert [shard.num_hellos for shard in store.shards] == [2, 0]
