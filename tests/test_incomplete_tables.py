"""A table that was never sent whole: the server says so, whatever ends meanwhile, until a trainer has sent the rest."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import first_upload
import numpy as np
import pytest
import torch
from command_line import CommandLine
from first_upload import NUM_ROWS, trained_weights
from stored_rows import read_rows
from torch import nn
from watched_server import wait_until

from headrace import SourceRows
from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.paramserver.replica.endpoint.health import Readiness
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError, HeadraceError, UnavailableError, UnknownTableError
from headrace.streamer import RawEmbeddingStreamer

ROWS = np.arange(NUM_ROWS)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        yield server


def _kill_amid_first_upload(address: str) -> None:
    command = [sys.executable, first_upload.__file__, address, "kill"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        try:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "sent a part\n"
        finally:
            trainer.kill()


def _start_again(address: str) -> None:
    command = [sys.executable, first_upload.__file__, address, "end"]
    assert subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout == "equal\n"


class _Source:
    """A table of two rows with virtual ids."""

    dim = 2

    def row_ids(self) -> torch.Tensor:
        return torch.tensor([1, 2**40])

    def read(self, row_ids: torch.Tensor) -> SourceRows:
        is_held = torch.isin(row_ids, self.row_ids())
        return SourceRows(is_held=is_held, weights=torch.ones(int(is_held.sum()), self.dim), states={})


def _lacks(run: CommandLine, address: str, table: str = "ctr:weight") -> str | None:
    found = {each["fqn"]: each["lacks"] for each in run.json("table", "list", "--server", address)}
    assert found == {each["fqn"]: each["lacks"] for each in run.json("status", "--server", address)["tables"]}
    return found[table]


def _train(model: nn.Embedding, optimizer: Any, *rows: int) -> None:
    optimizer.zero_grad()
    model(torch.tensor(rows)).sum().backward()
    optimizer.step()


def _attached(address: str, model: nn.Module, **arguments: Any) -> tuple[RawEmbeddingStreamer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    streamer = RawEmbeddingStreamer(address, run="ctr", model="ctr")
    streamer.attach(model, optimizer, **arguments)
    return streamer, optimizer


def test_a_trainer_killed_amid_its_first_upload_sends_the_rest_when_it_starts_again(
    server: ServerProcess, run: CommandLine, tmp_path: Path
) -> None:
    """Everybody says so before: status, doctor, replicas and a snapshot; a replica by step shows the table whole."""
    with EmbeddingReplica(server.address, consistency="step") as by_step:
        _kill_amid_first_upload(server.address)
        _check_what_is_said(server, run, by_step, tmp_path)
        with pytest.raises(UnavailableError, match=r"has not ended a step .* has not sent all rows of ctr:weight"):
            EmbeddingReplica(server.address, consistency="step", open_timeout_s=0.5)
        snapshots = tmp_path / "data" / "snapshots"
        run("snapshot", "create", "--server", server.address, "--name", "s", "--now")
        _start_again(server.address)
        assert _lacks(run, server.address) is None
        with EmbeddingReplica(server.address) as latest:
            for replica in (latest, by_step):
                wait_until(lambda replica=replica: not replica.incomplete and replica.step > 0, "the rest")
                assert np.array_equal(replica.lookup("weight", ROWS), trained_weights())
    for shards in (2, 3):
        data = tmp_path / f"restored{shards}"
        run("restore", snapshots / "s", "--data", data, "--shards", shards)
        with ServerProcess.start(data) as restored:
            assert _lacks(run, restored.address) == "incomplete"


def _check_what_is_said(server: ServerProcess, run: CommandLine, by_step: EmbeddingReplica, tmp_path: Path) -> None:
    assert _lacks(run, server.address) == "incomplete"
    assert "no: its trainer has not sent all rows" in run("table", "describe", "weight", "--server", server.address)
    told = run("doctor", "--server", server.address, code=1)
    assert "incomplete: ctr:weight; the trainer has not sent all rows, and is not connected" in told
    assert "Start run 'ctr' again" in told
    rows = tmp_path / "rows.safetensors"
    options = ("--server", server.address, "--now", "--to", rows, "--format", "safetensors")
    assert run.json("export", *options)["lacks"] == {"ctr:weight": "incomplete"}
    wait_until(lambda: by_step.incomplete == ("ctr:weight",), "the table")
    with EmbeddingReplica(server.address) as latest:
        assert latest.incomplete == by_step.incomplete == by_step.hidden == ("ctr:weight",)
        assert latest.hidden == ()
        assert "incomplete: ctr:weight" in repr(latest)
        report = latest.audit()
        assert report.is_equal and report.incomplete == ("ctr:weight",) and str(report).endswith("; incomplete")
        latest.lookup("weight", ROWS)
        assert 0 < latest.num_missing["ctr:weight"] < NUM_ROWS
        with pytest.raises(UnknownTableError, match="'ctr:weight' is incomplete: its trainer or backfill has not"):
            by_step.lookup("weight", ROWS)
        for replica, is_ready in ((latest, True), (by_step, False)):
            readiness = Readiness(max_lag_s=0.0)
            readiness.replica = replica
            state = readiness.look()
            assert state.is_ready is is_ready and "incomplete: ctr:weight" in str(state.failure)


def test_updated_rows_only_by_the_users_word_are_no_incomplete_table(server: ServerProcess, run: CommandLine) -> None:
    """It holds for later starts, too, until one sends all rows; and it ends what was incomplete."""
    model = nn.Embedding(50, 4)
    for publish, lacks in (("updated", "updated rows only"), ("auto", "updated rows only"), ("all", None)):
        streamer, optimizer = _attached(server.address, model, publish=publish)
        with streamer:
            _train(model, optimizer, 3, 4)
            streamer.flush()
            assert _lacks(run, server.address) == lacks, publish
            with EmbeddingReplica(server.address, consistency="step") as replica:
                assert replica.incomplete == replica.hidden == ()
                replica.lookup("weight", np.arange(50))
                assert replica.num_missing.get("ctr:weight", 0) == (0 if publish == "all" else 48)
    assert run("doctor", "--server", server.address)
    streamer, _ = _attached(server.address, nn.Sequential(nn.Embedding(9, 4)))
    streamer.close(flush=False)
    assert _lacks(run, server.address, "ctr:0.weight") == "incomplete"
    streamer, _ = _attached(server.address, nn.Sequential(nn.Embedding(9, 4)), publish="updated")
    streamer.close()
    assert _lacks(run, server.address, "ctr:0.weight") == "updated rows only"


def test_a_table_that_nobody_fills_holds_up_no_copy(server: ServerProcess, run: CommandLine, tmp_path: Path) -> None:
    """A new replica answers from the other tables; a new copy of an old replica shows what the copy before showed."""
    model, other = nn.Embedding(50, 4), nn.Embedding(20, 4)
    streamer, optimizer = _attached(server.address, model, publish="updated")
    with streamer:
        _train(model, optimizer, 3, 4)
    with EmbeddingReplica(server.address, consistency="step") as old:
        found = old.lookup("ctr:weight", ROWS[:50])
        _attached(server.address, model, publish="all")[0].close(flush=False)
        assert _lacks(run, server.address) == "incomplete"
        with RawEmbeddingStreamer(server.address, run="other", model="ctr") as streamer:
            optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
            streamer.attach(nn.ModuleDict({"other": other}), optimizer)
            _train(other, optimizer, 3)
        run("snapshot", "create", "--server", server.address, "--name", "s", "--now")
        old.load_snapshot(tmp_path / "data" / "snapshots" / "s", timeout_s=20.0)
        assert old.hidden == () and torch.equal(old.lookup("ctr:weight", ROWS[:50]), found)
        old.lookup("ctr:other.weight", ROWS[:20])
    with EmbeddingReplica(server.address, consistency="step") as new:
        readiness = Readiness(max_lag_s=0.0)
        readiness.replica = new
        state = readiness.look()
        assert state.is_ready and "incomplete: ctr:weight" in str(state.failure)
        new.lookup("ctr:other.weight", ROWS[:20])
        with pytest.raises(UnknownTableError, match="'ctr:weight' is incomplete"):
            new.lookup("ctr:weight", ROWS[:50])


def test_marks_from_before_an_attach_do_not_complete_a_table(server: ServerProcess, run: CommandLine) -> None:
    """A second model's table waits for a step after the attach, whatever was flushed before it."""
    first, second = nn.ModuleDict({"first": nn.Embedding(4, 4)}), nn.Embedding(50, 4)
    streamer, _ = _attached(server.address, first, publish="updated")
    with streamer:
        streamer.step(7)
        streamer.flush()
        optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
        streamer.attach(second, optimizer, publish="all")
        streamer.pause()
        _train(second, optimizer, 3)
        assert _lacks(run, server.address) == "incomplete", "a paused step ends nothing"
        streamer.resume()
        _train(second, optimizer, 3)
        streamer.flush()
        assert _lacks(run, server.address) is None


def test_an_attach_that_fails_after_it_was_announced_ends_streaming(
    server: ServerProcess, run: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise later steps would say that the table's rows have been sent."""

    def refuse(tables: object) -> None:
        raise ConfigError("no room")

    model = nn.Embedding(50, 4)
    streamer = RawEmbeddingStreamer(server.address, run="ctr", model="ctr")
    monkeypatch.setattr(streamer._delivery.flusher, "add_tables", refuse)
    with pytest.raises(ConfigError, match="no room"):
        streamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(HeadraceError, match="an attach could not make ctr:weight: no room"):
        streamer.step()
    streamer.close()
    assert _lacks(run, server.address) == "incomplete"


def test_a_run_that_takes_over_sends_the_rest(server: ServerProcess, run: CommandLine) -> None:
    """The table is incomplete for whoever trains it."""
    model = nn.Embedding(50, 4)
    streamer, _ = _attached(server.address, model)
    streamer.close(flush=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with RawEmbeddingStreamer(server.address, run="other", model="ctr", takes_over=True) as streamer:
        streamer.attach(model, optimizer)
        assert streamer.stats().num_dirty_rows == 50
        assert "the trainer has not sent all rows" in run("doctor", "--server", server.address)
        streamer.flush()
        assert streamer.audit().is_equal
        assert _lacks(run, server.address) is None


def test_a_table_of_virtual_ids_is_complete_with_its_first_flush(server: ServerProcess, run: CommandLine) -> None:
    """It has no number of rows, and is whole with those that are held at first."""
    with RawEmbeddingStreamer(server.address, run="ctr", model="ctr") as streamer:
        streamer.attach_source("raw", _Source())
        assert _lacks(run, server.address, "ctr:raw") == "incomplete"
        streamer.flush()
        assert _lacks(run, server.address, "ctr:raw") is None


@pytest.mark.parametrize("consistency", ["latest", "step"])
def test_the_new_rows_of_a_grown_table_are_sent(server: ServerProcess, run: CommandLine, consistency: str) -> None:
    """Whoever is killed in between leaves an incomplete table, whose former rows replicas show all the time."""
    model = nn.Embedding(50, 4)
    streamer, optimizer = _attached(server.address, model)
    with streamer:
        _train(model, optimizer, 3)
    larger = nn.Embedding(60, 4)
    with torch.no_grad():
        larger.weight[:50] = model.weight
    before = model.weight.detach().numpy()
    with EmbeddingReplica(server.address, consistency=consistency) as replica:
        streamer, _ = _attached(server.address, larger)
        streamer.close(flush=False)  # as if killed
        assert _lacks(run, server.address) == "incomplete"
        wait_until(lambda: replica.incomplete == ("ctr:weight",), "the growth")
        assert np.array_equal(replica.lookup("weight", np.arange(50)), before)
        streamer, optimizer = _attached(server.address, larger)
        with streamer:
            streamer.flush()
            assert _lacks(run, server.address) is None
            assert streamer.audit(only_present=False).is_equal
            wait_until(lambda: not replica.incomplete, "all rows")
            assert np.array_equal(replica.lookup("weight", np.arange(60)), larger.weight.detach())


def test_a_grown_table_sends_only_its_new_rows(server: ServerProcess) -> None:
    """The others are there."""
    model, larger = nn.Embedding(50, 4), nn.Embedding(60, 4)
    with torch.no_grad():
        larger.weight[:50] = model.weight
    streamer, _ = _attached(server.address, model)
    streamer.close()
    streamer, _ = _attached(server.address, larger)
    with streamer:
        assert streamer.stats().num_dirty_rows == 10


@pytest.mark.parametrize("larger", [nn.Embedding(60, 4), nn.EmbeddingBag(50, 4, mode="mean")])
def test_a_start_that_was_refused_is_refused_again(server: ServerProcess, run: CommandLine, larger: nn.Module) -> None:
    """New rows or other uses are no word that the trained ones may be replaced, and neither is registered."""
    streamer, optimizer = _attached(server.address, nn.EmbeddingBag(50, 4, mode="sum"))
    streamer.close()
    before = read_rows(server.address, "ctr:weight", range(50)).weights
    for _ in range(2):
        streamer, optimizer = _attached(server.address, larger)
        optimizer.zero_grad()
        larger(torch.tensor([[3]])).sum().backward()
        with pytest.raises(ConfigError, match="other rows of ctr:weight than the model"):
            optimizer.step()
        streamer.close()
    assert np.array_equal(read_rows(server.address, "ctr:weight", range(50)).weights, before)
    assert _lacks(run, server.address) is None


def test_new_rows_that_were_sent_in_part_are_sent_again(server: ServerProcess, run: CommandLine) -> None:
    """They may have other values, as each start makes its own."""
    model, larger = nn.Embedding(50, 4), nn.Embedding(60, 4)
    _attached(server.address, model)[0].close()
    with torch.no_grad():
        larger.weight[:50] = model.weight
    streamer, optimizer = _attached(server.address, larger, publish="updated")
    with streamer:
        _train(larger, optimizer, 55)
    _attached(server.address, larger, publish="all")[0].close(flush=False)  # as if killed
    assert _lacks(run, server.address) == "incomplete"
    with torch.no_grad():
        larger.weight[50:] += 1
    streamer, _ = _attached(server.address, larger)
    with streamer:
        assert streamer.stats().num_dirty_rows == 10
        assert streamer.audit().is_equal
        assert _lacks(run, server.address) is None


def test_updated_rows_are_enough_for_a_complete_table_in_this_run_alone(
    server: ServerProcess, run: CommandLine
) -> None:
    """It stays complete, also with other uses, and the next start sends the rows by which it grows."""
    model, larger = nn.Embedding(50, 4), nn.EmbeddingBag(60, 4)
    _attached(server.address, model)[0].close()
    mean = nn.EmbeddingBag(50, 4, mode="mean")
    with torch.no_grad():
        larger.weight[:50] = mean.weight[:] = model.weight
    _attached(server.address, mean, publish="updated")[0].close()
    assert _lacks(run, server.address) is None
    streamer, _ = _attached(server.address, larger)
    with streamer:
        report = streamer.audit()
        assert report.is_equal and report.tables[0].num_missing == 0
        assert _lacks(run, server.address) is None


def _logs_of(server: ServerProcess, copy: Path) -> Path:
    """Copy a running server's logs."""
    return Path(shutil.copytree(server.data_dir, copy, ignore=shutil.ignore_patterns("store", "snapshots")))


def test_a_log_leaves_incomplete_what_was(server: ServerProcess, run: CommandLine, tmp_path: Path) -> None:
    """What is made of a log lacks what its server lacked: the rest of a table that its trainer had begun to send."""
    _kill_amid_first_upload(server.address)
    run("restore", _logs_of(server, tmp_path / "one"), "--data", tmp_path / "other")
    with ServerProcess.start(tmp_path / "other") as other:
        assert _lacks(run, other.address) == "incomplete"
    _start_again(server.address)
    run("restore", _logs_of(server, tmp_path / "two"), "--data", tmp_path / "third")
    with ServerProcess.start(tmp_path / "third") as third:
        assert _lacks(run, third.address) is None


def test_a_restored_table_of_updated_rows_only_stays_one(
    server: ServerProcess, run: CommandLine, tmp_path: Path
) -> None:
    """What is made of a log says of a table what the trainer said, and a trainer goes on so."""
    model = nn.Embedding(50, 4)
    streamer, optimizer = _attached(server.address, model, publish="updated")
    with streamer:
        _train(model, optimizer, 3, 4)
    run("restore", _logs_of(server, tmp_path / "logs"), "--data", tmp_path / "other")
    with ServerProcess.start(tmp_path / "other") as other:
        assert _lacks(run, other.address) == "updated rows only"
        with EmbeddingReplica(other.address, consistency="step") as replica:
            replica.lookup("weight", np.arange(50))
            assert (replica.hidden, replica.num_missing) == ((), {"ctr:weight": 48})
        _attached(other.address, model)[0].close()
        assert _lacks(run, other.address) == "updated rows only"
