"""Update logs in files, written by tests, and left as a crash leaves them."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from faulty_file_ops import FaultyFileOps

from headrace.paramserver.log.files import FileUpdateLog
from headrace.paramserver.log.interface import UpdateLog, UpdateLogConfig
from headrace.paramserver.log.segment_reader import LogReader
from headrace.schemas.log_records import (
    RECORD_HEADER_BYTES,
    SEAL_BYTES,
    SEGMENT_HEADER_BYTES,
    decode_segment_header,
    encode_checkpoint,
)

SMALL = UpdateLogConfig(segment_bytes=4096, allocate_bytes=4096, tail_bytes=8192)
ROOMY = UpdateLogConfig(segment_bytes=1 << 20, allocate_bytes=8192, tail_bytes=8192)


@contextlib.asynccontextmanager
async def opened_log(path: Path, config: UpdateLogConfig = ROOMY, ops: FaultyFileOps | None = None):  # type: ignore[no-untyped-def]
    log = FileUpdateLog.open(path, config=config, ops=ops)
    try:
        yield log
    finally:
        if ops is not None:
            ops.gate.set()
        await log.close()


def body_of(seq: int, size_bytes: int = 100) -> bytes:
    return (b"%d," % seq * size_bytes)[:size_bytes]


async def fill(log: UpdateLog, count: int, *, size_bytes: int = 100, one_by_one: bool = False) -> None:
    last_seq = log.last_seq
    appends = []
    for seq in range(last_seq + 1, last_seq + count + 1):
        append = log.append(epoch=1, header={"step": seq}, body=[body_of(seq, size_bytes)])
        appends.append(append.durable)
        if one_by_one:
            await append.durable
    await asyncio.gather(*appends)


async def make_log(path: Path, count: int, *, size_bytes: int = 100, config: UpdateLogConfig = ROOMY) -> Path:
    """Write a log and close it; return its first segment."""
    async with opened_log(path, config) as log:
        await fill(log, count, size_bytes=size_bytes, one_by_one=True)
    return segments_of(path)[0]


def segments_of(path: Path) -> list[Path]:
    return sorted(path.glob("*.hrlog"))


def flip(segment: Path, *offsets: int, bits: int = 1) -> None:
    """Flip bits of the bytes at some offsets."""
    data = bytearray(segment.read_bytes())
    for offset in offsets:
        data[offset] ^= bits
    segment.write_bytes(data)


def unseal(segment: Path, *, with_checkpoint: bool, zeros: int = 0) -> bytes:
    """Leave a segment as a crash does: without its seal. Returns its bytes."""
    data = segment.read_bytes()[:-SEAL_BYTES]
    last_seq = LogReader(segment.parent).last_seq
    if with_checkpoint:
        data += encode_checkpoint(nonce=decode_segment_header(data).nonce, durable_seq=last_seq)
    data += bytes(zeros)
    segment.write_bytes(data)
    return data


def offsets_of(segment: Path) -> list[int]:
    """Return where each record of a segment made by `make_log` begins, and where the last one ends."""
    data = segment.read_bytes()
    found = [SEGMENT_HEADER_BYTES]
    while found[-1] + 8 <= len(data) and (size := int.from_bytes(data[found[-1] + 4 : found[-1] + 8], "little")) > 20:
        found.append(found[-1] + RECORD_HEADER_BYTES + size)
    return found


def check_records(log: FileUpdateLog | LogReader, count: int, size_bytes: int = 100) -> None:
    records = list(log.read(1))
    assert [record.seq for record in records] == list(range(1, count + 1))
    assert all(bytes(record.body) == body_of(record.seq, size_bytes) for record in records)


async def crash(log: FileUpdateLog, ops: FaultyFileOps) -> None:
    """End a log as `kill -9` does: no further call reaches its files."""
    ops.is_dead = True
    ops.gate.set()
    await log.close()
    ops.is_dead = False
