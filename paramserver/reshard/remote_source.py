"""A move's source on another shard: each call on a connection of the move's own, in the shard's term."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from headrace.paramserver.reshard.move_messages import move_to_idl, position_from_idl, position_to_idl
from headrace.paramserver.reshard.source_moves import Copied, FollowedRecord, Tail
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.system.event_loop import background_task
from headrace.schemas.errors import CorruptionError, GoneError, ProtocolError, UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.log_records import unpack_header
from headrace.schemas.move_records import Move, Position

__all__ = ["MoveReport", "Nodes", "RemoteCopy", "RemoteSource"]

_SCAN_S = 3600.0
# Of 4 MiB: the source reads while rows are written.
_CHUNKS_AHEAD = 4


class MoveReport:
    """How far a move is at its destination, for people.

    Attributes:
        phase: What is being done.
        copied_bytes, copied_rows: Of the copy, so far.
        records_behind: Records of the source's log that are to be read yet.
        error: Why it does not go on, or was given up; None while all is well.
    """

    def __init__(self) -> None:
        """Begin."""
        self.phase = "begin"
        self.copied_bytes = self.copied_rows = self.records_behind = 0
        self.error: str | None = None


class Nodes(Protocol):
    """Connects to the other shards of the server: `Membership`."""

    async def connect(self, shard: int) -> ParamServerClient:
        """Return a connection that has exchanged places and partition maps."""

    async def exchange(self, client: ParamServerClient) -> None:
        """Exchange them once more."""


class RemoteCopy:
    """What a source copies, chunk by chunk; some are fetched ahead, so that the source reads while the rows are loaded.

    Attributes:
        shared_state: Chunk 0.
    """

    def __init__(self, fetch: Callable[[int], Awaitable[Any]], first: Any, report: MoveReport) -> None:
        """Begin with the reply that has chunk 0; `fetch` gets the reply with a later one."""
        self.shared_state = bytes(first.data)
        self._fetch, self._report = fetch, report

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the chunks behind chunk 0. Raises as the calls; cancellation: harmless."""
        self._report.copied_bytes, self._report.copied_rows = len(self.shared_state), 0
        ahead: asyncio.Queue[Any] = asyncio.Queue(_CHUNKS_AHEAD)
        async with background_task(self._fetch_all(ahead), name="headrace-copy"):
            while True:
                reply = await ahead.get()
                if isinstance(reply, Exception):
                    raise reply
                yield bytes(reply.data)
                self._report.copied_bytes += len(reply.data)
                self._report.copied_rows += reply.num_rows
                if reply.is_last:
                    return

    async def _fetch_all(self, ahead: asyncio.Queue[Any]) -> None:
        """Put the replies in order, or what has ended them."""
        try:
            for number in itertools.count(1):
                reply = await self._fetch(number)
                await ahead.put(reply)
                if reply.is_last:
                    return
        except Exception as exc:
            await ahead.put(exc)


class RemoteSource:
    """A `MoveSource` for one move. Use it with `async with`.

    Before what may decide something, both shards tell each other their maps: a source that was set back learns so that
    it has released. Thread: the loop's. Cancellation: the call may take effect all the same.
    """

    def __init__(self, nodes: Nodes, server_id: str, move: Move, report: MoveReport) -> None:
        """Connect when it is first called."""
        self._nodes, self._server_id, self._report = nodes, server_id, report
        self._source, self._move = move.source, move_to_idl(move)
        self._client: ParamServerClient | None = None

    async def __aenter__(self) -> RemoteSource:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._client is not None:
            await self._client.close()

    async def copy(self, move: Move) -> Copied:
        """As `MoveSource.copy`."""
        self._report.phase = "copy"
        client = await self._greeted()
        first = await client.copy_partitions(self._copy_request(0, 0))
        copy_id = first.copy_id

        async def fetch(number: int) -> Any:
            try:
                return await client.copy_partitions(self._copy_request(copy_id, number))
            except GoneError as exc:
                raise UnavailableError(f"the copy has ended at its source: {exc}") from exc

        return Copied(position=position_from_idl(first.position), contents=RemoteCopy(fetch, first, self._report))

    def _copy_request(self, copy_id: int, chunk: int) -> Any:
        return idl.CopyPartitionsRequest(server_id=self._server_id, move=self._move, copy_id=copy_id, chunk=chunk)

    async def follow(self, move: Move, after: Position, up_to_seq: int) -> Tail | None:
        """As `MoveSource.follow`; raises `UnavailableError` if no record comes in time."""
        self._report.phase, self._report.records_behind = "follow", max(up_to_seq - after.seq, 0)
        request = idl.FollowPartitionsRequest(
            server_id=self._server_id,
            move=self._move,
            after=position_to_idl(after),
            up_to_seq=up_to_seq,
        )
        reply = await (await self._connected()).follow_partitions(request)
        if reply.is_lost:
            return None
        position = position_from_idl(reply.position)
        if position == after and after.seq < up_to_seq:
            raise UnavailableError(f"shard {self._source} has no record behind {after.seq}, and {up_to_seq} is wanted")
        records = tuple(_followed(each) for each in reply.records)
        return Tail(records=records, position=position)

    async def digest(self, move: Move) -> tuple[Position, bytes]:
        """As `MoveSource.digest`."""
        self._report.phase = "verify"
        reply = await self._step(idl.SourceStep.DIGEST, timeout_s=_SCAN_S)
        if reply.digest is None:
            raise ProtocolError(f"shard {self._source} digests without a digest")
        return position_from_idl(reply.position), bytes(reply.digest)

    async def seal(self, move: Move) -> Position | None:
        """As `MoveSource.seal`."""
        self._report.phase = "seal"
        reply = await self._step(idl.SourceStep.SEAL)
        return position_from_idl(reply.position) if reply.is_done else None

    async def release(self, move: Move, at: Position) -> bool:
        """As `MoveSource.release`."""
        self._report.phase = "release"
        return bool((await self._step(idl.SourceStep.RELEASE, position=position_to_idl(at))).is_done)

    async def unseal(self, move: Move) -> bool:
        """As `MoveSource.unseal`."""
        self._report.phase = "give up"
        return bool((await self._step(idl.SourceStep.UNSEAL)).is_done)

    async def purge(self, move: Move) -> None:
        """As `MoveSource.purge`."""
        self._report.phase = "purge"
        await self._step(idl.SourceStep.PURGE, timeout_s=_SCAN_S)

    async def is_purged(self) -> bool:
        """Return whether the source has purged the partitions."""
        return bool((await self._step(idl.SourceStep.LOOK)).is_done)

    async def _step(self, step: int, *, timeout_s: float = 30.0, **fields: Any) -> Any:
        request = idl.StepMoveRequest(server_id=self._server_id, move=self._move, step=step, **fields)
        return await (await self._greeted()).step_move(request, timeout_s=timeout_s)

    async def _greeted(self) -> ParamServerClient:
        """Return the connection, once both sides have told their maps on it just now."""
        is_new = self._client is None or self._client.is_closed
        client = await self._connected()
        if not is_new:
            await self._nodes.exchange(client)
        return client

    async def _connected(self) -> ParamServerClient:
        if self._client is None or self._client.is_closed:
            self._client = await self._nodes.connect(self._source)
        return self._client


def _followed(struct: Any) -> FollowedRecord:
    try:
        header = unpack_header(struct.header)
    except CorruptionError as exc:  # on its way here, not on a disk
        raise ProtocolError(f"a record of a move's source has no header that can be read: {exc}") from exc
    return FollowedRecord(
        position=position_from_idl(struct.position), epoch=struct.epoch, header=header, body=struct.body
    )
