"""Row digests: the same in every process, and different for different rows."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from headrace.schemas.errors import ProtocolError
from headrace.schemas.idl import idl
from headrace.schemas.row_digest import BUCKET_ROWS, TableDigest, bucket_digests, digest_rows
from headrace.schemas.tables import DType, TableSpec

RNG = np.random.default_rng(0)
MASK = 2**64 - 1
GOLDEN = 0xBFA78C9C52419FBA


def plain_mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def plain_digest(row_id: int, columns: list[bytes]) -> int:
    golden, total = 0x9E3779B97F4A7C15, 0
    for number, data in enumerate(columns):
        unit = next(unit for unit in (4, 2, 1) if len(data) % unit == 0)
        seed = plain_mix((number + 1) * golden & MASK)
        for at in range(len(data) // unit):
            word = int.from_bytes(data[at * unit : (at + 1) * unit], "little")
            key = plain_mix((seed + (at + 1) * golden) & MASK) | 1
            total += word * key
    return plain_mix((total + plain_mix((row_id + golden) & MASK)) & MASK)


@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<f8", "u1"])
@pytest.mark.parametrize("width", [1, 2, 3, 7, 64])
def test_is_as_defined(dtype: str, width: int) -> None:
    """The vectorized digest is what the definition says, computed word by word, for every unit."""
    weights = RNG.integers(0, 256, (5, width * np.dtype(dtype).itemsize), np.uint8).view(dtype)
    state = RNG.integers(0, 256, (5, 4), np.uint8).view("<f4")
    ids = np.array([0, 1, 7, 2**40, 2**62])
    pairs = zip(ids.tolist(), weights, state, strict=True)
    expected = [plain_digest(row, [w.tobytes(), s.tobytes()]) for row, w, s in pairs]
    assert digest_rows(ids, [weights, state]).tolist() == expected
    golden = np.arange(8, dtype="<f4").reshape(1, 8)  # never changes: saved digests and other processes rely on it
    assert digest_rows(np.array([42]), [golden]).tolist() == [GOLDEN]


def test_views_and_copies_agree() -> None:
    """Columns of wider tensors and expanded ones have the digest of their copy; buckets are sums of their rows'."""
    wide = RNG.standard_normal((100, 30)).astype("<f4")
    ids = np.arange(100)
    for part in (wide[:, 3:10], wide[:, 4:12], np.broadcast_to(wide[:1, :1], (100, 1)), wide[::2][:50]):
        some = ids[: len(part)]
        assert np.array_equal(digest_rows(some, [part]), digest_rows(some, [np.array(part)]))
    ids = np.unique(RNG.integers(0, 5 * BUCKET_ROWS, 1000))
    digests = RNG.integers(0, 2**63, ids.size).astype(np.uint64)
    buckets, sums, counts = bucket_digests(ids, digests)
    assert counts.sum() == ids.size
    for bucket, total, count in zip(buckets, sums, counts, strict=True):
        inside = ids // BUCKET_ROWS == bucket
        assert (digests[inside].sum(), inside.sum()) == (total, count)
    order = RNG.permutation(ids.size)
    for again, first in zip(bucket_digests(ids[order], digests[order]), (buckets, sums, counts), strict=True):
        assert np.array_equal(again, first)
    assert [part.size for part in bucket_digests(ids[:0], digests[:0])] == [0, 0, 0]


@pytest.mark.parametrize(
    ("row", "is_inside"),
    [(9, False), (10, True), (BUCKET_ROWS, True), (BUCKET_ROWS + 4, True), (BUCKET_ROWS + 5, False), (2**40, False)],
)
def test_rows_out_of_the_range_are_refused(row: int, is_inside: bool) -> None:
    """A reply about rows that nobody has asked for is no digest: the asker has no such rows to compare."""
    bits = np.zeros(BUCKET_ROWS, np.uint8)
    bits[row % BUCKET_ROWS] = 1
    reply = idl.DigestRowsReply(
        buckets=np.array([row // BUCKET_ROWS], "<i8").tobytes(),
        digests=bytes(8),
        counts=np.array([1], "<i8").tobytes(),
        presence=np.packbits(bits, bitorder="little").tobytes(),
        next_row=BUCKET_ROWS + 5,
        seq=1,
    )
    spec = TableSpec(fqn="t", num_rows=2 * BUCKET_ROWS, dim=4, dtype=DType.FLOAT32)
    digest = TableDigest(spec=spec, columns=spec.whole)
    with contextlib.nullcontext() if is_inside else pytest.raises(ProtocolError):
        digest.add(reply, first_row=10, end_row=BUCKET_ROWS + 5)
