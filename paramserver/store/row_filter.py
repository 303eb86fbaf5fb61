"""RocksDB's bloom filter over row keys, many keys at a time.

The format is that of RocksDB's `FastLocalBloom`: a key touches one 64-byte line. RocksDB reads these filters as its
own, and makes the same bytes of the same keys: a test compares them.

Source: RocksDB's util/bloom_impl.h (`FastLocalBloomImpl`), util/xxph3.h (`XXPH3_len_9to16_64b`) and
table/block_based/filter_policy.cc.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["build_filter", "hash_keys"]

_U64 = npt.NDArray[np.uint64]

# ON DISK: RocksDB's numbers, all of them.
_SECRET = bytes.fromhex("b8fe6c3923a44bbe7c01812cf721ad1c")
_SECRET_LOW, _SECRET_HIGH = (np.uint64(int.from_bytes(_SECRET[at : at + 8], "little")) for at in (0, 8))
_KEY_BYTES = np.uint64(16)
_PRIME_3 = np.uint64(0x165667B19E3779F9)
_GOLDEN_RATIO = np.uint32(0x9E3779B9)
_LINE_BYTES = 64
# Thousandths of a bit a key, up to which so many probes (from one on) serve best.
_PROBES_UP_TO = (2080, 3580, 5100, 6640, 8300, 10070, 11720, 14001, 16050, 18300, 22001, 25501)
_NEW_FORMAT, _FAST_LOCAL = 0xFF, 0


def build_filter(hashes: _U64, *, bits_per_key: int) -> bytes:
    """Return the filter block of some keys, without its trailer.

    Args:
        hashes: From `hash_keys`, one at least, each key once.
        bits_per_key: 1 to 30; each costs 1/8 byte a key.

    Thread: any; other threads run meanwhile, but for some milliseconds.
    """
    num_lines = (hashes.size * bits_per_key + 8 * _LINE_BYTES - 1) // (8 * _LINE_BYTES)
    size_bytes = num_lines * _LINE_BYTES
    num_probes = _num_probes(round(size_bytes * 8000 / hashes.size))
    # The low half of a hash picks the line, without a division.
    first_bits = ((hashes & np.uint64(0xFFFFFFFF)) * np.uint64(num_lines)) >> np.uint64(32)
    first_bits <<= np.uint64(9)
    probe = (hashes >> np.uint64(32)).astype(np.uint32)
    bits = np.zeros(size_bytes * 8, bool)
    for _ in range(num_probes):
        bits[first_bits + (probe >> np.uint32(23))] = True
        probe *= _GOLDEN_RATIO
    return np.packbits(bits, bitorder="little").tobytes() + bytes((_NEW_FORMAT, _FAST_LOCAL, num_probes, 0, 0))


def hash_keys(prefix: bytes, row_ids: npt.NDArray[np.int64]) -> _U64:
    """Return RocksDB's hash of the keys of rows, uint64[n].

    Args:
        prefix: First eight bytes of the keys (`row_keys.key_prefix`).
        row_ids: int64[n].
    """
    low = np.uint64(int.from_bytes(prefix, "little")) ^ _SECRET_LOW
    high = row_ids.astype(">u8").view("<u8") ^ _SECRET_HIGH
    with np.errstate(over="ignore"):  # of scalars; arrays wrap around in silence
        hashed = (_KEY_BYTES + low) + high
        hashed += _multiply_and_fold(low, high)
        hashed ^= hashed >> np.uint64(37)
        hashed *= _PRIME_3
    hashed ^= hashed >> np.uint64(32)
    return hashed


def _multiply_and_fold(left: np.uint64, right: _U64) -> _U64:
    """Return high half xor low half of the 128-bit product."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    left_low, left_high = left & mask, left >> half
    right_low, right_high = right & mask, right >> half
    middle = right_low * left_high
    cross = right_high * left_low
    cross += (right_low * left_low) >> half
    cross += middle & mask  # at most 2⁶⁴ − 1
    high = right_high * left_high
    high += middle >> half
    high += cross >> half
    high ^= right * left
    return high


def _num_probes(millibits_per_key: int) -> int:
    for number, most in enumerate(_PROBES_UP_TO, 1):
        if millibits_per_key <= most:
            return number
    return 24 if millibits_per_key > 50_000 else (millibits_per_key - 1) // 2000 - 1
