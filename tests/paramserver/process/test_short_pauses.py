"""A process of ours is not held up by collections of what is imported, nor by work that nobody waits for."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.paramserver.process.short_pauses import NICENESS
from headrace.paramserver.supervisor.launch import ServerProcess

_PROGRAM = """
import gc, sys
from headrace.paramserver.process.short_pauses import shorten_pauses
shorten_pauses()
print(gc.get_freeze_count() > 1000, gc.get_threshold()[0] > 700, sys.getswitchinterval() < 0.005, gc.isenabled())
"""


def test_collections_and_switches_are_set() -> None:
    """What is there is left alone, and collections come rarely, but come."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 4


def test_threads_that_nobody_waits_for_step_back(tmp_path: Path) -> None:
    """RocksDB's threads, which it starts with the store, leave a busy processor to the event loop of the shard."""
    server = ServerProcess.start(tmp_path / "data", shards=1)
    try:
        process = server.shard_pids[0]
        niceness = {}
        for task in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # others may end meanwhile
                if (task / "comm").read_text().startswith("rocksdb"):
                    niceness[task.name] = os.getpriority(os.PRIO_PROCESS, int(task.name))
        assert niceness
        assert set(niceness.values()) == {os.getpriority(os.PRIO_PROCESS, process) + NICENESS}
    finally:
        server.close()


@pytest.mark.parametrize(("before", "after"), [(1, 1 + NICENESS), (17, 19)])
def test_stepping_back_counts_from_where_the_process_is(before: int, after: int) -> None:
    """A process that was started nicer than others has threads that are nicer still, which needs no rights."""
    program = (
        "import os; from headrace.paramserver.process.short_pauses import step_back; step_back(); print(os.nice(0))"
    )
    command = ["nice", "-n", str(before - os.nice(0)), sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) == after
