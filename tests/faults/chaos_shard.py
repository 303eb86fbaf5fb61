"""The real shard process, with a file system under its log that fails, stalls and remembers what it has synced.

    python chaos_shard.py CONTROL_DIR BREAKAGE

It takes commands on the Unix socket `CONTROL_DIR/shard-N.sock`, a line of JSON each:

    {"do": "fail", "errno": 5, "after": {"fdatasync": 2}}    the third call from now on fails
    {"do": "hold"}                                           no sync returns any more
    {"do": "wait_held"}                                      answered once a sync is held

and keeps in `CONTROL_DIR/synced-N` which segment it wrote last and up to where that is on the disk (`Synced`). Its
BREAKAGE is a bug that the harness must find: see `BREAKAGES`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from headrace.paramserver.archive import archiver
from headrace.paramserver.ingest import shard_state
from headrace.paramserver.log import sessions
from headrace.paramserver.log.files import FileUpdateLog
from headrace.paramserver.log.interface import Append, DurableFuture
from headrace.paramserver.log.segments import FileOps
from headrace.paramserver.rpc import connection as rpc_connection
from headrace.paramserver.rpc import server
from headrace.paramserver.rpc.frames import BufferPool, FrameReader
from headrace.paramserver.shard import membership, process, retention, service
from headrace.paramserver.snapshots import bucket, uploader
from headrace.paramserver.store import applier, memtable
from headrace.paramserver.store.applier import ApplierConfig
from headrace.schemas.messages import Segment

_SYNCED = struct.Struct("<QQ")
WAIT_HELD_S = 50.0
OBJECT_AGES = {
    name: timedelta(seconds=age_s) for name, age_s in (("_REUSE_AGE", 30), ("_NAMED_AGE", 55), ("_PRUNE_AGE", 60))
}
"""Of `bucket`: an object that no snapshot names is old after a minute, not after a day."""


class Synced(NamedTuple):
    """Up to where a log was on the disk when its process ended: the first seq of its last segment, and an offset."""

    first_seq: int
    end: int

    @classmethod
    def read(cls, control: Path, number: int) -> Synced:
        """Return what the process of a shard has noted last."""
        return cls(*_SYNCED.unpack((control / f"synced-{number}").read_bytes()))


class ChaosFileOps(FileOps):
    """`FileOps` on real files; see the module. Thread: any."""

    def __init__(self, control: Path) -> None:
        self._control = control
        self._paths: dict[int, Path] = {}
        self._ends: dict[int, int] = {}
        self._faults: list[list[Any]] = []
        self._is_holding = False
        self._held = threading.Event()
        self._lock = threading.Lock()
        self._note_fd = -1

    def serve(self, number: int) -> None:
        """Take commands for shard `number` from now on."""
        self._note_fd = os.open(self._control / f"synced-{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        path = self._control / f"shard-{number}.sock"
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(os.fspath(path))
        listener.listen()
        threading.Thread(target=self._take_commands, args=(listener,), daemon=True).start()

    def _take_commands(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rwb") as stream:
                command = json.loads(stream.readline())
                is_so = self._held.wait(WAIT_HELD_S) if command["do"] == "wait_held" else True
                # Before it is done: a fault may end this process at once.
                stream.write(json.dumps(is_so).encode() + b"\n")
            with self._lock:
                if command["do"] == "hold":
                    self._is_holding = True
                elif command["do"] == "fail":
                    self._faults += [[name, command["errno"], after] for name, after in command["after"].items()]

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        self._paths[fd], self._ends[fd] = path, 0
        return fd

    def close(self, fd: int) -> None:
        self._paths.pop(fd)
        self._ends.pop(fd)
        super().close(fd)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._paths = {fd: target if path == source else path for fd, path in self._paths.items()}

    def pwritev(self, fd: int, buffers: Sequence[Segment], offset: int) -> int:
        self._fail_if_due("pwritev")
        written = super().pwritev(fd, buffers, offset)
        self._ends[fd] = offset + written
        return written

    def allocate(self, fd: int, offset: int, size_bytes: int) -> None:
        self._fail_if_due("allocate")
        super().allocate(fd, offset, size_bytes)

    def fdatasync(self, fd: int) -> None:
        self._sync("fdatasync", fd, super().fdatasync)

    def fsync(self, fd: int) -> None:
        self._sync("fsync", fd, super().fsync)

    def _sync(self, operation: str, fd: int, sync: Callable[[int], None]) -> None:
        if self._is_holding:
            self._held.set()
            threading.Event().wait()  # for ever: only `kill -9` ends it
        self._fail_if_due(operation)
        end = self._ends[fd]
        sync(fd)
        name = self._paths[fd].name.partition(".")[0]
        # Noted before anything is acked: what is not in the note was not acked either.
        if name.isdigit():
            os.pwrite(self._note_fd, _SYNCED.pack(int(name), end), 0)

    def _fail_if_due(self, operation: str) -> None:
        with self._lock:
            for fault in [fault for fault in self._faults if fault[0] == operation]:
                fault[2] -= 1
                if fault[2] < 0:
                    self._faults.remove(fault)
                    raise OSError(fault[1], os.strerror(fault[1]))


def _ack_early() -> None:
    """Ack each batch when it comes, and write it to the log when there is time."""
    append = FileUpdateLog.append

    def append_early(self: Any, **record: Any) -> Append:
        durable = DurableFuture()
        durable.set_result(None)
        return Append(append(self, **record).seq, durable)

    FileUpdateLog.append = append_early  # type: ignore[method-assign,assignment]


def _forget_sequence() -> None:
    """Take every batch as it comes, as if there were neither client seqs nor the check that steps rise."""
    accept = sessions.Sessions.accept

    def accept_all(self: Any, run: str, client: str, epoch: int, client_seq: int) -> Any:
        session = self._sessions[run, client]
        session.step = -1
        return accept(self, run, client, epoch, session.last_client_seq + 1)

    sessions.Sessions.accept = accept_all  # type: ignore[method-assign]


def _forget_deletes() -> None:
    """Ack deletes and do nothing about them, nor count them where rows cross into the memtable."""
    decode, add = shard_state.decode_delta, memtable.Memtable.add

    def decode_without(*args: Any, **settings: Any) -> Any:
        return dataclasses.replace(decode(*args, **settings), deleted_row_ids=None)

    def add_uncounted(self: Any, batch: Any) -> Any:
        return add(self, dataclasses.replace(batch, tally=None))

    shard_state.decode_delta = decode_without
    memtable.Memtable.add = add_uncounted  # type: ignore[method-assign]


def _release_early() -> None:
    """Give each batch's frame back before its rows are in the store."""
    submit = applier.Applier.submit

    def submit_released(self: Any, batch: Any) -> None:
        submit(self, batch)
        batch.release()

    applier.Applier.submit = submit_released  # type: ignore[method-assign]


def _answer_unowned() -> None:
    """Answer from a log whose lease may have ended long ago. Of a replicated log."""
    from headrace.paramserver.log.jetstream.stream_log import JetStreamUpdateLog

    JetStreamUpdateLog.check_owned = lambda self: None  # type: ignore[method-assign]


BREAKAGES: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "answers_unowned": _answer_unowned,
    "acks_early": _ack_early,
    "forgets_sequence": _forget_sequence,
    "forgets_deletes": _forget_deletes,
    "releases_early": _release_early,
}


def main(control: Path, breakage: str) -> int:
    """Run the shard process."""
    ops = ChaosFileOps(control)
    BREAKAGES[breakage]()

    class _Log(FileUpdateLog):
        @classmethod
        def open(cls, path: Path, *, config: Any = None, **_: Any) -> Any:
            ops.serve(int(path.parent.name.removeprefix("shard-")))
            return super().open(path, config=dataclasses.replace(config, allocate_bytes=1 << 20), ops=ops)

    service.open_log = _Log.open
    hurry()
    poison_frames()
    return process.main()


def hurry() -> None:
    """Let happen within a cycle what takes minutes in life: flushes, retention, looks at claims and snapshots."""
    service.ApplierConfig = functools.partial(ApplierConfig, flush_interval_s=2.0)  # type: ignore[misc,assignment]
    _set(retention, _INTERVAL_S=1.0, _GRACE_S=0.0)
    _set(membership, _LOOK_S=1.0, _TELL_S=0.5, _STORE_DEADLINE_S=2.0)
    _set(archiver, _CHECK_S=2.0, _FIRST_PRUNE_S=2.0, _PRUNE_INTERVAL_S=2.0, _LONGEST_PAUSE_S=2.0)
    _set(uploader, _LOOK_INTERVAL_S=2.0, _RETRY_INTERVAL_S=1.0)
    _set(bucket, **OBJECT_AGES)


def _set(module: ModuleType, **values: Any) -> None:
    # Never a name that is not there: without retention, nothing would be found that it does wrong.
    assert values.keys() <= vars(module).keys()
    vars(module).update(values)


def poison_frames() -> None:
    """Let almost every frame have a buffer of the pool, which is overwritten as soon as it is given back."""
    small_bytes = 256
    server.BufferPool = functools.partial(BufferPool, poison=0xDD)  # type: ignore[misc,assignment]
    rpc_connection.SMALL_FRAME_BYTES = small_bytes
    rpc_connection.FrameReader = functools.partial(FrameReader, small_frame_bytes=small_bytes)  # type: ignore[misc,assignment]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
