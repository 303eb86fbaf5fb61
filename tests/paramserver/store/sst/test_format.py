"""RocksDB's numbers and checksums, against its bytes."""

from __future__ import annotations

import numpy as np
import pytest
from crc32c import crc32c

from headrace.paramserver.store.sst.format import entry_head, mask_crc, read_handle, read_varint, varint


@pytest.mark.parametrize(
    ("number", "data"),
    [
        (0, b"\0"),
        (127, b"\x7f"),
        (128, b"\x80\x01"),
        (300, b"\xac\x02"),
        (16_383, b"\xff\x7f"),
        (16_384, b"\x80\x80\x01"),
        (2**63, b"\x80" * 9 + b"\x01"),
    ],
)
def test_a_number_has_seven_bits_a_byte(number: int, data: bytes) -> None:
    """The lowest bits come first, each byte except the last has its high bit set, and a cut number is an error."""
    assert varint(number) == data
    assert read_varint(b"x" + data + b"x", 1) == (number, 1 + len(data))
    with pytest.raises(IndexError):
        read_varint(data[:-1], 0)


def test_handles_and_entries_begin_with_numbers() -> None:
    """A handle is offset and size; an entry of ours shares no bytes of its 24-byte key with the key before."""
    assert entry_head(300) == b"\x00\x18\xac\x02"
    assert read_handle(b"x" + varint(300) + varint(128) + b"x", 1) == (300, 128, 5)
    with pytest.raises(IndexError):
        read_handle(varint(300), 0)


def test_checksums_are_stored_turned_and_raised() -> None:
    """A checksum is rotated right by 15 bits, and a constant is added modulo 2³²."""
    assert crc32c(b"123456789") == 0xE3069283
    checksums = np.array([0xE3069283, 0, 0x4000], np.uint32)  # turned: 0x2507C60D, 0, 0x80000000
    assert mask_crc(checksums).tolist() == [0xC78AB0E5, 0xA282EAD8, 0x2282EAD8]
