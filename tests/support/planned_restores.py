"""Tables as DTensors of every layout, restored one by one, each as it was planned."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist
from replicated_training import OTHER_ORDER, PLACEMENTS, place_whole
from torch import nn

__all__ = ["plan_and_restore_on_rank"]


def _layouts() -> dict[str, str]:
    """Return placements that so many ranks can have, by tables' names."""
    size = dist.get_world_size()
    fitting = [name for name, (shape, _) in PLACEMENTS.items() if math.prod(shape) == size]
    return {name.replace("-", "_").lower(): name for name in (*fitting, *([OTHER_ORDER] if size == 4 else []))}


def plan_and_restore_on_rank(
    rank: int, address: str, run: str, shape: tuple[int, int], only: str | None = None
) -> dict[str, dict[str, Any]]:
    """Publish a table in each layout, then plan and restore it; return by layout what was planned and what came."""
    from headrace import RawEmbeddingStreamer, restore

    generator = torch.Generator().manual_seed(5)
    model = nn.ModuleDict()
    layouts = {name: layout for name, layout in _layouts().items() if only in (None, layout)}
    for name, layout in layouts.items():
        model[name] = nn.Embedding(0, shape[1])
        model[name].weight = nn.Parameter(place_whole(torch.rand(shape, generator=generator), layout))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with RawEmbeddingStreamer(address, run=run, model=run) as streamer:
        streamer.attach(model, optimizer, publish="all")
        streamer.step()
        streamer.flush()
        dist.barrier()
    found = {}
    for name, layout in layouts.items():
        local = model[name].weight._local_tensor
        before = local.detach().clone()
        with torch.no_grad():
            local.fill_(-1)
        arguments: dict[str, Any] = {"model_name": run, "tables": [f"{name}.weight"]}
        plan = restore(model, optimizer, address, **arguments, plan=True).plan
        is_untouched = bool((local == -1).all())
        dist.barrier()
        began_s = time.perf_counter()
        report = restore(model, optimizer, address, **arguments)
        seconds = time.perf_counter() - began_s
        found[layout] = {
            "plan": plan,
            "is_untouched": is_untouched,
            "is_equal": torch.equal(local, before),
            "bytes_read": report.bytes_read,
            "num_restored": report.num_restored,
            "seconds": seconds,
        }
    return found
