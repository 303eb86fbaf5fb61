"""Processes of the fault harness: workers that it talks to, and programs that it kills and starts again."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from waiting import pause, scaled_s, wait_until

__all__ = ["WAIT_S", "ChaosError", "Program", "Worker", "stopped"]

WAIT_S = 180.0
# A worker is forked from a process that has these loaded already: it starts in a moment.
_PRELOADED = [
    "torch",
    "torch.optim",
    "headrace.streamer.api",
    "headrace.paramserver.replica",
]


class ChaosError(AssertionError):
    """A promise is broken, or something did not react to a fault as it must."""


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Stop processes for a while, as a machine that swaps does."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


class Worker:
    """A process at the other end of a pipe; a killed one is replaced by a new object.

    It sends tuples that begin with a kind; one that has failed sends ("failed", why).
    """

    def __init__(self, what: str, main: Callable[..., None], *args: Any) -> None:
        """Start `main` with the arguments and its end of the pipe."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._what = what
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=main, args=(*args, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._replies: queue.Queue[tuple[Any, ...] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, request: Any) -> None:
        """Ask for something; `expect` comes next."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, and perhaps said why
            self._pipe.send(request)

    def expect(self, kind: str) -> tuple[Any, ...]:
        """Return what comes with the next report, which must be of this kind."""
        try:
            report = self._replies.get(timeout=scaled_s(3 * WAIT_S))
        except queue.Empty:
            raise ChaosError(f"{self._what}: no {kind!r} within {3 * WAIT_S:g} s") from None
        if report is None:
            self._process.join(WAIT_S)
            self._replies.put(None)
            raise ChaosError(f"{self._what} has ended, exit code {self._process.exitcode}")
        if report[0] != kind:
            raise ChaosError(f"{self._what}: {report[0]} instead of {kind!r}: {report[1:]}")
        return report[1:]

    def check(self) -> None:
        """Raise what has ended it."""
        if not self._replies.empty():
            self.expect("nothing of itself")

    def pause(self, seconds: float) -> None:
        """Stop the process for a while."""
        assert self._process.pid is not None
        with stopped(self._process.pid):
            pause(seconds)

    def kill(self) -> None:
        """`kill -9`, and take in what it had reported until then. Idempotent."""
        self._process.kill()
        self._process.join(WAIT_S)
        self._reader.join(WAIT_S)
        self._pipe.close()

    def take(self, report: tuple[Any, ...]) -> bool:
        """Take a report that nobody expects, in a thread of its own; return False for all others."""
        return False

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):  # its last words may be cut
            while True:
                report = self._pipe.recv()
                if not self.take(report):
                    self._replies.put(report)
        self._replies.put(None)


class Program:
    """A program that is killed and started again. It writes a file when it is ready. Every method blocks.

    Attributes:
        log_path: What all of its processes have said.
        ready_file: The file.
    """

    def __init__(self, directory: Path, name: str) -> None:
        """Prepare in a directory that is there."""
        self._name = name
        self.log_path, self.ready_file = directory / f"{name}.log", directory / "ready.json"
        self._process: subprocess.Popen[bytes] | None = None
        self._said_before_bytes = 0

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process that was started last, and not waited for."""
        assert self._process is not None
        return self._process

    def launch_program(self, script: str, words: Sequence[object]) -> None:
        """Start a script of the harness."""
        self.ready_file.unlink(missing_ok=True)
        with self.log_path.open("ab") as log:
            self._said_before_bytes = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, script, *map(str, words)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )

    def is_ready(self) -> bool:
        """Return whether it has come up."""
        return self.ready_file.exists()

    def wait_ready(self, is_ready: Callable[[], bool] | None = None) -> None:
        """Return when it is ready, by default when its file is there."""
        is_ready = is_ready or self.is_ready

        def has_come() -> bool:
            self.check(self.process.poll() is None, "it has ended")
            return is_ready()

        self.wait_until(has_come, "its ready file")

    def wait_end(self) -> int:
        """Return the exit code once it has ended by itself."""
        self.wait_until(lambda: self.process.poll() is not None, "its end")
        exit_code = self.process.wait()
        self.forget()
        return exit_code

    def close(self) -> None:
        """End whatever runs. Idempotent."""
        if self._process is not None:
            self.kill()

    def kill(self) -> None:
        """`kill -9`."""
        self.process.kill()
        self.process.wait(WAIT_S)
        self.forget()

    def forget(self) -> None:
        """Take leave of a process that has ended."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._process = None

    def said(self) -> str:
        """Return what its processes have said since the last start."""
        with self.log_path.open("rb") as log:
            log.seek(self._said_before_bytes)
            return log.read().decode("utf-8", "replace")

    def tail(self) -> str:
        """Return the last lines of that."""
        return "\n".join(self.said().splitlines()[-12:])

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait for something of it."""
        wait_until(is_so, lambda: f"the {self._name} said:\n{self.tail()}\n{what}", within_s=WAIT_S)

    def check(self, is_so: bool, otherwise: str) -> None:
        """Fail with what it said last unless something is so."""
        assert is_so, f"the {self._name}: {otherwise}; it said:\n{self.tail()}"
