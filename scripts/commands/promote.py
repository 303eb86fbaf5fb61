"""The command `headrace promote`: let a follower, or a standby of a replicated log, take a server's updates."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from headrace.paramserver.observe.status_query import StatusAccess
from headrace.paramserver.reading.link import Dial, ShardLink, link_all, retry
from headrace.paramserver.rpc.address import Address, format_address, parse_addresses
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.schemas.errors import ConfigError, HeadraceError, RequestError, UnavailableError
from headrace.schemas.idl import idl
from headrace.scripts.commands.terminal import Access, AsJson, ServerFlag, option, print_line, with_server_flags

__all__ = ["promote", "promote_shard"]

# How long the owner takes nothing at most; it takes some ten milliseconds.
_HOLD_MS = 5000
_CATCH_UP_S = 60.0
_POLL_S = 0.01


@with_server_flags
def promote(
    *,
    server: ServerFlag = None,
    shard: Annotated[
        list[int] | None,
        typer.Option("--shard", metavar="N", help="Only this shard. May be repeated.", min=0, show_default="all"),
    ] = None,
    to: Annotated[str | None, option("Of a cluster: the node whose standby takes over.", "NODE")] = None,
    force: Annotated[
        bool,
        option("The source is gone and will not come back: what it acked and the follower lacks is lost.", None),
    ] = False,
    abort: Annotated[
        bool, option("At the source: take updates again, unless the follower has taken over.", None)
    ] = False,
    as_json: AsJson = False,
    access: Access,
) -> None:
    """Let the follower at --server take the updates of the server that it follows, shard by shard.

    First the follower catches up. Then the source offers it the shard, and takes nothing until that is decided.
    Trainers, replicas and other followers find the shard at its new place. The source goes on if the follower declines.

    Raises:
        ConfigError: The server has no such shard, or it follows nobody.
        UnavailableError: The follower or its source is away, or the follower did not take over.
    """
    found = access(server, timeout_s=10.0)
    shards = asyncio.run(_run(found, shard, to, forces=force, aborts=abort))
    if as_json:
        print(json.dumps(shards))
        return
    for each in shards:
        if abort:
            print_line(f"shard {each['shard']} takes updates again at {each['address']}")
        else:
            pause = "" if each["pause_s"] is None else f"; nobody took updates for {each['pause_s'] * 1000:.0f} ms"
            where = f"at {each['address']}" if to is None else f"on node {to} at {each['address']}"
            print_line(f"shard {each['shard']} is {where}, in term {each['term']}{pause}")


async def _run(
    access: StatusAccess, shards: list[int] | None, to: str | None, *, forces: bool, aborts: bool
) -> list[dict[str, Any]]:
    dial = access.dial(idl.Role.ADMIN)
    if forces and to is not None:  # the shards' owners are gone, so any node says where the copies are
        if not shards:
            raise ConfigError("--force --to: name the shards whose owners are gone: --shard N")
        copies = [await _standby_on(dial, access.seeds, shard, to) for shard in shards]
        return [await _force(dial, copy, shard) for copy, shard in zip(copies, shards, strict=True)]
    links = await link_all(dial, access.seeds)
    try:
        for shard in shards or ():
            if shard >= len(links):
                raise ConfigError(f"--shard {shard}: the server has shards 0 to {len(links) - 1}")
        done = []
        for shard in shards or await _those_that_follow(links, is_any=to is not None or aborts):
            link = links[shard]
            if aborts:
                await link.promote_shard(idl.PromoteShardRequest(shard=shard, aborts=True, forces=forces or None))
                done.append({"shard": shard, "address": link.address})
            elif forces:
                done.append(await _force(dial, (link.host, link.port), shard))
            else:
                done.append(await promote_shard(dial, link, shard, to, seeds=access.seeds))
        return done
    finally:
        await asyncio.gather(*(link.close() for link in links))


async def _those_that_follow(links: Sequence[ShardLink], *, is_any: bool) -> Sequence[int]:
    """Return the shards that follow others, or all: a command that has ended in the middle is given again."""
    following = [] if is_any else [link.hello.shard for link in links if (await link.status()).following is not None]
    return following or range(len(links))


async def promote_shard(
    dial: Dial, link: ShardLink, shard: int, node: str | None = None, *, seeds: Sequence[Address] = ()
) -> dict[str, Any]:
    """Let a shard's follower, or its standby on a node, take over; return its number, address, term, and `pause_s`.

    Where the standby is, the shard's owner knows, or one of the `seeds`, if its cluster file is newer. `pause_s` is how
    long nobody took updates, seconds. Raises as the command. Cancellation: the shard is handed over or not; if not, its
    owner goes on.
    """
    hello = await link.refresh()
    if node is not None:
        if any((each.shard, each.node) == (shard, node) for each in hello.shards):
            raise ConfigError(f"--to {node}: shard {shard} is there")
        return await _hand_over(
            dial, link, shard, await _standby_on(dial, ((link.host, link.port), *seeds), shard, node)
        )
    following = (await link.status()).following
    if following is None:
        known = sorted({each.node for each in hello.standbys or () if each.shard == shard and each.node})
        advice = f": name the node of its standby, --to {known[0]}" if known else ""
        raise ConfigError(f"shard {shard} at {link.address} takes updates already, and follows nobody{advice}")
    if following.failure is not None:
        raise UnavailableError(f"shard {shard} at {link.address} does not follow: {following.failure}")
    # They find the shard again if its owner hands it on just now.
    sources = await link_all(dial, parse_addresses(following.source))
    try:
        return await _hand_over(dial, sources[shard], shard, (link.host, link.port))
    finally:
        await asyncio.gather(*(source.close() for source in sources))


async def _standby_on(dial: Dial, seeds: Sequence[Address], shard: int, node: str) -> Address:
    """Return where a shard's standby on a node is, as one of some addresses says; `ConfigError` if none knows of it."""
    why: HeadraceError | None = None
    for seed in seeds:
        try:
            hello = await dial.ask(*seed)
        except UnavailableError as exc:
            why = why or exc
            continue
        for place in hello.standbys or ():
            if (place.shard, place.node) == (shard, node):
                return place.host, place.port
        why = ConfigError(
            f"--to {node}: shard {shard} cannot move to that node: no cluster file of those that were asked gives it a "
            "standby there"
        )
    assert why is not None
    raise why


async def _force(dial: Dial, target: Address, shard: int) -> dict[str, Any]:
    client, _ = await dial.connect(*target)
    async with client:
        term = (await client.promote_shard(idl.PromoteShardRequest(shard=shard, forces=True))).term or 0
    hello = await _wait_open(dial, target, term)
    return {"shard": shard, "address": format_address(*target), "term": hello.term, "pause_s": None}


async def _hand_over(dial: Dial, owner: ShardLink, shard: int, target: Address) -> dict[str, Any]:
    """Let the follower or standby at an address take a shard over from its owner."""
    client, _ = await dial.connect(*target)
    async with client:
        if (await client.status()).following is None:
            raise UnavailableError(
                f"{format_address(*target)} follows nobody, so the shard stays where it is: remove a directory that "
                "was taken over, and it follows"
            )
        await _catch_up(client, owner)
    to, began_s = format_address(*target), 0.0

    async def offer_it() -> Any:
        nonlocal began_s
        began_s = time.monotonic()
        return await owner.promote_shard(idl.PromoteShardRequest(shard=shard, to=to, hold_ms=_HOLD_MS))

    # The source may have handed the shard on just now, where the follower will find it, too.
    offer = await retry(offer_it, patience_s=_HOLD_MS / 1000)
    hello = await _wait_open(dial, target, offer.term or 0)
    return {"shard": shard, "address": to, "term": hello.term, "pause_s": time.monotonic() - began_s}


async def _catch_up(follower: ParamServerClient, owner: ShardLink) -> None:
    """Wait until a follower has what its owner had a moment ago."""
    wanted = (await owner.status()).log_seq
    deadline_s = time.monotonic() + _CATCH_UP_S
    while (has := await _seq_of(follower)) < wanted:
        if time.monotonic() > deadline_s:
            raise UnavailableError(
                f"the copy at {follower.address} is {wanted - has} records behind after {_CATCH_UP_S:.0f} s; the "
                "shard stays where it is"
            )
        await asyncio.sleep(_POLL_S)


async def _seq_of(follower: ParamServerClient) -> int:
    """Return the last record that a follower has."""
    return int((await follower.status()).accepted_seq)


async def _wait_open(dial: Dial, target: tuple[str, int], term: int) -> Any:
    """Return the hello of a shard that has opened in a higher term."""
    deadline_s, why = time.monotonic() + 2 * _HOLD_MS / 1000, ""
    while True:
        try:
            client, hello = await dial.connect(*target)
            async with client:
                following = (await client.status()).following
            if hello.shard >= 0 and following is None and (hello.term or 0) > term:
                return hello
            why = "" if following is None or following.failure is None else f": {following.failure}"
        except (UnavailableError, RequestError):
            pass
        if time.monotonic() > deadline_s:
            raise UnavailableError(
                f"the copy at {format_address(*target)} has not taken over{why}; headrace status says who takes "
                "updates, and headrace promote --abort at the source lets that go on"
            )
        await asyncio.sleep(_POLL_S)
