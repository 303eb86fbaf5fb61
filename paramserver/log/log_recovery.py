"""Opening an update log's directory: its lock, and what is done about what a crash has left.

A log that was closed has only sealed segments, and nothing is done. After a crash the last segment has no seal: it is
checked record by record, cut behind the last intact one, and sealed. So writing always begins with a new segment.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from headrace.paramserver.files.file_ops import FileOps
from headrace.paramserver.log.log_reader import check_chain, load_sealed
from headrace.paramserver.log.log_segments import UNFINISHED_SUFFIX, LogSegment, fail_storage, list_segments
from headrace.paramserver.log.segment_file import SegmentFile, Tail, damage
from headrace.schemas.errors import ConfigError
from headrace.schemas.log_records import Seal, encode_seal

__all__ = ["LOCK_NAME", "claim_directory", "recover_segments"]

LOCK_NAME = "LOCK"


def claim_directory(path: Path, ops: FileOps) -> int:
    """Make a log's directory if need be, durably, and return a file descriptor that holds its lock.

    Raises:
        ConfigError: The log is open elsewhere.
        StorageError: The file system refuses.
    """
    try:
        missing = [parent for parent in (path, *path.parents) if not parent.exists()]
        for directory in reversed(missing):
            directory.mkdir()
            ops.fsync_dir(directory.parent)
        lock_fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as exc:
        fail_storage(path, exc, doing="opening the log")
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(lock_fd)
        raise ConfigError(f"{path}: the log is in use by another process; stop that one first") from exc
    except OSError as exc:
        os.close(lock_fd)
        fail_storage(path, exc, doing="locking the log")
    return lock_fd


def recover_segments(path: Path, ops: FileOps, clock_us: Callable[[], int]) -> tuple[list[LogSegment], str | None]:
    """Return a log's segments, all of them sealed, and what was cut from the last one, if anything.

    REQUIRES: the caller holds the directory's lock.

    Args:
        path: The log's directory.
        ops: The file system.
        clock_us: Wall clock, microseconds since 1970.

    Raises:
        StorageError: The file system refuses.
        CorruptionError: A segment is damaged or missing; nothing was changed.
    """
    try:
        unfinished = [path / name for name in sorted(os.listdir(path)) if name.endswith(UNFINISHED_SUFFIX)]
        paths = list_segments(path)
    except OSError as exc:
        fail_storage(path, exc, doing="listing the log")
    segments: list[LogSegment] = []
    tail: Tail | None = None
    for file in paths:
        segment = load_sealed(file)
        if segment is None:
            if file != paths[-1]:
                raise damage(file, file.stat().st_size, "no seal, and not the last segment")
            segment, tail = _scan_last(file, ops)
        segments.append(segment)
    check_chain(segments)
    # Only now is anything changed.
    try:
        for file in unfinished:
            ops.unlink(file)
    except OSError as exc:
        fail_storage(path, exc, doing="removing an unfinished segment")
    if tail is None:
        return segments, None
    return segments, _seal_last(segments[-1], tail, ops, clock_us())


def _scan_last(path: Path, ops: FileOps) -> tuple[LogSegment, Tail]:
    """Return the last segment up to where it is intact, as the disk has it."""
    try:
        fd = ops.open(path, os.O_RDWR)
        try:
            # What a killed process wrote may be in memory only, and a failed sync leaves pages there that the disk
            # never got: write what can be written, forget the rest, and read what is really there.
            ops.fdatasync(fd)
            ops.drop_cache(fd)
        finally:
            ops.close(fd)
    except OSError as exc:
        fail_storage(path, exc, doing="syncing")
    with SegmentFile(path) as file:
        tail = file.scan_tail()
        return LogSegment(path, file.header, tail.last_seq, tail.end, None), tail


def _seal_last(segment: LogSegment, tail: Tail, ops: FileOps, now_us: int) -> str | None:
    """Cut and seal the last segment, durably; a crash on the way leaves one that this is done to again."""
    num_records = segment.last_seq - segment.first_seq + 1
    seal = encode_seal(mark=segment.header.mark, seal=Seal(segment.last_seq, num_records, now_us))
    try:
        fd = ops.open(segment.path, os.O_RDWR)
        try:
            ops.truncate(fd, segment.end)
            written = ops.pwritev(fd, [seal], segment.end)
            if written != len(seal):
                raise OSError(f"only {written} of {len(seal)} bytes written")
            ops.fsync(fd)
        finally:
            ops.close(fd)
    except OSError as exc:
        fail_storage(segment.path, exc, doing="sealing")
    segment.sealed_us = now_us
    if tail.reason is None:
        return None
    return f"{tail.reason}; the log goes on after seq {segment.last_seq}"
