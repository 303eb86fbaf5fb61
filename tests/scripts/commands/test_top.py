"""`headrace top`."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest
from command_line import CommandLine
from metric_samples import TABLE, WRITER, state
from rich.console import Console
from watched_server import say_hello

from headrace.paramserver.observe.sample import ShardState, TableSample
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.tables import DType, TableSpec
from headrace.scripts.commands.top import Frame, render

NAME = "user[red].weight"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess.start(tmp_path_factory.mktemp("top") / "data", shards=2) as running:
        spec = TableSpec(fqn=NAME, num_rows=9, dim=4, dtype=DType.FLOAT32, states=())
        asyncio.run(say_hello(running.address, [spec]))
        yield running


def _text(now: Frame, before: Frame | None = None, failure: str | None = None) -> str:
    console = Console(width=140, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 - it lives as long
    with console.file:
        console.print(render(now, before, failure))
        return console.export_text()


def test_rates_are_differences() -> None:
    """Rates are differences over time; a restarted shard has none."""
    before = Frame(states=[state(), state(shard=1)], time_s=100.0)
    later = {"log_seq": 29, "num_rows_written": 2500, "num_refused": 1}
    now = Frame(states=[state(**later), state(shard=1, pid=99, **later)], time_s=104.0)
    lines = _text(now, before).splitlines()
    (first,) = [line.split() for line in lines if re.match(r" *0 ", line)]
    (second,) = [line.split() for line in lines if re.match(r" *1 ", line)]
    assert first[3:6] == ["5.0", "500.0", "0.2"]
    assert "500.0" not in second
    assert "500.0" not in _text(now)


def test_problems_first_and_names_as_they_are() -> None:
    """Problems stand above the shards; markup in a name is text."""
    gone = ShardState(shard=1, address="x", error="it is gone [red]")
    table, writer = (
        TableSample(dataclasses.replace(TABLE.spec, fqn="[bold]t[/bold]"), 1),
        dataclasses.replace(WRITER, run="[i]r"),
    )
    odd = state(tables=(table,), writers=(writer,))
    text = _text(Frame(states=[odd, gone], time_s=0.0))
    assert text.index("shard 1 does not answer: it is gone [red]") < text.index("records/s")
    assert "[bold]t[/bold]" in text
    assert "[i]r" in text
    assert "this is old: away" in _text(Frame(states=[odd], time_s=0.0), failure="away")


def test_names_cannot_write_on_the_terminal() -> None:
    """Control characters in what a server or a client calls itself are written out, and a line stays one line."""
    odd = "a\x1b[2Jb\nc\x7fd\x9b31me\x85f"
    writer, gone = dataclasses.replace(WRITER, run=odd, client=odd), ShardState(shard=1, address=odd, error=odd)
    shown = _text(Frame(states=[state(writers=(writer,)), gone], time_s=0.0), failure=odd)
    assert re.findall(r"[^\n -\x7e\xa0-\U0010ffff]", shown) == []
    assert shown.count(r"a\x1b[2Jb\nc\x7fd\x9b31me\x85f") == 4
    assert len(shown.splitlines()) == len(shown.split("\n")) - 1


@pytest.mark.parametrize(
    ("cost", "shown"),
    [
        ((0.94, True), "0.9 % max_cost_percent connected"),
        ((0.0, False), "0.0 % freshness_s connected"),
        ((None, None), "40 3.0 s connected"),
    ],
)
def test_what_streaming_costs_a_trainer(cost: tuple[float | None, bool | None], shown: str) -> None:
    """A writer's line has the cost and which setting binds, or neither."""
    writer = dataclasses.replace(WRITER, cost_percent=cost[0], is_cost_bound=cost[1])
    (line,) = [
        line for line in _text(Frame(states=[state(writers=(writer,))], time_s=0.0)).splitlines() if "ctr " in line
    ]
    assert " ".join(line.split()).endswith(shown)


def test_one_frame_without_a_terminal(server: ServerProcess, run: CommandLine) -> None:
    """In a pipe, the command prints one frame and ends."""
    out = run("top", "--server", server.address)
    assert NAME in out
    assert "\x1b" not in out


@pytest.mark.parametrize("end", ["q", "\x04", "SIGINT"])
def test_ends_cleanly_on_a_terminal(server: ServerProcess, end: str) -> None:
    """On a terminal, q, Ctrl-D or Ctrl-C ends the command with 0 and restores the terminal."""
    ours, theirs = pty.openpty()
    try:
        before = termios.tcgetattr(theirs)
        command = [sys.executable, "-m", "headrace", "top", "--server", server.address, "--interval-s", "0.1"]
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
        try:
            shown = _read_until(ours, "0.0")  # a rate, so the second frame has come
            assert NAME in shown
            if end == "SIGINT":
                process.send_signal(signal.SIGINT)
            else:
                os.write(ours, end.encode())
            _drain_until_end(ours, process)
            assert process.returncode == 0
            assert termios.tcgetattr(theirs) == before
        finally:
            process.kill()
            process.wait()
    finally:
        os.close(ours)
        os.close(theirs)


def _read_until(fd: int, word: str) -> str:
    shown, deadline_s = "", time.monotonic() + 60
    while word not in shown:
        ready, _, _ = select.select([fd], [], [], max(deadline_s - time.monotonic(), 0))
        assert ready, f"{word} was not shown, but {shown}"
        shown += os.read(fd, 65536).decode(errors="replace")
    return shown


def _drain_until_end(fd: int, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + 60
    while process.poll() is None:
        assert time.monotonic() < deadline_s, "it does not end"
        if select.select([fd], [], [], 0.05)[0]:
            os.read(fd, 65536)
