"""The server of the tests of the parameter server: they kill its shards, make snapshots, and read all that it holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.paramserver.shard.launch import ServerProcess


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Return a real server of two shards, which the tests of a module have for themselves."""
    with ServerProcess.start(tmp_path_factory.mktemp("server") / "data", shards=2) as process:
        yield process
