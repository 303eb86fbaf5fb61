"""What tests of a whole streamer share: a store of three shards, and a model that trains."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_shard import FakeStore, hosted
from streamed_training import Training


@pytest.fixture
def store() -> Iterator[FakeStore]:
    """Return a store that is served."""
    with hosted(FakeStore(num_shards=3)) as store:
        yield store


@pytest.fixture
def training() -> Training:
    """Return a model and its optimizer, not streamed yet."""
    return Training()
