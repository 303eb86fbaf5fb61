"""`headrace bench dense`: what publishing dense parameters costs a training step, and how late a replica shows them.

One process has two copies of a model and trains them in turns. Both stream their rows, each to a server with a replica
that follows; one also publishes its dense parameters. A block begins right after a dense step and ends with the last of
`num_intervals` further ones, so each copy of the parameters, and the sending between them, is inside what is measured.
A block without dense parameters, of as many steps, stands on either side, so that a machine that becomes slower or
faster meanwhile does not count. Servers and replicas have one processor, as they have machines of their own otherwise;
the trainer may use all.
"""

from __future__ import annotations

import itertools
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import mean, median
from typing import Annotated, Any

import typer

from headrace.paramserver.shard.launch import ServerProcess
from headrace.scripts.benches.child import Child, Worker, on_processor
from headrace.scripts.benches.harness import FolderOption, OnStage, Rounds, RoundsOption, bench_command, bench_folder
from headrace.scripts.benches.observer import delays_of, observed_replica

__all__ = ["DenseConfig", "dense", "make_figures", "measure"]

_RUN = "bench"
_KINDS = ("dense", "rows")
_NUM_FIRST_STEPS = 64  # of the first block, before one with dense parameters has said how many it has


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseConfig:
    """How much `headrace bench dense` measures; by default 100 MB of dense parameters."""

    num_layers: Annotated[int, typer.Option("--layers", min=1, help="Dense layers.")] = 6
    width: Annotated[int, typer.Option(min=1, help="Their width; a layer has its square of float32.")] = 2048
    batch_size: Annotated[int, typer.Option("--batch", min=1, help="Samples of a step.")] = 64
    num_rows: Annotated[int, typer.Option("--rows", min=100, help="Rows of the table, of 64 float32.")] = 200_000
    interval_s: Annotated[float, typer.Option(min=0.01, help="The streamer's dense_interval_s.")] = 10.0
    num_intervals: Annotated[int, typer.Option("--intervals", min=1, help="Dense intervals of a block.")] = 2
    num_rounds: RoundsOption = 5
    folder: FolderOption = None


def measure(config: DenseConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure what dense parameters add to a training step, and how late a replica in another process shows them.

    The exit code is 1 if a figure misses its target.
    """
    model = {name: getattr(config, name) for name in ("num_layers", "width", "batch_size", "num_rows", "interval_s")}
    step_s, delays_s = Rounds(), Rounds()
    loads: list[float] = []
    with bench_folder(config.folder) as folder:
        on_stage("starting servers, trainer and replicas")
        with ExitStack() as running:
            with on_processor(max(os.sched_getaffinity(0))):
                server, plain = (running.enter_context(ServerProcess.start(folder / kind, shards=1)) for kind in _KINDS)
                addresses = [server.address, plain.address]
            trainer = running.enter_context(Child(f"{__name__}:_train", "the trainer", addresses=addresses, **model))
            with on_processor(max(os.sched_getaffinity(0))):
                replica, _ = (
                    running.enter_context(observed_replica(address, consistency="step")) for address in addresses
                )

            def train(kind: str, num_steps: int) -> Any:
                block = trainer.ask(kind=kind, num_intervals=config.num_intervals, num_steps=num_steps)
                step_s.add(kind, mean(block["step_s"]))
                loads.append(os.getloadavg()[0])
                return block

            num_steps = _NUM_FIRST_STEPS
            train("rows", num_steps)
            for number in range(config.num_rounds):
                on_stage(f"round {number + 1}: dense")
                block = train("dense", num_steps)
                num_steps = len(block["step_s"])
                on_stage(f"round {number + 1}: rows")
                train("rows", num_steps)
                shown = replica.ask(step=block["dense_steps"][-1])
                for delay_ms in delays_of(block["dense_steps"], block["updated_ns"], shown["seen"]):
                    delays_s.add("dense", delay_ms / 1000)
    return make_figures(step_s, delays_s["dense"], trainer.ready["dense_bytes"]) | {"load_average": loads}


def make_figures(step_s: Rounds, delays_s: list[float], dense_bytes: int) -> dict[str, Any]:
    """Return the figures of each block's mean step, by `dense` and `rows`, and of each dense step's delay.

    There is a block of `rows` before the first one of `dense` and after each.
    """
    neighbors = itertools.pairwise(step_s["rows"])
    ratios = [dense / mean(rows) for dense, rows in zip(step_s["dense"], neighbors, strict=True)]
    return {
        "dense_step_ratio": median(ratios),
        "dense_visible_extra_p50_s": median(delays_s),
        "step_ms": step_s.medians(1000),
        "dense_bytes": dense_bytes,
        "round_ratios": ratios,
        "delays_s": delays_s,
    }


dense = bench_command("dense", DenseConfig, measure, has_bounds=True)


def _train(
    addresses: list[str], num_layers: int, width: int, batch_size: int, num_rows: int, interval_s: float
) -> Worker:
    """Train block after block; an order is its `kind`, `num_intervals` of dense ones, and `num_steps` of the others.

    The answer has `step_s` of each step, and the `dense_steps` with the moments `updated_ns` of their optimizer's step.
    """
    import torch
    from torch import nn

    from headrace.streamer import RawEmbeddingStreamer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    ids = [torch.randint(num_rows, (batch_size, 20)) for _ in range(16)]
    updated_ns: dict[int, int] = {}

    def start(kind: str, address: str) -> tuple[Any, Any]:
        rows = nn.EmbeddingBag(num_rows, 64, mode="sum", sparse=True)
        layers = itertools.chain.from_iterable((nn.Linear(width, width), nn.ReLU()) for _ in range(num_layers))
        top = nn.Sequential(nn.Linear(64, width), *layers, nn.Linear(width, 1))
        model = nn.ModuleDict({"rows": rows, "top": top})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        streamer = RawEmbeddingStreamer(address, run=_RUN, dense_interval_s=interval_s)
        numbers = itertools.count(streamer.stats().step + 1)
        # Registered before the streamer's own hook, which copies: this is the moment of the update.
        optimizer.register_step_post_hook(lambda *_: updated_ns.update({next(numbers): time.monotonic_ns()}))
        streamer.attach(model, optimizer, publish="all", dense=kind == "dense")
        streamer.flush()

        def step(number: int) -> float:
            begin_s = time.perf_counter()
            optimizer.zero_grad()
            logits = top(rows(ids[number % len(ids)])).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))
            torch.autograd.backward(loss)
            optimizer.step()
            return time.perf_counter() - begin_s

        return step, streamer

    trainers = {kind: start(kind, address) for kind, address in zip(_KINDS, addresses, strict=True)}
    answer: dict[str, Any] = {"dense_bytes": trainers["dense"][1].stats().dense_bytes}
    while True:
        order = yield answer
        step, streamer = trainers[order["kind"]]
        updated_ns.clear()
        last = streamer.stats().dense_step
        step_s: list[float] = []
        dense_steps: list[int] = []
        if order["kind"] == "dense":
            while streamer.stats().dense_step == last:  # due since the last block
                step(0)
            last = streamer.stats().dense_step
        else:
            step(0)  # touches the caches
        num_steps, num_intervals = order["num_steps"], order["num_intervals"]
        while len(dense_steps) < num_intervals if order["kind"] == "dense" else len(step_s) < num_steps:
            step_s.append(step(len(step_s)))
            if (now := streamer.stats().dense_step) != last:
                dense_steps.append(now)
                last = now
        # No flush here: one would send the dense part again, which the server would store in the next block's time.
        moments = [updated_ns[number] for number in dense_steps]
        answer = {"step_s": step_s, "dense_steps": dense_steps, "updated_ns": moments}
