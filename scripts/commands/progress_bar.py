"""Show a command's progress as a bar on stderr, if that is a terminal; it disappears at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

__all__ = ["ProgressBar", "show_bytes", "show_rows"]


@dataclass(frozen=True, slots=True)
class ProgressBar:
    """A bar from `show_bytes` or `show_rows`."""

    _progress: Progress
    _task: TaskID

    def advance(self, count: int) -> None:
        """Advance by `count`."""
        self._progress.advance(self._task, count)

    def update(self, done: int, total: int) -> None:
        """Show `done` of `total`."""
        self._progress.update(self._task, completed=done, total=total)


def show_bytes(what: str, total: int | None = None) -> AbstractContextManager[ProgressBar]:
    """Show a bar of bytes for the block, labeled `what`; a `total` of None waits for `update`."""
    return _show(what, total, DownloadColumn(binary_units=True), TransferSpeedColumn())


def show_rows(what: str, total: int | None = None) -> AbstractContextManager[ProgressBar]:
    """Show a bar of rows for the block; see `show_bytes`."""
    return _show(what, total, MofNCompleteColumn(), _RowRate())


class _RowRate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} rows/s")


@contextmanager
def _show(what: str, total: int | None, *columns: ProgressColumn) -> Iterator[ProgressBar]:
    console = Console(stderr=True)
    described = (TextColumn("{task.description}", markup=False), BarColumn(), *columns, TimeRemainingColumn())
    with Progress(*described, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield ProgressBar(progress, progress.add_task(what, total=total))
