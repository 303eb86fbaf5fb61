"""About how many rows the files of a RocksDB hold, also of those of which RocksDB does not know.

How many entries a file has stands in the file, and not in RocksDB's manifest: of a store that is opened RocksDB looks
into 20 files, and takes all others for empty until it writes them anew. Of these the length is known. So they are taken
to be as dense as the others of their column shard; where no file of it is known, one is looked into.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.paramserver.store.table_file_reader import TableFileReader
from headrace.schemas.errors import HeadraceError

__all__ = ["FileRowCounts"]

_PREFIX_BYTES = 8  # table and column shard
_Density = tuple[int, int]  # entries, bytes


class FileRowCounts:
    """Counts the entries of one store's files.

    Thread: any, also several: at worst a file is looked into twice.
    """

    def __init__(self, path: Path) -> None:
        """Know of none; `path` is the store's directory."""
        self._path = path
        self._looked_into: dict[bytes, _Density] = {}

    def count(self, files: Sequence[dict[str, Any]]) -> list[int]:
        """Return how many entries each file has, about; one that cannot be told has none.

        Args:
            files: As RocksDB lists them.
        """
        known: dict[bytes, _Density] = {}
        for file in files:
            if file["num_entries"]:
                entries, size_bytes = known.get(prefix := _prefix_of(file), (0, 0))
                known[prefix] = entries + int(file["num_entries"]), size_bytes + int(file["size"])
        counts = []
        for file in files:
            count = int(file["num_entries"])
            if not count:
                entries, size_bytes = known.get(_prefix_of(file)) or self._look_into(file)
                count = entries * int(file["size"]) // size_bytes
            counts.append(count)
        return counts

    def _look_into(self, file: dict[str, Any]) -> _Density:
        prefix = _prefix_of(file)
        if prefix not in self._looked_into:
            self._looked_into[prefix] = _entries_of(self._path / file["name"].lstrip("/")), max(int(file["size"]), 1)
        return self._looked_into[prefix]


def _prefix_of(file: dict[str, Any]) -> bytes:
    return bytes((file["start_key"] or b"")[:_PREFIX_BYTES])


def _entries_of(path: Path) -> int:
    try:
        reader = TableFileReader.open(path)
    except HeadraceError:  # compacted away since it was listed; or damaged, as whoever reads its rows will be told
        return 0
    if reader is None:  # of a kind that is not read here
        return 0
    with reader:
        return reader.num_entries
