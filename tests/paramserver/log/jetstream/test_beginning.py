"""A shard's log in files that goes on in a stream, on the scripted engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from log_files import SMALL, fill, make_log, opened_log
from scripted_shard_stream import TIMES, ScriptedShardStream

from headrace.paramserver.log.interface import note_of
from headrace.paramserver.log.jetstream.beginning import StreamBeginning
from headrace.paramserver.log.jetstream.stream_log import JetStreamUpdateLog
from headrace.schemas.errors import ConfigError, UnavailableError


@pytest.fixture
def stream() -> ScriptedShardStream:
    return ScriptedShardStream("stream-0")


def _facts(log: Any, from_seq: int = 1) -> list[tuple[int, int, int | None, dict[str, Any], bytes]]:
    """Return all that followers see of a log's records."""
    return [
        (each.seq, each.epoch, log.nonce_of(each.seq), each.header, bytes(each.body)) for each in log.read(from_seq)
    ]


@contextlib.asynccontextmanager
async def _opened(stream: ScriptedShardStream, path: Path) -> AsyncIterator[JetStreamUpdateLog]:
    """Open the log in the stream, as a server does at its start."""
    log = await JetStreamUpdateLog.open(stream.engine, path, begin_seq=1, config=SMALL, times=TIMES)
    try:
        await log.wait_beyond(stream.stream.last_seq - 1 if stream.stream is not None else 0)
        yield log
    finally:
        await log.close()


async def test_a_log_in_files_goes_on_in_a_stream(stream: ScriptedShardStream, tmp_path: Path) -> None:
    """All records keep place and mark, over restarts too; the first one in the stream names the offer, for ever."""
    path, beginning = tmp_path / "log", StreamBeginning(stream, config=SMALL, times=TIMES)
    async with opened_log(path, SMALL) as files:
        await fill(files, 40)
        seen = _facts(files)
        assert await beginning.offer() is None
        await beginning.make(40)
        assert await beginning.offer() is None
        log = await beginning.begin(files)
        assert await log.take_over(40, owner="here:1", above_term=6, offer="one")
        assert (log.term, await beginning.offer()) == (7, "one")
        await fill(log, 20)
        assert _facts(log)[:40] == seen
        seen = _facts(log)
        assert note_of(seen[40][3]) == "open" and seen[40][3]["id"] == "one"
        await log.close()
    async with _opened(stream, path) as log:
        assert _facts(log)[: len(seen)] == seen
        assert await log.take_over(log.last_seq, owner="here:1")
        await fill(log, 1)
    assert await beginning.offer() == "one"


async def test_a_stream_is_made_anew_until_it_has_a_record(stream: ScriptedShardStream, tmp_path: Path) -> None:
    """An empty one of an earlier offer begins elsewhere; one with records, or sealed, is left as it is."""
    beginning = StreamBeginning(stream, config=SMALL, times=TIMES)
    for last_seq in (0, 10, 10, 15):
        await beginning.make(last_seq)
        assert stream.stream is not None and stream.stream.first_seq == last_seq + 1
    stream.is_sealed = True
    with pytest.raises(ConfigError, match="nats stream rm stream-0"):
        await beginning.make(15)
    stream.is_sealed, stream.is_away = False, True
    with pytest.raises(UnavailableError):
        await beginning.make(15)
    stream.is_away = False
    await make_log(path := tmp_path / "log", 15, config=SMALL)
    async with _opened(stream, path) as log:
        assert await log.take_over(15, owner="here:1")
    assert await beginning.offer() == ""
    for work in (beginning.check(), beginning.make(15), beginning.make(20)):
        with pytest.raises(ConfigError, match=r"exists already, with records 16 to \d+: .* nats stream rm stream-0"):
            await work
