"""A stand-in for `torch.classes.fbgemm.RawEmbeddingStreamer`, whose network half the public FBGEMM lacks.

A table-batched module that was made with `enable_raw_embedding_streaming=True` calls it from its prefetch with the rows
of its cache that the last step (with a prefetch pipeline the last but one) has changed. `install` puts ours in its
place. The rows are written through to the module's own table in host memory, which the cache would overwrite with the
same or newer values anyway, and marked: so the memory taken stays one bit a row, and hot rows coalesce like any others.

What FBGEMM hands over is all that can be sent: weights without optimizer states, a step or two late, of cached tables
only; with `has_identities` the raw ids behind the rows, and runtime meta as it comes. Where
`RawEmbeddingStreamer.attach` takes a model, it is the better way.

Source: `fbgemm_gpu/split_table_batched_embeddings_ops_training.py` (`raw_embedding_stream`), fbgemm-gpu 1.8.0, and
`fbgemm_gpu/src/split_embeddings_cache/raw_embedding_streamer.cpp`, pytorch/FBGEMM at 71d6f8b.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from headrace.schemas.errors import ConfigError, RequestError, RowRangeError, UnsupportedModelError
from headrace.schemas.near_names import describe_near
from headrace.schemas.tables import ColumnShard, TableSpec
from headrace.streamer.raw_embedding_streamer import RawEmbeddingStreamer
from headrace.streamer.taps.fbgemm_tap import is_table_batched, table_parts
from headrace.streamer.taps.row_meta import RowMeta, check_meta
from headrace.streamer.taps.tapped_modules import add_tapped, check_untapped, remove_tapped
from headrace.streamer.taps.tapped_table import TablePart, TappedTable, dtype_of

__all__ = ["ResStandIn", "install"]

_log = logging.getLogger(__name__)
_PORT_VARIABLE = "LOCAL_RES_PORT"


def install(
    module: Any,
    streamer: RawEmbeddingStreamer | None = None,
    *,
    run: str = "res",
    path: str = "",
    parts: Sequence[TablePart] | None = None,
    enabled_tables: str | Sequence[str] | None = None,
    has_identities: bool = False,
) -> RawEmbeddingStreamer:
    """Put our object in the place of the RES streamer of a table-batched module.

    Args:
        module: `SplitTableBatchedEmbeddingBagsCodegen` made with `enable_raw_embedding_streaming=True`.
        streamer: Where its rows go; None connects to this machine at the port of the environment's LOCAL_RES_PORT or of
            the module's `res_params.res_server_port`, as RES does.
        run: Name of the run, when there is no streamer yet.
        path: The module's path in the model; tables are named `PATH.NAME`, or `NAME` without one.
        parts: Which part of which table each of the module's tables is; None takes the names and row offsets of its
            `res_params`, each table ending with the last row here and having all columns: right for tables that are
            whole, and for the last rows of one. RES itself mixes column shards up; with parts they are kept apart.
        enabled_tables: Names or patterns of tables to stream, in a list or with commas as `res_enabled_tables` has
            them; None for all.
        has_identities: The module's forward is given `hash_zch_identities`: the tables' rows are stored with the raw
            ids behind them, -1 for a row that came without. Takes 8 bytes a row here.

    Returns:
        The streamer; `flush` and `close` it as always.

    Raises:
        UnsupportedModelError: It is no such module, it is streamed already, or two tables have the same rows.
        ConfigError: No table is enabled, no port is given, or the settings do not fit the module.
        UnavailableError: No server there.
    """
    if not is_table_batched(module) or not getattr(module, "enable_raw_embedding_streaming", False):
        raise UnsupportedModelError(
            f"{type(module).__name__} was not made with enable_raw_embedding_streaming=True, or is no table-batched "
            f"module of FBGEMM: attach the model instead"
        )
    check_untapped([(path, module)])
    parts = _parts_of(module, path) if parts is None else parts
    enabled = _enabled(parts, enabled_tables)
    is_own = streamer is None
    if streamer is None:
        streamer = RawEmbeddingStreamer(f"127.0.0.1:{_port_of(module)}", run=run)
    num_shards = module.res_params.res_store_shards
    if num_shards not in (1, streamer.num_shards):
        _log.warning(
            "res_store_shards is %d and the server has %d shards: rows are spread over the server's",
            num_shards,
            streamer.num_shards,
        )
    made: list[ResStandIn] = []

    def make(on_step: Callable[[], None]) -> ResStandIn:
        made.append(ResStandIn(module, parts, enabled, on_step, has_identities=has_identities))
        return made[0]

    try:
        streamer.attach_tap(make)
    except BaseException:
        if is_own:
            streamer.close(flush=False)
        raise
    made[0].share_steps(_steps.setdefault(streamer, set()))
    made[0].take_place()
    return streamer


# Per streamer, the stand-ins that have streamed since the last step boundary.
_steps: weakref.WeakKeyDictionary[RawEmbeddingStreamer, set[int]] = weakref.WeakKeyDictionary()


class ResStandIn:
    """Has the methods of `torch.classes.fbgemm.RawEmbeddingStreamer`, and is a tap.

    Thread: the one that calls the module's forward or prefetch.

    Attributes:
        tables: Those that are streamed.
        names: Of those.
    """

    def __init__(
        self,
        module: Any,
        parts: Sequence[TablePart],
        is_enabled: Sequence[bool],
        on_step: Callable[[], None],
        *,
        has_identities: bool = False,
    ) -> None:
        """Describe the module's tables; `take_place` begins."""
        self._module = module
        self._on_step = on_step
        self._streamed: set[int] = set()
        self._has_identities = has_identities
        self._has_updates = self._has_warned = False
        self._replaced: Any = None
        weights = module.split_embedding_weights()
        if len(parts) != len(weights):
            raise ConfigError(f"{len(parts)} names or parts for a module of {len(weights)} tables")
        self._sizes = np.array([0, *np.cumsum([table.shape[0] for table in weights])], np.int64)
        # By the module's table number, of any size: RES itself has eight bits for it.
        self._tables = [
            self._table(index, part, weights[index]) if enabled and weights[index].shape[0] else None
            for index, (part, enabled) in enumerate(zip(parts, is_enabled, strict=True))
        ]
        self.tables = [table for table in self._tables if table is not None]
        _check_apart(self.tables)
        self.names = frozenset(table.spec.fqn for table in self.tables)

    def stream(
        self,
        indices: torch.Tensor,
        weights: torch.Tensor,
        identities: torch.Tensor | None,
        runtime_meta: torch.Tensor | None,
        count: torch.Tensor,
        require_tensor_copy: bool,
        blocking_tensor_copy: bool = True,
        copy_done_flag: torch.Tensor | None = None,
        use_hbm: bool = False,
    ) -> None:
        """Take changed rows. All is copied when this returns, whatever the flags say.

        Args:
            indices: int64[≥ n], rows of all tables one after the other; negative ones are skipped.
            weights: `[≥ n, ≥ dim]`, their values.
            identities: `[≥ n]` or `[≥ n, 1]`, integers: the raw ids behind the rows, of tables with and without.
            runtime_meta: `[≥ n, any]`, any type, which may differ from call to call: bytes that travel with the rows.
            count: Integer `[1]`: n, how many rows are valid.
            require_tensor_copy: Not needed.
            blocking_tensor_copy: Not needed.
            copy_done_flag: Set to 0 when the rows are copied.
            use_hbm: Not needed: values are read where they are.

        Raises:
            RowRangeError: An index is beyond the last table; nothing was taken.
            RequestError: The runtime meta is too long, or identities are not one a row; nothing was taken.
        """
        del require_tensor_copy, blocking_tensor_copy, use_hbm
        if identities is not None and not self._has_identities and not self._has_warned:
            self._has_warned = True
            _log.warning("identities of rows are not streamed: give install() has_identities=True, and a new store")
        if identities is not None and identities.numel() != identities.shape[0]:
            raise RequestError(f"identities of shape {tuple(identities.shape)}: one a row is streamed")
        if runtime_meta is not None:
            check_meta(runtime_meta)
        if id(self) in self._streamed:
            self._end_step()
        self._streamed.add(id(self))
        num_rows = min(int(count.reshape(-1)[0]), indices.numel())
        # `.cpu()` waits for what the device was told to copy into the buffers.
        ids = indices.detach().reshape(-1)[:num_rows].cpu().numpy().astype(np.int64, copy=False)
        rows = np.flatnonzero(ids >= 0)
        if rows.size and int(ids[rows].max()) >= self._sizes[-1]:
            raise RowRangeError(f"row {int(ids[rows].max())} of all tables' {int(self._sizes[-1])} rows")
        # The table that begins last at or before the row: tables without rows begin where the next one does.
        numbers = np.searchsorted(self._sizes, ids[rows], side="right") - 1
        live = self._module.split_embedding_weights() if rows.size else []
        for number in np.unique(numbers).tolist():
            table = self._tables[number]
            if table is not None:
                of_table = rows[numbers == number]
                self._take_extras(table, of_table, ids - self._sizes[number], identities, runtime_meta)
                self._take(table, live[number], of_table, ids - self._sizes[number], weights)
        if copy_done_flag is not None:
            copy_done_flag.zero_()

    def join_stream_tensor_copy_thread(self) -> None:
        """Return at once: nothing is copied behind the caller's back."""

    def share_steps(self, streamed: set[int]) -> None:
        """Count steps together with other modules: one is over when one of them streams for the second time."""
        self._streamed = streamed

    def take_place(self) -> None:
        """Become the module's streamer."""
        self._replaced, self._module._raw_embedding_streamer = self._module._raw_embedding_streamer, self
        add_tapped([("", self._module)])

    def end_step(self) -> bool:
        """Declare that the step is over; return whether there were updates."""
        had_updates = self._has_updates
        if had_updates:
            self._end_step()
        return had_updates

    def sweep(self) -> None:
        """The module tells of each row: there is nothing else to look for."""

    def close(self) -> None:
        """Give the module its own streamer back; idempotent."""
        if self._replaced is not None:
            self._module._raw_embedding_streamer, self._replaced = self._replaced, None
            remove_tapped([("", self._module)])

    def _end_step(self) -> None:
        self._streamed.clear()
        self._has_updates = False
        self._on_step()

    def _take(self, table: TappedTable, live: torch.Tensor, rows: Any, local_ids: Any, weights: torch.Tensor) -> None:
        """Write some of the rows through to a table, and mark them."""
        local = torch.from_numpy(local_ids[rows])
        values = weights.detach()[torch.from_numpy(rows).to(weights.device), : table.shard.width]
        with torch.no_grad():
            live.detach().index_copy_(0, local.to(live.device), values.to(device=live.device, dtype=live.dtype))
        table.dirty.mark(local)
        self._has_updates = True

    def _take_extras(
        self,
        table: TappedTable,
        rows: Any,
        local_ids: Any,
        identities: torch.Tensor | None,
        runtime_meta: torch.Tensor | None,
    ) -> None:
        """Keep what travels with some of the rows until they are sent."""
        at = torch.from_numpy(rows)
        if runtime_meta is not None:
            assert table.meta is not None
            meta = runtime_meta.detach().index_select(0, at.to(runtime_meta.device))
            table.meta.put(local_ids[rows], meta)
        if self._has_identities:
            raw_ids = torch.full((rows.size,), -1, dtype=torch.int64)
            if identities is not None:
                raw_ids = (
                    identities.detach().reshape(-1).index_select(0, at.to(identities.device)).cpu().to(torch.int64)
                )
            table.identities()[torch.from_numpy(local_ids[rows])] = raw_ids

    def _table(self, index: int, part: TablePart, weights: torch.Tensor) -> TappedTable:
        if part.num_local_rows is not None or part.num_local_columns is not None:
            raise ConfigError(f"table {part.fqn!r}: a part of a module's table is not streamed, only all of it")
        num_local_rows, num_columns = weights.shape
        end_row, end_column = part.row_offset + num_local_rows, part.column_offset + num_columns
        if not (part.row_offset >= 0 and end_row <= (part.num_rows or 2**63)):
            raise ConfigError(
                f"table {part.fqn!r}: rows {part.row_offset}:{end_row} are not within the table's {part.num_rows} rows"
            )
        if not (part.column_offset >= 0 and end_column <= part.dim):
            raise ConfigError(
                f"table {part.fqn!r}: columns {part.column_offset}:{end_column} are not within its {part.dim} columns"
            )
        spec = TableSpec(
            fqn=part.fqn,
            num_rows=part.num_rows,
            dim=part.dim,
            dtype=dtype_of(f"table {part.fqn!r}", weights.dtype),
            has_identities=self._has_identities,
        )
        identities = torch.full((num_local_rows if self._has_identities else 0,), -1, dtype=torch.int64)
        return TappedTable(
            spec=spec,
            shard=ColumnShard(offset=part.column_offset, width=num_columns),
            row_offset=part.row_offset,
            num_local_rows=num_local_rows,
            weights=lambda: self._module.split_embedding_weights()[index].detach(),
            states=dict,
            identities=(lambda: identities) if self._has_identities else None,
            meta=RowMeta(num_local_rows),
        )


def _parts_of(module: Any, path: str) -> list[TablePart]:
    """Return the parts that the module's `res_params` describe, or those of whole tables where it has no names."""
    res = module.res_params
    whole = list(table_parts(path, module))
    names = [f"{path}.{name}" if path else name for name in res.table_names] or [part.fqn for part in whole]
    offsets = list(res.table_offsets) or [0] * len(names)
    if not len(names) == len(offsets) == len(whole):
        raise ConfigError(
            f"res_params have {len(names)} table_names and {len(offsets)} table_offsets for {len(whole)} tables"
        )
    return [
        TablePart(fqn=name, num_rows=offset + part.num_rows, dim=part.dim, row_offset=offset)
        for name, offset, part in zip(names, offsets, whole, strict=True)
    ]


def _check_apart(tables: Sequence[TappedTable]) -> None:
    """Check that no two tables of the module have rows and columns in common, which would take turns in the store."""
    by_name: dict[str, list[tuple[range, range]]] = {}
    for table in tables:
        rows = range(table.row_offset, table.row_offset + table.num_local_rows)
        columns = range(table.shard.offset, table.shard.offset + table.shard.width)
        others = by_name.setdefault(table.spec.fqn, [])
        if any(_overlap(rows, its_rows) and _overlap(columns, its_columns) for its_rows, its_columns in others):
            raise UnsupportedModelError(
                f"two tables are named {table.spec.fqn!r} and have the same rows and columns of it: give them "
                f"different names, or say with install(parts=...) which part each is"
            )
        others.append((rows, columns))


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _enabled(parts: Sequence[TablePart], wanted: str | Sequence[str] | None) -> list[bool]:
    """Return which tables are streamed."""
    patterns = wanted.split(",") if isinstance(wanted, str) else list(wanted or ())
    patterns = [pattern.strip() for pattern in patterns if pattern.strip()]
    if not patterns:  # as in TorchRec: an empty list enables all
        return [True] * len(parts)

    def matches(fqn: str, pattern: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for name in (fqn, fqn.rpartition(".")[2]))

    fqns = [part.fqn for part in parts]
    enabled = [any(matches(fqn, pattern) for pattern in patterns) for fqn in fqns]
    if not any(enabled):
        raise ConfigError(f"none of the tables {', '.join(fqns)} is in res_enabled_tables, {', '.join(patterns)}")
    for pattern in patterns:
        if not any(matches(fqn, pattern) for fqn in fqns):  # one of another module's, or of none
            _log.warning(
                "enabled_tables: no table here is named or matches %r; %s", pattern, describe_near(pattern, fqns)
            )
    return enabled


def _port_of(module: Any) -> int:
    text = os.environ.get(_PORT_VARIABLE) or str(module.res_params.res_server_port)
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ConfigError(f"port {text!r}: set {_PORT_VARIABLE} or res_server_port, or give install() a streamer")
    return int(text)
