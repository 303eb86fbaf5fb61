"""What a trained collection returns, in which order and how computed, as its trainer says with the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.kernels.dtypes import TORCH_DTYPES
from headrace.schemas.errors import ConfigError
from headrace.schemas.table_uses import Divisor, Kind, Output, TableUse, decode_uses
from headrace.schemas.tables import DType, TableSpec

__all__ = ["CollectionOutput", "configured_outputs", "table_use", "trained_outputs"]


class _Table(Protocol):
    @property
    def fqn(self) -> str: ...

    @property
    def features(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class CollectionOutput:
    """One output of a collection.

    Attributes:
        table: Number of its table, as the collection was given them.
        feature: The feature that is looked up.
        name: Key of the output: the feature, with its table if several tables have it.
        use: How the trained module uses the table; None if the trainer does not say.
        divisor: By what pooled rows are divided.
    """

    table: int
    feature: str
    name: str
    use: TableUse | None = None
    divisor: Divisor = Divisor.NONE

    @property
    def is_sharded(self) -> bool:
        """Whether the trained module is TorchRec's sharded one."""
        return self.use is not None and self.use.is_sharded

    @property
    def dtype(self) -> torch.dtype:
        """Type of the output before it is divided."""
        return torch.float32 if self.use is None or self.use.dtype is None else TORCH_DTYPES[DType[self.use.dtype]]


def configured_outputs(tables: Sequence[_Table]) -> list[CollectionOutput]:
    """Return the outputs of an unsharded collection of TorchRec: in the order of its configuration."""
    counts: dict[str, int] = {}
    for feature in (feature for table in tables for feature in table.features):
        counts[feature] = counts.get(feature, 0) + 1
    outputs = []
    for number, table in enumerate(tables):
        name = table.fqn.removesuffix(".weight").rpartition(".")[2]
        outputs += [
            CollectionOutput(number, feature, feature if counts[feature] == 1 else f"{feature}@{name}")
            for feature in table.features
        ]
    return outputs


def trained_outputs(
    tables: Sequence[_Table], specs: Sequence[TableSpec], configured: Sequence[TableUse]
) -> list[CollectionOutput]:
    """Return the outputs of the collection that trains these tables, in its order.

    `specs` are those of the tables, and `configured` says how the given collection is configured to use each. Where
    the trainer says nothing of any of the tables, the outputs are those of the configuration.

    Raises:
        ConfigError: The trained collection is configured in another way, or what it returns cannot be computed here.
    """
    if all(spec.uses is None for spec in specs):
        return configured_outputs(tables)
    uses = [table_use(spec, use) for spec, use in zip(specs, configured, strict=True)]
    named: Mapping[tuple[int, str], CollectionOutput] = {
        (output.table, output.feature): output for output in configured_outputs(tables)
    }
    placed: list[tuple[int, CollectionOutput]] = []
    for number, use in enumerate(uses):
        for output in use.outputs:
            name = named[number, output.feature].name
            placed.append((output.position, CollectionOutput(number, output.feature, name, use, output.divisor)))
    placed.sort(key=lambda each: each[0])
    if [position for position, _ in placed] != list(range(len(placed))):
        raise ConfigError(
            f"the trained collection of table {specs[0].fqn!r} has other tables too, or its ranks are starting: give "
            "the model with all of its tables"
        )
    return [output for _, output in placed]


def table_use(spec: TableSpec, configured: TableUse) -> TableUse:
    """Return how the trained module uses a table, of a given one that is configured to use it so.

    Where the trainer does not say it, that is as configured.

    Raises:
        ConfigError: The trained module is configured in another way, or what it returns cannot be computed here.
    """
    if spec.uses is None:
        return configured
    what = f"table {spec.fqn!r}"
    uses = decode_uses(what, spec.uses)
    differences = [_difference(use, configured) for use in uses]
    if "" not in differences:
        raise ConfigError(f"{what}: {differences[0]}: build the model as the trainer does")
    use = uses[differences.index("")]
    if use.kernel_pooling == "parts":
        raise ConfigError(
            f"{what}: TorchRec's grid sharding adds the means that ranks have of their rows, which is not served: "
            "shard the table otherwise, or sum"
        )
    return use


def _difference(use: TableUse, configured: TableUse) -> str:
    """Return what the trained module has otherwise than a given one; empty if nothing.

    Not what only a sharded module has; and whether inputs are weighted does not matter to that.
    """
    if use.kind is not configured.kind:
        return f"the trainer has an {use.kind} of it, the model an {configured.kind}"
    names = ["pooling", "need_indices", *([] if use.is_sharded else ["is_weighted"])]
    if use.kind is Kind.BAG:  # only bags leave the padding out
        names.append("padding_idx")
    for name in names:
        if (theirs := getattr(use, name)) != (ours := getattr(configured, name)):
            return f"{name} is {theirs!r} in the trainer and {ours!r} in the model"
    theirs, ours = _features(use.outputs), _features(configured.outputs)
    return "" if theirs == ours else f"its features are {theirs} in the trainer and {ours} in the model"


def _features(outputs: Sequence[Output]) -> list[str]:
    return sorted(output.feature for output in outputs)
