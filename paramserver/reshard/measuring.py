"""What a shard measures of itself for the plan of a reshard. Everything here blocks: use a thread."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.log.interface import KIND_BATCH, LogRecord, UpdateLog
from headrace.paramserver.reshard.store_view import PartitionFilter, StoreView
from headrace.paramserver.system.direct_file import DirectFileWriter, read_direct, write_buffer
from headrace.schemas.errors import GoneError, StorageError
from headrace.schemas.idl import idl
from headrace.schemas.messages import decode_header, decode_struct
from headrace.schemas.partition_map import PartitionMap

__all__ = ["DiskFigures", "measure_disk", "measure_scan", "updates_by_partition"]

# Long enough for a disk's cache of its own to matter little, short enough not to delay the log's syncs.
_PROBE_BYTES = 16 << 20
_PIECE_BYTES = 4 << 20
# Of the disk, for logs that are held back and for compactions.
_RESERVE_PART = 0.05
_SHORTEST_S = 0.1
# Read of a store; with less than the first there is nothing to tell.
_LEAST_SCANNED_BYTES, _SCANNED_BYTES = 4 << 20, 256 << 20

DiskFigures = tuple[str, int, float, float]
"""Name of machine and disk, bytes that may be written, bytes a second of reading and of writing."""


def measure_disk(directory: Path, *, clock_s: Callable[[], float] = time.monotonic) -> DiskFigures:
    """Write and read a short file past the page cache.

    Raises:
        StorageError: The disk is full or fails.
    """
    path = directory / f".speed-{os.getpid()}"
    try:
        files = os.statvfs(directory)
        disk = f"{platform.node()}:{os.stat(directory).st_dev}"
        free_bytes = int(files.f_bavail * files.f_frsize - _RESERVE_PART * files.f_blocks * files.f_frsize)
        try:
            began_s = clock_s()
            with DirectFileWriter(path, write_buffer()) as file:
                piece = np.random.default_rng(0).bytes(_PIECE_BYTES)
                for _ in range(_PROBE_BYTES // _PIECE_BYTES):
                    file.write(piece)
                file.sync()
            written_s = clock_s()
            read_bytes = sum(len(data) for data in read_direct(path))
            read_s = clock_s()
        finally:
            path.unlink(missing_ok=True)
    except OSError as exc:
        raise StorageError(f"{directory}: the speed of the disk cannot be measured: {exc.strerror or exc}") from exc
    shortest_s = 1e-6
    return (
        disk,
        max(free_bytes, 0),
        read_bytes / max(read_s - written_s, shortest_s),
        _PROBE_BYTES / max(written_s - began_s, shortest_s),
    )


def measure_scan(view: StoreView, wanted: PartitionFilter, *, clock_s: Callable[[], float] = time.monotonic) -> float:
    """Return the bytes a second of its files at which a copy would read a store; 0 if there are too few.

    A long store is not read to its end: then those of its rows alone count. Raises as `StoreView.records`.
    """
    began_s, size_bytes = clock_s(), 0
    for table in view.tables:
        for layout in view.layouts(table):
            for ids, records in view.records(table, layout, wanted):
                size_bytes += ids.nbytes + records.nbytes
                if size_bytes >= _SCANNED_BYTES:
                    return size_bytes / (clock_s() - began_s)
    return view.size_bytes / (clock_s() - began_s) if size_bytes >= _LEAST_SCANNED_BYTES else 0.0


def updates_by_partition(
    log: UpdateLog, seed_of: Callable[[str], int | None], known: PartitionMap, *, max_bytes: int, now_us: int
) -> npt.NDArray[np.float64]:
    """Return the rows a second that writers send for each partition, float64[partitions].

    They are counted in the last `max_bytes` of the log, which is exact there, and costs nothing while rows come. A rate
    is over the time from the first of these records, by its trainer's clock, until now.

    Args:
        log: The shard's.
        seed_of: Returns a table's routing seed by name; None for a table that is gone.
        known: The partitions.
        max_bytes: About so much is read.
        now_us: Microseconds since 1970.
    """
    counts = np.zeros(known.num_partitions, np.int64)
    num_records = log.last_seq - log.first_seq + 1
    if num_records <= 0:
        return counts.astype(np.float64)
    # An average record may be longer than the last ones; that only makes the window shorter.
    num_read = max(int(num_records * min(max_bytes / max(log.size_bytes, 1), 1)), 1)
    first_us = now_us
    try:
        for record in log.read(log.last_seq - num_read + 1, past_cache=True):
            if record.header.get("kind") == KIND_BATCH:
                first_us = min(first_us, _count(record, seed_of, known, counts) or now_us)
    except GoneError:  # removed meanwhile: the records before it count
        pass
    return counts / max((now_us - first_us) / 1e6, _SHORTEST_S)


def _count(
    record: LogRecord, seed_of: Callable[[str], int | None], known: PartitionMap, counts: npt.NDArray[np.int64]
) -> int:
    """Count a batch's rows; return its time, microseconds since 1970."""
    offset = decode_header(record.body).body_offset
    request: Any = decode_struct(idl.ParameterServer.setEmbeddings_args, record.body, offset).request
    for delta in request.deltas:
        if (seed := seed_of(delta.fqn)) is None:
            continue
        for packed in (delta.row_ids, delta.deleted_row_ids or b""):
            row_ids = np.frombuffer(packed, "<i8").astype(np.int64)
            counts += np.bincount(known.partitions_of_rows(seed, row_ids), minlength=len(counts))
    return int(request.time_us)
