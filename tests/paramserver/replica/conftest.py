"""A server, and a training run that streams to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from counted_training import Training

from headrace.paramserver.shard.launch import ServerProcess


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess.start(tmp_path / "data", shards=2) as process:
        yield process


@pytest.fixture
def training(server: ServerProcess) -> Iterator[Training]:
    """Return a run that has flushed its first step."""
    training = Training(server.address)
    training.step()
    training.flush()
    yield training
    training.close()
