"""A mirror of a log: what it promises besides the suite of all logs (`test_interface.py`)."""

from __future__ import annotations

import asyncio
import errno
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from faulty_file_ops import FaultyFileOps
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from log_files import body_of, fill, flip, opened_log, segments_of

from headrace.paramserver.log.inspection import inspect_log
from headrace.paramserver.log.interface import LogRecord, UpdateLogConfig
from headrace.paramserver.log.mirror import LogMirror, MirrorSegmentWriter, MirrorSource
from headrace.schemas.errors import CorruptionError, GoneError, ProtocolError, StorageError

SMALL = UpdateLogConfig(segment_bytes=4096, allocate_bytes=4096, tail_bytes=8192)


def _append(mirror: LogMirror, seq: int) -> asyncio.Future[None]:
    return mirror.append(seq=seq, mark=1, epoch=1, header={"step": seq}, body=[body_of(seq)]).durable


def _record(seq: int, *, size_bytes: int = 100) -> LogRecord:
    return LogRecord(seq, 3, {"kind": 1, "step": seq}, memoryview(body_of(seq, size_bytes)))


def _facts(records: Any) -> list[tuple[int, int, dict[str, Any], bytes]]:
    return [(record.seq, record.epoch, record.header, bytes(record.body)) for record in records]


async def test_mirror_equals_its_source(path: Path, tmp_path: Path) -> None:
    """A mirror that begins in the middle has the source's records and nonces, over restarts of either."""
    mirrored = 41
    for _ in range(3):
        async with opened_log(tmp_path / "source", SMALL) as source:
            await fill(source, 100)
            mirror = LogMirror.open(path, begin_seq=mirrored, config=SMALL)
            assert (mirror.first_seq, mirror.last_seq) == (41, mirrored - 1)
            for record in source.read(mirrored):
                appended = mirror.append(
                    seq=record.seq,
                    mark=source.nonce_of(record.seq),
                    epoch=record.epoch,
                    header=record.header,
                    body=[record.body],
                )
                await appended.durable
            assert _facts(mirror.read(41)) == _facts(source.read(41))
            marks = [mirror.nonce_of(seq) for seq in range(41, source.last_seq + 1)]
            assert marks == [source.nonce_of(seq) for seq in range(41, source.last_seq + 1)]
            assert len(set(marks)) > 2
            assert mirror.nonce_of(40) is None and mirror.nonce_of(source.last_seq + 1) is None
            with pytest.raises(GoneError, match="begins at seq 41"):
                mirror.read(40)
            mirrored = source.last_seq + 1
            await mirror.close()
    found = MirrorSource.of_directory(path)
    assert (found.first_seq, found.last_seq) == (41, 300)
    assert found.nonces(41, 300) == list(dict.fromkeys(marks_of(path)))
    assert not inspect_log(path).damage


def marks_of(path: Path) -> list[int]:
    """Return the source's mark of each segment in a directory, oldest first."""
    return [MirrorSource.of_segment(segment).nonces(0, 2**62)[0] for segment in segments_of(path)]


async def test_gap_and_repetition_are_refused(path: Path) -> None:
    """Only the record behind the last one is taken, and a refused one changes nothing."""
    mirror = LogMirror.open(path, begin_seq=7)
    for next_seq in (7, 8):
        for seq in (next_seq - 1, next_seq + 1):
            with pytest.raises(ProtocolError, match=f"record {seq} where {next_seq}"):
                _append(mirror, seq)
        await _append(mirror, next_seq)
    assert [record.seq for record in mirror.read(7)] == [7, 8]
    await mirror.close()
    with pytest.raises(ValueError, match="the first is 1"):
        LogMirror.open(path, begin_seq=0)


def test_one_segment_is_written_and_checked_alone(path: Path) -> None:
    """A segment in a directory of its own is sealed, moved, read back and checked without the others."""
    path.mkdir()
    writer = MirrorSegmentWriter(path, first_seq=50, mark=-9)
    assert (writer.first_seq, writer.last_seq, writer.mark) == (50, 49, -9)
    records = [_record(seq) for seq in range(50, 90)]
    writer.write(records[:15])
    with pytest.raises(ProtocolError, match="record 67 where 66"):
        writer.write([records[15], records[17]])
    writer.write([])
    writer.write(records[15:])
    with pytest.raises(CorruptionError, match="no seal"):
        MirrorSource.of_segment(writer.path)
    size_bytes = writer.size_bytes
    sealed = writer.seal()
    writer.close()
    assert sealed.stat().st_size == size_bytes + 64
    moved = path / "elsewhere" / sealed.name
    moved.parent.mkdir()
    sealed.rename(moved)
    source = MirrorSource.of_segment(moved)
    assert (source.first_seq, source.last_seq, source.nonces(50, 89)) == (50, 89, [-9])
    assert _facts(source.read(50)) == _facts(records)
    assert _facts(source.read(60, 62)) == _facts(records[10:13])
    flip(moved, 1000)
    with pytest.raises(CorruptionError, match=moved.name):
        list(MirrorSource.of_segment(moved).read(50))
    with pytest.raises(FileNotFoundError):
        MirrorSource.of_segment(sealed)


def test_segments_of_one_log_id_are_one_log(path: Path) -> None:
    """Segments that were written one by one are read together, and a missing one between them is found."""
    path.mkdir()
    for first_seq in (5, 10, 15):
        writer = MirrorSegmentWriter(path, first_seq=first_seq, mark=first_seq, log_id=bytes(range(16)))
        writer.write([_record(seq, size_bytes=5000) for seq in range(first_seq, first_seq + 5)])
        writer.seal()
    source = MirrorSource.of_directory(path)
    assert [record.seq for record in source.read(5)] == list(range(5, 20))
    assert source.nonces(9, 10) == [5, 10]
    segments_of(path)[1].unlink()
    with pytest.raises(CorruptionError, match="a segment is missing"):
        MirrorSource.of_directory(path)


def test_full_disk_ends_a_segment(path: Path, ops: FaultyFileOps) -> None:
    """A disk that refuses is a `StorageError`, and nothing passes for a sealed segment."""
    path.mkdir()
    writer = MirrorSegmentWriter(path, first_seq=1, mark=1, ops=ops)
    ops.fail("pwritev", errno.ENOSPC)
    with pytest.raises(StorageError, match="ENOSPC"):
        writer.write([_record(1)])
    writer.close()
    assert ops.num_open == 0
    with pytest.raises(CorruptionError):
        MirrorSource.of_segment(writer.path)


class _MirrorMachine(RuleBasedStateMachine):
    """A mirror against a list of (mark, body), with restarts, kills and power cuts."""

    @initialize(begin_seq=st.integers(1, 2**40))
    def begin(self, begin_seq: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "log"
        self.loop = asyncio.new_event_loop()
        self.ops = FaultyFileOps()
        self.begin_seq = self.first_seq = begin_seq
        self.records: list[tuple[int, bytes]] = []
        self.mark = 1
        self.open()

    def open(self) -> None:
        # A new mirror is told where it begins; one with records knows.
        begin_seq = 1 if self.records else self.begin_seq
        self.mirror = LogMirror.open(self.path, begin_seq=begin_seq, config=SMALL, ops=self.ops)

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    @property
    def next_seq(self) -> int:
        return self.begin_seq + len(self.records)

    async def _append(self, sizes: list[int], *, waits: bool = True) -> list[tuple[int, bytes]]:
        added, appends = [], []
        for seq, size_bytes in enumerate(sizes, self.next_seq):
            added.append((self.mark, body_of(seq, size_bytes)))
            append = self.mirror.append(seq=seq, mark=self.mark, epoch=1, header={"step": 1}, body=[added[-1][1]])
            appends.append(append.durable)
        if waits:
            await asyncio.gather(*appends)
        else:
            await asyncio.gather(*appends, return_exceptions=True)
        return added

    @rule(sizes=st.lists(st.sampled_from([0, 10, 300, 5000]), min_size=1, max_size=8))
    def append(self, sizes: list[int]) -> None:
        self.records += self.run(self._append(sizes))

    @rule()
    def restart_source(self) -> None:
        self.mark += 1

    @rule()
    def restart(self) -> None:
        self.run(self.mirror.close())
        self.open()

    @rule(
        sizes=st.lists(st.sampled_from([0, 300, 5000]), min_size=1, max_size=6),
        num_calls=st.integers(0, 25),
        seed=st.integers(0, 2**32) | st.none(),
    )
    def crash(self, sizes: list[int], num_calls: int, seed: int | None) -> None:
        """Die within so many calls of the file system while records are appended; then perhaps lose power."""
        self.ops.calls_left = num_calls
        added = self.run(self._append(sizes, waits=False))
        durable = self.mirror.last_seq
        self.ops.is_dead = True
        self.run(self.mirror.close())
        self.ops.is_dead, self.ops.calls_left = False, None
        if seed is not None:
            self.ops.power_cut(random.Random(seed))
        self.open()
        last_seq = self.mirror.last_seq
        assert durable <= last_seq < self.next_seq + len(added)
        self.records += added[: last_seq + 1 - self.next_seq]

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        floor = data.draw(st.integers(self.begin_seq, self.next_seq))
        first_seq = self.mirror.trim(floor)
        assert self.first_seq <= first_seq <= max(self.first_seq, floor)
        self.first_seq = first_seq

    @invariant()
    def agrees_with_the_list(self) -> None:
        if not hasattr(self, "mirror"):
            return
        assert self.mirror.last_seq == self.next_seq - 1
        if not self.records:
            return
        assert self.mirror.first_seq == self.first_seq
        kept = self.records[self.first_seq - self.begin_seq :]
        assert [bytes(record.body) for record in self.mirror.read(self.first_seq)] == [body for _, body in kept]
        seqs = range(self.first_seq, self.next_seq)
        assert [self.mirror.nonce_of(seq) for seq in seqs] == [mark for mark, _ in kept]

    def teardown(self) -> None:
        if hasattr(self, "mirror"):
            self.run(self.mirror.close())
            self.loop.close()
            self.folder.cleanup()


TestMirrorMachine = _MirrorMachine.TestCase
TestMirrorMachine.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
