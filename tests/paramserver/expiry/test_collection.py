"""Tombstones are collected: which ones, when, and that no row comes back; `ingest/test_floors.py` has a dict's word."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expiry_rig import DELETED, MISSING, PRESENT, SECOND_US, Rig, open_rig

from headrace.paramserver.log.leases import LogLeases
from headrace.schemas.tables import ColumnShard

LEFT, RIGHT = ColumnShard(offset=0, width=2), ColumnShard(offset=2, width=2)


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


async def test_old_tombstones_go_with_their_keys(rig: Rig) -> None:
    """Tombstones older than the limit leave RocksDB, which has the keys of present rows then; a dry run only counts."""
    await rig.write(1, 1, range(100))
    await rig.write(1, 2, [], deleted=range(90))
    await rig.write(1, 50, [95])
    dry = await rig.collect(is_dry_run=True)
    assert (dry.collected, rig.table.floor) == (90, (0, -1))
    assert rig.stored_rows() == list(range(100))
    report = await rig.collect()
    assert (report.collected, report.note, rig.table.floor) == (90, "", (1, 2))
    assert rig.stored_rows() == list(range(90, 100))
    assert await rig.presence([0, 89, 90, 95]) == [MISSING, MISSING, PRESENT, PRESENT]
    assert (await rig.collect()).collected == 0


async def test_no_collected_row_comes_back(rig: Rig) -> None:
    """What was collected stays away from a replay, a newer version counts, and the trainer's own write lives."""
    await rig.write(1, 1, range(5))
    await rig.write(1, 2, [], deleted=range(4))
    await rig.write(1, 50)
    assert (await rig.collect()).collected == 4
    await _replay(rig, 1, range(6))
    assert await rig.present(range(6)) == [4]
    await _replay(rig, 3, [0])
    await rig.write(1, 51, [1])
    assert await rig.present(range(6)) == [0, 1, 4]


async def test_young_tombstones_and_those_of_running_steps_stay(rig: Rig) -> None:
    """A tombstone counts as old by its own time, and only below every step that a trainer may still send."""
    rig.now_us = 100 * SECOND_US
    await rig.write(1, 1, range(6))
    for step in (10, 20, 60, 61):
        await rig.write(1, step, [], deleted=[step % 7])
    assert (await rig.collect(keep_s=85)).collected == 1
    assert rig.table.floor == (1, 10)
    assert (await rig.collect(keep_s=1)).collected == 1  # not of the steps 60 and 61, which are the last two
    assert rig.table.floor == (1, 20)


async def test_below_the_floor_age_does_not_matter(rig: Rig) -> None:
    """A tombstone that is not above the floor means nothing any more, so it goes even if it is young."""
    await rig.write(1, 1, range(3))
    await rig.write(1, 9, [], deleted=[0])
    await rig.write(1, 50)
    await rig.collect()
    await rig.write(1, 50, [], run="replay", client="r", ends_step=False, version_epoch=1, deleted=[9], time_us=10**15)
    await rig.write(1, 5, [], run="replay", client="r", ends_step=False, version_epoch=1, deleted=[1], time_us=10**15)
    assert await rig.presence([1, 2, 9]) == [DELETED, PRESENT, DELETED]
    assert (await rig.collect()).collected == 1
    assert await rig.presence([1, 2, 9]) == [MISSING, PRESENT, DELETED]


async def test_a_tombstone_that_hides_a_record_stays(rig: Rig) -> None:
    """A row deleted in other columns than it was written in is kept: its old record would show again."""
    await rig.write(1, 1, [0, 1])
    for shard in (LEFT, RIGHT):
        await rig.write(1, 2, [], deleted=[0, 5], shard=shard)
    await rig.write(1, 2, [], deleted=[1])
    await rig.write(1, 50)
    assert (await rig.collect(is_dry_run=True)).collected == 2
    assert (await rig.collect()).collected == 2
    assert rig.stored_rows() == [0]
    assert await rig.presence([0, 1, 5]) == [DELETED, MISSING, MISSING]


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
        # A crash keeps RocksDB's files and takes its memtable.
        shutil.copytree(tmp_path / "shard" / "store", copies[-1] / "store")

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
