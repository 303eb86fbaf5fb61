"""What is a whole shard's and not a partition's: tables, floors, scalars, drops, fences, epochs, sessions.

A shard that gets partitions takes it over from their source, so that it refuses what the source would have refused. All
of it only rises: taken over twice, late or in vain it does no harm. It goes through the log, because catalog and
sessions are a function of that.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import msgpack

from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.store.catalog import Catalog
from headrace.schemas.errors import CorruptionError, RequestError

__all__ = [
    *("catalog_of_shared_state", "check_shared_state", "pack_meta", "pack_shared_state", "take_shared_state"),
    "unpack_meta",
]

_MAX_BYTES = 256 << 20  # of the metadata: far more than tables and sessions can take


def pack_shared_state(catalog: Catalog, sessions: Sessions) -> bytes:
    """Return what a shard has at this moment, compressed. Tell it once the records up to now are durable.

    ON DISK: a zlib stream of a msgpack map, the store's metadata of the catalog and the sessions.
    """
    return pack_meta(catalog.packed() | sessions.packed())


def check_shared_state(data: bytes | memoryview, catalog: Catalog) -> None:
    """Check what another shard has packed, before it is put into the log. Changes nothing.

    Raises:
        RequestError: It cannot be read.
        SpecMismatchError: A table of one name differs, or was dropped elsewhere and made anew.
    """
    meta = unpack_meta(data)
    try:
        theirs = Catalog(meta)
        Sessions(meta)
    except CorruptionError as exc:
        raise RequestError(f"the state of a shard cannot be read: {exc}") from exc
    Catalog(catalog.packed()).take_over(theirs)


def catalog_of_shared_state(data: bytes | memoryview) -> Catalog:
    """Return the source's tables. Raises RequestError or CorruptionError for data that was not checked."""
    return Catalog(unpack_meta(data))


def take_shared_state(
    data: bytes | memoryview, catalog: Catalog, sessions: Sessions, seq: int, *, with_steps: bool
) -> dict[bytes, bytes]:
    """Take it over, here as in recovery, as record `seq` says; return the metadata to save.

    Sessions come without their batches: client seqs are a shard's own, so a client's first batch here is 1. They keep
    the steps that their client has ended only `with_steps`, see `ShardPartitions.can_keep_steps`. A session that the
    shard has in the same epoch stays as it is. Rows are not conditional on any of this, so which client wrote them is
    nothing that the destination has to know.

    Raises:
        As `check_shared_state`; then catalog and sessions may have taken some of it.
    """
    meta = unpack_meta(data)
    return catalog.take_over(Catalog(meta)) | sessions.take_over(Sessions(meta), seq, with_steps=with_steps)


def pack_meta(meta: Mapping[bytes, bytes]) -> bytes:
    """Return metadata, compressed."""
    return zlib.compress(msgpack.packb(dict(meta)), 1)


def unpack_meta(data: bytes | memoryview) -> dict[bytes, bytes]:
    """Return the metadata that `pack_meta` has packed; raise `RequestError` if it has not."""
    try:
        unpacker = zlib.decompressobj()
        meta: dict[bytes, bytes] = msgpack.unpackb(unpacker.decompress(data, _MAX_BYTES))
        if not unpacker.eof or not all(type(part) is bytes for pair in meta.items() for part in pair):
            raise ValueError("it is cut off, too long, or not of bytes")
    except (zlib.error, ValueError, TypeError, AttributeError) as exc:
        raise RequestError(f"the state of a shard cannot be read: {exc}") from exc
    return meta
