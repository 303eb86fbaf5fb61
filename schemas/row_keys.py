"""Row keys: the store's key of a row of one column shard of a table.

    byte  0      4        6       8                16
          table  offset   width   row id
          u32    u16      u16     u64      all big-endian, so that keys sort by table, column shard, row id

Each shard's catalog numbers tables from 1; table 0 is the store's own metadata. Keys with offset 65535 and width 0,
which no column shard has, hold the table's identity claims (`row_records.py`).
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
    """Return the keys of rows, int64[n], of one column shard of a table, 16 bytes each, in their order."""
    return encode_keys_of([key_prefix(table_id, shard)], [row_ids.size], row_ids)


def encode_keys_of(prefixes: Sequence[bytes], sizes: Sequence[int], row_ids: npt.NDArray[np.int64]) -> list[bytes]:
    """Return the keys of rows of several column shards, one shard after the other.

    Args:
        prefixes: `key_prefix` of each column shard.
        sizes: Number of rows of each column shard.
        row_ids: int64[n], ≥ 0.
    """
    keys = np.empty(row_ids.size, _KEY)
    keys["prefix"] = np.repeat(np.frombuffer(b"".join(prefixes), f"V{_PREFIX_BYTES}"), sizes)
    keys["row"] = row_ids.view(np.uint64)
    # An unstructured void array becomes a list of `bytes` in one pass, without a Python loop over rows.
    return cast("list[bytes]", keys.view(f"V{KEY_BYTES}").tolist())


def decode_row_ids(keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """Return the row ids, int64[n], of keys made by `encode_keys`."""
    return np.frombuffer(b"".join(keys), _KEY)["row"].astype(np.int64)


def key_prefix(table_id: int, shard: ColumnShard | None = None) -> bytes:
    """Return the prefix of all keys of a table, or of one of its column shards."""
    prefix = table_id.to_bytes(4, "big")
    if shard is None:
        return prefix
    return prefix + shard.offset.to_bytes(2, "big") + shard.width.to_bytes(2, "big")
