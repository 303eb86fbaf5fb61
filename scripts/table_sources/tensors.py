"""Files of named tensors: what a source of them is, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.scripts.table_sources.columns import Column

__all__ = ["TensorSource", "stamp_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSource:
    """Tensors of a file or a directory.

    Attributes:
        path: Of it.
        columns: By name: tensors of one or two dimensions and of an element type that a table can have.
        files: Those that it was opened from.
        notes: What `headrace export` has noted of its tables; None in files of others.
    """

    path: Path
    columns: Mapping[str, Column]
    files: list[Path]
    notes: dict[str, Any] | None = None


def stamp_of(paths: list[Path]) -> list[Any]:
    """Return names, lengths and times of change of files: other values mean other contents."""
    found = []
    for path in sorted(paths):
        stat = path.stat()
        found.append([path.name, stat.st_size, stat.st_mtime_ns])
    return found
