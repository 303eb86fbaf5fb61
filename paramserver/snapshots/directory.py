"""Publish, list, read, verify and remove snapshots in a server's directory of snapshots.

    snapshots/NAME/manifest.json         written last, before the rename that publishes the snapshot
    snapshots/NAME/shard-0000/…          a RocksDB of its own; its files may be hard links to the store's
    snapshots/.new-NAME                  being made; not a snapshot yet
    snapshots/.gone-NAME                 being removed; no snapshot any more

A published snapshot has its name, and its contents and its name are durable.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

from crc32c import crc32c

from headrace.paramserver.store.sst.table_reader import BlockCheck
from headrace.paramserver.system.direct_file import read_direct
from headrace.paramserver.system.durable import fsync_path, move_into_place, write_file
from headrace.schemas.errors import ConfigError, CorruptionError, GoneError, HeadraceError, RequestError, StorageError
from headrace.schemas.snapshot_manifest import (
    MANIFEST_NAME,
    ShardPart,
    SnapshotFile,
    SnapshotManifest,
    check_snapshot_name,
    shard_folder,
)

__all__ = [
    "FileIdentity",
    "SnapshotFiles",
    "by_age",
    "check_file",
    "hash_file",
    "hash_folder",
    "identity_of",
    "link_or_copy",
    "mapped_errors",
    "part_folder",
    "read_manifest",
    "verify_snapshot",
]

_NEW, _GONE = ".new-", ".gone-"
# RocksDB writes files of rows once. It may append to other files, so those are copied and not linked.
_ROW_FILES = ".sst"
# An unpublished snapshot that has not changed for this long has been abandoned.
_STALE_S = 86_400.0


FileIdentity = tuple[int, int, int, int]
"""Device, inode, length and modification time of a file, whatever its name; inodes alone are reused."""


@dataclass(frozen=True, slots=True)
class _ReadManifest:
    """A cached manifest. For a store of terabytes it lists tens of thousands of files, too many to read often."""

    identity: FileIdentity
    manifest: SnapshotManifest
    paths: frozenset[str]


class SnapshotFiles:
    """The snapshots of one server.

    Every method raises `StorageError` if the disk fails, and `GoneError` for a snapshot that does not exist.

    Attributes:
        path: Their directory; the first snapshot creates it.

    Thread: any; everything blocks.
    """

    def __init__(self, path: Path) -> None:
        """Use a directory, which may be missing."""
        self.path = path
        self._read_manifests: dict[str, _ReadManifest] = {}

    def folder_of(self, name: str) -> Path:
        """Return the directory of a published snapshot."""
        return self.path / check_snapshot_name(name)

    def new_folder(self, name: str) -> Path:
        """Return the directory in which a snapshot is made."""
        return self.path / f"{_NEW}{check_snapshot_name(name)}"

    def list(self) -> tuple[list[SnapshotManifest], list[str]]:
        """Return the manifests of all published snapshots, oldest first, and a line about each unreadable one.

        Snapshots of one store are ordered by their positions in its log, because clocks may be wrong. Stores are
        ordered by the clocks of their last snapshots, as they have nothing else in common.
        """
        with mapped_errors(self.path, FileNotFoundError):
            try:
                names = [entry.name for entry in os.scandir(self.path) if entry.is_dir() and entry.name[0] != "."]
            except FileNotFoundError:
                names = []
        for name in set(self._read_manifests).difference(names):
            self._read_manifests.pop(name, None)
        manifests, damage = [], []
        for name in sorted(names):
            try:
                manifests.append(self.manifest_of(name))
            except GoneError:
                pass  # removed meanwhile
            except HeadraceError as exc:
                damage.append(str(exc))
        return by_age(manifests), damage

    def manifest_of(self, name: str) -> SnapshotManifest:
        """Return a published snapshot's manifest; `CorruptionError` if it is damaged."""
        return self._read_manifest(name).manifest

    def _read_manifest(self, name: str) -> _ReadManifest:
        path = self.folder_of(name) / MANIFEST_NAME
        try:
            with mapped_errors(path, FileNotFoundError):
                identity = identity_of(path)
                known = self._read_manifests.get(name)
                if known is None or known.identity != identity:
                    manifest = SnapshotManifest.decode(path.read_bytes())
                    known = self._read_manifests[name] = _ReadManifest(identity, manifest, frozenset(manifest.files()))
                return known
        except FileNotFoundError as exc:
            self._read_manifests.pop(name, None)
            raise GoneError(f"there is no snapshot {name!r}") from exc
        except CorruptionError as exc:
            raise CorruptionError(f"{path}: {exc}") from exc

    def newest(self, server_id: str | None = None) -> SnapshotManifest | None:
        """Return the newest readable snapshot without a lease, of one store or, for None, last in the list."""
        manifests = [m for m in self.list()[0] if not m.lease_s and (server_id is None or m.server_id == server_id)]
        return manifests[-1] if manifests else None

    def row_files_of_newest(self, server_id: str) -> dict[FileIdentity, SnapshotFile]:
        """Return the manifest entries of the newest snapshot's files of rows, which it hard-links with the store.

        RocksDB writes such a file once, so a file with the same identity has the same bytes. If the disk has lost some
        of them, the old checksum shows it, while a new one would hide it.
        """
        manifest = self.newest(server_id)
        known: dict[FileIdentity, SnapshotFile] = {}
        if manifest is not None:
            folder = self.folder_of(manifest.name)
            for path, file in manifest.files().items():
                if path.endswith(_ROW_FILES):
                    with (
                        mapped_errors(folder, FileNotFoundError),
                        contextlib.suppress(FileNotFoundError),
                    ):  # removed meanwhile
                        known[identity_of(folder / path)] = file
        return known

    def publish(self, manifest: SnapshotManifest) -> None:
        """Give the shards' parts a manifest and the snapshot its name, durably.

        Raises:
            CorruptionError: A file of the manifest is missing or differs.
            RequestError: The name is taken.
        """
        folder, target = self.new_folder(manifest.name), self.folder_of(manifest.name)
        with mapped_errors(folder, FileNotFoundError):
            for path, file in manifest.files().items():
                if not (folder / path).is_file() or (folder / path).stat().st_size != file.size_bytes:
                    raise CorruptionError(f"{folder / path}: not the file that its shard has made")
                if not path.endswith(_ROW_FILES):  # another attempt at this name may leave the same names and lengths
                    check_file(folder / path, file)
            if target.exists():
                raise RequestError(f"there is a snapshot {manifest.name!r} already")
            write_file(folder / MANIFEST_NAME, manifest.encode())
            move_into_place(folder, target)
            fsync_path(self.path.parent)  # the first snapshot has created `self.path`

    def discard(self, name: str) -> None:
        """Remove the parts of an unpublished snapshot."""
        shutil.rmtree(self.new_folder(name), ignore_errors=True)

    def remove(self, name: str) -> None:
        """Remove a published snapshot. It disappears at once, before its files do."""
        gone = self.path / f"{_GONE}{name}"
        try:
            with mapped_errors(self.path, FileNotFoundError):
                folder = self.folder_of(name)
                if folder.exists():
                    shutil.rmtree(gone, ignore_errors=True)  # from an interrupted removal of its name
                move_into_place(folder, gone)
                with contextlib.suppress(FileNotFoundError):  # `prune_abandoned` removes it, too
                    shutil.rmtree(gone)
        except FileNotFoundError as exc:
            raise GoneError(f"there is no snapshot {name!r}") from exc

    def prune_abandoned(self) -> tuple[str, ...]:
        """Remove remains of interrupted removals, attempts that are a day old, and snapshots whose lease has run out.

        Returns the names of those snapshots.
        """
        with mapped_errors(self.path, FileNotFoundError):
            for path in self.path.iterdir() if self.path.is_dir() else ():
                with contextlib.suppress(FileNotFoundError):  # another process removes it
                    if path.name.startswith(_GONE) or (path.name.startswith(_NEW) and _is_stale(path)):
                        shutil.rmtree(path, ignore_errors=True)
        expired = []
        for manifest in self.list()[0]:
            with mapped_errors(self.path, FileNotFoundError), contextlib.suppress(GoneError, FileNotFoundError):
                if manifest.lease_s and _idle_s(self.folder_of(manifest.name)) > manifest.lease_s:
                    self.remove(manifest.name)
                    expired.append(manifest.name)
        return tuple(expired)

    def read(self, name: str, path: str, offset: int, max_bytes: int) -> tuple[bytes, int]:
        """Return (at most `max_bytes` of a file from an offset on, its whole length); renews the snapshot's lease.

        An empty path stands for the manifest. `RequestError` for a place that is not in the file.
        """
        if offset < 0 or max_bytes < 1:
            raise RequestError(f"{max_bytes} bytes from {offset} on: out of range")
        known = self._read_manifest(name)
        if path and path not in known.paths:
            raise GoneError(f"snapshot {name!r} has no file {path!r}")
        file_path = self.folder_of(name) / (path or MANIFEST_NAME)
        try:
            with mapped_errors(file_path, FileNotFoundError), open(file_path, "rb") as file:
                size_bytes = os.fstat(file.fileno()).st_size
                if offset > size_bytes:
                    what = path or "the manifest"
                    raise RequestError(f"{what} of snapshot {name!r} has {size_bytes} bytes, and none from {offset} on")
                if known.manifest.lease_s:
                    os.utime(self.folder_of(name))  # the time of the lease starts again
                return os.pread(file.fileno(), max_bytes, offset), size_bytes
        except FileNotFoundError as exc:
            raise GoneError(f"snapshot {name!r} has been removed") from exc


def verify_snapshot(folder: Path, *, on_progress: Callable[[int], None] | None = None) -> SnapshotManifest:
    """Check every byte of a snapshot's directory and return its manifest.

    `on_progress` gets the number of bytes checked since the last call.

    Raises:
        ConfigError: It is not a snapshot.
        CorruptionError: A file is missing or differs; the message names it.
        StorageError: A file cannot be read.
    """
    manifest = read_manifest(folder)
    for path, expected in manifest.files().items():
        check_file(folder / path, expected, on_progress=on_progress)
    return manifest


def read_manifest(folder: Path) -> SnapshotManifest:
    """Return the manifest of a snapshot's directory; raises as `verify_snapshot` does."""
    path = folder / MANIFEST_NAME
    try:
        with mapped_errors(folder, FileNotFoundError):
            data = path.read_bytes()
    except FileNotFoundError as exc:
        raise ConfigError(f"{folder}: no snapshot: there is no {MANIFEST_NAME}") from exc
    try:
        return SnapshotManifest.decode(data)
    except CorruptionError as exc:
        raise CorruptionError(f"{path}: {exc}") from exc


def check_file(path: Path, expected: SnapshotFile, *, on_progress: Callable[[int], None] | None = None) -> None:
    """Check the length and checksum of a file; `CorruptionError` if it is missing or differs."""
    try:
        found = hash_file(path, on_progress=on_progress)
    except FileNotFoundError as exc:
        raise CorruptionError(f"{path}: missing") from exc
    if found.size_bytes != expected.size_bytes:
        raise CorruptionError(f"{path}: {found.size_bytes} bytes, the manifest says {expected.size_bytes}")
    if found.crc32c != expected.crc32c:
        raise CorruptionError(f"{path}: its checksum is not the manifest's")


def hash_file(
    path: Path, *, check: BlockCheck | None = None, on_progress: Callable[[int], None] | None = None
) -> SnapshotFile:
    """Return a file's manifest entry, and let `check` see its blocks. Other Python threads run meanwhile.

    Raises:
        FileNotFoundError: It is missing.
        CorruptionError: `check` found damage.
        StorageError: It cannot be read.
    """
    size_bytes = crc = 0
    with mapped_errors(path, FileNotFoundError):
        for chunk in read_direct(path):
            if check is not None:
                check.take(chunk)
            crc = crc32c(chunk, crc, True)
            size_bytes += len(chunk)
            if on_progress is not None:
                on_progress(len(chunk))
    if check is not None:
        check.finish()
    return SnapshotFile(name=path.name, size_bytes=size_bytes, crc32c=crc)


def hash_folder(
    folder: Path,
    *,
    known: MutableMapping[FileIdentity, SnapshotFile] | None = None,
    is_checked: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> tuple[SnapshotFile, ...]:
    """Make a folder of finished files durable, and return the manifest entry of each.

    Args:
        folder: The folder.
        known: Entries of files that need not be read again. Files of rows are added as they are read, so that an
            interrupted attempt does not read them twice.
        is_checked: Verify the blocks' own checksums of rows; otherwise a damaged file gets a checksum of its damage.
        on_progress: Called with the number of bytes read since the last call; may raise to stop.

    Raises:
        CorruptionError: A block of rows is damaged; the message names file and place.
        StorageError: A file cannot be read or synced.
    """
    known = {} if known is None else known
    with mapped_errors(folder, FileNotFoundError):
        files = []
        for path in sorted(folder.iterdir()):
            identity = identity_of(path)
            if (before := known.get(identity)) is not None:
                files.append(replace(before, name=path.name))
                continue
            fsync_path(path)
            is_rows = path.suffix == _ROW_FILES
            check = BlockCheck.open(path) if is_checked and is_rows else None
            files.append(hash_file(path, check=check, on_progress=on_progress))
            if is_rows:
                known[identity] = files[-1]
        fsync_path(folder)
        fsync_path(folder.parent)
    return tuple(files)


def identity_of(path: Path) -> FileIdentity:
    """Return what tells a file that was written once from any other."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def link_or_copy(source: Path, target: Path) -> None:
    """Put a file of a snapshot into a store such that the store's writes never change the snapshot."""
    if source.suffix == _ROW_FILES:
        try:
            os.link(source, target)
            return
        except OSError:
            pass  # another file system, or one without hard links; other errors recur in the copy
    shutil.copyfile(source, target)


def _idle_s(path: Path) -> float:
    return time.time() - path.stat().st_mtime


def _is_stale(new_folder: Path) -> bool:
    # Writing a file changes its own time, but not those of the folders above.
    changed_s = (path.lstat().st_mtime for path in itertools.chain((new_folder,), new_folder.rglob("*")))
    return all(time.time() - at_s > _STALE_S for at_s in changed_s)


def by_age(manifests: Iterable[SnapshotManifest]) -> list[SnapshotManifest]:
    """Return manifests oldest first, as `SnapshotFiles.list` orders them."""
    stores: dict[str, list[SnapshotManifest]] = {}
    for manifest in manifests:
        stores.setdefault(manifest.server_id, []).append(manifest)
    for own in stores.values():
        own.sort(key=lambda m: ([part.seq for part in m.parts], m.created_us, m.name))
    in_order = sorted(stores.values(), key=lambda own: (max(m.created_us for m in own), own[-1].server_id))
    return [manifest for own in in_order for manifest in own]


def part_folder(folder: Path, part: ShardPart) -> Path:
    """Return the directory of a shard's part in a snapshot's directory."""
    return folder / shard_folder(part.shard)


@contextlib.contextmanager
def mapped_errors(path: Path, *passes: type[OSError]) -> Iterator[None]:
    """Turn errors of the file system into `StorageError`, except some that the caller handles."""
    try:
        yield
    except passes:
        raise
    except OSError as exc:
        raise StorageError(f"{path}: {exc.strerror or exc}") from exc
