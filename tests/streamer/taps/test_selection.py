"""Which tables are streamed, and when: lists of names, pauses, and the modes of a training loop; nothing goes twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
import torch
from mirror import Mirror
from torch import nn

from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.supervisor.launch import ServerProcess
from headrace.schemas.errors import ConfigError, UnsupportedModelError
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.compare import compare_with_store
from headrace.streamer.taps.selection import Selection
from headrace.streamer.taps.tap import tap_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess.start(tmp_path_factory.mktemp("server"), shards=2) as process:
        yield process


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.users = nn.EmbeddingBag(60, 4, mode="sum", sparse=True)
        self.films = nn.EmbeddingBag(40, 4, mode="sum", sparse=True)
        self.dense = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dense(torch.cat([self.users(ids), self.films(ids % 40)], dim=1)).pow(2).sum()  # type: ignore[no-any-return]


def names_of(model: nn.Module, tables: list[str] | None) -> list[str]:
    tap = tap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: None, tables=tables)
    tap.close()
    return [table.spec.fqn for table in tap.tables]


@pytest.mark.parametrize(
    ("tables", "found"),
    [
        (None, ["users.weight", "films.weight"]),
        (["users.weight"], ["users.weight"]),
        (["*.weight"], ["users.weight", "films.weight"]),
        (["f*", "films.weight"], ["films.weight"]),
        (["[uv]sers.weigh?"], ["users.weight"]),
    ],
)
def test_names_and_patterns(tables: list[str] | None, found: list[str]) -> None:
    """A list of names or patterns streams the tables that have one of them, once each."""
    assert names_of(Towers(), tables) == found


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (["user.weight"], r"no table is named or matches 'user.weight'; the nearest are 'users.weight'"),
        (["users.weight", "x*"], r"matches 'x\*'; there are 'films.weight', 'users.weight'"),
        ([], "tables is empty"),
        ("users.weight", "is no list"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(tables: list[str], message: str) -> None:
    """A name that no table has is an error that lists the nearest, and leaves no hook."""
    model = Towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=message):
        tap_model(model, optimizer, lambda: None, tables=tables)
    assert not optimizer._optimizer_step_post_hooks


def test_tables_that_are_not_selected_may_be_of_any_kind() -> None:
    """What would be refused is no hindrance when it is not selected."""
    model = Towers()
    model.films = nn.EmbeddingBag(40, 4, mode="sum", max_norm=1.0)
    with pytest.raises(UnsupportedModelError, match="max_norm"):
        names_of(model, None)
    assert names_of(model, ["users*"]) == ["users.weight"]


def test_a_selection_remembers_what_it_was_asked() -> None:
    """What was matched and what was not is told apart by pattern, not by table."""
    selection = Selection(["a*", "b"])
    assert [selection.takes(name) for name in ("aa", "c", "ab")] == [True, False, True]
    assert selection.unmatched == ["b"]
    assert selection.names == ["aa", "c", "ab"]


@pytest.mark.torchrec
def test_some_tables_of_a_fused_module() -> None:
    """Of one table-batched module only the selected tables are streamed, and exactly."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    sizes = [(30, 4), (50, 8), (20, 4)]
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(*size, EmbeddingLocation.HOST, ComputeDevice.CPU) for size in sizes],
        table_names=["a", "b", "c"],
        learning_rate=0.1,
    )
    mirror = Mirror()
    tap = tap_model(nn.ModuleDict({"t": tbe}), [], mirror.on_step, tables=["t.b", "t.c"])
    mirror.watch(tap)
    assert [table.spec.fqn for table in tap.tables] == ["t.b", "t.c"]
    tbe(torch.tensor([7, 8, 9, 3]), torch.tensor([0, 2, 3, 4])).sum().backward()
    assert tap.end_step()
    assert mirror.taken == [{"t.b": [9], "t.c": [3]}]


def rows_written(server: ServerProcess) -> int:
    """Return how many rows the server has taken since it began, of all shards."""

    async def ask() -> int:
        async with await EmbeddingReader.connect(server.address) as reader:
            return sum(shard.num_rows_written for shard in await reader.status())

    return asyncio.run(ask())


def test_rows_that_change_in_a_pause_go_out_after_it(server: ServerProcess) -> None:
    """In a pause steps are counted and nothing is sent; then all that has changed goes out."""
    model = nn.ModuleDict({"paused": Towers()})
    core = model["paused"]
    optimizer = torch.optim.Adagrad([core.users.weight, core.films.weight], lr=0.1)

    def step(*ids: int) -> None:
        optimizer.zero_grad()
        core(torch.tensor([list(ids)])).backward()
        optimizer.step()

    with RawEmbeddingStreamer(server.address, run="paused") as streamer:
        streamer.attach(model, optimizer)
        step(1, 2)
        streamer.flush()
        before = rows_written(server)
        streamer.pause()
        assert streamer.is_paused
        for turn in range(5):
            step(2, 10 + turn)
        assert streamer.stats().step == 6
        assert streamer.stats().num_dirty_rows == 2 * 6
        assert rows_written(server) == before
        assert compare_with_store(streamer.tables, server.address, only_present=True).num_different == 2
        streamer.resume()
        step(3)
        streamer.flush()
        assert rows_written(server) == before + 2 * 7
        assert compare_with_store(streamer.tables, server.address, only_present=True).is_equal


class Loop:
    """A training loop over a plain table and a fused one, and the rows that it should have streamed."""

    def __init__(self, name: str) -> None:
        self.model = nn.ModuleDict({name: Towers()})
        self.core = self.model[name]
        self.optimizer = torch.optim.Adagrad([self.core.users.weight, self.core.films.weight], lr=0.1)
        self.num_rows = 0

    def backward(self, *ids: int) -> None:
        self.core(torch.tensor([list(ids)])).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def plain(loop: Loop) -> None:
    loop.backward(1, 1, 2)
    loop.step()
    loop.num_rows += 4


def evaluation(loop: Loop) -> None:
    loop.model.eval()
    loop.core(torch.tensor([[5, 6]]))
    loop.model.train()
    plain(loop)


def without_gradients(loop: Loop) -> None:
    with torch.no_grad():
        loop.core(torch.tensor([[7]]))
    with torch.inference_mode():
        loop.core(torch.tensor([[8]]))
    plain(loop)


def accumulation(loop: Loop) -> None:
    loop.backward(1, 2)
    loop.backward(2, 3)
    loop.step()
    loop.num_rows += 6


def scaler_that_skips(loop: Loop) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, float("inf")):
        scaler.scale(loop.core(torch.tensor([[1, 2]])) * factor).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
    loop.num_rows += 4


def compiled_dense_part(loop: Loop) -> None:
    loop.core.dense.compile(backend="eager")
    plain(loop)


def compiled_model(loop: Loop) -> None:
    compiled = torch.compile(loop.core, backend="eager")
    compiled(torch.tensor([[1, 1, 2]])).backward()
    loop.step()
    loop.num_rows += 4


def compiled_optimizer(loop: Loop) -> None:
    loop.backward(1, 1, 2)
    torch.compile(loop.optimizer.step, backend="eager")()
    loop.optimizer.zero_grad()
    loop.num_rows += 4


@pytest.mark.parametrize(
    "mode",
    [
        plain,
        evaluation,
        without_gradients,
        accumulation,
        scaler_that_skips,
        compiled_dense_part,
        compiled_model,
        compiled_optimizer,
    ],
)
def test_what_a_training_loop_does_streams_each_change_once(
    server: ServerProcess, mode: Callable[[Loop], None]
) -> None:
    """Each mode sends the rows that it has changed, once, and the store equals the tables."""
    loop = Loop(mode.__name__)
    with RawEmbeddingStreamer(server.address, run=mode.__name__) as streamer:
        streamer.attach(loop.model, loop.optimizer)
        before = rows_written(server)
        for _ in range(3):
            mode(loop)
            streamer.flush()
        assert rows_written(server) - before == loop.num_rows
        comparison = compare_with_store(streamer.tables, server.address, only_present=True)
    assert comparison.is_equal, str(comparison)
    assert comparison.num_compared > 0
