"""Where the shards of a server are, as any one of them tells it."""

from __future__ import annotations

from typing import Any

from headrace.paramserver.rpc.address import format_address, is_wildcard
from headrace.schemas.errors import ProtocolError

__all__ = ["shard_map"]


def shard_map(hello: Any, host: str, port: int) -> list[tuple[str, int]]:
    """Return host and port of each shard, in their order.

    Args:
        hello: A shard's `idl.HelloReply`.
        host: By which that shard was reached. Where it names none that leads anywhere, as a server that listens
            everywhere cannot know by which of its addresses a client comes, that is the host of all.
        port: By which it was reached.

    Raises:
        ProtocolError: A shard is missing, or is there twice.
    """
    places = sorted((place.shard, place.host, place.port) for place in hello.shards)
    if [shard for shard, _, _ in places] != list(range(len(places))) or not 0 <= hello.shard < len(places):
        raise ProtocolError(
            f"the server at {format_address(host, port)} has an incomplete shard map: this is shard {hello.shard}, and "
            f"it lists {[shard for shard, _, _ in places]}"
        )
    return [(host if not name or is_wildcard(name) else name, at) for _, name, at in places]
