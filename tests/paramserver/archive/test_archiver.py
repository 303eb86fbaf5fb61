"""Archiving a shard's log: what is archived, when, and what becomes of a store or a log that fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from archived_log import WAIT_S, append, archive_in, flatten, open_file_log, until

from headrace.paramserver.archive.archiver import Archiver, ArchiverConfig
from headrace.paramserver.archive.objects import ShardArchive, chain_of
from headrace.paramserver.log.excerpt import excerpt_log_id, write_excerpt
from headrace.paramserver.log.files import FileUpdateLog
from headrace.paramserver.log.opening import open_source
from headrace.schemas.errors import (
    ConfigError,
    CorruptionError,
    GoneError,
    LogFencedError,
    StorageError,
    UnavailableError,
)


class Faulty:
    """An archive in an object store that raises what a test says, before or after a call takes effect."""

    def __init__(self, directory: Path) -> None:
        self.archive = archive_in(directory)
        self.store: Any = self.archive.store
        self.archive.store = self  # type: ignore[assignment]
        self.before: Callable[[str], None] = lambda name: None
        self.after: Callable[[str], None] = lambda name: None
        self.is_away = False

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.store, name)
        if not callable(attribute):
            return attribute

        def call(*args: Any, **options: Any) -> Any:
            self.before(name)
            result = attribute(*args, **options)
            self.after(name)
            return result

        return call

    def fail(self, *names: str) -> Callable[[str], None]:
        """Return a fault: calls of these names, or all, fail while `is_away`."""
        self.is_away = True

        def fail(name: str) -> None:
            if self.is_away and (name in names or not names):
                raise UnavailableError("the store is away")

        return fail


@asynccontextmanager
async def archiving(
    log: FileUpdateLog, archive: ShardArchive, *, checks: bool = True, **settings: Any
) -> AsyncIterator[Archiver]:
    check_claim = settings.pop("check_claim", lambda term: None)
    config = {"server_id": "server", "shard": 0, "segment_s": 0.05, "where": "the store", "has_held_term": True}
    archiver = Archiver(log, archive, ArchiverConfig(**config | settings), check_claim=check_claim)
    if checks:
        await archiver.check()
    async with archiver:
        yield archiver


def archived(archive: ShardArchive, scratch: Path, from_seq: int = 1) -> list[Any]:
    """Return all records that a restore finds."""
    scratch.mkdir()
    for piece in chain_of(archive.pieces(), from_seq):
        write_excerpt(scratch, piece.segment.first_seq, archive.read(piece.segment), last_seq=piece.last_seq)
    return [flatten(record) for record in open_source(scratch).read(from_seq)]


async def test_durable_records_are_archived_soon(tmp_path: Path) -> None:
    """A segment is closed some time after its first record, and has all records of the log with their marks."""
    archive = archive_in(tmp_path / "store")
    async with open_file_log(tmp_path / "log") as log, archiving(log, archive) as archiver:
        for _ in range(3):
            await append(log, 5)
            await until(lambda: archiver.state().archived_seq == log.last_seq)
        state = archiver.state()
        assert (state.archived_seq, state.behind_bytes, state.behind_s, state.num_failures) == (15, 0, 0.0, 0)
        assert archiver.lease().seq == 16
        segments = archive.segments()
        assert [log.nonce_of(segment.first_seq) for segment in segments] == [segment.mark for segment in segments]
        assert archived(archive, tmp_path / "restored") == [flatten(record) for record in log.read(1)]


async def test_a_segment_is_closed_when_it_is_full(tmp_path: Path) -> None:
    """Segments have about their size, whatever the time; a larger record has its own; segments of the log end them."""
    archive = archive_in(tmp_path / "store")
    async with (
        open_file_log(tmp_path / "log", segment_bytes=40_000) as log,
        archiving(log, archive, segment_s=3600.0, segment_bytes=8_000) as archiver,
    ):
        await append(log, 60, size_bytes=1_000)
        await append(log, 1, size_bytes=30_000)
        await append(log, 20, size_bytes=1_000)
        await until(lambda: archiver.state().archived_seq >= 70)
        segments = archive.segments()
        assert all(s.content.size_bytes <= 8_000 or s.first_seq == s.last_seq for s in segments)
        assert any(s.content.size_bytes > 30_000 for s in segments)
        assert len({segment.mark for segment in segments}) > 1
        assert archiver.state().behind_bytes > 0
    # An orderly end archives the rest.
    assert archive.segments()[-1].last_seq == 81


async def test_a_restart_goes_on_where_the_archive_ends(tmp_path: Path) -> None:
    """Nothing is archived twice, and there is no gap, over restarts of which one was killed."""
    archive = archive_in(tmp_path / "store")
    for number in range(4):
        async with open_file_log(tmp_path / "log") as log:
            await append(log, 7)
            async with archiving(log, archive, segment_s=0.01) as archiver:
                await append(log, 7)
                if number == 2:  # what a kill leaves
                    assert archiver._task is not None
                    archiver._task.cancel()
            expected = [flatten(record) for record in log.read(1)]
    segments = archive.segments()
    assert [s.first_seq for s in segments][1:] == [s.last_seq + 1 for s in segments][:-1]
    assert archived(archive, tmp_path / "restored") == expected


@pytest.mark.parametrize("takes_effect", [False, True])
async def test_a_store_that_is_away_delays_the_archive_only(
    tmp_path: Path, takes_effect: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Failures are counted and shown, however much is read; then all is archived once, also what a lost reply hid."""
    caplog.set_level(logging.INFO, "headrace.paramserver.archive")
    store = Faulty(tmp_path / "store")
    archive = store.archive
    setattr(store, "after" if takes_effect else "before", store.fail("create"))
    async with open_file_log(tmp_path / "log") as log, archiving(log, archive) as archiver:
        await append(log, 5)
        await until(lambda: archiver.state().num_failures >= 2)
        state = archiver.state()
        assert (state.archived_seq, state.error) == (0, "the store is away")
        assert state.behind_bytes > 0
        assert state.behind_s > 0
        assert archiver.lease().seq == 1
        await append(log, 5)
        await until(lambda: len([task for task in asyncio.all_tasks() if "_upload" in repr(task.get_coro())]) == 2)
        assert archiver.state().error == "the store is away" and "the archive goes on" not in caplog.messages
        store.is_away = False
        await until(lambda: archiver.state().archived_seq == 10)
        assert archiver.state().error is None and "the archive goes on" in caplog.messages
        assert archived(archive, tmp_path / "restored") == [flatten(record) for record in log.read(1)]


async def test_a_log_that_cannot_be_read_for_a_moment_delays_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the log can be read again the status says so, before anything is sent, and an orderly end archives all."""
    archive, fill, num_reads = archive_in(tmp_path / "store"), Archiver._fill, 0

    def fill_later(self: Archiver, *args: Any) -> Any:
        nonlocal num_reads
        num_reads += 1
        if num_reads == 1:
            raise StorageError("cannot read")
        return fill(self, *args)

    monkeypatch.setattr(Archiver, "_fill", fill_later)
    async with open_file_log(tmp_path / "log") as log:
        async with archiving(log, archive, segment_s=600) as archiver:
            await append(log, 5)
            await until(lambda: archiver.state().num_failures == 1 and archiver.state().error is None)
            assert archiver.state().archived_seq == 0
        assert archived(archive, tmp_path / "restored") == [flatten(record) for record in log.read(1)]


async def test_a_store_that_is_away_delays_no_end(tmp_path: Path) -> None:
    """A shard that ends while the store is away, as after a failure of its disk, does not wait for the store."""
    store = Faulty(tmp_path / "store")
    store.before = store.fail("create")
    async with open_file_log(tmp_path / "log") as log:
        await append(log, 1)
        async with asyncio.timeout(WAIT_S), archiving(log, store.archive) as archiver:
            await until(lambda: archiver.state().num_failures >= 2)


async def test_a_store_that_is_away_at_the_start_is_asked_again(tmp_path: Path) -> None:
    """A shard starts without its archive, and keeps its log until it has found out what is archived."""
    store = Faulty(tmp_path / "store")
    async with open_file_log(tmp_path / "log") as log:
        async with archiving(log, store.archive):
            await append(log, 5)
        store.before = store.fail()
        async with archiving(log, store.archive) as archiver:
            assert archiver.state().archived_seq == -1
            assert archiver.lease().seq == log.first_seq
            await append(log, 5)
            store.is_away = False
            await until(lambda: archiver.state().archived_seq == 10)


async def test_an_object_that_comes_back_altered_is_sent_again(tmp_path: Path) -> None:
    """A segment counts only once it was read back; one that is altered later is refused by whoever reads it."""
    store = Faulty(tmp_path / "store")
    archive, folder = store.archive, tmp_path / "store" / "archive" / "0000"
    num_altered = 0

    def alter(name: str) -> None:
        nonlocal num_altered
        if name == "create" and num_altered < 2:
            (path,) = folder.iterdir()
            data = path.read_bytes()
            path.write_bytes(data[:50] if num_altered else data[:99] + b"?" + data[100:])
            num_altered += 1

    store.after = alter
    async with open_file_log(tmp_path / "log") as log:
        await append(log, 5)  # before it is archived: in one segment, however slow the disk is
        async with archiving(log, archive) as archiver:
            await until(lambda: archiver.state().archived_seq == 5)
            assert archiver.state().num_failures == 2
        assert archived(archive, tmp_path / "restored") == [flatten(record) for record in log.read(1)]
    (segment,) = archive.segments()
    path = tmp_path / "store" / segment.path
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CorruptionError, match="not those that were put"):
        archived(archive, tmp_path / "again")


async def test_an_archive_ahead_of_the_log_is_refused(tmp_path: Path) -> None:
    """A log that ends before its archive, or holds other records at its end, is an older copy: the start says so."""
    archive = archive_in(tmp_path / "store")
    async with open_file_log(tmp_path / "log") as log, archiving(log, archive):
        await append(log, 10)
    before = archive.segments()
    for num_records in (0, 4, 10, 15):
        async with open_file_log(tmp_path / f"other-{num_records}") as other:
            await append(other, num_records)
            with pytest.raises(ConfigError, match=r"has its log up to seq 10.* headrace restore the store --shard 0"):
                async with archiving(other, archive):
                    pass
            # If the store was away at the start, the shard stops once the store tells; a `ConfigError` would end all.
            async with archiving(other, archive, checks=False) as archiver, asyncio.timeout(WAIT_S):
                error = await archiver.wait_failed()
            assert isinstance(error, LogFencedError) and "is an older copy" in str(error)
    assert archive.segments() == before


async def test_a_copy_that_was_overtaken_stops_before_its_next_upload(tmp_path: Path) -> None:
    """Once another copy has claimed the shard, this one archives nothing more and steps down."""
    archive = archive_in(tmp_path / "store")
    is_fenced = False

    def check_claim(term: int) -> None:
        if is_fenced:
            raise LogFencedError("another copy")

    async with open_file_log(tmp_path / "log") as log, archiving(log, archive, check_claim=check_claim) as archiver:
        await append(log, 5)
        await until(lambda: archiver.state().archived_seq == 5)
        is_fenced = True
        await append(log, 5)
        async with asyncio.timeout(WAIT_S):
            assert isinstance(await archiver.wait_failed(), LogFencedError)
    assert archive.segments()[-1].last_seq == 5


async def test_log_that_was_removed_before_it_was_archived_is_a_gap(tmp_path: Path) -> None:
    """The archive goes on behind the gap and says how much it lacks; a chain never spans a gap."""
    archive = archive_in(tmp_path / "store")
    async with open_file_log(tmp_path / "log", segment_bytes=4_096) as log:
        async with archiving(log, archive):
            await append(log, 10)
        await append(log, 300)
        first_seq = log.trim(200)
        assert first_seq > 12
        async with archiving(log, archive) as archiver:
            await until(lambda: archiver.state().archived_seq == 310)
            assert archiver.state().num_lost == first_seq - 11
            await archiver.wait_archived(first_seq - 1, 310)
            with pytest.raises(GoneError, match="removed before it was archived"):
                await archiver.wait_archived(first_seq - 2, 310)
        assert chain_of(archive.pieces(), 1)[-1].last_seq == 10
        expected = [flatten(record) for record in log.read(first_seq)]
    assert archived(archive, tmp_path / "restored", first_seq) == expected


async def test_a_gap_of_a_lost_upload_is_filled(tmp_path: Path) -> None:
    """Of two uploads at once the first may be lost by a kill: the next start archives its records again."""
    archive = archive_in(tmp_path / "store")
    async with open_file_log(tmp_path / "log") as log:
        async with archiving(log, archive) as archiver:
            for _ in range(3):
                await append(log, 5)
                await until(lambda: archiver.state().archived_seq == log.last_seq)
        archive.store.delete(archive.segments()[1].path)
        async with archiving(log, archive) as archiver:
            await until(lambda: archiver.state().archived_seq == 15)
        assert archived(archive, tmp_path / "restored") == [flatten(record) for record in log.read(1)]


def test_the_log_id_of_excerpts_never_changes() -> None:
    """ON DISK: excerpts of releases must go together."""
    assert excerpt_log_id("3f1c", 7).hex() == "be8917526cb3dfcd3fa8c6356832f818"
    assert excerpt_log_id("3f1c", 7) != excerpt_log_id("3f1c", 8)
