"""Runs a page as it stands: its programs are saved, its commands run in order, and their output is compared.

- A `python` block with a title is saved under that name; one without is executed, all of a page in one namespace.
- In a `console` block a line `$ …` is a command (a line that ends in a backslash goes on), what follows is what it
  prints: each line must come, in this order, where `…` stands for anything. A line `…` stands for any lines.
- `headrace serve` and `headrace replica` are left running, on ports that are kept for the page; wherever the page has
  the port that stands there, they are put in. They end with the page.
- A command that ends in ` &` is left running as soon as it has printed what follows. `fg` waits for its end, and what
  follows there is the rest of what it prints.
- Commands that begin with one of `NOT_RUN` are not run, each for the reason that stands there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from held_ports import hold_ports
from waiting import WAIT_S, wait_until

__all__ = ["NOT_RUN", "Block", "Command", "DocumentedPage", "blocks_of", "commands_of", "is_run", "missing_line"]

# What a page may show and the suite does not run, and why. Keep it short: nothing else holds such a command.
NOT_RUN: Mapping[str, str] = {
    "pip install": "needs a package index; tests/test_packaging.py installs",
    "scripts/demo": "tests/scripts/commands/test_demo.py",
    "scripts/test": "would run itself",
}
_DEFAULT_PORTS = {"serve": {"--port": 7601}, "replica": {"--port": 7701}}
_MOST_SHARDS = 4
_FENCE = re.compile(r"^```(\w*)[ ]?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A fenced block: `line` is that of its fence, `title` a file's name or empty."""

    language: str
    title: str
    text: str
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command of a console block, and the lines that it is said to print."""

    text: str
    output: tuple[str, ...]


def blocks_of(page: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    return [
        Block(
            language=match[1],
            title=title[1] if (title := _TITLE.search(match[2])) else "",
            text=match[3],
            line=page.count("\n", 0, match.start()) + 1,
        )
        for match in _FENCE.finditer(page)
    ]


def commands_of(block: Block) -> list[Command]:
    """Return what a console block has behind `$`; a block without one is output alone."""
    found: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif found and found[-1][0].endswith("\\"):
            found[-1] = (found[-1][0][:-1] + line.strip(), [])
        elif found:
            found[-1][1].append(line)
    return [Command(text=text, output=tuple(output)) for text, output in found]


def is_run(command: str) -> bool:
    """Say whether the suite runs it."""
    return not any(command.startswith(prefix) for prefix in NOT_RUN)


def missing_line(expected: tuple[str, ...], printed: str) -> str | None:
    """Return the first expected line that was not printed after those before it; None when all were."""
    rest = iter([" ".join(line.split()) for line in printed.splitlines()])
    for line in expected:
        words = " ".join(line.split())
        if words in ("", "…"):
            continue
        pattern = re.compile("[ ]?.*[ ]?".join(re.escape(part.strip()) for part in words.split("…")))
        if not any(pattern.fullmatch(given) for given in rest):
            return line
    return None


class DocumentedPage:
    """Runs blocks in a directory; used with `with`, at whose end what it has started is stopped."""

    def __init__(self, directory: Path, *, paths: Mapping[str, str] | None = None) -> None:
        """Run nothing yet.

        Args:
            directory: Where the commands run.
            paths: Paths that the page names, and what to take instead.
        """
        self.directory = directory
        self.num_run = 0
        self._replaced: dict[str, str] = dict(paths or {})
        self._names: dict[str, Any] = {"__name__": "__main__"}
        self._servers: list[subprocess.Popen[bytes]] = []
        self._job: tuple[subprocess.Popen[bytes], Path, int] | None = None
        self._stack = ExitStack()
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        self._environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environ.update(COLUMNS="120", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")

    def run(self, block: Block) -> None:
        """Run a block, or save it; blocks that are neither Python nor console are passed over."""
        if block.language == "python" and block.title:
            (self.directory / block.title).write_text(self._put_in(block.text))
        elif block.language == "python":
            self.num_run += 1
            code = compile("\n" * block.line + self._put_in(block.text), f"page {self.directory.name}", "exec")
            exec(code, self._names)
        elif block.language == "console":
            for command in filter(lambda command: is_run(command.text), commands_of(block)):
                self.num_run += 1
                if command.text.startswith(("headrace serve ", "headrace replica ")):
                    self._start(command.text)
                elif command.text.endswith(" &"):
                    self._leave_running(command)
                elif command.text == "fg":
                    self._wait_for_job(command)
                else:
                    self._finish(command)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # The one that was started last may follow one of the others.
        self._stack.close()

    def _put_in(self, text: str) -> str:
        for documented, actual in self._replaced.items():
            text = re.sub(rf"(?<![\w.]){re.escape(documented)}(?!\w)", actual, text)
        return text

    def _finish(self, command: Command) -> None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self._put_in(command.text)],
            cwd=self.directory,
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert done.returncode == 0, f"{command.text}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        missing = missing_line(command.output, done.stdout)
        assert missing is None, f"{command.text}: {missing!r} is not in what it prints:\n{done.stdout}"

    def _start(self, command: str) -> None:
        """Start a server on the ports that stand for the page's, and return when it is ready."""
        command = command.partition("#")[0]
        ports = {**_DEFAULT_PORTS[command.split()[1]], **_ports(command)}
        for port in ports.values():
            if str(port) not in self._replaced:
                self._replaced[str(port)] = str(hold_ports(_MOST_SHARDS))
        flags = " ".join(f"{flag} {self._replaced[str(port)]}" for flag, port in ports.items())
        ready = self.directory / f"ready-{len(self._servers)}.json"
        log = self.directory / f"server-{len(self._servers)}.log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {self._put_in(command)} {flags} --watch-stdin --ready-file {ready}"],
                cwd=self.directory,
                env=self._environ,
                stdin=subprocess.PIPE,
                stderr=stderr,
            )
        self._servers.append(process)
        self._stack.callback(_stop, process)
        wait_until(lambda: ready.exists() or process.poll() is not None, f"the ready file of {command}")
        assert process.poll() is None, f"{command}: has ended\n{log.read_text()}"

    def _leave_running(self, command: Command) -> None:
        """Start a program, and return when it has printed what stands below it."""
        log = self.directory / "job.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {self._put_in(command.text.removesuffix(' &'))}"],
                cwd=self.directory,
                env={**self._environ, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._stack.callback(_kill, process)
        printed = ""

        def is_printed() -> bool:
            nonlocal printed
            has_ended = process.poll() is not None  # before its last words are read
            missing = missing_line(command.output, printed := log.read_text())
            assert missing is None or not has_ended, f"{command.text}: {missing!r} is not in what it prints:\n{printed}"
            return missing is None

        wait_until(is_printed, lambda: f"{command.text} prints:\n{printed}\nThe rest")
        self._job = process, log, len(printed)

    def _wait_for_job(self, command: Command) -> None:
        assert self._job is not None, "nothing was left running"
        (process, log, begin), self._job = self._job, None
        exit_code = process.wait(WAIT_S)
        printed = log.read_text()
        assert exit_code == 0, f"exit code {exit_code}\n{printed}"
        missing = missing_line(command.output, printed[begin:])
        assert missing is None, f"{missing!r} is not in what it prints:\n{printed}"


def _ports(command: str) -> dict[str, int]:
    return {flag: int(port) for flag, port in re.findall(r"(--port|--metrics-port)[ =](\d+)", command)}


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Have a server drain by closing its stdin; kill it when it does not."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
