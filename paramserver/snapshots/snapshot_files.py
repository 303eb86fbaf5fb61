"""Snapshots as files: publish, list, read, verify and remove. One directory a server.

    snapshots/NAME/manifest.json         written last, before the rename that publishes all
    snapshots/NAME/shard-0000/…          a RocksDB of its own; files may be hard links to those of the store
    snapshots/.new-NAME                  being made; counts for nothing
    snapshots/.gone-NAME                 being removed; counts for nothing

Published means: the directory has its name, and everything in it and the name itself are on disk.
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

from headrace.paramserver.files.direct_file import read_direct
from headrace.paramserver.files.durable_files import fsync_path
from headrace.paramserver.store.block_check import BlockCheck
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
    "check_file",
    "hash_file",
    "hash_folder",
    "link_or_copy",
    "part_folder",
    "read_manifest",
    "verify_snapshot",
]

_NEW, _GONE = ".new-", ".gone-"
# Files of rows: RocksDB writes them once. All others are copied, as it may append to them.
_ROW_FILES = ".sst"
# What lies about unpublished and unchanged for longer than this was left by somebody who is gone.
_STALE_S = 86_400.0


FileIdentity = tuple[int, int, int, int]
"""A file whatever its names are: its device and its inode; its length and time of change, as an inode is used again."""


@dataclass(frozen=True, slots=True)
class _ReadManifest:
    """A manifest that was read: of a store of terabytes it lists ten thousands of files, too many to be read often."""

    identity: FileIdentity
    manifest: SnapshotManifest
    paths: frozenset[str]


class SnapshotFiles:
    """The snapshots of one server.

    Attributes:
        path: Their directory; made with the first of them.

    Thread: any; everything blocks.
    """

    def __init__(self, path: Path) -> None:
        """Look into a directory, which need not be there."""
        self.path = path
        self._read_manifests: dict[str, _ReadManifest] = {}

    def folder_of(self, name: str) -> Path:
        """Return the directory of a published snapshot."""
        return self.path / check_snapshot_name(name)

    def new_folder(self, name: str) -> Path:
        """Return the directory in which a snapshot is made."""
        return self.path / f"{_NEW}{check_snapshot_name(name)}"

    def list(self) -> tuple[list[SnapshotManifest], list[str]]:
        """Return the manifests of all published snapshots, oldest first, and a line for each that cannot be read.

        Those of one store are together, in the order of their places in its log: a maker's clock may have been wrong.
        Stores are in the order of their last snapshots' clocks, as they have nothing else in common.

        Raises:
            StorageError: The directory cannot be read.
        """
        with _mapped_errors(self.path):
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
                pass  # removed since it was listed
            except HeadraceError as exc:
                damage.append(str(exc))
        return _by_age(manifests), damage

    def manifest_of(self, name: str) -> SnapshotManifest:
        """Return a published snapshot's manifest.

        Raises:
            GoneError: There is no such snapshot.
            CorruptionError: The manifest is damaged.
        """
        return self._read_manifest(name).manifest

    def _read_manifest(self, name: str) -> _ReadManifest:
        path = self.folder_of(name) / MANIFEST_NAME
        try:
            with _mapped_errors(path):
                identity = _identity_of(path)
                known = self._read_manifests.get(name)
                if known is None or known.identity != identity:
                    manifest = SnapshotManifest.decode(path.read_bytes())
                    known = self._read_manifests[name] = _ReadManifest(identity, manifest, frozenset(manifest.files()))
                return known
        except FileNotFoundError as exc:
            self._read_manifests.pop(name, None)
            raise GoneError(f"there is no snapshot {name!r} in {self.path}") from exc
        except CorruptionError as exc:
            raise CorruptionError(f"{path}: {exc}") from exc

    def newest(self, server_id: str | None = None) -> SnapshotManifest | None:
        """Return the newest snapshot that can be read and stays; None when there is none.

        Args:
            server_id: Look only at this store's; None for the last of the list.
        """
        manifests = [m for m in self.list()[0] if not m.lease_s and (server_id is None or m.server_id == server_id)]
        return manifests[-1] if manifests else None

    def row_files_of_newest(self, server_id: str) -> dict[FileIdentity, SnapshotFile]:
        """Return what the newest snapshot of a store says of its files of rows, of which its copies have hard links.

        RocksDB writes such a file once. So one that has the same identity now has the same bytes, unless the disk has
        lost some: then the checksum of before finds it, and a new one would hide it.

        Raises:
            StorageError: The disk failed.
        """
        manifest = self.newest(server_id)
        known: dict[FileIdentity, SnapshotFile] = {}
        if manifest is not None:
            folder = self.folder_of(manifest.name)
            for path, file in manifest.files().items():
                if path.endswith(_ROW_FILES):
                    with _mapped_errors(folder), contextlib.suppress(FileNotFoundError):  # removed since
                        known[_identity_of(folder / path)] = file
        return known

    def publish(self, manifest: SnapshotManifest) -> None:
        """Give what the shards have made its manifest and its name, durably.

        Raises:
            CorruptionError: A file of the manifest is not there.
            RequestError: There is a snapshot of that name.
            StorageError: The disk failed; nothing is published.
        """
        folder, target = self.new_folder(manifest.name), self.folder_of(manifest.name)
        with _mapped_errors(folder):
            for path, file in manifest.files().items():
                if not (folder / path).is_file() or (folder / path).stat().st_size != file.size_bytes:
                    raise CorruptionError(f"{folder / path}: not the file that its shard has made")
                if not path.endswith(_ROW_FILES):  # of the same names and lengths, in another attempt of this name
                    check_file(folder / path, file)
            if target.exists():
                raise RequestError(f"there is a snapshot {manifest.name!r} already")
            (folder / MANIFEST_NAME).write_bytes(manifest.encode())
            fsync_path(folder / MANIFEST_NAME)
            fsync_path(folder)
            folder.rename(target)
            fsync_path(self.path)
            fsync_path(self.path.parent)  # of the first snapshot, which has made the directory of them all

    def discard(self, name: str) -> None:
        """Remove what has been made of a snapshot that is not published."""
        shutil.rmtree(self.new_folder(name), ignore_errors=True)

    def remove(self, name: str) -> None:
        """Remove a published snapshot; from the first moment it is not seen any more.

        Raises:
            GoneError: There is no such snapshot.
            StorageError: It could not be removed.
        """
        gone = self.path / f"{_GONE}{name}"
        try:
            with _mapped_errors(self.path):
                folder = self.folder_of(name)
                if folder.exists():
                    shutil.rmtree(gone, ignore_errors=True)  # of one of its name, whose removal was interrupted
                folder.rename(gone)
                fsync_path(self.path)
                with contextlib.suppress(FileNotFoundError):  # a sweep is at it, too
                    shutil.rmtree(gone)
        except FileNotFoundError as exc:
            raise GoneError(f"there is no snapshot {name!r} in {self.path}") from exc

    def sweep(self) -> tuple[str, ...]:
        """Remove what interrupted removals, and attempts without a change for a day, have left, and what nobody reads.

        Returns:
            Names of the snapshots that were removed because their lease had run out.

        Raises:
            StorageError: The directory cannot be read, or a snapshot not be removed.
        """
        with _mapped_errors(self.path):
            for path in self.path.iterdir() if self.path.is_dir() else ():
                with contextlib.suppress(FileNotFoundError):  # somebody else removes it
                    if path.name.startswith(_GONE) or (path.name.startswith(_NEW) and _is_stale(path)):
                        shutil.rmtree(path, ignore_errors=True)
        expired = []
        for manifest in self.list()[0]:
            with _mapped_errors(self.path), contextlib.suppress(GoneError, FileNotFoundError):
                if manifest.lease_s and _idle_s(self.folder_of(manifest.name)) > manifest.lease_s:
                    self.remove(manifest.name)
                    expired.append(manifest.name)
        return tuple(expired)

    def read(self, name: str, path: str, offset: int, max_bytes: int) -> tuple[bytes, int]:
        """Return (bytes of a file from an offset on, its whole length).

        Args:
            name: Snapshot.
            path: One of its manifest; empty for the manifest itself.
            offset: First byte.
            max_bytes: Most bytes.

        Raises:
            GoneError: The snapshot is not there, or has no such file.
            StorageError: It cannot be read.
        """
        known = self._read_manifest(name)
        if path and path not in known.paths:
            raise GoneError(f"snapshot {name!r} has no file {path!r}")
        file_path = self.folder_of(name) / (path or MANIFEST_NAME)
        try:
            with _mapped_errors(file_path), open(file_path, "rb") as file:
                if known.manifest.lease_s:
                    os.utime(self.folder_of(name))  # its lease begins anew
                return os.pread(file.fileno(), max_bytes, offset), os.fstat(file.fileno()).st_size
        except FileNotFoundError as exc:
            raise GoneError(f"snapshot {name!r} has been removed") from exc


def verify_snapshot(folder: Path, *, on_progress: Callable[[int], None] | None = None) -> SnapshotManifest:
    """Check every byte of a snapshot's directory, wherever it lies; return its manifest.

    Args:
        folder: Directory with `manifest.json`.
        on_progress: Called with the bytes that have been checked since the last call.

    Raises:
        ConfigError: There is no snapshot.
        CorruptionError: A file is missing, has another length or another checksum; it is named.
        StorageError: A file cannot be read.
    """
    manifest = read_manifest(folder)
    for path, expected in manifest.files().items():
        check_file(folder / path, expected, on_progress=on_progress)
    return manifest


def read_manifest(folder: Path) -> SnapshotManifest:
    """Return the manifest of a snapshot's directory, wherever it lies.

    Raises:
        ConfigError: There is no snapshot.
        CorruptionError: The manifest is damaged.
        StorageError: It cannot be read.
    """
    path = folder / MANIFEST_NAME
    try:
        with _mapped_errors(folder):
            data = path.read_bytes()
    except FileNotFoundError as exc:
        raise ConfigError(f"{folder}: no snapshot: there is no {MANIFEST_NAME}") from exc
    try:
        return SnapshotManifest.decode(data)
    except CorruptionError as exc:
        raise CorruptionError(f"{path}: {exc}") from exc


def check_file(path: Path, expected: SnapshotFile, *, on_progress: Callable[[int], None] | None = None) -> None:
    """Check one file.

    Raises:
        CorruptionError: It is missing, or not what is expected.
        StorageError: It cannot be read.
    """
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
    """Return what a manifest says of a file. Other Python threads run meanwhile.

    Args:
        path: The file.
        check: Is given all of its bytes, too.
        on_progress: Called with the bytes that have been read since the last call.

    Raises:
        FileNotFoundError: It is not there.
        CorruptionError: `check` has found damage.
        StorageError: It cannot be read.
    """
    size_bytes = crc = 0
    with _mapped_errors(path):
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
    """Make a shard's folder last, and return what a manifest says of each of its files.

    Args:
        folder: With files that nobody changes any more.
        known: What is said of these is not read again; see `SnapshotFiles.row_files_of_newest`. The other files of
            rows are added when they have been read, so that nothing is read twice whatever comes in between.
        is_checked: Look at the blocks' own checksums in files of rows that are read. A file that the disk has damaged
            would get a checksum of its damage.
        on_progress: Called with the bytes that have been read since the last call; what it raises ends it.

    Raises:
        CorruptionError: A block of rows is damaged; file and place are named.
        StorageError: A file cannot be read or synced.
    """
    known = {} if known is None else known
    with _mapped_errors(folder):
        paths = sorted(folder.iterdir())
        files = []
        for path in paths:
            identity = _identity_of(path)
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


def _identity_of(path: Path) -> FileIdentity:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def link_or_copy(source: Path, target: Path) -> None:
    """Give a store of one's own a file of a snapshot, which is not changed whatever is done in that store.

    Raises:
        OSError: The disk failed, or the file is not there.
    """
    if source.suffix == _ROW_FILES:
        try:
            os.link(source, target)
            return
        except OSError:
            pass  # another file system, one without hard links, or what the copy will say
    shutil.copyfile(source, target)


def _idle_s(path: Path) -> float:
    return time.time() - path.stat().st_mtime


def _is_stale(new_folder: Path) -> bool:
    # Bytes that come change the times of their file alone: not those of the folders above.
    changed_s = (path.lstat().st_mtime for path in itertools.chain((new_folder,), new_folder.rglob("*")))
    return all(time.time() - at_s > _STALE_S for at_s in changed_s)


def _by_age(manifests: Iterable[SnapshotManifest]) -> list[SnapshotManifest]:
    stores: dict[str, list[SnapshotManifest]] = {}
    for manifest in manifests:
        stores.setdefault(manifest.server_id, []).append(manifest)
    for own in stores.values():
        own.sort(key=lambda m: ([part.seq for part in m.parts], m.created_us, m.name))
    in_order = sorted(stores.values(), key=lambda own: (max(m.created_us for m in own), own[-1].server_id))
    return [manifest for own in in_order for manifest in own]


def part_folder(folder: Path, part: ShardPart) -> Path:
    """Return where a shard's part lies in a snapshot's directory."""
    return folder / shard_folder(part.shard)


@contextlib.contextmanager
def _mapped_errors(path: Path) -> Iterator[None]:
    """Turn the file system's errors into ours, but for a file that is not there."""
    try:
        yield
    except (FileNotFoundError, HeadraceError):
        raise
    except OSError as exc:
        raise StorageError(f"{path}: {exc.strerror or exc}") from exc
