"""The bytes of a copy of partitions: chunks of runs of records. No I/O.

    byte  0       4         8
          crc32c  size      head                                   ids of each run, records of each run
          u32     of head,  msgpack: [table, offset, width,        int64[n] and record bytes[n], run after run
                  u32       ids, bytes of a record] of each run

The checksum is of all that follows it. Runs are in the order of the source's keys. On the wire tables have the
source's numbers. ON THE WIRE, between shards of equal versions; ON
DISK, in the log of the destination, with its own numbers of tables.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from headrace.schemas.errors import CorruptionError
from headrace.schemas.tables import ColumnShard

__all__ = ["CopyRun", "decode_runs", "encode_runs", "grouped", "renumbered"]

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]
_HEAD = struct.Struct("<II")
_CHECKED_FROM = 4


@dataclass(frozen=True, slots=True, eq=False)
class CopyRun:
    """Ids, int64[n], and records, `V`[n], contiguous, of one column shard of table `table_id`."""

    table_id: int
    shard: ColumnShard
    ids: _Ids
    records: _Array

    @property
    def size_bytes(self) -> int:
        """Bytes of ids and records."""
        return self.ids.nbytes + self.records.nbytes


def grouped(runs: Iterable[CopyRun], max_bytes: int) -> Iterator[list[CopyRun]]:
    """Yield runs in groups of about `max_bytes`, cutting long ones; none is empty."""
    group: list[CopyRun] = []
    size = 0
    for run in runs:
        row_bytes = 8 + run.records.itemsize
        start = 0
        while start < run.ids.size:
            end = min(start + max(1, (max_bytes - size) // row_bytes), run.ids.size)
            group.append(CopyRun(run.table_id, run.shard, run.ids[start:end], run.records[start:end]))
            size += (end - start) * row_bytes
            start = end
            if size + row_bytes > max_bytes:
                yield group
                group, size = [], 0
    if group:
        yield group


def encode_runs(runs: Iterable[CopyRun]) -> bytes:
    """Return a chunk."""
    runs = list(runs)
    head = msgpack.packb(
        [[run.table_id, run.shard.offset, run.shard.width, run.ids.size, run.records.itemsize] for run in runs]
    )
    parts = [len(head).to_bytes(4, "little"), head]
    for run in runs:
        parts += [run.ids.tobytes(), run.records.tobytes()]
    body = b"".join(parts)
    return crc32c(body).to_bytes(4, "little") + body


def decode_runs(data: bytes | memoryview) -> list[CopyRun]:
    """Return the runs of a chunk, as views of it.

    Raises:
        CorruptionError: It is damaged.
    """
    try:
        checksum, head_bytes = _HEAD.unpack_from(data)
        if crc32c(memoryview(data)[_CHECKED_FROM:]) != checksum:
            raise ValueError("its checksum differs")
        at = _HEAD.size + head_bytes
        runs = []
        for table_id, offset, width, size, record_bytes in msgpack.unpackb(memoryview(data)[_HEAD.size : at]):
            ids = np.frombuffer(data, "<i8", size, at)
            records = np.frombuffer(data, f"V{record_bytes}", size, at + ids.nbytes)
            runs.append(CopyRun(table_id, ColumnShard(offset=offset, width=width), ids, records))
            at += ids.nbytes + records.nbytes
        if at != len(data):
            raise ValueError(f"{len(data) - at} bytes too many")
    except (ValueError, TypeError, struct.error) as exc:
        raise CorruptionError(f"a chunk of a copy of partitions is damaged: {exc}") from exc
    return runs


def renumbered(runs: Iterable[CopyRun], numbers: Mapping[int, int | None]) -> Iterator[CopyRun]:
    """Yield runs with other numbers of tables, without those of tables whose number is None.

    Raises:
        CorruptionError: A table has none in `numbers`.
    """
    for run in runs:
        if run.table_id not in numbers:
            raise CorruptionError(f"a copy of partitions has rows of table {run.table_id}, which it does not name")
        if (number := numbers[run.table_id]) is not None:
            yield replace(run, table_id=number)
