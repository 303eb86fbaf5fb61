"""Lookups by identity find the server's rows, however the copy began, in both consistencies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from identity_writer import IdentityWriter, identity_spec, weights_of
from replica_of import replica_of
from shard_servers import serve_shards

from headrace.paramserver.reading.link import Dial
from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.snapshots.remote import create_snapshot
from headrace.schemas.errors import RequestError, RowRangeError, UnknownTableError
from headrace.schemas.idl import idl

FQN = identity_spec().fqn
WAIT_S = 30.0


@contextlib.asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[tuple[IdentityWriter, str]]:
    async with serve_shards(tmp_path / "data", 2) as ports:
        writer = await IdentityWriter.connect(ports)
        yield writer, f"127.0.0.1:{ports[0]}"
        await writer.close()


def following(address: str, **settings: Any) -> contextlib.AbstractAsyncContextManager[EmbeddingReplica]:
    # Servers in this process wait for the last answers to their followers.
    return replica_of(address, fetch_wait_s=0.1, **settings)


async def check(replica: EmbeddingReplica, writer: IdentityWriter, step_of: dict[int, tuple[int, int]]) -> None:
    """Compare with (row, step) by identity, and check two identities that no row has."""
    await asyncio.to_thread(replica.wait_for, writer.step, WAIT_S)
    expected = [weights_of(row, identity, step) for identity, (row, step) in step_of.items()]
    rows = replica.lookup_by_identity(FQN, [*step_of, -1, 424242])
    assert rows.tolist() == [*expected, [0.0] * 4, [0.0] * 4]
    found = replica.find_rows(FQN, [*step_of, -1, 424242])
    assert found.tolist() == [*(row for row, _ in step_of.values()), -1, -1]
    assert replica.lookup_runtime_meta(FQN, found).tolist() == [
        [step] * 2 for _, step in [*step_of.values(), (0, 0), (0, 0)]
    ]


@pytest.mark.parametrize("consistency", ["latest", "step"])
@pytest.mark.parametrize("begins_from", ["live", "snapshot"])
async def test_every_identity_leads_to_its_row(tmp_path: Path, consistency: str, begins_from: str) -> None:
    """Identities from before the replica, moved, reassigned and deleted ones are right on two shards."""
    async with serving(tmp_path) as (writer, address):
        await writer.write({row: 100 + row for row in range(8)})
        await writer.write({1: 102, 2: 101, 3: 200}, deleted=[4])
        settings: dict[str, Any] = {"consistency": consistency}
        if begins_from == "snapshot":
            dial = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=WAIT_S, role=idl.Role.ADMIN)
            manifest = await create_snapshot(address, dial=dial, timeout_s=WAIT_S)
            settings["snapshot"] = tmp_path / "data" / "snapshots" / manifest.name
        async with following(address, **settings) as replica:
            known = {100: (0, 1), 102: (1, 2), 101: (2, 2), 200: (3, 2), 105: (5, 1), 106: (6, 1), 107: (7, 1)}
            await check(replica, writer, known)
            assert replica.lookup_by_identity(FQN, [103, 104]).tolist() == [[0.0] * 4] * 2
            for turn in range(5):
                await writer.write({0: 300 + turn, 9 + turn: 100, 8 + turn: 500 + turn}, deleted=[20])
                await check(replica, writer, {300 + turn: (0, writer.step), 100: (9 + turn, writer.step)})
            await writer.write({}, deleted=[13])
            await check(replica, writer, {105: (5, 1)})
            assert not replica.lookup_by_identity(FQN, [100]).any()


async def test_missing_identities_follow_the_policy(tmp_path: Path) -> None:
    """Missing identities read as the default and are counted, or raise; any shape is kept."""
    async with serving(tmp_path) as (writer, address):
        await writer.write({1: 10, 2: -20})
        default = torch.tensor([9.0, 8.0, 7.0, 6.0])
        async with following(address, missing="table_default", defaults={FQN: default}) as replica:
            rows = replica.lookup_by_identity(FQN, torch.tensor([[10, 11], [-20, -1]]))
            assert rows.tolist() == [
                [weights_of(1, 10, 1), default.tolist()],
                [weights_of(2, -20, 1), default.tolist()],
            ]
            assert replica.num_missing == {FQN: 2}
            replica.lookup_by_identity(FQN, [10, 12])
            replica.lookup(FQN, [2, 3, 3])
            assert replica.num_missing == {FQN: 5}  # of all lookups so far
            assert replica.lookup_by_identity(FQN, []).shape == (0, 4)
            found = replica.find_rows(FQN, torch.tensor([[10, 11], [-20, -1]]))
            assert found.tolist() == [[1, -1], [2, -1]]
            meta = replica.lookup_runtime_meta(FQN, found)
            assert (meta.dtype, meta.tolist()) == (torch.int64, [[[1, 1], [0, 0]]] * 2)
            assert replica.lookup_runtime_meta(FQN, []).shape == (0, 2)
            with pytest.raises(RowRangeError):
                replica.lookup_runtime_meta(FQN, [-2])
        async with following(address, missing="error") as replica:
            assert replica.lookup_by_identity(FQN, [10]).tolist() == [weights_of(1, 10, 1)]
            with pytest.raises(RequestError, match=r"identity 11 is not there \(2 of 3"):
                replica.lookup_by_identity(FQN, [10, 11, -1])


async def test_what_is_refused(tmp_path: Path) -> None:
    """A table without identities and an unknown one are refused."""
    plain = dataclasses.replace(identity_spec("items.weight"), has_identities=False, states=())
    async with serve_shards(tmp_path, 1) as (port,):
        await (await IdentityWriter.connect([port], plain)).close()
        async with following(f"127.0.0.1:{port}") as replica:
            with pytest.raises(RequestError, match=r"'items\.weight' has no identities"):
                replica.lookup_by_identity(plain.fqn, [1])
            with pytest.raises(RequestError, match=r"'items\.weight' has no identities"):
                replica.find_rows(plain.fqn, [1])
            with pytest.raises(RequestError, match=r"'items\.weight' has no runtime meta"):
                replica.lookup_runtime_meta(plain.fqn, [1])
            for look in (replica.lookup_by_identity, replica.find_rows, replica.lookup_runtime_meta):
                with pytest.raises(UnknownTableError):
                    look("no.such", [1])
