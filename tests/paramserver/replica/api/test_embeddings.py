"""Lookups of a replica equal those of torch's own modules, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from headrace.paramserver.replica import EmbeddingReplica, ReplicaEmbedding, ReplicaEmbeddingBag
from headrace.paramserver.replica.api.config import DiskStorage
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError, RequestError, RowRangeError
from headrace.streamer import RawEmbeddingStreamer

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64}
ROWS, PADDING = 90, 7
STORAGES = {"memory": {}, "disk": {"*": DiskStorage(memory_bytes=4096)}}


class Trained:
    """One table of each dtype after some steps, and a replica of them at the last."""

    def __init__(self, model: nn.ModuleDict, replicas: dict[str, EmbeddingReplica]) -> None:
        self.model, self.replicas = model, replicas

    def weight(self, name: str) -> torch.Tensor:
        return cast("torch.Tensor", self.model[name].weight).detach()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    torch.manual_seed(2)
    model = nn.ModuleDict(
        {name: nn.Embedding(ROWS, 16 + 3 * i, dtype=of) for i, (name, of) in enumerate(DTYPES.items())}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ServerProcess.start(tmp_path_factory.mktemp("server"), shards=2) as server:
        with RawEmbeddingStreamer(server.address, run="run") as streamer:
            streamer.attach(model, optimizer, publish="all", tables=[f"{name}.weight" for name in DTYPES])
            for step in range(3):
                optimizer.zero_grad()
                sum(table(torch.arange(step, ROWS)).float().pow(2).sum() for table in model.values()).backward()
                optimizer.step()
            streamer.flush()
            epoch = streamer.epoch
        replicas = {}
        try:
            for name, storage in STORAGES.items():
                replicas[name] = EmbeddingReplica(server.address, storage=storage)
                replicas[name].wait_for(1, 60.0)
            assert epoch
            yield Trained(model, replicas)
        finally:
            for replica in replicas.values():
                replica.close()


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype is expected.dtype and found.shape == expected.shape
    assert torch.equal(found.view(torch.uint8), expected.detach().view(torch.uint8))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", DTYPES)
def test_rows_of_any_shape(trained: Trained, storage: str, name: str) -> None:
    """Rows, their shape and their dtype are those of `nn.Embedding`, also for no ids and for int32."""
    ours = ReplicaEmbedding.like(
        nn.Embedding(ROWS, 1, padding_idx=-2, device="meta", dtype=trained.weight(name).dtype),
        trained.replicas[storage],
        f"{name}.weight",
    )
    assert (ours.num_embeddings, ours.embedding_dim, ours.padding_idx) == (
        ROWS,
        trained.weight(name).shape[1],
        ROWS - 2,
    )
    theirs = nn.Embedding(ROWS, ours.embedding_dim, _weight=trained.weight(name))
    for shape in ((), (5,), (2, 3), (2, 0), (0,), (2, 3, 4)):
        for dtype in (torch.int64, torch.int32):
            ids = torch.randint(0, ROWS, shape, dtype=dtype)
            assert_same_bits(ours(ids), theirs(ids))
    assert not ours(torch.tensor([1])).requires_grad
    assert not trained.replicas[storage].num_missing.get(ours.fqn)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("padding", [None, PADDING, -3], ids=["dense", "padding", "from-end"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("name", DTYPES)
def test_bags_of_every_mode(trained: Trained, storage: str, mode: Any, padding: int | None, name: str) -> None:
    """Bags equal those of `nn.EmbeddingBag`, whatever the form of the input, also empty and of padding alone."""
    generator = torch.Generator().manual_seed(8)
    weight = trained.weight(name)
    for with_last in (False, True):
        theirs = nn.EmbeddingBag(
            *weight.shape, mode=mode, include_last_offset=with_last, padding_idx=padding, _weight=weight
        )
        ours = ReplicaEmbeddingBag(
            trained.replicas[storage],
            f"{name}.weight",
            mode=mode,
            include_last_offset=with_last,
            padding_idx=padding,
            dtype=weight.dtype,
        )
        for num_bags in (0, 1, 6):
            for longest in (0, 1, 9):
                lengths = torch.randint(0, longest + 1, (num_bags,), generator=generator)
                bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
                ids = torch.randint(0, ROWS, (int(bounds[-1]),), generator=generator)
                if padding is not None:
                    ids[torch.rand(ids.shape, generator=generator) < 0.4] = padding % ROWS
                offsets = bounds if with_last else bounds[:-1]
                assert_same_bits(ours(ids, offsets), theirs(ids, offsets))
                assert_same_bits(ours(ids.int(), offsets.int()), theirs(ids.int(), offsets.int()))
                if mode == "sum":
                    factors = torch.rand(ids.shape, generator=generator).to(weight.dtype)
                    assert_same_bits(ours(ids, offsets, factors), theirs(ids, offsets, factors))
        ids = torch.randint(0, ROWS, (5, 4), generator=generator)
        ids[1] = PADDING
        ids[2, 1:] = PADDING
        assert_same_bits(ours(ids), theirs(ids))
        if mode == "sum":
            factors = torch.rand(5, 4, generator=generator).to(weight.dtype)
            assert_same_bits(ours(ids, per_sample_weights=factors), theirs(ids, per_sample_weights=factors))


def test_a_padding_row_is_sent_once_and_missing_until_then(tmp_path: Path) -> None:
    """The padding's row, which nothing trains, need not be zero: it is missing until it is there, and then the same."""
    torch.manual_seed(2)
    model = nn.ModuleDict(
        {"table": nn.Embedding.from_pretrained(torch.rand(ROWS, 4), freeze=False, padding_idx=PADDING)}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.tensor([[1, PADDING], [PADDING, 2]])
    with (
        ServerProcess.start(tmp_path / "data", shards=2) as server,
        RawEmbeddingStreamer(server.address, run="run") as streamer,
    ):
        streamer.attach(model, optimizer, publish="updated")
        with EmbeddingReplica(server.address) as replica:
            like = nn.Embedding(ROWS, 4, padding_idx=PADDING, device="meta")
            ours = ReplicaEmbedding.like(like, replica, "table.weight")
            ours(ids)
            assert replica.num_missing == {"table.weight": 4}
            model["table"](ids).sum().backward()
            optimizer.step()
            streamer.flush()
            replica.wait_for(0, 60.0)
            replica.num_missing.clear()
            assert_same_bits(ours(ids), model["table"](ids))
            bag = ReplicaEmbeddingBag(replica, "table.weight", mode="sum", padding_idx=PADDING)
            assert torch.equal(bag(ids), model["table"].weight[[1, 2]])
            assert not replica.num_missing


def test_what_is_refused(trained: Trained) -> None:
    """Settings and inputs that do not fit are refused in one line that names the table."""
    replica = trained.replicas["memory"]
    with pytest.raises(ConfigError, match="no table 'nothing' in this replica"):
        ReplicaEmbedding(replica, "nothing")
    with pytest.raises(ConfigError, match=r"'f32\.weight': padding_idx 90 is no row, there are 90"):
        ReplicaEmbedding(replica, "f32.weight", padding_idx=ROWS)
    with pytest.raises(ConfigError, match="mode is 'min', must be sum, mean or max"):
        ReplicaEmbeddingBag(replica, "f32.weight", mode=cast("Any", "min"))
    rows = ReplicaEmbedding(replica, "f32.weight")
    with pytest.raises(AttributeError, match=r"ReplicaEmbedding of table 'f32\.weight' has no `weight`"):
        _ = rows.weight
    assert not hasattr(rows, "weight") and not list(rows.parameters()) and not rows.state_dict()
    with pytest.raises(RowRangeError):
        rows(torch.tensor([ROWS]))
    with pytest.raises(RequestError, match="not integers"):
        rows(torch.tensor([1.0]))
    bag = ReplicaEmbeddingBag(replica, "f32.weight", mode="sum")
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 2])
    with pytest.raises(RequestError, match="omit the offsets"):
        bag(ids[None], offsets)
    for wrong in ((ids,), (ids[None, None],), (ids, offsets[None])):
        with pytest.raises(RequestError, match=r"ids must be \[bags, n\], or \[ids\] with offsets"):
            bag(*wrong)
    for bounds in ([1, 2], [0, 4], [0, 2, 1], []):
        with pytest.raises(RequestError, match="must rise from 0 to 3"):
            bag(ids, torch.tensor(bounds, dtype=torch.int64))
    with pytest.raises(RequestError, match=r"ids of shape \(3,\) and weights of shape \(2,\)"):
        bag(ids, offsets, torch.ones(2))
    with pytest.raises(RequestError, match=r"weights are torch\.float64, must be torch\.float32"):
        bag(ids, offsets, torch.ones(3, dtype=torch.float64))
    with pytest.raises(RequestError, match="only sums can be weighted, the mode is max"):
        ReplicaEmbeddingBag(replica, "f32.weight", mode="max")(ids, offsets, torch.ones(3))
    nested = torch.nested.nested_tensor([ids, ids[:1]], layout=torch.jagged)
    for module in (rows, bag):
        with pytest.raises(RequestError, match="a nested tensor is not looked up"):
            module(nested)
