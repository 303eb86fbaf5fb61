"""Kinds of update logs, behind one face: how to open one, hold its disk back and break it."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from faulty_file_ops import FaultyFileOps
from memory_update_log import MemoryUpdateLog
from scripted_stream import ScriptedEngine, ScriptedStream

from headrace.paramserver.log.files import FileUpdateLog
from headrace.paramserver.log.interface import Append, LogRecord, UpdateLog, UpdateLogConfig, is_housekeeping
from headrace.paramserver.log.jetstream.appender import StreamTimes
from headrace.paramserver.log.jetstream.stream_log import JetStreamUpdateLog
from headrace.schemas.errors import GoneError, StorageError
from headrace.schemas.messages import Segment

SMALL = UpdateLogConfig(segment_bytes=4096, allocate_bytes=4096)


class LogHarness:
    """A log in files: how to open it, hold its disk back and break it. Other kinds of logs do the same."""

    def __init__(self, path: Path) -> None:
        self.path, self.ops = path, FaultyFileOps()
        self.now_us = 1_000_000_000
        self.logs: list[UpdateLog] = []

    async def open(self, config: UpdateLogConfig = SMALL) -> UpdateLog:
        log = await self.make(config)
        self.logs.append(log)
        return log

    async def make(self, config: UpdateLogConfig) -> UpdateLog:
        return FileUpdateLog.open(self.path, config=config, ops=self.ops, clock_us=lambda: self.now_us)

    async def written(self) -> None:
        """Wait until the files of the log that was opened last have all that is durable; it is not held back."""

    def hold(self) -> None:
        self.ops.gate.clear()

    def release(self) -> None:
        self.ops.gate.set()

    def break_next_sync(self) -> None:
        self.ops.fail("fdatasync", errno.EIO)


class CopiedLog:
    """A log of records that another one has, each opening with a new mark of that one."""

    def __init__(self, log: FileUpdateLog) -> None:
        self.log = log
        self._mark = secrets.randbits(63) + 1

    def append(self, *, epoch: int, header: dict[str, Any], body: Sequence[Segment]) -> Append:
        return self.log.append(epoch=epoch, header=header, body=body, source_mark=self._mark)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.log, name)


class CopyHarness(LogHarness):
    async def make(self, config: UpdateLogConfig) -> UpdateLog:
        log: Any = await super().make(config)
        copied: Any = CopiedLog(log)
        return copied


class MemoryHarness(LogHarness):
    log: MemoryUpdateLog

    async def make(self, config: UpdateLogConfig) -> UpdateLog:
        is_first = not self.logs
        self.log = MemoryUpdateLog(config=config, clock_us=lambda: self.now_us) if is_first else self.log.reopen()
        return self.log

    def hold(self) -> None:
        self.log.hold()

    def release(self) -> None:
        self.log.release()

    def break_next_sync(self) -> None:
        self.log.fail(StorageError("the disk is broken"))


class DataRecords:
    """A replicated log without the records that it has for itself: data records are numbered 1, 2, 3 ..."""

    def __init__(self, log: JetStreamUpdateLog, seqs: list[int]) -> None:
        self.log = log
        self._seqs = seqs  # of the data records, durable or not; shared by all openings of one log

    def __getattr__(self, name: str) -> Any:
        return getattr(self.log, name)

    def append(self, *, epoch: int, header: dict[str, Any], body: Sequence[Segment]) -> Append:
        append = self.log.append(epoch=epoch, header=header, body=body)
        self._seqs.append(append.seq)
        return Append(len(self._seqs), append.durable)

    def _number_at(self, seq: int) -> int:
        """Return the number of the first data record from a seq on."""
        return 1 + sum(each < seq for each in self._seqs)

    def _seq_of(self, number: int) -> int:
        return self._seqs[number - 1] if number <= len(self._seqs) else self.log.last_seq + 1 + number

    @property
    def first_seq(self) -> int:
        return self._number_at(self.log.first_seq)

    @property
    def last_seq(self) -> int:
        return self._number_at(self.log.last_seq + 1) - 1

    def read(self, from_number: int, *, past_cache: bool = False) -> Iterator[LogRecord]:
        if 1 <= from_number < self.first_seq:
            raise GoneError(f"the first record is {self.first_seq}")
        seq = self._seq_of(from_number) if from_number > 0 else from_number
        records = self.log.read(seq, past_cache=past_cache)
        return (replace(each, seq=self._number_at(each.seq)) for each in records if not is_housekeeping(each.header))

    def nonce_of(self, number: int) -> int | None:
        is_here = self.first_seq <= number <= self.last_seq
        return self.log.nonce_of(self._seqs[number - 1]) if is_here else None

    def trim(self, before_seq: int, *, max_bytes: int | None = None, max_age_s: float | None = None) -> int:
        before = self._seq_of(before_seq)
        return self._number_at(self.log.trim(before, max_bytes=max_bytes, max_age_s=max_age_s))


class StreamHarness(LogHarness):
    """A replicated log on the scripted engine, with a mirror in files; each opening takes over from the one before."""

    TIMES = StreamTimes(
        heartbeat_s=30, lease_s=40, silence_s=50, ack_s=0.2, retry_s=0.01, lost_data_s=0.3, idle_poll_s=0.01
    )
    stream: ScriptedStream

    async def make(self, config: UpdateLogConfig) -> UpdateLog:
        if not self.logs:
            self.stream, self.seqs = ScriptedStream(), list[int]()
        log = await JetStreamUpdateLog.open_on(
            ScriptedEngine(self.stream),
            self._open_mirror(config),
            begin_seq=max(1, self.stream.last_seq),  # as of a store that has applied all but the last
            config=config,
            times=self.TIMES,
        )
        await log.wait_beyond(self.stream.last_seq - 1)
        assert await log.take_over(self.stream.last_seq, owner="here:1")
        await _mirrored(log)
        if not self.seqs:
            log.trim(log.last_seq)  # whole segments without data would be trimmed first
        data: Any = DataRecords(log, self.seqs)
        return data

    async def written(self) -> None:
        data: Any = self.logs[-1]
        await _mirrored(data.log)

    def _open_mirror(self, config: UpdateLogConfig) -> Any:
        async def open_mirror(begin_seq: int, *, anew: bool) -> FileUpdateLog:
            assert not anew
            settings: Any = {"config": replace(config, max_pending_bytes=1 << 62), "clock_us": lambda: self.now_us}
            return FileUpdateLog.open(self.path, begin_seq=begin_seq, ops=self.ops, **settings)

        return open_mirror

    def hold(self) -> None:
        self.stream.hold()

    def release(self) -> None:
        self.stream.release()

    def break_next_sync(self) -> None:
        self.stream.lose_tail(2)


async def _mirrored(log: JetStreamUpdateLog) -> None:
    """Wait until a log's mirror has all that is acked: acks do not wait for it."""
    while log.outstanding_bytes:
        log._mirrored.clear()
        await log._mirrored.wait()
