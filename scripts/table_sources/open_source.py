"""Opens whatever a backfill is pointed at, by what it is and not by its name alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.schemas.errors import ConfigError, StorageError
from headrace.schemas.tables import TableSpec
from headrace.scripts.import_with_extra import import_with_extra
from headrace.scripts.table_sources.columns import map_file_errors
from headrace.scripts.table_sources.naming import Naming
from headrace.scripts.table_sources.source_table import SourceTable, Versions
from headrace.scripts.table_sources.tensors import TensorSource, stamp_of

__all__ = ["OpenSource", "open_source"]

# Ending: module and function.
_READERS = {
    ".pt": "torch_file:open_torch_file",
    ".pth": "torch_file:open_torch_file",
    ".safetensors": "safetensors_file:open_safetensors",
    ".npz": "npz_file:open_npz",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenSource:
    """Tables of a source, checked.

    Attributes:
        tables: In the order of their names.
        files: Those that it was opened from.
        stamp: Names, lengths and times of change of the files, which tell this state of them from a later one.
    """

    tables: list[SourceTable]
    files: list[Path]
    stamp: list[Any]

    def check_unchanged(self) -> None:
        """Check that the files are still those that were opened.

        Raises:
            RequestError: One is gone.
            StorageError: One was changed: what was read of it may be a mixture.
        """
        for file, expected in zip(self.files, self.stamp, strict=True):
            with map_file_errors(file):
                if stamp_of([file]) != [expected]:
                    raise StorageError(f"{file}: changed while it was read; run it again when it is at rest")


def open_source(
    path: Path,
    *,
    naming: Naming,
    wanted: list[str] | None,
    known: Mapping[str, TableSpec] | None,
    zero_states: bool,
    versions: Versions,
) -> OpenSource:
    """Open a file or directory and check what it says of all tables; rows are read later.

    Args:
        path: A `.pt`, `.safetensors`, `.npz` or `.parquet` file, a checkpoint's directory or one of Parquet files.
        naming: The user's rules.
        wanted: Only these tables, by fqn; None for all.
        known: The target's tables; None when it is new.
        zero_states: See `dense_tables`.
        versions: Of the rows; a time of 0 becomes that of the source's last change.

    Raises:
        ConfigError: There is nothing that can be read, or a library for it is missing.
        HeadraceError: The source is damaged, or does not fit the target.
    """
    parquet = _parquet_files(path)
    tensors: TensorSource | None = None
    if parquet is None:
        tensors = _open_tensors(path)
    files = parquet if parquet is not None else tensors.files if tensors is not None else []
    with map_file_errors(path):
        stamp = [fact for file in files for fact in stamp_of([file])]
    if not versions.time_us:
        versions = replace(versions, time_us=max(changed_ns for _, _, changed_ns in stamp) // 1000)
    if parquet is not None:
        load = _import("parquet_tables:parquet_tables")
        tables = load(parquet, naming=naming, wanted=wanted, known=known, versions=versions)
    else:
        load = _import("dense_tables:dense_tables")
        tables = load(tensors, naming=naming, wanted=wanted, known=known, zero_states=zero_states, versions=versions)
    naming.check_used(str(path))
    return OpenSource(tables=sorted(tables, key=lambda table: table.spec.fqn), files=files, stamp=stamp)


def _parquet_files(path: Path) -> list[Path] | None:
    if path.is_file() and path.suffix == ".parquet":
        return [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix == ".parquet" and file.name[0] != ".")
        return files or None
    return None


def _open_tensors(path: Path) -> TensorSource:
    if path.is_dir():
        if not (path / ".metadata").exists():
            raise ConfigError(f"{path}: neither a checkpoint (no .metadata) nor a directory of .parquet files")
        reader = "dcp_directory:open_checkpoint"
    elif not path.exists():
        raise ConfigError(f"{path}: there is no such file or directory")
    elif path.suffix in _READERS:
        reader = _READERS[path.suffix]
    else:
        raise ConfigError(
            f"{path}: unknown ending {path.suffix!r}; .pt, .safetensors, .npz and .parquet files and directories of "
            "checkpoints are read"
        )
    source: TensorSource = _import(reader)(path)
    return source


def _import(function: str) -> Callable[..., Any]:
    return import_with_extra(f"headrace.scripts.table_sources.{function}", what="this")
