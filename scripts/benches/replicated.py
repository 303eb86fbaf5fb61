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
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from headrace.paramserver.ingest.pipeline import Ingest
from headrace.paramserver.log.jetstream.nats_address import NatsAccess, NatsLogAddress, subject_of
from headrace.paramserver.store.applier import Applier, ApplierConfig
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, encode_message
from headrace.scripts.benches.child import AsyncWorker, Child
from headrace.scripts.benches.harness import OnStage, Rounds, RoundsOption, bench_command, bench_folder
from headrace.scripts.benches.ingest import SHARD_STORE
from headrace.scripts.benches.peers import nats_servers
from headrace.scripts.benches.workload import BenchRows, RowsConfig

__all__ = ["measure", "replicated"]

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


def measure(
    on_stage: OnStage,
    *,
    num_batches: Annotated[
        int, typer.Option("--batches", min=4, help="Messages of about 1 MB that each side sends in a round.")
    ] = 384,
    num_lone: Annotated[
        int, typer.Option("--lone", min=4, help="Messages of 32 kB that are sent one at a time in a round.")
    ] = 200,
    num_rounds: RoundsOption = 3,
) -> dict[str, Any]:
    """Measure what a replicated log costs a shard, beside the engine alone: three servers of NATS on this machine.

    In turns, the same rows are sent by a bare loop of publishes and appended by a shard, which applies them too; then
    few rows one at a time; then the shard's stream is read by a bare loop of direct gets and by a shard without a
    directory, which applies it. All have as many bytes on their way.
    """
    values = Rounds()
    with bench_folder() as folder, nats_servers(folder) as url:
        order: dict[str, Any] = {"url": url, "folder": str(folder), "num_batches": num_batches, "num_lone": num_lone}
        with (
            Child(f"{__name__}:_publish", "the bench's publisher", **order) as publisher,
            Child(f"{__name__}:_append", "the bench's shard", **order) as shard,
            Child(f"{__name__}:_read", "the bench's reader", **order) as reader,
        ):
            for number in range(num_rounds):
                bare, ours = 2 * number, 2 * number + 1
                on_stage(f"round {number + 1}: bare publishes, then a shard")
                for answer in (publisher.ask(shard=bare), shard.ask(shard=ours)):
                    for name, value in answer.items():
                        values.add(name, value)
                for what in ("direct_get", "recovery"):
                    on_stage(f"round {number + 1}: {what.replace('_', ' ')}")
                    values.add(what, reader.ask(what=what, shard=ours)["bytes_per_s"])
                for stream in (bare, ours):
                    reader.ask(what="remove", shard=stream)
    medians = values.medians()
    return {
        "acked_vs_publish": values.ratio("acked", "publish"),
        "ack_p50_ms": medians["ack_p50_ms"],
        "publish_p50_ms": medians["publish_p50_ms"],
        "ack_p50_bound_ms": 1.3 * medians["publish_p50_ms"] + 2,
        "recovery_vs_direct_get": values.ratio("recovery", "direct_get"),
        "bytes_per_s": {name: medians[name] for name in ("publish", "acked", "direct_get", "recovery")},
        "rounds": values,
    }


replicated = bench_command("replicated", measure)


def _access(url: str) -> NatsAccess:
    return NatsAccess(address=NatsLogAddress.parse(url))


class _Messages:
    """A round's messages: `many` of about 1 MB, and `lone` ones of 32 kB; `max_bytes` bounds a stream that has all."""

    def __init__(self, num_batches: int, num_lone: int) -> None:
        sizes = ((num_batches, _ROWS_OF_MESSAGE), (num_lone, _ROWS_OF_LONE_MESSAGE))
        configs = [RowsConfig(ids="uniform", num_batches=count, num_lookups=size) for count, size in sizes]
        self.many, self.lone = map(BenchRows, configs)
        self.size_bytes = sum(len(self.many.message(number)) for number in range(num_batches))
        self.window = max(1, _IN_FLIGHT_BYTES // len(self.many.message(0)))
        self.max_bytes = 2 * self.size_bytes + sum(2 * len(self.lone.message(number)) for number in range(num_lone))


async def _publish(url: str, folder: str, num_batches: int, num_lone: int) -> AsyncWorker:
    """Publish a round's messages as nats-py does, with the expectation that the log needs."""
    import nats

    from headrace.paramserver.log.jetstream.nats_stream import open_engine

    messages = _Messages(num_batches, num_lone)
    answer: dict[str, Any] = {}
    while True:
        order = yield answer
        facts = {"server_id": _SERVER_ID, "shard": order["shard"], "max_bytes": messages.max_bytes}
        subject = subject_of((await open_engine(_access(url), **facts)).stream)
        client = await nats.connect(url.removeprefix("nats://").split(","), allow_reconnect=False)
        jetstream = client.jetstream(publish_async_max_pending=messages.window)
        begin_s, acks = time.perf_counter(), []
        for number in range(num_batches):
            headers = {"Nats-Expected-Last-Sequence": str(number)}
            acks.append(await jetstream.publish_async(subject, messages.many.message(number), headers=headers))
        for ack in acks:
            await ack
        took_s, took_ms = time.perf_counter() - begin_s, []
        for number in range(num_lone):
            message, headers = messages.lone.message(number), {"Nats-Expected-Last-Sequence": str(num_batches + number)}
            begin_s = time.perf_counter()
            await jetstream.publish(subject, message, headers=headers)
            took_ms.append((time.perf_counter() - begin_s) * 1e3)
        await client.close()
        answer = {"publish": messages.size_bytes / took_s, "publish_p50_ms": float(np.median(took_ms))}


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


async def _append(url: str, folder: str, num_batches: int, num_lone: int) -> AsyncWorker:
    """Take a round's rows as a shard does, and apply them."""
    messages = _Messages(num_batches, num_lone)
    answer: dict[str, Any] = {}
    while True:
        order = yield answer
        place = Path(folder) / "shard"
        async with _shard(url, place, order["shard"], messages.max_bytes) as (log, ingest, applier):
            while not await log.take_over(ingest.submitted_seq, owner="127.0.0.1:1"):
                await ingest.recover()
            await ingest.recover()
            await ingest.open_session("bench", "rank0", 1, 0, 1, [messages.many.spec])
            window = asyncio.Semaphore(2 * messages.window)

            async def write(rows: BenchRows, number: int, client_seq: int) -> None:
                request = rows.request(number, client_seq=client_seq)
                args = idl.ParameterServer.setEmbeddings_args(request=request)
                frame = b"".join(encode_message("setEmbeddings", CALL, number, args))
                await ingest.write(request, memoryview(frame), lambda: lambda: None)  # it holds nothing
                window.release()  # noqa: B023

            begin_s = time.perf_counter()
            async with asyncio.TaskGroup() as tasks:
                for number in range(num_batches):
                    await window.acquire()
                    tasks.create_task(write(messages.many, number, number + 1))
            acked_s = time.perf_counter() - begin_s
            await applier.wait_applied(ingest.submitted_seq)
            took_ms = []
            for number in range(num_lone):
                await window.acquire()
                begin_s = time.perf_counter()
                await write(messages.lone, number, num_batches + number + 1)
                took_ms.append((time.perf_counter() - begin_s) * 1e3)
        answer = {"acked": messages.size_bytes / acked_s, "ack_p50_ms": float(np.median(took_ms))}


async def _read(url: str, folder: str, num_batches: int, num_lone: int) -> AsyncWorker:
    """Read a shard's stream, alone or into a new shard; or remove a stream."""
    from headrace.paramserver.log.jetstream.nats_engine import NatsEngine
    from headrace.paramserver.log.jetstream.nats_stream import connect_any

    access, max_bytes = _access(url), _Messages(num_batches, num_lone).max_bytes
    answer: dict[str, Any] = {}
    while True:
        order = yield answer
        stream = access.address.stream_name(_SERVER_ID, order["shard"])
        if order["what"] == "remove":
            client = await connect_any(access)
            await client.ask("STREAM.DELETE", stream, timeout_s=_TIMEOUT_S)
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
        answer = {"bytes_per_s": state.size_bytes / took_s}


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
