"""Settings of a replica."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

from headrace.paramserver.replica.tables.base import Rows
from headrace.paramserver.replica.tables.slot_rows import Precision, check_precision
from headrace.paramserver.system.object_store import check_object_store_url
from headrace.paramserver.system.text import describe_near
from headrace.schemas.errors import ConfigError
from headrace.schemas.table_names import check_model, is_among, matches, model_of, path_of
from headrace.schemas.tables import TableSpec

if TYPE_CHECKING:
    import torch

__all__ = ["DiskStorage", "MemoryStorage", "ReplicaConfig", "ReplicaSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryStorage:
    """Keep all rows of a table in memory; a lookup is one gather.

    Attributes:
        precision: How rows are kept; None for the replica's `precision`.
    """

    precision: Precision | None = None

    def __post_init__(self) -> None:
        check_precision(self.precision)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskStorage:
    """Keep all rows of a table in a RocksDB of the replica, and the most used rows in memory.

    Attributes:
        memory_bytes: Memory per table, for hot rows and for the table's share of RocksDB's blocks and memtables.
        hot_share: Share of it for hot rows, above 0 and below 1. Looking up a hot row costs one copy; a row in a cached
            block costs about 2 µs, but the block also has the row's neighbors, and no memory goes into hashes.
    """

    memory_bytes: int = 256 << 20
    hot_share: float = 0.5

    def __post_init__(self) -> None:
        if self.memory_bytes <= 0:
            raise ConfigError(f"replica: storage memory_bytes is {self.memory_bytes}, must be above 0")
        if not 0 < self.hot_share < 1:
            raise ConfigError(f"replica: storage hot_share is {self.hot_share}, must be between 0 and 1")

    @property
    def hot_bytes(self) -> int:
        """Memory for a table's hot rows."""
        return int(self.memory_bytes * self.hot_share)

    @property
    def cache_bytes(self) -> int:
        """A table's share of RocksDB's memory."""
        return self.memory_bytes - self.hot_bytes


_IN_MEMORY = MemoryStorage()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaConfig:
    """Settings of an `EmbeddingReplica`. Directories may be given as strings.

    Attributes:
        consistency: `latest` shows each update when it arrives. `step` shows whole steps, in all shards and tables at
            once: a lookup waits while a step is applied, and a step's updates are in memory twice until it is complete.
        missing: What a lookup of a missing row returns: `zeros`, `table_default` (see `defaults`), or `error` to raise.
        defaults: Default rows `[dim]` by fqn, zeros for other tables; with `table_default` only.
        storage: Where tables live, by fqn or by a pattern such as `user.*`. An exact fqn goes before patterns, and the
            first matching pattern counts. Other tables are in memory.
        precision: How rows in memory are kept: `fp32`, `fp16`, `bf16`, or rowwise `int8` or `int4`. Lookups return the
            table's dtype in any case. None, or a precision that saves nothing, keeps the table's dtype.
        disk_dir: Directory of the copies on disk, for this replica alone. It has two copies during a switch. None
            creates a temporary one. A copy starts with hard links to its snapshot's files if both are on one file
            system.
        disk_threads: Threads that read rows for `prefetch`, and help with large lookups.
        model: Model whose tables to keep. None keeps all models' tables; with `step`, those of the only model.
        tables: Tables to keep, by fqn, by path or by a pattern of either; None keeps all, also tables that are
            registered later.
        name: Registers the replica at the server, which then keeps log for it while it is away. None does not.
        lease_s: How long the server keeps that log, seconds.
        max_memory_bytes: Limit for the tables of all copies; None for the machine's free memory when a copy is built.
        build_percent: Processor time that building a new copy may take while another one answers look-ups, in percent
            of one core, 1 to 100. Less leaves look-ups alone, and a switch takes longer.
        max_pending_bytes: With `step`, memory per shard for updates of incomplete steps. A shard that is so far ahead
            of the others is not fetched from. If waiting does not help, the replica builds a new copy aside; a copy
            that lookups do not see yet needs none of this memory.
            Dense tensors take none of it: a copy keeps the visible part of each model and at most eight that follow it.
            A shard that is four dense steps ahead of another is not fetched from, so mostly one or two follow.
        snapshot_dir: Where fetched snapshots are stored; the last one stays. None for a temporary directory.
        object_store: URL of the object store with the server's snapshots. Each copy starts from the newest there, and
            never reads the store or a snapshot of a shard. None starts from what the server has.
        fetch_wait_s: How long one fetch waits for new records, seconds.
        timeout_s: Deadline for one answer of a shard, seconds.
    """

    consistency: Literal["latest", "step"] = "latest"
    missing: Literal["zeros", "table_default", "error"] = "zeros"
    defaults: Mapping[str, torch.Tensor] = field(default_factory=dict)
    storage: Mapping[str, MemoryStorage | DiskStorage] = field(default_factory=dict)
    precision: Precision | None = None
    disk_dir: Path | None = None
    disk_threads: int = 2
    model: str | None = None
    tables: frozenset[str] | None = None
    name: str | None = None
    lease_s: float = 600.0
    max_memory_bytes: int | None = None
    build_percent: int = 50
    max_pending_bytes: int = 256 << 20
    snapshot_dir: Path | None = None
    object_store: str | None = None
    fetch_wait_s: float = 10.0
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if self.consistency not in ("latest", "step"):
            raise ConfigError(f"replica: consistency is {self.consistency!r}, must be latest or step")
        if self.missing not in ("zeros", "table_default", "error"):
            raise ConfigError(f"replica: missing is {self.missing!r}, must be zeros, table_default or error")
        if self.defaults and self.missing != "table_default":
            raise ConfigError("replica: defaults need missing='table_default'")
        if isinstance(self.tables, str):
            raise ConfigError(f"replica: tables is one string, {self.tables!r}; give a set of names")
        if self.model is not None:
            check_model(self.model)
        check_precision(self.precision)
        for pattern, storage in self.storage.items():
            if not isinstance(storage, MemoryStorage | DiskStorage):
                raise ConfigError(f"replica: storage of {pattern!r} is {storage!r}, not MemoryStorage or DiskStorage")
        if self.object_store is not None:
            check_object_store_url(self.object_store)
        for name in ("disk_dir", "snapshot_dir"):
            if isinstance(path := getattr(self, name), str):
                object.__setattr__(self, name, Path(path))
        for name in ("disk_threads", "lease_s", "max_pending_bytes", "fetch_wait_s", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"replica: {name} is {getattr(self, name)}, must be above 0")
        if not 1 <= self.build_percent <= 100:
            raise ConfigError(f"replica: build_percent is {self.build_percent}, must be 1 to 100")

    @property
    def uses_disk(self) -> bool:
        """Whether a table may be on disk."""
        return any(isinstance(storage, DiskStorage) for storage in self.storage.values())

    def wants(self, fqn: str) -> bool:
        """Return whether the replica keeps a table."""
        if self.model is not None and model_of(fqn) != self.model:
            return False
        return self.tables is None or is_among(fqn, self.tables)

    def unmatched(self, fqns: Collection[str]) -> list[str]:
        """Return a line for each name in the settings that no table of the server has, perhaps a misspelled one."""
        lines = []
        models = set(map(model_of, fqns))
        if self.model is not None and self.model not in models:
            lines.append(f"model: {self.model!r} has no table on the server yet; {describe_near(self.model, models)}")
        names_of = {"tables": sorted(self.tables or ()), "storage": list(self.storage), "defaults": list(self.defaults)}
        for setting, names in names_of.items():
            for name in names:
                is_meant = matches if setting != "defaults" else lambda fqn, name: name in _called(fqn)
                if not any(is_meant(fqn, name) for fqn in fqns):
                    lines.append(f"{setting}: {name!r} is no table of the server yet; {describe_near(name, fqns)}")
        return lines

    def storage_of(self, fqn: str) -> MemoryStorage | DiskStorage:
        """Return where a table lives."""
        for name in _called(fqn):
            if name in self.storage:
                return self.storage[name]
        return next((storage for pattern, storage in self.storage.items() if matches(fqn, pattern)), _IN_MEMORY)

    def default_of(self, spec: TableSpec) -> Rows | None:
        """Return the default row of a table, of its `DType.numpy`; None for zeros."""
        default = next((self.defaults[name] for name in _called(spec.fqn) if name in self.defaults), None)
        if default is None:
            return None
        from headrace.kernels.dtypes import TORCH_DTYPES, bits_of  # needs torch, which gave the tensor

        return bits_of(default.to(TORCH_DTYPES[spec.dtype])).view(spec.dtype.numpy)

    def precision_of(self, fqn: str) -> Precision | None:
        """Return the precision setting for a table in memory; None for the table's dtype."""
        storage = self.storage_of(fqn)
        own = storage.precision if isinstance(storage, MemoryStorage) else None
        return own or self.precision


class ReplicaSettings(TypedDict, total=False):
    """The fields of `ReplicaConfig` as keyword arguments."""

    consistency: Literal["latest", "step"]
    missing: Literal["zeros", "table_default", "error"]
    defaults: Mapping[str, torch.Tensor]
    storage: Mapping[str, MemoryStorage | DiskStorage]
    precision: Precision | None
    disk_dir: Path | str | None
    disk_threads: int
    model: str | None
    tables: Collection[str] | None
    name: str | None
    lease_s: float
    max_memory_bytes: int | None
    build_percent: int
    max_pending_bytes: int
    snapshot_dir: Path | str | None
    object_store: str | None
    fetch_wait_s: float
    timeout_s: float


def _called(fqn: str) -> tuple[str, str]:
    """Return the names by which settings may call a table."""
    return fqn, path_of(fqn)
