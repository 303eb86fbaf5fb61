"""Marks: what tells copies of one log apart; one suite, on files and in memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from memory_update_log import MemoryUpdateLog

from headrace.paramserver.log.file_update_log import FileUpdateLog
from headrace.paramserver.log.update_log import UpdateLog, UpdateLogConfig

_SMALL = UpdateLogConfig(segment_bytes=4096, allocate_bytes=4096)


@pytest.fixture(params=["file", "memory"])
def reopened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], UpdateLog]:
    """Opens the same log, again and again; the last one is closed."""
    logs: list[MemoryUpdateLog] = []

    def open_memory() -> UpdateLog:
        logs.append(logs[-1].reopen() if logs else MemoryUpdateLog(config=_SMALL))
        return logs[-1]

    if request.param == "memory":
        return open_memory
    return lambda: FileUpdateLog.open(tmp_path / "log", config=_SMALL)


async def _append(log: UpdateLog, count: int, size_bytes: int = 10) -> None:
    for _ in range(count):
        await log.append(epoch=1, header={}, body=[b"x" * size_bytes]).durable


async def test_each_opening_has_marks_of_its_own(reopened: Callable[[], UpdateLog]) -> None:
    """No record of one opening has the mark of another's, and none changes later; absent records have no mark."""
    told: list[int] = []
    for _ in range(3):
        log = reopened()
        before = len(told)
        assert [log.mark_of(seq) for seq in range(1, before + 1)] == told
        await _append(log, 3)
        await _append(log, 1, 4000)  # in a segment of its own
        new = [log.mark_of(seq) for seq in range(before + 1, before + 5)]
        assert set(new).isdisjoint(told)
        told += [mark for mark in new if mark is not None]
        assert len(told) == log.last_seq and all(-(2**63) <= mark < 2**63 for mark in told)
        assert log.mark_of(0) is None and log.mark_of(log.last_seq + 1) is None
        await log.close()


async def test_a_removed_record_has_no_mark(reopened: Callable[[], UpdateLog]) -> None:
    """What retention has removed cannot be told any more; what is left can."""
    log = reopened()
    await _append(log, 4, 3000)
    log.trim(4)
    assert log.mark_of(log.first_seq - 1) is None and log.mark_of(log.first_seq) is not None
    await log.close()


async def test_a_copy_of_a_running_log_shares_marks_as_far_as_records(tmp_path: Path) -> None:
    """A directory that is copied amid a segment and opened goes on with another mark than the log that it is of."""
    log = FileUpdateLog.open(tmp_path / "log", config=_SMALL)
    await _append(log, 3)
    shutil.copytree(tmp_path / "log", tmp_path / "copy")
    copy = FileUpdateLog.open(tmp_path / "copy", config=_SMALL)
    for each in (log, copy):
        await _append(each, 2)
    marks = [[each.mark_of(seq) for seq in range(1, 6)] for each in (log, copy)]
    assert marks[0][:3] == marks[1][:3] and set(marks[0][3:]).isdisjoint(marks[1][3:])
    for each in (log, copy):
        await each.close()
