"""Read a snapshot for export: tables, of the selected rows and columns in the requested types; whole dense tensors."""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.snapshots.contents import SnapshotReader
from headrace.paramserver.snapshots.dense_part import read_dense_part
from headrace.paramserver.store.catalog import Scalar, pack_spec
from headrace.schemas.errors import ConfigError, CorruptionError
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.table_names import path_of
from headrace.schemas.tables import DType, StateKind, TableSpec
from headrace.schemas.version import MAX_EPOCH, is_newer

__all__ = ["ExportConfig", "ExportRows", "ExportTable", "ExportTensor", "file_name_of", "tensors_of"]

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]
_FLOATS = {"fp32": DType.FLOAT32, "fp16": DType.FLOAT16}
_INT8_EXTRA_BYTES = 8  # scale and bias of each row
_MAX_NAME_BYTES = 255  # in Linux file systems


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig:
    """The rows and columns to export."""

    first_row: int = 0  # lowest row id
    end_row: int | None = None  # end of the row ids, exclusive; None for the table's end
    since_step: int | None = None  # only rows last updated at this step or later; None for all
    since_epoch: int | None = None  # epoch of that step, None for the snapshot's; rows of later epochs are later
    precision: str | None = None  # type of the weights: `fp32`, `fp16`, `int8`, or None for the table's own
    with_states: bool = False  # include optimizer states

    def __post_init__(self) -> None:
        if self.first_row < 0 or (self.end_row is not None and self.end_row <= self.first_row):
            raise ConfigError(f"--rows {self.first_row}:{self.end_row}: no rows are in there")
        if self.end_row is not None and self.end_row > 2**63:
            raise ConfigError(f"--rows {self.first_row}:{self.end_row}: row ids end below 2^63")
        if self.since_epoch is not None and self.since_step is None:
            raise ConfigError("--since-epoch goes with --since-step: it says whose step that is")
        if self.precision not in (None, "fp32", "fp16", "int8"):
            raise ConfigError(f"--dtype {self.precision!r}: fp32, fp16 or int8")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExportRows:
    """Some rows, ascending by id."""

    row_ids: _Ids  # int64[n]
    columns: dict[str, _Array]  # by field, [n, width], contiguous
    epochs: _Ids  # int64[n]
    steps: _Ids  # int64[n]
    times_us: _Ids  # int64[n]
    identities: _Ids | None  # int64[n] if the table has them


class ExportTable:
    """A table of a snapshot.

    Attributes:
        spec: Spec that a backfill gives it, with the exported type and states.
        precision: `int8` if the weights are bytes with scale and bias, else None.
        first_row: Lowest row id.
        end_row: End of the row ids, exclusive; None for virtual ids.
        fields: Element type and width of `weights` and each `state:NAME`, as exported.
        num_rows_read: Rows that the last call of `rows` has yielded.
    """

    def __init__(self, reader: SnapshotReader, fqn: str, config: ExportConfig, *, name: str | None = None) -> None:
        """Check that a snapshot's table can be exported so, under another name if one is given.

        Raises:
            ConfigError: The table has no such rows, its type cannot be converted, or the epoch of the step is unknown.
        """
        source, part = reader.tables[fqn], reader.manifest.parts[0]
        self._since_epoch = part.epoch if config.since_epoch is None else config.since_epoch
        if config.since_epoch is None and config.since_step is not None and config.since_step > part.step:
            where = f"epoch {part.epoch}, step {part.step}" if part.step >= 0 else "no common step"
            raise ConfigError(
                f"--since-step {config.since_step}: the snapshot is at {where}; say with --since-epoch of which epoch "
                "the step is"
            )
        self._reader, self._source, self._config = reader, source, config
        self.precision = "int8" if config.precision == "int8" else None
        dtype = _FLOATS.get(config.precision or "", source.dtype)
        if config.precision is not None and source.dtype not in _TO_FLOAT32:
            raise ConfigError(f"--dtype {config.precision}: table {fqn!r} holds {source.dtype.name}")
        states = source.states if config.with_states else ()
        self.spec = replace(source, fqn=name or fqn, dtype=dtype, states=states)
        self._scalars = list(reader.scalars(fqn).values()) if config.with_states else []
        self.num_rows_read = 0
        self.first_row = config.first_row
        self.end_row = config.end_row if config.end_row is not None else source.num_rows or None
        if source.num_rows and (self.end_row or 0) > source.num_rows:
            raise ConfigError(f"--rows {self.first_row}:{self.end_row}: table {fqn!r} has {source.num_rows} rows")
        if self.end_row is not None and self.end_row <= self.first_row:
            raise ConfigError(f"--rows {self.first_row}: table {fqn!r} has {source.num_rows} rows")
        layout = RecordLayout(self.spec, self.spec.whole)
        self.fields = {name: (column.dtype, column.width) for name, column in layout.columns.items()}
        if self.precision == "int8":
            self.fields["weights"] = (DType.UINT8, source.dim + _INT8_EXTRA_BYTES)

    @property
    def num_rows(self) -> int:
        """Size of the range; rows in it may be missing. REQUIRES: `end_row` is not None."""
        assert self.end_row is not None
        return self.end_row - self.first_row

    @property
    def num_rows_estimate(self) -> int:
        """Estimated number of rows."""
        estimate = self._reader.num_rows_estimate(self._source.fqn)
        return estimate if self.end_row is None else min(estimate, self.num_rows)

    @property
    def row_bytes(self) -> int:
        """Bytes of an exported row's columns."""
        return sum(dtype.size_bytes * width for dtype, width in self.fields.values())

    def shape_of(self, field: str) -> list[int]:
        """Return the shape of a column over the whole range; a rowwise state of one element has one dimension."""
        width = self.fields[field][1]
        rowwise = {f"state:{state.name}" for state in self.spec.states if state.kind is StateKind.ROWWISE}
        return [self.num_rows] if width == 1 and field in rowwise else [self.num_rows, width]

    def note(self, names: dict[str, str], identities: str | None) -> dict[str, Any]:
        """Return the note that a backfill reads, with the tensors' names by field, and that of the identities."""
        return {
            "spec": pack_spec(self.spec),
            "first_row": self.first_row,
            "precision": self.precision,
            "weights": names["weights"],
            "states": {field.removeprefix("state:"): name for field, name in names.items() if field != "weights"},
            "identities": identities,
            "scalars": _note_of(self._scalars),
        }

    def rows(
        self, fields: list[str] | None = None, *, on_rows: Callable[[int], None] | None = None
    ) -> Iterator[ExportRows]:
        """Yield the rows, some megabytes at a time.

        Args:
            fields: Only these columns; None for all.
            on_rows: Called with the number of rows just read.

        Raises:
            CorruptionError: A file of the snapshot is damaged.
            StorageError: A file cannot be read.
        """
        config = self._config
        self.num_rows_read = 0
        for ids, records in self._reader.rows(self._source.fqn, first_row=self.first_row, end_row=self.end_row):
            if on_rows is not None:
                on_rows(ids.size)
            if config.since_step is not None:
                keep = ~is_newer(self._since_epoch, config.since_step, records["epoch"], records["step"])
                ids, records = ids[keep], records[keep]
            self.num_rows_read += ids.size
            if ids.size:
                yield self._rows_of(ids, records, fields)

    def _rows_of(self, ids: _Ids, records: _Array, fields: list[str] | None) -> ExportRows:
        if int(records["epoch"].max()) > MAX_EPOCH or int(records["step"].min()) < 0:
            raise CorruptionError(f"table {self.spec.fqn!r}: a row's version is out of range")
        layout = RecordLayout(self._source, self._source.whole)
        columns = {}
        for field in self.fields if fields is None else fields:
            column = layout.columns[field]
            values = np.ascontiguousarray(records[field]).view(column.dtype.numpy).reshape(ids.size, column.width)
            columns[field] = self._converted(values) if field == "weights" else values
        return ExportRows(
            row_ids=ids,
            columns=columns,
            epochs=records["epoch"].astype(np.int64),
            steps=records["step"].astype(np.int64),
            times_us=records["time_us"].astype(np.int64),
            identities=records["identity"].astype(np.int64) if self.spec.has_identities else None,
        )

    def _converted(self, weights: _Array) -> _Array:
        if self.precision is None and self.spec.dtype is self._source.dtype:
            return weights
        floats = _TO_FLOAT32[self._source.dtype](weights)
        if self.precision is None:
            with np.errstate(over="ignore"):  # values beyond float16 become infinite
                return floats.astype(self.spec.dtype.numpy)
        torch = importlib.import_module("torch")
        quantize = importlib.import_module("headrace.kernels.quantization").quantize_rows
        packed: _Array = quantize(torch.from_numpy(np.array(floats)), "int8").numpy()
        return packed


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExportTensor:
    """A dense tensor of a snapshot, whole and in its own type.

    Attributes:
        name: Its name in the export.
        spec: Its description in the snapshot.
        epoch: With `step`, the version of its model's dense part.
        step: The trainer's step.
        columns: `weights` and each `state:NAME`, of the tensor's shape (bfloat16 as uint16).
        scalars: What the optimizer keeps once for it.
    """

    name: str
    spec: TableSpec
    epoch: int
    step: int
    columns: dict[str, _Array]
    scalars: tuple[Scalar, ...]

    @property
    def dtypes(self) -> dict[str, DType]:
        """Element types of the columns."""
        return {"weights": self.spec.dtype, **{f"state:{state.name}": state.dtype for state in self.spec.states}}

    def note(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Return the note about it, with the tensors' names by column."""
        return {
            "weights": names["weights"],
            "states": {field.removeprefix("state:"): name for field, name in names.items() if field != "weights"},
            "epoch": self.epoch,
            "step": self.step,
            "scalars": _note_of(self.scalars),
        }


def tensors_of(
    reader: SnapshotReader, specs: Mapping[str, TableSpec], *, with_states: bool, has_paths: bool
) -> list[ExportTensor]:
    """Return dense tensors of one model of a snapshot, by name; `has_paths` names them as in its `state_dict`.

    Raises:
        ConfigError: They are not of one step.
        CorruptionError: A file is damaged.
        StorageError: A file cannot be read.
    """
    way_on = "leave them out with --no-dense, or take a snapshot at a step of that model's run"
    place = f"the snapshot {reader.manifest.name}"
    part = read_dense_part(reader, specs, with_states=with_states, place=place, way_on=way_on)
    found = []
    for name, spec in sorted(specs.items()):
        path = path_of(name)
        states = part.states.get(path, {})
        found.append(
            ExportTensor(
                name=path if has_paths else name,
                spec=spec if with_states else replace(spec, states=()),
                epoch=part.epoch,
                step=part.step,
                columns={"weights": part.tensors[path], **{f"state:{state}": states[state] for state in states}},
                scalars=tuple(reader.scalars(name).values()) if with_states else (),
            )
        )
    return found


def _note_of(scalars: Iterable[Scalar]) -> list[list[Any]]:
    return [[scalar.name, int(scalar.dtype), scalar.data.hex()] for scalar in scalars]


_TO_FLOAT32: dict[DType, Callable[[_Array], _Array]] = {
    DType.FLOAT32: lambda values: values,
    DType.FLOAT16: lambda values: values.astype("<f4"),
    DType.FLOAT64: lambda values: values.astype("<f4"),
    DType.BFLOAT16: lambda values: (values.astype("<u4") << np.uint32(16)).view("<f4"),
}
"""Converts weights to float32, by their type."""


def file_name_of(spec: TableSpec, suffix: str) -> str:
    """Return a table's file name: letters, digits, `.`, `_` and `-` stay, and other bytes are written as %XX.

    A name that is too long for file systems is cut, and ends in `~`, which no other name has, and a hash of the whole.
    """
    kept = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    name = "".join(chr(byte) if byte in kept else f"%{byte:02X}" for byte in spec.fqn.encode())
    name = name if name[0] != "." else f"%2E{name[1:]}"
    if len(name) + len(suffix) > _MAX_NAME_BYTES:
        end = f"~{hashlib.blake2b(spec.fqn.encode(), digest_size=16).hexdigest()}"
        name = re.sub("%.?$", "", name[: _MAX_NAME_BYTES - len(end) - len(suffix)]) + end
    return name + suffix
