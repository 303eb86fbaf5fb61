"""A file system that fails on demand, and forgets on demand what was not synced.

It works on real files and remembers, for each, what a disk would have. Then `power_cut` leaves what a power failure may
leave: all that was synced, and of the rest nothing, or whichever sectors, as any write left them, chance chose.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.paramserver.log.segments import FileOps
from headrace.schemas.messages import Segment

__all__ = ["FaultyFileOps"]

_SECTOR_BYTES = 512


@dataclass
class _File:
    path: Path
    disk: bytes  # what a power failure leaves for sure
    is_lossy: bool = False  # a sync has failed: the kernel forgets what it could not write, and the next sync succeeds
    writes: list[tuple[int, bytes]] = field(default_factory=list)  # since the last sync: offset, bytes
    sizes: list[int] = field(default_factory=list)  # since the last sync


@dataclass
class _Fault:
    operation: str
    error: OSError | None
    after: int
    short_bytes: int | None = None


@dataclass
class _DirectoryChange:
    directory: Path
    undo: Callable[[], None]


@dataclass
class FaultyFileOps(FileOps):
    """`FileOps` on real files, with faults.

    Attributes:
        calls: (operation, file name) of all calls that change something or make it last.
        gate: Cleared, it holds every `fdatasync` back until it is set.
        reached: Set whenever an `fdatasync` has come to the gate.
        is_dead: Every call fails: the process is as good as killed.
        calls_left: It is dead after so many more calls; None: it lives on.
    """

    calls: list[tuple[str, str]] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)
    is_dead: bool = False
    calls_left: int | None = None
    _called: threading.Condition = field(default_factory=threading.Condition)
    _faults: list[_Fault] = field(default_factory=list)
    _open: dict[int, _File] = field(default_factory=dict)
    _files: dict[Path, _File] = field(default_factory=dict)
    _changes: list[_DirectoryChange] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    # What a test asks for.

    def fail(self, operation: str, code: int, *, after: int = 0) -> None:
        """Let one call of `operation` fail with an errno, after so many that succeed."""
        self._faults.append(_Fault(operation, OSError(code, os.strerror(code)), after))

    def write_short(self, size_bytes: int, *, after: int = 0) -> None:
        """Let one `pwritev` write only so many bytes, of its first buffer, and say so."""
        self._faults.append(_Fault("pwritev", None, after, size_bytes))

    @property
    def num_open(self) -> int:
        """How many files are open."""
        return len(self._open)

    def wait_for_calls(self, operations: Sequence[str]) -> None:
        """Block until the latest calls are of these operations, in this order."""

        def have_come() -> bool:
            return [operation for operation, _ in self.calls[-len(operations) :]] == list(operations)

        with self._called:
            assert self._called.wait_for(have_come, 60), f"{operations} did not come"

    def power_cut(self, rng: random.Random | None = None) -> None:
        """Leave on the files what a power failure leaves.

        Args:
            rng: Chooses what of the unsynced survives, sector by sector; None: nothing does.
        """
        for file in self._files.values():
            if not file.path.exists():
                continue
            cached = file.path.read_bytes()
            file.path.write_bytes(file.disk if rng is None else _mix(file, cached, rng))
        kept = 0 if rng is None else rng.randint(0, len(self._changes))
        for change in reversed(self._changes[kept:]):  # a journal loses the newest first
            change.undo()
        self._changes.clear()
        self._files.clear()  # what is there now is on the disk

    # The file system.

    def open(self, path: Path, flags: int) -> int:
        is_new = not path.exists()
        self._call("open", path)
        fd = super().open(path, flags)
        file = self._files.get(path)
        if file is None or is_new:
            file = self._files[path] = _File(path, b"" if is_new else path.read_bytes())
        if is_new:
            self._changes.append(_DirectoryChange(path.parent, lambda: file.path.unlink(missing_ok=True)))
        self._open[fd] = file
        return fd

    def close(self, fd: int) -> None:
        del self._open[fd]  # also when dead: a killed process has no open files
        super().close(fd)

    def pwritev(self, fd: int, buffers: Sequence[Segment], offset: int) -> int:
        file = self._open[fd]
        fault = self._call("pwritev", file.path)
        if fault is not None:
            assert fault.short_bytes is not None
            buffers = [memoryview(buffers[0])[: fault.short_bytes]]
        written = super().pwritev(fd, buffers, offset)
        file.writes.append((offset, b"".join(buffers)))
        file.sizes.append(os.fstat(fd).st_size)
        return written

    def allocate(self, fd: int, offset: int, size_bytes: int) -> None:
        self._call("allocate", self._open[fd].path)
        super().allocate(fd, offset, size_bytes)
        self._open[fd].sizes.append(os.fstat(fd).st_size)

    def truncate(self, fd: int, size_bytes: int) -> None:
        self._call("truncate", self._open[fd].path)
        super().truncate(fd, size_bytes)
        self._open[fd].sizes.append(size_bytes)

    def fdatasync(self, fd: int) -> None:
        self.reached.set()
        assert self.gate.wait(60), "the gate was never opened"
        self._sync("fdatasync", fd)

    def fsync(self, fd: int) -> None:
        self._sync("fsync", fd)

    def fsync_dir(self, path: Path) -> None:
        self._call("fsync_dir", path)
        self._changes = [change for change in self._changes if change.directory != path]

    def rename(self, source: Path, target: Path) -> None:
        self._call("rename", target)
        replaced = target.read_bytes() if target.exists() else None
        super().rename(source, target)
        file = self._files[target] = self._files.pop(source)
        file.path = target

        def undo() -> None:
            os.replace(target, source)
            file.path = source
            if replaced is not None:
                target.write_bytes(replaced)

        self._changes.append(_DirectoryChange(target.parent, undo))

    def unlink(self, path: Path) -> None:
        self._call("unlink", path)
        content = path.read_bytes()
        super().unlink(path)
        self._changes.append(_DirectoryChange(path.parent, lambda: path.write_bytes(content) and None))

    def drop_cache(self, fd: int) -> None:
        file = self._open[fd]
        self._call("drop_cache", file.path)
        if file.is_lossy:
            file.path.write_bytes(file.disk)
            file.is_lossy = False

    def _sync(self, operation: str, fd: int) -> None:
        file = self._open[fd]
        try:
            self._call(operation, file.path)
        except OSError:
            file.is_lossy = file.is_lossy or not self.is_dead
            raise
        if not file.is_lossy:
            file.disk = file.path.read_bytes()
            file.writes.clear()
            file.sizes.clear()

    def _call(self, operation: str, path: Path) -> _Fault | None:
        """Note a call, and fail it if that is due; return a fault that is not an error."""
        if self.calls_left is not None:
            self.calls_left -= 1
            self.is_dead = self.is_dead or self.calls_left < 0
        if self.is_dead:
            raise OSError(errno.EIO, "the process is dead")
        with self._called:  # a fault that is asked for once the call was seen is for a later one
            due = self._due(operation)
            self.calls.append((operation, path.name))
            self._called.notify_all()
        if due is not None and due.error is not None:
            raise due.error
        return due

    def _due(self, operation: str) -> _Fault | None:
        for fault in [fault for fault in self._faults if fault.operation == operation]:
            fault.after -= 1
            if fault.after < 0:
                self._faults.remove(fault)
                return fault
        return None


def _mix(file: _File, cached: bytes, rng: random.Random) -> bytes:
    """Return a file of a size that it had since the last sync, whose sectors are each as some write left them."""
    size = rng.choice((len(file.disk), len(cached), *file.sizes))
    parts = []
    for start in range(0, size, _SECTOR_BYTES):
        end = min(start + _SECTOR_BYTES, size)
        versions = [file.disk[start:end], cached[start:end]]
        versions += [data[start - at : end - at] for at, data in file.writes if at <= start and end <= at + len(data)]
        parts.append(rng.choice(versions).ljust(end - start, b"\0"))
    return b"".join(parts)
