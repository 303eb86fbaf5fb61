"""Which tensors of a model are dense, how they are named, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from dense_model import DTYPES, DenseModel, tensors_of, train_dense
from torch import nn

from headrace.schemas.errors import ConfigError, UnsupportedModelError
from headrace.schemas.tables import DType
from headrace.streamer.taps.dense_tensors import publishers

LAYERS = ["bottom.0.weight", "bottom.0.bias", "bottom.1.weight", "bottom.1.bias"]
STATISTICS = ["bottom.1.running_mean", "bottom.1.running_var", "bottom.1.num_batches_tracked"]


def paths(model: nn.Module, **settings: Any) -> list[str]:
    return [each.path for each in tensors_of(model, **settings).all]


def test_all_parameters_and_persistent_buffers_but_tables() -> None:
    """Each is found once under its first name in the state dict; tables, scratch buffers and empty tensors are not."""
    model = DenseModel()
    found = tensors_of(model, model_name="ctr")
    assert {each.path for each in found.all} == model.state_dict().keys() - {"user.weight", "tied.weight", "nothing"}
    assert len({each.path for each in found.all}) == len(found.all)
    assert {each.spec.fqn for each in found.all} == {f"ctr:{each.path}" for each in found.all}
    assert {each.spec.dtype for each in found.all} == set(DType)
    for each in found.all:
        assert each.spec.shape == tuple(model.state_dict()[each.path].shape)
        assert each.is_buffer == (each.path not in dict(model.named_parameters()))


def test_wrappers_are_no_part_of_names() -> None:
    """A compiled or data-parallel model has the names of the model in it."""
    inner = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    outer = nn.ModuleDict({"net": torch.compile(inner)})  # type: ignore[dict-item]
    assert paths(nn.DataParallel(outer)) == [f"net.{name}" for name in inner.state_dict()]
    assert paths(nn.Linear(2, 3)) == ["weight", "bias"]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["bottom.0.*", "bottom.1.weight", "bottom.1.bias"], LAYERS),
        (["bottom.1.r*", "bottom.1.num_batches_tracked"], STATISTICS),
        (["user.weight"], ["user.weight"]),
        (["user.weight", "to[op].*"], ["user.weight", "top.weight", "top.bias"]),
        (["nothing", "frozen"], ["frozen"]),
    ],
)
def test_names_and_patterns(names: list[str], found: list[str]) -> None:
    """A list selects tensors; a table that is not streamed by rows counts only under its very name."""
    assert paths(DenseModel(), names=names) == found


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["bottom.0.weigth"], "dense: no dense tensor .* 'bottom.0.weigth'; the nearest are 'bottom.0.weight'"),
        (["use*"], "no dense tensor is named or matches 'use"),
        (["scratch"], "no dense tensor is named or matches 'scratch'"),
        ([], "dense is empty"),
        ("top.*", "dense 'top.*' is not a list"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(names: Any, message: str) -> None:
    """A name that matches nothing is an error."""
    with pytest.raises(ConfigError, match=message):
        tensors_of(DenseModel(), names=names)


def test_streamed_tables_and_what_shares_their_weights_go_by_rows() -> None:
    """A streamed table is left out under every name, and cannot be named."""
    model = nn.ModuleDict({"table": nn.Embedding(5, 2), "out": nn.Linear(2, 5)})
    model["out"].weight = model["table"].weight  # type: ignore[assignment]
    assert paths(model, table_paths={"table.weight"}) == ["out.bias"]
    assert paths(model) == ["out.weight", "out.bias"]
    with pytest.raises(ConfigError, match=r"'table\.weight' is a table that is streamed by rows"):
        tensors_of(model, names=["table.weight"], table_paths={"table.weight"})


def test_nothing_inside_of_modules_that_hold_tables() -> None:
    """What TorchRec's collections and collision modules hold is left out, whatever its name."""
    torchrec = pytest.importorskip("torchrec")
    from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, MCHManagedCollisionModule

    config = torchrec.EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"])
    model = nn.ModuleDict(
        {
            "bags": torchrec.EmbeddingBagCollection(tables=[config]),
            "collisions": MCHManagedCollisionModule(
                zch_size=9,
                device=torch.device("cpu"),
                eviction_policy=DistanceLFU_EvictionPolicy(),
                eviction_interval=1,
            ),
            "over": nn.Linear(4, 1),
        }
    )
    assert paths(model) == ["over.weight", "over.bias"]


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (nn.Parameter(torch.zeros(2, dtype=torch.complex64)), "dense tensor 'w': element type torch.complex64"),
        (torch.zeros(2, dtype=torch.float8_e5m2), "dense tensor 'w': element type torch.float8_e5m2"),
        (nn.UninitializedParameter(), "dense tensor 'w' has no shape yet"),
        (torch.eye(3).to_sparse(), "dense tensor 'w' has the layout sparse_coo"),
    ],
)
def test_tensors_that_cannot_be_published(parameter: torch.Tensor, message: str) -> None:
    """Types without a number, tensors without a shape and sparse ones are refused in one line."""
    model = nn.Module()
    if isinstance(parameter, nn.Parameter):
        model.register_parameter("w", parameter)
    else:
        model.register_buffer("w", parameter)
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        tensors_of(model)


@pytest.mark.parametrize(
    ("make", "states", "scalars"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), [], []),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), ["momentum_buffer"], []),
        (lambda p: torch.optim.Adagrad(p, lr=0.1), ["sum"], ["step"]),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"], ["step"]),
    ],
)
def test_states_are_known_before_the_first_step(make: Any, states: list[str], scalars: list[str]) -> None:
    """States that an optimizer makes in its first step are zeros before it, and what it has made after it."""
    model = DenseModel()
    optimizer = make(model.parameters())
    if not states:
        dense = tensors_of(model, [optimizer], has_states=True)
        assert not any(each.spec.states for each in dense.all)
        return
    dense = tensors_of(model, [optimizer], has_states=True)
    has_states = {each.path for each in dense.all if each.spec.states}
    assert has_states == dict(model.named_parameters()).keys() - {"user.weight", "frozen"}
    top = next(each for each in dense.all if each.path == "top.weight")
    assert [state.name for state in top.spec.states] == states
    for state in dense.read(top, dense.live()).states:
        assert state.shape == top.spec.shape
        assert not state.any()
    train_dense(model, optimizer, range(2))
    values = dense.read(top, dense.live())
    for name, value in zip(states, values.states, strict=True):
        assert torch.equal(value, optimizer.state[model.top.weight][name])
    assert list(values.scalars) == scalars
    assert all(value.item() == 2 for value in values.scalars.values())


def test_states_that_cannot_be_published() -> None:
    """Unknown optimizers, states of another shape, two optimizers and none are refused in one line."""
    model = nn.Linear(3, 2)
    with pytest.raises(UnsupportedModelError, match=r"states that Adamax makes for 'weight' are not known: use SGD"):
        tensors_of(model, torch.optim.Adamax(model.parameters()), has_states=True)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.state[model.weight] = {"step": torch.zeros(()), "exp_avg": torch.zeros(3)}
    with pytest.raises(
        UnsupportedModelError, match=r"'exp_avg' of 'weight' has another shape than it \(strided\[3\]\)"
    ):
        tensors_of(model, optimizer, has_states=True)
    both = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters())]
    with pytest.raises(UnsupportedModelError, match=r"'weight' is updated by 2 optimizers \(SGD and Adam\)"):
        tensors_of(model, both, has_states=True)
    with pytest.raises(ConfigError, match="no given optimizer trains a dense parameter"):
        tensors_of(model, has_states=True)


def test_rowwise_states_are_refused() -> None:
    """A state with one value a row is no state of a dense tensor."""
    module = pytest.importorskip("torchrec.optim.rowwise_adagrad")
    model = nn.Linear(3, 2, bias=False)
    with pytest.raises(UnsupportedModelError, match=r"state 'sum' of 'weight' has another shape .*one value a row"):
        tensors_of(model, module.RowWiseAdagrad(model.parameters()), has_states=True)


def test_a_parameter_is_looked_up_by_its_name() -> None:
    """A parameter, or module, that replaced another of the same shape is read; one of another shape or type is not."""
    model = DenseModel()
    dense = tensors_of(model)
    top = next(each for each in dense.all if each.path == "top.weight")
    model.top.weight = nn.Parameter(torch.full((1, 16), 7.0))
    assert dense.read(top, dense.live()).weights.unique().tolist() == [7.0]
    model.top = nn.Linear(16, 1)
    assert torch.equal(dense.read(top, dense.live()).weights, model.top.weight)
    model.top = nn.Linear(16, 2)
    message = r"dense tensor 'top.weight' was float32\[1, 16\] when it was attached and is float32\[2, 16\] now"
    with pytest.raises(UnsupportedModelError, match=message):
        dense.read(top, dense.live())
    model.top = nn.Linear(16, 1, dtype=torch.float64)
    with pytest.raises(UnsupportedModelError, match=r"is float64\[1, 16\] now"):
        dense.read(top, dense.live())
    model.top = nn.Identity()  # type: ignore[assignment]
    with pytest.raises(UnsupportedModelError, match=r"'top\.weight' is gone from the model"):
        dense.read(top, dense.live())


def test_publishers_share_the_bytes() -> None:
    """Every rank finds the same publisher of each tensor; parameters are spread by bytes, and buffers are rank 0's."""
    dense = tensors_of(DenseModel(dtypes=DTYPES[:2]))
    ranks = publishers(dense.all, 3)
    loads = [sum(each.size_bytes for each, at in zip(dense.all, ranks, strict=True) if at == rank) for rank in range(3)]
    assert {rank for each, rank in zip(dense.all, ranks, strict=True) if each.is_buffer} == {0}
    assert max(loads) < 2 * min(loads) + 12_000
    assert publishers(dense.all, 1) == [0] * len(dense.all)
