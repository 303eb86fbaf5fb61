from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.paramserver.reshard.destination import NoSnapshotError
from headrace.paramserver.shard.part_keeper import PartKeeper


class _Shard:
    """What a part keeper asks: ingest, applier, store, uploader and archiver in one."""

    def __init__(self) -> None:
        self.durable_seq = 3
        self.newest: Any = None
        self.num_looks, self.archived = 0, iter(())

    async def wait_durable(self, seq: int) -> None:
        pass

    wait_applied = wait_durable

    def flush(self) -> None:
        self.durable_seq = 9

    def look_soon(self) -> None:
        self.num_looks += 1

    def state(self) -> Any:
        return SimpleNamespace(archived_seq=next(self.archived))


def _keeper(shard: Any, *, has_objects: bool) -> PartKeeper:
    objects = shard if has_objects else None
    return PartKeeper(shard, shard, shard, 1, objects, objects)


async def test_without_an_object_store_the_disk_is_what_counts() -> None:
    """All up to the record is flushed."""
    shard: Any = _Shard()
    await _keeper(shard, has_objects=False).wait_safe(4, 7)
    assert shard.durable_seq == 9


async def test_with_an_object_store_a_snapshot_and_the_archive_count() -> None:
    """A load waits for a snapshot behind it, and for the archive, and says what is missing."""
    shard: Any = _Shard()
    keeper = _keeper(shard, has_objects=True)
    parts = (SimpleNamespace(seq=99), SimpleNamespace(seq=4))
    for newest, loaded_seq in ((None, 4), (SimpleNamespace(parts=parts), 5)):
        shard.newest = newest
        with pytest.raises(NoSnapshotError) as caught:
            await keeper.wait_safe(loaded_seq, 7)
        assert caught.value.from_seq == loaded_seq
    assert shard.num_looks == 2
    shard.archived = iter((-1, 6, 7))
    async with asyncio.timeout(10):
        await keeper.wait_safe(4, 7)
    assert not list(shard.archived)
