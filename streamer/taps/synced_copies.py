"""Copies of tables in the groups of a `DMPCollection` (2D parallel), which are equal from each sync to the next update.

Source: `torchrec/distributed/model_parallel.py` (`DMPCollection.sync`), torchrec 1.8.0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from headrace.streamer.taps.hooks import ModuleHook, hook_sync
from headrace.streamer.taps.local_parts import TableCopy
from headrace.streamer.taps.row_cache import is_cached
from headrace.streamer.taps.tapped_table import TablePart

__all__ = ["SyncedCopies", "SyncedTables"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncedTables:
    """A table-batched module whose rows several groups of ranks have."""

    module: Any
    # One for each of its tables, in its order; None for those that are not selected.
    parts: tuple[TablePart | None, ...]
    # The ranks that have the same rows, ascending.
    ranks: tuple[int, ...]
    # The `DMPCollection` whose `sync` makes them equal.
    synced_by: Any


class SyncedCopies:
    """Tells which copies should be equal at the moment. Weights only: a sync may leave states out.

    Thread: the one that runs the modules' nodes in `backward()`.
    """

    def __init__(self, tables: Iterable[SyncedTables]) -> None:
        """Hook the syncs and the updates. Tables behind a cache are not compared."""
        self._tables = list(tables)
        self._in_sync: set[int] = set()  # ids of the modules without an update since their last sync
        self._removables: list[Any] = []
        by_sync: dict[Any, list[SyncedTables]] = {}
        for each in self._tables:
            by_sync.setdefault(each.synced_by, []).append(each)
            self._removables.append(each.module.register_forward_hook(ModuleHook(self._after_forward)))
        for synced_by, synced in by_sync.items():
            self._removables.append(hook_sync(synced_by, functools.partial(self._after_sync, synced)))

    def copies(self) -> list[TableCopy]:
        """Return the copies of modules that were not updated since their sync."""
        found = []
        for tables in self._tables:
            if id(tables.module) not in self._in_sync:
                continue
            for index, (part, weights) in enumerate(
                zip(tables.parts, tables.module.split_embedding_weights(), strict=True)
            ):
                if part is not None and not is_cached(tables.module, index):
                    found.append(
                        TableCopy(
                            fqn=part.fqn,
                            ranks=tables.ranks,
                            runs=((part.row_offset, weights.shape[0]),),
                            column=part.column_offset,
                            tensors=functools.partial(_weights, tables.module, index),
                        )
                    )
        return found

    def close(self) -> None:
        """Remove the hooks. Idempotent."""
        for each in self._removables:
            each.remove()
        self._removables.clear()

    def _after_sync(self, tables: Iterable[SyncedTables]) -> None:
        self._in_sync.update(id(each.module) for each in tables)

    def _after_forward(self, module: Any, args: Any, output: torch.Tensor) -> None:
        if output.grad_fn is not None:
            output.grad_fn.register_hook(lambda *_: self._in_sync.discard(id(module)))


def _weights(module: Any, index: int) -> list[torch.Tensor]:
    return [module.split_embedding_weights()[index].detach()]
