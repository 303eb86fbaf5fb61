"""Leases on the update log: when they end, how many there may be, and which a restart keeps."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fact_log import FactLog, collect_facts

from headrace.paramserver.log import leases as leases_module
from headrace.paramserver.log.leases import LogLeases, SavedLeases
from headrace.schemas.errors import RequestError


class Process:
    """One run of a shard, with a clock of its own."""

    def __init__(self, path: Path, *, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self.leases = LogLeases(clock=lambda: self.now_s)
        self.saved = SavedLeases(path, self.leases, min_lease_s=600.0, clock=lambda: self.now_s)

    def seqs(self) -> list[int]:
        return sorted(lease.seq for lease in self.leases.held())

    def held(self) -> list[tuple[str, str, int, float]]:
        """Return (name, copy, seq, seconds left) of the leases."""
        held = [(lease.name, lease.copy_id, lease.seq, lease.expires_s - self.now_s) for lease in self.leases.held()]
        return sorted(held)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "leases.json"


@pytest.fixture
def process(path: Path) -> Process:
    return Process(path)


@pytest.fixture
def facts() -> Iterator[FactLog]:
    yield from collect_facts("headrace.paramserver.log.leases")


def _seqs_in(path: Path) -> list[int]:
    return [lease["seq"] for lease in json.loads(path.read_text())["leases"]]


def test_leases_end(process: Process) -> None:
    """A lease is its copy's, and ends with its time or its release; `renew` returns whether more log is needed."""
    for now_s, (name, copy), seq, lease_s, needs_more, held in [
        (0, ("a", ""), 5, 10, True, [5]),
        (0, ("b", ""), 9, 20, True, [5, 9]),
        (0, ("a", ""), 5, 10, False, [5, 9]),
        (0, ("a", ""), 7, 10, False, [7, 9]),
        (0, ("a", ""), 6, 10, True, [6, 9]),  # it goes back
        (10, ("b", ""), 9, 20, False, [9]),
        (10, ("a", ""), 7, 10, True, [7, 9]),  # its lease had ended
        (10, ("a", ""), 1, 0, False, [9]),  # a release
        (10, ("b", "slow"), 3, 10, True, [3, 9]),
        (10, ("b", "fast"), 8, 10, True, [3, 8, 9]),
        (10, ("b", "fast"), 9, 0, False, [3, 9]),
    ]:
        process.now_s = now_s
        assert process.leases.renew(name, seq, lease_s, copy_id=copy) is needs_more
        assert process.seqs() == held and len(process.leases) == len(held)


def test_of_too_many_leases_the_least_recently_renewed_is_dropped(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    """Leases of copies that died make room for new ones, and renewed leases stay."""
    process.leases.renew("lives", 1, 600.0)
    for copy in range(1023):
        process.leases.renew("crashes", 2, 600.0, copy_id=str(copy))
    process.leases.renew("lives", 1, 600.0)
    with caplog.at_level(logging.WARNING):
        process.leases.renew("new", 3, 600.0)
    assert "too many leases" in caplog.text
    assert len(process.leases) == 1024 and process.seqs()[0] == 1 and process.seqs()[-1] == 3


@pytest.mark.parametrize(
    ("others", "many"),
    [("10.0.0.{0}:5000", "10.0.0.4:{0}"), ("10.0.0.4:{0}", "10.0.0.4:4")],
    ids=["a host with many connections", "a connection"],
)
def test_many_leases_push_out_only_those_of_their_own_holder(process: Process, others: str, many: str) -> None:
    """A host's thousand leases leave those of others; likewise a connection's those of others of its host."""
    for number in (1, 2, 3):
        process.leases.renew("replica", number, 600.0, copy_id=str(number), address=others.format(number))
    for copy in range(1050):
        process.leases.renew("many", 9, 600.0, copy_id=str(copy), address=many.format(copy))
    assert process.seqs()[:4] == [1, 2, 3, 9] and len(process.leases) == 1024


def test_a_bad_lease_is_refused(process: Process) -> None:
    """Empty or long names, those with control characters, and durations out of range change nothing."""
    for name, lease_s, copy_id in (
        ("", 1, ""),
        ("n" * 257, 1, ""),
        ("n", -1, ""),
        ("n", 86_401, ""),
        ("n", 1, "c" * 257),
        ("n\x1b[2J", 1, ""),
        ("n", 1, "c\x9b31m"),
        ("n\u202en", 1, ""),
    ):
        with pytest.raises(RequestError):
            process.leases.renew(name, 1, lease_s, copy_id=copy_id)
    assert len(process.leases) == 0


async def test_long_leases_outlive_a_restart(path: Path, process: Process) -> None:
    """A restart keeps the time left of long leases, however long the shard was down; short ones are not saved."""
    process.leases.renew("short", 3, 600.0)
    await process.saved.restore()
    await process.saved.save()
    await process.saved.save(at_end=True)
    assert os.listdir(path.parent) == []
    process.leases.renew("long", 7, 4000.0, copy_id="a")
    process.leases.renew("long", 9, 5000.0, copy_id="b")
    process.now_s = 500.0
    await process.saved.save()
    second = Process(path, now_s=3.0)
    await second.saved.restore()
    assert second.held() == [("long", "a", 7, 3500.0), ("long", "b", 9, 4500.0)]
    assert os.listdir(path.parent) == ["leases.json"]
    for copy_id in ("a", "b"):  # released ones are not restored again, also if no other is left to write
        second.leases.renew("long", 7, 0.0, copy_id=copy_id)
    await second.saved.save()
    assert _seqs_in(path) == []


class _WatchedLock:
    """A lock that tells when somebody has to wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_waited_for = threading.Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.is_waited_for.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


async def test_a_cancelled_save_is_not_overtaken(path: Path, process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last save of a closing shard waits for the thread of a cancelled one before it."""
    process.leases.renew("a", 1, 4000.0)
    write_file = leases_module.write_file
    is_writing, may_write, lock = threading.Event(), threading.Event(), _WatchedLock()
    num_writes = 0

    def write(*args: Any, **settings: Any) -> None:
        nonlocal num_writes
        num_writes += 1
        is_writing.set()
        assert may_write.wait(60)
        write_file(*args, **settings)

    monkeypatch.setattr(leases_module, "write_file", write)
    monkeypatch.setattr(process.saved, "_writing", lock)
    saving = asyncio.create_task(process.saved.save())
    assert await asyncio.to_thread(is_writing.wait, 60)
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    process.leases.renew("b", 2, 4000.0)
    last = asyncio.create_task(process.saved.save(at_end=True))
    assert await asyncio.to_thread(lock.is_waited_for.wait, 60)
    assert num_writes == 1
    may_write.set()
    await last
    assert _seqs_in(path) == [1, 2]


async def test_a_lease_does_not_grow_by_restarts(path: Path, process: Process) -> None:
    """A lease that nobody renews ends after its time, however often the shard restarts."""
    process.leases.renew("gone", 7, 3600.0)
    left = []
    for _ in range(100):
        for later_s in (59.0, 1.0, 15.0):
            await process.saved.save()
            process.now_s += later_s
        process = Process(path, now_s=process.now_s)
        await process.saved.restore()
        if not process.held():
            break
        left.append(process.held()[0][3])
    assert left == [3600.0 - 60.0 * n for n in range(1, 50)]  # below ten minutes it is not saved


async def test_changes_are_written_at_once(path: Path, process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """New and ended leases are written at once, advanced ones after a minute and at the end."""
    seqs: list[list[int]] = []
    write_file = leases_module.write_file

    def note(*args: Any, **settings: Any) -> None:
        write_file(*args, **settings)
        seqs.append(_seqs_in(path))

    monkeypatch.setattr(leases_module, "write_file", note)
    for now_s, name, seq, lease_s, expected in (
        (0.0, "a", 1, 4000.0, [[1]]),
        (59.0, "a", 2, 4000.0, []),
        (59.0, "b", 3, 4000.0, [[2, 3]]),
        (118.0, "b", 3, 3941.0, []),
        (119.0, "a", 5, 4000.0, [[3, 5]]),
        (119.0, "b", 3, 0.0, [[5]]),
    ):
        process.now_s = now_s
        process.leases.renew(name, seq, lease_s)
        await process.saved.save()
        assert [sorted(each) for each in seqs] == expected
        seqs.clear()
    await process.saved.save(at_end=True)
    process.leases.renew("a", 5, 0.0)
    await process.saved.save()
    assert seqs == [[5], []]


async def test_a_disk_that_refuses_leaves_the_file_before(
    path: Path, process: Process, monkeypatch: pytest.MonkeyPatch, facts: FactLog
) -> None:
    """The failure is logged, the shard continues, and the next call tries again."""
    process.leases.renew("a", 1, 4000.0)
    await process.saved.save()
    process.leases.renew("b", 2, 4000.0)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        await process.saved.save()
    assert _seqs_in(path) == [1]
    ((message, fields),) = facts.facts
    assert message == "leases cannot be saved" and "No space left" in fields["error"]
    await process.saved.save()
    assert _seqs_in(path) == [1, 2]


def _damaged(path: Path, data: bytes) -> Process:
    path.write_bytes(data)
    return Process(path)


async def test_a_damaged_file_keeps_nothing(path: Path, facts: FactLog) -> None:
    """A shard with a damaged file logs it and starts; its followers ask again, or begin anew."""
    lease = {"name": "a", "copy_id": "", "seq": 1, "lease_s": 9}
    file = {"format": "headrace-leases", "format_version": 1, "leases": [lease]}
    wrong = [{"name": 1}, {"seq": "1"}, {"seq": 0}, {"lease_s": math.nan}]
    files = [{"leases": [lease | change]} for change in wrong] + [{"leases": [1]}, {"format_version": 2}]
    for data in [b"", b"\xff", b"[]", b"[" * 100_000, *(json.dumps(file | of).encode() for of in files)]:
        process = _damaged(path, data)
        await process.saved.restore()
        assert process.held() == [], data
        process.leases.renew("a", 1, 4000.0)
        await process.saved.save()
        assert _seqs_in(path) == [1]
    assert [message for message, _ in facts.facts] == ["saved leases cannot be read"] * 10
