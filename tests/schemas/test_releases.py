"""Messages between this release and the one before terms, archives and relays, both ways.

`paramserver_before_terms.thrift` is that release's IDL, and `messages_before_terms.txt` has a message of each method as
that release wrote it, with every field that it knew. Neither is ever changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import thriftpy2
from thrift_values import METHODS, example
from thriftpy2.protocol.cybin import TCyBinaryProtocol
from thriftpy2.transport import TMemoryBuffer
from thriftpy2.transport.buffered import TCyBufferedTransport

from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, REPLY, decode_header, decode_struct, encode_message

OLD: Any = thriftpy2.load(
    str(Path(__file__).with_name("paramserver_before_terms.thrift")), module_name="headrace_before_terms_thrift"
)
KINDS = {"args": CALL, "result": REPLY}
# Methods that came later are not asked for unless the server has told what needs them.
MESSAGES = [(name, part) for name in METHODS if hasattr(OLD.ParameterServer, f"{name}_args") for part in KINDS]


def recorded() -> dict[tuple[str, str], bytes]:
    lines = Path(__file__).with_name("messages_before_terms.txt").read_text().splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    return {(name, part): bytes.fromhex(digits) for name, part, digits in rows}


def struct_of(module: Any, name: str, part: str) -> Any:
    return getattr(module.ParameterServer, f"{name}_{part}")


def read_as_then(name: str, part: str, message: bytes) -> Any:
    """Read a message with the IDL of then and a Thrift library's own codec."""
    value = struct_of(OLD, name, part)()
    body = message[decode_header(memoryview(message)).body_offset :]
    TCyBinaryProtocol(TCyBufferedTransport(TMemoryBuffer(body))).read_struct(value)
    return value


def read_now(name: str, part: str, message: bytes) -> Any:
    frame = memoryview(message)
    return decode_struct(struct_of(idl, name, part), frame, decode_header(frame).body_offset)


def is_same(new: Any, old: Any) -> bool:
    """Return whether two structs have the same values in all fields of the older one."""
    if isinstance(old, list):
        return len(new) == len(old) and all(map(is_same, new, old))
    if not hasattr(old, "thrift_spec"):
        return bool((bytes(new) if isinstance(new, memoryview) else new) == old)
    names = [name for _, name, *_ in old.thrift_spec.values()]
    return all(is_same(getattr(new, name), getattr(old, name)) for name in names)


def later_fields(new: Any, old: Any) -> list[Any]:
    """Return the values of all fields that only the newer struct has, at any depth."""
    if isinstance(new, list):
        return [value for pair in zip(new, old, strict=True) for value in later_fields(*pair)]
    if not hasattr(old, "thrift_spec"):
        return []
    known = {name for _, name, *_ in old.thrift_spec.values()}
    found = []
    for _, name, *_ in new.thrift_spec.values():
        value = getattr(new, name)
        found += later_fields(value, getattr(old, name)) if name in known else [value]
    return found


@pytest.mark.parametrize(("name", "part"), MESSAGES)
def test_what_the_release_before_wrote(name: str, part: str) -> None:
    """Its messages are read with all their fields; those that came later are absent, and it is written the same.

    But a hello's token goes first now, which no reader minds.
    """
    message = recorded()[name, part]
    old, new = read_as_then(name, part, message), read_now(name, part, message)
    assert is_same(new, old)
    assert all(value is None for value in later_fields(new, old))
    again = b"".join(bytes(each) for each in encode_message(name, KINDS[part], 1, new))
    assert again == message or ((name, part) == ("hello", "args") and sorted(again) == sorted(message))


@pytest.mark.parametrize(("name", "part"), MESSAGES)
def test_what_the_release_before_reads(name: str, part: str) -> None:
    """Messages with every field of today are read there, with the fields that it knew."""
    new = example(struct_of(idl, name, part))
    message = b"".join(bytes(each) for each in encode_message(name, KINDS[part], 1, new))
    assert is_same(new, read_as_then(name, part, message))
    frame = memoryview(message)  # our codec of then was today's
    assert is_same(new, decode_struct(struct_of(OLD, name, part), frame, decode_header(frame).body_offset))


def test_the_fields_that_came_later_are_looked_at() -> None:
    """The replies of today have later fields, terms among them: the tests above would be empty without."""
    replies = ("hello", "setEmbeddings", "getEmbeddings", "digestRows", "fetchUpdates", "fetchSnapshot", "status")
    for name in (*replies, "findRows"):
        new = example(struct_of(idl, name, "result"))
        message = b"".join(bytes(each) for each in encode_message(name, REPLY, 1, new))
        assert later_fields(new, read_as_then(name, "result", message))
    hello = example(struct_of(idl, "hello", "args")).request
    assert hello.shards[0].term and hello.shards[0].node
