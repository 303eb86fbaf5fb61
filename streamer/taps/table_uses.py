"""How the modules of a trained model use their tables, for the copies that are served.

Source: `torchrec/modules/embedding_modules.py`, `torchrec/distributed/{embedding,embeddingbag}.py`, torchrec 1.8.0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch import nn

from headrace.kernels.dtypes import DTYPES
from headrace.kernels.module_walk import is_a
from headrace.schemas.table_uses import Divisor, Kind, Output, TableUse

__all__ = ["use_of_embedding", "uses_in_collection", "uses_in_sharded"]

# Shardings in which several ranks have rows of one table.
_OF_ROWS = ("row_wise", "table_row_wise")


def use_of_embedding(module: nn.Embedding | nn.EmbeddingBag) -> TableUse:
    """Return how a plain module uses its table."""
    if isinstance(module, nn.EmbeddingBag):
        return TableUse(kind=Kind.BAG, pooling=module.mode, padding_idx=module.padding_idx)
    return TableUse(kind=Kind.EMBEDDING, padding_idx=module.padding_idx)


def uses_in_collection(module: Any) -> dict[nn.Module, TableUse]:
    """Return how an unsharded collection uses its tables, by the modules in it that hold them; none of others."""
    if is_a(module, "EmbeddingBagCollection") and isinstance(getattr(module, "embedding_bags", None), nn.ModuleDict):
        configs, tables = module.embedding_bag_configs(), module.embedding_bags
    elif is_a(module, "EmbeddingCollection") and isinstance(getattr(module, "embeddings", None), nn.ModuleDict):
        configs, tables = module.embedding_configs(), module.embeddings
    else:
        return {}
    positions = itertools.count()
    return {
        tables[config.name]: _use(
            module, config, [Output(feature=name, position=next(positions)) for name in config.feature_names]
        )
        for config in configs
    }


def uses_in_sharded(path: str, module: Any) -> dict[str, TableUse]:
    """Return how the sharded collection at a path uses its tables, by their names: those on other ranks too."""
    if is_a(module, "ShardedEmbeddingBagCollection"):
        folder, configs, names = "embedding_bags", module._embedding_bag_configs, list(module._embedding_names)
        divisors = _divisors(module, names)
    else:
        folder, configs = "embeddings", module._embedding_configs
        names = [name for names in module._embedding_names_per_sharding for name in names]
        divisors = [Divisor.NONE] * len(names)
    counts: dict[str, int] = {}
    for feature in (feature for config in configs for feature in config.feature_names):
        counts[feature] = counts.get(feature, 0) + 1
    uses = {}
    for config in configs:
        outputs = []
        for feature in config.feature_names:
            position = names.index(feature if counts[feature] == 1 else f"{feature}@{config.name}")
            outputs.append(Output(feature=feature, position=position, divisor=divisors[position]))
        fqn = f"{path}.{folder}.{config.name}.weight" if path else f"{folder}.{config.name}.weight"
        uses[fqn] = _use(module, config, outputs, is_sharded=True)
    return uses


def _use(module: Any, config: Any, outputs: list[Output], *, is_sharded: bool = False) -> TableUse:
    dtype = _output_dtype(module, config.name) if is_sharded else "FLOAT32"
    if is_a(module, "ShardedEmbeddingCollection") or is_a(module, "EmbeddingCollection"):
        need_indices = module._need_indices if is_sharded else module.need_indices()
        return TableUse(
            kind=Kind.COLLECTION,
            is_sharded=is_sharded,
            outputs=tuple(outputs),
            need_indices=bool(need_indices),
            dtype=dtype,
        )
    pooling = config.pooling.value.lower()
    return TableUse(
        kind=Kind.BAG_COLLECTION,
        is_sharded=is_sharded,
        outputs=tuple(outputs),
        pooling=pooling,
        kernel_pooling=_kernel_pooling(module, config.name, pooling) if is_sharded else None,
        is_weighted=bool(module._is_weighted if is_sharded else module.is_weighted()),
        dtype=dtype,
    )


def _kernel_pooling(module: Any, name: str, pooling: str) -> str:
    sharding = module.module_sharding_plan[name].sharding_type
    if pooling == "mean" and sharding in _OF_ROWS:
        return "sum"  # divided afterwards
    return "parts" if pooling == "mean" and sharding == "grid_shard" else pooling


def _divisors(module: Any, names: list[str]) -> list[Divisor]:
    """Return by what each output is divided: with a mean over parts of rows in the module, all are.

    As `_create_mean_pooling_divisor` has it, that is 1 for the features of row-wise tables that are summed. The others
    are divided by the lengths of their bags, also those of tables that are not row-wise, whatever their pooling is.
    """
    if not module._has_mean_pooling_callback:
        return [Divisor.NONE] * len(names)
    features = [name for sharding in module._embedding_shardings for name in sharding.feature_names()]
    sums = {features.index(feature) for feature in module._pooling_type_to_rs_features.get("SUM", ())}
    if len(features) == len(names):
        places = range(len(names))
    else:
        places = [features.index(name.split("@")[0]) for name in names]  # type: ignore[assignment]
    return [Divisor.ONE if place in sums else Divisor.LENGTH for place in places]


def _output_dtype(module: Any, table: str) -> str:
    """Return the name of the type that a sharded module returns of a table, wherever its parts are."""
    shardings = getattr(module, "_embedding_shardings", None) or module._sharding_type_to_sharding.values()
    for sharding in shardings:
        for name, value in vars(sharding).items():
            if name.startswith("_grouped_embedding_configs"):
                for config in _configs_in(value):
                    if config.name == table:
                        output = (config.fused_params or {}).get("output_dtype")
                        return "FLOAT32" if output is None else DTYPES[output.as_dtype()].name
    raise AssertionError(f"table {table!r} is in no sharding")


def _configs_in(groups: Any) -> Iterator[Any]:
    """Yield the tables of groups, which may be in a list for each rank or node."""
    for group in groups:
        yield from group.embedding_tables if hasattr(group, "embedding_tables") else _configs_in(group)
