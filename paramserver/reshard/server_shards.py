"""What a coordinator needs of a server, over connections to its shards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import reduce
from typing import Any, Self

from headrace.paramserver.reading.link import Dial, ShardLink, link_all
from headrace.paramserver.reshard.coordinator import MoveState
from headrace.paramserver.reshard.move_messages import move_to_idl
from headrace.paramserver.rpc.address import Address, format_address
from headrace.schemas.errors import RequestError
from headrace.schemas.idl import idl
from headrace.schemas.move_records import Move
from headrace.schemas.partition_map import PartitionMap

__all__ = ["ServerShards"]

_STATES = {
    idl.MoveState.UNKNOWN: MoveState.UNKNOWN,
    idl.MoveState.UNDER_WAY: MoveState.UNDER_WAY,
    idl.MoveState.DONE: MoveState.DONE,
}


class ServerShards:
    """The `ReshardShards` of a running server; use it with `async with`. Thread: the event loop's.

    Each call is one attempt. Cancellation: harmless, but a change of the reshard may have been made.

    Attributes:
        links: To each shard, by number.
        move_errors: By id, why moves that were asked after do not go on.
    """

    def __init__(self, links: Sequence[ShardLink], dial: Dial) -> None:
        """Use links of the role ADMIN; see `reach`."""
        self.links, self._dial = links, dial
        self.move_errors: dict[str, str] = {}

    @classmethod
    async def reach(cls, dial: Dial, seeds: Sequence[Address]) -> Self:
        """Learn all shards from the first of some that answers; `dial` has the role ADMIN and knows partitions.

        Raises:
            HeadraceError: None can be reached, or it refuses.
        """
        return cls(await link_all(dial, seeds), dial)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.gather(*(link.close() for link in self.links))

    async def load(self) -> bytes | None:
        """Return the reshard that shard 0 keeps; None without one."""
        return await self._keep(None)

    async def save(self, data: bytes | None, *, instead_of: bytes | None) -> None:
        """Let shard 0 keep another reshard, if it has `instead_of` now; raises RequestError if not."""
        await self._keep(idl.ReshardChange(instead_of=instead_of or b"", reshard=data or b""))

    async def _keep(self, change: Any) -> bytes | None:
        request = idl.KeepReshardRequest(server_id=self.links[0].hello.server_id, change=change)
        reply = await self.links[0].keep_reshard(request)
        return bytes(reply.reshard) or None

    async def hellos(self) -> list[Any]:
        """Return each shard's present `idl.HelloReply`, all of which know partitions.

        Raises:
            RequestError: A shard is of a release that does not know partitions.
        """
        hellos = await asyncio.gather(*(link.refresh() for link in self.links))
        for shard, hello in enumerate(hellos):
            if hello.partitions is None:
                raise RequestError(f"shard {shard} is of a release that does not know partitions: upgrade its server")
        return hellos

    async def partition_map(self) -> PartitionMap:
        """Return the map that the shards know together."""
        maps = [PartitionMap.decode(hello.partitions) for hello in await self.hellos()]
        return reduce(PartitionMap.merged, maps)

    async def without_partitions(self) -> list[str]:
        """Return the clients and standbys that do not know partitions: a name or an address each, sorted."""
        statuses = await asyncio.gather(*(link.status() for link in self.links))
        found = {name for status in statuses for name in status.without_partitions or ()}
        standbys = {(place.host, place.port) for link in self.links for place in link.hello.standbys or ()}
        replies = await asyncio.gather(*(self._dial.ask(*address) for address in standbys))
        found |= {
            f"standby at {format_address(*address)}"
            for address, reply in zip(standbys, replies, strict=True)
            if reply.partitions is None
        }
        return sorted(found)

    async def begin(self, move: Move) -> None:
        """Let the move's destination carry it out."""
        await self._ask(move, idl.MoveRequestKind.CARRY_OUT)

    async def abort(self, move: Move) -> None:
        """Ask the move's destination to give it up."""
        await self._ask(move, idl.MoveRequestKind.ABORT)

    async def state_of(self, move: Move) -> MoveState:
        """Return how far the move's destination is."""
        return await self._ask(move, idl.MoveRequestKind.LOOK)

    async def _ask(self, move: Move, kind: int) -> MoveState:
        if not move.destination < len(self.links):
            raise RequestError(f"move {move.move_id!r} to shard {move.destination}: there are {len(self.links)} shards")
        link = self.links[move.destination]
        request = idl.MovePartitionsRequest(server_id=link.hello.server_id, move=move_to_idl(move), kind=kind)
        reply = await link.move_partitions(request)
        self.move_errors.pop(move.move_id, None)
        if reply.error:
            self.move_errors[move.move_id] = reply.error
        return _STATES[reply.state]
