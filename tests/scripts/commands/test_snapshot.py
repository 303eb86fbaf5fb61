"""The commands `headrace snapshot …`, on a real server."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import CommandLine
from file_modes import open_to_others, open_umask
from table_rows import USERS, build, chunk_of

from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.snapshots.directory import SnapshotFiles
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotManifest


def test_a_snapshot_from_making_to_removing(tmp_path: Path, run: CommandLine) -> None:
    """It is made, listed, verified, fetched to another directory, verified there, found damaged, and pruned."""
    data, copy = tmp_path / "data", tmp_path / "copy"
    names = ["20261122T113345.194669Z", "one", "two", "three"]  # the first as the time of day makes it
    with ServerProcess.start(data, shards=2) as server:
        for name in names:
            out = run("snapshot", "create", "--server", server.address, "--name", name)
            assert f"Snapshot {name}: no common step, 2 shards" in out
        line = run.refused("snapshot", "create", "--server", server.address, "--name", "one")
        assert "there is a snapshot 'one' already" in line
        assert "Snapshot three" in run("snapshot", "fetch", "--server", server.address, "--to", copy)
    assert [s["name"] for s in run.json("snapshot", "list", data)["snapshots"]] == names
    out = run("snapshot", "list", data)
    assert all(name in out for name in names)
    run("snapshot", "verify", data)
    assert "all checksums are right" in run("snapshot", "verify", copy / "three")
    current = copy / "three" / "shard-0001" / "CURRENT"
    current.write_bytes(current.read_bytes()[::-1])
    assert str(current) in run.refused("snapshot", "verify", copy, "three")
    out = run("snapshot", "prune", data, "--keep", 1)
    assert "Removed one." in out and "Removed two." in out
    assert [path.name for path in (data / "snapshots").iterdir()] == ["three"]


def test_snapshots_of_a_server_with_an_object_store(tmp_path: Path, run: CommandLine) -> None:
    """They go to the store, are listed, checked, fetched, exported, restored, removed and pruned there."""
    data, url = (
        build(tmp_path / "data", {USERS: chunk_of(USERS, range(300))}, num_shards=2),
        f"file://{tmp_path}/bucket",
    )
    with ServerProcess.start(data, object_store=url) as server:
        for name in ("one", "two", "three"):
            assert f"Snapshot {name}" in run("snapshot", "create", "--server", server.address, "--now", "--name", name)
        assert f"Snapshot three in {url}: " in run("status", "--server", server.address).replace("\n", " ")
        upload = run.json("status", "--server", server.address)["shards"][1]["upload"]
        assert (upload["url"], upload["name"], upload["is_running"], upload["failure"]) == (url, "three", False, None)
        assert upload["done_bytes"] == upload["size_bytes"]
    assert run("snapshot", "list", data) == "No snapshots.\n"
    assert [s["name"] for s in run.json("snapshot", "list", url)["snapshots"]] == ["one", "two", "three"]
    assert run("snapshot", "verify", url).count("all checksums are right") == 3
    assert "all checksums are right" in run("snapshot", "check", url, "two")
    assert "Snapshot three" in run("snapshot", "fetch", url, "--to", tmp_path / "copy")
    run("snapshot", "verify", tmp_path / "copy" / "three")
    assert run("snapshot", "remove", url, "three") == "Removed three.\n"
    assert "there is no snapshot 'three'" in run.refused("snapshot", "remove", url, "three")
    assert run("snapshot", "prune", url, "--keep", 1).splitlines() == ["Removed one.", "1 left."]
    with open_umask():
        assert "2 shards. Next:" in run("restore", url, "--name", "two", "--data", tmp_path / "new")
        assert open_to_others(tmp_path / "new") == []
    with ServerProcess.start(tmp_path / "new") as server:
        assert "users" in run("status", "--server", server.address)
    assert "no snapshot 'one'" in run.refused("restore", url, "--name", "one", "--data", tmp_path / "x")
    assert not (tmp_path / "x").exists()
    out = ["--to", tmp_path / "rows.parquet", "--format", "parquet"]
    assert "300" in run("export", "--snapshot", url, *out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bucket", "copy", "data", "new", "rows.parquet"]


def test_what_is_pruned_is_the_oldest_by_the_log(tmp_path: Path, run: CommandLine) -> None:
    """Clocks that went back do not cost the newest, and each store in the directory keeps its own newest."""
    files = SnapshotFiles(tmp_path)
    for seq, created_us, server_id in [(1, 50, "s"), (2, 40, "s"), (3, 30, "s"), (7, 20, "t"), (8, 10, "t")]:
        name = f"{server_id}-{seq}"
        files.new_folder(name).mkdir()
        part = ShardPart(shard=0, server_id=server_id, seq=seq, epoch=0, step=-1, tables=(), files=())
        files.publish(SnapshotManifest(name=name, created_us=created_us, parts=(part,)))
    out = run("snapshot", "prune", tmp_path, "--keep", 2)
    assert out.splitlines() == ["Removed s-1.", "4 left."]
    out = run("snapshot", "prune", tmp_path, "--keep", 1)
    assert out.splitlines() == ["Removed t-7.", "Removed s-2.", "2 left."]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s-3", "t-8"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["list", "nowhere"], "nowhere: not a directory"),
        (["verify", "."], "no snapshots"),
        (["list", "."], ".: no snapshots, and not the directory of a server"),
        (["list", "ftp://x/y"], "ftp://x/y: not a URL of an object store"),
        (
            ["list", "s3://user:secret@bucket"],
            "headrace: error: the URL of an object store has a user or password: everybody",
        ),
        (["remove", ".", "one"], "no snapshot 'one'"),
        (["create", "--now", "--run", "r"], "give only one of them"),
        (["create", "--name", "a/b"], "snapshot name 'a/b'"),
        (["create", "--server", "127.0.0.1:1"], "no connection to 127.0.0.1:1"),
        (["fetch", "--server", "127.0.0.1:1", "--to", "x"], "127.0.0.1:1"),
        (["fetch", "127.0.0.1:1", "--to", "x"], "127.0.0.1:1: no URL of an object store; a server's address goes with"),
        (["fetch", "file:///x", "--server", "127.0.0.1:1", "--to", "x"], "or --server, not both"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    run: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    says: str,
) -> None:
    """A user's mistake is one line that says what is wrong, and exit code 1."""
    monkeypatch.chdir(tmp_path)
    assert says in run.refused("snapshot", *arguments)
