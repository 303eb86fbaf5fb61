"""Checksums of blocks, checked as the file goes by in pieces of any length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import rocksdict
from open_files import files_open_in
from row_batches import make_batch

from headrace.paramserver.store.block_check import BlockCheck
from headrace.paramserver.store.pending import Part, coalesce
from headrace.paramserver.store.row_store import RowStore
from headrace.paramserver.store.store_config import StoreConfig, rocks_options
from headrace.schemas.errors import CorruptionError
from headrace.schemas.row_keys import encode_keys
from headrace.schemas.tables import ColumnShard

SHARD = ColumnShard(offset=0, width=4)


def _flushed(path: Path) -> Path:
    """Make a file as RocksDB does, with metadata of a long name beside the rows."""
    db = rocksdict.Rdict(str(path), rocks_options(StoreConfig(block_cache_bytes=4 << 20)))
    for key in encode_keys(2, SHARD, np.arange(0, 900, 3)):
        db[key] = bytes(40)
    db[b"\0\0\0\0session/" + b"x" * 200] = b"1" * 20_000
    db.flush()
    (file,) = db.live_files()
    db.close()
    return path / str(file["name"]).lstrip("/")


def _ingested(path: Path) -> Path:
    """Make a file as a store writes it by itself."""
    store = RowStore.open(path, config=StoreConfig(block_cache_bytes=4 << 20, file_bytes=0))
    batch = make_batch(1, range(300))
    run = coalesce(2, [Part.of_delta(batch.deltas[0], batch)]).copied()
    store.write_runs([run], meta={}, applied_seq=1)
    store.close()
    return max(path.glob("*.sst"), key=lambda file: file.stat().st_size)


def _check(path: Path, data: bytes, piece_bytes: int) -> None:
    check = BlockCheck.open(path)
    assert check is not None
    for at in range(0, len(data), piece_bytes):
        check.take(memoryview(data)[at : at + piece_bytes])
    check.finish()


@pytest.mark.parametrize("make", [_flushed, _ingested])
@pytest.mark.parametrize("piece_bytes", [1, 4, 1000, 4096, 1 << 22])
def test_every_block_is_checked(make: object, piece_bytes: int, tmp_path: Path) -> None:
    """A sound file passes, whatever its pieces; a flipped bit of any block, filter and index included, does not."""
    assert callable(make)
    path = make(tmp_path / "store")
    whole = path.read_bytes()
    _check(path, whole, piece_bytes)
    end = len(whole) - 53  # behind the blocks is the footer
    # The last ones, of metadata, are short.
    for at in [*range(0, end, 491), *range(end - 1500, end, 7)] if piece_bytes > 4 else range(0, end, 4999):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(CorruptionError, match=rf"{path.name}: the block at byte \d+ does not match its checksum"):
            _check(path, bytes(damaged), piece_bytes)
    with pytest.raises(CorruptionError, match=r"ends at byte .* before its last block"):
        _check(path, whole[: len(whole) // 2], piece_bytes)


def test_a_file_is_open_only_while_its_index_is_read(tmp_path: Path) -> None:
    """A snapshot of thousands of files takes no descriptor for each, whatever becomes of it."""
    path = _flushed(tmp_path / "store")
    check = BlockCheck.open(path)
    assert check is not None and not files_open_in(tmp_path)


def test_tables_of_another_kind_are_refused(tmp_path: Path) -> None:
    """What says of which kind a table is has no checksum: were others passed over, damage there would hide the rest."""
    db = rocksdict.Rdict(str(tmp_path / "db"), rocksdict.Options(raw_mode=True))
    db[b"x" * 16] = b"y"
    db.flush()
    (file,) = db.live_files()
    db.close()
    with pytest.raises(CorruptionError, match="not a table of the kind that this version writes"):
        BlockCheck.open(tmp_path / "db" / str(file["name"]).lstrip("/"))


@pytest.mark.parametrize("size_bytes", [1, 2, 8])
def test_a_damaged_footer_is_told(size_bytes: int, tmp_path: Path) -> None:
    """What it names is not read where the file has no such bytes; what says the kind of table may not change."""
    path = _flushed(tmp_path / "store")
    whole = path.read_bytes()
    kind = [len(whole) - 53, *range(len(whole) - 12, len(whole))]  # of checksum; version and magic number
    num_told = 0
    for at in range(len(whole) - 53, len(whole) - size_bytes + 1):
        for fill in (b"\xff", b"\x7f", b"\0"):
            damaged = whole[:at] + fill * size_bytes + whole[at + size_bytes :]
            path.write_bytes(damaged)
            try:
                BlockCheck.open(path)
            except CorruptionError as exc:
                assert path.name in str(exc)
                num_told += 1
            else:
                assert [damaged[byte] for byte in kind] == [whole[byte] for byte in kind]
    assert num_told > 3 * len(kind)
