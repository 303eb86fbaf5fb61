"""Compressed messages come back with every bit, and no bytes make their decoder do anything else than refuse."""

from __future__ import annotations

import re
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from set_embeddings import delta_of, request_of

from headrace.schemas.errors import ConfigError, ProtocolError
from headrace.schemas.extras import install_command
from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, encode_message
from headrace.schemas.packed_messages import (
    ZSTD,
    check_compression,
    known_compressions,
    pack_request,
    size_of_packed,
    unpack_message,
)
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec

zstandard = pytest.importorskip("zstandard", reason="needs the extra zstd")

STATE = StateSpec(name="exp_avg", kind=StateKind.POINTWISE, dtype=DType.FLOAT32)
ROWWISE = StateSpec(name="sum", kind=StateKind.ROWWISE, dtype=DType.FLOAT64, width=1)
SPEC = TableSpec(fqn="t", num_rows=100_000, dim=16, dtype=DType.FLOAT32, states=(STATE, ROWWISE), has_identities=True)
MAX_BYTES = 1 << 20


def request(num_rows: int = 1000, **changes: Any) -> Any:
    """Return rows like those of a trained table: small numbers around zero."""
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.1, (num_rows, SPEC.dim))
    states = {"exp_avg": weights / 9, "sum": rng.random((num_rows, 1))}
    ids = np.arange(num_rows)
    more = {"identities": (ids * 7).astype("<i8").tobytes(), "deleted_row_ids": (ids + 5000).astype("<i8").tobytes()}
    return request_of(delta_of(SPEC, ids, weights, states=states, **more), **changes)


def plain(request: Any) -> bytes:
    args = idl.ParameterServer.setEmbeddings_args(request=request)
    return b"".join(bytes(part) for part in encode_message("setEmbeddings", CALL, 0, args))


def packed(part: Any) -> Any:
    return idl.SetPackedRequest(compression=idl.Compression.ZSTD, parts=[part])


def part(data: bytes, *, size_bytes: int, element_bytes: int = 1) -> Any:
    return idl.PackedPart(size_bytes=size_bytes, element_bytes=element_bytes, data=data)


def unpack(request: Any) -> bytes:
    return bytes(unpack_message(request, size_of_packed(request, max_bytes=MAX_BYTES)))


@pytest.mark.parametrize("num_rows", [1000, 700, 300])  # with fewer rows, more of the columns are no parts of their own
def test_the_message_comes_back(num_rows: int) -> None:
    """Every bit is as it was, in fewer bytes, and the numbers say how many."""
    before = plain(request(num_rows))
    compressed, plain_bytes, packed_bytes = pack_request(request(num_rows))
    assert unpack(compressed) == before
    assert plain_bytes == len(before)
    assert packed_bytes == sum(len(part.data) for part in compressed.parts) < 0.9 * plain_bytes


def test_numbers_are_compressed_by_plane() -> None:
    """Each column has its element's size. Ids take a twentieth of their bytes, four times less than without planes."""
    compressed, *_ = pack_request(request())
    assert [part.element_bytes for part in compressed.parts] == [0, 8, 0, 4, 0, 4, 0, 8, 0, 8, 0, 8, 0]
    ids = compressed.parts[1]
    assert len(ids.data) * 20 < ids.size_bytes
    assert len(ids.data) * 4 < len(zstandard.ZstdCompressor(level=1).compress(np.arange(1000, dtype="<i8").tobytes()))


def test_noise_is_left_as_it_is() -> None:
    """A message that would hardly get smaller is not packed; a column that would not is a view."""
    noise = np.frombuffer(np.random.default_rng(0).bytes(64_000), "<f4").reshape(1000, 16)
    spec = TableSpec(fqn="t", num_rows=100_000, dim=16, dtype=DType.FLOAT32)
    batch = request_of(delta_of(spec, np.random.default_rng(0).permutation(100_000)[:1000], noise))
    compressed, *_ = pack_request(batch)
    assert isinstance(compressed.parts[3].data, memoryview)
    assert unpack(compressed) == plain(batch)
    short = request_of(delta_of(spec, [1], noise[:1]))
    assert pack_request(short) == (None, len(plain(short)), len(plain(short)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size_bytes": 0}, "parts of 0 bytes"),
        ({"size_bytes": -1}, "parts of -1 bytes"),
        ({"size_bytes": MAX_BYTES + 1}, f"the limit is {MAX_BYTES}"),
        ({"element_bytes": 3}, "elements of 3 bytes"),
        ({"element_bytes": -4}, "elements of -4 bytes"),
        ({"element_bytes": 8}, "1001 bytes has elements of 8"),
        ({"element_bytes": 0}, "of 1001 bytes"),
    ],
)
def test_sizes_out_of_bounds(changes: dict[str, int], words: str) -> None:
    """Sizes that cannot be are refused before anything is allocated."""
    fields = {"size_bytes": 1001, "element_bytes": 1} | changes
    with pytest.raises(ProtocolError, match=words):
        size_of_packed(packed(part(zstandard.compress(bytes(1001)), **fields)), max_bytes=MAX_BYTES)


def test_what_is_no_message() -> None:
    """No parts, an unknown compression, and parts that are too long together are refused."""
    each = part(b"x" * 600_000, size_bytes=600_000, element_bytes=0)
    for parts, compression, words in (([], 1, "without parts"), ([each], 7, "compression 7"), ([each] * 2, 1, "limit")):
        with pytest.raises(ProtocolError, match=words):
            size_of_packed(idl.SetPackedRequest(compression=compression, parts=parts), max_bytes=MAX_BYTES)


@pytest.mark.parametrize("says_size", [True, False])
def test_a_frame_cannot_ask_for_memory(says_size: bool) -> None:
    """A part whose frame holds more than it declares, or does not say how much, is refused without that memory."""
    bomb = zstandard.ZstdCompressor(level=1, write_content_size=says_size).compress(bytes(256 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="where 1000 bytes are declared"):
            unpack(packed(part(bomb, size_bytes=1000)))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("damage", [b"", b"\0", b"\x28\xb5\x2f\xfd", b"trailing"])
def test_damaged_frames(damage: bytes) -> None:
    """A frame that is cut off, is none, or has bytes behind it is refused."""
    frame = zstandard.compress(bytes(range(250)) * 4)
    wrong = frame + damage if damage == b"trailing" else damage
    with pytest.raises(ProtocolError):
        unpack(packed(part(wrong, size_bytes=1000)))
    with pytest.raises(ProtocolError):
        unpack(packed(part(frame[:-3], size_bytes=1000)))


@given(data=st.data())
def test_fuzzed_parts(data: st.DataObject) -> None:
    """Whatever a part holds, it is refused or gives as many bytes as it declares."""
    frame = bytearray(zstandard.compress(data.draw(st.binary(max_size=600))))
    for _ in range(data.draw(st.integers(0, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    sizes = {
        "size_bytes": data.draw(st.integers(-1, 700)),
        "element_bytes": data.draw(st.sampled_from([0, 1, 2, 4, 8])),
    }
    wanted = packed(part(bytes(frame[: data.draw(st.integers(0, len(frame)))]), **sizes))
    try:
        found = unpack(wanted)
    except ProtocolError:
        return
    assert len(found) == sizes["size_bytes"]


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that lacks it is told what to install; a server names no compression."""
    check_compression(ZSTD)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert known_compressions() == []
    with pytest.raises(ConfigError, match=re.escape(f"compression: 'zstd' needs {install_command('zstd')}")):
        check_compression(ZSTD)
