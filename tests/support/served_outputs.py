"""Collections of TorchRec under many shardings: what the trained module returns, and what is served in its place."""

from __future__ import annotations

import copy
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec_models import parallel, plan_of

__all__ = ["CASES", "Case", "Table", "compare_on_rank", "follow_on_rank"]

ROWS, BATCH = 23, 6


@dataclass(frozen=True)
class Table:
    """One table of a collection.

    Attributes:
        dim: Columns.
        sharding: Name of TorchRec's sharding, and its settings.
        features: Those looked up in it; None for one of the table's name.
        pooling: `SUM` or `MEAN`.
        data_type: Of its weights.
    """

    dim: int
    sharding: tuple[str, dict[str, Any]]
    features: tuple[str, ...] | None = None
    pooling: str = "SUM"
    data_type: str = "FP32"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A collection, how it is sharded, and its inputs.

    Attributes:
        world_size: Ranks.
        tables: By name.
        kind: `bags`, `rows`, `managed-bags` or `managed-rows`.
        is_weighted: The collection's setting.
        weights: Type of the weights of the inputs; None for inputs without.
        need_indices: An `EmbeddingCollection`'s setting.
        has_variable_batch: Features have batches of different sizes.
        output_dtype: Of fused parameters.
        is_exact: Weights are small multiples of 1/8, whose sums are exact in any order, and stay as they are.
        refusal: Part of the `ConfigError` with which it is refused; None if it is served.
        looks_refused: Part of the `RequestError` with which its inputs are refused.
    """

    world_size: int
    tables: dict[str, Table]
    kind: str = "bags"
    is_weighted: bool = False
    weights: str | None = None
    need_indices: bool = False
    has_variable_batch: bool = False
    output_dtype: str | None = None
    is_exact: bool = False
    refusal: str | None = None
    looks_refused: str | None = None


TW, TW_1, RW = ("table_wise", {"rank": 0}), ("table_wise", {"rank": 1}), ("row_wise", {})
CW, CW_2 = ("column_wise", {"ranks": [0, 0]}), ("column_wise", {"ranks": [1, 0]})
DP = ("data_parallel", {})
TWRW = ("table_row_wise", {"host_index": 0})
GRID = ("grid_shard", {"host_indexes": [0]})

_MIXED = {
    "a": Table(4, TW),
    "b": Table(8, RW),
    "c": Table(16, CW),
    "d": Table(4, TW, ("d0", "d1")),
    "e": Table(12, DP),
    "f": Table(8, RW),
}
_ON_TWO = {
    "a": Table(4, TW_1),
    "b": Table(8, RW),
    "c": Table(16, CW_2),
    "d": Table(4, TW, ("d0", "d1")),
    "e": Table(12, DP),
    "f": Table(8, TW),
}

CASES: dict[str, Case] = {
    "all-shardings": Case(world_size=1, tables=_MIXED),
    "sums-and-means-in-groups": Case(
        world_size=1,
        tables={
            "a": Table(4, TW),
            "b": Table(4, TW, pooling="MEAN"),
            "c": Table(8, TW),
            "d": Table(8, TW, pooling="MEAN"),
        },
    ),
    "data-types-in-groups": Case(
        world_size=1, tables={"a": Table(4, TW), "b": Table(8, TW, data_type="FP16"), "c": Table(4, TW)}
    ),
    "means-of-halves": Case(
        world_size=1, tables={"a": Table(8, TW, data_type="FP16", pooling="MEAN"), "b": Table(8, RW, data_type="FP16")}
    ),
    "row-wise-means-divide-all": Case(
        world_size=1,
        tables={
            "a": Table(4, RW, pooling="MEAN"),
            "b": Table(8, TW),
            "c": Table(4, TW, pooling="MEAN"),
            "d": Table(4, RW),
            "e": Table(8, CW, pooling="MEAN"),
        },
    ),
    "shared-features": Case(
        world_size=1,
        tables={"a": Table(4, CW, ("x", "y")), "b": Table(8, RW, ("y",)), "c": Table(4, TW, ("x",)), "d": Table(4, TW)},
    ),
    "shared-features-of-row-wise-means": Case(
        world_size=1,
        tables={
            "a": Table(4, RW, ("x",)),
            "b": Table(8, TW, ("x", "y"), pooling="MEAN"),
            "c": Table(4, RW, pooling="MEAN"),
        },
    ),
    "shared-columns-of-row-wise-means": Case(
        world_size=1,
        tables={
            "a": Table(8, CW, ("x", "y")),
            "b": Table(8, RW, ("x",)),
            "c": Table(4, RW, ("y", "z"), pooling="MEAN"),
        },
    ),
    "weighted": Case(world_size=1, tables=_MIXED, is_weighted=True, weights="float32"),
    "weights-unasked-for": Case(world_size=1, tables=_MIXED, weights="float32"),
    "weights-in-double": Case(world_size=1, tables=_MIXED, weights="float64"),
    "weights-of-halves": Case(world_size=1, tables={"a": Table(8, TW, data_type="FP16")}, weights="float32"),
    "weights-missing": Case(world_size=1, tables=_MIXED, is_weighted=True),
    "weights-of-means": Case(
        world_size=1,
        tables={"a": Table(8, TW, pooling="MEAN")},
        weights="float32",
        looks_refused="means of weighted rows",
    ),
    "weights-beside-row-wise-means": Case(
        world_size=1,
        tables={"a": Table(8, RW), "b": Table(8, RW, pooling="MEAN")},
        weights="float32",
        looks_refused="means of weighted rows",
    ),
    "output-in-halves": Case(
        world_size=1,
        tables={"a": Table(4, TW), "b": Table(8, RW), "c": Table(4, TW, pooling="MEAN")},
        output_dtype="FP16",
    ),
    "output-in-halves-divided": Case(
        world_size=1, tables={"a": Table(4, TW), "b": Table(8, RW, pooling="MEAN")}, output_dtype="FP16"
    ),
    "variable-batch": Case(
        world_size=1, tables={"a": Table(4, TW), "b": Table(8, RW), "c": Table(4, TW)}, has_variable_batch=True
    ),
    "rows": Case(
        world_size=1,
        kind="rows",
        tables={
            "a": Table(8, TW, ("x", "a")),
            "b": Table(8, RW, ("x",)),
            "c": Table(8, CW),
            "d": Table(8, TW, data_type="FP16"),
            "e": Table(8, TW),
        },
    ),
    "rows-with-indices": Case(
        world_size=1, kind="rows", tables={"a": Table(8, TW), "b": Table(8, RW), "c": Table(8, TW)}, need_indices=True
    ),
    "rows-in-halves": Case(
        world_size=1, kind="rows", tables={"a": Table(8, TW), "b": Table(8, RW), "c": Table(8, TW)}, output_dtype="FP16"
    ),
    "managed-bags": Case(
        world_size=1,
        kind="managed-bags",
        tables={"a": Table(4, RW), "b": Table(8, RW, data_type="FP16"), "c": Table(4, RW)},
    ),
    "managed-rows": Case(
        world_size=1,
        kind="managed-rows",
        tables={"a": Table(8, RW), "b": Table(8, RW, data_type="FP16"), "c": Table(8, RW)},
    ),
    "two-ranks": Case(world_size=2, tables=_ON_TWO, is_exact=True),
    "two-ranks-weights-unasked-for": Case(world_size=2, tables=_ON_TWO, weights="float32", is_exact=True),
    "two-ranks-of-tables": Case(
        world_size=2,
        tables={
            "a": Table(4, TW_1),
            "b": Table(8, TW),
            "c": Table(16, CW_2, ("x", "c")),
            "d": Table(4, TW_1, ("x",), pooling="MEAN"),
        },
    ),
    "two-ranks-of-means": Case(
        world_size=2,
        tables={
            "a": Table(4, TW_1),
            "b": Table(8, RW, pooling="MEAN"),
            "c": Table(4, TWRW, pooling="MEAN"),
            "d": Table(4, TW),
        },
        is_exact=True,
    ),
    "table-row-wise": Case(
        world_size=2, tables={"a": Table(4, TW_1), "b": Table(8, TWRW, ("x", "y")), "c": Table(8, TWRW)}, is_exact=True
    ),
    "grid": Case(world_size=2, tables={"a": Table(4, TW_1), "b": Table(16, GRID), "c": Table(8, TWRW)}, is_exact=True),
    "grid-of-means": Case(
        world_size=2, tables={"a": Table(4, TW_1), "b": Table(16, GRID, pooling="MEAN")}, is_exact=True, refusal="grid"
    ),
    "two-ranks-of-rows": Case(
        world_size=2,
        kind="rows",
        tables={"a": Table(8, TW_1, ("x", "a")), "b": Table(8, RW, ("x",)), "c": Table(8, CW_2), "d": Table(8, TW)},
        need_indices=True,
    ),
}


def _configs(case: Case) -> list[Any]:
    import torchrec
    from torchrec.modules.embedding_configs import DataType, PoolingType

    def begin(parameter: Any) -> Any:
        values = torch.randint(-16, 17, parameter.shape) / 8 if case.is_exact else torch.randn(parameter.shape)
        with torch.no_grad():
            return parameter.copy_(values)

    kind: Any = torchrec.EmbeddingBagConfig if case.kind.endswith("bags") else torchrec.EmbeddingConfig
    return [
        kind(
            name=name,
            num_embeddings=ROWS,
            embedding_dim=table.dim,
            feature_names=list(table.features or (name,)),
            data_type=DataType[table.data_type],
            init_fn=begin,
            **({"pooling": PoolingType[table.pooling]} if case.kind.endswith("bags") else {}),
        )
        for name, table in case.tables.items()
    ]


def plain_model(case: Case, device: str = "meta") -> nn.Module:
    """Return a model whose collection `sparse` is not sharded."""
    import torchrec

    configs, at = _configs(case), torch.device(device)
    if case.kind.endswith("bags"):
        collection: Any = torchrec.EmbeddingBagCollection(tables=configs, is_weighted=case.is_weighted, device=at)
    else:
        collection = torchrec.EmbeddingCollection(tables=configs, need_indices=case.need_indices, device=at)
    if case.kind.startswith("managed"):
        collection = _managed(collection, configs, is_bag=case.kind.endswith("bags"), device=at)
    return nn.ModuleDict({"sparse": collection})


def _managed(collection: Any, configs: list[Any], *, is_bag: bool, device: torch.device) -> Any:
    from torchrec.modules import mc_embedding_modules as managed
    from torchrec.modules.mc_modules import (
        DistanceLFU_EvictionPolicy,
        ManagedCollisionCollection,
        MCHManagedCollisionModule,
    )

    modules = {
        config.name: MCHManagedCollisionModule(
            zch_size=ROWS, device=device, eviction_interval=1, eviction_policy=DistanceLFU_EvictionPolicy()
        )
        for config in configs
    }
    make: Any = (
        managed.ManagedCollisionEmbeddingBagCollection if is_bag else managed.ManagedCollisionEmbeddingCollection
    )
    return make(collection, ManagedCollisionCollection(modules, configs), return_remapped_features=False)


def features_of(case: Case, seed: int) -> Any:
    """Return inputs of a case: bags of 0 to 4 ids."""
    import torchrec

    generator = torch.Generator().manual_seed(seed)
    names = list(dict.fromkeys(name for key, table in case.tables.items() for name in table.features or (key,)))
    names = names[::-1]  # other than the tables' order
    sizes = [BATCH - number % 2 if case.has_variable_batch else BATCH for number in range(len(names))]
    lengths = torch.cat([torch.randint(0, 5, (size,), generator=generator) for size in sizes])
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    weights = None
    if case.weights is not None:
        weights = (torch.randint(1, 9, ids.shape, generator=generator) / 4).to(getattr(torch, case.weights))
    more: dict[str, Any] = {}
    if case.has_variable_batch:
        more["stride_per_key_per_rank"] = [[size] for size in sizes]
        inverse = [torch.arange(BATCH) % size for size in sizes]
        more["inverse_indices"] = (names, torch.stack(inverse))
    return torchrec.KeyedJaggedTensor(keys=names, values=ids, lengths=lengths.int(), weights=weights, **more)


def _train(case: Case, address: str, model: str) -> Any:
    """Train and stream a case's model; return it."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from torchrec.distributed import sharding_plan
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
    from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
    from torchrec.optim.keyed import KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    from headrace.streamer import RawEmbeddingStreamer

    torch.manual_seed(3)
    fused: dict[str, Any] = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.125}
    if case.output_dtype is not None:
        fused["output_dtype"] = SparseType[case.output_dtype]
    sharders: dict[str, Any] = {
        "bags": EmbeddingBagCollectionSharder(fused_params=fused),
        "rows": EmbeddingCollectionSharder(fused_params=fused),
        "managed-bags": ManagedCollisionEmbeddingBagCollectionSharder(
            EmbeddingBagCollectionSharder(fused_params=fused)
        ),
        "managed-rows": ManagedCollisionEmbeddingCollectionSharder(EmbeddingCollectionSharder(fused_params=fused)),
    }
    root, sharder = plain_model(case, "cpu"), sharders[case.kind]
    made = {name: getattr(sharding_plan, t.sharding[0])(**t.sharding[1]) for name, t in case.tables.items()}
    plan = plan_of(root.get_submodule("sparse"), made, sharder)
    for sharding in plan.values():
        if sharding.sharding_type != "data_parallel":  # by default the kernel is another one
            sharding.compute_kernel = "fused"
    dmp = parallel(root, {"sparse": plan}, sharder)
    rest = {name: each for name, each in in_backward_optimizer_filter(dmp.named_parameters())}
    optimizer = KeyedOptimizerWrapper(rest, lambda given: torch.optim.SGD(given, lr=0.125)) if rest else None
    with RawEmbeddingStreamer(address, run=model, model=model) as streamer:
        streamer.attach(dmp, optimizer or (), publish="all")
        for step in range(3):
            loss = _values(dmp.module["sparse"](features_of(case, step))).float().sum() * (0 if case.is_exact else 0.1)
            loss.backward()
            if optimizer is not None:
                optimizer.step()
            streamer.step()
        streamer.flush()
        dist.barrier()
        dmp.end = (streamer.epoch, streamer.stats().step)
    return dmp


def _first(output: Any) -> Any:
    """Return the rows that a module has returned, and not the ids beside them, once they are there."""
    output = output[0] if isinstance(output, tuple) else output
    return output.wait() if hasattr(output, "wait") else output


def _values(output: Any) -> torch.Tensor:
    output = _first(output)
    return torch.cat([each.values() for each in output.values()]) if isinstance(output, dict) else output.values()


def _difference(trained: Any, served: Any) -> str:
    """Return how a served output differs from the trained one, in anything; empty if it does not."""
    trained, served = _first(trained), _first(served)
    if isinstance(trained, dict):
        if list(trained) != list(served):
            return f"keys {list(served)}, trained {list(trained)}"
        for name, part in trained.items():
            other = served[name]
            ours, theirs = part.weights_or_none(), other.weights_or_none()
            if not torch.equal(part.lengths(), other.lengths()) or (ours is None) != (theirs is None):
                return f"{name}: lengths or weights"
            if ours is not None and not (ours.dtype == theirs.dtype and torch.equal(ours, theirs)):
                return f"{name}: weights {theirs}, trained {ours}"
            if part.values().dtype != other.values().dtype or not torch.equal(part.values(), other.values()):
                return f"{name}: values"
        return ""
    if trained.keys() != served.keys() or list(trained.length_per_key()) != list(served.length_per_key()):
        return f"keys {served.keys()} {served.length_per_key()}, trained {trained.keys()} {trained.length_per_key()}"
    if trained.values().dtype != served.values().dtype:
        return f"{served.values().dtype}, trained {trained.values().dtype}"
    off = {key: float((trained[key] - served[key]).abs().max()) for key in trained.keys()}  # noqa: SIM118
    return "" if torch.equal(trained.values(), served.values()) else f"values differ, by {off}"


def compare_on_rank(rank: int, cases: dict[str, Case], address: str) -> dict[str, str]:
    """Train cases, and compare on rank 0 what is served with what the trained modules return; return what differs."""
    return {name: _compare(rank, name, case, address) for name, case in cases.items()}


def follow_on_rank(rank: int, cases: list[Case], address: str) -> list[str]:
    """Train cases one after the other as one model; return how one served model differs from each of them."""
    from headrace.paramserver.replica import EmbeddingReplica, serve_model

    problems: list[str] = []
    served: Any = None
    with ExitStack() as stack, torch.no_grad():
        for case in cases:
            with torch.enable_grad():
                dmp = _train(case, address, "follow")
            if served is None:
                replica = stack.enter_context(EmbeddingReplica(address, model="follow"))
                served = serve_model(plain_model(case), replica)
            else:
                replica.wait_for(dmp.end[1], 60.0, epoch=dmp.end[0])
            probe = features_of(case, 77)
            trained = _first(dmp.eval().module["sparse"](copy.deepcopy(probe)))
            problems.append(_difference(trained, served["sparse"](probe)))
    return problems


def _compare(rank: int, name: str, case: Case, address: str) -> str:
    from headrace.paramserver.replica import EmbeddingReplica, serve_model
    from headrace.schemas.errors import ConfigError, RequestError

    try:
        dmp = _train(case, address, name)
        probe = features_of(case, 77)
        with torch.no_grad():
            trained = _first(dmp.eval().module["sparse"](copy.deepcopy(probe)))
        if rank:
            return ""
        problems = []
        with EmbeddingReplica(address, model=name) as replica, torch.no_grad():
            given = {"the plain model": plain_model(case)}
            if not case.kind.startswith("managed") or dist.get_world_size() == 1:
                given["the dmp"] = dmp
            for what, model in given.items():
                expected: Any = (case.refusal, ConfigError) if case.refusal else (case.looks_refused, RequestError)
                try:
                    served: Any = serve_model(model, replica, model=name)
                    difference = _difference(trained, served["sparse"](copy.deepcopy(probe)))
                    if expected[0] is not None:
                        difference = "was not refused"
                except (ConfigError, RequestError) as exc:
                    is_meant = isinstance(exc, expected[1]) and expected[0] is not None and expected[0] in str(exc)
                    difference = "" if is_meant else f"{type(exc).__name__}: {exc}"
                if difference:
                    problems.append(f"{what}: {difference}")
    except Exception:
        return traceback.format_exc()
    return "; ".join(problems)
