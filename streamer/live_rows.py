"""Rows of the trainer's own tables by id: fetch their present values, and evict them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy.typing as npt
import torch
from torch.utils.hooks import RemovableHandle

from headrace.kernels.plain_context import users_context
from headrace.paramserver.system.text import describe_near
from headrace.schemas.errors import RowRangeError, UnknownTableError
from headrace.schemas.tables import row_ids_of
from headrace.streamer.taps.tapped_table import TappedTable

__all__ = ["Evictor", "LiveRows", "fetch_rows", "unused_rows"]

_Hook = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveRows:
    """Copies of rows of one table, in the order of the given ids.

    Attributes:
        row_ids: The given ids, flattened, int64[n] on the CPU.
        columns: (first column, number of columns) of each part on this rank, side by side in weights and states.
        weights: `[n, width of all parts]` on the CPU.
        states: By name, `[n, width]` on the CPU. A rowwise state has one value per part.
    """

    row_ids: torch.Tensor
    columns: tuple[tuple[int, int], ...]
    weights: torch.Tensor
    states: dict[str, torch.Tensor]


def fetch_rows(tables: Sequence[TappedTable], fqn: str, row_ids: npt.ArrayLike) -> LiveRows:
    """Return present rows of one of this rank's tables; see `RawEmbeddingStreamer.fetch`."""
    parts = [table for table in tables if table.spec.fqn == fqn]
    if not parts:
        near = describe_near(fqn, (table.spec.fqn for table in tables))
        raise UnknownTableError(f"no table {fqn!r} is streamed on this rank; {near}")
    ids = torch.tensor(row_ids_of(row_ids), dtype=torch.int64, device="cpu")
    by_columns: dict[tuple[int, int], list[TappedTable]] = {}
    for part in parts:
        by_columns.setdefault((part.shard.offset, part.shard.width), []).append(part)
    columns = tuple(sorted(by_columns))
    pieces = [_gather(by_columns[of], ids) for of in columns]
    return LiveRows(
        row_ids=ids,
        columns=columns,
        weights=torch.cat([piece["weights"] for piece in pieces], dim=1),
        states={
            state.name: torch.cat([piece[f"state:{state.name}"] for piece in pieces], dim=1)
            for state in parts[0].spec.states
        },
    )


def _gather(parts: Sequence[TappedTable], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gather rows, by the names of their columns, from parts with the same columns and different rows."""
    spec, shard = parts[0].spec, parts[0].shard
    found = torch.zeros(ids.numel(), dtype=torch.bool, device="cpu")
    columns: dict[str, torch.Tensor] = {}
    for part in parts:
        if part.index is None:
            places = ids - part.row_offset
            inside = (places >= 0) & (places < part.num_local_rows)
        else:
            places = part.places(ids)
            inside = places >= 0
        found |= inside
        states = part.states()
        local = places[inside]
        live = {"weights": part.weights_at(local)}
        for state in spec.states:
            tensor = states[state.name]
            live[f"state:{state.name}"] = tensor.index_select(0, local.to(tensor.device))
        for name, rows in live.items():
            if name not in columns:
                columns[name] = torch.zeros(ids.numel(), rows.shape[1], dtype=rows.dtype, device="cpu")
            columns[name][inside] = rows.detach().cpu()
    if not bool(found.all()):
        missing = int(ids[~found][0])
        raise RowRangeError(
            f"table {spec.fqn!r}: row {missing} is not on this rank, or beyond the table's {spec.num_rows} rows "
            f"(columns {shard.offset} to {shard.offset + shard.width - 1})"
        )
    return columns


class Evictor:
    """Evicts rows of tapped tables, after calling the user's hooks.

    Thread: the training thread's.
    """

    def __init__(self) -> None:
        self._hooks: OrderedDict[int, _Hook] = OrderedDict()

    def register_hook(self, hook: _Hook) -> RemovableHandle:
        """Register a function to call with fqn and global row ids, int64[n], before rows are evicted."""
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def evict(
        self, tables: Sequence[TappedTable], fqn: str, row_ids: npt.ArrayLike, *, names_elsewhere: Collection[str] = ()
    ) -> int:
        """Call the hooks, then have rows deleted unless they are marked again before the next flush.

        Returns and raises like `RawEmbeddingStreamer.evict`; `names_elsewhere` are tables of other ranks.
        """
        parts = [table for table in tables if table.spec.fqn == fqn]
        if not parts:
            if fqn in names_elsewhere:
                return 0
            known = {table.spec.fqn for table in tables}.union(names_elsewhere)
            raise UnknownTableError(f"no table {fqn!r} is streamed; {describe_near(fqn, known)}")
        ids = torch.unique(torch.tensor(row_ids_of(row_ids), dtype=torch.int64, device="cpu"))
        parts[0].spec.check_row_ids(ids.numpy())
        by_part = [(part, part.ids_here(ids)) for part in parts]
        here = torch.unique(torch.cat([local + part.row_offset for part, local in by_part]))
        if here.numel():
            for part, _ in by_part:
                part.leave_device()  # may refuse, so before the hooks: a hook may give the rows' places away
            with users_context():
                for hook in list(self._hooks.values()):
                    hook(fqn, here)
            for part, local in by_part:
                part.evict(local)
        return int(here.numel())

    def evict_again(self, tables: Sequence[TappedTable], evicted: Mapping[str, Sequence[int]]) -> None:
        """Have rows deleted that a checkpoint names as evicted and unused; calls no hook again."""
        for table in tables:
            if rows := evicted.get(table.spec.fqn):
                table.evict(table.ids_here(torch.tensor(rows, dtype=torch.int64, device="cpu")))


def unused_rows(tables: Sequence[TappedTable], on_their_way: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Return, by fqn, the global ids of this rank's rows that were evicted and not used since.

    `on_their_way` has, by fqn, the global ids of rows whose deletion is sent and not acked.
    """
    found: dict[str, list[int]] = {}
    for table in tables:
        local = table.deleted.unused(table.dirty)
        if table.index is not None:  # its taken deletions are not in `deleted`; a row that came back has a place
            sent = torch.tensor(on_their_way.get(table.spec.fqn, ()), dtype=torch.int64, device="cpu")
            local = torch.cat([local, sent[table.places(sent) < 0]])
        rows = set(found.get(table.spec.fqn, ())).union((local + table.row_offset).tolist())
        if rows:
            found[table.spec.fqn] = sorted(rows)
    return found
