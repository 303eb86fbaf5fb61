"""Samples of shards, made up."""

from __future__ import annotations

import dataclasses
from typing import Any

from headrace.paramserver.observe.sample import (
    ArchiveSample,
    CacheSample,
    ExpirySample,
    FollowerSample,
    FollowingSample,
    HistogramSample,
    LogSample,
    ShardDetail,
    ShardSample,
    ShardState,
    SnapshotSample,
    StandbySample,
    TableSample,
    WriterSample,
)
from headrace.schemas.tables import DType, TableSpec

HISTOGRAM = HistogramSample(bounds_s=(0.5, 1.0), counts=(3, 0, 2), sum_s=4.5)
TABLE = TableSample(TableSpec(fqn="user.weight", num_rows=100, dim=8, dtype=DType.FLOAT32), 70)
# Two tensors of the dense part of `ctr`, and one that its earlier architecture has left behind.
DENSE = tuple(
    TableSample(TableSpec.of_tensor(f"ctr:{path}", shape, DType.FLOAT32), 1, "ctr-run", epoch)
    for path, shape, epoch in (("top.weight", (4, 16), 3), ("top.bias", (4,), 3), ("old.bias", (9,), 2))
)
WRITER = WriterSample(run="ctr", client="rank0", epoch=2, step=40, is_connected=True, rank=0, world_size=1, age_s=3.0)
DETAIL = ShardDetail(
    apply_lag_s=0.25,
    apply_delay=HISTOGRAM,
    fsync=HISTOGRAM,
    refused={"overloaded": 0, "malformed": 0},
    num_requests=10,
    num_failed=0,
    inflight_requests=1,
    log_first_seq=1,
    log_size_bytes=1000,
    log_pending_bytes=10,
    backlog_bytes=20,
    num_log_records=7,
    log_written_bytes=900,
    store_bytes=800,
    compaction_bytes=0,
    cache=CacheSample(capacity_bytes=100, used_bytes=50, hits=9, misses=1),
    memory_bytes=1 << 20,
    cpu_s=1.5,
    num_open_files=12,
    disk_free_bytes=50,
    disk_bytes=100,
    disk_reserve_bytes=10,
    num_followers=1,
    num_holds_broken=0,
    snapshot=SnapshotSample(name="nightly", step=30, created_us=1_700_000_000_000_000, size_bytes=77),
)
SAMPLE = ShardSample(
    server_id="id",
    shard=0,
    num_shards=1,
    version="1",
    pid=42,
    uptime_s=600.0,
    log_seq=9,
    applied_seq=8,
    inflight_bytes=100,
    num_connections=2,
    num_refused=0,
    num_disk_failures=0,
    num_rows_written=500,
    worst_loop_pause_s=0.01,
    tables=(TABLE, *DENSE),
    writers=(WRITER,),
    followers=(FollowerSample(name="shop", address="10.0.0.3:5000", records_behind=2, age_s=1.25),),
    expiry=ExpirySample(),
    archive=ArchiveSample(archived_seq=9),
    following=FollowingSample(source="10.0.0.1:7601", source_seq=9, lag_ms=0, knowledge_age_ms=400),
    log=LogSample(
        is_owner=True,
        owner="127.0.0.1:7601",
        leader="n1",
        peer_lag=0,
        peers_away=0,
        outstanding_bytes=0,
        stalled_s=0.0,
        refusals={"full": 1},
        num_voids=0,
        num_elections=0,
        stream_bytes=1 << 20,
        stream_max_bytes=1 << 30,
        is_full=False,
        standbys=(StandbySample(address="127.0.0.2:7602", applied_seq=9),),
    ),
    detail=DETAIL,
)


def state(*, num_restarts: int = 0, detail: dict[str, Any] | None = None, **changes: Any) -> ShardState:
    """Return a shard's state with some fields of its sample, or of the sample's detail, changed."""
    sample = dataclasses.replace(SAMPLE, detail=dataclasses.replace(DETAIL, **(detail or {})), **changes)
    return ShardState(shard=sample.shard, address="127.0.0.1:7601", sample=sample, num_restarts=num_restarts)
