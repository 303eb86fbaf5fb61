"""TorchRec models on the CPU of each rank: fused optimizers, plans, and `DistributedModelParallel` by them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["FUSED", "fuse", "parallel", "plan_of"]

FUSED = ("sgd", "adagrad", "row-wise-adagrad")
"""The fused optimizers of FBGEMM's CPU build, as `fuse` takes them."""


def fuse(optimizer: str, parameters: Iterable[nn.Parameter]) -> None:
    """Have sharded tables updated in the backward pass."""
    import torchrec
    from torch.distributed.optim import _apply_optimizer_in_backward

    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "row-wise-adagrad": torchrec.optim.RowWiseAdagrad}
    settings = {"lr": 0.1} if optimizer == "sgd" else {"lr": 0.1, "eps": 1e-6}
    _apply_optimizer_in_backward(kinds[optimizer], parameters, settings)


def plan_of(module: nn.Module, shardings: dict[str, Any], sharder: Any) -> Any:
    """Return a module's plan: by table, what a function of TorchRec's `sharding_plan` has made."""
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan

    size = dist.get_world_size()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return construct_module_sharding_plan(
        module, shardings, sharder=sharder, local_size=local_size, world_size=size, device_type="cpu"
    )


def parallel(root: nn.Module, plans: dict[str, Any], *sharders: Any) -> Any:
    """Return a model under `DistributedModelParallel`; `plans` are by the modules' names."""
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingPlan

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DistributedModelParallel(
            root, device=torch.device("cpu"), plan=ShardingPlan(plans), sharders=list(sharders)
        )
