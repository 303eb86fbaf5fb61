"""The headline: after a drain, every row of the store equals the trainer's row, bit for bit, weights and states.

One matrix of what trains and how it is streamed, whose rows hold each pair of values once at least; a real server of
two shards has what they stream. In a row all optimizers and placements are tables of one model. A test shows that the
comparison finds a single flipped bit.
"""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import collision_training
import numpy as np
import pytest
import torch
from equality_matrix import (
    LOOPS,
    SENT,
    Row,
    assert_equal_columns,
    check_row,
    pairwise,
    train_row_on_rank,
    train_rows_on_rank,
)
from hellos import hello_of_writer
from pipelined_training import CASES, ROWS, STEPS, reshard_on_rank, run_cases_on_rank
from ranks import run_ranks
from replicated_training import refusal_on_rank
from set_embeddings import delta_of, request_of
from stored_rows import read_rows
from torch import nn

from headrace.kernels.dtypes import bits_of
from headrace.paramserver.reading.blocking_reader import BlockingReader
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.streamer import RawEmbeddingStreamer

_AXES: dict[str, Any] = {
    "tables": ("torch", "fbgemm", "torchrec", "torchrec and dense"),
    "ranks": (1, 2, 4),
    "publish": ("all", "updated"),
    "sent": tuple(SENT),
    "loop": LOOPS,
}
_CORE = [
    {"tables": tables, "ranks": 1, "publish": publish, "sent": "rows", "loop": "steps"}
    for tables in _AXES["tables"]
    for publish in _AXES["publish"]
]
_MATRIX = [Row(**row) for row in pairwise(_AXES, lambda tables, ranks, **_: tables != "fbgemm" or ranks == 1, _CORE)]


def _rows(*ranks: int) -> list[Any]:
    return [
        pytest.param(row, id=row.name, marks=[] if row.tables == "torch" else pytest.mark.torchrec)
        for row in _MATRIX
        if row.ranks in ranks
    ]


@pytest.fixture(scope="module")
def on_one_rank(server: ServerProcess) -> dict[Row, dict[str, Any]]:
    """What the rank returns of each row, all in one process, because a process takes seconds to begin."""
    has_torchrec = all(importlib.util.find_spec(name) for name in ("torchrec", "fbgemm_gpu"))
    rows = [row for row in _MATRIX if row.ranks == 1 and (has_torchrec or row.tables == "torch")]
    (results,) = run_ranks(train_rows_on_rank, 1, server.address, rows)
    return dict(zip(rows, results, strict=True))


@pytest.mark.parametrize("row", _rows(1))
def test_on_one_rank(server: ServerProcess, on_one_rank: dict[Row, dict[str, Any]], row: Row) -> None:
    """Whatever trains on one rank, and however, arrives whole, and nothing else does."""
    assert "traceback" not in on_one_rank[row], on_one_rank[row]["traceback"]
    check_row(server.address, row, [on_one_rank[row]])


@pytest.mark.parametrize("row", _rows(2, 4))
def test_on_ranks(server: ServerProcess, row: Row) -> None:
    """The same on several ranks: replicas, `fully_shard`, DTensors, and TorchRec's shardings, on nodes of two ranks."""
    results = run_ranks(train_row_on_rank, row.ranks, server.address, row, local_size=2)
    check_row(server.address, row, results)


@pytest.fixture(scope="module")
def pipelined(server: ServerProcess) -> list[dict[str, tuple[bool, int, int]]]:
    return run_ranks(run_cases_on_rank, 2, server.address)


@pytest.mark.torchrec
@pytest.mark.parametrize("case", CASES)
def test_in_train_pipelines(pipelined: list[dict[str, tuple[bool, int, int]]], case: str) -> None:
    """Also where one rank has no batches left, and with an evaluation in a pipeline between; steps are counted."""
    num_rows = collision_training.ROWS["mch"] if case == "collisions" else sum(ROWS.values())
    steps = 2 * STEPS if case == "evaluated_between" else STEPS
    assert [result[case] for result in pipelined] == [(True, num_rows, steps)] * 2


@pytest.mark.torchrec
def test_a_table_that_moves_to_another_rank_is_told(server: ServerProcess) -> None:
    """After `reshard` the next flush of each rank says so, and a new streamer goes on."""
    for was_equal, told, is_equal in run_ranks(reshard_on_rank, 2, server.address):
        assert was_equal and is_equal
        assert "is not what was attached: the model has another module or parameter in its place" in told


@pytest.mark.parametrize(
    ("case", "messages"),
    [
        ("unwrapped", ["nothing keeps its copies equal"] * 2),
        ("ignored", ["DistributedDataParallel ignores it"] * 2),
        ("part_of_the_ranks", ["mesh of 1 of the 2 ranks"] * 2),
        ("ddp_of_some_ranks", ["kept equal on only 1 of the 2 ranks"] * 2),
        pytest.param("rowwise_dtensor", ["rowwise states of a DTensor cut by columns"] * 2, marks=pytest.mark.torchrec),
        ("partial", ["with placement P"] * 2),
        ("flattened", ["inside FullyShardedDataParallel"] * 2),
        ("unknown_name", ["no table is named or matches 'bagg.weight'; the nearest is 'bag.weight'"] * 2),
        ("only_one_rank_refuses", ["rank 1 cannot stream its tables", "max_norm"]),
        pytest.param(
            "different_ways_to_count", ["rank 0 was given optimizers and rank 1 none"] * 2, marks=pytest.mark.torchrec
        ),
        pytest.param("same_rows_twice", ["row 0 of table 'tbe.t' is on ranks 0 and 1"] * 2, marks=pytest.mark.torchrec),
    ],
)
def test_refused_on_all_ranks(case: str, messages: list[str]) -> None:
    """What cannot have one owner a row, or counts steps differently, is refused with its reason, on every rank."""
    for error, message in zip(run_ranks(refusal_on_rank, 2, case), messages, strict=True):
        assert message in error


def test_one_flipped_bit_is_found(server: ServerProcess) -> None:
    """The comparison that all tests above lean on reports the row in which the store has one bit the other way."""
    model = nn.ModuleDict({"flip": nn.EmbeddingBag(50, 4, mode="sum", sparse=True)})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with RawEmbeddingStreamer(server.address, run="flip") as streamer:
        streamer.attach(model, optimizer, publish="all")
        streamer.flush()
    weight = model["flip"].weight
    columns = {"weights": bits_of(weight), "sum": bits_of(optimizer.state[weight]["sum"])}
    assert_equal_columns("flip", columns, read_rows(server.address, "flip.weight", with_states=True))
    asyncio.run(_flip_one_bit(server.address, "flip.weight", row=17))
    with pytest.raises(AssertionError, match=r"flip sum: rows \[17\]"):
        assert_equal_columns("flip", columns, read_rows(server.address, "flip.weight", with_states=True))


async def _flip_one_bit(address: str, fqn: str, *, row: int) -> None:
    """Write a row back with the lowest bit of its first state element turned over."""
    async with await EmbeddingReader.connect(address) as reader:
        spec = reader.tables[fqn]
        rows = await reader.get(fqn, np.array([row]), with_states=True)
        num_shards = len(await reader.status())
    state = rows.states["sum"].copy()
    state.view(np.uint32)[0, 0] ^= 1
    shard = int(shards_of_rows(table_seed(fqn), np.array([row]), num_shards)[0])
    host, port = address.rsplit(":", 1)
    async with await ParamServerClient.connect(host, int(port)) as first:
        hello = hello_of_writer(spec, run="vandal", epoch=0)
        where = (await first.hello(hello)).shards[shard]
    async with await ParamServerClient.connect(where.host, where.port) as client:
        await client.hello(hello_of_writer(spec, run="vandal", epoch=1_000_000))
        delta = delta_of(spec, [row], rows.weights, states={"sum": state})
        of_vandal = {"run": "vandal", "epoch": 1_000_000, "step": 0}
        await client.set_embeddings(request_of(delta, **of_vandal))


def test_the_store_keeps_rows_and_step_counts_over_a_restart(tmp_path: Path) -> None:
    """Rows, and each table's `step` as its optimizer has it whatever shard its last rows went to, outlive a server."""
    made: dict[str, tuple[Any, bool]] = {
        "adagrad": (torch.optim.Adagrad, True),
        "adam": (torch.optim.Adam, False),
        "sparse-adam": (torch.optim.SparseAdam, True),
        "sgd": (torch.optim.SGD, True),
    }
    model = nn.ModuleDict(
        {name: nn.EmbeddingBag(30, 4, mode="sum", sparse=sparse) for name, (_, sparse) in made.items()}
    )
    optimizers = [make(model[name].parameters(), lr=0.1) for name, (make, _) in made.items()]

    def check(address: str) -> None:
        with BlockingReader(address) as reader:
            for name, table in model.items():
                state = dict(next((of.state[table.weight] for of in optimizers if table.weight in of.state), {}))
                step = {"step": 5.0} if "step" in state else {}
                assert float(state.pop("step", 5)) == 5
                assert reader.scalars(f"{name}.weight") == step
                rows = reader.get(f"{name}.weight", range(30), with_states=True)
                assert_equal_columns(name, {k: bits_of(v) for k, v in {"weights": table.weight, **state}.items()}, rows)

    with ServerProcess.start(tmp_path, shards=2) as server:
        with RawEmbeddingStreamer(server.address, run="kept") as streamer:
            streamer.attach(model, optimizers, publish="all")
            for step in range(5):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                sum(table(torch.tensor([[step, step + 1]])).sum() for table in model.values()).backward()
                for optimizer in optimizers:
                    optimizer.step()
                streamer.flush()
        check(server.address)
    with ServerProcess.start(tmp_path, shards=2) as server:
        check(server.address)


@pytest.mark.torchrec
def test_the_count_of_steps_of_a_table_batched_module_comes_back(server: ServerProcess) -> None:
    """Each table of a module whose fused optimizer counts steps has the count of the module when it was last sent."""
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as ops
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation

    place = (EmbeddingLocation.HOST, ops.ComputeDevice.CPU)
    tbe = ops.SplitTableBatchedEmbeddingBagsCodegen(
        [(30, 4, *place), (20, 8, *place)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        weight_decay=0.1,
        weight_decay_mode=ops.WeightDecayMode.COUNTER,
        counter_based_regularization=ops.CounterBasedRegularizationDefinition(
            counter_weight_decay_mode=ops.CounterWeightDecayMode.ADAGRADW
        ),
        table_names=["left", "right"],
    )
    with RawEmbeddingStreamer(server.address, run="tbe") as streamer:
        streamer.attach(nn.ModuleDict({"tbe": tbe}), publish="updated")
        for step in range(4):
            left = torch.tensor([step])
            right = torch.tensor([step] if step < 2 else [], dtype=torch.int64)
            tbe(torch.cat([left, right]), torch.tensor([0, 1, 1 + right.numel()])).sum().backward()
            streamer.flush()
    with BlockingReader(server.address) as reader:
        assert reader.scalars("tbe.left") == {"iter": 4}
        assert reader.scalars("tbe.right") == {"iter": 2}
