"""The part of an embedding table that this rank streams: its description, live values, dirty and evicted rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from headrace.kernels.dirty_sets import VIRTUAL_ROWS, DirtyIds, DirtyRows, bitmap_bytes, dirty_set
from headrace.kernels.dtypes import DTYPES, TORCH_DTYPES
from headrace.paramserver.system.text import first_of, format_size
from headrace.schemas.errors import UnsupportedModelError
from headrace.schemas.routing import shards_of_rows
from headrace.schemas.table_names import table_name
from headrace.schemas.table_uses import decode_uses
from headrace.schemas.tables import (
    RUNTIME_META,
    ColumnShard,
    DType,
    StateKind,
    StateSpec,
    TableSpec,
)
from headrace.streamer.device.dirty_rows import DeviceDirtyRows, TableDirtySet
from headrace.streamer.taps.collisions import IdentitySource
from headrace.streamer.taps.model_tree import or_without

__all__ = [
    "DeletedRows",
    "Holder",
    "RowCache",
    "RowIndex",
    "TablePart",
    "TappedTable",
    "describe_rows",
    "dtype_of",
    "tap_part",
    "zero_state",
]

_DEFAULT_BITMAP_BYTES = 256 * 2**20
_IDS_AT_ONCE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePart:
    """The rows and columns of a table that a local tensor, or a rectangle of it, holds.

    Attributes:
        fqn: Name of the weight parameter in the unwrapped model's `state_dict`.
        num_rows: Rows of the whole table.
        dim: Columns of the whole table.
        row_offset: Global id of the rectangle's first row.
        column_offset: The table's column at the rectangle's first column.
        first_row: The tensor's row where the rectangle begins.
        num_local_rows: Rows of the rectangle; None for all rows of the tensor.
        first_column: The tensor's column where the rectangle begins.
        num_local_columns: Columns of the rectangle; None for all columns of the tensor.
    """

    fqn: str
    num_rows: int
    dim: int
    row_offset: int = 0
    column_offset: int = 0
    first_row: int = 0
    num_local_rows: int | None = None
    first_column: int = 0
    num_local_columns: int | None = None

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the rectangle's rows of a tensor `[local rows, any]`."""
        if self.num_local_rows is None:
            return tensor
        return tensor.narrow(0, self.first_row, self.num_local_rows)

    def columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the rectangle's columns of a tensor `[any, local columns]`."""
        if self.num_local_columns is None:
            return tensor
        return tensor.narrow(1, self.first_column, self.num_local_columns)

    def row_ids(self, local_ids: torch.Tensor) -> torch.Tensor:
        """Return those of a tensor's row ids that are in the rectangle, relative to its first row."""
        if self.num_local_rows is None:
            return local_ids
        is_inside = (local_ids >= self.first_row) & (local_ids < self.first_row + self.num_local_rows)
        return local_ids[is_inside] - self.first_row

    def row_ids_or_none(self, local_ids: torch.Tensor) -> torch.Tensor:
        """Like `row_ids`, with -1 for ids outside: on a device nothing has to wait for the number of ids."""
        if self.num_local_rows is None:
            return local_ids
        is_inside = (local_ids >= self.first_row) & (local_ids < self.first_row + self.num_local_rows)
        return torch.where(is_inside, local_ids - self.first_row, -1)


class RowIndex(Protocol):
    """Maps the virtual ids of a table to places in a tensor that holds the rows existing now."""

    def find(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Return the places of rows, int64[n] ≥ 0 on the CPU, in `TappedTable.weights` and `states`; -1 if absent."""

    def row_ids(self) -> torch.Tensor:
        """Return the ids of all present rows, int64[n], unique, in any order."""


class RowCache(Protocol):
    """Has weights of some rows of a table that the table's tensor does not have yet."""

    def read(self, weights: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the present rows, `[n, width]`, of the weights, by their places, int64[n] on the same device."""

    def write(self, weights: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
        """Replace rows, `[n, width]`, by their places, int64[n], unique, in the weights and in the cache."""


class Holder(Protocol):
    """What holds the values of tables, for writing restored ones: a parameter with its optimizer, or a fused module."""

    def create_states(self) -> None:
        """Create the states that the optimizer's first step creates, where there are none yet."""

    def set_scalars(self, scalars: Mapping[str, float]) -> None:
        """Set the values kept once per table, by name, as far as the optimizer has them now."""

    def share_rows(self) -> None:
        """Send this rank's rows, with their states, to the replicas on other ranks, and receive theirs.

        All ranks that hold replicas must call it together, with the same states created.
        """


class TappedTable:
    """The part of a table that this rank streams: description, live values and dirty rows.

    Values are live tensors, consistent between two optimizer updates. Get them again for each gather: optimizers create
    states late, and modules may move their weights.

    Thread: the training thread's.

    Attributes:
        spec: The whole table, as the server knows it.
        shard: The columns on this rank.
        row_offset: Global id of local row 0.
        num_local_rows: Rows on this rank; 0 with an `index`.
        index: Places of rows with virtual ids, whose local ids are global; None where a row's local id is its place.
        dirty: Local ids of the dirty rows; on the table's device if a `DevicePipeline` has the table.
        send_share: Share of the dirty rows that a flush sends; 1 for all.
        waiting: Rows that were dirty at a flush which did not send them, where `send_share` is below 1; None elsewhere.
            Those that have changed since are dirty too.
        deleted: Evicted rows.
        on_move: Called, if not None, when `dirty` has moved to or from a device.
        is_in_use: Returns whether the model still uses the weights.
        backing: The tensors that hold weights and states, or None; see `__init__`.
        holder: What holds the values; None for a table that cannot be restored.
        cache: Has newer weights of some rows; None where `weights` has all.
    """

    def __init__(
        self,
        *,
        spec: TableSpec,
        num_local_rows: int,
        weights: Callable[[], torch.Tensor],
        states: Callable[[], dict[str, torch.Tensor]],
        shard: ColumnShard | None = None,
        row_offset: int = 0,
        identities: Callable[[], torch.Tensor] | None = None,
        scalars: Callable[[], dict[str, torch.Tensor]] = dict,
        is_in_use: Callable[[], bool] = lambda: True,
        backing: Callable[[], Sequence[torch.Tensor]] | None = None,
        index: RowIndex | None = None,
        holder: Holder | None = None,
        cache: RowCache | None = None,
    ) -> None:
        """Describe a table without dirty rows; a `shard` of None is all columns.

        `weights`, `states`, `identities` and `scalars` return present values; see the methods of these names.
        `is_in_use` returns whether the model still uses the weights. REQUIRES: with an index, the spec has 0 rows.
        `backing`, if given, returns the tensors whose parts are weights and states: where these are the same and have
        the same place, type and shape, so have weights and states. It raises what `weights` would.
        """
        assert (identities is not None) == spec.has_identities
        assert index is None or not (spec.num_rows or row_offset or num_local_rows)
        self.spec = spec
        self.path = spec.fqn  # within the model; `join_model` changes the spec's name
        self._dtype = spec.dtype  # of the live weights; `store_as` changes the spec's
        self.shard = spec.whole if shard is None else shard
        self.row_offset = row_offset
        self.num_local_rows = num_local_rows
        self.index = index
        self.holder = holder
        self.cache = cache
        self._num_ids = num_local_rows if index is None else VIRTUAL_ROWS
        self.dirty: TableDirtySet = dirty_set(self._num_ids, max_bitmap_bytes=_DEFAULT_BITMAP_BYTES)
        self.send_share = 1.0
        self.waiting: DirtyRows | None = None
        self.on_move: Callable[[], None] | None = None
        self.deleted = DeletedRows(self._num_ids, is_lasting=index is None)
        self._weights = weights
        self._states = states
        self._identities = identities
        self._scalars = scalars
        self.is_in_use = is_in_use
        self.backing = backing

    def call(self, name: str) -> None:
        """Give the table another name on the server than its path. REQUIRES: it has not joined a model yet."""
        self.spec = dataclasses.replace(self.spec, fqn=name)

    def join_model(self, model: str) -> None:
        """Give the table the name that it has on the server, for a table that is named by its path so far."""
        self.spec = dataclasses.replace(self.spec, fqn=table_name(model, self.spec.fqn))

    def store_as(self, dtype: DType, *, has_states: bool) -> None:
        """Have weights stored in another type, each rounded to the nearest value of it, or no optimizer states stored.

        Runtime meta stays: it is no optimizer's. REQUIRES: the table is not registered with the server yet.
        """
        states = self.spec.states if has_states else tuple(s for s in self.spec.states if s.name == RUNTIME_META)
        self.spec = dataclasses.replace(self.spec, dtype=dtype, states=states)
        if not has_states:
            self._scalars = dict

    def hold_back_all_but(self, send_share: float) -> None:
        """Have flushes send only this share of the dirty rows, above 0 and below 1, as `ImportanceFilter` does.

        REQUIRES: `can_wait`, and no flush has had the table.
        """
        self.send_share, self.waiting = send_share, DirtyRows(self.num_local_rows)

    @property
    def can_wait(self) -> bool:
        """Whether rows can be held back: not where a row may come to stand for another id, nor by integers."""
        return self.index is None and not self.spec.has_identities and TORCH_DTYPES[self._dtype].is_floating_point

    @property
    def is_rounded(self) -> bool:
        """Whether weights are stored in another type than they are trained in."""
        return self.spec.dtype is not self._dtype

    @property
    def live_row_bytes(self) -> int:
        """Bytes of a row's weights in the model, of the columns here."""
        return self.shard.width * self._dtype.size_bytes

    def mark_all(self, *, spares_evicted: bool = False) -> None:
        """Mark every row on this rank; with `spares_evicted` except rows that were evicted and not used since."""
        if self.index is not None:
            self.dirty.mark(self.index.row_ids())
            return
        unused = self.deleted.unused(self.dirty) if spares_evicted else None
        if isinstance(self.dirty, DirtyIds):  # with all rows in it, a bitmap is smaller
            self.dirty = DirtyRows(self.num_local_rows)
        self.dirty.mark_all()
        if unused is not None:
            self.dirty.discard(unused)

    def mark_from(self, first_row: int) -> None:
        """Mark the rows on this rank from a global id on. REQUIRES: no `index`."""
        first = max(first_row - self.row_offset, 0)
        if first >= self.num_local_rows:
            return
        if isinstance(self.dirty, DirtyIds):  # as in `mark_all`
            self.dirty = _as_bitmap(self.dirty, self.num_local_rows)
        self.dirty.mark(torch.arange(first, self.num_local_rows, dtype=torch.int64, device="cpu"))

    def mark_padding(self) -> None:
        """Mark the padding's row, if it is here: nothing trains it, and it need not be zero."""
        uses = () if self.spec.uses is None else decode_uses(f"table {self.spec.fqn!r}", self.spec.uses)
        rows = [use.padding_idx for use in uses if use.padding_idx is not None]
        if (here := self.ids_here(torch.tensor(rows, dtype=torch.int64, device="cpu"))).numel():
            self.dirty.mark(here)

    def mark_shards(self, shards: Collection[int], num_shards: int) -> None:
        """Mark every row on this rank that lives on some shards of a server.

        Those that were evicted and not used since are to be deleted again; an `index` forgets them once they were sent.
        """
        unused = self.deleted.unused(self.dirty)
        # As in `mark_all`: with many rows in it, a bitmap is smaller.
        if self.index is None and isinstance(self.dirty, DirtyIds):
            self.dirty = _as_bitmap(self.dirty, self.num_local_rows)
        for local_ids in self._all_ids():
            global_ids = local_ids + self.row_offset
            home = shards_of_rows(self.spec.seed, global_ids.numpy(), num_shards)
            is_lost = torch.from_numpy(np.isin(home, list(shards)))
            self.dirty.mark(local_ids[is_lost])
        self.dirty.discard(unused)
        home = shards_of_rows(self.spec.seed, (unused + self.row_offset).numpy(), num_shards)
        self.deleted.give_back(unused[torch.from_numpy(np.isin(home, list(shards)))])

    def mark_again(self, row_ids: torch.Tensor) -> None:
        """Have rows, local int64[n] on the CPU, that were in a flush go out once more, by their present state.

        Those that were evicted and not used since are to be deleted, whatever the flush had of them; others are marked.
        An `index` knows by itself which rows are gone.
        """
        is_unused = torch.isin(row_ids, self.deleted.unused(self.dirty))
        self.deleted.give_back(row_ids[is_unused])
        self.dirty.mark(row_ids[~is_unused])

    def _all_ids(self) -> Iterator[torch.Tensor]:
        """Yield the local ids of all rows, int64 on the CPU, some at a time."""
        known = None if self.index is None else self.index.row_ids().cpu()
        num_ids = self.num_local_rows if known is None else known.numel()
        for first in range(0, num_ids, _IDS_AT_ONCE):
            end = min(first + _IDS_AT_ONCE, num_ids)
            yield torch.arange(first, end, dtype=torch.int64, device="cpu") if known is None else known[first:end]

    def limit_bitmap(self, max_bytes: int) -> None:
        """Keep dirty rows in a bitmap if it takes at most `max_bytes`, else as ids while those take less memory."""
        assert not isinstance(self.dirty, DeviceDirtyRows)
        size_bytes = bitmap_bytes(self._num_ids)
        if isinstance(self.dirty, DirtyRows):
            # A bitmap with marked rows stays: its memory is allocated already.
            if size_bytes > max_bytes and self.dirty.is_empty:
                self.dirty = DirtyIds(self._num_ids)
        elif size_bytes <= max(max_bytes, self.dirty.size_bytes):
            self.dirty = _as_bitmap(self.dirty, self._num_ids)

    def join_device(self, dirty: DeviceDirtyRows) -> None:
        """Move dirty rows to a set on the table's device."""
        if not self.dirty.is_empty:
            dirty.add(self.dirty)
        self.dirty = dirty
        if self.on_move is not None:
            self.on_move()

    def leave_device(self) -> None:
        """Move dirty rows to the host, if they are on a device; waits for it."""
        if isinstance(self.dirty, DeviceDirtyRows):
            self.dirty = self.dirty.to_host()
            if self.on_move is not None:
                self.on_move()

    def evict(self, row_ids: torch.Tensor) -> None:
        """Have the next flush delete rows, local int64[n] on the CPU, unless they are marked again before it.

        The table leaves its device. REQUIRES: no flush of it is on its way from there.
        """
        self.leave_device()
        self.deleted.add(row_ids, self.dirty)
        if self.waiting is not None:
            self.waiting.discard(row_ids)

    def ids_here(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Return the local ids of those of the global rows, int64[n] on the CPU, that are on this rank."""
        if self.index is not None:
            return row_ids
        end_row = self.row_offset + self.num_local_rows
        return row_ids[(row_ids >= self.row_offset) & (row_ids < end_row)] - self.row_offset

    def places(self, local_ids: torch.Tensor) -> torch.Tensor:
        """Return the places of local rows, int64[n] on the CPU, in `weights` and `states`; -1 for an absent row."""
        return local_ids if self.index is None else self.index.find(local_ids).cpu()

    def weights(self) -> torch.Tensor:
        """Return the live weights, `[num_local_rows or places, shard.width]`, detached. Do not write or keep them.

        With a `cache`, rows in it are out of date here, and if the table `is_rounded` they are stored in another type:
        read rows with `weights_at`.

        Raises:
            UnsupportedModelError: Their type or shape has changed since `attach` (`module.to(dtype)`, a write to
                `.data`), or the model has another module or parameter in their place.
        """
        if not self.is_in_use():
            raise UnsupportedModelError(
                f"table {self.spec.fqn!r} is not what was attached: the model has another module or parameter in its "
                f"place; change a model before `attach`, or attach it to a new streamer"
            )
        weights = self._weights()
        if weights.is_meta:
            raise UnsupportedModelError(
                f"table {self.spec.fqn!r} has been moved to the meta device: its rows are gone; attach the model to a "
                "new streamer once it has memory again"
            )
        self._check_same("table", weights, self._dtype, self.shard.width)
        return weights

    def weights_at(self, places: torch.Tensor) -> torch.Tensor:
        """Return copies of the present weights, as they are stored, of rows by their places, int64[n].

        They are `[n, shard.width]` of the spec's dtype, on the weights' device.

        Raises:
            UnsupportedModelError: As `weights` does.
        """
        weights = self.weights()
        here = places.to(weights.device)
        rows = weights.index_select(0, here) if self.cache is None else self.cache.read(weights, here)
        return rows.to(TORCH_DTYPES[self.spec.dtype])

    def write_weights(self, places: torch.Tensor, rows: torch.Tensor) -> None:
        """Replace the weights, `[n, shard.width]`, of rows by their places, int64[n], unique."""
        weights = self.weights()
        here, values = places.to(weights.device), rows.to(weights.device)
        if self.cache is None:
            weights.index_copy_(0, here, values)
        else:
            self.cache.write(weights, here, values)

    def states(self) -> dict[str, torch.Tensor]:
        """Return the live optimizer states by name, in the spec's order. Do not write or keep them.

        Each is `[num_local_rows, width in this shard]`, without gradient. A state that the optimizer has not created
        yet is its initial value, expanded with zero strides, which takes no memory.

        Raises:
            UnsupportedModelError: The type or shape of one has changed since `attach`.
        """
        states = self._states()
        for state in self.spec.states:
            self._check_same(
                f"state {state.name!r} of table", states[state.name], state.dtype, state.width_in(self.shard)
            )
        return states

    def scalars(self) -> dict[str, torch.Tensor]:
        """Return the one-element values kept once per table, such as the step count; empty before the first step."""
        return self._scalars()

    def identities(self) -> torch.Tensor:
        """Return the raw id mapped to each row now, int64[num_local_rows], -1 for none. REQUIRES: identities."""
        assert self._identities is not None
        return self._identities()

    def _check_same(self, what: str, values: torch.Tensor, dtype: DType, width: int) -> None:
        num_rows = values.shape[0] if self.index is not None else self.num_local_rows
        if values.shape != (num_rows, width) or DTYPES.get(values.dtype) is not dtype:
            raise UnsupportedModelError(
                f"{what} {self.spec.fqn!r} was {dtype.name.lower()}{[num_rows, width]} when it was attached and is "
                f"{str(values.dtype).removeprefix('torch.')}{list(values.shape)} now: change a model before `attach`"
            )

    def __repr__(self) -> str:
        last_row = self.row_offset + self.num_local_rows
        last_column = self.shard.offset + self.shard.width
        return (
            f"TappedTable({self.spec.fqn!r}, rows {self.row_offset}:{last_row} of {self.spec.num_rows}, "
            f"columns {self.shard.offset}:{last_column} of {self.spec.dim}, {self.spec.dtype.name})"
        )


def _as_bitmap(ids: DirtyIds, num_rows: int) -> DirtyRows:
    bitmap = DirtyRows(num_rows)
    for part in ids.parts():
        bitmap.mark(part)
    return bitmap


def dtype_of(what: str, dtype: torch.dtype, *, instead: str = "") -> DType:
    """Return the schema's type, or raise UnsupportedModelError: `what` has this one, and what to do `instead`."""
    try:
        return DTYPES[dtype]
    except KeyError:
        known = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise UnsupportedModelError(f"{what}: element type {dtype} cannot be streamed: use {known}{instead}") from None


def tap_part(
    part: TablePart,
    *,
    num_local_rows: int,
    num_columns: int,
    dtype: torch.dtype,
    states_of: Iterable[tuple[str, torch.dtype, int]] = (),
    states: Callable[[], dict[str, torch.Tensor]],
    identities: IdentitySource | None = None,
    **live: Any,
) -> TappedTable:
    """Describe a part's table, or refuse its dtypes.

    `states_of` has each optimizer state's name, dtype, and width if it is rowwise, 0 if it is not. The runtime meta of
    `identities` becomes one more state.
    """
    if identities is not None:
        identities.check(part.fqn, num_local_rows)
        if (meta := identities.meta()) is not None:
            states_of = [*states_of, (RUNTIME_META, meta.dtype, meta.shape[1])]
            states = _with_meta(states, identities)
    spec = TableSpec(
        fqn=part.fqn,
        num_rows=part.num_rows,
        dim=part.dim,
        dtype=dtype_of(f"table {part.fqn!r}", dtype, instead=or_without(part.fqn)),
        states=tuple(
            StateSpec(
                name=name,
                kind=StateKind.ROWWISE if width else StateKind.POINTWISE,
                dtype=dtype_of(f"state {name!r} of table {part.fqn!r}", state_dtype, instead=or_without(part.fqn)),
                width=int(width),
            )
            for name, state_dtype, width in states_of
        ),
        has_identities=identities is not None,
    )
    live |= {"row_offset": part.row_offset, "shard": ColumnShard(offset=part.column_offset, width=num_columns)}
    return TappedTable(spec=spec, num_local_rows=num_local_rows, states=states, identities=identities, **live)


def _with_meta(states: Callable[[], dict[str, torch.Tensor]], identities: IdentitySource) -> Any:
    return lambda: states() | {RUNTIME_META: identities.meta()}


def describe_rows(tables: Sequence[TappedTable]) -> str:
    """Return the tables' names, and how many rows and bytes of weights and states all of their rows here are."""
    num_rows = sum(table.num_local_rows for table in tables)
    num_bytes = sum(table.num_local_rows * _row_bytes(table) for table in tables)
    names = first_of(list(dict.fromkeys(table.path for table in tables)))
    return f"{names}: {num_rows:,} rows, {format_size(num_bytes)}"


def _row_bytes(table: TappedTable) -> int:
    spec = table.spec
    states = sum(state.width_in(table.shard) * state.dtype.size_bytes for state in spec.states)
    return table.shard.width * spec.dtype.size_bytes + states


def zero_state(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros `[num_rows, width]` in the memory of one row."""
    return torch.zeros((1, width), dtype=dtype, device=device).expand(num_rows, width)


class DeletedRows:
    """The evicted rows of one table, by local row id.

    Nothing announces that an evicted row is used again; it is marked dirty like any other. So an eviction removes its
    rows from the dirty set, and a row that is dirty again when a flush takes the deletions is alive. Takes no memory
    before the first eviction, then up to 32 bytes for each row that is not used again.
    """

    def __init__(self, num_rows: int, *, is_lasting: bool) -> None:
        """Begin with none of `num_rows`; if `is_lasting`, remember rows after their deletion was sent."""
        self._pending = DirtyIds(num_rows)
        self._deleted = DirtyIds(num_rows) if is_lasting else None

    def add(self, row_ids: torch.Tensor, dirty: TableDirtySet) -> None:
        """Add unique rows, int64[n] on the CPU, and discard their dirty bits. Interrupted before, they stay alive."""
        self._pending.mark(row_ids)
        if self._deleted is not None:
            self._deleted.mark(row_ids)
        dirty.discard(row_ids)

    def take(
        self, max_rows: int, dirty: TableDirtySet, *, note: Callable[[torch.Tensor], None] | None = None
    ) -> torch.Tensor:
        """Remove and return at most `max_rows` rows to delete, int64[n] on the CPU, ascending.

        Rows that are dirty again, before any are taken for the same flush, are alive and dropped. `note` is called with
        all rows before they are removed, so that an interrupted caller can `give_back`.
        """
        row_ids = self._pending.take(max_rows, note=note)
        return row_ids[~dirty.contains(row_ids)]

    def give_back(self, row_ids: torch.Tensor) -> None:
        """Add rows again that `take` returned and that were not sent."""
        self._pending.mark(row_ids)

    def note_sent(self, row_ids: torch.Tensor) -> None:
        """Forget rows, int64[n], that go out with values, because they are used again."""
        if not self._pending.is_empty:  # more are evicted than a flush could take
            self._pending.discard(row_ids)
        if self._deleted is not None and not self._deleted.is_empty:
            self._deleted.discard(row_ids)

    def contains(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Return which rows, int64[n] on the CPU, were evicted and not sent since, bool[n], if the set is lasting."""
        if self._deleted is None or self._deleted.is_empty:
            return torch.zeros(row_ids.numel(), dtype=torch.bool, device="cpu")
        return self._deleted.contains(row_ids)

    def unused(self, dirty: TableDirtySet) -> torch.Tensor:
        """Return the rows evicted and not used since, int64[n] on the CPU, ascending.

        Unless the set is lasting, only those whose deletion was not taken yet.
        """
        held = self._pending if self._deleted is None else self._deleted
        row_ids = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *held.parts()])
        return row_ids[~dirty.contains(row_ids)]

    @property
    def is_empty(self) -> bool:
        """Whether no deletion is pending and all evicted rows are used again."""
        return self._pending.is_empty and (self._deleted is None or self._deleted.is_empty)

    @property
    def is_pending(self) -> bool:
        """Whether a deletion was not taken yet."""
        return not self._pending.is_empty

    @property
    def num_pending(self) -> int:
        """Number of deletions not taken yet, including rows that are used again.

        Thread: any.
        """
        return self._pending.count
