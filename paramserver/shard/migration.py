"""The update logs of a stopped server's shards, moved from files into a replicated log, or back.

    1. every shard is prepared     its stream is made; or is sealed, and its records are brought into the directory
    2. the manifest is written     the decision
    3. sealed streams are removed  only on the way back

Before the decision the directory serves as before, or, once a stream is sealed, refuses to until the migration was
repeated. Killed anywhere, it goes on when it is repeated. `log/jetstream/moving.py` says what becomes of a log.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headrace.paramserver.config.cluster_file import ClusterFile, ClusterNode
from headrace.paramserver.config.data_dir import DataDir, Manifest, find_manifest
from headrace.paramserver.ingest.pipeline import META_MARK
from headrace.paramserver.log.claims import HeldClaims, raise_term
from headrace.paramserver.log.interface import AppliedRecord
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import ConfigError
from headrace.schemas.snapshot_manifest import shard_folder

__all__ = ["MovedLog", "Mover", "find_server", "move_to_files", "move_to_stream", "remove_streams"]

_STORE_CONFIG = StoreConfig(block_cache_bytes=4 << 20, max_open_files=64)


@dataclass(frozen=True, slots=True)
class MovedLog:
    """A shard's log that was moved: its last record, and its stream's name."""

    shard: int
    last_seq: int
    stream: str


class Mover(Protocol):
    """What moves one shard's log: `log_mover` returns it."""

    def name(self, shard: int) -> str: ...  # noqa: D102 - documented in `LogMover`
    async def check_engine(self) -> None: ...  # noqa: D102
    async def begin_stream(self, shard: int, directory: Path) -> int: ...  # noqa: D102
    async def check_silent(self, shard: int, directory: Path, *, applied: AppliedRecord) -> None: ...  # noqa: D102
    async def end_stream(  # noqa: D102
        self, shard: int, directory: Path, *, applied: AppliedRecord, owner: str, above_term: int
    ) -> tuple[int, int]: ...
    def num_own_bytes(self, directory: Path) -> int: ...  # noqa: D102
    async def own_log(self, directory: Path, *, on_progress: Callable[[int], None]) -> None: ...  # noqa: D102
    async def remove_sealed(self, shard: int, directory: Path) -> bool: ...  # noqa: D102


def find_server(data: Path, cluster: ClusterFile | None = None, node: ClusterNode | None = None) -> Manifest:
    """Return what a directory says whose logs are to be moved.

    Raises:
        ConfigError: It has no server, or it is a cluster's node and the cluster file is missing.
    """
    manifest = find_manifest(data.absolute(), node=node)
    if manifest is None:
        raise ConfigError(f"--data {data}: there is no server in it")
    if manifest.node_shards is not None and cluster is None:
        raise ConfigError(
            f"--data {data}: has {len(manifest.shards)} of a cluster's {manifest.num_shards} shards, and the logs of "
            "all nodes move together: stop all nodes, and on each host run this with --cluster FILE --node NAME"
        )
    return manifest


async def move_to_stream(
    data: Path,
    mover: Mover,
    *,
    cluster: ClusterFile | None = None,
    node: ClusterNode | None = None,
    on_moved: Callable[[MovedLog], None] = lambda _: None,
) -> list[MovedLog]:
    """Move the logs of a directory's shards, or of a node's, from files into streams; each is told to `on_moved`.

    Nothing is copied. Safe to repeat. Cancellation: as if it was killed.

    Raises:
        ConfigError: The directory is in use, or its logs are not in files; the engine is unfit, or has other records.
        HeadraceError: A log is damaged or missing, the disk failed, or the engine does not answer.
    """
    with DataDir.claim(data, num_shards=None, cluster=cluster, node=node) as directory:
        shards = _own_shards(directory, node)
        await asyncio.to_thread(directory.check_logs, shards)
        await mover.check_engine()
        moved = []
        for shard in shards:
            last_seq = await mover.begin_stream(shard, directory.shard_path(shard) / "log")
            moved.append(MovedLog(shard, last_seq, mover.name(shard)))
            on_moved(moved[-1])
        await asyncio.to_thread(directory.set_log, "nats", shards)
    return moved


async def move_to_files(
    data: Path,
    mover: Mover,
    *,
    cluster: ClusterFile | None = None,
    node: ClusterNode | None = None,
    on_size: Callable[[int], None] = lambda _: None,
    on_progress: Callable[[int], None] = lambda _: None,
    on_moved: Callable[[MovedLog], None] = lambda _: None,
) -> list[MovedLog]:
    """Move the logs of a directory's shards, or of a node's, from streams into files; each is told to `on_moved`.

    What the local mirrors hold is written anew: `on_size` gets its bytes, `on_progress` those since its last call, from
    threads. Safe to repeat. Cancellation: as if it was killed.

    Raises:
        ConfigError: The directory is in use, its logs are in files, it has a standby's copy, or a shard's owner lives.
        HeadraceError: A log is damaged or not that of its stream, the disk failed, or the engine does not answer.
    """
    with DataDir.claim(data, num_shards=None, cluster=cluster, node=node, log="nats") as directory:
        shards = _own_shards(directory, node)
        for shard in set(directory.manifest.shards) - set(shards):
            if (path := directory.shard_path(shard)).exists():
                raise ConfigError(
                    f"--data {data}: {path.name} is a standby's copy, and a shard whose log is in files has one copy: "
                    "move it away first"
                )
        applied = [await asyncio.to_thread(_applied, directory.shard_path(shard) / "store") for shard in shards]
        # All of them before one is ended: each takes some seconds.
        await _all_of(
            mover.check_silent(shard, directory.shard_path(shard) / "log", applied=record)
            for shard, record in zip(shards, applied, strict=True)
        )
        ended = [await _end(directory, shard, mover, record) for shard, record in zip(shards, applied, strict=True)]
        logs = [directory.shard_path(shard) / "log" for shard in shards]
        sizes = [await asyncio.to_thread(mover.num_own_bytes, log) for log in logs]
        on_size(sum(sizes))
        for log, moved in zip(logs, ended, strict=True):
            await mover.own_log(log, on_progress=on_progress)
            on_moved(moved)
        await asyncio.to_thread(directory.set_log, "file", shards)
    await remove_streams(directory.path, mover, shards)
    return ended


async def remove_streams(data: Path, mover: Mover, shards: Sequence[int]) -> None:
    """Remove the sealed streams of shards whose logs are in files again. Safe to repeat, also while a server runs.

    Raises:
        ConfigError: A stream is another copy's.
        UnavailableError: The engine does not answer.
    """
    for shard in shards:
        await mover.remove_sealed(shard, data / shard_folder(shard) / "log")


def _own_shards(directory: DataDir, node: ClusterNode | None) -> Sequence[int]:
    return directory.manifest.shards if node is None else sorted(node.shards)


async def _all_of(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all at once; raise the first error, and end the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _end(directory: DataDir, shard: int, mover: Mover, applied: AppliedRecord) -> MovedLog:
    path, server_id = directory.shard_path(shard), directory.manifest.server_id
    held = await asyncio.to_thread(HeldClaims.read, path, server_id, shard)
    last_seq, term = await mover.end_stream(
        shard,
        path / "log",
        applied=applied,
        owner=f"headrace migrate-log on {socket.gethostname()}",
        above_term=held.highest_term,
    )
    # Clients that have seen the stream's terms take a lower one for that of an old copy.
    await asyncio.to_thread(raise_term, path, server_id=server_id, shard=shard, term=term)
    return MovedLog(shard, last_seq, mover.name(shard))


def _applied(path: Path) -> AppliedRecord:
    """Return what a store has applied; nothing for one that was never opened. Thread: any; blocks."""
    if not (path / "CURRENT").is_file():
        return AppliedRecord(0)
    store = RowStore.open_read_only(path, config=_STORE_CONFIG)
    try:
        seq, _, mark = store.read_meta().get(META_MARK, b"").partition(b" ")
        return AppliedRecord(store.applied_seq, int(mark) if seq == b"%d" % store.applied_seq else None)
    finally:
        store.close()
