"""The trainer of the chaos harness, as the harness sees it: a process that is started, flushed and killed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
from typing import Any

from chaos_ledger import Ledger
from chaos_served import Outputs, Seen
from chaos_server import WAIT_S
from chaos_trainer import TrainerOrder, run_trainer
from waiting import pause

from headrace.schemas.version import Version

__all__ = ["ChaosError", "Trainer"]

# The folder of the harness is not on the path of the process that trainers are forked from.
_PRELOADED = [
    "torch",
    "torch.optim",
    "headrace.streamer.api",
    "headrace.streamer.compare",
    "headrace.paramserver.replica",
]


class ChaosError(Exception):
    """A promise is broken, or something did not react to a fault as it must."""


class Trainer:
    """A trainer process and what it has reported; a killed one is replaced by a new object."""

    def __init__(self, order: TrainerOrder, ledger: Ledger, outputs: Outputs, lock: threading.Lock) -> None:
        """Start the process; `wait_ready` comes next."""
        self._ledger, self._outputs, self._lock = ledger, outputs, lock
        self._replies: queue.Queue[tuple[Any, ...]] = queue.Queue()
        # Forked from a process that has torch loaded already: a trainer starts in a moment.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        commands, self._commands = context.Pipe(duplex=False)
        self._reports, reports = context.Pipe(duplex=False)
        self._process = context.Process(target=run_trainer, args=(order, commands, reports), daemon=True)
        self._process.start()
        commands.close()
        reports.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self) -> None:
        """Return when it trains."""
        self._expect("ready")

    def flush(self) -> dict[str, Version]:
        """Let it send everything, wait until it is acked, and compare the store with its tables.

        Return the version of each model; nothing follows until `go_on`.
        """
        self._commands.send("flush")
        _, is_equal, text, versions = self._expect("flushed")
        if not is_equal:
            raise ChaosError(f"after the flush the store differs from the trainer: {text}")
        return dict(versions)

    def go_on(self) -> None:
        """Let it train again after a flush."""
        self._commands.send("go on")

    def pause(self, seconds: float) -> None:
        """Stop the process for a while."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        pause(seconds)
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """`kill -9`, and take in what it had reported until then."""
        self._process.kill()
        self._end()

    def check(self) -> None:
        """Raise what has ended it."""
        while not self._replies.empty():
            self._take(self._replies.get())
        if not self._process.is_alive():
            raise ChaosError(f"the trainer has ended with exit code {self._process.exitcode}")

    def _end(self) -> None:
        self._process.join(WAIT_S)
        self._reader.join(WAIT_S)
        self._commands.close()
        self._reports.close()

    def _read(self) -> None:
        while True:
            try:
                report = pickle.loads(self._reports.recv_bytes())
            except (EOFError, OSError):
                return  # its last words may be cut
            if report[0] == "acked":
                with self._lock:
                    self._ledger.take(report[1], shard=report[2], seq=report[3])
            elif report[0] == "computed":
                with self._lock:
                    self._outputs.note(Seen(*report[1:]))
            else:
                self._replies.put(report)

    def _expect(self, kind: str) -> tuple[Any, ...]:
        deadline_s = time.monotonic() + 2 * WAIT_S
        while True:
            try:
                report = self._take(self._replies.get(timeout=0.2))
            except queue.Empty:
                if not self._process.is_alive() and self._replies.empty():
                    raise ChaosError(f"the trainer has ended, exit code {self._process.exitcode}") from None
                if time.monotonic() > deadline_s:
                    raise ChaosError(f"the trainer has not come to {kind!r}") from None
                continue
            if report[0] == kind:
                return report

    def _take(self, report: tuple[Any, ...]) -> tuple[Any, ...]:
        if report[0] == "failed":
            raise ChaosError(f"the trainer has failed: {report[1]}")
        return report
