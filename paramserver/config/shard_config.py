"""What one shard process is told by its supervisor."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.paramserver.config.server_config import ServerConfig, ShardSettings
from headrace.paramserver.process.machine_memory import machine_memory_bytes

__all__ = ["ShardConfig"]

_MIN_AUTO_CACHE_BYTES = 32 * 2**20
_PATHS = (
    *("directory", "tls_certificate", "tls_key", "tls_client_authority"),
    *("token_file", "writer_token_file", "reader_token_file"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardConfig(ShardSettings):
    """One shard's settings and its place in the server.

    Here `block_cache_bytes` is never 0 when made by `of_server`: the supervisor has looked at the machine.

    Attributes:
        directory: The shard's own directory; it exists.
        shard: Index, 0 to `num_shards` - 1.
        server_id: Identity of the data directory.
        addresses: Host and port of every shard, by index, as clients are told.
    """

    directory: Path
    shard: int
    server_id: str
    addresses: tuple[tuple[str, int], ...]

    @property
    def snapshots_path(self) -> Path:
        """Directory of the server's snapshots: one for all shards, on the same file system as theirs."""
        return self.directory.parent / "snapshots"

    @property
    def num_shards(self) -> int:
        """Number of shards of the server."""
        return len(self.addresses)

    @classmethod
    def of_server(
        cls,
        server: ServerConfig,
        *,
        directory: Path,
        shard: int,
        server_id: str,
        addresses: tuple[tuple[str, int], ...],
    ) -> ShardConfig:
        """Return what a server's configuration means for one of its shards."""
        settings = {field.name: getattr(server, field.name) for field in dataclasses.fields(ShardSettings)}
        if not settings["block_cache_bytes"]:
            share = machine_memory_bytes() // 4 // len(addresses)
            settings["block_cache_bytes"] = max(share, _MIN_AUTO_CACHE_BYTES)
        return cls(directory=directory, shard=shard, server_id=server_id, addresses=addresses, **settings)

    def to_json(self) -> dict[str, Any]:
        """Return a form that `json` can write."""
        return {name: str(v) if isinstance(v, Path) else v for name, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ShardConfig:
        """Return what `to_json` was made of.

        Raises:
            ConfigError: A setting is out of its bounds.
            TypeError: A key is missing or unknown: the supervisor is of another version.
        """
        paths = {name: None if values[name] is None else Path(values[name]) for name in _PATHS}
        addresses = tuple((str(host), int(port)) for host, port in values["addresses"])
        return cls(**{**values, **paths, "addresses": addresses})
