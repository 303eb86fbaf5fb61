"""Keep snapshots in an object store: S3, GCS, Azure, or a directory.

    server.json                       whose snapshots lie here; put if absent
    files/SIZE-SHA256-NUMBER          a file of any snapshot; never written twice
    snapshots/NAME.json               the manifest and the object of each file; put if absent, makes the snapshot exist
    clock                             written to learn the store's time

Prune deletes objects that no snapshot names and that are older than a day. An upload sends again what is older than
half a day, under another number, and publishes within half a day. So nothing that it names is old enough to be deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from crc32c import crc32c

from headrace.paramserver.snapshots.directory import SnapshotFiles, check_file, mapped_errors, read_manifest
from headrace.paramserver.system.direct_file import read_direct
from headrace.paramserver.system.durable import fsync_path
from headrace.paramserver.system.limits import check_room
from headrace.schemas.errors import (
    ConfigError,
    CorruptionError,
    GoneError,
    RequestError,
    StorageError,
    UnavailableError,
)
from headrace.schemas.snapshot_manifest import SnapshotFile, SnapshotManifest, check_snapshot_name

__all__ = ["SnapshotStore"]

# ON DISK: never renumber, never rename a field.
_FORMAT, _FORMAT_VERSION = "headrace-object-snapshot", 1
_IDENTITY, _CLOCK, _FILES, _SNAPSHOTS = "server.json", "clock", "files/", "snapshots/"
# An upload in parts holds this many of them at once, for each of the files that go up together.
_CHUNK_BYTES, _CHUNKS_AT_ONCE, _FILES_AT_ONCE = 8 << 20, 2, 4
_REUSE_AGE, _PRUNE_AGE = timedelta(hours=12), timedelta(days=1)


class SnapshotStore:
    """The snapshots of one server under one prefix of an object store.

    Every method raises `UnavailableError` if the store does not answer, `ConfigError` if it refuses us, and
    `CorruptionError` for an object that differs from what was put.

    Thread: any; everything blocks.
    """

    def __init__(self, store: Any, where: str) -> None:
        """Use a store of `obstore`; `where` names it in errors."""
        self._store, self._where = store, where

    @classmethod
    def of_url(cls, url: str) -> SnapshotStore:
        """Return the store at `s3://…`, `gs://…`, `az://…` or `file:///…`, with the environment's credentials.

        Raises:
            ConfigError: The URL is wrong, or `obstore` is not installed.
        """
        try:
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError as exc:
            raise ConfigError(f"{url}: an object store needs pip install 'headrace[objectstore]'") from exc
        try:
            store = from_url(url, mkdir=True) if url.startswith("file:") else from_url(url)
        except (BaseError, ValueError) as exc:
            raise ConfigError(f"{url}: {_line_of(exc)}") from exc
        return cls(store, url)

    def claim(self, server_id: str) -> None:
        """Take the prefix for a server; `ConfigError` if it is another's."""
        ours = json.dumps({"format": _FORMAT, "format_version": _FORMAT_VERSION, "server_id": server_id}).encode()
        found = self._put_if_absent(_IDENTITY, ours)
        if found != ours:
            raise ConfigError(f"{self._where}: has snapshots of another server: use another prefix for {server_id}")

    def names(self) -> list[str]:
        """Return the snapshots' names, sorted."""
        paths = sorted(path for path, _ in self._list(_SNAPSHOTS))
        return [path.removeprefix(_SNAPSHOTS).removesuffix(".json") for path in paths]

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
        began = self._now()
        named = {key for name in self.names() for key in self._read(name)[1].values()}
        # By content, the youngest last.
        there = {p.rpartition("-")[0]: p for p, at in sorted(self._list(_FILES), key=_by_time) if _is_young(at, began)}

        def send(item: tuple[str, SnapshotFile]) -> tuple[str, str, int]:
            path, file = item
            content = _FILES + _content_name(folder / path, file)
            key, sent_bytes = there.get(content), 0
            if key is not None and key not in named and not self._is_whole(key):
                key = None  # sent by an upload that was killed before it had checked
            if key is None:
                key, sent_bytes = f"{content}-{secrets.token_hex(4)}", file.size_bytes
                with self._mapped_errors(key):
                    self._obstore().put(
                        self._store, key, folder / path, chunk_size=_CHUNK_BYTES, max_concurrency=_CHUNKS_AT_ONCE
                    )
                for _ in self._checked_chunks(key):
                    pass
            on_progress(file.size_bytes)
            return path, key, sent_bytes

        with ThreadPoolExecutor(_FILES_AT_ONCE, "headrace-upload") as pool:
            sent = list(pool.map(send, manifest.files().items()))
        if not _is_young(began, self._now()):
            raise UnavailableError(f"{self._where}: the upload of {manifest.name} took more than half a day: try again")
        data = _encode(manifest, {path: key for path, key, _ in sent})
        # A lost reply makes us meet our own manifest, or one whose objects were sent by an earlier call.
        if _decode(self._put_if_absent(_path_of(manifest.name), data), self._where)[0] != manifest:
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
        self._delete(_path_of(name))

    def prune(self) -> int:
        """Delete objects that no snapshot names and that are older than a day; return how many."""
        now = self._now()
        # First the objects: whatever is named later is younger than these.
        old = [key for key, at in self._list(_FILES) if now - at > _PRUNE_AGE]
        named = {key for name in self.names() for key in self._read(name)[1].values()}
        gone = [key for key in old if key not in named]
        for key in gone:
            self._delete(key)
        return len(gone)

    def _read(self, name: str) -> tuple[SnapshotManifest, dict[str, str]]:
        path = _path_of(name)
        return _decode(self._get(path), f"{self._where}/{path}")

    def _checked_chunks(self, key: str) -> Iterator[bytes]:
        size_bytes, sha = 0, hashlib.sha256()
        with self._mapped_errors(key):
            for chunk in self._obstore().get(self._store, key).stream(min_chunk_size=1 << 20):
                data = bytes(chunk)
                sha.update(data)
                size_bytes += len(data)
                yield data
        if f"{_FILES}{size_bytes}-{sha.hexdigest()}" != key.rpartition("-")[0]:
            raise CorruptionError(f"{self._where}/{key}: its {size_bytes} bytes are not those that were put")

    def _is_whole(self, key: str) -> bool:
        try:
            for _ in self._checked_chunks(key):
                pass
        except CorruptionError:
            return False
        return True

    def _now(self) -> datetime:
        """Return the store's time: ages by our own clock would be wrong when it is."""
        with self._mapped_errors(_CLOCK):
            self._obstore().put(self._store, _CLOCK, b"")
            at: datetime = self._obstore().head(self._store, _CLOCK)["last_modified"]
            return at.astimezone(UTC)

    def _put_if_absent(self, path: str, data: bytes) -> bytes:
        """Put an object unless there is one; return what is there now."""
        from obstore.exceptions import AlreadyExistsError

        with self._mapped_errors(path):
            try:
                self._obstore().put(self._store, path, data, mode="create")
            except AlreadyExistsError:
                return self._get(path)
        return data

    def _get(self, path: str) -> bytes:
        with self._mapped_errors(path):
            return bytes(self._obstore().get(self._store, path).bytes())

    def _delete(self, path: str) -> None:
        with self._mapped_errors(path), contextlib.suppress(FileNotFoundError):
            self._obstore().delete(self._store, path)

    def _list(self, prefix: str) -> Iterator[tuple[str, datetime]]:
        with self._mapped_errors(prefix):
            for page in self._obstore().list(self._store, prefix):
                for found in page:
                    yield found["path"], found["last_modified"].astimezone(UTC)

    @staticmethod
    def _obstore() -> Any:
        import obstore

        return obstore

    @contextlib.contextmanager
    def _mapped_errors(self, path: str) -> Iterator[None]:
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        try:
            yield
        except FileNotFoundError as exc:
            raise GoneError(f"{self._where}/{path}: there is no such object, or no such bucket") from exc
        except (PermissionDeniedError, UnauthenticatedError) as exc:
            raise ConfigError(f"{self._where}/{path}: the store refuses us: {_line_of(exc)}") from exc
        except BaseError as exc:
            raise UnavailableError(f"{self._where}/{path}: {_line_of(exc)}") from exc
        except OSError as exc:  # a local file, or a directory that is the store
            raise StorageError(f"{self._where}/{path}: {_line_of(exc)}") from exc


def _path_of(name: str) -> str:
    return f"{_SNAPSHOTS}{check_snapshot_name(name)}.json"


def _by_time(entry: tuple[str, datetime]) -> datetime:
    return entry[1]


def _is_young(at: datetime, now: datetime) -> bool:
    return now - at < _REUSE_AGE


def _content_name(path: Path, expected: SnapshotFile) -> str:
    """Return a local file's length and SHA-256; `CorruptionError` if it is not the manifest's."""
    sha, crc, size_bytes = hashlib.sha256(), 0, 0
    with mapped_errors(path):
        for chunk in read_direct(path):
            sha.update(chunk)
            crc = crc32c(chunk, crc, True)
            size_bytes += len(chunk)
    if (size_bytes, crc) != (expected.size_bytes, expected.crc32c):
        raise CorruptionError(f"{path}: not the file of the manifest; it is not uploaded")
    return f"{size_bytes}-{sha.hexdigest()}"


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


def _line_of(exc: BaseException) -> str:
    return next((line.strip() for line in str(exc).splitlines() if line.strip()), type(exc).__name__)
