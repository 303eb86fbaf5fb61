"""Routing of rows to shards by `splitmix64`: the same in every process, language and version.

The hash is the finalizer of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014). Its input is the row id xor the table's seed, FNV-1a 64 of the fqn. The shard is the hash modulo the
number of shards. All columns and states of a row live on the same shard.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["GOLDEN", "mix", "shards_of_rows", "table_seed"]

# ON DISK: never change these constants; they decide where every stored row lives.
_FNV_OFFSET, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""splitmix64's increment."""


def table_seed(fqn: str) -> int:
    """Return FNV-1a 64 of the UTF-8 bytes of a table's fqn, 0 to 2⁶⁴ - 1."""
    seed = _FNV_OFFSET
    for byte in fqn.encode():
        seed = ((seed ^ byte) * _FNV_PRIME) & 0xFFFFFFFFFFFFFFFF
    return seed


def shards_of_rows(seed: int, row_ids: npt.NDArray[np.int64], num_shards: int) -> npt.NDArray[np.int64]:
    """Return the shard of each row, int64[n], 0 to `num_shards` - 1.

    Args:
        seed: `TableSpec.seed` of the table.
        row_ids: int64[n], ≥ 0.
        num_shards: Number of shards, ≥ 1.
    """
    if num_shards == 1:
        return np.zeros(row_ids.shape, np.int64)
    hashes = mix((row_ids.view(np.uint64) ^ np.uint64(seed)) + GOLDEN)
    return (hashes % np.uint64(num_shards)).view(np.int64)


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return splitmix64's finalizer of each value, uint64 of any shape."""
    mixed = values ^ (values >> np.uint64(30))
    mixed *= _MIX_1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MIX_2
    mixed ^= mixed >> np.uint64(31)
    return mixed
