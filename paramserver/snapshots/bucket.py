"""Keep snapshots in an object store: S3, GCS, Azure, or a directory.

    server.json                       whose snapshots lie here; put if absent
    files/SIZE-SHA256-NUMBER          a file of any snapshot; never written twice
    snapshots/NAME.json               the manifest and the object of each file; put if absent, makes the snapshot exist
    clock                             written to learn the store's time

Prune deletes objects that no snapshot names and that are older than a day. An upload sends again what is older than
half a day, under another number, and publishes within half a day. So nothing that it names is old enough to be deleted.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from crc32c import crc32c

from headrace.paramserver.snapshots.directory import SnapshotFiles, by_age, check_file, mapped_errors, read_manifest
from headrace.paramserver.system.direct_file import read_direct
from headrace.paramserver.system.durable import fsync_path
from headrace.paramserver.system.limits import check_room
from headrace.paramserver.system.object_store import Content, ContentHash, ObjectStore
from headrace.schemas.errors import (
    ConfigError,
    CorruptionError,
    RequestError,
    UnavailableError,
)
from headrace.schemas.snapshot_manifest import SnapshotFile, SnapshotManifest, check_snapshot_name

__all__ = ["SnapshotStore", "is_store_url"]

# ON DISK: never renumber, never rename a field.
_FORMAT, _FORMAT_VERSION = "headrace-object-snapshot", 1
_IDENTITY, _CLOCK, _FILES, _SNAPSHOTS = "server.json", "clock", "files/", "snapshots/"
_FILES_AT_ONCE = 4
_REUSE_AGE, _PRUNE_AGE = timedelta(hours=12), timedelta(days=1)


def is_store_url(place: str) -> bool:
    """Return whether a place is an object store's URL, and no path or address."""
    return place.startswith(("file://", "s3://", "gs://", "az://"))


class SnapshotStore:
    """The snapshots of one server under one prefix of an object store.

    Every method raises `UnavailableError` if the store does not answer, `ConfigError` if it refuses us, and
    `CorruptionError` for an object that differs from what was put.

    Thread: any; everything blocks.
    """

    def __init__(self, objects: ObjectStore) -> None:
        """Use the prefix of an object store."""
        self._objects, self._where = objects, objects.where

    @classmethod
    def of_url(cls, url: str) -> SnapshotStore:
        """Return the store at a URL; see `ObjectStore.of_url`."""
        return cls(ObjectStore.of_url(url))

    def claim(self, server_id: str) -> None:
        """Take the prefix for a server; `ConfigError` if it is another's."""
        ours = json.dumps({"format": _FORMAT, "format_version": _FORMAT_VERSION, "server_id": server_id}).encode()
        found = self._objects.put_if_absent(_IDENTITY, ours)
        if found != ours:
            raise ConfigError(f"{self._where}: has snapshots of another server: use another prefix for {server_id}")

    def names(self) -> list[str]:
        """Return the snapshots' names, sorted."""
        paths = sorted(found.path for found in self._objects.list(_SNAPSHOTS))
        return [path.removeprefix(_SNAPSHOTS).removesuffix(".json") for path in paths]

    def manifests(self) -> list[SnapshotManifest]:
        """Return the snapshots' manifests, oldest first."""
        return by_age(self.manifest_of(name) for name in self.names())

    def manifest_of(self, name: str) -> SnapshotManifest:
        """Return a snapshot's manifest; `GoneError` if there is none."""
        return self._read(name)[0]

    def upload(self, folder: Path, *, on_progress: Callable[[int], None] = lambda _: None) -> int:
        """Put a published snapshot's directory into the store, read back what was sent, and publish it.

        A call after an interruption sends only what is missing. `on_progress` gets the bytes done since its last call.

        Returns:
            The bytes that were sent.

        Raises:
            ConfigError: The prefix is another server's, or `folder` is no snapshot.
            CorruptionError: A local file is damaged, or an object came back altered.
            RequestError: The store has another snapshot of that name.
            UnavailableError: The store is away, or the upload took more than half a day; call again.
            StorageError: A local file cannot be read.
        """
        manifest = replace(read_manifest(folder), lease_s=0)
        self.claim(manifest.server_id)
        began = self._objects.now()
        named = {key for name in self.names() for key in self._read(name)[1].values()}
        # By content, the youngest last.
        stored = sorted(self._objects.list(_FILES), key=lambda found: found.put_at)
        there = {f.path.rpartition("-")[0]: f.path for f in stored if _is_young(f.put_at, began)}

        def send(item: tuple[str, SnapshotFile]) -> tuple[str, str, int]:
            path, file = item
            content = _content_of(folder / path, file)
            prefix = f"{_FILES}{content}"
            key, sent_bytes = there.get(prefix), 0
            if key is not None and key not in named and not self._objects.is_whole(key, content):
                key = None  # sent by an upload that was killed before it had checked
            if key is None:
                key, sent_bytes = f"{prefix}-{secrets.token_hex(4)}", file.size_bytes
                self._objects.upload(key, content, lambda: read_direct(folder / path))
            on_progress(file.size_bytes)
            return path, key, sent_bytes

        with ThreadPoolExecutor(_FILES_AT_ONCE, "headrace-upload") as pool:
            sent = list(pool.map(send, manifest.files().items()))
        if not _is_young(began, self._objects.now()):
            raise UnavailableError(f"{self._where}: the upload of {manifest.name} took more than half a day: try again")
        data = _encode(manifest, {path: key for path, key, _ in sent})
        # A lost reply makes us meet our own manifest, or one whose objects were sent by an earlier call.
        found = self._objects.put_if_absent(_path_of(manifest.name), data)
        if _decode(found, self._where)[0] != manifest:
            raise RequestError(f"{self._where}: there is another snapshot {manifest.name!r} already")
        return sum(sent_bytes for *_, sent_bytes in sent)

    def check(self, name: str, *, on_progress: Callable[[int], None] = lambda _: None) -> SnapshotManifest:
        """Read every byte of a snapshot and return its manifest; `CorruptionError` names a damaged object."""
        manifest, objects = self._read(name)
        for key in objects.values():
            for chunk in self._checked_chunks(key):
                on_progress(len(chunk))
        return manifest

    def fetch(
        self, name: str, files: SnapshotFiles, *, on_progress: Callable[[int], None] = lambda _: None
    ) -> SnapshotManifest:
        """Copy a snapshot into a directory, checked, whole or not at all, and return its manifest.

        Raises:
            GoneError: There is no such snapshot.
            RequestError: The directory has one of that name.
            StorageError: The disk failed or lacks room.
        """
        manifest, objects = self._read(name)
        if files.folder_of(name).exists():
            raise RequestError(f"there is a snapshot {name!r} in {files.path} already")
        files.discard(name)  # of an interrupted fetch
        folder = files.new_folder(name)
        with mapped_errors(folder):
            folder.mkdir(parents=True)
            check_room(folder, manifest.size_bytes, what=f"snapshot {name!r}")
            for path, file in manifest.files().items():
                (folder / path).parent.mkdir(exist_ok=True)
                with open(folder / path, "wb") as target:
                    for chunk in self._checked_chunks(objects[path]):
                        target.write(chunk)
                        on_progress(len(chunk))
                check_file(folder / path, file)
                fsync_path(folder / path)
            for part in {(folder / path).parent for path in objects}:
                fsync_path(part)
        files.publish(manifest)
        return manifest

    def remove(self, name: str) -> None:
        """Remove a snapshot; its objects go with a later `prune`. Removing one twice is harmless."""
        self._objects.delete(_path_of(name))

    def prune(self) -> int:
        """Delete objects that no snapshot names and that are older than a day; return how many."""
        now = self._objects.now()
        # First the objects: whatever is named later is younger than these.
        old = [found.path for found in self._objects.list(_FILES) if now - found.put_at > _PRUNE_AGE]
        named = {key for name in self.names() for key in self._read(name)[1].values()}
        gone = [key for key in old if key not in named]
        for key in gone:
            self._objects.delete(key)
        return len(gone)

    def _read(self, name: str) -> tuple[SnapshotManifest, dict[str, str]]:
        path = _path_of(name)
        return _decode(self._objects.get(path), f"{self._where}/{path}")

    def _checked_chunks(self, key: str) -> Iterator[bytes]:
        return self._objects.download(key, _content_in(key, self._where))


def _path_of(name: str) -> str:
    return f"{_SNAPSHOTS}{check_snapshot_name(name)}.json"


def _is_young(at: datetime, now: datetime) -> bool:
    return now - at < _REUSE_AGE


def _content_of(path: Path, expected: SnapshotFile) -> Content:
    """Return a local file's content; `CorruptionError` if it is not the manifest's."""
    found, crc = ContentHash(), 0
    with mapped_errors(path):
        for chunk in read_direct(path):
            found.update(chunk)
            crc = crc32c(chunk, crc, True)
    content = found.content()
    if (content.size_bytes, crc) != (expected.size_bytes, expected.crc32c):
        raise CorruptionError(f"{path}: not the file of the manifest; it is not uploaded")
    return content


def _content_in(key: str, where: str) -> Content:
    """Return the content that an object's name tells."""
    try:
        return Content.parse(key.removeprefix(_FILES).rpartition("-")[0])
    except ValueError as exc:
        raise CorruptionError(f"{where}: an object of a snapshot has a wrong name: {exc}") from exc


def _encode(manifest: SnapshotManifest, objects: dict[str, str]) -> bytes:
    body = {"manifest": manifest.encode().decode(), "objects": objects}
    values = {"format": _FORMAT, "format_version": _FORMAT_VERSION, **body}
    return _dump(values | {"crc32c": crc32c(_dump(values))})


def _decode(data: bytes, where: str) -> tuple[SnapshotManifest, dict[str, str]]:
    try:
        values = json.loads(data)
        found = values.pop("crc32c")
        if (values["format"], values["format_version"]) != (_FORMAT, _FORMAT_VERSION):
            raise ValueError("another format or version")
        if crc32c(_dump(values)) != found:
            raise ValueError("its checksum is wrong")
        manifest, objects = SnapshotManifest.decode(values["manifest"].encode()), values["objects"]
        if set(objects) != set(manifest.files()):
            raise ValueError("its objects are not those of its files")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise CorruptionError(f"{where}: no snapshot's manifest: {exc}") from exc
    return manifest, objects


def _dump(values: dict[str, Any]) -> bytes:
    return json.dumps(values, indent=2, sort_keys=True).encode() + b"\n"
