"""Publishing, checking and removing snapshots in a directory."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from text_scripts import Script, scripts

from headrace.paramserver.snapshots import directory
from headrace.paramserver.snapshots.directory import SnapshotFiles, check_file, hash_folder, verify_snapshot
from headrace.schemas.errors import CorruptionError, GoneError, StorageError
from headrace.schemas.snapshot_manifest import MANIFEST_NAME, ShardPart, SnapshotManifest


class Snapshots:
    """A directory of snapshots; paths are relative to it."""

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, SnapshotFiles(path)
        self.made: dict[str, SnapshotManifest] = {}

    def make(self, name: str, *, seq: int = 3, at: int = 1, server: str = "s", lease: int = 0) -> None:
        """Make a snapshot of two shards with two files each, unpublished."""
        parts = []
        for shard in range(2):
            folder = self.files.new_folder(name) / f"shard-{shard:04d}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "CURRENT").write_bytes(b"x" * 16)
            (folder / "000001.sst").write_bytes(bytes(range(256)) * 100)
            hashed = hash_folder(folder)
            parts.append(ShardPart(shard=shard, server_id=server, seq=seq, epoch=1, step=2, tables=(), files=hashed))
        self.made[name] = SnapshotManifest(name=name, created_us=at, parts=tuple(parts), lease_s=lease)

    def publish(self, name: str) -> str | None:
        return self._told(lambda: self.files.publish(self.made[name]))

    def _told(self, call: Callable[[], object]) -> str | None:
        """Return which file damage names, if there is any."""
        try:
            call()
        except CorruptionError as exc:
            return f"CorruptionError in {str(exc).partition(': ')[0].removeprefix(f'{self.path}/')}"
        return None

    def discard(self, name: str) -> None:
        self.files.discard(name)

    def remove(self, name: str) -> None:
        self.files.remove(name)

    def prune(self) -> str:
        return " ".join(self.files.prune_abandoned())

    def show(self) -> str:
        """Return the names of the snapshots, oldest first, and how many cannot be read."""
        found, damaged = self.files.list()
        assert all(manifest == self.made[manifest.name] for manifest in found)
        return " ".join([manifest.name for manifest in found] or ["none"]) + f", {len(damaged)} damaged" * bool(damaged)

    def newest(self, server: str | None = None) -> str:
        return newest.name if (newest := self.files.newest(server)) else "none"

    def verify(self, name: str) -> str | None:
        return self._told(lambda: verify_snapshot(self.path / name))

    def read(self, name: str, path: str = "", offset: int = 0, num_bytes: int = 16) -> str:
        data, size_bytes = self.files.read(name, path, offset, num_bytes)
        return f"{list(data[:3])} ... {list(data[-3:])} of {size_bytes}"

    def manifest(self, name: str, num_bytes: int) -> None:
        """Check that a manifest is read as it is, also in part."""
        assert SnapshotManifest.decode(self.files.read(name, "", 0, 1 << 20)[0]) == self.made[name]
        assert self.files.read(name, "", 0, num_bytes)[0] == self.made[name].encode()[:num_bytes]

    def entries(self) -> list[str]:
        return sorted(path.name for path in self.path.iterdir())

    def stray(self) -> None:
        """Make what a snapshot is like that is removed while it is listed."""
        (self.path / "going").mkdir()

    def folder(self, path: str) -> None:
        (self.path / path).mkdir(parents=True)

    def write(self, path: str, text: str) -> None:
        (self.path / path).write_text(text)

    def unlink(self, path: str) -> None:
        (self.path / path).unlink()

    def cut(self, path: str) -> None:
        os.truncate(self.path / path, (self.path / path).stat().st_size - 1)

    def flip(self, path: str) -> None:
        data = bytearray((self.path / path).read_bytes())
        data[len(data) // 2] ^= 1
        (self.path / path).write_bytes(data)

    def idle(self) -> None:
        """Let all files and folders look old."""
        for path in self.path.rglob("*"):
            os.utime(path, (0, 0))


@pytest.fixture
def snapshots(tmp_path: Path) -> Snapshots:
    return Snapshots(tmp_path / "snapshots")


@scripts(__file__, "directory")
def test_directory(script: Script, snapshots: Snapshots) -> None:
    """Snapshots are made, published, read, damaged and removed."""
    script.run(snapshots)


def note_syncs(monkeypatch: pytest.MonkeyPatch, target: Path) -> list[tuple[str, bool]]:
    """Return a list that receives the name of what is synced, and whether `target` existed by then."""
    synced: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append((Path(os.readlink(f"/proc/self/fd/{fd}")).name, target.exists()))
    )
    return synced


def test_a_part_is_durable_once_it_is_hashed(snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashing syncs the files, their names and the folder's name; publishing does not sync them again."""
    synced: list[Path] = []
    monkeypatch.setattr(directory, "fsync_path", synced.append)
    snapshots.make("a")
    folders = [snapshots.files.new_folder("a") / f"shard-{shard:04d}" for shard in range(2)]
    assert synced == [path for f in folders for path in (f / "000001.sst", f / "CURRENT", f, f.parent)]


def test_names_are_durable(snapshots: Snapshots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest is synced before the rename, the directories above after it; a name goes before its files."""
    snapshots.make("a")
    with monkeypatch.context() as patch:
        synced = note_syncs(patch, snapshots.path / "a")
        snapshots.publish("a")
    before, after = ("manifest.json.tmp", ".new-a"), ("snapshots", tmp_path.name)
    assert synced == [*((name, False) for name in before), *((name, True) for name in after)]
    synced = note_syncs(monkeypatch, snapshots.path / ".gone-a" / "manifest.json")
    snapshots.remove("a")
    assert synced == [("snapshots", True)]


def test_a_manifest_is_read_once(snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of pieces of a fetch, and repeated listings, decode a manifest once."""
    files, decoded = snapshots.files, []
    for name, seq in (("a", 1), ("b", 2)):
        snapshots.make(name, seq=seq)
        snapshots.publish(name)
    decode = SnapshotManifest.decode
    monkeypatch.setattr(SnapshotManifest, "decode", lambda data: (decoded.append(1), decode(data))[1])
    for _ in range(3):
        assert files.read("a", "shard-0000/CURRENT", 0, 100)
        assert snapshots.newest() == "b"
    assert len(decoded) == 2
    files.remove("b")
    shutil.copytree(snapshots.path / "a", snapshots.path / "b")  # another snapshot of that name
    snapshots.make("b", seq=9)
    (snapshots.path / "b" / MANIFEST_NAME).write_bytes(snapshots.made["b"].encode())
    assert (newest := files.newest()) is not None and newest.parts[0].seq == 9
    shutil.rmtree(snapshots.path / "b")
    with pytest.raises(GoneError):
        files.read("b", "shard-0000/CURRENT", 0, 100)


def test_damage_between_two_snapshots_is_found(snapshots: Snapshots) -> None:
    """A file that two snapshots share keeps its first checksum, so later damage shows."""
    files = snapshots.files
    snapshots.make("a")
    snapshots.publish("a")
    shared = files.folder_of("a") / "shard-0000" / "000001.sst"
    folder = files.new_folder("b") / "shard-0000"
    folder.mkdir(parents=True)
    os.link(shared, folder / "000002.sst")
    (folder / "000003.sst").write_bytes(shared.read_bytes())
    with shared.open("r+b") as file:
        file.write(b"!")
    linked, copied = hash_folder(folder, known=files.row_files_of_newest("s"))
    assert linked.name == "000002.sst" and linked.crc32c == copied.crc32c
    with pytest.raises(CorruptionError, match=r"000002\.sst: its checksum"):
        check_file(folder / linked.name, linked)
    check_file(folder / copied.name, copied)
    assert files.row_files_of_newest("another store") == {}
    shared.unlink()  # the snapshot is being removed: its other files are known
    assert [file.crc32c for file in files.row_files_of_newest("s").values()] == [linked.crc32c]


def test_a_failed_disk_while_pruning_is_a_storage_error(snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch) -> None:
    """An age that cannot be read is a storage error."""
    snapshots.make("left", lease=60)
    snapshots.publish("left")

    def fail(path: Path) -> float:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(directory, "_idle_s", fail)
    with pytest.raises(StorageError, match=f"{snapshots.path}: Input/output error"):
        snapshots.prune()


def test_a_removal_and_pruning_may_meet(snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal succeeds even if pruning removes the files first."""
    snapshots.make("a")
    snapshots.publish("a")
    remove_tree = shutil.rmtree

    def prune_first(path: Path, **settings: Any) -> None:
        if not settings:
            snapshots.prune()
        remove_tree(path, **settings)

    monkeypatch.setattr(shutil, "rmtree", prune_first)
    snapshots.remove("a")
    assert snapshots.entries() == []
