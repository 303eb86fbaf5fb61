"""The interface definition, loaded once, and conversions between its structs and our types.

At import, thriftpy2 makes a class for each struct of `paramserver.thrift`; `idl` holds them. They are typed as `Any`,
because only the IDL defines their fields.
"""

from __future__ import annotations

from importlib import resources
from types import ModuleType
from typing import Any

import thriftpy2

from headrace.schemas.errors import (
    FencedError,
    GoneError,
    HeadraceError,
    NonFiniteError,
    OverloadedError,
    OwnedError,
    ProtocolMismatchError,
    RequestError,
    ReshardedError,
    RowRangeError,
    SequenceGapError,
    SetBackError,
    SpecMismatchError,
    UnauthorizedError,
    UnavailableError,
    UnknownTableError,
)
from headrace.schemas.messages import MAX_TEXT_BYTES
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec

__all__ = [
    "MAX_NAME_BYTES",
    "PROTOCOL_VERSION",
    "error_from_idl",
    "error_to_idl",
    "idl",
    "spec_from_idl",
    "spec_to_idl",
    "wire_text",
]

_PLAIN_BY_CODE: dict[int, type[HeadraceError]] = {
    **{cls.code: cls for cls in (RequestError, UnknownTableError, SpecMismatchError, RowRangeError, NonFiniteError)},
    **{cls.code: cls for cls in (UnavailableError, UnauthorizedError, ProtocolMismatchError, GoneError, OwnedError)},
}
_TRUNCATED_BYTES = MAX_TEXT_BYTES - len("…".encode())


def _load() -> ModuleType:
    with resources.as_file(resources.files("headrace.schemas") / "paramserver.thrift") as path:
        return thriftpy2.load(str(path), module_name="headrace_paramserver_thrift")


idl: Any = _load()
PROTOCOL_VERSION: int = idl.PROTOCOL_VERSION
MAX_NAME_BYTES = 256
"""Longest name of a run or a client in a hello, in bytes of UTF-8."""


def spec_to_idl(spec: TableSpec) -> Any:
    """Return the IDL's `TableSpec` struct of a spec."""
    return idl.TableSpec(
        fqn=spec.fqn,
        num_rows=spec.num_rows,
        dim=spec.dim,
        dtype=int(spec.dtype),
        states=[idl.StateSpec(name=s.name, kind=int(s.kind), dtype=int(s.dtype), width=s.width) for s in spec.states],
        has_identities=spec.has_identities,
        fingerprint=spec.fingerprint,
        shape=None if spec.shape is None else list(spec.shape),
        uses=spec.uses,
    )


def spec_from_idl(struct: Any) -> TableSpec:
    """Return the spec of an IDL `TableSpec` struct.

    Raises:
        RequestError: A field is out of range, or the fingerprint does not match the fields.
    """
    try:
        states = tuple(
            StateSpec(name=s.name, kind=StateKind(s.kind), dtype=DType(s.dtype), width=s.width) for s in struct.states
        )
        dtype = DType(struct.dtype)
    except ValueError as exc:
        raise RequestError(f"table {struct.fqn!r}: {exc}") from exc
    spec = TableSpec(
        fqn=struct.fqn,
        num_rows=struct.num_rows,
        dim=struct.dim,
        dtype=dtype,
        states=states,
        has_identities=struct.has_identities,
        shape=None if struct.shape is None else tuple(struct.shape),
        uses=struct.uses,
    )
    if struct.fingerprint is not None and struct.fingerprint != spec.fingerprint:
        raise RequestError(
            f"table {struct.fqn!r}: fingerprint {struct.fingerprint} was sent, but the fields give {spec.fingerprint}"
        )
    return spec


def error_to_idl(error: HeadraceError) -> Any:
    """Return the IDL's `ServerError` for an error; a message that is too long is truncated."""
    wire = idl.ServerError(code=error.code, message=wire_text(str(error)))
    if isinstance(error, SequenceGapError):
        wire.expected_seq = error.expected_seq
    elif isinstance(error, OverloadedError):
        wire.retry_after_ms = round(error.retry_after_s * 1000)
    elif isinstance(error, FencedError):
        wire.epoch = error.epoch
    elif isinstance(error, SetBackError):
        wire.is_set_back = True
    elif isinstance(error, ReshardedError):
        host, port = error.successor
        wire.successor = idl.ShardAddress(shard=0, host=host, port=port)
    elif isinstance(error, UnavailableError) and error.moves_to is not None:
        wire.shards = [error.moves_to]
    return wire


def error_from_idl(wire: Any) -> HeadraceError:
    """Return the error that an IDL `ServerError` reports; a plain `HeadraceError` for an unknown code."""
    code, message = wire.code, wire.message
    if code == SequenceGapError.code and wire.expected_seq is not None:
        return SequenceGapError(message, expected_seq=wire.expected_seq)
    if code == FencedError.code and wire.epoch is not None:
        return FencedError(message, epoch=wire.epoch)
    if code == SetBackError.code and wire.is_set_back:
        return SetBackError(message)
    if code == UnavailableError.code and wire.successor is not None:
        return ReshardedError(message, successor=(wire.successor.host, wire.successor.port))
    if code == UnavailableError.code and wire.shards:
        return UnavailableError(message, moves_to=wire.shards[0])
    if code == OverloadedError.code:
        return OverloadedError(message, retry_after_s=(wire.retry_after_ms or 0) / 1000)
    return _PLAIN_BY_CODE.get(code, HeadraceError)(message)


def wire_text(text: str) -> str:
    """Return a text that fits into a message: truncated if too long, escaped where it is not valid Unicode."""
    # A path may hold bytes that are not text; Python keeps them as surrogates, which UTF-8 cannot encode.
    data = text.encode("utf-8", "backslashreplace")
    return data.decode() if len(data) <= MAX_TEXT_BYTES else data[:_TRUNCATED_BYTES].decode(errors="ignore") + "…"
