"""RocksDB as the store uses it: reads, writes, stalls and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import rocksdict

from headrace.paramserver.store.rocksdb import RocksDb, StoreConfig, rocks_options
from headrace.schemas.errors import (
    ConfigError,
    CorruptionError,
    HeadraceError,
    StorageError,
    UnavailableError,
    UnknownTableError,
)

OPTIONS = rocks_options(StoreConfig(block_cache_bytes=1 << 20))


class Busy:
    """A RocksDB that stalls some writes, then takes them."""

    def __init__(self, num_refusals: int) -> None:
        self.num_refusals = num_refusals
        self.written: list[int] = []

    def write(self, batch: Any, options: Any) -> None:
        assert options.no_slowdown and options.disable_wal
        if self.num_refusals:
            self.num_refusals -= 1
            raise Exception("Result incomplete: Write stall")
        self.written.append(len(batch))


def test_a_write_is_made_when_rocksdb_keeps_up(tmp_path: Path) -> None:
    """A stalled write is repeated until it is taken, whole and once."""
    busy = Busy(3)
    assert RocksDb(tmp_path, busy).write([b"a", b"b"], [b"1", b"2"]) > 4
    assert (busy.written, busy.num_refusals) == ([2], 0)


def test_a_file_is_taken_in_once_what_is_older_is_in_files(tmp_path: Path) -> None:
    """A file whose keys are in RocksDB's memtable is refused until a flush; then its values count."""
    db = RocksDb.open(tmp_path / "db", OPTIONS)
    db.write([b"k"], [b"old"])
    writer = rocksdict.SstFileWriter(options=rocks_options(StoreConfig(block_cache_bytes=1 << 20)))
    writer.open(str(tmp_path / "rows"))
    writer[b"k"] = b"new"
    writer.finish()
    assert not db.ingest(tmp_path / "rows")
    db.flush()
    assert db.ingest(tmp_path / "rows")
    assert db.get([b"k"]) == [b"new"]
    db.close()


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("Corruption: block checksum mismatch", CorruptionError, "is damaged: Corruption: block"),
        ("IO error: lock hold by current process", ConfigError, "in use by another process"),
        ("IO error: While lock file: /db/LOCK: Resource", ConfigError, "in use by another process"),
        ("IO error: Permission denied", ConfigError, "cannot be used"),
        ("IO error: No space left on\ndevice", StorageError, "No space left on device"),
    ],
)
def test_errors_become_ours(tmp_path: Path, text: str, kind: type[HeadraceError], words: str) -> None:
    """RocksDB's errors become one line of the right class, with the directory; ours pass unchanged."""
    fails = mock.Mock(side_effect=[Exception(text), UnknownTableError("ours")])
    with pytest.raises(kind, match=words) as caught:
        RocksDb(tmp_path, None).map_errors(fails)
    assert type(caught.value) is kind
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UnknownTableError, match="ours"):
        RocksDb(tmp_path, None).map_errors(fails)


def test_after_close_every_call_says_so(tmp_path: Path) -> None:
    """Closing keeps the pairs and says whether it did anything; afterwards every call fails."""
    db = RocksDb.open(tmp_path / "db", OPTIONS)
    db.write([b"k"], [b"v"])
    assert db.close()
    assert not db.close()
    for call in (
        lambda: db.get([b"k"]),
        lambda: db.write([b"k"], [b"v"]),
        lambda: db.ingest(tmp_path / "rows"),
        lambda: list(db.scan(b"")),
        lambda: db.checkpoint(tmp_path / "copy"),
        lambda: db.property_value("rocksdb.stats"),
        db.flush,
        db.live_files,
    ):
        with pytest.raises(UnavailableError) as closed:
            call()
        assert str(tmp_path) not in str(closed.value)  # clients see it
    again = RocksDb.open(tmp_path / "db", OPTIONS, is_read_only=True)
    assert again.get([b"k"]) == [b"v"]
    again.close()


def test_reading_only_changes_nothing(tmp_path: Path) -> None:
    """Two may read at once, no file is written, and a directory without a RocksDB is not made into one."""
    db = RocksDb.open(tmp_path / "db", OPTIONS)
    db.write([b"k"], [b"v"])
    db.close()

    def files() -> dict[str, tuple[int, bytes]]:
        return {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in (tmp_path / "db").iterdir()}

    before = files()
    readers = [RocksDb.open(tmp_path / "db", OPTIONS, is_read_only=True) for _ in range(2)]
    assert [reader.get([b"k"]) for reader in readers] == [[b"v"], [b"v"]]
    with pytest.raises(StorageError):
        readers[0].write([b"k"], [b"w"])
    for reader in readers:
        reader.close()
    assert files() == before
    with pytest.raises((StorageError, CorruptionError)):
        RocksDb.open(tmp_path / "nothing", OPTIONS, is_read_only=True)


@pytest.mark.parametrize(
    ("name", "value"), [("block_cache_bytes", 0), ("write_buffer_bytes", -1), ("max_background_jobs", 0)]
)
def test_bad_settings_are_refused(name: str, value: object) -> None:
    """A setting out of range is named."""
    with pytest.raises(ConfigError, match=name):
        StoreConfig(**{name: value})  # type: ignore[arg-type]
