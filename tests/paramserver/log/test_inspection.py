"""Inspecting logs: what is counted, that all damage is found, and that nothing is touched."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest
from log_files import SMALL, flip, segments_of

from headrace.paramserver.config.data_dir import DataDir
from headrace.paramserver.log.files import FileUpdateLog
from headrace.paramserver.log.inspection import LogReport, find_logs, inspect_log, size_of_log
from headrace.paramserver.log.interface import UpdateLogConfig, note_header
from headrace.paramserver.log.segment_reader import LogReader
from headrace.schemas.errors import ConfigError, StorageError
from headrace.schemas.log_records import SEAL_BYTES


async def _make(path: Path, count: int = 100) -> list[Path]:
    """Make a log and return its segments."""
    log = FileUpdateLog.open(path, config=SMALL, clock_us=lambda: 5_000_000)
    await _append(log, count)
    await log.close()
    return segments_of(path)


async def _append(log: FileUpdateLog, count: int) -> None:
    appends = []
    for seq in range(log.last_seq + 1, log.last_seq + count + 1):
        header = {"step": 10 * seq, "time_us": 1_000_000 + seq} if seq > 1 else {}
        appends.append(log.append(epoch=1 + seq // 50, header=header, body=[bytes(90)]).durable)
    await asyncio.gather(*appends)


async def test_whole_log_is_described(path: Path) -> None:
    """Seqs, epochs, steps, times and sizes are those of the records; progress adds up to the size."""
    segments = await _make(path)
    done: list[int] = []
    report = inspect_log(path, on_progress=done.append)
    assert report.damage == []
    assert sum(done) == size_of_log(path) == sum(file.stat().st_size for file in segments)
    first, last = report.segments[0], report.segments[-1]
    assert (first.first_seq, last.last_seq) == (1, 100)
    assert sum(segment.num_records for segment in report.segments) == 100
    assert first.steps is not None and last.steps is not None and last.times_us is not None
    assert (first.steps[0], last.steps[1], last.times_us[1]) == (20, 1000, 1_000_100)  # record 1 has no step
    assert (first.epochs, last.epochs) == ((1, 1), (2, 3))
    assert {segment.log_id for segment in report.segments} == {first.log_id}
    assert all(segment.created_us == segment.sealed_us == 5_000_000 for segment in report.segments)


async def test_every_flipped_byte_is_found(path: Path) -> None:
    """Any changed byte of a sealed segment is reported with the file, and inspection goes on to the end."""
    segment = (await _make(path))[1]
    data = segment.read_bytes()
    rng = random.Random(5)
    for at in [*rng.sample(range(len(data)), 150), 0, 8, 63, 64, len(data) - SEAL_BYTES, len(data) - 1]:
        segment.write_bytes(data)
        flip(segment, at, bits=1 << rng.randrange(8))
        report = inspect_log(path)
        assert report.damage
        assert all(str(segment) in line for line in report.damage)
        assert report.segments[-1].last_seq == 100


async def test_all_damage_is_gathered(tmp_path: Path) -> None:
    """Records after a damaged one with an intact header are checked; missing and other logs' segments are named."""
    path, other = tmp_path / "a", tmp_path / "b"
    first, second = (await _make(path))[:2]
    await _make(other)
    second.unlink()
    (line,) = inspect_log(path).damage
    assert "a segment is missing before it" in line
    flip(first, 150, 500, 1466)  # in bodies, not in headers
    report = inspect_log(path)
    assert sum(str(first) in line for line in report.damage) == 3
    assert report.segments[0].num_records == report.segments[0].last_seq - 3  # type: ignore[operator]
    assert inspect_log(path).damage == report.damage
    first.write_bytes(first.read_bytes()[:1000])
    assert any("no seal" in line for line in inspect_log(path).damage)
    second.write_bytes((other / second.name).read_bytes())
    assert sum("another log" in line for line in inspect_log(path).damage) == 2


async def test_segment_left_by_a_crash_is_open_and_whole(path: Path) -> None:
    """A segment without a seal is not damaged, torn tail or not, unless an acked record is."""
    (segment,) = await _make(path, 10)
    data = segment.read_bytes()[:-SEAL_BYTES]
    for tail in (b"", bytes(5000), b"torn"):
        segment.write_bytes(data + tail)
        (report,) = inspect_log(path).segments
        assert (report.damage, report.sealed_us, report.last_seq, report.num_records) == ([], None, 10, 10)
    segment.write_bytes(data[:-5])
    assert inspect_log(path).segments[0].last_seq == 9


async def test_log_that_is_being_written_is_inspected(path: Path) -> None:
    """Beside a running log, over new and trimmed segments, no damage is reported."""
    log = FileUpdateLog.open(path, config=UpdateLogConfig(segment_bytes=16384, allocate_bytes=8192))
    await _append(log, 1)
    stop = False

    def inspect_all() -> list[LogReport]:
        reports = [inspect_log(path)]
        while not stop:
            reports.append(inspect_log(path))
        return reports

    inspecting = asyncio.create_task(asyncio.to_thread(inspect_all))
    for _ in range(60):
        await _append(log, 10)
        await asyncio.to_thread(log.trim, log.last_seq - 300)
    stop = True
    reports = await inspecting
    await log.close()
    assert [report.damage for report in reports] == [[]] * len(reports)
    assert inspect_log(path).segments[-1].last_seq == 601


async def test_any_damage_gives_only_documented_errors(path: Path) -> None:
    """Whatever bytes a segment has, reading raises only `StorageError`, and inspection nothing."""
    (segment,) = await _make(path, 20)
    data = segment.read_bytes()
    rng = random.Random(11)
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(damaged))
            damaged[at : at + rng.randint(0, 9)] = rng.randbytes(rng.randint(0, 9))
        segment.write_bytes(damaged[: rng.randint(0, len(damaged))] if rng.random() < 0.3 else damaged)
        inspect_log(path)
        try:
            for _ in LogReader(path).read(1):
                pass
        except StorageError as exc:
            assert str(segment) in str(exc)


async def test_logs_are_found(tmp_path: Path) -> None:
    """The directories of a server, of a shard and of a log lead to the logs, in order; others are mistakes."""
    logs = [tmp_path / "data" / f"shard-{shard:04d}" / "log" for shard in range(3)]
    for log in logs:
        await _make(log, 1)
        (log.parent / "store").mkdir()
        (log.parent / "store" / "000012.log").write_bytes(b"not ours")
    assert find_logs(tmp_path / "data") == logs
    assert find_logs(logs[1].parent) == find_logs(logs[1]) == [logs[1]]
    with pytest.raises(ConfigError, match="holds no update log"):
        find_logs(logs[1].parent / "store")
    with pytest.raises(ConfigError, match="not a directory"):
        find_logs(tmp_path / "gone")
    with DataDir.claim(tmp_path / "new", num_shards=2) as made:
        made.prepare()
    with pytest.raises(ConfigError, match="new: its update logs have no records yet; nothing has been written"):
        find_logs(tmp_path / "new")


async def test_inspecting_touches_nothing(path: Path) -> None:
    """Neither names nor sizes nor modification times differ afterwards."""
    last = (await _make(path))[-1]
    last.write_bytes(last.read_bytes()[:-SEAL_BYTES] + b"torn")

    def state() -> list[tuple[str, int, int]]:
        return sorted((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in os.scandir(path))

    before = state()
    inspect_log(path)
    assert state() == before


async def test_what_a_log_writes_for_itself_has_no_epoch(path: Path) -> None:
    """The epochs of a mirrored log are those of its writers; the other records count as records."""
    log = FileUpdateLog.open(path, config=SMALL)
    await log.append(epoch=7, header={}, body=[]).durable
    await log.append(epoch=1, header=note_header("heartbeat"), body=[]).durable
    await log.close()
    (segment,) = inspect_log(path).segments
    assert (segment.num_records, segment.epochs) == (2, (7, 7))
