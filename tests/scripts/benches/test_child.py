"""What benches and the demo rely on when they run a worker in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.schemas.errors import HeadraceError, UnavailableError
from headrace.scripts.benches.child import Child, peak_memory_bytes

_MIB = 2**20
_WORKERS = """
import asyncio, os, threading
from headrace.schemas.errors import HeadraceError

def echo(**order):
    while True:
        order = yield {"pid": os.getpid(), "order": order, "environ": dict(os.environ)}

def end_later():
    yield {}
    os._exit(3)

def refuse(reason):
    raise HeadraceError(reason)
    yield

def hang():
    yield {}
    threading.Event().wait()

async def count():
    turns = 0
    async def turn():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)
    task = asyncio.create_task(turn())
    while True:
        yield {"turns": turns}
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "workers.py").write_text(_WORKERS, "utf-8")
    return {"PYTHONPATH": str(tmp_path)}


def test_peak_memory_is_that_of_the_program_itself() -> None:
    """The memory of a large parent does not count for its child."""
    parent = np.ones(400 * _MIB, np.uint8)
    program = (
        "from headrace.scripts.benches.child import peak_memory_bytes as peak\n"
        "import os\npid = os.getpid()\n"
        "print(peak(pid), len(bytearray(b'x') * (50 << 20)), peak(pid))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, _, after = map(int, done.stdout.split())
    assert 5 * _MIB < before < 200 * _MIB
    assert 40 * _MIB < after - before < 80 * _MIB
    assert peak_memory_bytes(os.getpid()) > parent.nbytes


def test_orders_are_answered_one_by_one(environ: dict[str, str]) -> None:
    """The first order is the worker's arguments; the child has its own variables in addition to ours."""
    with Child("workers:echo", "the worker", environ=environ, number=7) as child:
        assert child.ready["order"] == {"number": 7}
        assert child.ready["environ"]["PYTHONPATH"] == environ["PYTHONPATH"] and "PATH" in child.ready["environ"]
        assert child.ask(rows=[1, 2])["order"] == {"rows": [1, 2]}
        assert child.ask()["order"] == {}


def test_event_loop_of_a_worker_runs_between_orders(environ: dict[str, str]) -> None:
    """Tasks of an async worker make progress while it waits for an order."""
    with Child("workers:count", "the worker", environ=environ) as child:
        while child.ask()["turns"] < 10:
            pass


def test_a_child_that_ends_is_an_error(environ: dict[str, str]) -> None:
    """A process that has ended is an error that names it, before it is ready and afterwards."""
    message = "the bench's trainer has ended"
    with pytest.raises(UnavailableError, match=message):
        Child("headrace.scripts.no_such_module:work", "the bench's trainer")
    with Child("workers:end_later", "the bench's trainer", environ=environ) as child:
        for _ in range(2):  # the second order cannot be written, and neither can the rest of it when the pipe closes
            with pytest.raises(UnavailableError, match=message):
                child.ask()


def test_an_error_of_ours_is_raised_in_the_parent(environ: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    """The worker's HeadraceError arrives with its message, and without a traceback on stderr."""
    with pytest.raises(HeadraceError, match="the worker: no address"):
        Child("workers:refuse", "the worker", environ=environ, reason="no address")
    assert capfd.readouterr().err == ""


def test_a_worker_that_hangs_is_an_error_after_the_deadline(environ: dict[str, str]) -> None:
    """An answer that does not come in time is an error that says how long it was awaited."""
    with (
        Child("workers:hang", "the worker", environ=environ) as child,
        pytest.raises(UnavailableError, match=r"the worker has not answered for 0\.01 s"),
    ):
        child.ask(timeout_s=0.01)


def test_a_child_ends_with_its_parent(environ: dict[str, str]) -> None:
    """Even a worker that is busy ends when its parent is killed."""
    program = (
        "import os, signal\nfrom headrace.scripts.benches.child import Child\n"
        "child = Child('workers:echo', 'the worker')\nprint(child.ready['pid'], flush=True)\n"
        "busy = Child('workers:hang', 'the worker')\nbusy._orders.write(b'{}\\n'); busy._orders.flush()\n"
        "print(busy._process.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # The children inherit stderr, so this returns when the last of them has ended.
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=os.environ | environ, capture_output=True, timeout=60, check=False)
    assert len(done.stdout.split()) == 2
