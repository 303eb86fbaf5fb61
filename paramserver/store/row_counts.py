"""Estimate how many rows the files of a RocksDB hold, including files that RocksDB has not looked into.

Entry counts stand in the files, not in RocksDB's manifest: on opening a store it looks into 20 files and reports the
others as empty until it rewrites them. It does know their lengths, so they are assumed as dense as the other files of
their column shard; where none is known, one is read.

A file with several column shards is read once: its index, and for each column shard a block or a few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.paramserver.store.sst.table_reader import TableFileReader
from headrace.schemas.errors import HeadraceError
from headrace.schemas.row_records import key_prefix

__all__ = ["FileRowCounts"]

_TABLE_BYTES = 4
_PREFIX_BYTES = len(key_prefix(0))  # table and column shard
_Density = tuple[int, int]  # entries, bytes


class FileRowCounts:
    """Counts the rows of one store's files.

    Thread: any, also several: at worst a file is read twice.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._densities: dict[bytes, _Density] = {}  # by prefix, from one file each of those that were read
        self._counts: dict[str, Mapping[bytes, int]] = {}  # by name, of files with several prefixes

    def count(self, files: Sequence[dict[str, Any]]) -> Counter[int]:
        """Return about how many rows the files that RocksDB lists hold, by table id, without metadata."""
        known: dict[bytes, _Density] = {}
        for file in files:
            first, last = _prefixes_of(file)
            if file["num_entries"] and first == last:
                entries, size_bytes = known.get(first, (0, 0))
                known[first] = entries + int(file["num_entries"]), size_bytes + int(file["size"])
        counts: dict[str, Mapping[bytes, int]] = {}
        totals: Counter[int] = Counter()
        for file in files:
            first, last = _prefixes_of(file)
            if first == last:
                _add({first: int(file["num_entries"]) or self._estimate(file, first, known)}, totals)
            else:
                name = file["name"]
                counts[name] = self._counts.get(name) or self._count_by_prefix(file)
                _add(counts[name], totals)
        self._counts = counts  # drops files that are gone
        return totals

    def _estimate(self, file: dict[str, Any], prefix: bytes, known: Mapping[bytes, _Density]) -> int:
        density = known.get(prefix) or self._densities.get(prefix)
        if density is None:
            with_entries = _look_into(self._path_of(file))
            density = self._densities[prefix] = sum(with_entries.values()), max(int(file["size"]), 1)
        entries, size_bytes = density
        return entries * int(file["size"]) // size_bytes

    def _count_by_prefix(self, file: dict[str, Any]) -> Mapping[bytes, int]:
        if found := _look_into(self._path_of(file)):
            return found
        # Our reader does not know this kind: share the entries evenly among the tables in its key range.
        low, high = (int.from_bytes(prefix[:_TABLE_BYTES], "big") for prefix in _prefixes_of(file))
        tables = range(max(low, 1), high + 1)
        return {key_prefix(table_id): int(file["num_entries"]) // len(tables) for table_id in tables}

    def _path_of(self, file: dict[str, Any]) -> Path:
        return self._path / str(file["name"]).lstrip("/")


def _add(counts: Mapping[bytes, int], totals: Counter[int]) -> None:
    for prefix, num_entries in counts.items():
        table_id = int.from_bytes(prefix[:_TABLE_BYTES], "big")
        if table_id:
            totals[table_id] += num_entries


def _prefixes_of(file: dict[str, Any]) -> tuple[bytes, bytes]:
    first, last = (bytes((file[key] or b"")[:_PREFIX_BYTES]) for key in ("start_key", "end_key"))
    return first, last


def _look_into(path: Path) -> Mapping[bytes, int]:
    """Return about how many entries a file has of each prefix; empty when that cannot be told."""
    try:
        reader = TableFileReader.open(path)
        if reader is None:  # our reader does not know this kind
            return {}
        with reader:
            return reader.count_by_prefix(_PREFIX_BYTES)
    except HeadraceError:  # compacted away since it was listed; or damaged, which readers of its rows will report
        return {}
