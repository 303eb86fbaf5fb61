"""The commands `headrace snapshot …` with an object store's URL, here of a directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import CommandLine

from headrace.paramserver.snapshots.directory import SnapshotFiles, hash_folder
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotManifest


def publish(path: Path, name: str, seq: int, contents: dict[str, bytes]) -> Path:
    """Publish a snapshot of one shard; return its directory."""
    files = SnapshotFiles(path)
    part = files.new_folder(name) / "shard-0000"
    part.mkdir(parents=True)
    for file_name, data in contents.items():
        (part / file_name).write_bytes(data)
    made = ShardPart(shard=0, server_id="s", seq=seq, epoch=1, step=2, tables=(), files=hash_folder(part))
    files.publish(SnapshotManifest(name=name, created_us=seq, parts=(made,)))
    return files.folder_of(name)


def test_snapshots_go_up_and_come_back(tmp_path: Path, run: CommandLine) -> None:
    """Unchanged files go up once, the newest is fetched, and prune keeps what another snapshot names."""
    url, same = f"file://{tmp_path}/bucket", {"1.sst": b"one"}
    for name, seq in [("b", 3), ("a", 4)]:
        run("snapshot", "upload", publish(tmp_path / "own", name, seq, same), url)
    assert len(list((tmp_path / "bucket" / "files").iterdir())) == 1
    assert [s["name"] for s in run.json("snapshot", "list", url)["snapshots"]] == ["b", "a"]
    assert "Snapshot a" in run("snapshot", "fetch", url, "--to", tmp_path / "copy")
    run("snapshot", "verify", tmp_path / "copy")
    assert run("snapshot", "prune", url, "--keep", 1).splitlines() == ["Removed b.", "1 left."]
    assert "all checksums are right" in run("snapshot", "check", url, "a")


@pytest.mark.parametrize("data", [b"on", b"two"])
def test_a_damaged_object_is_found(tmp_path: Path, run: CommandLine, data: bytes) -> None:
    """Check and fetch name it, and a fetch publishes nothing."""
    url = f"file://{tmp_path}/bucket"
    run("snapshot", "upload", publish(tmp_path / "own", "a", 3, {"1.sst": b"one"}), url)
    (object_path,) = (tmp_path / "bucket" / "files").iterdir()
    object_path.write_bytes(data)
    assert object_path.name in run.refused("snapshot", "check", url, "a")
    assert object_path.name in run.refused("snapshot", "fetch", url, "--to", tmp_path / "copy")
    assert SnapshotFiles(tmp_path / "copy").list() == ([], [])


def test_mistakes_are_one_line(tmp_path: Path, run: CommandLine) -> None:
    """An unknown snapshot and a URL of another kind are named."""
    assert "there is no snapshot 'x'" in run.refused("snapshot", "check", f"file://{tmp_path}", "x")
    assert "not a URL of an object store" in run.refused("snapshot", "check", "ftp://x", "a")
