"""`headrace bench freshness`: from the optimizer's update in one process to visible in a replica in another.

Blocks of paced training and blocks of the floor take turns: the same bytes to a bare server that makes them durable,
then to a reader (`bench_freshness_floor.py`).
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from headrace.paramserver.supervisor.launch import ServerProcess
from headrace.schemas.errors import ConfigError, ProtocolError
from headrace.scripts.benches.bench_child import BenchChild
from headrace.scripts.benches.bench_freshness_floor import Floor
from headrace.scripts.benches.bench_report import (
    FolderOption,
    JsonOption,
    OnStage,
    RoundsOption,
    bench_folder,
    check_folder,
    check_json,
    conclude,
    show_progress,
)
from headrace.scripts.benches.bench_report_targets import MAX_P50_VS_FLOOR

__all__ = ["FreshnessConfig", "FreshnessResult", "delays_of", "freshness", "observed_replica", "run"]

_ROW_OVERHEAD_BYTES = 8  # its id


@dataclass(frozen=True, kw_only=True, slots=True)
class FreshnessConfig:
    """How much is measured.

    Attributes:
        num_rows: Rows of the table.
        dim: Columns of it, float32.
        rows_per_step: Different rows that a step updates.
        rows_per_s: Pace of the trainer.
        num_steps: Steps of a block, and round trips of a block of the floor.
        num_warm_steps: Steps before the first block that do not count.
        num_rounds: Blocks of each.
        consistency: Of the replica.
        settings: Of the streamer.
        folder: Where the server's files and the floor's go; None for the system's temporary folder.
    """

    num_rows: int = 200_000
    dim: int = 64
    rows_per_step: int = 1000
    rows_per_s: int = 100_000
    num_steps: int = 500
    num_warm_steps: int = 50
    num_rounds: int = 3
    consistency: str = "latest"
    settings: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.rows_per_step % 10 or not 10 <= self.rows_per_step <= self.num_rows:
            raise ConfigError(f"--rows-per-step: {self.rows_per_step} is no multiple of 10 up to {self.num_rows}")
        if self.consistency not in ("latest", "step"):
            raise ConfigError(f"--consistency: {self.consistency!r} is none of latest, step")

    @property
    def num_stages(self) -> int:
        """How often `on_stage` is called."""
        return 1 + 2 * self.num_rounds

    @property
    def interval_s(self) -> float:
        """From one step to the next, seconds."""
        return self.rows_per_step / self.rows_per_s

    @property
    def step_bytes(self) -> int:
        """What a step sends."""
        return self.rows_per_step * (self.dim * 4 + _ROW_OVERHEAD_BYTES)


@dataclass(kw_only=True, slots=True)
class FreshnessResult:
    """What was measured.

    Attributes:
        delays_ms: From each step's update to visible.
        floor_ms: Of each round trip.
        blocks: What trainer and replica told of each block.
    """

    delays_ms: list[float] = field(default_factory=list)
    floor_ms: list[float] = field(default_factory=list)
    blocks: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self, config: FreshnessConfig) -> dict[str, Any]:
        """Return the figures."""
        p50_ms, p99_ms = (float(np.percentile(self.delays_ms, percent)) for percent in (50, 99))
        floor_p50_ms, floor_p99_ms = (float(np.percentile(self.floor_ms, percent)) for percent in (50, 99))
        num_rows = sum(block["num_rows_sent"] for block in self.blocks)
        return {
            "p50_ms": p50_ms,
            "p99_ms": p99_ms,
            "p50_vs_floor": p50_ms / floor_p50_ms,
            "floor_p50_ms": floor_p50_ms,
            "floor_p99_ms": floor_p99_ms,
            "rows_per_s": num_rows / sum(block["took_s"] for block in self.blocks),
            "rows_per_s_wanted": config.rows_per_s,
            "flushes_per_step": sum(block["num_flushes"] for block in self.blocks) / len(self.delays_ms),
            "update_to_acked_p50_ms": self.blocks[-1]["ack_p50_ms"],
            "replica_histogram_p50_ms": self.blocks[-1]["histogram_p50_ms"],
            "step_bytes": config.step_bytes,
            "num_steps": len(self.delays_ms),
            "block_p50_ms": [block["p50_ms"] for block in self.blocks],
            "load_average": [block["load"] for block in self.blocks],
            "config": {name: value for name, value in asdict(config).items() if name != "folder"},
        }


def freshness(
    *,
    json_path: JsonOption = None,
    folder: FolderOption = None,
    rounds: RoundsOption = 3,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a block, and round trips of one of the floor.")] = 500,
    rows_per_s: Annotated[int, typer.Option(min=10, help="Pace of the trainer.")] = 100_000,
    rows_per_step: Annotated[int, typer.Option(min=10, help="Different rows that a step updates.")] = 1000,
    rows: Annotated[int, typer.Option(min=10, help="Rows of the table.")] = 200_000,
    dim: Annotated[int, typer.Option(min=1, max=4096, help="Columns of it, float32.")] = 64,
    consistency: Annotated[str, typer.Option(help="Of the replica: latest or step.")] = "latest",
    flush_percent: Annotated[int, typer.Option(min=1, max=100, help="The streamer's setting.")] = 100,
) -> int:
    """Measure how long an update takes from the optimizer to a replica in another process.

    A trainer (torch, one table, SGD) streams at a steady pace through a server of one shard to a replica. The floor is
    one round trip of a step's bytes to a bare server that writes and syncs them, and one to a reader. Exit code 1 when
    the median is more than five times the floor's.

    Raises:
        ConfigError: A path cannot be written, or an option is wrong.
        UnavailableError: A process has ended or does not start.
    """
    check_json(json_path)
    config = FreshnessConfig(
        num_rows=rows,
        dim=dim,
        rows_per_step=rows_per_step,
        rows_per_s=rows_per_s,
        num_steps=steps,
        num_rounds=rounds,
        consistency=consistency,
        settings={"flush_percent": flush_percent},
        folder=check_folder(folder),
    )
    with show_progress("freshness", config.num_stages) as on_stage:
        figures = run(config, on_stage=on_stage).to_json(config)
    conclude(figures, json_path)
    return 0 if figures["p50_vs_floor"] <= MAX_P50_VS_FLOOR else 1


def run(config: FreshnessConfig, *, on_stage: OnStage) -> FreshnessResult:
    """Measure; processes and files are gone when this returns or raises.

    Args:
        config: How much.
        on_stage: Told in a few words what begins.

    Raises:
        UnavailableError: A process has ended or does not start.
    """
    result = FreshnessResult()
    with bench_folder(config.folder) as folder:
        on_stage("starting server, trainer and replica")
        with (
            ServerProcess.start(folder / "data", shards=1) as server,
            BenchChild(
                "headrace.scripts.benches.bench_freshness_trainer", "trainer", _trainer_order(config, server)
            ) as trainer,
            observed_replica(server.address, consistency=config.consistency) as replica,
            Floor(folder, config.step_bytes) as floor,
        ):
            _train(trainer, replica, config.num_warm_steps)
            for number in range(config.num_rounds):
                on_stage(f"round {number + 1}: floor")
                found_s = floor.measure(config.num_steps, interval_s=config.interval_s)
                result.floor_ms.extend(seconds * 1000 for seconds in found_s)
                on_stage(f"round {number + 1}: training, streaming, serving")
                block = _train(trainer, replica, config.num_steps)
                result.delays_ms.extend(block.pop("delays_ms"))
                result.blocks.append(block)
    return result


def observed_replica(address: str, *, consistency: str) -> BenchChild:
    """Start a replica in a process of its own; ordered a `step`, it answers what it has seen by then, and when."""
    order = {"address": address, "settings": {"consistency": consistency}}
    return BenchChild("headrace.scripts.benches.bench_freshness_replica", "replica", order)


def delays_of(first_step: int, updated_ns: list[int], seen: list[tuple[int, int]]) -> list[float]:
    """Return how long after its update each step was visible, milliseconds.

    Args:
        first_step: Step of the first update.
        updated_ns: Moment of each step's update.
        seen: (step, moment) of each change of what is visible, ascending; a step is visible with the first that is not
            below it.

    Raises:
        ProtocolError: A step was never visible.
    """
    steps, moments = np.array(seen, np.int64).reshape(-1, 2).T
    places = np.searchsorted(steps, np.arange(first_step, first_step + len(updated_ns)))
    if len(updated_ns) and (not steps.size or places[-1] >= steps.size):
        raise ProtocolError(f"the replica has not shown step {first_step + len(updated_ns) - 1}")
    found: list[float] = ((moments[places] - np.array(updated_ns)) / 1e6).tolist()
    return found


def _train(trainer: BenchChild, replica: BenchChild, num_steps: int) -> dict[str, Any]:
    """Train one block; return what was told, with `delays_ms`."""
    trained = trainer.ask({"num_steps": num_steps})
    updated_ns: list[int] = trained.pop("updated_ns")
    told = replica.ask({"step": trained["first_step"] + num_steps - 1})
    delays_ms = delays_of(trained["first_step"], updated_ns, told.pop("seen"))
    return {
        **trained,
        **told,
        "delays_ms": delays_ms,
        "p50_ms": float(np.median(delays_ms)),
        "load": os.getloadavg()[0],
    }


def _trainer_order(config: FreshnessConfig, server: ServerProcess) -> dict[str, Any]:
    names = ("num_rows", "dim", "rows_per_step", "rows_per_s", "settings")
    return {"address": server.address, **{name: getattr(config, name) for name in names}}
