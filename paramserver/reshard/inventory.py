"""What a plan starts from: nodes, shards, partitions and measured speeds, all as numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from headrace.schemas.errors import RequestError

__all__ = ["FOLLOWABLE", "Cluster", "Floats", "Goal", "Loads", "Node", "Shard", "drain", "sum_floats"]

Floats = npt.NDArray[np.float64]
FOLLOWABLE = 0.9
"""Share of a rate that updates may take: with less than a tenth to spare, to follow takes longer than ten copies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A host with one disk.

    Attributes:
        name: As in the cluster file; it differs from the others'.
        rack: Nodes of one rack may be lost together.
        free_bytes: What may be written to the disk beyond today's, ≥ 0. Leave the reserve for logs and compaction out.
        read_bytes_s: Of the disk, > 0.
        write_bytes_s: Of the disk, > 0.
        num_cores: Processors, which its shards share, ≥ 1.
    """

    name: str
    rack: str = ""
    free_bytes: int
    read_bytes_s: float
    write_bytes_s: float
    num_cores: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A shard, its place and its caps.

    Attributes:
        node: Index in `Cluster.nodes`.
        max_memory_bytes: Of its rows, by `Cluster.memory_bytes_per_row`, ≥ 0.
        max_updates_s: Rows a second that may be sent to it, ≥ 0.
    """

    node: int
    max_memory_bytes: float = inf
    max_updates_s: float = inf


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cluster:
    """All nodes and shards, and what was measured on them.

    Attributes:
        nodes: By index.
        shards: By number.
        link_bytes_s: float64[nodes, nodes], > 0: from a row's node to a column's. On the diagonal: within a node; `inf`
            where only its disk counts.
        apply_rows_s: Rows a second that a shard applies when it does nothing else, > 0.
        round_trip_s: Of a request between two nodes, ≥ 0.
        follow_lag_s: How far a follower that has caught up is behind, ≥ 0.
        stage_overhead_s: What a stage takes beside its moves: to begin, and to be found at its end, ≥ 0.
        scan_bytes_s: At which one processor reads through a shard's store, > 0.
        checkpoint_s: To open a store as of a record, ≥ 0.
        memory_bytes_per_row: That a shard holds for each row, ≥ 0.
        max_rack_share: The largest part of all bytes that one rack may hold, above 0 to 1.
    """

    nodes: tuple[Node, ...]
    shards: tuple[Shard, ...]
    link_bytes_s: Floats
    apply_rows_s: float
    round_trip_s: float
    follow_lag_s: float
    stage_overhead_s: float = 0.0
    scan_bytes_s: float = inf
    checkpoint_s: float = 0.0
    memory_bytes_per_row: float = 0.0
    max_rack_share: float = 1.0

    def __post_init__(self) -> None:
        """Raises RequestError: a number is out of range, a name occurs twice, or sizes differ."""
        twice = [name for name, count in Counter(node.name for node in self.nodes).items() if count > 1]
        speeds = [self.apply_rows_s, self.scan_bytes_s]
        speeds += [rate for node in self.nodes for rate in (node.read_bytes_s, node.write_bytes_s, node.num_cores)]
        rest = [self.round_trip_s, self.follow_lag_s, self.stage_overhead_s, self.memory_bytes_per_row]
        rest.append(self.checkpoint_s)
        rest += [node.free_bytes for node in self.nodes]
        rest += [cap for shard in self.shards for cap in (shard.max_memory_bytes, shard.max_updates_s)]
        if twice:
            raise RequestError(f"node {twice[0]} occurs twice")
        if self.link_bytes_s.shape != (len(self.nodes), len(self.nodes)):
            raise RequestError(f"{len(self.nodes)} nodes need as many rows and columns of link_bytes_s")
        if not (self.link_bytes_s > 0).all() or not all(speed > 0 for speed in speeds):
            raise RequestError("each speed of link, disk, applying and scanning, and each num_cores, must be above 0")
        if not all(number >= 0 for number in rest) or not 0 < self.max_rack_share <= 1:
            raise RequestError(
                "caps, times and free bytes must be at least 0, and max_rack_share above 0 and at most 1"
            )
        if wrong := [shard.node for shard in self.shards if not 0 <= shard.node < len(self.nodes)]:
            raise RequestError(f"a shard is on node {wrong[0]} of {len(self.nodes)}")

    @property
    def node_of_shard(self) -> npt.NDArray[np.int64]:
        """Index of each shard's node, int64[shards]."""
        return np.array([shard.node for shard in self.shards], np.int64)

    def bytes_s(self) -> Floats:
        """Return float64[nodes, nodes]: the slowest part of the way of a copy from a row's node to a column's."""
        read = np.array([node.read_bytes_s for node in self.nodes])
        write = np.array([node.write_bytes_s for node in self.nodes])
        return np.asarray(np.minimum(self.link_bytes_s, np.minimum(read[:, None], write[None, :])), np.float64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Loads:
    """The partitions as they are, and what was measured of each.

    Attributes:
        owner: int64[partitions], a shard's number.
        size_bytes: int64[partitions], ≥ 0; on its shard's disk.
        num_rows: int64[partitions], ≥ 0.
        updates_s: float64[partitions], ≥ 0; rows a second.
    """

    owner: npt.NDArray[np.int64]
    size_bytes: npt.NDArray[np.int64]
    num_rows: npt.NDArray[np.int64]
    updates_s: Floats

    def __post_init__(self) -> None:
        """Raises RequestError: sizes differ, or a number is negative or not finite."""
        arrays = (self.owner, self.size_bytes, self.num_rows, self.updates_s)
        if len({array.shape for array in arrays}) > 1 or self.owner.ndim != 1 or not self.owner.size:
            raise RequestError("owner, size_bytes, num_rows and updates_s must have one entry a partition")
        if not all((array >= 0).all() and np.isfinite(array).all() for array in arrays):
            raise RequestError("owner, size_bytes, num_rows and updates_s must be finite and at least 0")

    @property
    def row_bytes(self) -> Floats:
        """Mean bytes of a row of each partition, float64[partitions]; 0 where there is none."""
        return self.size_bytes / np.maximum(self.num_rows, 1) * (self.num_rows > 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """Who shall own the partitions.

    Attributes:
        shards: Numbers of the shards that own some afterwards, ascending. All others end empty.
        balance: What is evened out: `bytes`, `rows` or `updates`.
        tolerance: How far a shard may be from the mean, as a part of it, ≥ 0. A mean partition is always allowed.
        evens_out: Bring every shard of `shards` within the tolerance. If not, they only take what the others must give.
    """

    shards: tuple[int, ...]
    balance: str = "bytes"
    tolerance: float = 0.05
    evens_out: bool = True

    def __post_init__(self) -> None:
        """Raises RequestError: no shards, one twice or out of order, an unknown balance, or a negative tolerance."""
        if not self.shards or list(self.shards) != sorted(set(self.shards)):
            raise RequestError(f"the shards must be some, ascending, each once: {list(self.shards)}")
        if self.balance not in {"bytes", "rows", "updates"}:
            raise RequestError(f"balance is bytes, rows or updates, not {self.balance}")
        if not self.tolerance >= 0:
            raise RequestError(f"tolerance must be at least 0, not {self.tolerance}")


def drain(cluster: Cluster, loads: Loads, node: str, *, balance: str = "bytes") -> Goal:
    """Return the goal to empty a node: the shards that own something elsewhere take what its shards have.

    Raises:
        RequestError: There is no such node, or no shard elsewhere owns anything.
    """
    names = [each.name for each in cluster.nodes]
    if node not in names:
        raise RequestError(f"there is no node {node}; there are {', '.join(names)}")
    owners = np.unique(loads.owner).tolist()
    rest = tuple(shard for shard in owners if names[cluster.shards[shard].node] != node)
    if not rest:
        raise RequestError(f"node {node} cannot be drained: no other node has a shard that owns partitions")
    return Goal(shards=rest, balance=balance, evens_out=False)


def sum_floats(group: npt.NDArray[np.int64], values: Floats, num_groups: int) -> Floats:
    """Return each group's sum, float64[groups], always in the order of the values."""
    return np.bincount(group, values, num_groups).astype(np.float64)
