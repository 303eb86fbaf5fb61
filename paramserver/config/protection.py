"""What protects a server, as its settings say: TLS, a token, or an address that only this machine reaches."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from headrace.paramserver.config.server_config import ShardSettings
from headrace.paramserver.rpc.security import AccessPolicy, load_token, server_tls_context
from headrace.schemas.errors import ConfigError

__all__ = ["Protection"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Protection:
    """TLS and token of a server, loaded.

    Attributes:
        ssl_context: For TLS; None without.
        access: What a client must show.
        is_complete: Only clients that have shown something may call, and nobody can listen in: the server may be
            reached from other machines.
    """

    ssl_context: ssl.SSLContext | None
    access: AccessPolicy
    is_complete: bool

    @classmethod
    def load(cls, settings: ShardSettings, environ: Mapping[str, str]) -> Self:
        """Return what the settings name.

        Args:
            settings: Of the server or of a shard.
            environ: Where a token may be, under `HEADRACE_TOKEN`.

        Raises:
            ConfigError: A file is missing, unfit or lacks its counterpart.
        """
        certificate, key, authority = settings.tls_certificate, settings.tls_key, settings.tls_client_authority
        if (certificate is None) != (key is None):
            raise ConfigError("--tls-certificate and --tls-key go together; only one of them is given")
        context = None
        if certificate is not None and key is not None:
            context = server_tls_context(certificate=certificate, key=key, client_authority=authority)
        elif authority is not None:
            raise ConfigError("--tls-client-authority needs --tls-certificate and --tls-key")
        token = load_token(path=settings.token_file, environ=environ)
        return cls(
            ssl_context=context,
            access=AccessPolicy(token),
            is_complete=context is not None and (token is not None or authority is not None),
        )
