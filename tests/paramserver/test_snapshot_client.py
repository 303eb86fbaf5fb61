"""What a client of snapshots believes of shards, and how often it asks; whole snapshots are in `test_snapshot.py`."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.paramserver.snapshot_client import _cut, _fetch_file, _fetch_manifest
from headrace.schemas.errors import CorruptionError, UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotFile


class _Pieces:
    """A shard that has the first bytes of a file and says that there are more."""

    address = "somewhere:1"

    def __init__(self, data: bytes, *, size_bytes: int) -> None:
        self.data, self.size_bytes = data, size_bytes
        self.offsets: list[int] = []

    async def fetch_snapshot(self, request: Any) -> Any:
        self.offsets.append(request.offset)
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
    """A manifest longer than a piece is put together, up to the size that the shard says."""
    link = _Pieces(b"{ it is }", size_bytes=9)
    assert await _fetch_manifest(link, "one") == b"{ it is }"  # type: ignore[arg-type]
    assert link.offsets == [0, 2, 4, 6, 8]


async def test_a_file_that_stops_short_is_refused(tmp_path: Path) -> None:
    """A shard that has less of a file than its manifest says is told of by file and byte; what came stays for later."""
    link = _Pieces(b"abcd", size_bytes=6)
    file = SnapshotFile(name="CURRENT", size_bytes=6, crc32c=0)
    with pytest.raises(CorruptionError, match="shard-0000/CURRENT of snapshot 'one' ends at 4 bytes"):
        await _fetch_file(link, "one", "shard-0000/CURRENT", file, tmp_path)  # type: ignore[arg-type]
    assert link.offsets == [0, 2, 4]
    assert (tmp_path / "shard-0000" / "CURRENT").read_bytes() == b"abcd"


class _Running:
    """A shard of a run that is always so many steps beyond the one it is asked to be cut at."""

    address = "somewhere:1"

    def __init__(self, shard: int, *, beyond: int) -> None:
        self.shard, self.beyond = shard, beyond
        self.min_steps: list[int] = []
        self.num_discarded = 0

    async def status(self) -> Any:
        client = idl.ClientStatus(run="run", client="rank0", epoch=3, step=10, world_size=1)
        return idl.StatusReply(clients=[client])

    async def create_snapshot(self, request: Any) -> Any:
        self.min_steps.append(request.min_step)
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


async def test_shards_at_one_step_are_a_cut() -> None:
    """The first attempt at which all shards are at the same step is taken; nothing of it is dropped."""
    links = [_Running(0, beyond=2), _Running(1, beyond=2)]
    parts = await _cut(links, "one", "run", True, time.monotonic() + 60)  # type: ignore[arg-type]
    assert [(part.shard, part.step) for part in parts] == [(0, 12), (1, 12)]
    assert links[0].num_discarded == 0
