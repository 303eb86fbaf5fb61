"""Parts of a log as segments of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from archived_log import append, flatten, open_file_log

from headrace.paramserver.log.excerpt import LogExcerpt, begin_log_at, end_log, excerpt_log_id, write_excerpt
from headrace.paramserver.log.files import FileUpdateLog
from headrace.paramserver.log.opening import open_source
from headrace.paramserver.log.segments import segment_name
from headrace.schemas.errors import CorruptionError

LOG_ID = excerpt_log_id("server", 1)


def excerpt_of(log: FileUpdateLog, first_seq: int, last_seq: int) -> bytes:
    mark = log.nonce_of(first_seq)
    assert mark is not None
    excerpt = LogExcerpt(log_id=LOG_ID, mark=mark, first_seq=first_seq, now_us=5)
    for record in log.read(first_seq):
        if record.seq <= last_seq:
            excerpt.add(record)
    assert excerpt.last_seq == last_seq
    return bytes(excerpt.seal(7))


def pieces(data: bytes) -> list[bytes]:
    return [data[at : at + 50] for at in range(0, len(data), 50)]


@pytest.mark.parametrize("last_seq", [4, 5, 9, 14, 15, 29, 30])
async def test_a_log_of_excerpts_has_the_same_records_and_marks(tmp_path: Path, last_seq: int) -> None:
    """A log put together from excerpts reads as the source does up to any end, and continues with another mark."""
    target = tmp_path / "target"
    target.mkdir()
    async with open_file_log(tmp_path / "log") as log:
        await append(log, 30)
        for first, last in ((5, 14), (15, 30)):
            assert write_excerpt(target, first, pieces(excerpt_of(log, first, last)), last_seq=last) == 3
        expected = [flatten(record) for record in log.read(5) if record.seq <= last_seq]
        marks = [log.nonce_of(seq) for seq in range(5, last_seq + 1)]
    end_log(target, last_seq)
    assert [flatten(record) for record in open_source(target).read(5)] == expected
    async with open_file_log(target) as copy:
        assert (copy.first_seq, copy.last_seq, copy.log_id) == (5, last_seq, LOG_ID)
        assert [flatten(record) for record in copy.read(5)] == expected
        assert [copy.nonce_of(seq) for seq in range(5, last_seq + 1)] == marks
        await append(copy, 1)
        assert copy.nonce_of(last_seq + 1) not in marks


async def test_every_damage_is_found(tmp_path: Path) -> None:
    """An excerpt that was cut or altered anywhere is refused."""
    async with open_file_log(tmp_path / "log") as log:
        await append(log, 3)
        data = excerpt_of(log, 1, 3)
    for at in range(len(data)):
        for damaged in (data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]):
            target = tmp_path / f"{at}-{len(damaged)}"
            target.mkdir()
            with pytest.raises(CorruptionError):
                write_excerpt(target, 1, [damaged], last_seq=3)


async def test_a_log_without_records_continues_where_it_is_told(tmp_path: Path) -> None:
    """The first record of a log that was begun at a seq has that seq."""
    begin_log_at(tmp_path, 42, log_id=LOG_ID, now_us=1)
    assert (tmp_path / segment_name(42)).is_file()
    async with open_file_log(tmp_path) as log:
        assert (log.first_seq, log.last_seq) == (42, 41)
        await append(log, 2)
    async with open_file_log(tmp_path) as log:
        assert (log.first_seq, log.last_seq) == (42, 43)
