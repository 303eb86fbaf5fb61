"""The spool: flushes that wait on disk, so that their staging buffers are free for the next ones.

It outlives an outage of the server, not the trainer: a restarted trainer has a new epoch and streams what the store
lacks. So the files are unnamed and never synced, and a crash leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import resource
import tempfile
import threading
from pathlib import Path

from headrace.schemas.errors import ConfigError
from headrace.streamer.flush.layout import Column, Flush, FlushedDeletions, FlushedTable

__all__ = ["Spool"]

# The least that a flush is charged, and the most flushes: each has a mapping and some KiB of memory, and a process may
# have 65 530 mappings. Python keeps a file descriptor with each mapping, and the trainer needs most of those itself.
_MIN_BYTES = mmap.PAGESIZE
_MAX_FLUSHES = 1024
_SHARE_OF_DESCRIPTORS = 4


class Spool:
    """A bounded place on disk for flushes; `used_bytes` are taken. Thread: any, but one `store` at a time."""

    def __init__(self, directory: Path, *, max_bytes: int) -> None:
        """Check that files can be created in the directory, on a local disk; raise `ConfigError` if not."""
        self._directory, self._max_bytes = directory, max_bytes
        self._lock = threading.Lock()
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_flushes = _MAX_FLUSHES
        if descriptors != resource.RLIM_INFINITY:
            self._max_flushes = min(_MAX_FLUSHES, max(1, descriptors // _SHARE_OF_DESCRIPTORS))
        self._num_flushes = 0
        self.used_bytes = 0
        try:
            tempfile.TemporaryFile(dir=directory).close()
        except OSError as exc:
            raise ConfigError(f"spool_dir {directory}: {exc.strerror}") from exc

    def store(self, flush: Flush) -> list[FlushedTable | FlushedDeletions] | None:
        """Write a flush's columns to disk; return its tables with the columns there, or None if there is no room.

        Then the caller releases the staging buffer, and later calls `remove`. An `OSError` leaves the flush as it was.
        """
        size_bytes = self._charge_of(flush)
        with self._lock:
            if self._num_flushes >= self._max_flushes or self.used_bytes + size_bytes > self._max_bytes:
                return None
            self._num_flushes += 1
            self.used_bytes += size_bytes
        try:
            return self._write(flush)
        except BaseException:
            self.remove(flush)
            raise

    def remove(self, flush: Flush) -> None:
        """Stop counting a flush that is not needed any more; its file goes with the last view of it."""
        with self._lock:
            self._num_flushes -= 1
            self.used_bytes -= self._charge_of(flush)

    def _charge_of(self, flush: Flush) -> int:
        return -(-max(1, flush.size_bytes) // _MIN_BYTES) * _MIN_BYTES

    def _write(self, flush: Flush) -> list[FlushedTable | FlushedDeletions]:
        if not flush.size_bytes:
            return []
        with tempfile.TemporaryFile(dir=self._directory, buffering=0) as file:
            for table in flush.tables:
                for column in table.columns:
                    _write_all(file.fileno(), column.data)
            # Written by calls, not through the mapping: there, a full disk is a signal instead of an error.
            view = memoryview(mmap.mmap(file.fileno(), flush.size_bytes, prot=mmap.PROT_READ))
        stored: list[FlushedTable | FlushedDeletions] = []
        offset = 0
        for table in flush.tables:
            columns = []
            for column in table.columns:
                end = offset + column.data.nbytes
                columns.append(Column(view[offset:end], column.row_bytes))
                offset = end
            stored.append(table.with_columns(columns))
        return stored


def _write_all(descriptor: int, data: memoryview) -> None:
    while data.nbytes:
        data = data[os.write(descriptor, data) :]
