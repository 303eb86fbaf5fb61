"""What a client of snapshots believes of shards, and how often it asks; whole snapshots are in `test_snapshot.py`."""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from headrace.paramserver.snapshots import snapshot_client
from headrace.paramserver.snapshots.snapshot_client import _cut, _fetch_file, _fetch_manifest
from headrace.schemas.errors import CorruptionError, HeadraceError, OverloadedError, StorageError, UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotFile


class _Pieces:
    """A shard that has the first bytes of a file and says that there are more."""

    address = "somewhere:1"

    def __init__(self, data: bytes, *, size_bytes: int) -> None:
        self.data, self.size_bytes = data, size_bytes
        self.offsets: list[int] = []
        self.names: list[str] = []

    async def fetch_snapshot(self, request: Any) -> Any:
        self.offsets.append(request.offset)
        self.names.append(request.name)
        data = self.data[request.offset : request.offset + 2]
        return idl.FetchSnapshotReply(name="one", data=memoryview(data), size_bytes=self.size_bytes)


@pytest.mark.parametrize(("size_bytes", "offsets"), [(6, [0, 2, 4]), (1 << 40, [0])])
async def test_a_manifest_that_never_ends_is_not_waited_for(size_bytes: int, offsets: list[int]) -> None:
    """A manifest that stops short, or claims to be of a size that none has, is refused, and asked for no further."""
    link = _Pieces(b"{ un", size_bytes=size_bytes)
    with pytest.raises(CorruptionError, match="the manifest of snapshot 'one' does not come whole"):
        await _fetch_manifest(link, "one")  # type: ignore[arg-type]
    assert link.offsets == offsets


async def test_a_manifest_comes_in_pieces() -> None:
    """A manifest longer than a piece is put together, up to the size that the shard says, all of one snapshot."""
    link = _Pieces(b"{ it is }", size_bytes=9)
    assert await _fetch_manifest(link, "") == b"{ it is }"  # type: ignore[arg-type]
    assert link.offsets == [0, 2, 4, 6, 8]
    assert link.names == ["", *["one"] * 4]  # the newest may be another by the second piece


async def test_a_file_that_stops_short_is_refused(tmp_path: Path) -> None:
    """A shard that has less of a file than its manifest says is told of by file and byte; what came stays for later."""
    link = _Pieces(b"abcd", size_bytes=6)
    file = SnapshotFile(name="CURRENT", size_bytes=6, crc32c=0)
    with pytest.raises(CorruptionError, match="shard-0000/CURRENT of snapshot 'one' ends at 4 bytes"):
        await _fetch_file(link, "one", "shard-0000/CURRENT", file, tmp_path)  # type: ignore[arg-type]
    assert link.offsets == [0, 2, 4]
    assert (tmp_path / "shard-0000" / "CURRENT").read_bytes() == b"abcd"


@pytest.mark.parametrize(
    ("before", "offsets"),
    [(None, [0, 2]), (b"ab", [2]), (b"abcd", []), (b"abXd", [0, 2]), (b"abcde", [0, 2])],
    ids=["nothing", "half", "whole", "damaged", "longer"],
)
async def test_only_what_is_lacking_is_fetched_and_all_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes | None, offsets: list[int]
) -> None:
    """What an earlier call has brought is fetched again only if it is wrong; file and name survive power loss."""
    target = tmp_path / "shard-0000" / "CURRENT"
    if before is not None:
        target.parent.mkdir()
        target.write_bytes(before)
    synced: list[tuple[Path, bool]] = []
    monkeypatch.setattr(
        snapshot_client, "fsync_path", lambda path: synced.append((path, target.read_bytes() == b"abcd"))
    )
    link, file = _Pieces(b"abcd", size_bytes=4), SnapshotFile(name="CURRENT", size_bytes=4, crc32c=crc32c(b"abcd"))
    await _fetch_file(link, "one", "shard-0000/CURRENT", file, tmp_path)  # type: ignore[arg-type]
    assert link.offsets == offsets
    assert synced == [(target, True), (target.parent, True)]


async def test_a_file_that_cannot_be_synced_is_an_error_of_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails at the last moment is told of as one that fails before, naming the file."""

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(snapshot_client, "fsync_path", fail)
    link, file = _Pieces(b"abcd", size_bytes=4), SnapshotFile(name="CURRENT", size_bytes=4, crc32c=crc32c(b"abcd"))
    with pytest.raises(StorageError, match="shard-0000/CURRENT: Input/output error"):
        await _fetch_file(link, "one", "shard-0000/CURRENT", file, tmp_path)  # type: ignore[arg-type]


class _Running:
    """A shard of a run that is always so many steps beyond the one it is asked to be cut at; others write there too."""

    address = "somewhere:1"

    def __init__(self, shard: int, *, beyond: int, errors: Sequence[HeadraceError] = ()) -> None:
        self.shard, self.beyond, self.errors = shard, beyond, [*errors]
        self.min_steps: list[int] = []
        self.num_discarded = 0

    async def status(self) -> Any:
        client = idl.ClientStatus(run="run", client="rank0", epoch=3, step=10 - self.shard, world_size=1)
        other = idl.ClientStatus(run="replay", client="log", epoch=9, step=70, world_size=0)
        return idl.StatusReply(clients=[client, other])

    async def create_snapshot(self, request: Any) -> Any:
        assert request.epoch == 3
        self.min_steps.append(request.min_step)
        if self.errors:
            raise self.errors.pop(0)
        step = request.min_step + self.beyond
        part = ShardPart(shard=self.shard, server_id="s", seq=1, epoch=3, step=step, tables=(), files=())
        return idl.CreateSnapshotReply(part=part.encode())

    async def finish_snapshot(self, request: Any) -> Any:
        self.num_discarded += 1
        return idl.FinishSnapshotReply()


async def test_shards_that_are_never_at_one_step_make_no_snapshot() -> None:
    """Each attempt asks for a step further ahead, is dropped when the shards differ, and the deadline ends them."""
    links = [_Running(0, beyond=0), _Running(1, beyond=1)]
    with pytest.raises(UnavailableError, match="did not come to one step in time"):
        await _cut(links, "one", None, True, time.monotonic() + 0.05)  # type: ignore[arg-type]
    ahead = list(itertools.accumulate(links[0].min_steps[1:], lambda last, _: min(2 * last + 1, 1 << 20), initial=0))
    assert links[0].min_steps == links[1].min_steps == [10 + steps for steps in ahead]
    assert len(ahead) > 1
    assert links[0].num_discarded == len(ahead) - 1


async def test_a_run_that_is_late_is_asked_for_the_same_step_again() -> None:
    """An attempt that a shard could not wait for is dropped; the run may have stopped there, so no step is added."""
    late = [UnavailableError("amid a step"), OverloadedError("another snapshot is being made")]
    links = [_Running(0, beyond=0), _Running(1, beyond=0, errors=late)]
    parts = await _cut(links, "one", None, True, time.monotonic() + 60)  # type: ignore[arg-type]
    assert [part.step for part in parts] == [10, 10]
    assert links[0].min_steps == links[1].min_steps == [10, 10, 10]
    assert links[0].num_discarded == 2


async def test_a_shard_that_refuses_is_not_asked_again() -> None:
    """An error that time does not mend is told at once, however long the deadline."""
    links = [_Running(0, beyond=0), _Running(1, beyond=0, errors=[StorageError("the disk is on fire")])]
    with pytest.raises(StorageError, match="on fire"):
        await _cut(links, "one", None, True, time.monotonic() + 60)  # type: ignore[arg-type]
    assert links[0].min_steps == [10]


async def test_shards_at_one_step_are_a_cut() -> None:
    """The first attempt at which all shards are at the same step is taken; nothing of it is dropped."""
    links = [_Running(0, beyond=2), _Running(1, beyond=2)]
    parts = await _cut(links, "one", "run", True, time.monotonic() + 60)  # type: ignore[arg-type]
    assert [(part.shard, part.step) for part in parts] == [(0, 12), (1, 12)]
    assert links[0].num_discarded == 0
