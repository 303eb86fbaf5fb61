"""What protects a server, as its settings say: TLS, tokens, or an address that only this machine reaches."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from headrace.paramserver.config.server_config import ShardSettings
from headrace.paramserver.rpc.security import AccessPolicy, Token, load_token, server_tls_context
from headrace.schemas.errors import ConfigError
from headrace.schemas.idl import idl

__all__ = ["Protection"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Protection:
    """TLS and tokens of a server, loaded.

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
        tokens = _load_tokens(settings, environ)
        return cls(
            ssl_context=context,
            access=AccessPolicy(tokens),
            is_complete=context is not None and (tokens is not None or authority is not None),
        )


def _load_tokens(settings: ShardSettings, environ: Mapping[str, str]) -> dict[int, Token] | None:
    """Return the token of each role that has one; None when clients need not show any."""
    token = load_token(path=settings.token_file, environ=environ)
    tokens = {} if token is None else {int(idl.Role.ADMIN): token}
    for role, flag, path in (
        (idl.Role.WRITER, "--writer-token-file", settings.writer_token_file),
        (idl.Role.READER, "--reader-token-file", settings.reader_token_file),
    ):
        if path is None:
            continue
        if token is None:
            raise ConfigError(f"{flag} needs --token-file or HEADRACE_TOKEN, with the token that opens every role")
        own = load_token(path=path, environ={})
        assert own is not None
        if any(other.matches(own.reveal()) for other in tokens.values()):
            raise ConfigError(f"{flag} {path}: holds a token that opens a higher role too; give each its own")
        tokens[role] = own
    return tokens or None
