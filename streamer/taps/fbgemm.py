"""Tap on FBGEMM's table-batched embeddings, whose optimizer is fused into `backward()`.

A forward hook keeps the batch's row ids with the output's autograd node. A hook on that node runs right after the fused
update and marks them: a forward without a backward marks nothing, and a backward that runs twice marks twice. The ids
are those that the module looks up, after its bounds check; autograd keeps them anyway. A backward of lookups that no
hook has seen (a pipeline's, before `attach`) marks all rows; one with lookups of both kinds marks only the seen ones.

Source: `fbgemm_gpu/split_table_batched_embeddings_ops_training.py`, fbgemm-gpu 1.8.0.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from headrace.kernels.dirty_sets import DirtyRows, JointMarks
from headrace.kernels.module_walk import is_a
from headrace.kernels.packing import to_device
from headrace.kernels.plain_context import in_plain_context
from headrace.paramserver.system.torch_releases import explain_load_failure
from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.device.dirty_rows import DeviceBitmap, DeviceDirtyRows
from headrace.streamer.taps.collisions import Evictions, IdentitySource, Removable
from headrace.streamer.taps.guards.hidden_writes import check_not_shared
from headrace.streamer.taps.hooks import ModuleHook
from headrace.streamer.taps.model_tree import or_without
from headrace.streamer.taps.optimizer_rules import Dirty
from headrace.streamer.taps.row_cache import CacheResets, FusedRowCache, check_cache, is_cached
from headrace.streamer.taps.tapped_table import TablePart, TappedTable, describe_rows, tap_part
from headrace.streamer.taps.torch_optim import warn_unknown_reach

__all__ = ["FbgemmTap", "FusedTables", "is_table_batched", "load_fbgemm", "table_parts"]

# Optimizers (`EmbOptimType`) that change only rows of the batch. FBGEMM has the first three on the CPU. With others,
# and with global weight decay, all rows are marked: after each update, and after each forward in training mode, in
# which EMAINPLACE and ENSEMBLE average whole tables.
_EXACT = {
    "EXACT_SGD",
    "EXACT_ADAGRAD",
    "EXACT_ROWWISE_ADAGRAD",
    "ADAM",
    "PARTIAL_ROWWISE_ADAM",
    "LAMB",
    "PARTIAL_ROWWISE_LAMB",
}
# The count of steps: one number for all of the module's tables, not a state of rows.
_COUNT = "iter"
# Tensors that hold all tables' weights, or one of their states, one table after the other.
_STORES = tuple(
    f"{prefix}_{place}"
    for prefix in ("weights", "momentum1", "momentum2", "prev_iter", "row_counter")
    for place in ("host", "dev", "uvm")
)
_Snapshot = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedTables:
    """A `SplitTableBatchedEmbeddingBagsCodegen` and its tables."""

    module: nn.Module
    # One for each of its tables, in its order; None for those that are not streamed.
    parts: tuple[TablePart | None, ...]
    # Of zero-collision-hash tables, by fqn.
    identities: Mapping[str, IdentitySource] = field(default_factory=dict)
    # What resets rows of these; None if nothing does.
    evictions: Evictions | None = None
    # Returns whether the model still uses it, and no other module in its place.
    is_in_use: Callable[[], bool] = lambda: True
    # The `DMPCollection` whose `sync` writes its tables, which torch does not count.
    synced_by: Any = None

    @property
    def names(self) -> str:
        """The streamed tables, for messages."""
        return ", ".join(map(repr, self.fqns))

    @property
    def fqns(self) -> list[str]:
        """Names of the streamed tables."""
        return [part.fqn for part in self.parts if part is not None]


def load_fbgemm() -> None:
    """Import FBGEMM's table-batched modules and register its classes.

    Raises:
        UnsupportedModelError: It cannot be loaded, as with a torch of another release; the message says what can.
        ModuleNotFoundError: It is not installed.
    """
    try:
        importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    except OSError as exc:
        raise UnsupportedModelError(explain_load_failure(exc)) from exc


def is_table_batched(module: nn.Module) -> bool:
    """Return whether a module is a table-batched one of FBGEMM with a fused optimizer."""
    return is_a(module, "SplitTableBatchedEmbeddingBagsCodegen")


def table_parts(path: str, module: Any) -> Iterator[TablePart]:
    """Yield the tables of an unsharded table-batched module, named `PATH.NAME`, or `PATH.table_I` without names."""
    names: list[str] = module.table_names or [f"table_{i}" for i in range(len(module.embedding_specs))]
    for name, (num_rows, dim, *_) in zip(names, module.embedding_specs, strict=True):
        yield TablePart(fqn=f"{path}.{name}" if path else name, num_rows=num_rows, dim=dim)


class FbgemmTap:
    """Marks the rows that one table-batched module's fused optimizer updates.

    Thread: the one that runs the module's node in `backward()`; on the CPU that is the training thread.
    """

    def __init__(self, fused: FusedTables, *, note_update: Callable[[], None], dirty: Dirty | None = None) -> None:
        """Refuse a module that cannot be streamed exactly, or register hooks that call `note_update` after marks.

        `dirty` says what an update of an unknown optimizer changes; `all` is said of every optimizer.
        """
        self.module = fused.module
        module: Any = fused.module
        self._module = module
        self._note_update = note_update
        _check_readable(fused)
        self._is_known = _is_known(module)
        self._marks_all = dirty == "all" or (dirty is None and not self._is_known)
        self._values = _Values(self._module)
        self._names, self._identities, self._evictions = fused.names, fused.identities, fused.evictions
        self._is_in_use = fused.is_in_use
        self._by_index = [None if part is None else self._table(i, part) for i, part in enumerate(fused.parts)]
        self.tables = [table for table in self._by_index if table is not None]
        feature_table_map: list[int] = list(module.feature_table_map)
        self._features = list(_feature_runs(feature_table_map))
        self._num_features = len(feature_table_map)
        self._device = _DeviceFeatures(self._by_index, feature_table_map)
        self._joint = JointMarks()
        check_not_shared(fused.fqns, self._values.stores())
        # None during an update: if it fails before its rows are marked, it has changed unknown rows.
        self._seen: _Snapshot | None = self._values.snapshot()
        self._calls = _ForwardCounter(module)
        self._cache_resets = CacheResets(module)
        self._has_warned = False
        self._is_marked = False  # whether the running backward's update is
        self._handles: list[Removable] = [
            module.register_forward_pre_hook(ModuleHook(self._before_forward)),
            module.register_forward_hook(ModuleHook(self._after_forward)),
        ]
        # Every fused lookup depends on this tensor, on a GPU too, where weights are buffers. It is empty and gets no
        # gradient, but torch calls its hooks all the same: once per backward, after all its lookups.
        if module.placeholder_autograd_tensor.requires_grad:
            self._handles.append(module.placeholder_autograd_tensor.register_hook(self._after_backward))
        self._watch_identities()

    def warn_wide_reach(self) -> None:
        """Log what it costs if the optimizer is not known to change only the batches' rows."""
        if self._marks_all and not self._is_known:
            has_states = any(table.spec.states for table in self.tables)
            rest = "" if has_states else ", without states of the optimizer"
            kind = f"{self._module.optimizer.name}{' with global weight decay' * _decays_globally(self._module)}"
            warn_unknown_reach(kind, describe_rows(self.tables), word="lookups", rest=rest)

    def sweep(self) -> None:
        """Mark all rows if torch counted a write to the tables by anything other than the fused optimizer."""
        now = self._values.snapshot()
        if now != self._seen or not self._is_in_use() or self._has_bypass() or self._cache_resets.take():
            self.mark_all()
            self._seen = now
        for table in self.tables:
            identities = self._identities.get(table.path)
            if identities is not None and (slots := identities.take_reassigned()) is not None:
                self._mark_rows(table, slots)

    def mark_all(self) -> None:
        """Mark all rows, for a write to the tables that torch does not count."""
        for table in self.tables:
            table.mark_all()
        self._note_update()

    def mark_rows(self, row_ids: torch.Tensor) -> None:
        """Mark rows by ids that count through all tables of the module; those beyond are passed over."""
        row_ids, first = row_ids.detach().flatten().to(torch.int64), 0
        for table, (num_rows, *_) in zip(self._by_index, self._module.embedding_specs, strict=True):
            if table is not None:
                is_here = (row_ids >= first) & (row_ids < first + num_rows)
                self._mark_rows(table, row_ids[is_here] - first)
            first += num_rows

    def close(self) -> None:
        """Remove the hooks; a later backward marks nothing. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._evictions is not None:
            self._evictions.remove(self)

    def _watch_identities(self) -> None:
        for table in self.tables:
            identities = self._identities.get(table.path)
            if identities is not None:
                self._handles += identities.watch(functools.partial(self._mark_rows, table))
        if self._evictions is not None:
            self._evictions.add(self)

    @in_plain_context
    def _mark_rows(self, table: TappedTable, rows: torch.Tensor) -> None:
        table.dirty.mark(rows)
        self._note_update()

    @in_plain_context
    def before_eviction(self) -> None:
        """Mark what else has been written so far; if the eviction then fails, it has changed unknown rows."""
        self.sweep()
        self._seen = None

    @in_plain_context
    def after_eviction(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Mark the evicted rows, local int64[n], of the tables by their names."""
        for table in self.tables:
            if table.path in rows:
                self._mark_rows(table, rows[table.path])
        self._seen = self._values.snapshot()

    def _table(self, index: int, part: TablePart) -> TappedTable:
        weights = self._values.weights(index)
        num_local_rows, num_columns = weights.shape
        states = self._values.states_and_kinds(index).items()
        return tap_part(
            part,
            num_local_rows=num_local_rows,
            num_columns=num_columns,
            dtype=weights.dtype,
            states_of=[(name, state.dtype, is_rowwise) for name, (state, is_rowwise) in states],
            weights=lambda: self._values.weights(index),
            states=lambda: {name: state for name, (state, _) in self._values.states_and_kinds(index).items()},
            identities=self._identities.get(part.fqn),
            scalars=self._values.scalars,
            cache=FusedRowCache(self._module, index) if is_cached(self._module, index) else None,
            holder=self._values,
            is_in_use=self._is_in_use,
            backing=self._values.stores,
        )

    def _has_bypass(self) -> bool:
        """Return whether a lookup ran without hooks, and warn about it."""
        has_bypass = self._calls.has_bypass()
        if has_bypass:
            self._warn("its forward() was called directly, which runs no hook: call the module")
        return has_bypass

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"tables {self._names}: all rows are streamed after each step, because it is not known which rows a "
                f"step of their module changes: {reason}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _before_forward(self, *_: Any) -> None:
        if self._cache_resets.take():  # before a prefetch moves the clock on
            self.mark_all()
        self._calls.begin()

    def _after_forward(self, module: Any, args: Any, output: torch.Tensor) -> None:
        is_batch_kept = self._calls.end()
        if self._marks_all and module.training:
            for table in self.tables:
                table.mark_all()
        node = output.grad_fn
        if node is None:  # without gradients no update follows
            return
        indices, offsets, batch_offsets = module._indices, module._offsets, module._vbe_B_offsets

        @in_plain_context
        def before_update(*_: Any) -> None:
            if self._handles:
                self.sweep()
                self._seen = None

        @in_plain_context
        def after_update(*_: Any) -> None:
            if self._handles:
                if self._marks_all:
                    self.mark_all()
                elif is_batch_kept:
                    self._mark(indices, offsets, batch_offsets)
                else:
                    self._warn("a compiled module does not keep its batch: leave it out, with torch.compiler.disable")
                    self.mark_all()
                self._seen = self._values.snapshot()
                self._is_marked = True

        # Builds differ in whether torch counts the update itself as a write: compare before it, and take a new snapshot
        # after it.
        node.register_prehook(before_update)
        node.register_hook(after_update)

    @in_plain_context
    def _after_backward(self, *_: Any) -> None:
        """Mark all rows if the update was that of a lookup before `attach`, whose batch no hook has kept."""
        if not self._is_marked:
            self.mark_all()
        self._is_marked = False

    def _mark(self, indices: torch.Tensor, offsets: torch.Tensor, batch_offsets: torch.Tensor | None) -> None:
        """Mark the rows of one batch: local ids `indices`, feature after feature.

        `offsets` says where each bag begins, and ends with the number of ids. `batch_offsets` says where each feature
        begins in `offsets`, and ends with their number; None if all have as many bags.
        """
        at = self._feature_starts(offsets, batch_offsets)
        if not self._device.mark(indices, at):
            self._mark_on_host(indices, list(self._spans(at)))
        self._note_update()

    def _mark_on_host(self, indices: torch.Tensor, spans: list[tuple[TappedTable, slice]]) -> None:
        """Mark rows of the tables that are not on a device: in one pass if their ids are all of the batch's."""
        bitmaps = [table.dirty for table, _ in spans if isinstance(table.dirty, DirtyRows)]
        if spans and len(bitmaps) == len(self._features):
            starts = [span.start for _, span in spans]
            self._joint.mark(indices, bitmaps, [*starts, spans[-1][1].stop])
            return
        for table, span in spans:
            if not isinstance(table.dirty, DeviceDirtyRows):
                table.dirty.mark(indices[span])

    def last_lookup(self) -> Iterator[tuple[TappedTable, slice]]:
        """Yield the streamed tables of the module's last forward, and where their ids are in its `_indices`."""
        return self._spans(self._feature_starts(self._module._offsets, self._module._vbe_B_offsets))

    def _feature_starts(self, offsets: torch.Tensor, batch_offsets: torch.Tensor | None) -> torch.Tensor:
        """Return int[features + 1]: where each feature's ids begin; arguments as those of `_mark`."""
        if batch_offsets is not None:
            return offsets[batch_offsets.to(torch.int64)]
        num_bags = (offsets.numel() - 1) // self._num_features
        return offsets[::num_bags] if num_bags else offsets.new_zeros(self._num_features + 1)

    def _spans(self, at: torch.Tensor) -> Iterator[tuple[TappedTable, slice]]:
        """Yield, for each run of features of a streamed table, where its ids are."""
        starts = at.tolist()
        for index, first, end in self._features:
            table = self._by_index[index]
            if table is not None:
                yield table, slice(starts[first], starts[end])


class _ForwardCounter:
    """Detects forwards without hooks by the count that a table-batched module keeps with its batch."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._num_seen: int = module.step
        self._is_in_call = False
        self._has_bypass = False

    def begin(self) -> None:
        """Record that a forward with hooks begins."""
        self.has_bypass()
        self._num_seen, self._is_in_call = self._module.step, True

    def end(self) -> bool:
        """Record that it is over; return whether the module has kept its batch, which a compiled one does not."""
        is_counted = bool(self._module.step == self._num_seen + 1)
        self._num_seen, self._is_in_call = self._module.step, False
        return is_counted

    def has_bypass(self) -> bool:
        """Return whether any forward ran without hooks: its update may still come, and others may follow."""
        # A forward that failed may have been counted or not.
        self._has_bypass |= self._module.step - self._num_seen > int(self._is_in_call)
        return self._has_bypass


class _DeviceFeatures:
    """Marks rows of all tables on a device with one kernel."""

    def __init__(self, by_index: list[TappedTable | None], feature_table_map: list[int]) -> None:
        self._by_feature = [by_index[index] for index in feature_table_map]
        self._has_moved = False
        for table in self._by_feature:
            if table is not None:
                table.on_move = self._note_move
        self._bitmap: DeviceBitmap | None = None
        self._marks_all = False
        self._first_slots = self._num_rows = torch.empty(0, dtype=torch.int64, device="cpu")

    def mark(self, indices: torch.Tensor, starts: torch.Tensor) -> bool:
        """Mark rows, feature after feature, of tables on a device, without waiting; return whether all tables are.

        `starts`, int[features + 1], says where each feature's ids begin.
        """
        if self._has_moved:
            self._refresh()
        if self._bitmap is not None:
            self._bitmap.mark_features(indices, starts, self._first_slots, self._num_rows)
        return self._marks_all

    def _note_move(self) -> None:
        self._has_moved = True

    def _refresh(self) -> None:
        self._has_moved = False
        sets = [None if table is None else table.dirty for table in self._by_feature]
        on_device = [each if isinstance(each, DeviceDirtyRows) else None for each in sets]
        self._bitmap = next((each.bitmap for each in on_device if each is not None), None)
        self._marks_all = self._bitmap is not None and all(
            each is not None or table is None or not table.num_local_rows
            for each, table in zip(on_device, self._by_feature, strict=True)
        )
        if self._bitmap is not None:
            device = self._bitmap.runtime.device
            slots = [-1 if each is None else each.first_slot for each in on_device]
            num_rows = [0 if each is None else each.num_rows for each in on_device]
            self._first_slots = to_device(torch.tensor(slots, dtype=torch.int64, device="cpu"), device)
            self._num_rows = to_device(torch.tensor(num_rows, dtype=torch.int64, device="cpu"), device)


class _Values:
    """Views of the weights and states of a module's tables, renewed when the module has moved them."""

    def __init__(self, module: Any) -> None:
        self._module = module
        # Found once: an empty store stays empty, and looking up attributes that a module lacks is slow.
        stores = {name: getattr(module, name, None) for name in _STORES}
        self._store_names = [key for key, store in stores.items() if isinstance(store, torch.Tensor) and store.numel()]
        self._addresses: tuple[int, ...] | None = None
        self._weights: list[torch.Tensor] = []
        self._states: list[dict[str, tuple[torch.Tensor, bool]]] = []
        # Every module counts its steps; it saves the count if its optimizer needs it, though not always as a state.
        counts = _COUNT in module.state_dict() or any(_COUNT in of_table for of_table in _optimizer_states(module))
        self._scalar_names = (_COUNT,) if counts else ()

    def weights(self, index: int) -> torch.Tensor:
        self._refresh()
        return self._weights[index]

    def states_and_kinds(self, index: int) -> dict[str, tuple[torch.Tensor, bool]]:
        """Return, by name, the states `[rows, width]` and whether each is rowwise."""
        self._refresh()
        return self._states[index]

    def scalars(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self._module, name).detach() for name in self._scalar_names}

    def set_scalars(self, scalars: Mapping[str, float]) -> None:
        """Set the module's count of steps; all its tables have one."""
        if _COUNT in self._scalar_names and _COUNT in scalars:
            self._module.iter.fill_(int(scalars[_COUNT]))
            self._module.iter_cpu.fill_(int(scalars[_COUNT]))  # what an update reads

    def create_states(self) -> None:
        """Do nothing: the module has its states from the start."""

    def share_rows(self) -> None:
        """Do nothing: no other rank has its rows."""

    def snapshot(self) -> _Snapshot:
        """Return numbers that differ after torch wrote or replaced a store; fused updates do not count."""
        return tuple((store.data_ptr(), store._version) for store in self.stores())

    def stores(self) -> list[torch.Tensor]:
        return [getattr(self._module, name) for name in self._store_names]

    def _refresh(self) -> None:
        addresses = tuple(store.data_ptr() for store in self.stores())
        if addresses == self._addresses:
            return
        self._weights = self._module.split_embedding_weights()
        states = _optimizer_states(self._module) or [{} for _ in self._weights]
        self._states = [
            {  # the width is given, because a shard may have no rows
                name: (state.detach().view(-1, 1 if state.dim() == 1 else weights.shape[1]), state.dim() == 1)
                for name, state in of_table.items()
                if name != _COUNT
            }
            for weights, of_table in zip(self._weights, states, strict=True)
        ]
        self._addresses = addresses


def _optimizer_states(module: Any) -> list[dict[str, torch.Tensor]]:
    """Return each table's states by name; none if there are none (NONE), or FBGEMM has no names for them (LARS_SGD)."""
    states: list[dict[str, torch.Tensor]] = []
    with contextlib.suppress(NotImplementedError):
        states = module.get_optimizer_state()
    return states


def _feature_runs(feature_table_map: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (table, first feature, end) for each run of features of the same table."""
    for index, run in itertools.groupby(range(len(feature_table_map)), feature_table_map.__getitem__):
        features = list(run)
        yield index, features[0], features[-1] + 1


def _is_known(module: Any) -> bool:
    """Return whether an update is known to change only rows of the batch."""
    return module.optimizer.name in _EXACT and not _decays_globally(module)


def _decays_globally(module: Any) -> bool:
    return bool(module._used_rowwise_adagrad_with_global_weight_decay)


def _check_readable(fused: FusedTables) -> None:
    module: Any = fused.module
    if module.weights_precision.name == "INT8":
        raise UnsupportedModelError(
            f"tables {fused.names}: INT8 weights are not streamed: use FP32, FP16 or BF16{or_without(*fused.fqns)}"
        )
    if any(part is not None and is_cached(module, index) for index, part in enumerate(fused.parts)):
        check_cache(fused.fqns, module)
