"""Multi-probe zero-collision hashing on the CPU, where FBGEMM can look ids up but not train.

It keeps the rules of FBGEMM's kernels: an id probes the rows from its hash on, takes the first free one, or evicts an
id that is out of date; torch counts none of these writes. The read-only kernel of the CPU finds what it has put.

Source: `fbgemm_gpu/src/faster_hash_ops/faster_hash.cu` (`process_item_zch`) and
`fbgemm_gpu/src/split_embeddings_cache/reset_weight_momentum.cu`, fbgemm-gpu 1.8.0.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torchrec.modules import hash_mc_evictions
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

__all__ = ["EmulatedHashZch", "Hours"]

_LRU = 1


class EmulatedHashZch(HashZchManagedCollisionModule):
    """A module whose lookups in training mode work on the CPU."""

    def _zero_collision_hash(self, **call: Any) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        # The CPU's kernel takes no data for evictions.
        unused = {"metadata": None, "input_metadata": None, "eviction_threshold": -1, "opt_in_rands": None}
        lookup = call | unused | {"runtime_meta": None, "readonly": True}
        if call["readonly"]:
            return super()._zero_collision_hash(**lookup)
        assert call["opt_in_prob"] == -1, "not emulated"
        # In a table without ids the kernel gives each the row that it would probe first.
        empty = torch.full_like(call["identities"], -1)
        firsts, _ = super()._zero_collision_hash(**lookup | {"identities": empty, "disable_fallback": False})
        evicted: list[int] = []
        slots = [self._place(call, at, first, evicted) for at, first in enumerate(firsts.tolist())]
        return torch.tensor(slots, dtype=torch.int64), torch.tensor(evicted, dtype=torch.int64)

    def _place(self, call: dict[str, Any], at: int, first: int, evicted: list[int]) -> int:
        """Return the row of one id, -1 for none, by the row that it probes first."""
        raw_id, num_slots, offset = (int(call[name][at]) for name in ("input", "local_sizes", "offsets"))
        identities, metadata = call["identities"].data.view(-1), call["metadata"]
        probed = [offset + (first - offset + step) % num_slots for step in range(min(call["max_probe"], num_slots))]
        now = -1 if call["input_metadata"] is None else int(call["input_metadata"][at])

        def put(slot: int) -> int:
            identities[slot] = raw_id
            if call["input_metadata"] is not None:
                metadata.data[slot] = max(now, int(metadata[slot]))
            if call["runtime_meta"] is not None:
                call["runtime_meta"].data[slot] += 1
            return slot

        for slot in probed:
            if int(identities[slot]) in (raw_id, -1):
                return put(slot)
        old = [slot for slot in probed if int(metadata[slot]) < min(call["eviction_threshold"], now)]
        if old:
            slot = min(old, key=lambda each: int(metadata[each])) if call["eviction_policy"] == _LRU else old[0]
            evicted.append(slot)
            if call["runtime_meta"] is not None:
                call["runtime_meta"].data[slot] = 0
            return put(slot)
        return -1 if call["disable_fallback"] else probed[0]


class Hours:
    """The clock by which modules evict; begins at hour 1000."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Set the modules' clock, and have evicted rows reset on the CPU too."""
        self.now = 1000
        clock = types.SimpleNamespace(time=lambda: self.now * 3600)
        monkeypatch.setattr(hash_mc_evictions, "time", clock)
        monkeypatch.setattr(SplitTableBatchedEmbeddingBagsCodegen, "reset_embedding_weight_momentum", _reset)


def _reset(
    module: Any,
    pruned_indices: torch.Tensor,
    pruned_indices_offsets: torch.Tensor,
    logical_table_ids: torch.Tensor,
    buffer_ids: torch.Tensor,
) -> None:
    assert pruned_indices_offsets.tolist() == [0, pruned_indices.numel()]
    assert buffer_ids.tolist() == [0]
    if module.optimizer.name != "EXACT_ROWWISE_ADAGRAD":
        return
    (table,) = logical_table_ids.tolist()
    module.split_embedding_weights()[table].data[pruned_indices] = 0
    module.get_optimizer_state()[table]["sum"].data[pruned_indices] = 0
