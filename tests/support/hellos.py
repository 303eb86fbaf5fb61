"""How clients of a server say hello."""

from __future__ import annotations

from typing import Any

from headrace.schemas.idl import PROTOCOL_VERSION, idl, spec_to_idl
from headrace.schemas.tables import TableSpec

__all__ = ["hello_of_nobody", "hello_of_writer"]


def hello_of_writer(*specs: TableSpec, epoch: int = 1, **changes: Any) -> Any:
    """Return the hello of a run's only writer, which registers tables; `changes` are of other fields."""
    fields = {
        "role": idl.Role.WRITER,
        "run": "run",
        "client": "rank0",
        "epoch": epoch,
        "tables": [spec_to_idl(spec) for spec in specs],
    }
    return hello_of_nobody(**(fields | changes))


def hello_of_nobody(role: int = idl.Role.READER, **changes: Any) -> Any:
    """Return a hello that is of no run and registers nothing; `changes` are of other fields."""
    fields = {
        "protocol_version": PROTOCOL_VERSION,
        "run": "",
        "client": "",
        "epoch": 0,
        "rank": 0,
        "world_size": 1,
        "tables": [],
    }
    return idl.HelloRequest(role=role, **(fields | changes))
