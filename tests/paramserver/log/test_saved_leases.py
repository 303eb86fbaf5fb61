"""Long leases over a restart: which are saved, when, and what a file that is damaged or cannot be written costs."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fact_log import FactLog, collect_facts

from headrace.paramserver.log import saved_leases
from headrace.paramserver.log.log_leases import LogLeases
from headrace.paramserver.log.saved_leases import SavedLeases


@pytest.fixture
def facts() -> Iterator[FactLog]:
    yield from collect_facts("headrace.paramserver.log.saved_leases")


def _file(lease: str) -> bytes:
    return f'{{"format": "headrace-leases", "format_version": 1, "leases": [{lease}]}}'.encode()


class Process:
    """One run of a shard, with a clock of its own."""

    def __init__(self, path: Path, *, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self.leases = LogLeases(clock=lambda: self.now_s)
        self.saved = SavedLeases(path, self.leases, min_lease_s=600.0, clock=lambda: self.now_s)

    def held(self) -> list[tuple[str, str, int, float]]:
        """Return (name, copy, seq, seconds left) of the leases."""
        held = [(lease.name, lease.copy_id, lease.seq, lease.expires_s - self.now_s) for lease in self.leases.held()]
        return sorted(held)


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


async def test_long_leases_outlive_a_restart(tmp_path: Path) -> None:
    """What is left of each is left when the shard is back, however long that took; short ones are not written."""
    path = tmp_path / "leases.json"
    first = Process(path, now_s=1000.0)
    first.leases.renew("long", 7, 4000.0, copy_id="a")
    first.leases.renew("long", 9, 5000.0, copy_id="b")
    first.leases.renew("short", 3, 600.0)
    first.now_s = 1500.0
    await first.saved.save()
    second = Process(path, now_s=3.0)
    await second.saved.restore()
    assert second.held() == [("long", "a", 7, 3500.0), ("long", "b", 9, 4500.0)]
    assert os.listdir(tmp_path) == ["leases.json"]


async def test_a_lease_that_ended_after_a_restart_is_not_restored_again(tmp_path: Path) -> None:
    """What a shard has read from its file is in it until it is written again, also when there is nothing to write."""
    path = tmp_path / "leases.json"
    first = Process(path)
    first.leases.renew("a", 7, 4000.0)
    await first.saved.save()
    second = Process(path)
    await second.saved.restore()
    second.leases.renew("a", 7, 0.0)
    await second.saved.save()
    assert json.loads(path.read_text())["leases"] == []


async def test_the_file_and_its_name_are_on_disk_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure leaves the file of before or the new one, and the new one once `save` has returned."""
    path = tmp_path / "leases.json"
    process = Process(path)
    process.leases.renew("a", 1, 4000.0)
    synced: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        saved_leases, "fsync_path", lambda synced_path: synced.append((synced_path.name, path.exists()))
    )
    await process.saved.save()
    assert synced == [("leases.new", False), (tmp_path.name, True)]


async def test_a_save_that_was_given_up_is_not_written_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last save of a shard that closes waits for the one before, which goes on in its thread when cancelled."""
    path = tmp_path / "leases.json"
    process = Process(path)
    process.leases.renew("a", 1, 4000.0)
    write_text, fsync_path = Path.write_text, saved_leases.fsync_path
    is_syncing, may_sync, lock = threading.Event(), threading.Event(), _WatchedLock()
    written: list[str] = []

    def write(target: Path, text: str) -> int:
        written.append(text)
        return write_text(target, text)

    def sync(target: Path) -> None:
        is_syncing.set()
        assert may_sync.wait(60)
        fsync_path(target)

    monkeypatch.setattr(Path, "write_text", write)
    monkeypatch.setattr(saved_leases, "fsync_path", sync)
    monkeypatch.setattr(process.saved, "_writing", lock)
    saving = asyncio.create_task(process.saved.save())
    assert await asyncio.to_thread(is_syncing.wait, 60)
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    process.leases.renew("b", 2, 4000.0)
    last = asyncio.create_task(process.saved.save(at_end=True))
    assert await asyncio.to_thread(lock.is_waited_for.wait, 60)
    assert len(written) == 1
    may_sync.set()
    await last
    assert len(json.loads(path.read_text())["leases"]) == 2


async def test_without_long_leases_nothing_is_written(tmp_path: Path) -> None:
    """The usual server has no such file."""
    process = Process(tmp_path / "leases.json")
    process.leases.renew("short", 3, 600.0)
    await process.saved.restore()
    await process.saved.save()
    await process.saved.save(at_end=True)
    assert os.listdir(tmp_path) == []


async def test_a_lease_does_not_grow_by_restarts(tmp_path: Path) -> None:
    """One that nobody renews ends after its time, however often the shard starts: what is left is written."""
    path = tmp_path / "leases.json"
    process = Process(path)
    process.leases.renew("gone", 7, 3600.0)
    left = []
    for _ in range(100):
        await process.saved.save()
        process.now_s += 59.0
        await process.saved.save()
        process.now_s += 1.0
        await process.saved.save()
        process.now_s += 15.0
        process = Process(path, now_s=process.now_s)
        await process.saved.restore()
        if not process.held():
            break
        left.append(process.held()[0][3])
    assert left == [3600.0 - 60.0 * n for n in range(1, 50)]  # below ten minutes the time after a start is for it


async def test_who_comes_or_goes_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that goes on is written again after a minute, and at the end."""
    path = tmp_path / "leases.json"
    process = Process(path)
    seqs: list[list[int]] = []
    write = SavedLeases._write

    def note(self: SavedLeases, saved: Any) -> None:
        seqs.append([lease["seq"] for lease in saved])
        write(self, saved)

    monkeypatch.setattr(SavedLeases, "_write", note)
    process.leases.renew("a", 1, 4000.0)
    await process.saved.save()
    process.leases.renew("a", 2, 4000.0)
    process.now_s = 59.0
    await process.saved.save()
    assert seqs == [[1]]
    process.leases.renew("b", 3, 4000.0)
    await process.saved.save()
    process.now_s = 118.0
    await process.saved.save()
    assert seqs == [[1], [2, 3]]
    process.now_s = 119.0
    process.leases.renew("a", 5, 4000.0)
    await process.saved.save()
    process.leases.renew("b", 3, 0.0)
    await process.saved.save()
    await process.saved.save(at_end=True)
    assert seqs == [[1], [2, 3], [3, 5], [5], [5]]
    process.leases.renew("a", 5, 0.0)
    await process.saved.save()
    assert seqs[5:] == [[]] and json.loads(path.read_text())["leases"] == []


@pytest.mark.parametrize("step", ["write_text", "fsync_path", "replace"])
async def test_a_disk_that_refuses_leaves_the_file_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: FactLog, step: str
) -> None:
    """It is told, the shard goes on, and the next call tries again."""
    path = tmp_path / "leases.json"
    process = Process(path)
    process.leases.renew("a", 1, 4000.0)
    await process.saved.save()
    before = path.read_bytes()
    process.leases.renew("b", 2, 4000.0)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        owner: Any = {"write_text": Path, "fsync_path": saved_leases, "replace": os}[step]
        patched.setattr(owner, step, fail)
        await process.saved.save()
    assert path.read_bytes() == before
    ((message, fields),) = facts.facts
    assert message == "leases cannot be saved" and "No space left" in fields["error"]
    await process.saved.save()
    assert len(json.loads(path.read_text())["leases"]) == 2


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"[" * 100_000,
        b'{"format": "headrace-leases", "format_version": 2, "leases": []}',
        b'{"format": "headrace-leases", "format_version": 1, "leases": [1]}',
        _file('{"name": 1, "copy_id": "", "seq": 1, "lease_s": 9}'),
        _file('{"name": "a", "copy_id": "", "seq": "1", "lease_s": 9}'),
        _file('{"name": "a", "copy_id": "", "seq": 0, "lease_s": 9}'),
        _file('{"name": "a", "copy_id": "", "seq": 1, "lease_s": NaN}'),
    ],
)
async def test_a_damaged_file_is_told_and_keeps_nothing(tmp_path: Path, facts: FactLog, data: bytes) -> None:
    """A shard starts all the same: its followers ask again, or begin anew."""
    path = tmp_path / "leases.json"
    path.write_bytes(data)
    process = Process(path)
    await process.saved.restore()
    assert process.held() == [] and [message for message, _ in facts.facts] == ["saved leases cannot be read"]
    process.leases.renew("a", 1, 4000.0)
    await process.saved.save()
    assert len(json.loads(path.read_text())["leases"]) == 1
