"""Tables whose weights are stored in a smaller type, or without states: store and replica equal the rounded weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import CommandLine
from counted_training import make_snapshot
from replica_endpoint import replica_endpoint
from safetensors.torch import load_file
from stored_rows import read_rows
from torch import nn
from trainer_tables import Trained

import headrace
from headrace.kernels.dtypes import bits_of
from headrace.kernels.quantization import dequantize_rows_reference, quantize_rows_reference
from headrace.paramserver.reading.blocking_reader import BlockingReader
from headrace.paramserver.replica import serve_model
from headrace.paramserver.replica.api.config import DiskStorage, MemoryStorage
from headrace.paramserver.replica.api.embedding_collections import BagTable, ReplicaEmbeddingBagCollection
from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError, NonFiniteError, RequestError, UnsupportedModelError
from headrace.schemas.tables import ColumnShard, DType, TableSpec
from headrace.scripts.commands.export import export_snapshot
from headrace.scripts.table_io.exported import ExportConfig
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.compare import compare_with_store
from headrace.streamer.flush import gather
from headrace.streamer.taps.stored_types import StoredTypes
from headrace.streamer.taps.tapped_table import TappedTable

NUM_ROWS = 300
WRONG_SHARES: list[Any] = [0, 1.5, -0.1, "0.2", True, float("nan")]
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32


class Net(nn.Module):
    """Two tables, one pooled, and a layer behind them that takes float32 only."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(NUM_ROWS, 8)
        self.tags = nn.EmbeddingBag(NUM_ROWS, 8, mode="sum")
        self.top = nn.Linear(16, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([self.users(ids[:, 0]), self.tags(ids)], dim=1)
        scores: torch.Tensor = self.top(rows)
        return scores


def trained(
    address: str, name: str, *, publish: str = "all", seed: int = 0, **stored: Any
) -> tuple[Net, torch.optim.Optimizer]:
    """Train and stream a model; every row, audited, is in the store when it returns."""
    torch.manual_seed(seed)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    with RawEmbeddingStreamer(address, run=name, model=name) as streamer:
        streamer.attach(net, optimizer, publish=publish, dense=True, **stored)  # type: ignore[arg-type]
        for _ in range(5):
            optimizer.zero_grad()
            net(torch.randint(NUM_ROWS, (20, 3))).sum().backward()
            optimizer.step()
        streamer.flush()
        assert streamer.audit(only_present=False).is_equal
        assert compare_with_store(streamer.tables, address).is_equal
        net.users.weight.detach().numpy()[7] += 0.25  # behind torch's count of writes: nobody marks it
        assert not compare_with_store(streamer.tables, address).is_equal
        assert not streamer.audit().is_equal
        net.users.weight.detach().numpy()[7] -= 0.25
    return net, optimizer


def stored(server: ServerProcess, name: str) -> Any:
    return read_rows(server.address, name, torch.arange(NUM_ROWS).numpy(), with_states=True)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_rows_are_the_trainers_rounded_to_nearest(
    server: ServerProcess, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row of the store has the trainer's bits after rounding, some at a time; states stay as they are."""
    monkeypatch.setattr(gather, "_COPY_BYTES", 7 * 32)
    name = f"rounded-{dtype}".replace("torch.", "")
    net, optimizer = trained(server.address, name, weights_dtype=dtype)
    for path, weight in (("users.weight", net.users.weight), ("tags.weight", net.tags.weight)):
        rows = stored(server, f"{name}:{path}")
        assert rows.weights.tobytes() == bits_of(weight.to(dtype)).tobytes()
        assert rows.states["exp_avg"].tobytes() == optimizer.state[weight]["exp_avg"].numpy().tobytes()


def test_a_served_model_takes_rounded_rows(server: ServerProcess) -> None:
    """The served copy of a float32 model returns float32, as the model does with rounded tables."""
    net, _ = trained(server.address, "served", weights_dtype={"users.weight": BFLOAT16, "*": FLOAT16}, states=False)
    ids = torch.randint(NUM_ROWS, (50, 3))

    with EmbeddingReplica(server.address) as replica:
        served = serve_model(Net(), replica, model="served")
        found = served(ids)
        assert served.users(ids).dtype == served.tags(ids).dtype == FLOAT32
    with torch.no_grad():
        net.users.weight.copy_(net.users.weight.bfloat16())
        net.tags.weight.copy_(net.tags.weight.half())
        expected = net(ids)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)  # bags are pooled in float16


def test_a_weighted_collection_takes_the_models_weights(server: ServerProcess) -> None:
    """Weights of ids are float32 in the model, whatever type the table is stored in."""
    net, _ = trained(server.address, "weighted", weights_dtype=BFLOAT16)
    ids, offsets, weights = torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]), torch.tensor([0.5, 2.0, 1.5])
    table = BagTable(fqn="weighted:tags.weight", features=("f",), pooling="sum")
    with EmbeddingReplica(server.address) as replica:
        pooled = ReplicaEmbeddingBagCollection(replica, [table], is_weighted=True).pool({"f": (ids, offsets, weights)})
    rows = net.tags.weight.detach().bfloat16().float()
    expected = torch.stack([0.5 * rows[1] + 2.0 * rows[2], 1.5 * rows[3]])
    assert pooled.dtype == FLOAT32
    torch.testing.assert_close(pooled, expected, rtol=1e-2, atol=1e-2)


def test_a_value_beyond_float16_is_said_to_be(server: ServerProcess) -> None:
    """With `reject`, the error says that the value became infinite by rounding."""
    table = nn.ModuleDict({"t": nn.Embedding(9, 4)})
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    table["t"].weight.detach()[2] = 1e5
    with RawEmbeddingStreamer(server.address, run="beyond", model="beyond", non_finite="reject") as streamer:
        streamer.attach(table, optimizer, weights_dtype=FLOAT16)
        with pytest.raises(NonFiniteError, match="weights of row 2 is NaN or Inf once rounded to float16"):
            streamer.flush()
        table["t"].weight.detach()[2] = 1


def test_states_are_left_out(server: ServerProcess) -> None:
    """Without states the store has weights alone, of the tables that are meant, and restores those."""
    net, _ = trained(server.address, "stateless", states=["users.*"])
    assert stored(server, "stateless:users.weight").states.keys() == {"exp_avg", "exp_avg_sq"}
    assert not stored(server, "stateless:tags.weight").states
    with BlockingReader(server.address) as reader:
        assert reader.scalars("stateless:users.weight").keys() == {"step"}
        assert not reader.scalars("stateless:tags.weight")
    again = Net()
    optimizer = torch.optim.Adam(again.parameters())
    headrace.restore(again, optimizer, address=server.address, model_name="stateless", states=False)
    assert again.tags.weight.detach().numpy().tobytes() == net.tags.weight.detach().numpy().tobytes()


def test_a_rounded_table_is_not_restored(server: ServerProcess) -> None:
    """A trainer would go on with less than it had: the error says in what the tables differ."""
    trained(server.address, "lossy", weights_dtype=BFLOAT16)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    with pytest.raises(RequestError, match=r"dtype FLOAT32 ≠ BFLOAT16 \(weights that were rounded come from"):
        headrace.restore(net, optimizer, address=server.address, model_name="lossy", states=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"weights_dtype": torch.int16}, r"weights_dtype: torch\.int16 is none of torch\.float32.*torch\.int8"),
        ({"weights_dtype": "bfloat16"}, "weights_dtype: 'bfloat16' is none of"),
        ({"weights_dtype": {"user.weight": BFLOAT16}}, r"weights_dtype: no table .*'user\.weight'.*users\.weight"),
        ({"states": ["item.*"]}, r"states: no table is named or matches 'item\.\*'"),
        ({"states": "users.weight"}, r"states 'users\.weight' is not a list"),
        *(({"send_share": {"users.weight": x}}, "send_share: .* above 0 and at most 1") for x in WRONG_SHARES),
        ({"send_share": {"user.weight": 0.5}}, r"send_share: .*'user\.weight'.*users\.weight"),
    ],
)
def test_wrong_arguments(server: ServerProcess, arguments: dict[str, Any], words: str) -> None:
    """Each is one line, and nothing is attached: the model can be attached again."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with RawEmbeddingStreamer(server.address, run="wrong", model="wrong") as streamer:
        with pytest.raises(ConfigError, match=words):
            streamer.attach(net, optimizer, **arguments)
        streamer.attach(net, optimizer, publish="all")


def test_smaller_types_stay(server: ServerProcess) -> None:
    """A table whose type is no larger than the wanted one keeps its own."""
    table = nn.ModuleDict({"small": nn.Embedding(NUM_ROWS, 4, dtype=FLOAT16)})
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    with RawEmbeddingStreamer(server.address, run="small", model="small") as streamer:
        streamer.attach(table, optimizer, publish="all", weights_dtype=BFLOAT16)
        streamer.flush()
    assert stored(server, "small:small.weight").weights.tobytes() == bits_of(table["small"].weight).tobytes()


def test_rows_in_int8(server: ServerProcess) -> None:
    """The store has FBGEMM's bytes and no states; readers return float32, off by half a step of the row at most."""
    net, _ = trained(server.address, "int8", weights_dtype=torch.int8)
    ids = torch.arange(NUM_ROWS).numpy()
    for path, weight in (("users.weight", net.users.weight.detach()), ("tags.weight", net.tags.weight.detach())):
        with BlockingReader(server.address) as reader:
            stored = reader.get(f"int8:{path}", ids, with_states=True, is_dequantized=False)
            rows = torch.from_numpy(reader.get(f"int8:{path}", ids).weights)
        packed = quantize_rows_reference(weight, "int8")
        assert stored.weights.tobytes() == packed.numpy().tobytes()
        assert not stored.states
        assert rows.equal(dequantize_rows_reference(packed, "int8", 8))
        half_step = (weight.amax(dim=1, keepdim=True) - weight.amin(dim=1, keepdim=True)) / 255 / 2
        assert bool(((rows - weight).abs() <= half_step * 1.001 + 1e-7).all())


def test_a_single_row_in_int8_whose_width_is_odd(server: ServerProcess) -> None:
    """A flush may have one row, and a row with its scale any number of bytes."""
    table = nn.ModuleDict({"odd": nn.Embedding(20, 9, sparse=True)})
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    with RawEmbeddingStreamer(server.address, run="odd", model="odd") as streamer:
        streamer.attach(table, optimizer, publish="updated", weights_dtype=torch.int8)
        table["odd"](torch.tensor([3])).sum().backward()
        optimizer.step()
        streamer.flush()
        assert streamer.audit().is_equal
    with BlockingReader(server.address) as reader:
        (row,) = reader.get("odd:odd.weight", [3], is_dequantized=False).weights
    assert row.tobytes() == quantize_rows_reference(table["odd"].weight.detach()[[3]], "int8").numpy().tobytes()


def test_a_trainers_own_rows_in_int8(server: ServerProcess) -> None:
    """`fetch` returns the numbers that the store has, of all columns."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with RawEmbeddingStreamer(server.address, run="own", model="own") as streamer:
        streamer.attach(net, optimizer, weights_dtype=torch.int8)
        rows = streamer.fetch("own:users.weight", [7, 0])
    packed = quantize_rows_reference(net.users.weight.detach()[[7, 0]], "int8")
    assert rows.weights.equal(dequantize_rows_reference(packed, "int8", 8))
    assert rows.columns == ((0, 8),)


def test_copies_of_rows_in_int8(tmp_path: Path) -> None:
    """A replica's process, a replica that begins from a snapshot, and an export have the same bytes and numbers."""
    ids = torch.arange(NUM_ROWS)
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        net, _ = trained(server.address, "m", weights_dtype={"users.weight": torch.int8})
        packed = quantize_rows_reference(net.users.weight.detach(), "int8")
        rows = dequantize_rows_reference(packed, "int8", 8)
        with replica_endpoint(tmp_path, server.address) as endpoint:
            assert (
                read_rows(endpoint.address, "m:users.weight", ids.numpy()).weights.tobytes() == rows.numpy().tobytes()
            )
        folder = make_snapshot(server)
        with EmbeddingReplica(server.address) as replica:
            replica.load_snapshot(folder)
            assert replica.lookup("m:users.weight", ids).equal(rows)
            assert replica.audit().is_equal
    export_snapshot(folder, tmp_path / "float.safetensors", "safetensors", ExportConfig())
    export_snapshot(folder, tmp_path / "int8.safetensors", "safetensors", ExportConfig(precision="int8"))
    assert load_file(tmp_path / "float.safetensors")["users.weight"].equal(rows)
    assert load_file(tmp_path / "int8.safetensors")["users.weight"].equal(packed)


@pytest.mark.parametrize("storage", [MemoryStorage(), DiskStorage(memory_bytes=1 << 20)])
def test_a_replica_of_rows_in_int8(server: ServerProcess, tmp_path: Path, storage: Any) -> None:
    """It keeps the bytes, which it audits, and looks up and serves the numbers."""
    name = f"kept{type(storage).__name__}"
    net, _ = trained(server.address, name, weights_dtype=torch.int8)
    ids = torch.randint(NUM_ROWS, (50, 3))
    settings = {"model": name, "storage": {"*": storage}, "disk_dir": tmp_path}
    with EmbeddingReplica(server.address, **settings) as replica:
        assert replica.audit().is_equal
        served = serve_model(Net(), replica, model=name)
        for table in (net.users, net.tags):
            rows = dequantize_rows_reference(quantize_rows_reference(table.weight.detach(), "int8"), "int8", 8)
            with torch.no_grad():
                table.weight.copy_(rows)
        assert replica.lookup(f"{name}:users.weight", ids).equal(net.users(ids))
        assert served.tags(ids).equal(net.tags(ids))
        torch.testing.assert_close(served(ids), net(ids), rtol=0, atol=1e-6)
        weights = torch.rand(ids.shape)
        table = BagTable(fqn=f"{name}:tags.weight", features=("f",), pooling="sum")
        pooled = ReplicaEmbeddingBagCollection(replica, [table], is_weighted=True).pool(
            {"f": (ids.view(-1), torch.arange(0, 151, 3), weights.view(-1))}
        )
        torch.testing.assert_close(pooled, net.tags(ids, per_sample_weights=weights))
        if isinstance(storage, MemoryStorage):
            damaged: Any = replica._table_set.table(f"{name}:users.weight")
            damaged._rows._weights[7, 0] ^= 1
            assert [each.differing_row_ids for each in replica.audit().tables] == [[], [7]]


@pytest.mark.timeout(300)
def test_rows_in_int8_replayed_and_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Replay, a reshard, and replicas on disk that follow both keep the bytes, which `headrace verify` compares."""
    run, types = CommandLine(capsys), {"users.weight": torch.int8, "tags.weight": BFLOAT16}
    with ServerProcess.start(tmp_path / "source", shards=2) as source:
        trained(source.address, "m", weights_dtype=types, states=False)
    budgets = {"block_cache_bytes": "32MiB", "memtable_bytes": "16MiB"}
    with ServerProcess.start(tmp_path / "data", shards=2, **budgets):
        pass
    disk: dict[str, Any] = {"storage": {"*": DiskStorage(memory_bytes=1 << 20)}, "disk_dir": tmp_path}
    with ServerProcess.start(tmp_path / "data", shards=3, **budgets) as server:
        to = ("--server", server.address)
        assert " rows sent and durable" in run("replay", tmp_path / "source", *to)
        with (
            ServerProcess.start(tmp_path / "source") as source,
            EmbeddingReplica(server.address, **disk) as replica,
        ):
            assert "All partitions have moved" in run("reshard", "start", *to, "--shards", 3, "--wait")
            said = run("verify", *to, "--against", source.address)
            assert all(f"m:{path}: {NUM_ROWS} rows, digest " in said for path in types)
            assert " rows sent and durable" in run("replay", tmp_path / "source", *to)
            assert replica.audit().is_equal
            net, _ = trained(server.address, "m", seed=2, weights_dtype=types, states=False)
            rows = quantize_rows_reference(net.users.weight.detach(), "int8")
            replica.wait_for(5, 60, epoch=2)
            found = replica.lookup("m:users.weight", torch.arange(NUM_ROWS))
            assert found.equal(dequantize_rows_reference(rows, "int8", 8))
            assert replica.audit().is_equal
            said = run("verify", *to, "--against", source.address, code=1)
            assert all(f"m:{path}: {NUM_ROWS} rows" in said for path in types) and "; equal" not in said


@pytest.mark.parametrize(("missing", "expected"), [("zeros", [0.0] * 4), ("table_default", [0.0, 0.25, 0.5, 1.0])])
def test_what_is_missing_in_int8(server: ServerProcess, missing: Any, expected: list[float]) -> None:
    """A missing row reads as zeros, or as the table's default, rounded as rows are."""
    table = nn.ModuleDict({"t": nn.Embedding(9, 4)})
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    with RawEmbeddingStreamer(server.address, run=missing, model=missing) as streamer:
        streamer.attach(table, optimizer, publish="updated", weights_dtype=torch.int8)
        table["t"](torch.tensor([3])).sum().backward()
        optimizer.step()
        streamer.flush()
    name, default = f"{missing}:t.weight", torch.tensor([0.0, 0.25, 0.5, 1.0])
    defaults = {name: default} if missing == "table_default" else {}
    with EmbeddingReplica(server.address, model=missing, missing=missing, defaults=defaults) as replica:
        torch.testing.assert_close(replica.lookup(name, [5])[0], torch.tensor(expected), rtol=0, atol=1 / 509)


def test_int8_without_a_way(server: ServerProcess) -> None:
    """What has no numbers is refused under `reject`; a trainer cannot take such a table back, and is told so."""
    trained(server.address, "flat", weights_dtype=torch.int8)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    with pytest.raises(RequestError, match=r"dim 8 ≠ 16.*weights that were rounded come from"):
        headrace.restore(net, optimizer, address=server.address, model_name="flat", states=False)
    net.users.weight.detach()[5, 2] = float("inf")
    with RawEmbeddingStreamer(server.address, run="inf", model="inf", non_finite="reject") as streamer:
        streamer.attach(net, optimizer, weights_dtype=torch.int8, publish="all")
        with pytest.raises(NonFiniteError, match="weights of row 5 is NaN or Inf once rounded to rowwise_int8"):
            streamer.flush()
        net.users.weight.detach()[5, 2] = 1


def test_what_cannot_be_int8() -> None:
    """A table that is sharded by columns is refused, with what to do; a table of integers keeps its type."""
    part = Trained("t.weight", dim=8, shard=ColumnShard(offset=0, width=4)).tapped
    with pytest.raises(UnsupportedModelError, match=r"'t.weight' cannot be stored in int8: .*by columns.*bfloat16"):
        StoredTypes(torch.int8).apply([part], ["t.weight"])
    part.spec = dataclasses.replace(part.spec, has_identities=True)
    part.shard = part.spec.whole
    with pytest.raises(UnsupportedModelError, match=r"maps raw ids to rows .*bfloat16"):
        StoredTypes(torch.int8).apply([part], ["t.weight"])
    whole = TappedTable(
        spec=TableSpec(fqn="t.weight", num_rows=9, dim=8, dtype=DType.INT32),
        num_local_rows=9,
        weights=lambda: torch.zeros(9, 8, dtype=torch.int32),
        states=dict,
        backing=list,
    )
    StoredTypes(torch.int8).apply([whole], ["t.weight"])
    assert (whole.spec.dtype, whole.spec.dim) == (DType.INT32, 8)
