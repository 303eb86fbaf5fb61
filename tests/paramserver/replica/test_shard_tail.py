"""What a replica knows of a shard's writers: the same as the shard."""

from __future__ import annotations

import pytest

from headrace.paramserver.ingest import sessions as sessions_module
from headrace.paramserver.ingest.sessions import Sessions
from headrace.paramserver.reading.follower import Update
from headrace.paramserver.replica.shard_tail import ShardTail
from headrace.paramserver.store.catalog import Catalog
from headrace.schemas.idl import idl


def test_writers_without_end_take_no_memory_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many runs come and go, a replica remembers as many writers as the shard, and knows the newest."""
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 5)
    sessions = Sessions({})
    tail = ShardTail(0, seq=0, catalog=Catalog({}), sessions=sessions)
    for seq in range(1, 101):
        header = {"run": f"run{seq}", "client": "rank0", "rank": 0, "world_size": 1, "tables": []}
        tail.take(Update(seq=seq, epoch=seq, kind=idl.UpdateKind.HELLO, header=header, body=memoryview(b"")))
        assert (tail.epoch, len(list(sessions))) == (seq, min(seq, 5))
