"""Compare every row of the trainer's tables with the store, bit for bit: weights and optimizer states."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels.dtypes import bits_of
from headrace.kernels.plain_context import in_plain_context
from headrace.paramserver.reading.differences import rows_that_differ
from headrace.paramserver.reading.reader import EmbeddingReader, Rows
from headrace.schemas.row_records import PRESENT
from headrace.streamer.taps.tapped_table import TappedTable

__all__ = ["Comparison", "TableComparison", "compare_tables", "compare_with_store"]

# Rows are read in pieces of about this size, so that a comparison takes little memory.
_CHUNK_BYTES = 16 * 2**20
_MAX_NAMED = 10


@dataclass(kw_only=True, slots=True)
class TableComparison:
    """The result for one table, or for the part of it that this rank has.

    Attributes:
        fqn: The table.
        num_rows: Rows of the trainer.
        num_equal: Rows of which every bit is equal.
        num_missing: Rows that the store does not have.
        num_different: Rows that the store has with other values.
        different_row_ids: The first of them, global.
        missing_row_ids: The first of the missing ones, global.
        skipped_states: States that were not compared: the rowwise ones of a table split by columns. Each part has its
            own copy of them, and the store answers with one.
    """

    fqn: str
    num_rows: int = 0
    num_equal: int = 0
    num_missing: int = 0
    num_different: int = 0
    different_row_ids: list[int] = field(default_factory=list)
    missing_row_ids: list[int] = field(default_factory=list)
    skipped_states: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The result for all tables.

    Attributes:
        tables: In the order given.
        only_present: Accept rows that the store does not have: they were never updated.
    """

    tables: tuple[TableComparison, ...]
    only_present: bool

    @property
    def num_compared(self) -> int:
        """Rows that both sides have."""
        return sum(table.num_equal + table.num_different for table in self.tables)

    @property
    def num_different(self) -> int:
        """Rows that differ."""
        return sum(table.num_different for table in self.tables)

    @property
    def num_missing(self) -> int:
        """Rows that the store does not have."""
        return sum(table.num_missing for table in self.tables)

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs and no row is missing that should be there."""
        return not self.num_different and (self.only_present or not self.num_missing)

    def __str__(self) -> str:
        """Describe each table in one line."""
        return "\n".join(_describe(table) for table in self.tables)


@in_plain_context
def compare_with_store(
    tables: Sequence[TappedTable], address: str, *, only_present: bool = False, timeout_s: float = 60.0
) -> Comparison:
    """Compare tables with a running server, from a program without an event loop; see `compare_tables`.

    Args:
        tables: `RawEmbeddingStreamer.tables`. REQUIRES: no training meanwhile.
        address: `host:port` of any shard.
        only_present: Accept rows that the store does not have, because it gets updated rows only.
        timeout_s: Deadline of each read, seconds.

    Raises:
        UnavailableError: The server does not answer.
    """

    async def compare() -> Comparison:
        async with await EmbeddingReader.connect(address, timeout_s=timeout_s) as reader:
            return await compare_tables(tables, reader, only_present=only_present)

    return asyncio.run(compare())


async def compare_tables(
    tables: Sequence[TappedTable], reader: EmbeddingReader, *, only_present: bool = False
) -> Comparison:
    """Compare tables with what a reader finds; see `compare_with_store`.

    Cancellation: harmless.
    """
    results = [await _compare_table(table, reader) for table in tables]
    return Comparison(tables=tuple(results), only_present=only_present)


async def _compare_table(table: TappedTable, reader: EmbeddingReader) -> TableComparison:
    spec = table.spec
    is_split = table.shard != spec.whole
    skipped = tuple(state.name for state in spec.states if is_split and state.width)
    result = TableComparison(fqn=spec.fqn, skipped_states=skipped)
    row_bytes = sum(s.width_in(spec.whole) * s.dtype.size_bytes for s in spec.states) + spec.dim * spec.dtype.size_bytes
    step = max(1, _CHUNK_BYTES // row_bytes)
    local_rows = (
        torch.arange(table.num_local_rows, dtype=torch.int64, device="cpu")
        if table.index is None
        else table.index.row_ids().cpu().sort().values
    )
    for local_ids in torch.split(local_rows, step):
        stored = await reader.get(spec.fqn, (local_ids + table.row_offset).numpy(), with_states=True)
        _add(result, table, table.places(local_ids), stored)
    return result


def _add(result: TableComparison, table: TappedTable, places: torch.Tensor, stored: Rows) -> None:
    """Add some rows to a result; they lie at `places` in the trainer's tensors."""
    part = slice(table.shard.offset, table.shard.offset + table.shard.width)
    live, there = [], [stored.weights[:, part]]
    live_states = table.states()
    for state in table.spec.states:
        if state.name not in result.skipped_states:
            live.append(live_states[state.name])
            there.append(stored.states[state.name] if state.width else stored.states[state.name][:, part])
    if table.spec.has_identities and stored.identities is not None:
        live.append(table.identities())
        there.append(stored.identities)
    rows = [table.weights_at(places), *(tensor.detach().index_select(0, places.to(tensor.device)) for tensor in live)]
    ours = [bits_of(values) for values in rows]
    is_present = stored.presence == PRESENT
    is_different = rows_that_differ(ours, there) & is_present
    result.num_rows += places.numel()
    result.num_missing += int((~is_present).sum())
    result.num_different += int(is_different.sum())
    result.num_equal += int((is_present & ~is_different).sum())
    _name(result.missing_row_ids, stored.row_ids[~is_present])
    _name(result.different_row_ids, stored.row_ids[is_different])


def _name(known: list[int], row_ids: npt.NDArray[np.int64]) -> None:
    known += row_ids[: max(0, _MAX_NAMED - len(known))].tolist()


def _describe(table: TableComparison) -> str:
    text = f"{table.fqn}: {table.num_equal + table.num_different} rows compared, {table.num_different} different"
    if table.num_different:
        text += f" (first: {', '.join(map(str, table.different_row_ids))})"
    text += f", {table.num_missing} missing"
    if table.skipped_states:
        text += f"; not compared: {', '.join(table.skipped_states)} (split by columns)"
    return text
