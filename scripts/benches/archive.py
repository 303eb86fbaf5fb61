"""`headrace bench archive`: what an object store costs a shard, how far it is behind, and how fast a server comes back.

The store is a plain HTTP server in memory, in a process of its own on this machine (`object_server.py`). A store cannot
be nearer. So what bounds the figures are this machine's processors and its disk; the store's own work counts against
us, as it is done on the same processors.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from headrace.paramserver.archive.objects import ShardArchive
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.snapshots.bucket import SnapshotStore
from headrace.paramserver.snapshots.remote import create_snapshot
from headrace.paramserver.system.object_store import ObjectStore
from headrace.schemas.errors import UnavailableError
from headrace.scripts.benches.child import Child, Worker, peak_memory_bytes
from headrace.scripts.benches.harness import FolderOption, OnStage, Rounds, RoundsOption, bench_command, bench_folder
from headrace.scripts.benches.ingest import admin_dial, serve
from headrace.scripts.benches.object_server import BUCKET, PREFIX, StoreProcess
from headrace.scripts.benches.table_files import make_snapshot
from headrace.scripts.benches.workload import RowsConfig, WriterProcess

__all__ = ["ArchiveConfig", "archive", "measure"]

_TIMEOUT_S = 600.0
_POLL_S, _SAMPLE_S = 0.02, 0.1
# What an upload reads back is younger than this.
_KEEP_BYTES = 2 << 30
_LOADS = (0.2, 0.8)
_FEW_ROWS_SHARE = 5
_DIM = 64
# Of what a restore finds in the log, as a share of the table.
_TAIL_SHARE = 0.02
# Compaction is over when the store's files have been the same for so long.
_QUIET_S = 2.0
_CHUNK_BYTES = 1 << 20
# Amazon gives 85 to 90 MB/s for one connection to S3, and advises to use several.
_CONNECTION_BYTES_PER_S = 90_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveConfig:
    """How much `headrace bench archive` measures."""

    num_rows: Annotated[
        int, typer.Option("--rows", min=1000, help="Rows of the table that goes up and comes back, of 64 float32.")
    ] = 5_000_000
    num_batches: Annotated[
        int, typer.Option("--batches", min=2, help="Steps of 4096 lookups whose rows are written with and without.")
    ] = 960
    num_hot_batches: Annotated[
        int, typer.Option("--hot-batches", min=1, help="Steps that update the hottest rows between two snapshots.")
    ] = 250
    block_s: Annotated[
        float, typer.Option(min=0.1, help="How long each load lasts whose lag is measured; longer than the bound.")
    ] = 75.0
    num_rounds: RoundsOption = 3
    folder: FolderOption = None


def measure(config: ArchiveConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure what an object store costs a shard, how far the archive is behind, and how fast a server comes back.

    Rows are applied with an archive and without, in turns. A restore is a server's start on an empty directory until it
    serves; it is compared with a GET of the same objects, one after the other, from memory and with connections bounded
    to what S3 gives to one. The second snapshot is made after only
    the hottest hundredth of the rows was updated. An upload's memory is that of a process that does nothing else.
    """
    with bench_folder(config.folder) as folder:
        return {
            **_measure_ingest(config, folder, on_stage),
            **_measure_lag(config, folder, on_stage),
            **_measure_restore(config, folder, on_stage),
            **_measure_memory(config, folder, on_stage),
            "config": {name: value for name, value in asdict(config).items() if name != "folder"},
        }


archive = bench_command("archive", ArchiveConfig, measure, has_bounds=True)


@contextmanager
def _archiving(data_dir: Path, store: StoreProcess, **settings: Any) -> Iterator[ServerProcess]:
    """Run a server with an object store; kill it at the end if it still runs."""
    environ = {**os.environ, **store.environ}
    with serve(data_dir, object_store=store.url, environ=environ, timeout_s=_TIMEOUT_S, **settings) as server:
        yield server


def _measure_ingest(config: ArchiveConfig, folder: Path, on_stage: OnStage) -> dict[str, Any]:
    """Write the same rows with an archive and without."""
    rates, archived_shares = Rounds(), []
    with WriterProcess(RowsConfig(ids="uniform", num_batches=config.num_batches)) as writer:
        for number in range(config.num_rounds):
            on_stage(f"round {number + 1}: rows without an archive")
            with serve(folder / "data") as server:
                written = writer.write(server.address, num_batches=config.num_batches)
                server.kill()
            shutil.rmtree(folder / "data")
            rates.add("without", written.num_rows / written.applied_s)
            on_stage(f"round {number + 1}: rows with an archive")
            with StoreProcess(keep_bytes=_KEEP_BYTES) as store, _archiving(folder / "data", store) as server:
                written = writer.write(server.address, num_batches=config.num_batches)
                behind_bytes = asyncio.run(_behind_bytes(server.address))
                server.kill()
            shutil.rmtree(folder / "data")
            rates.add("with", written.num_rows / written.applied_s)
            archived_shares.append(max(0.0, 1 - behind_bytes / written.wire_bytes))
    return {
        "ingest_with_archive": rates.ratio("with", "without"),
        "ingest_rows_per_s": rates.medians(),
        "ingest_archived_share": median(archived_shares),  # of the bytes, when the last row was applied
        "rows_per_s": rates,
    }


async def _behind_bytes(address: str) -> int:
    async with await _connect(address) as client:
        return int((await client.status()).archive.behind_bytes)


async def _wait_archived(address: str) -> None:
    async with await _connect(address) as client, asyncio.timeout(_TIMEOUT_S):
        while (status := await client.status()).archive.archived_seq < status.log_seq:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(_POLL_S)


async def _connect(address: str) -> ParamServerClient:
    client, _ = await admin_dial(_TIMEOUT_S).connect(*parse_address(address))
    return client


def _measure_lag(config: ArchiveConfig, folder: Path, on_stage: OnStage) -> dict[str, Any]:
    """Write at a share of the capacity and look how long the oldest record that is not archived has been durable.

    A block lasts longer than the bound: an archive that is slower than the log would be late by then.
    """
    rows = RowsConfig(ids="uniform", num_batches=64, num_rows=1_000_000)
    figures: dict[str, Any] = {}
    with (
        StoreProcess(keep_bytes=_KEEP_BYTES) as store,
        _archiving(folder / "data", store) as server,
        WriterProcess(rows) as writer,
        ThreadPoolExecutor(1) as pool,
    ):
        on_stage("capacity")
        written = writer.write(server.address, num_batches=config.num_batches)
        capacity = written.num_rows / written.applied_s
        for load in _LOADS:
            asyncio.run(_wait_archived(server.address))
            on_stage(f"the archive's lag at {load:.0%} of the capacity, for {config.block_s:g} s")
            num_batches = max(1, round(config.block_s * load * capacity / rows.num_lookups))
            is_over = threading.Event()
            sampling = pool.submit(lambda: asyncio.run(_sample_lag(server.address, is_over)))  # noqa: B023
            try:
                written = writer.write(server.address, num_batches=num_batches, rows_per_s=load * capacity)
            finally:
                is_over.set()
            samples_s = sampling.result()
            suffix = "" if load == _LOADS[0] else f"_{load * 100:.0f}"
            figures[f"archive_lag{suffix}_p50_s"] = float(np.percentile(samples_s, 50))
            figures[f"archive_lag{suffix}_p99_s"] = float(np.percentile(samples_s, 99))
            figures[f"archive_lag{suffix}_end_s"] = samples_s[-1]
            figures[f"archive_load{suffix}_late_ms"] = written.late_ms  # a writer that is late offers less
        server.kill()
    shutil.rmtree(folder / "data")
    return {**figures, "capacity_rows_per_s": capacity}


async def _sample_lag(address: str, is_over: threading.Event) -> list[float]:
    """Return how far the archive was behind, seconds, at regular moments until the event."""
    samples_s: list[float] = []
    async with await _connect(address) as client:
        while not is_over.is_set() or not samples_s:
            samples_s.append((await client.status()).archive.behind_s)
            await asyncio.sleep(_SAMPLE_S)
    return samples_s


def _measure_restore(config: ArchiveConfig, folder: Path, on_stage: OnStage) -> dict[str, Any]:
    """Fill a table, make two snapshots and some log behind the second, and bring the server back from the store."""
    took_s, size_bytes, data_dir = Rounds(), 0, folder / "data"
    with StoreProcess() as store:
        with _archiving(data_dir, store, archive_segment_s=1) as server:
            on_stage("filling the table")
            _write(server, config, "shuffled", math.ceil(config.num_rows / 4096))
            _settle(data_dir)  # its files would count as new in the second snapshot
            on_stage("the first snapshot")
            _, first_bytes = _snapshot(server, "first")
            on_stage("updating the hottest rows")
            _write(server, config, "hot", config.num_hot_batches)
            _settle(data_dir)  # what compaction writes anew counts
            on_stage("the second snapshot")
            whole_bytes, second_bytes = _snapshot(server, "second")
            _write(server, config, "uniform", max(1, round(config.num_rows * _TAIL_SHARE / 4096)))
            asyncio.run(_wait_archived(server.address))
            server.stop()
        shutil.rmtree(data_dir)
        on_stage("an empty server's start")
        with serve(data_dir) as server:
            server.kill()
        shutil.rmtree(data_dir)
        with Child(f"{__name__}:_get", "the bench's GET", environ=store.environ, url=store.url, port=store.port) as get:
            for number in range(config.num_rounds):
                for suffix, bytes_per_s in (("", 0), ("_bounded", _CONNECTION_BYTES_PER_S)):
                    store.bound_connections(bytes_per_s)
                    on_stage(f"round {number + 1}: GET{suffix.replace('_', ', ')}")
                    got = get.ask()
                    took_s.add(f"get{suffix}", got["took_s"])
                    size_bytes = got["size_bytes"]
                    on_stage(f"round {number + 1}: restore{suffix.replace('_', ', ')}")
                    begin_s = time.perf_counter()
                    with _archiving(data_dir, store, restore=True) as server:
                        took_s.add(f"restore{suffix}", time.perf_counter() - begin_s)
                        server.kill()
                    shutil.rmtree(data_dir)
                on_stage(f"round {number + 1}: an empty server's start")
                begin_s = time.perf_counter()
                with serve(data_dir) as server:
                    took_s.add("start", time.perf_counter() - begin_s)
                    server.kill()
                shutil.rmtree(data_dir)
    median_s = took_s.medians()
    return {
        "restore_vs_get": took_s.ratio("get", "restore"),
        "restore_vs_get_bounded": took_s.ratio("get_bounded", "restore_bounded"),
        "restore_vs_get_without_start": median_s["get"] / max(median_s["restore"] - median_s["start"], _POLL_S),
        "second_snapshot_bytes_ratio": second_bytes / first_bytes,
        "first_snapshot_bytes": first_bytes,
        "second_snapshot_bytes": second_bytes,
        "snapshot_size_bytes": whole_bytes,
        "restored_bytes": size_bytes,
        "bytes_per_s": {name: size_bytes / median_s[name] for name in median_s if name != "start"},
        "took_s": took_s,
    }


def _write(server: ServerProcess, config: ArchiveConfig, ids: str, num_batches: int) -> None:
    rows = RowsConfig(ids=ids, num_batches=num_batches, dim=_DIM, num_rows=config.num_rows)
    with WriterProcess(rows) as writer:
        writer.write(server.address, num_batches=num_batches)


def _settle(data_dir: Path) -> None:
    """Wait until compaction is over."""
    deadline_s, seen, since_s = time.monotonic() + _TIMEOUT_S, None, 0.0
    while True:
        found, now_s = sorted(path.name for path in data_dir.glob("shard-*/store/*.sst")), time.monotonic()
        if found != seen:
            seen, since_s = found, now_s
        if now_s - since_s >= _QUIET_S:
            return
        if now_s > deadline_s:
            raise UnavailableError(f"the bench's store has compacted for {_TIMEOUT_S:g} s")
        time.sleep(_POLL_S)


def _snapshot(server: ServerProcess, name: str) -> tuple[int, int]:
    """Make a snapshot in the object store; return its length and the bytes that were sent."""

    async def make() -> tuple[int, int]:
        dial = admin_dial(_TIMEOUT_S)
        made = await create_snapshot(server.address, dial=dial, name=name, at_step=False, timeout_s=_TIMEOUT_S)
        async with await _connect(server.address) as client:
            return made.size_bytes, (await client.status()).upload.sent_bytes

    return asyncio.run(make())


def _get(url: str, port: int) -> Worker:
    """GET what a restore reads, one object after the other over one connection; each order does it once."""
    store = ObjectStore.of_url(url)
    newest = SnapshotStore(store).newest()
    assert newest is not None
    objects = json.loads(store.get(f"snapshots/{newest.name}.json"))["objects"].values()
    segments = (each.path for each in ShardArchive(store, 0).segments() if each.last_seq > newest.parts[0].seq)
    paths, buffer = [*objects, *segments], bytearray(_CHUNK_BYTES)
    answer: dict[str, Any] = {}
    while True:
        yield answer
        size_bytes, begin_s = 0, time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port)
        for path in paths:
            connection.request("GET", f"/{BUCKET}/{PREFIX}/{path}")
            response = connection.getresponse()
            assert response.status == http.HTTPStatus.OK
            while num_bytes := response.readinto(buffer):
                size_bytes += num_bytes
        answer = {"took_s": time.perf_counter() - begin_s, "size_bytes": size_bytes}
        connection.close()


def _measure_memory(config: ArchiveConfig, folder: Path, on_stage: OnStage) -> dict[str, Any]:
    """Upload a snapshot of the table and of a fifth of it."""
    peaks: dict[str, int] = {}
    for num_rows in (max(config.num_rows // _FEW_ROWS_SHARE, 1), config.num_rows):
        on_stage(f"making a snapshot of {num_rows} rows")
        snapshot = make_snapshot(folder, num_rows)
        on_stage("its upload")
        with StoreProcess() as store:
            places = {"folder": str(snapshot), "url": store.url}
            with Child(f"{__name__}:_upload", "the bench's upload", environ=store.environ, **places) as upload:
                peaks[str(num_rows)] = upload.ready["peak_rss_bytes"]
        shutil.rmtree(snapshot)
    return {"peak_rss_bytes": peaks}


def _upload(folder: str, url: str) -> Worker:
    SnapshotStore.of_url(url).upload(Path(folder))
    yield {"peak_rss_bytes": peak_memory_bytes()}
