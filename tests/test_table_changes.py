"""Tables change while trainers, a server and replicas go on."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from held_ports import hold_ports
from safetensors.torch import load_file
from stored_rows import read_rows
from torch import nn
from watched_server import WAIT_S, wait_until

from headrace import TableAdmin, cli, restore
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.paramserver.replica.api.served_model import serve_model
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.store.catalog import Catalog
from headrace.paramserver.store.rows import RowStore
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
        with pytest.raises(
            SpecMismatchError, match=rf"num_rows {MANY} ≠ {FEW}\); a table's shape is fixed, except for more rows"
        ):
            smaller.stream(server.address)
        with pytest.raises(SpecMismatchError, match=rf"\(model ≠ stored\): num_rows {FEW} ≠ {MANY}"):
            restore(smaller.model, smaller.optimizer, server.address)
        with RawEmbeddingStreamer(server.address, run="ctr", model="ctr") as streamer:
            streamer.attach(trainer.model, trainer.optimizer)
            with pytest.raises(OwnedError, match="'ctr:weight' belongs to run 'ctr'"):
                Trainer(MANY + 1).stream(server.address, run="other")
        weights, num_rows = read(server.address, MANY)
        assert np.array_equal(weights, trainer.weights) and num_rows == MANY


def drop(address: str, name: str = "weight", **options: bool) -> list[str]:
    async def ask() -> list[str]:
        async with await TableAdmin.connect(address) as admin:
            return await admin.drop([name], **options)

    return asyncio.run(ask())


def test_a_dropped_table_does_not_come_back(tmp_path: Path) -> None:
    """Not by its running trainer or a restart; a trainer that starts later makes it anew."""
    old = Trainer(FEW)
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        old.stream(server.address)
    port = hold_ports(2)  # the trainer finds both shards again where they were
    with ServerProcess.start(tmp_path / "data", port=port) as server:
        running = RawEmbeddingStreamer(server.address, run="ctr", model="ctr")
        running.attach(old.model, old.optimizer, publish="updated")
        old.step()
        running.flush()
        with pytest.raises(OwnedError, match="is written by run 'ctr', which is connected: stop it first"):
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
            stored = read_rows(server.address, "weight", range(FEW)).presence
            assert np.flatnonzero(stored == 1).tolist() == [3]
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


def test_another_shape_is_another_model(tmp_path: Path) -> None:
    """The error says so; both are served until the old one's tables are dropped, and the other goes on."""
    old = Trainer(FEW)
    torch.manual_seed(1)
    wide, sgd = nn.Embedding(FEW, DIM + 1), nn.Embedding(FEW, DIM)
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        old.stream(server.address)
        with RawEmbeddingStreamer(server.address, run="ctr", model="ctr") as streamer:
            for model, make, difference in (
                (wide, torch.optim.Adam, "dim 4 ≠ 5"),
                (sgd, torch.optim.SGD, "states [exp_avg:POINTWISE:FLOAT32:0, exp_avg_sq:POINTWISE:FLOAT32:0] ≠ [none]"),
            ):
                with pytest.raises(SpecMismatchError) as caught:
                    streamer.attach(model, make(model.parameters(), lr=0.1), publish="all")
                assert f"({difference}); a table's shape is fixed" in str(caught.value)
                assert 'RawEmbeddingStreamer(..., model="other name")' in str(caught.value)
        with RawEmbeddingStreamer(server.address, run="ctr", model="ctr-wide") as streamer:
            streamer.attach(wide, torch.optim.Adam(wide.parameters(), lr=0.1))
            streamer.flush()
        with EmbeddingReplica(server.address) as replica:
            served = [
                serve_model(copy.deepcopy(each), replica, model=name)
                for each, name in ((old.model, "ctr"), (wide, "ctr-wide"))
            ]
            for each, model in zip(served, (old.model, wide), strict=True):
                assert torch.equal(each(torch.arange(FEW)), model.weight)
            assert drop(server.address, "ctr:weight") == ["ctr:weight"]
            wait_until(lambda: replica.tables.keys() == {"ctr-wide:weight"}, "the drop")
            assert torch.equal(served[1](torch.arange(FEW)), wide.weight)


def test_a_restored_server_knows_drops_and_what_is_incomplete(tmp_path: Path) -> None:
    """On another number of shards too: each shard has the drop, and what was incomplete is sent whole."""
    old, new = Trainer(FEW), Trainer(FEW, seed=1)

    def lacks(address: str) -> dict[str, str]:
        async def ask() -> dict[str, str]:
            async with await TableAdmin.connect(address) as admin:
                return {table.spec.fqn: table.lacks for table in await admin.tables()}

        return asyncio.run(ask())

    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        old.stream(server.address)
        drop(server.address)
        with RawEmbeddingStreamer(server.address, run="item", model="item") as streamer:
            streamer.attach(new.model, new.optimizer)
            streamer.close(flush=False)
        assert cli.main(["snapshot", "create", "--server", server.address, "--name", "s", "--now"]) == 0
    snapshot = str(tmp_path / "data" / "snapshots" / "s")
    for shards in (2, 3):
        data = tmp_path / f"restored{shards}"
        assert cli.main(["restore", snapshot, "--data", str(data), "--shards", str(shards)]) == 0
        with ServerProcess.start(data) as server:
            assert lacks(server.address) == {"item:weight": "incomplete"}
            with RawEmbeddingStreamer(server.address, run="item", model="item") as streamer:
                streamer.attach(new.model, new.optimizer)
            assert lacks(server.address) == {"item:weight": ""}
        for shard in range(shards):
            store = RowStore.open_read_only(data / f"shard-{shard:04}" / "store")
            assert Catalog(store.read_meta()).drop_epochs.keys() == {"ctr:weight"}
            store.close()
