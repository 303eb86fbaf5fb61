"""Whose tables are free: runs that ended and runs that were killed, and backfills beside trainers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from stored_rows import read_rows
from torch import nn

from headrace.cli import main
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import OwnedError
from headrace.schemas.row_records import PRESENT
from headrace.scripts.table_io.sending import BackfillCounts, BackfillSender, RowPace, ask_server
from headrace.scripts.table_io.server_writer import TargetServer
from headrace.scripts.table_io.source import BackfillConfig
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.delivery.first_rows import Publish

NUM_ROWS, DIM = 20_000, 64  # several messages of a backfill


class KilledError(Exception):
    """The backfill stops here, and says nothing to the server."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess.start(tmp_path_factory.mktemp("server") / "data", shards=2) as running:
        yield running


def _attached(
    server: ServerProcess, run: str, model: str, value: float = 0.0, *, publish: Publish = "all"
) -> RawEmbeddingStreamer:
    """Return a streamer of a run that has sent a table with one value in all its rows."""
    net = nn.Embedding.from_pretrained(torch.full((NUM_ROWS, DIM), value), freeze=False)
    streamer = RawEmbeddingStreamer(server.address, run=run, model=model)
    try:
        streamer.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), publish=publish)
        streamer.flush()
    except BaseException:
        streamer.close(flush=False)
        raise
    return streamer


def _backfill(
    server: ServerProcess, file: Path, model: str, *, then: Callable[[], None] = lambda: None, again: bool = False
) -> BackfillCounts:
    """Write a file's rows; `then` is called once the first of them are there, and before the others are sent."""

    async def run_then(_: float) -> None:
        async with asyncio.timeout(30):
            while not await asyncio.to_thread(_values, server, model, 10):
                pass
        then()

    async def run() -> BackfillCounts:
        host, port = parse_address(server.address)
        target = TargetServer(host=host, port=port)
        facts = await ask_server(target)
        source = BackfillConfig(tables=("weight",), model=model).open(file, facts.tables)
        sender = BackfillSender(source, target, facts, again=again, pace=RowPace(1, sleep=run_then))
        await sender.run()
        return sender.counts[f"{model}:weight"]

    return asyncio.run(run())


def _kill() -> None:
    raise KilledError


def _values(server: ServerProcess, model: str, num_rows: int = NUM_ROWS) -> set[float]:
    rows = read_rows(server.address, f"{model}:weight", np.arange(num_rows))
    return set(np.unique(rows.weights[rows.presence == PRESENT]).tolist())


@pytest.fixture
def ones(tmp_path: Path) -> Path:
    save_file({"weight": np.ones((NUM_ROWS, DIM), np.float32)}, tmp_path / "ones.safetensors")
    return tmp_path / "ones.safetensors"


def test_a_run_frees_its_tables_once_it_has_ended(server: ServerProcess) -> None:
    """Another run takes the tables of one that was closed; of one that was not it is refused until that has ended."""
    _attached(server, "a", "ended").close(flush=False)  # as when it is killed
    with pytest.raises(OwnedError, match="which is not connected"):
        _attached(server, "b", "ended")
    _attached(server, "a", "ended").close()
    with _attached(server, "b", "ended", 3.0):
        assert _values(server, "ended") == {3.0}


def test_a_killed_backfill_goes_on(server: ServerProcess, ones: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Started again it sends what is missing, in the epoch that it had; until then the table is known to lack rows."""
    with pytest.raises(KilledError):
        _backfill(server, ones, "again", then=_kill)
    assert main(["table", "describe", "again:weight", "--server", server.address]) == 0
    assert "no: backfill backfill-" in capsys.readouterr().out
    assert 0 < _backfill(server, ones, "again").num_earlier < NUM_ROWS
    rows = read_rows(server.address, "again:weight", np.arange(NUM_ROWS), with_versions=True)
    assert (rows.weights == 1).all()
    assert np.unique(rows.epochs).size == 1


def test_a_trainer_keeps_the_table_of_a_killed_backfill(server: ServerProcess, ones: Path) -> None:
    """The trainer takes it as it is; the backfill that goes on is refused, even after the trainer, and begins anew."""
    with pytest.raises(KilledError):
        _backfill(server, ones, "killed", then=_kill)
    assert _values(server, "killed") == {1.0}
    with _attached(server, "t", "killed", 2.0), pytest.raises(OwnedError, match="trainer that has not ended"):
        _backfill(server, ones, "killed")
    with pytest.raises(OwnedError, match="since this backfill began"):
        _backfill(server, ones, "killed")
    assert _values(server, "killed") == {2.0}
    _backfill(server, ones, "killed", again=True)
    assert _values(server, "killed") == {1.0}


def test_a_trainer_sends_what_a_killed_backfill_has_not(server: ServerProcess, ones: Path) -> None:
    """Rows that are equal are no reason to take the others for written."""
    with pytest.raises(KilledError):
        _backfill(server, ones, "part", then=_kill)
    rows = np.arange(NUM_ROWS)
    assert 0 < np.count_nonzero(read_rows(server.address, "part:weight", rows).presence == PRESENT) < NUM_ROWS
    with _attached(server, "t", "part", 1.0, publish="auto") as streamer:
        assert (read_rows(server.address, "part:weight", rows).presence == PRESENT).all()
        assert streamer.audit().is_equal


def test_a_trainer_takes_a_table_from_a_backfill_in_progress(server: ServerProcess, ones: Path) -> None:
    """The backfill ends with an error that names the trainer, and none of its later rows counts."""
    started: list[RawEmbeddingStreamer] = []

    def start() -> None:
        if not started:
            started.append(_attached(server, "t", "taken", 2.0))

    with pytest.raises(OwnedError, match=r"'taken:weight' belongs to run 't'"):
        _backfill(server, ones, "taken", then=start)
    with started[0]:
        assert _values(server, "taken") == {2.0}


def test_a_trainer_ends_well_whose_server_is_gone_once_all_is_durable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It warns, because the run has not ended for others."""
    with ServerProcess.start(tmp_path / "data") as server:
        streamer = _attached(server, "late", "late")
    streamer.close(timeout_s=0.5)
    assert "the server has not heard that the run has ended" in caplog.text
