import struct
from pathlib import Path

import numpy as np
import pytest
import rocksdict

from headrace.paramserver.store.row_filter import build_filter, hash_keys
from headrace.paramserver.store.store_config import StoreConfig, rocks_options

PREFIX = bytes.fromhex("0000000100000080")


def _rocksdb_file(path: Path, row_ids: np.ndarray, bits_per_key: int) -> bytes:
    """Return the file that RocksDB makes of these rows."""
    writer = rocksdict.SstFileWriter(rocks_options(StoreConfig(bloom_bits_per_key=bits_per_key)))
    writer.open(str(path))
    for row in row_ids.tolist():
        writer[PREFIX + struct.pack(">Q", row)] = b"v"
    writer.finish()
    return path.read_bytes()


@pytest.mark.parametrize("bits_per_key", [1, 5, 10, 17, 30])
@pytest.mark.parametrize("num_rows", [1, 2, 100, 3001])
def test_the_bytes_are_those_that_rocksdb_makes(tmp_path, num_rows, bits_per_key):
    """RocksDB's own file of the same keys holds the very filter."""
    row_ids = np.unique(np.random.default_rng(num_rows).integers(0, 2**63 - 1, num_rows))
    ours = build_filter(hash_keys(PREFIX, row_ids), bits_per_key=bits_per_key)
    assert ours in _rocksdb_file(tmp_path / "file", row_ids, bits_per_key)


def test_golden_hashes():
    """The hashes of three keys, as RocksDB's filters have them."""
    hashes = hash_keys(PREFIX, np.array([0, 1, 2**63 - 1]))
    assert [f"{value:016x}" for value in hashes.tolist()] == [
        "41ab9622182bc1f4",
        "f84228cd76bdc0c1",
        "efb0cfe62bef56d7",
    ]
