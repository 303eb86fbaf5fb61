"""Tables that are trained and not streamed: they go along, or a flush refuses and no audit says equal."""

from __future__ import annotations

import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import CommandLine
from ranks import run_ranks
from scripted_training import run_on
from store_comparison import compare_with_store
from text_scripts import Script, scripts
from torch import nn

from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer import RawEmbeddingStreamer

IS_NEW = "'b.weight' is not streamed, though all else is sent: it is trained since attach: call attach"


class Model(nn.Module):
    def __init__(self, *, frozen: str = "") -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(50, 8), nn.Embedding(50, 8)
        if frozen:
            self.get_submodule(frozen).requires_grad_(False)


def train(model: Model, optimizer: torch.optim.Optimizer, *names: str, num_steps: int = 3) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        losses = [model.get_submodule(name)(torch.randint(50, (8,))).pow(2).sum() for name in names]
        torch.stack(losses).sum().backward()
        optimizer.step()


@pytest.fixture
def streamer(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[RawEmbeddingStreamer]:
    streamer = RawEmbeddingStreamer(server.address, run="r", model=request.node.name.replace("[", "-").rstrip("]"))
    yield streamer
    streamer.close(flush=False)


def check_equal(streamer: RawEmbeddingStreamer, server: ServerProcess, names: list[str]) -> None:
    report = streamer.audit(only_present=False)
    assert report.is_equal, str(report)
    assert sorted(table.path for table in streamer.tables) == names
    assert compare_with_store(streamer.tables, server.address).is_equal


@scripts(__file__, "unstreamed")
@pytest.mark.filterwarnings("ignore:.*was frozen:RuntimeWarning")
def test_scripts(server: ServerProcess, script: Script, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is trained is streamed, or told, as the scripts say."""
    run_on(server.address, script, tmp_path, caplog)


def test_a_table_that_another_optimizer_trains_later(streamer: RawEmbeddingStreamer, server: ServerProcess) -> None:
    """A frozen table that an optimizer trains which was never attached is found by its writes."""
    model = Model(frozen="b")
    optimizer = torch.optim.SGD(model.a.parameters(), lr=0.1)
    streamer.attach(model, optimizer)
    model.b.requires_grad_(True)
    other = torch.optim.Adagrad(model.b.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, optimizer, "a")
        train(model, other, "b")
    with pytest.raises(UnsupportedModelError, match=IS_NEW):
        streamer.flush()
    streamer.attach(model, [optimizer, other])
    step = streamer.stats().step
    for _ in range(2):
        train(model, optimizer, "a", num_steps=1)
        train(model, other, "b", num_steps=1)
    assert streamer.stats().step == step + 2  # a step is over when both have stepped
    streamer.flush()
    check_equal(streamer, server, ["a.weight", "b.weight"])


def test_the_same_call_again_takes_in_what_is_new(streamer: RawEmbeddingStreamer, server: ServerProcess) -> None:
    """Names of tables that stream already, and dense tensors that are published, are no fault in its arguments."""
    model = Model(frozen="b")
    model.top = nn.Linear(8, 1)
    optimizer = torch.optim.Adagrad([*model.a.parameters(), *model.top.parameters()], lr=0.1)
    settings: dict[str, Any] = {
        "dense": True,
        "send_share": {"a.weight": 0.5},
        "states": {"a.*": False},
        "weights_dtype": {"a.weight": torch.bfloat16},
    }
    streamer.attach(model, optimizer, **settings)
    train(model, optimizer, "a")
    streamer.flush()
    model.b.requires_grad_(True)
    model.add_module("more", nn.Linear(8, 1))
    optimizer.add_param_group({"params": [*model.b.parameters(), *model.get_submodule("more").parameters()]})
    streamer.attach(model, optimizer, **settings)
    train(model, optimizer, "a", "b")
    streamer.flush()
    assert streamer.audit(only_present=False).is_equal
    assert sorted(table.path for table in streamer.tables) == ["a.weight", "b.weight"]
    dense = {each.rpartition(":")[2] for each in streamer._delivery.flusher.dense.names}
    assert dense == {"top.weight", "top.bias", "more.weight", "more.bias"}


class OwnTableBatchedEmbeddings(nn.Module):
    """Stands for the table-batched modules that are not known, such as those of a later FBGEMM."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(9, 4))


@pytest.mark.parametrize("tables", [None, ["!other.*"], ["a.*", "b.*"]])
def test_a_module_of_an_unknown_kind(server: ServerProcess, tables: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It is in audit, line, notebook's table, `stats`, metrics and status, unless it was left out by name."""
    model = Model()
    model.add_module("other", OwnTableBatchedEmbeddings())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    name = f"unknown-{len(tables or ())}"
    with RawEmbeddingStreamer(server.address, run=name, model=name, metrics_port=0) as streamer:
        streamer.attach(model, optimizer, tables=tables)
        is_told = tables is None
        report = streamer.audit()
        assert report.is_equal != is_told
        assert ("other is not streamed: it is of an unknown kind" in str(report)) == is_told
        assert ("1 trained and NOT STREAMED; not streamed: other" in repr(streamer)) == is_told
        assert ("<td>other</td><td colspan=3>not streamed: it is of" in streamer._repr_html_()) == is_told
        assert streamer.stats().num_unstreamed == is_told
        with urllib.request.urlopen(f"http://127.0.0.1:{streamer.metrics_port}/metrics", timeout=30) as answer:
            page = answer.read().decode()
        assert f'headrace_streamer_unstreamed_tables{{rank="0",run="{name}"}} {float(is_told)}' in page
        problems = CommandLine(capsys).json("status", "--server", server.address, code=None)["problems"]
        told = f"run {name}: of its tables and modules, 1 is trained and not streamed"
        assert (told in [problem["text"] for problem in problems]) == is_told


@pytest.mark.torchrec
def test_tables_of_an_unknown_kernel(server: ServerProcess) -> None:
    """Tables of a kernel that is not known, such as FUSED_TRITON, are in the audit, each by its name."""
    from sparse_model import one_rank, sharded, table_wise

    with one_rank():
        model = sharded("sgd", table_wise)
        (lookup,) = model.module.sparse.more._lookups
        (kernel,) = lookup._emb_modules
        lookup._emb_modules[0] = type("TritonBatchedFusedEmbeddingBag", (nn.Module,), {})()
        lookup._emb_modules[0]._emb_module, lookup._emb_modules[0]._config = nn.Identity(), kernel._config
        with RawEmbeddingStreamer(server.address, run="triton", model="triton") as streamer:
            streamer.attach(model)
            report = streamer.audit()
            assert not report.is_equal
            name = "sparse.more.embedding_bags.user.weight"
            assert "rows of its kernel cannot be read" in report.unstreamed[name]
        with RawEmbeddingStreamer(server.address, run="triton", model="triton") as streamer:
            streamer.attach(model, tables=[f"!{name}"])
            assert streamer.audit().is_equal


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Embedding(50, 8)
        self.rows = nn.Parameter(torch.randn(1_000, 8))


@pytest.mark.parametrize("tables", [None, ["!rows"]])
def test_a_bare_parameter_that_is_a_table(streamer: RawEmbeddingStreamer, tables: Any) -> None:
    """It is in the audit once it trains by rows, unless it was left out by name."""
    model = Bare()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    streamer.attach(model, optimizer, tables=tables)
    for _ in range(2):
        optimizer.zero_grad()
        (model.a(torch.tensor([1])).sum() + model.rows[torch.tensor([3, 500])].sum()).backward()
        optimizer.step()
    streamer.flush()  # a warning has said it, and no attach could take it in
    report = streamer.audit()
    assert report.is_equal == (tables is not None)
    assert [*report.unstreamed] == ([] if tables else ["rows"])


def test_dense_tensors_alone_may_be_new(streamer: RawEmbeddingStreamer) -> None:
    """An attach takes them in without a new table, and refuses once there is nothing new at all."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    streamer.attach(model, optimizer, dense=True)
    model.add_module("top", nn.Linear(8, 1))
    streamer.attach(model, optimizer, dense=True)
    train(model, optimizer, "a", num_steps=1)
    assert streamer.stats().step == 1
    streamer.flush()
    dense = {each.rpartition(":")[2] for each in streamer._delivery.flusher.dense.names}
    assert dense == {"top.weight", "top.bias"}
    for is_dense in (True, False):
        with pytest.raises(UnsupportedModelError, match=r"'a' is streamed already"):
            streamer.attach(model, optimizer, dense=is_dense)
    train(model, optimizer, "a", num_steps=1)
    assert streamer.stats().step == 2


@pytest.mark.torchrec
def test_a_new_module_whose_tables_are_on_one_rank(server: ServerProcess) -> None:
    """All ranks attach it, also those that have none of its tables."""
    from growing_training import grow_on_rank

    grown = ["first.embedding_bags.t.weight", "second.embedding_bags.t.weight"]
    for is_equal, refusal, names in run_ranks(grow_on_rank, 2, server.address):
        assert is_equal
        assert "is streamed already" in refusal
        assert names in (grown, [])
