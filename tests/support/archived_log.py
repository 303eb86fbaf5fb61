"""A file log with small segments, and an object store in a directory, for tests of the archive."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from waiting import WAIT_S, until

from headrace.paramserver.archive.objects import ShardArchive
from headrace.paramserver.log.files import FileUpdateLog
from headrace.paramserver.log.interface import LogRecord, UpdateLogConfig
from headrace.paramserver.system.object_store import ObjectStore

__all__ = ["WAIT_S", "append", "archive_in", "flatten", "open_file_log", "until"]


def archive_in(directory: Path, shard: int = 0) -> ShardArchive:
    """Return the archive of a shard in a directory that is an object store."""
    directory.mkdir(exist_ok=True)
    return ShardArchive(ObjectStore.of_url(f"file://{directory}", deadline_s=0.5), shard)


@asynccontextmanager
async def open_file_log(directory: Path, **settings: Any) -> AsyncIterator[FileUpdateLog]:
    log = FileUpdateLog.open(directory, config=UpdateLogConfig(**{"segment_bytes": 1 << 20, **settings}))
    try:
        yield log
    finally:
        await log.close()


async def append(log: FileUpdateLog, num_records: int, *, size_bytes: int = 100) -> None:
    """Append records whose body tells their number, and wait until they are durable."""
    first = log.last_seq + 1
    pending = [
        log.append(epoch=3, header={"n": first + i}, body=[(first + i).to_bytes(8, "big") + bytes(size_bytes)])
        for i in range(num_records)
    ]
    for each in pending:
        await each.durable


def flatten(record: LogRecord) -> tuple[int, int, Any, bytes]:
    return record.seq, record.epoch, record.header, bytes(record.body)
