"""`headrace bench backfill` and `headrace bench export`: a file made into a server's directory, a snapshot into files.

Each piece of work runs in a process of its own, so that its processor time and its peak memory are its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import numpy.typing as npt
import rocksdict
import typer

from headrace.paramserver.snapshots.remote import create_snapshot
from headrace.paramserver.store.catalog import pack_spec
from headrace.paramserver.store.rocksdb import StoreConfig, rocks_options
from headrace.schemas.errors import ConfigError
from headrace.schemas.row_records import RecordLayout, encode_keys
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec
from headrace.scripts.benches.child import Child, Worker, peak_memory_bytes
from headrace.scripts.benches.harness import FolderOption, OnStage, Rounds, RoundsOption, bench_command, bench_folder
from headrace.scripts.benches.ingest import admin_dial, serve
from headrace.scripts.commands.backfill import build_directory
from headrace.scripts.commands.export import export_snapshot
from headrace.scripts.table_io.exported import ExportConfig
from headrace.scripts.table_io.source import BackfillConfig as BackfillSettings

__all__ = ["BackfillConfig", "ExportBenchConfig", "backfill", "export", "make_snapshot", "measure_backfill"]
__all__ += ["measure_export"]

_FORMATS = ("safetensors", "parquet", "npz", "dcp")
_FEW_ROWS_SHARE = 5
_DIM, _FQN = 64, "bench.weight"
_ROWS_AT_ONCE = 65_536
_CHUNK_BYTES = 4 << 20
_TIMEOUT_S = 600.0

RowsOption = Annotated[int, typer.Option("--rows", min=1000, help="Rows of the table, of 64 float32 and a state.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class BackfillConfig:
    """How much `headrace bench backfill` measures."""

    num_rows: RowsOption = 5_000_000
    num_rounds: RoundsOption = 1
    folder: FolderOption = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportBenchConfig:
    """How much `headrace bench export` measures."""

    num_rows: RowsOption = 5_000_000
    format_name: Annotated[str, typer.Option("--format", metavar="NAME", help="Format of the files.")] = "safetensors"
    num_rounds: RoundsOption = 1
    folder: FolderOption = None

    def __post_init__(self) -> None:
        if self.format_name not in _FORMATS:
            raise ConfigError(f"--format {self.format_name!r}: must be one of {', '.join(_FORMATS)}")


def measure_backfill(config: BackfillConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure how fast a new directory is made from a file, and that memory does not grow with the table.

    It is compared with a loop that puts the same records, sorted, into RocksDB without RocksDB's own log.
    """
    took = _Took(config.num_rows)
    with bench_folder(config.folder) as folder:
        on_stage("making the file")
        for name, num_rows in (("few", took.few_rows), ("all", config.num_rows)):
            _run(_write_source, path=folder / f"{name}.safetensors", num_rows=num_rows)
        on_stage("a fifth of it, for the memory")
        took.run("few", _fill_directory, source=folder / "few.safetensors", target=folder / "few.data")
        for number in range(config.num_rounds):
            on_stage(f"round {number + 1}: backfill")
            took.run("backfill", _fill_directory, source=folder / "all.safetensors", target=folder / "data")
            shutil.rmtree(folder / "data")
            on_stage(f"round {number + 1}: RocksDB")
            took.run("rocksdb", _put_rows, path=folder / "rocksdb", num_rows=config.num_rows)
            shutil.rmtree(folder / "rocksdb")
    return {
        "offline_vs_rocksdb": took.wall_s.ratio("rocksdb", "backfill"),
        "offline_vs_rocksdb_cpu": took.cpu_s.ratio("rocksdb", "backfill"),
        **took.figures("backfill"),
    }


backfill = bench_command("backfill", BackfillConfig, measure_backfill)


def measure_export(config: ExportBenchConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure how fast a snapshot is exported, and that memory does not grow with the table.

    It is compared with a sequential write of as many bytes, synced at the end.
    """
    took, size_bytes, to = _Took(config.num_rows), 0, {"format_name": config.format_name}
    with bench_folder(config.folder) as folder:
        on_stage("making the snapshots")
        few, whole = (make_snapshot(folder, num_rows) for num_rows in (took.few_rows, config.num_rows))
        on_stage("a fifth of it, for the memory")
        took.run("few", _write_files, snapshot=few, to=folder / "few.out", **to)
        for number in range(config.num_rounds):
            on_stage(f"round {number + 1}: export")
            out = folder / "out"
            took.run("export", _write_files, snapshot=whole, to=out, **to)
            size_bytes = sum(file.stat().st_size for file in (out.iterdir() if out.is_dir() else [out]))
            shutil.rmtree(out) if out.is_dir() else out.unlink()
            on_stage(f"round {number + 1}: disk")
            took.run("disk", _write_bytes, path=folder / "disk", size_bytes=size_bytes)
            (folder / "disk").unlink()
    figures = took.figures("export")
    of_export = {name: figures[name]["export"] for name in ("rows_per_s", "cpu_us_per_row")}
    return {
        "export_vs_disk": took.wall_s.ratio("disk", "export"),
        "format": config.format_name,
        "size_bytes": size_bytes,
        "bytes_per_s": took.per_s(size_bytes),
        **(figures | of_export),
    }


export = bench_command("export", ExportBenchConfig, measure_export)


class _Took:
    """What pieces of work took, round after round; `few` is the one with a small table."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows, self.few_rows = num_rows, max(num_rows // _FEW_ROWS_SHARE, 1)
        self.wall_s, self.cpu_s, self._peak_bytes = Rounds(), Rounds(), Rounds()

    def run(self, name: str, work: Callable[..., None], **arguments: Any) -> None:
        """Run a function of this module in a process of its own."""
        answer = _run(work, **arguments)
        for rounds, key in ((self.wall_s, "wall_s"), (self.cpu_s, "cpu_s"), (self._peak_bytes, "peak_rss_bytes")):
            rounds.add(name, answer[key])

    def figures(self, name: str) -> dict[str, Any]:
        """Return the figures that both benches have, of the work with this name and its peer."""
        peaks = {str(self.few_rows): self._peak_bytes["few"][0], str(self._num_rows): max(self._peak_bytes[name])}
        return {
            "num_rows": self._num_rows,
            "rows_per_s": self.per_s(self._num_rows),
            "cpu_us_per_row": _without_few(self.cpu_s.medians(1e6 / self._num_rows)),
            "peak_rss_bytes": peaks,
            "wall_s": _without_few(self.wall_s),
        }

    def per_s(self, amount: float) -> dict[str, float]:
        return {name: amount / seconds for name, seconds in _without_few(self.wall_s.medians()).items()}


def _without_few(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "few"}


def make_snapshot(folder: Path, num_rows: int) -> Path:
    """Make a published snapshot of a table of so many rows in a folder; return its directory."""
    source, data, snapshot = folder / "source.safetensors", folder / "data", folder / f"{num_rows}.snapshot"
    _run(_write_source, path=source, num_rows=num_rows)
    _run(_fill_directory, source=source, target=data)
    source.unlink()
    with serve(data) as server:
        dial = admin_dial(_TIMEOUT_S)
        made = asyncio.run(create_snapshot(server.address, dial=dial, at_step=False, timeout_s=_TIMEOUT_S))
    (data / "snapshots" / made.name).rename(snapshot)
    shutil.rmtree(data)
    return snapshot


def _run(work: Callable[..., None], **arguments: Any) -> dict[str, float]:
    """Run a function of this module in a process of its own; return its `wall_s`, `cpu_s` and `peak_rss_bytes`."""
    texts = {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()}
    with Child(f"{__name__}:_run_here", f"the bench's {work.__name__}", work=work.__name__, arguments=texts) as child:
        return child.ready


def _run_here(work: str, arguments: dict[str, Any]) -> Worker:
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    globals()[work](**arguments)
    wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    yield {"wall_s": wall_s, "cpu_s": cpu_s, "peak_rss_bytes": peak_memory_bytes()}


def _fill_directory(source: str, target: str) -> None:
    settings = BackfillSettings(non_finite="keep")
    build_directory(settings.open(Path(source), None), Path(target), num_shards=1)


def _write_files(snapshot: str, to: str, format_name: str) -> None:
    export_snapshot(Path(snapshot), Path(to), format_name, ExportConfig(with_states=True))


def _put_rows(path: str, num_rows: int) -> None:
    """Put the same records in the same order into RocksDB, one after the other, and flush."""
    spec = _make_spec(num_rows)
    layout = RecordLayout(spec, spec.whole)
    options = cast(Any, rocksdict.WriteOptions())  # its type stub takes the properties for methods
    options.disable_wal = True
    db = rocksdict.Rdict(path, rocks_options(StoreConfig(block_cache_bytes=4 << 20)))
    db.set_write_options(options)
    for first, weights, states in _columns(num_rows):
        ids = np.arange(first, first + states.size, dtype=np.int64)
        columns: dict[str, Any] = {"weights": weights.data.cast("B"), "state:momentum1": states.data.cast("B")}
        values = layout.encode(columns, epoch=1, step=0, time_us=0)
        for key, value in zip(encode_keys(1, spec.whole, ids), values, strict=True):
            db[key] = value
    db.flush()
    db.close()


def _write_bytes(path: str, size_bytes: int) -> None:
    """Write bytes sequentially and sync them."""
    chunk = os.urandom(_CHUNK_BYTES)
    with open(path, "wb", buffering=0) as file:
        for start in range(0, size_bytes, _CHUNK_BYTES):
            file.write(chunk[: size_bytes - start])
        os.fsync(file.fileno())


def _make_spec(num_rows: int) -> TableSpec:
    state = StateSpec(name="momentum1", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1)
    return TableSpec(fqn=_FQN, num_rows=num_rows, dim=_DIM, dtype=DType.FLOAT32, states=(state,))


def _columns(num_rows: int) -> Iterator[tuple[int, npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
    """Yield (first row, weights, states), the same ones each time."""
    pool = np.random.default_rng(0).random((2 * _ROWS_AT_ONCE, _DIM), np.float32)
    for first in range(0, num_rows, _ROWS_AT_ONCE):
        weights = pool[first % 977 : first % 977 + min(_ROWS_AT_ONCE, num_rows - first)]
        yield first, weights, weights[:, 0].copy()


def _write_source(path: str, num_rows: int) -> None:
    """Write the table as a safetensors file that describes itself."""
    from safetensors.numpy import save_file

    names = {"weights": _FQN, "states": {"momentum1": f"{_FQN}/momentum1"}}
    note = {"spec": pack_spec(_make_spec(num_rows)), "first_row": 0, "precision": None, "identities": None, **names}
    _, weights, states = zip(*_columns(num_rows), strict=True)
    tensors = {_FQN: np.concatenate(weights), f"{_FQN}/momentum1": np.concatenate(states)}
    save_file(tensors, path, {"headrace": json.dumps({"version": 1, "tables": [note]})})
