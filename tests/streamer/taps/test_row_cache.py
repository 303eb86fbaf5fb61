"""Tables behind FBGEMM's cache, on an emulation of it: what is read, sent and restored is what a lookup would see."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from mirror import mirrored, present_weights
from store_comparison import compare_with_store
from torch import nn

import headrace
import headrace.res
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.delivery import pipeline as delivery
from headrace.streamer.device.dirty_rows import DeviceDirtyRows
from headrace.streamer.flush.flusher import Flusher

pytestmark = pytest.mark.torchrec

RESParams = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training").RESParams
cached_tables = pytest.importorskip("cached_tables")

# Tables 0 and 2 are cached, together in 48 of their 220 rows; features 0 and 1 share table 0.
SHAPES = [(120, 8), (40, 12), (100, 4)]
CACHED, FEATURES = [0, 2], [0, 0, 1, 2]
OPTIMIZERS = ("EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD")


@pytest.fixture(autouse=True)
def _lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    cached_tables.emulate_lookup(monkeypatch)


def make(optimizer: str = "EXACT_ROWWISE_ADAGRAD", **settings: Any) -> Any:
    torch.manual_seed(3)
    settings = {"cached": CACHED, "num_sets": 12, "features": FEATURES} | settings
    return cached_tables.CachedTables(SHAPES, optimizer=optimizer, **settings)


def batch_of(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids of two bags a feature, skewed so that some rows stay in the cache."""
    ids = [(torch.rand(6, generator=generator) ** 2 * SHAPES[table][0]).long() for table in FEATURES]
    return torch.cat(ids), torch.arange(0, 6 * len(FEATURES) + 1, 3)


def train(module: Any, num_steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        module(*batch_of(generator)).pow(2).mean().backward()


@pytest.mark.parametrize("precision", ["FP32", "FP16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_marked_rows_are_all_that_changed(optimizer: str, precision: str) -> None:
    """A mirror that reads only marked rows equals what lookups see after each step, though rows move all the time."""
    module = make(optimizer, precision=precision)
    tap, _ = mirrored(module)
    num_outdated = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        module(*batch_of(generator)).pow(2).mean().backward()
        assert tap.end_step()  # the mirror compares every row
        num_outdated.append(module.num_outdated())
    assert min(num_outdated) > 0
    assert int((module.lxu_cache_state < 0).sum()) == 0, "no row was ever evicted"
    seen = [present_weights(table) for table in tap.tables]
    module.flush()
    assert all(map(torch.equal, seen, module.split_embedding_weights()))


def train_ahead(module: Any, num_steps: int) -> None:
    """Train with prefetches two steps ahead."""
    generator = torch.Generator().manual_seed(1)
    batches = [batch_of(generator) for _ in range(num_steps)]
    for batch in batches[:2]:
        module._prefetch(*batch)
    for number, batch in enumerate(batches):
        loss = module(*batch).pow(2).mean()
        if number + 2 < num_steps:
            module._prefetch(*batches[number + 2])
        loss.backward()


@pytest.mark.parametrize("train_by", [train, train_ahead])
@pytest.mark.parametrize("cached", [[0, 1, 2], [0, 2], [1], [2]])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_placements_in_one_module(
    server: ServerProcess, optimizer: str, cached: list[int], train_by: Callable[[Any, int], None]
) -> None:
    """The store has all rows, cached or not, of each placement, optimizer and kind of prefetch."""
    name = f"{optimizer}-{'-'.join(map(str, cached))}-{train_by.__name__}"
    module = make(optimizer, cached=cached, num_sets=6, table_names=["a", "b", "c"])
    with RawEmbeddingStreamer(server.address, run=name, model=name, freshness_s=0, max_cost_percent=100) as streamer:
        streamer.attach(module, publish="all")
        streamer.flush()  # from now on only rows that are marked go out
        train_by(module, 8)
        streamer.flush()
        assert module.num_outdated() > 0
        check(streamer, server)
        assert streamer.stats().step == 8


@pytest.mark.parametrize("train_by", [train, train_ahead])
def test_placements_of_a_module_made_for_res(server: ServerProcess, train_by: Callable[[Any, int], None]) -> None:
    """The stand-in reads cached rows as `attach` does."""
    run = f"res-cached-{train_by.__name__}"
    with headrace.res.install(
        server.address, run=run, model=run, publish="all", freshness_s=0, max_cost_percent=100
    ) as streamer:
        res = RESParams(table_names=["a", "b", "c"], table_offsets=[0, 0, 0])
        module = make(enable_raw_embedding_streaming=True, res_params=res)
        train_by(module, 8)
        streamer.flush()
        assert module.num_outdated() > 0
        check(streamer, server)
        assert streamer.stats().step == 8


def streamed(server: ServerProcess, name: str, **settings: Any) -> tuple[Any, RawEmbeddingStreamer]:
    module = make(table_names=["a", "b", "c"])
    streamer = RawEmbeddingStreamer(server.address, run=name, freshness_s=0, max_cost_percent=100, **settings)
    streamer.attach(nn.ModuleDict({name: module}), publish="all")
    return module, streamer


def check(streamer: RawEmbeddingStreamer, server: ServerProcess) -> None:
    comparison = compare_with_store(streamer.tables, server.address)
    assert comparison.is_equal, str(comparison)
    assert comparison.num_compared == sum(rows for rows, _ in SHAPES)


def test_the_store_has_what_lookups_see(server: ServerProcess) -> None:
    """Flushes, a comparison, an audit, and rows fetched or published again have cached rows' newest weights."""
    module, streamer = streamed(server, "cached")
    with streamer:
        check_after = [3, 4, 5]
        for seed in check_after:
            train(module, 4, seed)
            streamer.flush()
            check(streamer, server)
            assert module.num_outdated() > 0
        assert streamer.audit().is_equal
        present = present_weights(streamer.tables[0])
        assert not torch.equal(present, module.split_embedding_weights()[0])
        rows = torch.arange(SHAPES[0][0])
        assert torch.equal(streamer.fetch("cached.a", rows).weights, present)
        module.flush()
        check(streamer, server)
        saved = streamer.state_dict()
    with RawEmbeddingStreamer(server.address, run="cached") as again:
        again.attach(nn.ModuleDict({"cached": module}), publish="updated")
        again.load_state_dict(saved)
        train(module, 2, 9)
        again.flush()
        check(again, server)


def test_restored_rows_are_in_table_and_cache(server: ServerProcess) -> None:
    """A model whose rows are cached gets the store's, whatever it had, and keeps them when they are evicted."""
    trained, streamer = streamed(server, "restored")
    with streamer:
        train(trained, 6)
        streamer.flush()
    other = make(table_names=["a", "b", "c"])
    train(other, 6, seed=8)
    assert other.num_outdated() > 0
    headrace.restore(nn.ModuleDict({"restored": other}), address=server.address)
    wanted = [present_weights(table) for table in streamer.tables]
    other_tap, _ = mirrored(nn.ModuleDict({"restored": other}))
    assert all(map(torch.equal, wanted, [present_weights(table) for table in other_tap.tables]))
    other.flush()
    assert all(map(torch.equal, wanted, other.split_embedding_weights()))


def test_the_device_pipeline_leaves_cached_tables_to_the_host(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the table without a cache is drained on the device, even where the others' memory can be read there."""
    fake = FakeDevice(5, trains_at_once=True)
    monkeypatch.setattr(delivery, "Flusher", functools.partial(Flusher, runtime_of=lambda device: fake))
    module, streamer = streamed(server, "mixed", device_pipeline=True)
    with streamer:
        train(module, 6)
        streamer.flush()
        assert [isinstance(table.dirty, DeviceDirtyRows) for table in streamer.tables] == [False, True, False]
        assert "rows in FBGEMM's cache" in caplog.text
        check(streamer, server)


def test_a_cache_that_is_reset_sends_all_rows() -> None:
    """Rows that lose their cached updates are sent again, also if the next prefetch comes before the step's end."""
    module = make(features=[0, 1, 2])
    tap, mirror = mirrored(module)
    ids, offsets = torch.tensor([3, 4, 5]), torch.arange(4)
    for _ in range(2):
        module(ids, offsets).pow(2).mean().backward()
        assert tap.end_step()
    module.reset_cache_states()
    assert tap.end_step()
    assert [len(rows) for rows in mirror.taken[-1].values()] == [rows for rows, _ in SHAPES]
    module(ids, offsets).pow(2).mean().backward()
    assert tap.end_step()
    assert [len(rows) for rows in mirror.taken[-1].values()] == [1, 1, 1]
    module.reset_cache_states()
    module(ids, offsets).pow(2).mean().backward()
    assert tap.end_step()
    assert [len(rows) for rows in mirror.taken[-1].values()] == [rows for rows, _ in SHAPES]


def test_a_cache_that_rounds_is_refused_where_it_is_streamed() -> None:
    """Tables behind a cache of another precision are refused, unless `tables=` leaves them out."""
    module = make(table_names=["a", "b", "c"])
    module.lxu_cache_weights = module.lxu_cache_weights.half()
    with pytest.raises(
        UnsupportedModelError, match=r"a cache of torch\.float16 and rows of torch\.float32 rounds rows"
    ):
        mirrored(module)
    assert not module._forward_hooks
    tap, _ = mirrored(module, tables=["b"])
    assert [table.path for table in tap.tables] == ["b"]


class Stream:
    """Notes which stream waits for which."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


def test_prefetches_of_another_stream_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read and written after the prefetches queued before, and before those queued later."""
    module = make()
    tap, _ = mirrored(module)
    log: list[str] = []
    look_up = torch.ops.fbgemm.lxu_cache_lookup

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        log.append("look up")
        located: torch.Tensor = look_up(*args, **kwargs)
        return located

    monkeypatch.setattr(torch.ops.fbgemm, "lxu_cache_lookup", noted)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("training", log))
    module.prefetch_stream = Stream("prefetch", log)
    rows = torch.tensor([7, 3])
    tap.tables[0].write_weights(rows, tap.tables[0].weights_at(rows))
    tap.tables[1].weights_at(rows)  # has no cache
    assert log == ["training waits for prefetch", "look up", "prefetch waits for training"] * 2
