"""A stand-in for `torch.classes.fbgemm.RawEmbeddingStreamer` (RES), whose networking the public FBGEMM lacks.

A table-batched module created with `enable_raw_embedding_streaming=True` calls it from its prefetch with the cached
rows that the last step (with a prefetch pipeline the last but one) has changed. `install` replaces it. The rows are
written through to the module's own table in host memory, which the cache would overwrite with the same or newer values
anyway, and marked. So they take one bit of memory each, and hot rows coalesce.

Only what FBGEMM hands over can be sent: weights without optimizer states, a step or two late, of cached tables; with
`has_identities` the raw ids behind the rows, and runtime meta. If `RawEmbeddingStreamer.attach` accepts a model, use
that.

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

from headrace.paramserver.system.text import describe_near
from headrace.schemas.errors import ConfigError, RequestError, RowRangeError, UnsupportedModelError
from headrace.streamer.api import RawEmbeddingStreamer
from headrace.streamer.taps.fbgemm import is_table_batched, table_parts
from headrace.streamer.taps.guards.tapped_modules import add_tapped, check_untapped, remove_tapped
from headrace.streamer.taps.row_extras import RowMeta, check_meta
from headrace.streamer.taps.tapped_table import TablePart, TappedTable, tap_part

__all__ = ["ResStandIn", "install", "provide_masked_index_select"]

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
    """Replace the RES streamer of a table-batched module, so that its rows go to a parameter server.

    Args:
        module: `SplitTableBatchedEmbeddingBagsCodegen` created with `enable_raw_embedding_streaming=True`.
        streamer: Sends the rows. None connects to this machine at the port in the environment variable LOCAL_RES_PORT,
            or the module's `res_params.res_server_port`, like RES.
        run: Name of the run, if `streamer` is None.
        path: The module's path in the model; tables are named `PATH.NAME`, or `NAME` without a path.
        parts: The part of a table that each of the module's tables is. None takes names and row offsets from its
            `res_params`, with all columns, up to the last row here: right for whole tables, and for the last rows of
            one. RES itself mixes up column shards; `parts` keeps them apart.
        enabled_tables: Names or patterns of the tables to stream, in a list or separated by commas like
            `res_enabled_tables`; None for all.
        has_identities: The module's forward gets `hash_zch_identities`, so rows are stored with their raw ids,
            -1 for a row without one. Takes 8 bytes per row here.

    Returns:
        The streamer, to `flush` and `close`.

    Raises:
        UnsupportedModelError: It is no such module, it is streamed already, or two of its tables have the same rows.
        ConfigError: No table is enabled, no port is given, or the settings do not fit the module.
        UnavailableError: No server answers.
    """
    if not is_table_batched(module) or not getattr(module, "enable_raw_embedding_streaming", False):
        raise UnsupportedModelError(
            f"{type(module).__name__} was not created with enable_raw_embedding_streaming=True, or is not a "
            f"table-batched module of FBGEMM: attach the model instead"
        )
    check_untapped([(path, module)])
    parts = _parts_of(module, path) if parts is None else parts
    enabled = _enabled(parts, enabled_tables)
    is_new = streamer is None
    if streamer is None:
        streamer = RawEmbeddingStreamer(f"127.0.0.1:{_port_of(module)}", run=run)
    num_shards = module.res_params.res_store_shards
    if num_shards not in (1, streamer.num_shards):
        _log.warning("res_store_shards is %d, but the server has %d: using these", num_shards, streamer.num_shards)
    provide_masked_index_select()
    made: list[ResStandIn] = []

    def make(on_step: Callable[[], None]) -> ResStandIn:
        made.append(ResStandIn(module, parts, enabled, on_step, has_identities=has_identities))
        return made[0]

    try:
        streamer.attach_tap(make)
    except BaseException:
        if is_new:
            streamer.close(flush=False)
        raise
    made[0].share_steps(_steps.setdefault(streamer, set()))
    made[0].take_place()
    return streamer


# Holds the operator's registration: it would end with this object.
_operators: list[Any] = []


def provide_masked_index_select() -> None:
    """Define the operator with which a module picks cached rows for RES, if this build of FBGEMM lacks it.

    It belongs to FBGEMM's SSD tables, which public wheels leave out; without it a module's second prefetch raises
    AttributeError.
    """
    if hasattr(torch.ops.fbgemm, "masked_index_select"):
        return
    library: Any = torch.library.Library("fbgemm", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(
        "masked_index_select(Tensor(a!) self, Tensor indices, Tensor values, Tensor count, bool use_pipeline=False, "
        "int preferred_sms=-1) -> ()"
    )
    library.impl("masked_index_select", _masked_index_select, "CompositeExplicitAutograd")
    _operators.append(library)


def _masked_index_select(
    out: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor,
    count: torch.Tensor,
    use_pipeline: bool = False,
    preferred_sms: int = -1,
) -> None:
    """Copy the rows of `values` at the first `count` of the indices to their positions in `out`, without waiting.

    Negative indices are skipped. Those behind `count`, `[1]`, may be anything.
    """
    del use_pipeline, preferred_sms
    is_taken = (torch.arange(indices.numel(), device=indices.device) < count) & (indices >= 0)
    rows = values.index_select(0, torch.where(is_taken, indices, 0))
    target = out[: indices.numel()]
    target.copy_(torch.where(is_taken.unsqueeze(1), rows, target))


# By streamer, the stand-ins that have streamed since the last step boundary.
_steps: weakref.WeakKeyDictionary[RawEmbeddingStreamer, set[int]] = weakref.WeakKeyDictionary()


class ResStandIn:
    """A tap with the methods of `torch.classes.fbgemm.RawEmbeddingStreamer`.

    Thread: the one that calls the module's forward or prefetch.
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
        """Describe the module's tables; `take_place` starts streaming."""
        self._module = module
        self._on_step = on_step
        self._streamed: set[int] = set()
        self._has_identities = has_identities
        self._has_updates = self._has_warned = False
        self._replaced: Any = None
        weights = module.split_embedding_weights()
        if len(parts) != len(weights):
            raise ConfigError(f"{len(parts)} names or parts for a module with {len(weights)} tables")
        self._sizes = np.array([0, *np.cumsum([table.shape[0] for table in weights])], np.int64)
        # By the module's table number, without a limit; RES itself has eight bits for it.
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
        """Take changed rows. All are copied when this returns, whatever the flags say. An error takes none.

        `count`, `[1]`, is the number n of valid rows. `indices`, int64[≥ n], are row numbers across all tables;
        negative ones are skipped. `weights`, `[≥ n, ≥ dim]`, are the rows' values, `identities`, `[≥ n]` or `[≥ n, 1]`,
        the raw ids behind them. `runtime_meta`, `[≥ n, any]`, may differ in type and width from call to call.
        `copy_done_flag` is set to 0 when the rows are copied.

        Raises:
            RowRangeError: An index is beyond the last table.
            RequestError: The runtime meta is too long, or there is not one identity per row.
        """
        del require_tensor_copy, blocking_tensor_copy, use_hbm
        if identities is not None and not self._has_identities and not self._has_warned:
            self._has_warned = True
            _log.warning("identities of rows are not streamed: call install() with has_identities=True, on a new store")
        if identities is not None and identities.numel() != identities.shape[0]:
            raise RequestError(f"identities of shape {tuple(identities.shape)}: give one per row")
        if runtime_meta is not None:
            check_meta(runtime_meta)
        if id(self) in self._streamed:
            self._end_step()
        self._streamed.add(id(self))
        num_rows = min(int(count.reshape(-1)[0]), indices.numel())
        # `.cpu()` waits for the device's copies into the buffers.
        ids = indices.detach().reshape(-1)[:num_rows].cpu().numpy().astype(np.int64, copy=False)
        rows = np.flatnonzero(ids >= 0)
        if rows.size and int(ids[rows].max()) >= self._sizes[-1]:
            raise RowRangeError(f"row {int(ids[rows].max())} of all tables' {int(self._sizes[-1])} rows")
        # The last table that begins at or before the row, because an empty table begins where the next one does.
        numbers = np.searchsorted(self._sizes, ids[rows], side="right") - 1
        live = self._module.split_embedding_weights() if rows.size else []
        for number in np.unique(numbers).tolist():
            table = self._tables[number]
            if table is not None:
                at = rows[numbers == number]
                local_ids = ids[at] - self._sizes[number]
                self._put_extras(table, torch.from_numpy(at), local_ids, identities, runtime_meta)
                self._write(table, live[number], torch.from_numpy(at), torch.from_numpy(local_ids), weights)
        if copy_done_flag is not None:
            copy_done_flag.zero_()

    def join_stream_tensor_copy_thread(self) -> None:
        """Return at once: `stream` copies nothing in the background."""

    def share_steps(self, streamed: set[int]) -> None:
        """Share steps with other modules: a step ends when one of them streams for the second time."""
        self._streamed = streamed

    def take_place(self) -> None:
        """Replace the module's streamer."""
        self._replaced, self._module._raw_embedding_streamer = self._module._raw_embedding_streamer, self
        add_tapped([("", self._module)])

    def end_step(self) -> bool:
        """End the step if there were updates; return whether there were."""
        had_updates = self._has_updates
        if had_updates:
            self._end_step()
        return had_updates

    def sweep(self) -> None:
        """Do nothing: the module reports every changed row."""

    def close(self) -> None:
        """Give the module its own streamer back. Idempotent."""
        if self._replaced is not None:
            self._module._raw_embedding_streamer, self._replaced = self._replaced, None
            remove_tapped([("", self._module)])

    def _end_step(self) -> None:
        self._streamed.clear()
        self._has_updates = False
        self._on_step()

    def _write(self, table: TappedTable, live: torch.Tensor, at: Any, local_ids: Any, weights: torch.Tensor) -> None:
        """Write rows, at some positions of the buffer, through to a table, and mark them."""
        values = weights.detach()[at.to(weights.device), : table.shard.width]
        with torch.no_grad():
            # Not `detach()`, which shares the count of writes: a prefetch streams between a forward and its backward,
            # which would refuse weights that were written since.
            live.data.index_copy_(0, local_ids.to(live.device), values.to(device=live.device, dtype=live.dtype))
        if live.device.type == "cuda":  # a prefetch runs on another stream than the flush that reads the rows
            torch.cuda.current_stream(live.device).synchronize()
        table.dirty.mark(local_ids)
        self._has_updates = True

    def _put_extras(self, table: TappedTable, at: Any, local_ids: Any, identities: Any, meta: Any) -> None:
        """Keep runtime meta and identities of rows until they are sent."""
        if meta is not None:
            assert table.meta is not None
            table.meta.put(local_ids, meta.detach().index_select(0, at.to(meta.device)))
        if self._has_identities:
            raw_ids = torch.full(at.shape, -1, dtype=torch.int64)
            if identities is not None:
                raw_ids = identities.detach().reshape(-1).index_select(0, at.to(identities.device)).cpu().long()
            table.identities()[torch.from_numpy(local_ids)] = raw_ids

    def _table(self, index: int, part: TablePart, weights: torch.Tensor) -> TappedTable:
        if part.num_local_rows is not None or part.num_local_columns is not None:
            raise ConfigError(f"table {part.fqn!r}: a module's table can only be streamed whole, not a part of it")
        num_local_rows, num_columns = weights.shape
        end_row, end_column = part.row_offset + num_local_rows, part.column_offset + num_columns
        if not (part.row_offset >= 0 and end_row <= (part.num_rows or 2**63)):
            rows = f"rows {part.row_offset}:{end_row} are not in its {part.num_rows} rows"
            raise ConfigError(f"table {part.fqn!r}: {rows}")
        if not (part.column_offset >= 0 and end_column <= part.dim):
            columns = f"columns {part.column_offset}:{end_column} are not in its {part.dim} columns"
            raise ConfigError(f"table {part.fqn!r}: {columns}")
        identities = torch.full((num_local_rows,), -1, dtype=torch.int64) if self._has_identities else None
        return tap_part(
            part,
            num_local_rows=num_local_rows,
            num_columns=num_columns,
            dtype=weights.dtype,
            weights=lambda: self._module.split_embedding_weights()[index].detach(),
            states=dict,
            identities=None if identities is None else lambda: identities,
            meta=RowMeta(num_local_rows),
        )


def _parts_of(module: Any, path: str) -> list[TablePart]:
    """Return the parts that the module's `res_params` describe, or whole tables if it has no names."""
    res = module.res_params
    whole = list(table_parts(path, module))
    names = [f"{path}.{name}" if path else name for name in res.table_names] or [part.fqn for part in whole]
    offsets = list(res.table_offsets) or [0] * len(names)
    if not len(names) == len(offsets) == len(whole):
        counts = f"{len(names)} table_names and {len(offsets)} table_offsets"
        raise ConfigError(f"res_params have {counts} for {len(whole)} tables")
    return [
        TablePart(fqn=name, num_rows=offset + part.num_rows, dim=part.dim, row_offset=offset)
        for name, offset, part in zip(names, offsets, whole, strict=True)
    ]


def _check_apart(tables: Sequence[TappedTable]) -> None:
    """Check that no two tables of the module overlap: they would overwrite each other in the store."""
    by_name: dict[str, list[tuple[range, range]]] = {}
    for table in tables:
        rows = range(table.row_offset, table.row_offset + table.num_local_rows)
        columns = range(table.shard.offset, table.shard.offset + table.shard.width)
        others = by_name.setdefault(table.spec.fqn, [])
        if any(_overlap(rows, other[0]) and _overlap(columns, other[1]) for other in others):
            raise UnsupportedModelError(
                f"two tables are named {table.spec.fqn!r} and have the same rows and columns: give them different "
                f"names, or say with install(parts=...) which part each is"
            )
        others.append((rows, columns))


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _enabled(parts: Sequence[TablePart], wanted: str | Sequence[str] | None) -> list[bool]:
    patterns = wanted.split(",") if isinstance(wanted, str) else list(wanted or ())
    patterns = [pattern.strip() for pattern in patterns if pattern.strip()]
    if not patterns:  # an empty list enables all, as in TorchRec
        return [True] * len(parts)

    def matches(fqn: str, pattern: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for name in (fqn, fqn.rpartition(".")[2]))

    fqns = [part.fqn for part in parts]
    enabled = [any(matches(fqn, pattern) for pattern in patterns) for fqn in fqns]
    if not any(enabled):
        raise ConfigError(f"none of the tables {', '.join(fqns)} is in res_enabled_tables, {', '.join(patterns)}")
    for pattern in patterns:
        if not any(matches(fqn, pattern) for fqn in fqns):  # may name another module's table
            _log.warning("enabled_tables: no table here matches %r; %s", pattern, describe_near(pattern, fqns))
    return enabled


def _port_of(module: Any) -> int:
    text = os.environ.get(_PORT_VARIABLE) or str(module.res_params.res_server_port)
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ConfigError(f"port {text!r}: set {_PORT_VARIABLE} or res_server_port, or give install() a streamer")
    return int(text)
