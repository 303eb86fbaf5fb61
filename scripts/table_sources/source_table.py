"""A table of a source, checked and ready to be read: whatever file it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.paramserver.store.row_chunk import RowChunk
from headrace.schemas.errors import ConfigError, SpecMismatchError
from headrace.schemas.near_names import describe_near
from headrace.schemas.tables import TableSpec

__all__ = ["SourceTable", "Versions", "check_against", "check_wanted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Versions:
    """The versions that rows are given.

    Attributes:
        epoch: First half; None leaves rows those that they have in the file, and is 1 where they have none.
        step: Second half.
        time_us: Wall clock of rows that have none, microseconds since 1970.
    """

    epoch: int | None = None
    step: int = 0
    time_us: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceTable:
    """One table.

    Attributes:
        name: In the source, for messages.
        spec: What it is, or becomes, in the target.
        num_rows: Rows that it has to give.
        chunks: Yields them, ascending, about so many bytes at a time as it is given.
        check_ids: Reads ids, versions and deletions, if they have to be read to be known, and checks them.
    """

    name: str
    spec: TableSpec
    num_rows: int
    chunks: Callable[[int], Iterator[RowChunk]]
    check_ids: Callable[[], None]


def check_against(known: TableSpec, found: TableSpec, where: str) -> None:
    """Check that a file's table is the one that the target knows.

    Raises:
        SpecMismatchError: It is another one.
    """
    difference = known.describe_difference(found)
    if difference:
        raise SpecMismatchError(
            f"{where}: table {known.fqn!r} is another one (the server's ≠ the file's): {difference}"
        )


def check_wanted(wanted: list[str] | None, found: set[str], where: str) -> None:
    """Check that every table that was asked for is there.

    Raises:
        ConfigError: One is not.
    """
    for fqn in wanted or ():
        if fqn not in found:
            raise ConfigError(f"--table {fqn!r}: no such table in {where}; {describe_near(fqn, found)}")
