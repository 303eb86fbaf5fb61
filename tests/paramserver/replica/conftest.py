"""A training run that streams to a server, of the test's own or of all tests of a module."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from counted_training import Training

from headrace.paramserver.shard.launch import ServerProcess

_numbers = itertools.count(1)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess.start(tmp_path / "data", shards=2) as process:
        yield process


@pytest.fixture
def training(server: ServerProcess) -> Iterator[Training]:
    """Return a run that has flushed its first step, of a model of its own."""
    training = Training(server.address, name=f"counted{next(_numbers)}")
    training.step()
    training.flush()
    yield training
    training.close()
