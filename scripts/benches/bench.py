"""The command `headrace bench`: what Headrace costs and how fast it is, each figure beside its own limit or peer.

To add a bench, add an entry to `_BENCHES`. Its target is a plain function, as for `headrace.cli`; it is imported when
its arguments are parsed.
"""

from __future__ import annotations

from typing import Any

import typer
import typer.core

from headrace.scripts.lazy_command import LazyCommand

__all__ = ["bench"]

# Name, module and function, help.
_BENCHES = (
    ("ingest", "bench_ingest:ingest", "How fast a shard takes rows, beside disk, RocksDB and Redis."),
    ("recovery", "bench_recovery:recovery", "How fast a killed shard applies its log again."),
    ("wire", "bench_wire:wire", "How fast requests travel, beside gRPC and thriftpy2."),
    ("lookup", "bench_lookup:lookup", "How fast a replica looks up, beside torch, Redis, RocksDB."),
    ("overhead", "bench_overhead:overhead", "What streaming costs a trainer."),
    ("backfill", "bench_backfill:backfill", "How fast a directory is made of files, beside RocksDB."),
    ("export", "bench_export:export", "How fast a snapshot becomes files, beside the disk."),
    ("kernels", "bench_kernels:kernels", "How fast rows are marked, packed, digested and routed."),
    ("freshness", "bench_freshness:freshness", "How late a replica shows an update, beside a floor."),
    ("all", "bench_all:all_benches", "All of these and the sweeps, as a report with charts."),
)


class _Benches(typer.core.TyperGroup):
    """The group of all benches."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, function, help_text in _BENCHES:
            self.add_command(LazyCommand(name, f"headrace.scripts.benches.{function}", help_text))


bench = typer.Typer(add_completion=False, no_args_is_help=True, cls=_Benches)


@bench.callback()
def _front_door() -> None:
    """Measure Headrace on this machine, each figure beside its own limit or peer."""
