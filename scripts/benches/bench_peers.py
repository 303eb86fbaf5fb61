"""What Headrace's ingest is measured against: the disk alone, RocksDB alone, and Redis. Each is handed ready bytes.

Nothing that is not the peer's own work is in its time: ids, keys and values are made before the clock starts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import rocksdict

from headrace.paramserver.files.direct_file import supports_direct_io
from headrace.paramserver.store.store_config import StoreConfig, rocks_options
from headrace.schemas.errors import UnavailableError
from headrace.schemas.row_keys import encode_keys
from headrace.scripts.benches.bench_rows import BenchRows

__all__ = [
    "GRPC_HINT",
    "REDIS_HINT",
    "has_grpc",
    "has_redis",
    "redis_server",
    "time_fsync",
    "time_redis",
    "time_rocksdb",
]

REDIS_HINT = "Redis is left out: apt-get install redis-server, and pip install 'redis[hiredis]'"
GRPC_HINT = "gRPC is left out: pip install 'headrace[bench]'"

_GROUP_BYTES = 16 << 20
_KEYS_PER_MSET = 256
_MSETS_PER_PIPELINE = 16
_START_TIMEOUT_S = 20.0
_POLL_S = 0.02


def time_fsync(rows: BenchRows, folder: Path, *, num_batches: int) -> float:
    """Return the seconds that it takes to get the messages of batches onto the disk, with no server at all.

    They are written as the update log would at its best: `writev` and `fdatasync` of 16 MiB at a time.
    """
    messages = [rows.message(number) for number in range(num_batches)]
    groups: list[list[bytes]] = [[]]
    for message in messages:
        if groups[-1] and sum(map(len, groups[-1])) + len(message) > _GROUP_BYTES:
            groups.append([])
        groups[-1].append(message)
    fd = os.open(folder / "synced", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        begin_s = time.perf_counter()
        for group in groups:
            written = os.writev(fd, group)
            assert written == sum(map(len, group))
            os.fdatasync(fd)
        return time.perf_counter() - begin_s
    finally:
        os.close(fd)


def time_rocksdb(rows: BenchRows, folder: Path, config: StoreConfig) -> float:
    """Return the seconds that a plain loop takes to write all rows, a batch sorted by key after the other, without WAL.

    RocksDB has the options of a shard's store; what is in its memtables at the end counts as written.
    """
    (spec,) = rows.specs
    batches = [(encode_keys(1, spec.whole, ids), rows.records(number)) for number, ids in enumerate(rows.ids)]
    options = cast(Any, rocksdict.WriteOptions())
    options.disable_wal = True
    db = rocksdict.Rdict(str(folder / "rocksdb"), rocks_options(config, is_direct=supports_direct_io(folder)))
    try:
        begin_s = time.perf_counter()
        for keys, values in batches:
            batch = rocksdict.WriteBatch(raw_mode=True)
            for key, value in zip(keys, values, strict=True):
                batch[key] = value
            db.write(batch, options)
        return time.perf_counter() - begin_s
    finally:
        db.close()


def has_redis() -> bool:
    """Say whether server and client of Redis are installed."""
    return shutil.which("redis-server") is not None and importlib.util.find_spec("redis") is not None


def has_grpc() -> bool:
    """Say whether gRPC is installed."""
    return importlib.util.find_spec("grpc") is not None


def time_redis(rows: BenchRows, folder: Path, *, num_batches: int) -> tuple[int, float]:
    """Return (rows, seconds) of pipelined MSETs of the first batches' rows to a Redis with an append-only file.

    A row is one string of its weights and state. The file is synced every second, so an answer promises less than an
    ack of Headrace does.
    """
    import redis

    pairs = [
        dict(zip((b"bench:%d" % row for row in rows.ids[number].tolist()), rows.plain_values(number), strict=True))
        for number in range(num_batches)
    ]
    msets: list[dict[bytes, bytes]] = []
    for batch in pairs:
        items = list(batch.items())
        msets.extend(dict(items[first : first + _KEYS_PER_MSET]) for first in range(0, len(items), _KEYS_PER_MSET))
    with redis_server(folder) as port, redis.Redis("127.0.0.1", port) as client:
        begin_s = time.perf_counter()
        for first in range(0, len(msets), _MSETS_PER_PIPELINE):
            pipeline = client.pipeline(transaction=False)
            for mset in msets[first : first + _MSETS_PER_PIPELINE]:
                pipeline.mset(mset)
            pipeline.execute()
        seconds = time.perf_counter() - begin_s
        return sum(map(len, msets)), seconds


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    """Run a Redis in a folder; yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
    settings = {
        "port": port,
        "bind": "127.0.0.1",
        "dir": folder,
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "daemonize": "no",
    }
    command = ["redis-server", *(word for name, value in settings.items() for word in (f"--{name}", str(value)))]
    with open(folder / "redis.log", "wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not _is_listening(port):
            if process.poll() is not None or time.monotonic() > deadline_s:
                last = (folder / "redis.log").read_text("utf-8", "replace").strip().rpartition("\n")[2]
                raise UnavailableError(f"redis-server did not start: {last}")
            time.sleep(_POLL_S)
        yield port
    finally:
        process.kill()
        process.wait()


def _is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=_START_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return False
    return True
