"""Write tables as a torch.distributed.checkpoint directory, which a trainer loads however it shards its tables.

The directory has one file with parts of some megabytes of each tensor, as `torch.save` writes them, and the metadata,
which says where each part lies.
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

from headrace.kernels.dtypes import TORCH_DTYPES
from headrace.schemas.errors import ConfigError
from headrace.schemas.tables import DType
from headrace.scripts.table_io.dcp_reader import METADATA_NAME
from headrace.scripts.table_io.dense_writer import IDENTITIES, check_dense, columns_of, dense_windows
from headrace.scripts.table_io.exported import ExportTable

__all__ = ["STATE_KEY", "WEIGHTS_KEY", "write_checkpoint"]

WEIGHTS_KEY = "{fqn}"
STATE_KEY = "state.{fqn}.{table}.{state}"
"""The names in the `state_dict()` of TorchRec's fused optimizers."""

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
    """Write a new directory. The snapshot is read once per column.

    Args:
        path: REQUIRES: does not exist.
        tables: Ordered by name.
        on_rows: Called with the number of rows just read.
        weights_key: Name of a table's weights, with `{fqn}` and `{table}`, the second last part of the fqn.
        state_key: Name of a state, with `{state}`, too.

    Raises:
        ConfigError: A table has virtual ids, or two tensors would have the same name.
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
    # Protocol 4 writes the same bytes in every supported version of Python.
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
        # A new object each time: the pickle would show that two of them are the same one.
        chunks.append(ChunkStorageMetadata(offsets=torch.Size([*offsets]), sizes=torch.Size([*part.shape])))
        info = _StorageInfo(relative_path=_DATA_NAME, offset=start, length=file.tell() - start)
        metadata.storage_data[MetadataIndex(key, offsets, len(chunks) - 1)] = info
    metadata.state_dict_metadata[key] = TensorStorageMetadata(
        properties=TensorProperties(dtype=of_torch), size=torch.Size(shape), chunks=chunks
    )


def _key_of(table: ExportTable, field: str, weights_key: str, state_key: str) -> str:
    fqn = table.spec.fqn
    parts = fqn.split(".")
    state = f"{IDENTITIES}:" if field == IDENTITIES else field.removeprefix("state:")  # no state has this name
    template = weights_key if field == "weights" else state_key
    try:
        return template.format(fqn=fqn, table=parts[-2] if len(parts) > 1 else fqn, state=state)
    except (AttributeError, LookupError, TypeError, ValueError) as exc:
        raise ConfigError(f"{template!r}: only {{fqn}}, {{table}} and {{state}} can be put in") from exc
