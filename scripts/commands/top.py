"""The command `headrace top`: a running server, live on a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.paramserver.observe.problems import find_problems
from headrace.paramserver.observe.sample import ShardSample, ShardState, merge_dense, merge_tables, merge_writers
from headrace.paramserver.observe.status_query import StatusAccess, TimeoutFlag, ask_shards
from headrace.paramserver.system.text import counted, format_size, visible
from headrace.schemas.errors import HeadraceError
from headrace.scripts.commands.status import WRITER_COLUMNS, show_dense, show_duration, show_problem, show_writer
from headrace.scripts.commands.terminal import (
    Access,
    ServerFlag,
    escape,
    number_table,
    output_console,
    with_server_flags,
)

__all__ = ["Frame", "render", "top"]

_QUIT_KEYS = (b"q", b"Q", b"\x03", b"\x04")
_RATES = ("log_seq", "num_rows_written", "num_refused")


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """A server at one moment; `time_s` is monotonic."""

    states: Sequence[ShardState]
    time_s: float


@with_server_flags
def top(
    *,
    server: ServerFlag = None,
    interval_s: Annotated[
        float, typer.Option(help="Time between updates, seconds.", min=0.1, max=3600, metavar="SECONDS")
    ] = 2.0,
    timeout_s: TimeoutFlag = 5.0,
    access: Access,
) -> int:
    """Watch a running server: problems first, then shards with their rates, writers and tables.

    `q` or Ctrl-C ends it. Without a terminal it prints one frame.
    """
    reached, console = access(server, timeout_s=timeout_s), output_console()
    if console.is_terminal and sys.stdin.isatty():
        asyncio.run(_watch(reached, interval_s, console))
    else:
        console.print(render(asyncio.run(_look(reached)), None))
    return 0


async def _look(access: StatusAccess) -> Frame:
    return Frame(states=await ask_shards(access), time_s=time.monotonic())


async def _watch(access: StatusAccess, interval_s: float, console: Console) -> None:
    quitting = asyncio.Event()
    frame = await _look(access)
    with _keys(quitting), Live(render(frame, None), console=console, screen=True, auto_refresh=False) as live:
        before: Frame | None = None
        failure: str | None = None
        while not quitting.is_set():
            live.update(_fit(render(frame, before, failure), console), refresh=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(quitting.wait(), interval_s)
            looking = asyncio.create_task(_look(access))
            waiting = asyncio.create_task(quitting.wait())
            await asyncio.wait((looking, waiting), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if not looking.done():
                looking.cancel()
                await asyncio.wait((looking,))
                return
            try:
                before, frame, failure = frame, looking.result(), None
            except HeadraceError as exc:
                failure = str(exc)  # the last frame stays


@contextlib.contextmanager
def _keys(quitting: asyncio.Event) -> Iterator[None]:
    """Read keys as they are pressed; restore the terminal at the end, whatever happens."""
    loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()
    saved = termios.tcgetattr(stdin)

    def on_key() -> None:
        key = os.read(stdin, 1)
        if not key or key in _QUIT_KEYS:
            quitting.set()

    try:
        tty.setcbreak(stdin)
        loop.add_reader(stdin, on_key)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, quitting.set)
        yield
    finally:
        loop.remove_reader(stdin)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        termios.tcsetattr(stdin, termios.TCSADRAIN, saved)


def _fit(frame: RenderableType, console: Console) -> RenderableType:
    """Return the part of a frame that fits the screen, and how much does not."""
    lines = console.render_lines(frame, pad=False)
    room = max(console.height, 2)
    if len(lines) <= room:
        return frame
    text = Text("\n").join(Text.assemble(*((s.text, s.style or "") for s in line)) for line in lines[: room - 1])
    return Group(text, Text(f"… {len(lines) - room + 1} more lines", style="dim"))


def render(now: Frame, before: Frame | None, failure: str | None = None) -> RenderableType:
    """Return a screen for a frame, with rates since an earlier frame and the reason why there is no newer one."""
    samples = [state.sample for state in now.states if state.sample is not None]
    parts: list[RenderableType] = []
    if samples:
        writers = sum(writer.is_connected for writer in merge_writers(samples))
        name = f"[bold]headrace {escape(samples[0].version)}[/bold]"
        counts = f"{counted(len(now.states), 'shard')}, {counted(writers, 'writer')} connected"
        parts.append(Text.from_markup(f"{name}  {counts}"))
    if failure is not None:
        parts.append(Text(f"no answer, this is old: {visible(failure)}", style="bold red"))
    parts += [Text.from_markup(show_problem(problem)) for problem in find_problems(now.states)]
    parts += [_shards_table(now, before), *_rest(samples)]
    parts.append(Text("q quits", style="dim"))
    return Group(*parts)


def _shards_table(now: Frame, before: Frame | None) -> Table:
    rates = ("records/s>", "rows/s>", "refused/s>")
    has_nodes = any(state.node for state in now.states)
    table = _table(
        *("shard>", *(["node"] if has_nodes else []), "up>"),
        *(*rates, "to apply>", "in flight>", "conns>", "pause>"),
    )
    earlier = {s.shard: s.sample for s in before.states if s.sample is not None} if before is not None else {}
    elapsed_s = now.time_s - before.time_s if before is not None else 0.0
    for state in now.states:
        sample = state.sample
        head = [str(state.shard), *([escape(state.node or "")] if has_nodes else [])]
        if sample is None:
            table.add_row(*head, "no answer", style="red")
            continue
        values = (_rate(sample, earlier.get(state.shard), name, elapsed_s) for name in _RATES)
        table.add_row(
            *head,
            show_duration(sample.uptime_s),
            *values,
            f"{sample.log_seq - sample.applied_seq:,}",
            format_size(sample.inflight_bytes),
            f"{sample.num_connections:,}",
            f"{sample.worst_loop_pause_s * 1000:.0f} ms",
        )
    return table


def _rate(sample: ShardSample, earlier: ShardSample | None, name: str, elapsed_s: float) -> str:
    # The counters of another process started at zero.
    if earlier is None or earlier.pid != sample.pid or elapsed_s <= 0:
        return ""
    return f"{(getattr(sample, name) - getattr(earlier, name)) / elapsed_s:,.1f}"


def _rest(samples: Sequence[ShardSample]) -> Iterator[RenderableType]:
    if writers := merge_writers(samples):
        table = _table(*WRITER_COLUMNS)
        for writer in writers:
            table.add_row(*show_writer(writer))
        yield table
    if tables := merge_tables(samples):
        table = _table("table", "rows>", "dim>", "dtype")
        for known in sorted(tables, key=lambda t: (-t.num_rows_estimate, t.spec.fqn)):
            table.add_row(escape(known.spec.fqn), f"{known.num_rows_estimate:,}", str(known.spec.dim), known.dtype)
        yield table
    for part in merge_dense(samples):
        yield Text.from_markup(show_dense(part))


def _table(*columns: str) -> Table:
    return number_table(*columns, box=None, pad_edge=False, header_style="dim")
