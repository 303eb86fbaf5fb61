"""TorchRec's train pipelines and modules on several ranks, streamed and audited; functions here run on a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from collision_training import collision_model, drifting_ids
from torch import nn
from torchrec_models import fuse, parallel, plan_of

__all__ = ["CASES", "Stream", "cpu_streams", "reshard_on_rank", "run_cases_on_rank"]

CPU = torch.device("cpu")
ROWS = {"users": 211, "films": 101}
DIM = 32
SIZE = 4
STEPS = 8


class Model(nn.Module):
    """Pooled tables and a layer over them, called as a train pipeline calls it."""

    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags
        self.dense = nn.Linear(DIM * len(ROWS), 1)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss = (self.dense(self.bags(batch).values()) - 1).pow(2).mean()
        return loss, loss.detach()


class Stream:
    """A stream of a CPU: all is done when it is asked for."""

    device = CPU

    def wait_stream(self, _: Any) -> None:
        """Nothing is on its way."""


@contextlib.contextmanager
def cpu_streams() -> Iterator[None]:
    """The pipelines ask for the streams of a GPU, for which a CPU has nothing to do."""
    with (
        mock.patch.object(torch, "get_device_module", lambda *_: torch.cpu),
        mock.patch.object(torch.cpu, "current_stream", lambda *_: Stream()),
        mock.patch.object(torch.Tensor, "record_stream", lambda *_: None),
    ):
        yield


def make_tables() -> Any:
    """Return the tables' modules, each with a fused optimizer when it is sharded."""
    import torchrec

    bags = torchrec.EmbeddingBagCollection(
        tables=[
            torchrec.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
            for name, rows in ROWS.items()
        ],
        device=CPU,
    )
    # Without states: TorchRec's reshard never ends on gloo when it moves more than one tensor of a table.
    fuse("sgd", bags.parameters())
    return bags


def sharded(bags: Any, shardings: dict[str, Any], sharder: Any) -> Any:
    return parallel(Model(bags), {"bags": plan_of(bags, shardings, sharder)}, sharder)


def plain_model() -> Any:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import row_wise, table_wise

    torch.manual_seed(1)
    return sharded(make_tables(), {"users": row_wise(), "films": table_wise(rank=1)}, EmbeddingBagCollectionSharder())


def batch(seed: int, *, is_empty: bool = False) -> Any:
    from torchrec import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 1 if is_empty else 4, (len(ROWS) * SIZE,), generator=generator)
    counts = lengths.view(len(ROWS), SIZE).sum(1).tolist()
    ids = [torch.randint(0, rows, (n,), generator=generator) for rows, n in zip(ROWS.values(), counts, strict=True)]
    return KeyedJaggedTensor(keys=list(ROWS), values=torch.cat(ids), lengths=lengths)


def batch_of_several_sizes(seed: int) -> Any:
    """Return a batch with as many bags of a feature as differ (VBE), and which of them each sample has."""
    from torchrec import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(seed)
    sizes = [2, 3]
    lengths = [torch.randint(1, 4, (size,), generator=generator) for size in sizes]
    ids = [
        torch.randint(0, rows, (int(of_key.sum()),), generator=generator)
        for rows, of_key in zip(ROWS.values(), lengths, strict=True)
    ]
    inverse = torch.stack([torch.randint(0, size, (SIZE,), generator=generator) for size in sizes])
    return KeyedJaggedTensor(
        keys=list(ROWS),
        values=torch.cat(ids),
        lengths=torch.cat(lengths),
        stride_per_key_per_rank=[[size] for size in sizes],
        inverse_indices=(list(ROWS), inverse),
    )


Attached = tuple[Any, Any]
"""The model, and a function that trains it to the end of its batches."""


def drain(pipeline: Any, batches: list[Any]) -> None:
    """Have a pipeline take all batches."""
    inputs = iter(batches)
    with cpu_streams(), contextlib.suppress(StopIteration):
        while True:
            pipeline.progress(inputs)


def pipelined(rank: int, make: Callable[[Any, Any], Any], *, evaluates: bool = False) -> Attached:
    """Return a model and its training in a pipeline, where rank 1 has only empty batches after the half.

    Args:
        rank: This one.
        make: Makes the pipeline of the model and the optimizer of its dense part.
        evaluates: Train twice, and evaluate in another pipeline in between.
    """
    model = plain_model()
    dense = torch.optim.SGD([p for name, p in model.named_parameters() if "dense" in name], lr=0.1)
    pipeline = make(model, dense)
    batches = [batch(100 * rank + step, is_empty=rank == 1 and step >= STEPS // 2) for step in range(STEPS)]

    def train() -> None:
        drain(pipeline, batches)
        if evaluates:
            from torchrec.distributed.train_pipeline import EvalPipelineSparseDist

            pipeline.detach()
            evaluation = EvalPipelineSparseDist(model.eval(), dense, CPU)
            drain(evaluation, [batch(1000 + 100 * rank + step) for step in range(3)])
            evaluation.detach()
            model.train()
            pipeline.reset()
            drain(pipeline, batches)

    return model, train


def sparse_dist(rank: int, *, evaluates: bool = False) -> Attached:
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    return pipelined(rank, lambda model, dense: TrainPipelineSparseDist(model, dense, CPU), evaluates=evaluates)


def evaluated_between(rank: int) -> Attached:
    return sparse_dist(rank, evaluates=True)


def semi_sync(rank: int) -> Attached:
    from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync

    return pipelined(rank, lambda model, dense: TrainPipelineSemiSync(model, dense, CPU, start_batch=1))


def fused_dist(rank: int) -> Attached:
    from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineFusedSparseDist

    return pipelined(rank, lambda model, dense: TrainPipelineFusedSparseDist(model, dense, CPU))


def optimizer_in_backward(rank: int) -> Attached:
    from torchrec.distributed.train_pipeline.experimental_pipelines import TrainPipelineSparseDistBwdOpt

    return pipelined(rank, lambda model, dense: TrainPipelineSparseDistBwdOpt(model, dense, CPU, site_fqn="bags"))


def variable_batches(rank: int) -> Attached:
    model = plain_model()

    def train() -> None:
        for step in range(STEPS):
            model(batch_of_several_sizes(100 * rank + step))[0].backward()

    return model, train


def feature_processed(rank: int) -> Attached:
    import torchrec
    from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import row_wise, table_wise
    from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

    torch.manual_seed(1)
    tables = torchrec.EmbeddingBagCollection(tables=make_tables().embedding_bag_configs(), device=CPU, is_weighted=True)
    fuse("sgd", tables.parameters())
    positions = PositionWeightedModuleCollection(max_feature_lengths=dict.fromkeys(ROWS, 4), device=CPU)
    bags = FeatureProcessedEmbeddingBagCollection(tables, positions)
    shardings = {"users": row_wise(), "films": table_wise(rank=1)}
    model = sharded(bags, shardings, FeatureProcessedEmbeddingBagCollectionSharder())

    def train() -> None:
        for step in range(STEPS):
            model(batch(100 * rank + step))[0].backward()

    return model, train


def collisions(rank: int) -> Attached:
    """Return a model whose rows are given to other ids while it trains, in a pipeline."""
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    model = collision_model("collisions", True, 3)

    def forward(ids: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss = model(ids)
        return loss, loss.detach()

    unused = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    pipeline = TrainPipelineSparseDist(model, unused, CPU, custom_model_fwd=forward)
    generator = torch.Generator().manual_seed(rank)
    return model, lambda: drain(pipeline, [drifting_ids(step, generator) for step in range(STEPS)])


CASES: dict[str, Callable[[int], Attached]] = {
    case.__name__: case
    for case in (
        sparse_dist,
        evaluated_between,
        semi_sync,
        fused_dist,
        optimizer_in_backward,
        variable_batches,
        feature_processed,
        collisions,
    )
}


def run_cases_on_rank(rank: int, address: str) -> dict[str, tuple[bool, int, int]]:
    """Return of each case whether the store equals all rows of all ranks, its step, and rows that a rank has sent."""
    from headrace.streamer import RawEmbeddingStreamer

    found = {}
    for name, case in CASES.items():
        model, train = case(rank)
        # Each step's rows on their own, so that none is sent for the marks of another step.
        with RawEmbeddingStreamer(
            address, run=name, takes_over=True, policy="block", freshness_s=0, max_cost_percent=100
        ) as streamer:
            streamer.attach(model, publish="all")
            train()
            report = streamer.audit(only_present=False)
            found[name] = (report.is_equal, sum(part.num_rows for part in report.tables), streamer.stats().step)
    return found


def reshard_on_rank(rank: int, address: str) -> tuple[bool, str, bool]:
    """Move a table to the other rank while it is streamed, by TorchRec's own means.

    Returns:
        Whether all rows were equal before, what the next flush says, and whether all are equal in a new streamer.
    """
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import table_wise

    from headrace.schemas.errors import UnsupportedModelError
    from headrace.streamer import RawEmbeddingStreamer

    torch.manual_seed(1)
    sharder = EmbeddingBagCollectionSharder()
    model = sharded(make_tables(), {"users": table_wise(rank=0), "films": table_wise(rank=1)}, sharder)
    told = ""

    def train(first: int) -> None:
        for step in range(first, first + 3):
            model(batch(100 * rank + step))[0].backward()

    streamer = RawEmbeddingStreamer(address, run="resharded", takes_over=True)
    streamer.attach(model, publish="all")
    train(0)
    was_equal = streamer.audit(only_present=False).is_equal
    state = streamer.state_dict()
    moved = plan_of(make_tables(), {"users": table_wise(rank=1), "films": table_wise(rank=1)}, sharder)
    model.reshard({"bags": (0.0, {"users": moved["users"]})}, sharded_module_fqn="bags")
    try:
        streamer.flush()
    except UnsupportedModelError as exc:
        told = str(exc)
    streamer.close(flush=False)
    train(3)
    with RawEmbeddingStreamer(address, run="resharded", takes_over=True) as streamer:
        streamer.attach(model, publish="updated")
        streamer.load_state_dict(state)
        train(6)
        return was_equal, told, streamer.audit(only_present=False).is_equal
