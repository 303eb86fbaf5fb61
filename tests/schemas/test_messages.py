from __future__ import annotations

import contextlib
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thrift_values import (
    LIST,
    METHODS,
    STRUCT,
    STRUCTS,
    example,
    field,
    nasty_messages,
    values,
)
from thriftpy2.protocol.cybin import TCyBinaryProtocol
from thriftpy2.transport import TMemoryBuffer
from thriftpy2.transport.buffered import TCyBufferedTransport

from headrace.schemas.errors import ProtocolError
from headrace.schemas.idl import idl
from headrace.schemas.messages import (
    CALL,
    MAX_TEXT_BYTES,
    REPLY,
    decode_header,
    decode_struct,
    encode_message,
    find_fields,
    size_of_segments,
)

SERVICE = idl.ParameterServer
KINDS = {"args": CALL, "result": REPLY}
_HELLO = {
    "protocol_version": 1,
    "role": 2,
    "run": "",
    "client": "",
    "epoch": 0,
    "rank": 0,
    "world_size": 0,
    "tables": [],
}


def golden_messages() -> dict[tuple[str, str], bytes]:
    lines = Path(__file__).with_name("golden_messages.txt").read_text().splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    return {(name, part): bytes.fromhex(digits) for name, part, digits in rows}


def joined(segments: list[Any]) -> bytes:
    return b"".join(bytes(segment) for segment in segments)


def _body(struct: Any) -> bytes:
    """Return the bytes of a struct alone."""
    return joined(encode_message("m", CALL, 1, struct))[13:]


def message(name: str, part: str, body: Any) -> bytes:
    return joined(encode_message(name, KINDS[part], 1, body))


def plain(value: Any) -> Any:
    """Return a value with its views as bytes, so that it can be compared."""
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if hasattr(value, "thrift_spec"):
        return {name: plain(getattr(value, name)) for _, name, *_ in value.thrift_spec.values()}
    return value


def thriftpy_encoded(body: Any) -> bytes:
    memory = TMemoryBuffer()
    transport = TCyBufferedTransport(memory)
    TCyBinaryProtocol(transport).write_struct(body)
    transport.flush()
    return bytes(memory.getvalue())


def thriftpy_decoded(cls: type[Any], data: bytes) -> Any:
    value = cls()
    TCyBinaryProtocol(TCyBufferedTransport(TMemoryBuffer(data))).read_struct(value)
    return value


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("part", ["args", "result"])
def test_golden_messages(name: str, part: str) -> None:
    """Bytes that were written once are read by every later version, and written the same, but for the token's place."""
    cls = getattr(SERVICE, f"{name}_{part}")
    golden = golden_messages().get((name, part))
    assert golden is not None, f"add to golden_messages.txt: {name} {part} {message(name, part, example(cls)).hex()}"
    frame = memoryview(golden)
    header = decode_header(frame)
    assert (header.name, header.kind, header.seqid) == (name, KINDS[part], 1)
    again = message(name, part, decode_struct(cls, frame, header.body_offset))
    assert again == golden or ((name, part) == ("hello", "args") and sorted(again) == sorted(golden))


# As a shard with a term writes them: golden, with the term as their last field.
_WITH_TERM = {
    "setEmbeddings": "0a000300000000000000070000",
    "getEmbeddings": "0a000a00000000000000070000",
    "digestRows": "0a000700000000000000070000",
    "fetchUpdates": "0a000600000000000000070000",
    "fetchSnapshot": "0a000400000000000000070000",
    "status": "0a001300000000000000070000",
    "hello": "0a000b00000000000000070000",
}


@pytest.mark.parametrize("name", _WITH_TERM)
def test_terms_in_recorded_replies(name: str) -> None:
    """An old server's reply has no term; a new one's has it behind the old fields, which an old client reads alone."""
    cls = getattr(SERVICE, f"{name}_result")
    golden = golden_messages()[name, "result"]
    result = decode_struct(cls, memoryview(golden), decode_header(memoryview(golden)).body_offset)
    assert result.success.term is None
    result.error = None
    old = message(name, "result", result)
    result.success.term = 7
    new = message(name, "result", result)
    assert new.endswith(bytes.fromhex(_WITH_TERM[name]))
    assert thriftpy_decoded(cls, new[decode_header(memoryview(new)).body_offset :]).success.term == 7
    end = len(bytes.fromhex(_WITH_TERM[name]))
    unknown = new[:-end] + b"\x0a\x7f\xff" + new[3 - end :]  # to a reader of before terms its number is as foreign
    assert message(name, "result", decode_struct(cls, memoryview(unknown), 4 + 4 + len(name) + 4)) == old


@pytest.mark.parametrize("cls", STRUCTS, ids=lambda cls: cls.__name__)
@settings(max_examples=8)
@given(data=st.data())
def test_round_trip_and_thriftpy2(cls: type[Any], data: st.DataObject) -> None:
    """Whatever a struct holds comes back, by our codec and by thriftpy2's compiled one, in both directions."""
    value = data.draw(values(cls))
    ours, theirs = _body(value), thriftpy_encoded(value)
    assert len(ours) == len(theirs)  # the order of the fields is free
    assert plain(decode_struct(cls, memoryview(ours), 0)) == plain(value)
    assert plain(decode_struct(cls, memoryview(theirs), 0)) == plain(value)
    assert plain(thriftpy_decoded(cls, ours)) == plain(value)


def test_columns_are_views_both_ways() -> None:
    """A long column is neither copied when it is written nor when it is read; arrays of any shape are columns."""
    weights = np.arange(100_000, dtype=np.float32)
    request = idl.GetEmbeddingsReply(presence=b"", weights=weights.data, states=[], seq=1)
    segments = encode_message("m", REPLY, 1, request)
    assert np.shares_memory(np.frombuffer(segments[1], np.float32), weights)
    assert size_of_segments(segments) == len(joined(segments))
    frame = np.frombuffer(joined(segments), np.uint8)
    reply = decode_struct(idl.GetEmbeddingsReply, frame.data, 13)
    assert np.shares_memory(np.frombuffer(reply.weights, np.uint8), frame)
    matrix = np.arange(3000.0).reshape(1000, 3)
    for data in (b"", b"12", bytearray(5000), np.zeros((0, 4)), np.zeros((3, 0)), matrix, matrix[:0], matrix.data):
        assert _body(idl.TableScalar(name="x", dtype=1, data=data)).endswith(memoryview(data).tobytes() + b"\0")


def test_bounds_of_values() -> None:
    """What does not fit its type is refused before a byte is written. A text up to the bound travels; one byte more is
    refused before it is made, quoted or sent; the JSON of a snapshot is no name, and as long as a store has files."""
    for value in (2**63, -(2**63) - 1, "7", 1.5):
        with pytest.raises(ProtocolError):
            _body(idl.SetEmbeddingsReply(seq=value, is_duplicate=False))
    for character in ("x", "\0", "ä", "\U000e0001"):
        text = character * (MAX_TEXT_BYTES // len(character.encode()))
        request = SERVICE.findRows_args(request=idl.FindRowsRequest(fqn=text, identities=b""))
        assert _body(request) == thriftpy_encoded(request)
        assert decode_struct(SERVICE.findRows_args, memoryview(_body(request)), 0).request.fqn == text
        request.request.fqn = text + "x"
        with pytest.raises(ProtocolError, match="the maximum is 65536") as caught:
            _body(request)
        assert len(str(caught.value)) < 600
        with pytest.raises(ProtocolError, match="a text has 65537 bytes; the maximum is 65536"):
            decode_struct(SERVICE.findRows_args, memoryview(thriftpy_encoded(request)), 0)
    manifest = "{" + " " * 10 * MAX_TEXT_BYTES + "}"
    for body in (
        SERVICE.finishSnapshot_args(request=idl.FinishSnapshotRequest(name="n", manifest=manifest)),
        SERVICE.createSnapshot_result(success=idl.CreateSnapshotReply(part=manifest)),
    ):
        assert plain(decode_struct(type(body), memoryview(_body(body)), 0)) == plain(body)


def test_a_list_of_another_type_is_refused() -> None:
    """Elements are not read as what they are not, also where their bytes would do; an empty list has no type."""
    args, deltas = SERVICE.setEmbeddings_args(request=example(idl.SetEmbeddingsRequest)), field(LIST, 9)
    assert _body(args).count(deltas + bytes([STRUCT])) == 1
    with pytest.raises(ProtocolError, match="a list of Thrift type 13 where the IDL says 12"):
        decode_struct(type(args), memoryview(_body(args).replace(deltas + b"\x0c", deltas + b"\x0d")), 0)
    args.request.deltas = []
    body = _body(args).replace(deltas + b"\x0c", deltas + b"\0")
    assert decode_struct(type(args), memoryview(body), 0).request.deltas == []


def test_unknown_fields_of_every_type_are_skipped() -> None:
    """A field of a newer version is read past, whatever it is and however it nests."""
    newer = field(STRUCT, 99, thriftpy_encoded(example(idl.HelloReply)))
    newer += field(LIST, 98, b"\x0d\0\0\0\1" + b"\x0b\x03\0\0\0\1" + b"\0\0\0\1a\7")  # a list of maps
    newer += field(14, 97, b"\x02\0\0\0\2\1\0") + field(4, 96, bytes(8)) + field(6, 95, bytes(2))
    body = newer + thriftpy_encoded(idl.SetEmbeddingsReply(seq=5, is_duplicate=True))
    assert decode_struct(idl.SetEmbeddingsReply, memoryview(body), 0).seq == 5


@pytest.mark.parametrize("cls", STRUCTS, ids=lambda cls: cls.__name__)
def test_missing_required_fields_are_named(cls: type[Any]) -> None:
    """A struct without a field that the IDL requires is refused, when read and when written."""
    required = [name for _, name, *_, is_required in cls.thrift_spec.values() if is_required]
    if required:
        with pytest.raises(ProtocolError, match=required[0]):
            decode_struct(cls, memoryview(b"\0"), 0)
        with pytest.raises(ProtocolError, match=required[0]):
            encode_message("m", CALL, 1, cls())
    else:
        assert decode_struct(cls, memoryview(b"\0"), 0) == cls()


def test_fields_are_found_in_the_beginning_of_a_message() -> None:
    """A field is found by its header wherever it is, if it is there whole; few that look like it are found at most."""
    hello = idl.HelloRequest(**_HELLO)
    found: list[Any] = []
    for token in ("secret", "\0\x0b\0\x09\0\0\0\1x", None):
        hello.token = token
        data = message("hello", "args", SERVICE.hello_args(request=hello))
        found += [[*find_fields(idl.HelloRequest, "token", memoryview(data))]]
        assert [*find_fields(idl.HelloRequest, "role", memoryview(data))] == [2]
    assert found == [["secret"], ["\0\x0b\0\x09\0\0\0\1x", "x"], []]
    for number in (1, 3, 100):
        cut = [b"\x0b\0\x09\x7f\0\0\1", b"\x0b\0\x09\0\0\0\1\xff", b"\x0b\0\x09"]
        data = b"\x0b\0\x09\0\0\0\1x" * number + b"".join(cut)
        assert [*find_fields(idl.HelloRequest, "token", memoryview(data))] == ["x"] * min(number, 16)


def test_a_message_may_be_given_fewer_elements_and_more_time() -> None:
    """The bound on elements can be lower, and a decoder that gives way does so often and reads the same."""
    body = memoryview(_body(idl.HelloRequest(**_HELLO, fills=["x"] * 1000)))
    with pytest.raises(ProtocolError, match="elements"):
        decode_struct(idl.HelloRequest, body, 0, max_elements=999)
    num_pauses = 0

    def give_way() -> None:
        nonlocal num_pauses
        num_pauses += 1

    patient = decode_struct(idl.HelloRequest, body, 0, max_elements=1000, give_way=give_way)
    assert patient == decode_struct(idl.HelloRequest, body, 0)
    assert num_pauses == 1000 // 32
    unknown = memoryview(bytes(body[:-1]) + b"\x0f\x7f\x00\x02\0\0\3\xe8" + bytes(1000) + b"\0")
    assert decode_struct(idl.HelloRequest, unknown, 0, give_way=give_way) == patient
    assert num_pauses == 3 * (1000 // 32)


def test_every_part_of_a_message_is_refused() -> None:
    """A message that is cut anywhere is an error, and one that is followed by anything too."""
    for (name, part), golden in golden_messages().items():
        cls = getattr(SERVICE, f"{name}_{part}")
        offset = decode_header(memoryview(golden)).body_offset
        for length in range(offset, len(golden)):
            with pytest.raises(ProtocolError):
                decode_struct(cls, memoryview(golden)[:length], offset)
        with pytest.raises(ProtocolError, match="follow"):
            decode_struct(cls, memoryview(golden + b"\0"), offset)


@pytest.mark.parametrize("frame", [pytest.param(frame, id=what) for what, frame in nasty_messages()])
def test_nasty_messages_cost_an_error_and_nothing_else(frame: bytes) -> None:
    """Header or body, one of the two says no, in a sentence and in memory that the frame's own length bounds."""
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=r"\w"):
            header = decode_header(memoryview(frame))
            if header.kind != CALL:
                raise ProtocolError("no call")
            decode_struct(getattr(SERVICE, f"{header.name}_args"), memoryview(frame), header.body_offset)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # At most 65 536 elements are ever looked at, and what they are made into is at most a small struct each.
    assert peak_bytes < 32 * 2**20


@settings(max_examples=300)
@given(data=st.data())
def test_any_bytes_decode_or_raise_protocol_error(data: st.DataObject) -> None:
    """Bytes that nobody meant, and messages in which some were changed, cut out or put in, give nothing else.

    Whatever is decoded can be written again.
    """
    body = bytearray(data.draw(st.binary(max_size=200)))
    if data.draw(st.booleans()):
        body = bytearray(thriftpy_encoded(data.draw(values(data.draw(st.sampled_from(STRUCTS))))))
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(body)))
            body[at : data.draw(st.integers(at, min(at + 8, len(body))))] = data.draw(st.binary(max_size=8))
    for cls in STRUCTS:
        try:
            value = decode_struct(cls, memoryview(body), 0)
        except ProtocolError:
            continue
        assert plain(decode_struct(cls, memoryview(_body(value)), 0)) == plain(value)
    for start in (b"", b"\x80\x01\0\x01", b"\x80\x01\0\x01\0\0\0\x03"):
        frame = memoryview(start + bytes(body))
        with contextlib.suppress(ProtocolError):
            header = decode_header(frame)
            assert header.body_offset == 12 + len(header.name.encode()) <= len(frame)
