"""A `setEmbeddings` message in compressed parts, one a column: its numbers' bytes by plane, then Zstandard.

Trained floats have like signs and exponents, while their low bytes are noise: by plane, the bytes that compress lie
together. A part that would hardly get smaller stays as it is.

The decoder is safe against any bytes: the sizes that parts declare are checked before anything is allocated.

Source: the byte shuffle of HDF5 and Blosc; RFC 8878 (Zstandard). The sizes and speeds are in docs/wire.md.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.schemas.errors import ConfigError, ProtocolError
from headrace.schemas.extras import install_command
from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, Segment, encode_message, size_of_segments
from headrace.schemas.tables import DType

__all__ = ["ZSTD", "check_compression", "known_compressions", "pack_request", "size_of_packed", "unpack_message"]

ZSTD = "zstd"
"""Name of the compression, in a hello and in settings."""

# Level 3 takes up to three times as long, and saves nothing more of weights and states.
_LEVEL = 1
# A shorter part is not worth a Zstandard frame.
_MIN_BYTES = 512
# A part, and a message, that would save less than this share of its bytes stays as it is.
_LEAST_SAVED = 1 / 32
_ELEMENT_BYTES = {1, 2, 4, 8}
# A frame may ask its decoder for a window of this size, or of its contents.
_MAX_WINDOW_BYTES = 2**20

_Bytes = npt.NDArray[np.uint8]


def known_compressions() -> list[str]:
    """Return the names of the compressions whose library is installed."""
    return [ZSTD] if importlib.util.find_spec("zstandard") is not None else []


def check_compression(compression: str) -> None:
    """Raise ConfigError if a compression's library is not installed."""
    if compression not in known_compressions():
        raise ConfigError(f"compression: {compression!r} needs {install_command(compression)}")


def pack_request(request: Any) -> tuple[Any, int, int]:
    """Return (an `idl.SetPackedRequest`, the message's bytes, the bytes of its parts) of an `idl.SetEmbeddingsRequest`.

    The first is None if compression saves too little. Parts that stay as they are are views of the request's columns,
    which must not change until they are sent. REQUIRES: zstandard is installed.
    """
    import zstandard

    args = idl.ParameterServer.setEmbeddings_args(request=request)
    segments, columns = encode_message("setEmbeddings", CALL, 0, args), _columns_of(request)
    compressor, parts = zstandard.ZstdCompressor(level=_LEVEL), []
    for segment in segments:
        element_bytes = 1
        if isinstance(segment, memoryview):
            # Shorter columns, which are no segments of their own, are shorter than any that is one.
            element_bytes = next(width for column, width in columns if memoryview(column).nbytes == segment.nbytes)
        parts.append(_pack_part(compressor, segment, element_bytes))
    size_bytes, packed_bytes = size_of_segments(segments), sum(len(part.data) for part in parts)
    if packed_bytes > size_bytes * (1 - _LEAST_SAVED):
        return None, size_bytes, size_bytes
    return idl.SetPackedRequest(compression=idl.Compression.ZSTD, parts=parts), size_bytes, packed_bytes


def size_of_packed(packed: Any, *, max_bytes: int) -> int:
    """Return the bytes that the message of an `idl.SetPackedRequest` will have, 1 to `max_bytes`.

    Raises:
        ProtocolError: It is compressed in another way, or the sizes of its parts are out of bounds.
    """
    if packed.compression != idl.Compression.ZSTD:
        raise ProtocolError(f"a message in compression {packed.compression}, which this server does not know")
    size_bytes = 0
    for part in packed.parts:
        size_bytes += part.size_bytes
        if part.size_bytes < 1 or size_bytes > max_bytes:
            raise ProtocolError(f"a compressed message has parts of {part.size_bytes} bytes; the limit is {max_bytes}")
        if part.element_bytes and (part.element_bytes not in _ELEMENT_BYTES or part.size_bytes % part.element_bytes):
            raise ProtocolError(f"a part of {part.size_bytes} bytes has elements of {part.element_bytes} bytes")
        if not part.element_bytes and len(part.data) != part.size_bytes:
            raise ProtocolError(f"a part that is not compressed has {len(part.data)} of {part.size_bytes} bytes")
    if not size_bytes:
        raise ProtocolError("a compressed message without parts")
    return size_bytes


def unpack_message(packed: Any, size_bytes: int) -> memoryview:
    """Return the message of an `idl.SetPackedRequest`, uint8, read-only; `size_bytes` is from `size_of_packed`.

    Takes as much memory again as its longest part while it runs. Thread: any. REQUIRES: zstandard is installed.

    Raises:
        ProtocolError: A part is damaged, or does not have the size that it declares.
    """
    import zstandard

    message, begin, decompressor = np.empty(size_bytes, np.uint8), 0, zstandard.ZstdDecompressor()
    for part in packed.parts:
        end, width = begin + part.size_bytes, part.element_bytes
        if not width:
            message[begin:end] = np.frombuffer(part.data, np.uint8)
        else:
            planes = _decompress(decompressor, part).reshape(width, -1)
            message[begin:end].reshape(-1, width)[:] = planes.T
        begin = end
    return message.data.toreadonly()


def _columns_of(request: Any) -> Iterator[tuple[Any, int]]:
    """Yield (column, bytes of an element) in the order of a message."""
    for delta in request.deltas:
        yield delta.row_ids, 8
        num_elements = memoryview(delta.row_ids).nbytes // 8 * delta.width
        yield delta.weights, memoryview(delta.weights).nbytes // max(1, num_elements)
        for state in delta.states:
            yield state.data, DType(state.dtype).size_bytes
        for ids in (delta.identities, delta.deleted_row_ids):
            if ids is not None:
                yield ids, 8


def _pack_part(compressor: Any, segment: Segment, element_bytes: int) -> Any:
    size_bytes = len(segment)
    if size_bytes >= _MIN_BYTES:
        planes = np.frombuffer(segment, np.uint8).reshape(-1, element_bytes).T
        packed = compressor.compress(np.ascontiguousarray(planes).reshape(-1))
        if len(packed) <= size_bytes * (1 - _LEAST_SAVED):
            return idl.PackedPart(size_bytes=size_bytes, element_bytes=element_bytes, data=packed)
    return idl.PackedPart(size_bytes=size_bytes, element_bytes=0, data=segment)


def _decompress(decompressor: Any, part: Any) -> _Bytes:
    import zstandard

    try:
        # Without this, the frame itself would say how much is allocated.
        told = zstandard.get_frame_parameters(part.data)
        if told.content_size != part.size_bytes or told.window_size > max(part.size_bytes, _MAX_WINDOW_BYTES):
            raise ProtocolError(
                f"a compressed part has {told.content_size} bytes and a window of {told.window_size}, "
                f"where {part.size_bytes} bytes are declared"
            )
        data = decompressor.decompress(part.data, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise ProtocolError(f"a compressed part of {len(part.data)} bytes is damaged: {exc}") from exc
    if len(data) != part.size_bytes:
        raise ProtocolError(f"a compressed part has {len(data)} bytes, and {part.size_bytes} are declared")
    return np.frombuffer(data, np.uint8)
