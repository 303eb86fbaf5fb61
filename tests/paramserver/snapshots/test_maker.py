"""One shard's part of a snapshot; `test_snapshot.py` covers whole servers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from headrace.paramserver.ingest.pipeline import Ingest
from headrace.paramserver.log.files import FileUpdateLog
from headrace.paramserver.log.leases import LogLeases
from headrace.paramserver.snapshots.directory import SnapshotFiles, hash_file
from headrace.paramserver.snapshots.maker import SnapshotMaker
from headrace.paramserver.store.applier import Applier
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import CorruptionError, OverloadedError, RequestError, UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.snapshot_manifest import SnapshotFile


@contextlib.asynccontextmanager
async def _making(path: Path) -> AsyncIterator[tuple[SnapshotMaker, LogLeases]]:
    """Make the parts of a shard whose run has said hello and ended no step."""
    store = RowStore.open(path / "store", config=StoreConfig(block_cache_bytes=1 << 20))
    log, leases = FileUpdateLog.open(path / "log"), LogLeases()
    async with Applier(store) as applier:
        ingest = Ingest(log, applier, {}, max_backlog_bytes=1 << 30)
        await ingest.open_session("run", "rank0", 1, 0, 1, [])
        files = SnapshotFiles(path / "snapshots")
        yield SnapshotMaker(log, ingest, applier, store, files, leases, "s", 0), leases
        await log.close()
    store.close()


NOW = {"epoch": 0, "min_step": -1}


def _request(name: str, **fields: int) -> Any:
    return idl.CreateSnapshotRequest(**{"name": name, "epoch": 1, "min_step": 0, "wait_ms": 60_000} | fields)


async def test_one_snapshot_at_a_time(tmp_path: Path) -> None:
    """A second snapshot, or one out of range, is refused while one waits for its step; the next comes once it ends."""
    async with _making(tmp_path) as (maker, leases):
        for fields in ({"epoch": -1}, {"wait_ms": -1}):
            with pytest.raises(RequestError, match="out of range"):
                await maker.create(_request("one", **fields))
        assert not (tmp_path / "snapshots").exists()
        waiting = asyncio.create_task(maker.create(_request("one")))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="another snapshot is being made") as caught:
            await maker.create(_request("two", **NOW))
        assert caught.value.retry_after_s > 0
        assert not waiting.done() and leases.held() == []
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        assert leases.held() == []  # a cancelled one keeps no log
        part = await maker.create(_request("two", **NOW))
        assert (part.seq, part.step) == (1, -1)
        assert part.mark == maker._log.nonce_of(1) is not None
        assert [lease.name for lease in leases.held()] == ["snapshot two"]


async def test_a_copy_is_ordered_once(tmp_path: Path) -> None:
    """Records between the end of the step and the start of the copy order no second copy."""
    async with _making(tmp_path) as (maker, _):
        making, ingest = asyncio.create_task(maker.create(_request("one"))), maker._ingest
        await until(lambda: ingest.on_accepted)
        session = ingest.sessions.find("run", "rank0")
        assert session is not None
        ingest.sessions.advance(session, client_seq=1, step=4, time_us=1, ends_step=True, is_exact_cut=True)
        look = ingest.on_accepted
        look()
        look()
        assert (await making).step == 4
        assert ingest.on_accepted is None


async def test_a_run_that_reaches_no_step_ends_the_wait(tmp_path: Path) -> None:
    """After the wait, records are not watched any more, and no log is kept."""
    async with _making(tmp_path) as (maker, leases):
        with pytest.raises(UnavailableError, match="has not stood exactly at a step from 0 on; its watermark"):
            await maker.create(_request("one", wait_ms=1))
        assert maker._ingest.on_accepted is None and leases.held() == []


async def test_remains_of_a_killed_attempt_do_not_matter(tmp_path: Path) -> None:
    """A second attempt at a name has only its own files."""
    async with _making(tmp_path) as (maker, _):
        for _ in range(2):
            part = await maker.create(_request("one", **NOW))
            (folder,) = (tmp_path / "snapshots" / ".new-one").iterdir()
            assert sorted(path.name for path in folder.iterdir()) == [file.name for file in part.files]
            (folder / "leftover").touch()


async def _write_file(maker: SnapshotMaker) -> None:
    """Add a file of rows to the shard's store."""
    store = maker._store
    await asyncio.to_thread(store.write, [b"\0\0\0\1k"], [b"v"], applied_seq=store.applied_seq)
    await asyncio.to_thread(store.flush)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives the name of each file of rows once it is hashed."""
    names: list[str] = []

    def note(path: Path, **settings: Any) -> SnapshotFile:
        file = hash_file(path, **settings)
        if path.suffix == ".sst":
            names.append(path.name)
        return file

    monkeypatch.setattr("headrace.paramserver.snapshots.directory.hash_file", note)
    return names


async def test_files_of_an_earlier_attempt_are_not_rehashed(tmp_path: Path, read: list[str]) -> None:
    """A discarded attempt need not read the whole store again."""
    async with _making(tmp_path) as (maker, _):
        await _write_file(maker)
        first = await maker.create(_request("one", **NOW))
        await asyncio.to_thread(maker._files.discard, "one")
        rows = [file for file in first.files if file.name.endswith(".sst")]
        assert rows and {file.name for file in rows} <= set(read)
        read.clear()
        maker._hashed[0, 0, 0, 0] = SnapshotFile(name="compacted.sst", size_bytes=1, crc32c=1)
        await _write_file(maker)
        second = await maker.create(_request("one", **NOW))
        assert set(read) == {file.name for file in second.files if file.name.endswith(".sst") and file not in rows}
        assert set(rows) <= set(second.files)
        assert (0, 0, 0, 0) not in maker._hashed  # files that are gone are forgotten


async def test_files_of_an_abandoned_attempt_are_not_hashed_again(tmp_path: Path, read: list[str]) -> None:
    """After a caller gave up, the next attempt hashes only the rest."""
    async with _making(tmp_path) as (maker, _):
        for _ in range(2):
            await _write_file(maker)
        with pytest.raises(UnavailableError, match="nobody waits for it"):
            await maker.create(_request("one", **NOW), is_wanted=lambda: not read)
        assert len(read) == 1
        part = await maker.create(_request("two", **NOW))
        rows = [file.name for file in part.files if file.name.endswith(".sst")]
        assert len(rows) > 1
        assert sorted(read) == rows


async def test_the_log_behind_a_part_is_kept_for_the_slowest_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part keeps its log from its cut on for a day, or until shortly after it is released."""
    clock = [0.0]

    def hash_for_an_hour(path: Path, **settings: Any) -> SnapshotFile:
        clock[0] += 3600.0
        assert leases.held()[-1].seq == 2
        return hash_file(path, **settings)

    monkeypatch.setattr("headrace.paramserver.snapshots.directory.hash_file", hash_for_an_hour)
    async with _making(tmp_path) as (maker, leases):
        leases._clock = lambda: clock[0]
        for name in ("one", "two"):
            await maker.create(_request(name, **NOW))
        maker.release_log("one")
        maker.release_log("three")
        left_s = {lease.name: (lease.seq, lease.expires_s - clock[0]) for lease in leases.held()}
        assert clock[0] > 3600
        # The first one until retention sees that it is published.
        assert left_s == {"snapshot one": (2, 60.0), "snapshot two": (2, 86_400.0)}


async def test_no_snapshot_is_made_of_a_damaged_store(tmp_path: Path) -> None:
    """A damaged file gets no checksum; the error names it and the remedy."""
    async with _making(tmp_path) as (maker, leases):
        await _write_file(maker)
        (file,) = maker._store.path.glob("*.sst")
        whole = file.read_bytes()
        file.write_bytes(whole[:10] + bytes((whole[10] ^ 4,)) + whole[11:])
        with pytest.raises(
            CorruptionError, match=r'block at byte 0 .*; no snapshot is made .*"A damaged store"'
        ) as caught:
            await maker.create(_request("one", **NOW))
        assert str(file) in str(caught.value)
        assert leases.held() == []
        file.write_bytes(whole)
        part = await maker.create(_request("one", **NOW))  # the damaged file was not remembered
        assert file.name in {known.name for known in part.files}


@pytest.mark.parametrize("ends", ["stop", "cancel", "leave"])
async def test_hashing_stops_when_nobody_waits(ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashing stops when the shard stops or the caller is gone; else its end would take hours."""
    started, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    def endless(path: Path, *, on_progress: Callable[[int], None], **_: object) -> SnapshotFile:
        started.set()
        try:
            while True:
                assert goes_on.wait(60)
                on_progress(1)
        finally:
            ended.set()

    monkeypatch.setattr("headrace.paramserver.snapshots.directory.hash_file", endless)
    async with _making(tmp_path) as (maker, leases):
        is_there = [True]
        request = _request("one", **NOW)
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
        assert leases.held() == []
