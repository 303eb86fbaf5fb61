"""The commands `headrace snapshot …`, on a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.snapshots.directory import SnapshotFiles
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotManifest


def _run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_snapshot_from_making_to_removing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is made, listed, verified, fetched to another directory, verified there, found damaged, and pruned."""
    data, copy = tmp_path / "data", tmp_path / "copy"
    names = ["20261122T113345.194669Z", "one", "two", "three"]  # the first as the time of day makes it
    with ServerProcess.start(data, shards=2) as server:
        for name in names:
            code, out, _ = _run(capsys, "snapshot", "create", server.address, "--name", name)
            assert code == 0 and f"Snapshot {name}: no common step, 2 shards" in out
        code, out, err = _run(capsys, "snapshot", "create", server.address, "--name", "one")
        assert code == 1 and "there is a snapshot 'one' already" in err and err.count("\n") == 1
        code, out, _ = _run(capsys, "snapshot", "fetch", server.address, "--to", copy)
        assert code == 0 and "Snapshot three" in out
    code, out, _ = _run(capsys, "snapshot", "list", data, "--json")
    assert code == 0 and [s["name"] for s in json.loads(out)["snapshots"]] == names
    code, out, _ = _run(capsys, "snapshot", "list", data)
    assert code == 0 and all(name in out for name in names)
    assert _run(capsys, "snapshot", "verify", data)[0] == 0
    code, out, _ = _run(capsys, "snapshot", "verify", copy / "three")
    assert code == 0 and "all checksums are right" in out
    current = copy / "three" / "shard-0001" / "CURRENT"
    current.write_bytes(current.read_bytes()[::-1])
    code, _, err = _run(capsys, "snapshot", "verify", copy, "three")
    assert code == 1 and str(current) in err and err.count("\n") == 1
    code, out, _ = _run(capsys, "snapshot", "prune", data, "--keep", 1)
    assert code == 0 and "Removed one." in out and "Removed two." in out
    assert [path.name for path in (data / "snapshots").iterdir()] == ["three"]


def test_what_is_pruned_is_the_oldest_by_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Clocks that went back do not cost the newest, and each store in the directory keeps its own newest."""
    files = SnapshotFiles(tmp_path)
    for seq, created_us, server_id in [(1, 50, "s"), (2, 40, "s"), (3, 30, "s"), (7, 20, "t"), (8, 10, "t")]:
        name = f"{server_id}-{seq}"
        files.new_folder(name).mkdir()
        part = ShardPart(shard=0, server_id=server_id, seq=seq, epoch=0, step=-1, tables=(), files=())
        files.publish(SnapshotManifest(name=name, created_us=created_us, parts=(part,)))
    code, out, _ = _run(capsys, "snapshot", "prune", tmp_path, "--keep", 2)
    assert code == 0 and out.splitlines() == ["Removed s-1.", "4 left."]
    code, out, _ = _run(capsys, "snapshot", "prune", tmp_path, "--keep", 1)
    assert code == 0 and out.splitlines() == ["Removed t-7.", "Removed s-2.", "2 left."]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s-3", "t-8"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["list", "nowhere"], "nowhere: not a directory"),
        (["verify", "."], "no snapshots"),
        (["create", "--now", "--run", "r"], "give only one of them"),
        (["create", "--name", "a/b"], "snapshot name 'a/b'"),
        (["create", "127.0.0.1:1"], "no connection to 127.0.0.1:1"),
        (["fetch", "127.0.0.1:1", "--to", "x"], "127.0.0.1:1"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    says: str,
) -> None:
    """A user's mistake is one line that says what is wrong, and exit code 1."""
    monkeypatch.chdir(tmp_path)
    code, _, err = _run(capsys, "snapshot", *arguments)
    assert code == 1 and says in err and err.count("\n") == 1
