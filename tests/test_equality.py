"""The headline: after a drain, every row of the store equals the trainer's row, bit for bit, weights and states.

Each case trains a model with several tables of different dims on random batches, streams it to a real server of two
shards, and compares every row. The last test shows that the comparison finds a single flipped bit.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equality_tables import BATCH, TABLES, TorchModel, batch_of, table_batched
from hellos import hello_of_writer
from set_embeddings import delta_of, request_of
from torch import nn
from torchrec_models import parallel, plan_of
from whole_optimizers import Around, Decaying, Lion

from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.compare import compare_with_store

NUM_STEPS = 12


def _loss(output: torch.Tensor) -> torch.Tensor:
    return (output - 1).pow(2).mean()


def _row_wise_adagrad(parameters: Any) -> torch.optim.Optimizer:
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    # The default eps is 0 in float16, and then 0 / 0 in rows without a gradient.
    return RowWiseAdagrad(parameters, lr=0.1, eps=1e-4)


TORCH_CASES: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], bool]] = {
    "sgd-sparse": (lambda p: torch.optim.SGD(p, lr=0.1), True),
    "sgd-dense": (lambda p: torch.optim.SGD(p, lr=0.1), False),
    "adagrad-sparse": (lambda p: torch.optim.Adagrad(p, lr=0.1), True),
    "adagrad-dense": (lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-4), False),
    "rowwise-adagrad-dense": (_row_wise_adagrad, False),
    "adam-sparse": (lambda p: torch.optim.SparseAdam(p, lr=0.1), True),
    "momentum-dense": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), False),
    "adam-dense": (lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-4), False),
    "amsgrad-dense": (lambda p: torch.optim.AdamW(p, lr=0.1, eps=1e-4, weight_decay=0, amsgrad=True), False),
}


@pytest.mark.parametrize(
    ("dtype", "publish"),
    [
        *itertools.product([torch.float32, torch.float16], ["all", "updated"]),
        (torch.bfloat16, "all"),
        (torch.float64, "all"),
    ],
    ids=["fp32-all", "fp32-updated", "fp16-all", "fp16-updated", "bf16-all", "fp64-all"],
)
@pytest.mark.parametrize("case", TORCH_CASES)
def test_torch_optimizers(server: ServerProcess, case: str, dtype: torch.dtype, publish: str) -> None:
    """Tables of `nn.Embedding` and `nn.EmbeddingBag` arrive whole for every optimizer that is exact."""
    if "rowwise" in case:
        pytest.importorskip("torchrec")
    make_optimizer, sparse = TORCH_CASES[case]
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    model = nn.ModuleDict({f"{case}-{dtype}-{publish}".replace(".", "_"): TorchModel(dtype, sparse=sparse)})
    (core,) = model.values()
    optimizer = make_optimizer(list(model.parameters()))
    touched: dict[str, set[int]] = {name: set() for name, _, _ in TABLES}
    with RawEmbeddingStreamer(server.address, run=next(iter(model))) as streamer:
        streamer.attach(model, optimizer, publish=publish)
        for _ in range(NUM_STEPS):
            batch = batch_of(generator)
            batch["shops"] = batch["shops"][:, :1]
            for table, ids in batch.items():
                touched[table] |= set(ids.flatten().tolist())
            optimizer.zero_grad()
            _loss(core(batch)).backward()
            optimizer.step()
        streamer.flush()
        if publish == "all":
            _check_all_equal(streamer, server)
            return
        comparison = compare_with_store(streamer.tables, server.address, only_present=True)
    assert comparison.is_equal, str(comparison)
    assert comparison.num_compared == sum(len(ids) for ids in touched.values())


def _check_all_equal(streamer: RawEmbeddingStreamer, server: ServerProcess, *, num_models: int = 1) -> None:
    comparison = compare_with_store(streamer.tables, server.address)
    assert comparison.is_equal, str(comparison)
    assert comparison.num_compared == num_models * sum(rows for _, rows, _ in TABLES)
    assert (comparison.num_different, comparison.num_missing) == (0, 0)


# Optimizers that change every row, or are not known to change only some. The default eps is 0 in float16.
WHOLE_CASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd-decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "adagrad-decay": lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-4, weight_decay=0.01),
    "adam-decay": lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-4, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, eps=1e-4, weight_decay=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, eps=1e-2, momentum=0.9, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1, eps=1e-4),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1, eps=1e-4),
    "lion": Lion,
    "derived": lambda p: Decaying(p, eps=1e-4),
    "wrapper": Around,
}


@pytest.mark.parametrize("case", WHOLE_CASES)
def test_torch_optimizers_that_may_change_every_row(server: ServerProcess, case: str) -> None:
    """Tables of all types arrive whole with optimizers of any kind, with those states whose names are known."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
    model = nn.ModuleDict({f"whole-{case}-{name}": TorchModel(dtype, sparse=False) for name, dtype in dtypes.items()})
    optimizer = WHOLE_CASES[case](list(model.parameters()))
    with RawEmbeddingStreamer(server.address, run=f"whole-{case}") as streamer:
        streamer.attach(model, optimizer, publish="updated")
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            for core in model.values():
                _loss(core(batch_of(generator))).backward()
            optimizer.step()
        streamer.flush()
        assert streamer.stats().step == NUM_STEPS
        _check_all_equal(streamer, server, num_models=len(model))
        assert not any(parameter.isnan().any() for parameter in model.parameters())


@pytest.mark.torchrec
@pytest.mark.parametrize("case", ["averages", "cowclip", "said-all"])
def test_fbgemm_optimizers_that_may_change_every_row(server: ServerProcess, case: str) -> None:
    """Tables of a fused TBE arrive whole if an update, or a forward, changes rows outside of the batch."""
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as ops

    settings: dict[str, Any] = {"weight_decay": 0.1}
    if case == "averages":
        settings = {"emainplace_mode": ops.EmainplaceModeDefinition(step_ema=3, step_start=0, step_ema_coef=0.5)}
    elif case == "cowclip":
        settings |= {"weight_decay_mode": ops.WeightDecayMode.COWCLIP}
        settings |= {"cowclip_regularization": ops.CowClipDefinition(lower_bound=0.01)}
    generator = torch.Generator().manual_seed(4)
    name = "EMAINPLACE_ROWWISE_ADAGRAD" if case == "averages" else "EXACT_ROWWISE_ADAGRAD"
    tbe, forward = table_batched(name, **settings)
    is_whole = case != "cowclip"
    with RawEmbeddingStreamer(server.address, run=f"tbe-{case}") as streamer:
        word = {"dirty": "all"} if case == "said-all" else {}
        streamer.attach(nn.ModuleDict({f"tbe-{case}": tbe}), publish="updated" if is_whole else "all", **word)
        for _ in range(NUM_STEPS):
            _loss(forward(batch_of(generator))).backward()
        streamer.flush()
        _check_all_equal(streamer, server)


# The fused optimizers of FBGEMM's CPU build; its Adam and the others run on a GPU only.
FBGEMM_NAMES = ["EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD"]


@pytest.mark.torchrec
@pytest.mark.parametrize("precision", ["FP32", "FP16"])
@pytest.mark.parametrize("name", FBGEMM_NAMES)
def test_fbgemm_tbe(server: ServerProcess, name: str, precision: str) -> None:
    """Tables of a fused TBE arrive whole, with the optimizer's states."""
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(4)
    tbe, forward = table_batched(name, precision)
    model = nn.ModuleDict({f"tbe-{name}-{precision}": tbe})
    with RawEmbeddingStreamer(server.address, run=f"tbe-{name}-{precision}") as streamer:
        streamer.attach(model, publish="all")
        for _ in range(NUM_STEPS):
            _loss(forward(batch_of(generator))).backward()
        streamer.flush()
        _check_all_equal(streamer, server)


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.torchrec
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("precision", ["FP32", "FP16"])
@pytest.mark.parametrize("name", FBGEMM_NAMES)
def test_torchrec_dmp(server: ServerProcess, name: str, precision: str) -> None:
    """Tables of a model under `DistributedModelParallel` arrive whole, under their names in the state dict."""
    import torchrec
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import table_wise

    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(6)
    data_type = torchrec.modules.embedding_configs.DataType[precision]
    configs = [
        torchrec.EmbeddingBagConfig(
            name=table, num_embeddings=rows, embedding_dim=dim, feature_names=[table], data_type=data_type
        )
        for table, rows, dim in TABLES
    ]
    bags, path = torchrec.EmbeddingBagCollection(device=torch.device("meta"), tables=configs), f"dmp-{name}-{precision}"
    root = nn.Sequential()
    root.add_module(path, bags)
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType[name], "learning_rate": 0.1, "eps": 1e-6}
    )
    # Without a kernel's name the plan takes the dense one, which has no fused optimizer.
    shardings = {table: table_wise(rank=0, compute_kernel="fused") for table, _, _ in TABLES}
    dmp = parallel(root, {path: plan_of(bags, shardings, sharder)}, sharder)
    with RawEmbeddingStreamer(server.address, run=path) as streamer:
        streamer.attach(dmp, publish="all")
        for _ in range(NUM_STEPS):
            batch = batch_of(generator)
            features = torchrec.KeyedJaggedTensor(
                keys=[table for table, _, _ in TABLES],
                values=torch.cat([batch[table].flatten() for table, _, _ in TABLES]),
                lengths=torch.full((len(TABLES) * BATCH,), 3),
            )
            _loss(dmp(features).values().float()).backward()
        streamer.flush()
        assert {table.spec.fqn for table in streamer.tables} <= set(dmp.state_dict())
        _check_all_equal(streamer, server)


def test_one_flipped_bit_is_found(server: ServerProcess) -> None:
    """The comparison that all tests above lean on reports the row in which the store has one bit the other way."""
    model = nn.ModuleDict({"flip": nn.EmbeddingBag(50, 4, mode="sum", sparse=True)})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with RawEmbeddingStreamer(server.address, run="flip") as streamer:
        streamer.attach(model, optimizer, publish="all")
        streamer.flush()
        assert compare_with_store(streamer.tables, server.address).num_different == 0
        asyncio.run(_flip_one_bit(server.address, "flip.weight", row=17))
        comparison = compare_with_store(streamer.tables, server.address)
    assert comparison.num_different == 1
    assert "flip.weight" in str(comparison) and "17" in str(comparison)


async def _flip_one_bit(address: str, fqn: str, *, row: int) -> None:
    """Write a row back with the lowest bit of its first state element turned over, as a replay would."""
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
        await client.hello(hello_of_writer(spec, run="vandal", epoch=1_000_000, world_size=0))
        delta = delta_of(spec, [row], rows.weights, states={"sum": state})
        of_vandal = {"run": "vandal", "epoch": 1_000_000, "version_epoch": 1_000_000, "step": 0}
        await client.set_embeddings(request_of(delta, **of_vandal))


def test_the_store_keeps_its_rows_over_a_restart(tmp_path: Path) -> None:
    """What was equal before the server stopped is equal after it has started again."""
    model = nn.ModuleDict({"kept": nn.EmbeddingBag(400, 12, mode="sum", sparse=True)})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with (
        ServerProcess.start(tmp_path, shards=2) as server,
        RawEmbeddingStreamer(server.address, run="kept") as streamer,
    ):
        streamer.attach(model, optimizer, publish="all")
        model["kept"](torch.arange(300).view(100, 3)).sum().backward()
        optimizer.step()
        streamer.flush()
        tables = streamer.tables
    with ServerProcess.start(tmp_path, shards=2) as server:
        comparison = compare_with_store(tables, server.address)
    assert (comparison.num_compared, comparison.num_different, comparison.num_missing) == (400, 0, 0)
