"""The update log in files: opening, trimming, and recovery after crashes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import random
import shutil
import signal
import subprocess
import sys
import threading
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
    flip,
    make_log,
    offsets_of,
    opened_log,
    segments_of,
    unseal,
)

from headrace.paramserver.log.files import FileUpdateLog
from headrace.paramserver.log.interface import UpdateLogConfig
from headrace.paramserver.log.segment_reader import LogReader
from headrace.paramserver.log.segments import segment_name
from headrace.schemas.errors import ConfigError, CorruptionError, StorageError
from headrace.schemas.log_records import SEAL_BYTES, decode_segment_header, encode_record


async def test_trimming_syncs_each_removal(path: Path, ops: FaultyFileOps) -> None:
    """Segments are removed oldest first and one at a time, so no crash can leave a gap."""
    async with opened_log(path, SMALL, ops) as log:
        await fill(log, 100)
        names = [segment.name for segment in segments_of(path)]
        del ops.calls[:]
        log.trim(101)
        expected = [call for name in names[:-1] for call in (("unlink", name), ("fsync_dir", path.name))]
        # The writer may write its checkpoint meanwhile.
        assert [call for call in ops.calls if call[0] != "pwritev"] == expected
        assert [segment.name for segment in segments_of(path)] == names[-1:]


async def test_removal_that_fails_does_not_stop_the_log(path: Path, ops: FaultyFileOps) -> None:
    """A segment that cannot be removed is an error of `trim` alone, which can be called again."""
    async with opened_log(path, SMALL, ops) as log:
        await fill(log, 100)
        ops.fail("unlink", errno.EACCES, after=1)
        with pytest.raises(StorageError, match="EACCES"):
            log.trim(101)
        first = log.first_seq
        assert 1 < first < 101 and next(log.read(first)).seq == first
        await fill(log, 5)
        assert log.trim(106) > first


async def test_reserved_space_is_given_back(path: Path) -> None:
    """An open segment reserves space in steps; a sealed one is as long as its records."""
    async with opened_log(path, UpdateLogConfig(segment_bytes=1 << 20, allocate_bytes=65536)) as log:
        await fill(log, 10)
        segment = segments_of(path)[0]
        assert segment.stat().st_size == 65536
        await fill(log, 1, size_bytes=100_000)
        assert segment.stat().st_size == 2 * 65536
    assert segment.stat().st_size == log.size_bytes < 110_000


async def test_second_opener_is_refused(path: Path) -> None:
    """A log that is open cannot be opened again, neither here nor in another process, until it is closed."""
    async with opened_log(path) as log:
        with pytest.raises(ConfigError, match="in use"):
            FileUpdateLog.open(path)
        code = "import pathlib, sys; from headrace.paramserver.log.files import FileUpdateLog as Log; "
        command = [sys.executable, "-c", f"{code}Log.open(pathlib.Path(sys.argv[1]))", str(path)]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and "ConfigError" in done.stderr
        await fill(log, 1)
    async with opened_log(path) as log:
        check_records(log, 1)


async def test_refused_open_leaves_the_log_closed(path: Path) -> None:
    """An open that fails, by damage or by a lack of memory, releases the lock; one below a file is refused."""
    segment = await make_log(path, 1)
    with pytest.raises(StorageError, match=segment.name):
        FileUpdateLog.open(segment / "log")
    flip(segment, 0)
    with pytest.raises(CorruptionError):
        FileUpdateLog.open(path)
    flip(segment, 0)
    with pytest.raises(StorageError, match=rf"taking {1 << 60} bytes of memory for the log's tail failed: .*ENOMEM"):
        FileUpdateLog.open(path, config=UpdateLogConfig(tail_bytes=1 << 60))
    async with opened_log(path) as log:
        check_records(log, 1)


async def test_index_and_walk_find_the_same_records(path: Path) -> None:
    """A log just written, which has an index, and one just opened, which has none, read the same records."""
    for count in (300, 0):
        async with opened_log(path, UpdateLogConfig()) as log:
            await fill(log, count, size_bytes=5000)
            for seq in (1, 2, 53, 54, 160, 299, 300):
                record = next(log.read(seq))
                assert (record.seq, record.header, bytes(record.body)) == (seq, {"step": seq}, body_of(seq, 5000))


async def test_reader_beside_a_writer(path: Path) -> None:
    """A tool that reads beside the writer sees an unbroken sequence of whole records."""
    num_rounds, is_written = 0, threading.Event()

    def read_on() -> None:
        nonlocal num_rounds
        last_seq = 0
        while not is_written.is_set():
            reader = LogReader(path)
            check_records(reader, reader.last_seq)
            assert reader.last_seq >= last_seq
            last_seq, num_rounds = reader.last_seq, num_rounds + 1

    async with opened_log(path, SMALL) as log, asyncio.timeout(60):
        reading = asyncio.create_task(asyncio.to_thread(read_on))
        try:
            while (num_rounds < 20 or log.last_seq < 400) and not reading.done():
                await fill(log, 5)
        finally:
            is_written.set()
            await reading
        assert len(segments_of(path)) > 10


@pytest.mark.parametrize("leftover", ["nothing", "zeros", "noise"])
async def test_torn_tail_is_cut_wherever_it_is_torn(path: Path, leftover: str) -> None:
    """A last record that breaks off anywhere is cut, whatever follows it; the log continues after the one before."""
    segment = await make_log(path, 3, size_bytes=20)
    data = unseal(segment, with_checkpoint=False)
    start, end = offsets_of(segment)[2:4]
    noise = random.Random(1).randbytes(3000)
    for torn_at in range(start, end):
        segment.write_bytes(data[:torn_at] + {"nothing": b"", "zeros": bytes(3000), "noise": noise}[leftover])
        async with opened_log(path) as log:
            assert log.last_seq == 2
            # A first byte alone may be a zero.
            assert torn_at <= start + 1 or log.torn_tail is not None
            check_records(log, 2, 20)
            assert segment.stat().st_size == start + SEAL_BYTES
            if torn_at % 25 == 0:
                await fill(log, 2, size_bytes=20)
                check_records(log, 4, 20)
        for later in segments_of(path)[1:]:
            later.unlink()


async def test_crash_without_a_torn_tail_loses_nothing(path: Path) -> None:
    """A log without a seal, but otherwise whole, keeps all records; an unfinished segment goes."""
    count, unfinished = 0, path / (segment_name(99) + ".new")
    for with_checkpoint, zeros in itertools.product((False, True), (0, 5000)):
        await make_log(path, 5)
        count += 5
        unseal(segments_of(path)[-1], with_checkpoint=with_checkpoint, zeros=zeros)
        unfinished.touch()
        async with opened_log(path) as log:
            assert log.torn_tail is None and not unfinished.exists()
            check_records(log, count)


async def test_torn_group_may_have_lost_any_of_its_records(path: Path) -> None:
    """If a record of an unsynced group is lost, later ones go too; none of them was acked."""
    segment = await make_log(path, 2)
    data = unseal(segment, with_checkpoint=False)
    nonce = decode_segment_header(data).nonce
    group = [
        encode_record(nonce=nonce, seq=seq, durable_seq=2, epoch=1, header=b"\x80", body=[body_of(seq)]) + body_of(seq)
        for seq in (3, 4, 5, 6)
    ]
    for lost in itertools.product([False, True], repeat=4):
        tail = b"".join(bytes(len(part)) if is_lost else part for part, is_lost in zip(group, lost, strict=True))
        segment.write_bytes(data + tail)
        survivors = lost.index(True) if True in lost else 4
        async with opened_log(path) as log:
            check_records(log, 2 + survivors)


async def test_stale_record_is_never_live(tmp_path: Path) -> None:
    """A record of another segment, as a recycled block may hold it, is not read, even with the right seq."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    await make_log(ours, 2)
    await make_log(theirs, 3)
    segment, other = segments_of(ours)[0], segments_of(theirs)[0]
    data = unseal(segment, with_checkpoint=False)
    start, end = offsets_of(other)[2:4]
    segment.write_bytes(data + other.read_bytes()[start:end] + bytes(100))
    async with opened_log(ours) as log:
        assert log.last_seq == 2
        assert "another segment" in str(log.torn_tail)


@pytest.mark.parametrize("tear", [None, *range(12)])
async def test_power_cuts_lose_nothing_that_was_acked(path: Path, tear: int | None) -> None:
    """After any number of power cuts, whichever unsynced sectors survive, all acked records are there, in order."""
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
    """A crash during any call loses nothing acked, also with records at the edges of blocks."""
    config = UpdateLogConfig(segment_bytes=12_289, allocate_bytes=allocate_bytes, tail_bytes=8192)
    # A record has 49 bytes more. Bodies reach a block's edge, end next to it, have their checkpoint over it, or exceed
    # the tail.
    sizes = (4096 - 64 - 49, 10, 4096 - 59 - 49 + 1, 4096 - 1 - 49 - 20, 20, 20_000, 0, 300)
    bodies = [random.Random(size).randbytes(size) for size in sizes]

    async def go_on(path: Path, ops: FaultyFileOps, acked: int) -> int:
        """Open and check the log, append what is missing, and return the last acked seq."""
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
        ops.is_dead, ops.calls_left = False, rng.randint(0, 9)  # a second crash, at the start or soon after
        ops.power_cut(rng)
        acked = await go_on(path, ops, acked)
        ops.is_dead, ops.calls_left = False, None
        ops.power_cut(rng)
        assert await go_on(path, ops, acked) == len(bodies)
        assert [bytes(record.body) for record in LogReader(path).read(1)] == bodies
        if is_done:
            break
    assert num_calls > 50


async def test_a_power_cut_after_the_start_that_follows_a_kill_loses_nothing(tmp_path: Path) -> None:
    """A start makes durable what the killed process had only written: also its seal, behind which it goes on."""
    for num_calls in itertools.count():
        path, ops = tmp_path / str(num_calls), FaultyFileOps()
        log = FileUpdateLog.open(path, config=SMALL, ops=ops)
        await fill(log, 3, one_by_one=True)
        ops.calls_left = num_calls
        with contextlib.suppress(StorageError):
            await log.close()
        is_done = not ops.is_dead
        ops.is_dead, ops.calls_left = False, None
        log = FileUpdateLog.open(path, config=SMALL, ops=ops)
        await fill(log, 1)
        await crash(log, ops)
        ops.power_cut()
        async with opened_log(path, SMALL) as log:
            assert [bytes(record.body) for record in log.read(1)] == [body_of(seq) for seq in range(1, 5)]
        if is_done:
            break
    assert num_calls > 2


@pytest.mark.parametrize("end", ["power cut", "kill"])
async def test_what_a_failed_sync_left_in_memory_is_not_believed(path: Path, ops: FaultyFileOps, end: str) -> None:
    """Pages that the kernel could not write stay readable for a while; the next start drops them before it reads."""
    log = FileUpdateLog.open(path, config=ROOMY, ops=ops)
    await fill(log, 3, one_by_one=True)
    ops.fail("fdatasync", errno.EIO)
    with pytest.raises(StorageError):
        await fill(log, 1)
    await log.close()
    assert body_of(4) in segments_of(path)[0].read_bytes(), "the page cache has it"
    if end == "power cut":
        ops.power_cut()
    async with opened_log(path, ops=ops) as log:
        check_records(log, 3)
        await fill(log, 1)
    async with opened_log(path, ops=ops) as log:
        check_records(log, 4)


_CHILD = """
import asyncio, pathlib, sys
from headrace.paramserver.log.files import FileUpdateLog, UpdateLogConfig

async def main():
    config = UpdateLogConfig(segment_bytes=65536, allocate_bytes=16384)
    log = FileUpdateLog.open(pathlib.Path(sys.argv[1]), config=config)
    while True:
        seqs = range(log.last_seq + 1, log.last_seq + 8)
        for append in [log.append(epoch=1, header={}, body=[b"%d," % seq * (seq % 500)]) for seq in seqs]:
            await append.durable
            print(append.seq, flush=True)

asyncio.run(main())
"""


def test_kill_9_loses_nothing_that_was_acked(path: Path) -> None:
    """A process that is killed while it appends leaves every record that it reported, perhaps more."""
    acked = 0
    for num_lines in (1, 150, 500):
        with subprocess.Popen([sys.executable, "-c", _CHILD, str(path)], stdout=subprocess.PIPE) as child:
            try:
                assert child.stdout is not None
                for _ in range(num_lines):
                    acked = int(child.stdout.readline())
            finally:
                child.send_signal(signal.SIGKILL)
            # Lines that were left in the pipe were reported too.
            acked = max([acked, *(int(line) for line in child.stdout.read().split(b"\n")[:-1])])
        assert child.returncode == -signal.SIGKILL
        reader = LogReader(path)
        assert reader.last_seq >= acked > 0
        for seq, record in enumerate(reader.read(1), 1):
            assert record.seq == seq
            assert bytes(record.body) == b"%d," % seq * (seq % 500)


async def test_disk_that_fails_while_opening(path: Path) -> None:
    """A refusal during the repair of the last segment is an error, and the next start repairs it."""
    for operation in ("open", "fdatasync", "truncate", "pwritev", "fsync", "short write"):
        await make_log(path, 2)
        count = LogReader(path).last_seq
        unseal(segments_of(path)[-1], with_checkpoint=True)
        ops = FaultyFileOps()
        if operation == "short write":
            ops.write_short(10)
        else:
            ops.fail(operation, errno.EIO)
        with pytest.raises(StorageError, match=f"EIO|sealing failed: only 10 of {SEAL_BYTES} bytes"):
            FileUpdateLog.open(path, ops=ops)
        async with opened_log(path) as log:
            assert log.last_seq == count


async def test_empty_segment_is_replaced(path: Path) -> None:
    """An empty segment, left by a crash before its first record, leaves no gap and loses no seq."""
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


async def test_a_copy_of_a_running_log_shares_nonces_as_far_as_records(tmp_path: Path) -> None:
    """A copy of the directory keeps the log's id, and continues with other nonces than the original."""
    async with opened_log(tmp_path / "log", SMALL) as log:
        await fill(log, 3)
        shutil.copytree(tmp_path / "log", tmp_path / "copy")
        async with opened_log(tmp_path / "copy", SMALL) as copy:
            for each in (log, copy):
                await fill(each, 2)
            assert log.log_id == copy.log_id
            nonces = [[each.nonce_of(seq) for seq in range(1, 6)] for each in (log, copy)]
    assert nonces[0][:3] == nonces[1][:3] and set(nonces[0][3:]).isdisjoint(nonces[1][3:])
