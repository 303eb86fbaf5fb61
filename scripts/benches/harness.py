"""What all benches share: options, the command around a measurement, progress, medians and printed figures.

A bench is a dataclass with its settings and a function that measures. `bench_command` makes a command of them: each
field annotated with a `typer.Option` becomes an option.
"""

from __future__ import annotations

import inspect
import json
import os
import platform
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Annotated, Any, NoReturn, get_type_hints

import typer
from rich.console import Console

from headrace.paramserver.system.limits import machine_memory_bytes
from headrace.schemas.errors import ConfigError
from headrace.scripts.benches.report import judge

__all__ = ["FolderOption", "JsonOption", "OnStage", "Rounds", "RoundsOption", "bench_command", "bench_folder"]
__all__ += ["check_folder", "check_json", "conclude", "machine_facts", "one_torch_thread", "say", "show_progress"]
__all__ += ["stop_once", "write_json"]

JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures to this file.", show_default=False)
]
FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        metavar="DIR",
        help="Existing folder on the disk to measure; by default the system's temporary folder.",
        show_default=False,
    ),
]
RoundsOption = Annotated[
    int, typer.Option("--rounds", min=1, max=100, help="How often everything is measured, in turn.")
]

OnStage = Callable[[str], None]
"""Called with a few words on what begins."""


class Rounds(dict[str, list[float]]):
    """The values of all rounds, by name."""

    def add(self, name: str, value: float) -> None:
        """Add the value of one round."""
        self.setdefault(name, []).append(value)

    def medians(self, scale: float = 1.0) -> dict[str, float]:
        """Return the median of each name, times `scale`."""
        return {name: median(values) * scale for name, values in self.items()}

    def ratio(self, name: str, peer: str) -> float | None:
        """Return one median over another; None if either was not measured."""
        return median(self[name]) / median(self[peer]) if name in self and peer in self else None


def bench_command(
    name: str,
    config_class: Any,
    measure: Callable[[Any, OnStage], dict[str, Any]],
    *,
    hints: Callable[[], Sequence[str]] = list,
    has_bounds: bool = False,
) -> Callable[..., int]:
    """Return the command of a bench, with options from the settings' dataclass and help from `measure`.

    `hints` returns lines to print first, such as how to install a peer that is missing. With `has_bounds` each figure
    is printed with its target, and the exit code is 1 if one is missed.
    """

    def command(*, json_path: Path | None = None, **settings: Any) -> int:
        check_json(json_path)
        check_folder(settings.get("folder"))
        config = config_class(**settings)
        say(*hints())
        with show_progress(name) as on_stage:
            figures = measure(config, on_stage)
        conclude(figures, json_path)
        verdicts = [verdict for verdict in judge(name, figures) if has_bounds and verdict.is_met is not None]
        for each in verdicts:
            typer.echo(f"{each.name:26s} {each.value:>14s}   {each.target:14s} {'ok' if each.is_met else 'MISSED'}")
        return 0 if all(verdict.is_met for verdict in verdicts) else 1

    types = {"json_path": JsonOption, **get_type_hints(config_class, include_extras=True)}
    defaults = {"json_path": None} | {name: field.default for name, field in config_class.__dataclass_fields__.items()}
    shown = {name: of for name, of in types.items() if hasattr(of, "__metadata__")}
    parameter, kind = inspect.Parameter, inspect.Parameter.KEYWORD_ONLY
    parameters = [parameter(name, kind, default=defaults[name], annotation=of) for name, of in shown.items()]
    command.__annotations__, command.__signature__ = shown, inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = measure.__doc__
    return command


def check_folder(folder: Path | None) -> None:
    """Raise ConfigError if a folder for files cannot be written to."""
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(f"--folder {folder}: not a folder that can be written to")


def check_json(path: Path | None) -> None:
    """Raise ConfigError if the file cannot be written, before minutes of work instead of after."""
    if path is not None and not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(f"--json {path}: cannot be written")


@contextmanager
def bench_folder(parent: Path | None) -> Iterator[Path]:
    """Make a new folder for files, in `parent` or the system's temporary folder; remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=parent) as name:
        yield Path(name)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch use one thread for its operations."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def say(*lines: str) -> None:
    """Print lines that are no figures on stderr."""
    for line in lines:
        Console(stderr=True).print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def stop_once() -> Iterator[None]:
    """Raise at the first SIGINT or SIGTERM, and ignore further ones while processes and files are cleaned up."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGTERM:
            raise SystemExit(128 + number)  # as a shell reports it
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def show_progress(name: str) -> Iterator[OnStage]:
    """Show what a bench does."""
    with stop_once(), Console(stderr=True).status(f"{name}: making rows") as status:
        yield lambda what: status.update(f"{name}: {what}")


def conclude(figures: dict[str, Any], path: Path | None) -> None:
    """Print the figures and facts of this machine, and write them to the file if there is one."""
    figures = {**figures, "machine": machine_facts()}
    Console().print_json(data=figures)
    if path is not None:
        write_json(figures, path)


def write_json(figures: dict[str, Any], path: Path) -> None:
    """Write figures to the file of `--json`; raise ConfigError if that fails."""
    try:
        path.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    except OSError as exc:
        raise ConfigError(f"--json {path}: {exc.strerror}") from exc


def machine_facts() -> dict[str, Any]:
    """Return the facts that figures of this machine must state."""
    return {
        "cores": os.cpu_count(),
        "memory_bytes": machine_memory_bytes(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
