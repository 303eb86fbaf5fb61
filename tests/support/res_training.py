"""A TorchRec model made for RES, on several ranks; a function here runs on a rank."""

from __future__ import annotations

from typing import Any

import torch
import torchrec
from torchrec_models import fuse, parallel, plan_of

import headrace.res
from headrace.streamer.compare import compare_with_store

__all__ = ["NUM_STEPS", "ROWS", "train_for_res_on_rank"]

ROWS = {"rows": 101, "columns": 60, "whole": 33, "unnamed": 20}
NUM_STEPS = 4


def train_for_res_on_rank(rank: int, address: str, run: str) -> tuple[str, int, int, list[str]]:
    """Return what differs between tables and store, the rows compared, the step, and the tables of this rank."""
    from torchrec.distributed import sharding_plan
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    torch.manual_seed(4)
    settings = {"model": run, "flush_percent": 100, "enabled_tables": '["rows", "columns", "whole"]'}
    with headrace.res.install(address, run=run, publish="all", **settings) as streamer:
        bags = torchrec.EmbeddingBagCollection(
            tables=[
                torchrec.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=16, feature_names=[name])
                for name, rows in ROWS.items()
            ],
            device=torch.device("cpu"),
        )
        fuse("row-wise-adagrad", bags.parameters())
        res = {
            "enable_raw_embedding_streaming": True,
            "res_store_shards": 2,
            "res_enabled_tables": "rows,columns,whole",
        }
        sharder: Any = EmbeddingBagCollectionSharder(fused_params=res)
        shardings = {
            "rows": sharding_plan.row_wise(),
            "columns": sharding_plan.column_wise(ranks=[0, 0, 1, 1]),
            "whole": sharding_plan.table_wise(rank=1),
            "unnamed": sharding_plan.table_wise(rank=0),
        }
        model = parallel(torch.nn.ModuleDict({"bags": bags}), {"bags": plan_of(bags, shardings, sharder)}, sharder)
        for step in range(NUM_STEPS):
            generator = torch.Generator().manual_seed(10 * step + rank)
            ids = [torch.randint(rows, (6,), generator=generator) for rows in ROWS.values()]
            lengths = torch.full((3 * len(ROWS),), 2)
            batch = torchrec.KeyedJaggedTensor(keys=list(ROWS), values=torch.cat(ids), lengths=lengths)
            (model.module.bags(batch).values() - 1).pow(2).sum().backward()
        streamer.flush()
        comparison = compare_with_store(streamer.tables, address)
        parts = [f"{table.path} {table.row_offset} {table.shard.offset}" for table in streamer.tables]
        return "" if comparison.is_equal else str(comparison), comparison.num_compared, streamer.stats().step, parts
