"""Begins copies: connects, loads what there is, on the tables' own storage, and lets it follow the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

from headrace.paramserver.process.machine_memory import free_memory_bytes
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.reading.shard_link import Dial
from headrace.paramserver.replica.config import ReplicaConfig
from headrace.paramserver.replica.copy_folders import CopyFolders
from headrace.paramserver.replica.fetched_snapshots import FetchedSnapshots, snapshot_in_use
from headrace.paramserver.replica.followed import Followed
from headrace.paramserver.replica.generation import Generation
from headrace.paramserver.replica.loading import load_live, load_snapshot
from headrace.paramserver.replica.log_hold import CopyLease, LogHold
from headrace.paramserver.replica.storage import Storage, memory_needed
from headrace.paramserver.snapshots.snapshot_client import fetch_snapshot, newest_snapshot
from headrace.paramserver.snapshots.snapshot_files import read_manifest, verify_snapshot
from headrace.schemas.errors import (
    ConfigError,
    GoneError,
    HeadraceError,
    SetBackError,
    UnavailableError,
    UnknownTableError,
)
from headrace.schemas.sizes import format_size
from headrace.schemas.snapshot_manifest import SnapshotManifest
from headrace.schemas.tables import TableSpec

__all__ = ["CopyBuilder"]

_log = logging.getLogger(__name__)

_CONNECTING, _READING = "the server has not answered yet", "its tables are being read"


class CopyBuilder:
    """Begins one replica's copies.

    Thread: the event loop's, but for making and closing it.

    Attributes:
        doing: What is waited for while a copy is built; one line without an end.
        on_progress: Called, by any thread, whenever some megabytes have been fetched, checked or loaded, or a file has
            been linked.
    """

    def __init__(self, address: str, dial: Dial, config: ReplicaConfig) -> None:
        """Claim the directory of copies on disk, when there are to be any.

        Args:
            address: `host:port` of any shard.
            dial: How to connect.
            config: Settings.

        Raises:
            ConfigError: The directory cannot be used, or another replica uses it.
        """
        self._address = address
        self._dial = dial
        self._config = config
        self._folders = CopyFolders(config.disk_dir) if config.uses_disk else None
        self.doing = _CONNECTING
        self.on_progress: Callable[[], None] = lambda: None
        self._fetched: str | None = None  # the snapshot that was fetched last into a directory that stays

    def close(self) -> None:
        """Give the directory up; copies are closed by those who have them. Idempotent."""
        if self._folders is not None:
            self._folders.close()

    async def remove_old_snapshots(self) -> None:
        """Remove what replicas have fetched before into `snapshot_dir`, once a copy of the newest answers.

        What fails is logged: it costs disk, and is tried again after the next change.

        Cancellation: what has been chosen is removed.
        """
        directory = self._config.snapshot_dir
        if directory is None or self._fetched is None:
            return
        try:
            await asyncio.to_thread(FetchedSnapshots(directory).remove_others, self._fetched)
        except HeadraceError as exc:
            _log.warning("snapshots that are not needed any more: %s", exc)

    async def build(
        self,
        snapshot: Path | None,
        *,
        held_bytes: int,
        on_change: Callable[[], None],
        on_lost: Callable[[Followed, HeadraceError], None],
    ) -> Followed:
        """Return a new copy that has begun to follow.

        Args:
            snapshot: Directory of a snapshot to begin from; None for what the server has.
            held_bytes: Memory of the copies that are there.
            on_change: See `Followed`.
            on_lost: See `Followed`.

        Raises:
            ConfigError: There is no snapshot, not enough memory, or the disk's directory cannot be used.
            CorruptionError: The snapshot is damaged.
            GoneError: There is no snapshot where one is needed, or it is of another store.
            StorageError: The disk failed.
            UnavailableError: The server is not there.

        Cancellation: nothing is left of the copy.
        """
        dial = self._dial
        self.doing = _CONNECTING
        reader = await EmbeddingReader.connect(
            self._address,
            timeout_s=dial.timeout_s,
            ssl_context=dial.ssl_context,
            server_hostname=dial.server_hostname,
            token=dial.token,
            reach_log=dial.reach_log,
        )
        self.doing = _READING
        lease = CopyLease.of(self._config)
        specs = list(reader.tables.values())
        for line in self._config.unmatched(reader.tables) if specs else ():
            _log.warning("replica: %s", line)
        storage = Storage(self._config, self._folders, specs)
        try:
            if snapshot is not None:
                with snapshot_in_use(snapshot):
                    generation = await self._load(snapshot, reader, lease, storage, held_bytes)
            elif all(spec.num_rows for spec in specs if self._config.wants(spec.fqn)):
                self._check_memory(specs, 0, held_bytes)
                generation = await self._load_live(reader, lease, storage)
            else:
                generation = await self._load_newest(reader, lease, storage, held_bytes)
            targets = [status.accepted_seq for status in await reader.status()]
        except BaseException:
            try:
                await reader.close()
            finally:  # also where that is cancelled
                await asyncio.to_thread(storage.close)
            raise
        return Followed(
            generation,
            reader,
            self._config,
            lease,
            target_seqs=targets,
            on_change=on_change,
            on_lost=on_lost,
        )

    async def _load_live(self, reader: EmbeddingReader, lease: CopyLease, storage: Storage) -> Generation:
        try:
            return await load_live(
                reader,
                is_by_step=self._is_by_step,
                make_table=storage.make,
                lease=lease,
                on_progress=lambda: self.on_progress(),
            )
        except UnknownTableError as exc:  # one that another shard has told of: a trainer is just beginning
            raise UnavailableError(f"{exc}: it is not registered at every shard yet") from exc

    async def _load(
        self, folder: Path, reader: EmbeddingReader, lease: CopyLease, storage: Storage, held_bytes: int
    ) -> Generation:
        manifest: SnapshotManifest = await asyncio.to_thread(read_manifest, folder)
        async with _hold(reader, manifest, lease) as hold:

            def check_wanted() -> None:
                storage.check_open()
                hold.check()
                self.on_progress()

            await asyncio.to_thread(verify_snapshot, folder, on_progress=lambda _: check_wanted())
            self._check_memory(list(manifest.tables.values()), manifest.size_bytes, held_bytes)
            await asyncio.to_thread(storage.link, folder, manifest, check_wanted=check_wanted)
            return await asyncio.to_thread(
                load_snapshot,
                folder,
                manifest,
                is_by_step=self._is_by_step,
                make_table=storage.make,
                check_wanted=check_wanted,
            )

    async def _load_newest(
        self, reader: EmbeddingReader, lease: CopyLease, storage: Storage, held_bytes: int
    ) -> Generation:
        async with contextlib.AsyncExitStack() as stack:
            directory = self._config.snapshot_dir
            if directory is None:
                temporary = tempfile.TemporaryDirectory(prefix="headrace-")
                stack.push_async_callback(asyncio.to_thread, temporary.cleanup)  # gigabytes, maybe
                directory = Path(temporary.name)
            folder = await self._fetch_newest(FetchedSnapshots(directory), reader, lease, stack)
            return await self._load(folder, reader, lease, storage, held_bytes)

    async def _fetch_newest(
        self, fetched: FetchedSnapshots, reader: EmbeddingReader, lease: CopyLease, in_use: contextlib.AsyncExitStack
    ) -> Path:
        """Bring the server's newest snapshot, while the log behind it is kept; return its folder, which is in use."""
        tried = ""
        while True:
            try:
                manifest = await newest_snapshot(self._address, dial=self._dial)
            except GoneError as exc:
                raise GoneError(
                    f"{exc}, and tables of virtual ids cannot be read without one: headrace snapshot create"
                ) from exc
            try:
                self.doing = f"snapshot {manifest.name!r} is being fetched"
                async with _hold(reader, manifest, lease) as hold, fetched.alone(hold.check):

                    def check_wanted(_done: int, _total: int, hold: LogHold = hold) -> None:
                        hold.check()
                        self.on_progress()

                    await asyncio.to_thread(fetched.prepare, manifest)
                    await fetch_snapshot(
                        self._address,
                        fetched.files.path,
                        dial=self._dial,
                        name=manifest.name,
                        on_progress=check_wanted,
                    )
                    folder = fetched.files.folder_of(manifest.name)
                    in_use.enter_context(snapshot_in_use(folder))
                self._fetched, self.doing = manifest.name, _READING
                return folder
            except GoneError as exc:  # it was removed, or its log: perhaps there is a newer one by now
                if manifest.name == tried:
                    advice = "headrace snapshot create makes another"
                    if isinstance(exc, SetBackError):  # its place may be beyond that of the other, which is newer
                        advice = f"remove snapshots/{tried} from the server's directory by hand; then {advice}"
                    raise GoneError(f"snapshot {tried!r} cannot be followed from: {exc}; {advice}") from exc
                tried = manifest.name

    @property
    def _is_by_step(self) -> bool:
        return self._config.consistency == "step"

    def _check_memory(self, specs: Collection[TableSpec], snapshot_bytes: int, held_bytes: int) -> None:
        """Refuse a copy that will not fit beside those that are there."""
        needed = memory_needed(self._config, specs, snapshot_bytes)
        limit = self._config.max_memory_bytes
        free = free_memory_bytes() if limit is None else limit - held_bytes
        if needed > free:
            raise ConfigError(
                f"replica: a new copy takes about {format_size(needed)}, {format_size(max(free, 0))} are free "
                f"beside the {format_size(held_bytes)} of the present one"
            )


def _hold(reader: EmbeddingReader, manifest: SnapshotManifest, lease: CopyLease) -> LogHold:
    """Return what has the log behind a snapshot kept; enter it.

    Raises:
        GoneError: The snapshot is of another store.
    """
    server_id = reader.links[0].hello.server_id
    if manifest.server_id != server_id:
        raise GoneError(f"the snapshot is of store {manifest.server_id}, the server has {server_id}")
    marks = [part.mark for part in manifest.parts]
    return LogHold(reader.links, [part.seq + 1 for part in manifest.parts], lease, marks=marks)
