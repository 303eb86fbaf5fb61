"""Run a worker of a bench or of the demo in a process of its own.

Parent and child talk in lines of JSON over the child's stdin and stdout: an order, then its answer. A worker is a
generator function. Its arguments are the first order; each `yield` answers the order before and returns the next one.
The event loop of an async generator keeps running while it waits for an order.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import pkgutil
import queue
import select
import subprocess
import sys
import threading
import traceback
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from headrace.schemas.errors import HeadraceError, UnavailableError

__all__ = ["AsyncWorker", "Child", "Worker", "on_processor", "peak_memory_bytes"]

Worker = Generator[dict[str, Any], dict[str, Any], None]
AsyncWorker = AsyncGenerator[dict[str, Any], dict[str, Any]]


class Child:
    """A running worker; use it with `with`. It ends at once when this process is gone."""

    def __init__(self, worker: str, what: str, *, environ: Mapping[str, str] | None = None, **order: Any) -> None:
        """Start the worker `module:function`, on the processors that this thread may use, and wait until it is ready.

        `ready` is its answer to the first order, which is the function's arguments; `what` names it in messages, as in
        "the bench's writer"; `environ` are variables in addition to this process's.

        Raises:
            HeadraceError: As `ask` does.
        """
        self._what = what
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(environ or {})},
            start_new_session=True,  # Ctrl-C reaches the whole foreground group, but this process ends the child
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._answers = self._process.stdin, self._process.stdout
        try:
            self.ready = self.ask(**order)
        except BaseException:
            self.close()
            raise

    def ask(self, *, timeout_s: float | None = None, **order: Any) -> dict[str, Any]:
        """Send an order and return its answer.

        Raises:
            HeadraceError: The worker raised it.
            UnavailableError: The process has ended, or has not answered within `timeout_s`.
        """
        with contextlib.suppress(BrokenPipeError):  # the missing answer shows that it has ended
            self._orders.write(json.dumps(order).encode() + b"\n")
            self._orders.flush()
        if not select.select([self._answers], [], [], timeout_s)[0]:
            raise UnavailableError(f"{self._what} has not answered for {timeout_s:g} s")
        line = self._answers.readline()
        if not line:
            raise UnavailableError(f"{self._what} has ended; its error is above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise HeadraceError(f"{self._what}: {answer['error']}")
        return answer

    def close(self) -> None:
        """Kill the process; idempotent."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):  # an order that it has not read
            self._orders.close()
        self._answers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@contextlib.contextmanager
def on_processor(processor: int) -> Iterator[None]:
    """Keep this thread, and processes that it starts meanwhile, on one processor."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {processor})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def peak_memory_bytes(pid: int) -> int:
    """Return the largest resident memory that a process has had since it began its program.

    `getrusage` would also count what the process was before: a copy of its parent.
    """
    lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))


def _read_orders(orders: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    os._exit(0)  # the parent is gone, so nobody waits for the answer that may be under way


async def _work(worker: AsyncWorker, orders: queue.SimpleQueue[dict[str, Any]]) -> None:
    _answer(await anext(worker))
    while True:
        _answer(await worker.asend(await asyncio.to_thread(orders.get)))


def _answer(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _main() -> None:
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_orders, args=(orders,), daemon=True).start()
    try:
        worker = pkgutil.resolve_name(sys.argv[1])(**orders.get())
        if inspect.isasyncgen(worker):
            asyncio.run(_work(worker, orders))  # type: ignore[arg-type]  # not known to be ours
        _answer(next(worker))
        while True:
            _answer(worker.send(orders.get()))
    except HeadraceError as exc:
        _answer({"error": str(exc)})
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # the usual end of the interpreter would wait for the thread that reads stdin


if __name__ == "__main__":
    _main()
