"""What the benches share: where they write, how they show how far they are, how they print what they found."""

from __future__ import annotations

import json
import os
import platform
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from headrace.paramserver.process.machine_memory import machine_memory_bytes
from headrace.schemas.errors import ConfigError

__all__ = [
    "FolderOption",
    "JsonOption",
    "OnStage",
    "RoundsOption",
    "bench_folder",
    "check_folder",
    "check_json",
    "conclude",
    "machine_facts",
    "say",
    "show_progress",
]

# As a shell reports a process that SIGTERM has ended.
_EXIT_TERMINATED = 128 + signal.SIGTERM

JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there too.", show_default=False)
]
FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        metavar="DIR",
        help="Existing folder on the disk to measure; without it, the system's temporary one.",
        show_default=False,
    ),
]
RoundsOption = Annotated[int, typer.Option("--rounds", min=1, max=100, help="How often all is measured, in turn.")]

OnStage = Callable[[str], None]
"""Told in a few words what begins."""


def check_folder(folder: Path | None) -> Path | None:
    """Return a folder for a bench's files.

    Raises:
        ConfigError: It cannot be written to.
    """
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(f"--folder {folder}: not a folder that can be written to")
    return folder


def check_json(path: Path | None) -> None:
    """Find out that the file can be written before minutes of work, not after."""
    if path is not None and not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(f"--json {path}: cannot be written")


@contextmanager
def bench_folder(parent: Path | None) -> Iterator[Path]:
    """Yield a new folder for a bench's files, in `parent` or the system's temporary folder; it is gone at the end."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=parent) as name:
        yield Path(name)


def say(*lines: str) -> None:
    """Print what is no figure on stderr, such as that a peer is left out."""
    for line in lines:
        Console(stderr=True).print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def show_progress(name: str, num_stages: int) -> Iterator[OnStage]:
    """Show how far a bench is; SIGTERM ends it as it should, so that no process and no file is left."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(_EXIT_TERMINATED)

    columns = (BarColumn(bar_width=16), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(f"{name}: making rows", total=num_stages)
            seen = iter(range(num_stages))

            def on_stage(what: str) -> None:
                progress.update(task, description=what, completed=next(seen, num_stages))

            yield on_stage
    finally:
        signal.signal(signal.SIGTERM, before)


def conclude(result: dict[str, Any], path: Path | None) -> None:
    """Print the figures, and write them to the file if there is one."""
    result = {**result, "machine": machine_facts()}
    table = Table(show_header=False, box=None)
    for name, value in _flatten(result):
        table.add_row(name, value)
    Console().print(table)
    if path is not None:
        try:
            path.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
        except OSError as exc:
            raise ConfigError(f"--json {path}: {exc.strerror}") from exc


def _flatten(result: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in result.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield prefix + name, "  ".join(map(_show, value))
        else:
            yield prefix + name, _show(value)


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "not measured" if value is None else str(value)


def machine_facts() -> dict[str, Any]:
    """Return what figures of this machine have to name."""
    return {
        "cores": os.cpu_count(),
        "memory_bytes": machine_memory_bytes(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
