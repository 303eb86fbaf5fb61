"""What a tap is, and which ones fit a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import nn

from headrace.schemas.errors import UnsupportedModelError
from headrace.schemas.tables import TableSpec
from headrace.streamer.fbgemm_tap import FbgemmTap, FusedTables, is_table_batched, table_parts
from headrace.streamer.model_tree import inner_optimizers, is_a, named_modules
from headrace.streamer.step_boundary import StepBoundary
from headrace.streamer.tapped_table import TablePart, TappedTable
from headrace.streamer.torch_optim_tap import TableParameter, TorchOptimTap
from headrace.streamer.torchrec_tap import is_sharded, sharded_tables

__all__ = ["Tap", "tap_model"]


class Tap(Protocol):
    """The hooks on one model that mark its changed rows and tell when a step is over.

    A tap is made with `on_step`, which it calls on the training thread at each step boundary: all updates of the
    step are in the tables, none of the next has begun. Between boundaries rows may be dirty of which the update is
    done, so a gather at any time outside of `backward()` and `optimizer.step()` reads sound rows.

    """

    @property
    def tables(self) -> list[TappedTable]:
        """All tables that are streamed; fixed."""

    def end_step(self) -> bool:
        """Declare, on the training thread, that the step is over: `on_step` is called if rows changed since the last.

        For a model without a torch optimizer, where the end of a step is else noticed at the next forward, and before
        a flush.

        Returns:
            Whether `on_step` was called.
        """

    def close(self) -> None:
        """Remove every hook; the tables stay readable. Idempotent."""


def tap_model(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    on_step: Callable[[], None],
) -> Tap:
    """Find the embedding tables of a model and hook what updates them.

    Tables are `nn.Embedding` and `nn.EmbeddingBag` with torch optimizers, FBGEMM's
    `SplitTableBatchedEmbeddingBagsCodegen`, and the sharded embedding modules of TorchRec. Frozen ones are left out.

    Args:
        model: The model as it is trained, wrapped (`DistributedModelParallel`, `DistributedDataParallel`, compiled) or
            not.
        optimizers: Those that the training loop steps, once a step each; TorchRec's wrappers are looked through.
            May be empty when all tables have fused optimizers: then a step ends where the model's next forward in
            training mode begins, or at `Tap.end_step`.
        on_step: Called at each step boundary, on the training thread.

    Raises:
        UnsupportedModelError: A table cannot be streamed exactly, there are none, or the model has a tap already. No
            hook is left.
    """
    return _ModelTap(model, inner_optimizers(optimizers), on_step)


# Modules that hold tapped tables. A second tap on one would stream everything twice.
_tapped_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _ModelTap:
    """The taps of all kinds on one model, and its step boundary."""

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], on_step: Callable[[], None]) -> None:
        sources = _Sources(model)
        self._modules = sources.modules
        for path, module in self._modules:
            if module in _tapped_modules:
                raise UnsupportedModelError(
                    f"module {path or type(module).__name__!r} has a tap already: close that one first"
                )
        self._boundary: StepBoundary | None = None
        self._parts: list[FbgemmTap | TorchOptimTap] = []
        try:
            for fused in sources.fused:
                self._parts.append(FbgemmTap(fused, note_update=self._note_update))
            self._parts.append(TorchOptimTap(sources.parameters, optimizers, note_update=self._note_update))
            self.tables = [table for part in self._parts for table in part.tables]
            _check_tables(self.tables, may_be_elsewhere=sources.has_sharded)
            # After the taps: hooks run in the order of registration, and a boundary is told when all is marked.
            self._boundary = StepBoundary(on_step, model=model, optimizers=optimizers, sweep=self._sweep)
        except BaseException:
            self.close()
            raise
        _tapped_modules.update(module for _, module in self._modules)

    def end_step(self) -> bool:
        return self._boundary is not None and self._boundary.end_step()

    def close(self) -> None:
        if self._boundary is not None:
            self._boundary.close()
            self._boundary = None
            _tapped_modules.difference_update(module for _, module in self._modules)
        for part in self._parts:
            part.close()

    def _note_update(self) -> None:
        if self._boundary is not None:
            self._boundary.note_update()

    def _sweep(self) -> None:
        for part in self._parts:
            part.sweep()


class _Sources:
    """The tables of a model, by what updates them.

    Attributes:
        modules: Those that hold tables, with their paths.
        fused: Table-batched modules with a fused optimizer.
        has_sharded: Whether there are sharded modules, whose tables may all be on other ranks.
        parameters: Tables that are parameters of torch optimizers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules: list[tuple[str, nn.Module]] = []
        self.fused: list[FusedTables] = []
        self.has_sharded = False
        self._parameters: dict[int, TableParameter] = {}
        for path, module in named_modules(model):
            if is_sharded(path, module):
                self.has_sharded = True
                fused, parameters = sharded_tables(path, module)
                self.fused += fused
                for parameter in parameters:
                    self._parameters[id(parameter.parameter)] = parameter
            elif is_table_batched(module):
                self.fused.append(FusedTables(module=module, parts=tuple(table_parts(path, module))))
            elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
                self._add_embedding(path, module)
            else:
                continue
            self.modules.append((path, module))

    @property
    def parameters(self) -> list[TableParameter]:
        return list(self._parameters.values())

    def _add_embedding(self, path: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
        fqn = f"{path}.weight" if path else "weight"
        if module.max_norm is not None:
            raise UnsupportedModelError(
                f"table {fqn!r}: max_norm rescales rows in the forward, also in evaluation, without the optimizer; "
                f"clip the rows after the optimizer's step instead"
            )
        parameter = _check_parameter(fqn, module.weight)
        known = self._parameters.get(id(parameter))  # tied: one table, by its first name
        self._parameters[id(parameter)] = TableParameter(
            part=known.part if known else TablePart(fqn=fqn, num_rows=module.num_embeddings, dim=module.embedding_dim),
            parameter=parameter,
            is_sparse=module.sparse and (known is None or known.is_sparse),
        )


def _check_parameter(fqn: str, weight: torch.Tensor) -> nn.Parameter:
    if is_a(weight, "DTensor"):
        raise UnsupportedModelError(f"table {fqn!r} is a DTensor: sharded parameters outside TorchRec are not streamed")
    if weight.requires_grad and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise UnsupportedModelError(
            f"table {fqn!r} is on {torch.distributed.get_world_size()} ranks, which would all stream all of it: "
            f"shard it with TorchRec, or attach in a run of one rank"
        )
    if not isinstance(weight, nn.Parameter):
        raise UnsupportedModelError(
            f"table {fqn!r} is not a parameter but computed in each forward (parametrization, pruning): not streamed"
        )
    return weight


def _check_tables(tables: list[TappedTable], *, may_be_elsewhere: bool) -> None:
    """Check that there are tables, and no part of one twice."""
    if not tables and not may_be_elsewhere:
        raise UnsupportedModelError(
            "the model has no embedding table that is trained: nn.Embedding, nn.EmbeddingBag, "
            "FBGEMM SplitTableBatchedEmbeddingBagsCodegen and sharded TorchRec modules are streamed"
        )
    specs: dict[str, TableSpec] = {}
    parts: set[tuple[str, int, int]] = set()
    for table in tables:
        part = (table.spec.fqn, table.row_offset, table.shard.offset)
        if part in parts:
            raise UnsupportedModelError(f"two tables are named {table.spec.fqn!r}: give them different names")
        parts.add(part)
        known = specs.setdefault(table.spec.fqn, table.spec)
        if known != table.spec:
            raise UnsupportedModelError(
                f"two parts of table {table.spec.fqn!r} differ: {known.describe_difference(table.spec)}"
            )
