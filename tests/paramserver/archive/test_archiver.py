"""Archiving a shard's log: what is archived, when, and what becomes of a store or a log that fails."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from archived_log import WAIT_S, append, archive_in, flatten, open_file_log, until

from headrace.paramserver.archive.archiver import Archiver, ArchiverConfig
from headrace.paramserver.archive.objects import chain_of
from headrace.paramserver.log.excerpt import excerpt_log_id, write_excerpt
from headrace.paramserver.log.files import FileUpdateLog
from headrace.paramserver.log.opening import open_source
from headrace.schemas.errors import (
    ConfigError,
    CorruptionError,
    LogFencedError,
    StorageError,
    UnavailableError,
)


class Store:
    """A shard's archive in an object store that raises what a test says, before or after a call takes effect."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.archive = directory / "store", archive_in(directory / "store")
        self.scratch = directory / "scratch"
        self.store: Any = self.archive.store
        self.archive.store = self  # type: ignore[assignment]
        self.before: Callable[[str], None] = lambda name: None
        self.after: Callable[[str], None] = lambda name: None
        self.is_away = False

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.store, name)

        def call(*args: Any, **options: Any) -> Any:
            self.before(name)
            result = attribute(*args, **options)
            self.after(name)
            return result

        return call if callable(attribute) else attribute

    def fail(self, *names: str) -> Callable[[str], None]:
        """Return a fault: calls of these names, or all, fail while `is_away`."""
        self.is_away = True

        def fail(name: str) -> None:
            if self.is_away and (name in names or not names):
                raise UnavailableError("the store is away")

        return fail

    def restored(self, from_seq: int = 1) -> list[Any]:
        """Return all records that a restore finds."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        for piece in chain_of(self.archive.pieces(), from_seq):
            data = self.archive.read(piece.segment)
            write_excerpt(self.scratch, piece.segment.first_seq, data, last_seq=piece.last_seq)
        return [flatten(record) for record in open_source(self.scratch).read(from_seq)]

    @asynccontextmanager
    async def archiving(
        self,
        log: FileUpdateLog,
        *,
        checks: bool = True,
        check_claim: Callable[[int], None] = lambda term: None,
        **settings: Any,
    ) -> AsyncIterator[Archiver]:
        config = {"server_id": "server", "shard": 0, "segment_s": 0.05, "where": "the store", "has_held_term": True}
        archiver = Archiver(log, self.archive, ArchiverConfig(**config | settings), check_claim=check_claim)
        if checks:
            await archiver.check()
        async with archiver:
            yield archiver


def records_of(log: FileUpdateLog, from_seq: int = 1) -> list[Any]:
    return [flatten(record) for record in log.read(from_seq)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[FileUpdateLog]:
    async with open_file_log(tmp_path / "log") as opened:
        yield opened


async def test_durable_records_are_archived_soon(store: Store, log: FileUpdateLog) -> None:
    """A segment is closed some time after its first record, and has all records of the log with their marks.

    Of two uploads at once the first may be lost by a kill: the next start archives its records again.
    """
    async with store.archiving(log) as archiver:
        for _ in range(3):
            await append(log, 5)
            await until(lambda: archiver.state().archived_seq == log.last_seq)
        state = archiver.state()
        assert (state.archived_seq, state.behind_bytes, state.behind_s, state.num_failures) == (15, 0, 0.0, 0)
        assert archiver.lease().seq == 16
        segments = store.archive.segments()
        assert [log.nonce_of(segment.first_seq) for segment in segments] == [segment.mark for segment in segments]
        assert store.restored() == records_of(log)
    store.delete(segments[1].path)
    async with store.archiving(log) as archiver:
        await until(lambda: archiver.state().archived_seq == 15)
    assert store.restored() == records_of(log)


async def test_a_segment_is_closed_when_it_is_full(tmp_path: Path, store: Store) -> None:
    """Segments have about their size, whatever the time; a larger record has its own; segments of the log end them."""
    async with (
        open_file_log(tmp_path / "log", segment_bytes=40_000) as log,
        store.archiving(log, segment_s=3600.0, segment_bytes=8_000) as archiver,
    ):
        await append(log, 60, size_bytes=1_000)
        await append(log, 1, size_bytes=30_000)
        await append(log, 20, size_bytes=1_000)
        await until(lambda: archiver.state().archived_seq >= 70)
        segments = store.archive.segments()
        assert all(s.content.size_bytes <= 8_000 or s.first_seq == s.last_seq for s in segments)
        assert any(s.content.size_bytes > 30_000 for s in segments)
        assert len({segment.mark for segment in segments}) > 1
        assert archiver.state().behind_bytes > 0
    # An orderly end archives the rest.
    assert store.archive.segments()[-1].last_seq == 81


async def test_a_restart_goes_on_where_the_archive_ends(tmp_path: Path, store: Store) -> None:
    """Nothing is archived twice, and there is no gap, over restarts of which one was killed."""
    for number in range(4):
        async with open_file_log(tmp_path / "log") as log:
            await append(log, 7)
            async with store.archiving(log, segment_s=0.01) as archiver:
                await append(log, 7)
                if number == 2:  # what a kill leaves
                    assert archiver._task is not None
                    archiver._task.cancel()
            expected = records_of(log)
    segments = store.archive.segments()
    assert [s.first_seq for s in segments][1:] == [s.last_seq + 1 for s in segments][:-1]
    assert store.restored() == expected


@pytest.mark.parametrize("takes_effect", [False, True])
async def test_a_store_that_is_away_delays_the_archive_only(
    store: Store, log: FileUpdateLog, takes_effect: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Failures are counted and shown, however much is read; then all is archived once, also what a lost reply hid."""
    caplog.set_level(logging.INFO, "headrace.paramserver.archive")
    setattr(store, "after" if takes_effect else "before", store.fail("create"))
    async with store.archiving(log) as archiver:
        await append(log, 5)
        await until(lambda: archiver.state().num_failures >= 2)
        state = archiver.state()
        assert (state.archived_seq, state.error) == (0, "the store is away")
        assert state.behind_bytes > 0 and state.behind_s > 0
        assert archiver.lease().seq == 1
        await append(log, 5)
        await until(lambda: len([task for task in asyncio.all_tasks() if "_upload" in repr(task.get_coro())]) == 2)
        assert archiver.state().error == "the store is away" and "the archive goes on" not in caplog.messages
        store.is_away = False
        await until(lambda: archiver.state().archived_seq == 10)
        assert archiver.state().error is None and "the archive goes on" in caplog.messages
        assert store.restored() == records_of(log)


async def test_a_log_that_cannot_be_read_for_a_moment_delays_no_more(
    store: Store, log: FileUpdateLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the log can be read again the status says so, before anything is sent, and an orderly end archives all."""
    fill, errors = Archiver._fill, [StorageError("cannot read")]

    def fill_later(self: Archiver, *args: Any) -> Any:
        if errors:
            raise errors.pop()
        return fill(self, *args)

    monkeypatch.setattr(Archiver, "_fill", fill_later)
    async with store.archiving(log, segment_s=600) as archiver:
        await append(log, 5)
        await until(lambda: archiver.state().num_failures == 1 and archiver.state().error is None)
        assert archiver.state().archived_seq == 0
    assert store.restored() == records_of(log)


async def test_a_store_that_is_away_at_the_start_is_asked_again(store: Store, log: FileUpdateLog) -> None:
    """A shard starts without its archive, keeps its log until it knows what is archived, and waits for no upload."""
    async with store.archiving(log):
        await append(log, 5)
    store.before = store.fail()
    async with store.archiving(log) as archiver:
        assert archiver.state().archived_seq == -1
        assert archiver.lease().seq == log.first_seq
        await append(log, 5)
        store.is_away = False
        await until(lambda: archiver.state().archived_seq == 10)
        store.before = store.fail("create")
        await append(log, 1)
        await until(lambda: archiver.state().num_failures >= 2)
    # A shard that ends while the store is away, as after a failure of its disk, has not waited for the store.


async def test_an_object_that_comes_back_altered_is_sent_again(store: Store, log: FileUpdateLog) -> None:
    """A segment counts only once it was read back; one that is altered later is refused by whoever reads it."""
    num_altered = 0

    def alter(name: str) -> None:
        nonlocal num_altered
        if name == "create" and num_altered < 2:
            (path,) = (store.directory / "archive" / "0000").iterdir()
            data = path.read_bytes()
            path.write_bytes(data[:50] if num_altered else data[:99] + b"?" + data[100:])
            num_altered += 1

    store.after = alter
    await append(log, 5)  # before it is archived: in one segment, however slow the disk is
    async with store.archiving(log) as archiver:
        await until(lambda: archiver.state().archived_seq == 5)
        assert archiver.state().num_failures == 2
    assert store.restored() == records_of(log)
    (segment,) = store.archive.segments()
    path = store.directory / segment.path
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CorruptionError, match="not those that were put"):
        store.restored()


async def test_an_archive_ahead_of_the_log_is_refused(tmp_path: Path, store: Store, log: FileUpdateLog) -> None:
    """A log that ends before its archive, or holds other records at its end, is an older copy: the start says so."""
    async with store.archiving(log):
        await append(log, 10)
    before = store.archive.segments()
    for num_records in (0, 4, 10, 15):
        async with open_file_log(tmp_path / f"other-{num_records}") as other:
            await append(other, num_records)
            with pytest.raises(ConfigError, match=r"has its log up to seq 10.* headrace restore the store --shard 0"):
                async with store.archiving(other):
                    pass
            # If the store was away at the start, the shard stops once the store tells; a `ConfigError` would end all.
            async with store.archiving(other, checks=False) as archiver, asyncio.timeout(WAIT_S):
                error = await archiver.wait_failed()
            assert isinstance(error, LogFencedError) and "is an older copy" in str(error)
    assert store.archive.segments() == before


async def test_a_copy_that_was_overtaken_stops_before_its_next_upload(store: Store, log: FileUpdateLog) -> None:
    """Once another copy has claimed the shard, this one archives nothing more and steps down."""
    is_fenced = False

    def check_claim(term: int) -> None:
        if is_fenced:
            raise LogFencedError("another copy")

    async with store.archiving(log, check_claim=check_claim) as archiver:
        await append(log, 5)
        await until(lambda: archiver.state().archived_seq == 5)
        is_fenced = True
        await append(log, 5)
        async with asyncio.timeout(WAIT_S):
            assert isinstance(await archiver.wait_failed(), LogFencedError)
    assert store.archive.segments()[-1].last_seq == 5


async def test_log_that_was_removed_before_it_was_archived_is_a_gap(tmp_path: Path, store: Store) -> None:
    """The archive goes on behind the gap and says how much it lacks; a chain never spans a gap."""
    async with open_file_log(tmp_path / "log", segment_bytes=4_096) as log:
        async with store.archiving(log):
            await append(log, 10)
        await append(log, 300)
        first_seq = log.trim(200)
        assert first_seq > 12
        async with store.archiving(log) as archiver:
            await until(lambda: archiver.state().archived_seq == 310)
            assert archiver.state().num_lost == first_seq - 11
        assert chain_of(store.archive.pieces(), 1)[-1].last_seq == 10
        expected = records_of(log, first_seq)
    assert store.restored(first_seq) == expected


def test_the_log_id_of_excerpts_never_changes() -> None:
    """ON DISK: excerpts of releases must go together."""
    assert excerpt_log_id("3f1c", 7).hex() == "be8917526cb3dfcd3fa8c6356832f818"
    assert excerpt_log_id("3f1c", 7) != excerpt_log_id("3f1c", 8)
