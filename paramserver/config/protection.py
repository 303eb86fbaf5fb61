"""How a server is protected: TLS, tokens, or an address that only this machine reaches."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from headrace.paramserver.rpc.security import AccessPolicy, Token, load_token, server_tls_context
from headrace.schemas.errors import ConfigError
from headrace.schemas.idl import idl

__all__ = ["Protection"]


class _ProtectionSettings(Protocol):
    """The settings that protect a process, as `ShardSettings` and a replica's settings have them."""

    @property
    def tls_certificate(self) -> Path | None: ...
    @property
    def tls_key(self) -> Path | None: ...
    @property
    def tls_client_authority(self) -> Path | None: ...
    @property
    def token_file(self) -> Path | None: ...
    @property
    def writer_token_file(self) -> Path | None: ...
    @property
    def reader_token_file(self) -> Path | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Protection:
    """TLS and tokens of a server, loaded."""

    ssl_context: ssl.SSLContext | None  # None without TLS
    access: AccessPolicy  # what a client must show
    is_complete: bool  # clients must authenticate and nobody can eavesdrop, so other machines may reach the server

    @classmethod
    def load(cls, settings: _ProtectionSettings, environ: Mapping[str, str]) -> Self:
        """Load the files that the settings name; a token may also be in the environment's `HEADRACE_TOKEN`.

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


def _load_tokens(settings: _ProtectionSettings, environ: Mapping[str, str]) -> dict[int, Token] | None:
    """Return the token of each role that has one; None if clients need none."""
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
