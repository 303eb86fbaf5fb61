"""Ask every shard of a running server for its status; the flags that say how to connect."""

from __future__ import annotations

import asyncio
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from headrace.paramserver.observe.sample import ShardSample, ShardState
from headrace.paramserver.reading.link import Dial, ShardLink
from headrace.paramserver.rpc.address import DEFAULT_PORT, Address, format_address, parse_addresses
from headrace.paramserver.rpc.security import Token, client_tls_context, load_token
from headrace.paramserver.rpc.shard_places import ShardPlaces
from headrace.schemas.errors import HeadraceError
from headrace.schemas.idl import idl

__all__ = [
    "DEFAULT_ADDRESS",
    "AddressArgument",
    "AuthorityFlag",
    "CertificateFlag",
    "KeyFlag",
    "StatusAccess",
    "TimeoutFlag",
    "TlsFlag",
    "TokenFlag",
    "ask_shards",
]

DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"
AddressArgument = Annotated[
    str,
    typer.Argument(metavar="ADDRESS", help="Host and port of any shard, or several with commas.", show_default=True),
]
TimeoutFlag = Annotated[float, typer.Option(help="Timeout for each shard, seconds.", min=0.1, metavar="SECONDS")]
TlsFlag = Annotated[bool, typer.Option("--tls", help="Use TLS; the other --tls options imply it.", show_default=False)]


def _file_option(text: str) -> Any:
    return typer.Option(help=text, metavar="FILE", show_default=False)


AuthorityFlag = Annotated[Path | None, _file_option("Use TLS and trust only the authorities in this PEM file.")]
CertificateFlag = Annotated[Path | None, _file_option("Our certificate chain, for mutual TLS.")]
KeyFlag = Annotated[Path | None, _file_option("Our certificate's private key.")]
TokenFlag = Annotated[Path | None, _file_option("File with the token. Also HEADRACE_TOKEN.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusAccess:
    """How to reach a server: by the first of `seeds`, any of its shards, that answers; `timeout_s` is for each."""

    seeds: tuple[Address, ...]
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
        """Return the access that flags and the environment describe.

        Raises:
            ConfigError: The address is invalid, or a file cannot be used.
        """
        seeds = parse_addresses(address)
        context = None
        if tls or any((tls_authority, tls_certificate, tls_key)):
            context = client_tls_context(authority=tls_authority, certificate=tls_certificate, key=tls_key)
        token = load_token(path=token_file, environ=os.environ)
        return cls(seeds=seeds, ssl_context=context, token=token, timeout_s=timeout_s)

    def dial(self, role: int = idl.Role.READER) -> Dial:
        """Return how to connect in a role."""
        return Dial(
            ssl_context=self.ssl_context, server_hostname=None, token=self.token, timeout_s=self.timeout_s, role=role
        )


async def ask_shards(access: StatusAccess) -> list[ShardState]:
    """Learn all shards from one of them, ask each, and return their states by index.

    Raises:
        HeadraceError: The first shard cannot be reached, or refuses.

    Cancellation: harmless.
    """
    dial = access.dial()
    first = await _first_answer(access, dial)
    places = ShardPlaces.of_hello(first.hello, first.host, first.port)
    asked = list(places.addresses)
    states = list(await asyncio.gather(*(_ask(shard, places, dial) for shard in range(len(places)))))
    # A shard that has moved is where the others say by now.
    moved = [shard for shard, address in enumerate(places.addresses) if address != asked[shard]]
    for shard, state in zip(moved, await asyncio.gather(*(_ask(shard, places, dial) for shard in moved)), strict=True):
        states[shard] = state
    return states


async def _first_answer(access: StatusAccess, dial: Dial) -> ShardLink:
    """Return a link, closed again, to the first seed that has answered."""
    first = ShardLink(dial, *access.seeds[0], others=access.seeds[1:])
    try:
        await first.refresh()
    finally:
        await first.close()
    return first


async def _ask(shard: int, places: ShardPlaces, dial: Dial) -> ShardState:
    host, port = places[shard].address
    address = format_address(host, port)
    try:
        client, _ = await dial.connect(host, port, places=places)
        async with client:
            reply = await client.status(timeout_s=dial.timeout_s)
    except HeadraceError as exc:
        return ShardState(shard=shard, address=address, error=str(exc))
    return ShardState(shard=shard, address=address, sample=ShardSample.of_reply(reply))
