"""What crashes leave of an update log in files, and what the next start makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faulty_file_ops import FaultyFileOps
from log_files import (
    ROOMY,
    SMALL,
    body_of,
    check_records,
    crash,
    fill,
    make_log,
    offsets_of,
    opened_log,
    segments_of,
    unseal,
)

from headrace.paramserver.log.file_update_log import FileUpdateLog
from headrace.paramserver.log.log_reader import LogReader
from headrace.paramserver.log.log_segments import segment_name
from headrace.paramserver.log.update_log import UpdateLogConfig
from headrace.schemas.errors import StorageError
from headrace.schemas.log_records import SEAL_BYTES, decode_segment_header, encode_record


@pytest.mark.parametrize("leftover", ["nothing", "zeros", "noise"])
async def test_torn_tail_is_cut_wherever_it_is_torn(tmp_path: Path, leftover: str) -> None:
    """Wherever the last record breaks off, whatever follows, it is cut; the log goes on with what was before."""
    path = tmp_path / "log"
    await make_log(path, 3, size_bytes=20)
    segment = segments_of(path)[0]
    data = unseal(segment, with_mark=False)
    start, end = offsets_of(segment)[2:4]
    noise = random.Random(1).randbytes(3000)
    for torn_at in range(start, end):
        segment.write_bytes(data[:torn_at] + {"nothing": b"", "zeros": bytes(3000), "noise": noise}[leftover])
        async with opened_log(path) as log:
            assert log.last_seq == 2
            # Of the record's first byte alone nothing may be left, if it is a zero.
            assert torn_at <= start + 1 or log.cut is not None
            check_records(log, 2, 20)
            assert segment.stat().st_size == start + SEAL_BYTES
            if torn_at % 25 == 0:
                await fill(log, 2, size_bytes=20)
                check_records(log, 4, 20)
        for later in segments_of(path)[1:]:
            later.unlink()


@pytest.mark.parametrize("with_mark", [False, True])
@pytest.mark.parametrize("zeros", [0, 5000])
async def test_crash_without_a_torn_tail_loses_nothing(tmp_path: Path, with_mark: bool, zeros: int) -> None:
    """Without a seal, but whole, the log is all there, and nothing is reported as cut."""
    path = tmp_path / "log"
    await make_log(path, 5)
    unseal(segments_of(path)[0], with_mark=with_mark, zeros=zeros)
    async with opened_log(path) as log:
        assert log.cut is None
        check_records(log, 5)
        await fill(log, 1)
    async with opened_log(path) as log:
        check_records(log, 6)


async def test_torn_group_may_have_lost_any_of_its_records(tmp_path: Path) -> None:
    """If the first records of an unsynced group are lost and later ones are not, all go: none of them was acked."""
    path = tmp_path / "log"
    await make_log(path, 2)
    segment = segments_of(path)[0]
    data = unseal(segment, with_mark=False)
    mark = decode_segment_header(data).mark
    group = [
        encode_record(mark=mark, seq=seq, durable_seq=2, epoch=1, header=b"\x80", body=[body_of(seq)]) + body_of(seq)
        for seq in (3, 4, 5, 6)
    ]
    for lost in itertools.product([False, True], repeat=4):
        tail = b"".join(bytes(len(part)) if is_lost else part for part, is_lost in zip(group, lost, strict=True))
        segment.write_bytes(data + tail)
        survivors = lost.index(True) if True in lost else 4
        async with opened_log(path) as log:
            check_records(log, 2 + survivors)


async def test_stale_record_is_never_live(tmp_path: Path) -> None:
    """The right next record, but of another segment, as a recycled block may hold it, is not read."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    await make_log(ours, 2)
    await make_log(theirs, 3)
    segment, other = segments_of(ours)[0], segments_of(theirs)[0]
    data = unseal(segment, with_mark=False)
    start, end = offsets_of(other)[2:4]
    segment.write_bytes(data + other.read_bytes()[start:end] + bytes(100))
    async with opened_log(ours) as log:
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
        log = FileUpdateLog.open(path, config=SMALL, ops=ops)
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
        await crash(log, ops)
        acked = log.last_seq
        ops.power_cut(None if tear is None else rng)


@pytest.mark.parametrize("allocate_bytes", [0, 4096, 5000])
async def test_a_power_cut_between_any_two_calls_loses_nothing_that_was_acked(
    tmp_path: Path, allocate_bytes: int
) -> None:
    """Amid a header, a record, a mark, a seal or a start: what was acked is there; so with records at blocks' edges."""
    config = UpdateLogConfig(segment_bytes=12_289, allocate_bytes=allocate_bytes, tail_bytes=8192)
    # With 49 bytes around each body: up to a block's edge, next to it, with its mark over one, larger than the tail.
    sizes = (4096 - 64 - 49, 10, 4096 - 59 - 49 + 1, 4096 - 1 - 49 - 20, 20, 20_000, 0, 300)
    bodies = [random.Random(size).randbytes(size) for size in sizes]

    async def go_on(path: Path, ops: FaultyFileOps, acked: int) -> int:
        """Open the log, check it, and append what is missing; return the last seq that was acked."""
        with contextlib.suppress(StorageError):
            log = FileUpdateLog.open(path, config=config, ops=ops)
            assert log.last_seq >= acked
            assert [bytes(record.body) for record in log.read(1)] == bodies[: log.last_seq]
            for body in bodies[log.last_seq :]:
                with contextlib.suppress(StorageError):
                    await log.append(epoch=1, header={}, body=[body]).durable
            await log.close()
            return log.last_seq
        return acked

    for num_calls in itertools.count():
        path, rng = tmp_path / str(num_calls), random.Random(num_calls)
        ops = FaultyFileOps(calls_left=num_calls)
        acked = await go_on(path, ops, 0)
        is_done = not ops.is_dead
        ops.is_dead, ops.calls_left = False, rng.randint(0, 9)  # and once more: at the start, or soon after
        ops.power_cut(rng)
        acked = await go_on(path, ops, acked)
        ops.is_dead, ops.calls_left = False, None
        ops.power_cut(rng)
        assert await go_on(path, ops, acked) == len(bodies)
        assert [bytes(record.body) for record in LogReader(path).read(1)] == bodies
        if is_done:
            break
    assert num_calls > 50


@pytest.mark.parametrize("end", ["power cut", "kill"])
async def test_what_a_failed_sync_left_in_memory_is_not_believed(tmp_path: Path, end: str) -> None:
    """Pages that the kernel could not write stay readable for a while; the next start forgets them before it reads."""
    path, ops = tmp_path / "log", FaultyFileOps()
    log = FileUpdateLog.open(path, config=ROOMY, ops=ops)
    await fill(log, 3, one_by_one=True)
    ops.fail("fdatasync", errno.EIO)
    with pytest.raises(StorageError):
        await fill(log, 1)
    await log.close()
    assert body_of(4) in segments_of(path)[0].read_bytes(), "in memory it is there"
    if end == "power cut":
        ops.power_cut()
    async with opened_log(path, ops=ops) as log:
        check_records(log, 3)
        await fill(log, 1)
    async with opened_log(path, ops=ops) as log:
        check_records(log, 4)


_CHILD = """
import asyncio, sys
from pathlib import Path
from headrace.paramserver.log.file_update_log import FileUpdateLog
from headrace.paramserver.log.update_log import UpdateLogConfig

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


async def test_disk_that_fails_while_opening(tmp_path: Path) -> None:
    """A refusal while the last segment is repaired is an error, and the next start repairs it."""
    path = tmp_path / "log"
    for operation in ("open", "fdatasync", "truncate", "pwritev", "fsync", "short write"):
        await make_log(path, 2)
        count = LogReader(path).last_seq
        unseal(segments_of(path)[-1], with_mark=True)
        ops = FaultyFileOps()
        if operation == "short write":
            ops.write_short(10)
        else:
            ops.fail(operation, errno.EIO)
        with pytest.raises(StorageError, match=f"EIO|sealing failed: only 10 of {SEAL_BYTES} bytes"):
            FileUpdateLog.open(path, ops=ops)
        async with opened_log(path) as log:
            assert log.last_seq == count


async def test_unfinished_segment_is_removed(tmp_path: Path) -> None:
    """What a crash left of a segment that was being made is removed at the next start."""
    path = tmp_path / "log"
    await make_log(path, 2)
    unfinished = path / (segment_name(3) + ".new")
    unfinished.write_bytes(b"HEAD")
    ops = FaultyFileOps()
    ops.fail("unlink", errno.EROFS)
    with pytest.raises(StorageError, match=r"removing an unfinished segment failed: .*EROFS"):
        FileUpdateLog.open(path, ops=ops)
    async with opened_log(path) as log:
        assert not unfinished.exists()
        check_records(log, 2)


async def test_empty_segment_is_replaced(tmp_path: Path) -> None:
    """A crash between making a segment and its first record leaves an empty one, and no gap and no lost seq."""
    path = tmp_path / "log"
    for _ in range(2):
        ops = FaultyFileOps()
        log = FileUpdateLog.open(path, config=SMALL, ops=ops)
        before = log.last_seq
        ops.fail("pwritev", errno.EIO, after=1)
        with pytest.raises(StorageError):
            await fill(log, 1)
        await log.close()
        assert len(segments_of(path)) == 1
    for count in (40, 80):
        async with opened_log(path, SMALL) as log:
            assert log.last_seq == count - 40
            await fill(log, 40)
            check_records(log, count)
    assert before == 0
