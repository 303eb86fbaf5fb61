"""Tables as a directory of torch.distributed.checkpoint, which a trainer loads whatever way it shards its tables.

Each tensor is written in parts of some megabytes one after the other, as `torch.save` writes them, and the metadata
says where each lies: that is all that such a directory is.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from headrace.kernels.torch_dtypes import TORCH_DTYPES
from headrace.schemas.errors import ConfigError
from headrace.schemas.tables import DType
from headrace.scripts.table_sinks.dense import IDENTITIES, check_dense, columns_of, dense_windows
from headrace.scripts.table_sinks.export_table import ExportTable
from headrace.scripts.table_sources.dcp_directory import METADATA_NAME

__all__ = ["STATE_KEY", "WEIGHTS_KEY", "write_checkpoint"]

WEIGHTS_KEY = "{fqn}"
STATE_KEY = "state.{fqn}.{table}.{state}"
"""As TorchRec's fused optimizers name them in their `state_dict()`."""

_DATA_NAME = "__0_0.distcp"
_PART_BYTES = 16 << 20


def write_checkpoint(
    path: Path,
    tables: list[ExportTable],
    *,
    on_rows: Callable[[int], None],
    weights_key: str = WEIGHTS_KEY,
    state_key: str = STATE_KEY,
) -> None:
    """Write a directory. The snapshot is read once for each column.

    Args:
        path: Not there yet.
        tables: In the order of their names.
        on_rows: Called with the number of rows that were gone through.
        weights_key: Name of a table's weights; `{fqn}` and `{table}`, its last name but one, are put in.
        state_key: Name of a state; `{state}` too.

    Raises:
        ConfigError: A table has virtual ids, or two tensors would have one name.
        OSError: The disk failed.
        HeadraceError: The snapshot cannot be read.
    """
    check_dense(tables, "dcp")
    path.mkdir()
    metadata = Metadata(state_dict_metadata={}, planner_data={}, storage_data={})
    with open(path / _DATA_NAME, "xb") as file:
        for table in tables:
            for number, field in enumerate(columns_of(table)):
                key = _key_of(table, field, weights_key, state_key)
                if key in metadata.state_dict_metadata:
                    raise ConfigError(f"two tensors would have the name {key!r}")
                _write_tensor(file, metadata, key, table, field, None if number else on_rows)
                metadata.planner_data[key] = (key,)
    # Protocol 4 writes the same bytes in every version of Python that is supported.
    (path / METADATA_NAME).write_bytes(pickle.dumps(metadata, protocol=4))


def _write_tensor(
    file: io.BufferedWriter,
    metadata: Metadata,
    key: str,
    table: ExportTable,
    field: str,
    on_rows: Callable[[int], None] | None,
) -> None:
    dtype, shape = columns_of(table)[field]
    row_bytes = dtype.size_bytes * (shape[1] if len(shape) == 2 else 1)
    of_torch, chunks = TORCH_DTYPES[dtype], []
    for first, window in dense_windows(table, field, max(1, _PART_BYTES // row_bytes), on_rows=on_rows):
        values = torch.from_numpy(window if len(shape) == 2 else window[:, 0])
        part = values.view(of_torch) if dtype is DType.BFLOAT16 else values
        offsets = torch.Size((first, 0) if len(shape) == 2 else (first,))
        start = file.tell()
        buffer = io.BytesIO()
        torch.save(part, buffer)
        file.write(buffer.getbuffer())
        # Not one object twice: whether two of them are one would be seen in the pickle.
        chunks.append(ChunkStorageMetadata(offsets=torch.Size([*offsets]), sizes=torch.Size([*part.shape])))
        info = _StorageInfo(relative_path=_DATA_NAME, offset=start, length=file.tell() - start)
        metadata.storage_data[MetadataIndex(key, offsets, len(chunks) - 1)] = info
    metadata.state_dict_metadata[key] = TensorStorageMetadata(
        properties=TensorProperties(dtype=of_torch), size=torch.Size(shape), chunks=chunks
    )


def _key_of(table: ExportTable, field: str, weights_key: str, state_key: str) -> str:
    fqn = table.spec.fqn
    parts = fqn.split(".")
    state = f"{IDENTITIES}:" if field == IDENTITIES else field.removeprefix("state:")  # no state is called so
    template = weights_key if field == "weights" else state_key
    try:
        return template.format(fqn=fqn, table=parts[-2] if len(parts) > 1 else fqn, state=state)
    except (AttributeError, LookupError, TypeError, ValueError) as exc:
        raise ConfigError(f"{template!r}: only {{fqn}}, {{table}} and {{state}} can be put in") from exc
