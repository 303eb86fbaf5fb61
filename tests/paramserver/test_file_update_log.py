"""The update log in files: what it does to them, and what crashes, failing disks and damage leave of it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_file_ops import FaultyFileOps

from headrace.paramserver import log_segments
from headrace.paramserver.file_update_log import FileUpdateLog
from headrace.paramserver.log_reader import LogReader
from headrace.paramserver.log_segments import segment_name
from headrace.paramserver.update_log import UpdateLogConfig
from headrace.schemas.errors import ConfigError, CorruptionError, StorageError
from headrace.schemas.log_records import (
    RECORD_HEADER_BYTES,
    SEAL_BYTES,
    SEGMENT_HEADER_BYTES,
    decode_segment_header,
    encode_mark,
    encode_record,
)

_SMALL = UpdateLogConfig(segment_bytes=4096, allocate_bytes=4096)
_ROOMY = UpdateLogConfig(segment_bytes=1 << 20, allocate_bytes=8192)


@contextlib.asynccontextmanager
async def _opened(path: Path, config: UpdateLogConfig = _ROOMY, ops: FaultyFileOps | None = None):  # type: ignore[no-untyped-def]
    log = FileUpdateLog.open(path, config=config, ops=ops)
    try:
        yield log
    finally:
        if ops is not None:
            ops.gate.set()
        await log.close()


def _body(seq: int, size_bytes: int = 100) -> bytes:
    return (b"%d," % seq * size_bytes)[:size_bytes]


async def _fill(log: FileUpdateLog, count: int, *, size_bytes: int = 100, one_by_one: bool = False) -> None:
    last_seq = log.last_seq
    appends = []
    for seq in range(last_seq + 1, last_seq + count + 1):
        append = log.append(epoch=1, header={"step": seq}, body=[_body(seq, size_bytes)])
        appends.append(append.durable)
        if one_by_one:
            await append.durable
    await asyncio.gather(*appends)


async def _make(path: Path, count: int, *, size_bytes: int = 100, config: UpdateLogConfig = _ROOMY) -> None:
    async with _opened(path, config) as log:
        await _fill(log, count, size_bytes=size_bytes, one_by_one=True)


def _segments(path: Path) -> list[Path]:
    return sorted(path.glob("*.hrlog"))


def _unseal(segment: Path, *, with_mark: bool, zeros: int = 0) -> bytes:
    """Leave a segment as a crash does: without its seal. Returns its bytes."""
    data = segment.read_bytes()[:-SEAL_BYTES]
    last_seq = LogReader(segment.parent).last_seq
    if with_mark:
        data += encode_mark(mark=decode_segment_header(data).mark, durable_seq=last_seq)
    data += bytes(zeros)
    segment.write_bytes(data)
    return data


def _offsets(segment: Path) -> list[int]:
    """Return where each record of a segment made by `_make` begins, and where the last one ends."""
    data = segment.read_bytes()
    found = [SEGMENT_HEADER_BYTES]
    while found[-1] + 8 <= len(data) and (size := int.from_bytes(data[found[-1] + 4 : found[-1] + 8], "little")) > 20:
        found.append(found[-1] + RECORD_HEADER_BYTES + size)
    return found


def _check(log: FileUpdateLog | LogReader, count: int, size_bytes: int = 100) -> None:
    records = list(log.read(1))
    assert [record.seq for record in records] == list(range(1, count + 1))
    assert all(bytes(record.body) == _body(record.seq, size_bytes) for record in records)


async def _crash(log: FileUpdateLog, ops: FaultyFileOps) -> None:
    """End a log as `kill -9` does: no further call reaches its files."""
    ops.is_dead = True
    ops.gate.set()
    await log.close()
    ops.is_dead = False


# What a crash leaves.


@pytest.mark.parametrize("leftover", ["nothing", "zeros", "noise"])
async def test_torn_tail_is_cut_wherever_it_is_torn(tmp_path: Path, leftover: str) -> None:
    """Wherever the last record breaks off, whatever follows, it is cut; the log goes on with what was before."""
    path = tmp_path / "log"
    await _make(path, 3, size_bytes=20)
    segment = _segments(path)[0]
    data = _unseal(segment, with_mark=False)
    start, end = _offsets(segment)[2:4]
    noise = random.Random(1).randbytes(3000)
    for torn_at in range(start, end):
        segment.write_bytes(data[:torn_at] + {"nothing": b"", "zeros": bytes(3000), "noise": noise}[leftover])
        async with _opened(path) as log:
            assert log.last_seq == 2
            # Of the record's first byte alone nothing may be left, if it is a zero.
            assert torn_at <= start + 1 or log.cut is not None
            _check(log, 2, 20)
            assert segment.stat().st_size == start + SEAL_BYTES
            if torn_at % 25 == 0:
                await _fill(log, 2, size_bytes=20)
                _check(log, 4, 20)
        for later in _segments(path)[1:]:
            later.unlink()


@pytest.mark.parametrize("with_mark", [False, True])
@pytest.mark.parametrize("zeros", [0, 5000])
async def test_crash_without_a_torn_tail_loses_nothing(tmp_path: Path, with_mark: bool, zeros: int) -> None:
    """Without a seal, but whole, the log is all there, and nothing is reported as cut."""
    path = tmp_path / "log"
    await _make(path, 5)
    _unseal(_segments(path)[0], with_mark=with_mark, zeros=zeros)
    async with _opened(path) as log:
        assert log.cut is None
        _check(log, 5)
        await _fill(log, 1)
    async with _opened(path) as log:
        _check(log, 6)


async def test_torn_group_may_have_lost_any_of_its_records(tmp_path: Path) -> None:
    """If the first records of an unsynced group are lost and later ones are not, all go: none of them was acked."""
    path = tmp_path / "log"
    await _make(path, 2)
    segment = _segments(path)[0]
    data = _unseal(segment, with_mark=False)
    mark = decode_segment_header(data).mark
    group = [
        encode_record(mark=mark, seq=seq, durable_seq=2, epoch=1, header=b"\x80", body=[_body(seq)]) + _body(seq)
        for seq in (3, 4, 5, 6)
    ]
    for lost in itertools.product([False, True], repeat=4):
        tail = b"".join(bytes(len(part)) if is_lost else part for part, is_lost in zip(group, lost, strict=True))
        segment.write_bytes(data + tail)
        survivors = lost.index(True) if True in lost else 4
        async with _opened(path) as log:
            _check(log, 2 + survivors)


async def test_stale_record_is_never_live(tmp_path: Path) -> None:
    """The right next record, but of another segment, as a recycled block may hold it, is not read."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    await _make(ours, 2)
    await _make(theirs, 3)
    segment, other = _segments(ours)[0], _segments(theirs)[0]
    data = _unseal(segment, with_mark=False)
    start, end = _offsets(other)[2:4]
    segment.write_bytes(data + other.read_bytes()[start:end] + bytes(100))
    async with _opened(ours) as log:
        assert log.last_seq == 2
        assert "another segment" in str(log.cut)


@pytest.mark.parametrize("tear", [None, *range(12)])
async def test_power_cuts_lose_nothing_that_was_acked(tmp_path: Path, tear: int | None) -> None:
    """After any number of power cuts, with any sectors of the unsynced kept, all that was acked is there, in order."""
    path = tmp_path / "log"
    rng = random.Random(tear)
    acked, bodies = 0, [b""]
    first = 1
    for _ in range(12):
        ops = FaultyFileOps()
        log = FileUpdateLog.open(path, config=_SMALL, ops=ops)
        assert acked <= log.last_seq < len(bodies)
        assert first <= log.first_seq
        del bodies[log.last_seq + 1 :]
        for record in log.read(log.first_seq):
            assert bytes(record.body) == bodies[record.seq]
        for _ in range(rng.randint(0, 4)):
            new = [rng.randbytes(rng.choice((10, 200, 600, 5000))) for _ in range(rng.randint(1, 9))]
            appends = [log.append(epoch=1, header={}, body=[body]).durable for body in new]
            bodies += new
            await asyncio.gather(*appends)
            acked = log.last_seq
            if rng.random() < 0.3:
                first = log.first_seq
                log.trim(rng.randint(1, acked + 1))
        for _ in range(rng.randint(0, 5)):
            bodies.append(rng.randbytes(rng.choice((10, 200, 5000))))
            if rng.random() < 0.5:
                ops.gate.clear()
            log.append(epoch=1, header={}, body=[bodies[-1]]).durable.add_done_callback(lambda f: f.exception())
        await _crash(log, ops)
        acked = log.last_seq
        ops.power_cut(None if tear is None else rng)


@pytest.mark.parametrize("end", ["power cut", "kill"])
async def test_what_a_failed_sync_left_in_memory_is_not_believed(tmp_path: Path, end: str) -> None:
    """Pages that the kernel could not write stay readable for a while; the next start forgets them before it reads."""
    path, ops = tmp_path / "log", FaultyFileOps()
    log = FileUpdateLog.open(path, config=_ROOMY, ops=ops)
    await _fill(log, 3, one_by_one=True)
    ops.fail("fdatasync", errno.EIO)
    with pytest.raises(StorageError):
        await _fill(log, 1)
    await log.close()
    assert _body(4) in _segments(path)[0].read_bytes(), "in memory it is there"
    if end == "power cut":
        ops.power_cut()
    async with _opened(path, ops=ops) as log:
        _check(log, 3)
        await _fill(log, 1)
    async with _opened(path, ops=ops) as log:
        _check(log, 4)


_CHILD = """
import asyncio, sys
from pathlib import Path
from headrace.paramserver.file_update_log import FileUpdateLog
from headrace.paramserver.update_log import UpdateLogConfig

async def main():
    log = FileUpdateLog.open(Path(sys.argv[1]), config=UpdateLogConfig(segment_bytes=65536, allocate_bytes=16384))
    pending = []
    while True:
        for _ in range(7):
            seq = log.last_seq + len(pending) + 1
            pending.append(log.append(epoch=1, header={}, body=[b"%d," % seq * (seq % 500)]))
        for append in pending:
            await append.durable
            print(append.seq, flush=True)
        pending.clear()

asyncio.run(main())
"""


def test_kill_9_loses_nothing_that_was_acked(tmp_path: Path) -> None:
    """A process that is killed while it appends leaves every record that it reported, and at most more of them."""
    path = tmp_path / "log"
    acked = 0
    for num_lines in (1, 150, 40, 700):
        with subprocess.Popen([sys.executable, "-c", _CHILD, str(path)], stdout=subprocess.PIPE) as child:
            try:
                assert child.stdout is not None
                for _ in range(num_lines):
                    acked = int(child.stdout.readline())
            finally:
                child.send_signal(signal.SIGKILL)
            # What was written to the pipe before the end was reported too.
            acked = max([acked, *(int(line) for line in child.stdout.read().split(b"\n")[:-1])])
        assert child.returncode == -signal.SIGKILL
        reader = LogReader(path)
        assert reader.last_seq >= acked > 0
        for seq, record in enumerate(reader.read(1), 1):
            assert record.seq == seq
            assert bytes(record.body) == b"%d," % seq * (seq % 500)


# Damage.


@pytest.mark.parametrize("with_mark", [True, False])
async def test_damage_in_an_unsealed_segment_stops_the_log(tmp_path: Path, with_mark: bool) -> None:
    """A flipped byte in any record that a later one proves synced is an error with file and offset, and no repair."""
    path = tmp_path / "log"
    await _make(path, 4)
    segment = _segments(path)[0]
    data = _unseal(segment, with_mark=with_mark, zeros=500)
    offsets = _offsets(segment)
    rng = random.Random(3)
    for record in range(4 if with_mark else 3):
        for at in rng.sample(range(offsets[record], offsets[record + 1]), 40):
            damaged = bytearray(data)
            damaged[at] ^= 1 << rng.randrange(8)
            segment.write_bytes(damaged)
            with pytest.raises(CorruptionError, match=re.escape(f"{segment}: damaged at offset {offsets[record]}:")):
                FileUpdateLog.open(path)
            assert segment.read_bytes() == damaged
    segment.write_bytes(data)
    async with _opened(path) as log:
        _check(log, 4)


async def test_idle_log_proves_its_last_record(tmp_path: Path) -> None:
    """Once the log is idle not even its last record can be damaged unnoticed: a mark says that it was synced."""
    path, ops = tmp_path / "log", FaultyFileOps()
    log = FileUpdateLog.open(path, config=_ROOMY, ops=ops)
    await _fill(log, 3)
    await asyncio.to_thread(ops.wait_for_calls, ["fdatasync", "pwritev"])
    await _crash(log, ops)
    segment = _segments(path)[0]
    data = bytearray(segment.read_bytes())
    data[_offsets(segment)[2] + 60] ^= 1
    segment.write_bytes(data)
    with pytest.raises(CorruptionError, match="record 3 was synced, as a MARK record at offset"):
        FileUpdateLog.open(path)


async def test_a_failure_behind_the_last_record_is_told(tmp_path: Path) -> None:
    """When only the mark of an idle log cannot be written, whoever waits for a failure hears of it at once."""
    ops = FaultyFileOps()
    async with _opened(tmp_path / "log", ops=ops) as log:
        waiting = asyncio.create_task(log.wait_failed())
        ops.fail("pwritev", errno.EIO, after=2)  # the segment's header and the record are written, the mark is not
        append = log.append(epoch=1, header={}, body=[_body(1)])
        await append.durable
        assert "Input/output error" in str(await asyncio.wait_for(waiting, 10))
        assert await log.wait_failed() is log.failed


async def test_lost_write_in_the_middle_stops_the_log(tmp_path: Path) -> None:
    """A hole of zeros where a synced record was is damage, not the end."""
    path = tmp_path / "log"
    await _make(path, 4)
    segment = _segments(path)[0]
    data = bytearray(_unseal(segment, with_mark=False, zeros=500))
    start, end = _offsets(segment)[1:3]
    data[start:end] = bytes(end - start)
    segment.write_bytes(data)
    with pytest.raises(CorruptionError, match=rf"damaged at offset {start}: record 2 was synced"):
        FileUpdateLog.open(path)


async def test_damage_in_a_sealed_segment_is_found_when_it_is_read(tmp_path: Path) -> None:
    """A reader gets what precedes the damage, then an error with file and offset; a full check finds it at start."""
    path = tmp_path / "log"
    await _make(path, 100, config=_SMALL)
    segment = _segments(path)[1]
    first = int(segment.stem)
    offsets = _offsets(segment)
    data = bytearray(segment.read_bytes())
    data[offsets[5] + 70] ^= 4
    segment.write_bytes(data)
    where = re.escape(f"{segment}: damaged at offset {offsets[5]}: the checksum of record {first + 5} is wrong")
    async with _opened(path, _SMALL) as log:
        records = log.read(1)
        for seq in range(1, first + 5):
            assert next(records).seq == seq
        with pytest.raises(CorruptionError, match=where):
            next(records)
        assert next(log.read(first + 6)).seq == first + 6
    with pytest.raises(CorruptionError, match=where):
        FileUpdateLog.open(path, config=UpdateLogConfig(check_all_on_open=True))


def _swap_name(path: Path) -> None:
    first, second = _segments(path)[1:3]
    second.rename(path / "spare")
    first.rename(second)
    (path / "spare").rename(first)


def _overwrite(at: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        segment = _segments(path)[1]
        data = bytearray(segment.read_bytes())
        data[at] ^= 255
        segment.write_bytes(data)

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: _segments(path)[1].unlink(), "a segment is missing"),
        (_swap_name, "its name says another"),
        (_overwrite(0), "offset 0: not a log segment"),
        (_overwrite(45), "offset 0: the segment header's checksum"),
        (_overwrite(-10), "no seal, and not the last segment"),
        (lambda path: _segments(path)[1].write_bytes(b""), "offset 0: 0 bytes are less than a segment's header"),
    ],
)
async def test_damaged_or_missing_segment_stops_the_log(
    tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    """A segment that is missing between others, or whose header, seal or name is wrong, is refused at start."""
    path = tmp_path / "log"
    await _make(path, 150, config=_SMALL)
    assert len(_segments(path)) > 3
    damage(path)
    before = {file: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(CorruptionError, match=words):
        FileUpdateLog.open(path)
    with pytest.raises(CorruptionError, match=words):
        LogReader(path)
    assert {file: file.read_bytes() for file in path.iterdir()} == before


async def test_segment_of_another_log_stops_the_log(tmp_path: Path) -> None:
    """A segment with the right name and seqs, but of another log, is refused."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for path in (ours, theirs):
        await _make(path, 60, config=_SMALL)
    name = _segments(ours)[1].name
    (ours / name).write_bytes((theirs / name).read_bytes())
    with pytest.raises(CorruptionError, match="another log"):
        FileUpdateLog.open(ours)


# A failing disk.

_FAULTS = [
    ("fdatasync", errno.EIO),
    ("pwritev", errno.ENOSPC),
    ("pwritev", errno.EIO),
    ("allocate", errno.ENOSPC),
    ("open", errno.EMFILE),
    ("fsync", errno.EIO),
    ("rename", errno.EIO),
    ("fsync_dir", errno.EIO),
    ("truncate", errno.EIO),
]


@pytest.mark.parametrize("after", [0, 1, 2, 5])
@pytest.mark.parametrize(("operation", "code"), _FAULTS)
async def test_failing_disk_stops_the_log_for_good(
    tmp_path: Path, operation: str, code: int, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Any refusal by the disk fails what waits, acks nothing more, and leaves all that was acked for the next start."""
    path, ops = tmp_path / "log", FaultyFileOps()
    log = FileUpdateLog.open(path, config=_SMALL, ops=ops)
    await _fill(log, 3)
    ops.fail(operation, code, after=after)
    acked = 3
    while log.failed is None and acked < 1000:
        appends = []
        for seq in range(acked + 1, acked + 11):
            try:
                appends.append(log.append(epoch=1, header={}, body=[_body(seq)]).durable)
            except StorageError:
                break  # it failed while we were at it
        results = await asyncio.gather(*appends, return_exceptions=True)
        good = [result for result in results if result is None]
        assert results[: len(good)] == good, "acks are a prefix"
        assert all(isinstance(result, StorageError) for result in results[len(good) :])
        acked += len(good)
    assert errno.errorcode[code] in str(log.failed)
    calls = len(ops.calls)
    with pytest.raises(StorageError, match=errno.errorcode[code]):
        log.append(epoch=1, header={}, body=[])
    assert log.last_seq == acked
    _check(log, acked)
    await log.close()
    assert len(ops.calls) == calls, "nothing was tried again"
    ops.power_cut()
    async with _opened(path, _SMALL) as log:
        assert log.last_seq >= acked
        _check(log, log.last_seq)
    assert "the update log stops" in caplog.text
    assert "Traceback" not in caplog.text


async def test_short_write_stops_the_log(tmp_path: Path) -> None:
    """A write that the system cut short is a failure, and its half record is cut at the next start."""
    path, ops = tmp_path / "log", FaultyFileOps()
    async with _opened(path, ops=ops) as log:
        await _fill(log, 3)
        ops.write_short(70)
        ops.write_short(70)
        with pytest.raises(StorageError):
            await _fill(log, 1)
        assert "only" in str(log.failed)
    async with _opened(path) as log:
        _check(log, 3)


async def test_failed_seal_on_close_loses_nothing(tmp_path: Path) -> None:
    """When the seal cannot be written the log says so, and the next start seals what is there."""
    path, ops = tmp_path / "log", FaultyFileOps()
    async with _opened(path, ops=ops) as log:
        await _fill(log, 3)
        ops.fail("fsync", errno.EIO)
    assert "EIO" in str(log.failed)
    async with _opened(path) as log:
        _check(log, 3)


async def test_bug_in_the_writer_stops_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody foresaw fails what waits instead of leaving it to wait for ever."""
    async with _opened(tmp_path / "log") as log:
        await _fill(log, 1)
        monkeypatch.setattr(log_segments.SegmentWriter, "write", lambda *_: 1 / 0)
        with pytest.raises(StorageError, match="ZeroDivisionError"):
            await _fill(log, 1)
        assert log.failed is not None


async def test_disk_without_preallocation_is_written_all_the_same(tmp_path: Path) -> None:
    """Where blocks cannot be reserved the files grow as they are written."""
    path, ops = tmp_path / "log", FaultyFileOps()
    ops.fail("allocate", errno.EOPNOTSUPP)
    async with _opened(path, ops=ops) as log:
        await _fill(log, 5)
    assert [call for call in ops.calls if call[0] == "allocate"] == [("allocate", segment_name(1) + ".new")]
    async with _opened(path) as log:
        _check(log, 5)


async def test_disk_that_fails_while_opening(tmp_path: Path) -> None:
    """A refusal while the last segment is repaired is an error, and the next start repairs it."""
    path = tmp_path / "log"
    for operation in ("open", "fdatasync", "truncate", "pwritev", "fsync"):
        await _make(path, 2)
        count = LogReader(path).last_seq
        _unseal(_segments(path)[-1], with_mark=True)
        ops = FaultyFileOps()
        ops.fail(operation, errno.EIO)
        with pytest.raises(StorageError, match="EIO"):
            FileUpdateLog.open(path, ops=ops)
        async with _opened(path) as log:
            assert log.last_seq == count


# The order of things.


async def test_segment_is_durable_before_its_first_record(tmp_path: Path) -> None:
    """A new segment is written aside, synced, named, and its name synced; the old one is sealed before all that."""
    path, ops = tmp_path / "log", FaultyFileOps()
    async with _opened(path, _SMALL, ops) as log:
        await _fill(log, 1, size_bytes=3900)
        ops.gate.clear()
        ops.reached.clear()
        first = log.append(epoch=1, header={}, body=[bytes(3900)])
        assert await asyncio.to_thread(ops.reached.wait, 30)
        del ops.calls[:]
        second = log.append(epoch=1, header={}, body=[bytes(3900)])
        ops.gate.set()
        await asyncio.gather(first.durable, second.durable)
        calls = list(ops.calls)
    one, two = segment_name(2), segment_name(3)
    expected = [
        ("truncate", one),
        ("pwritev", one),
        ("fsync", one),
        ("open", f"{two}.new"),
        ("allocate", f"{two}.new"),
        ("pwritev", f"{two}.new"),
        ("fsync", f"{two}.new"),
        ("rename", two),
        ("fsync_dir", path.name),
        ("pwritev", two),
        ("fdatasync", two),
    ]
    begin = calls.index(expected[0])
    assert calls[begin : begin + len(expected)] == expected


async def test_group_is_synced_once(tmp_path: Path) -> None:
    """What queues up while a sync runs is written and synced together, up to the bound."""
    ops = FaultyFileOps()
    config = UpdateLogConfig(max_group_bytes=2000)
    async with _opened(tmp_path / "log", config, ops) as log:
        await _fill(log, 1)
        ops.gate.clear()
        ops.reached.clear()
        held = log.append(epoch=1, header={}, body=[b"held"])
        assert await asyncio.to_thread(ops.reached.wait, 30)
        appends = [log.append(epoch=1, header={}, body=[bytes(352)]) for _ in range(19)]
        ops.gate.set()
        await asyncio.gather(held.durable, *(append.durable for append in appends))
        # 401 bytes each: four to a group.
        assert (log.metrics.num_records, log.metrics.num_groups) == (21, 1 + 1 + 5)


async def test_large_group_is_written_in_several_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group beyond what one call may write is split, between buffers, and is still one group."""
    monkeypatch.setattr(log_segments, "_MAX_WRITE_BYTES", 1000)
    path, ops = tmp_path / "log", FaultyFileOps()
    async with _opened(path, ops=ops) as log:
        for _ in range(5):
            await _fill(log, 20)
    assert sum(operation == "pwritev" for operation, _ in ops.calls) > 15
    async with _opened(path) as log:
        _check(log, 100)


async def test_trimming_syncs_each_removal(tmp_path: Path) -> None:
    """Segments are removed oldest first and one at a time, so no crash can leave a gap."""
    path, ops = tmp_path / "log", FaultyFileOps()
    async with _opened(path, _SMALL, ops) as log:
        await _fill(log, 100)
        names = [segment.name for segment in _segments(path)]
        del ops.calls[:]
        log.trim(101)
        expected = [call for name in names[:-1] for call in (("unlink", name), ("fsync_dir", path.name))]
        assert ops.calls == expected
        assert [segment.name for segment in _segments(path)] == names[-1:]


async def test_removal_that_fails_does_not_stop_the_log(tmp_path: Path) -> None:
    """A segment that cannot be removed is an error of `trim` alone, which can be called again."""
    path, ops = tmp_path / "log", FaultyFileOps()
    async with _opened(path, _SMALL, ops) as log:
        await _fill(log, 100)
        ops.fail("unlink", errno.EACCES, after=1)
        with pytest.raises(StorageError, match="EACCES"):
            log.trim(101)
        first = log.first_seq
        assert 1 < first < 101
        assert next(log.read(first)).seq == first
        await _fill(log, 5)
        assert log.trim(106) > first


async def test_reserved_space_is_given_back(tmp_path: Path) -> None:
    """An open segment reserves space in steps; a sealed one is as long as its records."""
    path = tmp_path / "log"
    async with _opened(path, UpdateLogConfig(segment_bytes=1 << 20, allocate_bytes=65536)) as log:
        await _fill(log, 10)
        segment = _segments(path)[0]
        assert segment.stat().st_size == 65536
        await _fill(log, 1, size_bytes=100_000)
        assert segment.stat().st_size == 2 * 65536
    assert segment.stat().st_size == log.size_bytes < 110_000


# Opening.


async def test_second_opener_is_refused(tmp_path: Path) -> None:
    """A log that is open, here or in another process, cannot be opened; once it is closed it can."""
    path = tmp_path / "log"
    async with _opened(path) as log:
        await _fill(log, 1)
        with pytest.raises(ConfigError, match="in use"):
            FileUpdateLog.open(path)
        code = (
            "import sys; from pathlib import Path; from headrace.paramserver.file_update_log import FileUpdateLog; "
            "FileUpdateLog.open(Path(sys.argv[1]))"
        )
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 1
        assert "ConfigError" in done.stderr
        await _fill(log, 1)
    async with _opened(path) as log:
        _check(log, 2)


async def test_refused_open_leaves_the_log_closed(tmp_path: Path) -> None:
    """An open that fails gives the lock back."""
    path = tmp_path / "log"
    await _make(path, 1)
    segment = _segments(path)[0]
    data = segment.read_bytes()
    segment.write_bytes(b"x" + data[1:])
    with pytest.raises(CorruptionError):
        FileUpdateLog.open(path)
    segment.write_bytes(data)
    async with _opened(path) as log:
        _check(log, 1)


async def test_log_keeps_its_id(tmp_path: Path) -> None:
    """All segments of a log share an id, over restarts; two logs have two."""
    ids = set()
    for name in ("a", "a", "b"):
        async with _opened(tmp_path / name, _SMALL) as log:
            await _fill(log, 50)
            ids.add(log.log_id)
    assert len(ids) == 2


async def test_unfinished_segment_is_removed(tmp_path: Path) -> None:
    """What a crash left of a segment that was being made is removed at the next start."""
    path = tmp_path / "log"
    await _make(path, 2)
    unfinished = path / (segment_name(3) + ".new")
    unfinished.write_bytes(b"HEAD")
    async with _opened(path) as log:
        assert not unfinished.exists()
        _check(log, 2)


async def test_empty_segment_is_replaced(tmp_path: Path) -> None:
    """A crash between making a segment and its first record leaves an empty one, and no gap and no lost seq."""
    path = tmp_path / "log"
    for _ in range(2):
        ops = FaultyFileOps()
        log = FileUpdateLog.open(path, config=_SMALL, ops=ops)
        before = log.last_seq
        ops.fail("pwritev", errno.EIO, after=1)
        with pytest.raises(StorageError):
            await _fill(log, 1)
        await log.close()
        assert len(_segments(path)) == 1
    for count in (40, 80):
        async with _opened(path, _SMALL) as log:
            assert log.last_seq == count - 40
            await _fill(log, 40)
            _check(log, count)
    assert before == 0


async def test_index_and_walk_find_the_same_records(tmp_path: Path) -> None:
    """A log just written, which knows where records lie, and one just opened, which does not, read the same."""
    path = tmp_path / "log"
    async with _opened(path, UpdateLogConfig()) as log:
        await _fill(log, 300, size_bytes=5000)
        written = {seq: next(log.read(seq)) for seq in (1, 2, 53, 54, 160, 299, 300)}
    async with _opened(path, UpdateLogConfig()) as log:
        for seq, record in written.items():
            again = next(log.read(seq))
            assert (again.seq, again.header, bytes(again.body)) == (seq, record.header, bytes(record.body))


async def test_reader_beside_a_writer(tmp_path: Path) -> None:
    """A tool can read the directory while the log is written to, and sees an unbroken run of whole records."""
    path = tmp_path / "log"

    def read_until(count: int) -> int:
        rounds, last_seq = 0, 0
        while last_seq < count:
            reader = LogReader(path)
            _check(reader, reader.last_seq)
            assert reader.last_seq >= last_seq
            last_seq, rounds = reader.last_seq, rounds + 1
        return rounds

    async with _opened(path, UpdateLogConfig(segment_bytes=16384, allocate_bytes=8192)) as log, asyncio.timeout(60):
        reading = asyncio.create_task(asyncio.to_thread(read_until, 1000))
        for _ in range(200):
            await _fill(log, 5)
        assert await reading >= 1


def test_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    """A path that is a file is refused with its name."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="file"):
        FileUpdateLog.open(tmp_path / "file" / "log")
    assert os.listdir(tmp_path) == ["file"]
