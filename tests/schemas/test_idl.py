from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from headrace.schemas import errors
from headrace.schemas.errors import (
    FencedError,
    HeadraceError,
    OverloadedError,
    RequestError,
    ReshardedError,
    SequenceGapError,
    UnavailableError,
)
from headrace.schemas.idl import error_from_idl, error_to_idl, idl, spec_from_idl, spec_to_idl
from headrace.schemas.messages import REPLY, decode_header, decode_struct, encode_message
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec

SPEC = TableSpec(
    fqn="user.weight",
    num_rows=1000,
    dim=8,
    dtype=DType.BFLOAT16,
    states=(
        StateSpec(name="momentum1", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1),
        StateSpec(name="exp_avg", kind=StateKind.POINTWISE, dtype=DType.FLOAT32, width=0),
    ),
    has_identities=True,
)
ERRORS = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, HeadraceError) and cls.__module__ == errors.__name__
]


def test_specs_travel_whole() -> None:
    """A spec comes back equal with its fingerprint, which is optional; a wrong one means another idea of the table."""
    for spec in (
        SPEC,
        TableSpec.of_tensor("mlp.0.weight", (30, 70), DType.BOOL),
        TableSpec.of_tensor("n", (), DType.INT64),
    ):
        struct = spec_to_idl(spec)
        assert spec_from_idl(struct) == spec
        assert struct.fingerprint == spec.fingerprint
        struct.fingerprint = None
        assert spec_from_idl(struct) == spec
        struct.fingerprint = spec.fingerprint + 1
        with pytest.raises(RequestError, match=rf"{re.escape(spec.fqn)}.*fingerprint"):
            spec_from_idl(struct)


@pytest.mark.parametrize(("name", "value"), [("dtype", 99), ("dim", 0), ("num_rows", -1), ("fqn", ""), ("kind", 3)])
def test_specs_out_of_range_are_refused(name: str, value: object) -> None:
    """A peer's specs of tables and states are checked, and the error names the table."""
    struct = spec_to_idl(SPEC)
    setattr(struct.states[0] if name == "kind" else struct, name, value)
    with pytest.raises(RequestError, match="name" if name == "fqn" else r"user\.weight"):
        spec_from_idl(struct)


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_every_error_survives_the_wire(cls: type[HeadraceError]) -> None:
    """An error arrives as the class that was raised, or the nearest one that a peer can know, and with its text."""
    extras: dict[type[HeadraceError], dict[str, Any]] = {
        SequenceGapError: {"expected_seq": 7},
        OverloadedError: {"retry_after_s": 1.5},
        FencedError: {"epoch": 9},
        ReshardedError: {"successor": ("h", 9)},
        UnavailableError: {"moves_to": idl.ShardAddress(shard=1, host="h", port=9)},
    }
    extra = extras.get(cls, {})
    error = cls("what happened", **extra)
    back = error_from_idl(error_to_idl(error))
    assert isinstance(error, type(back))
    assert (back.code, str(back), back.retriable) == (error.code, "what happened", error.retriable)
    for name, value in extra.items():
        assert getattr(back, name) == value
    newer = error_from_idl(idl.ServerError(code=250, message="new"))
    assert type(newer) is HeadraceError and "new" in str(newer), "an unknown code is not mistaken for something else"


@pytest.mark.parametrize("text", ["x" * 10**6, "\U000e0001" * 10**6, "/data/\udcff/store: no space", "\udcff" * 20_000])
def test_every_message_of_an_error_can_be_sent(text: str) -> None:
    """One that is too long is cut, and bytes of a path that are no text are told by their numbers."""
    wire = error_to_idl(RequestError(text))
    body = idl.ParameterServer.getEmbeddings_result(error=wire)
    frame = memoryview(b"".join(map(bytes, encode_message("getEmbeddings", REPLY, 1, body))))
    back = decode_struct(type(body), frame, decode_header(frame).body_offset).error
    assert back.message.replace("\\udcff", "\udcff").removesuffix("…")[:10_000] == text[:10_000]
