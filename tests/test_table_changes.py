"""Tables change while trainers, a server and replicas go on."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from held_ports import hold_ports
from safetensors.torch import load_file, save_file
from stored_rows import read_rows
from torch import nn
from watched_server import WAIT_S, wait_until

from headrace import TableAdmin, cli, restore
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.paramserver.replica.api.served_model import serve_model
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError, OwnedError, SpecMismatchError, UnknownTableError
from headrace.streamer import RawEmbeddingStreamer

FEW, MANY, DIM = 40, 61, 4


class Trainer:
    """An embedding that Adam trains."""

    def __init__(self, num_rows: int, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Embedding(num_rows, DIM)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def stream(self, address: str, *, run: str = "ctr", num_steps: int = 2) -> None:
        """Publish all rows, train, compare with the store, and end."""
        with RawEmbeddingStreamer(address, run=run, model="ctr") as streamer:
            streamer.attach(self.model, self.optimizer, publish="all")
            for _ in range(num_steps):
                self.step()
            assert streamer.audit(only_present=False).is_equal

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model.weight.pow(2).sum().backward()
        self.optimizer.step()

    @property
    def weights(self) -> np.ndarray:
        return self.model.weight.detach().numpy()


def read(address: str, num_rows: int) -> tuple[np.ndarray, int]:
    """Return the first rows of the table, and how many it has."""

    async def ask() -> tuple[np.ndarray, int]:
        async with await EmbeddingReader.connect(address) as reader:
            return (await reader.get("weight", np.arange(num_rows))).weights, reader.tables["ctr:weight"].num_rows

    return asyncio.run(ask())


@pytest.mark.parametrize("consistency", ["latest", "step"])
def test_a_model_with_more_rows_is_restored_and_trains_on(tmp_path: Path, consistency: str) -> None:
    """Old rows and Adam's states come back, the replica that runs gets the new rows, and a restart changes nothing."""
    first, grown = Trainer(FEW), Trainer(MANY, seed=1)
    built = grown.weights.copy()
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        first.stream(server.address)
        with EmbeddingReplica(server.address, consistency=consistency) as replica:
            assert np.array_equal(replica.lookup("weight", np.arange(FEW)).numpy(), first.weights)
            report = restore(grown.model, grown.optimizer, server.address)
            assert np.array_equal(grown.weights[:FEW], first.weights)
            assert np.array_equal(grown.weights[FEW:], built[FEW:])
            assert (report.tables[0].num_restored, report.tables[0].num_rows) == (FEW, MANY)
            assert grown.optimizer.state[grown.model.weight]["step"] == 2
            grown.stream(server.address)
            replica.wait_for(2, WAIT_S, epoch=2)
            wait_until(lambda: np.array_equal(replica.lookup("weight", np.arange(MANY)).numpy(), grown.weights))
            assert replica.tables["ctr:weight"].num_rows == MANY
        with EmbeddingReplica(server.address, consistency=consistency) as late:
            assert np.array_equal(late.lookup("weight", np.arange(MANY)).numpy(), grown.weights)
            for num_rows in (FEW, MANY):
                served = serve_model(nn.Embedding(num_rows, DIM, device="meta"), late)
                assert np.array_equal(served(torch.arange(num_rows)).numpy(), grown.weights[:num_rows])
            with pytest.raises(ConfigError, match=r"is 61 × 4 torch.float32 in the replica and 62 × 4"):
                serve_model(nn.Embedding(MANY + 1, DIM, device="meta"), late)
        server.kill()
    with ServerProcess.start(tmp_path / "data") as server:
        weights, num_rows = read(server.address, MANY)
        assert np.array_equal(weights, grown.weights) and num_rows == MANY
        grown.stream(server.address)
        assert np.array_equal(read(server.address, MANY)[0], grown.weights)


def test_a_table_never_loses_rows(tmp_path: Path) -> None:
    """A trainer or a restore with fewer rows is told both numbers; another run does not grow it; nothing changes."""
    trainer = Trainer(MANY)
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        trainer.stream(server.address)
        smaller = Trainer(FEW)
        with pytest.raises(SpecMismatchError, match=rf"num_rows {MANY} ≠ {FEW}; a table can get more rows"):
            smaller.stream(server.address)
        with pytest.raises(SpecMismatchError, match=rf"\(model ≠ stored\): num_rows {FEW} ≠ {MANY}"):
            restore(smaller.model, smaller.optimizer, server.address)
        with pytest.raises(OwnedError, match="'ctr:weight' belongs to run 'ctr'"):
            Trainer(MANY + 1).stream(server.address, run="other")
        weights, num_rows = read(server.address, MANY)
        assert np.array_equal(weights, trainer.weights) and num_rows == MANY


def test_logs_from_before_and_after_the_growth_are_replayed(tmp_path: Path) -> None:
    """An old log goes to a table that has grown; a log with the growth in it makes the grown table."""
    first, grown = Trainer(FEW), Trainer(MANY)
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        first.stream(server.address)
    shutil.copytree(tmp_path / "data", tmp_path / "before")
    with ServerProcess.start(tmp_path / "data") as server:
        grown.stream(server.address)
    with ServerProcess.start(tmp_path / "target", shards=3) as server:
        assert cli.main(["replay", str(tmp_path / "data"), "--server", server.address]) == 0
        weights, num_rows = read(server.address, MANY)
        assert np.array_equal(weights, grown.weights) and num_rows == MANY
        assert cli.main(["replay", str(tmp_path / "before"), "--server", server.address]) == 0
        assert np.array_equal(read(server.address, MANY)[0], grown.weights), "older rows change nothing"
    with ServerProcess.start(tmp_path / "empty", shards=2) as server:
        assert cli.main(["replay", str(tmp_path / "before"), "--server", server.address]) == 0
        assert cli.main(["replay", str(tmp_path / "data"), "--server", server.address]) == 0
        assert np.array_equal(read(server.address, MANY)[0], grown.weights)


def drop(address: str, **options: bool) -> list[str]:
    async def ask() -> list[str]:
        async with await TableAdmin.connect(address) as admin:
            return await admin.drop(["weight"], **options)

    return asyncio.run(ask())


def test_a_dropped_table_does_not_come_back(tmp_path: Path) -> None:
    """Not by its running trainer, a replay, a backfill, or a restart; a trainer that starts later makes it anew."""
    old = Trainer(FEW)
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        old.stream(server.address)
    shutil.copytree(tmp_path / "data", tmp_path / "before")
    port = hold_ports(2)  # the trainer finds both shards again where they were
    with ServerProcess.start(tmp_path / "data", port=port) as server:
        running = RawEmbeddingStreamer(server.address, run="ctr", model="ctr")
        running.attach(old.model, old.optimizer, publish="updated")
        old.step()
        running.flush()
        with pytest.raises(OwnedError, match="is trained by run 'ctr', which is connected: stop it first"):
            drop(server.address)
        with EmbeddingReplica(server.address) as replica:
            assert np.array_equal(replica.lookup("weight", np.arange(FEW)).numpy(), old.weights)
            assert drop(server.address, force=True) == ["ctr:weight"]
            wait_until(lambda: not replica.tables, "the drop")
            with pytest.raises(UnknownTableError, match="table 'ctr:weight' was dropped in epoch"):
                replica.lookup("weight", [0])
        old.step()
        with pytest.raises(UnknownTableError, match=r"'ctr:weight' was dropped in epoch .*; a trainer that starts"):
            running.flush()
        running.close(flush=False)
        assert cli.main(["replay", str(tmp_path / "before"), "--server", server.address]) == 1
        server.kill()
    with ServerProcess.start(tmp_path / "data", port=port) as server:
        with pytest.raises(UnknownTableError, match="no table 'weight' on this server"):
            read(server.address, FEW)
        rows = nn.Embedding(FEW, DIM, sparse=True)
        with RawEmbeddingStreamer(server.address, run="ctr", model="ctr") as streamer:
            adam = torch.optim.SparseAdam(rows.parameters(), lr=0.1)
            streamer.attach(rows, adam, publish="updated")
            rows(torch.tensor([3])).sum().backward()
            adam.step()
            streamer.flush()
            assert cli.main(["replay", str(tmp_path / "before"), "--server", server.address]) == 0
            stored = read_rows(server.address, "weight", range(FEW)).presence
            assert np.flatnonzero(stored == 1).tolist() == [3], "the replay's rows are from before the drop"
        with EmbeddingReplica(server.address) as late:
            assert late.num_rows("weight") == 1
            assert torch.equal(late.lookup("weight", [3]), rows.weight.detach()[3:4])


def test_a_replica_follows_a_table_that_is_made_anew(tmp_path: Path) -> None:
    """One that runs through drop and new start has the new table's rows alone."""
    old, new = Trainer(FEW), Trainer(MANY, seed=1)
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        old.stream(server.address)
        for num_drops in (1, 2):
            with EmbeddingReplica(server.address) as replica:
                drop(server.address)
                new.stream(server.address)
                wait_until(lambda: replica.tables.keys() == {"ctr:weight"} and replica.num_rows("weight") == MANY)
                wait_until(
                    lambda: np.array_equal(replica.lookup("weight", np.arange(MANY)).numpy(), new.weights),
                    f"the rows after drop {num_drops}",
                )
        assert np.array_equal(read(server.address, MANY)[0], new.weights)
        to = ["--server", server.address, "--to", str(tmp_path / "out"), "--format", "safetensors", "--now"]
        assert cli.main(["export", *to]) == 0
    exported = load_file(tmp_path / "out")
    assert np.array_equal(exported["weight"].numpy(), new.weights), "files of RocksDB that hold the dropped rows too"


class Named(nn.Module):
    """A table under a name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.add_module(name, nn.Embedding(MANY, DIM))

    def forward(self) -> torch.Tensor:
        return sum(parameter.pow(2).sum() for parameter in self.parameters())


@pytest.mark.parametrize("consistency", ["latest", "step"])
def test_a_renamed_table_trains_on(tmp_path: Path, consistency: str) -> None:
    """After its module was renamed it is restored, trained, read, exported and filled as before; no row moves."""

    def train(model: Named, optimizer: torch.optim.Optimizer, publish: Any = "updated") -> None:
        with RawEmbeddingStreamer(server.address, run="ctr", model="ctr") as streamer:
            streamer.attach(model, optimizer, publish=publish)
            for _ in range(3):
                optimizer.zero_grad()
                model().backward()
                optimizer.step()
            assert streamer.audit(only_present=False).is_equal

    async def rename() -> str:
        async with await TableAdmin.connect(server.address) as admin:
            return await admin.rename("user.weight", "person.weight")

    first, then = Named("user"), Named("person")
    with ServerProcess.start(tmp_path / "data", shards=3) as server:
        train(first, torch.optim.Adam(first.parameters(), lr=0.1), publish="all")
        with EmbeddingReplica(server.address, consistency=consistency) as replica:
            assert asyncio.run(rename()) == "ctr:person.weight"
            wait_until(lambda: replica.tables.keys() == {"ctr:person.weight"}, "the rename")
            with pytest.raises(UnknownTableError, match=r"was renamed to 'ctr:person\.weight'"):
                replica.lookup("user.weight", [0])
            optimizer = torch.optim.Adam(then.parameters(), lr=0.1)
            report = restore(then, optimizer, server.address)
            assert report.tables[0].num_restored == MANY
            assert torch.equal(then.person.weight, first.user.weight)
            assert optimizer.state[then.person.weight]["exp_avg"].any()
            train(then, optimizer)
            rows, weights = np.arange(MANY), then.person.weight.detach()
            wait_until(lambda: torch.equal(replica.lookup("person.weight", rows), weights), "the rows")
        server.kill()
    shutil.copytree(tmp_path / "data", tmp_path / "log")
    with ServerProcess.start(tmp_path / "other") as server:
        assert cli.main(["replay", str(tmp_path / "log"), "--server", server.address]) == 0
        with EmbeddingReplica(server.address) as replica:
            assert replica.tables.keys() == {"ctr:person.weight"}
            assert torch.equal(replica.lookup("person.weight", rows), weights)
    with ServerProcess.start(tmp_path / "data") as server:
        with EmbeddingReplica(server.address, consistency=consistency) as late:
            assert torch.equal(late.lookup("person.weight", rows), weights)
        to = ["--server", server.address, "--to", str(tmp_path / "out"), "--format", "safetensors", "--now"]
        assert cli.main(["export", *to]) == 0
        assert torch.equal(load_file(tmp_path / "out")["person.weight"], weights)
        filled = torch.zeros(MANY, DIM)
        save_file({"person.weight": filled}, tmp_path / "zeros.safetensors")
        source = ["--epoch", "1000", "--zero-states"]
        assert cli.main(["backfill", str(tmp_path / "zeros.safetensors"), "--server", server.address, *source]) == 0
        with EmbeddingReplica(server.address) as late:
            assert torch.equal(late.lookup("person.weight", rows), filled)
        assert cli.main(["replay", str(tmp_path / "log"), "--server", server.address]) == 0, "changes nothing"
        assert cli.main(["snapshot", "create", "--server", server.address, "--name", "s", "--now"]) == 0
    snapshot = str(tmp_path / "data" / "snapshots" / "s")
    assert cli.main(["snapshot", "restore", snapshot, "--data", str(tmp_path / "two"), "--shards", "2"]) == 0
    with ServerProcess.start(tmp_path / "two") as server, EmbeddingReplica(server.address) as replica:
        assert torch.equal(replica.lookup("person.weight", rows), filled)


def test_a_replay_leaves_out_what_was_dropped_later(tmp_path: Path) -> None:
    """A log with a drop in it makes what the server had in the end: the rows that were written since."""
    old, new = Trainer(FEW), Trainer(FEW, seed=1)
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        old.stream(server.address)
        drop(server.address)
    with ServerProcess.start(tmp_path / "empty") as server:
        assert cli.main(["replay", str(tmp_path / "data"), "--server", server.address]) == 1, "nothing is left"
    with ServerProcess.start(tmp_path / "data") as server:
        new.stream(server.address)
    with ServerProcess.start(tmp_path / "target", shards=3) as server:
        assert cli.main(["replay", str(tmp_path / "data"), "--server", server.address]) == 0
        assert np.array_equal(read(server.address, FEW)[0], new.weights)
