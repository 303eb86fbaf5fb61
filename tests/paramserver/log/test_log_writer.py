"""What the writer of an update log does to its files, in which order, and what a failing disk makes of it."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest
from faulty_file_ops import FaultyFileOps
from log_files import SMALL, body_of, check_records, fill, opened_log, segments_of

from headrace.paramserver.log import log_segments
from headrace.paramserver.log.file_update_log import FileUpdateLog
from headrace.paramserver.log.log_segments import segment_name
from headrace.paramserver.log.update_log import UpdateLogConfig
from headrace.schemas.errors import StorageError


async def test_a_failure_behind_the_last_record_is_told(tmp_path: Path) -> None:
    """When only the mark of an idle log cannot be written, whoever waits for a failure hears of it at once."""
    ops = FaultyFileOps()
    async with opened_log(tmp_path / "log", ops=ops) as log:
        waiting = asyncio.create_task(log.wait_failed())
        ops.fail("pwritev", errno.EIO, after=2)  # the segment's header and the record are written, the mark is not
        append = log.append(epoch=1, header={}, body=[body_of(1)])
        await append.durable
        assert "Input/output error" in str(await asyncio.wait_for(waiting, 10))
        assert await log.wait_failed() is log.failed


_FAULTS = [
    ("fdatasync", errno.EIO),
    ("pwritev", errno.ENOSPC),
    ("pwritev", errno.EIO),
    ("allocate", errno.ENOSPC),
    ("open", errno.EMFILE),
    ("fsync", errno.EIO),
    ("rename", errno.EIO),
    ("fsync_dir", errno.EIO),
    ("truncate", errno.EIO),
]


@pytest.mark.parametrize("after", [0, 1, 2, 5])
@pytest.mark.parametrize(("operation", "code"), _FAULTS)
async def test_failing_disk_stops_the_log_for_good(
    tmp_path: Path, operation: str, code: int, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Any refusal by the disk fails what waits, acks nothing more, and leaves all that was acked for the next start."""
    path, ops = tmp_path / "log", FaultyFileOps()
    log = FileUpdateLog.open(path, config=SMALL, ops=ops)
    await fill(log, 3)
    ops.fail(operation, code, after=after)
    acked = 3
    while log.failed is None and acked < 1000:
        appends = []
        for seq in range(acked + 1, acked + 11):
            try:
                appends.append(log.append(epoch=1, header={}, body=[body_of(seq)]).durable)
            except StorageError:
                break  # it failed while we were at it
        results = await asyncio.gather(*appends, return_exceptions=True)
        good = [result for result in results if result is None]
        assert results[: len(good)] == good, "acks are a prefix"
        assert all(isinstance(result, StorageError) for result in results[len(good) :])
        acked += len(good)
    assert errno.errorcode[code] in str(log.failed)
    calls = len(ops.calls)
    with pytest.raises(StorageError, match=errno.errorcode[code]):
        log.append(epoch=1, header={}, body=[])
    assert log.last_seq == acked
    check_records(log, acked)
    await log.close()
    assert len(ops.calls) == calls, "nothing was tried again"
    ops.power_cut()
    async with opened_log(path, SMALL) as log:
        assert log.last_seq >= acked
        check_records(log, log.last_seq)
    assert "the update log stops" in caplog.text
    assert "Traceback" not in caplog.text


async def test_short_write_stops_the_log(tmp_path: Path) -> None:
    """A write that the system cut short is a failure, and its half record is cut at the next start."""
    path, ops = tmp_path / "log", FaultyFileOps()
    async with opened_log(path, ops=ops) as log:
        await fill(log, 3)
        ops.write_short(70)
        ops.write_short(70)
        with pytest.raises(StorageError):
            await fill(log, 1)
        assert "only" in str(log.failed)
    async with opened_log(path) as log:
        check_records(log, 3)


async def test_failed_seal_on_close_loses_nothing(tmp_path: Path) -> None:
    """When the seal cannot be written the log says so, and the next start seals what is there."""
    path, ops = tmp_path / "log", FaultyFileOps()
    async with opened_log(path, ops=ops) as log:
        await fill(log, 3)
        ops.fail("fsync", errno.EIO)
    assert "EIO" in str(log.failed)
    async with opened_log(path) as log:
        check_records(log, 3)


async def test_a_file_that_cannot_be_closed_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """A log is closed, and says why it failed, also when the last thing that it does with its file fails."""

    class FailsToClose(FaultyFileOps):
        def close(self, fd: int) -> None:
            super().close(fd)
            raise OSError(errno.EIO, "Input/output error")

    log = FileUpdateLog.open(tmp_path / "log", ops=FailsToClose())
    await fill(log, 3)
    await asyncio.wait_for(log.close(), 10)
    assert "Input/output error" in str(log.failed)
    async with opened_log(tmp_path / "log") as log:
        check_records(log, 3)


async def test_bug_in_the_writer_stops_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody foresaw fails what waits instead of leaving it to wait for ever."""
    async with opened_log(tmp_path / "log") as log:
        await fill(log, 1)
        monkeypatch.setattr(log_segments.SegmentWriter, "write", lambda *_: 1 / 0)
        with pytest.raises(StorageError, match="ZeroDivisionError"):
            await fill(log, 1)
        assert log.failed is not None


async def test_disk_without_preallocation_is_written_all_the_same(tmp_path: Path) -> None:
    """Where blocks cannot be reserved the files grow as they are written."""
    path, ops = tmp_path / "log", FaultyFileOps()
    ops.fail("allocate", errno.EOPNOTSUPP)
    async with opened_log(path, ops=ops) as log:
        await fill(log, 5)
    assert [call for call in ops.calls if call[0] == "allocate"] == [("allocate", segment_name(1) + ".new")]
    async with opened_log(path) as log:
        check_records(log, 5)


async def test_segment_is_durable_before_its_first_record(tmp_path: Path) -> None:
    """A new segment is written aside, synced, named, and its name synced; the old one is sealed before all that."""
    path, ops = tmp_path / "log", FaultyFileOps()
    async with opened_log(path, SMALL, ops) as log:
        await fill(log, 1, size_bytes=3900)
        ops.gate.clear()
        ops.reached.clear()
        first = log.append(epoch=1, header={}, body=[bytes(3900)])
        assert await asyncio.to_thread(ops.reached.wait, 30)
        del ops.calls[:]
        second = log.append(epoch=1, header={}, body=[bytes(3900)])
        ops.gate.set()
        await asyncio.gather(first.durable, second.durable)
        calls = list(ops.calls)
    one, two = segment_name(2), segment_name(3)
    expected = [
        ("truncate", one),
        ("pwritev", one),
        ("fsync", one),
        ("open", f"{two}.new"),
        ("allocate", f"{two}.new"),
        ("pwritev", f"{two}.new"),
        ("fsync", f"{two}.new"),
        ("rename", two),
        ("fsync_dir", path.name),
        ("pwritev", two),
        ("fdatasync", two),
    ]
    begin = calls.index(expected[0])
    assert calls[begin : begin + len(expected)] == expected


async def test_group_is_synced_once(tmp_path: Path) -> None:
    """What queues up while a sync runs is written and synced together, up to the bound."""
    ops = FaultyFileOps()
    config = UpdateLogConfig(max_group_bytes=2000)
    async with opened_log(tmp_path / "log", config, ops) as log:
        await fill(log, 1)
        ops.gate.clear()
        ops.reached.clear()
        held = log.append(epoch=1, header={}, body=[b"held"])
        assert await asyncio.to_thread(ops.reached.wait, 30)
        appends = [log.append(epoch=1, header={}, body=[bytes(352)]) for _ in range(19)]
        ops.gate.set()
        await asyncio.gather(held.durable, *(append.durable for append in appends))
        # 401 bytes each: four to a group.
        assert (log.metrics.num_records, log.metrics.num_groups) == (21, 1 + 1 + 5)


async def test_large_group_is_written_in_several_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group beyond what one call may write is split, between buffers, and is still one group."""
    monkeypatch.setattr(log_segments, "_MAX_WRITE_BYTES", 1000)
    path, ops = tmp_path / "log", FaultyFileOps()
    async with opened_log(path, ops=ops) as log:
        for _ in range(5):
            await fill(log, 20)
    assert sum(operation == "pwritev" for operation, _ in ops.calls) > 15
    async with opened_log(path) as log:
        check_records(log, 100)


@pytest.mark.parametrize("one_by_one", [False, True])
async def test_a_segment_ends_within_its_bound_and_is_closed(tmp_path: Path, one_by_one: bool) -> None:
    """No segment is longer, seal and all, than it may be, however its records were grouped; none stays open."""
    path, ops = tmp_path / "log", FaultyFileOps()
    async with opened_log(path, SMALL, ops) as log:
        await fill(log, 100, one_by_one=one_by_one)
        assert ops.num_open == 1
    assert ops.num_open == 0
    sizes = [segment.stat().st_size for segment in segments_of(path)]
    # They are as long as may be: one more record, of 155 bytes and more, and a segment would be too long.
    assert len(sizes) > 3 and max(sizes) <= SMALL.segment_bytes < max(sizes) + 155


async def test_a_failed_log_leaves_nothing_open(tmp_path: Path) -> None:
    """What a failure stops is closed as well: its descriptors are the process's."""
    ops = FaultyFileOps()
    async with opened_log(tmp_path / "log", SMALL, ops) as log:
        await fill(log, 1)
        ops.fail("fdatasync", errno.EIO)
        with pytest.raises(StorageError):
            await fill(log, 1)
    assert ops.num_open == 0
