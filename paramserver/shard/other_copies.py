"""Whether other nodes of a cluster have the shards that a node is about to begin without a row."""

from __future__ import annotations

import asyncio
import logging

from headrace.paramserver.config.cluster_file import ClusterFile, ClusterNode
from headrace.paramserver.reading.link import Dial
from headrace.paramserver.rpc.address import format_address
from headrace.paramserver.system.log_lines import fact
from headrace.schemas.errors import ConfigError, HeadraceError

__all__ = ["check_nobody_has"]

_log = logging.getLogger(__name__)


async def check_nobody_has(cluster: ClusterFile, node: ClusterNode, dial: Dial, *, restores: bool = False) -> None:
    """Check, before a node begins with an empty directory, that no other node has a shard that the file gives to it.

    A node that does not answer is logged. One that `restores` its shards may do so although there is a copy of them.

    Raises:
        ConfigError: A node has one, or knows who has, or keeps a copy with rows; the message says what to do.

    Cancellation: harmless.
    """
    others = [other for other in cluster.nodes.values() if other is not node]
    known = await asyncio.gather(*(_ask_node(node, other, cluster.server_id, dial) for other in others))
    for other, (owners, copies) in zip(others, known, strict=True):
        why = None
        for shard, address in owners.items():
            why = f"shard {shard} is at {address}, as node {other.name} says"
        if why is None and copies and not restores:
            seed = format_address(other.host, other.port)
            why = (
                f"node {other.name} has a copy of shard {copies[0]}: let that take over first (headrace promote "
                f"--force --shard {copies[0]} --to {other.name} --server {seed})"
            )
        if why is not None:
            raise ConfigError(
                f"node {node.name} has an empty directory, and {cluster.path} gives it a shard that somebody else has: "
                f"{why}; name the shard under standbys of node {node.name}, and it follows"
            )


async def _ask_node(
    node: ClusterNode, other: ClusterNode, server_id: str, dial: Dial
) -> tuple[dict[int, str], list[int]]:
    """Return where a node's shards are by the word of another one, if not at that node; and its copies with rows."""
    owners: dict[int, str] = {}
    copies: list[int] = []

    async def ask(shard: int) -> bool:
        try:
            client, hello = await dial.connect(*other.addresses[shard])
            async with client:
                status = await client.status(timeout_s=dial.timeout_s)
        except HeadraceError:
            return False
        if hello.server_id != server_id:
            return False
        for place in hello.shards:
            if node.addresses.get(place.shard) not in (None, (place.host, place.port)) and place.shard in node.shards:
                owners[place.shard] = format_address(place.host, place.port)
        if shard in node.shards and status.following is not None and status.accepted_seq:
            copies.append(shard)
        return True

    if not any(await asyncio.gather(*map(ask, other.copies))):
        fact(_log, logging.WARNING, "node does not answer: nobody knows what it has", node=other.name)
    return owners, sorted(copies)
