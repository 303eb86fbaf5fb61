"""What `headrace bench all` runs: each bench with its own defaults, made smaller by the scale, and then the sweeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.scripts.benches.bench_peers import GRPC_HINT, REDIS_HINT, has_grpc, has_redis
from headrace.scripts.benches.bench_report import OnStage

__all__ = ["PARTS", "Part", "Plan", "Prepared", "missing_peers"]

_MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        scale: Share of the default amounts, above 0 to 1.
        rounds: How often all is measured, in turn.
        folder: Where files go; None for the system's temporary folder.
    """

    scale: float
    rounds: int
    folder: Path | None

    def amount(self, full: int, least: int = 1) -> int:
        """Return the scaled amount."""
        return max(least, round(full * self.scale))

    @property
    def settings(self) -> dict[str, Any]:
        """Return `num_rounds` and `folder`, for a config."""
        return {"num_rounds": self.rounds, "folder": self.folder}

    def some(self, full: tuple[Any, ...], least: int = 2) -> tuple[Any, ...]:
        """Return the points of a sweep: all, or at a very small scale the first and the last of them."""
        return full if self.scale >= 0.05 or len(full) <= least else (full[0], full[-1])


@dataclass(frozen=True, slots=True)
class Prepared:
    """A part that is ready to run.

    Attributes:
        num_stages: How often `run` calls its argument.
        run: Measures, and returns the JSON.
    """

    num_stages: int
    run: Callable[[OnStage], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Part:
    """A bench or a sweep.

    Attributes:
        name: For `--only` and the results.
        title: In words.
        rounds: Of its own, where it is not told how many.
        full_s: What they take at full scale on two cores, seconds; half a minute is not exact.
        least_s: What one takes at the smallest scale: processes start, whatever they do.
        prepare: Makes it ready. Imports the bench, so that a report does without what it does not need.
    """

    name: str
    title: str
    rounds: int
    full_s: float
    least_s: float
    prepare: Callable[[Plan], Prepared]

    def expected_s(self, plan: Plan) -> float:
        """Return about how long it will take, seconds."""
        return self.least_s + (self.full_s - self.least_s) * plan.scale * plan.rounds / self.rounds


def missing_peers() -> list[str]:
    """Return a line for each peer that is not installed, with what to do about it."""
    return [hint for hint, is_there in ((REDIS_HINT, has_redis()), (GRPC_HINT, has_grpc())) if not is_there]


def _ingest(plan: Plan) -> Prepared:
    from headrace.scripts.benches import bench_ingest as bench

    config = bench.IngestConfig(
        num_batches=plan.amount(960, 4),
        num_acked_batches=plan.amount(80, 2),
        num_redis_batches=plan.amount(100),
        **plan.settings,
    )
    return Prepared(config.num_stages, lambda on_stage: bench.run(config, on_stage=on_stage).to_json())


def _recovery(plan: Plan) -> Prepared:
    from headrace.scripts.benches import bench_recovery as bench

    config = bench.RecoveryConfig(log_bytes=plan.amount(1024 * _MIB, 4 * _MIB), **plan.settings)
    return Prepared(config.num_stages, lambda on_stage: bench.run(config, on_stage=on_stage).to_json())


def _wire(plan: Plan) -> Prepared:
    from headrace.scripts.benches import bench_wire as bench

    config = bench.WireConfig(
        num_rounds=plan.rounds,
        num_writes=plan.amount(80, 4),
        num_reads=plan.amount(1600, 32),
        num_idle=plan.amount(10_000, 40),
    )
    return Prepared(config.num_stages, lambda on_stage: bench.run(config, on_stage=on_stage).to_json())


def _lookup(plan: Plan) -> Prepared:
    from headrace.scripts.benches import bench_lookup as bench

    config = bench.LookupConfig(
        num_rows=plan.amount(10_000_000, 10_000),
        redis_rows=plan.amount(1_000_000, 10_000),
        disk_rows=plan.amount(1_000_000, 10_000),
        num_lookups=plan.amount(500, 5),
        **plan.settings,
    )
    return Prepared(config.num_stages, lambda on_stage: bench.run(config, on_stage=on_stage).to_json(config))


def _overhead(plan: Plan) -> Prepared:
    from headrace.scripts.benches import bench_overhead as bench

    config = bench.OverheadConfig(num_steps=plan.amount(60, 2), **plan.settings)
    return Prepared(config.num_stages, lambda on_stage: bench.run(config, on_stage=on_stage).to_json())


def _freshness(plan: Plan) -> Prepared:
    from headrace.scripts.benches import bench_freshness as bench

    config = bench.FreshnessConfig(num_steps=plan.amount(500, 20), **plan.settings)
    return Prepared(config.num_stages, lambda on_stage: bench.run(config, on_stage=on_stage).to_json(config))


def _backfill(plan: Plan) -> Prepared:
    from headrace.scripts.benches import bench_backfill as bench
    from headrace.scripts.benches.bench_tables_rounds import TablesConfig

    config = TablesConfig(num_rows=plan.amount(5_000_000, 5000), **plan.settings)
    return Prepared(config.num_stages, lambda on_stage: bench.run(config, on_stage=on_stage))


def _export(plan: Plan) -> Prepared:
    from headrace.scripts.benches import bench_export as bench

    config = bench.ExportBenchConfig(num_rows=plan.amount(5_000_000, 5000), **plan.settings)
    return Prepared(config.num_stages, lambda on_stage: bench.run(config, on_stage=on_stage))


def _kernels(plan: Plan) -> Prepared:
    from headrace.scripts.benches import bench_kernels as bench

    config = bench.KernelsConfig(
        num_rounds=plan.rounds, num_rows=plan.amount(10_000_000, 100_000), step_ids=plan.amount(65_536, 1000)
    )
    return Prepared(bench.NUM_STAGES, lambda on_stage: bench.run(config, on_stage=on_stage))


def _throughput(plan: Plan) -> Prepared:
    from headrace.scripts.benches import bench_sweep_throughput as sweep

    config = sweep.ThroughputConfig(
        dims=plan.some((16, 64, 128, 256, 512)) if plan.scale >= 0.05 else (16, 128),
        shards=plan.some((1, 2, 4)),
        run_bytes=plan.amount(256 * _MIB, _MIB),
        max_batches=plan.amount(240, 4),
        **plan.settings,
    )
    return Prepared(config.num_stages, lambda on_stage: sweep.run(config, on_stage=on_stage))


def _lag(plan: Plan) -> Prepared:
    from headrace.scripts.benches import bench_sweep_lag as sweep

    full = sweep.LagConfig()
    config = sweep.LagConfig(
        loads=plan.some(full.loads),
        block_s=full.block_s * plan.scale,
        min_batches=plan.amount(full.min_batches, 10),
        capacity_batches=plan.amount(full.capacity_batches, 40),
        num_rows=plan.amount(full.num_rows, 20_000),
        **plan.settings,
    )
    return Prepared(config.num_stages, lambda on_stage: sweep.run(config, on_stage=on_stage))


def _recovery_size(plan: Plan) -> Prepared:
    from headrace.scripts.benches import bench_sweep_recovery as sweep

    full = sweep.RecoverySweepConfig()
    sizes = tuple(plan.amount(size, 4 * _MIB) for size in plan.some(full.log_bytes))
    config = sweep.RecoverySweepConfig(log_bytes=tuple(dict.fromkeys(sizes)), **plan.settings)
    return Prepared(config.num_stages, lambda on_stage: sweep.run(config, on_stage=on_stage))


def _cost(plan: Plan) -> Prepared:
    from headrace.scripts.benches import bench_sweep_cost as sweep

    full = sweep.CostConfig()
    config = sweep.CostConfig(
        tables=plan.some(full.tables),
        rows=plan.some(full.rows),
        connections=plan.some(full.connections),
        num_batches=plan.amount(full.num_batches, 8),
        num_steps=plan.amount(full.num_steps, 2),
        **plan.settings,
    )
    return Prepared(config.num_stages, lambda on_stage: sweep.run(config, on_stage=on_stage))


PARTS: tuple[Part, ...] = (
    Part("ingest", "Ingest", 3, 180, 12, _ingest),
    Part("recovery", "Recovery", 3, 60, 8, _recovery),
    Part("wire", "Wire", 9, 100, 8, _wire),
    Part("lookup", "Lookup", 3, 180, 10, _lookup),
    Part("overhead", "Overhead", 4, 150, 25, _overhead),
    Part("freshness", "Freshness", 3, 60, 12, _freshness),
    Part("backfill", "Backfill", 1, 60, 12, _backfill),
    Part("export", "Export", 1, 60, 12, _export),
    Part("kernels", "Row kernels", 7, 40, 3, _kernels),
    Part("throughput", "Throughput against shards and the width of a row", 3, 420, 40, _throughput),
    Part("lag", "Lag against load", 2, 180, 12, _lag),
    Part("recovery-size", "Recovery time against the size of the log", 2, 120, 20, _recovery_size),
    Part("cost", "Cost against tables, rows and clients", 2, 240, 60, _cost),
)
"""In the order in which they run."""
