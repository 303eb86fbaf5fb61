"""Digests of tables and ranges of rows, summed over shards, ranks or replies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.schemas.errors import ProtocolError
from headrace.schemas.idl import idl
from headrace.schemas.row_digest import BUCKET_ROWS, bucket_digests, digest_rows
from headrace.schemas.tables import ColumnShard, TableSpec

__all__ = ["TableDigest"]

_BITMAP_BYTES = BUCKET_ROWS // 8

_Ids = npt.NDArray[np.int64]


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

    def add(self, reply: Any) -> None:
        """Add an `idl.DigestRowsReply`.

        Raises:
            ProtocolError: Its fields have inconsistent lengths.
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
        for at, (bucket, digest, count) in enumerate(zip(*columns, strict=True)):
            self._add(bucket, digest, count)
            if reply.presence is not None:
                self._add_presence(
                    bucket, np.frombuffer(reply.presence, np.uint8, _BITMAP_BYTES, at * _BITMAP_BYTES).copy()
                )

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
