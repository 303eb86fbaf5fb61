"""Settings of every process that answers Thrift clients, a shard or a replica."""

# ruff: noqa: RUF009 (`setting` returns a dataclass field, which the linter cannot know)

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from headrace.paramserver.rpc.admission import ServerLimits
from headrace.paramserver.system.settings import (
    check,
    count_setting,
    path_setting,
    seconds_setting,
    size_setting,
    switch_setting,
)
from headrace.schemas.errors import ConfigError

__all__ = ["ThriftSettings"]

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
_MAX_BYTES = 2**50
_DAY_S = 86400


@dataclass(frozen=True, kw_only=True, slots=True)
class ThriftSettings:
    """What clients may send, and what they must show.

    Each field's `help` says what it does and costs, its `kind` the unit; the help page shows both.
    """

    max_frame_bytes: int = size_setting(
        64 * _MIB, 64 * _KIB, _GIB, "Longest request or reply. A connection may hold a buffer of this size."
    )
    max_client_bytes: int = size_setting(
        256 * _MIB, 64 * _KIB, _MAX_BYTES, "Bytes of requests that one client may have unanswered."
    )
    max_client_requests: int = count_setting(256, 1, 8192, "Requests that one client may have unanswered.")
    max_connections: int = count_setting(
        12_000, 1, 1_000_000, "Connections that a process lets in. An idle one costs a file descriptor and some KiB."
    )
    max_inflight_bytes: int = size_setting(
        _GIB, 64 * _KIB, _MAX_BYTES, "Memory a process for requests of all clients that are read and not answered."
    )
    idle_timeout_s: float = seconds_setting(
        600.0, 0, 30 * _DAY_S, "Close a connection that has been without a request this long; 0 never does."
    )
    drain_s: float = seconds_setting(
        10.0, 0, 3600, "How long a stopping process goes on answering the requests that it has begun."
    )
    tls_certificate: Path | None = path_setting(
        None, "PEM file with the certificate chain to show clients; with it, only TLS is spoken."
    )
    tls_key: Path | None = path_setting(None, "PEM file with the certificate's private key.")
    tls_client_authority: Path | None = path_setting(
        None, "PEM file with authorities; every client must show a certificate of theirs (mutual TLS)."
    )
    token_file: Path | None = path_setting(
        None, "File with the token that clients must show, readable by its owner alone. Also HEADRACE_TOKEN."
    )

    insecure_bind: bool = switch_setting(
        False,
        "Listen beyond loopback, though anyone who reaches the port may then read and write, and nodes of a cluster "
        "show each other their token without TLS.",
    )

    # Settings of a server only; a replica's readers have one token.
    writer_token_file: Path | None = None
    reader_token_file: Path | None = None

    def __post_init__(self) -> None:
        check(self)
        for smaller, larger in itertools.pairwise(("max_frame_bytes", "max_client_bytes", "max_inflight_bytes")):
            self._check_order(smaller, larger)

    def _check_order(self, smaller: str, larger: str) -> None:
        if getattr(self, smaller) > getattr(self, larger):
            raise ConfigError(f"{larger} is less than {smaller}: no request of the largest size would fit")

    @property
    def limits(self) -> ServerLimits:
        """Limits of the Thrift server."""
        return ServerLimits(
            max_frame_bytes=self.max_frame_bytes,
            max_client_bytes=self.max_client_bytes,
            max_client_requests=self.max_client_requests,
            max_inflight_bytes=self.max_inflight_bytes,
            max_connections=self.max_connections,
            idle_timeout_s=self.idle_timeout_s,
        )
