"""Values that an optimizer keeps once a table travel with its rows, and the newest one is read back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.store.catalog import Catalog, Scalar
from headrace.schemas.tables import DType, TableSpec
from headrace.streamer import RawEmbeddingStreamer


def scalars(address: str, fqn: str) -> dict[str, np.generic]:
    async def read() -> dict[str, np.generic]:
        async with await EmbeddingReader.connect(address) as reader:
            return await reader.scalars(fqn)

    return asyncio.run(read())


@pytest.mark.parametrize(
    ("name", "make", "sparse"),
    [
        ("adagrad", lambda p: torch.optim.Adagrad(p, lr=0.1), True),
        ("adam", lambda p: torch.optim.Adam(p, lr=0.1), False),
        ("sparse-adam", lambda p: torch.optim.SparseAdam(p, lr=0.1), True),
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.1), True),
    ],
)
def test_the_count_of_steps_comes_back_also_after_a_restart(tmp_path: Path, name: str, make: Any, sparse: bool) -> None:
    """The store has each table's `step` as the optimizer has it, whatever shard its last rows went to."""
    model = nn.ModuleDict({name: nn.EmbeddingBag(30, 4, mode="sum", sparse=sparse)})
    optimizer = make(list(model.parameters()))
    with ServerProcess.start(tmp_path, shards=2) as server:
        with RawEmbeddingStreamer(server.address, run=name) as streamer:
            streamer.attach(model, optimizer, publish="updated")
            for step in range(5):
                optimizer.zero_grad()
                model[name](torch.tensor([[step, step + 1]])).sum().backward()
                optimizer.step()
                streamer.flush()
        trained = optimizer.state[model[name].weight].get("step")
        expected = {} if trained is None else {"step": float(trained)}
        assert trained is None or float(trained) == 5
        assert scalars(server.address, f"{name}.weight") == expected
    with ServerProcess.start(tmp_path, shards=2) as server:
        assert scalars(server.address, f"{name}.weight") == expected


@pytest.mark.torchrec
def test_the_count_of_steps_of_a_table_batched_module_comes_back(tmp_path: Path) -> None:
    """Each table of a module whose fused optimizer counts steps has the count of the module when it was last sent."""
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as ops
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation

    tbe = ops.SplitTableBatchedEmbeddingBagsCodegen(
        [
            (30, 4, EmbeddingLocation.HOST, ops.ComputeDevice.CPU),
            (20, 8, EmbeddingLocation.HOST, ops.ComputeDevice.CPU),
        ],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        weight_decay=0.1,
        weight_decay_mode=ops.WeightDecayMode.COUNTER,
        counter_based_regularization=ops.CounterBasedRegularizationDefinition(
            counter_weight_decay_mode=ops.CounterWeightDecayMode.ADAGRADW
        ),
        table_names=["left", "right"],
    )
    with ServerProcess.start(tmp_path, shards=2) as server, RawEmbeddingStreamer(server.address, run="tbe") as streamer:
        streamer.attach(nn.ModuleDict({"tbe": tbe}), publish="updated")
        for step in range(4):
            left = torch.tensor([step])
            right = torch.tensor([step] if step < 2 else [], dtype=torch.int64)
            tbe(torch.cat([left, right]), torch.tensor([0, 1, 1 + right.numel()])).sum().backward()
            streamer.flush()
        assert scalars(server.address, "tbe.left") == {"iter": 4}
        assert scalars(server.address, "tbe.right") == {"iter": 2}


def test_the_newest_version_wins_and_is_kept() -> None:
    """An older version of a scalar (replay, backfill) changes nothing; the metadata brings all of them back."""
    spec = TableSpec(fqn="t", num_rows=5, dim=2, dtype=DType.FLOAT32)
    catalog = Catalog({})
    meta = catalog.add([spec])
    newer, older = np.float32(7).tobytes(), np.float32(3).tobytes()
    meta |= catalog.set_scalars("t", [("step", DType.FLOAT32, newer)], epoch=2, step=1)
    meta |= catalog.set_scalars("t", [("step", DType.FLOAT32, older)], epoch=1, step=9)
    expected = {"step": Scalar("step", DType.FLOAT32, newer, 2, 1)}
    assert catalog.find("t").scalars == expected
    assert Catalog(meta).find("t").scalars == expected
