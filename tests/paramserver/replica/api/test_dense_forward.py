"""A served model with dense tensors: every output is that of the trainer's model at one step, bit for bit."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from dense_trainer import DenseTrainer, ModelTrainer
from torch import nn
from watched_server import wait_until

from headrace.paramserver.replica import EmbeddingReplica, serve_model
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError, UnavailableError

ROWS, DIM = 40, 8
WAIT_S = 60.0


class Ranker(nn.Module):
    """Dense tensors of each sort: tied, counted, half, in a recurrent layer, without elements, and not published."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(ROWS, DIM)
        self.bottom = nn.Sequential(nn.Linear(4, DIM), nn.BatchNorm1d(DIM), nn.Dropout(0.5))
        self.recurrent = nn.GRU(DIM, DIM, batch_first=True)
        self.query = nn.Linear(DIM, DIM, bias=False)
        self.key = nn.Linear(DIM, DIM, bias=False)
        self.key.weight = self.query.weight
        self.again = self.query
        self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16))
        self.register_buffer("mean", torch.zeros(3, 1, DIM))
        self.register_buffer("cache", torch.full((2,), 5.0), persistent=False)
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        rows, _ = self.recurrent(self.user(ids))
        scores = (self.query(rows) * self.key(rows) + self.again(rows) - self.mean[0]).sum(dim=1)
        total: torch.Tensor = (scores + self.bottom(features)) * self.scale * self.cache[0]
        return total


def batch_of(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, ROWS, (6, 5), generator=generator), torch.rand(6, 4, generator=generator)


class Training:
    """A model whose parameters and buffers change at each step, and what it computes in eval mode after each."""

    def __init__(self, own_server: ServerProcess) -> None:
        torch.manual_seed(3)
        self.model = Ranker()
        self.trainer = ModelTrainer(own_server.address, self.model)
        self.expected: dict[int, torch.Tensor] = {}

    def step(self) -> int:
        step = len(self.expected) + 1
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.9).add_(torch.randn_like(parameter) / 10)
            self.model.mean.add_(0.25)
            self.model.train()(*batch_of(step))  # BatchNorm counts
            # torch folds some products only where no gradient is required, which rounds otherwise.
            self.expected[step] = copy.deepcopy(self.model).requires_grad_(False).eval()(*batch_of(0))
        self.trainer.publish(step)
        return step


@pytest.fixture
def training(own_server: ServerProcess) -> Iterator[Training]:
    training = Training(own_server)
    training.step()
    yield training
    training.trainer.close()


def check(served: Callable[..., torch.Tensor], expected: torch.Tensor) -> None:
    found = served(*batch_of(0))
    assert found.dtype is expected.dtype and torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("on_meta", [False, True])
def test_each_output_is_that_of_one_step(own_server: ServerProcess, training: Training, on_meta: bool) -> None:
    """The copy has the trainer's dense tensors from the start and after each dense step, whatever the model has."""
    with torch.device("meta" if on_meta else "cpu"):
        given = Ranker()
    given.cache = torch.full((2,), 5.0)
    with EmbeddingReplica(own_server.address, consistency="step") as replica:
        served = serve_model(given, replica)
        assert type(served) is Ranker and not served.training
        check(served, training.expected[1])
        for _ in range(3):
            step = training.step()
            replica.wait_for(step, WAIT_S)
            check(served, training.expected[step])
        assert served.key.weight is served.query.weight and served.again is served.query
        assert served.query.weight is not given.query.weight
        assert not any(parameter.requires_grad for parameter in served.parameters())
        assert served.bottom[1].num_batches_tracked == 4
        hooked: list[int] = []
        served.query.register_forward_hook(lambda *_: hooked.append(1))
        served.register_forward_hook(lambda module, args, output: output * 2)
        check(lambda *batch: served(*batch) / 2, training.expected[step])
        assert hooked
        check(torch.compile(serve_model(given, replica), backend="eager"), training.expected[step])


def test_threads_while_parts_change(own_server: ServerProcess, training: Training) -> None:
    """Every output of every thread equals that of a step, and no thread goes back."""
    with EmbeddingReplica(own_server.address, consistency="step") as replica:
        served = serve_model(Ranker(), replica)
        found: list[list[torch.Tensor]] = [[] for _ in range(4)]
        faults: list[BaseException] = []
        is_over = threading.Event()

        def serve(outputs: list[torch.Tensor]) -> None:
            try:
                while not is_over.is_set():
                    output = served(*batch_of(0))
                    if not outputs or not torch.equal(outputs[-1], output):
                        outputs.append(output)
            except BaseException as exc:
                faults.append(exc)

        threads = [threading.Thread(target=serve, args=(outputs,)) for outputs in found]
        for thread in threads:
            thread.start()
        try:
            for _ in range(30):
                step = training.step()
            replica.wait_for(step, WAIT_S)
            last = training.expected[step]
            wait_until(lambda: faults or all(o and torch.equal(o[-1], last) for o in found), "the last step")
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
    assert not faults
    for outputs in found:
        steps = [[s for s, each in training.expected.items() if torch.equal(each, output)] for output in outputs]
        assert all(len(of_output) == 1 for of_output in steps), steps
        assert steps == sorted(steps) and len(steps) > 1


def test_a_part_of_the_model_is_served_by_its_prefix(own_server: ServerProcess, training: Training) -> None:
    """Its dense tensors are found like its tables; a part without tables is served, too."""
    with EmbeddingReplica(own_server.address) as replica:
        served = serve_model(nn.Linear(4, DIM), replica, prefix="bottom.0")
        assert torch.equal(served(torch.ones(1, 4)), training.model.bottom[0](torch.ones(1, 4)))
        assert serve_model(nn.Embedding(ROWS, DIM), replica, prefix="user")(torch.tensor([3])).shape == (1, DIM)


def test_what_does_not_fit_is_listed(own_server: ServerProcess, training: Training) -> None:
    """One error has each tensor that the part lacks or has otherwise, and what to do; `keep` leaves them alone."""
    model = Ranker()
    model.extra = nn.Linear(2, 3)
    model.scale = nn.Parameter(torch.ones(()))
    model.bottom[0] = nn.Linear(5, DIM)
    with EmbeddingReplica(own_server.address) as replica:
        with pytest.raises(ConfigError) as caught:
            serve_model(model, replica)
        for part in (
            "the trainer's dense tensors at step 1 of epoch 1 do not fit the served model",
            "no 'extra.weight'",
            "no 'extra.bias'",
            "'scale' is [] torch.bfloat16 there and [] torch.float32 in the model",
            "'bottom.0.weight' is [8, 4] torch.float32 there and [8, 5] torch.float32 in the model",
            "attach it with dense=[…]",
            "keep=[paths]",
        ):
            assert part in str(caught.value)
        assert "\n" not in str(caught.value)
        served = serve_model(model, replica, keep=["extra", "scale", "bottom.*"])
        assert torch.equal(served.extra.weight, model.extra.weight)
        assert torch.equal(served.query.weight, training.model.query.weight)
        model = Ranker()
        model.regularized = [model.query.weight]
        with pytest.raises(ConfigError, match="keeps dense tensors in regularized, where they cannot be replaced"):
            serve_model(model, replica)
        assert serve_model(model, replica, keep=["query.weight", "key"]) is not model


def test_a_model_that_changes_is_refused_when_it_is_called(own_server: ServerProcess, training: Training) -> None:
    """A part of another architecture is never set in part; the error says what to do."""
    with EmbeddingReplica(own_server.address) as replica:
        served = serve_model(Ranker(), replica)
        del training.model.scale
        with ModelTrainer(own_server.address, training.model, epoch=2) as changed:
            changed.publish(1)
            replica.wait_for(1, WAIT_S, epoch=2)
            with pytest.raises(ConfigError, match="at step 1 of epoch 2 do not fit the served model: no 'scale'"):
                served(*batch_of(0))


def test_before_the_first_part(own_server: ServerProcess) -> None:
    """A model whose trainer names dense tensors and has published none yet is not served with other weights."""
    with DenseTrainer(own_server.address) as trainer, EmbeddingReplica(own_server.address) as replica:
        model = nn.ModuleDict({"user": nn.Embedding(20, 4), "fc": nn.Linear(60, 50)})
        with pytest.raises(UnavailableError, match="no whole dense part of model 'ctr' yet"):
            serve_model(model, replica)
        trainer.publish(1)
        replica.wait_for(1, WAIT_S)
        with pytest.raises(ConfigError, match=r"'fc\.bias' is"):
            serve_model(model, replica)


def test_other_models_are_served_as_before(own_server: ServerProcess, training: Training) -> None:
    """Where a model's own trainer publishes no dense tensors, the copy has the given model's."""
    with DenseTrainer(own_server.address, model="cvr", run="cvr", epoch=5, specs=[]) as other:
        other.publish(1)
        with EmbeddingReplica(own_server.address) as replica:
            model = nn.ModuleDict({"user": nn.Embedding(20, 4), "fc": nn.Linear(3, 2)})
            served = serve_model(model, replica, model="cvr")
            assert torch.equal(served["fc"].weight, model["fc"].weight) and "forward" not in vars(served)
