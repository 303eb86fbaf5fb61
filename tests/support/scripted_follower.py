"""A follower that answers an owner as a test says, and what an owner has noted in its log."""

from __future__ import annotations

from typing import Any

from held_ports import hold_ports
from machines import SERVER_ID, Machine

from headrace.paramserver.log.interface import note_of
from headrace.paramserver.rpc.admission import ServerLimits
from headrace.schemas.errors import UnavailableError
from headrace.schemas.idl import PROTOCOL_VERSION, idl

__all__ = ["ScriptedFollower", "notes_of", "offer"]

OPEN, DECLINED = idl.OfferState.OPEN, idl.OfferState.DECLINED


class ScriptedFollower:
    """Answers an owner as a test says, or hangs up for None.

    Attributes:
        state: Its answer about any offer.
        term: Of the owner that it knows of.
        offers: What it was asked about, in order.
    """

    def __init__(self) -> None:
        self.port = hold_ports()
        self.state: Any = OPEN
        self.term = 0
        self.server_id = SERVER_ID
        self.offers: list[Any] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def hello(self, call: Any, request: Any) -> Any:
        return idl.HelloReply(
            protocol_version=PROTOCOL_VERSION,
            server_id=self.server_id,
            shard=0,
            shards=[],
            limits=ServerLimits().to_idl(),
            highest_epoch=0,
            last_client_seq=0,
            tables=[],
        )

    async def promote_shard(self, call: Any, request: Any) -> Any:
        self.offers.append(request)
        if self.state is None:
            raise UnavailableError("it is away")
        if request.declines and self.state == OPEN:
            self.state = DECLINED
        return idl.PromoteShardReply(state=self.state)

    def disconnected(self, peer: Any) -> None:
        pass


def notes_of(shard: Any) -> list[str]:
    """Return the notes in a shard's log, in order."""
    return [note for record in shard.log.read(shard.log.first_seq) if (note := note_of(record.header)) is not None]


async def offer(machine: Machine, follower: ScriptedFollower, *, hold_ms: int = 60_000) -> None:
    """Offer an owner's shard to a follower, which then answers as it does."""
    state, follower.state = follower.state, OPEN
    await machine.ask(to=follower.address, hold_ms=hold_ms)
    follower.state = state
