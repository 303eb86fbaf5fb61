"""Damage in an update log's files: it stops the log with file and offset, and nothing is repaired."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import re
from collections.abc import Callable
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

from headrace.paramserver.files.direct_file import BLOCK_BYTES
from headrace.paramserver.log.file_update_log import FileUpdateLog
from headrace.paramserver.log.log_reader import LogReader
from headrace.paramserver.log.update_log import UpdateLogConfig
from headrace.schemas.errors import CorruptionError


@pytest.mark.parametrize("with_mark", [True, False])
async def test_damage_in_an_unsealed_segment_stops_the_log(tmp_path: Path, with_mark: bool) -> None:
    """A flipped byte in any record that a later one proves synced is an error with file and offset, and no repair."""
    path = tmp_path / "log"
    await make_log(path, 4)
    segment = segments_of(path)[0]
    data = unseal(segment, with_mark=with_mark, zeros=500)
    offsets = offsets_of(segment)
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
    async with opened_log(path) as log:
        check_records(log, 4)


async def test_idle_log_proves_its_last_record(tmp_path: Path) -> None:
    """Once the log is idle not even its last record can be damaged unnoticed: a mark says that it was synced."""
    path, ops = tmp_path / "log", FaultyFileOps()
    log = FileUpdateLog.open(path, config=ROOMY, ops=ops)
    await fill(log, 3)
    await asyncio.to_thread(ops.wait_for_calls, ["fdatasync", "pwritev"])
    await crash(log, ops)
    segment = segments_of(path)[0]
    data = bytearray(segment.read_bytes())
    data[offsets_of(segment)[2] + 60] ^= 1
    segment.write_bytes(data)
    with pytest.raises(CorruptionError, match="record 3 was synced, as a MARK record at offset"):
        FileUpdateLog.open(path)


async def test_lost_write_in_the_middle_stops_the_log(tmp_path: Path) -> None:
    """A hole of zeros where a synced record was is damage, not the end."""
    path = tmp_path / "log"
    await make_log(path, 4)
    segment = segments_of(path)[0]
    data = bytearray(unseal(segment, with_mark=False, zeros=500))
    start, end = offsets_of(segment)[1:3]
    data[start:end] = bytes(end - start)
    segment.write_bytes(data)
    with pytest.raises(CorruptionError, match=rf"damaged at offset {start}: record 2 was synced"):
        FileUpdateLog.open(path)


async def test_damage_in_a_sealed_segment_is_found_when_it_is_read(tmp_path: Path) -> None:
    """A reader gets what precedes the damage, then an error with file and offset."""
    path = tmp_path / "log"
    await make_log(path, 100, config=SMALL)
    segment = segments_of(path)[1]
    first = int(segment.stem)
    offsets = offsets_of(segment)
    data = bytearray(segment.read_bytes())
    data[offsets[5] + 70] ^= 4
    segment.write_bytes(data)
    where = re.escape(f"{segment}: damaged at offset {offsets[5]}: the checksum of record {first + 5} is wrong")
    async with opened_log(path, SMALL) as log:
        records = log.read(1)
        for seq in range(1, first + 5):
            assert next(records).seq == seq
        with pytest.raises(CorruptionError, match=where):
            next(records)
        assert next(log.read(first + 6)).seq == first + 6


def _swap_name(path: Path) -> None:
    first, second = segments_of(path)[1:3]
    second.rename(path / "spare")
    first.rename(second)
    (path / "spare").rename(first)


def _overwrite(at: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        segment = segments_of(path)[1]
        data = bytearray(segment.read_bytes())
        data[at] ^= 255
        segment.write_bytes(data)

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: segments_of(path)[1].unlink(), "a segment is missing"),
        (_swap_name, "its name says another"),
        (_overwrite(0), "offset 0: not a log segment"),
        (_overwrite(45), "offset 0: the segment header's checksum"),
        (_overwrite(-10), "no seal, and not the last segment"),
        (lambda path: segments_of(path)[1].write_bytes(b""), "offset 0: 0 bytes are less than a segment's header"),
    ],
)
async def test_damaged_or_missing_segment_stops_the_log(
    tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    """A segment that is missing between others, or whose header, seal or name is wrong, is refused at start."""
    path = tmp_path / "log"
    await make_log(path, 150, config=SMALL)
    assert len(segments_of(path)) > 3
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
        await make_log(path, 60, config=SMALL)
    name = segments_of(ours)[1].name
    (ours / name).write_bytes((theirs / name).read_bytes())
    with pytest.raises(CorruptionError, match="another log"):
        FileUpdateLog.open(ours)


@pytest.mark.parametrize(("size_bytes", "count"), [(2_100_000, 20), (5000, 1000)])
async def test_a_log_is_read_about_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int, count: int
) -> None:
    """Whatever the length of its records, what is read of a log is little more than what is in it."""
    await make_log(tmp_path / "log", count, size_bytes=size_bytes, config=UpdateLogConfig())
    read, num_bytes, is_direct = os.preadv, list[int](), list[bool]()

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        assert offset % BLOCK_BYTES == 0, "or the rest of the file would go through the page cache"
        num_bytes.append(read(fd, buffers, offset))
        is_direct.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return num_bytes[-1]

    async with opened_log(tmp_path / "log", UpdateLogConfig()) as log:
        monkeypatch.setattr(os, "preadv", counted)
        for past_cache in (False, True):
            num_bytes.clear()
            assert len(list(log.read(1, past_cache=past_cache))) == count
            assert sum(num_bytes) < 1.1 * size_bytes * count + 200_000
            assert {*is_direct} == {past_cache}
            is_direct.clear()


@pytest.mark.parametrize("seed", range(10))
async def test_records_of_all_lengths_come_back(tmp_path: Path, seed: int) -> None:
    """Wherever blocks and chunks end, each record is read as it was written."""
    path, rng = tmp_path / "log", random.Random(seed)
    sizes = [
        rng.choice([0, 1, 3000, rng.randint(4000, 4100), 70_000, rng.randint(262_000, 262_300)]) for _ in range(20)
    ]
    async with opened_log(path, UpdateLogConfig()) as log:
        for size_bytes in sizes:
            await fill(log, 1, size_bytes=size_bytes)
    records = list(LogReader(path).read(1))
    assert [bytes(record.body) for record in records] == [body_of(seq, size) for seq, size in enumerate(sizes, 1)]
