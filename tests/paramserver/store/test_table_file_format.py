"""RocksDB's numbers and checksums, against bytes that RocksDB would write."""

from __future__ import annotations

import numpy as np
import pytest
from crc32c import crc32c

from headrace.paramserver.store.table_file_format import entry_head, mask_crc, read_handle, read_varint, varint


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
    """The lowest come first, and every byte but the last says that more follow; one that is cut is no number."""
    assert varint(number) == data
    assert read_varint(b"x" + data + b"x", 1) == (number, 1 + len(data))
    with pytest.raises(IndexError):
        read_varint(data[:-1], 0)


def test_a_handle_is_two_numbers() -> None:
    """Offset and size, one behind the other."""
    assert read_handle(b"x" + varint(300) + varint(128) + b"x", 1) == (300, 128, 5)
    with pytest.raises(IndexError):
        read_handle(varint(300), 0)


def test_an_entry_begins_with_the_lengths_of_key_and_value() -> None:
    """Nothing is shared with the key before; a key has 24 bytes, with its tag."""
    assert entry_head(300) == b"\x00\x18\xac\x02"


def test_checksums_are_stored_turned_and_raised() -> None:
    """By 15 bits to the right, and by a number that RocksDB adds to all; what is too large for 32 bits goes."""
    assert crc32c(b"123456789") == 0xE3069283
    checksums = np.array([0xE3069283, 0, 0x4000], np.uint32)  # turned: 0x2507C60D, 0, 0x80000000
    assert mask_crc(checksums).tolist() == [0xC78AB0E5, 0xA282EAD8, 0x2282EAD8]
