"""What a store takes for its RocksDB, in memory: a flush writes it to one file, and a killed process loses the rest."""

from __future__ import annotations

import itertools
import marshal
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from host_loop import host_here

from headrace.schemas.errors import StorageError, UnavailableError

__all__ = ["MemoryRocks"]

_FILE = "CURRENT"


class MemoryRocks:
    """As `RocksDb`."""

    def __init__(self, path: Path, pairs: dict[bytes, bytes]) -> None:
        self.path = path
        self._pairs, self._host = pairs, host_here()
        self._keys: list[bytes] | None = None  # in order, unless they have changed
        self._is_closed = False

    @classmethod
    def open(cls, path: Path, options: Any, *, is_read_only: bool = False) -> MemoryRocks:
        """Return what the last flush has written."""
        file = path / _FILE
        return cls(path, marshal.loads(file.read_bytes()) if file.exists() else {})

    def close(self) -> bool:
        """Flush, and return whether it was open."""
        if self._is_closed:
            return False
        self.flush()
        self._is_closed = True
        return True

    def flush(self) -> None:
        """Write the file."""
        if self._host is not None and self._host.is_dead:
            raise StorageError("the process was killed")
        _write(self.path, self._open())

    def checkpoint(self, path: Path) -> None:
        """Write a copy into a new directory."""
        path.mkdir()
        _write(path, self._open())

    def write(self, keys: Sequence[bytes], values: Sequence[bytes], removed: Sequence[bytes] = ()) -> int:
        """Write pairs and remove keys; return the size."""
        pairs = self._open()
        size = len(pairs)
        pairs.update(zip(keys, values, strict=True))
        for key in removed:
            pairs.pop(key, None)
        if removed or len(pairs) != size:
            self._keys = None
        return sum(map(len, keys)) + sum(map(len, values))

    def delete_range(self, begin: bytes, end: bytes) -> None:
        """Remove the keys from one on and before another one."""
        self.write([], [], [key for key in self._open() if begin <= key < end])

    def get(self, keys: list[bytes]) -> list[bytes | None]:
        """Return the value of each key."""
        return list(map(self._open().get, keys))

    def scan(
        self, prefix: bytes, *, start: bytes | None = None, limit: int | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield pairs with a prefix, in order."""
        pairs = self._open()
        if self._keys is None:
            self._keys = sorted(pairs)
        keys = self._keys[bisect_left(self._keys, max(start or prefix, prefix)) :]
        of_prefix = itertools.takewhile(lambda key: key.startswith(prefix), keys)
        return iter([(key, pairs[key]) for key in itertools.islice(of_prefix, limit)])

    def scan_chunks(self, prefix: bytes, *, start: bytes, sizes: Iterable[int]) -> Iterator[list[tuple[bytes, bytes]]]:
        """Yield chunks of the pairs with a prefix."""
        pairs = self.scan(prefix, start=start)
        for size in sizes:
            if not (chunk := list(itertools.islice(pairs, size))):
                return
            yield chunk

    def ingest(self, file: Path) -> bool:
        """Refuse: stores in memory are small."""
        raise NotImplementedError

    def live_files(self) -> list[dict[str, Any]]:
        """Return the file, which readers of RocksDB's files do not know."""
        keys = sorted(self._open())
        if not keys:
            return []
        size = len(keys)
        return [
            {"name": f"/{_FILE}", "level": 0, "start_key": keys[0], "end_key": keys[-1], "num_entries": size, "size": 1}
        ]

    def property_value(self, name: str) -> str:
        """Return that there is nothing of it."""
        return "0"

    def map_errors(self, work: Callable[[], Any]) -> Any:
        """Call it."""
        return work()

    def _open(self) -> dict[bytes, bytes]:
        if self._is_closed:
            raise UnavailableError("the store is closed")
        return self._pairs


def _write(path: Path, pairs: dict[bytes, bytes]) -> None:
    new = path / "NEW"
    new.write_bytes(marshal.dumps(pairs))
    new.rename(path / _FILE)
