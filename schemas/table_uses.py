"""How modules of the trained model use a table: what a served copy must know to return what they return."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headrace.schemas.errors import ConfigError

__all__ = ["Divisor", "Kind", "Output", "TableUse", "decode_uses", "encode_uses"]


class Kind(enum.StrEnum):
    """What kind of module uses a table. ON THE WIRE and ON DISK: never rename."""

    EMBEDDING = "Embedding"
    BAG = "EmbeddingBag"
    COLLECTION = "EmbeddingCollection"
    BAG_COLLECTION = "EmbeddingBagCollection"


class Divisor(enum.StrEnum):
    """By what a sharded module of TorchRec divides a pooled output. ON THE WIRE and ON DISK: never rename."""

    NONE = "none"
    ONE = "one"
    """1 + 10⁻⁶."""
    LENGTH = "length"
    """The number of the bag's ids, + 10⁻⁶."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """One output of a collection.

    Attributes:
        feature: Name of the feature that is looked up.
        position: Place among all outputs of the module, from 0.
        divisor: By what the pooled rows are divided.
    """

    feature: str
    position: int
    divisor: Divisor = Divisor.NONE


@dataclass(frozen=True, kw_only=True, slots=True)
class TableUse:
    """How one module of the trained model uses a table.

    Attributes:
        kind: What kind of module it is.
        is_sharded: It is TorchRec's sharded module. Its kernels compute in float32, and multiply rows by the weights of
            any input that has some.
        outputs: Of a collection, what it returns of this table, in the order of the table's features.
        pooling: `sum`, `mean` or `max`, as configured; None for a module that does not pool.
        kernel_pooling: How the kernels of a sharded module pool: `sum`, `mean`, or `parts`, the sum of what several
            ranks have as the mean of their ids. None for other modules.
        is_weighted: The module is configured for weighted inputs.
        need_indices: An `EmbeddingCollection` returns ids with the rows.
        padding_idx: Row of the padding; None without.
        dtype: Name of the output's `DType`; None for the table's.
    """

    kind: Kind
    is_sharded: bool = False
    outputs: tuple[Output, ...] = ()
    pooling: str | None = None
    kernel_pooling: str | None = None
    is_weighted: bool = False
    need_indices: bool = False
    padding_idx: int | None = None
    dtype: str | None = None


def encode_uses(uses: Iterable[TableUse]) -> str:
    """Return uses as the text that `TableSpec.uses` has. ON THE WIRE and ON DISK: only add fields with defaults."""
    return json.dumps([dataclasses.asdict(use) for use in uses], separators=(",", ":"), sort_keys=True)


def decode_uses(what: str, text: str) -> tuple[TableUse, ...]:
    """Return the uses of a text that `encode_uses` made. `what` names the table in errors.

    Raises:
        ConfigError: This release does not know all of it.
    """
    try:
        return tuple(_use(**fields) for fields in json.loads(text))
    except (ValueError, TypeError, KeyError) as exc:
        raise ConfigError(
            f"{what}: this release does not know how its trainer uses it ({exc}): install the trainer's release"
        ) from exc


def _use(*, kind: str, outputs: list[dict[str, Any]], **rest: Any) -> TableUse:
    return TableUse(kind=Kind(kind), outputs=tuple(_output(**output) for output in outputs), **rest)


def _output(*, divisor: str, **rest: Any) -> Output:
    return Output(divisor=Divisor(divisor), **rest)
