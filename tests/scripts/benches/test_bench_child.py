"""What the benches' child processes have in common."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.schemas.errors import UnavailableError
from headrace.scripts.benches.bench_child import BenchChild, peak_memory_bytes

_MIB = 2**20


def test_peak_memory_is_that_of_the_program_itself() -> None:
    """A large parent counts in no child, which a process's own `getrusage` would have."""
    parent = np.ones(400 * _MIB, np.uint8)
    program = (
        "from headrace.scripts.benches.bench_child import peak_memory_bytes as peak\n"
        "print(peak(), len(bytearray(b'x') * (50 << 20)), peak())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, _, after = map(int, done.stdout.split())
    assert 5 * _MIB < before < 200 * _MIB
    assert 40 * _MIB < after - before < 80 * _MIB
    assert peak_memory_bytes() > parent.nbytes


def test_a_child_that_ends_is_told(tmp_path: Path) -> None:
    """A process that has ended is an error that names it, whether it ends before it is ready or afterwards."""
    told = "the bench's trainer has ended"
    with pytest.raises(UnavailableError, match=told):
        BenchChild("headrace.scripts.no_such_module", "trainer", {})
    (tmp_path / "answer_once.py").write_text("input()\nprint('{}', flush=True)\n", "utf-8")
    with BenchChild("answer_once", "trainer", {}, environ={"PYTHONPATH": str(tmp_path)}) as child:
        assert child.ready == {}
        child._process.wait()  # so that the order stays in the pipe's buffer, and closing that cannot write it either
        with pytest.raises(UnavailableError, match=told):
            child.ask({})


def test_a_child_gets_its_own_variables_beside_ours(tmp_path: Path) -> None:
    """What is named for a child is in its environment, and what is in ours too."""
    program = "import json, os\nfor _ in iter(input, ''): print(json.dumps(dict(os.environ)), flush=True)\n"
    (tmp_path / "tell_environment.py").write_text(program, "utf-8")
    with BenchChild("tell_environment", "child", {}, environ={"PYTHONPATH": str(tmp_path)}) as child:
        found = child.ready
    assert found["PYTHONPATH"] == str(tmp_path)
    assert "PATH" in found
