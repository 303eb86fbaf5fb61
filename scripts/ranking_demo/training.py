"""The demo: a model that trains and streams to a server, and its served model, in another process, which ranks.

The model has one embedding row for each user and one for each item. The score of a user and an item is the sum of the
products of their rows, each weighted by a dense layer; training tells each event's item from random ones. FBGEMM's
fused rowwise Adagrad updates the TorchRec tables in the backward pass, as in production, but small.

For each batch of events, in time order: the reader ranks it with the served model as it is at that moment, the trainer
ranks it too, and then trains on it. The trainer never waits for its updates to arrive, only for the reader's answer, so
the served model is as old as it really is: its rows a few milliseconds, its dense part half a second or a little more.
No order to the reader carries rows, weights or gradients.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan

from headrace.paramserver.replica import EmbeddingReplica, RecordingCheck, serve_model
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import UnavailableError
from headrace.scripts.benches.child import Child, Worker
from headrace.scripts.benches.harness import OnStage, one_torch_thread
from headrace.scripts.benches.observer import Observer, delays_of
from headrace.scripts.ranking_demo.events import TABLES, EventLog, Replay, draw, is_hit
from headrace.scripts.ranking_demo.summary import DemoReport, HitLog
from headrace.streamer import RawEmbeddingStreamer, StreamerConfig
from headrace.streamer.compare import compare_with_store

__all__ = ["DemoModel", "Reader", "make_ranker", "process_group", "rank", "read", "run"]

_ANSWER_TIMEOUT_S = 90.0  # longer than any deadline in the reader, whose own error says more
# Tuned on the sample log, for the hit rate of the live tables. A row that was not trained on yet scores by its first
# values, from a normal distribution with this standard deviation.
_DIM, _LEARNING_RATE, _INIT_STD = 32, 0.3, 0.1
_DENSE_LEARNING_RATE = 0.01
_NUM_RANDOM_ITEMS, _NUM_PASSES = 32, 2  # each pass over a batch is an optimizer step with other random items
_RECORDED_BATCHES = 20  # one in so many is recorded, and answered again by the served model
_TRAINING_STREAM = 2  # first word of a generator's seed, different from that of ranking

_Ids = npt.NDArray[np.int64]


@contextmanager
def process_group() -> Iterator[None]:
    """Make this process the whole of a torch.distributed group. It needs no network port."""
    # gloo looks up the host's own name and complains if it does not resolve; loopback is always there.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in the module's `__all__`
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class DemoModel:
    """The model under `DistributedModelParallel`, `dmp`, and its training step.

    `tables` are the live rows by fqn, float32[num_rows, dim]: views of the trainer's memory, not copies. The fused
    optimizer has them, `optimizer` the dense layer.
    """

    def __init__(self, *, num_users: int, num_items: int, seed: int) -> None:
        """Build and shard the model. REQUIRES: a process group of one, as `process_group` makes it."""
        self._seed = seed
        torch.manual_seed(seed)
        ranker = make_ranker(num_users, num_items)
        fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": _LEARNING_RATE}
        sharder = EmbeddingBagCollectionSharder(fused_params=fused)
        # Without a kernel's name the plan takes the dense one, which has no fused optimizer.
        placement = {name: table_wise(rank=0, compute_kernel="fused") for name in ("user", "item")}
        plan = construct_module_sharding_plan(
            ranker.ebc, placement, sharder=sharder, world_size=1, local_size=1, device_type="cpu"
        )
        self.dmp = DistributedModelParallel(
            ranker,
            device=torch.device("cpu"),
            plan=ShardingPlan({"ebc": plan}),
            sharders=[sharder],
            init_data_parallel=False,  # one process
        )
        states = self.dmp.state_dict()
        self.tables = {fqn: states[fqn].local_shards()[0].tensor.numpy() for fqn in TABLES}
        self.optimizer = torch.optim.Adagrad(ranker.top.parameters(), lr=_DENSE_LEARNING_RATE)

    def train(self, batch: int, users: _Ids, items: _Ids, num_items_seen: _Ids) -> float:
        """Train on one batch, int64[b] each, and return the loss of its first pass, a mean over the events."""
        rng = np.random.default_rng((_TRAINING_STREAM, self._seed, batch))
        losses = []
        for _ in range(_NUM_PASSES):
            pairs = draw(rng, items, num_items_seen, _NUM_RANDOM_ITEMS)
            logits = self.dmp(_features(users, pairs)).view(pairs.shape)
            # A sum, not a mean: a row's step does not depend on how many others share its batch.
            loss = nn.functional.softplus(-logits[:, 0]).sum() + nn.functional.softplus(logits[:, 1:]).sum()
            self.optimizer.zero_grad()
            torch.autograd.backward(loss)  # the fused optimizer updates the rows here
            self.optimizer.step()
            losses.append(loss.item() / users.size)
        return losses[0]


class _Ranker(nn.Module):
    def __init__(self, ebc: EmbeddingBagCollection) -> None:
        super().__init__()
        self.ebc = ebc
        self.top = nn.Linear(_DIM, 1, bias=False)
        nn.init.ones_(self.top.weight)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        rows = self.ebc(features).to_dict()
        scores: torch.Tensor = self.top(rows["user"] * rows["item"])
        return scores


def make_ranker(num_users: int, num_items: int, *, device: str = "cpu") -> _Ranker:
    """Return the plain model, untrained; its tables on a device, without memory if that is `meta`."""
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # warns of how TorchRec uses torch
    tables = [_make_table("user", num_users), _make_table("item", num_items)]
    return _Ranker(EmbeddingBagCollection(device=torch.device(device), tables=tables))


def _features(users: _Ids, pairs: _Ids) -> KeyedJaggedTensor:
    """Return int64[b] users against int64[b, n] items, as bags of one id."""
    values = np.concatenate([np.repeat(users, pairs.shape[1]), pairs.ravel()])
    lengths = torch.ones(values.size, dtype=torch.int32)
    return KeyedJaggedTensor(keys=["user", "item"], values=torch.from_numpy(values), lengths=lengths)


@torch.no_grad()
def rank(model: nn.Module, replay: Replay, batch: int) -> int:
    """Return how many events of a batch a model ranks as hits."""
    candidates = replay.candidates(batch)
    scores = model(_features(replay.log.users[replay.events_of(batch)], candidates))
    return int(is_hit(scores.view(candidates.shape).numpy()).sum())


def _make_table(name: str, num_rows: int) -> EmbeddingBagConfig:
    init = functools.partial(nn.init.normal_, std=_INIT_STD)
    sizes = {"num_embeddings": num_rows, "embedding_dim": _DIM}
    return EmbeddingBagConfig(name=name, feature_names=[name], init_fn=init, **sizes)


class Reader:
    """Ranks with the model `served`, and with a copy of it that is frozen at the start of each part of the log."""

    def __init__(self, replica: EmbeddingReplica, replay: Replay) -> None:
        """Build the served model. The frozen one is untrained until batch 0. Raises: as `serve_model`."""
        self._replica, self._replay = replica, replay
        sizes = self._sizes = replay.log.user_ids.size, replay.log.item_ids.size
        self.served = serve_model(make_ranker(*sizes, device="meta"), replica)
        self._frozen = make_ranker(*sizes)

    def rank(self, batch: int) -> dict[str, int]:
        """Return the hits of the `streamed` and the `frozen` model, and the `missing` rows, which count as zeros."""
        if batch in self._replay.part_starts:
            self._frozen.load_state_dict(self.state())
        num_missing = sum(self._replica.num_missing.values())
        streamed = rank(self.served, self._replay, batch)
        missing = sum(self._replica.num_missing.values()) - num_missing
        return {"streamed": streamed, "frozen": rank(self._frozen, self._replay, batch), "missing": missing}

    def state(self) -> dict[str, torch.Tensor]:
        """Return all rows and the dense part of one moment, as the model's `state_dict` names them."""
        ids = {fqn: torch.arange(size) for fqn, size in zip(TABLES, self._sizes, strict=True)}
        return self._replica.at_one_moment(lambda: {**self._replica.lookup_many(ids), **self._replica.dense().tensors})


def read(address: str, log_path: str, batch_events: int, seed: int, recordings: str) -> Worker:
    """Follow the server at an address; an order is a `batch` to rank, or the last `step` and a `path` to save to.

    Meanwhile a second replica, by step, answers the trainer's recordings; the last answer has how many were `equal`.
    """
    torch.set_num_threads(1)  # for tables this small a second thread costs more than it helps
    replay = Replay(log=EventLog(**np.load(log_path)), batch_events=batch_events, seed=seed)
    with (
        EmbeddingReplica(address) as replica,
        Observer(replica) as observer,
        EmbeddingReplica(address, consistency="step") as by_step,
        RecordingCheck(Reader(by_step, replay).served, recordings, by_step).watch(interval_s=0.01) as check,
    ):
        reader = Reader(replica, replay)
        answer: dict[str, Any] = {}
        while True:
            order = yield answer
            if "batch" in order:
                answer = reader.rank(order["batch"])
            else:
                answer = {"seen": observer.wait_for(order["step"])}
                _wait_for_dense(replica, order["step"])
                _wait_for_answers(check, order["num_recorded"])
                answer["outcomes"] = check.outcomes
                state: dict[str, Any] = {name: tensor.numpy() for name, tensor in reader.state().items()}
                np.savez(order["path"], **state)


def _wait_for_dense(replica: EmbeddingReplica, step: int) -> None:
    """Return when the dense part of a step is visible: the trainer's flush sends it after the step's rows."""
    deadline_s = time.monotonic() + _ANSWER_TIMEOUT_S / 2
    while (seen := replica.dense().step) < step:
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"the dense part of step {step} has not become visible, that of step {seen} is")
        time.sleep(0.005)


def _wait_for_answers(check: RecordingCheck, num_recorded: int) -> None:
    """Return when so many recordings were reached, or after a while: the report says how many were compared."""
    deadline_s = time.monotonic() + _ANSWER_TIMEOUT_S / 4
    while sum(check.outcomes.values()) < num_recorded and time.monotonic() < deadline_s:
        time.sleep(0.005)


def run(
    replay: Replay, *, num_shards: int, on_stage: OnStage, on_batch: Callable[[HitLog, int], None]
) -> tuple[HitLog, DemoReport]:
    """Run the demo once; return the hits of each copy, and what was found. Its processes and files are gone then.

    `on_batch` is called after each batch with the hits so far, and the number of events trained on.
    """
    started_s, log, hits = time.monotonic(), replay.log, HitLog(replay)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-demo-")))
        stack.enter_context(one_torch_thread())  # for tables this small a second thread costs more than it helps
        on_stage(f"starting a parameter server of {num_shards} shard{'s' * (num_shards > 1)}")
        server = stack.enter_context(ServerProcess.start(folder / "server", shards=num_shards))
        on_stage("publishing the untrained model")
        stack.enter_context(process_group())
        model = DemoModel(num_users=log.user_ids.size, num_items=log.item_ids.size, seed=replay.seed)
        # Without the environment's settings, which are for another server. Rows are as fresh as
        # they can be. The dense part changes slowly: every half second is soon enough.
        recordings = str(folder / "recordings")
        config = StreamerConfig(
            freshness_s=0, max_cost_percent=100, dense_interval_s=0.5, recordings=recordings, record_every_steps=1
        )
        streamer = stack.enter_context(RawEmbeddingStreamer(server.address, run="demo", config=config))
        streamer.attach(model.dmp, publish="all", dense=True)
        streamer.flush()  # a server that does not know a model needs its tables once; no further flush before the end
        np.savez(folder / "log.npz", **asdict(log))
        order: dict[str, Any] = {"address": server.address, "log_path": str(folder / "log.npz")}
        order |= {"batch_events": replay.batch_events, "seed": replay.seed, "recordings": recordings}
        reader = stack.enter_context(Child("headrace.scripts.ranking_demo.training:read", "the demo's reader", **order))
        num_published = streamer.stats().num_rows_sent
        on_stage("training, streaming and serving")
        training_s, num_missing, num_recorded = time.monotonic(), 0, 0
        steps, trained_ns = list[int](), list[int]()
        for batch in range(replay.num_batches):
            events = replay.events_of(batch)
            users, items = log.users[events], log.items[events]
            score = reader.ask(batch=batch, timeout_s=_ANSWER_TIMEOUT_S)
            num_missing += score.pop("missing")
            hits.add(live=rank(model.dmp, replay, batch), **score)
            model.train(batch, users, items, replay.num_items_seen[events])
            trained_ns.append(time.monotonic_ns())
            streamer.step()  # ends the step now; otherwise it would end when the next one begins
            steps.append(streamer.stats().step)
            if batch % _RECORDED_BATCHES == 0:
                num_recorded += streamer.record(_features(users, replay.candidates(batch)), model.dmp)
            on_batch(hits, events.stop)
        streamer.flush()
        streaming_s = time.monotonic() - training_s
        stats = streamer.stats()
        on_stage("comparing every row of trainer, server and replica")
        last = {"step": steps[-1], "path": str(folder / "served.npz"), "num_recorded": num_recorded}
        found = reader.ask(**last, timeout_s=_ANSWER_TIMEOUT_S)
        seen, outcomes = found["seen"], found["outcomes"]
        comparison = compare_with_store(streamer.tables, server.address)
        served = np.load(folder / "served.npz")
        weights = {**model.tables, "top.weight": model.dmp.state_dict()["top.weight"].numpy()}
        assert set(served) == set(weights), sorted(served)
        is_different = [(rows.view("i4") != served[name].view("i4")).any(axis=1) for name, rows in weights.items()]
    lags_ms = delays_of(steps, trained_ns, seen)
    p50_ms, p99_ms = np.percentile(lags_ms, [50, 99]).tolist()
    assert stats.lag_p50_s is not None and stats.lag_p99_s is not None  # there was a flush
    return hits, DemoReport(
        num_events=log.users.size,
        num_users=log.user_ids.size,
        num_items=log.item_ids.size,
        num_batches=replay.num_batches,
        num_shards=num_shards,
        seed=replay.seed,
        num_rows_compared=sum(table.num_rows for table in comparison.tables),
        num_rows_different=comparison.num_different + comparison.num_missing,
        num_replica_rows_different=sum(int(of_table.sum()) for of_table in is_different),
        num_answers_compared=outcomes["equal"] + outcomes["different"],
        num_answers_different=outcomes["different"],
        num_rows_streamed=stats.num_rows_sent - num_published,
        streaming_s=streaming_s,
        ack_lag={"p50_ms": stats.lag_p50_s * 1e3, "p99_ms": stats.lag_p99_s * 1e3, "count": stats.num_flushes},
        arrival_lag={"p50_ms": p50_ms, "p99_ms": p99_ms, "count": len(lags_ms)},
        num_missing_rows=num_missing,
        hit_rate=hits.rates(),
        hit_rate_whole_log=hits.rates(first_part=0),
        duration_s=time.monotonic() - started_s,
    )
