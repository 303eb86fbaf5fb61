"""The sweep of cost: processor time of a row on the trainer and on the shard, against tables, rows and connections.

The clock says little of cost on a machine whose processors are shared; processor time says more. Of the trainer there
are the training thread (`bench_sweep_trainer.py`) and the process that sends; of the server, all of a shard's threads.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.scripts.benches.bench_ingest import serve
from headrace.scripts.benches.bench_report import OnStage, bench_folder
from headrace.scripts.benches.bench_rows import RowsConfig
from headrace.scripts.benches.bench_sweep_trainer import measure_trainer
from headrace.scripts.benches.bench_writer import WriterProcess

__all__ = ["CostConfig", "process_cpu_s", "run"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True, slots=True)
class CostConfig:
    """How much is measured.

    Attributes:
        tables: Numbers of tables, of `table_rows` rows each.
        rows: Rows of one table.
        connections: Connections of clients to one shard.
        table_rows: Rows of a table where they do not vary.
        dim: Columns, float32.
        num_batches: Batches of 4096 look-ups that a shard gets.
        step_lookups: Ids that a trainer's step looks up, in all tables together.
        num_steps: Steps of the trainer.
        num_rounds: All is measured so often, in turn.
        folder: Where files go; None for the system's temporary folder.
    """

    tables: tuple[int, ...] = (1, 10, 100, 1000)
    rows: tuple[int, ...] = (10**5, 10**6, 10**7, 10**8)
    connections: tuple[int, ...] = (1, 4, 16, 64)
    table_rows: int = 1_000_000
    dim: int = 64
    num_batches: int = 128
    step_lookups: int = 65_536
    num_steps: int = 8
    num_rounds: int = 2
    folder: Path | None = None

    @property
    def num_stages(self) -> int:
        """How often `on_stage` is called."""
        return self.num_rounds * (len(self.tables) + len(self.rows) + len(self.connections))


def run(config: CostConfig, *, on_stage: OnStage) -> dict[str, Any]:
    """Measure; processes and files are gone when this returns or raises.

    Args:
        config: How much.
        on_stage: Told in a few words what begins.

    Returns:
        `tables`, `rows` and `connections`, each with `x` and `series`: by what was measured, for each x, the values of
        all rounds: `mark_us`, `flush_us`, `send_us` and `shard_us`, processor time of a row; `rows_per_s`;
        `bitmap_bytes`.

    Raises:
        UnavailableError: A process has ended or does not start.
    """
    plain = RowsConfig(ids="uniform", num_batches=config.num_batches, dim=config.dim, num_rows=config.table_rows)
    results: dict[str, dict[str, Any]] = {
        name: {"x": list(getattr(config, name)), "series": {}} for name in ("tables", "rows", "connections")
    }
    for number in range(config.num_rounds):
        for name, result in results.items():
            for at, x in enumerate(result["x"]):
                on_stage(f"round {number + 1}: {x:,} {name}")
                if name == "connections":
                    found = _measure_shard(plain, config.folder, num_clients=x)
                else:
                    rows = replace(plain, **{"num_tables" if name == "tables" else "num_rows": x})
                    found = _measure_thread(rows, config) | _measure_shard(rows, config.folder)
                for what, value in found.items():
                    result["series"].setdefault(what, [[] for _ in result["x"]])[at].append(value)
    return results


def process_cpu_s(pid: int) -> float:
    """Return the processor time that all threads of a process have used, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _measure_thread(rows: RowsConfig, config: CostConfig) -> dict[str, float]:
    found = measure_trainer(replace(rows, num_lookups=config.step_lookups), num_steps=config.num_steps)
    names = {"mark_us": "mark_us_per_row", "flush_us": "flush_us_per_row", "bitmap_bytes": "bitmap_bytes"}
    return {name: found[of] for name, of in names.items()}


def _measure_shard(rows: RowsConfig, folder: Path | None, *, num_clients: int = 1) -> dict[str, float]:
    with (
        bench_folder(folder) as place,
        WriterProcess(rows, num_clients=num_clients) as writer,
        serve(place / "data") as server,
    ):
        (pid,) = server.shard_pids
        before_s = process_cpu_s(pid)
        written = writer.write(server.address, num_batches=rows.num_batches)
        used_s = process_cpu_s(pid) - before_s
        server.kill()
    return {
        "send_us": written.cpu_s / written.num_rows * 1e6,
        "shard_us": used_s / written.num_rows * 1e6,
        "rows_per_s": written.num_rows / written.applied_s,
    }
