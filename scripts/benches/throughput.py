"""The sweep of throughput: rows a second against the width of a row and the number of shards.

All contenders move the same bytes: Headrace, the disk alone, RocksDB alone, Redis, and two servers that keep nothing,
gRPC's and thriftpy2's own. The last one is what a service generated from the IDL would be before it did anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.scripts.benches.harness import OnStage, bench_folder
from headrace.scripts.benches.ingest import SHARD_STORE, serve
from headrace.scripts.benches.peers import has_redis, time_fsync, time_redis, time_rocksdb
from headrace.scripts.benches.wire import contenders, wire_pair
from headrace.scripts.benches.wire_peers import WriteShape
from headrace.scripts.benches.workload import BenchRows, RowsConfig
from headrace.scripts.benches.writer import WriterProcess

__all__ = ["ThroughputConfig", "measure"]

_LOOKUPS = 4096
# Slower peers get fewer batches, which suffice for a rate.
_SHARE_OF_REDIS, _SHARE_OF_THRIFTPY2 = 6, 4

_Rates = Iterator[tuple[str, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputConfig:
    """How much the sweep measures."""

    dims: tuple[int, ...] = (16, 64, 128, 256, 512)  # columns of a row, float32
    shards: tuple[int, ...] = (1, 2, 4)  # with rows of `shard_dim` columns
    shard_dim: int = 128  # one of `dims`
    run_bytes: int = 256 << 20  # bytes on the wire of each run
    max_batches: int = 240  # of 4096 lookups, in a run
    num_rounds: int = 3
    folder: Path | None = None

    def rows(self, dim: int) -> RowsConfig:
        """Return the rows of a width."""
        row_bytes = RowsConfig(ids="uniform", num_batches=1, dim=dim).row_bytes
        num_batches = max(2, min(self.run_bytes // (_LOOKUPS * row_bytes), self.max_batches))
        return RowsConfig(ids="uniform", num_batches=num_batches, dim=dim)


def measure(config: ThroughputConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure all contenders at each width, and Headrace with each number of shards.

    Returns:
        `width` and `shards`, each with `x` and `rows_per_s`: by contender, for each x, the rates of all rounds.
    """
    width: dict[str, list[list[float]]] = {}
    shards: dict[str, list[list[float]]] = {}
    for number in range(config.num_rounds):
        for at, dim in enumerate(config.dims):
            on_stage(f"round {number + 1}: rows of {dim} columns")
            for name, rate in _contend(config.rows(dim), config.folder):
                width.setdefault(name, [[] for _ in config.dims])[at].append(rate)
        for at, num_shards in enumerate(config.shards):
            on_stage(f"round {number + 1}: {num_shards} shards")
            for name, rate in _headrace(config.rows(config.shard_dim), config.folder, num_shards=num_shards):
                shards.setdefault(name, [[] for _ in config.shards])[at].append(rate)
    return {
        "width": {"x": list(config.dims), "rows_per_s": width},
        "shards": {"x": list(config.shards), "rows_per_s": shards},
        "shard_dim": config.shard_dim,
        "row_bytes": [config.rows(dim).row_bytes for dim in config.dims],
    }


def _contend(config: RowsConfig, folder: Path | None) -> _Rates:
    """Yield the rate of each contender with the same rows."""
    yield from _headrace(config, folder)
    rows = BenchRows(config)
    with bench_folder(folder) as place:
        yield "fsync", rows.num_rows / time_fsync(rows, place, num_batches=config.num_batches)
        yield "rocksdb", rows.num_rows / time_rocksdb(rows, place, SHARD_STORE)
        if has_redis():
            num_rows, seconds = time_redis(rows, place, num_batches=max(1, config.num_batches // _SHARE_OF_REDIS))
            yield "redis", num_rows / seconds
    # These messages have as many bytes, but their rows have no optimizer state, so they have a few more rows.
    shape = WriteShape(_LOOKUPS * config.row_bytes // (8 + 4 * config.dim), config.dim)
    for name in ("grpc", "thriftpy2"):
        if name in contenders():
            num_calls = max(4, config.num_batches // (_SHARE_OF_THRIFTPY2 if name == "thriftpy2" else 1)) // 4 * 4
            with wire_pair(name, shape) as pair:
                pair.write(4)  # connections, pools, caches
                seconds, _ = pair.write(num_calls)
            yield name, num_calls * shape.message_bytes / config.row_bytes / seconds


def _headrace(config: RowsConfig, folder: Path | None, *, num_shards: int = 1) -> _Rates:
    with (
        bench_folder(folder) as place,
        WriterProcess(config) as writer,
        serve(place / "data", shards=num_shards) as server,
    ):
        written = writer.write(server.address, num_batches=config.num_batches)
        server.kill()
    yield "acked", written.num_rows / written.acked_s
    yield "applied", written.num_rows / written.applied_s
