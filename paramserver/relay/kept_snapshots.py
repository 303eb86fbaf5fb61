"""The snapshots that a relay keeps: fetched once, from the server, another relay or an object store, for all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from headrace.paramserver.log.leases import MAX_LEASE_S
from headrace.paramserver.reading.link import Dial, ShardLink
from headrace.paramserver.relay.options import RelayConfig
from headrace.paramserver.relay.shard_mirror import ShardMirror
from headrace.paramserver.snapshots.bucket import SnapshotStore
from headrace.paramserver.snapshots.directory import SnapshotFiles
from headrace.paramserver.snapshots.remote import fetch_snapshot, newest_snapshot
from headrace.paramserver.system.log_lines import fact
from headrace.schemas.errors import ConfigError, GoneError, HeadraceError, UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.snapshot_manifest import SnapshotManifest

__all__ = ["KeptSnapshots", "RemoteSnapshots", "SnapshotSource", "StoredSnapshots", "source_of"]

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 8 << 20
# After a failure; a server that restarts is back by then.
_AGAIN_S = 5.0


class SnapshotSource(Protocol):
    """Where a relay gets snapshots from. Cancellation: a fetch may be resumed."""

    async def newest(self) -> SnapshotManifest | None:
        """Return the manifest of the server's newest snapshot; None if there is none."""

    async def fetch(self, manifest: SnapshotManifest, files: SnapshotFiles) -> None:
        """Copy a snapshot, checked, into a directory of snapshots, whole or not at all."""


class RemoteSnapshots:
    """The snapshots of a running server or relay, on its disk or in the object store that it names.

    Implements `SnapshotSource`.
    """

    def __init__(self, links: Sequence[ShardLink], server: str, dial: Dial, server_id: str) -> None:
        """Use the links to its shards, which find them where they are, and the addresses in `server`."""
        self._links, self._server, self._dial, self._server_id = links, server, dial, server_id
        self._stored: StoredSnapshots | None = None

    async def newest(self) -> SnapshotManifest | None:
        """See `SnapshotSource`."""
        upload = (await self._status()).upload
        if upload is None:
            self._stored = None
            try:
                manifest = await newest_snapshot(self._addresses, dial=self._dial)
            except GoneError:
                return None
            return manifest if manifest.server_id == self._server_id else None
        try:
            self._stored = StoredSnapshots(await asyncio.to_thread(SnapshotStore.of_url, upload.url), self._server_id)
            return await self._stored.newest()
        except ConfigError as exc:  # this is another machine than the server's; nothing here is set wrong
            raise UnavailableError(f"the server's snapshots cannot be read from here: {exc}") from exc

    async def fetch(self, manifest: SnapshotManifest, files: SnapshotFiles) -> None:
        """See `SnapshotSource`."""
        if self._stored is not None:
            await self._stored.fetch(manifest, files)
        else:
            await fetch_snapshot(self._addresses, files.path, dial=self._dial, name=manifest.name)

    @property
    def _addresses(self) -> str:
        return ",".join(dict.fromkeys([*self._server.split(","), *(link.address for link in self._links)]))

    async def _status(self) -> Any:
        """Return the status of the first shard that answers."""
        for link in self._links[:-1]:
            with suppress(UnavailableError):
                return await link.status()
        return await self._links[-1].status()


class StoredSnapshots:
    """A server's snapshots in an object store. Implements `SnapshotSource`."""

    def __init__(self, store: SnapshotStore, server_id: str) -> None:
        """Use those under a server's prefix."""
        self._store, self._server_id = store, server_id

    async def newest(self) -> SnapshotManifest | None:
        """See `SnapshotSource`; `ConfigError` if it is another server's prefix."""
        manifest = await asyncio.to_thread(self._store.newest)
        if manifest is not None and manifest.server_id != self._server_id:
            raise ConfigError(
                f"{self._store.where} has the snapshots of server {manifest.server_id}, and this is a relay of server "
                f"{self._server_id}: name that one's prefix with --object-store"
            )
        return manifest

    async def fetch(self, manifest: SnapshotManifest, files: SnapshotFiles) -> None:
        """See `SnapshotSource`."""
        await asyncio.to_thread(self._store.fetch, manifest.name, files)


def source_of(config: RelayConfig, links: Sequence[ShardLink], dial: Dial, server_id: str) -> SnapshotSource:
    """Return where the settings say that snapshots come from; `ConfigError` if the object store cannot be used."""
    if config.object_store is None:
        return RemoteSnapshots(links, config.server, dial, server_id)
    return StoredSnapshots(SnapshotStore.of_url(config.object_store), server_id)


class KeptSnapshots:
    """Fetches new snapshots, removes old ones, and offers the newest that every shard's mirror follows.

    Thread: the event loop's.

    Attributes:
        files: The directory.
        failure: Why none is offered, or a newer one could not be fetched; None if all is well.
    """

    def __init__(self, directory: Path, source: SnapshotSource, config: RelayConfig, server_id: str) -> None:
        """Use a directory, which may be missing."""
        self.files = SnapshotFiles(directory)
        self.failure: str | None = None
        self._kept: list[SnapshotManifest] = []  # oldest first
        self._source, self._config, self._server_id = source, config, server_id

    async def newest_at_source(self) -> SnapshotManifest | None:
        """Return the manifest of the source's newest snapshot; None if there is none."""
        return await self._source.newest()

    async def run(self, mirrors: Sequence[ShardMirror]) -> None:
        """Keep the newest snapshots, for ever. Failures are told and tried again. Cancellation: safe."""
        await asyncio.to_thread(self._look)
        while True:
            pause_s = self._config.snapshot_interval_s
            try:
                await self._fetch_newest(mirrors)
                self.failure = None
            except ConfigError:
                raise
            except HeadraceError as exc:
                pause_s = min(_AGAIN_S, pause_s)
                self.failure = f"no newer snapshot could be fetched: {exc}"
                fact(_log, logging.WARNING, "no newer snapshot could be fetched", error=str(exc))
            await asyncio.sleep(pause_s)

    def offered(self, mirrors: Sequence[ShardMirror]) -> SnapshotManifest | None:
        """Return the newest snapshot that can be followed here; None if there is none. No I/O."""
        return next((manifest for manifest in reversed(self._kept) if _is_followed(manifest, mirrors)), None)

    def why_none(self, mirrors: Sequence[ShardMirror]) -> str:
        """Return why `offered` returns None, and what to do."""
        if not self._kept:
            return (
                self.failure or "this relay has no snapshot yet: make one with headrace snapshot create at the server"
            )
        newest = self._kept[-1]
        for mirror, part in zip(mirrors, newest.parts, strict=False):
            if mirror.log is None or part.seq > mirror.log.last_seq:
                return f"this relay has not caught up with snapshot {newest.name!r} yet"
        return (
            f"this relay's log does not follow snapshot {newest.name!r} any more: make a newer one with headrace "
            "snapshot create at the server, and raise the relay's --log-hold-bytes if it was reached"
        )

    def read(self, request: Any, name: str, max_bytes: int) -> Any:
        """Return the `FetchSnapshotReply` for a piece of a snapshot; raises as `SnapshotFiles.read`. Thread: any."""
        size_bytes = min(request.max_bytes, max_bytes, _CHUNK_BYTES)
        data, total_bytes = self.files.read(name, request.path, request.offset, size_bytes)
        return idl.FetchSnapshotReply(name=name, data=data, size_bytes=total_bytes)

    def _look(self) -> None:
        """Note which snapshots are here. Thread: any; blocks."""
        self._kept = [manifest for manifest in self.files.list()[0] if manifest.server_id == self._server_id]

    async def _fetch_newest(self, mirrors: Sequence[ShardMirror]) -> None:
        manifest = await self.newest_at_source()
        if manifest is None:
            return
        known = next((each for each in self._kept if each.name == manifest.name), None)
        if known is None or [part.mark for part in known.parts] != [part.mark for part in manifest.parts]:
            if known is not None:  # of a time that is gone, under the same name
                await asyncio.to_thread(self.files.remove, manifest.name)
            async with self._log_kept(mirrors, manifest):
                await self._source.fetch(manifest, self.files)
            fact(_log, logging.INFO, "snapshot", name=manifest.name, step=manifest.step, bytes=manifest.size_bytes)
            await asyncio.to_thread(self._look)
        others = [each for each in self._kept if each.name != manifest.name]
        # One that cannot be followed would be of no use, and of a time that is gone it could pass for the newest.
        followed = [each.name for each in reversed(others) if _is_followed(each, mirrors)]
        kept = followed[: self._config.num_snapshots - 1]
        await asyncio.to_thread(self._remove, [each.name for each in others if each.name not in kept])

    @asynccontextmanager
    async def _log_kept(self, mirrors: Sequence[ShardMirror], manifest: SnapshotManifest) -> AsyncIterator[None]:
        """Keep the mirrored log behind a snapshot, within its bound, while the snapshot is being fetched."""
        name = f"snapshot {manifest.name}"
        held = [
            (mirror.log.retention.snapshot_leases, part.seq + 1)
            for mirror, part in zip(mirrors, manifest.parts, strict=True)
            if mirror.log is not None
        ]
        for leases, seq in held:
            leases.renew(name, seq, MAX_LEASE_S)
        try:
            yield
        finally:
            for leases, seq in held:
                leases.renew(name, seq, 0)

    def _remove(self, names: Sequence[str]) -> None:
        """Remove snapshots. Thread: any; blocks."""
        for name in names:
            with suppress(GoneError):
                self.files.remove(name)
        self.files.prune_abandoned()
        self._look()


def _is_followed(manifest: SnapshotManifest, mirrors: Sequence[ShardMirror]) -> bool:
    """Return whether a copy made from a snapshot can follow the mirrors."""
    return all(
        mirror.log is not None and mirror.log.covers(part) for mirror, part in zip(mirrors, manifest.parts, strict=True)
    )
