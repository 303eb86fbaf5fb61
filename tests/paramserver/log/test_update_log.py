"""What every update log promises: one suite, run on files and in memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from log_harness import FileLogHarness, LogHarness, MemoryLogHarness

from headrace.paramserver.log.update_log import LogRecord, UpdateLog, UpdateLogConfig
from headrace.schemas.errors import (
    ConfigError,
    GoneError,
    OverloadedError,
    RequestError,
    StorageError,
    UnavailableError,
)
from headrace.schemas.log_records import MAX_PAYLOAD_BYTES


@pytest.fixture(params=["file", "memory"])
async def harness(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LogHarness]:
    made: LogHarness = FileLogHarness(tmp_path / "log") if request.param == "file" else MemoryLogHarness()
    yield made
    if made.logs:
        made.release()
    for log in made.logs:
        async with asyncio.timeout(60):
            await log.close()


async def _fill(log: UpdateLog, count: int, size_bytes: int = 100) -> None:
    """Append records whose bodies are their seq, over and over."""
    appends = []
    last_seq = log.last_seq
    for seq in range(last_seq + 1, last_seq + count + 1):
        append = log.append(epoch=1, header={"step": seq}, body=[_body(seq, size_bytes)])
        assert append.seq == seq
        appends.append(append.durable)
    await asyncio.gather(*appends)


def _body(seq: int, size_bytes: int = 100) -> bytes:
    return (b"%d," % seq * size_bytes)[:size_bytes]


def _seqs(records: Iterator[LogRecord]) -> list[int]:
    return [record.seq for record in records]


async def test_new_log_is_empty(harness: LogHarness) -> None:
    """A new log begins at seq 1 and holds nothing."""
    log = harness.open()
    assert (log.first_seq, log.last_seq, log.failed, log.pending_bytes) == (1, 0, None, 0)
    assert _seqs(log.read(1)) == []


async def test_records_come_back_as_they_went_in(harness: LogHarness) -> None:
    """Seq, epoch, header and body of each record are read as they were appended."""
    log = harness.open()
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
    """While the disk is held back no future is done, `last_seq` stays, and reading does not show the record."""
    log = harness.open()
    await _fill(log, 1)
    harness.hold()
    append = log.append(epoch=1, header={}, body=[b"x"])
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
    """The futures are done in the order of the seqs, whatever the sizes."""
    log = harness.open(UpdateLogConfig(segment_bytes=4096, max_group_bytes=1000))
    done: list[int] = []
    appends = [log.append(epoch=1, header={}, body=[bytes(i * 37 % 900)]) for i in range(60)]
    for append in appends:
        append.durable.add_done_callback(lambda _, seq=append.seq: done.append(seq))  # type: ignore[misc]
    await appends[-1].durable
    await asyncio.sleep(0)
    assert done == list(range(1, 61))


async def test_full_log_refuses_and_recovers(harness: LogHarness) -> None:
    """Beyond `max_pending_bytes` an append is refused, uses no seq, and is accepted once there is room."""
    log = harness.open(UpdateLogConfig(max_pending_bytes=1000))
    await _fill(log, 1)
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
    """A record above the bounds for pending, group and segment is taken when nothing else is pending."""
    log = harness.open(UpdateLogConfig(segment_bytes=4096, max_group_bytes=10, max_pending_bytes=10))
    for seq in (1, 2, 3):
        await log.append(epoch=1, header={}, body=[_body(seq, 9000)]).durable
    assert [bytes(record.body) for record in log.read(1)] == [_body(seq, 9000) for seq in (1, 2, 3)]


async def test_record_that_cannot_be_is_refused(harness: LogHarness) -> None:
    """Too large, a wrong epoch, scattered bytes, a header that msgpack cannot hold: refused, and no seq is used."""
    log = harness.open()
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
    await _fill(log, 1)


async def test_reading_begins_and_ends_where_asked(harness: LogHarness) -> None:
    """A read begins at any seq, in any segment, and ends at the end."""
    log = harness.open()
    await _fill(log, 200)
    for seq in (1, 2, 57, 131, 199, 200):
        records = list(log.read(seq))
        assert [record.seq for record in records] == list(range(seq, 201))
        assert [bytes(record.body) for record in records] == [_body(n) for n in range(seq, 201)]
    assert _seqs(log.read(201)) == []
    assert _seqs(log.read(10_000)) == []
    with pytest.raises(ValueError, match="the first is 1"):
        log.read(0)


async def test_reading_beside_writing_sees_what_was_durable(harness: LogHarness) -> None:
    """A read that began before an append ends before it; one that is made later sees it."""
    log = harness.open()
    await _fill(log, 30)
    before = log.read(1)
    seen = [next(before).seq]
    await _fill(log, 30)
    seen += _seqs(before)
    assert seen == list(range(1, 31))
    assert _seqs(log.read(1)) == list(range(1, 61))


async def test_reading_in_threads_while_writing(harness: LogHarness) -> None:
    """Readers in other threads, beside a writer, see an unbroken run of whole records each time."""
    log = harness.open()

    def read_all() -> int:
        last, rounds = 0, 0
        while last < 400:
            for expected, record in zip(itertools.count(1), log.read(1), strict=False):
                assert record.seq == expected
                assert bytes(record.body) == _body(record.seq)
                last = record.seq
            rounds += 1
        return rounds

    readers = [asyncio.create_task(asyncio.to_thread(read_all)) for _ in range(2)]
    async with asyncio.timeout(60):
        for _ in range(40):
            await _fill(log, 10)
        assert all(rounds >= 1 for rounds in await asyncio.gather(*readers))


async def test_trim_removes_whole_segments_below_the_floor(harness: LogHarness) -> None:
    """Trimming never removes a record at or above the floor, and what it removed is gone for readers."""
    log = harness.open()
    await _fill(log, 200)
    assert log.trim(1) == 1
    for floor in (30, 60, 130):
        first = log.trim(floor)
        assert floor - 40 < first <= floor
        assert log.first_seq == first
        assert _seqs(log.read(first)) == list(range(first, 201))
        with pytest.raises(GoneError, match=str(first)):
            log.read(first - 1)
    assert log.trim(10) == first


async def test_trim_keeps_the_newest_segment(harness: LogHarness) -> None:
    """However far trimming may go, the newest segment stays and the log goes on with the next seq."""
    log = harness.open()
    await _fill(log, 100)
    first = log.trim(10_000)
    assert 60 < first <= 100
    assert _seqs(log.read(first)) == list(range(first, 101))
    await log.close()
    log = harness.open()
    assert (log.first_seq, log.last_seq) == (first, 100)
    await _fill(log, 1)
    assert log.trim(10_000) <= 101


async def test_trim_to_a_size(harness: LogHarness) -> None:
    """With `max_bytes` the oldest go until the rest fits, and none goes that fits, or lies above the floor."""
    log = harness.open()
    await _fill(log, 200)
    size = log.size_bytes
    assert log.trim(201, max_bytes=size) == 1
    first = log.trim(201, max_bytes=size - 1)
    assert 1 < first < 60
    assert log.size_bytes < size
    log.trim(201, max_bytes=10_000)
    assert 5000 < log.size_bytes <= 10_000
    before = log.first_seq
    assert log.trim(before, max_bytes=0) == before


async def test_trim_by_age(harness: LogHarness) -> None:
    """With `max_age_s` only segments whose last record is older go."""
    log = harness.open()
    for _ in range(4):
        await _fill(log, 50)
        harness.now_us += 10_000_000
    assert log.trim(201, max_age_s=1000) == 1
    assert 10 < log.trim(201, max_age_s=35) <= 51
    assert 60 < log.trim(201, max_age_s=25) <= 101
    # Either reason will do.
    assert log.trim(201, max_age_s=1000, max_bytes=0) > 160


async def test_iterator_that_was_overtaken_by_trimming(harness: LogHarness) -> None:
    """A read that is overtaken by trimming yields whole records in order, and then says that the rest is gone."""
    log = harness.open()
    await _fill(log, 200)
    records = log.read(1)
    seen = [next(records).seq]
    log.trim(190)
    with contextlib.suppress(GoneError):
        seen += _seqs(records)
    assert seen == list(range(1, len(seen) + 1))


async def test_close_drains_and_refuses(harness: LogHarness) -> None:
    """Closing makes what is pending durable, then appends are refused; reading goes on; closing again is harmless."""
    log = harness.open()
    appends = [log.append(epoch=1, header={}, body=[_body(seq)]) for seq in range(1, 11)]
    await asyncio.gather(log.close(), log.close())
    assert all(append.durable.done() for append in appends)
    with pytest.raises(UnavailableError, match="closed"):
        log.append(epoch=1, header={}, body=[])
    assert _seqs(log.read(1)) == list(range(1, 11))
    await log.close()


async def test_close_survives_cancellation(harness: LogHarness) -> None:
    """A close that is cancelled goes on, and the next one waits for it."""
    log = harness.open()
    await _fill(log, 1)
    harness.hold()
    append = log.append(epoch=1, header={}, body=[b"x"])
    closing = asyncio.create_task(log.close())
    await asyncio.sleep(0)
    closing.cancel()
    harness.release()
    await asyncio.wait([closing])
    await log.close()
    assert append.durable.done()
    assert log.last_seq == 2


async def test_log_goes_on_after_reopening(harness: LogHarness) -> None:
    """A log that is closed and opened again has its records and gives out the next seq."""
    for count in (3, 0, 50, 0, 1):
        log = harness.open()
        before = log.last_seq
        assert _seqs(log.read(1)) == list(range(1, before + 1))
        await _fill(log, count)
        await log.close()
        assert log.last_seq == before + count
    log = harness.open()
    assert [bytes(record.body) for record in log.read(1)] == [_body(seq) for seq in range(1, 55)]


async def test_failure_is_for_good(harness: LogHarness) -> None:
    """After a failure what was pending fails, later appends raise, what was durable is readable, nothing else is."""
    log = harness.open()
    await _fill(log, 5)
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
    for _ in range(2):
        with pytest.raises(StorageError):
            log.append(epoch=1, header={}, body=[])
    assert log.last_seq == 5
    assert _seqs(log.read(1)) == [1, 2, 3, 4, 5]
    await log.close()
    assert log.last_seq == 5


async def test_waiting_cannot_be_cancelled_before_the_buffers_are_free(harness: LogHarness) -> None:
    """A task that is cancelled while it waits is told so only when its record is durable."""
    log = harness.open()
    await _fill(log, 1)
    harness.hold()
    append = log.append(epoch=1, header={}, body=[b"x"])
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


async def test_metrics_count_what_was_done(harness: LogHarness) -> None:
    """Records and bytes are counted; groups are at most as many as records."""
    log = harness.open()
    await _fill(log, 50)
    metrics = log.metrics
    assert metrics.num_records == 50
    assert 1 <= metrics.num_groups <= 50
    assert metrics.written_bytes >= 50 * 100
    assert len(metrics.recent_fsync_s) == metrics.num_fsyncs
    assert metrics.fsync_s == pytest.approx(sum(metrics.recent_fsync_s))


@pytest.mark.parametrize("seed", range(8))
async def test_any_sequence_of_calls_agrees_with_a_list(harness: LogHarness, seed: int) -> None:
    """Whatever is called in whatever order, the log holds what a plain list of bodies says."""
    rng = random.Random(seed)
    log = harness.open()
    bodies: list[bytes] = []
    first = 1

    async def append() -> None:
        new = [rng.randbytes(rng.choice((0, 10, 300, 5000))) for _ in range(rng.randint(1, 12))]
        appends = [log.append(epoch=1, header={"n": len(body)}, body=[body[:7], body[7:]]) for body in new]
        assert [each.seq for each in appends] == list(range(len(bodies) + 1, len(bodies) + len(new) + 1))
        await asyncio.gather(*(each.durable for each in appends))
        bodies.extend(new)

    async def trim() -> None:
        nonlocal first
        floor = rng.randint(1, len(bodies) + 2)
        found = log.trim(floor)
        assert first <= found <= max(first, floor, len(bodies))
        first = found

    async def read() -> None:
        start = rng.randint(first, len(bodies) + 1)
        records = list(log.read(start))
        assert [bytes(record.body) for record in records] == bodies[start - 1 :]

    async def reopen() -> None:
        nonlocal log
        await log.close()
        log = harness.open()
        assert (log.first_seq, log.last_seq) == (first, len(bodies))

    steps: list[Callable[[], Any]] = [append, append, append, trim, read, read, reopen]
    for _ in range(60):
        await rng.choice(steps)()


@pytest.mark.parametrize(
    ("name", "value"),
    {
        "segment_bytes": 4095,
        "max_group_bytes": 0,
        "max_pending_bytes": 0,
        "allocate_bytes": -1,
        "tail_bytes": 4096,
    }.items(),
)
def test_config_names_what_is_wrong(name: str, value: int) -> None:
    """A setting out of range is refused by name."""
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        UpdateLogConfig(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tail_bytes is 9000"):
        UpdateLogConfig(tail_bytes=9000)
