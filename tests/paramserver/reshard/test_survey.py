"""What a plan starts from, measured on real shards."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hellos import hello_of_writer
from set_embeddings import delta_of, request_of
from shard_servers import serve_shards

from headrace.paramserver.reading.link import Dial
from headrace.paramserver.reshard.inventory import Goal
from headrace.paramserver.reshard.measuring import measure_disk, measure_scan
from headrace.paramserver.reshard.planner import make_plan
from headrace.paramserver.reshard.server_shards import ServerShards
from headrace.paramserver.reshard.survey import look_around
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.service import Shard
from headrace.schemas.errors import RequestError, StorageError
from headrace.schemas.idl import idl
from headrace.schemas.partition_map import PartitionMap
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="items.weight", num_rows=0, dim=4, dtype=DType.FLOAT32)
FIRST = PartitionMap.first(2)
ROWS = np.arange(20_000)


def _dial() -> Dial:
    return Dial(
        ssl_context=None,
        server_hostname=None,
        token=None,
        timeout_s=60.0,
        role=idl.Role.ADMIN,
        knows_partitions=True,
    )


async def test_a_server_measures_itself(tmp_path: Path) -> None:
    """Rows and bytes are the server's by partition, updates what the log holds, and both shards are on one disk."""
    opened: list[Shard] = []
    owners, began_us = FIRST.shards_of_rows(SPEC.seed, ROWS), time.time_ns() // 1000 - 1000 * 1_000_000
    async with serve_shards(tmp_path, 2, opened=opened) as ports:
        for shard, port in enumerate(ports):
            async with await ParamServerClient.connect("127.0.0.1", port) as client:
                await client.hello(hello_of_writer(SPEC, knows_partitions=True))
                for seq, rows in enumerate((ROWS[owners == shard], ROWS[owners == shard][:100]), 1):
                    await client.set_embeddings(
                        request_of(delta_of(SPEC, rows, 1.0), client_seq=seq, step=seq, time_us=began_us)
                    )
            await opened[shard].applied()
        async with await ServerShards.reach(_dial(), [("127.0.0.1", ports[0])]) as shards:
            survey = await look_around(shards)
            with pytest.raises(RequestError, match="not of other"):
                await shards.links[0].measure_shard(idl.MeasureShardRequest(server_id="other"))
    cluster, loads = survey.cluster, survey.loads
    assert [node.name for node in cluster.nodes] == [cluster.nodes[0].name]
    assert [shard.node for shard in cluster.shards] == [0, 0]
    assert cluster.nodes[0].free_bytes > 0 and cluster.nodes[0].read_bytes_s > 0 < cluster.nodes[0].write_bytes_s
    assert cluster.checkpoint_s > 0 and cluster.scan_bytes_s == 3e8  # assumed: the stores are too short
    assert cluster.nodes[0].num_cores == len(os.sched_getaffinity(0))
    assert (loads.owner == FIRST.owners).all()
    assert 0.9 * ROWS.size / 1024 < loads.num_rows[0] < 1.2 * ROWS.size / 1024 + 1
    assert 16 * ROWS.size / 1024 < loads.size_bytes[0] < 400 * ROWS.size / 1024
    again = np.concatenate([ROWS[owners == shard][:100] for shard in range(2)])
    counts = np.bincount(FIRST.partitions_of_rows(SPEC.seed, np.concatenate([ROWS, again])), minlength=1024)
    span_s = counts.sum() / loads.updates_s.sum()
    # By the trainer's clock; the shards are measured one after the other.
    assert 1000 <= span_s < 1300
    assert loads.updates_s == pytest.approx(counts / span_s, rel=0.2)
    assert len(survey.notes) == 1 and "applied too little" in survey.notes[0]
    assert make_plan(cluster, loads, Goal(shards=(0,))).moved_bytes == 512 * loads.size_bytes[0]


async def test_partitions_of_an_empty_server_are_spread(tmp_path: Path) -> None:
    """A server without a row can grow as well: each partition counts."""
    async with (
        serve_shards(tmp_path, 3, first_shards=2, num_partitions=1024) as ports,
        await ServerShards.reach(_dial(), [("127.0.0.1", ports[0])]) as shards,
    ):
        survey = await look_around(shards, link_bytes_s=5e6)
    assert survey.cluster.link_bytes_s.tolist() == [[np.inf]]
    assert not survey.loads.updates_s.any()
    plan = make_plan(survey.cluster, survey.loads, Goal(shards=(0, 1, 2)))
    assert len(plan.stages) == 1 and plan.worst_after < 1.06


class View:
    """A store of one table with a MiB of rows in each of `num_chunks`; its files have as much again."""

    tables = (None,)

    def __init__(self, num_chunks: int) -> None:
        self.num_chunks, self.size_bytes = num_chunks, 2 * num_chunks << 20

    def layouts(self, table: object) -> list[None]:
        return [None]

    def records(self, *_: object) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for _ in range(self.num_chunks):
            yield np.zeros(1024, np.int64), np.zeros(1024, "V1016")


@pytest.mark.parametrize(("num_chunks", "bytes_s"), [(3, 0), (8, 8 << 20), (300, 128 << 20)])
def test_a_scan_is_measured(num_chunks: int, bytes_s: int) -> None:
    """Bytes of the files count, hidden ones too, unless the store is too long to be read, or too short to tell."""
    ticks = iter([1.0, 3.0])
    assert measure_scan(View(num_chunks), None, clock_s=lambda: next(ticks)) == bytes_s  # type: ignore[arg-type]


def test_a_disk_is_measured_and_left_clean(tmp_path: Path) -> None:
    """The short file is removed; a folder that is gone is an error of the disk."""
    disk, free_bytes, read_bytes_s, write_bytes_s = measure_disk(tmp_path)
    assert disk == measure_disk(tmp_path)[0]
    assert free_bytes > 0 and read_bytes_s > 0 and write_bytes_s > 0
    assert list(tmp_path.iterdir()) == []
    ticks = iter([0.0, 2.0, 3.0])
    assert measure_disk(tmp_path, clock_s=lambda: next(ticks))[2:] == (16 << 20, 8 << 20)
    with pytest.raises(StorageError, match="speed of the disk cannot be measured"):
        measure_disk(tmp_path / "gone")
