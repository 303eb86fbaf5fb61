"""TorchRec's prefetching train pipeline over tables behind a cache, on one GPU; a function here runs on a rank."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
from pipelined_training import DIM, ROWS, Model, batch
from torchrec_models import fuse

__all__ = ["prefetch_on_rank"]

NUM_STEPS = 12


def prefetch_on_rank(rank: int, address: str, device_pipeline: bool) -> tuple[bool, str, int]:
    """Train tables of which one is cached; return whether the store equals them, what differs, and stale rows.

    A stale row is one whose newest weights are only in the cache.
    """
    from store_comparison import compare_with_store
    from torchrec.distributed.train_pipeline.train_pipelines import PrefetchTrainPipelineSparseDist

    from headrace.streamer import RawEmbeddingStreamer

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.manual_seed(1)
    model = _cached_model(device)
    dense = torch.optim.SGD([p for name, p in model.named_parameters() if "dense" in name], lr=0.1)
    pipeline = PrefetchTrainPipelineSparseDist(model, dense, device)
    batches = iter([batch(seed) for seed in range(NUM_STEPS)])
    run = f"prefetching-{device_pipeline}".lower()
    with RawEmbeddingStreamer(
        address, run=run, device_pipeline=device_pipeline, freshness_s=0, max_cost_percent=100
    ) as streamer:
        # Other tests have tables of these names.
        streamer.attach(torch.nn.ModuleDict({run: model}), dense, publish="all")
        with contextlib.suppress(StopIteration):
            while True:
                pipeline.progress(batches)
        streamer.flush()
        comparison = compare_with_store(streamer.tables, address)
        num_stale = 0
        for table in streamer.tables:
            present = table.weights_at(torch.arange(table.num_local_rows))
            num_stale += int((present != table.weights()).any(dim=1).sum())
    return comparison.is_equal and comparison.num_compared == sum(ROWS.values()), str(comparison), num_stale


def _cached_model(device: torch.device) -> Any:
    import torchrec
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    bags = torchrec.EmbeddingBagCollection(
        tables=[
            torchrec.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
            for name, rows in ROWS.items()
        ],
        device=torch.device("meta"),
    )
    fuse("row-wise-adagrad", bags.parameters())
    sharder: Any = EmbeddingBagCollectionSharder(fused_params={"prefetch_pipeline": True, "cache_load_factor": 0.3})
    kernels = {"users": EmbeddingComputeKernel.FUSED_UVM_CACHING, "films": EmbeddingComputeKernel.FUSED}
    plan = construct_module_sharding_plan(
        bags,
        {name: table_wise(rank=0, compute_kernel=kernel.value) for name, kernel in kernels.items()},
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type="cuda",
    )
    root = Model(bags)
    root.dense.to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DistributedModelParallel(
            root,
            env=ShardingEnv.from_process_group(dist.new_group(backend="nccl")),
            device=device,
            plan=ShardingPlan({"bags": plan}),
            sharders=[sharder],
        )
