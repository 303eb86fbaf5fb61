"""`headrace bench follow`: what a follower costs its source, how far it is behind, and how long handing over takes.

Everything runs on this machine, so the source, its followers and their writer share the processors and the disk.
"""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from headrace.paramserver.reading.follower import ShardFollower
from headrace.paramserver.reading.link import link_all
from headrace.paramserver.reshard.rebuild import TableChoice, rebuild
from headrace.paramserver.reshard.remains import find_remains, open_remains
from headrace.paramserver.rpc.address import parse_address, parse_addresses
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.snapshots.remote import create_snapshot, fetch_snapshot
from headrace.schemas.errors import HeadraceError
from headrace.scripts.benches.harness import OnStage, Rounds, RoundsOption, bench_command, bench_folder
from headrace.scripts.benches.ingest import admin_dial, serve
from headrace.scripts.benches.workload import BenchRows, RowsConfig, WriterProcess, hello_request
from headrace.scripts.commands.promote import promote_shard

__all__ = ["follow", "measure"]

_TIMEOUT_S = 60.0
# Of the rate at which the source takes rows alone.
_PACE = 0.2
_NUM_LAGS = 200
# A follower takes over no sooner after its start: its source may answer rows by what it was told before.
_SETTLED_S = 1.5


def measure(
    on_stage: OnStage,
    *,
    num_batches: Annotated[
        int, typer.Option("--batches", min=1, help="Steps of 4096 lookups whose rows are written in a round.")
    ] = 240,
    num_promotions: Annotated[int, typer.Option("--promotions", min=1, help="Shards that are handed over.")] = 10,
    num_rounds: RoundsOption = 3,
) -> dict[str, Any]:
    """Measure followers, promotions, and builds of servers with other numbers of shards.

    In turns, a server takes rows alone and with one follower. Then it takes a fifth of what it can, and a reader of the
    follower notes when each record arrives. Then the server is handed over from one follower to the next, and at last
    it is built with 2, 3 and 2 shards again, beside a plain scan and bulk load of the same rows.
    """
    values, config = Rounds(), RowsConfig(ids="uniform", num_batches=num_batches)
    with bench_folder() as folder, WriterProcess(config) as writer:
        for number in range(num_rounds):
            for name in ("alone", "followed"):
                on_stage(f"round {number + 1}: {name}")
                place = folder / f"{name}-{number}"
                values.add(name, _rate(writer, place, num_batches, is_followed=name == "followed"))
        rows_per_s = _PACE * values.medians()["alone"]
        on_stage("how far the follower is behind")
        with serve(folder / "source") as source, serve(folder / "follower", follow=source.address) as follower:
            lags_ms = asyncio.run(_lags_ms(BenchRows(config), source.address, follower.address, rows_per_s))
        on_stage("promotions")
        pauses_s = _promotions_s(folder / "promoted", writer, num_promotions)
        on_stage("builds")
        builds = _builds(folder / "built", writer, num_batches)
    return {
        "acked_with_follower_ratio": values.ratio("followed", "alone"),
        "follower_lag_p99_ms": float(np.quantile(lags_ms, 0.99)),
        "follower_lag_p50_ms": float(np.median(lags_ms)),
        "promote_pause_p99_s": float(np.quantile(pauses_s, 0.99)),
        "promote_pause_p50_s": float(np.median(pauses_s)),
        **builds,
        "rows_per_s": values,
    }


follow = bench_command("follow", measure)


def _rate(writer: WriterProcess, place: Path, num_batches: int, *, is_followed: bool) -> float:
    """Return rows/s that a server acks, with one follower or none."""
    with serve(place) as server:
        follower = None
        if is_followed:
            follower = ServerProcess.start(place.with_name(f"{place.name}-copy"), follow=server.address)
        try:
            written = writer.write(server.address, num_batches=num_batches)
        finally:
            if follower is not None:
                follower.close()
    return written.num_rows / written.acked_s


async def _lags_ms(rows: BenchRows, source: str, follower: str, rows_per_s: float) -> list[float]:
    """Return how long after its ack each batch was in the follower's log, milliseconds."""
    (link,) = await link_all(admin_dial(_TIMEOUT_S), parse_addresses(follower))
    await link.refresh()
    seen_s: dict[int, float] = {}
    acked_s: dict[int, float] = {}

    async def read() -> None:
        reader = ShardFollower(link, from_seq=1)
        while True:
            updates = await reader.fetch()
            seen_s.update(dict.fromkeys((update.seq for update in updates), time.perf_counter()))

    reading = asyncio.create_task(read())
    try:
        async with await ParamServerClient.connect(*parse_address(source)) as client:
            await client.hello(hello_request([rows.spec]))
            begin_s, num_sent = time.perf_counter(), 0
            for number in range(_NUM_LAGS):
                place = number % len(rows.ids)
                await asyncio.sleep(max(0.0, begin_s + num_sent / rows_per_s - time.perf_counter()))
                num_sent += rows.ids[place].size
                reply = await client.set_embeddings(rows.request(place, client_seq=number + 1), timeout_s=_TIMEOUT_S)
                acked_s[reply.seq] = time.perf_counter()
        async with asyncio.timeout(_TIMEOUT_S):
            while not acked_s.keys() <= seen_s.keys():  # noqa: ASYNC110 (a reader of this loop)
                await asyncio.sleep(0.01)
    finally:
        reading.cancel()
        await asyncio.wait([reading])
        await link.close()
    return [max(seen_s[seq] - at_s, 0.0) * 1e3 for seq, at_s in acked_s.items()]


def _promotions_s(folder: Path, writer: WriterProcess, num_promotions: int) -> list[float]:
    """Hand a server over from follower to follower; return how long nobody took updates, seconds."""
    pauses_s, owner = [], ServerProcess.start(folder / "0", shards=1)
    try:
        for number in range(num_promotions):
            writer.write(owner.address, num_batches=4)
            following = ServerProcess.start(folder / str(number + 1), follow=owner.address)
            try:
                time.sleep(_SETTLED_S)
                pauses_s.append(asyncio.run(_promote(following.address)))
            finally:
                owner.close()
                owner = following
    finally:
        owner.close()
    return pauses_s


async def _promote(follower: str) -> float:
    dial = admin_dial(_TIMEOUT_S)
    (link,) = await link_all(dial, parse_addresses(follower))
    try:
        return float((await promote_shard(dial, link, 0))["pause_s"])
    finally:
        await link.close()


def _builds(folder: Path, writer: WriterProcess, num_batches: int) -> dict[str, Any]:
    """Build servers of 2, 3 and 2 shards from one of 1; return their pauses, and rates beside a scan and load."""
    pauses_s, old = [], ServerProcess.start(folder / "1", shards=1)
    try:
        num_rows = writer.write(old.address, num_batches=num_batches).num_rows
        begin_s = time.perf_counter()
        asyncio.run(_scan_and_load(old.address, folder))
        loaded = num_rows / (time.perf_counter() - begin_s)
        begin_s, built = time.perf_counter(), 0.0
        for number, shards in enumerate((2, 3, 2)):
            new = ServerProcess.start(folder / f"{number}-{shards}", shards=shards, reshard=old.address)
            built = built or num_rows / (_time_of(new, "the server was built") - _time_of(new, "snapshot"))
            pauses_s.append(_time_of(new, "server is ready") - _time_of(old, "shard is offered"))
            old.close()
            old = new
    finally:
        old.close()
    return {
        "reshard_pause_p99_s": max(pauses_s),
        "build_vs_scan_and_load": built / loaded,
        "built_rows_per_s": built,
        "loaded_rows_per_s": loaded,
    }


async def _scan_and_load(address: str, folder: Path) -> None:
    dial = admin_dial(_TIMEOUT_S)
    manifest = await create_snapshot(address, dial=dial, at_step=False, timeout_s=_TIMEOUT_S)
    await fetch_snapshot(address, folder / "fetched", dial=dial, name=manifest.name)

    def load() -> None:
        with find_remains(folder / "fetched" / manifest.name) as remains, open_remains(remains, None) as shards:
            rebuild(shards, folder / "loaded", num_shards=2, choice=TableChoice())

    await asyncio.to_thread(load)


def _time_of(server: ServerProcess, what: str) -> float:
    """Return when a server has logged a line, or the last of several, with some words; seconds since 1970."""
    times = [fact["time"] for fact in server.read_log() if what in str(fact.get("message"))]
    if not times:
        raise HeadraceError(f"the server's log has no line with {what!r}")
    return datetime.fromisoformat(times[-1]).timestamp()
