"""The log names embedding tables of a model that are not streamed, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mirror import mirrored
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch_tables import TwoKinds, hooks, train

from headrace.schemas.errors import ConfigError
from headrace.streamer.taps.attach import tap_model
from headrace.streamer.taps.guards.untapped_tables import _num_scattered_rows, bare_parameters, warn_frozen

IDS = torch.tensor([3, 70, 12, 3, 255])
LOGGER = "headrace.streamer.taps.guards.untapped_tables"

Use = Callable[[nn.Parameter], torch.Tensor]


class OwnTable(nn.Module):
    """A table of torch, and a bare parameter that a function uses."""

    def __init__(self, shape: tuple[int, ...], use: Use) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.user = nn.Embedding(40, 4)
        self.own = nn.Parameter(torch.randn(*shape))
        self.use = use

    def forward(self) -> torch.Tensor:
        return self.user(IDS % 40).pow(2).sum() + self.use(self.own).pow(2).sum()  # type: ignore[no-any-return]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return this module's warnings; threads of earlier tests may log others."""
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


def warnings_of(caplog: pytest.LogCaptureFixture, model: OwnTable, tables: list[str] | None = None) -> list[str]:
    """Train a model and return its warnings; check that its table is streamed exactly and that no hook stays."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    num_hooks = hooks(model, optimizer)
    with caplog.at_level(logging.WARNING, LOGGER):
        tap, mirror = mirrored(model, optimizer, tables=tables)
        for _ in range(3):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
    assert [sorted(taken["user.weight"]) for taken in mirror.taken] == [sorted({*(IDS % 40).tolist()})] * 3
    tap.close()
    assert hooks(model, optimizer) == num_hooks
    return warnings_in(caplog)


@pytest.mark.parametrize(
    "use",
    [
        lambda own: F.embedding(IDS, own),
        lambda own: F.embedding(IDS, own, sparse=True),
        lambda own: F.embedding_bag(IDS.view(1, -1), own, mode="sum"),
        lambda own: own[IDS],
        lambda own: own.index_select(0, IDS),
        lambda own: F.one_hot(IDS, 300).float() @ own,
    ],
    ids=["embedding", "sparse", "embedding_bag", "index", "index_select", "one_hot"],
)
def test_a_bare_parameter_that_is_a_table_is_told_once(caplog: pytest.LogCaptureFixture, use: Use) -> None:
    """The first step that trains some rows of a bare parameter logs its name and what to do, once."""
    (message,) = warnings_of(caplog, OwnTable((300, 4), use))
    assert message.startswith("parameter 'own' trains by rows, like an embedding table (4 of 300 in this step)")
    assert "make it the weight of an nn.Embedding" in message
    assert "\n" not in message


LAYERS: dict[str, tuple[tuple[int, ...], Use]] = {
    "output rows": ((300, 4), lambda own: F.linear(torch.ones(2, 4), own)),
    "input rows": ((300, 4), lambda own: torch.ones(2, 300) @ own),
    "first positions": ((300, 4), lambda own: own[:20]),
    "one row": ((300, 4), lambda own: own[7]),
    "norm": ((300, 4), lambda own: F.layer_norm(torch.randn(2, 300, 4), (300, 4), weight=own)),
    "unused": ((300, 4), lambda own: own[:0]),
    "dead units of one example": ((300, 4), lambda own: F.linear(torch.ones(1, 4), own).relu()),
    "3d": ((1, 300, 4), lambda own: own[:, IDS]),
    "1d": ((300,), lambda own: own[IDS]),
    "few rows": ((20, 4), lambda own: own[torch.tensor([2, 9])]),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_is_not_taken_for_a_table(caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """Parameters that a layer uses, or the first of a list of positions, are not named."""
    assert warnings_of(caplog, OwnTable(*LAYERS[kind])) == []


@pytest.mark.parametrize(("num_ids", "num_warnings"), [(8, 1), (9, 0)])
def test_the_least_that_is_a_table(caplog: pytest.LogCaptureFixture, num_ids: int, num_warnings: int) -> None:
    """64 rows, of which every eighth has a gradient, are a table; with one more row they may be a layer."""
    ids = torch.arange(num_ids) * 7
    assert len(warnings_of(caplog, OwnTable((64, 4), lambda own: own[ids]))) == num_warnings


@pytest.mark.parametrize("sparse", [False, True])
def test_an_empty_gradient_decides_nothing(caplog: pytest.LogCaptureFixture, sparse: bool) -> None:
    """A batch that uses no row of a table leaves the decision to the next one."""
    calls: list[int] = []

    def use(own: nn.Parameter) -> torch.Tensor:
        calls.append(len(calls))
        return F.embedding(IDS if len(calls) > 1 else IDS[:0], own, sparse=sparse)

    (message,) = warnings_of(caplog, OwnTable((300, 4), use))
    assert message.startswith("parameter 'own' trains by rows")


def test_untrained_parameters_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    """A parameter that has gradients, but no optimizer, has nothing to stream."""
    model = OwnTable((300, 4), lambda own: own[IDS])
    optimizer = torch.optim.SGD(model.user.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, LOGGER):
        tap = tap_model(model, optimizer, lambda: None)
        model().backward()
        optimizer.step()
    tap.close()
    assert model.own.grad is not None and warnings_in(caplog) == []


def test_bare_parameters() -> None:
    """Matrices of user modules are found; those inside tables, frozen ones and those without a shape are not."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(9, 4))
            self.frozen = nn.Parameter(torch.randn(9, 4), requires_grad=False)
            self.late = nn.UninitializedParameter()
            self.register_parameter("none", None)

    model = nn.Module()
    model.table, model.tables = Own(), Own()
    parameters = [{"params": [*module.parameters()]} for module in (model.table, model.tables)]
    optimizers: Any = [SimpleNamespace(param_groups=parameters)]
    for table_paths, names in (([], ["table.matrix", "tables.matrix"]), (["table"], ["tables.matrix"]), ([""], [])):
        assert [*bare_parameters(model, optimizers, table_paths)] == names


def test_a_layer_of_torch_is_never_told(caplog: pytest.LogCaptureFixture) -> None:
    """Layers of torch, and classes derived from them, are not named, although one example leaves units idle."""

    class Mine(nn.Linear):
        pass

    model = OwnTable((300, 4), lambda own: own[:1])
    model.layers = nn.ModuleList([nn.Linear(4, 300), Mine(4, 300)])
    mask = F.one_hot(torch.tensor([2, 99, 205]), 300).sum(dim=0)
    model.use = lambda own: sum(layer(own[:1]) * mask for layer in model.layers)  # type: ignore[union-attr, misc]
    assert warnings_of(caplog, model) == []


def test_parameters_in_containers_have_their_names(caplog: pytest.LogCaptureFixture) -> None:
    """A table in an `nn.ParameterDict` has its name in the `state_dict`, also if it is first used late."""
    model = OwnTable((300, 4), lambda own: own[:1])
    model.more = nn.ParameterDict({"item": torch.randn(300, 4)})
    calls: list[int] = []

    def use(own: nn.Parameter) -> torch.Tensor:
        calls.append(len(calls))
        return F.embedding(IDS, model.more["item"]) if len(calls) > 1 else own[:1]

    model.use = use
    (message,) = warnings_of(caplog, model)
    assert message.startswith("parameter 'more.item' trains by rows")


def test_a_list_of_tables_is_taken_at_its_word(caplog: pytest.LogCaptureFixture) -> None:
    """With `tables` nothing is logged of what it leaves out; wanting a bare parameter is an error with a way on."""
    model = OwnTable((300, 4), lambda own: own[IDS])
    assert warnings_of(caplog, model, tables=["user.weight"]) == []
    assert warnings_of(caplog, model, tables=["!own"]) == []
    assert warnings_of(caplog, model, tables=["!o*"]) == []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"tables: 'own' is a parameter outside of embedding modules: make it the"):
        tap_model(model, optimizer, lambda: None, tables=["user.weight", "own"])
    assert hooks(model, optimizer) == 0


@pytest.mark.parametrize("tables", [None, ["user.weight", "item.*"]])
def test_frozen_tables_are_named(caplog: pytest.LogCaptureFixture, tables: list[str] | None) -> None:
    """`attach` logs the selected tables that are frozen, in one line."""
    model = TwoKinds(sparse=True)
    model.item.weight.requires_grad_(False)
    model.idle.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with caplog.at_level(logging.WARNING, LOGGER):
        tap = tap_model(model, optimizer, lambda: None, tables=tables)
        train(model, optimizer, range(2))
    (message,) = warnings_in(caplog)
    names = "item.weight, idle.weight" if tables is None else "item.weight"
    assert f"so the store gets none of their rows: {names}; write them with `headrace backfill`" in message
    tap.close()


@pytest.mark.parametrize(("number", "end"), [(4, "t0, t1, t2, t3; write"), (6, "t0, t1, t2, t3 and 2 more; write")])
def test_of_many_tables_a_few_are_named(caplog: pytest.LogCaptureFixture, number: int, end: str) -> None:
    """The line names a few of many frozen tables and counts the rest; without frozen tables there is no line."""
    with caplog.at_level(logging.WARNING, LOGGER):
        warn_frozen([])
        warn_frozen([f"t{index}" for index in range(number)])
    (message,) = warnings_in(caplog)
    assert f"none of their rows: {end} them with" in message


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
@pytest.mark.filterwarnings("ignore:Sparse CS")
def test_other_layouts_are_ignored(layout: torch.layout) -> None:
    """A gradient in another sparse layout is not classified; it is the optimizer's to refuse."""
    gradient = F.one_hot(IDS, 300).float().T.contiguous().to_sparse(layout=layout)
    assert _num_scattered_rows(gradient, nn.Parameter(torch.randn(300, 4))) == 0


def test_the_local_part_of_a_dtensor_is_classified() -> None:
    """Of a DTensor the local gradient decides, unless gradient and parameter are placed differently."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        gradient = torch.zeros(300, 4)
        gradient[IDS] = 1.0
        parameter = nn.Parameter(distribute_tensor(torch.randn(300, 4), mesh, [Shard(0)]))
        assert _num_scattered_rows(distribute_tensor(gradient, mesh, [Shard(0)]), parameter) == 4
        assert _num_scattered_rows(distribute_tensor(gradient, mesh, [Replicate()]), parameter) == 0
        assert _num_scattered_rows(distribute_tensor(gradient, mesh, [Shard(0)]), nn.Parameter(gradient)) == 0
    finally:
        dist.destroy_process_group()
