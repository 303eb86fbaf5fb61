"""The sweep of throughput: rows a second against the width of a row and the number of shards.

The contenders move the same bytes: Headrace, the disk alone, RocksDB alone, Redis, and two servers that keep nothing,
gRPC's and thriftpy2's own. The last is what a service that was generated from the IDL would be before it did anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.scripts.benches.bench_ingest import SHARD_STORE, serve
from headrace.scripts.benches.bench_peers import has_redis, time_fsync, time_redis, time_rocksdb
from headrace.scripts.benches.bench_report import OnStage, bench_folder
from headrace.scripts.benches.bench_rows import BenchRows, RowsConfig
from headrace.scripts.benches.bench_wire import contenders, wire_pair
from headrace.scripts.benches.bench_wire_peers import WriteShape
from headrace.scripts.benches.bench_writer import WriterProcess

__all__ = ["ThroughputConfig", "run"]

_LOOKUPS = 4096
# Peers that are slower get fewer batches: a rate needs no more.
_SHARE_OF_REDIS, _SHARE_OF_THRIFTPY2 = 6, 4

_Rates = Iterator[tuple[str, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputConfig:
    """How much is measured.

    Attributes:
        dims: Widths of a row, float32.
        shards: Numbers of shards, with rows of `shard_dim`.
        shard_dim: Width of a row there; one of `dims`.
        run_bytes: What each run moves, bytes on the wire.
        max_batches: Batches of 4096 look-ups of a run, at most.
        num_rounds: All is measured so often, in turn.
        folder: Where files go; None for the system's temporary folder.
    """

    dims: tuple[int, ...] = (16, 64, 128, 256, 512)
    shards: tuple[int, ...] = (1, 2, 4)
    shard_dim: int = 128
    run_bytes: int = 256 << 20
    max_batches: int = 240
    num_rounds: int = 3
    folder: Path | None = None

    @property
    def num_stages(self) -> int:
        """How often `on_stage` is called."""
        return self.num_rounds * (len(self.dims) + len(self.shards))

    def rows(self, dim: int) -> RowsConfig:
        """Return the rows of a width."""
        row_bytes = RowsConfig(ids="uniform", num_batches=1, dim=dim).row_bytes
        num_batches = max(2, min(self.run_bytes // (_LOOKUPS * row_bytes), self.max_batches))
        return RowsConfig(ids="uniform", num_batches=num_batches, dim=dim)


def run(config: ThroughputConfig, *, on_stage: OnStage) -> dict[str, Any]:
    """Measure; processes and files are gone when this returns or raises.

    Args:
        config: How much.
        on_stage: Told in a few words what begins.

    Returns:
        `width` and `shards`, each with `x` and `rows_per_s`: by contender, for each x, the rates of all rounds.

    Raises:
        UnavailableError: A process has ended or does not start.
    """
    width: dict[str, list[list[float]]] = {}
    shards: dict[str, list[list[float]]] = {}
    for number in range(config.num_rounds):
        for at, dim in enumerate(config.dims):
            on_stage(f"round {number + 1}: rows of {dim} columns")
            _note(width, at, len(config.dims), _contend(config.rows(dim), config.folder))
        for at, num_shards in enumerate(config.shards):
            on_stage(f"round {number + 1}: {num_shards} shards")
            rates = _headrace(config.rows(config.shard_dim), config.folder, num_shards=num_shards)
            _note(shards, at, len(config.shards), rates)
    return {
        "width": {"x": list(config.dims), "rows_per_s": width},
        "shards": {"x": list(config.shards), "rows_per_s": shards},
        "shard_dim": config.shard_dim,
        "row_bytes": [config.rows(dim).row_bytes for dim in config.dims],
    }


def _note(series: dict[str, list[list[float]]], at: int, num_points: int, rates: _Rates) -> None:
    for name, rate in rates:
        series.setdefault(name, [[] for _ in range(num_points)])[at].append(rate)


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
    yield from _sinks(config)


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


def _sinks(config: RowsConfig) -> _Rates:
    """Yield the rates of servers that only count what comes, in rows of as many bytes as the others' have."""
    # These rows have no optimizer state, so a message has a few more of them.
    shape = WriteShape(_LOOKUPS * config.row_bytes // (8 + 4 * config.dim), config.dim)
    for name in ("grpc", "thriftpy2"):
        if name not in contenders():
            continue
        num_calls = max(4, config.num_batches // (_SHARE_OF_THRIFTPY2 if name == "thriftpy2" else 1))
        with wire_pair(name, shape) as pair:
            pair.write(4)  # what is done once
            seconds, _ = pair.write(num_calls // 4 * 4)
        yield name, num_calls // 4 * 4 * shape.message_bytes / config.row_bytes / seconds
