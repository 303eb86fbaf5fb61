"""The table that the benches of backfill and export move: a file with it, a server's directory of it, a snapshot."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.config.data_dir import DataDir
from headrace.paramserver.snapshots.snapshot_files import SnapshotFiles, hash_folder
from headrace.paramserver.store.catalog import Catalog, pack_spec
from headrace.paramserver.store.row_store import RowStore
from headrace.paramserver.store.store_config import StoreConfig
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotManifest, shard_folder
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec

__all__ = ["bench_spec", "record_chunks", "snapshot_of", "write_source"]

_DIM = 64
_ROWS_AT_ONCE = 65_536
_FQN = "bench.weight"


def bench_spec(num_rows: int) -> TableSpec:
    """Return the table: 64 columns of float32, and a rowwise state."""
    state = StateSpec(name="momentum1", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1)
    return TableSpec(fqn=_FQN, num_rows=num_rows, dim=_DIM, dtype=DType.FLOAT32, states=(state,))


def _columns(num_rows: int) -> Iterator[tuple[int, npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
    """Yield (first row, weights, states), the same ones each time."""
    pool = np.random.default_rng(0).random((2 * _ROWS_AT_ONCE, _DIM), np.float32)
    for first in range(0, num_rows, _ROWS_AT_ONCE):
        size = min(_ROWS_AT_ONCE, num_rows - first)
        weights = pool[first % 977 : first % 977 + size]
        yield first, weights, weights[:, 0].copy()


def write_source(path: Path, num_rows: int) -> None:
    """Write the table as a safetensors file that says what it is."""
    spec = bench_spec(num_rows)
    weights_bytes, states_bytes = num_rows * _DIM * 4, num_rows * 4
    names = {"weights": _FQN, "states": {"momentum1": f"{_FQN}/momentum1"}}
    note = {"spec": pack_spec(spec), "first_row": 0, "precision": None, "identities": None, **names}
    header = {
        "__metadata__": {"headrace": json.dumps({"version": 1, "tables": [note]})},
        _FQN: {"dtype": "F32", "shape": [num_rows, _DIM], "data_offsets": [0, weights_bytes]},
        f"{_FQN}/momentum1": {
            "dtype": "F32",
            "shape": [num_rows],
            "data_offsets": [weights_bytes, weights_bytes + states_bytes],
        },
    }
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % 8)
    start = 8 + len(packed)
    with open(path, "wb") as file:
        file.write(len(packed).to_bytes(8, "little") + packed)
        for first, weights, states in _columns(num_rows):
            os.pwrite(file.fileno(), weights.tobytes(), start + first * _DIM * 4)
            os.pwrite(file.fileno(), states.tobytes(), start + weights_bytes + first * 4)
        file.flush()
        os.fsync(file.fileno())


def record_chunks(num_rows: int) -> Iterator[tuple[npt.NDArray[np.int64], list[bytes]]]:
    """Yield (row ids, the records that a store keeps for them), for RocksDB by itself."""
    spec = bench_spec(num_rows)
    layout = RecordLayout(spec, spec.whole)
    for first, weights, states in _columns(num_rows):
        ids = np.arange(first, first + states.size, dtype=np.int64)
        columns: dict[str, Any] = {"weights": weights.data.cast("B"), "state:momentum1": states.data.cast("B")}
        yield ids, layout.encode(columns, epoch=1, step=0, time_us=0)


def snapshot_of(data_dir: Path, folder: Path) -> Path:
    """Make the snapshot `bench` of the directory of a server that is not running; return its directory.

    Args:
        data_dir: The server's.
        folder: Where snapshots are kept; on the same file system.

    Raises:
        HeadraceError: The directory is in use, or the disk failed.
    """
    files, name, parts = SnapshotFiles(folder), "bench", []
    with DataDir.claim(data_dir, num_shards=None) as directory:
        manifest = directory.manifest
        for shard in range(manifest.num_shards):
            part = files.new_folder(name) / shard_folder(shard)
            part.parent.mkdir(parents=True, exist_ok=True)
            store = RowStore.open(directory.shard_path(shard) / "store", config=StoreConfig(block_cache_bytes=4 << 20))
            try:
                store.checkpoint(part)
                tables = tuple(table.spec for table in Catalog(store.read_meta()))
                seq = store.applied_seq
            finally:
                store.close()
            parts.append(
                ShardPart(
                    shard=shard,
                    server_id=manifest.server_id,
                    seq=seq,
                    epoch=0,
                    step=-1,
                    tables=tables,
                    files=hash_folder(part),
                )
            )
        files.publish(SnapshotManifest(name=name, created_us=0, parts=tuple(parts)))
    return files.folder_of(name)
