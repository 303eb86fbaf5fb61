"""The command `headrace demo`: a real model trained on real events, streamed, and compared with what has arrived."""

from __future__ import annotations

import importlib.util
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headrace.schemas.errors import ConfigError, StorageError
from headrace.scripts.demo_data import SAMPLE_PATH, read_events
from headrace.scripts.demo_ranking import TOP, Replay
from headrace.scripts.demo_report import (
    PLOT_NAME,
    REPORT_NAME,
    DemoReport,
    HitLog,
    make_plot,
    make_table,
    write_report,
)

__all__ = ["demo"]

_EXTRA_MODULES = ("torch", "fbgemm_gpu", "torchrec", "matplotlib")
_EXIT_DIFFERENT = 1
# As a shell reports a process that SIGTERM has ended.
_EXIT_TERMINATED = 128 + signal.SIGTERM


def demo(
    *,
    events: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Interaction log: CSV with the header timestamp,user_id,item_id; may be gzipped. "
            "Without it, a small sample of a public project's history.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help=f"Where {REPORT_NAME} and {PLOT_NAME} go.")] = Path(
        "demo-out"
    ),
    shards: Annotated[int, typer.Option(min=1, max=64, help="Shards of the parameter server.")] = 2,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Decides the first rows and all random items.")] = 0,
    batch_events: Annotated[int, typer.Option(min=1, help="Events that are scored, then trained on, together.")] = 32,
    max_events: Annotated[
        int | None, typer.Option(min=1, help="Only the earliest so many events of the log.", show_default=False)
    ] = None,
) -> int:
    """Train a real model, stream it, serve it from a replica, and compare every row.

    A TorchRec model learns from an interaction log in time order and streams its embedding rows to a parameter server.
    Meanwhile a replica of it, in another process, ranks each event before it is trained on. The end shows what was
    streamed, how late it came, how well it ranks, and whether trainer, server and replica hold the same rows, bit for
    bit.

    Returns:
        The exit code: 0 when all rows are equal, 1 when one differs.
    """
    path = events or SAMPLE_PATH
    log = read_events(path, max_events=max_events)
    try:
        replay = Replay(log=log, batch_events=batch_events, seed=seed)
    except ConfigError as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    _check_extras()
    _prepare_folder(out)
    progress_console = Console(stderr=True)
    with _stop_at_signals():
        progress_console.print("loading torch and TorchRec", style="dim")
        hits, report = _run(replay, shards, progress_console)
    try:
        write_report(report, out / REPORT_NAME)
        make_plot(hits, report, replay).savefig(out / PLOT_NAME)
    except OSError as exc:
        raise StorageError(f"--out {out}: {exc.strerror or exc}") from exc
    console = Console()
    console.print(make_table(report))
    console.print(
        f"{out / PLOT_NAME}, {out / REPORT_NAME} ({report.duration_s:.0f} s)", soft_wrap=True, highlight=False
    )
    return _conclude(report)


def _run(replay: Replay, num_shards: int, console: Console) -> tuple[HitLog, DemoReport]:
    """Run the demo with a progress bar on the console."""
    from headrace.scripts.demo_run import run  # with torch, which `headrace demo --help` need not load

    columns = (
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("events  {task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=replay.log.num_events)

        def on_batch(hits: HitLog, num_events: int) -> None:
            rates = f"hit@{TOP} {hits.rate('streamed'):.0%} streamed {hits.rate('frozen'):.0%} frozen"
            progress.update(task, completed=num_events, description=rates)

        def on_stage(stage: str) -> None:
            progress.console.print(stage, style="dim")

        return run(replay, num_shards=num_shards, on_stage=on_stage, on_batch=on_batch)


def _prepare_folder(out: Path) -> None:
    """Make the folder, and find out that it can be written before a minute of work, not after."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as exc:
        raise ConfigError(f"--out {out}: {exc.strerror or exc}") from exc


def _check_extras() -> None:
    """Find out that what only an extra brings is there, without loading it; the front door says how to install it."""
    for module in _EXTRA_MODULES:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def _conclude(report: DemoReport) -> int:
    """Return the exit code, and say on stderr why when it is not 0."""
    for num_different, where in (
        (report.num_rows_different, "trainer and server"),
        (report.num_replica_rows_different, "trainer and replica"),
    ):
        if num_different:
            text = f"{num_different} of {report.num_rows_compared} rows differ between {where}"
            Console(stderr=True).print(f"headrace: error: {text}", style="bold red", soft_wrap=True)
    if not (report.num_rows_different or report.num_replica_rows_different):
        return 0
    return _EXIT_DIFFERENT


@contextmanager
def _stop_at_signals() -> Iterator[None]:
    """Leave the block when SIGINT or SIGTERM comes, by an exception, and ignore further ones while it is cleaned up.

    Else an impatient second Ctrl-C would cut the cleaning short and leave a server and its files behind. Every step of
    it has a deadline.
    """

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        for each in previous:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGTERM:
            raise SystemExit(_EXIT_TERMINATED)
        raise KeyboardInterrupt

    previous: dict[signal.Signals, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
