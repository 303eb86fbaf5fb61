"""A model restored from a server or a snapshot trains on as the one that was streamed, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch_tables import SIZES, Make, TwoKinds, assert_same_states, batch, hooks, row_wise_adagrad, train

from headrace import BlockingReader, RawEmbeddingStreamer, restore
from headrace.cli import main
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError, SpecMismatchError, UnavailableError, UnsupportedModelError

BEFORE, AFTER = range(5), range(5, 11)
NUM_ROWS = sum(rows for rows, _ in SIZES.values())

# By name: the optimizer, whether gradients are sparse, and its settings.
OPTIMIZERS: dict[str, tuple[Make, bool, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, True, {}),
    "momentum": (torch.optim.SGD, False, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "adagrad": (torch.optim.Adagrad, True, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    "adagrad-fused": (torch.optim.Adagrad, False, {"fused": True}),
    "adam": (torch.optim.Adam, False, {}),
    "adam-fused": (torch.optim.Adam, False, {"fused": True, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, False, {}),
    "sparse-adam": (torch.optim.SparseAdam, True, {}),
    "row-wise-adagrad": (row_wise_adagrad, False, {"eps": 1e-6, "lr_decay": 0.1}),
}


class Trainer:
    """A model and its optimizer, as a program builds them when it starts."""

    def __init__(self, kind: str = "adam", *, dtype: torch.dtype = torch.float32, tables: nn.Module | None = None):
        make, is_sparse, settings = OPTIMIZERS[kind]
        self.model = TwoKinds(sparse=is_sparse, dtype=dtype) if tables is None else tables
        self.optimizer = make(self.model.parameters(), **{"lr": 0.1, **settings})

    def train(self, steps: Iterable[int]) -> list[float]:
        """Train, and return the loss of each step."""
        losses = []
        for step in steps:
            self.optimizer.zero_grad()
            loss = self.model(batch(step))
            loss.backward()
            self.optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    def stream(self, address: str, model: str, steps: range = BEFORE, **settings: Any) -> None:
        """Train and stream, flush and end."""
        with RawEmbeddingStreamer(address, run=model, model=model) as streamer:
            streamer.attach(self.model, self.optimizer, **{"publish": "updated", **settings})
            train(self.model, self.optimizer, steps)


def assert_equal(restored: Trainer, expected: Trainer) -> None:
    """Compare weights and the optimizer's whole state: names, types and values."""
    for (name, ours), theirs in zip(restored.model.named_parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert restored.optimizer.state_dict()["param_groups"] == expected.optimizer.state_dict()["param_groups"]
    assert_same_states(restored.optimizer, expected.optimizer)


@pytest.fixture
def adam(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Trainer]:
    """Return a trainer that has been streamed as the model of the test's name, and not trained since."""
    trainer = Trainer()
    trainer.stream(server.address, request.node.name)
    yield trainer


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_as_if_it_had_never_stopped(server: ServerProcess, kind: str) -> None:
    """A new process's model gets weights, states in the optimizer's own form, and equal losses."""
    endless, restored = Trainer(kind), Trainer(kind)
    endless.stream(server.address, kind)
    report = restore(restored.model, restored.optimizer, server.address, model_name=kind)
    assert_equal(restored, endless)
    assert restored.train(AFTER) == endless.train(AFTER)
    assert_equal(restored, endless)
    assert (report.step, report.num_restored + report.num_kept) == (len(BEFORE), NUM_ROWS)


@pytest.mark.parametrize("kind", ["adam", "adagrad", "sparse-adam"])
def test_a_model_that_has_trained_on_other_data_is_set_back(server: ServerProcess, kind: str) -> None:
    """States and scalars that exist already are overwritten."""
    name = f"used-{kind}"
    endless, restored = Trainer(kind), Trainer(kind)
    endless.stream(server.address, name, publish="all")
    restored.train(range(20, 23))
    restore(restored.model, restored.optimizer, server.address, model_name=name)
    assert restored.train(AFTER) == endless.train(AFTER)
    assert torch.equal(restored.model.tag.weight, endless.model.tag.weight)


def test_a_plan_changes_nothing_and_says_what_is_read(
    server: ServerProcess, adam: Trainer, request: pytest.FixtureRequest
) -> None:
    """It names each table's rows and bytes, with and without states."""
    restored, untouched, name = Trainer(), Trainer(), request.node.name
    report = restore(restored.model, restored.optimizer, server.address, model_name=name, plan=True)
    assert_equal(restored, untouched)
    plan = report.plan
    assert plan is not None and not report.tables
    assert {table.name: sum(r.num_rows for reads in table.reads for r in reads) for table in plan.tables} == {
        f"{name}:{path}.weight": rows for path, (rows, _) in SIZES.items()
    }
    assert plan.seconds > 0
    assert all(f"{table.name}: " in str(report) for table in plan.tables)
    weights = restore(restored.model, restored.optimizer, server.address, model_name=name, states=False, plan=True).plan
    assert weights is not None
    assert 0 < sum(weights.bytes_read) < sum(plan.bytes_read)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_tables_of_other_types(server: ServerProcess, dtype: torch.dtype) -> None:
    """Each element type comes back bit for bit."""
    name = str(dtype)
    endless, restored = Trainer(dtype=dtype), Trainer(dtype=dtype)
    endless.stream(server.address, name)
    restore(restored.model, restored.optimizer, server.address, model_name=name)
    assert_equal(restored, endless)
    assert restored.train(AFTER) == endless.train(AFTER)


def test_rows_that_the_store_lacks_keep_the_models_values(server: ServerProcess) -> None:
    """Rows that were never sent, or deleted since, are counted and left as they are."""
    trained = Trainer("adagrad")
    with RawEmbeddingStreamer(server.address, run="lacks", model="lacks") as streamer:
        streamer.attach(trained.model, trained.optimizer, publish="updated")
        trained.train(BEFORE)
        streamer.flush()
        sent = sorted({row for step in BEFORE for row in batch(step)["user"].tolist()})
        streamer.evict("user.weight", sent[:2])
        streamer.flush()
    restored = Trainer("adagrad")
    with torch.no_grad():
        for parameter in restored.model.parameters():
            parameter.fill_(7)
    report = restore(restored.model, restored.optimizer, server.address, model_name="lacks")
    by_name = {table.name: table for table in report.tables}
    user, idle = by_name["lacks:user.weight"], by_name["lacks:idle.weight"]
    assert (user.num_restored, user.num_kept) == (len(sent) - 2, SIZES["user"][0] - len(sent) + 2)
    assert (idle.num_restored, idle.num_kept, idle.step) == (0, SIZES["idle"][0], 0)
    is_kept = torch.ones(SIZES["user"][0], dtype=torch.bool)
    is_kept[sent[2:]] = False
    weights, states = restored.model.user.weight, restored.optimizer.state[restored.model.user.weight]
    assert torch.equal(weights[~is_kept], trained.model.user.weight[~is_kept])
    assert (weights[is_kept] == 7).all() and (states["sum"][is_kept] == 0.5).all()
    assert f"lacks:user.weight: {len(sent) - 2} rows restored, {user.num_kept} kept, optimizer's step 5" in str(report)


def test_it_streams_nothing_and_attach_sends_only_what_changes_then(
    server: ServerProcess, adam: Trainer, request: pytest.FixtureRequest
) -> None:
    """No hook is left, and a run that goes on counts steps on and sends no row that did not change."""
    restored = Trainer()
    before = hooks(restored.model, restored.optimizer)
    report = restore(restored.model, restored.optimizer, server.address, model_name=request.node.name)
    assert hooks(restored.model, restored.optimizer) == before
    with RawEmbeddingStreamer(server.address, run=request.node.name, model=request.node.name) as streamer:
        streamer.attach(restored.model, restored.optimizer, publish="updated")
        streamer.step(report.step)
        streamer.flush()
        assert streamer.stats().num_rows_sent == 0
        restored.train(AFTER)
        assert streamer.audit().is_equal
        assert streamer.stats().step == len(BEFORE) + len(AFTER)
        with pytest.raises(UnsupportedModelError, match="is streamed already"):
            restore(restored.model, restored.optimizer, server.address, model_name=request.node.name)


def test_from_a_snapshot(tmp_path: Path) -> None:
    """A snapshot brings back one step exactly; of several, that of the step is taken, or the newest."""
    trained, at_cut = Trainer(), Trainer()
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        trained.stream(server.address, "a")
        assert main(["snapshot", "create", "--server", server.address, "--name", "one"]) == 0
        train(at_cut.model, at_cut.optimizer, BEFORE)
        trained.stream(server.address, "a", AFTER)
        assert main(["snapshot", "create", "--server", server.address, "--name", "two"]) == 0
    for folder in (tmp_path / "data", tmp_path / "data" / "snapshots"):
        for step, expected in ((len(BEFORE), at_cut), ("newest", trained)):
            restored = Trainer()
            restore(restored.model, restored.optimizer, snapshot=folder, step=step)
            assert_equal(restored, expected)
        with pytest.raises(ConfigError, match=r"no snapshot is at step 3; there are two at step 6, one at step 5"):
            restore(restored.model, restored.optimizer, snapshot=folder, step=3)
    one, restored, other = tmp_path / "data" / "snapshots" / "one", Trainer(), Trainer("momentum")
    report = restore(restored.model, restored.optimizer, snapshot=one)
    assert_equal(restored, at_cut)
    assert restored.train(AFTER) == at_cut.train(AFTER)
    assert (report.epoch, report.step) == (1, len(BEFORE))
    with pytest.raises(ConfigError, match=r"the snapshot is at step 5, not at step 6"):
        restore(restored.model, restored.optimizer, snapshot=one, step=6)
    with pytest.raises(SpecMismatchError, match=r"does not fit the snapshot .*one, and nothing was changed"):
        restore(other.model, other.optimizer, snapshot=one)
    with pytest.raises(ConfigError, match="no snapshot: there is no"):
        restore(other.model, other.optimizer, snapshot=tmp_path)


def test_a_step_that_the_server_is_at_or_not(tmp_path: Path) -> None:
    """Exactly at the step it restores; elsewhere, or in mid-step, one error says where it is and what has the step."""
    trained, restored = Trainer(), Trainer()
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        trained.stream(server.address, "a")
        other = Trainer()
        other.stream(server.address, "b", range(30, 37))
        report = restore(restored.model, restored.optimizer, server.address, model_name="a", step=len(BEFORE))
        assert report.step == len(BEFORE)
        assert_equal(restored, trained)
        with pytest.raises(ConfigError, match=r"not exactly at step 7 of model 'a'.* is at step 5 there.* no snap"):
            restore(restored.model, restored.optimizer, server.address, model_name="a", step=7)
        assert main(["snapshot", "create", "--server", server.address, "--run", "a", "--name", "one"]) == 0
        with RawEmbeddingStreamer(server.address, run="a", model="a") as streamer:
            streamer.attach(trained.model, trained.optimizer, publish="updated")
            with pytest.raises(ConfigError, match=r"at no step exactly there.* snapshot, 'one', is at step 5"):
                restore(restored.model, restored.optimizer, server.address, model_name="a", step=len(BEFORE))
        with pytest.raises(ConfigError, match=r"the snapshot .*one is not exactly at step 5 of model 'b'"):
            folder = tmp_path / "data" / "snapshots" / "one"
            restore(restored.model, restored.optimizer, snapshot=folder, model_name="b", step=len(BEFORE))


def test_rows_of_a_backfill_are_of_no_step(server: ServerProcess, tmp_path: Path) -> None:
    """The report's step stays that of training, also where a backfill has written a table since."""
    trained, restored, at = Trainer(), Trainer(), ["--server", server.address]
    trained.stream(server.address, "filled", publish="all")
    source, options = str(tmp_path / "rows"), ["--format", "parquet", "--table", "filled:user.*", "--with-states"]
    assert main(["export", *at, "--to", source, *options]) == 0
    assert main(["backfill", source, *at, "--model", "filled"]) == 0
    report = restore(restored.model, restored.optimizer, server.address, model_name="filled")
    assert report.step == len(BEFORE)
    assert [table.step for table in report.tables if table.name == "filled:user.weight"] == [0]


@pytest.mark.parametrize("format_name", ["safetensors", "parquet"])
@pytest.mark.parametrize("is_running", [False, True])
def test_an_export_brings_scalars_back(tmp_path: Path, format_name: str, is_running: bool) -> None:
    """What was exported and backfilled, into a new directory or a running server, trains on with equal losses."""
    trained, restored = Trainer(), Trainer()
    source = tmp_path / f"rows.{format_name}"
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        trained.stream(server.address, "a", publish="all")
        arguments = ["--server", server.address, "--to", str(source), "--format", format_name, "--with-states"]
        assert main(["export", *arguments]) == 0
    if not is_running:
        assert main(["backfill", str(source), "--data", str(tmp_path / "new"), "--shards", "3"]) == 0
    with ServerProcess.start(tmp_path / "new", shards=3) as server:
        if is_running:
            assert main(["backfill", str(source), "--server", server.address]) == 0
        report = restore(restored.model, restored.optimizer, server.address)
    assert {table.name: table.scalars for table in report.tables} == {
        f"{name}.weight": {} if name == "idle" else {"step": len(BEFORE)} for name in SIZES
    }
    assert restored.train(AFTER) == trained.train(AFTER)
    for ours, theirs in zip(restored.model.parameters(), trained.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class Other(TwoKinds):
    """Another architecture: a longer table, a wider one, one of another type, and one more."""

    def __init__(self) -> None:
        super().__init__(sparse=False)
        self.user = nn.Embedding(96, 8)
        self.item = nn.EmbeddingBag(64, 15)
        self.tag = nn.EmbeddingBag(130, 3, dtype=torch.float64)
        self.new = nn.Embedding(4, 4)


def test_another_architecture_is_refused_before_anything_changes(
    server: ServerProcess, adam: Trainer, request: pytest.FixtureRequest
) -> None:
    """One error names every table that is missing or differs; without `strict` these are left as they are."""
    name = request.node.name
    restored = Trainer(tables=Other())
    before = {key: value.clone() for key, value in restored.model.state_dict().items()}
    with pytest.raises(SpecMismatchError) as error:
        restore(restored.model, restored.optimizer, server.address, model_name=name)
    message = str(error.value)
    assert "\n" not in message and "table 'idle" not in message
    for part in (
        "table 'user.weight' differs (model ≠ stored): num_rows 96 ≠ 97",
        "table 'item.weight' differs (model ≠ stored): dim 15 ≠ 16",
        "table 'tag.weight' differs (model ≠ stored): dtype FLOAT64 ≠ FLOAT32",
        f"table 'new.weight' is not there under the name '{name}:new.weight'",
        "or pass strict=False",
    ):
        assert part in message
    assert all(torch.equal(value, before[key]) for key, value in restored.model.state_dict().items())
    assert not restored.optimizer.state_dict()["state"]
    report = restore(restored.model, restored.optimizer, server.address, model_name=name, strict=False)
    assert [table.name for table in report.tables] == [f"{name}:idle.weight"]
    assert report.skipped.keys() == {"user.weight", "item.weight", "tag.weight", "new.weight"}
    assert "item.weight: left as it is: differs" in str(report)


def test_another_optimizer_takes_weights_alone(
    server: ServerProcess, adam: Trainer, request: pytest.FixtureRequest
) -> None:
    """Other states are refused by name, unless the caller asks for weights only."""
    name = request.node.name
    restored = Trainer("adagrad")
    with pytest.raises(
        SpecMismatchError, match=r"states \[sum:POINTWISE.*\] ≠ \[exp_avg:POINTWISE.*restore\(states=False\)"
    ):
        restore(restored.model, restored.optimizer, server.address, model_name=name, strict=False)
    restore(restored.model, restored.optimizer, server.address, model_name=name, states=False)
    assert torch.equal(restored.model.tag.weight, adam.model.tag.weight)
    state = restored.optimizer.state[restored.model.tag.weight]
    assert (state["sum"] == 0.5).all() and state["step"] == 0


def test_two_models_on_one_server(tmp_path: Path) -> None:
    """Tables of one name belong to several models: the caller names one; the only one needs no name."""
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        first, second, restored = Trainer(), Trainer(), Trainer()
        first.stream(server.address, "ctr")
        assert restore(restored.model, restored.optimizer, server.address).tables[0].name == "ctr:idle.weight"
        second.stream(server.address, "cvr", range(30, 33))
        with pytest.raises(ConfigError, match=r"several models .* have these tables \(ctr, cvr\): pass model_name="):
            restore(restored.model, restored.optimizer, server.address)
        for name, trained in (("cvr", second), ("ctr", first)):
            restored = Trainer()
            restore(restored.model, restored.optimizer, server.address, model_name=name)
            assert_equal(restored, trained)
        with pytest.raises(SpecMismatchError, match=r"'item.weight' is not there under the name 'other:item.weight'"):
            restore(restored.model, restored.optimizer, server.address, model_name="other")


def test_some_tables_only(server: ServerProcess, adam: Trainer, request: pytest.FixtureRequest) -> None:
    """Tables that are not named keep their values, and get no states."""
    restored = Trainer()
    report = restore(
        restored.model, restored.optimizer, server.address, model_name=request.node.name, tables=["us*.weight"]
    )
    assert [table.name for table in report.tables] == [f"{request.node.name}:user.weight"]
    assert torch.equal(restored.model.user.weight, adam.model.user.weight)
    assert restored.optimizer.state_dict()["state"].keys() == {0}


def test_a_renamed_module_goes_on_by_its_name_on_the_server(
    server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a word attach names the table that it may be; with it rows and states of that table go on."""

    def train(name: str, names: Any = None) -> nn.Embedding:
        torch.manual_seed(len(name))
        model = nn.ModuleDict({name: nn.Embedding(30, 4), "item": nn.Embedding(30, 4)})
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        if names is not None:
            report = restore(model, optimizer, server.address, model_name="renamed", names=names)
            assert (report.num_restored, report.num_kept, report.skipped) == (60, 0, {})
            assert torch.equal(model[name].weight, users.weight)
        with RawEmbeddingStreamer(server.address, run="renamed", model="renamed") as streamer:
            for wrong in ({"persno.weight": "x"}, {f"{name}.weight": "item.weight"}, {f"{name}.weight": "a:x"}):
                with pytest.raises(ConfigError):
                    streamer.attach(model, optimizer, names=wrong)
            streamer.attach(model, optimizer, names=names, publish="auto" if names is not None else "all")
            optimizer.zero_grad()
            sum(each(torch.tensor([3, 5])).pow(2).sum() for each in model.values()).backward()
            optimizer.step()
            assert streamer.audit().is_equal
            told = "user.weight" if names is not None else f"{name}.weight"
            assert np.array_equal(streamer.fetch(told, [5]).weights, model[name].weight[[5]].detach())
            streamer.load_state_dict(streamer.state_dict())
            assert streamer.stats().num_dirty_rows == 0
        return model[name]

    users = train("user")
    assert "may be" not in caplog.text
    users = train("person", {"person.weight": "user.weight"})
    assert "may be" not in caplog.text
    train("somebody")
    assert "renamed:somebody.weight may be renamed:user.weight" in caplog.text
    assert "names={'somebody.weight': 'user.weight'}" in caplog.text
    with BlockingReader(server.address, model="renamed") as reader:
        assert np.array_equal(reader.get("user.weight", np.arange(30)).weights, users.weight.detach())
        assert sorted(reader.tables) == [f"renamed:{name}.weight" for name in ("item", "somebody", "user")]


@pytest.mark.torchrec
def test_a_table_batched_module(server: ServerProcess) -> None:
    """A fused module gets its tables, their states, and its count of steps, which all its tables share."""
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as ops

    def tables() -> nn.ModuleDict:
        torch.manual_seed(0)
        specs = [(rows, 4, ops.EmbeddingLocation.HOST, ops.ComputeDevice.CPU) for rows in (50, 30)]
        tbe = ops.SplitTableBatchedEmbeddingBagsCodegen(
            specs,
            optimizer=ops.OptimType.EXACT_ROWWISE_ADAGRAD,
            weight_decay=0.1,
            weight_decay_mode=ops.WeightDecayMode.COUNTER,
            counter_based_regularization=ops.CounterBasedRegularizationDefinition(
                counter_weight_decay_mode=ops.CounterWeightDecayMode.ADAGRADW
            ),
            table_names=["left", "right"],
        )
        for weights in tbe.split_embedding_weights():
            weights.normal_()
        return nn.ModuleDict({"tbe": tbe})

    def losses(model: nn.ModuleDict, steps: range) -> list[float]:
        found = []
        for step in steps:
            left, right = torch.arange(step, step + 3), torch.arange(step if step < 3 else 0)
            ids = torch.cat([left, right])
            loss = model["tbe"](ids, torch.tensor([0, 3, ids.numel()])).pow(2).sum()
            loss.backward()
            found.append(float(loss.detach()))
        return found

    endless, restored = tables(), tables()
    with RawEmbeddingStreamer(server.address, run="fused", model="fused") as streamer:
        streamer.attach(endless, publish="updated")
        losses(endless, BEFORE)
    report = restore(restored, None, server.address, model_name="fused")
    assert restored["tbe"].iter.item() == endless["tbe"].iter.item() == len(BEFORE)
    for ours, theirs in zip(
        restored["tbe"].split_embedding_weights(), endless["tbe"].split_embedding_weights(), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert losses(restored, AFTER) == losses(endless, AFTER)
    assert restored["tbe"].iter.item() == endless["tbe"].iter.item()
    assert {table.name for table in report.tables} == {"fused:tbe.left", "fused:tbe.right"}


def test_arguments_that_are_wrong() -> None:
    """Each is refused at once, with what to do, and changes nothing."""
    trainer = Trainer()
    arguments: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({}, ConfigError, "say where from"),
        ({"address": "x:1", "snapshot": "s"}, ConfigError, "say where from"),
        ({"address": "x:y"}, ConfigError, "x:y"),
        ({"address": "x:1", "model_name": "a:b"}, ConfigError, "model 'a:b'"),
        ({"address": "x:1", "tables": ["nothing"]}, ConfigError, "no table is named or matches 'nothing'"),
        ({"snapshot": "/nowhere"}, ConfigError, "/nowhere"),
        ({"address": "x:1", "step": -1}, ConfigError, "step=-1: must be 'newest'"),
        ({"address": "x:1", "step": "last"}, ConfigError, "step='last': must be 'newest'"),
        ({"address": "127.0.0.1:1", "timeout_s": 0.2}, UnavailableError, "within 0.2 s"),
    ]
    for given, kind, message in arguments:
        with pytest.raises(kind, match=message):
            restore(trainer.model, trainer.optimizer, **given)
    assert hooks(trainer.model, trainer.optimizer) == 0
