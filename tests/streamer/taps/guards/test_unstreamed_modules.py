"""Modules that train embeddings and are not streamed: the log names them, and `tables=` that names one is refused."""

from __future__ import annotations

import ast
import logging
import re
from typing import Any

import pytest
import torch
from sparse_model import one_rank, sharded, table_wise
from torch import nn

from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.taps.attach import tap_model

pytestmark = pytest.mark.torchrec

ops = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
unary = pytest.importorskip("fbgemm_gpu.batched_unary_embeddings_ops")
fused_modules = pytest.importorskip("torchrec.modules.fused_embedding_modules")
torchrec = pytest.importorskip("torchrec")
LOGGER = "headrace.streamer.taps.guards.unstreamed_modules"


def table_batched() -> Any:
    places = (ops.EmbeddingLocation.HOST, ops.ComputeDevice.CPU)
    return ops.SplitTableBatchedEmbeddingBagsCodegen([(9, 4, *places)], table_names=["t"])


def ssd() -> nn.Module:
    """Return what FBGEMM's wheels for CPUs cannot make: a module of its class, without its store."""
    from fbgemm_gpu.tbe.ssd.training import SSDTableBatchedEmbeddingBags

    module: nn.Module = SSDTableBatchedEmbeddingBags.__new__(SSDTableBatchedEmbeddingBags)
    nn.Module.__init__(module)
    module.placeholder_autograd_tensor = nn.Parameter(torch.zeros(0))
    module.table_names = ["users", "items"]  # type: ignore[assignment]
    return module


def fused_collection() -> Any:
    config = torchrec.EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"])
    device = torch.device("cpu")
    return fused_modules.FusedEmbeddingBagCollection([config], torch.optim.SGD, {"lr": 0.1}, device=device)


class OwnTableBatchedEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(9, 4))


class OwnSharded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._lookups: list[nn.Module] = []
        self.rows = nn.Parameter(torch.zeros(9, 4))


# By class: how to make a module, the name of a table in it, and a part of the reason.
KINDS: dict[str, tuple[Any, str, str]] = {
    "SSDTableBatchedEmbeddingBags": (ssd, "items", "its rows are in RocksDB"),
    "DenseTableBatchedEmbeddingBagsCodegen": (
        lambda: ops.DenseTableBatchedEmbeddingBagsCodegen([(9, 4)], use_cpu=True),
        "weights",
        "one flat parameter",
    ),
    "BatchedUnaryEmbeddingBag": (lambda: unary.BatchedUnaryEmbeddingBag(2, [9]), "weight", "not a table of rows"),
    "FusedEmbeddingBagCollection": (fused_collection, "embedding_bags.t.weight", "where they cannot be found"),
    "OwnTableBatchedEmbeddings": (OwnTableBatchedEmbeddings, "rows", "of an unknown kind"),
    "OwnSharded": (OwnSharded, "rows", "a sharded module of an unknown kind"),
}


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


@pytest.mark.parametrize("kind", KINDS)
def test_is_named_in_the_log_or_refused_by_its_name(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """One line says which modules are left out, and why; `tables=` may leave them out, and not take them."""
    make, name, reason = KINDS[kind]
    model = nn.ModuleDict({"first": make(), "second": make(), "t": table_batched()})
    tap = tap_model(model, [], lambda: None)
    assert [table.spec.fqn for table in tap.tables] == ["t.t"]
    tap.close()
    (line,) = told(caplog)
    assert line.startswith(f"first, second ({kind}) trains embeddings and is not streamed: ")
    assert reason in line
    assert "\n" not in line
    caplog.clear()
    tap_model(model, [], lambda: None, tables=["t.*"]).close()
    assert told(caplog) == []
    for tables in (["t.t", "first"], [f"second.{name}"], [f"*.{name.rpartition('.')[2]}", "first.*"], ["first.no"]):
        with pytest.raises(UnsupportedModelError, match=rf"'(first|second)' \({kind}\) cannot be streamed: .*{reason}"):
            tap_model(model, [], lambda: None, tables=tables)
    advised: list[str] = []
    for tables in (["t.t", "first.*"], ["t.t", "second.*"]):
        with pytest.raises(UnsupportedModelError) as caught:
            tap_model(model, [], lambda: None, tables=tables)
        (advice,) = re.findall(r"tables=(\[.*?\])", str(caught.value))
        advised += ast.literal_eval(advice)
    for tables in (advised, ["*", *advised]):
        tap_model(model, [], lambda: None, tables=tables).close()
    with pytest.raises(UnsupportedModelError, match="no embedding table that is trained"):
        tap_model(nn.ModuleDict({"first": make()}), [], lambda: None)


def test_what_trains_nothing_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    """Frozen tables and those for inference are no loss, nor is what `dense=True` publishes."""
    frozen = ops.DenseTableBatchedEmbeddingBagsCodegen([(9, 4)], use_cpu=True).requires_grad_(False)
    for_inference = type("IntNBitTableBatchedEmbeddingBagsCodegen", (OwnTableBatchedEmbeddings,), {})()
    model = nn.ModuleDict({"frozen": frozen, "inference": for_inference, "t": table_batched()})
    with caplog.at_level(logging.INFO, LOGGER):
        tap_model(model, [], lambda: None).close()
        dense = nn.ModuleDict({"dense": OwnTableBatchedEmbeddings(), "t": table_batched()})
        tap_model(dense, [], lambda: None, has_dense=True).close()
        tap_model(dense, [], lambda: None, is_streamed=False).close()
    assert told(caplog) == []
    tap_model(nn.ModuleDict({"ssd": ssd(), "t": table_batched()}), [], lambda: None, has_dense=True).close()
    assert len(told(caplog)) == 1


def test_tables_of_an_unknown_kernel(caplog: pytest.LogCaptureFixture) -> None:
    """The log names tables of a key-value kernel in a sharded module, whose others are streamed."""
    with one_rank():
        model = sharded("sgd", table_wise)
        module = model.module.sparse.more
        (lookup,) = module._lookups
        (kernel,) = lookup._emb_modules
        lookup._emb_modules[0] = type("KeyValueEmbeddingBag", (nn.Module,), {})()
        lookup._emb_modules[0]._emb_module, lookup._emb_modules[0]._config = nn.Identity(), kernel._config
        tap = tap_model(model, [], lambda: None)
        name = "sparse.more.embedding_bags.user.weight"
        assert name not in {table.spec.fqn for table in tap.tables}
        assert len(tap.tables) == 3
        tap.close()
        (line,) = told(caplog)
        assert line.startswith(f"{name} (KeyValueEmbeddingBag) trains embeddings and is not streamed: ")
        with pytest.raises(UnsupportedModelError, match=r"'sparse\.more.*use the kernel FUSED or DENSE"):
            tap_model(model, [], lambda: None, tables=["*.user.weight"])
        tap_model(model, [], lambda: None, tables=["*.item.weight"]).close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("GenericITEPModule", "gives them to other ids"),
        ("ManagedCollisionEmbeddingCollection", "zero-collision hashing"),
    ],
)
def test_tables_that_are_not_selected_may_be_spoiled(name: str, message: str) -> None:
    """A module that spoils its tables is refused if one of them is selected, before or after it in the model."""
    spoiler = type(name, (nn.Module,), {})()
    spoiler.inner = nn.EmbeddingBag(3, 2)
    spoiled = nn.ModuleDict({"before": nn.Embedding(3, 2), "spoiler": spoiler})
    model = nn.ModuleDict({"spoiled": spoiled, "free": nn.Embedding(5, 2)})
    optimizer = torch.optim.SGD(model.parameters())
    tap_model(model, optimizer, lambda: None, tables=["free.weight"]).close()
    is_beside = name == "GenericITEPModule"
    for tables in ([f"spoiled.{'before' if is_beside else 'spoiler.inner'}.weight"], ["*.weight"], None):
        with pytest.raises(UnsupportedModelError, match=message):
            tap_model(model, optimizer, lambda: None, tables=tables)


def test_a_sharded_module_that_another_streams() -> None:
    """Its tables are no reason to refuse others of the model."""
    with one_rank():
        model = sharded("sgd", table_wise)
        of_bags = tap_model(model, [], lambda: None, tables=["*.bags.*"])
        of_others = tap_model(model, [], lambda: None, tables=["*.sequence.*"])
        of_others.close()
        of_bags.close()
