"""Row digests: 64 bits that stand for a row's id, weights and states, and sums of them for many rows.

Trainer, store and replica compute the same digest from the same bits, in any order and in any parts, because the digest
of a set of rows is the sum of its rows' digests modulo 2⁶⁴. Equal sets have equal digests. Sets that differ by accident
have equal digests with a chance of about 2⁻⁶⁴. Digests do not protect against deliberate deception.

A column of `w` bytes per row is read as little-endian words of 4, 2 or 1 bytes, the longest that divides `w`. Then

    h(row)      = Σ  x × K(column, i)                      over all columns and their words x with number i
    digest(row) = mix(h(row) + mix(row id + G))

modulo 2⁶⁴, where `mix` is the finalizer of splitmix64, G its increment, and
K(column, i) = mix(mix((column + 1) × G) + (i + 1) × G) | 1 are odd keys. Column 0 holds the weights; the others hold
the states in the spec's order. Words have at most half the bits of a key. The top bit of a 64-bit word, such as an
element's sign, would contribute 2⁶³ whatever the key, so two changed signs would cancel out.

Source: the multilinear family in D. Lemire and O. Kaser, "Strongly Universal String Hashing is Fast", The Computer
Journal 57 (2014); G. L. Steele, D. Lea and C. H. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.schemas.routing import GOLDEN, mix

__all__ = ["BUCKET_ROWS", "bucket_digests", "digest_rows"]

# ON THE WIRE, and in saved digests: never change.
BUCKET_ROWS = 65_536
# Rows are digested in pieces of about this size, so that input and intermediate values stay in the cache.
_PASS_BYTES = 256 * 2**10

_Words = npt.NDArray[np.uint64]
_Ids = npt.NDArray[np.int64]


def digest_rows(row_ids: _Ids, columns: Sequence[npt.NDArray[Any]]) -> _Words:
    """Return the digest of each row, uint64[n].

    Args:
        row_ids: int64[n], global.
        columns: Weights, then the states in the spec's order: each `[n, width]` of any type, contiguous along a row.
    """
    hashed = np.zeros(row_ids.size, np.uint64)
    for number, column in enumerate(columns):
        words = _words_of(column)
        keys = _keys(number, words.shape[1])
        step = max(1, _PASS_BYTES // max(1, 8 * words.shape[1]))
        for first in range(0, row_ids.size, step):
            some = words[first : first + step].astype(np.uint64, copy=False)
            hashed[first : first + step] += np.einsum("ij,j->i", some, keys)
    hashed += mix(row_ids.view(np.uint64) + GOLDEN)
    return mix(hashed)


def bucket_digests(row_ids: _Ids, digests: _Words) -> tuple[_Ids, _Words, _Ids]:
    """Return (buckets, digests, row counts) of the buckets that have some of the rows, ascending.

    Args:
        row_ids: int64[n], any order.
        digests: uint64[n], digests of the rows.
    """
    buckets = row_ids // BUCKET_ROWS
    if buckets.size > 1 and np.any(buckets[1:] < buckets[:-1]):
        order = np.argsort(buckets, kind="stable")
        buckets, digests = buckets[order], digests[order]
    firsts = np.flatnonzero(np.diff(buckets, prepend=-1))
    if not firsts.size:
        return buckets, digests[:0], buckets
    counts = np.diff(firsts, append=buckets.size)
    return buckets[firsts], np.add.reduceat(digests, firsts), counts.astype(np.int64)


def _words_of(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    row_bytes = column.shape[1] * column.itemsize
    unit = next(unit for unit in (4, 2, 1) if row_bytes % unit == 0)
    if column.strides[1] != column.itemsize and column.shape[1] > 1:
        column = np.ascontiguousarray(column)
    if not row_bytes or (column.strides[0] % unit and column.shape[0] > 1) or column.strides[1] != column.itemsize:
        column = np.ascontiguousarray(column)
    return column.view(f"<u{unit}")


@functools.lru_cache(maxsize=256)
def _keys(column: int, count: int) -> _Words:
    with np.errstate(over="ignore"):
        seed = mix(np.array([column + 1], np.uint64) * GOLDEN)
        return mix(seed + np.arange(1, count + 1, dtype=np.uint64) * GOLDEN) | np.uint64(1)
