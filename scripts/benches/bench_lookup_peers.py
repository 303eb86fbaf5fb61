"""What the lookup bench measures beside the replica: Redis, and a table on disk against RocksDB alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import rocksdict

from headrace.paramserver.files.direct_file import supports_direct_io
from headrace.paramserver.replica.disk_stores import DiskStores, disk_store_config
from headrace.paramserver.replica.disk_table import DiskTable
from headrace.paramserver.store.store_config import rocks_options
from headrace.schemas.errors import UnavailableError
from headrace.schemas.row_keys import encode_keys
from headrace.scripts.benches.bench_lookup_writer import BATCH_ROWS, TableConfig, ZipfIds
from headrace.scripts.benches.bench_peers import redis_server

__all__ = ["RedisRows", "measure_disk", "redis_rows"]

_Ids = npt.NDArray[np.int64]
_LOAD_ROWS = 16_384
_PIPELINED_BATCHES = 4
_CACHED_PERCENT = 10
_COMPACTED_S, _POLL_S = 120.0, 0.05


class RedisRows:
    """A Redis with rows as strings of their bytes."""

    def __init__(self, port: int, table: TableConfig) -> None:
        """Write all rows of a table into it."""
        import redis

        self._client = redis.Redis("127.0.0.1", port)
        self._num_rows = table.num_rows
        values = np.random.default_rng(3).bytes(_LOAD_ROWS * table.dim * 4)
        width = 4 * table.dim
        for first in range(0, table.num_rows, _LOAD_ROWS):
            last = min(first + _LOAD_ROWS, table.num_rows)
            rows = range(last - first)
            self._client.mset({b"%d" % (first + row): values[row * width : (row + 1) * width] for row in rows})

    def time_mget(self, batches: list[_Ids]) -> float:
        """Return the seconds of pipelined MGETs, one a batch; ids beyond the rows that Redis has are wrapped around.

        Keys are made before the clock starts, and the values stay a list of bytes: the least that a client gets.
        """
        keys = [[b"%d" % row for row in (ids % self._num_rows).tolist()] for ids in batches]
        begin_s = time.perf_counter()
        for first in range(0, len(keys), _PIPELINED_BATCHES):
            pipeline = self._client.pipeline(transaction=False)
            for batch in keys[first : first + _PIPELINED_BATCHES]:
                pipeline.mget(batch)
            pipeline.execute()
        return time.perf_counter() - begin_s

    def close(self) -> None:
        """Drop the connection."""
        self._client.close()


@contextmanager
def redis_rows(folder: Path, table: TableConfig) -> Iterator[RedisRows]:
    """Run a Redis that has a table's rows."""
    with redis_server(folder) as port:
        rows = RedisRows(port, table)
        try:
            yield rows
        finally:
            rows.close()


def measure_disk(folder: Path, table: TableConfig, *, num_batches: int) -> dict[str, float]:
    """Return rows a second: `miss`, of a table on disk where its hot rows, warm and a tenth of it, do not have them.

    Beside it `rocksdb`, of sorted multi-gets of the same rows from a RocksDB with the same options and memory. The two
    take turns, once both have compacted what they were filled with.

    Args:
        folder: Where both go.
        table: Its rows are made here, all of them.
        num_batches: Of 4096 look-ups by Zipf, for the warming and again for the measurement.
    """
    spec, width = table.spec, 4 * table.dim
    hot_bytes = table.num_rows * width * _CACHED_PERCENT // 100
    stores = DiskStores.create(folder / "table", memory_bytes=hot_bytes, num_threads=1)
    disk = DiskTable(spec, stores, hot_bytes=hot_bytes)
    options = rocks_options(disk_store_config(hot_bytes), is_direct=supports_direct_io(folder))
    plain = rocksdict.Rdict(str(folder / "plain"), options)
    try:
        _fill(disk, plain, table)
        (store,) = stores.stores
        store.flush()
        _wait_compacted(store.rocksdb_property)
        _wait_compacted(plain.property_value)
        draw, is_seen = ZipfIds(table.num_rows, seed=4), np.zeros(table.num_rows, np.bool_)
        spent = {"miss": 0.0, "rocksdb": 0.0}
        num_rows = 0
        for number in range(2 * num_batches):
            looked_up = draw.draw(BATCH_ROWS)
            # What was never looked up is not hot, and nobody can have it there before the one who is timed.
            ids = np.unique(looked_up[~is_seen[looked_up]])
            is_seen[looked_up] = True
            is_warm = number >= num_batches
            sides = ("miss", "rocksdb") if number % 2 else ("rocksdb", "miss")
            for side in sides:
                took_s = _time_miss(disk, ids) if side == "miss" else _time_rocksdb(plain, table, ids)
                spent[side] += took_s * is_warm
            num_rows += ids.size * is_warm
            disk.gather(looked_up)
        return {side: num_rows / seconds for side, seconds in spent.items()}
    finally:
        plain.close()
        disk.close()


def _time_miss(disk: DiskTable, ids: _Ids) -> float:
    before = disk.stats.misses
    begin_s = time.perf_counter()
    disk.gather(ids)
    took_s = time.perf_counter() - begin_s
    assert disk.stats.misses - before == ids.size, "none of them was hot"
    return took_s


def _time_rocksdb(plain: Any, table: TableConfig, ids: _Ids) -> float:
    begin_s = time.perf_counter()
    rows = plain[encode_keys(1, table.spec.whole, ids)]
    np.frombuffer(b"".join(rows), np.float32).reshape(ids.size, table.dim)
    return time.perf_counter() - begin_s


def _wait_compacted(property_of: Callable[[str], str | None]) -> None:
    """Return when a RocksDB has nothing to do in the background."""
    deadline_s = time.monotonic() + _COMPACTED_S
    while any(property_of(f"rocksdb.{name}") != "0" for name in ("num-running-compactions", "compaction-pending")):
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"RocksDB still compacts, {_COMPACTED_S:.0f} s after it was filled")
        time.sleep(_POLL_S)


def _fill(disk: DiskTable, plain: Any, table: TableConfig) -> None:
    rng, spec = np.random.default_rng(5), table.spec
    options: Any = rocksdict.WriteOptions()
    options.disable_wal = True
    for first in range(0, table.num_rows, _LOAD_ROWS):
        ids = np.arange(first, min(first + _LOAD_ROWS, table.num_rows), dtype=np.int64)
        weights = rng.standard_normal((ids.size, table.dim), np.float32)
        ones = np.ones(ids.size, np.int64)
        disk.load(ids, weights, ones.astype(np.uint8), ones, ones, spec.whole)
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, row in zip(encode_keys(1, spec.whole, ids), weights, strict=True):
            batch[key] = row.tobytes()
        plain.write(batch, options)
    plain.flush()
