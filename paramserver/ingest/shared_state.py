"""What is a whole shard's and not a partition's: tables, floors, scalars, drops, renames, fences, epochs, sessions.

A shard that gets partitions takes it over from their source, so that it refuses what the source would have refused. All
of it only rises: taken over twice, late or in vain it does no harm. It goes through the log, because catalog and
sessions are a function of that.
"""

from __future__ import annotations

from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.store.catalog import Catalog

__all__ = ["check_shared_state", "pack_shared_state", "take_shared_state"]


def pack_shared_state(catalog: Catalog, sessions: Sessions) -> bytes:
    """Return what a shard has at this moment, compressed: some ten bytes for each session, about 100 a table.

    Tell it once the records up to now are durable.
    """
    raise NotImplementedError


def check_shared_state(data: bytes | memoryview, catalog: Catalog) -> None:
    """Check what another shard has packed, before it is put into the log. Changes nothing.

    Raises:
        RequestError: It cannot be read.
        SpecMismatchError: A table of one name differs, or it is not known which of the source's tables one here is.
    """
    raise NotImplementedError


def take_shared_state(
    data: bytes | memoryview, catalog: Catalog, sessions: Sessions, seq: int, *, with_steps: bool
) -> dict[bytes, bytes]:
    """Take it over, here as in recovery, as record `seq` says; return the metadata to save.

    Sessions come without their batches: client seqs are a shard's own, so a client's first batch here is 1. They keep
    the steps that their client has ended only `with_steps`: if the shard has no partitions, so that nothing of a step
    can be missing here. A session that the shard has in the same epoch stays as it is.

    Raises:
        As `check_shared_state`.
    """
    raise NotImplementedError
