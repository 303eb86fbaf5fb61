"""The thread that writes an update log, with group commit.

A group is what was queued while the previous one was written, up to a bound. It is written, synced and reported as one.
So the log is as fast as the disk under load, and a lone record waits for no other.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from headrace.paramserver.log.interface import DurableFuture, LogMetrics, UpdateLogConfig
from headrace.paramserver.log.segments import FileOps, SegmentList, SegmentWriter
from headrace.paramserver.log.tail import LogTail
from headrace.schemas.errors import StorageError
from headrace.schemas.log_records import SegmentHeader, encode_record
from headrace.schemas.messages import Segment

__all__ = ["LogWriter", "OutgoingRecord", "PendingRecord", "write_records"]

_log = logging.getLogger(__name__)

# A checkpoint record is a write of its own; at once, it would delay the next record of a client that waits for acks.
_CHECKPOINT_AFTER_S = 0.02


@dataclass(slots=True, eq=False)
class OutgoingRecord:
    """A record to write, of `size_bytes` in all; `source_mark` is that of its segment, see `SegmentHeader`."""

    seq: int
    epoch: int
    header: bytes
    body: Sequence[Segment]
    size_bytes: int
    source_mark: int


@dataclass(slots=True, eq=False)
class PendingRecord(OutgoingRecord):
    """A record on its way to the disk. The loop's thread resolves `durable`."""

    durable: DurableFuture


class LogWriter:
    """Writes the queued records in order, until it fails or is stopped.

    Thread: `put` and `stop` from any; the callbacks run in the writer's own.

    Attributes:
        last_seq: Last durable record.
        failed: The first failure, for good; later records are reported with it.
        gather_s: As of `UpdateLogConfig`; it may change.
    """

    def __init__(
        self,
        path: Path,
        segments: SegmentList,
        *,
        log_id: bytes,
        last_seq: int,
        config: UpdateLogConfig,
        ops: FileOps,
        metrics: LogMetrics,
        clock_us: Callable[[], int],
        on_settled: Callable[[list[PendingRecord], StorageError | None], None],
        on_stopped: Callable[[], None],
    ) -> None:
        """Continue a log whose segments are all sealed; new ones are added to the list.

        `on_settled` is called with records that are durable; or with those that fail, perhaps none, and the error: then
        all later records fail too. `on_stopped` is called when everything is written and closed.
        """
        self.last_seq = last_seq
        self.failed: StorageError | None = None
        self.gather_s = config.gather_s
        self._path, self._segments, self._log_id = path, segments, log_id
        self._config, self._ops, self._metrics, self._clock_us = config, ops, metrics, clock_us
        self._on_settled, self._on_stopped = on_settled, on_stopped
        self._queue: SimpleQueue[PendingRecord | None] = SimpleQueue()
        self._writer: SegmentWriter | None = None
        self._tail = LogTail(config.tail_bytes)
        self._stopping = threading.Event()
        # A daemon: a log that was not closed must not keep the process alive. It ends as in a crash.
        self._thread = threading.Thread(target=self._run, name=f"update-log {path.parent.name}", daemon=True)
        self._thread.start()

    def put(self, pending: PendingRecord) -> None:
        """Queue the next record."""
        self._queue.put(pending)

    def stop(self) -> None:
        """End after writing the queue and sealing. Call once, after the last `put`."""
        self._queue.put(None)
        self._stopping.set()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        pending = self._next()
        while pending is not None:
            group, pending = self._take_group(pending)
            if self.failed is None:
                try:
                    self._commit(group)
                except Exception as exc:
                    self._fail(exc)
            if self.failed is not None:
                self._on_settled(group, self.failed)
            del group  # the callers may reuse the buffers
            if pending is _NOTHING:
                pending = self._next()
        self._finish()

    def _next(self) -> PendingRecord | None:
        """Return the next queued record, once others have had time to come."""
        pending = self._wait()
        if (gather_s := self.gather_s) and pending is not None:
            self._stopping.wait(gather_s)
        return pending

    def _wait(self) -> PendingRecord | None:
        """Return the next queued record; write a checkpoint record first if none comes for a while."""
        if self.failed is None and self._writer is not None:
            try:
                return self._queue.get(timeout=_CHECKPOINT_AFTER_S)
            except Empty:
                try:
                    self._writer.write_checkpoint()
                except Exception as exc:
                    self._fail(exc)
                    self._on_settled([], self.failed)
        return self._queue.get()

    def _take_group(self, first: PendingRecord) -> tuple[list[PendingRecord], PendingRecord | None]:
        """Return the next group, and what was taken from the queue after it, or `_NOTHING`."""
        group, size_bytes = [first], first.size_bytes
        while not self._queue.empty():
            pending = self._queue.get()
            if pending is None or size_bytes + pending.size_bytes > self._config.max_group_bytes:
                return group, pending
            group.append(pending)
            size_bytes += pending.size_bytes
        return group, _NOTHING

    def _commit(self, group: list[PendingRecord]) -> None:
        """Make a group durable, in parts if it spans segments. Remove each part from the list once it is."""
        while group:
            writer = self._writer_for(group[0])
            mark = group[0].source_mark
            count, size_bytes = 1, group[0].size_bytes
            while count < len(group) and writer.fits(size_bytes + group[count].size_bytes):
                if group[count].source_mark != mark:
                    break
                size_bytes += group[count].size_bytes
                count += 1
            part = group[:count]
            write_records(writer, part, durable_seq=self.last_seq)
            del group[:count]
            self.last_seq = part[-1].seq
            self._metrics.num_groups += 1
            self._metrics.num_records += count
            self._on_settled(part, None)

    def _writer_for(self, pending: PendingRecord) -> SegmentWriter:
        """Return the segment for the record; begin a new one if it does not fit, or has another source's mark."""
        writer, mark = self._writer, pending.source_mark
        if writer is not None:
            if mark == writer.segment.header.source_mark and (writer.is_empty or writer.fits(pending.size_bytes)):
                return writer
            writer.seal(self._clock_us())
        nonce, now_us = secrets.randbits(64) or 1, self._clock_us()
        header = SegmentHeader(
            log_id=self._log_id, nonce=nonce, first_seq=pending.seq, created_us=now_us, source_mark=mark
        )
        self._writer = writer = SegmentWriter(
            self._path, header, tail=self._tail, ops=self._ops, metrics=self._metrics, config=self._config
        )
        self._segments.add(writer.segment)
        return writer

    def _fail(self, exc: Exception) -> None:
        """Stop for good. No record of the group is acked, even if it is on the disk."""
        if isinstance(exc, StorageError):
            error = exc
        else:
            error = StorageError(f"{self._path}: the log's writer failed: {exc!r}")
            error.__cause__ = exc
        self.failed = self.failed or error
        # One line says everything about a failing disk; a traceback is for bugs.
        _log.error("the update log stops: %s", error, exc_info=None if error is exc else error)

    def _finish(self) -> None:
        try:
            if self._writer is not None:
                try:
                    if self.failed is None:
                        self._writer.seal(self._clock_us())
                finally:
                    self._writer.close()
        except Exception as exc:
            # All records are durable. If the seal is not, the next start checks the records and seals.
            self._fail(exc)
        self._on_stopped()


def write_records(writer: SegmentWriter, records: Sequence[OutgoingRecord], *, durable_seq: int) -> None:
    """Write records to a segment and sync them. `durable_seq` is the last one that was synced before."""
    buffers: list[Segment] = []
    places: list[tuple[int, int]] = []
    offset = 0
    nonce = writer.segment.header.nonce
    for record in records:
        seq, epoch, header, body = record.seq, record.epoch, record.header, record.body
        head = encode_record(nonce=nonce, seq=seq, durable_seq=durable_seq, epoch=epoch, header=header, body=body)
        buffers += [head, *body]
        places.append((seq, offset))
        offset += record.size_bytes
    writer.write(buffers, offset, places)


# Says that nothing was taken; None is the order to stop.

_NOTHING = PendingRecord(0, 0, b"", (), 0, 0, None)  # type: ignore[arg-type]
