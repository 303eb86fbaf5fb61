"""Asking every shard of a running server for its status, and the flags that say how to get in."""

from __future__ import annotations

import asyncio
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from headrace.paramserver.config.server_config import DEFAULT_PORT
from headrace.paramserver.metrics.metrics_families import ShardState
from headrace.paramserver.metrics.metrics_sample import ShardSample
from headrace.paramserver.reading.shard_link import Dial
from headrace.paramserver.rpc.address import format_address, parse_address
from headrace.paramserver.rpc.security import Token, client_tls_context, load_token
from headrace.paramserver.rpc.shard_map import shard_map
from headrace.schemas.errors import HeadraceError

__all__ = [
    "DEFAULT_ADDRESS",
    "AddressArgument",
    "AuthorityFlag",
    "CertificateFlag",
    "KeyFlag",
    "ShardAnswer",
    "StatusAccess",
    "TimeoutFlag",
    "TlsFlag",
    "TokenFlag",
    "ask_shards",
]

DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"
AddressArgument = Annotated[
    str, typer.Argument(metavar="ADDRESS", help="Host and port of any shard.", show_default=True)
]
TimeoutFlag = Annotated[
    float, typer.Option(help="How long to wait for each shard, seconds.", min=0.1, metavar="SECONDS")
]
TlsFlag = Annotated[
    bool, typer.Option("--tls", help="Speak TLS; implied by the other --tls options.", show_default=False)
]
AuthorityFlag = Annotated[
    Path | None,
    typer.Option(
        help="Speak TLS, and trust the authorities in this PEM file, not the system's.",
        metavar="FILE",
        show_default=False,
    ),
]
CertificateFlag = Annotated[
    Path | None, typer.Option(help="Our certificate chain, for mutual TLS.", metavar="FILE", show_default=False)
]
KeyFlag = Annotated[
    Path | None, typer.Option(help="Our certificate's private key.", metavar="FILE", show_default=False)
]
TokenFlag = Annotated[
    Path | None, typer.Option(help="File with the token. Also HEADRACE_TOKEN.", metavar="FILE", show_default=False)
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardAnswer:
    """What one shard has answered: `reply` is the IDL's `StatusReply`, or None with the reason in `error`."""

    shard: int
    address: str
    reply: Any = None
    error: str | None = None

    @property
    def state(self) -> ShardState:
        """The same, as what finds problems wants it."""
        sample = None if self.reply is None else ShardSample.of_reply(self.reply)
        return ShardState(shard=self.shard, address=self.address, sample=sample, error=self.error)


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusAccess:
    """Where a server is and how to get in.

    Attributes:
        host: Of any shard.
        port: Of that shard.
        ssl_context: For TLS.
        token: For a server that asks for one.
        timeout_s: For each shard, seconds.
    """

    host: str
    port: int
    ssl_context: ssl.SSLContext | None
    token: Token | None
    timeout_s: float

    @classmethod
    def load(
        cls,
        address: str,
        *,
        timeout_s: float,
        tls: bool = False,
        tls_authority: Path | None = None,
        tls_certificate: Path | None = None,
        tls_key: Path | None = None,
        token_file: Path | None = None,
    ) -> Self:
        """Return what flags and the environment say.

        Raises:
            ConfigError: The address is none, or a file cannot be used.
        """
        host, port = parse_address(address, default_port=DEFAULT_PORT)
        has_tls = tls or any((tls_authority, tls_certificate, tls_key))
        context = None
        if has_tls:
            context = client_tls_context(authority=tls_authority, certificate=tls_certificate, key=tls_key)
        return cls(
            host=host,
            port=port,
            ssl_context=context,
            token=load_token(path=token_file, environ=os.environ),
            timeout_s=timeout_s,
        )


async def ask_shards(access: StatusAccess) -> list[ShardAnswer]:
    """Learn the shards from one of them, then ask each; return their answers by shard.

    Raises:
        HeadraceError: Nobody answers at the address, or not to us.

    Cancellation: harmless.
    """
    dial = Dial(ssl_context=access.ssl_context, server_hostname=None, token=access.token, timeout_s=access.timeout_s)
    client, hello = await dial.connect(access.host, access.port)
    await client.close()
    places = shard_map(hello, access.host, access.port)
    return list(await asyncio.gather(*(_ask(shard, *place, dial) for shard, place in enumerate(places))))


async def _ask(shard: int, host: str, port: int, dial: Dial) -> ShardAnswer:
    address = format_address(host, port)
    try:
        client, _ = await dial.connect(host, port)
        async with client:
            reply = await client.status(timeout_s=dial.timeout_s)
    except HeadraceError as exc:
        return ShardAnswer(shard=shard, address=address, error=str(exc))
    return ShardAnswer(shard=shard, address=address, reply=reply)
