"""Ask every shard of a running server for its status; the flags that say how to connect."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from headrace.paramserver.config.cluster_file import ClusterFile, ClusterNode
from headrace.paramserver.observe.sample import ShardSample, ShardState
from headrace.paramserver.reading.link import Dial, ShardLink
from headrace.paramserver.rpc.address import DEFAULT_PORT, Address, format_address, parse_addresses, server_in
from headrace.paramserver.rpc.security import Token, client_tls, load_token
from headrace.paramserver.rpc.shard_places import ShardPlace, ShardPlaces
from headrace.schemas.errors import HeadraceError, UnavailableError
from headrace.schemas.idl import idl

__all__ = [
    "DEFAULT_ADDRESS",
    "AuthorityFlag",
    "CertificateFlag",
    "InsecureTokenFlag",
    "KeyFlag",
    "OtherNodes",
    "StatusAccess",
    "TimeoutFlag",
    "TlsFlag",
    "TokenFlag",
    "ask_shards",
]

# A status page that waits for a host that is down must still come within its reader's patience.
_OTHER_TIMEOUT_S = 2.0
_SHARED_S = 1.0
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"
TimeoutFlag = Annotated[float, typer.Option(help="Timeout for each shard, seconds.", min=0.1, metavar="SECONDS")]
TlsFlag = Annotated[bool, typer.Option("--tls", help="Use TLS; the other --tls options imply it.", show_default=False)]


def _file_option(text: str) -> Any:
    return typer.Option(help=text, metavar="FILE", show_default=False)


AuthorityFlag = Annotated[Path | None, _file_option("Use TLS and trust only the authorities in this PEM file.")]
CertificateFlag = Annotated[Path | None, _file_option("Our certificate chain, for mutual TLS.")]
KeyFlag = Annotated[Path | None, _file_option("Our certificate's private key.")]
TokenFlag = Annotated[Path | None, _file_option("File with the token. Also HEADRACE_TOKEN.")]
InsecureTokenFlag = Annotated[
    bool,
    typer.Option(
        "--insecure-token",
        help="Show the token without TLS to other machines too, readable on its way.",
        show_default=False,
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusAccess:
    """How to reach a server: by the first of `seeds`, any of its shards, that answers; `timeout_s` is for each.

    `address` is what they were parsed from.
    """

    address: str
    seeds: tuple[Address, ...]
    ssl_context: ssl.SSLContext | None
    token: Token | None
    timeout_s: float

    @classmethod
    def load(
        cls,
        address: str | None,
        *,
        timeout_s: float,
        tls: bool = False,
        tls_authority: Path | None = None,
        tls_certificate: Path | None = None,
        tls_key: Path | None = None,
        token_file: Path | None = None,
        insecure_token: bool = False,
    ) -> Self:
        """Return the access that flags and the environment describe.

        An address of None stands for the one in `HEADRACE_SERVER`, or else for the default port of this machine.

        Raises:
            ConfigError: The address is invalid, or a file cannot be used.
        """
        if address is None:
            address = server_in(os.environ) or DEFAULT_ADDRESS
        return cls(
            address=address,
            seeds=parse_addresses(address),
            ssl_context=client_tls(tls, authority=tls_authority, certificate=tls_certificate, key=tls_key),
            token=load_token(path=token_file, environ=os.environ, insecure_token=insecure_token),
            timeout_s=timeout_s,
        )

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
    return await _ask_all(range(len(places)), places, dial)


async def _first_answer(access: StatusAccess, dial: Dial) -> ShardLink:
    """Return a link, closed again, to the first seed that has answered."""
    first = ShardLink(dial, *access.seeds[0], others=access.seeds[1:])
    try:
        await first.refresh()
    finally:
        await first.close()
    return first


async def _ask_all(shards: Sequence[int], places: ShardPlaces, dial: Dial) -> list[ShardState]:
    asked = list(places.addresses)
    states = dict(zip(shards, await asyncio.gather(*(_ask(shard, places, dial) for shard in shards)), strict=True))
    # A shard that has moved is where the others say by now.
    moved = [shard for shard in shards if places[shard].address != asked[shard]]
    for shard, state in zip(moved, await asyncio.gather(*(_ask(shard, places, dial) for shard in moved)), strict=True):
        states[shard] = state
    return list(states.values())


async def _ask(shard: int, places: ShardPlaces, dial: Dial) -> ShardState:
    host, port = places[shard].address
    state = ShardState(shard=shard, address=format_address(host, port), node=places[shard].node)
    try:
        client, hello = await dial.connect(host, port, places=places)
        async with client:
            if (hello.server_id, hello.shard) != (places.server_id, shard):
                raise UnavailableError(f"{state.address} is now shard {hello.shard} of server {hello.server_id}")
            reply = await client.status(timeout_s=dial.timeout_s)
    except HeadraceError as exc:
        return replace(state, error=str(exc))
    return replace(state, sample=ShardSample.of_reply(reply))


class OtherNodes:
    """The shards of a cluster that are not on this node, as the node's status page shows them.

    Thread: the event loop's.
    """

    def __init__(
        self,
        cluster: ClusterFile,
        node: ClusterNode,
        credentials: tuple[ssl.SSLContext | None, Token | None],
        *,
        timeout_s: float = _OTHER_TIMEOUT_S,
    ) -> None:
        """Prepare to ask with the `credentials` of the node; `timeout_s` is for each shard."""
        self.node = node.name
        context, token = credentials
        self._dial = Dial(ssl_context=context, server_hostname=None, token=token, timeout_s=timeout_s)
        names = cluster.nodes_of_shards
        self._places = ShardPlaces(
            cluster.server_id,
            (ShardPlace(*address, node=name) for address, name in zip(cluster.addresses, names, strict=True)),
        )
        self._shards = [shard for shard, name in enumerate(names) if name != node.name]
        self._own = node.addresses[node.copies[0]]
        self._lock, self._states, self._asked_s = asyncio.Lock(), list[ShardState](), -math.inf

    async def ask(self) -> list[ShardState]:
        """Return the states of the shards; calls within a second share one answer. Cancellation: harmless."""
        async with self._lock:
            if time.monotonic() - self._asked_s > _SHARED_S:
                self._states = await self._ask_all()
                self._asked_s = time.monotonic()
            return self._states

    async def _ask_all(self) -> list[ShardState]:
        # Our own shard knows which have moved since the file was written; if it is down, those that answer tell.
        with contextlib.suppress(HeadraceError):
            self._places.learn(await self._dial.ask(*self._own), *self._own)
        return await _ask_all(self._shards, self._places, self._dial)
