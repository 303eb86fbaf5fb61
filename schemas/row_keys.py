"""Row keys: where a row of a column shard of a table lies in the store.

    byte  0      4        6       8                16
          table  offset   width   row id
          u32    u16      u16     u64      all big-endian, so that keys sort by table, column shard, row id

Table ids are numbered from 1 by each shard's catalog; table id 0 is the store's own metadata. Offset 65535 with width 0
is no column shard: such keys are of the table's index of identities (`identity_claims.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from headrace.schemas.tables import ColumnShard

__all__ = ["KEY_BYTES", "META_PREFIX", "decode_row_ids", "encode_keys", "encode_keys_of", "key_prefix"]

# ON DISK: never renumber.
KEY_BYTES = 16
META_PREFIX = b"\0\0\0\0"
_PREFIX_BYTES = 8
_KEY = np.dtype([("prefix", f"V{_PREFIX_BYTES}"), ("row", ">u8")])


def encode_keys(table_id: int, shard: ColumnShard, row_ids: npt.NDArray[np.int64]) -> list[bytes]:
    """Return the keys of rows of one column shard, 16 bytes each, in the order of `row_ids`.

    Args:
        table_id: Number of the table in the shard's catalog, ≥ 1.
        shard: Columns that the record holds.
        row_ids: int64[n], ≥ 0.
    """
    return encode_keys_of([key_prefix(table_id, shard)], [row_ids.size], row_ids)


def encode_keys_of(prefixes: Sequence[bytes], sizes: Sequence[int], row_ids: npt.NDArray[np.int64]) -> list[bytes]:
    """Return the keys of rows of several column shards, one's behind the other's.

    Args:
        prefixes: Of each column shard, see `key_prefix`.
        sizes: How many of the rows are of each.
        row_ids: int64[n], ≥ 0.
    """
    keys = np.empty(row_ids.size, _KEY)
    keys["prefix"] = np.repeat(np.frombuffer(b"".join(prefixes), f"V{_PREFIX_BYTES}"), sizes)
    keys["row"] = row_ids.view(np.uint64)
    # An unstructured void array turns into a list of `bytes` in one pass, with no Python loop over rows.
    return cast("list[bytes]", keys.view(f"V{KEY_BYTES}").tolist())


def decode_row_ids(keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """Return the row ids of keys made by `encode_keys`, int64[n]."""
    return np.frombuffer(b"".join(keys), _KEY)["row"].astype(np.int64)


def key_prefix(table_id: int, shard: ColumnShard | None = None) -> bytes:
    """Return the bytes that every key of a table, or of one of its column shards, begins with."""
    prefix = table_id.to_bytes(4, "big")
    if shard is None:
        return prefix
    return prefix + shard.offset.to_bytes(2, "big") + shard.width.to_bytes(2, "big")
