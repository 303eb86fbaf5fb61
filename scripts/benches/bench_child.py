"""A bench's child process that takes orders as lines of JSON on stdin and answers each with one on stdout."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from headrace.schemas.errors import UnavailableError

__all__ = ["BenchChild", "give_answer", "orders", "peak_memory_bytes"]


class BenchChild:
    """A running child; use it with `with`. It ends when its stdin does.

    Attributes:
        ready: Its answer to the first order.
    """

    def __init__(
        self, module: str, what: str, order: dict[str, Any], *, environ: Mapping[str, str] | None = None
    ) -> None:
        """Start `python -m module`, on the processors that this thread may use, and wait until it is ready.

        Args:
            module: To run.
            what: What it is, for messages.
            order: The first one, which makes it ready.
            environ: Variables of its environment beside this process's.

        Raises:
            UnavailableError: The process has ended.
        """
        self._what = what
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environ or {})},
            # Ctrl-C reaches the whole foreground group; the child is ended by this process.
            start_new_session=True,
        )
        try:
            self.ready = self.ask(order)
        except BaseException:
            self.close()
            raise

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Give an order and return its answer.

        Raises:
            UnavailableError: The process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its answer will tell
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
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
        with contextlib.suppress(BrokenPipeError):  # an order that it has not taken
            self._process.stdin.close()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def orders() -> Iterator[dict[str, Any]]:
    """Yield what the parent orders, in the child; each wants one `give_answer`."""
    while line := sys.stdin.readline():
        yield json.loads(line)


def give_answer(answer: dict[str, Any]) -> None:
    """Answer the parent's last order, in the child."""
    print(json.dumps(answer), flush=True)


def peak_memory_bytes(pid: int | Literal["self"] = "self") -> int:
    """Return the most resident memory that a process has had since it has begun its program.

    `getrusage` counts what the process was before as well: its parent, as large as that was.
    """
    for line in Path(f"/proc/{pid}/status").read_text("ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
