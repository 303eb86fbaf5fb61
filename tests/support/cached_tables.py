"""A table-batched module on the CPU whose tables are behind a cache, as with MANAGED_CACHING on a GPU.

It keeps FBGEMM's rules: a lookup loads its rows into the cache, as far as their sets have room, and evicts those used
least lately, which are then written back. Updates of cached rows reach only the cache, others only the table, so a
table's own memory has old weights of cached rows. FBGEMM's update on the CPU runs on that memory: it gets the cached
weights before the update, and the old ones are put back after it.

Source: `fbgemm_gpu/src/split_embeddings_cache/lru_cache_populate.cu` and `lxu_cache.cu`, fbgemm-gpu 1.8.0.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, construct_cache_state
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

__all__ = ["CachedTables", "emulate_lookup"]

_WAYS = 4  # rows of one set of the cache; FBGEMM has 32


def emulate_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace FBGEMM's lookup in a cache, which does nothing on the CPU."""
    monkeypatch.setattr(torch.ops.fbgemm, "lxu_cache_lookup", _look_up)


def _look_up(ids: torch.Tensor, state: torch.Tensor, invalid_id: int, *, gather_cache_stats: bool) -> torch.Tensor:
    assert not gather_cache_stats
    assert ids.dtype is torch.int64
    assert ids.dim() == 1
    slot_of = {row: slot for slot, row in enumerate(state.flatten().tolist()) if row >= 0}
    return torch.tensor([-1 if row == invalid_id else slot_of.get(row, -1) for row in ids.tolist()], dtype=torch.int32)


class CachedTables(SplitTableBatchedEmbeddingBagsCodegen):
    """Tables of some rows and dims, those with a number in `cached` behind a cache of `num_sets` sets."""

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        *,
        cached: list[int],
        num_sets: int,
        optimizer: str = "EXACT_ROWWISE_ADAGRAD",
        precision: str = "FP32",
        features: list[int] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(
            [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in shapes],
            feature_table_map=features,
            optimizer=EmbOptimType[optimizer],
            weights_precision=SparseType[precision],
            device=torch.device("cpu"),
            learning_rate=0.1,
            eps=1e-3,
            **settings,
        )
        for table in self.split_embedding_weights():
            table.copy_(torch.randn(table.shape))
        places = [
            EmbeddingLocation.MANAGED_CACHING if index in cached else EmbeddingLocation.HOST
            for index in range(len(shapes))
        ]
        self.embedding_specs = [
            (rows, dim, place, ComputeDevice.CPU) for (rows, dim), place in zip(shapes, places, strict=True)
        ]
        of_cache = construct_cache_state([rows for rows, _ in shapes], places, self.feature_table_map)
        self.cache_hash_size_cumsum = torch.tensor(of_cache.cache_hash_size_cumsum)
        del self.total_cache_hash_size  # a buffer, in a module without a cache
        self.total_cache_hash_size = of_cache.total_cache_hash_size
        self.feature_of_id = of_cache.cache_index_table_map
        self.lxu_cache_state = torch.full((num_sets, _WAYS), -1)
        self.lxu_state = torch.zeros((num_sets, _WAYS), dtype=torch.int64)
        self.lxu_cache_weights = torch.zeros(num_sets * _WAYS, self.max_D, dtype=self.weights_host.dtype)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if not self.timesteps_prefetched:
            self._prefetch(indices, offsets)
        old = self._swap_in()
        output: torch.Tensor = super().forward(indices, offsets)
        self._swap_out(old)
        if output.grad_fn is not None:
            swapped: list[dict[int, torch.Tensor]] = []
            output.grad_fn.register_prehook(lambda *_: swapped.append(self._swap_in()))
            output.grad_fn.register_hook(lambda *_: self._swap_out(swapped.pop()))
        return output

    def _prefetch(self, indices: torch.Tensor, offsets: torch.Tensor, *_: Any, **__: Any) -> None:
        """Load the rows of a batch, as FBGEMM does before a forward, or earlier."""
        self.timestep += 1
        self.timesteps_prefetched.append(self.timestep)
        num_bags = (offsets.numel() - 1) // len(self.feature_table_map)
        for feature, first_id in enumerate(self.cache_hash_size_cumsum[:-1].tolist()):
            part = indices[offsets[feature * num_bags] : offsets[(feature + 1) * num_bags]]
            for row in part.unique().tolist() if first_id >= 0 else ():
                self._load(first_id + row)

    def _load(self, row_id: int) -> None:
        cache_set = row_id % len(self.lxu_cache_state)
        ids, used = self.lxu_cache_state[cache_set], self.lxu_state[cache_set]
        if row_id in ids.tolist():
            used[ids == row_id] = self.timestep
            return
        way = int(used.argmin())
        if used[way] == self.timestep:
            return  # all its set's rows are of this batch
        slot = cache_set * _WAYS + way
        if (evicted := int(ids[way])) >= 0:
            self._row(evicted).copy_(self._cached(slot, evicted))
        self._cached(slot, row_id).copy_(self._row(row_id))
        ids[way], used[way] = row_id, self.timestep

    def _row(self, row_id: int) -> torch.Tensor:
        """Return a row in the table's memory; torch counts no writes to it, as to those of FBGEMM's kernels."""
        index = self.feature_table_map[self.feature_of_id[row_id]]
        dim, start = self.embedding_specs[index][1], self.weights_physical_offsets[index]
        row = row_id - int(self.cache_hash_size_cumsum[self.feature_of_id[row_id]])
        return self.weights_host.data[start + row * dim : start + (row + 1) * dim]

    def _cached(self, slot: int, row_id: int) -> torch.Tensor:
        return self.lxu_cache_weights[slot, : self._row(row_id).numel()]

    def _in_cache(self) -> list[tuple[int, int]]:
        return [(slot, row) for slot, row in enumerate(self.lxu_cache_state.flatten().tolist()) if row >= 0]

    def _swap_in(self) -> dict[int, torch.Tensor]:
        """Put cached rows into the tables; return the old ones."""
        old = {row: self._row(row).clone() for _, row in self._in_cache()}
        for slot, row in self._in_cache():
            self._row(row).copy_(self._cached(slot, row))
        return old

    def _swap_out(self, old: dict[int, torch.Tensor]) -> None:
        for slot, row in self._in_cache():
            self._cached(slot, row).copy_(self._row(row))
            self._row(row).copy_(old[row])

    def flush(self) -> None:
        """Write all cached rows back; they stay cached."""
        for slot, row in self._in_cache():
            self._row(row).copy_(self._cached(slot, row))

    def num_outdated(self) -> int:
        """Return how many cached rows differ from those in the tables."""
        return sum(not torch.equal(self._row(row), self._cached(slot, row)) for slot, row in self._in_cache())
