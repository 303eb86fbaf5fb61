"""Messages between the supervisor and a shard process.

Down, on the process's stdin: the `ShardOrder`, one line of JSON. Then the pipe stays open. Its end means that the
supervisor is gone, and the process shows that its event loop runs by reading a byte now and then. Up, on a second pipe:
each `ShardReport`, one line of JSON. Finally, the exit code says whether a restart makes sense.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Self

from headrace.paramserver.config.server_settings import ShardConfig
from headrace.schemas.errors import ProtocolError

__all__ = [
    "EXIT_CONFIG",
    "EXIT_ERROR",
    "EXIT_INTERRUPTED",
    "EXIT_OK",
    "EXIT_STORAGE",
    "ShardOrder",
    "ShardReport",
]

EXIT_OK = 0
EXIT_ERROR = 1  # a restart may help
EXIT_CONFIG = 2  # the configuration cannot work, so a restart does not help
EXIT_STORAGE = 3  # the disk failed or its data is damaged; a restart does not help and may harm
EXIT_INTERRUPTED = 130  # a second signal ended the drain


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardOrder:
    """What a shard process needs to start: its configuration, the inherited file descriptors, and how to log."""

    config: ShardConfig
    socket_fd: int
    report_fd: int
    log_level: str
    log_format: str

    def encode(self) -> bytes:
        """Return one line."""
        fields = {name: getattr(self, name) for name in ("socket_fd", "report_fd", "log_level", "log_format")}
        return json.dumps({"config": self.config.to_json(), **fields}).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Self:
        """Decode a line; `ProtocolError` if it is not an order, `ConfigError` if a setting is out of range."""
        try:
            values = json.loads(line)
            return cls(**{**values, "config": ShardConfig.from_json(values["config"])})
        except (ValueError, TypeError, KeyError) as exc:
            raise ProtocolError(f"not an order from a supervisor of this version: {exc!r}") from exc


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardReport:
    """A report of a shard process: that it serves, or with `error`, why it is about to end."""

    is_ready: bool = False
    error: str | None = None

    def encode(self) -> bytes:
        """Return one line."""
        return json.dumps({"is_ready": self.is_ready, "error": self.error}).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Self:
        """Decode a line; `ProtocolError` if it is not a report."""
        try:
            return cls(**json.loads(line))
        except (ValueError, TypeError) as exc:
            raise ProtocolError(f"not a report of a shard process: {line[:80]!r}") from exc
