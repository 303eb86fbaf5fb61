"""A TorchRec model trained on several ranks under any sharding, streamed, and its whole tables as TorchRec has them.

Functions here run on a rank (see `ranks`); what they return is gathered and put together by `whole_tables`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from plain_tables import WHOLE, optimizer_of
from torch import nn
from torchrec_models import FUSED, fuse, parallel, plan_of

from headrace.kernels.dtypes import bits_of

__all__ = [
    "BAG_TABLES",
    "Job",
    "ShardedTables",
    "batch",
    "build",
    "copied",
    "everywhere",
    "go_on_on_rank",
    "live_shards",
]
__all__ += ["load_whole", "stream_on_rank", "whole_tables"]

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
        run: Name of the run, and of the model on the server.
        module: Path of the model in the root.
        shardings: By table: name of the sharding and its settings.
        optimizer: `sgd`, `adagrad` or `row-wise-adagrad`, fused; `torch-NAME` is one of `optimizer_names`, for
            data-parallel tables.
        optimizers: By table, where it is another one; also `averages`, which is EMAINPLACE.
        bag_tables: Rows and columns of pooled tables that there may be.
        num_steps: Steps.
        has_dense_optimizer: Whether the rest of the model has an optimizer, whose step ends a step.
        table_column_wise: Those of the column-wise tables whose columns are on one node.
    """

    run: str
    module: str
    shardings: dict[str, tuple[str, dict[str, Any]]]
    optimizer: str = "row-wise-adagrad"
    optimizers: dict[str, str] = field(default_factory=dict)
    bag_tables: dict[str, tuple[int, int]] = field(default_factory=lambda: BAG_TABLES)
    num_steps: int = 3
    has_dense_optimizer: bool = False
    table_column_wise: tuple[str, ...] = ()


def everywhere(kind: str, *names: str, **settings: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the shardings of a `Job` in which all of these tables have the same one."""
    return {name: (kind, settings) for name in names}


class SparseModel(nn.Module):
    """Bags and sequences with a dense layer over them.

    Attributes:
        sizes: Of the tables, by module and name.
    """

    def __init__(self, sizes: dict[str, dict[str, tuple[int, int]]]) -> None:
        super().__init__()
        import torchrec

        cpu = torch.device("cpu")
        for module, tables in sizes.items():
            is_sequence = module == "sequences"
            config = torchrec.EmbeddingConfig if is_sequence else torchrec.EmbeddingBagConfig
            configs = [
                config(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"{name}-0", f"{name}-1"])
                for name, (rows, dim) in tables.items()
            ]
            make = torchrec.EmbeddingCollection if is_sequence else torchrec.EmbeddingBagCollection
            self.add_module(module, make(tables=configs, device=cpu))
        self.sizes = sizes
        dims = [dim for module, tables in sizes.items() if module != "sequences" for _, dim in tables.values()]
        self.dense = nn.Linear(2 * sum(dims) or 1, 1)

    def forward(self, inputs: dict[str, Any]) -> torch.Tensor:
        pooled = [getattr(self, name)(inputs[name]).values() for name in self.sizes if name != "sequences"]
        loss = (
            (self.dense(torch.cat(pooled, 1)) - 1).pow(2).mean()
            if pooled
            else self.dense(torch.ones(1, 1)).pow(2).mean()
        )
        if "sequences" in self.sizes:
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
        inputs[kind] = torchrec.KeyedJaggedTensor(keys=keys, values=torch.cat(values), lengths=torch.cat(lengths))
    return inputs


def build(job: Job) -> tuple[Any, list[Any]]:
    """Return (model under `DistributedModelParallel`, torch optimizers)."""
    from torchrec.distributed import sharding_plan
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.optim.keyed import KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    torch.manual_seed(5)
    # Tables with optimizers of their own are modules of their own: those of one module share their memory, so that a
    # step of one optimizer is a write of somebody else's to the tables of another.
    sizes: dict[str, dict[str, tuple[int, int]]] = {}
    for name, size in (job.bag_tables | SEQUENCE_TABLES).items():
        if name in job.shardings:
            is_apart = job.optimizers.get(name, "").startswith("torch-")
            kind = "sequences" if name in SEQUENCE_TABLES else name if is_apart else "bags"
            sizes.setdefault(kind, {})[name] = size
    core = SparseModel(sizes)
    root = nn.Sequential()
    root.add_module(job.module, core)
    for name, parameter in core.named_parameters():
        optimizer = job.optimizers.get(name.split(".")[-2], job.optimizer)
        if "dense" not in name and optimizer in FUSED:
            fuse(optimizer, [parameter])
    fused = _averages() if "averages" in job.optimizers.values() else None
    bag_sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    sequence_sharder = EmbeddingCollectionSharder(fused_params=fused)
    made = {name: getattr(sharding_plan, kind)(**settings) for name, (kind, settings) in job.shardings.items()}
    plans = {
        f"{job.module}.{kind}": plan_of(
            getattr(core, kind),
            {name: made[name] for name in tables},
            sequence_sharder if kind == "sequences" else bag_sharder,
        )
        for kind, tables in sizes.items()
    }
    for module_plan in plans.values():
        for name, sharding in module_plan.items():
            # The planner's name for columns that stay on one node; there is no function that makes such a plan.
            if job.shardings[name][0] == "column_wise" and name in job.table_column_wise:
                sharding.sharding_type = "table_column_wise"
            if job.optimizers.get(name) == "averages":  # without an optimizer of its own it gets the dense kernel
                sharding.compute_kernel = "fused"
    model = parallel(root, plans, bag_sharder, sequence_sharder)
    groups: dict[str, dict[str, Any]] = {}
    for fqn, parameter in in_backward_optimizer_filter(model.named_parameters()):
        name = "dense" if ".dense." in fqn else job.optimizers.get(fqn.split(".")[-2], job.optimizer)
        if name.startswith("torch-") or (name == "dense" and job.has_dense_optimizer):
            groups.setdefault(name, {})[fqn] = parameter
    return model, [
        KeyedOptimizerWrapper(
            parameters,
            functools.partial(torch.optim.Adam, lr=0.01)
            if name == "dense"
            else functools.partial(optimizer_of, name.removeprefix("torch-")),
        )
        for name, parameters in groups.items()
    ]


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


def live_shards(model: Any, optimizers: Iterable[Any] = ()) -> dict[str, dict[str, Shards]]:
    """Return by fqn and column (`weights` or a state) the shards that this rank has."""
    found = {fqn: {"weights": shards_of(value)} for fqn, value in model.state_dict().items() if ".dense." not in fqn}
    states = dict(model.fused_optimizer.state_dict()["state"])
    for optimizer in optimizers:
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


def copied(shards: dict[str, dict[str, Shards]]) -> dict[str, dict[str, list[tuple[int, int, Any]]]]:
    """Return shards as they are now, as arrays, which travel to who puts them together by `whole_tables`."""
    return {
        fqn: {name: [(r, c, bits_of(t).copy()) for r, c, t in parts] for name, parts in columns.items()}
        for fqn, columns in shards.items()
    }


def load_whole(model: Any, optimizers: Iterable[Any], start: dict[str, dict[str, npt.NDArray[Any]]]) -> None:
    """Copy whole tables, as `whole_tables` returns them, into the shards that are here."""
    with torch.no_grad():
        for fqn, columns in live_shards(model, optimizers).items():
            if not columns["weights"]:
                continue
            # The only state of a table has other names in FBGEMM and TorchRec; those of several are equal.
            for (_, shards), (_, whole) in zip(sorted(columns.items()), sorted(start[fqn].items()), strict=True):
                for row, column, tensor in shards:
                    rows = torch.from_numpy(whole[row : row + tensor.shape[0]])
                    tensor.copy_(rows[:, 0] if tensor.dim() == 1 else rows[:, column : column + tensor.shape[1]])


class ShardedTables:
    """Trains a job's tables.

    Attributes:
        model, optimizers: As `attach` takes them.
        touched: Rows in batches so far, by table.
        whole: Tables of which a step may change every row.
    """

    def __init__(self, job: Job, *, is_blank: bool = False) -> None:
        self.model, self.optimizers = build(job)
        self._core, rank = getattr(self.model.module, job.module), dist.get_rank()
        self._seed = rank
        paths = {fqn.split(".")[-2]: fqn for fqn in live_shards(self.model)}
        self._paths = paths
        self.touched: dict[str, set[int]] = {fqn: set() for fqn in paths.values()}
        whole = {"averages", *(f"torch-{name}" for name in WHOLE)}
        self.whole = {fqn for name, fqn in paths.items() if job.optimizers.get(name, job.optimizer) in whole}
        if is_blank:
            for columns in live_shards(self.model, self.optimizers).values():
                for _, _, tensor in columns["weights"]:
                    tensor.detach().fill_(5)

    def train(self, step: int, *, is_idle: bool = False) -> float:
        """Train on the batch of a step and rank, which is empty in an idle one; return the loss."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        inputs = batch(self._core, 1000 * step + self._seed, is_empty=is_idle)
        for jagged in inputs.values():
            for key, ids in jagged.to_dict().items():
                self.touched[self._paths[key.rpartition("-")[0]]] |= set(ids.values().tolist())
        loss = self.model(inputs)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return float(loss.detach())

    def shards(self) -> dict[str, dict[str, Shards]]:
        """Return the live shards; states of an optimizer that is not known, which are not streamed, are left out."""
        shards = live_shards(self.model, self.optimizers)
        for fqn, columns in shards.items():
            if "lion" in fqn:
                columns.pop("exp_avg", None)
        return shards


def stream_on_rank(rank: int, address: str, job: Job) -> dict[str, Any]:
    """Stream a model, then train it on; return its shards before that, and the losses of that."""
    from headrace import RawEmbeddingStreamer

    trainer = ShardedTables(job)
    with RawEmbeddingStreamer(address, run=job.run, model=job.run) as streamer:
        streamer.attach(trainer.model, trainer.optimizers or None, publish="all")
        for step in range(job.num_steps):
            trainer.train(step)
        streamer.step()
        streamer.flush()
        dist.barrier()
    return {"shards": copied(trainer.shards())} | _trained_on(trainer, job)


def _trained_on(trainer: ShardedTables, job: Job) -> dict[str, Any]:
    losses = [trainer.train(step) for step in range(job.num_steps, 2 * job.num_steps)]
    return {"losses": losses, "end": copied(trainer.shards())}


def go_on_on_rank(
    rank: int, address: str | None, job: Job, start: dict[str, Any] | None = None, snapshot: str | None = None
) -> dict[str, Any]:
    """Restore a model, and stream it on; with a whole `start` train one that was loaded with that beside it."""
    from headrace import RawEmbeddingStreamer, restore

    trainer = ShardedTables(job, is_blank=True)
    report = restore(trainer.model, trainer.optimizers or None, address, snapshot=snapshot, model_name=job.run)
    result = {"report": report, "shards": copied(trainer.shards())}
    if address is None:
        return result | _trained_on(trainer, job)
    with RawEmbeddingStreamer(address, run=job.run, model=job.run) as streamer:
        streamer.attach(trainer.model, trainer.optimizers or None)
        result |= _trained_on(trainer, job)
        streamer.step()
        streamer.flush()
        dist.barrier()
    if start is not None:
        loaded = ShardedTables(job)
        load_whole(loaded.model, loaded.optimizers, start)
        result["expected"] = _trained_on(loaded, job)
    return result


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
