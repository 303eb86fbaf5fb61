"""The promises of every update log: one suite, run on files, on a copy of another log, in memory and on a stream."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from log_files import body_of, fill
from log_harness import CopyHarness, LogHarness, MemoryHarness, StreamHarness

from headrace.paramserver.log.interface import Append, LogRecord, UpdateLog, UpdateLogConfig
from headrace.schemas.errors import (
    ConfigError,
    GoneError,
    OverloadedError,
    RequestError,
    StorageError,
    UnavailableError,
)
from headrace.schemas.log_records import MAX_PAYLOAD_BYTES


@pytest.fixture(params=[LogHarness, CopyHarness, MemoryHarness, StreamHarness], ids=lambda kind: kind.__name__)
async def harness(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LogHarness]:
    made: LogHarness = request.param(tmp_path / "log")
    yield made
    if made.logs:
        made.release()
    for log in made.logs:
        async with asyncio.timeout(60):
            await log.close()


@pytest.fixture
async def log(harness: LogHarness) -> UpdateLog:
    return await harness.open()


def _seqs(records: Iterator[LogRecord]) -> list[int]:
    return [record.seq for record in records]


async def _held(harness: LogHarness) -> tuple[UpdateLog, Append]:
    """Return a log with one durable record, and a second one that waits for the disk."""
    log = await harness.open()
    await fill(log, 1)
    harness.hold()
    return log, log.append(epoch=1, header={}, body=[b"x"])


async def test_records_come_back_as_they_went_in(log: UpdateLog) -> None:
    """Seq, epoch, header and body of each record are read as they were appended."""
    whole = memoryview(bytes(range(256)) * 40)
    header = {"step": 7, "kind": 1, "tables": ["a.weight", "b.weight"], "id": b"\0\xff", "none": None, "big": 2**63}
    cases: list[tuple[int, dict[str, Any], list[bytes | memoryview]]] = [
        (1, {}, []),
        (2**32 - 1, header, [whole]),
        (3, {"x": 1}, [b"", b"a", whole[5:5000], b"", whole[:0]]),
        (4, {}, [memoryview(bytearray(24)).cast("i", shape=[2, 3])]),
        (5, {}, [whole[i : i + 3] for i in range(3000)]),
    ]
    appends = [log.append(epoch=epoch, header=fields, body=body) for epoch, fields, body in cases]
    assert [append.seq for append in appends] == [1, 2, 3, 4, 5]
    await asyncio.gather(*(append.durable for append in appends))
    assert (log.first_seq, log.last_seq) == (1, 5)
    for record, (epoch, fields, body) in zip(log.read(1), cases, strict=True):
        assert (record.epoch, record.header) == (epoch, fields)
        assert bytes(record.body) == b"".join(body)
        assert record.body.readonly


async def test_nothing_is_durable_or_readable_before_its_sync(harness: LogHarness) -> None:
    """While the disk is held back, no future is done, `last_seq` stays, and reads do not see the record."""
    log, append = await _held(harness)
    assert append.seq == 2
    for _ in range(20):
        await asyncio.sleep(0)
    assert not append.durable.done()
    assert (log.last_seq, _seqs(log.read(1))) == (1, [1])
    assert log.pending_bytes > 0
    harness.release()
    await append.durable
    assert (log.last_seq, _seqs(log.read(1)), log.pending_bytes) == (2, [1, 2], 0)


async def test_records_become_durable_in_order(harness: LogHarness) -> None:
    """The futures are done in the order of the seqs, whatever the sizes of the records."""
    log = await harness.open(UpdateLogConfig(segment_bytes=4096, max_group_bytes=1000))
    done: list[int] = []
    appends = [log.append(epoch=1, header={}, body=[bytes(i * 37 % 900)]) for i in range(60)]
    for append in appends:
        append.durable.add_done_callback(lambda _, seq=append.seq: done.append(seq))  # type: ignore[misc]
    await appends[-1].durable
    await asyncio.sleep(0)
    assert done == list(range(1, 61))


async def test_full_log_refuses_and_recovers(harness: LogHarness) -> None:
    """Beyond `max_pending_bytes` an append is refused without using a seq, until there is room again."""
    log = await harness.open(UpdateLogConfig(max_pending_bytes=1000))
    await fill(log, 1)
    harness.hold()
    first = log.append(epoch=1, header={}, body=[bytes(800)])
    with pytest.raises(OverloadedError, match="1000") as caught:
        log.append(epoch=1, header={}, body=[bytes(800)])
    assert caught.value.retriable
    harness.release()
    await first.durable
    again = log.append(epoch=1, header={}, body=[bytes(800)])
    assert (first.seq, again.seq) == (2, 3)
    await again.durable


async def test_record_larger_than_every_bound_goes_alone(harness: LogHarness) -> None:
    """A record above the bounds for pending, group and segment is accepted when nothing else is pending."""
    log = await harness.open(UpdateLogConfig(segment_bytes=4096, max_group_bytes=10, max_pending_bytes=10))
    for seq in (1, 2, 3):
        await log.append(epoch=1, header={}, body=[body_of(seq, 9000)]).durable
    assert [bytes(record.body) for record in log.read(1)] == [body_of(seq, 9000) for seq in (1, 2, 3)]


async def test_record_that_cannot_be_is_refused(log: UpdateLog) -> None:
    """Records that are too large, with a wrong epoch, scattered bytes or no msgpack are refused without using a seq."""
    with (
        mmap.mmap(-1, MAX_PAYLOAD_BYTES + 1) as untouched,
        memoryview(untouched) as huge,
        pytest.raises(RequestError, match=str(MAX_PAYLOAD_BYTES)),
    ):
        log.append(epoch=1, header={}, body=[huge])
    for epoch in (0, -1, 2**32):
        with pytest.raises(ValueError, match="epoch"):
            log.append(epoch=epoch, header={}, body=[])
    with pytest.raises(ValueError, match="contiguous"):
        log.append(epoch=1, header={}, body=[memoryview(bytes(10))[::2]])
    with pytest.raises(TypeError):
        log.append(epoch=1, header={"x": object()}, body=[])
    assert log.pending_bytes == 0
    await fill(log, 1)


async def test_reading_begins_and_ends_where_asked(log: UpdateLog) -> None:
    """A read begins at any seq, in any segment, and ends at what was the last record when it began."""
    await fill(log, 200)
    for seq in (1, 2, 57, 131, 199, 200):
        records = list(log.read(seq))
        assert [record.seq for record in records] == list(range(seq, 201))
        assert [bytes(record.body) for record in records] == [body_of(n) for n in range(seq, 201)]
    assert _seqs(log.read(201)) == []
    assert _seqs(log.read(10_000)) == []
    with pytest.raises(ValueError, match="the first is 1"):
        log.read(0)
    before = log.read(1)  # it ends where the log ended when it began
    seen = [next(before).seq]
    await fill(log, 30)
    assert seen + _seqs(before) == list(range(1, 201))


async def test_reading_in_threads_while_writing(log: UpdateLog) -> None:
    """Readers in other threads, beside a writer, see an unbroken run of whole records each time."""

    def read_all() -> int:
        last, rounds = 0, 0
        while last < 150:
            for expected, record in zip(itertools.count(1), log.read(1), strict=False):
                assert record.seq == expected
                assert bytes(record.body) == body_of(record.seq)
                last = record.seq
            rounds += 1
        return rounds

    readers = [asyncio.create_task(asyncio.to_thread(read_all)) for _ in range(2)]
    async with asyncio.timeout(60):
        for _ in range(15):
            await fill(log, 10)
        assert all(rounds >= 1 for rounds in await asyncio.gather(*readers))


async def test_trim_removes_whole_segments_below_the_floor(harness: LogHarness, log: UpdateLog) -> None:
    """Trimming removes no record at or above the floor, and readers get an error for those removed."""
    await fill(log, 200)
    await harness.written()
    assert log.trim(1) == 1
    for floor in (30, 60, 130):
        first = log.trim(floor)
        assert floor - 40 < first <= floor
        assert log.first_seq == first
        assert log.nonce_of(first - 1) is None and log.nonce_of(first) is not None
        assert _seqs(log.read(first)) == list(range(first, 201))
        with pytest.raises(GoneError, match=str(first)):
            log.read(first - 1)
    assert log.trim(10) == first


async def test_trim_keeps_the_newest_segment(harness: LogHarness, log: UpdateLog) -> None:
    """The newest segment is never trimmed, and the log continues with the next seq."""
    await fill(log, 100)
    await harness.written()
    first = log.trim(10_000)
    assert 60 < first <= 100
    await log.close()
    log = await harness.open()
    assert (log.first_seq, _seqs(log.read(first))) == (first, list(range(first, 101)))
    await fill(log, 1)
    assert log.trim(10_000) <= 101


async def test_trim_to_a_size(harness: LogHarness, log: UpdateLog) -> None:
    """With `max_bytes`, the oldest segments go until the rest fits, but none above the floor."""
    await fill(log, 200)
    await harness.written()
    size = log.size_bytes
    assert log.trim(201, max_bytes=size) == 1
    first = log.trim(201, max_bytes=size - 1)
    assert 1 < first < 60
    assert log.size_bytes < size
    log.trim(201, max_bytes=10_000)
    assert 5000 < log.size_bytes <= 10_000
    before = log.first_seq
    assert log.trim(before, max_bytes=0) == before


async def test_trim_by_age(harness: LogHarness, log: UpdateLog) -> None:
    """With `max_age_s`, only segments whose last record is older go."""
    for _ in range(4):
        await fill(log, 50)
        await harness.written()
        harness.now_us += 10_000_000
    assert log.trim(201, max_age_s=1000) == 1
    assert 10 < log.trim(201, max_age_s=35) <= 51
    assert 60 < log.trim(201, max_age_s=25) <= 101
    # One of the two reasons is enough.
    assert log.trim(201, max_age_s=1000, max_bytes=0) > 160


async def test_iterator_that_was_overtaken_by_trimming(harness: LogHarness, log: UpdateLog) -> None:
    """A read that is overtaken by trimming yields whole records in order, then raises that the rest is gone."""
    await fill(log, 200)
    await harness.written()
    records = log.read(1)
    seen = [next(records).seq]
    log.trim(190)
    with contextlib.suppress(GoneError):
        seen += _seqs(records)
    assert seen == list(range(1, len(seen) + 1))


async def test_close_drains_and_refuses(log: UpdateLog) -> None:
    """Closing makes pending records durable and refuses new ones; reading continues; closing again is harmless."""
    appends = [log.append(epoch=1, header={}, body=[body_of(seq)]) for seq in range(1, 11)]
    await asyncio.gather(log.close(), log.close())
    assert all(append.durable.done() for append in appends)
    with pytest.raises(UnavailableError, match="closed"):
        log.append(epoch=1, header={}, body=[])
    assert _seqs(log.read(1)) == list(range(1, 11))
    await log.close()


async def test_close_survives_cancellation(harness: LogHarness) -> None:
    """A cancelled close continues, and the next call waits for it."""
    log, append = await _held(harness)
    closing = asyncio.create_task(log.close())
    await asyncio.sleep(0)
    closing.cancel()
    harness.release()
    await asyncio.wait([closing])
    await log.close()
    assert append.durable.done()
    assert log.last_seq == 2


async def test_failure_is_for_good(harness: LogHarness, log: UpdateLog) -> None:
    """After a failure, pending records fail, later appends raise, and exactly the durable records are readable."""
    await fill(log, 5)
    harness.hold()
    waiting = asyncio.create_task(log.wait_failed())
    appends = [log.append(epoch=1, header={}, body=[bytes(50)]) for _ in range(3)]
    harness.break_next_sync()
    harness.release()
    results = await asyncio.gather(*(append.durable for append in appends), return_exceptions=True)
    assert all(isinstance(result, StorageError) for result in results)
    assert isinstance(log.failed, StorageError)
    assert await asyncio.wait_for(waiting, 60) is await log.wait_failed() is log.failed
    assert log.pending_bytes == 0
    with pytest.raises(StorageError):
        log.append(epoch=1, header={}, body=[])
    assert (log.last_seq, _seqs(log.read(1))) == (5, [1, 2, 3, 4, 5])
    await log.close()
    assert log.last_seq == 5


async def test_waiting_cannot_be_cancelled_before_the_buffers_are_free(harness: LogHarness) -> None:
    """A task that is cancelled while it waits ends only when its record is durable."""
    log, append = await _held(harness)
    seen: list[bool] = []

    async def wait() -> None:
        try:
            await append.durable
        finally:
            seen.append(append.durable.done() and not append.durable.cancelled())

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    assert not append.durable.cancel()
    harness.release()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert seen == [True]
    assert log.last_seq == 2


async def test_metrics_count_what_was_done(log: UpdateLog) -> None:
    """Records and bytes are counted; groups are at most as many as records."""
    await fill(log, 50)
    metrics = log.metrics
    assert metrics.num_records == 50
    assert 1 <= metrics.num_groups <= 50
    assert metrics.written_bytes >= 50 * 100
    assert len(metrics.recent_commit_s) == metrics.num_commits
    assert metrics.commit_s == pytest.approx(sum(metrics.recent_commit_s))


@pytest.mark.parametrize("seed", range(5))
async def test_any_sequence_of_calls_agrees_with_a_list(harness: LogHarness, log: UpdateLog, seed: int) -> None:
    """After any sequence of calls, the log holds the same records as a plain list of bodies."""
    rng = random.Random(seed)
    bodies: list[bytes] = []
    first = 1

    for _ in range(60):
        call = rng.choice(("append", "append", "append", "trim", "read", "read", "reopen"))
        if call == "append":
            new = [rng.randbytes(rng.choice((0, 10, 300, 5000))) for _ in range(rng.randint(1, 12))]
            appends = [log.append(epoch=1, header={"n": len(body)}, body=[body[:7], body[7:]]) for body in new]
            assert [each.seq for each in appends] == list(range(len(bodies) + 1, len(bodies) + len(new) + 1))
            await asyncio.gather(*(each.durable for each in appends))
            bodies.extend(new)
        elif call == "trim":
            floor = rng.randint(1, len(bodies) + 2)
            found = log.trim(floor)
            assert first <= found <= max(first, floor, len(bodies))
            first = found
        elif call == "read":
            start = rng.randint(first, len(bodies) + 1)
            assert [bytes(record.body) for record in log.read(start)] == bodies[start - 1 :]
        else:
            await log.close()
            log = await harness.open()
            assert (log.first_seq, log.last_seq) == (first, len(bodies))


def test_config_names_what_is_wrong() -> None:
    """A setting out of range is refused by name."""
    wrong = [("segment_bytes", 4095), ("max_group_bytes", 0), ("max_pending_bytes", 0), ("allocate_bytes", -1)]
    for name, value in [*wrong, ("tail_bytes", 4096), ("tail_bytes", 9000)]:
        with pytest.raises(ConfigError, match=f"{name} is {value}"):
            UpdateLogConfig(**{name: value})


async def test_each_opening_has_nonces_of_its_own(harness: LogHarness) -> None:
    """No two openings share a nonce, none changes later, and absent records have none."""
    known: list[int] = []
    for _ in range(3):
        log = await harness.open()
        before = len(known)
        assert [log.nonce_of(seq) for seq in range(1, before + 1)] == known
        await fill(log, 3)
        await fill(log, 1, size_bytes=4000)  # in a segment of its own
        new = [log.nonce_of(seq) for seq in range(before + 1, before + 5)]
        assert set(new).isdisjoint(known)
        known += [nonce for nonce in new if nonce is not None]
        assert len(known) == log.last_seq and all(-(2**63) <= nonce < 2**63 for nonce in known)
        assert log.nonce_of(0) is None and log.nonce_of(log.last_seq + 1) is None
        await log.close()
