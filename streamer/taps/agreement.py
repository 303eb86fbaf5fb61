"""What the ranks of a run make sure of together when a model is attached: one owner a row, one way to count steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.taps.selection import Selection, check_names
from headrace.streamer.taps.tapped_table import TappedTable

__all__ = ["agree"]


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a table, as a rank tells the others."""

    fqn: str
    fingerprint: int
    column: int
    num_columns: int
    row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class _Report:
    """What a rank tells the others."""

    parts: tuple[_Part, ...]
    counts_optimizer_steps: bool
    names: tuple[str, ...]
    unmatched: tuple[str, ...]
    failure: str | None


def agree(
    tables: Sequence[TappedTable], counts_optimizer_steps: bool, selection: Selection, failure: Exception | None
) -> frozenset[str]:
    """Compare with the other ranks; blocks until all are here.

    Args:
        tables: What this rank streams.
        counts_optimizer_steps: Whether a torch optimizer's step ends a step, or the model's next forward.
        selection: What was selected out of this rank's tables.
        failure: Why this rank cannot stream; it is raised here once the others know.

    Returns:
        The tables that any rank streams.

    Raises:
        ConfigError: A selected name is that of no table of any rank.
        UnsupportedModelError: Another rank cannot stream, two ranks have the same rows, no rank has any, or they count
            steps in different ways. Every rank raises.
    """
    parts = tuple(
        _Part(
            table.spec.fqn,
            table.spec.fingerprint,
            table.shard.offset,
            table.shard.width,
            table.row_offset,
            table.num_local_rows,
        )
        for table in tables
    )
    mine = _Report(
        parts,
        counts_optimizer_steps,
        tuple(selection.names),
        tuple(selection.unmatched),
        None if failure is None else str(failure) or type(failure).__name__,
    )
    reports: list[_Report | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, mine)
    if failure is not None:
        raise failure
    known = [report for report in reports if report is not None]
    _check(known)
    return frozenset(part.fqn for report in known for part in report.parts)


def _check(reports: list[_Report]) -> None:
    for rank, report in enumerate(reports):
        if report.failure is not None:
            raise UnsupportedModelError(f"rank {rank} cannot stream its tables: {report.failure}")
    unmatched = [p for p in reports[0].unmatched if all(p in report.unmatched for report in reports)]
    check_names(unmatched, [name for report in reports for name in report.names])
    if not any(report.parts for report in reports):
        raise UnsupportedModelError(f"none of the {len(reports)} ranks has an embedding table that is trained")
    counting = [report.counts_optimizer_steps for report in reports]
    if any(counting) != all(counting):
        raise UnsupportedModelError(
            f"rank {counting.index(True)} was given optimizers and rank {counting.index(False)} none: the ranks would "
            f"count steps differently; give all of them the same"
        )
    _check_owners(reports)


def _check_owners(reports: list[_Report]) -> None:
    fingerprints: dict[str, tuple[int, int]] = {}
    by_columns: dict[tuple[str, int, int], list[tuple[int, int, int]]] = {}
    for rank, report in enumerate(reports):
        for part in report.parts:
            fingerprint, first_rank = fingerprints.setdefault(part.fqn, (part.fingerprint, rank))
            if fingerprint != part.fingerprint:
                raise UnsupportedModelError(f"table {part.fqn!r} differs between ranks {first_rank} and {rank}")
            if part.num_rows:
                key = (part.fqn, part.column, part.num_columns)
                by_columns.setdefault(key, []).append((part.row, part.row + part.num_rows, rank))
    for (fqn, _, _), ranges in by_columns.items():
        ranges.sort()
        for (_, end, rank), (row, _, other) in itertools.pairwise(ranges):
            if row < end:
                raise UnsupportedModelError(
                    f"row {row} of table {fqn!r} is on ranks {rank} and {other}, which would both stream it: give "
                    f"tables that are not one different names, or replicate it with DistributedDataParallel"
                )
