"""What a shard answers who asks it for its part of a snapshot; snapshots of whole servers are in `test_snapshot.py`."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.paramserver.ingest.ingest import Ingest
from headrace.paramserver.log.file_update_log import FileUpdateLog
from headrace.paramserver.log.log_leases import LogLeases
from headrace.paramserver.snapshots.snapshot_files import SnapshotFiles, hash_file
from headrace.paramserver.snapshots.snapshot_maker import SnapshotMaker
from headrace.paramserver.store.applier import Applier
from headrace.paramserver.store.row_store import RowStore
from headrace.paramserver.store.store_config import StoreConfig
from headrace.schemas.errors import CorruptionError, OverloadedError, RequestError, UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.snapshot_manifest import SnapshotFile


@contextlib.asynccontextmanager
async def _making(path: Path) -> AsyncIterator[tuple[SnapshotMaker, LogLeases]]:
    """Make a shard of a run that has said hello and ended no step."""
    store = RowStore.open(path / "store", config=StoreConfig(block_cache_bytes=1 << 20))
    log, cuts = FileUpdateLog.open(path / "log"), LogLeases()
    async with Applier(store) as applier:
        ingest = Ingest(log, applier, {}, max_backlog_bytes=1 << 30)
        await ingest.open_session("run", "rank0", 1, 0, 1, [])
        files = SnapshotFiles(path / "snapshots")
        yield SnapshotMaker(log, ingest, applier, store, files, cuts, server_id="s", shard=0), cuts
        await log.close()
    store.close()


def _request(name: str, **fields: int) -> Any:
    return idl.CreateSnapshotRequest(**{"name": name, "epoch": 1, "min_step": 0, "wait_ms": 60_000} | fields)


@pytest.mark.parametrize("fields", [{"epoch": -1}, {"wait_ms": -1}])
async def test_a_request_out_of_range_is_refused(tmp_path: Path, fields: dict[str, int]) -> None:
    """No run has such an epoch, and nobody waits for less than no time: nothing is made or waited for."""
    async with _making(tmp_path) as (maker, _):
        with pytest.raises(RequestError, match="out of range"):
            await maker.create(_request("one", **fields))
        assert not (tmp_path / "snapshots").exists()


async def test_one_snapshot_at_a_time(tmp_path: Path) -> None:
    """Who asks while another snapshot waits for its step is told to come again, and may once that one has ended."""
    async with _making(tmp_path) as (maker, cuts):
        waiting = asyncio.create_task(maker.create(_request("one")))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="another snapshot is being made") as caught:
            await maker.create(_request("two", epoch=0, min_step=-1))
        assert caught.value.retry_after_s > 0
        assert not waiting.done() and cuts.held() == []
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        assert cuts.held() == []  # nor does one that was given up keep any log
        part = await maker.create(_request("two", epoch=0, min_step=-1))
        assert (part.seq, part.step) == (1, -1)
        assert part.mark == maker._log.mark_of(1) is not None
        assert [lease.name for lease in cuts.held()] == ["snapshot two"]


async def test_a_cut_is_ordered_once(tmp_path: Path) -> None:
    """Records that come between the one that ends the step and the copy's beginning order no second copy."""
    async with _making(tmp_path) as (maker, _):
        making, ingest = asyncio.create_task(maker.create(_request("one"))), maker._ingest
        async with asyncio.timeout(60):
            while ingest.on_accepted is None:  # noqa: ASYNC110 (what is waited for belongs to the code under test)
                await asyncio.sleep(0)
        session = ingest.sessions.find("run", "rank0")
        assert session is not None
        ingest.sessions.advance(session, client_seq=1, step=4, time_us=1, ends_step=True, is_exact_cut=True)
        look = ingest.on_accepted
        look()
        look()
        assert (await making).step == 4
        assert ingest.on_accepted is None


async def test_a_run_that_comes_to_no_step_is_waited_for_in_vain(tmp_path: Path) -> None:
    """When the time is over nothing looks at records any more, and no log is kept."""
    async with _making(tmp_path) as (maker, cuts):
        with pytest.raises(UnavailableError, match=r"has not stood exactly at a step from 0 on within 0\.001 s"):
            await maker.create(_request("one", wait_ms=1))
        assert maker._ingest.on_accepted is None and cuts.held() == []


async def test_what_a_killed_attempt_has_left_is_in_nobodys_way(tmp_path: Path) -> None:
    """A snapshot of that name can be made again at once: it has the files of the last attempt, and no others."""
    async with _making(tmp_path) as (maker, _):
        for _ in range(2):
            part = await maker.create(_request("one", epoch=0, min_step=-1))
            (folder,) = (tmp_path / "snapshots" / ".new-one").iterdir()
            assert sorted(path.name for path in folder.iterdir()) == [file.name for file in part.files]
            (folder / "leftover").touch()


async def _write_file(maker: SnapshotMaker) -> None:
    """Give the shard's store a file of rows."""
    store = maker._store
    await asyncio.to_thread(store.write, [b"\0\0\0\1k"], [b"v"], applied_seq=store.applied_seq)
    await asyncio.to_thread(store.flush)


async def test_what_an_attempt_has_hashed_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards that were cut at different steps are asked again; each would read all of its store once more."""
    read: list[str] = []

    def note(path: Path, **settings: Any) -> SnapshotFile:
        read.append(path.name)
        return hash_file(path, **settings)

    monkeypatch.setattr("headrace.paramserver.snapshots.snapshot_files.hash_file", note)
    async with _making(tmp_path) as (maker, _):
        await _write_file(maker)
        first = await maker.create(_request("one", epoch=0, min_step=-1))
        await asyncio.to_thread(maker._files.discard, "one")
        rows = [file for file in first.files if file.name.endswith(".sst")]
        assert rows and {file.name for file in rows} <= set(read)
        read.clear()
        maker._hashed[0, 0, 0, 0] = SnapshotFile(name="compacted.sst", size_bytes=1, crc32c=1)
        await _write_file(maker)
        second = await maker.create(_request("one", epoch=0, min_step=-1))
        assert {name for name in read if name.endswith(".sst")} == {
            file.name for file in second.files if file.name.endswith(".sst") and file not in rows
        }
        assert set(rows) <= set(second.files)
        assert (0, 0, 0, 0) not in maker._hashed  # of files that are gone nothing is kept


async def test_what_an_attempt_that_ended_has_hashed_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who gives up after an hour of hashing, and asks again, waits for the rest only."""
    read: list[str] = []

    def note(path: Path, **settings: Any) -> SnapshotFile:
        file = hash_file(path, **settings)
        if path.suffix == ".sst":
            read.append(path.name)
        return file

    monkeypatch.setattr("headrace.paramserver.snapshots.snapshot_files.hash_file", note)
    async with _making(tmp_path) as (maker, _):
        for _ in range(2):
            await _write_file(maker)
        with pytest.raises(UnavailableError, match="nobody waits for it any more"):
            await maker.create(_request("one", epoch=0, min_step=-1), is_wanted=lambda: not read)
        assert len(read) == 1
        part = await maker.create(_request("two", epoch=0, min_step=-1))
        rows = [file.name for file in part.files if file.name.endswith(".sst")]
        assert len(rows) > 1
        assert sorted(read) == rows


async def test_the_log_behind_a_part_is_kept_for_the_slowest_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may hash for a day longer: till then its log is kept, unless the shard is told of the end before."""
    clock = [0.0]

    def hash_for_an_hour(path: Path, **settings: Any) -> SnapshotFile:
        clock[0] += 3600.0
        return hash_file(path, **settings)

    monkeypatch.setattr("headrace.paramserver.snapshots.snapshot_files.hash_file", hash_for_an_hour)
    async with _making(tmp_path) as (maker, cuts):
        cuts._clock = lambda: clock[0]
        for name in ("one", "two"):
            await maker.create(_request(name, epoch=0, min_step=-1))
        maker.let_go("one")
        maker.let_go("three")
        left_s = {lease.name: (lease.seq, lease.expires_s - clock[0]) for lease in cuts.held()}
        assert clock[0] > 3600
        # The first until it is seen that it is published.
        assert left_s == {"snapshot one": (2, 60.0), "snapshot two": (2, 86_400.0)}


async def test_no_snapshot_is_made_of_a_damaged_store(tmp_path: Path) -> None:
    """A byte that the disk has lost gets no checksum that is right: the store's file is named, with what to do."""
    async with _making(tmp_path) as (maker, cuts):
        await _write_file(maker)
        (file,) = maker._store.path.glob("*.sst")
        whole = file.read_bytes()
        file.write_bytes(whole[:10] + bytes((whole[10] ^ 4,)) + whole[11:])
        with pytest.raises(
            CorruptionError, match=r'block at byte 0 .*; no snapshot is made .*"A damaged store"'
        ) as caught:
            await maker.create(_request("one", epoch=0, min_step=-1))
        assert str(file) in str(caught.value)
        assert cuts.held() == []
        file.write_bytes(whole)
        part = await maker.create(_request("one", epoch=0, min_step=-1))  # nothing of it is remembered as sound
        assert file.name in {known.name for known in part.files}


@pytest.mark.parametrize("ends", ["stop", "cancel", "leave"])
async def test_nothing_is_hashed_for_nobody(ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that stops, or whose caller has gone, reads no further: an end would have to wait for it, for hours."""
    started, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    def endless(path: Path, *, on_progress: Callable[[int], None], **_: object) -> SnapshotFile:
        started.set()
        try:
            while True:
                assert goes_on.wait(60)
                on_progress(1)
        finally:
            ended.set()

    monkeypatch.setattr("headrace.paramserver.snapshots.snapshot_files.hash_file", endless)
    async with _making(tmp_path) as (maker, cuts):
        is_there = [True]
        request = _request("one", epoch=0, min_step=-1)
        making = asyncio.create_task(maker.create(request, is_wanted=lambda: is_there[0]))
        assert await asyncio.to_thread(started.wait, 60)
        if ends == "stop":
            maker.stop()
        elif ends == "leave":
            is_there[0] = False
        else:
            making.cancel()
            with pytest.raises(asyncio.CancelledError):
                await making
        goes_on.set()
        assert await asyncio.to_thread(ended.wait, 60)
        if ends != "cancel":
            with pytest.raises(UnavailableError, match="the shard stops"):
                await making
        assert cuts.held() == []
