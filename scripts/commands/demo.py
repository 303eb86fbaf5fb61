"""The command `headrace demo`: a real model trained on real events, streamed, and compared with what has arrived."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from headrace.scripts.commands.bench import check_checkout
from headrace.scripts.commands.terminal import output_console

__all__ = ["demo"]


def demo(
    *,
    shards: Annotated[int, typer.Option(min=1, max=64, help="Shards of the parameter server.")] = 2,
    max_events: Annotated[
        int | None, typer.Option(min=500, help="Use only this many events, the earliest ones.", show_default=False)
    ] = None,
) -> int:
    """Train a real model, stream it, serve it from a replica, and compare every row.

    A TorchRec model learns from the history of a public project in time order and streams its rows and its dense layer
    to a parameter server. Meanwhile its served model, in another process, ranks each event before it is trained on.
    The end shows how late rows arrive, how well both rank, and whether trainer, server and replica are equal.

    Returns:
        The exit code: 0 if all rows and recorded answers are equal, 1 if one differs.
    """
    check_checkout("demo", "ranking_demo")
    from headrace.scripts.benches.harness import stop_once

    if importlib.util.find_spec("torchrec") is None:  # `headrace.cli` says how to install it
        raise ModuleNotFoundError("No module named 'torchrec'", name="torchrec")
    console = Console(stderr=True)
    with stop_once():
        console.print("loading torch and TorchRec", style="dim")
        from headrace.scripts.ranking_demo.training import run

        report = run(max_events, shards, console)
    output_console().print(_make_table(report))
    return 1 if any(report[f"num_{what}_different"] for what in ("rows", "replica_rows", "answers")) else 0


def _make_table(report: dict[str, Any]) -> Table:
    """Return the report as a table of a dozen lines."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")

    def verdict(what: str) -> str:
        count = report[f"num_{what}_different"]
        return f"[bold {'red' if count else 'green'}]{count:,} different"

    def show(lag_ms: list[float]) -> str:
        return " / ".join(f"{ms:.1f} ms" for ms in lag_ms)

    rates, num_rows = report["hit_rate"], f"of {report['num_rows_compared']:,}"
    table.add_row("trainer = server", verdict("rows"), f"{num_rows}: weights and states")
    table.add_row("trainer = replica", verdict("replica_rows"), f"{num_rows} and the dense part")
    table.add_row("trained = served", verdict("answers"), f"of {report['num_answers_compared']:,} recorded batches")
    table.add_row("rows streamed", f"{report['num_rows_streamed']:,}", "acked when durable on disk")
    table.add_row("freshness_s", "0", "sends each step; default 1")
    table.add_row("lag p50 / p99", show(report["ack_lag_ms"]), "update → durable on the server")
    table.add_row("lag p50 / p99", show(report["arrival_lag_ms"]), "update → visible in the replica")
    table.add_section()
    table.add_row("hit@10, served model", f"{rates['streamed']:.1%}", "from the replica, batch by batch")
    table.add_row("hit@10, frozen copy", f"{rates['frozen']:.1%}", "read at 9 moments of the log")
    table.add_row("hit@10, live model", f"{rates['live']:.1%}", "in the trainer, to compare")
    return table
