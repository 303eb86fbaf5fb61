"""What an update log holds, segment by segment, with every checksum checked. Read-only: safe beside a running server.

Unlike `LogReader`, which stops at the first damage, inspection goes on and reports all of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from headrace.paramserver.log.interface import is_housekeeping
from headrace.paramserver.log.segment_reader import SegmentReader, damage, scan_growing
from headrace.paramserver.log.segments import list_segments, storage_errors
from headrace.schemas.errors import ConfigError, CorruptionError
from headrace.schemas.log_records import RecordHeader, RecordKind

__all__ = ["LogReport", "Range", "SegmentReport", "find_logs", "inspect_log", "size_of_log", "widen"]

# Server directory, shard directory, log directory.
_MAX_DEPTH = 2
# In a server's directory; a layer above creates it.
_MANIFEST_NAME = "headrace.json"

Range = tuple[int, int]
"""(least, greatest) of some numbers."""


def widen(found: Range | None, value: int) -> Range:
    """Return the range with a number added; None is the range without numbers."""
    return (value, value) if found is None else (min(found[0], value), max(found[1], value))


@dataclass(kw_only=True, slots=True)
class SegmentReport:
    """What a segment holds. Ranges are None without values.

    Attributes:
        log_id: In hex. If the header cannot be read, all fields from here to `created_us` are None.
        last_seq: Seq of the last record; first seq − 1 without any.
        created_us: Microseconds since 1970.
        sealed_us: Microseconds since 1970; None without a seal: the newest segment, while written or after a crash.
        num_records: Intact records, like `record_bytes`.
        steps: The field `step` of the records' headers.
        times_us: Their field `time_us`, microseconds since 1970.
        damage: One line for each damage, with file and offset.
    """

    path: Path
    size_bytes: int
    log_id: str | None = None
    first_seq: int | None = None
    last_seq: int | None = None
    created_us: int | None = None
    sealed_us: int | None = None
    num_records: int = 0
    record_bytes: int = 0
    epochs: Range | None = None
    steps: Range | None = None
    times_us: Range | None = None
    damage: list[str] = field(default_factory=list)

    def count(self, record: RecordHeader, fields: dict[str, Any]) -> None:
        """Count an intact record."""
        self.num_records += 1
        self.record_bytes += record.size_bytes
        self.last_seq = record.seq
        self.epochs = self.epochs if is_housekeeping(fields) else widen(self.epochs, record.epoch)
        step, time_us = fields.get("step"), fields.get("time_us")
        self.steps = widen(self.steps, step) if isinstance(step, int) else self.steps
        self.times_us = widen(self.times_us, time_us) if isinstance(time_us, int) else self.times_us


@dataclass(frozen=True, kw_only=True, slots=True)
class LogReport:
    """What the log in a directory holds; `damage` has one line for each damage in segments, and between them."""

    path: Path
    segments: list[SegmentReport]
    damage: list[str]


def find_logs(path: Path) -> list[Path]:
    """Return the directories of update logs at or below a path: the directory of a log, a shard or a server.

    Raises:
        ConfigError: The path is not a directory, or holds no log with a record.
        StorageError: A directory cannot be read.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: not a directory")
    found: list[Path] = []
    level = [path]
    with storage_errors(path, "listing"):
        for _ in range(_MAX_DEPTH + 1):
            found += [directory for directory in level if list_segments(directory)]
            level = [Path(entry) for directory in level for entry in os.scandir(directory) if entry.is_dir()]
    if not found and (path / _MANIFEST_NAME).is_file() and any(path.glob("shard-*/log")):
        raise ConfigError(f"{path}: its update logs have no records yet; nothing has been written to this server")
    if not found:
        raise ConfigError(f"{path}: holds no update log; name the directory of a server, of a shard or of its log")
    return sorted(found)


def size_of_log(path: Path) -> int:
    """Return the bytes of a log's segments, all of which `inspect_log` reads."""
    size_bytes = 0
    with storage_errors(path, "listing"):
        for segment in list_segments(path):
            with suppress(FileNotFoundError):  # trimmed since it was listed
                size_bytes += segment.stat().st_size
    return size_bytes


def inspect_log(path: Path, *, on_progress: Callable[[int], None] = lambda _: None) -> LogReport:
    """Read the log in a directory from end to end and check it. Thread: any; blocks.

    `on_progress` is called now and then with the number of bytes checked since the last call.

    Raises:
        StorageError: A file cannot be read.
    """
    paths = list_segments(path)
    segments: list[SegmentReport] = []
    for segment in paths:
        with suppress(FileNotFoundError):  # trimmed since it was listed
            segments.append(_inspect_segment(segment, on_progress, is_last=segment == paths[-1]))
    found = [line for report in segments for line in report.damage]
    for before, after in pairwise(segments):
        found += _check_neighbors(before, after)
    return LogReport(path=path, segments=segments, damage=found)


def _inspect_segment(path: Path, on_progress: Callable[[int], None], *, is_last: bool) -> SegmentReport:
    report = SegmentReport(path=path, size_bytes=path.stat().st_size)
    try:
        file = SegmentReader(path)
    except CorruptionError as exc:
        report.damage.append(str(exc))
        on_progress(report.size_bytes)
        return report
    with file:
        seal = file.read_seal()
        if seal is None and not is_last:
            report.damage.append(str(damage(path, file.limit, "no seal, and not the last segment")))
        report.sealed_us = None if seal is None else seal.sealed_us
        if seal is None:
            _walk_open(file, report, on_progress)
        else:
            _walk_sealed(file, report, on_progress)
    return report


def _begin(file: SegmentReader, report: SegmentReport) -> None:
    header = file.header
    report.log_id, report.created_us = header.log_id.hex(), header.created_us
    report.first_seq, report.last_seq = header.first_seq, header.first_seq - 1
    report.num_records = report.record_bytes = 0
    report.epochs = report.steps = report.times_us = None


def _walk_open(file: SegmentReader, report: SegmentReport, on_progress: Callable[[int], None]) -> None:
    done = 0

    def visit(record: RecordHeader, fields: dict[str, Any]) -> None:
        nonlocal done
        report.count(record, fields)
        if file.offset > done:  # the second scan adds no progress
            on_progress(file.offset - done)
            done = file.offset

    try:
        scan_growing(file, visit, on_start=lambda: _begin(file, report))
    except CorruptionError as exc:
        report.damage.append(str(exc))
    on_progress(max(0, report.size_bytes - done))


def _walk_sealed(file: SegmentReader, report: SegmentReport, on_progress: Callable[[int], None]) -> None:
    """Walk a segment that does not change; continue after damaged records, up to the first damaged header."""
    _begin(file, report)
    start = 0
    expected = file.header.first_seq
    try:
        while (record := file.peek()) is not None and record.kind is RecordKind.DATA:
            if record.seq != expected:
                raise damage(file.path, file.offset, f"seq {record.seq} where {expected} should be")
            try:
                fields, _ = file.read_data(record)
                report.count(record, fields)
            except CorruptionError as exc:
                report.damage.append(str(exc))
                report.last_seq = record.seq
            expected += 1
            file.offset += record.size_bytes
            on_progress(file.offset - start)
            start = file.offset
        if record is None or record.kind is not RecordKind.SEAL or record.seq != expected - 1:
            raise damage(file.path, file.offset, f"neither record {expected} nor the seal")
    except CorruptionError as exc:
        report.damage.append(str(exc))
    on_progress(max(0, report.size_bytes - start))


def _check_neighbors(before: SegmentReport, after: SegmentReport) -> list[str]:
    found = []
    if None not in (before.log_id, after.log_id) and before.log_id != after.log_id:
        found.append(f"{after.path}: a segment of another log than {before.path.name}")
    # A damaged segment is reported already, and where it should have ended is unknown.
    if before.last_seq is not None and after.first_seq not in (None, before.last_seq + 1) and not before.damage:
        found.append(f"{after.path}: a segment is missing before it: {before.path.name} ends at seq {before.last_seq}")
    return found
