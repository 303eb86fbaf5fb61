"""Tap on FBGEMM's table-batched embeddings, whose optimizer is fused into `backward()`.

A forward hook keeps the batch's row ids with the output's node of the autograd graph. A hook on that node runs right
after the fused update, and marks them: a forward without a backward marks nothing, and a backward that runs twice
marks twice. The ids are those that the module itself looks up, after its bounds check, kept by autograd anyway.
A backward of lookups that no hook has seen (a pipeline's, before `attach`) marks all rows; one that has lookups of both
kinds marks those that were seen.

Source: `fbgemm_gpu/split_table_batched_embeddings_ops_training.py`, fbgemm-gpu 1.8.0.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from headrace.kernels.row_packing import to_device
from headrace.schemas.errors import UnsupportedModelError
from headrace.schemas.tables import ColumnShard, TableSpec
from headrace.streamer.device.device_dirty_rows import DeviceBitmap, DeviceDirtyRows
from headrace.streamer.taps.model_tree import is_a
from headrace.streamer.taps.module_hook import ModuleHook
from headrace.streamer.taps.own_memory import check_not_shared
from headrace.streamer.taps.row_identities import RowIdentities
from headrace.streamer.taps.tapped_table import TablePart, TappedTable, dtype_of, state_spec

__all__ = ["FbgemmTap", "FusedTables", "is_table_batched", "table_parts"]

# Optimizers (`EmbOptimType`) that change no rows but those of the batch. On the CPU FBGEMM has the first three.
_EXACT = {
    "EXACT_SGD",
    "EXACT_ADAGRAD",
    "EXACT_ROWWISE_ADAGRAD",
    "ADAM",
    "PARTIAL_ROWWISE_ADAM",
    "LAMB",
    "PARTIAL_ROWWISE_LAMB",
}
# One number for all of the module's tables, not a state of their rows: the count of steps.
_COUNT = "iter"
# Tensors that hold all tables' weights or one of their states, one after the other.
_STORES = tuple(
    f"{prefix}_{place}"
    for prefix in ("weights", "momentum1", "momentum2", "prev_iter", "row_counter")
    for place in ("host", "dev", "uvm")
)


_Snapshot = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedTables:
    """A table-batched module and what its tables are, in its own order.

    Attributes:
        module: `SplitTableBatchedEmbeddingBagsCodegen`.
        parts: One for each of its tables; None for those that are not streamed.
        identities: By fqn, of the tables whose rows are given to other ids while training.
        is_in_use: Returns whether the model uses it still, and not another one in its place.
    """

    module: nn.Module
    parts: tuple[TablePart | None, ...]
    identities: Mapping[str, RowIdentities] = field(default_factory=dict)
    is_in_use: Callable[[], bool] = lambda: True

    @property
    def names(self) -> str:
        """The streamed tables, for messages."""
        return ", ".join(repr(part.fqn) for part in self.parts if part is not None)


def is_table_batched(module: nn.Module) -> bool:
    """Return whether a module is a table-batched one of FBGEMM with a fused optimizer."""
    return is_a(module, "SplitTableBatchedEmbeddingBagsCodegen")


def table_parts(path: str, module: Any) -> Iterator[TablePart]:
    """Yield what the tables of a module that stands alone are; `PATH.NAME`, or `PATH.table_I` without names.

    Args:
        path: The module's path in the model; empty for the model itself.
        module: `SplitTableBatchedEmbeddingBagsCodegen`.
    """
    names: list[str] = module.table_names or [f"table_{i}" for i in range(len(module.embedding_specs))]
    for name, (num_rows, dim, *_) in zip(names, module.embedding_specs, strict=True):
        yield TablePart(fqn=f"{path}.{name}" if path else name, num_rows=num_rows, dim=dim)


class FbgemmTap:
    """Marks the rows that one table-batched module's fused optimizer updates.

    Thread: where `backward()` runs the module's node; on the CPU that is the training thread.

    Attributes:
        tables: One for each of the module's tables that are streamed, in its order.
    """

    def __init__(self, fused: FusedTables, *, note_update: Callable[[], None]) -> None:
        """Check that the module can be streamed exactly, then register a hook.

        Args:
            fused: The module and its tables.
            note_update: Called after rows were marked.

        Raises:
            UnsupportedModelError: Its optimizer changes rows outside of the batch, or its rows cannot be read.
        """
        module: Any = fused.module
        self._module = module
        self._note_update = note_update
        _check_exact(fused)
        self._values = _Values(self._module)
        self._names, self._identities = fused.names, fused.identities
        self._is_in_use = fused.is_in_use
        self._by_index = [None if part is None else self._table(i, part) for i, part in enumerate(fused.parts)]
        self.tables = [table for table in self._by_index if table is not None]
        feature_table_map: list[int] = list(module.feature_table_map)
        self._features = list(_feature_runs(feature_table_map))
        self._num_features = len(feature_table_map)
        self._device = _DeviceFeatures(self._by_index, feature_table_map)
        check_not_shared(fused.names, self._values.stores())
        # None amid an update: one that does not get as far as to be marked has changed who knows which rows.
        self._seen: _Snapshot | None = self._values.snapshot()
        self._calls = _Calls(module)
        self._has_warned = False
        self._is_marked = False  # the update of the backward that runs
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(ModuleHook(self._before_forward)),
            module.register_forward_hook(ModuleHook(self._after_forward)),
        ]
        # Every fused lookup depends on it, on a GPU too, where weights are buffers. It has no elements and gets no
        # gradient, but torch calls its hooks all the same: once a backward, when all its lookups are behind.
        if module.placeholder_autograd_tensor.requires_grad:
            self._handles.append(module.placeholder_autograd_tensor.register_hook(self._after_backward))

    def sweep(self) -> None:
        """Mark all rows if the tables were written by something else than the fused optimizer, which torch counts."""
        now = self._values.snapshot()
        if now != self._seen or not self._is_in_use() or self._has_bypass():
            self._mark_all()
            self._seen = now
        for table in self.tables:
            identities = self._identities.get(table.spec.fqn)
            if identities is not None and (slots := identities.take_reassigned()) is not None:
                table.dirty.mark(slots)
                self._note_update()

    def close(self) -> None:
        """Remove the hook; a backward that is still to come marks nothing. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _table(self, index: int, part: TablePart) -> TappedTable:
        weights = self._values.weights(index)
        num_local_rows, num_columns = weights.shape
        identities = self._identities.get(part.fqn)
        if identities is not None:
            identities.check(part.fqn, num_local_rows)
        spec = TableSpec(
            fqn=part.fqn,
            num_rows=part.num_rows,
            dim=part.dim,
            dtype=dtype_of(f"table {part.fqn!r}", weights.dtype),
            states=tuple(
                state_spec(part.fqn, name, state.dtype, rowwise_width=1 if is_rowwise else 0)
                for name, (state, is_rowwise) in self._values.states_and_kinds(index).items()
            ),
            has_identities=identities is not None,
        )
        return TappedTable(
            spec=spec,
            shard=ColumnShard(offset=part.column_offset, width=num_columns),
            row_offset=part.row_offset,
            num_local_rows=num_local_rows,
            weights=lambda: self._values.weights(index),
            states=lambda: {name: state for name, (state, _) in self._values.states_and_kinds(index).items()},
            identities=identities,
            scalars=self._values.scalars,
            is_in_use=self._is_in_use,
        )

    def _mark_all(self) -> None:
        for table in self.tables:
            table.mark_all()
        self._note_update()

    def _has_bypass(self) -> bool:
        """Return whether the module has looked up rows without its hooks, and warn of it."""
        has_bypass = self._calls.has_bypass()
        if has_bypass:
            self._warn("its forward() was called directly, which runs no hook: call the module")
        return has_bypass

    def _warn(self, reason: str) -> None:
        """Say once that all rows are streamed."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"tables {self._names}: all rows are streamed after each step, since it is not known which of them a "
                f"step of their module changes: {reason}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _before_forward(self, *_: Any) -> None:
        self._calls.begin()

    def _after_forward(self, module: Any, args: Any, output: torch.Tensor) -> None:
        is_batch_kept = self._calls.end()
        node = output.grad_fn
        if node is None:  # no gradient is wanted, so no update will follow
            return
        indices, offsets, batch_offsets = module._indices, module._offsets, module._vbe_B_offsets

        def before_update(*_: Any) -> None:
            if self._handles:
                self.sweep()
                self._seen = None

        def after_update(*_: Any) -> None:
            if self._handles:
                if is_batch_kept:
                    self._mark(indices, offsets, batch_offsets)
                else:
                    self._warn("a compiled module does not keep its batch: leave it out, with torch.compiler.disable")
                    self._mark_all()
                self._seen = self._values.snapshot()
                self._is_marked = True

        # Whether the update itself counts as a write differs between builds: look before it, and forget it after.
        node.register_prehook(before_update)
        node.register_hook(after_update)

    def _after_backward(self, *_: Any) -> None:
        """Mark all rows if the update was that of a lookup from before `attach`, whose batch nobody has kept."""
        if not self._is_marked:
            self._mark_all()
        self._is_marked = False

    def _mark(self, indices: torch.Tensor, offsets: torch.Tensor, batch_offsets: torch.Tensor | None) -> None:
        """Mark the rows of one batch.

        Args:
            indices: Local row ids, feature after feature.
            offsets: Where each bag begins in `indices`, and its length.
            batch_offsets: Where each feature begins in `offsets`, and their number; None if all have as many bags.
        """
        if batch_offsets is None:
            num_bags = (offsets.numel() - 1) // self._num_features
            at = offsets[::num_bags] if num_bags else offsets.new_zeros(self._num_features + 1)
        else:
            at = offsets[batch_offsets.to(torch.int64)]
        if self._device.mark(indices, at):
            self._note_update()
            return
        starts = at.tolist()
        for index, first, end in self._features:
            table = self._by_index[index]
            if table is not None and not isinstance(table.dirty, DeviceDirtyRows):
                table.dirty.mark(indices[starts[first] : starts[end]])
        self._note_update()


class _Calls:
    """Follows the forwards of a table-batched module by the count that it keeps together with its batch."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._num_seen: int = module.step
        self._is_in_call = False
        self._has_bypass = False

    def begin(self) -> None:
        """Note that hooks have seen a forward begin."""
        self.has_bypass()
        self._num_seen, self._is_in_call = self._module.step, True

    def end(self) -> bool:
        """Note that it is over; return whether the module has kept its batch, as it does where it is not compiled."""
        is_counted = bool(self._module.step == self._num_seen + 1)
        self._num_seen, self._is_in_call = self._module.step, False
        return is_counted

    def has_bypass(self) -> bool:
        """Return whether there was a forward without hooks: its update may be to come, and others may follow."""
        # One that has failed may have been counted or not.
        self._has_bypass |= self._module.step - self._num_seen > int(self._is_in_call)
        return self._has_bypass


class _DeviceFeatures:
    """The features of a module whose tables' changed rows are marked on a device, by one kernel for all of them."""

    def __init__(self, by_index: list[TappedTable | None], feature_table_map: list[int]) -> None:
        self._by_feature = [by_index[index] for index in feature_table_map]
        self._has_moved = False
        for table in self._by_feature:
            if table is not None:
                table.on_move = self._note_move
        self._bitmap: DeviceBitmap | None = None
        self._marks_all = False
        self._first_slots = self._num_rows = torch.empty(0, dtype=torch.int64)

    def mark(self, indices: torch.Tensor, starts: torch.Tensor) -> bool:
        """Mark the rows of tables on a device, without waiting for it; return whether these were all.

        Args:
            indices: Local row ids, feature after feature.
            starts: int[features + 1], where each feature's begin.
        """
        if self._has_moved:
            self._look()
        if self._bitmap is not None:
            self._bitmap.mark_features(indices, starts, self._first_slots, self._num_rows)
        return self._marks_all

    def _note_move(self) -> None:
        self._has_moved = True

    def _look(self) -> None:
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
            self._first_slots = to_device(torch.tensor(slots, dtype=torch.int64), device)
            num_rows = [0 if each is None else each.num_rows for each in on_device]
            self._num_rows = to_device(torch.tensor(num_rows, dtype=torch.int64), device)


class _Values:
    """Views of the weights and states of a module's tables, made again when the module has moved them."""

    def __init__(self, module: Any) -> None:
        self._module = module
        # Asked for once: a store that is empty now stays so, and looking up names that a module lacks is slow.
        stores = {name: getattr(module, name, None) for name in _STORES}
        self._store_names = [
            name for name, store in stores.items() if isinstance(store, torch.Tensor) and store.numel()
        ]
        self._addresses: tuple[int, ...] | None = None
        self._weights: list[torch.Tensor] = []
        self._states: list[dict[str, tuple[torch.Tensor, bool]]] = []
        # Every module counts its steps; it saves the count when its optimizer needs it, though not always as a state.
        counts = _COUNT in module.state_dict() or any(_COUNT in of_table for of_table in _optimizer_states(module))
        self._scalar_names = (_COUNT,) if counts else ()

    def weights(self, index: int) -> torch.Tensor:
        self._refresh()
        return self._weights[index]

    def states_and_kinds(self, index: int) -> dict[str, tuple[torch.Tensor, bool]]:
        """Return `[rows, width]` by name, and whether it is rowwise."""
        self._refresh()
        return self._states[index]

    def scalars(self) -> dict[str, torch.Tensor]:
        """Return what the optimizer keeps once for a table, by name."""
        return {name: getattr(self._module, name).detach() for name in self._scalar_names}

    def snapshot(self) -> _Snapshot:
        """Return numbers that differ after torch has written or replaced a store; fused updates do not count."""
        return tuple((store.data_ptr(), store._version) for store in self.stores())

    def stores(self) -> list[torch.Tensor]:
        """Return what holds all tables' weights, and their states."""
        return [getattr(self._module, name) for name in self._store_names]

    def _refresh(self) -> None:
        addresses = tuple(store.data_ptr() for store in self.stores())
        if addresses == self._addresses:
            return
        self._weights = self._module.split_embedding_weights()
        states = _optimizer_states(self._module) or [{} for _ in self._weights]
        self._states = [
            {
                name: (_by_row(state, weights.shape[1]), state.dim() == 1)
                for name, state in of_table.items()
                if name != _COUNT
            }
            for weights, of_table in zip(self._weights, states, strict=True)
        ]
        self._addresses = addresses


def _optimizer_states(module: Any) -> list[dict[str, torch.Tensor]]:
    """Return each table's states by name; empty where the optimizer has none."""
    states: list[dict[str, torch.Tensor]] = module.get_optimizer_state()
    return states


def _by_row(state: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a state as `[rows, width]`; a shard may have no rows at all."""
    return state.detach().view(-1, 1 if state.dim() == 1 else dim)


def _feature_runs(feature_table_map: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield table, first feature and end, for each run of features that look up the same table."""
    first = 0
    for end in range(1, len(feature_table_map) + 1):
        if end == len(feature_table_map) or feature_table_map[end] != feature_table_map[first]:
            yield feature_table_map[first], first, end
            first = end


def _check_exact(fused: FusedTables) -> None:
    """Refuse what changes rows outside of the batch, or keeps rows where they cannot be read."""
    module: Any = fused.module
    names = fused.names
    optimizer: str = module.optimizer.name
    if optimizer not in _EXACT:
        raise UnsupportedModelError(
            f"tables {names}: the fused optimizer {optimizer} may change rows outside of the batch, or its states are "
            f"not readable by name; use one of {', '.join(sorted(_EXACT))}"
        )
    if module._used_rowwise_adagrad_with_global_weight_decay:
        raise UnsupportedModelError(
            f"tables {names}: global weight decay (DECOUPLE_GLOBAL) changes rows outside of the batch; "
            f"use another weight_decay_mode"
        )
    if module.weights_precision.name == "INT8":
        raise UnsupportedModelError(f"tables {names}: INT8 weights are not streamed; use FP32, FP16 or BF16")
    if any(location.name == "MANAGED_CACHING" for _, _, location, _ in module.embedding_specs):
        raise UnsupportedModelError(
            f"tables {names}: MANAGED_CACHING keeps the newest rows in a cache; use HOST, DEVICE or MANAGED"
        )
