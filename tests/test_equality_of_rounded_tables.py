"""Tables whose weights are stored in a smaller type, or without states: store and replica equal the rounded weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from store_comparison import compare_with_store
from stored_rows import read_rows
from torch import nn

import headrace
from headrace.kernels.dtypes import bits_of
from headrace.paramserver.reading.blocking_reader import BlockingReader
from headrace.paramserver.replica import serve_model
from headrace.paramserver.replica.api.embedding_collections import BagTable, ReplicaEmbeddingBagCollection
from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError, NonFiniteError, RequestError
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.flush import gather

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
        (
            {"weights_dtype": torch.int8},
            "weights_dtype: torch.int8 is none of torch.float32, torch.bfloat16, torch.float16",
        ),
        ({"weights_dtype": "bfloat16"}, "weights_dtype: 'bfloat16' is none of"),
        ({"weights_dtype": {"user.weight": BFLOAT16}}, r"weights_dtype: no table .*'user\.weight'.*users\.weight"),
        ({"states": ["item.*"]}, r"states: no table is named or matches 'item\.\*'"),
        ({"states": "users.weight"}, r"states 'users\.weight' is not a list"),
        ({"states": {"*": "never"}}, "states: 'never' is neither True nor False"),
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
