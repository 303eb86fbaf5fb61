"""Find modules that train embeddings and cannot be streamed: the log names them, and `tables=` that names one fails.

Some are only left out. Others spoil the tables inside them, whose rows are on several ranks or change their meaning.

Source: `torchrec/modules/{fused_embedding_modules,itep_modules,mc_embedding_modules}.py`, torchrec 1.8.0;
`fbgemm_gpu/{tbe/ssd/training,batched_unary_embeddings_ops}.py`, fbgemm-gpu 1.8.0.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from headrace.kernels.module_walk import is_a
from headrace.paramserver.system.text import first_of
from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.taps.model_tree import Selection, or_without

__all__ = ["Unstreamed", "check_unstreamed", "spoiled_at", "unstreamed_module", "warn_unstreamed"]

_log = logging.getLogger(__name__)

# By class, why its tables are left out, and what to do.
_REASONS = {
    "SSDTableBatchedEmbeddingBags": "its rows are in RocksDB or another key-value store: use tables on HOST or MANAGED",
    "DenseTableBatchedEmbeddingBagsCodegen": (
        "a torch optimizer trains all its tables as one flat parameter: use nn.EmbeddingBag, or "
        "SplitTableBatchedEmbeddingBagsCodegen with a fused optimizer"
    ),
    "BatchedUnaryEmbeddingBag": "its parameter is not a table of rows: use nn.EmbeddingBag",
    # These keep their table-batched modules in a plain list.
    "FusedEmbeddingBagCollection": (
        "it keeps its tables where they cannot be found: use EmbeddingBagCollection under DistributedModelParallel"
    ),
    "FusedEmbeddingCollection": (
        "it keeps its tables where they cannot be found: use EmbeddingCollection under DistributedModelParallel"
    ),
}
_OF_UNKNOWN_KIND = "it is of an unknown kind: use SplitTableBatchedEmbeddingBagsCodegen or nn.EmbeddingBag"
_OF_UNKNOWN_SHARDING = (
    "it is a sharded module of an unknown kind: use EmbeddingBagCollection or EmbeddingCollection under "
    "DistributedModelParallel"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unstreamed:
    """Tables, or a module of tables, that are trained and not streamed."""

    path: str
    kind: str
    reason: str
    # Names that `tables=` may have for what it holds.
    names: tuple[str, ...] = ()
    # Whether its values are parameters of the model, which `dense=True` publishes.
    has_parameters: bool = False


def unstreamed_module(path: str, module: Any) -> Unstreamed | None:
    """Describe a module that trains embeddings and that no tap knows; None for others, and for frozen ones."""
    reason = next((reason for kind, reason in _REASONS.items() if is_a(module, kind)), None)
    if reason is None and _is_of_unknown_kind(module):
        reason = _OF_UNKNOWN_KIND
    if reason is None and hasattr(module, "_lookups"):
        reason = _OF_UNKNOWN_SHARDING
    if reason is None or not any(each.requires_grad for each in module.parameters()):
        return None
    prefix = f"{path}." if path else ""
    names = (*(getattr(module, "table_names", None) or ()), *(name for name, _ in module.named_parameters()))
    return Unstreamed(
        path=path,
        kind=type(module).__name__,
        reason=reason,
        names=tuple(prefix + name for name in names),
        has_parameters=any(each.numel() for each in module.parameters()),
    )


def _is_of_unknown_kind(module: nn.Module) -> bool:
    """Return whether a module is like FBGEMM's table-batched ones, and none of those for inference."""
    names = [kind.__name__ for kind in type(module).__mro__]
    return any("TableBatchedEmbedding" in name or "DynamicEmbeddingTables" in name for name in names) and not any(
        "IntNBit" in name or name == "SplitTableBatchedEmbeddingBagsCodegen" for name in names
    )


def spoiled_at(path: str, module: nn.Module, *, is_alone: bool) -> tuple[str, str] | None:
    """Return where the tables are that a module keeps from being streamed exactly, and why; None for other modules.

    `is_alone` says that no other rank trains the model.
    """
    kind = type(module).__name__
    if is_a(module, "GenericITEPModule"):  # beside the tables that it prunes
        return path.rpartition(".")[0], (
            f"module {path!r} ({kind}) prunes rows while training and gives them to other ids (ITEP), which the "
            f"tables do not show: train it without pruning"
        )
    if is_a(module, "BaseManagedCollisionEmbeddingCollection") and not is_alone:
        return path, (
            f"module {path!r} ({kind}) gives rows to other ids on each rank (zero-collision hashing): on several ranks "
            f"use it under DistributedModelParallel, as ShardedManagedCollisionEmbedding[Bag]Collection"
        )
    known = ("BaseManagedCollisionEmbeddingCollection", "BaseShardedManagedCollisionEmbeddingCollection")
    if "ManagedCollisionEmbedding" in kind and not any(is_a(module, name) for name in known):
        return path, (
            f"module {path!r} ({kind}) re-assigns rows to other ids (zero-collision hashing), in a way that is not "
            f"known: use ManagedCollisionEmbedding[Bag]Collection"
        )
    return None


def check_unstreamed(found: Iterable[Unstreamed], selection: Selection) -> list[Unstreamed]:
    """Return the modules that nobody has left out by name.

    Raises:
        UnsupportedModelError: `tables=` selects something of one, by name or pattern.
    """
    unstreamed = []
    for each in found:
        if selection.is_of_all:
            left_out = selection.note_left_out((*each.names, f"{each.path}."))
            if f"{each.path}." not in left_out and not (each.names and left_out.issuperset(each.names)):
                unstreamed.append(each)
            continue
        known = set(selection.names)  # tables in it that a tap has found are streamed
        if any([selection.takes(name) for name in each.names if name not in known]) or selection.names_in(each.path):
            without = or_without(each.path if each.path in each.names else f"{each.path}.*") if each.path else ""
            raise UnsupportedModelError(
                f"tables: {each.path!r} ({each.kind}) cannot be streamed: {each.reason}{without}"
            )
    return unstreamed


def warn_unstreamed(found: Iterable[Unstreamed], *, has_dense: bool) -> None:
    """Log one line for each reason not to stream some modules, except those whose parameters `dense=True` publishes."""
    paths: dict[tuple[str, str], list[str]] = {}
    for each in found:
        if not (has_dense and each.has_parameters):
            paths.setdefault((each.kind, each.reason), []).append(each.path)
    for (kind, reason), of_kind in paths.items():
        _log.warning("%s (%s) trains embeddings and is not streamed: %s", first_of(of_kind), kind, reason)
