"""Keep snapshots in an object store: S3, GCS, Azure, or a directory.

    server.json                       whose snapshots lie here; put if absent
    files/SIZE-SHA256-NUMBER          a file of any snapshot; never written twice
    snapshots/NAME.json               the manifest and the object of each file; put if absent, makes the snapshot exist
    clock                             written to learn the store's time

Prune deletes objects that no snapshot names and that are older than a day. An upload puts again what is older than
half a day, under another number, and a manifest is put only while all that it names is younger than that day by an
hour. So nothing that it names is old enough to be deleted, however many shards upload and prune at once.

A snapshot is void once one of its shards was set back to before it: a copy of a higher term has begun at an earlier
record (`log/claims.py`), as for archived log. It is never the newest; it can still be named.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from crc32c import crc32c

from headrace.paramserver.log.claims import ClaimedStarts
from headrace.paramserver.snapshots.directory import (
    FileIdentity,
    SnapshotFiles,
    by_age,
    check_file,
    identity_of,
    mapped_errors,
    read_manifest,
)
from headrace.paramserver.system.direct_file import DirectFileWriter, read_direct, write_buffer
from headrace.paramserver.system.durable import fsync_path
from headrace.paramserver.system.limits import check_room
from headrace.paramserver.system.object_store import Content, ContentHash, ObjectStore, StoredObject
from headrace.paramserver.system.text import first_of
from headrace.schemas.errors import ConfigError, CorruptionError, GoneError, RequestError, UnavailableError
from headrace.schemas.snapshot_manifest import SnapshotFile, SnapshotManifest, check_snapshot_name

__all__ = ["SnapshotStore", "is_object_store_url", "local_snapshot"]

# ON DISK: never renumber, never rename a field.
_FORMAT, _FORMAT_VERSION = "headrace-object-snapshot", 2
_IDENTITY, _FILES, _SNAPSHOTS = "server.json", "files/", "snapshots/"
# Each holds at most 20 MiB of pieces. A shard uploads one file after another, several parts of it at once: so it takes
# as much memory for a large table as for a small one.
_FILES_AT_ONCE, _UPLOADS_AT_ONCE = 4, 1
_REUSE_AGE, _NAMED_AGE, _PRUNE_AGE = timedelta(hours=12), timedelta(hours=23), timedelta(days=1)

_T = TypeVar("_T")
_NOBODY_COUNTS: Callable[[int], None] = lambda _: None  # noqa: E731


@dataclass(frozen=True, slots=True)
class _Found:
    """What a store has for an upload to reuse.

    Attributes:
        objects: The youngest object of each content.
        named: Objects of the newest snapshot: they were checked before it was made.
        at: The store's time of the look.
    """

    objects: dict[Content, StoredObject]
    named: frozenset[str]
    at: datetime


class SnapshotStore:
    """The snapshots of one server under one prefix of an object store.

    Every method raises `UnavailableError` if the store does not answer, `ConfigError` if it refuses us, and
    `CorruptionError` for an object that differs from what was put.

    Thread: any; everything blocks.
    """

    def __init__(self, objects: ObjectStore) -> None:
        """Use the prefix of an object store."""
        self._objects, self.where = objects, objects.where
        self._starts = ClaimedStarts(objects)

    @classmethod
    def of_url(cls, url: str, *, creates: bool = True) -> SnapshotStore:
        """Return the store at a URL; see `ObjectStore.of_url`."""
        return cls(ObjectStore.of_url(url, creates=creates))

    def claim(self, server_id: str) -> None:
        """Take the prefix for a server; `ConfigError` if it is another's."""
        ours = json.dumps({"format": _FORMAT, "format_version": _FORMAT_VERSION, "server_id": server_id}).encode()
        found = self._objects.put_if_absent(_IDENTITY, ours)
        if found != ours:
            raise ConfigError(f"{self.where}: has snapshots of another server: use another prefix for {server_id}")

    def server_id(self) -> str:
        """Return whose prefix it is; `GoneError` if it is nobody's, `CorruptionError` if that cannot be read."""
        try:
            return str(json.loads(self._objects.get(_IDENTITY))["server_id"])
        except (ValueError, KeyError, RecursionError, TypeError) as exc:
            raise CorruptionError(f"{self.where}/{_IDENTITY}: names no server: {exc}") from exc

    def names(self) -> list[str]:
        """Return the snapshots' names, sorted."""
        return sorted(_name_of(found.path) for found in self._objects.list(_SNAPSHOTS))

    def list(self, *, with_void: bool = False) -> list[SnapshotManifest]:
        """Return the manifests of all snapshots, oldest first, or of all that are not void."""
        manifests = []
        for name in self.names():
            with contextlib.suppress(GoneError):  # removed meanwhile
                manifests.append(self.manifest_of(name))
        self._starts.look()
        return by_age([each for each in manifests if with_void or not self.is_void(each)])

    def is_void(self, manifest: SnapshotManifest) -> bool:
        """Return whether one of its shards was set back to before it, as of the last listing."""
        return any(part.term and self._starts.is_void(part.shard, part.term, part.seq) for part in manifest.parts)

    def manifest_of(self, name: str) -> SnapshotManifest:
        """Return a snapshot's manifest; `GoneError` if there is none."""
        return self._read(name)[0]

    def newest(self) -> SnapshotManifest | None:
        """Return the manifest of the snapshot that was made last, by the store's clock, and is not void; or None."""
        found = self._newest()
        return None if found is None else found[0]

    def choose(self, name: str = "", *, step: int | None = None) -> SnapshotManifest:
        """Return the manifest of a snapshot by name, or of the newest, or of the newest at a step; `ConfigError`."""
        if name:
            return self.manifest_of(name)
        manifests = self.list()
        fitting = [manifest for manifest in manifests if step in (None, manifest.step)]
        if not fitting:
            there = first_of([f"{manifest.name} at step {manifest.step}" for manifest in reversed(manifests)])
            at_step = f"no snapshot is at step {step}; there are {there}" if manifests else "no snapshots"
            raise ConfigError(f"{self.where}: {at_step}")
        return fitting[-1]

    def upload(self, folder: Path, *, on_progress: Callable[[int], None] = _NOBODY_COUNTS) -> int:
        """Put a published snapshot's directory into the store, read back what was sent, and publish it.

        A call after an interruption sends only what is missing. `on_progress` gets the bytes done since its last call.

        Returns:
            The bytes that were sent.

        Raises:
            ConfigError: The prefix is another server's, or `folder` is no snapshot.
            CorruptionError: A local file is damaged, or an object came back altered.
            RequestError: The store has another snapshot of that name.
            UnavailableError: The store is away, or the upload took too long; call again.
            StorageError: A local file cannot be read.
        """
        manifest = replace(read_manifest(folder), lease_s=0)
        sent_bytes = 0

        def count(num_bytes: int) -> None:
            nonlocal sent_bytes
            sent_bytes += num_bytes

        objects = self.upload_files(
            folder, manifest.files(), server_id=manifest.server_id, on_progress=on_progress, on_sent=count
        )
        self.publish(manifest, objects)
        return sent_bytes

    def upload_files(
        self,
        folder: Path,
        files: Mapping[str, SnapshotFile],
        *,
        server_id: str,
        contents: MutableMapping[FileIdentity, Content] | None = None,
        on_progress: Callable[[int], None] = _NOBODY_COUNTS,
        on_sent: Callable[[int], None] = _NOBODY_COUNTS,
    ) -> dict[str, str]:
        """Put files of a snapshot that is being made; return the object of each, checked by reading it back.

        Objects that are there already are used and not sent again. `publish` makes the snapshot.

        Args:
            folder: The snapshot's directory.
            files: What to put, by path in `folder`.
            server_id: Takes the prefix for this server.
            contents: Of files that need not be read to know their content; gets those that were read.
            on_progress: Called with the bytes done since its last call, in several threads; may raise to stop.
            on_sent: Called with the bytes of a file that has been sent, in several threads.

        Raises: as `upload`.
        """
        self.claim(server_id)
        found, known = self._look(), {} if contents is None else contents

        def send(path: str, file: SnapshotFile) -> str:
            with mapped_errors(folder / path):
                identity = identity_of(folder / path)
            content = known.get(identity)
            if content is None:
                content = known[identity] = _content_of(folder / path, file, on_progress)
            key = self._reused(content, found)
            if key is None:
                key = _new_key(content)
                self._objects.upload(
                    key, content, lambda: read_direct(folder / path), on_progress=lambda _: on_progress(0)
                )
                on_sent(file.size_bytes)
            on_progress(file.size_bytes)
            return key

        return dict(zip(files, _in_threads(send, files.items(), "headrace-upload", _UPLOADS_AT_ONCE), strict=True))

    def publish(self, manifest: SnapshotManifest, objects: Mapping[str, str]) -> None:
        """Make a snapshot of objects that `upload_files` has returned, of all shards; safe to repeat.

        Raises:
            RequestError: The store has another snapshot of that name, or the objects are not those of its files.
            UnavailableError: An object is gone or so old that it may be pruned: the upload took too long; try again.
        """
        manifest = replace(manifest, lease_s=0)
        if set(objects) != set(manifest.files()):
            raise RequestError(f"snapshot {manifest.name!r}: its objects are not those of its files")
        if self._published(manifest):
            return
        now, put_at = self._objects.now(), {found.path: found.put_at for found in self._objects.list(_FILES)}
        for key in objects.values():
            if key not in put_at or now - put_at[key] > _NAMED_AGE:
                raise UnavailableError(f"{self.where}: the upload of {manifest.name} took most of a day: try again")
        found = self._objects.put_if_absent(_path_of(manifest.name), _encode(manifest, objects))
        # A lost reply makes us meet our own manifest, or one whose objects were sent by an earlier call.
        self._check_same(manifest, _decode(found, self.where)[0])
        if objects and self._objects.now() - min(put_at[key] for key in objects.values()) > _PRUNE_AGE:
            # This process was paused since its look, and a prune may have begun before it saw the manifest.
            self.remove(manifest.name)
            raise UnavailableError(f"{self.where}: publishing {manifest.name} took too long: try again")

    def _published(self, manifest: SnapshotManifest) -> bool:
        try:
            self._check_same(manifest, self.manifest_of(manifest.name))
        except GoneError:
            return False
        return True

    def _check_same(self, manifest: SnapshotManifest, found: SnapshotManifest) -> None:
        if found != manifest:
            raise RequestError(f"{self.where}: there is another snapshot {manifest.name!r} already")

    def check(self, name: str, *, on_progress: Callable[[int], None] = _NOBODY_COUNTS) -> SnapshotManifest:
        """Read every byte of a snapshot and return its manifest; `CorruptionError` names a damaged object."""
        manifest, objects = self._read(name)

        def check(_path: str, key: str) -> None:
            for chunk in self._checked_chunks(key):
                on_progress(len(chunk))

        _in_threads(check, objects.items(), "headrace-check")
        return manifest

    def fetch(
        self, name: str, files: SnapshotFiles, *, on_progress: Callable[[int], None] = _NOBODY_COUNTS
    ) -> SnapshotManifest:
        """Copy a snapshot into a directory, checked, whole or not at all, and return its manifest.

        A call after an interruption reads only what is missing. `on_progress` is called in several threads, with the
        bytes since its last call; it may raise to stop.

        Raises:
            GoneError: There is no such snapshot.
            RequestError: The directory has another snapshot of that name.
            CorruptionError: An object is altered.
            StorageError: The disk failed or lacks room.
        """
        manifest = self.manifest_of(name)
        if files.folder_of(name).exists():
            if replace(files.manifest_of(name), lease_s=0) == manifest:
                on_progress(manifest.size_bytes)
                return manifest
            raise RequestError(f"there is another snapshot {name!r} in {files.path} already")
        folder = files.new_folder(name)
        with mapped_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            os.utime(folder)  # a fetch that goes on after a day would look abandoned
            there_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        check_room(folder, manifest.size_bytes - there_bytes, what=f"the rest of snapshot {name!r}")
        self.fetch_files(name, lambda path: folder / path, on_progress=on_progress)
        files.publish(manifest)
        return manifest

    def fetch_files(
        self, name: str, place: Callable[[str], Path | None], *, on_progress: Callable[[int], None] = _NOBODY_COUNTS
    ) -> None:
        """Copy files of a snapshot to where `place` puts each, checked and durable; those that are there stay.

        A file without a place (None) is left out.

        Raises: as `fetch`.
        """
        manifest, objects = self._read(name)
        places = {path: target for path in objects if (target := place(path)) is not None}

        def fetch(path: str, file: SnapshotFile) -> None:
            target = places[path]
            with mapped_errors(target):
                target.parent.mkdir(exist_ok=True)
            if _is_there(target, file):
                on_progress(file.size_bytes)
                return
            key, crc = objects[path], 0
            # Past the page cache, whose copy costs more than all else here. The manifest's checksum is enough: a second
            # one, SHA-256, would cost as much as the rest.
            with mapped_errors(target), DirectFileWriter(target, write_buffer()) as out:
                for chunk in self._objects.pieces(key, file.size_bytes):
                    crc = crc32c(chunk, crc, True)
                    out.write(chunk)
                    on_progress(len(chunk))
                if crc != file.crc32c:
                    raise CorruptionError(f"{self.where}/{key}: not the file {path} of snapshot {name!r}")
                out.sync()

        wanted = [(path, file) for path, file in manifest.files().items() if path in places]
        _in_threads(fetch, wanted, "headrace-fetch")
        for folder in {target.parent for target in places.values()}:
            with mapped_errors(folder):
                fsync_path(folder)

    def remove(self, name: str) -> None:
        """Remove a snapshot; its objects go with a later `prune`. Removing one twice is harmless."""
        self._objects.delete(_path_of(name))

    def prune(self) -> int:
        """Delete objects that no snapshot names and that are older than a day; return how many."""
        now = self._objects.now()
        # First the objects: whatever is named later is younger than these.
        old = [found.path for found in self._objects.list(_FILES) if now - found.put_at > _PRUNE_AGE]
        named: set[str] = set()
        for name in self.names() if old else ():
            with contextlib.suppress(GoneError):  # removed meanwhile
                named.update(self._read(name)[1].values())
        gone = [key for key in old if key not in named]
        _in_threads(self._objects.delete, ((key,) for key in gone), "headrace-prune")
        return len(gone)

    def _look(self) -> _Found:
        at, newest = self._objects.now(), self._newest()
        objects: dict[Content, StoredObject] = {}
        for found in self._objects.list(_FILES):
            with contextlib.suppress(CorruptionError):  # a name that is none of ours
                content = _content_in(found.path, self.where)
                if content not in objects or objects[content].put_at < found.put_at:
                    objects[content] = found
        return _Found(objects, frozenset(() if newest is None else newest[1].values()), at)

    def _reused(self, content: Content, found: _Found) -> str | None:
        """Return an object of that content that no prune may delete before it is named; None to send one."""
        there = found.objects.get(content)
        if there is None:
            return None
        if found.at - there.put_at < _REUSE_AGE:
            # What no snapshot names comes from an upload that was killed, perhaps before it had checked.
            if there.path in found.named or self._objects.is_whole(there.path, content):
                return there.path
            return None
        key = _new_key(content)
        try:
            put_at = self._objects.copy(there.path, key)
        except (ConfigError, GoneError, UnavailableError):  # pruned just now, too large for a copy, or no right to it
            return None
        return key if found.at - put_at < _REUSE_AGE and self._objects.is_whole(key, content) else None

    def _newest(self) -> tuple[SnapshotManifest, dict[str, str]] | None:
        stored = sorted(self._objects.list(_SNAPSHOTS), key=lambda found: found.put_at, reverse=True)
        self._starts.look()
        for found in stored:
            with contextlib.suppress(GoneError):  # removed meanwhile
                manifest, objects = self._read(_name_of(found.path))
                if not self.is_void(manifest):
                    return manifest, objects
        return None

    def _read(self, name: str) -> tuple[SnapshotManifest, dict[str, str]]:
        path = _path_of(name)
        try:
            return _decode(self._objects.get(path), f"{self.where}/{path}")
        except GoneError as exc:
            raise GoneError(f"{self.where}: there is no snapshot {name!r}") from exc

    def _checked_chunks(self, key: str) -> Iterator[memoryview]:
        return self._objects.download(key, _content_in(key, self.where))


def is_object_store_url(place: str) -> bool:
    """Return whether a place that a user names is a URL, and not a directory or an address."""
    return "://" in place


@contextlib.contextmanager
def local_snapshot(
    url: str,
    *,
    name: str = "",
    step: int | None = None,
    scratch: Path | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Iterator[Path]:
    """Yield a directory with a snapshot of an object store, fetched for the block.

    Args:
        url: Of the store.
        name: Of the snapshot; empty for the newest.
        step: The newest that is at this step; None for any.
        scratch: Directory for the copy; None for the system's temporary one.
        on_progress: Called with (bytes so far, bytes in all), one at a time.

    Raises:
        ConfigError: There is no such snapshot; otherwise as `SnapshotStore.fetch`.
    """
    store = SnapshotStore.of_url(url, creates=False)
    manifest = store.choose(name, step=step)
    lock, done = threading.Lock(), 0

    def count(num_bytes: int) -> None:
        nonlocal done
        with lock:
            done += num_bytes
            on_progress(done, manifest.size_bytes)

    with tempfile.TemporaryDirectory(prefix=".headrace-", dir=scratch) as folder:
        files = SnapshotFiles(Path(folder))
        store.fetch(manifest.name, files, on_progress=count)
        yield files.folder_of(manifest.name)


def _in_threads(
    work: Callable[..., _T], items: Iterable[tuple[Any, ...]], name: str, at_once: int = _FILES_AT_ONCE
) -> list[_T]:
    """Return what `work` returns for each item, some at a time; after the first error none begins."""
    with ThreadPoolExecutor(at_once, name) as pool:
        futures = [pool.submit(work, *item) for item in items]
        try:
            return [future.result() for future in _until_error(futures)]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _until_error(futures: list[Future[_T]]) -> list[Future[_T]]:
    """Wait for all, or for the first that fails; return those to look at, that one first."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    failed = [future for future in futures if future in done and future.exception() is not None]
    return failed or futures


def _is_there(path: Path, file: SnapshotFile) -> bool:
    try:
        check_file(path, file)
    except CorruptionError:
        return False
    return True


def _new_key(content: Content) -> str:
    return f"{_FILES}{content}-{secrets.token_hex(4)}"


def _path_of(name: str) -> str:
    return f"{_SNAPSHOTS}{check_snapshot_name(name)}.json"


def _name_of(path: str) -> str:
    return path.removeprefix(_SNAPSHOTS).removesuffix(".json")


def _content_of(path: Path, expected: SnapshotFile, on_progress: Callable[[int], None]) -> Content:
    """Return a local file's content; `CorruptionError` if it is not the manifest's."""
    found, crc = ContentHash(), 0
    with mapped_errors(path):
        for chunk in read_direct(path):
            found.update(chunk)
            crc = crc32c(chunk, crc, True)
            on_progress(0)
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


def _encode(manifest: SnapshotManifest, objects: Mapping[str, str]) -> bytes:
    body = {"manifest": manifest.encode().decode(), "objects": dict(objects)}
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
        if set(objects) != set(manifest.files()) or not all(type(key) is str for key in objects.values()):
            raise ValueError("its objects are not those of its files")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise CorruptionError(f"{where}: no snapshot's manifest: {exc}") from exc
    return manifest, objects


def _dump(values: dict[str, Any]) -> bytes:
    return json.dumps(values, indent=2, sort_keys=True).encode() + b"\n"
