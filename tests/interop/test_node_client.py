"""The Node client of `examples/node` against real servers and a replica."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import CommandLine
from replica_endpoint import replica_endpoint

from headrace import RawEmbeddingStreamer
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.routing import shards_of_rows, table_seed

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "examples" / "node"
TLS = ROOT / "tests" / "paramserver" / "tls"
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}
NUM_ROWS, DIM = 2000, 3
DEADLINE_S = 60

pytestmark = [
    pytest.mark.skipif(shutil.which("thrift") is None, reason="the thrift compiler is not installed"),
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(
        not (CLIENT / "node_modules" / "thrift").is_dir(), reason="no npm install --prefix examples/node was run"
    ),
]


class Node:
    """A process that does what `node_orders.js` knows."""

    def __init__(self, folder: Path) -> None:
        script = Path(__file__).with_name("node_orders.js")
        self._process = subprocess.Popen(["node", script, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def answer(self, *order: object) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return dict(json.loads(self._process.stdout.readline()))

    def __call__(self, *order: object) -> Any:
        answer = self.answer(*order)
        assert "error" not in answer, answer
        return answer["result"]

    def rows(self, fqn: str, ids: list[int]) -> tuple[list[list[float]], list[bool]]:
        found = self("get", fqn, [str(row) for row in ids])
        return np.reshape(found["weights"], (len(ids), found["dim"])).tolist(), found["isPresent"]

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the client, what it needs, and the code that the compiler makes, as the client's header says."""
    made = tmp_path_factory.mktemp("node")
    shutil.copy(CLIENT / "headrace.js", made)
    (made / "node_modules").symlink_to(CLIENT / "node_modules")
    command = ["thrift", "--gen", "js:node", "-out", made, ROOT / "schemas" / "paramserver.thrift"]
    subprocess.run(command, check=True, timeout=DEADLINE_S)
    return made


@pytest.fixture
def node(folder: Path) -> Iterator[Node]:
    running = Node(folder)
    yield running
    running.close()


def _fill(address: str, **settings: Any) -> torch.nn.ModuleDict:
    """Write tables of every type, and return the model; all but the last rows are there."""
    model = torch.nn.ModuleDict(
        {name: torch.nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum", dtype=dtype) for name, dtype in DTYPES.items()}
    )
    with RawEmbeddingStreamer(address, run="node", **settings) as streamer:
        streamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), publish="all")
        streamer.evict("fp32.weight", [NUM_ROWS - 1])
    return model


def test_hash_is_that_of_the_server(node: Node) -> None:
    """Rows are hashed as schemas/routing.py does, to the last bit."""
    ids = [0, 1, 2, 3, 1000, 2**40, 2**63 - 1]
    hashes = [int(text) for text in node("hashes", "user.weight", [str(row) for row in ids])]
    assert [number % 4 for number in hashes] == [1, 0, 3, 3, 0, 1, 2]  # the golden shards of tests/schemas
    for fqn in ("", "é.weight"):
        there = [int(text) for text in node("hashes", fqn, [str(row) for row in ids])]
        for modulus in (2**32 - 5, 2**32):  # every bit of a hash is in one of the two
            here = shards_of_rows(table_seed(fqn), np.array(ids), modulus).tolist()
            assert [number % modulus for number in there] == here


def test_reads_from_server_and_replica(folder: Path, node: Node, tmp_path: Path) -> None:
    """Rows of every type come bit for bit from two shards, and from a replica; what is missing is said to be."""
    ids = [7, 0, NUM_ROWS - 1, *range(100, 600), 7]
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        model = _fill(server.address)
        with replica_endpoint(tmp_path, server.address) as replica:
            for address in (server.address, replica.address):
                assert node("connect", address) == sorted(f"{name}.weight" for name in DTYPES)
                for name in DTYPES:
                    weights = model[name].weight.detach().double()[ids]
                    is_present = [name != "fp32" or row != NUM_ROWS - 1 for row in ids]
                    weights[~torch.tensor(is_present)] = 0
                    assert node.rows(f"{name}.weight", ids) == (weights.tolist(), is_present)
            told = node.answer("get", "no.such", ["1"])
            assert told["error"].startswith("no table no.such here; there are ")
        command = ["node", folder / "headrace.js", server.address, "fp32.weight", "3", str(NUM_ROWS - 1)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        row, missing = done.stdout.splitlines()
        assert np.allclose([float(number) for number in row.split()[1:]], model["fp32"].weight[3].tolist(), rtol=0)
        assert (row.split()[0], missing) == ("3", f"{NUM_ROWS - 1} missing")


def test_follows_shards_that_come_back(node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A reader finds a shard that was killed."""
    ids, run = list(range(0, NUM_ROWS, 7)), CommandLine(capsys)
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        model = _fill(server.address)
        expected = model["fp64"].weight[ids].tolist(), [True] * len(ids)
        node("connect", server.address)
        assert node.rows("fp64.weight", ids) == expected
        os.kill(run.json("status", "--server", server.address)["shards"][0]["pid"], signal.SIGKILL)
        answers = [node.answer("get", "fp64.weight", [str(row) for row in ids]) for _ in range(2)]
        assert "result" in answers[1], answers


def test_token_and_tls(node: Node, tmp_path: Path) -> None:
    """A protected server lets the reader in with token and certificate, and says why it does not without."""
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("correct-horse-battery\n")
    settings = {"tls_certificate": TLS / "server.pem", "tls_key": TLS / "server.key.pem", "token_file": token}
    with ServerProcess.start(tmp_path / "data", **settings) as server:
        tls = {"ca": (TLS / "authority.pem").read_text()}
        assert node("connect", server.address, {"tls": tls, "token": "correct-horse-battery"}) == []
        assert "token" in node.answer("connect", server.address, {"tls": tls})["error"]
        plain = {"token": "correct-horse-battery"}
        assert "insecureToken" in node.answer("connect", "192.0.2.1:7601", plain)["error"]
        assert "127.0.0.1" in node.answer("connect", server.address, {"timeoutMs": 5000})["error"]
