"""Tables whose dim or optimizer changes go on as other generations, while a server and replicas run."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from held_ports import hold_ports
from safetensors.torch import load_file, save_file
from torch import nn
from watched_server import wait_until

from headrace import cli, restore
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.paramserver.replica.api.served_model import serve_model
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError, HeadraceError, OwnedError, SpecMismatchError, UnknownTableError
from headrace.streamer import RawEmbeddingStreamer

NUM_ROWS = 50
ROWS = np.arange(NUM_ROWS)
FIRST, SECOND = "ctr:weight", "ctr:weight#2"


class Trainer:
    """An embedding that an optimizer trains."""

    def __init__(self, dim: int = 8, make: Any = torch.optim.SGD, *, num_rows: int = NUM_ROWS) -> None:
        torch.manual_seed(dim)
        self.model = nn.Embedding(num_rows, dim)
        self.optimizer = make(self.model.parameters(), lr=0.1)

    def open(self, address: str, *, run: str = "ctr", **settings: Any) -> RawEmbeddingStreamer:
        return RawEmbeddingStreamer(address, run=run, model="ctr", **settings)

    def stream(self, address: str, *, num_steps: int = 1, publish: Any = "all", **settings: Any) -> None:
        """Attach, train, compare with the store, and end."""
        with self.open(address, **settings) as streamer:
            streamer.attach(self.model, self.optimizer, publish=publish)
            for _ in range(num_steps):
                self.step()
            assert streamer.audit(only_present=publish != "all").is_equal

    def step(self, row: int = 0) -> None:
        self.optimizer.zero_grad()
        self.model(torch.tensor([row])).sum().backward()
        self.optimizer.step()

    @property
    def weights(self) -> np.ndarray:
        return self.model.weight.detach().numpy().copy()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        yield server


def filling_of(address: str) -> dict[str, bool]:
    """Return the server's tables, and whether any shard lacks rows of them."""

    async def ask() -> dict[str, bool]:
        async with await EmbeddingReader.connect(address) as reader:
            tables = [table for status in await reader.status() for table in status.tables]
            lacking = {table.spec.fqn for table in tables if table.filling is not None}
            return {table.spec.fqn: table.spec.fqn in lacking for table in tables}

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        (Trainer(16), "dim 8 ≠ 16"),
        (Trainer(8, torch.optim.Adagrad), r"states \[none\] ≠ \[sum:POINTWISE:FLOAT32:0\]"),
    ],
)
def test_another_dim_or_optimizer_makes_another_generation(
    server: ServerProcess, changed: Trainer, difference: str
) -> None:
    """Without publish="all" it is refused with the way on; with it all rows go out, and a restart goes on there."""
    first = Trainer()
    first.stream(server.address)
    with pytest.raises(SpecMismatchError, match=rf"{difference}; attach with publish='all' .* or give your model"):
        changed.stream(server.address, publish="updated")
    assert filling_of(server.address) == {FIRST: False}
    changed.stream(server.address)
    assert filling_of(server.address) == {FIRST: False, SECOND: False}
    changed.stream(server.address, publish="updated")
    changed.stream(server.address)
    assert filling_of(server.address) == {FIRST: False, SECOND: False}
    with pytest.raises(SpecMismatchError, match="attach with publish='all' to go on with another generation"):
        first.stream(server.address, publish="updated")
    first.stream(server.address)
    assert filling_of(server.address) == {FIRST: False, SECOND: False, "ctr:weight#3": False}


def test_an_incomplete_generation_is_sent_whole_by_whoever_goes_on(
    server: ServerProcess, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer that ends before any step leaves it incomplete; the next start sends all rows, also with `updated`."""
    Trainer().stream(server.address)
    second = Trainer(16)
    with second.open(server.address) as streamer:
        streamer.attach(second.model, second.optimizer, publish="all")
        streamer.close(flush=False)
    assert filling_of(server.address) == {FIRST: False, SECOND: True}
    assert cli.main(["table", "list", "--server", server.address]) == 0
    assert cli.main(["table", "describe", "weight#2", "--server", server.address]) == 0
    out = capsys.readouterr().out
    assert "(incomplete)" in out and "no: its trainer has not sent all rows" in out
    caplog.clear()
    with caplog.at_level("INFO"), second.open(server.address) as streamer:
        streamer.attach(second.model, second.optimizer, publish="updated")
        assert f"sending {SECOND} whole" in caplog.text
        streamer.pause()
        second.step()
        assert filling_of(server.address)[SECOND], "a paused step ends nothing"
        streamer.resume()
        second.step()
        assert streamer.audit(only_present=False).is_equal
    assert not filling_of(server.address)[SECOND]


def test_the_first_generation_goes_on_while_the_next_is_incomplete(server: ServerProcess) -> None:
    """Whoever gives a change up goes on with the old model; once the change is complete that needs publish="all"."""
    first, second = Trainer(), Trainer(16)
    first.stream(server.address)
    with second.open(server.address) as streamer:
        streamer.attach(second.model, second.optimizer, publish="all")
        streamer.close(flush=False)
    first.stream(server.address, publish="updated")
    assert filling_of(server.address) == {FIRST: False, SECOND: True}


def test_a_generation_is_complete_without_a_step(server: ServerProcess) -> None:
    """A streamer that has sent nothing before completes a generation by its first flush."""
    Trainer().stream(server.address)
    Trainer(16).stream(server.address, num_steps=0)
    assert filling_of(server.address) == {FIRST: False, SECOND: False}


def test_marks_from_before_an_attach_do_not_complete_a_generation(server: ServerProcess) -> None:
    """A second model's generation waits for a step after the attach, whatever was flushed before it."""
    Trainer().stream(server.address)
    other, second = nn.ModuleDict({"other": nn.Embedding(4, 4)}), Trainer(16)
    with second.open(server.address) as streamer:
        streamer.attach(other, torch.optim.SGD(other.parameters(), lr=0.1), publish="updated")
        streamer.step(7)
        streamer.flush()
        streamer.attach(second.model, second.optimizer, publish="all")
        streamer.pause()
        assert filling_of(server.address)[SECOND]
        streamer.resume()
        second.step()
        streamer.flush()
        assert not filling_of(server.address)[SECOND]


def test_the_streamer_goes_on_by_the_plain_name(server: ServerProcess) -> None:
    """Fetch, evict, hooks, audit, state and a resumed run name a table as they did before it changed."""
    Trainer().stream(server.address)
    second, seen = Trainer(16), []
    with second.open(server.address) as streamer:
        streamer.register_pre_eviction_hook(lambda name, rows: seen.append((name, rows.tolist())))
        streamer.attach(second.model, second.optimizer, publish="all")
        assert torch.equal(streamer.fetch("weight", [3]).weights, second.model.weight[[3]])
        assert streamer.evict(FIRST, [4]) == 1
        second.step()
        streamer.flush()
        assert seen == [(FIRST, [4])]
        assert [table.fqn for table in streamer.audit().tables] == [FIRST]
        assert [table.spec.fqn for table in streamer.tables] == [SECOND]
        state = streamer.state_dict()
        assert state["evicted"] == {FIRST: [4]}
    with second.open(server.address) as streamer:
        streamer.attach(second.model, second.optimizer, publish="updated")
        assert streamer.load_state_dict(state) == 1, "the evicted row is deleted again"


def test_what_makes_no_generation(server: ServerProcess) -> None:
    """Fewer rows, another run and a name that looks like a generation are refused, and nothing is registered."""
    Trainer().stream(server.address)
    with pytest.raises(SpecMismatchError, match="num_rows 50 ≠ 40; a table can get more rows"):
        Trainer(num_rows=40).stream(server.address)
    with pytest.raises(OwnedError, match="belongs to run 'ctr'"):
        Trainer(16).stream(server.address, run="other")
    odd = nn.Module()
    odd.register_module("weight", nn.Embedding(4, 4))
    odd.weight.register_parameter("x#2", nn.Parameter(torch.zeros(1)))
    with (
        Trainer().open(server.address) as streamer,
        pytest.raises(ConfigError, match=r"'weight\.x#2': '#2' at the end of a name"),
    ):
        streamer.attach(odd, torch.optim.SGD(odd.parameters(), lr=0.1), dense=True, publish="updated")
    assert filling_of(server.address) == {FIRST: False}


def test_an_attach_that_fails_after_it_was_announced_ends_streaming(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise later steps would say that the generation's rows have been sent."""
    Trainer().stream(server.address)
    second = Trainer(16)
    streamer = second.open(server.address)
    monkeypatch.setattr(streamer._delivery.flusher, "add_tables", _refuse)
    with pytest.raises(ConfigError, match="no room"):
        streamer.attach(second.model, second.optimizer, publish="all")
    with pytest.raises(HeadraceError, match=rf"an attach could not make {SECOND}: no room"):
        streamer.step()
    streamer.close()
    assert filling_of(server.address)[SECOND]


def _refuse(tables: object) -> None:
    raise ConfigError("no room")


@pytest.mark.parametrize("consistency", ["latest", "step"])
def test_replicas_change_over_once_a_generation_is_complete(tmp_path: Path, consistency: str) -> None:
    """Once all rows are there, on all shards at once; served modules and roll_back keep the earlier one."""
    first, second = Trainer(), Trainer(16)
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        first.stream(server.address)
        with EmbeddingReplica(server.address, consistency=consistency) as replica:
            served = serve_model(nn.Embedding(NUM_ROWS, 8, device="meta"), replica)
            with second.open(server.address) as streamer:
                streamer.attach(second.model, second.optimizer, publish="all")
                wait_until(lambda: SECOND in replica.tables)
                for later in (replica, EmbeddingReplica(server.address, consistency="latest")):
                    assert np.array_equal(later.lookup("weight", ROWS).numpy(), first.weights), "not complete"
                later.close()
                second.step()
                streamer.flush()
            wait_until(lambda: replica.spec_of("weight").fqn == SECOND)
            assert np.array_equal(replica.lookup("weight", ROWS).numpy(), second.weights)
            assert np.array_equal(replica.lookup("ctr:weight#1", ROWS).numpy(), first.weights)
            assert np.array_equal(served(torch.arange(NUM_ROWS)).numpy(), first.weights)
            assert {table.fqn for table in replica.audit().tables} == {FIRST, SECOND}
            assert replica.audit(tables=["weight"]).is_equal
            for dim, weights in ((8, first.weights), (16, second.weights)):
                again = serve_model(nn.Embedding(NUM_ROWS, dim, device="meta"), replica)
                assert np.array_equal(again(torch.arange(NUM_ROWS)).numpy(), weights)
            replica.roll_back(["weight"])
            assert np.array_equal(replica.lookup("weight", ROWS).numpy(), first.weights)
            with pytest.raises(ConfigError, match="'ctr:weight' has no generation before 'ctr:weight' here"):
                replica.roll_back(["ctr:weight"])
            second.stream(server.address, publish="updated")
            assert replica.spec_of("weight").fqn == FIRST, "until another generation is complete"
            third = Trainer(4)
            third.stream(server.address)
            wait_until(lambda: replica.spec_of("weight").fqn == "ctr:weight#3")
            assert np.array_equal(replica.lookup("weight", ROWS).numpy(), third.weights)
        server.kill()
    with (
        ServerProcess.start(tmp_path / "data") as server,
        EmbeddingReplica(server.address, consistency=consistency) as late,
    ):
        assert np.array_equal(late.lookup("weight", ROWS).numpy(), third.weights)
        assert np.array_equal(late.lookup("weight#2", ROWS).numpy(), second.weights)


def test_served_models_go_on_in_a_generation_of_the_same_dim(server: ServerProcess) -> None:
    """After another optimizer a served model reads what is trained now, whichever generation it began with."""
    first, second = Trainer(), Trainer(8, torch.optim.Adagrad)
    first.stream(server.address)
    with EmbeddingReplica(server.address, consistency="step") as replica:
        served = serve_model(nn.Embedding(NUM_ROWS, 8, device="meta"), replica)
        second.stream(server.address, num_steps=3)
        wait_until(lambda: np.array_equal(served(torch.arange(NUM_ROWS)).numpy(), second.weights))
        replica.roll_back(["weight"])
        assert np.array_equal(served(torch.arange(NUM_ROWS)).numpy(), first.weights)


def test_a_server_keeps_as_many_generations_as_it_is_told(tmp_path: Path) -> None:
    """The trainer's next start drops earlier ones, not before all shards are complete; replicas and replays agree."""
    first, second, third = Trainer(), Trainer(16), Trainer(4)
    with ServerProcess.start(tmp_path / "data", shards=2, keep_generations=2) as server:
        first.stream(server.address)
        with EmbeddingReplica(server.address) as replica:
            second.stream(server.address)
            with third.open(server.address) as streamer:
                streamer.attach(third.model, third.optimizer, publish="all")
                streamer.close(flush=False)
            third.stream(server.address)
            assert filling_of(server.address) == {FIRST: False, SECOND: False, "ctr:weight#3": False}
            third.stream(server.address, publish="updated")
            assert filling_of(server.address) == {SECOND: False, "ctr:weight#3": False}
            wait_until(lambda: replica.tables.keys() == {SECOND, "ctr:weight#3"})
            assert np.array_equal(replica.lookup("weight", ROWS).numpy(), third.weights)
            with pytest.raises(UnknownTableError, match="'ctr:weight' was dropped in epoch"):
                replica.lookup("weight#1", ROWS)
            replica.roll_back(["weight"])
            assert np.array_equal(replica.lookup("weight", ROWS).numpy(), second.weights)
        server.kill()
    with ServerProcess.start(tmp_path / "data", keep_generations=1) as server:
        assert filling_of(server.address) == {SECOND: False, "ctr:weight#3": False}
        third.stream(server.address, publish="updated")
        assert filling_of(server.address) == {"ctr:weight#3": False}
        with EmbeddingReplica(server.address) as late:
            assert np.array_equal(late.lookup("weight", ROWS).numpy(), third.weights)


def test_a_replay_brings_generations_back_whole(tmp_path: Path) -> None:
    """Replicas of the target change over at its end, not amid it; a part of the log, or an incomplete one, does not."""
    first, second = Trainer(), Trainer(16)
    log, complete = tmp_path / "data", {FIRST: False, SECOND: False}
    with ServerProcess.start(log, shards=2) as server:
        first.stream(server.address)
        second.stream(server.address, num_steps=3)
        with Trainer(4).open(server.address) as streamer:
            third = Trainer(4)
            streamer.attach(third.model, third.optimizer, publish="all")
            streamer.close(flush=False)
        assert filling_of(server.address) == complete | {"ctr:weight#3": True}
    with (
        ServerProcess.start(tmp_path / "part", shards=3) as server,
        EmbeddingReplica(server.address, consistency="latest") as replica,
    ):
        assert cli.main(["replay", str(log), "--server", server.address, "--to-step", "2"]) == 0
        assert filling_of(server.address)[SECOND]
        wait_until(lambda: replica.tables.keys() >= {FIRST, SECOND})
        assert replica.spec_of("weight").fqn == FIRST
        assert cli.main(["replay", str(log), "--server", server.address]) == 0
        assert filling_of(server.address).items() >= complete.items()
        wait_until(lambda: replica.spec_of("weight").fqn == SECOND)
        assert np.array_equal(replica.lookup("weight", ROWS).numpy(), second.weights)
        server.kill()
    with ServerProcess.start(tmp_path / "part") as server:
        assert filling_of(server.address).items() >= complete.items()
        second.stream(server.address, publish="updated")


def test_a_restored_server_knows_drops_renames_and_generations(tmp_path: Path) -> None:
    """On another number of shards too: an old log brings nothing back, and what was incomplete is sent whole."""
    first, second = Trainer(), Trainer(16)
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        first.stream(server.address, run="old")
    shutil.copytree(tmp_path / "data", tmp_path / "before")
    with ServerProcess.start(tmp_path / "data") as server:
        assert cli.main(["table", "drop", FIRST, "--yes", "--server", server.address]) == 0
        for model in ("user", "item"):
            with RawEmbeddingStreamer(server.address, run=model, model=model) as streamer:
                streamer.attach(first.model, first.optimizer, publish="all")
        assert cli.main(["table", "rename", "user:weight", "rows.weight", "--server", server.address]) == 0
        with RawEmbeddingStreamer(server.address, run="item", model="item") as streamer:
            streamer.attach(second.model, second.optimizer, publish="all")
            streamer.close(flush=False)
        assert cli.main(["snapshot", "create", "--server", server.address, "--name", "s", "--now"]) == 0
    snapshot = str(tmp_path / "data" / "snapshots" / "s")
    for shards in (2, 3):
        data = tmp_path / f"restored{shards}"
        assert cli.main(["snapshot", "restore", snapshot, "--data", str(data), "--shards", str(shards)]) == 0
        with ServerProcess.start(data) as server:
            tables = {"item:weight": False, "item:weight#2": True, "user:rows.weight": False}
            assert filling_of(server.address) == tables
            assert cli.main(["replay", str(tmp_path / "before"), "--server", server.address]) == 1
            assert filling_of(server.address) == tables, "the dropped table does not come back"
            with EmbeddingReplica(server.address) as replica:
                assert np.array_equal(replica.lookup("rows.weight", ROWS).numpy(), first.weights)
                assert replica.spec_of("item:weight").fqn == "item:weight"
            with RawEmbeddingStreamer(server.address, run="item", model="item") as streamer:
                streamer.attach(second.model, second.optimizer, publish="updated")
            assert filling_of(server.address) == tables | {"item:weight#2": False}


def test_restore_export_and_backfill_mean_the_newest_complete_generation(tmp_path: Path) -> None:
    """By server and by snapshot, under the plain name; an earlier one by `#1`, and an incomplete one not at all."""
    first, second = Trainer(), Trainer(16, torch.optim.Adagrad)
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        first.stream(server.address)
        second.stream(server.address, num_steps=2)
        third = Trainer(4)
        with third.open(server.address) as streamer:
            streamer.attach(third.model, third.optimizer, publish="all")
            streamer.close(flush=False)
        assert cli.main(["snapshot", "create", "--server", server.address, "--name", "s", "--now"]) == 0
        snapshot = tmp_path / "data" / "snapshots" / "s"
        for source in ({"address": server.address}, {"snapshot": snapshot}):
            again = nn.Embedding(NUM_ROWS, 16)
            optimizer = torch.optim.Adagrad(again.parameters(), lr=0.1)
            assert restore(again, optimizer, **source).tables[0].num_restored == NUM_ROWS
            assert torch.equal(again.weight, second.model.weight)
            with pytest.raises(SpecMismatchError, match="dim 8 ≠ 16"):
                restore(first.model, first.optimizer, **source)
        for number, (wanted, weights) in enumerate((("weight", second.weights), ("weight#1", first.weights))):
            file = tmp_path / f"{number}.safetensors"
            place = ["--snapshot", str(snapshot), "--to", str(file), "--format", "safetensors"]
            assert cli.main(["export", *place, "--table", wanted]) == 0
            assert {name: rows.numpy().tolist() for name, rows in load_file(file).items()} == {
                "weight": weights.tolist()
            }
        save_file({"weight": torch.full((NUM_ROWS, 16), 7.0)}, tmp_path / "seven.safetensors")
        rows = ["--server", server.address, "--epoch", "1000", "--zero-states"]
        assert cli.main(["backfill", str(tmp_path / "seven.safetensors"), *rows]) == 0
        with EmbeddingReplica(server.address) as replica:
            assert replica.lookup("weight", ROWS).eq(7).all()
            assert np.array_equal(replica.lookup("weight#1", ROWS).numpy(), first.weights)


@pytest.mark.parametrize("amid", ["attach", "rows", "complete", "drop"])
@pytest.mark.parametrize("consistency", ["latest", "step"])
def test_a_kill_at_each_point_of_a_change_loses_and_mixes_nothing(tmp_path: Path, amid: str, consistency: str) -> None:
    """Replicas that run on or begin see one generation, whole, whatever had come; training goes on, and all arrives."""
    first, second = Trainer(), Trainer(16)
    settings = {"port": hold_ports(2), "keep_generations": 1}
    states: list[Any] = []

    def train(streamer: RawEmbeddingStreamer) -> None:
        second.step()
        states.append(second.weights.tolist())

    with ServerProcess.start(tmp_path / "data", shards=2, **settings) as server:
        first.stream(server.address)
        if amid == "drop":
            second.stream(server.address)
        replica = EmbeddingReplica(server.address, consistency=consistency)
        with second.open(server.address) as streamer, replica:
            streamer.attach(second.model, second.optimizer, publish="all")
            states.append(second.weights.tolist())
            if amid in ("rows", "complete"):
                if amid == "rows":
                    server.kill()  # the rows wait in the trainer
                train(streamer)
            if amid == "complete":
                streamer.flush()
            server.kill()
            seen = [replica.lookup("weight", ROWS).numpy().tolist()]
            with ServerProcess.start(tmp_path / "data", **settings) as again:
                with EmbeddingReplica(again.address) as late:
                    seen += [each.lookup("weight", ROWS).numpy().tolist() for each in (late, replica)]
                again.kill()
            assert all(rows in (first.weights.tolist(), *states) for rows in seen)
            assert amid != "attach" or all(rows == first.weights.tolist() for rows in seen)
            assert amid not in ("complete", "drop") or first.weights.tolist() not in seen[1:2]
            with ServerProcess.start(tmp_path / "data", **settings) as again:
                train(streamer)
                streamer.flush()
                assert streamer.audit(only_present=False).is_equal
                wait_until(lambda: replica.lookup("weight", ROWS).numpy().tolist() == states[-1])
                later = {SECOND: False}
                assert filling_of(again.address) == (later if amid == "drop" else {FIRST: False} | later)
                with EmbeddingReplica(again.address, consistency=consistency) as late:
                    assert late.lookup("weight", ROWS).numpy().tolist() == states[-1]
