"""Thrift messages in the strict binary protocol, with bulk columns as views.

The codec follows the struct specifications that thriftpy2 derives from the IDL. Decoding returns `binary` fields as
views into the given buffer, never as copies; encoding returns a list of segments in which long columns are the caller's
own buffers. Nothing here touches a socket.

The decoder is safe against any bytes. It checks each length against the remaining bytes, limits containers by count and
depth and texts by length, refuses a known field of the wrong type, and skips unknown fields. Every violation raises
`ProtocolError`.

Source: "Thrift Binary protocol encoding" in the Apache Thrift specification (doc/specs/thrift-binary-protocol.md).
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.schemas.errors import ProtocolError

__all__ = [
    "CALL",
    "EXCEPTION",
    "MAX_ELEMENTS",
    "MAX_TEXT_BYTES",
    "REPLY",
    "MessageHeader",
    "Segment",
    "decode_header",
    "decode_struct",
    "encode_message",
    "find_fields",
    "size_of_segments",
]

# ON THE WIRE: Thrift's own numbers.
CALL, REPLY, EXCEPTION = 1, 2, 3
_VERSION_1 = 0x8001
_STOP, _BOOL, _BYTE, _DOUBLE, _I16, _I32, _I64, _STRING = 0, 2, 3, 4, 6, 8, 10, 11
_STRUCT, _MAP, _SET, _LIST = 12, 13, 14, 15
# thriftpy2's own type for `binary`, to distinguish it from `string`; it is never sent.
_SPEC_BINARY = 18

_MAX_DEPTH = 16
MAX_ELEMENTS = 65_536
"""Limit for elements of all containers plus unknown fields of a message: far above any real message, far below what
would fill memory with small objects. To decode so many takes half a second."""
_MAX_NAME_BYTES = 128
MAX_TEXT_BYTES = 65_536
"""Longest text of a message, in UTF-8. Errors quote and escape names, which takes seconds for a frame-long name."""
# JSON that lists every file of a store.
_LONG_TEXTS = frozenset({"CreateSnapshotReply.part", "FinishSnapshotRequest.manifest"})
_MAX_FOUND = 16  # places that `find_fields` yields, so that nobody can make them many
# Fields that go before those with lower numbers, because a server looks for them in the first bytes of a frame.
_WRITTEN_FIRST = frozenset({"HelloRequest.token"})
_PATIENT_VALUES = 32  # that a decoder reads before it gives way to other threads
# Below this size, copying a field costs less than an extra segment.
_BULK_BYTES = 2048

Segment = bytes | memoryview

_MESSAGE_START = struct.Struct(">HxBi")  # version, kind, length of the name
_I16_AT = struct.Struct(">h").unpack_from
_I32_OF = struct.Struct(">i").pack
_I32_AT = struct.Struct(">i").unpack_from
_FIXED: dict[int, struct.Struct] = {
    _BYTE: struct.Struct(">b"),
    _DOUBLE: struct.Struct(">d"),
    _I16: struct.Struct(">h"),
    _I32: struct.Struct(">i"),
    _I64: struct.Struct(">q"),
}
_FIXED_BYTES = {_BOOL: 1} | {ttype: fixed.size for ttype, fixed in _FIXED.items()}
_FIELD_HEADER = struct.Struct(">bh")
_LIST_HEADER = struct.Struct(">bi")
_LENGTH = struct.Struct(">i")


@dataclass(frozen=True, slots=True)
class MessageHeader:
    """The header that precedes a message's struct.

    Attributes:
        name: Method name.
        kind: CALL, REPLY or EXCEPTION.
        seqid: Number that matches a reply to its call.
        body_offset: Offset of the struct in the frame.
    """

    name: str
    kind: int
    seqid: int
    body_offset: int


def decode_header(frame: memoryview) -> MessageHeader:
    """Return the header of the message in a frame.

    Raises:
        ProtocolError: The bytes are not a strict binary message.
    """
    try:
        version, kind, name_bytes = _MESSAGE_START.unpack_from(frame, 0)
        if version != _VERSION_1 or kind not in (CALL, REPLY, EXCEPTION):
            raise ProtocolError(f"not a strict binary Thrift message: it begins with {bytes(frame[:4]).hex()}")
        if not 0 <= name_bytes <= min(_MAX_NAME_BYTES, len(frame) - 12):
            raise ProtocolError(f"a message name of {name_bytes} bytes in a frame of {len(frame)}")
        name = str(frame[8 : 8 + name_bytes], "utf-8")
        (seqid,) = _I32_AT(frame, 8 + name_bytes)
    except (struct.error, UnicodeDecodeError) as exc:
        raise ProtocolError(f"message header: {exc}") from exc
    return MessageHeader(name, kind, seqid, 12 + name_bytes)


def decode_struct(
    cls: type[Any],
    frame: memoryview,
    offset: int,
    *,
    max_elements: int = MAX_ELEMENTS,
    give_way: Callable[[], None] | None = None,
) -> Any:
    """Return the struct at the end of a frame.

    Args:
        cls: thriftpy2's class for the struct.
        frame: uint8 view; the result's `binary` fields are views into it.
        offset: Offset of the struct.
        max_elements: Bound on the elements of all containers plus unknown fields.
        give_way: Called after every few values, in a thread that must not hold up others.

    Raises:
        ProtocolError: Truncated input, a length out of bounds, a wrong type, a missing field, or trailing bytes.
    """
    decoder = _Decoder(frame, max_elements) if give_way is None else _PatientDecoder(frame, max_elements, give_way)
    try:
        value, end = decoder.read_struct(cls, offset, 0)
    except (struct.error, IndexError, UnicodeDecodeError) as exc:
        raise ProtocolError(f"{cls.__name__}: {exc}") from exc
    if end != len(frame):
        raise ProtocolError(f"{cls.__name__}: {len(frame) - end} bytes follow the message in its frame")
    return value


def find_fields(cls: type[Any], name: str, head: memoryview) -> Iterator[Any]:
    """Yield what may be the values of a struct's field in the first bytes of a frame, found by its header alone.

    Nothing else is decoded. Bytes of other fields may look like it, so a few values are yielded at most.

    Args:
        cls: thriftpy2's class for the struct.
        name: A field with a number or a text.
        head: uint8 view of the beginning of a frame, or all of it.
    """
    field = next(field for field in _plan_of(cls).fields if field.name == name)
    data, decoder, pos = bytes(head), _Decoder(head, 0), -1
    for _ in range(_MAX_FOUND):
        pos = data.find(field.header, pos + 1)
        if pos < 0:
            return
        with contextlib.suppress(ProtocolError, struct.error, UnicodeDecodeError):
            yield field.read(decoder, pos + len(field.header), 0)[0]


def encode_message(name: str, kind: int, seqid: int, body: Any) -> list[Segment]:
    """Return a message as consecutive segments, without the frame's length.

    Args:
        name: Method name.
        kind: CALL, REPLY or EXCEPTION.
        seqid: −2³¹ to 2³¹ − 1.
        body: Struct of a thriftpy2 class. A long `binary` field becomes a segment that is a view of the field's own
            buffer, which must not change until it is written.

    Raises:
        ProtocolError: A required field is None or a value does not fit its type.
    """
    encoder = _Encoder()
    encoder.small += _MESSAGE_START.pack(_VERSION_1, kind, len(name)) + name.encode() + _I32_OF(seqid)
    try:
        encoder.write_struct(body)
    except (struct.error, TypeError, AttributeError, KeyError) as exc:
        raise ProtocolError(f"{type(body).__name__}: {exc}") from exc
    encoder.flush()
    return encoder.segments


def size_of_segments(segments: Sequence[Segment]) -> int:
    """Return the total number of bytes of all segments."""
    return sum(segment.nbytes if isinstance(segment, memoryview) else len(segment) for segment in segments)


_Read = Callable[["_Decoder", int, int], tuple[Any, int]]
_Write = Callable[["_Encoder", Any], None]


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    wire_type: int
    header: bytes
    bit: int
    is_required: bool
    read: _Read
    write: _Write


class _Plan:
    def __init__(self, cls: type[Any]) -> None:
        self.by_number: dict[int, _Field] = {}
        for number, spec in sorted(cls.thrift_spec.items()):
            ttype, name, *detail, is_required = spec
            read, write = _codec_of(ttype, detail[0] if detail else None)
            if f"{cls.__name__}.{name}" in _LONG_TEXTS:
                read, write = _Decoder.read_long_text, _Encoder.write_long_text
            wire_type = _STRING if ttype == _SPEC_BINARY else ttype
            header = _FIELD_HEADER.pack(wire_type, number)
            bit = 1 << len(self.by_number)
            self.by_number[number] = _Field(name, wire_type, header, bit, is_required, read, write)
        early = [field for field in self.by_number.values() if f"{cls.__name__}.{field.name}" in _WRITTEN_FIRST]
        self.fields = early + [field for field in self.by_number.values() if field not in early]
        self.required_bits = sum(field.bit for field in self.fields if field.is_required)


_PLANS: dict[type[Any], _Plan] = {}


def _plan_of(cls: type[Any]) -> _Plan:
    plan = _PLANS.get(cls)
    if plan is None:
        plan = _PLANS[cls] = _Plan(cls)
    return plan


def _codec_of(ttype: int, detail: Any) -> tuple[_Read, _Write]:
    if ttype in _FIXED:
        return _fixed_codec(ttype)
    if ttype == _BOOL:
        return _Decoder.read_bool, _Encoder.write_bool
    if ttype == _STRING:
        return _Decoder.read_text, _Encoder.write_text
    if ttype == _SPEC_BINARY:
        return _Decoder.read_binary, _Encoder.write_binary
    if ttype == _STRUCT:
        return (lambda decoder, pos, depth: decoder.read_struct(detail, pos, depth)), _Encoder.write_struct
    if ttype == _LIST:
        element, inner = detail if isinstance(detail, tuple) else (detail, None)
        read, write = _codec_of(element, inner)
        wire_type = _STRING if element == _SPEC_BINARY else element
        return (
            lambda decoder, pos, depth: decoder.read_list(wire_type, read, pos, depth),
            lambda encoder, values: encoder.write_list(wire_type, write, values),
        )
    raise NotImplementedError(f"the codec does not support Thrift type {ttype}, which the IDL uses")


def _fixed_codec(ttype: int) -> tuple[_Read, _Write]:
    fixed = _FIXED[ttype]
    unpack_from, pack, size = fixed.unpack_from, fixed.pack, fixed.size

    def read(decoder: _Decoder, pos: int, depth: int) -> tuple[Any, int]:
        return unpack_from(decoder.frame, pos)[0], pos + size

    def write(encoder: _Encoder, value: Any) -> None:
        encoder.small += pack(value)

    return read, write


class _Decoder:
    def __init__(self, frame: memoryview, max_elements: int) -> None:
        self.frame = frame
        self.elements_left = max_elements

    def read_struct(self, cls: type[Any], pos: int, depth: int) -> tuple[Any, int]:
        if depth > _MAX_DEPTH:
            raise ProtocolError(f"structs nest deeper than {_MAX_DEPTH}")
        plan, frame, value = _plan_of(cls), self.frame, cls()
        by_number, depth = plan.by_number, depth + 1
        values, seen_bits = value.__dict__, 0
        while (wire_type := frame[pos]) != _STOP:
            (number,) = _I16_AT(frame, pos + 1)
            field = by_number.get(number)
            if field is None:
                self.spend(1, len(frame) - pos)
                pos = self.skip(wire_type, pos + 3, depth)
                continue
            if field.wire_type != wire_type:
                raise ProtocolError(
                    f"{cls.__name__}.{field.name} has Thrift type {wire_type}, the IDL says {field.wire_type}"
                )
            if seen_bits & field.bit:
                raise ProtocolError(f"{cls.__name__}.{field.name} comes twice")
            seen_bits |= field.bit
            values[field.name], pos = field.read(self, pos + 3, depth)
        missing_bits = plan.required_bits & ~seen_bits
        if missing_bits:
            names = ", ".join(field.name for field in plan.fields if field.bit & missing_bits)
            raise ProtocolError(f"{cls.__name__} lacks {names}")
        return value, pos + 1

    def read_list(self, wire_type: int, read: _Read, pos: int, depth: int) -> tuple[list[Any], int]:
        element, count = _LIST_HEADER.unpack_from(self.frame, pos)
        pos += 5
        self.spend(count, len(self.frame) - pos)
        if element != wire_type and count:
            raise ProtocolError(f"a list of Thrift type {element} where the IDL says {wire_type}")
        values = []
        for _ in range(count):
            value, pos = read(self, pos, depth)
            values.append(value)
        return values, pos

    def read_bool(self, pos: int, depth: int) -> tuple[bool, int]:
        return self.frame[pos] != 0, pos + 1

    def read_binary(self, pos: int, depth: int) -> tuple[memoryview, int]:
        (size,) = _I32_AT(self.frame, pos)
        start = pos + 4
        end = start + size
        if size < 0 or end > len(self.frame):
            raise ProtocolError(f"a field has {size} bytes where only {len(self.frame) - start} are left")
        return self.frame[start:end], end

    def read_text(self, pos: int, depth: int) -> tuple[str, int]:
        (size,) = _I32_AT(self.frame, pos)
        if size > MAX_TEXT_BYTES:
            raise ProtocolError(f"a text has {size} bytes; the maximum is {MAX_TEXT_BYTES}")
        return self.read_long_text(pos, depth)

    def read_long_text(self, pos: int, depth: int) -> tuple[str, int]:
        view, end = self.read_binary(pos, depth)
        return str(view, "utf-8"), end

    def spend(self, count: int, bytes_left: int) -> None:
        # Every element takes at least one byte, so the count cannot exceed the remaining bytes.
        self.elements_left -= count
        if count < 0 or count > bytes_left or self.elements_left < 0:
            raise ProtocolError(f"a container has {count} elements where only {bytes_left} bytes are left")

    def skip(self, wire_type: int, pos: int, depth: int) -> int:
        if depth > _MAX_DEPTH:
            raise ProtocolError(f"values nest deeper than {_MAX_DEPTH}")
        if wire_type in _FIXED_BYTES:
            pos += _FIXED_BYTES[wire_type]
        elif wire_type == _STRING:
            _, pos = self.read_binary(pos, depth)
        elif wire_type == _STRUCT:
            while (field_type := self.frame[pos]) != _STOP:
                self.spend(1, len(self.frame) - pos)
                pos = self.skip(field_type, pos + 3, depth + 1)
            pos += 1
        elif wire_type in (_LIST, _SET):
            element, count = _LIST_HEADER.unpack_from(self.frame, pos)
            pos = self.skip_many((element,), count, pos + 5, depth)
        elif wire_type == _MAP:
            key, element, count = struct.unpack_from(">bbi", self.frame, pos)
            pos = self.skip_many((key, element), count, pos + 6, depth)
        else:
            raise ProtocolError(f"unknown Thrift type {wire_type}")
        if pos > len(self.frame):
            raise ProtocolError("a value ends beyond its frame")
        return pos

    def skip_many(self, wire_types: tuple[int, ...], count: int, pos: int, depth: int) -> int:
        self.spend(count, len(self.frame) - pos)
        for _ in range(count):
            for wire_type in wire_types:
                pos = self.skip(wire_type, pos, depth + 1)
        return pos


class _PatientDecoder(_Decoder):
    """Gives way after every few elements."""

    def __init__(self, frame: memoryview, max_elements: int, give_way: Callable[[], None]) -> None:
        super().__init__(frame, max_elements)
        self._give_way = give_way
        self._num_values = 0

    def read_list(self, wire_type: int, read: _Read, pos: int, depth: int) -> tuple[list[Any], int]:
        def read_patiently(decoder: _Decoder, pos: int, depth: int) -> tuple[Any, int]:
            self._count()
            return read(decoder, pos, depth)

        return super().read_list(wire_type, read_patiently, pos, depth)

    def skip(self, wire_type: int, pos: int, depth: int) -> int:
        self._count()
        return super().skip(wire_type, pos, depth)

    def _count(self) -> None:
        self._num_values += 1
        if not self._num_values % _PATIENT_VALUES:
            self._give_way()


class _Encoder:
    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.small = bytearray()

    def flush(self) -> None:
        if self.small:
            self.segments.append(bytes(self.small))
            self.small.clear()

    def write_struct(self, value: Any) -> None:
        small, values = self.small, value.__dict__
        for field in _plan_of(type(value)).fields:
            item = values[field.name]
            if item is None:
                if field.is_required:
                    raise ProtocolError(f"{type(value).__name__}.{field.name} is required")
                continue
            small += field.header
            field.write(self, item)
        small.append(_STOP)

    def write_list(self, wire_type: int, write: _Write, values: list[Any]) -> None:
        self.small += _LIST_HEADER.pack(wire_type, len(values))
        for value in values:
            write(self, value)

    def write_bool(self, value: bool) -> None:
        self.small.append(1 if value else 0)

    def write_text(self, value: str) -> None:
        data = value.encode()
        if len(data) > MAX_TEXT_BYTES:
            raise ProtocolError(f"the text {value[:40]!r}… has {len(data)} bytes; the maximum is {MAX_TEXT_BYTES}")
        self.small += _LENGTH.pack(len(data)) + data

    def write_long_text(self, value: str) -> None:
        data = value.encode()
        self.small += _LENGTH.pack(len(data)) + data

    def write_binary(self, value: Any) -> None:
        view = memoryview(value)
        self.small += _LENGTH.pack(view.nbytes)
        if view.nbytes < _BULK_BYTES:
            # `tobytes` also accepts a view with a zero in its shape, which `cast` refuses.
            self.small += view.tobytes()
        else:
            self.flush()
            self.segments.append(view.cast("B"))
