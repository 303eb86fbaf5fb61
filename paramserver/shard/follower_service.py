"""The service of a shard while it follows: it answers readers, and sends writers to whoever takes the updates."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, NoReturn

from headrace.paramserver.log.interface import ReplicatedLog
from headrace.paramserver.observe.sample import ShardSample
from headrace.paramserver.rpc.dispatch import define_all
from headrace.paramserver.rpc.server import Call, ThriftServer
from headrace.paramserver.rpc.shard_places import STANDBY, ShardPlaces
from headrace.paramserver.shard.following import Following
from headrace.paramserver.shard.read_service import ReadService
from headrace.paramserver.shard.sampler import ShardParts, copies_to_idl
from headrace.paramserver.shard.source_copy import SourceCopy
from headrace.paramserver.system.event_loop import background_task
from headrace.schemas.errors import RequestError, UnavailableError
from headrace.schemas.idl import PROTOCOL_VERSION, idl

__all__ = ["FollowingShard"]


class FollowingShard(ReadService):
    """The service of a shard that follows its source. Thread: the event loop's."""

    def __init__(self, parts: ShardParts, following: SourceCopy) -> None:
        """Serve what `following` keeps up to date."""
        following.parts = parts
        super().__init__(parts, term=following.term)
        self._following = following

    @property
    def stands(self) -> asyncio.Event:
        """Set once it serves for as long as somebody else has the shard."""
        return self._following.stands

    @property
    def term(self) -> int:
        """The source's, which every reply has; 0 where there is none."""
        return self._following.term

    async def follow(self) -> tuple[int | None, ReplicatedLog | None]:
        """Follow the source until the shard takes over; returns and raises as `SourceCopy.follow`, or what failed."""
        async with (
            background_task(self._following.follow(self._parts), name="headrace-follow") as copying,
            background_task(self.first_failure(), name="headrace-follow-failed") as failing,
        ):
            await asyncio.wait((copying, failing), return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                raise failing.result()
            return await copying

    @contextlib.asynccontextmanager
    async def served_by(self, server: ThriftServer) -> AsyncIterator[None]:
        """Report a server's figures, and gather those of the shard, while the block lasts."""
        self.sampler.server = server
        async with self.sampler.looking():
            yield

    async def sample(self) -> ShardSample:
        """Return the shard's sample; raises as `ShardSampler.sample`."""
        return await self.sampler.sample()

    async def hello(self, call: Call, request: Any) -> Any:
        """Tell readers the tables and this copy's place, and others where the source's shards are."""
        self._check_protocol(request)
        config, following = self._config, self._following
        if (elsewhere := following.lead(request)) is not None:
            call.peer.session = None
            return idl.HelloReply(
                protocol_version=PROTOCOL_VERSION,
                server_id=config.server_id,
                shard=STANDBY,
                shards=elsewhere.to_idl(),
                limits=self._limits.to_idl(),
                highest_epoch=0,
                last_client_seq=0,
                tables=[],
                knowledge_age_ms=following.knowledge_age_ms,
                standbys=copies_to_idl(config.copies) or None,
            )
        reply = self._hello_reply(
            ShardPlaces(config.server_id, following.places),
            knowledge_age_ms=following.knowledge_age_ms,
            standbys=copies_to_idl(config.other_copies) or None,
        )
        call.peer.session = self
        return reply

    async def get_embeddings(self, call: Call, request: Any) -> Any:
        """Return rows as of all records that were followed."""
        self._check_content(call)
        return await super().get_embeddings(call, request)

    async def digest_rows(self, call: Call, request: Any) -> Any:
        """Add up digests of such rows."""
        self._check_content(call)
        return await super().digest_rows(call, request)

    def _check_content(self, call: Call) -> None:
        """Refuse rows, which may be old, to whoever has not been told by hello that a copy answers."""
        self._following.check_here()
        if call.peer.session is not self:
            shard, source = self._config.shard, self._following.source
            raise UnavailableError(f"this is a copy of shard {shard}, whose rows are at {source}")

    async def fetch_updates(self, call: Call, request: Any) -> Any:
        """Wait for durable records of the update log and return them."""
        if request.from_seq > self._ingest.end_seq:
            self._following.check_here()
        if request.server_id == self._config.server_id and request.from_seq > self.log.last_seq + 1:
            await self._following.check_ahead(request.from_seq)
        reply = await super().fetch_updates(call, request)
        reply.knowledge_age_ms = self._following.knowledge_age_ms
        return reply

    async def promote_shard(self, call: Call, request: Any) -> Any:
        """Take over from the source that is gone, or say what became of its offer."""
        config, following = self._config, self._following
        if request.shard != config.shard:
            raise RequestError(f"this is shard {config.shard}, not {request.shard}")
        if not isinstance(following, Following):
            raise UnavailableError(f"this is a standby of shard {config.shard}: its log says who owns it")
        if request.offer is not None:
            state = await following.answer(
                request.offer, declines=bool(request.declines), is_reading=request.to is None
            )
            return idl.PromoteShardReply(state=state, term=self.term or None)
        if not request.forces or request.aborts or request.to is not None:
            raise RequestError(f"this server follows {following.source}, which alone can hand a shard over")
        await following.force(self._ingest.offer)
        return idl.PromoteShardReply(term=self.term or None)


async def _refuse(service: FollowingShard, call: Call, request: Any) -> NoReturn:
    raise RequestError(f"this server follows {service._following.source}: {call.method} goes there")


define_all(FollowingShard, _refuse)
