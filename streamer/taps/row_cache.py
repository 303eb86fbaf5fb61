"""FBGEMM's cache of rows in the GPU's memory (`MANAGED_CACHING`): the newest weights of a row may be only there.

The table itself, in managed memory, has a cached row's weights as of when they were loaded. Optimizer states are never
cached. Rows are looked up by id: reading n rows costs O(n), whatever the size of the cache, and changes neither the
order in which it evicts nor its statistics.

Source: `fbgemm_gpu/src/split_embeddings_cache/lxu_cache.cu` and `lru_cache_populate.cu`, fbgemm-gpu 1.8.0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.taps.model_tree import or_without

__all__ = ["CacheResets", "FusedRowCache", "check_cache", "is_cached"]


def is_cached(module: Any, index: int) -> bool:
    """Return whether a table of a table-batched module is behind a cache."""
    return bool(module.embedding_specs[index][2].name == "MANAGED_CACHING")


def check_cache(names: Sequence[str], module: Any) -> None:
    """Refuse a cache of another precision than the tables': it rounds rows when it evicts them, which no update shows.

    Raises:
        UnsupportedModelError: The precisions differ.
    """
    cached, stored = module.lxu_cache_weights.dtype, module.weights_precision.as_dtype()
    if cached != stored:
        raise UnsupportedModelError(
            f"tables {', '.join(map(repr, names))}: MANAGED_CACHING with a cache of {cached} and rows of {stored} "
            f"rounds rows when it evicts them, after their update: set cache_precision to the weights' precision"
            f"{or_without(*names)}"
        )


class FusedRowCache:
    """The cached rows of one table; a `RowCache`.

    A prefetch on another stream moves rows between cache and table. Those queued before a call are waited for on the
    device, and later ones wait for the call's work.

    Thread: one at a time.
    """

    def __init__(self, module: Any, index: int) -> None:
        """Find the rows of the module's table `index`. REQUIRES: `is_cached`, and `check_cache` has not refused it."""
        self._module = module
        self._dim: int = module.embedding_specs[index][1]
        # Ids in the cache run over all cached tables; the features of a table share its range.
        self._first_id = int(module.cache_hash_size_cumsum[list(module.feature_table_map).index(index)])

    def read(self, weights: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return copies of rows, `[n, dim]`, of the table's weights, by their places, int64[n] on the same device."""
        with self._between_prefetches(weights.device):
            rows = weights.index_select(0, places)
            locations = self._locations(places)
            cached = self._module.lxu_cache_weights[:, : self._dim].index_select(0, locations.clamp(min=0))
            return torch.where((locations >= 0).unsqueeze(1), cached, rows)

    def write(self, weights: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
        """Replace rows, `[n, dim]`, by their places, int64[n], unique, in the table's weights and where cached."""
        with self._between_prefetches(weights.device):
            weights.index_copy_(0, places, rows)
            locations = self._locations(places)
            is_held = locations >= 0
            self._module.lxu_cache_weights[locations[is_held].long(), : self._dim] = rows[is_held]

    def _locations(self, places: torch.Tensor) -> torch.Tensor:
        # The rows of the cache, int32[n], -1 for those that are not in it.
        module = self._module
        locations: torch.Tensor = torch.ops.fbgemm.lxu_cache_lookup(
            places + self._first_id,
            module.lxu_cache_state,
            module.total_cache_hash_size,
            gather_cache_stats=False,
        )
        return locations

    @contextlib.contextmanager
    def _between_prefetches(self, device: torch.device) -> Iterator[None]:
        prefetch = self._module.prefetch_stream  # None until a pipeline prefetches on another stream
        if prefetch is None:
            yield
            return
        current = torch.cuda.current_stream(device)
        current.wait_stream(prefetch)
        try:
            yield
        finally:
            prefetch.wait_stream(current)


class CacheResets:
    """Detects `reset_cache_states`, which gives rows back the weights that they had before they were cached."""

    def __init__(self, module: Any) -> None:
        """Begin now; a module without a cache is never reset."""
        self._module = module
        self._last: int = module.timestep

    def take(self) -> bool:
        """Return whether the cache was reset since the last call: only that sets the module's clock back."""
        was_reset = bool(self._module.timestep < self._last)
        self._last = self._module.timestep
        return was_reset
