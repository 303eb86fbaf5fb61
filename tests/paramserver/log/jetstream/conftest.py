"""Fixtures: a cluster of three NATS servers, and engines on streams of their own."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator

import pytest
from nats_cluster import access_of, nats_cluster
from nats_servers import NatsServers

from headrace.paramserver.log.jetstream.nats_engine import NatsEngine
from headrace.paramserver.log.jetstream.nats_stream import open_engine

_numbers = itertools.count(1)
OpenStream = Callable[..., Awaitable[NatsEngine]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServers]:
    with nats_cluster(tmp_path_factory.mktemp("nats")) as servers:
        yield servers


@pytest.fixture
def open_stream(cluster: NatsServers) -> OpenStream:
    """Make a new stream of the cluster and return an engine on it."""

    async def make(*, max_bytes: int = 32 << 20, first_seq: int = 1) -> NatsEngine:
        shard = next(_numbers)
        access = access_of(cluster)
        return await open_engine(access, server_id="s", shard=shard, max_bytes=max_bytes, first_seq=first_seq)

    return make
