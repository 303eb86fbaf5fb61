"""A served model computes what the trainer's model computes in eval mode, from the replica's tables."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn

from headrace.paramserver.replica import (
    EmbeddingReplica,
    ReplicaEmbedding,
    ReplicaEmbeddingBag,
    serve_model,
)
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError
from headrace.streamer import RawEmbeddingStreamer

ROWS, DIM, BATCH = 60, 8, 7
WAIT_S = 60.0


class Ranker(nn.Module):
    """Like DLRM in plain torch: dense features, bags of each mode, a padded sequence, and modules used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(4, DIM), nn.BatchNorm1d(DIM), nn.ReLU(), nn.Dropout(0.5))
        self.user = nn.Embedding(ROWS, DIM)
        self.history = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.tags = nn.ModuleDict({mode: nn.EmbeddingBag(ROWS, DIM, mode=mode) for mode in ("sum", "mean", "max")})
        self.item = nn.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=True, padding_idx=3)
        self.author = self.user  # one module under two names
        self.similar = nn.Embedding(ROWS, DIM)  # another module of the same weight
        self.similar.weight = self.user.weight
        self.by_place = [self.user, self.history]  # not registered
        self.top = nn.Linear(8 * DIM, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = [self.bottom(batch["dense"]), self.author(batch["ids"]), self.similar(batch["ids"])]
        parts += [self.by_place[0](batch["ids"]), self.history(batch["history"]).mean(dim=1)]
        parts += [sum(bag(batch["tags"], batch["offsets"]) for bag in self.tags.values())]
        last = torch.tensor([len(batch["tags"])])
        parts += [self.item(batch["tags"], torch.cat([batch["offsets"], last]), batch["factors"])]
        parts += [self.tags["max"](batch["history"])]
        return self.top(torch.cat(parts, dim=1))  # type: ignore[no-any-return]


def batch_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (BATCH,), generator=generator)
    tags = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    return {
        "dense": torch.rand(BATCH, 4, generator=generator),
        "ids": torch.randint(0, ROWS, (BATCH,), generator=generator),
        "history": torch.randint(0, ROWS, (BATCH, 5), generator=generator),
        "tags": tags,
        "offsets": lengths.cumsum(0) - lengths,
        "factors": torch.rand(tags.shape, generator=generator),
    }


class Training:
    """A model that is trained on a server; its steps are numbered from 1."""

    def __init__(self, server: ServerProcess, run: str, model: nn.Module, **settings: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
        self.streamer = RawEmbeddingStreamer(server.address, run=run, model=run)
        self.streamer.attach(model, self.optimizer, publish="all", **settings)
        self.num_steps = 0

    def step(self, batch: Any) -> None:
        self.model.train()
        self.optimizer.zero_grad()
        self.model(batch).pow(2).sum().backward()
        self.optimizer.step()
        self.num_steps += 1

    def settle(self, replica: EmbeddingReplica) -> None:
        self.streamer.flush()
        replica.wait_for(self.num_steps, WAIT_S, epoch=self.streamer.epoch)

    def expected(self, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            return self.model.eval()(batch)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def training(server: ServerProcess) -> Iterator[Training]:
    torch.manual_seed(4)
    training = Training(server, "ranker", Ranker())
    training.step(batch_of(0))
    training.streamer.flush()
    yield training
    training.streamer.close()


@pytest.fixture
def replica(server: ServerProcess, training: Training) -> Iterator[EmbeddingReplica]:
    with EmbeddingReplica(server.address, consistency="step", model="ranker") as replica:
        training.settle(replica)
        yield replica


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype is expected.dtype and torch.equal(found.view(torch.int32), expected.detach().view(torch.int32))


def test_own_dense_tensors_are_told(
    training: Training, replica: EmbeddingReplica, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the trainer publishes none, a warning names those that the model brings, unless `keep` does."""
    serve_model(training.model, replica, keep=["bottom", "top"])
    assert not caplog.records
    serve_model(training.model, replica, keep=["bottom.*"])
    assert "2 tensors (top.weight, top.bias)" in caplog.text
    with pytest.raises(ConfigError, match=r"no values for bottom\.0\.weight, .* 5 more"):
        serve_model(copy.deepcopy(training.model).to("meta"), replica, keep=["similar"])


def test_agrees_with_the_trainer_to_the_bit(training: Training, replica: EmbeddingReplica) -> None:
    """At every step, outputs equal the trainer's in eval mode; later steps change the served rows and nothing else."""
    for seed in range(1, 4):
        training.step(batch_of(seed))
        training.settle(replica)
        served = serve_model(training.model, replica)
        for other in range(100, 110):
            assert same_bits(served(batch_of(other)), training.expected(batch_of(other)))
    dense = copy.deepcopy(served.state_dict())
    before = served(batch_of(5))
    training.step(batch_of(4))
    training.settle(replica)
    assert all(torch.equal(value, dense[name]) for name, value in served.state_dict().items())
    assert not torch.equal(served(batch_of(5)), before), "the rows are the next step's"
    training.model.load_state_dict(dense, strict=False)
    assert same_bits(served(batch_of(5)), training.expected(batch_of(5)))


def test_what_is_copied(training: Training, replica: EmbeddingReplica) -> None:
    """The copy has no table's weight, no gradients and its ties, in eval mode; the given model stays as it is."""
    training.model.train()
    served = serve_model(training.model, replica)
    assert sorted(name for name, _ in served.named_parameters()) == sorted(
        name for name, _ in training.model.named_parameters() if name.startswith(("bottom", "top"))
    )
    assert not served.training and not any(p.requires_grad for p in served.parameters())
    assert training.model.training and all(p.requires_grad for p in training.model.parameters())
    assert served.author is served.user is served.by_place[0] and served.by_place[1] is served.history
    assert isinstance(served.user, ReplicaEmbedding) and isinstance(served.similar, ReplicaEmbedding)
    assert served.similar.fqn == served.user.fqn == "ranker:user.weight"
    assert isinstance(served.item, ReplicaEmbeddingBag) and served.item.padding_idx == 3
    assert served.top.weight is not training.model.top.weight
    assert type(served) is Ranker and "table='ranker:item.weight'" in repr(served)


def test_no_weight_of_a_table_is_copied(
    training: Training, replica: EmbeddingReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying takes no memory for tables, not even where the model keeps a list of their weights."""
    copied = []
    deepcopy = nn.Parameter.__deepcopy__
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", lambda self, memo: copied.append(self) or deepcopy(self, memo))
    model = Ranker()
    model.regularized = [model.user.weight, model.top.weight]
    served = serve_model(model, replica)
    dense = [p for name, p in model.named_parameters() if name.startswith(("bottom", "top"))]
    assert {id(p) for p in copied} == {id(p) for p in dense}
    assert served.regularized[0].is_meta and served.regularized[1] is served.top.weight


def test_a_compiled_copy_looks_rows_up_each_time(training: Training, replica: EmbeddingReplica) -> None:
    """Lookups stay outside of compiled graphs: a later step's rows are seen, in batches of any size."""
    served = torch.compile(serve_model(training.model, replica), backend="eager")
    for seed in (30, 31, 32):
        assert same_bits(served(batch_of(seed)), serve_model(training.model, replica)(batch_of(seed)))
    before = served(batch_of(33))
    training.step(batch_of(34))
    training.settle(replica)
    assert not torch.equal(served(batch_of(33)), before)


def test_wrappers_parts_and_hooks(training: Training, replica: EmbeddingReplica) -> None:
    """Wrappers at any depth are left out, a part is served by its prefix, and hooks on tables go on to work."""
    expected = training.expected(batch_of(7))
    assert same_bits(serve_model(torch.compile(training.model), replica)(batch_of(7)), expected)
    outer = nn.Sequential(torch.compile(training.model), nn.Identity())
    with pytest.raises(ConfigError, match=r"'0\.user' \(Embedding\): no table 'ranker:0\.user\.weight'"):
        serve_model(outer, replica, model="ranker")
    bag = serve_model(training.model.tags["max"], replica, prefix="tags.max", model="ranker")
    history = batch_of(7)["history"]
    assert same_bits(bag(history), training.model.tags["max"](history))
    model = copy.deepcopy(training.model)
    model.user.register_forward_hook(lambda module, args, output: output * 2)
    assert same_bits(serve_model(model, replica)(batch_of(7)), model.eval()(batch_of(7)))
    model.user.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 0,), kwargs), with_kwargs=True)
    assert same_bits(serve_model(model, replica)(batch_of(7)), model.eval()(batch_of(7)))


class _Shifted(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input - 1)


def test_all_that_cannot_be_served_is_listed(training: Training, replica: EmbeddingReplica) -> None:
    """One error has each module with its reason, and what to do; nothing is served in part."""
    model = copy.deepcopy(training.model)
    model.extra = nn.Embedding(9, 4)
    model.history = _Shifted(ROWS, DIM)
    model.item = nn.EmbeddingBag(ROWS, DIM + 1)
    model.tags["sum"] = nn.EmbeddingBag(ROWS, DIM, dtype=torch.float16)
    model.tags["mean"] = nn.EmbeddingBag(ROWS, DIM, max_norm=1.0)
    model.head = nn.Linear(DIM, ROWS, bias=False)
    model.head.weight = model.user.weight
    with pytest.raises(ConfigError) as caught:
        serve_model(model, replica)
    message = str(caught.value)
    for part in (
        "6 of the model's modules cannot be served: ",
        "'extra' (Embedding): no table 'extra.weight'",
        "'history' (_Shifted): what it computes is _Shifted's own: put an Embedding inside of the class",
        "'item' (EmbeddingBag): table 'ranker:item.weight' is 60 × 8 torch.float32 in the replica and 60 × 9",
        "'ranker:tags.sum.weight' is 60 × 8 torch.float32 in the replica and 60 × 8 torch.float16 in the model",
        "'tags.mean' (EmbeddingBag): max_norm",
        "'head.weight' (Linear): is the weight of a table",
        "give model=…, prefix=… or names=…",
        "keep=[paths]",
    ):
        assert part in message
    assert "\n" not in message
    with pytest.raises(ConfigError, match=r"keep: no module is named or matches 'histori'; the nearest is 'history'"):
        serve_model(model, replica, keep=["histori"])
    with pytest.raises(ConfigError, match="no module of the model has a table to serve"):
        serve_model(nn.Linear(1, 1), replica)
    with pytest.raises(ConfigError, match="no module of the model has a table to serve"):
        serve_model(training.model, replica, keep=["*"])
    with pytest.raises(ConfigError, match=r"model is a dict: give the nn\.Module"):
        serve_model(cast("Any", {}), replica)
    model = copy.deepcopy(training.model)
    model.lock = threading.Lock()
    with pytest.raises(ConfigError, match="the model cannot be copied: TypeError"):
        serve_model(model, replica)


def test_kept_modules_keep_their_weights(training: Training, replica: EmbeddingReplica) -> None:
    """A module that is named stays with the given model's weights, and they are a copy."""
    model = copy.deepcopy(training.model)
    with torch.no_grad():
        model.history.weight.fill_(1.0)
    served = serve_model(model, replica, keep=["history", "tags.*"])
    assert type(served.history) is nn.Embedding and type(served.tags["max"]) is nn.EmbeddingBag
    assert served.history.weight is not model.history.weight
    assert same_bits(served(batch_of(8)), model.eval()(batch_of(8)))


def test_a_forward_of_one_moment(training: Training, replica: EmbeddingReplica) -> None:
    """While a step arrives within a forward, `at_one_moment` computes it again, of that step alone."""
    served = serve_model(training.model, replica)
    steps = []

    def compute() -> tuple[int, torch.Tensor, torch.Tensor]:
        first = served.user(torch.arange(ROWS))
        steps.append(replica.step)
        if len(steps) == 1:
            training.step(batch_of(9))
            training.settle(replica)
        return replica.step, first, served.similar(torch.arange(ROWS))

    step, first, second = replica.at_one_moment(compute)
    assert steps == [step - 1, step] and same_bits(first, second)
    assert same_bits(first, training.model.user.weight)


def test_two_models_of_one_path_are_told_apart(server: ServerProcess, training: Training) -> None:
    """A replica of several models must be told which one is served."""
    other = Training(server, "other", Ranker())
    other.step(batch_of(1))
    with EmbeddingReplica(server.address) as replica:
        other.settle(replica)
        with pytest.raises(ConfigError, match=r"'user' \(Embedding\): several models have a table"):
            serve_model(other.model, replica)
        for each in (training, other):
            served = serve_model(each.model, replica, model=each.streamer.model)
            assert same_bits(served(batch_of(20)), each.expected(batch_of(20)))
    other.streamer.close()


def test_settings_other_than_the_trained_ones_are_refused(training: Training, replica: EmbeddingReplica) -> None:
    """A bag that pools otherwise, or another kind of module, is no copy of the trained one."""
    model = copy.deepcopy(training.model)
    model.tags["sum"] = nn.EmbeddingBag(ROWS, DIM, mode="mean")
    model.item = nn.EmbeddingBag(ROWS, DIM, mode="sum", padding_idx=2)
    model.history = nn.EmbeddingBag(ROWS, DIM)
    with pytest.raises(ConfigError) as caught:
        serve_model(model, replica)
    for part in (
        "3 of the model's modules",
        "'ranker:tags.sum.weight': pooling is 'sum' in the trainer and 'mean' in the model: build the model as",
        "'ranker:item.weight': padding_idx is 3 in the trainer and 2 in the model",
        "'ranker:history.weight': the trainer has an Embedding of it, the model an EmbeddingBag",
    ):
        assert part in str(caught.value)


def test_renamed_modules_are_served_by_their_names_on_the_server(training: Training, replica: EmbeddingReplica) -> None:
    """A mapping from paths says which tables they are; one that the model lacks is refused with the nearest."""
    net = nn.ModuleDict({"past": nn.Embedding(ROWS, DIM, padding_idx=0), "person": nn.Embedding(ROWS, DIM)})
    served = serve_model(net, replica, names={"past.weight": "history.weight", "person.weight": "user.weight"})
    ids = torch.arange(ROWS)
    for old, new in (("history", "past"), ("user", "person")):
        assert torch.equal(served[new](ids), getattr(training.model, old)(ids))
    with pytest.raises(
        ConfigError,
        match=r"names: .* no table, tensor or module 'pats.weight'; the nearest are 'past.weight', 'person.weight'",
    ):
        serve_model(net, replica, names={"pats.weight": "history.weight"})
    served = serve_model(
        net, replica, prefix="tower", names={"past.weight": "history.weight", "person.weight": "user.weight"}
    )
    assert torch.equal(served["person"](ids), training.model.user(ids)), "paths are those in the given part"


@pytest.mark.torchrec
def test_classes_of_the_same_name_are_not_taken_for_others(replica: EmbeddingReplica) -> None:
    """Quantized modules, a user's class of a name of TorchRec's, and one that computes otherwise are refused."""
    import torchrec
    from torchrec.modules.embedding_configs import QuantConfig
    from torchrec.quant import embedding_modules as quant

    tables = [torchrec.EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"])]
    float_bags = torchrec.EmbeddingBagCollection(tables=tables)
    int8 = torch.ao.quantization.PlaceholderObserver.with_args(dtype=torch.qint8)
    float_bags.qconfig = QuantConfig(activation=int8, weight=int8)  # type: ignore[assignment]

    class Weighted(torchrec.EmbeddingBagCollection):  # type: ignore[misc]
        def is_weighted(self) -> bool:
            return True

    modules = {
        "quant": quant.EmbeddingBagCollection.from_float(float_bags),
        "torch": torch.ao.nn.quantized.EmbeddingBag(9, 4),
        "named": type("EmbeddingCollection", (nn.Module,), {})(),
        "shadow": type("Embedding", (nn.Embedding,), {"forward": lambda self, ids: ids})(9, 4),
        "weighted": Weighted(tables=tables),
        # Tables of FBGEMM's own modules would be served as they were when the model was given.
        "fused": type("SplitTableBatchedEmbeddingBagsCodegen", (nn.Module,), {})(),
    }
    with pytest.raises(ConfigError) as caught:
        serve_model(nn.ModuleDict(modules), replica)
    for part in (
        "'quant' (EmbeddingBagCollection): is quantized: give the model that trains",
        "'torch' (EmbeddingBag): is quantized",
        f"'named' (EmbeddingCollection): is {__name__}'s, and no EmbeddingCollection of TorchRec",
        "'shadow' (Embedding): what it computes is Embedding's own",
        "'weighted' (Weighted): what it computes is Weighted's own",
        "'fused' (SplitTableBatchedEmbeddingBagsCodegen): has no counterpart: use",
    ):
        assert part in str(caught.value)
