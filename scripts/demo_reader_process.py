"""The trainer's end of the demo's reader: starts the process, hands it orders, and waits for its scores."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.schemas.errors import HeadraceError, UnavailableError
from headrace.scripts.demo_reader import BatchScore, ReaderConfig

__all__ = ["ReaderProcess"]

# Longer than any deadline inside the reader, so that its own error, which says more, comes first.
_ANSWER_TIMEOUT_S = 90.0
_EXIT_TIMEOUT_S = 5.0


class ReaderProcess:
    """A running reader, and the orders that go to it. A context manager that leaves no process behind.

    No order carries rows, weights or gradients: the reader knows of the model only what its replica has got from the
    server.
    """

    def __init__(self, config: ReaderConfig) -> None:
        """Prepare; nothing is started."""
        self._config = config
        self._sock: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ReaderProcess:
        self._sock, theirs = socket.socketpair()
        self._sock.settimeout(_ANSWER_TIMEOUT_S)
        self._answers = self._sock.makefile("rb")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace.scripts.demo_reader", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Ctrl-C reaches the whole foreground group; the reader ends when this process closes the socket.
                start_new_session=True,
            )
        self._send(asdict(self._config))
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._sock is not None and self._process is not None
        self._answers.close()
        self._sock.close()  # at this the reader ends by itself
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process is not None
        return self._process.pid

    def score(self, batch: int) -> BatchScore:
        """Have a batch scored with what the replica holds now, and wait for it.

        Raises:
            HeadraceError: What the reader could not do, in its words.
            UnavailableError: The reader has died or does not answer.
        """
        return BatchScore(**self._ask({"do": "score", "batch": batch}))

    def watch(self, step: int, trained_at_s: float) -> None:
        """Tell that a step is over, so that the reader looks out for it; does not wait.

        Args:
            step: The streamer's step that the updates belong to.
            trained_at_s: `time.monotonic()` after the update.
        """
        self._send({"do": "watch", "step": step, "trained_at_s": trained_at_s})

    def finish(self) -> list[float]:
        """Wait until every watched step is visible, and return their lags, seconds.

        Raises:
            HeadraceError: As `score` does.
        """
        return list(self._ask({"do": "finish"})["lags_s"])

    def save(self, path: Path) -> None:
        """Have all rows written as the replica serves them, and wait for it: `.npz`, an array a table, by fqn.

        Raises:
            HeadraceError: As `score` does.
        """
        self._ask({"do": "save", "path": str(path)})

    def _send(self, order: dict[str, Any]) -> None:
        assert self._sock is not None
        # A reader that has died says why in the answer, which is read next.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._sock.sendall(json.dumps(order).encode() + b"\n")

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        self._send(order)
        try:
            line = self._answers.readline()
        except TimeoutError as exc:
            raise UnavailableError(f"the demo's reader has not answered for {_ANSWER_TIMEOUT_S:g} s") from exc
        except ConnectionResetError:
            line = b""
        if not line.endswith(b"\n"):
            raise UnavailableError(f"the demo's reader, process {self.pid}, has died")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise HeadraceError(f"the demo's reader: {answer['error']}")
        return answer
