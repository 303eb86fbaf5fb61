"""Unpooled lookups of a replica equal TorchRec's own collection, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from headrace.paramserver.replica import EmbeddingReplica, EmbeddingTable, ReplicaEmbeddingCollection
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError, RequestError
from headrace.streamer import RawEmbeddingStreamer

pytestmark = pytest.mark.torchrec
torchrec = pytest.importorskip("torchrec")


def _features(seed: int, *, batch: int = 5) -> Any:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (2 * batch,), generator=generator)
    values = torch.randint(0, 30, (int(lengths.sum()),), generator=generator)
    return torchrec.KeyedJaggedTensor(keys=["a", "b"], values=values, lengths=lengths)


@pytest.mark.parametrize("need_indices", [False, True])
@pytest.mark.parametrize("data_type", ["FP32", "FP16"])
def test_agrees_with_torchrec_to_the_bit(tmp_path: Path, data_type: str, need_indices: bool) -> None:
    """Names, rows, lengths and indices equal those of the trainer's collection; a feature may be in two tables."""
    of = getattr(torchrec.modules.embedding_configs.DataType, data_type)
    tables = [
        torchrec.EmbeddingConfig(name=name, num_embeddings=30, embedding_dim=6, feature_names=features, data_type=of)
        for name, features in (("t0", ["a", "b"]), ("t1", ["b"]))
    ]
    ec = torchrec.EmbeddingCollection(tables=tables, need_indices=need_indices)
    model = nn.ModuleDict({"ec": ec})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        ServerProcess.start(tmp_path / "data", shards=2) as server,
        RawEmbeddingStreamer(server.address, run="run", model="ranker") as streamer,
    ):
        streamer.attach(model, optimizer, publish="all")
        for seed in range(3):
            optimizer.zero_grad()
            sum(part.values().pow(2).sum() for part in ec(_features(seed)).values()).backward()
            optimizer.step()
        streamer.flush()
        with EmbeddingReplica(server.address, consistency="step") as replica:
            replica.wait_for(3, 60.0, epoch=streamer.epoch)
            ours = ReplicaEmbeddingCollection.like(ec, replica, prefix="ec", model="ranker")
            assert [table.fqn for table in ours.tables] == [
                "ranker:ec.embeddings.t0.weight",
                "ranker:ec.embeddings.t1.weight",
            ]
            for seed in range(10, 20):
                features = _features(seed)
                with torch.no_grad():
                    expected, found = ec(features), ours(features)
                assert list(found) == list(expected) == ["a", "b@t0", "b@t1"]
                for name, part in expected.items():
                    assert torch.equal(found[name].values().view(torch.int32), part.values().view(torch.int32))
                    assert torch.equal(found[name].lengths(), part.lengths())
                    indices = found[name].weights_or_none()
                    assert torch.equal(indices, part.weights()) if need_indices else indices is None
            with pytest.raises(RequestError, match="feature 'b' is missing; there are a"):
                ours(torchrec.KeyedJaggedTensor(keys=["a"], values=torch.tensor([1]), lengths=torch.tensor([1])))
            with pytest.raises(ConfigError, match="no table 'nothing'"):
                ReplicaEmbeddingCollection(replica, [EmbeddingTable(fqn="nothing", features=("a",))])
            with pytest.raises(ConfigError, match="features is one string, 'a'"):
                EmbeddingTable(fqn="t", features=cast("Any", "a"))
            with pytest.raises(ConfigError, match="a Linear is no EmbeddingBagCollection"):
                ReplicaEmbeddingCollection.like(nn.Linear(1, 1), replica)
