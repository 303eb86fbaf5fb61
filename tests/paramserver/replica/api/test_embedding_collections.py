"""Lookups of a replica, pooled or not, equal those of TorchRec's own collections, bit for bit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from headrace.paramserver.replica import (
    BagTable,
    EmbeddingReplica,
    EmbeddingTable,
    ReplicaEmbeddingBagCollection,
    ReplicaEmbeddingCollection,
)
from headrace.paramserver.replica.api.config import DiskStorage
from headrace.paramserver.replica.tables.in_memory import MemoryTable
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError, RequestError
from headrace.schemas.tables import DType, TableSpec
from headrace.streamer import RawEmbeddingStreamer

pytestmark = pytest.mark.torchrec
ROWS = (100, 37, 5)
DIMS = (16, 7, 4)


def _collection(*, is_weighted: bool = False) -> Any:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    poolings = (PoolingType.SUM, PoolingType.SUM if is_weighted else PoolingType.MEAN, PoolingType.SUM)
    features = (["a", "b"], ["c"], ["b"])
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"t{i}", num_embeddings=n, embedding_dim=d, feature_names=f, pooling=p)
            for i, (n, d, f, p) in enumerate(zip(ROWS, DIMS, features, poolings, strict=True))
        ],
        is_weighted=is_weighted,
    )


def _features(seed: int, *, is_weighted: bool = False) -> Any:
    import torchrec

    generator = torch.Generator().manual_seed(seed)
    batch = int(torch.randint(1, 9, (1,), generator=generator))
    lengths = torch.randint(0, 12, (3 * batch,), generator=generator)
    limits = torch.repeat_interleave(torch.tensor([ROWS[0], ROWS[2], ROWS[1]]).repeat_interleave(batch), lengths)
    values = (torch.rand(limits.numel(), generator=generator) * limits).long()
    weights = torch.rand(limits.numel(), generator=generator) if is_weighted else None
    return torchrec.KeyedJaggedTensor(keys=["a", "b", "c"], values=values, lengths=lengths, weights=weights)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("storage", [{}, {"*": DiskStorage(memory_bytes=4096)}], ids=["memory", "disk"])
def test_bags_agree_with_torchrec_to_the_bit(server: ServerProcess, storage: Any, is_weighted: bool) -> None:
    """Outputs, names and order for random jagged features equal those of the trainer's collection."""
    torch.manual_seed(3)
    model = torch.nn.ModuleDict({f"ebc{is_weighted}": _collection(is_weighted=is_weighted)})
    (ebc,) = model.values()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with RawEmbeddingStreamer(server.address, run=f"run{is_weighted}") as streamer:
        streamer.attach(model, optimizer, publish="all")
        for seed in range(5):
            optimizer.zero_grad()
            ebc(_features(seed, is_weighted=is_weighted)).values().pow(2).sum().backward()
            optimizer.step()
        streamer.flush()
        with EmbeddingReplica(server.address, consistency="step", storage=storage) as replica:
            replica.wait_for(5, 60.0, epoch=streamer.epoch)
            ours = ReplicaEmbeddingBagCollection.like(ebc, replica, prefix=f"ebc{is_weighted}")
            for seed in range(100, 125):
                features = _features(seed, is_weighted=is_weighted)
                with torch.no_grad():
                    expected, found = ebc(features), ours(features)
                assert found.keys() == expected.keys() and found.length_per_key() == expected.length_per_key()
                assert torch.equal(found.values().view(torch.int32), expected.values().view(torch.int32))
                again = torch.randint(0, features.stride(), (3, 2 * features.stride()))
                features._inverse_indices = (["a", "b", "c"], again)  # a batch without repeated examples
                with torch.no_grad():
                    assert torch.equal(ours(features).values(), ebc(features).values())
                parts: dict[str, Any] = {}
                for name, part in features.to_dict().items():
                    parts[name] = (part.values(), part.offsets(), *([part.weights()] if is_weighted else []))
                assert torch.equal(ours.pool(parts), expected.values())
            assert not replica.num_missing


def test_refuses_what_it_cannot_pool(server: ServerProcess, tmp_path: Path) -> None:
    """Unknown tables, weighted means, unknown poolings and features in one string are refused."""
    with pytest.raises(ConfigError, match="pooling is 'max', must be sum or mean"):
        BagTable(fqn="t", features=("a",), pooling=cast("Any", "max"))
    with pytest.raises(ConfigError, match="features is one string, 'feat'"):
        BagTable(fqn="t", features=cast("Any", "feat"))
    with EmbeddingReplica(server.address) as replica:
        with pytest.raises(ConfigError, match="nothing"):
            ReplicaEmbeddingBagCollection(replica, [BagTable(fqn="nothing", features=("a",))])
        known = next(iter(replica.tables))
        with pytest.raises(ConfigError, match="only sums"):
            ReplicaEmbeddingBagCollection(
                replica, [BagTable(fqn=known, features=("a",), pooling="mean")], is_weighted=True
            )


def _of_one_table(*, dim: int, precision: Any = None, is_weighted: bool = False) -> ReplicaEmbeddingBagCollection:
    """Return a collection over an empty table in this process."""
    table = MemoryTable(TableSpec(fqn="t", num_rows=10, dim=dim, dtype=DType.FLOAT32), precision=precision)
    replica = SimpleNamespace(
        spec_of=lambda _: table.spec, look=lambda wanted: [make(table, at)[0] for _, at, make in wanted]
    )
    tables = [BagTable(fqn="t", features=("f",))]
    return ReplicaEmbeddingBagCollection(cast("Any", replica), tables, is_weighted=is_weighted)


@pytest.mark.parametrize("precision", [None, "fp16", "int8", "int4"])
@pytest.mark.parametrize(
    ("ids", "offsets", "says"),
    [
        ([1, 2, 3], [0, 2, 100], "rise from 0 to 3"),
        ([1, 2, 3], [0, 4, 3], "one per bag"),
        ([1, 2, 3], [0, 3, 2, 3], "one per bag"),
        ([1, 2, 3], [-1, 3], "rise from 0"),
        ([1, 2, 3], [0, 2], "rise from 0 to 3"),
        ([1, 2, 3], [], "one per bag"),
        ([[1, 2, 3]], [0, 3], "one per bag"),
        ([1.0, 2.0], [0, 2], "not integers"),
        ([1, 2], [0.0, 2.0], "not integers"),
    ],
)
def test_bags_that_are_none_are_refused(precision: Any, ids: Any, offsets: Any, says: str) -> None:
    """No kernel reads beyond the ids, whatever the offsets are."""
    ebc = _of_one_table(dim=8, precision=precision)
    assert ebc.pool({"f": (torch.tensor([1, 2, 3]), torch.tensor([0, 0, 3]))}).shape == (2, 8)
    with pytest.raises(RequestError, match=says):
        ebc.pool({"f": (torch.tensor(ids), torch.tensor(offsets))})
    with pytest.raises(RequestError, match="feature 'f' is missing; there are g"):
        ebc.pool({"g": (torch.tensor([1]), torch.tensor([0, 1]))})
    with pytest.raises(RequestError, match=r"2 ids and weights of shape \(3,\)"):
        weighted = _of_one_table(dim=8, precision=precision, is_weighted=True)
        weighted.pool({"f": (torch.tensor([1, 2]), torch.tensor([0, 2]), torch.ones(3))})


def test_weights_go_with_a_weighted_collection_alone() -> None:
    """Missing, surplus and wrongly typed weights are refused."""
    plain, weighted = (_of_one_table(dim=2, is_weighted=is_weighted) for is_weighted in (False, True))
    pair = (torch.tensor([1, 2]), torch.tensor([0, 2]))
    assert weighted.pool({"f": (*pair, torch.ones(2))}).shape == plain.pool({"f": pair}).shape == (1, 2)
    with pytest.raises(RequestError, match="feature 'f': 2 tensors; of a collection that is weighted"):
        weighted.pool({"f": pair})
    with pytest.raises(RequestError, match="feature 'f': 3 tensors; of a collection that is not"):
        plain.pool({"f": (*pair, torch.ones(2))})
    with pytest.raises(RequestError, match=r"weights are torch\.float64, must be torch\.float32"):
        weighted.pool({"f": (*pair, torch.ones(2, dtype=torch.float64))})


def _sequences(seed: int, *, batch: int = 5) -> Any:
    import torchrec

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (2 * batch,), generator=generator)
    values = torch.randint(0, 30, (int(lengths.sum()),), generator=generator)
    return torchrec.KeyedJaggedTensor(keys=["a", "b"], values=values, lengths=lengths)


@pytest.mark.parametrize("need_indices", [False, True])
@pytest.mark.parametrize("data_type", ["FP32", "FP16"])
def test_sequences_agree_with_torchrec_to_the_bit(server: ServerProcess, data_type: str, need_indices: bool) -> None:
    """Names, rows, lengths and indices equal those of the trainer's collection; a feature may be in two tables."""
    torchrec = pytest.importorskip("torchrec")
    of = getattr(torchrec.modules.embedding_configs.DataType, data_type)
    tables = [
        torchrec.EmbeddingConfig(name=table, num_embeddings=30, embedding_dim=6, feature_names=features, data_type=of)
        for table, features in (("t0", ["a", "b"]), ("t1", ["b"]))
    ]
    ec = torchrec.EmbeddingCollection(tables=tables, need_indices=need_indices)
    model = torch.nn.ModuleDict({"ec": ec})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    name = f"{data_type}-{need_indices}"
    with RawEmbeddingStreamer(server.address, run=name, model=name) as streamer:
        streamer.attach(model, optimizer, publish="all")
        for seed in range(3):
            optimizer.zero_grad()
            sum(part.values().pow(2).sum() for part in ec(_sequences(seed)).values()).backward()
            optimizer.step()
        streamer.flush()
        with EmbeddingReplica(server.address, consistency="step", model=name) as replica:
            replica.wait_for(3, 60.0, epoch=streamer.epoch)
            ours = ReplicaEmbeddingCollection.like(ec, replica, prefix="ec", model=name)
            assert [table.fqn for table in ours.tables] == [
                f"{name}:ec.embeddings.t0.weight",
                f"{name}:ec.embeddings.t1.weight",
            ]
            names = {f"sparse.embeddings.t{number}.weight": f"ec.embeddings.t{number}.weight" for number in range(2)}
            again = ReplicaEmbeddingCollection.like(ec, replica, prefix="sparse", model=name, names=names)
            assert again.tables == ours.tables, "a module that was renamed"
            for seed in range(10, 20):
                features = _sequences(seed)
                with torch.no_grad():
                    expected, found = ec(features), ours(features)
                assert list(found) == list(expected) == ["a", "b@t0", "b@t1"]
                for feature, part in expected.items():
                    assert torch.equal(found[feature].values().view(torch.int32), part.values().view(torch.int32))
                    assert torch.equal(found[feature].lengths(), part.lengths())
                    indices = found[feature].weights_or_none()
                    assert torch.equal(indices, part.weights()) if need_indices else indices is None
            with pytest.raises(RequestError, match="feature 'b' is missing; there are a"):
                ours(torchrec.KeyedJaggedTensor(keys=["a"], values=torch.tensor([1]), lengths=torch.tensor([1])))
            with pytest.raises(ConfigError, match="no table 'nothing'"):
                ReplicaEmbeddingCollection(replica, [EmbeddingTable(fqn="nothing", features=("a",))])
            with pytest.raises(ConfigError, match="features is one string, 'a'"):
                EmbeddingTable(fqn="t", features=cast("Any", "a"))
            with pytest.raises(ConfigError, match="a Linear is no EmbeddingBagCollection"):
                ReplicaEmbeddingCollection.like(torch.nn.Linear(1, 1), replica)
