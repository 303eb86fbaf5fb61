"""A small DLRM in TorchRec on the CPU, one rank, streamed through `attach` and served from a replica.

Install TorchRec as docs/torchrec.md says, and run it from a checkout; it takes a quarter of a minute:

    pip install '.[recordings]'
    python examples/dlrm_torchrec.py

It starts a server of two shards in a temporary directory and trains on synthetic clicks that depend on ids alone. It
prints the loss, how many rows went out and how long they took to become durable. Then the trainer records a batch with
its model's answer, a model that reads from a replica answers it too, bit for bit the same, and an audit compares rows.
docs/torchrec.md trains on two ranks.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM

from headrace import EmbeddingReplica, RawEmbeddingStreamer, RecordingCheck, ServerProcess, serve_model

TABLES = {"user": 5_000, "item": 2_000, "category": 50}  # name and rows
DIM, NUM_DENSE, BATCH, NUM_STEPS = 16, 4, 256, 200


def make_dlrm(device: str = "cpu") -> DLRM:
    """Return the plain model, untrained."""
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
        for name, rows in TABLES.items()
    ]
    return DLRM(
        EmbeddingBagCollection(tables=tables, device=torch.device(device)),
        dense_in_features=NUM_DENSE,
        dense_arch_layer_sizes=[32, DIM],
        over_arch_layer_sizes=[32, 1],
    )


def shard(model: DLRM) -> DistributedModelParallel:
    """Return the model with a fused optimizer for its tables."""
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    path, ebc = "sparse_arch.embedding_bag_collection", model.sparse_arch.embedding_bag_collection
    # Without a kernel's name the plan takes the dense one, which has no fused optimizer.
    placement = {name: table_wise(rank=0, compute_kernel="fused") for name in TABLES}
    plan = construct_module_sharding_plan(
        ebc, placement, sharder=sharder, world_size=1, local_size=1, device_type="cpu"
    )
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({path: plan}), sharders=[sharder]
    )


def make_batch() -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    """Return float32[BATCH, NUM_DENSE], a bag of one to three ids a table and example, and float32[BATCH] of clicks."""
    lengths = torch.randint(1, 4, (len(TABLES) * BATCH,))
    ids = [
        torch.randint(rows, (int(part.sum()),))
        for rows, part in zip(TABLES.values(), lengths.split(BATCH), strict=True)
    ]
    features = KeyedJaggedTensor(list(TABLES), torch.cat(ids), lengths=lengths)
    first_items = features["item"].values()[features["item"].offsets()[:-1]]
    return torch.rand(BATCH, NUM_DENSE), features, (first_items % 2).float()


def main() -> None:
    """Train, stream and serve."""
    warnings.simplefilter("ignore")  # TorchRec's own
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # of how TorchRec uses torch
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dmp = shard(make_dlrm())
    dense = [parameter for name, parameter in dmp.named_parameters() if "embedding_bags" not in name]
    optimizer = torch.optim.Adam(dense, lr=0.01)
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess.start(Path(folder) / "store", shards=2) as server,
        RawEmbeddingStreamer(
            server.address, run="dlrm", model="ctr", recordings=(recordings := f"{folder}/recordings")
        ) as streamer,
    ):
        streamer.attach(dmp, dense=True)
        for step in range(1, NUM_STEPS + 1):
            dense_features, sparse_features, clicks = make_batch()
            optimizer.zero_grad()
            loss = binary_cross_entropy_with_logits(dmp(dense_features, sparse_features)[:, 0], clicks)
            loss.backward()  # the fused optimizer updates the rows in here
            optimizer.step()
            if step % 50 == 0:
                print(f"step {step:3}: loss {loss.item():.3f}")
        streamer.step()  # the last step ends with no further forward
        streamer.flush()
        print(streamer)
        with EmbeddingReplica(server.address, consistency="step") as replica:
            served = serve_model(make_dlrm("meta"), replica, model="ctr")
            # In production: `record` after each step, and `watch` for as long as the model is served.
            streamer.record(make_batch()[:2], dmp)
            print(RecordingCheck(served, recordings, replica).check(timeout_s=60))
            print(f"trainer = server: {streamer.audit().is_equal}, server = replica: {replica.audit().is_equal}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
