"""Settings of a replica."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import torch

from headrace.paramserver.replica.precision import Precision, check_precision
from headrace.schemas.errors import ConfigError
from headrace.schemas.near_names import describe_near

__all__ = ["DiskStorage", "MemoryStorage", "ReplicaConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryStorage:
    """All rows of a table in memory: each lookup is a gather.

    Attributes:
        precision: What its rows are kept in; None for the replica's `precision`.
    """

    precision: Precision | None = None

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: There is no such precision.
        """
        check_precision(self.precision)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskStorage:
    """All rows of a table in a RocksDB of the replica, those that are looked up often in memory.

    Attributes:
        memory_bytes: For one table: its hot rows, and its part of the blocks that RocksDB keeps and of what it writes.
        hot_share: How much of it is for hot rows, between 0 and 1. A hot row costs a copy; one in a block that is kept
            costs some 2 µs, but such a block has all of the row's neighbours, and no place is wasted on hashes.
    """

    memory_bytes: int = 256 << 20
    hot_share: float = 0.5

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: One is out of range.
        """
        if self.memory_bytes <= 0:
            raise ConfigError(f"replica: storage memory_bytes is {self.memory_bytes}, not above 0")
        if not 0 < self.hot_share < 1:
            raise ConfigError(f"replica: storage hot_share is {self.hot_share}, not between 0 and 1")

    @property
    def hot_bytes(self) -> int:
        """Memory of a table's hot rows."""
        return int(self.memory_bytes * self.hot_share)

    @property
    def cache_bytes(self) -> int:
        """A table's part of RocksDB's memory."""
        return self.memory_bytes - self.hot_bytes


_IN_MEMORY = MemoryStorage()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaConfig:
    """What a replica keeps and what its lookups see. Directories may be strings too, and are paths here.

    Attributes:
        consistency: `latest` shows each update when it comes. `step` shows whole steps, of all shards and tables at
            once: a lookup waits while one is applied, and updates of a step are in memory twice until it is complete.
        missing: What a lookup of a row that is not there gives: `zeros`, `table_default` (see `defaults`) or `error`.
        defaults: By fqn, `[dim]`; zeros for tables that are not named. With `table_default` only.
        storage: Where tables live, by fqn or by a pattern of fqns such as `user.*`: an fqn counts before patterns, of
            patterns the first that matches. Tables that are not named are in memory.
        precision: What rows in memory are kept in: `fp32`, `fp16`, `bf16`, or rowwise `int8` or `int4`; lookups give
            the table's dtype all the same. None keeps the table's dtype, and so does a precision that saves nothing.
        disk_dir: Directory of the copies on disk, of this replica alone; two copies exist during a switch, and with a
            previous copy that is kept. None makes a temporary one. On the file system of the snapshots that are
            loaded, a copy begins with hard links to their files.
        disk_threads: That read rows for `prefetch`, and large lookups together with their caller.
        tables: Fqns to keep; None for all, also those that are registered later.
        name: Registers at the server, which keeps log for it while it is away; None does not.
        lease_s: For so long, seconds.
        max_memory_bytes: Tables of all copies together; None for what the machine has free when one is begun.
        max_pending_bytes: Memory a shard, in `step`, for what has come and is no whole step yet. A shard that is so far
            ahead of the others is not fetched from. Where waiting for others is of no use, the replica begins anew
            aside, and a copy that lookups do not see yet needs none of it.
        snapshot_dir: Where snapshots are put that are fetched, the last of which stays; None for a temporary directory.
        fetch_wait_s: How long one fetch waits for something new, seconds.
        timeout_s: For one answer of a shard, seconds.
    """

    consistency: Literal["latest", "step"] = "latest"
    missing: Literal["zeros", "table_default", "error"] = "zeros"
    defaults: Mapping[str, torch.Tensor] = field(default_factory=dict)
    storage: Mapping[str, MemoryStorage | DiskStorage] = field(default_factory=dict)
    precision: Precision | None = None
    disk_dir: Path | None = None
    disk_threads: int = 2
    tables: frozenset[str] | None = None
    name: str | None = None
    lease_s: float = 600.0
    max_memory_bytes: int | None = None
    max_pending_bytes: int = 256 << 20
    snapshot_dir: Path | None = None
    fetch_wait_s: float = 10.0
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: One is not what it may be.
        """
        if self.consistency not in ("latest", "step"):
            raise ConfigError(f"replica: consistency is {self.consistency!r}, not latest or step")
        if self.missing not in ("zeros", "table_default", "error"):
            raise ConfigError(f"replica: missing is {self.missing!r}, not zeros, table_default or error")
        if self.defaults and self.missing != "table_default":
            raise ConfigError("replica: defaults are for missing='table_default'")
        if isinstance(self.tables, str):
            raise ConfigError(f"replica: tables is one string, {self.tables!r}: give a set of names")
        check_precision(self.precision)
        for pattern, storage in self.storage.items():
            if not isinstance(storage, MemoryStorage | DiskStorage):
                raise ConfigError(f"replica: storage of {pattern!r} is {storage!r}, not MemoryStorage or DiskStorage")
        for name in ("disk_dir", "snapshot_dir"):
            if isinstance(path := getattr(self, name), str):
                object.__setattr__(self, name, Path(path))
        for name in ("disk_threads", "lease_s", "max_pending_bytes", "fetch_wait_s", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"replica: {name} is {getattr(self, name)}, not above 0")

    @property
    def uses_disk(self) -> bool:
        """Whether a table may be on disk."""
        return any(isinstance(storage, DiskStorage) for storage in self.storage.values())

    def wants(self, fqn: str) -> bool:
        """Return whether a table is to be kept."""
        return self.tables is None or fqn in self.tables

    def unmatched(self, fqns: Collection[str]) -> list[str]:
        """Return a line for each name in the settings that no table has, as where one is misspelled."""
        lines = []
        for setting, names in (
            ("tables", sorted(self.tables or ())),
            ("storage", list(self.storage)),
            ("defaults", list(self.defaults)),
        ):
            for name in names:
                is_pattern = setting == "storage" and any(fnmatchcase(fqn, name) for fqn in fqns)
                if name not in fqns and not is_pattern:
                    lines.append(f"{setting}: {name!r} is no table of the server yet; {describe_near(name, fqns)}")
        return lines

    def storage_of(self, fqn: str) -> MemoryStorage | DiskStorage:
        """Return where a table lives."""
        if fqn in self.storage:
            return self.storage[fqn]
        matches = (storage for pattern, storage in self.storage.items() if fnmatchcase(fqn, pattern))
        return next(matches, _IN_MEMORY)

    def precision_of(self, fqn: str) -> Precision | None:
        """Return what the rows of a table in memory are to be kept in; None for their own dtype."""
        storage = self.storage_of(fqn)
        own = storage.precision if isinstance(storage, MemoryStorage) else None
        return own or self.precision
