"""About how many rows the files of a RocksDB hold, also of those of which RocksDB does not know.

How many entries a file has stands in the file, and not in RocksDB's manifest: of a store that is opened RocksDB looks
into 20 files, and takes all others for empty until it writes them anew. Of these the length is known. So they are taken
to be as dense as the others of their column shard; where no file of it is known, one is looked into.

A file with more than one column shard, or with claims of identities (`identity_claims.py`) beside rows, is looked into
once: its index, and of each column shard a block or a few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.paramserver.store.table_file_reader import TableFileReader
from headrace.schemas.errors import HeadraceError
from headrace.schemas.identity_claims import CLAIMS_SHARD
from headrace.schemas.row_keys import key_prefix

__all__ = ["FileRowCounts"]

_TABLE_BYTES = 4
_CLAIMS = key_prefix(0, CLAIMS_SHARD)[_TABLE_BYTES:]
_PREFIX_BYTES = _TABLE_BYTES + len(_CLAIMS)  # table and column shard
_Density = tuple[int, int]  # entries, bytes


class FileRowCounts:
    """Counts the rows of one store's files.

    Thread: any, also several: at worst a file is looked into twice.
    """

    def __init__(self, path: Path) -> None:
        """Know of none; `path` is the store's directory."""
        self._path = path
        self._densities: dict[bytes, _Density] = {}  # of files with one prefix, one of each that was looked into
        self._counts: dict[str, Mapping[bytes, int]] = {}  # by name, of files with several prefixes

    def count(self, files: Sequence[dict[str, Any]]) -> Counter[int]:
        """Return about how many rows the files hold, by table id; claims are none, and metadata is no table's.

        Args:
            files: All, as RocksDB lists them.
        """
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
        self._counts = counts  # without those of files that are gone
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
        # Of a kind that is not read here: shared out evenly among the tables between its first key and its last.
        low, high = (int.from_bytes(prefix[:_TABLE_BYTES], "big") for prefix in _prefixes_of(file))
        tables = range(max(low, 1), high + 1)
        return {key_prefix(table_id): int(file["num_entries"]) // len(tables) for table_id in tables}

    def _path_of(self, file: dict[str, Any]) -> Path:
        return self._path / str(file["name"]).lstrip("/")


def _add(counts: Mapping[bytes, int], totals: Counter[int]) -> None:
    for prefix, num_entries in counts.items():
        table_id = int.from_bytes(prefix[:_TABLE_BYTES], "big")
        if table_id and prefix[_TABLE_BYTES:] != _CLAIMS:
            totals[table_id] += num_entries


def _prefixes_of(file: dict[str, Any]) -> tuple[bytes, bytes]:
    first, last = (bytes((file[key] or b"")[:_PREFIX_BYTES]) for key in ("start_key", "end_key"))
    return first, last


def _look_into(path: Path) -> Mapping[bytes, int]:
    """Return about how many entries a file has of each prefix; none when it cannot be told."""
    try:
        reader = TableFileReader.open(path)
        if reader is None:  # of a kind that is not read here
            return {}
        with reader:
            return reader.count_by_prefix(_PREFIX_BYTES)
    except HeadraceError:  # compacted away since it was listed; or damaged, as whoever reads its rows will be told
        return {}
