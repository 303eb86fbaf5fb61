"""The peers of ingest: the disk alone, RocksDB alone, and Redis.

The clock counts only the peer's own work: ids, keys and values are made before it starts.
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

from headrace.paramserver.store.rocksdb import StoreConfig, rocks_options
from headrace.paramserver.system.direct_file import supports_direct_io
from headrace.schemas.errors import UnavailableError
from headrace.schemas.extras import install_command
from headrace.schemas.row_records import encode_keys
from headrace.scripts.benches.workload import BenchRows

__all__ = ["GRPC_HINT", "REDIS_HINT", "has_grpc", "has_redis", "missing_peers", "redis_server"]
__all__ += ["fsync_rate", "redis_rate", "rocksdb_rate"]

REDIS_HINT = "Redis is left out: apt-get install redis-server, and pip install 'redis[hiredis]'"
GRPC_HINT = f"gRPC is left out: {install_command('bench')}"

_GROUP_BYTES = 16 << 20
_KEYS_PER_MSET = 256
_MSETS_PER_PIPELINE = 16
_START_TIMEOUT_S = 20.0
_POLL_S = 0.02


def fsync_rate(rows: BenchRows, folder: Path, *, num_batches: int) -> float:
    """Return the rows a second of the messages of the first batches on their way to disk without a server.

    `writev` and `fdatasync` of 16 MiB at a time: the best that an update log could do.
    """
    groups: list[list[bytes]] = [[]]
    for message in map(rows.message, range(num_batches)):
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
        seconds = time.perf_counter() - begin_s
        return sum(ids.size for ids in rows.ids[:num_batches]) / seconds
    finally:
        os.close(fd)


def rocksdb_rate(rows: BenchRows, folder: Path, config: StoreConfig) -> float:
    """Return the rows a second of a plain loop that writes all rows, sorted batch by sorted batch, without WAL.

    RocksDB has the options of a shard's store; rows that are still in its memtables at the end count as written.
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
        return rows.num_rows / (time.perf_counter() - begin_s)
    finally:
        db.close()


def has_redis() -> bool:
    """Return whether server and client of Redis are installed."""
    return shutil.which("redis-server") is not None and importlib.util.find_spec("redis") is not None


def has_grpc() -> bool:
    """Return whether gRPC is installed."""
    return importlib.util.find_spec("grpc") is not None


def missing_peers() -> list[str]:
    """Return a line for each peer that is not installed, with what to do about it."""
    return [hint for hint, is_there in ((REDIS_HINT, has_redis()), (GRPC_HINT, has_grpc())) if not is_there]


def redis_rate(rows: BenchRows, folder: Path, *, num_batches: int) -> float:
    """Return the rows a second of pipelined MSETs of the first batches' rows to a Redis with an append-only file.

    A row is one string of its weights and state. The file is synced every second, so a reply promises less than an ack
    of Headrace.
    """
    import redis

    msets: list[dict[bytes, bytes]] = []
    for number in range(num_batches):
        keys = [b"bench:%d" % row for row in rows.ids[number].tolist()]
        items = list(zip(keys, rows.plain_values(number), strict=True))
        msets.extend(dict(items[first : first + _KEYS_PER_MSET]) for first in range(0, len(items), _KEYS_PER_MSET))
    with redis_server(folder) as port, redis.Redis("127.0.0.1", port) as client:
        begin_s = time.perf_counter()
        for first in range(0, len(msets), _MSETS_PER_PIPELINE):
            pipeline = client.pipeline(transaction=False)
            for mset in msets[first : first + _MSETS_PER_PIPELINE]:
                pipeline.mset(mset)
            pipeline.execute()
        return sum(map(len, msets)) / (time.perf_counter() - begin_s)


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    """Run a Redis whose files are in a folder; yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
    settings = f"--port {port} --bind 127.0.0.1 --appendonly yes --appendfsync everysec --daemonize no"
    command = ["redis-server", *settings.split(), "--dir", str(folder), "--save", ""]
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
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0
