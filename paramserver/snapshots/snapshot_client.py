"""Snapshots from outside: orders a cut of all shards at one step, and brings a snapshot to another machine.

All shards are asked for the first step from S on at which the run stands exactly. A trainer ends each step on every
shard, so they name the same one, unless some had passed S before they were asked: then their parts are dropped and all
are asked again, for a step further on. Nothing has to stop for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiofiles

from headrace.paramserver.config.server_config import DEFAULT_PORT
from headrace.paramserver.files.disk_room import check_room
from headrace.paramserver.files.durable_files import fsync_path
from headrace.paramserver.process.task_group import task_group
from headrace.paramserver.reading.shard_link import Dial, ShardLink, link_all, retry
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.snapshots.snapshot_files import SnapshotFiles, check_file
from headrace.schemas.errors import (
    ConfigError,
    CorruptionError,
    GoneError,
    HeadraceError,
    OverloadedError,
    StorageError,
    UnavailableError,
)
from headrace.schemas.idl import idl
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotFile, SnapshotManifest, check_snapshot_name

__all__ = ["create_snapshot", "fetch_snapshot", "newest_snapshot", "remove_snapshot"]

# One attempt waits this long for the run; a trainer that flushes less often needs more of them.
_ATTEMPT_S = 10.0
# Pieces of several files are on their way at a time, so that no round trip is waited for; each is short enough to come
# through before a bad link breaks.
_CHUNK_BYTES, _FILES_AT_ONCE = 2 << 20, 8
_DISCARD_S = 60.0
# A server that is away for longer ends a fetch, which can be taken up again.
_PATIENCE_S = 60.0
_MAX_MANIFEST_BYTES = 1 << 30


async def create_snapshot(
    address: str,
    *,
    dial: Dial,
    name: str | None = None,
    run: str | None = None,
    at_step: bool = True,
    timeout_s: float,
    lease_s: int = 0,
) -> SnapshotManifest:
    """Make a snapshot of a running server and return its manifest once it is published.

    Args:
        address: `host:port` of any shard.
        dial: How to connect, as an admin.
        name: Its name; None for the time of day.
        run: Whose steps the cut is at; None for the run of the highest epoch.
        at_step: False cuts each shard now, at no common step; for a store whose run has ended between steps.
        timeout_s: Give up when the run has not stood exactly at a step on all shards by then.
        lease_s: The server removes it when nobody has read of it for so long, seconds; 0 for one that stays.

    Raises:
        UnavailableError: A shard is away, or the run did not come to such a step.
        ConfigError: There is no such run.
        HeadraceError: A shard refuses, or its disk failed. Nothing is published.

    Cancellation: nothing is published; what the shards have copied is swept after a day.
    """
    name = check_snapshot_name(name or datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ"))
    links = await link_all(dial, *parse_address(address, default_port=DEFAULT_PORT))
    deadline_s = time.monotonic() + timeout_s
    try:
        parts = await _cut(links, name, run if at_step else None, at_step, deadline_s)
        created_us = time.time_ns() // 1000
        manifest = SnapshotManifest(name=name, created_us=created_us, parts=tuple(parts), lease_s=lease_s)
        finish = idl.FinishSnapshotRequest(name=name, manifest=manifest.encode().decode())
        await links[0].finish_snapshot(finish)
        await _discard(links, name)  # there is nothing left of it but the log that each has kept for it
        return manifest
    except BaseException:
        await _discard(links, name)
        raise
    finally:
        await asyncio.gather(*(link.close() for link in links))


async def newest_snapshot(address: str, *, dial: Dial) -> SnapshotManifest:
    """Return the manifest of a running server's newest snapshot.

    Args:
        address: `host:port` of any shard.
        dial: How to connect.

    Raises:
        GoneError: There is none.
        UnavailableError: The server is not there.
        CorruptionError: What has come is no manifest.

    Cancellation: harmless.
    """
    host, port = parse_address(address, default_port=DEFAULT_PORT)
    link = ShardLink(dial, host, port)
    try:
        await link.refresh()
        return SnapshotManifest.decode(await _fetch_manifest(link, ""))
    finally:
        await link.close()


async def fetch_snapshot(
    address: str,
    directory: Path,
    *,
    dial: Dial,
    name: str = "",
    on_progress: Callable[[int, int], None] | None = None,
) -> SnapshotManifest:
    """Bring a published snapshot into a directory, checked, and return its manifest.

    What an interrupted call has brought already is not fetched again. The copy has no lease: it is the caller's.

    Args:
        address: `host:port` of any shard.
        directory: Where `NAME/` goes; made when it is not there.
        dial: How to connect.
        name: Snapshot; empty for the newest.
        on_progress: Called with (bytes so far, bytes in all) for each piece that has come; bytes that are fetched once
            more count once. What it raises ends the fetch.

    Raises:
        ConfigError: There is another snapshot of its name in the directory.
        GoneError: There is no such snapshot, or it was removed meanwhile; then what has come is removed, too.
        UnavailableError: The server is not there, or has gone for long.
        CorruptionError: A file came damaged, twice.
        StorageError: The disk failed, or has no room for it.

    Cancellation: what has come stays, and a later call goes on from there.
    """
    files = SnapshotFiles(directory)
    host, port = parse_address(address, default_port=DEFAULT_PORT)
    link = ShardLink(dial, host, port)
    try:
        await link.refresh()
        manifest = replace(SnapshotManifest.decode(await _fetch_manifest(link, name)), lease_s=0)
        if (published := await asyncio.to_thread(_published, files, manifest.name)) is not None:
            if replace(published, lease_s=0) != manifest:
                raise ConfigError(
                    f"{files.folder_of(manifest.name)} is another snapshot of that name: remove it, or fetch elsewhere"
                )
            return published
        folder = files.new_folder(manifest.name)
        with _mapped_errors(folder):
            await asyncio.to_thread(_check_room, files, manifest)
        await _fetch_files(link, manifest, files, on_progress)
        with _mapped_errors(folder):
            await asyncio.to_thread(files.publish, manifest)
        return manifest
    finally:
        await link.close()


async def remove_snapshot(address: str, name: str, *, dial: Dial) -> None:
    """Remove a published snapshot from a running server.

    Args:
        address: `host:port` of any shard.
        name: Snapshot.
        dial: How to connect, as an admin.

    Raises:
        GoneError: There is no such snapshot.
        UnavailableError: The server is not there.
        HeadraceError: The server refuses.

    Cancellation: it is removed or not.
    """
    host, port = parse_address(address, default_port=DEFAULT_PORT)
    link = ShardLink(dial, host, port)
    try:
        await link.refresh()
        await link.finish_snapshot(idl.FinishSnapshotRequest(name=check_snapshot_name(name), removes=True))
    finally:
        await link.close()


async def _cut(links: list[ShardLink], name: str, run: str | None, at_step: bool, deadline_s: float) -> list[ShardPart]:
    """Return the parts of all shards, all at one step."""
    ahead = 0
    while True:
        epoch, step = await _where(links, run) if at_step else (0, -1)
        left_s = max(deadline_s - time.monotonic(), 0.0)
        request = idl.CreateSnapshotRequest(
            name=name, epoch=epoch, min_step=step + ahead, wait_ms=round(min(left_s, _ATTEMPT_S) * 1000)
        )
        # Each is waited for, whatever the others say: a part that is still being made cannot be dropped.
        asked_s = time.monotonic()
        results = await asyncio.gather(*(link.create_snapshot(request) for link in links), return_exceptions=True)
        # The deadline is for the run to come to a step: hours of hashing are no part of it.
        deadline_s += max(time.monotonic() - asked_s - request.wait_ms / 1000, 0.0)
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, UnavailableError | OverloadedError) or time.monotonic() >= deadline_s:
                raise error
        parts = [ShardPart.decode(r.part) for r in results if not isinstance(r, BaseException)]
        if not errors and len({part.step for part in parts}) == 1:
            return parts
        if time.monotonic() >= deadline_s:
            raise UnavailableError("the shards did not come to one step in time: the run is too fast for it")
        await _discard(links, name)
        # Some had passed the step before they were asked, or the run stands still.
        ahead = 0 if errors else min(2 * ahead + 1, 1 << 20)


async def _where(links: list[ShardLink], run: str | None) -> tuple[int, int]:
    """Return (epoch, highest step that a shard has of it); epoch 0 for a store that nobody has written to."""
    replies = await asyncio.gather(*(link.status() for link in links))
    clients = [client for reply in replies for client in reply.clients if run is None or client.run == run]
    if run is not None and not clients:
        raise ConfigError(f"--run {run}: no writer of that run is known here")
    epoch = max((client.epoch for client in clients if client.world_size != 0), default=0)
    return epoch, max((client.step for client in clients if client.epoch == epoch), default=-1)


async def _discard(links: list[ShardLink], name: str) -> None:
    """Have what is not published removed, and each shard keep no log for it any more."""
    request = idl.FinishSnapshotRequest(name=name)
    try:
        async with asyncio.timeout(_DISCARD_S):  # so that a shard that hangs does not keep who gives up
            results = await asyncio.gather(*(link.finish_snapshot(request) for link in links), return_exceptions=True)
    except TimeoutError:
        return  # swept later
    for result in results:  # but ours: swept later; what went wrong before is what matters
        if isinstance(result, BaseException) and not isinstance(result, HeadraceError):
            raise result


async def _fetch_manifest(link: ShardLink, name: str) -> bytes:
    data = bytearray()
    while True:
        reply = await _piece(link, name, "", len(data))
        name = reply.name
        data += reply.data
        if len(data) >= reply.size_bytes:
            return bytes(data)
        if not reply.data or reply.size_bytes > _MAX_MANIFEST_BYTES:
            raise CorruptionError(f"{link.address}: the manifest of snapshot {name!r} does not come whole")


async def _fetch_files(
    link: ShardLink, manifest: SnapshotManifest, files: SnapshotFiles, on_progress: Callable[[int, int], None] | None
) -> None:
    """Bring all files, some at a time; the first error ends them all."""
    done, total = 0, manifest.size_bytes
    waiting, folder = iter(manifest.files().items()), files.new_folder(manifest.name)

    def count(new_bytes: int) -> None:
        nonlocal done
        done += new_bytes
        if on_progress is not None:
            on_progress(done, total)

    async def fetch() -> None:
        for path, file in waiting:
            await _fetch_file(link, manifest.name, path, file, folder, count)

    try:
        async with task_group(_gravest) as group:
            for _ in range(_FILES_AT_ONCE):
                group.create_task(fetch(), name="headrace-fetch-files")
    except _RemovedError:  # and so is what a later call would go on from
        await asyncio.to_thread(files.discard, manifest.name)
        raise


class _RemovedError(GoneError):
    """The server has no such snapshot, or not any more."""


def _gravest(errors: Sequence[BaseException]) -> BaseException:
    return next((exc for exc in errors if isinstance(exc, _RemovedError)), errors[0])


async def _fetch_file(
    link: ShardLink,
    name: str,
    path: str,
    expected: SnapshotFile,
    folder: Path,
    count: Callable[[int], None] = lambda _: None,
) -> None:
    """Bring one file, going on where an earlier call has stopped; once more from the beginning if it is damaged.

    `count` is called for what is there and for each piece that comes, with the bytes that had not been there before: 0
    for those that come once more.
    """
    target, counted_bytes = folder / path, 0

    def count_to(size_bytes: int) -> None:
        nonlocal counted_bytes
        before, counted_bytes = counted_bytes, max(counted_bytes, min(size_bytes, expected.size_bytes))
        count(counted_bytes - before)

    for attempt in range(2):
        with _mapped_errors(target):
            await asyncio.to_thread(_begin_in, target.parent)
            async with aiofiles.open(target, "ab") as file:
                if size_bytes := await file.tell():
                    count_to(size_bytes)
                while size_bytes < expected.size_bytes:
                    reply = await _piece(link, name, path, size_bytes)
                    if not reply.data:
                        raise CorruptionError(f"{link.address}: {path} of snapshot {name!r} ends at {size_bytes} bytes")
                    await file.write(reply.data)
                    size_bytes += len(reply.data)
                    count_to(size_bytes)
            try:
                await asyncio.to_thread(_settle, target, expected)
                return
            except CorruptionError:
                if attempt:
                    raise
                await asyncio.to_thread(target.unlink)  # somebody may have, and the folder with it


async def _piece(link: ShardLink, name: str, path: str, offset: int) -> Any:
    request = idl.FetchSnapshotRequest(name=name, path=path, offset=offset, max_bytes=_CHUNK_BYTES)
    try:
        return await retry(
            lambda: link.fetch_snapshot(request), patience_s=_PATIENCE_S, moved_s=lambda: link.pieces_moved_s
        )
    except GoneError as exc:
        raise _RemovedError(str(exc)) from exc
    except (UnavailableError, OverloadedError) as exc:
        if not exc.retriable:
            raise
        raise UnavailableError(f"{link.address}: no piece of snapshot {name!r} for {_PATIENCE_S:g} s: {exc}") from exc


def _published(files: SnapshotFiles, name: str) -> SnapshotManifest | None:
    return files.manifest_of(name) if files.folder_of(name).exists() else None


def _check_room(files: SnapshotFiles, manifest: SnapshotManifest) -> None:
    there = files.new_folder(manifest.name).rglob("*")
    lacking_bytes = manifest.size_bytes - sum(path.stat().st_size for path in there if path.is_file())
    check_room(files.path, lacking_bytes, what=f"the rest of snapshot {manifest.name!r}")


def _begin_in(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Else a sweep takes a fetch that goes on after a day, whose files that are whole are only read, for a left one.
    os.utime(folder)


def _settle(path: Path, expected: SnapshotFile) -> None:
    check_file(path, expected)
    fsync_path(path)
    fsync_path(path.parent)


@contextlib.contextmanager
def _mapped_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise StorageError(f"{path}: {exc.strerror or exc}") from exc
