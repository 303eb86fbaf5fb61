"""Clients that Apache Thrift's own compiler makes of our IDL, against a real shard."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import CommandLine
from documented_blocks import blocks_of, commands_of
from replica_endpoint import replica_endpoint

from headrace import BlockingReader, RawEmbeddingStreamer
from headrace.paramserver.rpc.security import Token
from headrace.paramserver.shard.launch import ServerProcess

ROOT = Path(__file__).parents[2]
IDL = ROOT / "schemas" / "paramserver.thrift"
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}
NUM_ROWS, DIM = 5000, 3
TOKEN = "correct-horse-battery"
DEADLINE_S = 60
COMPILE_S = 300

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


@pytest.fixture
def cpp_example(tmp_path: Path) -> Path:
    """Return the C++ example, built by the commands of the page."""
    has_library = ["g++", "-x", "c++", "-fsyntax-only", "-include", "thrift/transport/TBufferTransports.h", os.devnull]
    if shutil.which("g++") is None or subprocess.run(has_library, capture_output=True, timeout=DEADLINE_S).returncode:
        pytest.skip(
            "g++, or the libraries Thrift and Boost for it, are not installed (Debian: libthrift-dev libboost-dev)"
        )
    shutil.copytree(IDL.parent, tmp_path / "schemas", ignore=lambda _, names: set(names) - {IDL.name})
    shutil.copytree(
        ROOT / "examples/cpp", tmp_path / "examples/cpp", ignore=lambda _, names: set(names) - {"headrace.cpp"}
    )
    page = (ROOT / "docs/interop.md").read_text().partition("## C++")[2].partition("\n## ")[0]
    install, generate, build, run = [command.text for command in commands_of(blocks_of(page)[0])]
    assert install.startswith("apt-get install ") and run.startswith("examples/cpp/headrace ")
    for command in (generate, build):
        subprocess.run(command, shell=True, check=True, cwd=tmp_path, timeout=COMPILE_S)
    return tmp_path / "examples/cpp/headrace"


class CppReader:
    """The C++ example, which reads the rows whose ids are on its stdin."""

    def __init__(self, example: Path, address: str, fqn: str) -> None:
        self._process = subprocess.Popen(
            [example, address, fqn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def rows(self, ids: list[int]) -> list[list[float] | None]:
        """Return the weights of each row, None for a missing one."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, ids)) + "\n")
        self._process.stdin.flush()
        words = [self._process.stdout.readline().split() for _ in ids]
        assert [word[0] for word in words] == [str(row) for row in ids]
        return [None if row == ["missing"] else [float(number) for number in row] for _, *row in words]

    def __enter__(self) -> CppReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=DEADLINE_S)


def _rows_in_python(reader: BlockingReader, fqn: str, ids: list[int]) -> list[list[float] | None]:
    rows = reader.get(fqn, ids)
    weights: Any = rows.weights
    if weights.dtype == np.uint16:
        weights = (weights.astype(np.uint32) << 16).view(np.float32)
    return [row if presence == 1 else None for row, presence in zip(weights.tolist(), rows.presence, strict=True)]


@needs_compiler
def test_cpp_example(
    tmp_path: Path, cpp_example: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The C++ example reads what the Python reader reads: of any type, with a token, and where rows and shards move."""
    ids, run = [7, *range(NUM_ROWS), 7], CommandLine(capsys)
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    plain = subprocess.run(
        [cpp_example, "127.0.0.1:7601", "fp32.weight", "7x"], capture_output=True, timeout=DEADLINE_S
    )
    assert (plain.returncode, plain.stdout) == (1, b"")
    with ServerProcess.start(tmp_path / "data", shards=3, token_file=token, max_frame_bytes=2 << 20) as server:
        command = [str(cpp_example), server.address, "fp32.weight", "7"]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        assert refused.returncode == 1 and refused.stderr.startswith("error: ") and "token" in refused.stderr
        monkeypatch.setenv("HEADRACE_TOKEN", TOKEN)
        model: Any = torch.nn.ModuleDict(
            {name: torch.nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum", dtype=dtype) for name, dtype in DTYPES.items()}
        )
        with RawEmbeddingStreamer(server.address, run="cpp") as streamer:
            streamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), publish="all")
            streamer.evict("fp32.weight", [NUM_ROWS - 1])
        with replica_endpoint(tmp_path, server.address) as replica:
            for address in (server.address, replica.address):
                with BlockingReader(address, token=Token(TOKEN)) as reader:
                    for name in DTYPES:
                        with CppReader(cpp_example, address, f"{name}.weight") as client:
                            assert client.rows(ids) == _rows_in_python(reader, f"{name}.weight", ids)
        expected = model["fp64"].weight[ids].tolist()
        with CppReader(cpp_example, server.address, "fp64.weight") as client:
            assert client.rows(ids * 20) == expected * 20  # each shard's take more than one reply
            os.kill(run.json("status", "--server", server.address)["shards"][0]["pid"], signal.SIGKILL)
            assert client.rows(ids) == expected
        with CppReader(cpp_example, server.address, "fp64.weight") as client:
            assert client.rows(ids) == expected
        command[2] = "no.such"
        unknown = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        assert (unknown.returncode, unknown.stdout) == (1, "") and "fp32.weight" in unknown.stderr
    command[1] = "192.0.2.1:7601"
    abroad = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert abroad.returncode == 1 and "token is not sent" in abroad.stderr
