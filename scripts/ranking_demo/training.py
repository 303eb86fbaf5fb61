"""The demo's trainer: a model that streams to a server, with a reader beside it, and the comparison at the end.

The model is a factorization with one embedding row for each user and one for each item. The score of a user and an item
is the dot product of their rows; training tells each event's item from random ones. FBGEMM's fused rowwise Adagrad
updates the TorchRec tables in the backward pass, as in production, but small.

For each batch of events, in time order: the reader scores it with what its replica holds at that moment, the trainer's
own tables score it too, and then the trainer trains on it. The trainer never waits for its updates to arrive, only for
the reader's answer, so the streamed copy is as old as it really is.
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

from headrace.paramserver.shard.launch import ServerProcess
from headrace.scripts.benches.child import Child
from headrace.scripts.benches.harness import OnStage, one_torch_thread
from headrace.scripts.benches.observer import delays_of
from headrace.scripts.ranking_demo.events import TABLES, Replay, draw, is_hit
from headrace.scripts.ranking_demo.summary import DemoReport, HitLog
from headrace.streamer import RawEmbeddingStreamer, StreamerConfig
from headrace.streamer.compare import compare_with_store

__all__ = ["DemoModel", "process_group", "run"]

_ANSWER_TIMEOUT_S = 90.0  # longer than any deadline in the reader, whose own error says more
# Tuned on the sample log, for the hit rate of the live tables. A row that was not trained on yet scores by its first
# values, from a normal distribution with this standard deviation.
_DIM, _LEARNING_RATE, _INIT_STD = 32, 0.3, 0.1
_NUM_RANDOM_ITEMS, _NUM_PASSES = 32, 2  # each pass over a batch is an optimizer step with other random items
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

    `tables` are the live rows by fqn, float32[num_rows, dim]: views of the trainer's memory, not copies.
    """

    def __init__(self, *, num_users: int, num_items: int, seed: int) -> None:
        """Build and shard the model. REQUIRES: a process group of one, as `process_group` makes it."""
        self._seed = seed
        torch.manual_seed(seed)
        logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # warns of how TorchRec uses torch
        ebc = EmbeddingBagCollection(
            device=torch.device("cpu"), tables=[_make_table("user", num_users), _make_table("item", num_items)]
        )
        fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": _LEARNING_RATE}
        sharder = EmbeddingBagCollectionSharder(fused_params=fused)
        # Without a kernel's name the plan takes the dense one, which has no fused optimizer.
        placement = {name: table_wise(rank=0, compute_kernel="fused") for name in ("user", "item")}
        plan = construct_module_sharding_plan(
            ebc, placement, sharder=sharder, world_size=1, local_size=1, device_type="cpu"
        )
        self.dmp = DistributedModelParallel(
            _Factorization(ebc), device=torch.device("cpu"), plan=ShardingPlan({"ebc": plan}), sharders=[sharder]
        )
        states = self.dmp.state_dict()
        self.tables = {fqn: parameter.local_shards()[0].tensor.numpy() for fqn, parameter in states.items()}
        assert set(self.tables) == set(TABLES), sorted(self.tables)

    def train(self, batch: int, users: _Ids, items: _Ids, num_items_seen: _Ids) -> float:
        """Train on one batch, int64[b] each, and return the loss of its first pass, a mean over the events."""
        rng = np.random.default_rng((_TRAINING_STREAM, self._seed, batch))
        losses = []
        for _ in range(_NUM_PASSES):
            pairs = draw(rng, items, num_items_seen, _NUM_RANDOM_ITEMS)
            values = np.concatenate([np.repeat(users, pairs.shape[1]), pairs.ravel()])
            lengths = torch.ones(values.size, dtype=torch.int32)  # bags of one id: each user against each of its items
            features = KeyedJaggedTensor(keys=["user", "item"], values=torch.from_numpy(values), lengths=lengths)
            logits = self.dmp(features).view(pairs.shape)
            # A sum, not a mean: a row's step does not depend on how many others share its batch.
            loss = nn.functional.softplus(-logits[:, 0]).sum() + nn.functional.softplus(logits[:, 1:]).sum()
            torch.autograd.backward(loss)  # the fused optimizer updates the rows here
            losses.append(loss.item() / users.size)
        return losses[0]


class _Factorization(nn.Module):
    def __init__(self, ebc: EmbeddingBagCollection) -> None:
        super().__init__()
        self.ebc = ebc

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        rows = self.ebc(features).to_dict()
        scores: torch.Tensor = (rows["user"] * rows["item"]).sum(dim=1)
        return scores


def _make_table(name: str, num_rows: int) -> EmbeddingBagConfig:
    init = functools.partial(nn.init.normal_, std=_INIT_STD)
    sizes = {"num_embeddings": num_rows, "embedding_dim": _DIM}
    return EmbeddingBagConfig(name=name, feature_names=[name], init_fn=init, **sizes)


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
        on_stage("publishing the untrained tables")
        stack.enter_context(process_group())
        model = DemoModel(num_users=log.user_ids.size, num_items=log.item_ids.size, seed=replay.seed)
        # Without the environment's settings, which are for another server. Rows are as fresh as they can be.
        config = StreamerConfig(flush_percent=100)
        streamer = stack.enter_context(RawEmbeddingStreamer(server.address, run="demo", config=config))
        streamer.attach(model.dmp, publish="all")
        streamer.flush()  # a server that does not know a model needs its tables once; no further flush before the end
        np.savez(folder / "log.npz", **asdict(log))
        order: dict[str, Any] = {"address": server.address, "log_path": str(folder / "log.npz")}
        order |= {"batch_events": replay.batch_events, "seed": replay.seed}
        reader = stack.enter_context(Child("headrace.scripts.ranking_demo.reader:read", "the demo's reader", **order))
        num_published = streamer.stats().num_rows_sent
        on_stage("training, streaming and serving")
        training_s, num_missing = time.monotonic(), 0
        steps, trained_ns = list[int](), list[int]()
        for batch in range(replay.num_batches):
            events = replay.events_of(batch)
            users, items = log.users[events], log.items[events]
            score = reader.ask(batch=batch, timeout_s=_ANSWER_TIMEOUT_S)
            user_rows, item_rows = (model.tables[fqn] for fqn in TABLES)
            live = is_hit(user_rows[users], item_rows[replay.candidates(batch)])
            hits.add(live=int(live.sum()), **score)
            num_missing += score["missing"]
            model.train(batch, users, items, replay.num_items_seen[events])
            trained_ns.append(time.monotonic_ns())
            streamer.step()  # ends the step now; otherwise it would end when the next one begins
            steps.append(streamer.stats().step)
            on_batch(hits, events.stop)
        streamer.flush()
        streaming_s = time.monotonic() - training_s
        stats = streamer.stats()
        on_stage("comparing every row of trainer, server and replica")
        seen = reader.ask(step=steps[-1], path=str(folder / "served.npz"), timeout_s=_ANSWER_TIMEOUT_S)["seen"]
        comparison = compare_with_store(streamer.tables, server.address)
        served = np.load(folder / "served.npz")
        is_different = [(rows.view("i4") != served[fqn].view("i4")).any(axis=1) for fqn, rows in model.tables.items()]
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
        num_rows_streamed=stats.num_rows_sent - num_published,
        streaming_s=streaming_s,
        ack_lag={"p50_ms": stats.lag_p50_s * 1e3, "p99_ms": stats.lag_p99_s * 1e3, "count": stats.num_flushes},
        arrival_lag={"p50_ms": p50_ms, "p99_ms": p99_ms, "count": len(lags_ms)},
        num_missing_rows=num_missing,
        hit_rate=hits.rates(),
        hit_rate_whole_log=hits.rates(first_part=0),
        duration_s=time.monotonic() - started_s,
    )
