"""Tables that are not streamed are named in the log; layers are not taken for tables."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mirror import Mirror
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch_tables import TwoKinds, hooks, train

from headrace.schemas.errors import ConfigError
from headrace.streamer.taps.left_out import _num_scattered_rows, bare_parameters, tell_frozen
from headrace.streamer.taps.tap import tap_model

IDS = torch.tensor([3, 70, 12, 3, 255])
LOGGER = "headrace.streamer.taps.left_out"


class OwnTable(nn.Module):
    """A table of torch's, and a parameter of one's own that a function uses."""

    def __init__(self, shape: tuple[int, ...], use: Callable[[nn.Parameter], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.user = nn.Embedding(40, 4)
        self.own = nn.Parameter(torch.randn(*shape))
        self.use = use

    def forward(self) -> torch.Tensor:
        return self.user(IDS % 40).pow(2).sum() + self.use(self.own).pow(2).sum()  # type: ignore[no-any-return]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings about what is left out; a thread of an earlier test may say other things."""
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


def said(
    caplog: pytest.LogCaptureFixture, model: OwnTable, num_steps: int = 3, tables: list[str] | None = None
) -> list[str]:
    """Train a model and return the warnings of it, having checked that its table arrives and that no hook stays."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, mirror = hooks(model, optimizer), Mirror()
    with caplog.at_level(logging.WARNING, LOGGER):
        tap = tap_model(model, optimizer, mirror.on_step, tables=tables)
        mirror.watch(tap)
        for _ in range(num_steps):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
    # Marked as exactly as without: the rows of the batch.
    assert [sorted(taken["user.weight"]) for taken in mirror.taken] == [sorted({*(IDS % 40).tolist()})] * num_steps
    tap.close()
    assert hooks(model, optimizer) == before
    return told(caplog)


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
def test_a_bare_parameter_that_is_a_table_is_told_once(
    caplog: pytest.LogCaptureFixture, use: Callable[[nn.Parameter], torch.Tensor]
) -> None:
    """However its rows are looked up, the first step that trains some of them names it and says what to do."""
    (message,) = said(caplog, OwnTable((300, 4), use))
    assert message.startswith("parameter 'own' is trained by rows, as an embedding table is (4 of 300 in this step)")
    assert "make it the weight of an nn.Embedding" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("shape", "use"),
    [
        ((300, 4), lambda own: F.linear(torch.ones(2, 4), own)),
        ((300, 4), lambda own: torch.ones(2, 300) @ own),
        ((300, 4), lambda own: own[:20]),
        ((300, 4), lambda own: own[7]),
        ((300, 4), lambda own: F.layer_norm(torch.randn(2, 300, 4), (300, 4), weight=own)),
        ((300, 4), lambda own: own[:0]),
        ((300, 4), lambda own: F.linear(torch.ones(1, 4), own).relu()),
        ((1, 300, 4), lambda own: own[:, IDS]),
        ((300,), lambda own: own[IDS]),
        ((20, 4), lambda own: own[torch.tensor([2, 9])]),
    ],
    ids=[
        "output_rows",
        "input_rows",
        "positions_cut",
        "one_row",
        "norm",
        "unused",
        "dead_units_of_one_example",
        "3d",
        "1d",
        "few_rows",
    ],
)
def test_a_layer_is_not_taken_for_a_table(
    caplog: pytest.LogCaptureFixture, shape: tuple[int, ...], use: Callable[[nn.Parameter], torch.Tensor]
) -> None:
    """A parameter that a layer uses, or of which a list is cut off, is not told."""
    assert said(caplog, OwnTable(shape, use)) == []


def test_the_least_that_is_a_table(caplog: pytest.LogCaptureFixture) -> None:
    """Sixty-four rows, of which every eighth has a gradient, are one; with one row more they may be a layer."""
    for num_ids, num_told in ((8, 1), (9, 0)):
        caplog.clear()
        ids = torch.arange(num_ids) * 7
        assert len(said(caplog, OwnTable((64, 4), lambda own, ids=ids: own[ids]))) == num_told  # type: ignore[misc]


@pytest.mark.parametrize("sparse", [False, True])
def test_a_gradient_of_nothing_is_no_judgement(caplog: pytest.LogCaptureFixture, sparse: bool) -> None:
    """A batch that uses no row of a table leaves it to be told by one that does."""
    calls: list[int] = []

    def use(own: nn.Parameter) -> torch.Tensor:
        calls.append(len(calls))
        return F.embedding(IDS if len(calls) > 1 else IDS[:0], own, sparse=sparse)

    (message,) = said(caplog, OwnTable((300, 4), use))
    assert message.startswith("parameter 'own' is trained by rows")


def test_what_no_optimizer_trains_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """A table that has gradients and is left as it is has nothing to stream."""
    model = OwnTable((300, 4), lambda own: own[IDS])
    optimizer, mirror = torch.optim.SGD(model.user.parameters(), lr=0.1), Mirror()
    with caplog.at_level(logging.WARNING, LOGGER):
        tap = tap_model(model, optimizer, mirror.on_step)
        model().backward()
        optimizer.step()
    tap.close()
    assert model.own.grad is not None and told(caplog) == []


def test_parameters_of_tables_and_of_no_shape_yet_are_passed_over() -> None:
    """Of modules of one's own the matrices are looked at, whatever else these hold; not those inside a table."""

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
    optimizers = [SimpleNamespace(param_groups=parameters)]
    for table_paths, names in (([], ["table.matrix", "tables.matrix"]), (["table"], ["tables.matrix"]), ([""], [])):
        assert [*bare_parameters(model, optimizers, table_paths)] == names  # type: ignore[arg-type]


def test_a_layer_of_torch_is_never_told(caplog: pytest.LogCaptureFixture) -> None:
    """A Linear has idle units when one example is all there is: it is known for what it is, also when derived from."""

    class Mine(nn.Linear):
        pass

    model = OwnTable((300, 4), lambda own: own[:1])
    model.layers = nn.ModuleList([nn.Linear(4, 300), Mine(4, 300)])
    mask = F.one_hot(torch.tensor([2, 99, 205]), 300).sum(dim=0)
    model.use = lambda own: sum(layer(own[:1]) * mask for layer in model.layers)  # type: ignore[union-attr, misc]
    assert said(caplog, model) == []


def test_parameters_in_containers_have_their_names(caplog: pytest.LogCaptureFixture) -> None:
    """A table in an `nn.ParameterDict` is told by its name in the `state_dict`, also when it is first used late."""
    model = OwnTable((300, 4), lambda own: own[:1])
    model.more = nn.ParameterDict({"item": torch.randn(300, 4)})
    calls: list[int] = []

    def use(own: nn.Parameter) -> torch.Tensor:
        calls.append(len(calls))
        return F.embedding(IDS, model.more["item"]) if len(calls) > 1 else own[:1]

    model.use = use
    (message,) = said(caplog, model)
    assert message.startswith("parameter 'more.item' is trained by rows")
    assert "more.item" in model.state_dict()


def test_a_list_of_tables_is_taken_at_its_word(caplog: pytest.LogCaptureFixture) -> None:
    """With `tables` nothing is told, and naming a bare parameter there is an error that says what to do."""
    assert said(caplog, OwnTable((300, 4), lambda own: own[IDS]), tables=["user.weight"]) == []
    model = OwnTable((300, 4), lambda own: own[IDS])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"tables: 'own' is a parameter that no embedding module holds: make it the"):
        tap_model(model, optimizer, lambda: None, tables=["user.weight", "own"])
    assert hooks(model, optimizer) == 0


@pytest.mark.parametrize("tables", [None, ["user.weight", "item.*"]])
def test_frozen_tables_are_named(caplog: pytest.LogCaptureFixture, tables: list[str] | None) -> None:
    """`attach` says in one line which tables are left out since they are frozen; those not asked for are not named."""
    model = TwoKinds(sparse=True)
    model.item.weight.requires_grad_(False)
    model.idle.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with caplog.at_level(logging.WARNING, LOGGER):
        tap = tap_model(model, optimizer, lambda: None, tables=tables)
        train(model, optimizer, range(2))
    (message,) = told(caplog)
    names = "item.weight, idle.weight" if tables is None else "item.weight"
    assert f"so the store gets no rows of them: {names}; put them there with `headrace backfill`" in message
    tap.close()


@pytest.mark.parametrize(("number", "end"), [(4, "t0, t1, t2, t3; put"), (6, "t0, t1, t2, t3 and 2 more; put")])
def test_of_many_tables_a_few_are_named(caplog: pytest.LogCaptureFixture, number: int, end: str) -> None:
    """One line stays one, and says how many it leaves out; without any there is none."""
    with caplog.at_level(logging.WARNING, LOGGER):
        tell_frozen([])
        tell_frozen([f"t{index}" for index in range(number)])
    (message,) = told(caplog)
    assert f"no rows of them: {end} them there" in message


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
@pytest.mark.filterwarnings("ignore:Sparse CS")
def test_a_gradient_of_another_layout_is_left_alone(layout: torch.layout) -> None:
    """Which rows it has cannot be told as of the others, and what is wrong with it is the optimizer's to say."""
    parameter = nn.Parameter(torch.randn(300, 4))
    gradient = F.one_hot(IDS, 300).float().T.contiguous().to_sparse(layout=layout)
    assert _num_scattered_rows(gradient, parameter) == 0


def test_of_a_dtensor_the_own_part_is_judged() -> None:
    """Its gradient is one too; where that lies otherwise than the parameter, which rows it has is not told."""
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
