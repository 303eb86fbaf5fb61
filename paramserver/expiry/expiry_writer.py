"""Tombstones into the update log: expiry is a client of its own shard, and its batches are ordinary ones.

So replicas, followers, replay, snapshots and recovery need to know nothing of it. It goes through `Ingest` like
everyone: run `headrace`, client `expiry`, no trainer, its batches numbered, durable and conditional. It keeps no state:
what it has written is in its session, which is a function of the log, so after a crash its numbers go on where they
were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from headrace.paramserver.ingest.ingest import Ingest
from headrace.paramserver.store.catalog import Table
from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, decode_header, decode_struct, encode_message
from headrace.schemas.tables import ColumnShard

__all__ = ["EXPIRY_CLIENT", "EXPIRY_RUN", "MAX_BATCH_ROWS", "TombstoneWriter"]

# ON DISK: sessions and log records have these names. The epoch never rises: a shard has one expiry and nobody to fence.
EXPIRY_RUN, EXPIRY_CLIENT = "headrace", "expiry"
_EPOCH = 1
MAX_BATCH_ROWS = 8192

_Ids = npt.NDArray[np.int64]


class TombstoneWriter:
    """Writes tombstones of one shard. Thread: the event loop's; one call at a time."""

    def __init__(self, ingest: Ingest, *, clock_us: Callable[[], int] = lambda: time.time_ns() // 1000) -> None:
        """Write through `ingest`.

        Args:
            ingest: The shard's.
            clock_us: Wall clock that the records get, microseconds since 1970.
        """
        self._ingest = ingest
        self._clock_us = clock_us

    async def delete(self, table: Table, rows: Mapping[ColumnShard, _Ids], *, epoch: int, step: int) -> None:
        """Delete rows where the shard has no newer version of them than (epoch, step); durable on return.

        Args:
            table: Whose rows.
            rows: int64[k] by column shard, each id once, 8192 at most.
            epoch: Version of the tombstones, first half.
            step: Second half.

        Cancellation: the batch takes effect whole or not at all; the next one is numbered accordingly.

        Raises:
            OverloadedError: The shard has too much to write; nothing is changed.
            UnavailableError: The log has failed.
        """
        session, _ = await self._ingest.open_session(EXPIRY_RUN, EXPIRY_CLIENT, _EPOCH, 0, 0, [])
        request = idl.SetEmbeddingsRequest(
            run=EXPIRY_RUN,
            client=EXPIRY_CLIENT,
            epoch=_EPOCH,
            client_seq=session.last_client_seq + 1,
            step=step,
            time_us=self._clock_us(),
            ends_step=False,
            is_exact_cut=False,
            deltas=[_tombstones(table, shard, ids) for shard, ids in rows.items() if ids.size],
            version_epoch=epoch,
        )
        args = idl.ParameterServer.setEmbeddings_args(request=request)
        # The log keeps a request as it came over the wire, so it is made to come over the wire.
        frame = memoryview(b"".join(bytes(segment) for segment in encode_message("setEmbeddings", CALL, 0, args)))
        decoded = decode_struct(idl.ParameterServer.setEmbeddings_args, frame, decode_header(frame).body_offset)
        await self._ingest.write(decoded.request, frame, _hold)


def _tombstones(table: Table, shard: ColumnShard, row_ids: _Ids) -> object:
    assert row_ids.size <= MAX_BATCH_ROWS
    return idl.TableDelta(
        fqn=table.spec.fqn,
        fingerprint=table.spec.fingerprint,
        column_offset=shard.offset,
        width=shard.width,
        row_ids=b"",
        weights=b"",
        states=[],
        deleted_row_ids=row_ids.astype("<i8").tobytes(),
    )


def _hold() -> Callable[[], None]:
    """Hold a frame that nobody else has: Python's reference counts keep it."""
    return _release


def _release() -> None:
    pass
