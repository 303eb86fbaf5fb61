"""A TorchRec model trained on several ranks under any sharding, streamed, and its whole tables as TorchRec has them.

Functions here run on a rank (see `ranks`); what they return is gathered and put together by `whole_tables`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from matrix_training import optimizer_of
from torch import nn
from torchrec_models import FUSED, fuse, parallel, plan_of

__all__ = ["BAG_TABLES", "Job", "batch", "build", "copied_shards", "everywhere", "load_whole", "train_on_rank"]
__all__ += ["train_jobs_on_rank"]
__all__ += ["whole_tables"]

# name: rows, dim, kind of module. 1001 rows do not divide evenly.
# The table that leaves a rank without rows is not the last of its width: FBGEMM's CPU code would look for the next one
# that has rows beyond the end of an array, and fail when it finds a large number there.
BAG_TABLES = {"shops": (5, 32), "users": (1001, 32), "films": (303, 64), "wide": (77, 256)}
SEQUENCE_TABLES = {"clicks": (211, 32)}
BATCH = 8


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train, and where to stream it.

    Attributes:
        address: The server's; None trains without streaming.
        run: Name of the run, which is also the module's path, so that jobs do not share tables.
        module: Path of the model in the root.
        shardings: By table: name of the sharding and its settings.
        optimizer: `sgd`, `adagrad` or `row-wise-adagrad`, fused; `torch-NAME` leaves all to a torch
            optimizer, one of `optimizer_names`.
        optimizers: By table, where it is another one; also `averages`, which is EMAINPLACE.
        bag_tables: Rows and columns of pooled tables that there may be.
        num_steps: Steps.
        seed: Of the batches.
        publish: As for `attach`.
        send_share, states: As for `attach`.
        start: Whole weights and states to begin with, by fqn; None begins at random.
        has_dense_optimizer: Whether the rest of the model has an optimizer, whose step ends a step.
        idle_steps: Steps in which all batches are empty.
        flush_on_rank_0: Flush amid training, on rank 0 only.
        table_column_wise: Those of the column-wise tables whose columns are on one node.
    """

    address: str | None
    run: str
    module: str
    shardings: dict[str, tuple[str, dict[str, Any]]]
    optimizer: str = "row-wise-adagrad"
    optimizers: dict[str, str] = field(default_factory=dict)
    bag_tables: dict[str, tuple[int, int]] = field(default_factory=lambda: BAG_TABLES)
    num_steps: int = 6
    seed: int = 0
    publish: str = "all"
    send_share: float | None = None
    states: Any = True
    start: dict[str, dict[str, npt.NDArray[Any]]] | None = None
    has_dense_optimizer: bool = False
    idle_steps: tuple[int, ...] = ()
    flush_on_rank_0: bool = False
    table_column_wise: tuple[str, ...] = ()


def everywhere(kind: str, *names: str, **settings: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the shardings of a `Job` in which all of these tables have the same one."""
    return {name: (kind, settings) for name in names}


class SparseModel(nn.Module):
    """Bags and sequences with a dense layer over them.

    Attributes:
        sizes: Of the tables, by module and name.
    """

    def __init__(self, bags: dict[str, tuple[int, int]], sequences: dict[str, tuple[int, int]]) -> None:
        super().__init__()
        import torchrec

        def configs(kind: Any, sizes: dict[str, tuple[int, int]]) -> list[Any]:
            return [
                kind(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"{name}-0", f"{name}-1"])
                for name, (rows, dim) in sizes.items()
            ]

        cpu = torch.device("cpu")
        if bags:
            tables = configs(torchrec.EmbeddingBagConfig, bags)
            self.bags = torchrec.EmbeddingBagCollection(tables=tables, device=cpu)
        if sequences:
            tables = configs(torchrec.EmbeddingConfig, sequences)
            self.sequences = torchrec.EmbeddingCollection(tables=tables, device=cpu)
        self.sizes = {"bags": bags, "sequences": sequences}
        self.dense = nn.Linear(2 * sum(dim for _, dim in bags.values()) or 1, 1)

    def forward(self, inputs: dict[str, Any]) -> torch.Tensor:
        loss = torch.zeros(())
        if "bags" in inputs:
            loss = loss + (self.dense(self.bags(inputs["bags"]).values()) - 1).pow(2).mean()
        else:
            loss = loss + self.dense(torch.ones(1, 1)).pow(2).mean()
        if "sequences" in inputs:
            for values in self.sequences(inputs["sequences"]).values():
                loss = loss + (values.values() - 1).pow(2).sum()
        return loss


def batch(model: SparseModel, seed: int, *, is_empty: bool) -> dict[str, Any]:
    """Return jagged ids for each module, skewed so that rows repeat over steps and ranks."""
    import torchrec

    generator = torch.Generator().manual_seed(seed)
    inputs = {}
    for kind, sizes in model.sizes.items():
        keys, values, lengths = [], [], []
        for name, (num_rows, _) in sizes.items():
            for turn in range(2):
                keys.append(f"{name}-{turn}")
                lengths.append(torch.randint(0, 1 if is_empty else 4, (BATCH,), generator=generator))
                skewed = torch.rand(int(lengths[-1].sum()), generator=generator) ** 2
                values.append((skewed * num_rows).long())
        if keys:
            inputs[kind] = torchrec.KeyedJaggedTensor(keys=keys, values=torch.cat(values), lengths=torch.cat(lengths))
    return inputs


def build(job: Job) -> tuple[Any, Any]:
    """Return (model under `DistributedModelParallel`, torch optimizers or None)."""
    from torchrec.distributed import sharding_plan
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.optim.keyed import KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    torch.manual_seed(5)
    bags, sequences = (
        {name: size for name, size in sizes.items() if name in job.shardings}
        for sizes in (job.bag_tables, SEQUENCE_TABLES)
    )
    core = SparseModel(bags, sequences)
    root = nn.Sequential()
    root.add_module(job.module, core)
    for name, parameter in core.named_parameters():
        optimizer = job.optimizers.get(name.split(".")[-2], job.optimizer)
        if "dense" not in name and optimizer in FUSED:
            fuse(optimizer, [parameter])
    fused = _averages() if "averages" in job.optimizers.values() else None
    sharders = {
        "bags": EmbeddingBagCollectionSharder(fused_params=fused),
        "sequences": EmbeddingCollectionSharder(fused_params=fused),
    }
    made = {name: getattr(sharding_plan, kind)(**settings) for name, (kind, settings) in job.shardings.items()}
    plans = {
        f"{job.module}.{kind}": plan_of(getattr(core, kind), {name: made[name] for name in sizes}, sharders[kind])
        for kind, sizes in core.sizes.items()
        if sizes
    }
    for module_plan in plans.values():
        for name, sharding in module_plan.items():
            # The planner's name for columns that stay on one node; there is no function that makes such a plan.
            if job.shardings[name][0] == "column_wise" and name in job.table_column_wise:
                sharding.sharding_type = "table_column_wise"
            if job.optimizers.get(name) == "averages":  # without an optimizer of its own it gets the dense kernel
                sharding.compute_kernel = "fused"
    model = parallel(root, plans, *sharders.values())
    if job.optimizer.startswith("torch-"):
        make = functools.partial(optimizer_of, job.optimizer.removeprefix("torch-"))
        matrices = {name: parameter for name, parameter in model.named_parameters() if parameter.dim() == 2}
        return model, KeyedOptimizerWrapper(matrices, make)  # rowwise Adagrad takes no vectors
    if job.has_dense_optimizer:
        rest = dict(in_backward_optimizer_filter(model.named_parameters()))
        return model, KeyedOptimizerWrapper(rest, lambda p: torch.optim.Adam(p, lr=0.01))
    return model, None


def _averages() -> dict[str, Any]:
    """Return settings of the tables that have no optimizer of their own: EMAINPLACE, for which torch has no class."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import EmainplaceModeDefinition

    mode = EmainplaceModeDefinition(step_ema=2, step_start=0, step_ema_coef=0.5)
    kind = EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD
    return {"optimizer": kind, "emainplace_mode": mode, "learning_rate": 0.1, "eps": 1e-6}


Shards = list[tuple[int, int, torch.Tensor]]
"""Row offset, column offset and the live local tensor of each shard."""


def shards_of(value: Any) -> Shards:
    """Return the shards of a value of TorchRec's state dict, by its own metadata."""
    if not hasattr(value, "local_shards"):
        return [(0, 0, value)]
    return [(*(*shard.metadata.shard_offsets, 0)[:2], shard.tensor) for shard in value.local_shards()]


def live_shards(model: Any, optimizer: Any) -> dict[str, dict[str, Shards]]:
    """Return by fqn and column (`weights` or a state) the shards that this rank has."""
    found = {fqn: {"weights": shards_of(value)} for fqn, value in model.state_dict().items() if "dense" not in fqn}
    states = dict(model.fused_optimizer.state_dict()["state"])
    if optimizer is not None:
        states |= optimizer.state_dict()["state"]
    for fqn, columns in found.items():
        for name, value in states.get(fqn, {}).items():
            name = name.split(".")[-1]
            if name in ("step", "iter", "mu_product"):
                continue
            shards = shards_of(value)
            if shards and shards[0][2].dim() == 1:
                # A rowwise state, of which each column shard has its own: TorchRec's offsets stack them.
                weights = columns["weights"]
                shards = [(row, column, shard[2]) for (row, column, _), shard in zip(weights, shards, strict=True)]
            columns[name] = shards
    return found


def copied_shards(model: Any, optimizer: Any = None) -> dict[str, dict[str, list[tuple[int, int, Any]]]]:
    """Return `live_shards` as they are now, as arrays, which travel to who puts them together by `whole_tables`."""
    return {
        fqn: {name: [(r, c, t.detach().clone().numpy()) for r, c, t in shards] for name, shards in columns.items()}
        for fqn, columns in live_shards(model, optimizer).items()
    }


def load_whole(model: Any, optimizer: Any, start: dict[str, dict[str, npt.NDArray[Any]]]) -> None:
    """Copy whole tables into the shards that are here."""
    with torch.no_grad():
        for fqn, columns in live_shards(model, optimizer).items():
            for name, shards in columns.items():
                whole = start[fqn]["weights" if name == "weights" else "state"]
                for row, column, tensor in shards:
                    rows = whole[row : row + tensor.shape[0]]
                    if tensor.dim() == 1:
                        tensor.copy_(torch.from_numpy(rows[:, 0].copy()))
                    else:
                        tensor.copy_(torch.from_numpy(rows[:, column : column + tensor.shape[1]].copy()))


def train_on_rank(rank: int, job: Job) -> dict[str, Any]:
    """Train and stream on one rank; return its shards, its step and what its tap had."""
    from headrace.streamer import RawEmbeddingStreamer
    from headrace.streamer.compare import compare_with_store

    model, optimizer = build(job)
    assert job.address is not None
    core = getattr(model.module, job.module)
    if job.start is not None:
        load_whole(model, optimizer, job.start)
    # Each step sends its rows, so that one that is missed is not sent by another step.
    with RawEmbeddingStreamer(job.address, run=job.run, freshness_s=0, max_cost_percent=100) as streamer:
        streamer.attach(
            model,
            optimizer,
            publish=job.publish,  # type: ignore[arg-type]
            send_share=job.send_share,
            states=job.states,
        )
        for step in range(job.num_steps):
            if optimizer is not None:
                optimizer.zero_grad()
            is_empty = step in job.idle_steps
            model(batch(core, job.seed + 1000 * step + rank, is_empty=is_empty)).backward()
            if optimizer is not None:
                optimizer.step()
            if job.flush_on_rank_0 and rank == 0 and step % 2:
                streamer.flush()
        num_waiting, num_owed = streamer.stats().num_waiting_rows, streamer.stats().num_owed_rows
        streamer.flush()
        dist.barrier()
        step, checkpoint = streamer.stats().step, streamer.state_dict()
        is_equal = job.states is True or compare_with_store(streamer.tables, job.address).is_equal
        parts = [(t.spec.fqn, t.row_offset, t.num_local_rows, t.shard.offset, t.shard.width) for t in streamer.tables]
    shards = copied_shards(model, optimizer)
    waiting = {"num_waiting": num_waiting, "num_owed": num_owed, "checkpoint": checkpoint}
    return {"shards": shards, "step": step, "parts": parts, "is_equal": is_equal, **waiting}


def train_jobs_on_rank(rank: int, jobs: list[Job]) -> list[dict[str, Any]]:
    """Train jobs one after the other; return what `train_on_rank` returns of each."""
    return [train_on_rank(rank, job) for job in jobs]


def whole_tables(results: list[dict[str, Any]]) -> dict[str, dict[str, npt.NDArray[Any]]]:
    """Put the weights and states of all ranks together; where ranks overlap they must be equal."""
    whole: dict[str, dict[str, npt.NDArray[Any]]] = {}
    extents: dict[tuple[str, str], tuple[int, int]] = {}
    pieces: list[tuple[str, str, int, int, npt.NDArray[Any]]] = []
    for result in results:
        for fqn, columns in result["shards"].items():
            for name, shards in columns.items():
                for row, column, values in shards:
                    if values.ndim == 1 and column:
                        continue  # of the copies of a rowwise state, the one of the lowest columns counts
                    values = values.reshape(values.shape[0], 1 if values.ndim == 1 else values.shape[1])
                    rows, width = extents.get((fqn, name), (0, 0))
                    extents[fqn, name] = max(rows, row + values.shape[0]), max(width, column + values.shape[1])
                    pieces.append((fqn, name, row, column, values))
    has: dict[tuple[str, str], npt.NDArray[np.bool_]] = {}
    for fqn, name, row, column, values in pieces:
        table = whole.setdefault(fqn, {})
        if name not in table:
            table[name] = np.zeros(extents[fqn, name], values.dtype)
            has[fqn, name] = np.zeros(extents[fqn, name], bool)
        at = (slice(row, row + values.shape[0]), slice(column, column + values.shape[1]))
        known = has[fqn, name][at]
        assert (table[name][at][known] == values[known]).all(), f"{fqn} {name}: ranks differ"
        table[name][at] = values
        has[fqn, name][at] = True
    for (fqn, name), mask in has.items():
        assert mask.all(), f"{fqn} {name}: no rank has {np.argwhere(~mask)[:3].tolist()}"
    return whole
