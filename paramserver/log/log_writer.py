"""The thread that writes an update log: group commit.

A group is what has been queued while the last one was written, up to a bound. It is written and synced as one, then its
records are reported as one. So the log is as fast as the disk under load, and a lone record waits for nobody.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from headrace.paramserver.files.file_ops import FileOps
from headrace.paramserver.log.log_segments import SegmentList, SegmentWriter
from headrace.paramserver.log.log_tail import LogTail
from headrace.paramserver.log.update_log import DurableFuture, LogMetrics, UpdateLogConfig
from headrace.schemas.errors import StorageError
from headrace.schemas.log_records import SegmentHeader, encode_record
from headrace.schemas.messages import Segment

__all__ = ["LogWriter", "PendingRecord"]

_log = logging.getLogger(__name__)

# A mark is a write of its own. On a slow disk it would hold up the next record of a client that waits for each ack.
_MARK_AFTER_S = 0.02


@dataclass(slots=True, eq=False)
class PendingRecord:
    """A record on its way to the disk.

    Attributes:
        seq: Its seq.
        epoch: Its epoch.
        header: msgpack map.
        body: The caller's buffers.
        size_bytes: Of the whole record.
        durable: To be resolved by the loop's thread.
    """

    seq: int
    epoch: int
    header: bytes
    body: Sequence[Segment]
    size_bytes: int
    durable: DurableFuture


class LogWriter:
    """Writes what is put into its queue, in order, until it fails or is stopped.

    Thread: `put` and `stop` from any; the callbacks come from the writer's own.

    Attributes:
        last_seq: Last durable record.
        failed: Set for good by the first failure; what is put in later is reported with it.
    """

    def __init__(
        self,
        path: Path,
        segments: SegmentList,
        *,
        log_id: bytes,
        config: UpdateLogConfig,
        ops: FileOps,
        metrics: LogMetrics,
        clock_us: Callable[[], int],
        on_settled: Callable[[list[PendingRecord], StorageError | None], None],
        on_stopped: Callable[[], None],
    ) -> None:
        """Continue a log whose segments are all sealed; `start` begins.

        Args:
            path: The log's directory.
            segments: The log's segments; new ones are added.
            log_id: 16 bytes.
            config: Settings.
            ops: The file system.
            metrics: Counts of it.
            clock_us: Wall clock, microseconds since 1970.
            on_settled: Told which records are durable, or that they, if any, and all later ones will not be.
            on_stopped: Told when all is written and closed.
        """
        self.last_seq = segments.last_seq
        self.failed: StorageError | None = None
        self._path = path
        self._segments = segments
        self._log_id = log_id
        self._config = config
        self._ops = ops
        self._metrics = metrics
        self._clock_us = clock_us
        self._on_settled = on_settled
        self._on_stopped = on_stopped
        self._queue: SimpleQueue[PendingRecord | None] = SimpleQueue()
        self._writer: SegmentWriter | None = None
        self._tail = LogTail(config.tail_bytes)
        # A daemon, so that a log that nobody closed does not keep the process alive: it ends as in a crash.
        self._thread = threading.Thread(target=self._run, name=f"update-log {path.parent.name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, pending: PendingRecord) -> None:
        """Queue the record that comes next."""
        self._queue.put(pending)

    def stop(self) -> None:
        """Write what is queued, then seal and end. Call once, after the last `put`."""
        self._queue.put(None)

    def join(self) -> None:
        """Wait for the thread's end."""
        self._thread.join()

    def _run(self) -> None:
        pending = self._queue.get()
        while pending is not None:
            group, pending = self._take_group(pending)
            if self.failed is None:
                try:
                    self._commit(group)
                except Exception as exc:
                    self._fail(exc)
            if self.failed is not None:
                self._on_settled(group, self.failed)
            del group  # the buffers are the caller's again
            if pending is _NOTHING:
                pending = self._wait()
        self._finish()

    def _wait(self) -> PendingRecord | None:
        """Return what is queued next, having put a mark behind the last record if that is a while in coming."""
        if self.failed is None and self._writer is not None:
            try:
                return self._queue.get(timeout=_MARK_AFTER_S)
            except Empty:
                try:
                    self._writer.write_mark()
                except Exception as exc:
                    self._fail(exc)
                    self._on_settled([], self.failed)
        return self._queue.get()

    def _take_group(self, first: PendingRecord) -> tuple[list[PendingRecord], PendingRecord | None]:
        """Return what is to be synced together, and what was taken from the queue beyond it: `_NOTHING` if nothing."""
        group, size_bytes = [first], first.size_bytes
        while not self._queue.empty():
            pending = self._queue.get()
            if pending is None or size_bytes + pending.size_bytes > self._config.max_group_bytes:
                return group, pending
            group.append(pending)
            size_bytes += pending.size_bytes
        return group, _NOTHING

    def _commit(self, group: list[PendingRecord]) -> None:
        """Make a group durable, in parts if it spans segments; each part is taken out of the list once it is."""
        while group:
            writer = self._writer_for(group[0])
            count, size_bytes = 1, group[0].size_bytes
            while count < len(group) and writer.fits(size_bytes + group[count].size_bytes):
                size_bytes += group[count].size_bytes
                count += 1
            part = group[:count]
            self._write(writer, part, size_bytes)
            del group[:count]
            self.last_seq = part[-1].seq
            self._metrics.num_groups += 1
            self._metrics.num_records += count
            self._on_settled(part, None)

    def _write(self, writer: SegmentWriter, part: Sequence[PendingRecord], size_bytes: int) -> None:
        buffers: list[Segment] = []
        places: list[tuple[int, int]] = []
        offset = 0
        mark = writer.segment.header.mark
        for pending in part:
            head = encode_record(
                mark=mark,
                seq=pending.seq,
                durable_seq=self.last_seq,
                epoch=pending.epoch,
                header=pending.header,
                body=pending.body,
            )
            buffers.append(head)
            buffers.extend(pending.body)
            places.append((pending.seq, offset))
            offset += pending.size_bytes
        writer.write(buffers, size_bytes, places)

    def _writer_for(self, pending: PendingRecord) -> SegmentWriter:
        """Return the segment that the record goes to, beginning a new one where it is time."""
        writer = self._writer
        if writer is not None:
            if writer.is_empty or writer.fits(pending.size_bytes):
                return writer
            writer.seal(self._clock_us())
        header = SegmentHeader(
            log_id=self._log_id,
            mark=secrets.randbits(64) or 1,
            first_seq=pending.seq,
            created_us=self._clock_us(),
        )
        self._writer = writer = SegmentWriter.create(
            self._path,
            header,
            tail=self._tail,
            ops=self._ops,
            metrics=self._metrics,
            segment_bytes=self._config.segment_bytes,
            allocate_bytes=min(self._config.allocate_bytes, self._config.segment_bytes),
        )
        self._segments.add(writer.segment)
        return writer

    def _fail(self, exc: Exception) -> None:
        """Stop for good; whatever of the group is on the disk, it is not acked."""
        if isinstance(exc, StorageError):
            error = exc
        else:
            error = StorageError(f"{self._path}: the log's writer failed: {exc!r}")
            error.__cause__ = exc
        self.failed = self.failed or error
        # Of a disk its line says all, to whoever runs the server; a traceback is for bugs.
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
            # All records are durable, only the seal may not be: the next start checks them and seals.
            self._fail(exc)
        self._on_stopped()


# Stands for "nothing was taken", which None, the order to stop, is not.
_NOTHING = PendingRecord(0, 0, b"", (), 0, None)  # type: ignore[arg-type]
