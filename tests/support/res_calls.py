"""Records how an FBGEMM calls its RES streamer: its own Python, on a CPU, with the kernels of its cache in plain torch.

`python tests/support/res_calls.py tests/streamer/res_calls` writes the file of the installed version.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

__all__ = ["NUM_STEPS", "SCENARIOS", "emulated_kernels", "fbgemm_version", "prefetch", "record"]

NUM_STEPS = 5
# Name and placement of tables of (rows, dim), and whether lookups have identities.
SCENARIOS = {
    "cached": (["MANAGED_CACHING"], False),
    "identities": (["MANAGED_CACHING"], True),
    "device": (["DEVICE"], False),
    "mixed": (["MANAGED_CACHING", "DEVICE"], False),
}
SIZES = [(20, 4), (30, 8)]


def fbgemm_version() -> str:
    """Return the release of the installed FBGEMM, for a CPU or a GPU."""
    for name in ("fbgemm-gpu-cpu", "fbgemm-gpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name).partition("+")[0]
    raise AssertionError("no fbgemm_gpu is installed")


def record() -> dict[str, list[Any]]:
    """Return, by scenario, all calls: [name, arguments, named arguments], the constructor's first."""
    return {name: _record(name) for name in SCENARIOS}


def _record(scenario: str) -> list[Any]:
    calls: list[Any] = []
    with emulated_kernels(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.classes.fbgemm, "RawEmbeddingStreamer", lambda *a, **k: _Recorder(calls, *a, **k))
        module = make(scenario)
        for step in range(NUM_STEPS):
            prefetch(module, scenario, step)
    return calls


class _Recorder:
    def __init__(self, calls: list[Any], uuid: str, *args: Any, **kwargs: Any) -> None:
        assert isinstance(uuid, str)
        self._calls = calls
        calls.append(["__init__", ["UUID", *args], kwargs])

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._calls.append(
            [name, [_shown(arg) for arg in args], {key: _shown(arg) for key, arg in kwargs.items()}]
        )


def _shown(value: Any) -> Any:
    """Return what JSON keeps of an argument: of a tensor its type and shape, and whole numbers."""
    if not isinstance(value, torch.Tensor):
        return value
    numbers = None if value.is_floating_point() else value.tolist()
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "numbers": numbers}


def make(scenario: str) -> Any:
    """Return a module as for a GPU, which can prefetch but not look up. REQUIRES: emulated kernels."""
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as ops

    places, _ = SCENARIOS[scenario]
    names = ["users", "films"][: len(places)]
    res = ops.RESParams(table_names=names, table_offsets=[0] * len(places))
    if hasattr(res, "enable_hbm_streaming"):
        res.enable_hbm_streaming = True
    return ops.SplitTableBatchedEmbeddingBagsCodegen(
        [
            (*size, ops.EmbeddingLocation[place], ops.ComputeDevice.CUDA)
            for size, place in zip(SIZES, places, strict=False)
        ],
        optimizer=ops.OptimType.EXACT_SGD,
        cache_sets=1,
        enable_raw_embedding_streaming=True,
        res_params=res,
        device=torch.device("cpu"),
    )


def prefetch(module: Any, scenario: str, step: int) -> None:
    """Prefetch a step's batch of two bags of two ids a table, as a forward without a pipeline does."""
    places, has_identities = SCENARIOS[scenario]
    indices = torch.tensor([(step + 3 * at) % 20 for at in range(4 * len(places))])
    extras: dict[str, Any] = {}
    if has_identities:
        extras["hash_zch_identities"] = indices.view(-1, 1) + 2**40
        extras["hash_zch_runtime_meta"] = torch.stack([indices, indices], 1)
    module._prefetch(indices, torch.arange(0, indices.numel() + 1, 2), None, **extras)
    module.timesteps_prefetched.clear()
    module.lxu_cache_locations_list.clear()


@contextlib.contextmanager
def emulated_kernels() -> Iterator[None]:
    """Have FBGEMM's operators for a GPU's cache and unified memory run in plain torch, on one set of 32 slots."""
    import fbgemm_gpu.split_table_batched_embeddings_ops_training  # noqa: F401 (it registers the operators)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("new_unified_tensor", "new_managed_tensor", "new_host_mapped_tensor"):
            patch.setattr(torch.ops.fbgemm, name, lambda like, sizes, *_, **__: torch.zeros(sizes, dtype=like.dtype))
        patch.setattr(torch.ops.fbgemm, "linearize_cache_indices", _linearize)
        patch.setattr(torch.ops.fbgemm, "lru_cache_populate", _populate)
        patch.setattr(torch.ops.fbgemm, "lxu_cache_lookup", _look_up)
        patch.setattr(torch.ops.fbgemm, "get_unique_indices_with_inverse", _unique)
        patch.setattr(torch.ops.fbgemm, "masked_index_select", lambda *_: None, raising=False)
        patch.setattr(torch.cuda, "Event", _Event)
        zeros = torch.zeros
        patch.setattr(torch, "zeros", lambda *args, pin_memory=False, **kwargs: zeros(*args, **kwargs))
        yield


class _Event:
    def record(self) -> None:
        """Do nothing: the CPU is done."""

    def query(self) -> bool:
        return True


def _linearize(cumsum: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, *_: Any) -> torch.Tensor:
    """Add each table's first id in the cache; ids of tables that are not cached become the number of all."""
    first_ids = cumsum[:-1]
    starts = offsets[:: (offsets.numel() - 1) // first_ids.numel()]
    of_each = first_ids.repeat_interleave(starts.diff())
    return torch.where(of_each >= 0, indices + of_each, cumsum[-1])


def _populate(*args: Any) -> None:
    """Put new ids into free slots."""
    num_ids, ids, state = args[2], args[6], args[7].view(-1)
    for one in ids[ids < num_ids].unique().tolist():
        free = (state == -1).nonzero().view(-1)
        if one not in state.tolist() and free.numel():
            state[free[0]] = one


def _look_up(
    ids: torch.Tensor,
    state: torch.Tensor,
    num_ids: int,
    gather_cache_stats: bool = False,
    stats: torch.Tensor | None = None,
    num_uniq_cache_indices: torch.Tensor | None = None,
    lxu_cache_locations_output: torch.Tensor | None = None,
) -> torch.Tensor:
    slots = {int(one): slot for slot, one in enumerate(state.view(-1)) if one != -1}
    found = torch.tensor([slots.get(one, -1) for one in ids.tolist()], dtype=torch.int32)
    return found if lxu_cache_locations_output is None else lxu_cache_locations_output.copy_(found)


def _unique(ids: torch.Tensor, num_ids: int, compute_count: bool, compute_inverse_indices: bool) -> Any:
    """Return sorted unique ids, their number, counts, and the place of each id in order; padded to the ids' number."""
    unique, counts = ids.unique(return_counts=True)
    padding = ids.numel() - unique.numel()
    length = torch.tensor([unique.numel()], dtype=torch.int32)
    order = ids.argsort(stable=True).int()
    return _pad(unique, padding), length, _pad(counts.int(), padding), order


def _pad(tensor: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, size))


if __name__ == "__main__":
    os.environ["FBGEMM_RES_HBM_STREAMING"] = "1"
    target = Path(sys.argv[1]) / f"{fbgemm_version()}.json"
    scenarios = [f'"{name}": [\n' + ",\n".join(map(json.dumps, calls)) + "\n]" for name, calls in record().items()]
    target.write_text("{\n" + ",\n".join(scenarios) + "\n}\n")
