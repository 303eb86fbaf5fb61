"""TorchRec's 2D parallel on CPUs: two groups of two ranks, each with all rows. A function here runs on a rank."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torchrec_models import fuse

import headrace
import headrace.res
from headrace.schemas.errors import HeadraceError
from headrace.streamer import RawEmbeddingStreamer

__all__ = ["ROWS", "Synced", "train_synced_on_rank"]

ROWS = {"rows": 101, "columns": 60, "whole": 33}
GROUP_SIZE = 2


class Synced(NamedTuple):
    """What one rank of a `DMPCollection` has found.

    Attributes:
        audits: After steps, a sync, and steps around another sync: whether all rows are equal, and their number.
        spoiled: Table, ranks and rows of what an audit finds after a sync, when one value of a copy was changed.
        copies: Whether all groups have the same rows, before a sync and after it.
        parts: Tables that this rank streams.
        step: Steps that have ended.
        told: What is refused, and why.
    """

    audits: list[tuple[bool, int]]
    spoiled: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
    copies: tuple[bool, bool]
    parts: list[str]
    step: int
    told: dict[str, str]


def train_synced_on_rank(rank: int, address: str) -> Synced:
    """Train a model whose rows are in two groups of ranks, with a batch of its own on each rank."""
    torch.manual_seed(rank)
    model = make()
    told = {}
    with RawEmbeddingStreamer(address, run="synced", model="synced", freshness_s=0, max_cost_percent=100) as streamer:
        sharded = model.module.bags
        told["part"] = refusal(lambda: streamer.attach(model.module, publish="updated"))
        told["restore"] = refusal(lambda: headrace.restore(model, address=address, model_name="synced"))
        sharded._env.sharding_strategy = types.SimpleNamespace(name="FULLY_SHARDED")
        told["cut"] = refusal(lambda: streamer.attach(model, publish="updated"))
        sharded._env.sharding_strategy = types.SimpleNamespace(name="DEFAULT")
        streamer.attach(model, publish="all")

        def audit() -> tuple[bool, int]:
            report = streamer.audit(only_present=False)
            return report.is_equal, sum(table.num_rows for table in report.tables)

        train(model, rank, range(3))
        audits, were_equal = [audit()], have_same_rows(model)
        model.sync()
        copies = were_equal, have_same_rows(model)
        audits.append(audit())
        values = rows_of(model)
        before = values[4, 1].item()
        if rank == 3:
            values.numpy()[4, 1] += 1
        report = streamer.audit()
        spoiled = [(each.fqn, each.ranks, each.differing_row_ids) for each in report.copies]
        assert report.is_equal == (not spoiled)
        values.numpy()[4, 1] = before
        train(model, rank, range(3, 5))
        model.sync()
        train(model, rank, range(5, 6))
        audits.append(audit())
        parts = [f"{table.path} {table.row_offset} {table.shard.offset}" for table in streamer.tables]
        step = streamer.stats().step
    assert "sync" not in vars(model)
    with headrace.res.install(address, run="synced-res", model="synced-res") as streamer:
        other = make(enable_raw_embedding_streaming=True)
        told["install"] = refusal(lambda: train(other, rank, range(1)))
    return Synced(audits, spoiled, copies, parts, step, told)


def refusal(call: Any) -> str:
    try:
        call()
    except HeadraceError as exc:
        return str(exc)
    return ""


class Bags(nn.ModuleDict):
    def forward(self, batch: Any) -> Any:
        return self["bags"](batch)


def make(**fused: Any) -> Any:
    from torchrec.distributed import sharding_plan
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingPlan

    bags = torchrec.EmbeddingBagCollection(
        tables=[
            torchrec.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=[name])
            for name, rows in ROWS.items()
        ],
        device=torch.device("cpu"),
    )
    fuse("row-wise-adagrad", bags.parameters())
    sharder: Any = EmbeddingBagCollectionSharder(fused_params=fused)
    shardings = {
        "rows": sharding_plan.row_wise(),
        "columns": sharding_plan.column_wise(ranks=[0, 1]),
        "whole": sharding_plan.table_wise(rank=1),
    }
    plan = sharding_plan.construct_module_sharding_plan(
        bags, shardings, sharder=sharder, local_size=GROUP_SIZE, world_size=GROUP_SIZE, device_type="cpu"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = dmp_collection()(
            module=Bags({"bags": bags, "dense": nn.Linear(1, 1)}),
            device=torch.device("cpu"),
            plan=ShardingPlan({"bags": plan}),
            world_size=dist.get_world_size(),
            sharding_group_size=GROUP_SIZE,
            global_pg=dist.group.WORLD,
            sharders=[sharder],
        )
    group = model._default_ctx.replica_pg
    model.set_all_reduce_hook(lambda *given: average(group, given[-1]))  # since 1.9 the group is given, too
    return model


@functools.cache
def dmp_collection() -> Any:
    """Return `DMPCollection` for a CPU: as `python -O` has it, without an assertion, and with places on a CPU."""
    from torchrec.distributed import model_parallel

    without_asserts = types.ModuleType(model_parallel.__name__)
    source, path = inspect.getsource(model_parallel), inspect.getsourcefile(model_parallel)
    assert sys.modules[without_asserts.__name__] is model_parallel  # where its dataclasses look for themselves
    exec(compile(source, str(path), "exec", optimize=1), without_asserts.__dict__)

    class OnCpu(without_asserts.DMPCollection):
        def _remap_sharding_plan(self, plan: Any, *args: Any, **kwargs: Any) -> None:
            super()._remap_sharding_plan(plan, *args, **kwargs)
            for of_module in plan.plan.values():
                for sharding in of_module.values():
                    for shard in sharding.sharding_spec.shards:
                        shard.placement = torch.distributed._remote_device(f"rank:{shard.placement.rank()}/cpu")

    return OnCpu


def average(group: Any, tensors: list[torch.Tensor]) -> None:
    """Average over the ranks that have the same rows, which gloo cannot; torch counts no write, as with NCCL."""
    for tensor in tensors:
        versions = tensor._version
        dist.all_reduce(tensor, group=group)
        tensor.data.div_(dist.get_world_size(group))
        assert tensor._version == versions


def rows_of(model: Any) -> torch.Tensor:
    """Return this rank's rows of the table `rows`."""
    for lookup in model.module.bags._lookups:
        for kernel in lookup._emb_modules:
            names = [table.name for table in kernel._config.embedding_tables]
            if "rows" in names:
                weights: torch.Tensor = kernel._emb_module.split_embedding_weights()[names.index("rows")].detach()
                return weights
    raise AssertionError("each rank has rows of it")


def have_same_rows(model: Any) -> bool:
    """Return whether this rank's rows are those of the other ranks that have them."""
    group = model._default_ctx.replica_pg
    for lookup in model.module.bags._lookups:
        for kernel in lookup._emb_modules:
            for weights in kernel._emb_module.split_embedding_weights():
                copies = [torch.empty_like(weights) for _ in range(dist.get_world_size(group))]
                dist.all_gather(copies, weights.contiguous(), group=group)
                if not all(torch.equal(weights, copy) for copy in copies):
                    return False
    return True


def train(model: Any, rank: int, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + rank)
        ids = [torch.randint(num_rows, (6,), generator=generator) for num_rows in ROWS.values()]
        lengths = torch.full((3 * len(ROWS),), 2)
        batch = torchrec.KeyedJaggedTensor(keys=list(ROWS), values=torch.cat(ids), lengths=lengths)
        (model(batch).values() - 1).pow(2).sum().backward()
