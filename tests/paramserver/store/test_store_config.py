"""Settings of a store: bounds, defaults, and what RocksDB makes of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from row_batches import SPEC

from headrace.paramserver.store.row_store import RowStore
from headrace.paramserver.store.store_config import StoreConfig
from headrace.schemas.errors import ConfigError
from headrace.schemas.row_keys import encode_keys


@pytest.mark.parametrize(
    ("name", "value"),
    [("block_cache_bytes", 0), ("write_buffer_bytes", -1), ("compression", "zip"), ("max_background_jobs", 0)],
)
def test_bad_settings_are_refused(name: str, value: object) -> None:
    """A setting out of range is named."""
    with pytest.raises(ConfigError, match=name):
        StoreConfig(**{name: value})  # type: ignore[arg-type]


def test_lz4_shrinks_files(tmp_path: Path) -> None:
    """Compression is an option."""
    sizes = {}
    for compression in ("none", "lz4"):
        store = RowStore.open(
            tmp_path / compression, config=StoreConfig(block_cache_bytes=8 << 20, compression=compression)
        )
        store.write(encode_keys(1, SPEC.whole, np.arange(1000)), [bytes(500)] * 1000)
        store.close()
        sizes[compression] = sum(file.stat().st_size for file in (tmp_path / compression).glob("*.sst"))
    assert sizes["lz4"] < sizes["none"] / 4
