"""The inventory of a running server: what its shards measure of themselves, as a plan needs it.

Rows are hashed into partitions, so that all partitions of a server hold as many, up to the root of their number: of
10,000 rows, ±1 %. To count them would read all keys of the store, and a sample tells less than the hash does. So bytes
and rows are the server's, divided by its partitions. Updates are not even where a few rows are hot, and are counted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from headrace.paramserver.reading.link import ShardLink
from headrace.paramserver.reshard.inventory import Cluster, Loads, Node, Shard
from headrace.paramserver.reshard.server_shards import ServerShards
from headrace.schemas.errors import RequestError
from headrace.schemas.idl import idl
from headrace.schemas.partition_map import PartitionMap

__all__ = ["Survey", "look_around"]

# Of a shard that has applied too little to tell: less than the 0.6 million rows of 300 bytes that two cores take.
_ASSUMED_APPLY_ROWS_S = 300_000.0
# Of 10 Gbit/s, where the logs are too short to time a transfer.
_ASSUMED_LINK_BYTES_S = 1.0e9
_LEAST_TIMED_BYTES = 1 << 20
_TIMED_BYTES = 16 << 20
_FOLLOW_LAG_S = 0.05
# Of a store that is too short to tell: half of what one core has been seen to read.
_ASSUMED_SCAN_BYTES_S = 3.0e8
# Coordinators look twice a second.
_STAGE_OVERHEAD_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What a plan starts from.

    Attributes:
        cluster: Nodes and shards. A node is one disk of a machine.
        loads: The partitions.
        notes: What was not measured but assumed, a sentence each.
    """

    cluster: Cluster
    loads: Loads
    notes: tuple[str, ...]


async def look_around(shards: ServerShards, *, link_bytes_s: float | None = None) -> Survey:
    """Ask all shards to measure themselves.

    Links are timed from here: each shard sends the newest records of its log. So run it in the server's network, or
    give `link_bytes_s`, of every link between two nodes.

    Raises:
        UnavailableError: A shard does not answer.
        RequestError: A shard is of a release that does not know partitions.
    """
    hellos = await shards.hellos()
    began_s = time.monotonic()
    known = await shards.partition_map()
    round_trip_s = time.monotonic() - began_s
    request = idl.MeasureShardRequest(server_id=hellos[0].server_id)
    # One at a time: shards of one disk must not measure each other.
    measured = [await link.measure_shard(request) for link in shards.links]
    names = _names([place.node for place in hellos[0].shards], [each.disk for each in measured])
    notes: list[str] = []
    if not all(each.apply_rows_s for each in measured):
        notes.append(f"a shard has applied too little to tell: {_ASSUMED_APPLY_ROWS_S:,.0f} rows/s are assumed")
    # Of the shard that was kept busiest: where rows come few at a time, the price of each write hides the rate.
    apply_rows_s = max(each.apply_rows_s or _ASSUMED_APPLY_ROWS_S for each in measured)
    order = sorted(set(names), key=names.index)
    if link_bytes_s is None:
        speeds = [speed for link in shards.links if (speed := await _time_transfer(link)) is not None]
        link_bytes_s = min(speeds, default=_ASSUMED_LINK_BYTES_S)
        if not speeds and len(order) > 1:
            notes.append(f"the logs are too short to time links: {link_bytes_s:,.0f} bytes/s are assumed")
    links = np.full((len(order), len(order)), link_bytes_s)
    np.fill_diagonal(links, np.inf)
    cluster = Cluster(
        nodes=tuple(
            _node(name, [each for of, each in zip(names, measured, strict=True) if of == name]) for name in order
        ),
        shards=tuple(Shard(node=order.index(name)) for name in names),
        link_bytes_s=links,
        apply_rows_s=apply_rows_s,
        round_trip_s=round_trip_s,
        follow_lag_s=_FOLLOW_LAG_S,
        stage_overhead_s=_STAGE_OVERHEAD_S,
        # Of threads of the lowest priority for a moment: the slowest says more of that moment than of the shard.
        scan_bytes_s=median([each.scan_bytes_s for each in measured if each.scan_bytes_s] or [_ASSUMED_SCAN_BYTES_S]),
        checkpoint_s=median(each.checkpoint_s or 0.0 for each in measured),
    )
    return Survey(cluster=cluster, loads=_loads(known, measured), notes=tuple(notes))


def _loads(known: PartitionMap, measured: list[Any]) -> Loads:
    num = known.num_partitions
    updates = [np.frombuffer(each.updates_s, "<f8") for each in measured]
    if any(len(each) != num for each in updates):
        raise RequestError(f"a shard counts other partitions than the server's {num}")
    return Loads(
        owner=known.owners,
        # At least 1, so that partitions of an empty server are spread too.
        size_bytes=np.full(num, -(-sum(each.store_bytes for each in measured) // num) or 1, np.int64),
        num_rows=np.full(num, -(-sum(each.num_rows for each in measured) // num) or 1, np.int64),
        updates_s=np.sum(updates, axis=0),
    )


def _names(nodes: list[str | None], disks: list[str]) -> list[str]:
    """Return a name for each shard's disk: that of its node in the cluster file, with the disk if it has several."""
    disks_of: dict[str, set[str]] = {}
    for node, disk in zip(nodes, disks, strict=True):
        disks_of.setdefault(node or disk, set()).add(disk)
    return [
        node if node and len(disks_of[node]) == 1 else f"{node}/{disk}" if node else disk
        for node, disk in zip(nodes, disks, strict=True)
    ]


def _node(name: str, measured: list[Any]) -> Node:
    return Node(
        name=name,
        free_bytes=min(each.free_bytes for each in measured),
        read_bytes_s=max(each.read_bytes_s for each in measured),
        write_bytes_s=max(each.write_bytes_s for each in measured),
        num_cores=min(each.num_cores or 1 for each in measured),
    )


async def _time_transfer(link: ShardLink) -> float | None:
    """Return the bytes a second at which a shard sends the newest records of its log; None if they are too few."""
    status = await link.status()
    request = idl.FetchUpdatesRequest(
        server_id=status.server_id, from_seq=max(status.log_seq - 1000, 1), max_bytes=_TIMED_BYTES, wait_ms=0
    )
    try:
        began_s = time.monotonic()
        reply = await link.fetch_updates(request)
        took_s = time.monotonic() - began_s
    except RequestError:
        return None
    size = sum(len(record.header) + len(record.body) for record in reply.records)
    return size / took_s if size >= _LEAST_TIMED_BYTES else None
