"""A TorchRec model made for RES, on several ranks; a function here runs on a rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torchrec
from store_comparison import compare_with_store
from torchrec_models import fuse, parallel, plan_of

import headrace.res
from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer import RawEmbeddingStreamer

__all__ = ["NUM_STEPS", "ROWS", "Trained", "train_for_res_on_rank"]

ROWS = {"rows": 101, "columns": 60, "whole": 33, "unnamed": 20}
NUM_STEPS = 4


class Trained(NamedTuple):
    """What differs between tables and store, the rows compared, the step, and this rank's tables."""

    differs: str
    num_compared: int
    step: int
    parts: list[str]


def train_for_res_on_rank(rank: int, address: str) -> tuple[Trained, Trained, str]:
    """Train all tables, and one that is on rank 1, which then moves to rank 0.

    Returns:
        What was trained each time, and what the flush after the move raises.
    """
    from torchrec.distributed import sharding_plan

    shardings = {
        "rows": sharding_plan.row_wise(),
        "columns": sharding_plan.column_wise(ranks=[0, 0, 1, 1]),
        "whole": sharding_plan.table_wise(rank=1),
        "unnamed": sharding_plan.table_wise(rank=0),
    }
    with _install(address, "res-sharded") as streamer:
        found = _train(rank, streamer, _make(shardings, "row-wise-adagrad"), address)
    told = ""
    with _install(address, "res-alone") as streamer:
        # Without states: TorchRec's reshard never ends on gloo when it moves more than one tensor of a table.
        model = _make({"whole": sharding_plan.table_wise(rank=1)}, "sgd")
        alone = _train(rank, streamer, model, address)
        bags = _bags(["whole"], "sgd")
        moved = plan_of(bags, {"whole": sharding_plan.table_wise(rank=0)}, _sharder())
        model.reshard({"bags": (0.0, {"whole": moved["whole"]})}, sharded_module_fqn="bags")
        try:
            streamer.flush()
        except UnsupportedModelError as exc:
            told = str(exc)
        streamer.close(flush=False)
    return found, alone, told


def _install(address: str, run: str) -> RawEmbeddingStreamer:
    settings = {
        "model": run,
        "freshness_s": 0,
        "max_cost_percent": 100,
        "enabled_tables": '["rows", "columns", "whole"]',
    }
    return headrace.res.install(address, run=run, publish="all", **settings)


def _bags(names: list[str], optimizer: str) -> Any:
    bags = torchrec.EmbeddingBagCollection(
        tables=[
            torchrec.EmbeddingBagConfig(name=name, num_embeddings=ROWS[name], embedding_dim=16, feature_names=[name])
            for name in names
        ],
        device=torch.device("cpu"),
    )
    fuse(optimizer, bags.parameters())
    return bags


def _sharder() -> Any:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    res = {
        "enable_raw_embedding_streaming": True,
        "res_store_shards": 2,
        "res_enabled_tables": "rows,columns,whole",
    }
    return EmbeddingBagCollectionSharder(fused_params=res)


def _make(shardings: dict[str, Any], optimizer: str) -> Any:
    torch.manual_seed(4)
    bags = _bags(list(shardings), optimizer)
    sharder = _sharder()
    root = torch.nn.ModuleDict({"bags": bags, "dense": torch.nn.Linear(1, 1)})  # `reshard` needs a dense part
    return parallel(root, {"bags": plan_of(bags, shardings, sharder)}, sharder)


def _train(rank: int, streamer: RawEmbeddingStreamer, model: Any, address: str) -> Trained:
    names = list(model.module.bags.embedding_bags)
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        ids = [torch.randint(ROWS[name], (6,), generator=generator) for name in names]
        lengths = torch.full((3 * len(names),), 2)
        batch = torchrec.KeyedJaggedTensor(keys=names, values=torch.cat(ids), lengths=lengths)
        (model.module.bags(batch).values() - 1).pow(2).sum().backward()
    streamer.flush()
    comparison = compare_with_store(streamer.tables, address)
    parts = [f"{table.path} {table.row_offset} {table.shard.offset}" for table in streamer.tables]
    told = "" if comparison.is_equal else str(comparison)
    return Trained(told, comparison.num_compared, streamer.stats().step, parts)
