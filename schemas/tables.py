"""Table specs: element types, optimizer states, column shards, and the fingerprint that stands for a spec."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from headrace.schemas.errors import RequestError, RowRangeError, SpecMismatchError
from headrace.schemas.routing import table_seed

__all__ = [
    *("MAX_DENSE_DIM", "MAX_DIM", "MAX_DIMENSIONS", "RUNTIME_META", "ColumnShard", "DType", "StateKind", "StateSpec"),
    *("TableSpec", "as_ids", "mismatch", "row_ids_of"),
]

# ON DISK: never raise it; a column offset and a width share 32 bits of a row key.
MAX_DIM = 65_535
# Elements of a dense tensor in one row: long enough that row keys cost little, short enough for any frame.
MAX_DENSE_DIM = 1024
# Dimensions of a dense tensor: torch's own bound for most operations. Products of many sizes take seconds.
MAX_DIMENSIONS = 64
# ON THE WIRE and ON DISK: name of the rowwise state that holds what zero-collision hashing keeps with a row's raw id.
RUNTIME_META = "runtime_meta"
_MAX_NAME_BYTES = 1024


class DType(enum.IntEnum):
    """Element type of a column. ON THE WIRE and ON DISK: never renumber."""

    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    FLOAT64 = 4
    INT64 = 5
    INT32 = 6
    UINT8 = 7
    BOOL = 8
    INT16 = 9
    INT8 = 10

    @property
    def size_bytes(self) -> int:
        """Size of one element."""
        return self.numpy.itemsize

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """Little-endian numpy type of one element; uint16 for bfloat16, which numpy lacks."""
        return _NUMPY[self]

    def is_finite(self, column: npt.NDArray[np.generic]) -> bool:
        """Return whether no element of a column, of the type `numpy` and any shape, is NaN or infinite."""
        if self is DType.BFLOAT16:
            return not bool(np.any((column.view(np.uint16) & np.uint16(0x7F80)) == np.uint16(0x7F80)))
        if column.dtype.kind != "f":
            return True
        return bool(np.isfinite(column).all())


_NUMPY: dict[DType, np.dtype[np.generic]] = {
    DType.FLOAT32: np.dtype("<f4"),
    DType.FLOAT16: np.dtype("<f2"),
    DType.BFLOAT16: np.dtype("<u2"),
    DType.FLOAT64: np.dtype("<f8"),
    DType.INT64: np.dtype("<i8"),
    DType.INT32: np.dtype("<i4"),
    DType.UINT8: np.dtype("u1"),
    DType.BOOL: np.dtype("?"),
    DType.INT16: np.dtype("<i2"),
    DType.INT8: np.dtype("i1"),
}


class StateKind(enum.IntEnum):
    """Whether a state has one value per weight or per row. ON THE WIRE and ON DISK: never renumber."""

    POINTWISE = 1
    """As wide as the weights of the same column shard."""
    ROWWISE = 2
    """`width` elements per row for any shard; each column shard carries its own copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpec:
    """One optimizer state of a row, or its runtime meta.

    Attributes:
        name: The optimizer's name for it, such as `momentum1` or `exp_avg`; `RUNTIME_META` for runtime meta.
        kind: Pointwise or rowwise.
        dtype: Element type.
        width: Elements per row if rowwise, ≥ 1; 0 if pointwise.
    """

    name: str
    kind: StateKind
    dtype: DType
    width: int = 0

    def __post_init__(self) -> None:
        _check_name("state name", self.name)
        if self.kind is StateKind.POINTWISE and self.width != 0:
            raise RequestError(f"state {self.name!r}: a pointwise state has width 0, not {self.width}")
        if self.kind is StateKind.ROWWISE and not 1 <= self.width <= MAX_DIM:
            raise RequestError(f"state {self.name!r}: width {self.width} is not in 1..{MAX_DIM}")

    def width_in(self, shard: ColumnShard) -> int:
        """Return the elements per row of this state in a column shard."""
        return shard.width if self.kind is StateKind.POINTWISE else self.width


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class ColumnShard:
    """The columns `offset` to `offset + width - 1` of a table.

    Attributes:
        offset: First column, ≥ 0.
        width: Number of columns, ≥ 1.
    """

    offset: int
    width: int

    def overlaps(self, other: ColumnShard) -> bool:
        """Return whether two column shards have a column in common."""
        return self.offset < other.offset + other.width and other.offset < self.offset + self.width


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSpec:
    """One whole embedding table, or a dense tensor as rows; it does not say how trainers shard it.

    Attributes:
        fqn: Fully qualified name of the weight parameter, as in the model's `state_dict`.
        num_rows: Rows of the unsharded table; 0 for virtual ids: any id from 0 to 2⁶³ - 1.
        dim: Columns, 1 to 65 535.
        dtype: Element type of the weights.
        states: Optimizer states, and the runtime meta if rows have some, in the order of their columns in records.
        has_identities: Each row has an identity, the raw id (int64) that is mapped to it.
        shape: Shape of a dense tensor, whose elements in row-major order fill the rows, the last one with zeros behind
            them; pointwise states are laid out alike. None for an embedding table.
        uses: How the trained model's modules use the table, as `encode_uses` has it; None where the trainer does not
            say. It is no part of what the table is: specs that differ in nothing else are equal.
        fingerprint: Signed 64-bit digest of all other fields but `uses`; equal specs have equal fingerprints in every
            process and version.
    """

    fqn: str
    num_rows: int
    dim: int
    dtype: DType
    states: tuple[StateSpec, ...] = ()
    has_identities: bool = False
    shape: tuple[int, ...] | None = None
    uses: str | None = field(default=None, repr=False, compare=False)
    # Computed once, because hellos and statuses read it for thousands of tables.
    fingerprint: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_name("table name", self.fqn)
        if not 0 <= self.num_rows < 2**63:
            raise RequestError(f"table {self.fqn!r}: num_rows {self.num_rows} is not in 0..2^63-1")
        if not 1 <= self.dim <= MAX_DIM:
            raise RequestError(f"table {self.fqn!r}: dim {self.dim} is not in 1..{MAX_DIM}")
        names = [state.name for state in self.states]
        if len(set(names)) != len(names):
            raise RequestError(f"table {self.fqn!r}: state names repeat: {', '.join(names)}")
        if self.shape is not None:
            self._check_shape(self.shape)
        object.__setattr__(self, "fingerprint", self._digest())

    @classmethod
    def of_tensor(
        cls, fqn: str, shape: Sequence[int], dtype: DType, *, states: tuple[StateSpec, ...] = ()
    ) -> TableSpec:
        """Return the spec of a dense tensor of at least one element, in rows of at most `MAX_DENSE_DIM`.

        Raises:
            RequestError: The tensor has no elements or too many dimensions, or a state does not fit.
        """
        _check_dimensions(fqn, shape)
        num_elements = math.prod(shape)
        dim = max(1, min(num_elements, MAX_DENSE_DIM))
        num_rows = -(-num_elements // dim)
        return cls(fqn=fqn, num_rows=num_rows, dim=dim, dtype=dtype, states=states, shape=tuple(shape))

    @property
    def seed(self) -> int:
        """What the hash that routes rows to shards begins with, 0 to 2⁶⁴ - 1."""
        return table_seed(self.fqn)

    @property
    def is_dense(self) -> bool:
        """Whether this is a dense tensor and no embedding table."""
        return self.shape is not None

    @property
    def runtime_meta(self) -> StateSpec | None:
        """The state that holds the runtime meta of rows; None if they have none."""
        return next((state for state in self.states if state.name == RUNTIME_META and state.width), None)

    @property
    def num_elements(self) -> int:
        """Elements of the weights, without the zeros at the end of a dense tensor's last row."""
        return self.num_rows * self.dim if self.shape is None else math.prod(self.shape)

    @property
    def whole(self) -> ColumnShard:
        """All columns."""
        return ColumnShard(offset=0, width=self.dim)

    @property
    def of_weights(self) -> TableSpec:
        """The same table without optimizer states and identities, as replicas report it."""
        return dataclasses.replace(self, states=(), has_identities=False)

    def described(self, uses: str | None) -> TableSpec:
        """Return the same table with other `uses`."""
        return dataclasses.replace(self, uses=uses)

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        _check_dimensions(self.fqn, shape)
        if any(not 0 < size < 2**63 for size in shape):
            raise RequestError(f"dense tensor {self.fqn!r}: shape {list(shape)} has a size that is not in 1..2^63-1")
        if not 0 <= self.num_rows * self.dim - math.prod(shape) < self.dim:
            raise RequestError(
                f"dense tensor {self.fqn!r}: shape {list(shape)} does not fill {self.num_rows} rows of {self.dim}"
            )
        if self.has_identities or any(state.kind is not StateKind.POINTWISE for state in self.states):
            raise RequestError(f"dense tensor {self.fqn!r}: it has identities or states of another shape")

    def _digest(self) -> int:
        fields: list[Any] = [
            self.fqn,
            self.num_rows,
            self.dim,
            int(self.dtype),
            [[state.name, int(state.kind), int(state.dtype), state.width] for state in self.states],
            self.has_identities,
        ]
        if self.shape is not None:
            fields.append(list(self.shape))
        # ON THE WIRE and ON DISK: never change the fields, their order or the digest.
        digest = hashlib.sha256(msgpack.packb(fields, use_bin_type=True)).digest()
        return int.from_bytes(digest[:8], "little", signed=True)

    def describe_difference(self, other: TableSpec) -> str:
        """Return a short text on how `other` differs from this spec; empty if it does not."""
        differences = []
        of_rows = () if self.is_dense and other.is_dense else ("num_rows", "dim")  # a shape says them too
        for name in ("fqn", *of_rows, "has_identities", "shape"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                differences.append(f"{name} {mine} ≠ {theirs}")
        if self.dtype != other.dtype:
            differences.append(f"dtype {self.dtype.name} ≠ {other.dtype.name}")
        if self.states != other.states:
            mine, theirs = (
                ", ".join(f"{s.name}:{s.kind.name}:{s.dtype.name}:{s.width}" for s in spec.states) or "none"
                for spec in (self, other)
            )
            differences.append(f"states [{mine}] ≠ [{theirs}]")
        return "; ".join(differences)

    def is_growth_of(self, other: TableSpec) -> bool:
        """Return whether this is the same embedding table with more rows; both have a number of rows."""
        is_larger = self.shape is None and 0 < other.num_rows < self.num_rows
        return is_larger and dataclasses.replace(self, num_rows=other.num_rows) == other

    def has_rows_like(self, other: TableSpec) -> bool:
        """Return whether a reader of another table can read this one: rows, dim and type."""
        kind, its = ((s.dim, s.dtype, s.has_identities, s.num_rows == 0) for s in (self, other))
        return kind == its and self.num_rows >= other.num_rows

    def check_row_ids(self, row_ids: npt.NDArray[np.int64]) -> None:
        """Check that every id, int64[n] in any order, is a row of this table.

        Raises:
            RowRangeError: One is not; the message names it.
        """
        if not row_ids.size:
            return
        limit = self.num_rows or 2**63
        # As unsigned numbers, negative ids are the highest. `max` would cost more than the `reduce` that it calls when
        # a batch has only a few rows of a table.
        if int(np.maximum.reduce(row_ids.view(np.uint64))) >= limit:
            lowest, highest = int(row_ids.min()), int(row_ids.max())
            bad = lowest if lowest < 0 else highest
            raise RowRangeError(f"table {self.fqn!r}: row id {bad} is not in 0..{limit - 1}")


def mismatch(pairs: Sequence[tuple[TableSpec, TableSpec]]) -> SpecMismatchError:
    """Return the error for tables with other specs, given as (registered, yours); it says what to do."""
    stateless = [yours.fqn for known, yours in pairs if yours == dataclasses.replace(known, states=yours.states)]
    if len(stateless) == len(pairs) and not any(known.states for known, _ in pairs):
        return SpecMismatchError(
            f"{', '.join(map(repr, stateless))}: stored without optimizer states, as after a backfill of weights "
            "alone, and yours has some: attach with states=False, or after restore(states=False) drop what is stored "
            f"(headrace table drop {' '.join(stateless)}) and attach, which sends every row with its states"
        )
    listed = ", ".join(f"{known.fqn!r} ({known.describe_difference(spec)})" for known, spec in pairs)
    return SpecMismatchError(
        f"{'a table differs' if len(pairs) == 1 else f'{len(pairs)} tables differ'} from the server's (registered ≠ "
        f"yours): {listed}; a table's shape is fixed, except for more rows: give the changed model another name, as in "
        'RawEmbeddingStreamer(..., model="other name"), serve both, then drop the tables of the old one '
        "(headrace table drop)"
    )


def as_ids(given: Any, what: str = "ids") -> npt.NDArray[np.int64]:
    """Return ids as a contiguous int64 array of their shape, which may share the caller's memory.

    Args:
        given: Integers of any shape and type: a list, an array, or a torch tensor on any device.
        what: Name of the ids in error messages.

    Raises:
        RequestError: They are not integers. Masks are refused: cast to int64, a mask would name rows 0 and 1.
    """
    try:
        # Accepts torch tensors without importing torch.
        ids = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
    except (TypeError, ValueError) as exc:  # ragged lists, and types that numpy lacks
        raise RequestError(f"{what} of a {type(given).__name__} are not integers: {exc}".split("\n")[0]) from exc
    if ids.size and ids.dtype.kind not in "iu":
        advice = "; pass mask.nonzero() instead of a mask" if ids.dtype.kind == "b" else ""
        raise RequestError(f"{what} are {ids.dtype}, not integers{advice}")
    if ids.size and ids.dtype == np.uint64 and int(ids.max()) >= 2**63:
        raise RequestError(f"{what}: {ids.max()} is beyond 2**63 - 1")
    return np.asarray(ids, np.int64, order="C")


def row_ids_of(given: Any, what: str = "row ids") -> npt.NDArray[np.int64]:
    """Return ids as `as_ids` does, int64[n]."""
    return as_ids(given, what).reshape(-1)


def _check_dimensions(fqn: str, shape: Sequence[int]) -> None:
    if len(shape) > MAX_DIMENSIONS:
        raise RequestError(f"dense tensor {fqn!r} has {len(shape)} dimensions, more than {MAX_DIMENSIONS}")


def _check_name(what: str, name: str) -> None:
    try:
        num_bytes = len(name.encode())
    except UnicodeEncodeError as exc:
        raise RequestError(f"{what} {name[:40]!r} has an unpaired surrogate") from exc
    if not name or num_bytes > _MAX_NAME_BYTES or min(name) < " ":
        raise RequestError(f"{what} {name[:40]!r} is empty, over {_MAX_NAME_BYTES} bytes or has control characters")
