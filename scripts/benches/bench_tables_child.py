"""A child process of the benches of backfill and export: does one thing, and says how long and how much memory it took.

python -m headrace.scripts.benches.bench_tables_child '{"work": "backfill", …}'
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import rocksdict

from headrace.paramserver.store.store_config import StoreConfig, rocks_options
from headrace.schemas.errors import UnavailableError
from headrace.schemas.row_keys import encode_keys
from headrace.scripts.backfill import BackfillConfig, build_directory
from headrace.scripts.benches.bench_child import peak_memory_bytes
from headrace.scripts.benches.bench_tables import bench_spec, record_chunks, snapshot_of, write_source
from headrace.scripts.export import export_snapshot
from headrace.scripts.table_sinks.export_table import ExportConfig

__all__ = ["ChildResult", "run_child"]

ChildResult = dict[str, float]
_CHUNK_BYTES = 4 << 20


def run_child(work: str, **arguments: Any) -> ChildResult:
    """Do something in a process of its own; return `wall_s`, `cpu_s` and `peak_rss_bytes` of it.

    Args:
        work: `source`, `backfill`, `rocksdb`, `snapshot`, `export` or `disk`.
        arguments: Of it; paths as texts.

    Raises:
        UnavailableError: The process has ended with an error, which is on stderr.
    """
    order = json.dumps({"work": work, **arguments})
    command = [sys.executable, "-m", "headrace.scripts.benches.bench_tables_child", order]
    process = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if process.returncode:
        raise UnavailableError(f"the bench's child for {work!r} has ended; its error is above")
    result: ChildResult = json.loads(process.stdout)
    return result


def _source(path: str, num_rows: int) -> None:
    write_source(Path(path), num_rows)


def _backfill(source: str, target: str) -> None:
    config = BackfillConfig(non_finite="keep")
    build_directory(config.open(Path(source), None), Path(target), num_shards=1, config=config)


def _rocksdb(path: str, num_rows: int) -> None:
    """Put the same records in the same order, one after the other, and flush."""
    spec = bench_spec(num_rows)
    # Its type stub takes the properties for methods.
    options = cast(Any, rocksdict.WriteOptions())
    options.disable_wal = True
    db = rocksdict.Rdict(path, rocks_options(StoreConfig(block_cache_bytes=4 << 20)))
    db.set_write_options(options)
    for ids, values in record_chunks(num_rows):
        for key, value in zip(encode_keys(1, spec.whole, ids), values, strict=True):
            db[key] = value
    db.flush()
    db.close()


def _snapshot(data: str, folder: str) -> None:
    snapshot_of(Path(data), Path(folder))


def _export(snapshot: str, to: str, format_name: str) -> None:
    export_snapshot(Path(snapshot), Path(to), format_name, ExportConfig(with_states=True))


def _disk(path: str, size_bytes: int) -> None:
    """Write so many bytes one after the other and sync them."""
    chunk = os.urandom(_CHUNK_BYTES)
    with open(path, "wb", buffering=0) as file:
        for start in range(0, size_bytes, _CHUNK_BYTES):
            file.write(chunk[: size_bytes - start])
        os.fsync(file.fileno())


_WORK: dict[str, Callable[..., None]] = {
    "source": _source,
    "backfill": _backfill,
    "rocksdb": _rocksdb,
    "snapshot": _snapshot,
    "export": _export,
    "disk": _disk,
}


def _main() -> None:
    order = json.loads(sys.argv[1])
    work = _WORK[order.pop("work")]
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    work(**order)
    result = {
        "wall_s": time.perf_counter() - begin_s,
        "cpu_s": time.process_time() - begin_cpu_s,
        "peak_rss_bytes": peak_memory_bytes(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    _main()
