"""Raw ids that a replica looks up lead to the rows that the trainer's managed collision modules lead to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from collision_training import BATCH, DIM, ROWS, collision_model, drifting_ids
from sparse_model import one_rank

from headrace.paramserver.replica import EmbeddingReplica, ReplicaManagedCollisionCollection, serve_model
from headrace.paramserver.replica.api.embedding_collections import BagTable, ReplicaEmbeddingBagCollection
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError, RequestError
from headrace.streamer import RawEmbeddingStreamer

pytestmark = pytest.mark.torchrec
torchrec = pytest.importorskip("torchrec")
STEPS = 12


@pytest.fixture(autouse=True, scope="module")
def process_group() -> Iterator[None]:
    with one_rank():
        yield


def _unsharded(is_bag: bool, *, hashes: Any = None, is_remapped: bool = False) -> Any:
    """Return a managed collision collection like that of `collision_model`, without its training."""
    from torchrec.modules import mc_embedding_modules as embeddings
    from torchrec.modules import mc_modules as collisions

    cpu = torch.device("cpu")
    config = torchrec.EmbeddingBagConfig if is_bag else torchrec.EmbeddingConfig
    tables = [config(name="users", num_embeddings=ROWS["mch"], embedding_dim=DIM, feature_names=["u"])]
    module = collisions.MCHManagedCollisionModule(
        zch_size=ROWS["mch"],
        device=cpu,
        eviction_policy=collisions.LFU_EvictionPolicy(),
        eviction_interval=9,
        input_hash_func=hashes,
    )
    kind = torchrec.EmbeddingBagCollection if is_bag else torchrec.EmbeddingCollection
    inner = kind(tables=tables, device=torch.device("meta"))
    make = (
        embeddings.ManagedCollisionEmbeddingBagCollection if is_bag else embeddings.ManagedCollisionEmbeddingCollection
    )
    return make(
        inner,
        collisions.ManagedCollisionCollection({"users": module}, tables),
        return_remapped_features=is_remapped,
    )


def _values(output: Any, is_bag: bool) -> torch.Tensor:
    values: torch.Tensor = output.values() if is_bag else output["u"].values()
    return values


@pytest.mark.parametrize("is_bag", [True, False], ids=["bags", "sequences"])
def test_agrees_with_the_trainer_to_the_bit(server: ServerProcess, is_bag: bool) -> None:
    """Known ids, ids that lost their rows and unknown ids read what the trainer's module reads in eval mode."""
    name = f"mc{is_bag}"
    dmp = collision_model(name, is_bag, 3)
    generator = torch.Generator().manual_seed(1)
    with RawEmbeddingStreamer(server.address, run=name) as streamer:
        streamer.attach(dmp, publish="all")
        for step in range(STEPS):
            dmp(drifting_ids(step, generator)).backward()
            streamer.step()
        streamer.flush()
        dmp.eval()
        batches = [drifting_ids(step, generator) for step in range(STEPS + 3)]
        with EmbeddingReplica(server.address, model="default") as replica, torch.no_grad():
            replica.wait_for(streamer.stats().step, 60.0, epoch=streamer.epoch)
            served = serve_model(dmp, replica)
            ours = ReplicaManagedCollisionCollection.like(_unsharded(is_bag, is_remapped=True), replica, prefix=name)
            shifted = _unsharded(is_bag, hashes=lambda ids, size: ids - 1)
            hashed = ReplicaManagedCollisionCollection.like(shifted, replica, prefix=name)
            num_unknown = 0
            for batch in batches:
                expected = _values(getattr(dmp.module, name)(batch)[0], is_bag)
                found, remapped = ours(batch)
                assert torch.equal(_values(found, is_bag).view(torch.int32), expected.view(torch.int32))
                num_unknown += int((remapped.values() == ROWS["mch"] - 1).sum())
                assert torch.equal(served(batch), dmp(batch))
                moved = torchrec.KeyedJaggedTensor(keys=["u"], values=batch.values() + 1, lengths=batch.lengths())
                found, remapped = hashed(moved)
                assert torch.equal(_values(found, is_bag), expected) and remapped is None
            assert 0 < num_unknown < len(batches) * BATCH
            with pytest.raises(RequestError, match="feature 'u' is missing; there are x"):
                ours(torchrec.KeyedJaggedTensor(keys=["x"], values=batch.values(), lengths=batch.lengths()))


def test_a_table_without_identities_is_refused(server: ServerProcess) -> None:
    """Ids of a plain table are rows: nothing maps them."""
    model = torch.nn.ModuleDict({"plain": torch.nn.EmbeddingBag(9, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with RawEmbeddingStreamer(server.address, run="plain") as streamer:
        streamer.attach(model, optimizer, publish="updated")
        with EmbeddingReplica(server.address) as replica:
            bags = ReplicaEmbeddingBagCollection(replica, [BagTable(fqn="plain.weight", features=("u",))])
            with pytest.raises(ConfigError, match=r"'plain\.weight' has no identities"):
                ReplicaManagedCollisionCollection(replica, bags)
