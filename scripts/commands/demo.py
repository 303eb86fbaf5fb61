"""The command `headrace demo`: a real model trained on real events, streamed, and compared with what has arrived."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headrace.schemas.errors import ConfigError, StorageError
from headrace.scripts.commands.bench import check_checkout
from headrace.scripts.commands.terminal import output_console

__all__ = ["demo"]

_EXTRA_MODULES = ("torch", "fbgemm_gpu", "torchrec", "matplotlib")


def demo(
    *,
    events: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Interaction log: CSV with the header timestamp,user_id,item_id; may be gzipped. "
            "By default a small sample of a public project's history.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for report.json and hit-rate.png.")] = Path(
        "demo-out"
    ),
    shards: Annotated[int, typer.Option(min=1, max=64, help="Shards of the parameter server.")] = 2,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Determines the first rows and all random items.")
    ] = 0,
    batch_events: Annotated[int, typer.Option(min=1, help="Events that are scored, then trained on, together.")] = 32,
    max_events: Annotated[
        int | None, typer.Option(min=1, help="Use only this many events, the earliest ones.", show_default=False)
    ] = None,
) -> int:
    """Train a real model, stream it, serve it from a replica, and compare every row.

    A TorchRec model learns from an interaction log in time order and streams its rows and its dense layer to a
    parameter server. Meanwhile its served model, in another process, ranks each event before it is trained on, with
    rows that are milliseconds old and a dense layer of the last half second. The end shows what was streamed,
    how late it arrived, how well it ranks, and whether trainer, server and replica hold the same rows, bit for bit.

    Returns:
        The exit code: 0 if all rows are equal, 1 if one differs.
    """
    check_checkout("demo", "ranking_demo")
    from headrace.scripts.benches.harness import stop_once
    from headrace.scripts.ranking_demo.events import SAMPLE, TOP, Replay, read_events
    from headrace.scripts.ranking_demo.summary import HitLog, make_plot, make_table

    path = events or SAMPLE
    log = read_events(path, max_events=max_events)
    try:
        replay = Replay(log=log, batch_events=batch_events, seed=seed)
    except ConfigError as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    for module in _EXTRA_MODULES:
        if importlib.util.find_spec(module) is None:  # `headrace.cli` says how to install it
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):  # fails before a minute of work, not after
            pass
    except OSError as exc:
        raise ConfigError(f"--out {out}: {exc.strerror or exc}") from exc
    columns = (BarColumn(bar_width=16), MofNCompleteColumn(), TextColumn("events  {task.description}"))
    console = Console(stderr=True)
    with stop_once(), Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=log.users.size)
        console.print("loading torch and TorchRec", style="dim")
        from headrace.scripts.ranking_demo.training import run

        def show_rates(hits: HitLog, num_events: int) -> None:
            rates = f"hit@{TOP} {hits.rate('streamed'):.0%} streamed {hits.rate('frozen'):.0%} frozen"
            progress.update(task, completed=num_events, description=rates)

        def show_stage(stage: str) -> None:
            console.print(stage, style="dim")

        hits, report = run(replay, num_shards=shards, on_stage=show_stage, on_batch=show_rates)
    report_path, plot_path = out / "report.json", out / "hit-rate.png"
    try:
        report_path.write_text(json.dumps(report.to_json(), indent=2) + "\n", "utf-8")
        make_plot(hits, report, replay).savefig(plot_path)
    except OSError as exc:
        raise StorageError(f"--out {out}: {exc.strerror or exc}") from exc
    output_console().print(make_table(report))
    output_console().print(f"{plot_path}, {report_path} ({report.duration_s:.0f} s)", soft_wrap=True, highlight=False)
    num_different = {"server": report.num_rows_different, "replica": report.num_replica_rows_different}
    for where, number in num_different.items():
        if number:
            text = f"{number} of {report.num_rows_compared} rows differ between trainer and {where}"
            console.print(f"headrace: error: {text}", style="bold red", soft_wrap=True)
    if number := report.num_answers_different:
        text = f"{number} of {report.num_answers_compared} recorded batches are answered otherwise by the served model"
        console.print(f"headrace: error: {text}", style="bold red", soft_wrap=True)
    return 1 if any(num_different.values()) or report.num_answers_different else 0
