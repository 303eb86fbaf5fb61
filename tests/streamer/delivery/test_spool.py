"""Flushes on disk: same bytes, bounded, and gone with their last view."""

from __future__ import annotations

import dataclasses
import os
import resource
from pathlib import Path

import pytest
from trainer_tables import ROWWISE, Submitted, Trained, rows_of

from headrace.schemas.errors import ConfigError
from headrace.streamer.delivery.spool import Spool
from headrace.streamer.flush.layout import Flush


def flush_of(num_rows: int) -> tuple[Flush, Submitted]:
    tables = [Trained("a.weight", 2000, 16, states=[ROWWISE]), Trained("b.weight", 7, 3)]
    submitted = Submitted(tables, num_shards=2)
    tables[0].mark(range(num_rows))
    tables[1].mark([5])
    submitted.flusher.on_step(1)
    return submitted.flushes[0], submitted


def test_stored_flush_has_the_same_rows(tmp_path: Path) -> None:
    """The spool returns the same rows as the staging buffer, even after that is overwritten."""
    spool = Spool(tmp_path, max_bytes=2**20)
    flush, _ = flush_of(500)
    before = rows_of(flush, 2)
    tables = spool.store(flush)
    assert tables is not None
    assert flush.staging is not None
    stored = dataclasses.replace(flush, tables=tables, staging=None)
    flush.staging.used()[:] = bytes(flush.staging.used_bytes)
    assert rows_of(stored, 2) == before
    assert list(tmp_path.iterdir()) == []


def test_spool_is_bounded(tmp_path: Path) -> None:
    """A flush that does not fit is refused until there is room."""
    flush, _ = flush_of(500)
    spool = Spool(tmp_path, max_bytes=flush.size_bytes * 2)
    assert spool.store(flush) is not None
    assert spool.store(flush) is None
    spool.remove(flush)
    assert spool.used_bytes == 0
    assert spool.store(flush) is not None


def test_number_of_flushes_is_bounded(tmp_path: Path) -> None:
    """The number of flushes is bounded, because each takes memory and a mapping."""
    flush, _ = flush_of(0)
    spool = Spool(tmp_path, max_bytes=2**40)
    stored = [spool.store(flush) for _ in range(1030)]
    assert sum(tables is not None for tables in stored) == 1024


def test_the_trainers_files_are_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushes on disk take at most a quarter of the process's file descriptors."""
    flush, _ = flush_of(0)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 4096))
    spool = Spool(tmp_path, max_bytes=2**40)
    num_before = len(os.listdir("/proc/self/fd"))
    stored = [spool.store(flush) for _ in range(40)]
    assert sum(tables is not None for tables in stored) == 16
    assert len(os.listdir("/proc/self/fd")) - num_before <= 16


def test_failed_write_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is an error that leaves the flush unchanged."""
    flush, _ = flush_of(500)
    spool = Spool(tmp_path, max_bytes=2**20)
    before = rows_of(flush, 2)

    def fail(descriptor: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        with pytest.raises(OSError, match="No space left"):
            spool.store(flush)
    assert spool.used_bytes == 0
    assert rows_of(flush, 2) == before


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that takes only a part is followed by the rest."""
    flush, _ = flush_of(500)
    spool = Spool(tmp_path, max_bytes=2**20)
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:999]))
        tables = spool.store(flush)
    assert tables is not None
    assert rows_of(dataclasses.replace(flush, tables=tables), 2) == rows_of(flush, 2)


def test_directory_must_be_there(tmp_path: Path) -> None:
    """A directory that cannot be written is refused at the start, by name."""
    with pytest.raises(ConfigError, match=r"spool_dir .*missing: No such file or directory"):
        Spool(tmp_path / "missing", max_bytes=2**20)
