"""The writer of an update log: its file operations, their order, and what failing disks do."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_file_ops import FaultyFileOps
from log_files import ROOMY, SMALL, body_of, check_records, fill, opened_log, segments_of

from headrace.paramserver.log import segments, writer
from headrace.paramserver.log.files import FileUpdateLog
from headrace.paramserver.log.interface import UpdateLogConfig
from headrace.paramserver.log.segments import segment_name
from headrace.schemas.errors import StorageError
from headrace.schemas.messages import Segment


async def test_a_failure_behind_the_last_record_is_told(path: Path, ops: FaultyFileOps) -> None:
    """A checkpoint that cannot be written in an idle log wakes those who wait for a failure."""
    async with opened_log(path, ops=ops) as log:
        waiting = asyncio.create_task(log.wait_failed())
        ops.fail("pwritev", errno.EIO, after=2)  # header and record are written, the checkpoint is not
        append = log.append(epoch=1, header={}, body=[body_of(1)])
        await append.durable
        assert "Input/output error" in str(await asyncio.wait_for(waiting, 60))
        assert await log.wait_failed() is log.failed


async def test_a_client_that_waits_for_each_ack_does_not_wait_for_checkpoints(
    path: Path, ops: FaultyFileOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record costs one write while others keep coming; checkpoints are written only when none comes for a while."""
    monkeypatch.setattr(writer, "_CHECKPOINT_AFTER_S", 3600)
    async with opened_log(path, UpdateLogConfig(allocate_bytes=8192, tail_bytes=1 << 16), ops) as log:
        await fill(log, 50, one_by_one=True)
        calls = [operation for operation, _ in ops.calls]
        assert (calls.count("pwritev"), calls.count("fdatasync")) == (1 + 50, 50)


_FAULTS = [("pwritev", errno.ENOSPC), ("allocate", errno.ENOSPC), ("open", errno.EMFILE)]
_FAULTS += [(call, errno.EIO) for call in ("fdatasync", "pwritev", "fsync", "rename", "fsync_dir", "truncate")]


@pytest.mark.parametrize("after", [0, 1, 2, 5])
@pytest.mark.parametrize(("operation", "code"), _FAULTS)
async def test_failing_disk_stops_the_log_for_good(
    path: Path, ops: FaultyFileOps, operation: str, code: int, after: int, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any refusal by the disk fails waiting records, acks and writes nothing more, and keeps all acked records."""
    monkeypatch.setattr(writer, "_CHECKPOINT_AFTER_S", 0.0)  # one behind the failure would claim too much
    log = FileUpdateLog.open(path, config=SMALL, ops=ops)
    await fill(log, 3)
    ops.fail(operation, code, after=after)
    acked = 3
    while log.failed is None and acked < 1000:
        appends = []
        with contextlib.suppress(StorageError):  # it may fail meanwhile
            for seq in range(acked + 1, acked + 11):
                appends.append(log.append(epoch=1, header={}, body=[body_of(seq)]).durable)
        results = await asyncio.gather(*appends, return_exceptions=True)
        good = [result for result in results if result is None]
        assert results[: len(good)] == good, "acks are a prefix"
        assert all(isinstance(result, StorageError) for result in results[len(good) :])
        acked += len(good)
    assert errno.errorcode[code] in str(log.failed)
    with pytest.raises(StorageError, match=errno.errorcode[code]):
        log.append(epoch=1, header={}, body=[])
    assert log.last_seq == acked
    check_records(log, acked)
    await log.close()
    assert (ops.calls[-1][0], ops.num_open) == (operation, 0), "nothing was tried again, and nothing is left open"
    ops.power_cut()
    async with opened_log(path, SMALL) as log:
        assert log.last_seq >= acked
        check_records(log, log.last_seq)
    assert "the update log stops" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("size_bytes", [4096, 4000, 0])
async def test_a_short_write_is_followed_by_the_rest(
    path: Path, size_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A nearly full disk takes a part; one that finds it full, or a write of nothing, is logged in one line."""
    ops = _NoDirectOps() if size_bytes == 4000 else FaultyFileOps()
    num_records = 2 if size_bytes else 1
    async with opened_log(path, UpdateLogConfig(tail_bytes=16384), ops) as log:
        await fill(log, 1, size_bytes=10_000)
        await asyncio.to_thread(ops.wait_for_calls, ["fdatasync", "pwritev"])  # and its checkpoint
        if size_bytes:
            ops.write_short(size_bytes)
            await fill(log, 1, size_bytes=10_000)
            await asyncio.to_thread(ops.wait_for_calls, ["pwritev", "pwritev", "fdatasync", "pwritev"])
            ops.fail("pwritev", errno.ENOSPC, after=1)
        ops.write_short(size_bytes)
        with pytest.raises(StorageError, match=r"ENOSPC\); make room" if size_bytes else "none of .* bytes written"):
            await fill(log, 1, size_bytes=10_000)
    assert [record.exc_info for record in caplog.records if "the update log stops" in record.message] == [None]
    async with opened_log(path) as log:
        check_records(log, num_records, size_bytes=10_000)


class _FailsToClose(FaultyFileOps):
    def close(self, fd: int) -> None:
        super().close(fd)
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("fails", ["seal", "close"])
async def test_failed_end_loses_nothing(path: Path, fails: str) -> None:
    """A log whose seal, or whose file's end, fails is closed with an error; the next start has all records."""
    ops = FaultyFileOps() if fails == "seal" else _FailsToClose()
    async with opened_log(path, ops=ops) as log:
        await fill(log, 3)
        if fails == "seal":
            ops.fail("fsync", errno.EIO)
    assert ("EIO" if fails == "seal" else "Input/output error") in str(log.failed)
    async with opened_log(path) as log:
        check_records(log, 3)


async def test_bug_in_the_writer_stops_the_log(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected error fails waiting records instead of leaving them waiting forever."""
    async with opened_log(path) as log:
        await fill(log, 1)
        monkeypatch.setattr(segments.SegmentWriter, "write", lambda *_: 1 / 0)
        with pytest.raises(StorageError, match="ZeroDivisionError"):
            await fill(log, 1)
        assert log.failed is not None


async def test_disk_without_preallocation_is_written_all_the_same(path: Path, ops: FaultyFileOps) -> None:
    """Without preallocation, files grow as they are written."""
    ops.fail("allocate", errno.EOPNOTSUPP)
    async with opened_log(path, ops=ops) as log:
        await fill(log, 5)
    assert [call for call in ops.calls if call[0] == "allocate"] == [("allocate", segment_name(1) + ".new")]
    async with opened_log(path) as log:
        check_records(log, 5)


async def test_segment_is_durable_before_its_first_record(path: Path, ops: FaultyFileOps) -> None:
    """The old segment is sealed before the new one is written aside, synced, renamed, and its name synced."""
    async with opened_log(path, SMALL, ops) as log:
        await fill(log, 1, size_bytes=3900)
        ops.gate.clear()
        ops.reached.clear()
        first = log.append(epoch=1, header={}, body=[bytes(3900)])
        assert await asyncio.to_thread(ops.reached.wait, 60)
        del ops.calls[:]
        second = log.append(epoch=1, header={}, body=[bytes(3900)])
        ops.gate.set()
        await asyncio.gather(first.durable, second.durable)
        calls = list(ops.calls)
    one, two = segment_name(2), segment_name(3)
    expected = [(call, one) for call in ("pwritev", "truncate", "fsync")]
    expected += [(call, f"{two}.new") for call in ("open", "allocate", "pwritev", "fsync")]
    expected += [("rename", two), ("fsync_dir", path.name), ("pwritev", two), ("fdatasync", two)]
    begin = calls.index(expected[0])
    assert calls[begin : begin + len(expected)] == expected


async def test_group_is_synced_once(path: Path, ops: FaultyFileOps) -> None:
    """Records queued during a sync are written and synced together, up to the bound; `gather_s` waits once for more."""
    for gather_s, num_more in ((0, 19), (3600, 40)):
        waits: list[float] = []
        async with opened_log(path, UpdateLogConfig(gather_s=gather_s, max_group_bytes=2000), ops) as log:
            log._writer._stopping.wait = waits.append
            ops.gate.clear()
            ops.reached.clear()
            held = log.append(epoch=1, header={}, body=[b"held"])
            assert await asyncio.to_thread(ops.reached.wait, 60)
            appends = [log.append(epoch=1, header={}, body=[bytes(352)]) for _ in range(num_more)]
            ops.gate.set()
            await asyncio.gather(held.durable, *(append.durable for append in appends))
            # 401 bytes each: four to a group, and only before the first of these is anything waited for.
            assert log.metrics.num_groups == 1 + -(-num_more // 4)
            assert waits == [3600, 3600] * bool(gather_s)


async def test_closing_does_not_wait_for_more_records(path: Path) -> None:
    """With `gather_s` what comes meanwhile is one group, which a close ends."""
    async with opened_log(path, UpdateLogConfig(gather_s=3600)) as log:
        first = log.append(epoch=1, header={}, body=[b"first"])
        second = log.append(epoch=1, header={}, body=[b"second"])
        await log.close()
        await asyncio.gather(first.durable, second.durable)
        assert log.metrics.num_groups == 1


class _NoDirectOps(FaultyFileOps):
    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().open(path, flags)


class _BlocksOps(FaultyFileOps):
    """Checks that writes are whole aligned blocks."""

    num_checked = 0

    def pwritev(self, fd: int, buffers: Sequence[Segment], offset: int) -> int:
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        addresses = [np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers]
        assert not any(number % 4096 for number in (offset, *addresses, *map(len, buffers)))
        self.num_checked += 1
        return super().pwritev(fd, buffers, offset)


class _LargerBlocksOps(FaultyFileOps):
    """Opens files for direct writes and refuses the writes, as with larger blocks."""

    num_refused = 0

    def pwritev(self, fd: int, buffers: Sequence[Segment], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            self.num_refused += 1
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().pwritev(fd, buffers, offset)


@pytest.mark.parametrize("kind", [_NoDirectOps, _LargerBlocksOps, _BlocksOps])
async def test_the_log_goes_past_the_page_cache_where_it_can(path: Path, kind: type[FaultyFileOps]) -> None:
    """Direct writes are whole blocks of file and memory; other file systems are written through the cache."""
    ops = kind()
    for config in (SMALL, ROOMY):
        async with opened_log(path, config, ops) as log:
            await fill(log, 50)
            await fill(log, 50, one_by_one=True)
    async with opened_log(path) as log:
        check_records(log, 200)
    assert not isinstance(ops, _BlocksOps) or ops.num_checked > 100
    # Once a segment, at its header; later writes of it go through the cache.
    assert not isinstance(ops, _LargerBlocksOps) or ops.num_refused == len(segments_of(path))


async def test_a_write_that_is_refused_on_any_way_stops_the_log(path: Path, ops: FaultyFileOps) -> None:
    """A refusal without a direct write is an error, and not retried forever."""
    async with opened_log(path, ROOMY, ops) as log:
        await fill(log, 1)
        ops.fail("pwritev", errno.EINVAL)
        ops.fail("pwritev", errno.EINVAL)
        with pytest.raises(StorageError, match=r"writing 4096 bytes at offset 0 failed: .* \(EINVAL\)"):
            await fill(log, 1)
            await fill(log, 1)


@pytest.mark.parametrize("one_by_one", [False, True])
async def test_a_segment_ends_within_its_bound_and_is_closed(path: Path, ops: FaultyFileOps, one_by_one: bool) -> None:
    """No segment exceeds its size, seal included, however its records were grouped; none stays open."""
    async with opened_log(path, SMALL, ops) as log:
        await fill(log, 100, one_by_one=one_by_one)
        assert ops.num_open == 1
    assert ops.num_open == 0
    sizes = [segment.stat().st_size for segment in segments_of(path)]
    # With one more record, of at least 155 bytes, the longest would be too long.
    assert len(sizes) > 3 and max(sizes) <= SMALL.segment_bytes < max(sizes) + 155
