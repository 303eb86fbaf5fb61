"""Random values and random wrong bytes for every struct of the IDL, for tests of its codec and of the server."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from headrace.schemas.idl import idl

BOOL, BYTE, DOUBLE, I16, I32, I64, STRING, STRUCT, MAP, SET, LIST = 2, 3, 4, 6, 8, 10, 11, 12, 13, 14, 15
SPEC_BINARY = 18
"""thriftpy2's own type for `binary`, which is never sent."""
_BITS = {BYTE: 7, I16: 15, I32: 31, I64: 63}

METHODS = list(idl.ParameterServer.thrift_services)
"""Every method of the service."""
STRUCTS: list[Any] = [getattr(idl.ParameterServer, f"{name}_{part}") for name in METHODS for part in ("args", "result")]
"""Every struct that a message consists of."""


def values(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for structs: optional fields come and go, strings and columns are of any length up to some."""
    fields = {}
    for ttype, name, *detail, is_required in cls.thrift_spec.values():
        strategy = _value(ttype, detail[0] if detail else None)
        fields[name] = strategy if is_required else st.none() | strategy
    return st.builds(cls, **fields)


def _value(ttype: int, detail: Any) -> st.SearchStrategy[Any]:
    if ttype in _BITS:
        return st.integers(-(2 ** _BITS[ttype]), 2 ** _BITS[ttype] - 1)
    if ttype == BOOL:
        return st.booleans()
    if ttype == DOUBLE:
        return st.floats(allow_nan=False)
    if ttype == STRING:
        return st.text(max_size=20)
    if ttype == SPEC_BINARY:
        # Around 2048 bytes a column becomes a segment of its own.
        return st.binary(max_size=40) | st.sampled_from([2047, 2048, 5000]).map(bytes)
    if ttype == STRUCT:
        return st.deferred(lambda: values(detail))
    assert ttype == LIST
    element, inner = detail if isinstance(detail, tuple) else (detail, None)
    return st.lists(_value(element, inner), max_size=3)


def example(cls: type[Any], salt: int = 1) -> Any:
    """Return a struct with every field set, the same one for the same arguments."""
    value = cls()
    for number, (ttype, name, *detail, _) in sorted(cls.thrift_spec.items()):
        setattr(value, name, _example(ttype, detail[0] if detail else None, salt * 7 + number))
    return value


def _example(ttype: int, detail: Any, salt: int) -> Any:
    if ttype in _BITS:
        return salt
    if ttype == BOOL:
        return salt % 2 == 0
    if ttype == DOUBLE:
        return salt / 4
    if ttype == STRING:
        return f"s{salt}"
    if ttype == SPEC_BINARY:
        return bytes([salt % 251]) * 3
    if ttype == STRUCT:
        return example(detail, salt)
    element, inner = detail if isinstance(detail, tuple) else (detail, None)
    return [_example(element, inner, salt)]


def field(ttype: int, number: int, payload: bytes = b"") -> bytes:
    """Return a field: its header and whatever follows."""
    return struct.pack(">bh", ttype, number) + payload


def call(name: bytes, body: bytes, *, seqid: int = 1, kind: int = 1, version: int = 0x8001) -> bytes:
    """Return a message with any body."""
    return struct.pack(">HBBi", version, 0, kind, len(name)) + name + struct.pack(">i", seqid) + body


def nasty_bodies() -> Iterator[tuple[str, bytes]]:
    """Yield bytes that are no `setEmbeddings` arguments, each with what is wrong with it.

    Field 1 of the arguments is the request, whose field 1 is a string, 3 an i64 and 9 a list of structs; field 99 is in
    no struct of the IDL.
    """
    i32 = struct.Struct(">i").pack
    request = field(STRUCT, 1)
    yield "nothing at all", b""
    yield "a request that does not end", request
    yield "a field header that is cut", request + b"\x0b\0"
    for size, what in ((-1, "negative"), (-(2**31), "most negative"), (2**31 - 1, "longest"), (1000, "too long")):
        yield f"a string of a {what} length", request + field(STRING, 1, i32(size) + b"abc")
        yield f"an unknown string of a {what} length", request + field(STRING, 99, i32(size) + b"abc")
        for element in (BOOL, I64, STRING, STRUCT, LIST, 0, 1, 17, 127):
            header = struct.pack(">bi", element, size)
            yield f"a list of a {what} count, type {element}", request + field(LIST, 9, header)
            yield f"an unknown list of a {what} count, type {element}", request + field(LIST, 99, header)
            yield f"an unknown set of a {what} count, type {element}", request + field(SET, 99, header)
            both = struct.pack(">bbi", element, element, size)
            yield f"an unknown map of a {what} count, type {element}", request + field(MAP, 99, both)
    for ttype in (0, 1, 5, 7, 9, 16, 17, 18, 100, -1):
        element = struct.pack(">bi", ttype, 2**31 - 1)
        yield f"an unknown field of the wrong type {ttype}", request + field(ttype, 99, b"\0" * 40)
        yield f"a huge unknown list of the wrong type {ttype}", request + field(LIST, 99, element + b"\0" * 40)
    for ttype in (BOOL, I64, STRUCT, LIST, MAP):
        yield f"a string field of type {ttype}", request + field(ttype, 1, b"\0" * 40)
    yield "a list of zero-size structs", request + field(LIST, 9, struct.pack(">bi", STRUCT, 60_000) + b"\0" * 60_000)
    yield "many empty unknown structs", request + field(LIST, 99, struct.pack(">bi", STRUCT, 10**6) + b"\0" * 10**6)
    yield "unknown structs in each other", request + field(STRUCT, 99) * 1000 + b"\0" * 1000
    nested = struct.pack(">bi", LIST, 1) * 1000
    yield "unknown lists in each other", request + field(LIST, 99) + nested + b"\0" * 100
    nested_maps = struct.pack(">bbi", MAP, MAP, 1) * 1000
    yield "unknown maps in each other", request + field(MAP, 99) + nested_maps + b"\0" * 100
    doubling = struct.pack(">bi", LIST, 2) * 15
    yield "lists of two lists, fifteen deep", request + field(LIST, 99) + doubling + b"\0" * 100
    yield "a hundred thousand unknown fields", request + field(BOOL, 99, b"\1") * 100_000 + b"\0\0"
    yield "a field that comes twice", request + field(STRING, 1, i32(1) + b"a") * 2
    yield "a request that comes twice", (request + b"\0") * 2 + b"\0"
    yield "text that is not UTF-8", request + field(STRING, 1, i32(2) + b"\xff\xfe")
    yield "text that is too long", request + field(STRING, 1, i32(10**6) + b"\0" * 10**6) + b"\0\0"
    yield "an empty request", request + b"\0\0"


def nasty_messages() -> Iterator[tuple[str, bytes]]:
    """Yield bytes that are no call, each with what is wrong with it."""
    for what, body in nasty_bodies():
        yield what, call(b"setEmbeddings", body)
    good = call(b"status", b"\0")
    yield "the old protocol without a version", struct.pack(">i", 6) + b"status\1" + struct.pack(">i", 1) + b"\0"
    yield "another version", call(b"status", b"\0", version=0x8002)
    yield "HTTP", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield "the compact protocol", b"\x82\x21\x01\x06status\0"
    for kind in (0, 2, 3, 4, 5, 255):
        yield f"a message of kind {kind}", call(b"status", b"\0", kind=kind)
    for size in (-1, -(2**31), 2**31 - 1, 129):
        yield f"a name of {size} bytes", good[:4] + struct.pack(">i", size) + good[8:]
    yield "a name that is not UTF-8", call(b"\xff" * 6, b"\0")
    yield "bytes behind the message", good + b"\0"
    for length in range(len(good)):
        yield f"a message cut to {length} bytes", good[:length]
