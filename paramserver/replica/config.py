"""Settings of a replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from headrace.schemas.errors import ConfigError

__all__ = ["ReplicaConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaConfig:
    """What a replica keeps and what its lookups see.

    Attributes:
        consistency: `latest` shows each update when it comes. `step` shows whole steps, of all shards and tables at
            once: a lookup waits while one is applied, and updates of a step are in memory twice until it is complete.
        missing: What a lookup of a row that is not there gives: `zeros`, `table_default` (see `defaults`) or `error`.
        defaults: By fqn, `[dim]`; zeros for tables that are not named. With `table_default` only.
        tables: Fqns to keep; None for all, also those that are registered later.
        name: Registers at the server, which keeps log for it while it is away; None does not.
        lease_s: For so long, seconds.
        max_memory_bytes: Tables of all copies together; None for what the machine has free when one is begun.
        max_pending_bytes: A shard that is this far ahead of the others, with a whole step, is not fetched from; bytes.
        snapshot_dir: Where snapshots are put that are fetched; None for a temporary directory.
        fetch_wait_s: How long one fetch waits for something new, seconds.
        timeout_s: For one answer of a shard, seconds.
    """

    consistency: Literal["latest", "step"] = "latest"
    missing: Literal["zeros", "table_default", "error"] = "zeros"
    defaults: Mapping[str, torch.Tensor] = field(default_factory=dict)
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
        for name in ("lease_s", "max_pending_bytes", "fetch_wait_s", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"replica: {name} is {getattr(self, name)}, not above 0")
