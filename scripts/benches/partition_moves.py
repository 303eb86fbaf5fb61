"""`headrace bench reshard`: what it costs that partitions move between the shards of a server that trains and serves.

A trainer streams a fifth of what the server can take, and a replica answers lookups. Meanwhile the server, which begins
with two shards, has 3, 2, 4, 8, 4 and 2 of them. In turns with that, a process without a server scans as many rows as
the sources have, and loads as many as move, which is the least that a copy can cost.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from headrace.paramserver.observe.status_query import StatusAccess
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.reshard.coordinator import start
from headrace.paramserver.reshard.inventory import Cluster, Goal, Loads, Node, Shard
from headrace.paramserver.reshard.planner import Plan, make_plan
from headrace.paramserver.reshard.server_shards import ServerShards
from headrace.paramserver.reshard.store_view import PartitionFilter
from headrace.paramserver.reshard.survey import look_around
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.snapshots.contents import StoreScan
from headrace.paramserver.store.catalog import Table
from headrace.paramserver.store.coalescing import SortedRun
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import HeadraceError, UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.partition_map import PartitionMap
from headrace.schemas.row_records import RecordLayout
from headrace.scripts.benches.child import Child, Worker
from headrace.scripts.benches.clients import CALM_S, paced_trainer, steady_replica
from headrace.scripts.benches.harness import (
    FolderOption,
    OnStage,
    Rounds,
    RoundsOption,
    bench_command,
    bench_folder,
)
from headrace.scripts.benches.ingest import SHARD_STORE
from headrace.scripts.benches.workload import BenchRows, RowsConfig, WriterProcess

__all__ = ["ReshardConfig", "measure", "reshard"]

_FIRST_SHARDS = 2
_ROUND = (3, 2, 4, 8, 4, 2)
_DIM, _ID_BYTES = 64, 8
_ROWS_PER_BATCH = 4096
_LOAD_OF_CAPACITY = 0.2
# A batch has a price, whatever its rows: at 50 steps a second, small batches for 8 shards took both cores.
_STEP_S = 0.1
_TRAINED_PART = 5  # of the rows that move, the trainer has one in so many
_LOAD_BYTES = 24 << 20  # as a shard loads what has come
_POLL_S, _TIMEOUT_S = 0.05, 120.0
_PLANNED_SHARDS, _PLANNED_PARTITIONS = 1000, 16_384


@dataclass(frozen=True, kw_only=True, slots=True)
class ReshardConfig:
    """How much `headrace bench reshard` measures."""

    num_rows: Annotated[int, typer.Option("--rows", min=1000, help="Rows that move, of 64 float32 and a state.")] = (
        1_000_000
    )
    num_rounds: RoundsOption = 5
    folder: FolderOption = None

    @property
    def rows(self) -> RowsConfig:
        """The rows, in the order in which they are written at first."""
        num_batches = -(-self.num_rows // _ROWS_PER_BATCH)
        return RowsConfig(ids="shuffled", num_batches=num_batches, dim=_DIM, num_rows=self.num_rows)

    @property
    def trained_rows(self) -> int:
        """Rows of the trainer's table."""
        return self.num_rows // _TRAINED_PART


def measure(config: ReshardConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure what it costs that partitions move between shards while a trainer streams and a replica answers lookups.

    A round takes the server through 3, 2, 4, 8, 4 and 2 shards. The trainer streams a fifth of what two shards take. In
    turns with each reshard a process scans a store of the sources' rows and loads those that move. A move's pause of
    writes is given as the longest time without an ack during its reshard: each step updates rows of all partitions.
    """
    values = Rounds()
    loads = [os.getloadavg()[0]]
    settings: dict[str, Any] = {"block_cache_bytes": "32MiB", "memtable_bytes": "48MiB", "timeout_s": _TIMEOUT_S}
    with bench_folder(config.folder) as folder:
        on_stage("filling two shards")
        with ServerProcess.start(folder / "data", shards=_FIRST_SHARDS, **settings) as server:
            with WriterProcess(config.rows) as writer:
                written = writer.write(server.address, num_batches=config.rows.num_batches)
            server.stop()
        capacity = written.num_rows / written.applied_s
        rows_per_s = round(capacity * _LOAD_OF_CAPACITY)
        trained = {"num_rows": config.trained_rows, "dim": _DIM, "rows_per_s": rows_per_s}
        on_stage("starting server, trainer and replica")
        with (
            ServerProcess.start(folder / "data", shards=max(_ROUND), **settings) as server,
            Child(f"{__name__}:_scan_and_load", "the plain copy", rows=asdict(config.rows), path=str(folder)) as plain,
            paced_trainer(server.address, **trained, step_s=_STEP_S) as trainer,
            steady_replica(server.address, num_rows=config.trained_rows) as replica,
        ):
            for number in range(config.num_rounds):
                before = _FIRST_SHARDS
                for shards in _ROUND:
                    on_stage(f"round {number + 1}: from {before} shards to {shards}")
                    way = f"{before}→{shards}"
                    moved = asyncio.run(_reshard(server.address, shards))
                    _note(values, way, moved, trainer, replica)
                    of_sources = {name: moved[name] for name in ("num_rows", "num_source_rows")}
                    read = plain.ask(**of_sources, timeout_s=_TIMEOUT_S)
                    values.add("plain_bytes_per_s", read["size_bytes"] / read["took_s"])
                    loads.append(os.getloadavg()[0])
                    before = shards
    on_stage(f"planning for {_PLANNED_SHARDS} shards")
    took_s = _time_plan()
    return make_figures(values) | {
        "plan_1000_shards_s": took_s,
        "capacity_rows_per_s": capacity,
        "trained_rows_per_s": rows_per_s,
        "load_average": {"least": min(loads), "median": median(loads), "most": max(loads)},
        "config": {name: value for name, value in asdict(config).items() if name != "folder"},
    }


def _note(values: Rounds, way: str, moved: dict[str, Any], trainer: Child, replica: Child) -> None:
    """Add the figures of a reshard."""
    span = {"began_s": moved["began_s"]}
    trained = trainer.ask(**span, sure_s=moved["ended_s"], timeout_s=_TIMEOUT_S)
    looked = replica.ask(**span, ended_s=moved["ended_s"], timeout_s=_TIMEOUT_S)
    took_s = moved["ended_s"] - moved["began_s"]
    values.add(f"reshard_s {way}", took_s)
    values.add(f"planned_vs_measured {way}", moved["planned_s"] / took_s)
    values.add("copied_bytes", moved["copied_bytes"])
    values.add("least_bytes", moved["least_bytes"])
    values.add("copy_bytes_per_s", moved["copied_bytes"] / moved["copy_s"])
    values.add("num_switches", moved["num_switches"])
    values.add("longest_s", trained["longest_s"])
    for name in ("rows_per_s_during", "rows_per_s_calm"):
        values.add(name, trained[name])
    for name in ("num_lookups", "num_failed"):
        values.add(name, looked[name])
    for name, seconds in {**trained, **looked}.items():
        if isinstance(seconds, list):
            values.setdefault(name, []).extend(seconds)


def make_figures(values: Rounds) -> dict[str, Any]:
    """Return the figures of all reshards."""
    pauses = np.repeat(values["longest_s"], np.array(values["num_switches"], np.int64))
    planned = [median(each) for name, each in values.items() if name.startswith("planned_vs_measured ")]
    p99_ms = {name: float(np.percentile(values[f"lookup_{name}_s"], 99)) * 1000 for name in ("during", "calm")}
    return {
        "write_pause_p99_s": float(np.percentile(pauses, 99)),
        "write_pause_p50_s": median(values["longest_s"]),
        "bytes_vs_least": sum(values["copied_bytes"]) / sum(values["least_bytes"]),
        "copy_vs_scan_and_load": values.ratio("copy_bytes_per_s", "plain_bytes_per_s"),
        "ingest_during_ratio": values.ratio("rows_per_s_during", "rows_per_s_calm"),
        "lookup_p99_during_ratio": p99_ms["during"] / p99_ms["calm"],
        "lookup_p99_during_ms": p99_ms["during"],
        "lookup_p99_before_ms": p99_ms["calm"],
        "planned_vs_measured_s": {"least": min(planned), "most": max(planned)},
        "step_during_ratio": values.ratio("step_during_s", "step_calm_s"),
        "step_during_ms": median(values["step_during_s"]) * 1000,
        "step_before_ms": median(values["step_calm_s"]) * 1000,
        "step_unqueued_ratio": values.ratio("step_during_unqueued_s", "step_calm_unqueued_s"),
        "failed_lookups": sum(values["num_failed"]),
        "num_lookups": sum(values["num_lookups"]),
        "num_switches": sum(values["num_switches"]),
        "bytes_per_s": {name: median(values[f"{name}_bytes_per_s"]) for name in ("copy", "plain")},
        "rows_per_s": {name: median(values[f"rows_per_s_{name}"]) for name in ("during", "calm")},
        "reshards": {name: each for name, each in values.items() if not name.startswith(("step_", "lookup_"))},
    }


reshard = bench_command("reshard", ReshardConfig, measure, has_bounds=True)


async def _reshard(address: str, num_shards: int) -> dict[str, Any]:
    """Spread all partitions over some shards; return when that `began_s` and `ended_s`, and what has moved."""
    access = StatusAccess.load(address, timeout_s=10.0)
    dial = replace(access.dial(idl.Role.ADMIN), knows_partitions=True)
    async with await ServerShards.reach(dial, access.seeds) as shards:
        survey = await look_around(shards)
        plan = make_plan(survey.cluster, survey.loads, Goal(shards=tuple(range(num_shards))))
        known = await shards.partition_map()
        least = await _least_of(address, known, plan)
        await asyncio.sleep(CALM_S)
        began_s = time.monotonic()
        await start(shards, lambda _: plan)
        watched = await _watch(shards, plan)
        ended_s = time.monotonic()
        owners = (await shards.partition_map()).owners
        if len(np.unique(owners)) != num_shards:
            raise HeadraceError(f"a reshard to {num_shards} shards has ended with those of {np.unique(owners)}")
    return {
        **watched,
        "began_s": began_s,
        "ended_s": ended_s,
        "planned_s": plan.seconds,
        **least,
    }


async def _least_of(address: str, known: PartitionMap, plan: Plan) -> dict[str, Any]:
    """Return how many rows of the first table move, and their sources have; and the least bytes of all tables."""
    moves = [move for stage in plan.stages for move in stage.moves]
    partitions = [move.partition for move in moves]
    at_sources = np.isin(known.owners, [move.source for move in moves])
    moved_bytes, num_rows, num_source_rows = 0, dict[str, int](), dict[str, int]()
    async with await EmbeddingReader.connect(address) as reader:
        for name, spec in reader.tables.items():
            of_rows = known.partitions_of_rows(spec.seed, np.arange(spec.num_rows))
            counts = np.bincount(of_rows, minlength=known.num_partitions)
            num_rows[name], num_source_rows[name] = int(counts[partitions].sum()), int(counts[at_sources].sum())
            moved_bytes += num_rows[name] * (_ID_BYTES + RecordLayout(spec, spec.whole).size_bytes)
    return {
        "num_rows": num_rows["bench.weight"],
        "num_source_rows": num_source_rows["bench.weight"],
        "least_bytes": moved_bytes * plan.least_bytes / plan.moved_bytes,
    }


async def _watch(shards: ServerShards, plan: Plan) -> dict[str, Any]:
    """Wait until a reshard is over; return bytes and seconds of its copies, and the switches."""
    moves = [move for stage in plan.stages for move in stage.moves]
    links = [shards.links[number] for number in sorted({move.destination for move in moves})]
    copied_bytes: dict[str, int] = {}
    copy_s, last_s = 0.0, time.monotonic()
    deadline_s = last_s + _TIMEOUT_S
    while await shards.load() is not None:
        statuses = await asyncio.gather(*(link.status() for link in links))
        found = [each for status in statuses for each in status.moves or () if each.destination == status.shard]
        copied_bytes |= {each.move_id: each.copied_bytes or 0 for each in found}
        now_s = time.monotonic()
        if any(each.phase in ("begin", "copy") for each in found):
            copy_s += now_s - last_s
        last_s = now_s
        if now_s > deadline_s:
            raise UnavailableError(f"a reshard has taken more than {_TIMEOUT_S:g} s: {[each.error for each in found]}")
        await asyncio.sleep(_POLL_S)
    ways = [{(move.source, move.destination) for move in stage.moves} for stage in plan.stages]
    num_switches = sum(map(len, ways))
    if len(copied_bytes) != num_switches or not all(copied_bytes.values()):
        raise HeadraceError(f"{num_switches} moves, and copies of {copied_bytes} were seen")
    return {
        "copied_bytes": sum(copied_bytes.values()),
        "copy_s": max(copy_s, _POLL_S),
        "num_switches": num_switches,
    }


def _time_plan() -> float:
    """Return the seconds of a plan from half the shards to all, with partitions of different sizes."""
    num, rng = _PLANNED_SHARDS, np.random.default_rng(0)
    nodes = tuple(
        Node(name=f"n{number}", free_bytes=10**15, read_bytes_s=5e8, write_bytes_s=5e8) for number in range(num)
    )
    cluster = Cluster(
        nodes=nodes,
        shards=tuple(Shard(node=number) for number in range(num)),
        link_bytes_s=np.full((num, num), 1e9),
        apply_rows_s=1e6,
        round_trip_s=0.01,
        follow_lag_s=0.1,
    )
    size_bytes = rng.integers(10**9, 2 * 10**9, _PLANNED_PARTITIONS)
    loads = Loads(
        owner=np.arange(_PLANNED_PARTITIONS) % (num // 2),
        size_bytes=size_bytes,
        num_rows=size_bytes // 300,
        updates_s=rng.uniform(0, 2000, _PLANNED_PARTITIONS),
    )
    begin_s = time.perf_counter()
    assert make_plan(cluster, loads, Goal(shards=tuple(range(num)))).stages
    return time.perf_counter() - begin_s


def _scan_and_load(rows: dict[str, Any], path: str) -> Worker:
    """Scan `num_source_rows` rows of a store, and load `num_rows` of them into an empty one, in one thread.

    Those are rows of some partitions, so about as many, from all over the store, as a move's are.
    """
    config, folder = replace(RowsConfig(**rows), ids="each"), Path(path)
    (spec,) = config.specs
    table, layout = Table(1, spec), RecordLayout(spec, spec.whole)
    all_rows, partitions = BenchRows(config), PartitionMap.first(1)
    with_rows = RowStore.open(folder / "plain", config=SHARD_STORE)
    records = np.frombuffer(b"".join(b"".join(all_rows.records(n)) for n in range(config.num_batches)), layout.dtype)
    with_rows.write_runs([SortedRun(1, layout, np.arange(config.num_rows), records, None)], meta={}, applied_seq=1)
    with_rows.flush()
    answer: dict[str, Any] = {}
    while True:
        order = yield answer
        begin_s = time.perf_counter()
        loaded = RowStore.open(folder / "loaded", config=SHARD_STORE)
        runs, num_rows = list[SortedRun](), 0
        share = order["num_rows"] / order["num_source_rows"]
        wanted = PartitionFilter(partitions, range(round(partitions.num_partitions * share)))
        scan = StoreScan(with_rows, table, (0, order["num_source_rows"] - 1))
        for ids, found in scan.records(layout, keep=partial(wanted.has, spec)):
            runs.append(SortedRun(1, layout, ids, found, None))
            num_rows += ids.size
            if sum(run.size_bytes for run in runs) >= _LOAD_BYTES:
                loaded.write_runs(runs, meta={}, applied_seq=1)
                runs = []
        loaded.write_runs(runs, meta={}, applied_seq=1)
        loaded.flush()
        took_s = time.perf_counter() - begin_s
        assert 0.8 < num_rows / order["num_rows"] < 1.25
        answer = {"size_bytes": num_rows * (_ID_BYTES + layout.size_bytes), "took_s": took_s}
        loaded.close()
        shutil.rmtree(folder / "loaded")
