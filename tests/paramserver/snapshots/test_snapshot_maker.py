"""What a shard answers who asks it for its part of a snapshot; snapshots of whole servers are in `test_snapshot.py`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.paramserver.ingest.ingest import Ingest
from headrace.paramserver.log.file_update_log import FileUpdateLog
from headrace.paramserver.log.log_leases import LogLeases
from headrace.paramserver.snapshots.snapshot_files import SnapshotFiles
from headrace.paramserver.snapshots.snapshot_maker import SnapshotMaker
from headrace.paramserver.store.applier import Applier
from headrace.paramserver.store.row_store import RowStore
from headrace.paramserver.store.store_config import StoreConfig
from headrace.schemas.errors import OverloadedError, RequestError, UnavailableError
from headrace.schemas.idl import idl


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
        async with asyncio.timeout(20):
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
