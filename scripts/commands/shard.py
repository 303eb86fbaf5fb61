"""The command `headrace shard`: move a shard with a replicated log to another node of its cluster."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Annotated, Any, Literal

import typer

from headrace.paramserver.observe.status_query import StatusAccess
from headrace.paramserver.reading.link import Dial, ShardLink, link_all
from headrace.paramserver.rpc.address import format_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.schemas.errors import ConfigError, UnavailableError
from headrace.schemas.idl import idl
from headrace.scripts.commands.terminal import Access, AsJson, ServerFlag, print_line, with_server_flags

__all__ = ["move_shard", "shard"]

# How long the owner answers nobody at most; it takes some ten milliseconds.
_HOLD_MS = 5000
_CATCH_UP_S = 60.0
_POLL_S = 0.01


@with_server_flags
def shard(
    action: Annotated[Literal["move"], typer.Argument(metavar="move", help="Let another node own the shard.")],
    number: Annotated[int, typer.Argument(metavar="SHARD", help="The shard's number.", min=0, show_default=False)],
    *,
    server: ServerFlag = None,
    to: Annotated[
        str, typer.Option(metavar="NODE", help="A node of which the cluster file says that it has a standby.")
    ],
    as_json: AsJson = False,
    access: Access,
) -> None:
    """Move a shard to a node that has a standby of it.

    First the standby catches up. Then the owner offers it the shard, and answers nobody until it has taken over.
    Trainers and replicas find the shard there. If nobody takes it, the owner goes on after five seconds.

    Raises:
        ConfigError: The server has no such shard, or the node no standby of it.
        UnavailableError: The standby is away or too far behind, or did not take over.
    """
    del action
    moved = asyncio.run(move_shard(access(server, timeout_s=10.0), number, to))
    if as_json:
        print(json.dumps(moved))
    else:
        print_line(
            f"shard {number} is on node {to} at {moved['address']}, in term {moved['term']}; it answered nobody for "
            f"{moved['pause_s'] * 1000:.0f} ms"
        )


async def move_shard(access: StatusAccess, shard: int, node: str) -> dict[str, Any]:
    """Move a shard to a node; return its number, address and term there, and `pause_s`: how long nobody answered.

    Raises as the command. Cancellation: the shard moves or not; if not, its owner goes on.
    """
    dial = access.dial(idl.Role.ADMIN)
    links = await link_all(dial, access.seeds)
    try:
        if shard >= len(links):
            raise ConfigError(f"shard {shard}: the server has shards 0 to {len(links) - 1}")
        hello = await links[shard].refresh()
        place = next(
            (place for place in hello.standbys or () if place.shard == shard and place.node == node),
            None,
        )
        if place is None:
            here = next((place.node for place in hello.shards if place.shard == shard), None)
            where = "it is there" if here == node else "its cluster file gives it no standby there"
            raise ConfigError(f"--to {node}: shard {shard} cannot move to that node: {where}")
        return await _hand_over(dial, links[shard], shard, (place.host, place.port))
    finally:
        await asyncio.gather(*(link.close() for link in links))


async def _hand_over(dial: Dial, owner: ShardLink, shard: int, target: tuple[str, int]) -> dict[str, Any]:
    """Let the standby at an address take a shard over from its owner."""
    client, _ = await dial.connect(*target)
    async with client:
        await _catch_up(client, owner)
    began_s, to = time.monotonic(), format_address(*target)
    offer = await owner.move_shard(idl.MoveShardRequest(shard=shard, to=to, hold_ms=_HOLD_MS))
    hello = await _wait_open(dial, target, offer.term)
    return {"shard": shard, "address": to, "term": hello.term, "pause_s": time.monotonic() - began_s}


async def _catch_up(standby: ParamServerClient, owner: ShardLink) -> None:
    """Wait until a standby has what its owner had a moment ago."""
    wanted = (await owner.status()).log_seq
    deadline_s = time.monotonic() + _CATCH_UP_S
    while (applied := (await standby.status()).applied_seq) < wanted:
        if time.monotonic() > deadline_s:
            raise UnavailableError(
                f"the standby at {standby.address} is {wanted - applied} records behind after {_CATCH_UP_S:.0f} s; the "
                "shard stays where it is"
            )
        await asyncio.sleep(_POLL_S)


async def _wait_open(dial: Dial, target: tuple[str, int], term: int) -> Any:
    """Return the hello of a shard that has opened in a higher term."""
    deadline_s = time.monotonic() + _HOLD_MS / 1000
    while True:
        try:
            client, hello = await dial.connect(*target)
            await client.close()
            if hello.shard >= 0 and (hello.term or 0) > term:
                return hello
        except UnavailableError:
            pass
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"the standby at {format_address(*target)} has not taken over; the owner goes on")
        await asyncio.sleep(_POLL_S)
