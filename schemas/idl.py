"""The interface definition, loaded once, and conversions between its structs and our own types.

thriftpy2 makes the classes of `paramserver.thrift` at import; `idl` holds them. They are typed as `Any`: the IDL is the
one place that says what they hold.
"""

from __future__ import annotations

from importlib import resources
from types import ModuleType
from typing import Any

import thriftpy2

from headrace.schemas.errors import (
    FencedError,
    HeadraceError,
    OverloadedError,
    RequestError,
    SequenceGapError,
    SetBackError,
    error_from_code,
)
from headrace.schemas.messages import MAX_TEXT_BYTES
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec

__all__ = ["PROTOCOL_VERSION", "error_from_idl", "error_to_idl", "idl", "spec_from_idl", "spec_to_idl", "wire_text"]

_CUT_TEXT_BYTES = MAX_TEXT_BYTES - len("…".encode())


def _load() -> ModuleType:
    with resources.as_file(resources.files("headrace.schemas") / "paramserver.thrift") as path:
        return thriftpy2.load(str(path), module_name="headrace_paramserver_thrift")


idl: Any = _load()
PROTOCOL_VERSION: int = idl.PROTOCOL_VERSION


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
    )


def spec_from_idl(struct: Any) -> TableSpec:
    """Return the spec of an IDL `TableSpec` struct.

    Raises:
        RequestError: A field is out of range, or the fingerprint is of another spec.
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
    )
    if struct.fingerprint is not None and struct.fingerprint != spec.fingerprint:
        raise RequestError(
            f"table {struct.fqn!r}: fingerprint {struct.fingerprint} was sent, the fields make {spec.fingerprint}"
        )
    return spec


def error_to_idl(error: HeadraceError) -> Any:
    """Return the IDL's `ServerError` exception of an error, its message cut where it is too long for one."""
    wire = idl.ServerError(code=error.code, message=wire_text(str(error)))
    if isinstance(error, SequenceGapError):
        wire.expected_seq = error.expected_seq
    elif isinstance(error, OverloadedError):
        wire.retry_after_ms = round(error.retry_after_s * 1000)
    elif isinstance(error, FencedError):
        wire.epoch = error.epoch
    elif isinstance(error, SetBackError):
        wire.is_set_back = True
    return wire


def error_from_idl(wire: Any) -> HeadraceError:
    """Return the error that an IDL `ServerError` reports."""
    retry_after_s = None if wire.retry_after_ms is None else wire.retry_after_ms / 1000
    return error_from_code(
        wire.code,
        wire.message,
        expected_seq=wire.expected_seq,
        retry_after_s=retry_after_s,
        epoch=wire.epoch,
        is_set_back=wire.is_set_back,
    )


def wire_text(text: str) -> str:
    """Return a text that a message can carry: cut where it is too long, and escaped where it is no Unicode."""
    # A path may have bytes that are no text, which Python keeps as what UTF-8 has no code for.
    data = text.encode("utf-8", "backslashreplace")
    return data.decode() if len(data) <= MAX_TEXT_BYTES else data[:_CUT_TEXT_BYTES].decode(errors="ignore") + "…"
