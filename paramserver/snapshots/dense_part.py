"""The dense parts of a snapshot: each model's dense tensors, put together from their rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headrace.paramserver.reading.dense_parts import DenseAssemblies, DensePart, dense_sets
from headrace.paramserver.snapshots.contents import SnapshotReader
from headrace.schemas.errors import ConfigError
from headrace.schemas.row_records import PRESENT, RecordLayout
from headrace.schemas.table_names import model_of
from headrace.schemas.tables import TableSpec

__all__ = ["dense_specs", "read_dense_part"]


def dense_specs(reader: SnapshotReader) -> dict[str, dict[str, TableSpec]]:
    """Return the current dense tensors of each model, by model and name."""
    owners = reader.owners()
    return dense_sets((spec, owners[name].epoch if name in owners else 0) for name, spec in reader.tables.items())


def read_dense_part(
    reader: SnapshotReader, specs: Mapping[str, TableSpec], *, with_states: bool, place: str, way_on: str
) -> DensePart:
    """Return a model's dense tensors, or some of them, all of one step. Takes their memory.

    Args:
        reader: The snapshot.
        specs: The tensors, by name; at least one.
        with_states: Read optimizer states too.
        place: The snapshot, for the message.
        way_on: What to do about tensors of several steps, for the message.

    Raises:
        ConfigError: They are not of one step.
        CorruptionError: A file is damaged.
        StorageError: A file cannot be read.
    """
    assemblies = DenseAssemblies(with_states=with_states)
    for name, spec in specs.items():
        layout = RecordLayout(spec, spec.whole)
        fields = {"weights": "weights", **layout.fields_of_states}
        for row_ids, records in reader.rows(name):
            columns = {
                column: np.ascontiguousarray(records[field]).view(layout.columns[field].dtype.numpy)
                for column, field in fields.items()
            }
            columns = {column: values.reshape(row_ids.size, spec.dim) for column, values in columns.items()}
            presence = np.full(row_ids.size, PRESENT, np.uint8)
            assemblies.load(spec, row_ids, columns, presence, records["epoch"], records["step"])
    part = assemblies.whole(specs)
    if part is None:
        model = model_of(next(iter(specs)))
        raise ConfigError(
            f"{place}: the dense tensors of model {model!r} are not of one step: {assemblies.describe(specs)}; {way_on}"
        )
    return part
