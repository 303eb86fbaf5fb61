"""The update log in files: opening, reading, trimming; crashes, damage and failing disks have files of their own."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from faulty_file_ops import FaultyFileOps
from log_files import SMALL, check_records, fill, make_log, opened_log, segments_of

from headrace.paramserver.log.file_update_log import FileUpdateLog
from headrace.paramserver.log.log_reader import LogReader
from headrace.paramserver.log.update_log import UpdateLogConfig
from headrace.schemas.errors import ConfigError, CorruptionError, StorageError


async def test_trimming_syncs_each_removal(tmp_path: Path) -> None:
    """Segments are removed oldest first and one at a time, so no crash can leave a gap."""
    path, ops = tmp_path / "log", FaultyFileOps()
    async with opened_log(path, SMALL, ops) as log:
        await fill(log, 100)
        names = [segment.name for segment in segments_of(path)]
        del ops.calls[:]
        log.trim(101)
        expected = [call for name in names[:-1] for call in (("unlink", name), ("fsync_dir", path.name))]
        # The writer may put its mark behind the last record meanwhile.
        assert [call for call in ops.calls if call[0] != "pwritev"] == expected
        assert [segment.name for segment in segments_of(path)] == names[-1:]


async def test_removal_that_fails_does_not_stop_the_log(tmp_path: Path) -> None:
    """A segment that cannot be removed is an error of `trim` alone, which can be called again."""
    path, ops = tmp_path / "log", FaultyFileOps()
    async with opened_log(path, SMALL, ops) as log:
        await fill(log, 100)
        ops.fail("unlink", errno.EACCES, after=1)
        with pytest.raises(StorageError, match="EACCES"):
            log.trim(101)
        first = log.first_seq
        assert 1 < first < 101
        assert next(log.read(first)).seq == first
        await fill(log, 5)
        assert log.trim(106) > first


async def test_reserved_space_is_given_back(tmp_path: Path) -> None:
    """An open segment reserves space in steps; a sealed one is as long as its records."""
    path = tmp_path / "log"
    async with opened_log(path, UpdateLogConfig(segment_bytes=1 << 20, allocate_bytes=65536)) as log:
        await fill(log, 10)
        segment = segments_of(path)[0]
        assert segment.stat().st_size == 65536
        await fill(log, 1, size_bytes=100_000)
        assert segment.stat().st_size == 2 * 65536
    assert segment.stat().st_size == log.size_bytes < 110_000


async def test_a_log_that_cannot_have_its_memory_is_not_left_locked(tmp_path: Path) -> None:
    """Where there is no memory for the tail the log says so, and can be opened with less."""
    with pytest.raises(StorageError, match=rf"taking {1 << 60} bytes of memory for the log's tail failed: .*ENOMEM"):
        FileUpdateLog.open(tmp_path / "log", config=UpdateLogConfig(tail_bytes=1 << 60))
    async with opened_log(tmp_path / "log") as log:
        await fill(log, 1)


async def test_second_opener_is_refused(tmp_path: Path) -> None:
    """A log that is open, here or in another process, cannot be opened; once it is closed it can."""
    path = tmp_path / "log"
    async with opened_log(path) as log:
        await fill(log, 1)
        with pytest.raises(ConfigError, match="in use"):
            FileUpdateLog.open(path)
        code = (
            "import sys; from pathlib import Path; from headrace.paramserver.log.file_update_log import FileUpdateLog; "
            "FileUpdateLog.open(Path(sys.argv[1]))"
        )
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 1
        assert "ConfigError" in done.stderr
        await fill(log, 1)
    async with opened_log(path) as log:
        check_records(log, 2)


async def test_refused_open_leaves_the_log_closed(tmp_path: Path) -> None:
    """An open that fails gives the lock back."""
    path = tmp_path / "log"
    await make_log(path, 1)
    segment = segments_of(path)[0]
    data = segment.read_bytes()
    segment.write_bytes(b"x" + data[1:])
    with pytest.raises(CorruptionError):
        FileUpdateLog.open(path)
    segment.write_bytes(data)
    async with opened_log(path) as log:
        check_records(log, 1)


async def test_log_keeps_its_id(tmp_path: Path) -> None:
    """All segments of a log share an id, over restarts; two logs have two."""
    ids = set()
    for name in ("a", "a", "b"):
        async with opened_log(tmp_path / name, SMALL) as log:
            await fill(log, 50)
            ids.add(log.log_id)
    assert len(ids) == 2


async def test_index_and_walk_find_the_same_records(tmp_path: Path) -> None:
    """A log just written, which knows where records lie, and one just opened, which does not, read the same."""
    path = tmp_path / "log"
    async with opened_log(path, UpdateLogConfig()) as log:
        await fill(log, 300, size_bytes=5000)
        written = {seq: next(log.read(seq)) for seq in (1, 2, 53, 54, 160, 299, 300)}
    async with opened_log(path, UpdateLogConfig()) as log:
        for seq, record in written.items():
            again = next(log.read(seq))
            assert (again.seq, again.header, bytes(again.body)) == (seq, record.header, bytes(record.body))


async def test_reader_beside_a_writer(tmp_path: Path) -> None:
    """A tool can read the directory while the log is written to, and sees an unbroken run of whole records."""
    path = tmp_path / "log"

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


def test_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    """A path that is a file is refused with its name."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="file"):
        FileUpdateLog.open(tmp_path / "file" / "log")
    assert os.listdir(tmp_path) == ["file"]
