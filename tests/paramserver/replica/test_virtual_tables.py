"""A replica of tables with virtual ids begins from the server's newest snapshot."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hellos import hello_of_writer
from set_embeddings import delta_of, request_of

from headrace.paramserver.reading.link import Dial
from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.replica.api.config import DiskStorage
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.snapshots.remote import create_snapshot
from headrace.schemas.errors import GoneError
from headrace.schemas.idl import idl
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="virtual.weight", num_rows=0, dim=3, dtype=DType.FLOAT32)
WAIT_S = 60.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess.start(tmp_path / "data", shards=2) as process:
        yield process


def _values(ids: np.ndarray, step: int) -> np.ndarray:
    return ((ids % 997)[:, None] + np.arange(SPEC.dim) + step * 1000).astype("<f4")


async def _write(address: str, epoch: int, steps: dict[int, np.ndarray], deleted: np.ndarray | None = None) -> None:
    """Write rows as a new trainer; delete some with the last step."""
    hello = hello_of_writer(SPEC, run="virtual", epoch=epoch)
    host, port = address.rsplit(":", 1)
    async with await ParamServerClient.connect(host, int(port)) as client:
        shards = (await client.hello(hello)).shards
    for at, shard in enumerate(shards):
        async with await ParamServerClient.connect(shard.host, shard.port) as client:
            await client.hello(hello)
            for client_seq, (step, ids) in enumerate(steps.items(), 1):
                is_last = client_seq == len(steps)
                mine = ids[shards_of_rows(table_seed(SPEC.fqn), ids, len(shards)) == at]
                gone = deleted if is_last and deleted is not None else np.empty(0, np.int64)
                gone = gone[shards_of_rows(table_seed(SPEC.fqn), gone, len(shards)) == at]
                delta = delta_of(SPEC, mine, _values(mine, step), deleted_row_ids=gone)
                who = {"run": "virtual", "epoch": epoch, "client_seq": client_seq}
                await client.set_embeddings(request_of(delta, **who, step=step))


@pytest.mark.parametrize("consistency", ["latest", "step"])
@pytest.mark.parametrize("storage", [{}, {"*": DiskStorage(memory_bytes=40_000)}], ids=["memory", "disk"])
def test_begins_from_the_newest_snapshot_and_follows(
    server: ServerProcess, tmp_path: Path, storage: Any, consistency: Any
) -> None:
    """Rows of the snapshot, of the log after it, and deletions are as written; unknown ids are zeros."""
    rng = np.random.default_rng(1)
    ids = np.unique(rng.integers(0, 2**62, 5000))
    asyncio.run(_write(server.address, 1, {1: ids}))
    with pytest.raises(GoneError, match="headrace snapshot create"):
        EmbeddingReplica(server.address, consistency=consistency, storage=storage)
    dial = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=10.0, role=idl.Role.ADMIN)
    asyncio.run(create_snapshot(server.address, dial=dial, timeout_s=WAIT_S))
    changed, deleted = ids[::3], ids[1::3]
    asyncio.run(_write(server.address, 2, {1: changed[:100], 2: changed}, deleted=deleted))
    settings: dict[str, Any] = {"storage": storage, "consistency": consistency, "snapshot_dir": tmp_path / "kept"}
    with EmbeddingReplica(server.address, **settings) as replica:
        replica.wait_for(2, WAIT_S, epoch=2)
        assert replica.num_rows(SPEC.fqn) == ids.size - deleted.size or storage  # on disk it is an estimate
        expected = _values(ids, 1)
        expected[::3], expected[1::3] = _values(changed, 2), 0
        assert torch.equal(replica.lookup(SPEC.fqn, ids), torch.from_numpy(expected))
        assert replica.num_missing == {SPEC.fqn: deleted.size}
        new = np.arange(10_000, dtype=np.int64)
        asyncio.run(_write(server.address, 3, {7: new}))
        replica.wait_for(7, WAIT_S, epoch=3)
        assert torch.equal(replica.lookup(SPEC.fqn, new), torch.from_numpy(_values(new, 7)))
        assert replica.num_rows(SPEC.fqn) == ids.size - deleted.size + new.size or storage
    assert len(list((tmp_path / "kept").glob("[!.]*"))) == 1
