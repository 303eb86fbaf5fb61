"""A bench's child process that takes orders as lines of JSON on stdin and answers each with one on stdout."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from headrace.schemas.errors import UnavailableError

__all__ = ["BenchChild", "peak_memory_bytes"]


class BenchChild:
    """A running child; use it with `with`. It ends when its stdin does."""

    def __init__(self, module: str, what: str, *, environ: Mapping[str, str] | None = None) -> None:
        """Start `python -m module`.

        Args:
            module: To run.
            what: What it is, for messages.
            environ: Variables of its environment beside this process's.
        """
        self._what = what
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environ or {})},
        )

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Give an order and return its answer.

        Raises:
            UnavailableError: The process has ended.
        """
        self.tell(order)
        return self.answer()

    def tell(self, order: dict[str, Any]) -> None:
        """Give an order; `answer` has to be called before the next."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its answer will tell
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the answer to the last order.

        Raises:
            UnavailableError: The process has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UnavailableError(f"the bench's {self._what} has ended; its error is above")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End the process; idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def peak_memory_bytes(pid: int | Literal["self"] = "self") -> int:
    """Return the most resident memory that a process has had since it has begun its program.

    `getrusage` counts what the process was before as well: its parent, as large as that was.
    """
    for line in Path(f"/proc/{pid}/status").read_text("ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
