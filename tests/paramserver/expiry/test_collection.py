"""Tombstones are collected: which ones, when, and that no row comes back; `ingest/test_floors.py` has a dict's word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expiry_rig import Rig, RigCommands, open_rig
from row_batches import copy_as_after_crash
from set_embeddings import delta_of, request_of
from text_scripts import Script, scripts

from headrace.paramserver.log.interface import KIND_HELLO
from headrace.paramserver.log.leases import LogLeases
from headrace.schemas.log_records import pack_header
from headrace.schemas.tables import DType, TableSpec


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with open_rig(tmp_path) as rig:
        await _begin(rig)
        yield rig


async def _begin(rig: Rig) -> None:
    await rig.hello(1)
    await rig.hello(1, run="replay", client="r", world_size=0)


async def _replay(rig: Rig, step: int, rows: Any) -> None:
    await rig.write(1, step, rows, run="replay", client="r", ends_step=False, version_epoch=1)


@scripts(__file__, "collection")
async def test_collection(script: Script, tmp_path: Path) -> None:
    """Old tombstones go, and no row comes back for it."""
    async with RigCommands(tmp_path) as commands:
        await script.run_async(commands)


async def test_a_follower_that_lags_keeps_tombstones(rig: Rig) -> None:
    """While a follower has not taken the floor's record, nothing is dropped, and the report names it."""
    await rig.write(1, 1, [0, 1])
    await rig.write(1, 2, [], deleted=[0])
    await rig.write(1, 50)
    followers = LogLeases()
    followers.renew("r1", 3, 60.0)
    report = await rig.collect(followers=followers)
    assert report.collected == 0 and "follower 'r1' is still at record 3" in report.note
    assert rig.table.floor == (1, 2) and rig.stored_rows() == [0, 1]

    async def sleep(seconds: float) -> None:  # meanwhile it goes on
        followers.renew("r1", rig.ingest.accepted_seq + 1, 60.0)

    assert (await rig.collect(followers=followers, sleep=sleep)).collected == 1
    assert rig.stored_rows() == [1]


async def test_a_row_written_meanwhile_stays(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is written between the look at it and the removal is not removed."""
    await rig.write(1, 1, [0, 1])
    await rig.write(1, 2, [], deleted=[0, 1])
    await rig.write(1, 50)
    run_at = rig.applier.run_at

    def late(seq: int, work: Callable[[], None]) -> Any:
        async def do() -> None:
            await rig.write(1, 51, [0])
            await run_at(rig.ingest.accepted_seq, work)

        return asyncio.ensure_future(do())

    monkeypatch.setattr(rig.applier, "run_at", late)
    assert (await rig.collect()).collected == 1
    assert await rig.present([0, 1]) == [0] and rig.stored_rows() == [0]


async def test_nothing_comes_back_wherever_it_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at any point of a collection, the shard recovers its rows, and neither its log nor a replay adds one."""
    copies: list[Path] = []

    def copy() -> None:
        copies.append(tmp_path / f"copy{len(copies)}")
        copies[-1].mkdir()
        # A crash keeps RocksDB's files and takes its memtable.
        copy_as_after_crash(tmp_path / "shard" / "store", copies[-1] / "store")

    def with_copies(work: Callable[..., Any]) -> Callable[..., Any]:
        def do(*args: Any, **more: Any) -> Any:
            copy()
            done = work(*args, **more)
            copy()
            return done

        return do

    async with open_rig(tmp_path / "shard") as rig:
        for name in ("remove", "flush", "write_runs"):
            monkeypatch.setattr(rig.store, name, with_copies(getattr(rig.store, name)))
        await _begin(rig)
        await rig.write(1, 5, range(10))
        await rig.write(1, 6, [], deleted=range(8))
        await _replay(rig, 3, range(12))  # not above the floor later, and not below it yet
        await rig.write(1, 50)
        assert (await rig.collect(piece_rows=3)).collected == 8
        rig.store.flush()
        log = rig.log
    assert len(copies) > 10
    for path in copies:
        log = log.reopen()
        async with open_rig(path, log) as rig:
            await rig.hello(1, run="replay", client="r", world_size=0)
            assert await rig.present(range(12)) == [8, 9, 10, 11]
            await _replay(rig, 4, range(8))
            assert await rig.present(range(12)) == [8, 9, 10, 11]
            await rig.collect()
            assert rig.stored_rows() == [8, 9, 10, 11]


async def test_lookups_that_have_begun_are_waited_for(rig: Rig) -> None:
    """Nothing is dropped below a lookup that may still compare what it finds with older pending rows."""
    await rig.write(1, 1, [0])
    await rig.write(1, 2, [], deleted=[0])
    await rig.write(1, 50)
    ticket = rig.applier._readers.begin()
    collecting = asyncio.create_task(rig.collect())
    done, _ = await asyncio.wait([collecting], timeout=0.2)
    assert not done and rig.stored_rows() == [0]
    rig.applier._readers.end(ticket)
    assert (await collecting).collected == 1
    assert np.array_equal(rig.stored_rows(), [])


WITH_IDENTITIES = TableSpec(fqn="ids.weight", num_rows=0, dim=2, dtype=DType.FLOAT32, has_identities=True)


async def _assign(rig: Rig, step: int, identity_of: dict[int, int], *, deleted: Any = ()) -> None:
    """Write rows with their identities, as a trainer does."""
    identities, gone = np.array([*identity_of.values()], "<i8"), np.array(deleted, "<i8")
    delta = delta_of(WITH_IDENTITIES, [*identity_of], 1.0, identities=identities, deleted_row_ids=gone)
    session = rig.ingest.sessions.find("run", "rank0")
    assert session is not None
    request = request_of(delta, client_seq=session.last_client_seq + 1, step=step, time_us=step)
    await rig.send(request)


async def test_the_floor_is_a_hello_of_the_expirer_in_the_log(rig: Rig) -> None:
    """The record is a hello that says nothing else, which followers of earlier releases take as such."""
    await rig.write(1, 1, [0])
    await rig.write(1, 2, [], deleted=[0])
    await rig.write(1, 50)
    await rig.collect()
    *_, record = rig.log.read(1)
    assert pack_header(record.header) == bytes.fromhex(
        "88a46b696e64" + f"{KIND_HELLO:02x}" + "a372756ea86865616472616365a6636c69656e74a6657870697279a472616e6b00aa"
        "776f726c645f73697a6500a67461626c657390a56f776e656490a6666c6f6f727381ab757365722e776569676874920102"
    )
    assert (record.epoch, bytes(record.body)) == (1, b"")
    assert rig.ingest.sessions.find("headrace", "expiry") is not None
