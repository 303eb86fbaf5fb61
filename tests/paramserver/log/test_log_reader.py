"""Reading a log across its segments: what contradicts itself behind right checksums, and what is not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from log_files import ROOMY, check_records, fill, make_log, offsets_of, opened_log, segments_of

from headrace.paramserver.log.file_update_log import FileUpdateLog
from headrace.paramserver.log.log_reader import LogReader
from headrace.schemas.errors import CorruptionError, GoneError, StorageError
from headrace.schemas.log_records import SEAL_BYTES, Seal, decode_segment_header, encode_record, encode_seal

_NUM_RECORDS = 6


async def _damaged(path: Path, change: Callable[[bytearray, list[int]], None]) -> None:
    """Make a log of one sealed segment, and change its bytes; `change` gets them, and where each record begins."""
    await make_log(path, _NUM_RECORDS)
    (segment,) = segments_of(path)
    data = bytearray(segment.read_bytes())
    change(data, offsets_of(segment))
    segment.write_bytes(data)


@pytest.mark.parametrize("seal", [Seal(6, 5, 1), Seal(7, 6, 1), Seal(5, 6, 1)])
async def test_a_seal_that_miscounts_is_refused(tmp_path: Path, seal: Seal) -> None:
    """A seal whose last seq and number of records do not fit together ends no segment, whatever its checksum says."""

    def change(data: bytearray, offsets: list[int]) -> None:
        data[-SEAL_BYTES:] = encode_seal(mark=decode_segment_header(bytes(data)).mark, seal=seal)

    await _damaged(tmp_path / "log", change)
    words = f"the seal says {seal.num_records} records up to seq {seal.last_seq}"
    with pytest.raises(CorruptionError, match=words):
        FileUpdateLog.open(tmp_path / "log")
    with pytest.raises(CorruptionError, match=words):
        LogReader(tmp_path / "log")


def _repeat(data: bytearray, offsets: list[int]) -> None:
    data[offsets[3] : offsets[4]] = data[offsets[2] : offsets[3]]


def _blank(data: bytearray, offsets: list[int]) -> None:
    data[offsets[3] : offsets[4]] = bytes(offsets[4] - offsets[3])


def _seal_early(data: bytearray, offsets: list[int]) -> None:
    mark = decode_segment_header(bytes(data)).mark
    data[offsets[3] : offsets[3] + SEAL_BYTES] = encode_seal(mark=mark, seal=Seal(4, 4, 1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_repeat, "a DATA record of seq 3 where record 4 should be"),
        (_blank, "nothing where record 4 should be"),
        (_seal_early, "a SEAL record of seq 4 where record 4 should be"),
    ],
)
@pytest.mark.parametrize("from_seq", [1, 4, 6])
async def test_no_record_is_taken_for_another(
    tmp_path: Path, change: Callable[[bytearray, list[int]], None], words: str, from_seq: int
) -> None:
    """An intact record in the place of another is damage, told with its offset, also where it is only walked over."""
    await _damaged(tmp_path / "log", change)
    (segment,) = segments_of(tmp_path / "log")
    async with opened_log(tmp_path / "log", ROOMY) as log:
        records = log.read(from_seq)
        assert [next(records).seq for _ in range(from_seq, 4)] == list(range(from_seq, 4))
        with pytest.raises(CorruptionError, match=f"damaged at offset {offsets_of(segment)[3]}: {words}"):
            next(records)


async def test_a_record_does_not_end_beyond_its_segment(tmp_path: Path) -> None:
    """A record that claims more bytes than there are is where the damage is, also where it is only walked over."""

    def change(data: bytearray, offsets: list[int]) -> None:
        mark = decode_segment_header(bytes(data)).mark
        size_bytes = len(data)
        head = encode_record(mark=mark, seq=2, durable_seq=1, epoch=1, header=b"\x80", body=[bytes(size_bytes)])
        data[offsets[1] : offsets[1] + len(head)] = head

    await _damaged(tmp_path / "log", change)
    reader = LogReader(tmp_path / "log")
    with pytest.raises(CorruptionError, match=r"a record of .* ends beyond its segment"):
        next(reader.read(3))
    with pytest.raises(CorruptionError, match=r"a record of .* bytes where"):
        list(reader.read(1))


async def test_records_far_behind_are_not_walked_to(tmp_path: Path) -> None:
    """Beginning at a late record of a long segment does not read, or mind, what lies far before it."""
    async with opened_log(tmp_path / "log", ROOMY) as log:
        await fill(log, 40, size_bytes=20_000)
        (segment,) = segments_of(tmp_path / "log")
        data = bytearray(segment.read_bytes())
        at = offsets_of(segment)[1]
        data[at : at + 48] = bytes(48)
        segment.write_bytes(data)
        assert [record.seq for record in log.read(39)] == [39, 40]
        with pytest.raises(CorruptionError, match="where record 2 should be"):
            list(log.read(1))


async def test_reads_that_are_cut_short_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that gives fewer bytes than it was asked for is asked for the rest, and only for that."""
    await make_log(tmp_path / "log", 20, size_bytes=5000)
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:777]], offset))
    check_records(LogReader(tmp_path / "log"), 20, 5000)


async def test_what_is_gone_is_told(tmp_path: Path) -> None:
    """A seq before the first is gone; a log without records begins at 1; a directory that is not there is named."""
    await make_log(tmp_path / "log", _NUM_RECORDS)
    reader = LogReader(tmp_path / "log")
    check_records(reader, _NUM_RECORDS)
    reader.segments.clear()
    assert (reader.first_seq, reader.last_seq, list(reader.read(1))) == (1, 0, [])
    with pytest.raises(GoneError, match="begins at seq 1, seq 0 has been removed"):
        reader.read(0)
    with pytest.raises(StorageError, match=r"nowhere: listing failed: .* \(ENOENT\)"):
        LogReader(tmp_path / "nowhere")
