"""Questions to the store from the training thread: what it has of the trainer's rows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.reading.shard_link import ShardLink, retry
from headrace.paramserver.rpc.security import Token
from headrace.schemas.durations import format_seconds
from headrace.schemas.errors import GoneError, HeadraceError, SetBackError, UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.log_records import unpack_header
from headrace.schemas.near_names import first_of
from headrace.streamer.audit import TableAudit, audit_tables, mark_what_differs
from headrace.streamer.config import StreamerConfig
from headrace.streamer.delivery.takeover import tls_context
from headrace.streamer.run_state import Resumption, RunState
from headrace.streamer.taps.tapped_table import TappedTable
from headrace.streamer.world import World

__all__ = ["StoreInquiry"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class StoreInquiry:
    """Asks all shards of a store, over connections of its own; each call blocks.

    Thread: any.
    """

    def __init__(self, address: str, config: StreamerConfig, token: Token | None) -> None:
        """Prepare; each call connects.

        Args:
            address: `host:port` of any shard.
            config: The streamer's settings.
            token: Shown to the server.
        """
        self._address, self._config, self._token = address, config, token

    def audit(
        self, tables: Sequence[TappedTable], world: World, flush: Callable[[], None], timeout_s: float | None
    ) -> list[TableAudit]:
        """Flush, compare this rank's rows with the store's, and return what all ranks have found.

        Args:
            tables: Of this rank.
            world: All ranks call this together.
            flush: Makes this rank's rows durable.
            timeout_s: For the comparison, seconds; None has no deadline.

        Raises:
            HeadraceError: This rank, or another, could not do it.
        """
        mine: list[TableAudit] | HeadraceError
        try:
            flush()
            mine = self._ask(partial(audit_tables, tables, rank=world.rank), timeout_s)
        except HeadraceError as exc:
            if world.size == 1:
                raise
            mine = exc
        parts = world.gather(mine)
        for rank, part in enumerate(parts):
            if isinstance(part, HeadraceError):
                raise part if part is mine else HeadraceError(f"rank {rank} could not audit: {part}")
        return [table for part in parts if isinstance(part, list) for table in part]

    def resume(
        self, tables: Sequence[TappedTable], resumption: Resumption, *, epoch: int, timeout_s: float | None
    ) -> bool:
        """Mark the rows that a trainer which goes on from a checkpoint has to send: those that the store has otherwise.

        And those that it lacks, where it may have lacked or lost changes of them. Which those are is logged.

        Args:
            tables: Of this rank, not trained meanwhile.
            resumption: What it goes on from; all that was told is of this store.
            epoch: In which it goes on.
            timeout_s: For all of it, seconds; None has no deadline.

        Returns:
            Whether the store has what it had acked when the checkpoint was made, or its logs cannot tell.

        Raises:
            UnavailableError: A shard does not answer in time.
        """
        return self._ask(partial(_resume, tables, resumption, epoch), timeout_s)

    def _ask(self, ask: Callable[[EmbeddingReader], Awaitable[_T]], timeout_s: float | None) -> _T:
        """Return what a coroutine returns that is given a reader of all shards."""

        async def run() -> _T:
            async with (
                asyncio.timeout(timeout_s),
                await EmbeddingReader.connect(
                    self._address,
                    timeout_s=self._config.request_timeout_s,
                    ssl_context=tls_context(self._config),
                    token=self._token,
                ) as reader,
            ):
                return await ask(reader)

        # In a thread of its own: this one may have an event loop running, as in a notebook.
        with ThreadPoolExecutor(1, "headrace-ask") as pool:
            try:
                return pool.submit(asyncio.run, run()).result()
            except TimeoutError as exc:
                assert timeout_s is not None
                raise UnavailableError(f"the store has not been compared within {format_seconds(timeout_s)}") from exc


async def _resume(tables: Sequence[TappedTable], resumption: Resumption, epoch: int, reader: EmbeddingReader) -> bool:
    acked = resumption.last_acked
    has_acked = epoch >= acked.epoch and await _has_acked(acked, reader)
    doubts: dict[str, list[str]] = {}
    if has_acked:
        for fqn in dict.fromkeys(table.spec.fqn for table in tables if table.index is None and table.num_local_rows):
            if (doubt := resumption.doubt_about(fqn)) is not None:
                doubts.setdefault(doubt, []).append(fqn)
        if doubts:
            _log.warning("sending rows that the store lacks, also such as never changed: %s", _describe(doubts))
    else:
        _log.warning("the store was set back since the checkpoint: sending the rows that it has lost")
    doubtful = {fqn for names in doubts.values() for fqn in names}
    await mark_what_differs(tables, reader, marks_absent=lambda fqn: not has_acked or fqn in doubtful)
    return has_acked


def _describe(doubts: Mapping[str, Sequence[str]]) -> str:
    """Name the tables of each doubt, the first few of many."""
    return "; ".join(f"{first_of(names)}: {doubt}" for doubt, names in doubts.items())


async def _has_acked(saved: RunState, reader: EmbeddingReader) -> bool:
    for shard, (link, (client_seq, log_seq)) in enumerate(zip(reader.links, saved.places, strict=False)):
        if log_seq and not await _has_batch(link, saved.run, *saved.writer_of(shard), client_seq, log_seq):
            return False
    return True


async def _has_batch(link: ShardLink, run: str, epoch: int, client: str, client_seq: int, log_seq: int) -> bool:
    """Return whether a shard's log has a batch at the place that it had been told to have."""
    request = idl.FetchUpdatesRequest(server_id=link.hello.server_id, from_seq=log_seq, max_bytes=1, wait_ms=0)
    try:
        reply = await retry(lambda: link.fetch_updates(request))
    except SetBackError:
        return False
    except GoneError:  # removed: what is in its place, nobody knows
        return True
    if not reply.records:
        return False
    record = reply.records[0]
    header = unpack_header(record.header)
    found = record.epoch, header.get("run"), header.get("client"), header.get("client_seq")
    return found == (epoch, run, client, client_seq)
