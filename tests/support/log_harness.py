"""Kinds of update logs, behind one face: how to open one, hold its disk back and break it."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faulty_file_ops import FaultyFileOps
from memory_update_log import MemoryUpdateLog

from headrace.paramserver.log.files import FileUpdateLog
from headrace.paramserver.log.interface import Append, UpdateLog, UpdateLogConfig
from headrace.paramserver.log.mirror import LogMirror
from headrace.schemas.errors import StorageError
from headrace.schemas.messages import Segment

SMALL = UpdateLogConfig(segment_bytes=4096, allocate_bytes=4096)


class LogHarness:
    """One kind of log: how to open it, hold its disk back and break it."""

    def __init__(self) -> None:
        self.now_us = 1_000_000_000
        self.logs: list[UpdateLog] = []

    def open(self, config: UpdateLogConfig = SMALL) -> UpdateLog:
        log = self.make(config)
        self.logs.append(log)
        return log

    def make(self, config: UpdateLogConfig) -> UpdateLog:
        raise NotImplementedError

    def hold(self) -> None:
        raise NotImplementedError

    def release(self) -> None:
        raise NotImplementedError

    def break_next_sync(self) -> None:
        raise NotImplementedError


class FileLogHarness(LogHarness):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ops = FaultyFileOps()
        self.path = path

    def make(self, config: UpdateLogConfig) -> UpdateLog:
        return FileUpdateLog.open(self.path, config=config, ops=self.ops, clock_us=lambda: self.now_us)

    def hold(self) -> None:
        self.ops.gate.clear()

    def release(self) -> None:
        self.ops.gate.set()

    def break_next_sync(self) -> None:
        self.ops.fail("fdatasync", errno.EIO)


class MirroredLog:
    """A mirror that is appended to as any log: each seq is the next one, each opening a new segment of the source."""

    def __init__(self, mirror: LogMirror) -> None:
        self.mirror = mirror
        self._next_seq = mirror.last_seq + 1
        self._mark = secrets.randbits(63) + 1

    def append(self, *, epoch: int, header: dict[str, Any], body: Sequence[Segment]) -> Append:
        seq, mark = self._next_seq, self._mark
        append = self.mirror.append(seq=seq, mark=mark, epoch=epoch, header=header, body=body)
        self._next_seq += 1
        return append

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mirror, name)


class MirrorHarness(FileLogHarness):
    def make(self, config: UpdateLogConfig) -> UpdateLog:
        mirror = LogMirror.open(self.path, config=config, ops=self.ops, clock_us=lambda: self.now_us)
        log: Any = MirroredLog(mirror)
        return log


class MemoryLogHarness(LogHarness):
    log: MemoryUpdateLog | None = None

    def make(self, config: UpdateLogConfig) -> UpdateLog:
        if self.log is None:
            self.log = MemoryUpdateLog(config=config, clock_us=lambda: self.now_us)
        else:
            self.log = self.log.reopen()
        return self.log

    def hold(self) -> None:
        assert self.log is not None
        self.log.hold()

    def release(self) -> None:
        assert self.log is not None
        self.log.release()

    def break_next_sync(self) -> None:
        assert self.log is not None
        self.log.fail(StorageError("the disk is broken"))
