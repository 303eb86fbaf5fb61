"""Clients that Apache Thrift's own compiler makes of our IDL, against a real shard."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from replica_endpoint import replica_endpoint

from headrace.paramserver.shard.launch import ServerProcess

ROOT = Path(__file__).parents[2]
IDL = ROOT / "schemas" / "paramserver.thrift"
DEADLINE_S = 60

needs_compiler = pytest.mark.skipif(
    shutil.which("thrift") is None, reason="the thrift compiler is not installed (Debian: thrift-compiler)"
)
needs_library = pytest.mark.skipif(
    importlib.util.find_spec("thrift") is None, reason="the Python package thrift is not installed"
)


@pytest.fixture
def generated(tmp_path: Path) -> str:
    """Return a folder with the Python code that the compiler makes."""
    folder = tmp_path / "generated"
    folder.mkdir()
    subprocess.run(["thrift", "--gen", "py", "-out", folder, IDL], check=True, timeout=DEADLINE_S)
    return str(folder)


@needs_compiler
@needs_library
def test_generated_python_client(tmp_path: Path, generated: str) -> None:
    """Apache's generated client says hello, writes durably, reads back bit for bit, and gets errors as errors."""
    client = [sys.executable, str(Path(__file__).with_name("python_client.py")), generated]
    with ServerProcess.start(tmp_path / "data") as server:
        for epoch in (1, 2):  # the second time as a restarted trainer
            done = subprocess.run([*client, server.address], capture_output=True, text=True, timeout=DEADLINE_S)
            assert done.returncode == 0, done.stderr
            assert f"wrote and read 4 rows of interop.weight as epoch {epoch}" in done.stdout
            assert "refused: " in done.stdout and "no.such" in done.stdout


@needs_compiler
@needs_library
def test_generated_python_client_of_a_replica(tmp_path: Path, generated: str) -> None:
    """Apache's generated client reads from `headrace replica` what another has written to the server."""
    folder = Path(__file__).parent
    with ServerProcess.start(tmp_path / "data") as server:
        writer = [sys.executable, str(folder / "python_client.py"), generated, server.address]
        assert subprocess.run(writer, capture_output=True, timeout=DEADLINE_S).returncode == 0
        with replica_endpoint(tmp_path, server.address) as replica:
            reader = [sys.executable, str(folder / "python_replica_client.py"), generated, replica.address]
            done = subprocess.run(reader, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert "read 3 of 4 rows of interop.weight at step 1; refused: this is a replica" in done.stdout


@needs_compiler
@pytest.mark.parametrize("language", ["cpp", "java", "js", "go"])
def test_the_idl_compiles_for(language: str, tmp_path: Path) -> None:
    """Apache's compiler takes the IDL for other languages, without a word of complaint."""
    done = subprocess.run(
        ["thrift", "--gen", language, "-out", tmp_path, IDL], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
