"""TorchRec's train pipelines look up ahead of the update; each step marks exactly the rows that it changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mirror import Mirror
from pipelined_training import Stream, cpu_streams
from sparse_model import CPU, FQNS, ROWS, Batch, PipelinedBatch, PipelinedModel, one_rank, row_wise, sharded

from headrace.streamer.taps.attach import Tap, tap_model

pytestmark = pytest.mark.torchrec

pipelines = pytest.importorskip("torchrec.distributed.train_pipeline.train_pipelines")
experimental = pytest.importorskip("torchrec.distributed.train_pipeline.experimental_pipelines")
accumulation = pytest.importorskip("torchrec.distributed.train_pipeline.gradient_accumulation")

ALL = {FQNS[name]: list(range(rows)) for name, rows in ROWS.items()}
# Kinds, settings and whether the lookups of a step are made before the step that comes before it has ended.
KINDS: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "base": (pipelines.TrainPipelineBase, {}, False),
    "sparse-dist": (pipelines.TrainPipelineSparseDist, {}, False),
    "sparse-dist-late": (pipelines.TrainPipelineSparseDist, {"enqueue_batch_after_forward": True}, False),
    "sparse-dist-jit": (pipelines.TrainPipelineSparseDist, {"apply_jit": True}, False),
    "lite": (pipelines.TrainPipelineSparseDistLite, {}, False),
    "fused": (pipelines.TrainPipelineFusedSparseDist, {}, False),
    "prefetch": (pipelines.PrefetchTrainPipelineSparseDist, {}, False),
    "semi-sync": (pipelines.TrainPipelineSemiSync, {"start_batch": 2}, True),
    "semi-sync-stash": (pipelines.TrainPipelineSemiSync, {"start_batch": 0, "stash_gradients": True}, True),
    "hybrid": (experimental.TrainEvalHybridPipelineBase, {}, False),
}


@pytest.fixture(autouse=True, scope="module")
def process_group() -> Iterator[None]:
    """Run one process with its own store, without a port."""
    with one_rank():
        yield


@pytest.fixture(autouse=True)
def streams() -> Iterator[None]:
    """Those of a GPU are asked for."""
    with cpu_streams():
        yield


class Run:
    """A model, a pipeline over it, and the batches that it takes."""

    def __init__(self, kind: str, num_batches: int = 8, **settings: Any) -> None:
        make, own, _ = KINDS[kind]
        self.model = sharded("row-wise-adagrad", row_wise, kind_of_model=PipelinedModel)
        dense = [p for name, p in self.model.named_parameters() if "dense" in name]
        self.optimizer = torch.optim.SGD(dense, lr=0.1)
        self.pipeline = make(self.model, self.optimizer, CPU, **own, **settings)
        if kind == "prefetch":  # without streams it would leave its prefetch out
            self.pipeline._data_dist_stream = Stream()
            self.pipeline._stream_context = lambda _: contextlib.nullcontext()
        batches = [Batch(seed) for seed in range(num_batches)]
        self.rows = [batch.rows for batch in batches]
        self.inputs = iter([PipelinedBatch(*batch.inputs) for batch in batches])
        self.mirror = Mirror()

    def tap(self, *, counts_optimizer_steps: bool = False) -> Tap:
        tap = tap_model(self.model, [self.optimizer] if counts_optimizer_steps else [], self.mirror.on_step)
        self.mirror.watch(tap)
        return tap

    def train(self, num_batches: int | None = None) -> None:
        """Train on some batches, or until none is left."""
        with contextlib.suppress(StopIteration):
            while num_batches != 0:
                self.pipeline.progress(self.inputs)
                num_batches = None if num_batches is None else num_batches - 1


def together(steps: list[dict[str, list[int]]]) -> dict[str, list[int]]:
    """Return the rows of several steps, by table."""
    return {fqn: sorted({row for rows in steps for row in rows[fqn]}) for fqn in ALL}


@pytest.mark.parametrize("counts_optimizer_steps", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_train_pipeline_is_a_training_loop(kind: str, counts_optimizer_steps: bool) -> None:
    """Rows looked up ahead are marked in the step that changes them, also after `detach`."""
    run = Run(kind)
    tap = run.tap(counts_optimizer_steps=counts_optimizer_steps)
    run.train(4)
    if kind not in ("base", "prefetch"):  # of these, one has no forwards to give back, the other is not attached again
        run.pipeline.detach()
    run.train()
    tap.end_step()
    run.mirror.check()
    assert bool(getattr(run.pipeline, "_pipelined_modules", ())) == (kind != "base")
    if kind == "semi-sync-stash" and counts_optimizer_steps:  # the optimizer does not step after its first batch
        run.rows = [together(run.rows[:2]), *run.rows[2:]]
    assert run.mirror.taken == run.rows
    tap.close()


@pytest.mark.parametrize("kind", list(KINDS))
def test_attached_to_a_pipeline_that_runs(kind: str) -> None:
    """A batch looked up before `attach` and trained after it sends all rows, once."""
    run = Run(kind)
    run.train(3)
    tap = run.tap()
    run.train()
    tap.end_step()
    run.mirror.check()
    is_ahead = KINDS[kind][2]
    assert run.mirror.taken == [ALL if is_ahead else run.rows[3], *run.rows[4:]]
    tap.close()


def test_evaluation_in_the_same_pipeline() -> None:
    """Batches in evaluation mode change nothing and end no step."""
    run = Run("hybrid", num_batches=9)
    tap = run.tap()
    run.train(3)
    run.model.eval()
    run.train(3)
    run.model.train()
    run.train()
    tap.end_step()
    run.mirror.check()
    assert run.mirror.taken == [*run.rows[:3], *run.rows[6:]]
    tap.close()


@pytest.mark.parametrize("kind", ["base", "sparse-dist"])
def test_gradient_accumulation(kind: str) -> None:
    """Fused updates of accumulated batches go out with the optimizer's step."""
    run = Run(kind, num_batches=6)
    tap = run.tap(counts_optimizer_steps=True)
    config = accumulation.GradientAccumulationConfig(is_enabled=True, num_steps=3)
    run.pipeline = accumulation.GradientAccumulationWrapper(run.pipeline, run.optimizer, run.model, config)
    run.train()
    run.mirror.check()
    assert run.mirror.taken == [together(run.rows[:3]), together(run.rows[3:])]
    assert not tap.end_step()
    tap.close()


def test_a_forward_of_ones_own() -> None:
    """A pipeline that does not call the attached model ends steps only with an optimizer attached."""
    for counts_optimizer_steps in (False, True):
        run = Run("sparse-dist", num_batches=3)
        run.pipeline._model_fwd = run.model.module  # what `custom_model_fwd` sets
        tap = run.tap(counts_optimizer_steps=counts_optimizer_steps)
        run.train()
        if counts_optimizer_steps:
            assert run.mirror.taken == run.rows
        else:
            assert run.mirror.taken == []
            assert tap.end_step()
            assert run.mirror.taken == [together(run.rows)]
        tap.close()
