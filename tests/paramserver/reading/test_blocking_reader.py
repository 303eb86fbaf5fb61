"""Reads without an event loop, with a real server."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from replica_endpoint import replica_endpoint
from set_back_training import Trainer
from streamed_training import attached

from headrace import BlockingReader
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import UnavailableError, UnknownTableError


def test_calls_block_and_return_what_those_of_the_async_reader_do(server: ServerProcess) -> None:
    """In any thread; the errors are the same, and nothing is left behind."""
    trainer = Trainer("plain")
    with attached(server.address, trainer, run="plain", model="plain") as streamer:
        trainer.train([1, 2, 3])
        streamer.flush()
    threads = set(threading.enumerate())
    with BlockingReader(server.address, model="plain") as reader:
        fqn = "plain:plain.weight"
        assert list(reader.tables) == [fqn]
        assert repr(reader) == f"<BlockingReader of {server.address}: 1 table, 0 dense tensors, 2 shards>"
        rows = reader.get("plain.weight", [3, 1], with_versions=True)
        assert np.array_equal(rows.weights, trainer.table.weight.detach().numpy()[[3, 1]])
        assert rows.steps.tolist() == [1, 1]
        (found,) = reader.get_many([(fqn, [2])])
        assert found.presence.tolist() == [1]
        assert reader.digest(fqn).is_steady
        assert len(reader.status()) == 2
        with pytest.raises(UnknownTableError):
            reader.get("another", [1])
        assert reader.get.__doc__ == EmbeddingReader.get.__doc__
    with pytest.raises(UnavailableError, match="the reader is closed"):
        reader.get(fqn, [1])
    assert set(threading.enumerate()) <= threads  # those of other tests may end at any time


def test_a_server_that_is_away(server: ServerProcess) -> None:
    """The constructor raises and leaves no thread."""
    threads = set(threading.enumerate())
    with pytest.raises(UnavailableError):
        BlockingReader("127.0.0.1:1", timeout_s=0.2)
    assert set(threading.enumerate()) <= threads


def test_a_process_without_torch_looks_rows_up_in_a_replica(server: ServerProcess, tmp_path: Path) -> None:
    """Where importing torch raises, rows of a replica's process come as numpy arrays."""
    trainer = Trainer("small")
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'torchrec', 'fbgemm_gpu')))\n"  # None: import says it is not there
        "from headrace import BlockingReader\n"
        "with BlockingReader(sys.argv[1]) as reader:\n"
        "    sys.stdout.buffer.write(reader.get('small:small.weight', [3, 1]).weights.tobytes())\n"
    )
    with attached(server.address, trainer, run="small", model="small") as streamer:
        trainer.train([1, 2, 3])
        streamer.flush()
        with replica_endpoint(tmp_path, server.address) as replica:
            command = [sys.executable, "-P", "-c", code, replica.address]
            done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == trainer.table.weight.detach().numpy()[[3, 1]].tobytes()
