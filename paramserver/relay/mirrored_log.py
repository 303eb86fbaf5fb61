"""One shard's mirror on disk, with all that serves it: its feed, leases and retention.

    shard-0000/mirror.json         which folder holds the mirror, where it begins, and the source's mark before that
    shard-0000/log-0000000001/     its segments
    shard-0000/leases.json         followers' long leases

A mirror that lacks what comes next is replaced as a whole: the new folder is named in `mirror.json`, which is replaced
atomically, and then the old one is removed. So a kill at any moment leaves one mirror.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from headrace.paramserver.ingest.feed import UpdateFeed
from headrace.paramserver.log.interface import LogRecord, UpdateLogConfig
from headrace.paramserver.log.mirror import LogMirror
from headrace.paramserver.reading.follower import Update
from headrace.paramserver.relay.options import RelayConfig
from headrace.paramserver.relay.recent_records import RecentRecords
from headrace.paramserver.shard.retention import LogRetention
from headrace.paramserver.snapshots.directory import mapped_errors
from headrace.paramserver.system.durable import fsync_path, write_file
from headrace.schemas.errors import CorruptionError, HeadraceError
from headrace.schemas.snapshot_manifest import ShardPart

__all__ = ["MirrorPlace", "MirroredLog", "try_disk"]

# ON DISK: names, and what a version means.
_PLACE_NAME, _FOLDER, _TRIAL_NAME = "mirror.json", "log-", "trial"
_FORMAT, _FORMAT_VERSION = "headrace-mirror", 1
_TRIAL_BYTES = 1 << 20
# Followers that are not farther behind read memory, so the ring that the disk is written from may be small.
_RECENT_BYTES, _TAIL_BYTES = 24 << 20, 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class MirrorPlace:
    """A mirror's folder, its first seq, and the source's mark of the record before that, None if unknown."""

    folder: str
    begin_seq: int
    begin_mark: int | None

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """Return the place that a shard's directory names; None if it has no mirror yet.

        Raises:
            CorruptionError: The file is damaged.
            StorageError: It cannot be read.
        """
        path = directory / _PLACE_NAME
        with mapped_errors(path, FileNotFoundError):
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                return None
        try:
            values = json.loads(content)
            if (values.pop("format"), values.pop("format_version")) != (_FORMAT, _FORMAT_VERSION):
                raise ValueError(f"not a mirror of version {_FORMAT_VERSION}")
            return cls(**values)
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise CorruptionError(f"{path}: {exc}; remove {directory}, and the relay begins anew") from exc

    @classmethod
    def begin(cls, directory: Path, *, begin_seq: int, begin_mark: int | None) -> Self:
        """Name a new, empty folder as the shard's mirror, durably. Other folders are left for `remove_others`."""
        with mapped_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            numbers = [int(path.name.removeprefix(_FOLDER)) for path in directory.glob(f"{_FOLDER}[0-9]*")]
            place = cls(
                folder=f"{_FOLDER}{max(numbers, default=0) + 1:010d}", begin_seq=begin_seq, begin_mark=begin_mark
            )
            (directory / place.folder).mkdir()
            fsync_path(directory)
            values = {"format": _FORMAT, "format_version": _FORMAT_VERSION, "folder": place.folder}
            values |= {"begin_seq": begin_seq, "begin_mark": begin_mark}
            write_file(directory / _PLACE_NAME, json.dumps(values).encode() + b"\n")
        return place

    def remove_others(self, directory: Path) -> None:
        """Remove mirrors that were replaced."""
        with mapped_errors(directory):
            for path in directory.glob(f"{_FOLDER}[0-9]*"):
                if path.name != self.folder:
                    shutil.rmtree(path)


class MirroredLog:
    """An open mirror of one shard. Implements `CommittedLog`, and tells when records come.

    Followers get a record when it has come, and this machine's disk later: see `RecentRecords`.

    Thread: the event loop's; reading and trimming any.

    Attributes:
        mirror: The log itself.
        feed: Answers `fetchUpdates` from it.
        retention: Removes what nobody needs.
    """

    def __init__(
        self, mirror: LogMirror, place: MirrorPlace, config: RelayConfig, *, shard: int, server_id: str
    ) -> None:
        """Use `open`."""
        self.mirror = mirror
        self._place = place
        self._recent = RecentRecords(mirror.last_seq)
        self._grew = asyncio.Event()
        self.feed = UpdateFeed(
            self,
            self,
            server_id=server_id,
            max_frame_bytes=config.max_frame_bytes,
            few_since=self._recent.few_since,
        )
        retention = config.retention_of(shard, server_id=server_id)
        self.retention = LogRetention(self, self, self.feed.followers, retention)
        self._stack = AsyncExitStack()

    @classmethod
    async def open(cls, place: MirrorPlace, config: RelayConfig, *, shard: int, server_id: str) -> MirroredLog:
        """Open the mirror at a place and begin to keep it within its bounds.

        Raises:
            CorruptionError: A segment is damaged.
            StorageError: The disk failed.

        Cancellation: nothing stays open.
        """
        directory = config.data / f"shard-{shard:04d}"
        log_config = UpdateLogConfig(segment_bytes=config.log_segment_bytes, tail_bytes=_TAIL_BYTES)
        mirror = await asyncio.to_thread(
            LogMirror.open, directory / place.folder, begin_seq=place.begin_seq, config=log_config
        )
        opened = cls(mirror, place, config, shard=shard, server_id=server_id)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(mirror.close)
            await asyncio.to_thread(place.remove_others, directory)
            await stack.enter_async_context(opened.retention)
            opened._stack = stack.pop_all()
        return opened

    @property
    def first_seq(self) -> int:
        """See `UpdateLog`."""
        return self.mirror.first_seq

    @property
    def last_seq(self) -> int:
        """Last record that followers get."""
        return self._recent.last_seq

    @property
    def durable_seq(self) -> int:
        """Last record on this machine's disk. All may be removed once nobody needs it: no store is made from it."""
        return self.mirror.last_seq

    @property
    def pending_bytes(self) -> int:
        """Bytes of records that this machine's disk does not have yet."""
        return self.mirror.pending_bytes

    @property
    def size_bytes(self) -> int:
        """See `UpdateLog`."""
        return self.mirror.size_bytes

    @property
    def last_mark(self) -> int | None:
        """The source's mark of the last record, or of the one before the first; None if unknown."""
        return self.nonce_of(self.last_seq)

    def nonce_of(self, seq: int) -> int | None:
        """Return the source's mark of a record, also of the one before the mirror's first; None if unknown."""
        if seq == self._place.begin_seq - 1:
            return self._place.begin_mark
        mark = self._recent.mark_of(seq)
        return self.mirror.nonce_of(seq) if mark is None else mark

    def append(self, update: Update, mark: int | None) -> asyncio.Future[None]:
        """Add the next record of the source, and return what is done when it is durable here. Call `wake` then.

        Raises as `LogMirror.append`.
        """
        durable = self.mirror.append(
            seq=update.seq, mark=mark, epoch=update.epoch, header=update.header, body=[update.body]
        ).durable
        durable.add_done_callback(_take_error)
        self._recent.add(LogRecord(update.seq, update.epoch, update.header, update.body), mark)
        self._recent.drop(up_to_seq=self.mirror.last_seq, max_bytes=_RECENT_BYTES)
        return durable

    def read(self, from_seq: int, *, past_cache: bool = False) -> Iterator[LogRecord]:
        """See `UpdateLog.read`; it may end early, at a record that has just left memory."""
        if not self._recent.has(from_seq):
            for record in self.mirror.read(from_seq, past_cache=past_cache):
                yield record
                from_seq = record.seq + 1
        yield from self._recent.since(from_seq)

    def trim(self, before_seq: int, *, max_bytes: int | None = None, max_age_s: float | None = None) -> int:
        """See `UpdateLog.trim`."""
        return self.mirror.trim(before_seq, max_bytes=max_bytes, max_age_s=max_age_s)

    async def wait_durable(self, seq: int) -> None:
        """Return when a record has come, which is durable at the shard. Cancellation: harmless."""
        while self.last_seq < seq:
            await self._grew.wait()

    def wake(self) -> None:
        """Let those look again who wait for a record."""
        grew, self._grew = self._grew, asyncio.Event()
        grew.set()

    def covers(self, part: ShardPart) -> bool:
        """Return whether a copy made from a part of a snapshot can follow this log."""
        mark = self.nonce_of(part.seq)
        is_same = mark is None or part.mark is None or mark == part.mark
        return self.first_seq - 1 <= part.seq <= self.last_seq and is_same

    async def wait_failed(self) -> HeadraceError:
        """Wait until the disk fails, and return the error. Cancellation: harmless."""
        waiting = [asyncio.ensure_future(each.wait_failed()) for each in (self.mirror, self.retention)]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in waiting:
                task.cancel()

    async def close(self) -> None:
        """Answer all long polls, stop retention and close the files. Idempotent."""
        self.feed.stop()
        await self._stack.aclose()


def try_disk(directory: Path) -> None:
    """Write a file and remove it; raise `StorageError` if the disk refuses. Thread: any; blocks."""
    trial = directory / _TRIAL_NAME
    with mapped_errors(directory):
        write_file(trial, bytes(_TRIAL_BYTES))
        trial.unlink()


def _take_error(durable: asyncio.Future[None]) -> None:
    """Look at the outcome, which nobody else may do: `wait_failed` tells why a log has failed."""
    durable.exception()
