"""What a supervisor and a shard process say to one another.

Down, on the shard process's stdin: one line of JSON, the `ShardOrder`. Then the pipe stays open: its end tells the
shard process that the supervisor is gone, and by taking a byte that comes now and then its event loop shows that it
runs. Up, on a pipe of its own: a line of JSON for each `ShardReport`. At last the exit code says whether a restart
makes sense.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Self

from headrace.paramserver.config.shard_config import ShardConfig
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
EXIT_ERROR = 1
"""An error that may be gone after a restart."""
EXIT_CONFIG = 2
"""The configuration cannot work; a restart is of no use."""
EXIT_STORAGE = 3
"""The disk failed or holds what it should not; a restart is of no use and may harm."""
EXIT_INTERRUPTED = 130
"""A second signal ended the drain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardOrder:
    """What a shard process gets.

    Attributes:
        config: The shard's configuration.
        socket_fd: Inherited listening socket.
        report_fd: Inherited pipe for reports.
        log_level: As in `ServerConfig`.
        log_format: text or json.
    """

    config: ShardConfig
    socket_fd: int
    report_fd: int
    log_level: str
    log_format: str

    def encode(self) -> bytes:
        """Return the order as one line."""
        fields = {name: getattr(self, name) for name in ("socket_fd", "report_fd", "log_level", "log_format")}
        return json.dumps({"config": self.config.to_json(), **fields}).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Self:
        """Return the order of a line.

        Raises:
            ProtocolError: The line is no order.
            ConfigError: A setting is out of its bounds.
        """
        try:
            values = json.loads(line)
            return cls(**{**values, "config": ShardConfig.from_json(values["config"])})
        except (ValueError, TypeError, KeyError) as exc:
            raise ProtocolError(f"not an order from a supervisor of this version: {exc!r}") from exc


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardReport:
    """What a shard process tells of itself.

    Attributes:
        is_ready: It serves.
        error: The one line that says why it is about to end; None when it is not.
    """

    is_ready: bool = False
    error: str | None = None

    def encode(self) -> bytes:
        """Return the report as one line."""
        return json.dumps({"is_ready": self.is_ready, "error": self.error}).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Self:
        """Return the report of a line.

        Raises:
            ProtocolError: The line is no report.
        """
        try:
            return cls(**json.loads(line))
        except (ValueError, TypeError) as exc:
            raise ProtocolError(f"not a report of a shard process: {line[:80]!r}") from exc
