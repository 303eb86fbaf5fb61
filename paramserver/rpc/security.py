"""Access to a server: TLS contexts, tokens, roles, and the addresses that it may listen on.

A client checks the server's certificate and name; a server with an authority for clients demands a certificate from
each. Tokens are compared in constant time and appear in no message, log line or `repr`. A role includes the ones below
it: an admin may do what a writer may, a writer what a reader may.
"""

from __future__ import annotations

import hmac
import ipaddress
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from headrace.paramserver.rpc.thrift_settings import ThriftSettings
from headrace.schemas.errors import ConfigError, UnauthorizedError
from headrace.schemas.idl import idl

__all__ = [
    "READER_TOKEN_ENV",
    "SERVER_TOKEN_ENV",
    "TOKEN_ENV",
    "WRITER_TOKEN_ENV",
    "AccessPolicy",
    "Protection",
    "Token",
    "check_bind",
    "client_tls",
    "client_tls_context",
    "is_loopback",
    "load_token",
    "node_credentials",
    "role_name",
    "server_tls_context",
]

TOKEN_ENV = "HEADRACE_TOKEN"
WRITER_TOKEN_ENV = "HEADRACE_WRITER_TOKEN"
READER_TOKEN_ENV = "HEADRACE_READER_TOKEN"
SERVER_TOKEN_ENV = "HEADRACE_SERVER_TOKEN"
"""Environment variable with the token that a replica shows the server, if its clients show another one."""
_MIN_TOKEN_CHARS = 16
_MAX_TOKEN_CHARS = 4096
# Least role of each method; methods that are not listed need an admin.
_ROLE_OF_METHOD = {
    "getEmbeddings": idl.Role.READER,
    "findRows": idl.Role.READER,
    "status": idl.Role.READER,
    "fetchUpdates": idl.Role.READER,
    "digestRows": idl.Role.READER,
    "fetchSnapshot": idl.Role.READER,
    "createSnapshot": idl.Role.ADMIN,
    "finishSnapshot": idl.Role.ADMIN,
    "expireRows": idl.Role.ADMIN,
    "promoteShard": idl.Role.ADMIN,
    "setEmbeddings": idl.Role.WRITER,
}


def role_name(role: int | None) -> str:
    """Return a role's name for messages."""
    return "nobody" if role is None else str(idl.Role._VALUES_TO_NAMES.get(role, f"role {role}")).lower()


class Token:
    """A secret that clients show; its `repr` hides it."""

    __slots__ = ("_may_go_plain", "_secret")

    def __init__(self, secret: str, *, may_go_plain: bool = False) -> None:
        """Keep a secret of 16 to 4096 printable ASCII characters without spaces.

        With `may_go_plain`, clients show it to other machines without TLS too.

        Raises:
            ConfigError: The secret is something else; the message does not repeat it.
        """
        if not _MIN_TOKEN_CHARS <= len(secret) <= _MAX_TOKEN_CHARS or not all(33 <= ord(c) <= 126 for c in secret):
            raise ConfigError(
                f"a token must have {_MIN_TOKEN_CHARS} to {_MAX_TOKEN_CHARS} printable ASCII characters without spaces"
            )
        self._secret, self._may_go_plain = secret, may_go_plain

    def matches(self, shown: str | None) -> bool:
        """Return whether a client showed this token, in constant time."""
        # Cut where no token is as long: strangers show texts of 64 KiB, and comparing takes as long as what is shown.
        text = (shown or "")[: _MAX_TOKEN_CHARS + 1]
        return hmac.compare_digest(self._secret.encode(), text.encode("utf-8", "surrogatepass"))

    def reveal(self, server: str, *, is_private: bool) -> str:
        """Return the secret, for the hello to a `server` and nothing else.

        Args:
            server: Its address, for messages.
            is_private: Nobody can read along: the connection has TLS, or does not leave this machine.

        Raises:
            UnauthorizedError: Somebody could read it on the way, and nobody has accepted that.
        """
        if not (is_private or self._may_go_plain):
            raise UnauthorizedError(
                f"the token is not sent to {server} without TLS, where others could read it on its way: turn TLS on, "
                "or accept the risk with --insecure-token, in Python insecure_token (docs/security.md)"
            )
        return self._secret

    def equals(self, other: Token) -> bool:
        """Return whether two tokens have the same secret."""
        return self.matches(other._secret)

    def __repr__(self) -> str:
        return "Token(…)"


def load_token(
    *,
    path: Path | None,
    environ: Mapping[str, str],
    insecure_token: bool = False,
    variables: Sequence[str] = (TOKEN_ENV,),
) -> Token | None:
    """Return the token in a file, else in the environment, else None.

    The file holds only the token; white space around it is ignored.

    Args:
        path: The file.
        environ: The environment.
        insecure_token: Clients show the token to other machines without TLS too.
        variables: Names of environment variables; the first that is set counts. By default `HEADRACE_TOKEN`.

    Raises:
        ConfigError: The file cannot be read, others may read it, or its contents are no token.
    """
    if path is None:
        for variable in variables:
            if secret := environ.get(variable):
                return _token_of(secret, variable, may_go_plain=insecure_token)
        return None
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"token file {path}: others may read it; chmod 600 {path}")
        secret = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"token file {path}: {exc}") from exc
    return _token_of(secret, f"token file {path}", may_go_plain=insecure_token)


def _token_of(secret: str, source: str, *, may_go_plain: bool) -> Token:
    try:
        return Token(secret, may_go_plain=may_go_plain)
    except ConfigError as exc:
        raise ConfigError(f"{source}: {exc}") from exc


class AccessPolicy:
    """What each role must show, and which methods it may call."""

    def __init__(self, tokens: Mapping[int, Token] | Token | None = None) -> None:
        """Require tokens.

        Args:
            tokens: One token for all roles; or tokens by `Role`, where a higher role's also opens the lower ones and a
                role without any is refused; or None to require nothing.
        """
        if isinstance(tokens, Token):
            tokens = {int(idl.Role.ADMIN): tokens}
        self._tokens = None if tokens is None else dict(tokens)

    def check_knows(self, role: int | None, shown: Iterable[str], *, at_least: int) -> None:
        """Check that a client has shown a token of a role or a higher one among some texts, if tokens are required.

        Raises:
            UnauthorizedError: It has not; the message names the role that it asks for and does not repeat the texts.
        """
        if self._tokens is None:
            return
        texts = list(shown)
        # Compare every token, so that the time taken reveals nothing.
        known = [granted for text in texts for granted, token in self._tokens.items() if token.matches(text)]
        if not known:
            raise _wrong_token(role, texts[0] if texts else None)
        if max(known) < at_least:
            raise UnauthorizedError(
                f"the token is one of a {role_name(max(known))}, and a hello as long needs role "
                f"{role_name(at_least)}: give that role's token (docs/security.md)"
            )

    def check_hello(self, role: int, shown: str | None) -> None:
        """Check that the token of a hello opens the role of that hello.

        Raises:
            UnauthorizedError: It does not; the message does not repeat the token.
        """
        if role not in idl.Role._VALUES_TO_NAMES:
            raise UnauthorizedError(f"there is no role {role}")
        if self._tokens is None:
            return
        # Compare every token, so that the time taken reveals nothing.
        matches = [token.matches(shown) for granted, token in self._tokens.items() if granted >= role]
        if not any(matches):
            raise _wrong_token(role, shown)

    def check_call(self, role: int | None, method: str) -> None:
        """Check that a role may call a method, named as in the IDL; anybody may call hello.

        Raises:
            UnauthorizedError: It may not.
        """
        if method == "hello" or (self._tokens is None and role is None):
            return
        needed = _ROLE_OF_METHOD.get(method, idl.Role.ADMIN)
        if role is None:
            raise UnauthorizedError(f"{method} before hello")
        if role < needed:
            raise UnauthorizedError(
                f"{method} needs role {role_name(needed)}; this client is a {role_name(role)}: give that role's "
                "token (docs/security.md)"
            )


def _wrong_token(role: int | None, shown: str | None) -> UnauthorizedError:
    what = "a token is required" if shown is None else "the token is wrong"
    return UnauthorizedError(
        f"{what} for role {role_name(role)}: give that role's, in HEADRACE_TOKEN or a file (docs/security.md)"
    )


def server_tls_context(*, certificate: Path, key: Path, client_authority: Path | None = None) -> ssl.SSLContext:
    """Return a TLS context for a server; the files are PEM, the key without a passphrase.

    With `client_authority`, every client must show a certificate that one of its authorities has signed (mutual TLS).

    Raises:
        ConfigError: A file is missing or unfit.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_own(context, certificate, key)
    if client_authority is not None:
        _load_authority(context, client_authority)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_tls_context(
    *, authority: Path | None = None, certificate: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """Return a TLS context for a client, which checks the server's certificate and name; the files are PEM.

    Without an `authority` the system's are trusted. A `certificate` and its `key` are for mutual TLS.

    Raises:
        ConfigError: A file is missing or unfit, or only one of `certificate` and `key` is given.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if authority is None:
        context.load_default_certs()
    else:
        _load_authority(context, authority)
    if (certificate is None) != (key is None):
        raise ConfigError("a client's TLS certificate and key go together; only one of them is given")
    if certificate is not None and key is not None:
        _load_own(context, certificate, key)
    return context


def client_tls(
    is_wanted: bool, *, authority: Path | None, certificate: Path | None, key: Path | None
) -> ssl.SSLContext | None:
    """Return a client's TLS context if TLS `is_wanted` or a file for it is given, else None."""
    if not (is_wanted or authority or certificate or key):
        return None
    return client_tls_context(authority=authority, certificate=certificate, key=key)


def node_credentials(
    settings: ThriftSettings, environ: Mapping[str, str], *, authority: Path | None
) -> tuple[ssl.SSLContext | None, Token | None]:
    """Return how a node of a cluster speaks to the others: with its own certificate, if it has one, and its own token.

    Args:
        settings: The node's; the others speak TLS if it does. With `insecure_bind` nodes may do without, and then show
            each other their token all the same.
        environ: May have the token.
        authority: Those of the other nodes' certificates; None for the system's.

    Raises:
        ConfigError: A file is missing or unfit.
    """
    token = load_token(path=settings.token_file, environ=environ, insecure_token=settings.insecure_bind)
    certificate, key = settings.tls_certificate, settings.tls_key
    if certificate is None:
        if authority is not None:
            raise ConfigError("--tls-peer-authority needs --tls-certificate and --tls-key: all nodes have TLS, or none")
        return None, token
    return client_tls_context(authority=authority, certificate=certificate, key=key), token


def check_bind(host: str, *, is_protected: bool, allow_insecure: bool) -> None:
    """Check that a server may listen on a host.

    It may with mutual TLS, or TLS and a token (`is_protected`), with `--insecure-bind`, or on loopback.

    Raises:
        ConfigError: Anybody who reaches this address could write; the message names the ways out.
    """
    if is_protected or allow_insecure or is_loopback(host):
        return
    raise ConfigError(
        f"refusing to listen on {host or 'all addresses'} without protection: give a TLS certificate and a token "
        "(or a client authority), listen on 127.0.0.1, or accept the risk with --insecure-bind"
    )


def is_loopback(host: str) -> bool:
    """Return whether a name or address is this machine's own, which no other machine reaches."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if address.version == 6 else None
    return (mapped or address).is_loopback


@dataclass(frozen=True, kw_only=True, slots=True)
class Protection:
    """TLS and tokens of a server, loaded."""

    ssl_context: ssl.SSLContext | None  # None without TLS
    access: AccessPolicy  # what a client must show
    is_complete: bool  # clients must authenticate and nobody can eavesdrop, so other machines may reach the server

    @classmethod
    def load(cls, settings: ThriftSettings, environ: Mapping[str, str]) -> Self:
        """Load the files that the settings name; tokens may also be in the environment.

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


def _load_tokens(settings: ThriftSettings, environ: Mapping[str, str]) -> dict[int, Token] | None:
    """Return the token of each role that has one; None if clients need none."""
    token = load_token(path=settings.token_file, environ=environ)
    tokens = {} if token is None else {int(idl.Role.ADMIN): token}
    for role, flag, path, variable in (
        (idl.Role.WRITER, "--writer-token-file", settings.writer_token_file, WRITER_TOKEN_ENV),
        (idl.Role.READER, "--reader-token-file", settings.reader_token_file, READER_TOKEN_ENV),
    ):
        own = load_token(path=path, environ=environ, variables=[variable])
        if own is None:
            continue
        source = variable if path is None else f"{flag} {path}"
        if token is None:
            raise ConfigError(f"{source}: needs --token-file or HEADRACE_TOKEN, with the token that opens every role")
        if any(other.equals(own) for other in tokens.values()):
            raise ConfigError(f"{source}: holds a token that opens a higher role too; give each its own")
        tokens[role] = own
    return tokens or None


def _load_own(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    try:
        # An empty passphrase keeps OpenSSL from asking for one on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
        raise ConfigError(f"TLS certificate {certificate} with key {key}: {exc}") from exc


def _load_authority(context: ssl.SSLContext, authority: Path) -> None:
    try:
        context.load_verify_locations(authority)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"TLS authority {authority}: {exc}") from exc
