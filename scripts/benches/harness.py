"""What all benches share: options, the command around a measurement, progress, medians and printed figures.

A bench is a function that measures; `bench_command` makes a command of it.
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
from headrace.scripts.benches.verdicts import judge

__all__ = ["JsonOption", "OnStage", "Rounds", "RoundsOption", "bench_command", "bench_folder", "check_json", "conclude"]
__all__ += ["one_torch_thread", "say", "show_progress", "stop_once"]

JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures to this file.", show_default=False)
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
    name: str, measure: Callable[..., dict[str, Any]], *, hints: Callable[[], Sequence[str]] = list
) -> Callable[..., int]:
    """Return the command of a bench: a function `measure(on_stage, ...)` that returns figures.

    Its parameters that are annotated with a `typer.Option` become options, and its docstring the help. `hints` returns
    lines to print first, such as how to install a peer that is missing. The command returns the exit code: 1 if a
    figure misses its target.
    """

    def command(*, json_path: Path | None = None, **settings: Any) -> int:
        check_json(json_path)
        say(*hints())
        with show_progress(name) as on_stage:
            figures = measure(on_stage, **settings)
        return conclude(name, {**figures, "options": settings}, json_path)

    types, parameters = get_type_hints(measure, include_extras=True), inspect.signature(measure).parameters.values()
    options = [of.replace(annotation=types[of.name]) for of in parameters if hasattr(types[of.name], "__metadata__")]
    json_option = inspect.Parameter("json_path", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=JsonOption)
    shown = [*options, json_option]
    command.__annotations__ = {of.name: of.annotation for of in shown}
    command.__signature__, command.__doc__ = inspect.Signature(shown), measure.__doc__  # type: ignore[attr-defined]
    return command


def check_json(path: Path | None) -> None:
    """Raise ConfigError if the file cannot be written, before minutes of work instead of after."""
    if path is not None and not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(f"--json {path}: cannot be written")


@contextmanager
def bench_folder() -> Iterator[Path]:
    """Make a new folder for files below `TMPDIR`; remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
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


def conclude(name: str, figures: dict[str, Any], path: Path | None) -> int:
    """Print the figures, facts of this machine and verdicts; return the exit code, 1 if a figure misses its target.

    Figures and facts are written to the file if there is one.
    """
    facts: dict[str, Any] = {"cores": os.cpu_count(), "memory_bytes": machine_memory_bytes()}
    facts |= {"system": platform.platform(), "python": platform.python_version(), "load": os.getloadavg()}
    figures = {**figures, "machine": facts}
    Console().print_json(data=figures)
    try:
        if path is not None:
            path.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    except OSError as exc:
        raise ConfigError(f"--json {path}: {exc.strerror}") from exc
    verdicts = [verdict for verdict in judge(name, figures) if verdict.is_met is not None]
    for each in verdicts:
        typer.echo(f"{each.name:28s} {each.value:>14s}   {each.target:14s} {'ok' if each.is_met else 'MISSED'}")
    return 0 if all(verdict.is_met for verdict in verdicts) else 1
