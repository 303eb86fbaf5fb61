"""Row digests: 64 bits that stand for a row's id, weights and states, and sums of them for tables and parts of them.

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
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.schemas.errors import ProtocolError
from headrace.schemas.idl import idl
from headrace.schemas.routing import GOLDEN, mix
from headrace.schemas.tables import ColumnShard, TableSpec

__all__ = ["BUCKET_ROWS", "TableDigest", "bucket_digests", "digest_rows"]

# ON THE WIRE, and in saved digests: never change.
BUCKET_ROWS = 65_536
_BITMAP_BYTES = BUCKET_ROWS // 8
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


@dataclass(kw_only=True, slots=True)
class TableDigest:
    """Sums of row digests by bucket.

    Attributes:
        spec: The table.
        columns: Columns that are included.
        buckets: (digest, number of rows) of each bucket that has rows.
        presence: uint8[8192] by bucket, one bit per row, if requested.
        is_steady: Nothing was written between the parts.
        seqs: Log position at which each shard computed its digests, by shard.
    """

    spec: TableSpec
    columns: ColumnShard
    buckets: dict[int, tuple[int, int]] = field(default_factory=dict)
    presence: dict[int, npt.NDArray[np.uint8]] = field(default_factory=dict)
    is_steady: bool = True
    seqs: dict[int, int] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Number of rows in all buckets."""
        return sum(count for _, count in self.buckets.values())

    @property
    def total(self) -> int:
        """Digest of all rows, 0 to 2⁶⁴ - 1."""
        return sum(digest for digest, _ in self.buckets.values()) % 2**64

    def add_rows(self, row_ids: _Ids, columns: list[npt.NDArray[Any]], *, with_presence: bool = False) -> None:
        """Add rows.

        Args:
            row_ids: int64[n], global; none was added before.
            columns: As for `digest_rows`.
            with_presence: Set the rows' bits in `presence`.
        """
        for bucket, digest, count in zip(*bucket_digests(row_ids, digest_rows(row_ids, columns)), strict=True):
            self._add(int(bucket), int(digest), int(count))
            if with_presence:
                flags = np.zeros(BUCKET_ROWS, np.uint8)
                flags[row_ids[row_ids // BUCKET_ROWS == bucket] % BUCKET_ROWS] = 1
                self._add_presence(int(bucket), np.packbits(flags, bitorder="little"))

    def add(self, reply: Any, *, first_row: int, end_row: int) -> None:
        """Add an `idl.DigestRowsReply` about rows from `first_row` until before `end_row`.

        Raises:
            ProtocolError: Its fields have inconsistent lengths, or it has rows out of the range.
        """
        num_buckets = len(reply.buckets) // 8
        sizes = {len(reply.buckets), len(reply.digests), len(reply.counts)}
        is_fit = reply.presence is None or len(reply.presence) == num_buckets * _BITMAP_BYTES
        if sizes != {8 * num_buckets} or not is_fit:
            raise ProtocolError(f"digests of table {self.spec.fqn!r}: columns of different lengths")
        columns = (
            np.frombuffer(data, kind).tolist()
            for data, kind in zip((reply.buckets, reply.digests, reply.counts), ("<i8", "<u8", "<i8"), strict=True)
        )
        first_bucket, last_bucket = first_row // BUCKET_ROWS, (end_row - 1) // BUCKET_ROWS
        for at, (bucket, digest, count) in enumerate(zip(*columns, strict=True)):
            is_inside = first_bucket <= bucket <= last_bucket
            if is_inside and reply.presence is not None:
                bits = np.frombuffer(reply.presence, np.uint8, _BITMAP_BYTES, at * _BITMAP_BYTES).copy()
                self._add_presence(bucket, bits)
                if bucket in (first_bucket, last_bucket):
                    row_ids = self.present_rows(bucket)
                    is_inside = not row_ids.size or first_row <= row_ids[0] <= row_ids[-1] < end_row
            if not is_inside:
                raise ProtocolError(
                    f"digests of table {self.spec.fqn!r}: rows of bucket {bucket}, not {first_row} to {end_row - 1}"
                )
            self._add(bucket, digest, count)

    def present_rows(self, bucket: int) -> _Ids:
        """Return the global ids of a bucket's present rows, int64[n], ascending."""
        bits = self.presence.get(bucket)
        if bits is None:
            return np.empty(0, np.int64)
        return np.flatnonzero(np.unpackbits(bits, bitorder="little")) + bucket * BUCKET_ROWS

    def differing_buckets(self, other: TableDigest) -> list[int]:
        """Return the buckets, ascending, in which this digest differs from another one of the same table."""
        return sorted(
            bucket
            for bucket in self.buckets.keys() | other.buckets.keys()
            if self.buckets.get(bucket, (0, 0)) != other.buckets.get(bucket, (0, 0))
        )

    def to_idl(self, *, next_row: int, seq: int, with_presence: bool) -> Any:
        """Return this digest as an `idl.DigestRowsReply`.

        Args:
            next_row: First row that is not included.
            seq: Log position of the digests.
            with_presence: Include `presence`. REQUIRES: rows were added with it.
        """
        order = sorted(self.buckets)
        presence = b"".join(self.presence[bucket].tobytes() for bucket in order) if with_presence else None
        return idl.DigestRowsReply(
            buckets=np.array(order, "<i8").tobytes(),
            digests=np.array([self.buckets[bucket][0] for bucket in order], "<u8").tobytes(),
            counts=np.array([self.buckets[bucket][1] for bucket in order], "<i8").tobytes(),
            presence=presence,
            next_row=next_row,
            seq=seq,
        )

    def _add_presence(self, bucket: int, bits: npt.NDArray[np.uint8]) -> None:
        known = self.presence.get(bucket)
        self.presence[bucket] = bits if known is None else known | bits

    def _add(self, bucket: int, digest: int, count: int) -> None:
        known, num_rows = self.buckets.get(bucket, (0, 0))
        self.buckets[bucket] = ((known + digest) % 2**64, num_rows + count)


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
