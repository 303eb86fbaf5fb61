"""Lookups by identity over the wire."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from identity_writer import IdentityWriter, identity_spec, weights_of
from shard_servers import serve_shards

from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.schemas.errors import RequestError, UnknownTableError
from headrace.schemas.idl import idl
from headrace.schemas.routing import shards_of_rows, table_seed

FQN = identity_spec().fqn
WAIT_S = 30.0


@contextlib.asynccontextmanager
async def serving(directory: Path, num_shards: int = 3) -> AsyncIterator[tuple[IdentityWriter, EmbeddingReader]]:
    async with serve_shards(directory, num_shards) as ports:
        writer = await IdentityWriter.connect(ports)
        try:
            async with await EmbeddingReader.connect(f"127.0.0.1:{ports[0]}", timeout_s=WAIT_S) as reader:
                yield writer, reader
        finally:
            await writer.close()


def rows_of_other_shards(num_shards: int, count: int) -> list[int]:
    """Return rows such that neighbors are on different shards."""
    shards = shards_of_rows(table_seed(FQN), np.arange(64), num_shards).tolist()
    rows = [0]
    while len(rows) < count:
        rows.append(next(row for row in range(64) if shards[row] != shards[rows[-1]] and row not in rows))
    return rows


async def test_rows_are_found_on_whatever_shard(tmp_path: Path) -> None:
    """Each identity leads to its row and values, unknown ones and -1 to none, also after a restart."""
    identity_of = {row: row * 10**12 - 7 for row in range(0, 64, 3)}
    asked = [*identity_of.values(), 5, -1, next(iter(identity_of.values()))]
    expected = [*identity_of, -1, -1, 0]

    async def check(reader: EmbeddingReader) -> None:
        assert (await reader.find_rows(FQN, asked)).tolist() == expected
        rows = await reader.get_by_identity(FQN, asked, with_states=True, with_versions=True)
        assert rows.row_ids.tolist() == expected
        assert rows.presence.tolist() == [int(row >= 0) for row in expected]
        assert rows.identities is not None and rows.steps is not None
        for at, row in enumerate(expected):
            values = weights_of(row, asked[at], 1) if row >= 0 else [0.0] * 4
            assert rows.weights[at].tolist() == values
            assert rows.identities[at] == (asked[at] if row >= 0 else 0)
            assert rows.steps[at] == rows.states["sum"][at, 0] == int(row >= 0)

    async with serving(tmp_path) as (writer, reader):
        await writer.write(identity_of)
        await check(reader)
    async with serving(tmp_path) as (_, reader):
        await check(reader)


async def test_an_identity_that_moves_between_shards(tmp_path: Path) -> None:
    """The newest claim wins, even if an older row still has the identity or the newer one has lost it."""
    old, new = rows_of_other_shards(3, 2)
    async with serving(tmp_path) as (writer, reader):
        await writer.write({old: 70})
        assert (await reader.find_rows(FQN, [70])).tolist() == [old]
        await writer.write({new: 70})  # the old row does not know
        assert (await reader.find_rows(FQN, [70])).tolist() == [new]
        await writer.write({new: 71, old: 70})
        assert (await reader.find_rows(FQN, [70, 71])).tolist() == [old, new]
        await writer.write({new: 70})
        await writer.write({new: 72})
        assert (await reader.find_rows(FQN, [70, 72])).tolist() == [-1, new]
        await writer.write({}, deleted=[new])
        assert (await reader.find_rows(FQN, [70, 72])).tolist() == [-1, -1]
        assert (await reader.get_by_identity(FQN, [72])).presence.tolist() == [idl.RowPresence.MISSING]


async def test_a_row_that_changes_hands_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An identity is looked up again if its row got another identity after it was found."""
    first, second = rows_of_other_shards(3, 2)
    async with serving(tmp_path) as (writer, reader):
        await writer.write({first: 70})
        get, num_reads = reader._get, 0

        async def late_get(query: Any, row_ids: Any, deadline: Any) -> Any:
            nonlocal num_reads
            num_reads += 1
            if num_reads == 1:
                await writer.write({first: 71, second: 70})
            return await get(query, row_ids, deadline)

        monkeypatch.setattr(reader, "_get", late_get)
        rows = await reader.get_by_identity(FQN, [70, 70])
        assert rows.row_ids.tolist() == [second, second]
        assert rows.weights[0].tolist() == weights_of(second, 70, 2)
        assert num_reads == 2


async def test_many_identities_are_asked_in_pieces(tmp_path: Path) -> None:
    """More identities than one reply holds are found."""
    async with serving(tmp_path, 2) as (writer, reader):
        await writer.write({row: row + 1 for row in range(64)})
        for link in reader.links:
            link.hello.limits.max_frame_bytes = 8192
        asked = np.random.default_rng(1).integers(0, 70, 3000)
        assert (await reader.find_rows(FQN, asked)).tolist() == [i - 1 if 1 <= i <= 64 else -1 for i in asked.tolist()]
        assert (await reader.find_rows(FQN, [])).tolist() == []


async def test_what_is_refused(tmp_path: Path) -> None:
    """A table without identities, an unknown table and a truncated identity are errors."""
    plain = dataclasses.replace(identity_spec("items.weight"), has_identities=False, states=())
    async with serve_shards(tmp_path, 1) as (port,):
        await (await IdentityWriter.connect([port], plain)).close()
        await (await IdentityWriter.connect([port])).close()
        async with await EmbeddingReader.connect(f"127.0.0.1:{port}", timeout_s=WAIT_S) as reader:
            for call in (reader.find_rows, reader.get_by_identity):
                with pytest.raises(RequestError, match=r"'items\.weight' has no identities"):
                    await call(plain.fqn, [1])
                with pytest.raises(UnknownTableError):
                    await call("no.such", [1])
        async with await ParamServerClient.connect("127.0.0.1", port) as client:
            with pytest.raises(RequestError, match=r"'items\.weight' has no identities"):
                await client.find_rows(idl.FindRowsRequest(fqn=plain.fqn, identities=bytes(8)))
            with pytest.raises(RequestError, match="9 bytes of identities"):
                await client.find_rows(idl.FindRowsRequest(fqn=FQN, identities=bytes(9)))
            with pytest.raises(UnknownTableError):
                await client.find_rows(idl.FindRowsRequest(fqn="no.such", identities=b""))
            reply = await client.find_rows(idl.FindRowsRequest(fqn=FQN, identities=b""))
            assert not len(reply.row_ids)
