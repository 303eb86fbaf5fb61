"""The demo: a model that trains and streams to a server, and its served model, in another process, which ranks.

The score of a user and an item is the sum of the products of their embedding rows, each weighted by a dense layer;
training tells each event's item from random ones. FBGEMM's fused rowwise Adagrad updates the TorchRec tables.

For each batch of events, in time order: the reader ranks it with the served model as it is at that moment, the trainer
ranks it too, and then trains on it. The trainer waits for the reader's answer, never for its updates to arrive.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from rich.console import Console
from rich.progress import track
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, embeddingbag, sharding_plan, types

from headrace.paramserver.replica import EmbeddingReplica, RecordingCheck, serve_model
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import UnavailableError
from headrace.scripts.benches.child import Child, Worker
from headrace.scripts.benches.harness import one_torch_thread
from headrace.scripts.benches.observer import Observer, delays_of
from headrace.scripts.ranking_demo.events import TABLES, Replay, is_hit
from headrace.streamer import RawEmbeddingStreamer, StreamerConfig

__all__ = ["DemoModel", "Reader", "join_process_group", "rank", "read", "run"]

_ANSWER_TIMEOUT_S = 90.0  # longer than any deadline in the reader, whose own error says more
# Tuned on the sample log, for the hit rate of the live tables.
_DIM, _LEARNING_RATE, _DENSE_LEARNING_RATE, _INIT_STD = 32, 0.3, 0.01, 0.1
_NUM_RANDOM_ITEMS, _NUM_PASSES = 32, 2  # each pass over a batch is an optimizer step with other random items
_RECORDED_BATCHES = 20  # one in so many is recorded, and answered again by the served model

_Ids = npt.NDArray[np.int64]


def join_process_group() -> None:
    """Make this process the whole of a torch.distributed group. It needs no network port."""
    # gloo looks up the host's own name and complains if it does not resolve; loopback is always there.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in the module's `__all__`
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


class DemoModel:
    """The model under `DistributedModelParallel`, `dmp`, and its training step.

    `tables` are the live rows by fqn, float32[num_rows, dim]: the trainer's memory, not copies.
    """

    def __init__(self, replay: Replay) -> None:
        """Build and shard the model. REQUIRES: a process group of one, as `join_process_group` makes it."""
        self._replay = replay
        torch.manual_seed(0)
        ranker = _Ranker(replay)
        fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": _LEARNING_RATE}
        sharder = embeddingbag.EmbeddingBagCollectionSharder(fused_params=fused)
        # Without a kernel's name the plan takes the dense one, which has no fused optimizer.
        placement = {name: sharding_plan.table_wise(rank=0, compute_kernel="fused") for name in ("user", "item")}
        plan = sharding_plan.construct_module_sharding_plan(
            ranker.ebc, placement, sharder=sharder, world_size=1, local_size=1, device_type="cpu"
        )
        settings = {"plan": types.ShardingPlan({"ebc": plan}), "sharders": [sharder], "init_data_parallel": False}
        self.dmp = DistributedModelParallel(ranker, device=torch.device("cpu"), **settings)
        states = self.dmp.state_dict()
        self.tables = {fqn: states[fqn].local_shards()[0].tensor for fqn in TABLES}
        self._optimizer = torch.optim.Adagrad(ranker.top.parameters(), lr=_DENSE_LEARNING_RATE)

    def train(self, batch: int) -> None:
        """Train on one batch."""
        users = self._replay.users[self._replay.events_of(batch)]
        for number in range(_NUM_PASSES):
            pairs = self._replay.candidates(batch, _NUM_RANDOM_ITEMS, stream=1 + number)
            logits = self.dmp(_features(users, pairs)).view(pairs.shape)
            # A sum, not a mean: a row's step does not depend on how many others share its batch.
            loss = nn.functional.softplus(-logits[:, 0]).sum() + nn.functional.softplus(logits[:, 1:]).sum()
            self._optimizer.zero_grad()
            torch.autograd.backward(loss)  # the fused optimizer updates the rows here
            self._optimizer.step()


class _Ranker(nn.Module):
    """The plain model, untrained; its tables without memory if the device is `meta`."""

    def __init__(self, replay: Replay, device: str = "cpu") -> None:
        super().__init__()
        logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # warns of how TorchRec uses torch
        init, tables = functools.partial(nn.init.normal_, std=_INIT_STD), []
        for name, num_rows in (("user", replay.num_users), ("item", replay.num_items)):
            sizes = {"num_embeddings": num_rows, "embedding_dim": _DIM}
            tables.append(EmbeddingBagConfig(name=name, feature_names=[name], init_fn=init, **sizes))
        self.ebc = EmbeddingBagCollection(device=torch.device(device), tables=tables)
        self.top = nn.Linear(_DIM, 1, bias=False)
        nn.init.ones_(self.top.weight)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        rows = self.ebc(features).to_dict()
        scores: torch.Tensor = self.top(rows["user"] * rows["item"])
        return scores


def _features(users: _Ids, pairs: _Ids) -> KeyedJaggedTensor:
    """Return int64[b] users against int64[b, n] items, as bags of one id."""
    values = np.concatenate([np.repeat(users, pairs.shape[1]), pairs.ravel()])
    lengths = torch.ones(values.size, dtype=torch.int32)
    return KeyedJaggedTensor(keys=["user", "item"], values=torch.from_numpy(values), lengths=lengths)


@torch.no_grad()
def rank(model: nn.Module, replay: Replay, batch: int) -> int:
    """Return how many events of a batch a model ranks as hits."""
    candidates = replay.candidates(batch)
    scores = model(_features(replay.users[replay.events_of(batch)], candidates))
    return int(is_hit(scores.view(candidates.shape).numpy()).sum())


class Reader:
    """Ranks with the model `served`, and with a copy of it that is frozen at the start of each part of the log."""

    def __init__(self, replica: EmbeddingReplica, replay: Replay) -> None:
        self._replica, self._replay = replica, replay
        self.served = serve_model(_Ranker(replay, "meta"), replica)
        self._frozen = _Ranker(replay)

    def rank(self, batch: int) -> dict[str, int]:
        """Return the hits of the `streamed` and the `frozen` model."""
        if batch in self._replay.part_starts:
            self._frozen.load_state_dict(self.state())
        models = {"streamed": self.served, "frozen": self._frozen}
        return {copy: rank(model, self._replay, batch) for copy, model in models.items()}

    def state(self) -> dict[str, torch.Tensor]:
        """Return all rows and the dense part of one moment, as the model's `state_dict` names them."""
        sizes = self._replay.num_users, self._replay.num_items
        ids = {fqn: torch.arange(size) for fqn, size in zip(TABLES, sizes, strict=True)}
        return self._replica.at_one_moment(lambda: {**self._replica.lookup_many(ids), **self._replica.dense().tensors})


def read(address: str, max_events: int | None, recordings: str) -> Worker:
    """Follow the server at an address; an order is a `batch` to rank, or the last `step` and a `path` to save to.

    Meanwhile a second replica, by step, answers the trainer's recordings.
    """
    torch.set_num_threads(1)  # for tables this small a second thread costs more than it helps
    replay = Replay(max_events)
    with (
        EmbeddingReplica(address) as replica,
        Observer(replica) as observer,
        EmbeddingReplica(address, consistency="step") as by_step,
        RecordingCheck(Reader(by_step, replay).served, recordings, by_step).watch(interval_s=0.01) as check,
    ):
        reader = Reader(replica, replay)
        order = yield {}
        while "batch" in order:
            order = yield reader.rank(order["batch"])
        seen = observer.wait_for(order["step"])
        # The trainer's flush sends the dense part of a step after the step's rows.
        _wait(lambda: replica.dense().step >= order["step"], "the last dense part has not become visible")
        _wait(lambda: sum(check.outcomes.values()) >= order["num_recorded"], "some recordings were not answered")
        torch.save(reader.state(), order["path"])
        yield {"seen": seen, "outcomes": check.outcomes}


def _wait(is_done: Callable[[], bool], otherwise: str) -> None:
    deadline_s = time.monotonic() + _ANSWER_TIMEOUT_S / 3
    while not is_done():
        time.sleep(0.005)
        if time.monotonic() > deadline_s:
            raise UnavailableError(otherwise)


def run(max_events: int | None, num_shards: int, console: Console) -> dict[str, Any]:
    """Run the demo once, and return what was found. Its processes and files are gone then."""
    replay, hits = Replay(max_events), Counter[str]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-demo-")))
        stack.enter_context(one_torch_thread())
        console.print(f"starting a parameter server of {num_shards} shard{'s' * (num_shards > 1)}", style="dim")
        server = stack.enter_context(ServerProcess.start(folder / "server", shards=num_shards))
        console.print("publishing the untrained model", style="dim")
        join_process_group()
        stack.callback(dist.destroy_process_group)
        model = DemoModel(replay)
        # Without the environment's settings, which are for another server. Rows are as fresh as they can be.
        recordings = str(folder / "recordings")
        pace: Any = {"freshness_s": 0, "max_cost_percent": 100, "dense_interval_s": 0.5, "record_every_steps": 1}
        config = StreamerConfig(recordings=recordings, **pace)
        streamer = stack.enter_context(RawEmbeddingStreamer(server.address, run="demo", config=config))
        streamer.attach(model.dmp, publish="all", dense=True)
        streamer.flush()  # a server that does not know a model needs its tables once; no further flush before the end
        order: Any = {"address": server.address, "max_events": max_events, "recordings": recordings}
        reader = stack.enter_context(Child(f"{__name__}:read", "the demo's reader", **order))
        console.print("training, streaming and serving", style="dim")
        num_recorded, steps, trained_ns = 0, list[int](), list[int]()
        for batch in track(range(replay.num_batches), "batches", console=console, transient=True):
            events = replay.events_of(batch)
            score = reader.ask(batch=batch, timeout_s=_ANSWER_TIMEOUT_S)
            score["live"] = rank(model.dmp, replay, batch)
            if batch >= replay.part_starts[1]:  # before, the frozen copy is untrained
                hits.update({**score, "events": events.stop - events.start})
            model.train(batch)
            trained_ns.append(time.monotonic_ns())
            streamer.step()  # ends the step now; otherwise it would end when the next one begins
            steps.append(streamer.stats().step)
            if batch % _RECORDED_BATCHES == 0:
                num_recorded += streamer.record(_features(replay.users[events], replay.candidates(batch)), model.dmp)
        streamer.flush()
        stats = streamer.stats()
        console.print("comparing every row of trainer, server and replica", style="dim")
        last = {"step": steps[-1], "path": str(folder / "served"), "num_recorded": num_recorded}
        found = reader.ask(**last, timeout_s=_ANSWER_TIMEOUT_S)
        audit = streamer.audit()
        trained = {**model.tables, "top.weight": model.dmp.state_dict()["top.weight"]}
        served = {name: rows.view(torch.int32) for name, rows in torch.load(folder / "served").items()}
        is_different = [(rows.view(torch.int32) != served[name]).any(1) for name, rows in trained.items()]
    assert stats.lag_p50_s is not None and stats.lag_p99_s is not None  # there was a flush
    outcomes = found["outcomes"]
    return {
        "num_rows_compared": audit.num_rows,
        "num_rows_different": sum(len(table.differing_row_ids) + table.num_missing for table in audit.tables),
        "num_replica_rows_different": sum(int(of_table.sum()) for of_table in is_different),
        "num_answers_compared": outcomes["equal"] + outcomes["different"],
        "num_answers_different": outcomes["different"],
        "num_rows_streamed": stats.num_rows_sent,
        "ack_lag_ms": [stats.lag_p50_s * 1e3, stats.lag_p99_s * 1e3],
        "arrival_lag_ms": np.percentile(delays_of(steps, trained_ns, found["seen"]), [50, 99]).tolist(),
        "hit_rate": {copy: hits[copy] / hits["events"] for copy in ("streamed", "frozen", "live")},
    }
