"""Servers of one shard on a `HostLoop`: the product's code in virtual time, with log, rows and claims in memory."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from host_loop import Host, HostLoop, host_here
from memory_rocks import MemoryRocks
from memory_update_log import MemoryUpdateLog

from headrace.paramserver.config.server_settings import ShardConfig
from headrace.paramserver.expiry import expirer
from headrace.paramserver.ingest import digests
from headrace.paramserver.log import leases
from headrace.paramserver.log.interface import UpdateLogConfig
from headrace.paramserver.rpc import outages, resolver
from headrace.paramserver.rpc.admission import ServerLimits
from headrace.paramserver.rpc.server import ThriftServer
from headrace.paramserver.shard import following, membership, retention, sampler, service
from headrace.paramserver.shard.follower_service import FollowingShard
from headrace.paramserver.shard.service import Shard, open_shard
from headrace.paramserver.store import applier, rows
from headrace.schemas.errors import (
    ConfigError,
    GoneError,
    HeadraceError,
    LogFencedError,
    StorageError,
    UnavailableError,
)

__all__ = ["CLAIMS_URL", "DiskLog", "MemoryClaims", "SimulatedServer", "World", "surroundings"]

CLAIMS_URL = "file:///claims"


class World:
    """What the servers of one schedule share; the newest one counts.

    Attributes:
        claims: The object store.
        sync_s: Bounds of the time that a sync of a log takes.
        folder: Where directories of servers are.
        logs: By what the file in their directories says.
    """

    now: World
    folder: Path

    def __init__(self) -> None:
        self.claims, self.logs = MemoryClaims(), dict[str, DiskLog]()
        self.sync_s = (0.0005, 0.01)
        World.now = self
        for path in World.folder.iterdir():
            shutil.rmtree(path)


class DiskLog(MemoryUpdateLog):
    """A log on a disk: syncs take a while, and a kill takes what was not synced, or a part of it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._host = _here()
        self._host.on_kill.append(self._be_killed)

    @classmethod
    def at(
        cls,
        directory: Path,
        *,
        begin_seq: int = 1,
        begin_mark: int | None = None,
        config: UpdateLogConfig | None = None,
    ) -> DiskLog:
        """Open the log of a directory, as `open_log`."""
        file, logs = directory / "records", World.now.logs
        if not file.exists():
            directory.mkdir(exist_ok=True)
            file.write_text(f"log {len(logs)}")
            log = cls(config=config, begin_seq=begin_seq, begin_mark=begin_mark)
        else:
            log = logs[file.read_text()].reopen()
        logs[file.read_text()] = log
        return log

    def add(self, header: dict[str, Any]) -> None:
        """Add a record without rows, durably."""
        self.append(epoch=1, header=header, body=[])
        self._commit()

    def _be_killed(self) -> None:
        num_kept = self._host.rng.randint(0, len(self._pending))
        del self._pending[num_kept:]
        self._commit()
        self.failed = StorageError("the process was killed")

    def _schedule(self) -> None:
        if self._pending and not self._is_scheduled:
            self._is_scheduled = True
            sync_s = self._host.rng.uniform(*World.now.sync_s)
            self._pending[0][-1].get_loop().call_later(sync_s, self._commit)


class MemoryClaims:
    """An object store that has claims, and may be away, or take what it says that it has not."""

    where = CLAIMS_URL

    def __init__(self) -> None:
        self.objects, self.is_away = dict[str, bytes](), False

    def _call(self) -> None:
        if self.is_away:
            raise UnavailableError("the object store is away")

    def get(self, path: str) -> bytes:
        self._call()
        if path not in self.objects:
            raise GoneError(path)
        return self.objects[path]

    def put_if_absent(self, path: str, data: bytes) -> bytes:
        if self.is_away and _here().rng.random() < 0.3:
            self.objects.setdefault(path, data)
        self._call()
        return self.objects.setdefault(path, data)

    def list(self, prefix: str) -> Any:
        self._call()
        return [_Entry(path) for path in sorted(self.objects) if path.startswith(prefix)]


class _Entry:
    def __init__(self, path: str) -> None:
        self.path = path


class _NoUploads:
    """What a shard takes for its uploader: nothing is uploaded."""

    @classmethod
    def open(cls, *args: Any, **settings: Any) -> _NoUploads:
        return cls()

    async def __aenter__(self) -> _NoUploads:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass

    def leases(self) -> list[Any]:
        return []

    def status(self) -> None:
        return None

    def stop(self) -> None:
        pass


class _NoArchive:
    @classmethod
    def of_shard(cls, *args: Any) -> None:
        return None


class _NoProbe:
    worst_pause_s = 0.0

    async def __aenter__(self) -> _NoProbe:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass


class _StoreOfUrl:
    @classmethod
    def of_url(cls, url: str, **settings: Any) -> MemoryClaims:
        return World.now.claims


class _Inline:
    """An executor without threads."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        pass

    def __enter__(self) -> _Inline:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def submit(self, func: Callable[..., Any], *args: Any, **more: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(func(*args, **more))
        except Exception as exc:
            done.set_exception(exc)
        return done

    def shutdown(self) -> None:
        pass


_real_monotonic = time.monotonic


def _here() -> Host:
    host = host_here()
    assert host is not None, "the code of a server runs in a host"
    return host


def _monotonic() -> float:
    loop = asyncio._get_running_loop()
    return loop.time() if isinstance(loop, HostLoop) else _real_monotonic()


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    """Let the product's code run on a `HostLoop`: its clock, its chance, and disks in memory."""
    log = logging.getLogger("headrace")
    level = log.level
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        log.setLevel(logging.CRITICAL + 1)
        World.folder = Path(folder)
        patch.setattr(time, "monotonic", _monotonic)
        for cls, name in (
            (applier.Applier, "clock"),
            (digests.Digester, "clock"),
            (expirer.Expirer, "clock_s"),
            (leases.LogLeases, "clock"),
            (leases.SavedLeases, "clock"),
            (outages.OutageLog, "clock_s"),
            (resolver.Resolver, "clock_s"),
            (retention.LogRetention, "clock"),
            (sampler.ShardSampler, "clock_s"),
        ):
            if (defaults := cls.__init__.__kwdefaults__) is not None and name in defaults:
                patch.setitem(defaults, name, _monotonic)
        patch.setattr(random, "random", lambda: _here().rng.random())
        patch.setattr(secrets, "token_hex", lambda size=32: f"{_here().rng.getrandbits(8 * size):0{2 * size}x}")
        patch.setattr(secrets, "randbits", lambda size: _here().rng.getrandbits(size))
        patch.setattr(rows, "RocksDb", MemoryRocks)
        patch.setattr(rows, "rocks_options", lambda *args, **settings: None)
        patch.setattr(rows, "supports_direct_io", lambda path: False)
        for module in (applier, service):
            patch.setattr(module, "ThreadPoolExecutor", _Inline)
        for module in (membership, following):
            patch.setattr(module, "ObjectStore", _StoreOfUrl)
        patch.setattr(service, "open_log", DiskLog.at)
        patch.setattr(following, "FileUpdateLog", DiskLog)
        patch.setattr(service, "LoopProbe", _NoProbe)
        patch.setattr(service, "Archiver", _NoArchive)
        patch.setattr(service, "SnapshotUploader", _NoUploads)
        try:
            yield
        finally:
            log.setLevel(level)


class SimulatedServer:
    """A server of one shard at an address, over the lives of its process.

    Attributes:
        name: Of the machine.
        shard: What serves now; None while nothing does.
        host: The life of the process; None while it is down.
        failures: What has ended the shard, in order; it starts again.
        fatal: What has ended it for good, until somebody starts it again.
        is_lost: The machine has burnt down.
    """

    def __init__(self, loop: HostLoop, name: str, port: int, *, follow: str | None, has_claims: bool) -> None:
        self.name, self.port = name, port
        self.shard: Shard | FollowingShard | None = None
        self.host: Host | None = None
        self.failures: list[HeadraceError] = []
        self.fatal: HeadraceError | None = None
        self.is_lost = False
        self._loop, self._has_claims, self._num_directories = loop, has_claims, 0
        self.use_new_directory(follow)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def use_new_directory(self, follow: str | None) -> None:
        """Begin without data; the server is down."""
        self._num_directories += 1
        path = World.folder / f"{self.name}-{self.port}-{self._num_directories}" / "shard-0000"
        (path / "log").mkdir(parents=True)
        self.use(path, follow=follow)

    def use(self, path: Path, **changes: Any) -> None:
        """Serve a shard's directory from the next start on; `changes` are of settings."""
        self.is_lost = False
        self.config = ShardConfig(
            **{
                "directory": path,
                "shard": 0,
                "server_id": "a-server",
                "addresses": (("127.0.0.1", self.port),),
                "block_cache_bytes": 32 << 20,
                "memtable_bytes": 6 << 20,
                "object_store": CLAIMS_URL if self._has_claims else None,
                **changes,
            }
        )

    def follow(self, source: str) -> None:
        """Follow another server from the next start on."""
        self.config = dataclasses.replace(self.config, follow=source)

    def start(self) -> None:
        """Start the process."""
        assert self.host is None and not self.is_lost
        self.fatal = None
        self.host = Host(self._loop, self.name)
        self.running = self.host.run(self._keep_running(self.host))

    def kill(self) -> None:
        """Kill it."""
        if self.host is not None:
            self.host.kill()
            self.host = self.shard = None

    def lose(self) -> None:
        """Let the machine burn down."""
        self.kill()
        self.is_lost = True

    async def _keep_running(self, host: Host) -> None:
        while not host.is_dead:
            try:
                await self._run(host)
            except (ConfigError, LogFencedError, StorageError) as exc:
                if not host.is_dead:
                    self.fatal = exc
                    self.host = None
                return
            except HeadraceError as exc:
                self.failures.append(exc)

    async def _run(self, host: Host) -> None:
        @contextlib.asynccontextmanager
        async def serving(shard: Any) -> Any:
            server = ThriftServer(shard, limits=ServerLimits(max_frame_bytes=self.config.max_frame_bytes))
            await server.start(self._loop.listen(self.port))  # type: ignore[arg-type]
            self.shard = shard
            try:
                yield
            finally:
                if not host.is_dead:
                    self.shard = None
                await server.close(drain_s=0)

        async with open_shard(self.config, stand_by=serving) as shard, serving(shard):
            try:
                raise await shard.wait_failed()
            finally:
                shard.begin_drain()
