"""Reading a log: damage is an error with file and offset, and nothing is repaired."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import re
import shutil
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
from headrace.paramserver.system.direct_file import BLOCK_BYTES
from headrace.schemas.errors import CorruptionError, GoneError, StorageError
from headrace.schemas.log_records import SEAL_BYTES, Seal, decode_segment_header, encode_record, encode_seal


def _is_refused(path: Path, words: str) -> None:
    """Check that neither the log nor a reader of it opens, and that both leave the files alone."""
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    for opens in (FileUpdateLog.open, LogReader):
        with pytest.raises(CorruptionError, match=words):
            opens(path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


@pytest.mark.parametrize("with_checkpoint", [True, False])
async def test_damage_in_an_unsealed_segment_stops_the_log(path: Path, with_checkpoint: bool) -> None:
    """A flipped byte in a record that a later one proves synced is an error with file and offset, and no repair."""
    segment = await make_log(path, 4)
    data = unseal(segment, with_checkpoint=with_checkpoint, zeros=500)
    offsets = offsets_of(segment)
    rng = random.Random(3)
    for record in range(4 if with_checkpoint else 3):
        for at in rng.sample(range(offsets[record], offsets[record + 1]), 40):
            segment.write_bytes(data)
            flip(segment, at, bits=1 << rng.randrange(8))
            _is_refused(path, re.escape(f"{segment}: damaged at offset {offsets[record]}:"))
    start, end = offsets[1:3]
    segment.write_bytes(data[:start] + bytes(end - start) + data[end:])  # a lost write
    _is_refused(path, rf"damaged at offset {start}: record 2 was synced")
    segment.write_bytes(data)
    async with opened_log(path) as log:
        check_records(log, 4)


async def test_damage_in_a_sealed_segment_is_found_when_it_is_read(path: Path) -> None:
    """A reader gets the records before the damage, then an error with file and offset."""
    await make_log(path, 100, config=SMALL)
    segment = segments_of(path)[1]
    first, offsets = int(segment.stem), offsets_of(segment)
    flip(segment, offsets[5] + 70, bits=4)
    where = re.escape(f"{segment}: damaged at offset {offsets[5]}: the checksum of record {first + 5} is wrong")
    async with opened_log(path, SMALL) as log:
        records = log.read(1)
        assert [next(records).seq for _ in range(1, first + 5)] == list(range(1, first + 5))
        with pytest.raises(CorruptionError, match=where):
            next(records)
        assert next(log.read(first + 6)).seq == first + 6


def _swap_names(path: Path) -> None:
    first, second = segments_of(path)[1:3]
    second.rename(path / "spare")
    first.rename(second)
    (path / "spare").rename(first)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: segments_of(path)[1].unlink(), "a segment is missing"),
        (_swap_names, "its name says another"),
        (lambda path: flip(segments_of(path)[1], 0, bits=255), "offset 0: not a log segment"),
        (lambda path: flip(segments_of(path)[1], 45, bits=255), "offset 0: the segment header's checksum"),
        (lambda path: flip(segments_of(path)[1], -10, bits=255), "no seal, and not the last segment"),
        (lambda path: segments_of(path)[1].write_bytes(b""), "offset 0: 0 bytes are less than a segment's header"),
        (lambda path: shutil.copy(segments_of(path.parent / "other")[1], path), "another log"),
    ],
    ids=["missing", "names", "magic", "header", "seal", "empty", "another log's"],
)
async def test_damaged_or_missing_segment_stops_the_log(path: Path, damage: Callable[[Path], None], words: str) -> None:
    """A missing segment, and one with a wrong header, seal or name, or of another log, is refused at start."""
    for each in (path, path.parent / "other"):
        await make_log(each, 80, config=SMALL)
    assert len(segments_of(path)) > 3
    damage(path)
    _is_refused(path, words)


@pytest.mark.parametrize(("size_bytes", "count"), [(2_100_000, 20), (5000, 1000)])
async def test_a_log_is_read_about_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int, count: int
) -> None:
    """Reading a log reads little more than its size, whatever the length of its records."""
    async with opened_log(path, UpdateLogConfig()) as log:
        await fill(log, count, size_bytes=size_bytes)
    read, num_bytes, is_direct = os.preadv, list[int](), list[bool]()

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        assert offset % BLOCK_BYTES == 0, "or the rest of the file would go through the page cache"
        num_bytes.append(read(fd, buffers, offset))
        is_direct.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return num_bytes[-1]

    async with opened_log(path, UpdateLogConfig()) as log:
        monkeypatch.setattr(os, "preadv", counted)
        for past_cache in (False, True):
            num_bytes.clear()
            assert len(list(log.read(1, past_cache=past_cache))) == count
            assert sum(num_bytes) < 1.1 * size_bytes * count + 200_000
            assert {*is_direct} == {past_cache}
            is_direct.clear()


@pytest.mark.parametrize("seed", range(10))
async def test_records_of_all_lengths_come_back(path: Path, seed: int) -> None:
    """Each record is read as it was written, wherever blocks and chunks end."""
    rng = random.Random(seed)
    lengths = [0, 1, 3000, rng.randint(4000, 4100), 70_000, rng.randint(262_000, 262_300)]
    sizes = rng.choices(lengths, k=20)
    async with opened_log(path, UpdateLogConfig()) as log:
        for size_bytes in sizes:
            await fill(log, 1, size_bytes=size_bytes)
    records = list(LogReader(path).read(1))
    assert [bytes(record.body) for record in records] == [body_of(seq, size) for seq, size in enumerate(sizes, 1)]


_Change = Callable[[bytearray, list[int], int], None]


async def _changed(path: Path, change: _Change) -> list[int]:
    """Make a log of one segment with six records, change its bytes, and return the offsets of the records."""
    segment = await make_log(path, 6)
    data, offsets = bytearray(segment.read_bytes()), offsets_of(segment)
    change(data, offsets, decode_segment_header(bytes(data)).nonce)
    segment.write_bytes(data)
    return offsets


@pytest.mark.parametrize("seal", [Seal(6, 5, 1), Seal(7, 6, 1), Seal(5, 6, 1)])
async def test_a_seal_that_miscounts_is_refused(path: Path, seal: Seal) -> None:
    """A seal whose last seq and number of records contradict each other is refused, in spite of its checksum."""
    await _changed(path, lambda data, _, nonce: _put(data, len(data) - SEAL_BYTES, encode_seal(nonce=nonce, seal=seal)))
    _is_refused(path, f"the seal says {seal.num_records} records up to seq {seal.last_seq}")


def _put(data: bytearray, at: int, new: bytes | bytearray) -> None:
    data[at : at + len(new)] = new


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda data, at, _: _put(data, at[3], data[at[2] : at[3]]), "a DATA record of seq 3"),
        (lambda data, at, _: _put(data, at[3], bytes(at[4] - at[3])), "nothing"),
        (
            lambda data, at, nonce: _put(data, at[3], encode_seal(nonce=nonce, seal=Seal(4, 4, 1))),
            "a SEAL record of seq 4",
        ),
    ],
)
@pytest.mark.parametrize("from_seq", [1, 4, 6])
async def test_no_record_is_taken_for_another(path: Path, change: _Change, found: str, from_seq: int) -> None:
    """An intact record in place of another is damage, also where a reader only walks over it."""
    offsets = await _changed(path, change)
    async with opened_log(path, ROOMY) as log:
        records = log.read(from_seq)
        assert [next(records).seq for _ in range(from_seq, 4)] == list(range(from_seq, 4))
        where = f"damaged at offset {offsets[3]}: {found} where record 4 should be"
        with pytest.raises(CorruptionError, match=where):
            next(records)


async def test_a_record_does_not_end_beyond_its_segment(path: Path) -> None:
    """A record that claims more bytes than there are is damage, also where a reader only walks over it."""

    def change(data: bytearray, offsets: list[int], nonce: int) -> None:
        body = [bytes(len(data))]
        head = encode_record(nonce=nonce, seq=2, durable_seq=1, epoch=1, header=b"\x80", body=body)
        _put(data, offsets[1], head)

    await _changed(path, change)
    reader = LogReader(path)
    with pytest.raises(CorruptionError, match=r"a record of .* ends beyond its segment"):
        next(reader.read(3))
    with pytest.raises(CorruptionError, match=r"a record of .* bytes where"):
        list(reader.read(1))


async def test_records_far_behind_are_not_walked_to(path: Path) -> None:
    """A read that begins late in a long segment skips, and does not mind, records far before it."""
    async with opened_log(path, ROOMY) as log:
        await fill(log, 40, size_bytes=20_000)
        (segment,) = segments_of(path)
        flip(segment, offsets_of(segment)[1])
        assert [record.seq for record in log.read(39)] == [39, 40]
        with pytest.raises(CorruptionError, match="a record header's checksum is wrong"):
            list(log.read(1))


async def test_short_reads_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system returns fewer bytes than requested, only the rest is requested again."""
    await make_log(path, 20, size_bytes=5000)
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:777]], offset))
    check_records(LogReader(path), 20, 5000)


async def test_missing_records_and_directories_are_named(path: Path) -> None:
    """A seq before the first is gone, a log without records begins at 1, and a missing directory is named."""
    await make_log(path, 6)
    reader = LogReader(path)
    check_records(reader, 6)
    reader.segments.clear()
    assert (reader.first_seq, reader.last_seq, list(reader.read(1))) == (1, 0, [])
    with pytest.raises(GoneError, match="begins at seq 1, seq 0 has been removed"):
        reader.read(0)
    with pytest.raises(StorageError, match=r"nowhere: listing failed: .* \(ENOENT\)"):
        LogReader(path / "nowhere")


async def test_idle_log_proves_its_last_record(path: Path) -> None:
    """In an idle log even damage of the last record is found, because a checkpoint says that it was synced."""
    ops = FaultyFileOps()
    log = FileUpdateLog.open(path, config=ROOMY, ops=ops)
    await fill(log, 3)
    await asyncio.to_thread(ops.wait_for_calls, ["fdatasync", "pwritev"])
    await crash(log, ops)
    segment = segments_of(path)[0]
    flip(segment, offsets_of(segment)[2] + 60)
    _is_refused(path, "record 3 was synced, as a CHECKPOINT record at offset")
