"""Row digests: the same in every process, and different for different rows."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.schemas.row_digest import BUCKET_ROWS, bucket_digests, digest_rows

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
    expected = [
        plain_digest(int(row), [w.tobytes(), s.tobytes()]) for row, w, s in zip(ids, weights, state, strict=True)
    ]
    assert digest_rows(ids, [weights, state]).tolist() == expected


def test_golden() -> None:
    """The digest of a certain row never changes: saved digests and other processes rely on it."""
    weights = np.arange(8, dtype="<f4").reshape(1, 8)
    assert digest_rows(np.array([42]), [weights]).tolist() == [plain_digest(42, [weights.tobytes()])]
    assert plain_digest(42, [weights.tobytes()]) == GOLDEN


def test_views_and_copies_agree() -> None:
    """Columns of a wider tensor and expanded ones have the digest of their copy."""
    wide = RNG.standard_normal((100, 30)).astype("<f4")
    ids = np.arange(100)
    for part in (wide[:, 3:10], wide[:, 4:12], np.broadcast_to(wide[:1, :1], (100, 1)), wide[::2][:50]):
        some = ids[: len(part)]
        assert np.array_equal(digest_rows(some, [part]), digest_rows(some, [np.array(part)]))


def test_every_bit_counts() -> None:
    """Flipping any one bit, and the signs of any two elements, changes the digest."""
    row = RNG.standard_normal((1, 8)).astype("<f4")
    ids = np.array([3])
    flipped = np.repeat(row.view("<u4"), 256, axis=0)
    for bit in range(256):
        flipped[bit, bit // 32] ^= np.uint32(1 << (bit % 32))
    seen = digest_rows(np.repeat(ids, 256), [flipped.view("<f4")]).tolist()
    assert len({*seen, int(digest_rows(ids, [row])[0])}) == 257
    signs = [row * np.where(np.isin(np.arange(8), (a, b)), -1, 1) for a in range(8) for b in range(a)]
    seen = digest_rows(np.repeat(ids, 28), [np.concatenate(signs).astype("<f4")]).tolist()
    assert len({*seen, int(digest_rows(ids, [row])[0])}) == 29


def test_rows_that_swap_places_differ() -> None:
    """The sum over a table tells two rows that have each other's values, and a row that is there twice."""
    weights = RNG.standard_normal((4, 8)).astype("<f4")
    ids = np.arange(4)
    total = digest_rows(ids, [weights]).sum()
    assert digest_rows(ids, [weights[[1, 0, 2, 3]]]).sum() != total
    assert digest_rows(ids[[0, 0, 2, 3]], [weights[[0, 0, 2, 3]]]).sum() != total
    assert digest_rows(ids[::-1].copy(), [weights[::-1]]).sum() == total


def test_buckets_add_up() -> None:
    """Digests of buckets are sums of their rows', in any order of the rows, and of parts of them."""
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
