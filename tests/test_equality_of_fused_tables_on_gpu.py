"""FBGEMM's tables on a GPU: with any placement and fused optimizer, every row and state of the store equals theirs.

The tests need a GPU, a build of fbgemm_gpu for it, and less than 100 MB of managed memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from prefetching_training import prefetch_on_rank
from ranks import run_ranks
from store_comparison import compare_with_store
from torch import nn

import headrace
import headrace.res
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.device.dirty_rows import DeviceDirtyRows
from headrace.streamer.taps.tapped_table import TappedTable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torchrec,
    # A thread ends the run: no signal gets through to a call that waits for the device.
    pytest.mark.timeout(120, method="thread"),
    # Of the libraries, attributed to us; a RuntimeWarning, which says that all rows are sent, still fails.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

# FBGEMM reads it once in a process, when the first module is made.
os.environ["FBGEMM_RES_HBM_STREAMING"] = "1"
# (name, rows, dim), and the table of each feature.
TABLES = [("users", 1500, 16), ("films", 303, 8), ("shops", 7, 36)]
FEATURES = [0, 0, 1, 2]
NUM_BAGS, BAG = 16, 3
NUM_STEPS = 10
# 256 rows, of some 1,800: each batch has about 100, so rows are evicted, and some find no place.
CACHE_SETS = 8
# The placement of each table: names in `EmbeddingLocation`.
PLACEMENTS = {
    "device": ["DEVICE"] * 3,
    "managed": ["MANAGED"] * 3,
    "cached": ["MANAGED_CACHING"] * 3,
    "mixed": ["MANAGED_CACHING", "DEVICE", "MANAGED"],
    "cached-last": ["DEVICE", "MANAGED_CACHING", "MANAGED_CACHING"],
}
OPTIMIZERS = [
    "EXACT_SGD",
    "EXACT_ADAGRAD",
    "EXACT_ROWWISE_ADAGRAD",
    "ADAM",
    "PARTIAL_ROWWISE_ADAM",
    "LAMB",
    "PARTIAL_ROWWISE_LAMB",
]
Batch = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def device() -> torch.device:
    """Return the GPU, or skip where FBGEMM has no kernels for it."""
    import fbgemm_gpu.split_table_batched_embeddings_ops_training  # noqa: F401 (it registers the operators)

    if not torch._C._dispatch_has_kernel_for_dispatch_key("fbgemm::bounds_check_indices", "CUDA"):
        pytest.skip("this fbgemm_gpu is a build for the CPU")
    return torch.device("cuda", torch.cuda.current_device())


def make(
    device: torch.device,
    placement: str = "cached",
    optimizer: str = "EXACT_ROWWISE_ADAGRAD",
    *,
    precision: str = "FP32",
    cache_sets: int = CACHE_SETS,
    seed: int = 3,
    **settings: Any,
) -> Any:
    """Return a module of all tables with random weights."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    torch.manual_seed(seed)
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [
            (rows, dim, EmbeddingLocation[place], ComputeDevice.CUDA)
            for (_, rows, dim), place in zip(TABLES, PLACEMENTS[placement], strict=True)
        ],
        feature_table_map=FEATURES,
        optimizer=EmbOptimType[optimizer],
        learning_rate=0.1,
        eps=1e-6,
        weights_precision=SparseType[precision],
        output_dtype=SparseType.FP32,
        cache_sets=cache_sets,
        table_names=[name for name, _, _ in TABLES],
        device=device,
        **settings,
    )
    module.init_embedding_weights_uniform(-0.1, 0.1)
    return module


def batches_of(device: torch.device, num_batches: int, seed: int = 4) -> list[Batch]:
    """Return ids and offsets of batches; all are on the device when this returns."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(num_batches):
        # Skewed, so that some rows are in each batch.
        ids = [(torch.rand(NUM_BAGS * BAG, generator=generator) ** 3 * TABLES[table][1]).long() for table in FEATURES]
        offsets = torch.arange(0, NUM_BAGS * BAG * len(FEATURES) + 1, BAG)
        batches.append((torch.cat(ids).to(device), offsets.to(device)))
    torch.cuda.synchronize(device)
    return batches


def rows_of(batches: Sequence[Batch]) -> list[list[int]]:
    """Return the distinct rows of each table in some batches."""
    found: list[set[int]] = [set() for _ in TABLES]
    for indices, _ in batches:
        for table, ids in zip(FEATURES, indices.view(len(FEATURES), -1).tolist(), strict=True):
            found[table].update(ids)
    return [sorted(rows) for rows in found]


def train_step(module: Any, batch: Batch) -> None:
    (module(*batch) - 1).pow(2).mean().backward()


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Have CUDA raise where the host would wait for it."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def whole(table: TappedTable) -> torch.Tensor:
    return table.weights_at(torch.arange(table.num_local_rows))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def check(streamer: RawEmbeddingStreamer, server: ServerProcess) -> None:
    """Compare every row and state with the store."""
    comparison = compare_with_store(streamer.tables, server.address)
    assert comparison.is_equal, str(comparison)
    assert comparison.num_compared == sum(rows for _, rows, _ in TABLES)


def check_cache(streamer: RawEmbeddingStreamer, module: Any, server: ServerProcess) -> None:
    """Check that some rows are newer in the cache than in the tables, and that FBGEMM writes back what was sent."""
    seen = [whole(table) for table in streamer.tables]
    in_tables = module.split_embedding_weights()
    assert any(not torch.equal(*both) for both in zip(seen, in_tables, strict=True)), "no row was in the cache alone"
    module.flush()
    torch.cuda.synchronize()
    for table, before, now in zip(streamer.tables, seen, module.split_embedding_weights(), strict=True):
        different = (bits(before) != bits(now)).any(dim=1).nonzero().flatten().tolist()
        assert not different, f"{table.name}: rows {different} are others once they are written back"
    check(streamer, server)


def check_marks(streamer: RawEmbeddingStreamer, module: Any, batch: Batch) -> None:
    """Check that a step marks the rows of its batch, and no others. REQUIRES: no row is dirty."""
    train_step(module, batch)
    marked = [[row for part in table.dirty.parts() for row in part.tolist()] for table in streamer.tables]
    assert marked == rows_of([batch])
    streamer.step()


def check_training(
    server: ServerProcess, device: torch.device, name: str, placement: str, *, device_pipeline: bool, **settings: Any
) -> None:
    """Train tables of a placement, and compare them."""
    module = make(device, placement, **settings)
    batches = batches_of(device, NUM_STEPS + 2)
    is_drained = device_pipeline and placement == "device"
    with RawEmbeddingStreamer(
        server.address, run=name, device_pipeline=device_pipeline, freshness_s=0, max_cost_percent=100
    ) as streamer:
        streamer.attach(nn.ModuleDict({name: module}), publish="all")
        for batch in batches[:NUM_STEPS]:
            train_step(module, batch)
            with no_waits() if is_drained else contextlib.nullcontext():
                streamer.step()
        streamer.flush()
        on_device = [isinstance(table.dirty, DeviceDirtyRows) for table in streamer.tables]
        assert on_device == [device_pipeline and place == "DEVICE" for place in PLACEMENTS[placement]]
        check(streamer, server)
        check_marks(streamer, module, batches[NUM_STEPS])
        train_step(module, batches[NUM_STEPS + 1])
        streamer.flush()
        check(streamer, server)
        if "MANAGED_CACHING" in PLACEMENTS[placement]:
            check_cache(streamer, module, server)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_and_placements(server: ServerProcess, device: torch.device, optimizer: str, placement: str) -> None:
    """Each fused optimizer's rows and states arrive from each placement, with the device pipeline."""
    name = f"{optimizer}-{placement}".lower()
    check_training(server, device, name, placement, device_pipeline=True, optimizer=optimizer)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("optimizer", ["EXACT_ROWWISE_ADAGRAD", "ADAM"])
def test_without_the_device_pipeline(
    server: ServerProcess, device: torch.device, optimizer: str, placement: str
) -> None:
    """The host gathers the same rows."""
    name = f"host-{optimizer}-{placement}".lower()
    check_training(server, device, name, placement, device_pipeline=False, optimizer=optimizer)


@pytest.mark.parametrize("placement", ["device", "managed", "cached", "mixed"])
@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "EXACT_ROWWISE_ADAGRAD", "PARTIAL_ROWWISE_ADAM"])
def test_half_precision(server: ServerProcess, device: torch.device, optimizer: str, placement: str) -> None:
    """Rows in half precision are those that stochastic rounding gave, in the cache and out of it.

    Not for Adam, whose kernel for a GPU refuses its own states beside such weights (fbgemm-gpu 1.6.0).
    """
    name = f"half-{optimizer}-{placement}".lower()
    check_training(server, device, name, placement, device_pipeline=True, optimizer=optimizer, precision="FP16")


@pytest.mark.parametrize("device_pipeline", [True, False], ids=["pipeline", "host"])
def test_managed_memory_that_is_on_the_device(
    server: ServerProcess, device: torch.device, device_pipeline: bool
) -> None:
    """With `enforce_hbm` cached tables are in the device's own memory, and still not drained there."""
    name = f"hbm-{device_pipeline}".lower()
    check_training(server, device, name, "cached", device_pipeline=device_pipeline, enforce_hbm=True)


def test_the_least_frequently_used_rows_are_evicted(server: ServerProcess, device: torch.device) -> None:
    """A cache that evicts by frequency is read like one that evicts by time."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm

    settings = {"cache_algorithm": CacheAlgorithm.LFU, "device_pipeline": True}
    check_training(server, device, "lfu", "cached", **settings)


def test_a_cache_of_another_precision_is_refused(server: ServerProcess, device: torch.device) -> None:
    """A cache that rounds rows when it evicts them is refused, before anything is hooked."""
    from fbgemm_gpu.split_embedding_configs import SparseType

    module = make(device, "cached", precision="FP16", cache_precision=SparseType.FP32)
    with (
        RawEmbeddingStreamer(server.address, run="rounds") as streamer,
        pytest.raises(UnsupportedModelError, match="rounds rows when it evicts"),
    ):
        streamer.attach(nn.ModuleDict({"rounds": module}), publish="updated")


class Prefetcher:
    """Prefetches batches on a stream of its own, as TorchRec's `PrefetchTrainPipelineSparseDist` does."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device
        self._stream = torch.cuda.Stream(device)

    def prefetch(self, batch: Batch) -> None:
        forward_stream = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            self._module.prefetch(*batch, forward_stream=forward_stream)

    def wait(self) -> None:
        """Have the current stream wait for the prefetches."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


@pytest.mark.parametrize("device_pipeline", [True, False], ids=["pipeline", "host"])
@pytest.mark.parametrize("placement", ["cached", "mixed", "cached-last"])
@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "EXACT_ROWWISE_ADAGRAD", "PARTIAL_ROWWISE_ADAM"])
def test_prefetches_on_another_stream(
    server: ServerProcess, device: torch.device, optimizer: str, placement: str, device_pipeline: bool
) -> None:
    """Steps end, and rows are read, while the next batches' rows move into the cache."""
    name = f"prefetch-{optimizer}-{placement}-{device_pipeline}".lower()
    module = make(device, placement, optimizer, prefetch_pipeline=True)
    prefetcher = Prefetcher(module, device)
    batches = batches_of(device, 2 * NUM_STEPS)
    with RawEmbeddingStreamer(
        server.address, run=name, device_pipeline=device_pipeline, freshness_s=0, max_cost_percent=100
    ) as streamer:
        streamer.attach(nn.ModuleDict({name: module}), publish="all")
        prefetcher.prefetch(batches[0])
        for number, batch in enumerate(batches):
            prefetcher.wait()
            loss = (module(*batch) - 1).pow(2).mean()
            if number + 1 < len(batches):
                prefetcher.prefetch(batches[number + 1])
            loss.backward()
            if number == NUM_STEPS:  # after a flush, with nothing dirty
                marked = [[row for part in table.dirty.parts() for row in part.tolist()] for table in streamer.tables]
                assert marked == rows_of([batch])
            streamer.step()
            if number == NUM_STEPS - 1:
                streamer.flush()
        streamer.flush()
        check(streamer, server)
        check_cache(streamer, module, server)


def test_cached_rows_are_audited_fetched_and_restored(server: ServerProcess, device: torch.device) -> None:
    """Audits and `fetch` read the cache; restored rows are in tables and cache, whatever these had."""
    module = make(device)
    with RawEmbeddingStreamer(server.address, run="whole", freshness_s=0, max_cost_percent=100) as streamer:
        streamer.attach(nn.ModuleDict({"whole": module}), publish="all")
        for batch in batches_of(device, NUM_STEPS):
            train_step(module, batch)
        streamer.flush()
        assert streamer.audit().is_equal
        wanted = [whole(table) for table in streamer.tables]
        fetched = streamer.fetch("whole.users", torch.arange(TABLES[0][1])).weights
        assert torch.equal(bits(fetched), bits(wanted[0].cpu()))
        other = make(device, seed=8)
        for batch in batches_of(device, NUM_STEPS, seed=9):
            train_step(other, batch)
        headrace.restore(nn.ModuleDict({"whole": other}), address=server.address)
        other.flush()
        torch.cuda.synchronize()
        for before, now in zip(wanted, other.split_embedding_weights(), strict=True):
            assert torch.equal(bits(before), bits(now))
        module.reset_cache_states()  # takes back what was never written back
        streamer.flush()
        check(streamer, server)


@pytest.mark.parametrize("prefetches", [False, True], ids=["forward", "prefetch"])
@pytest.mark.parametrize("streams_hbm", [False, True], ids=["cache-lane", "hbm-lane"])
@pytest.mark.parametrize("placement", ["device", "cached", "mixed", "cached-last"])
def test_raw_embedding_streaming(
    server: ServerProcess, device: torch.device, placement: str, streams_hbm: bool, prefetches: bool
) -> None:
    """Modules made for RES after `install` arrive whole, from cache and tables, whatever rows FBGEMM hands over."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import RESParams

    res = {"table_names": [table for table, _, _ in TABLES], "table_offsets": [0, 0, 0]}
    if streams_hbm and not hasattr(RESParams(), "enable_hbm_streaming"):
        pytest.skip("tables in HBM are streamed by fbgemm_gpu 1.9 and later")
    if streams_hbm:
        res["enable_hbm_streaming"] = True
    name = f"res-{placement}-{streams_hbm}-{prefetches}".lower()
    with headrace.res.install(
        server.address, run=name, model=name, publish="all", freshness_s=0, max_cost_percent=100
    ) as streamer:
        module = make(
            device,
            placement,
            prefetch_pipeline=prefetches,
            enable_raw_embedding_streaming=True,
            res_params=RESParams(**res),
        )
        assert streams_hbm == getattr(module, "_res_hbm_streaming", False)
        lanes = []
        module._raw_embedding_streamer.stream = lambda *_, use_hbm=False, **__: lanes.append(use_hbm)
        prefetcher = Prefetcher(module, device)
        batches = batches_of(device, NUM_STEPS)
        if prefetches:
            prefetcher.prefetch(batches[0])
        for number, batch in enumerate(batches):
            prefetcher.wait()
            loss = (module(*batch) - 1).pow(2).mean()
            if prefetches and number + 1 < len(batches):
                prefetcher.prefetch(batches[number + 1])
            loss.backward()
            assert streamer.stats().step == number
        streamer.flush()
        assert streamer.stats().step == NUM_STEPS
        places = PLACEMENTS[placement]
        has_lane = {False: "MANAGED_CACHING" in places, True: streams_hbm and "DEVICE" in places}
        # 1.9 also calls for the cache of a module without one.
        assert {use_hbm for use_hbm in has_lane if has_lane[use_hbm]} <= set(lanes)
        check(streamer, server)
        if "MANAGED_CACHING" in places:
            check_cache(streamer, module, server)


@pytest.mark.timeout(150, method="thread")
@pytest.mark.parametrize("device_pipeline", [True, False], ids=["pipeline", "host"])
def test_a_prefetching_train_pipeline(server: ServerProcess, device: torch.device, device_pipeline: bool) -> None:
    """Tables that `DistributedModelParallel` caches, and TorchRec's pipeline prefetches, arrive whole."""
    del device  # the rank's own process takes it
    ((is_equal, comparison, num_stale),) = run_ranks(
        prefetch_on_rank, 1, server.address, device_pipeline, uses_gpu=True
    )
    assert is_equal, comparison
    assert num_stale > 0


# Last: a capture that fails may leave the device unusable.
@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "EXACT_ROWWISE_ADAGRAD"])
def test_steps_replayed_from_a_cuda_graph(server: ServerProcess, device: torch.device, optimizer: str) -> None:
    """Rows that a replay updates are marked by it."""
    name = f"graph-{optimizer}".lower()
    module = make(device, "device", optimizer)
    batches = batches_of(device, 3 + NUM_STEPS)
    indices, offsets = batches[0][0].clone(), batches[0][1].clone()
    with RawEmbeddingStreamer(
        server.address, run=name, device_pipeline=True, freshness_s=0, max_cost_percent=100
    ) as streamer:
        streamer.attach(nn.ModuleDict({name: module}), publish="all")
        for batch in batches[:3]:
            train_step(module, batch)
            streamer.step()
        streamer.flush()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            train_step(module, (indices, offsets))
        for batch in batches[3:]:
            indices.copy_(batch[0])
            graph.replay()
            streamer.step()
        streamer.flush()
        assert all(isinstance(table.dirty, DeviceDirtyRows) for table in streamer.tables)
        check(streamer, server)
