"""`headrace bench freshness`: from the optimizer's update in one process to visible in a replica in another.

Blocks of paced training take turns with blocks of `Floor`, which sends the same bytes.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from headrace.paramserver.shard.launch import ServerProcess
from headrace.scripts.benches.child import Child, Worker
from headrace.scripts.benches.harness import OnStage, RoundsOption, bench_command, bench_folder
from headrace.scripts.benches.observer import delays_of, observed_replica

__all__ = ["floor", "freshness", "make_figures", "measure"]

_NUM_ROWS, _DIM, _ID_BYTES = 200_000, 64, 8
_ROWS_PER_STEP, _ROWS_PER_S = 1000, 100_000
_INTERVAL_S = _ROWS_PER_STEP / _ROWS_PER_S
_NUM_WARM_STEPS = 50
_NUM_BATCHES = 64


def measure(
    on_stage: OnStage,
    *,
    num_steps: Annotated[
        int, typer.Option("--steps", min=1, help="Steps of a block, and round trips of a block of the floor.")
    ] = 500,
    num_rounds: RoundsOption = 3,
) -> dict[str, Any]:
    """Measure how long an update takes from the optimizer to a replica in another process.

    A trainer (torch, one table, SGD) streams 100,000 rows a second through a server of one shard to a replica, each
    step at once. The floor is one round trip of a step's bytes to a bare server that writes and syncs them, and one to
    a reader. The exit code is 1 if the median is more than five times the floor's.
    """
    floor_ms: list[float] = []
    blocks: list[dict[str, Any]] = []
    with bench_folder() as folder:
        on_stage("starting server, trainer and replica")
        with (
            ServerProcess.start(folder / "data", shards=1) as server,
            Child(f"{__name__}:_train", "the bench's trainer", address=server.address) as trainer,
            observed_replica(server.address) as replica,
            floor(folder, _ROWS_PER_STEP * (_DIM * 4 + _ID_BYTES)) as round_trip_ms,
        ):
            _measure_block(trainer, replica, _NUM_WARM_STEPS)
            for number in range(num_rounds):
                on_stage(f"round {number + 1}: floor")
                floor_ms += [round_trip_ms() for _ in _paced(num_steps)]
                on_stage(f"round {number + 1}: training, streaming, serving")
                blocks.append(_measure_block(trainer, replica, num_steps))
    return make_figures(blocks, floor_ms)


def _measure_block(trainer: Child, replica: Child, num_steps: int) -> dict[str, Any]:
    """Train one block; return the trainer's answer, and `delays_ms` of each step."""
    trained = trainer.ask(num_steps=num_steps)
    steps = range(trained["first_step"], trained["first_step"] + num_steps)
    seen = replica.ask(step=steps[-1])["seen"]
    return {**trained, "delays_ms": delays_of(steps, trained["updated_ns"], seen)}


def make_figures(blocks: list[dict[str, Any]], floor_ms: list[float]) -> dict[str, Any]:
    """Return the figures of all blocks."""
    delays_ms = [delay for block in blocks for delay in block["delays_ms"]]
    p50_ms, p99_ms = np.percentile(delays_ms, [50, 99]).tolist()
    floor_p50_ms, floor_p99_ms = np.percentile(floor_ms, [50, 99]).tolist()
    return {
        "p50_ms": p50_ms,
        "p99_ms": p99_ms,
        "p50_vs_floor": p50_ms / floor_p50_ms,
        "floor_p50_ms": floor_p50_ms,
        "floor_p99_ms": floor_p99_ms,
        "rows_per_s": sum(block["num_rows_sent"] for block in blocks) / sum(block["took_s"] for block in blocks),
        "num_steps": len(delays_ms),
        "block_p50_ms": [median(block["delays_ms"]) for block in blocks],
    }


freshness = bench_command("freshness", measure)


def _train(address: str) -> Worker:
    """Train a small model at a steady pace and stream each step; an order is `num_steps` of a block."""
    import torch
    from torch import nn

    from headrace.streamer import RawEmbeddingStreamer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    draws = (rng.choice(_NUM_ROWS, _ROWS_PER_STEP, replace=False).reshape(-1, 10) for _ in range(_NUM_BATCHES))
    batches = [torch.from_numpy(ids) for ids in draws]
    rows, top = nn.EmbeddingBag(_NUM_ROWS, _DIM, mode="sum", sparse=True), nn.Linear(_DIM, 1)
    model = nn.ModuleDict({"rows": rows, "top": top})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    updated_ns: list[int] = []
    # Registered before the streamer's own hook, which flushes: this is the moment of the update.
    optimizer.register_step_post_hook(lambda *_: updated_ns.append(time.monotonic_ns()))
    streamer = RawEmbeddingStreamer(address, run="bench", freshness_s=0, max_cost_percent=100)
    streamer.attach(model, optimizer, publish="all")
    streamer.flush()
    answer: dict[str, Any] = {}
    while True:
        order = yield answer
        updated_ns.clear()
        before = streamer.stats()
        began_s = time.monotonic()
        for step in _paced(order["num_steps"]):
            optimizer.zero_grad()
            logits = top(rows(batches[step % _NUM_BATCHES])).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))
            torch.autograd.backward(loss)
            optimizer.step()
        took_s = time.monotonic() - began_s
        streamer.flush()
        after = streamer.stats()
        answer = {
            "first_step": before.step + 1,
            "updated_ns": updated_ns,
            "took_s": took_s,
            "num_rows_sent": after.num_rows_sent - before.num_rows_sent,
        }


@contextmanager
def floor(folder: Path, size_bytes: int) -> Iterator[Callable[[], float]]:
    """Yield the least that freshness can cost on a machine: a function that returns milliseconds.

    Two processes with one blocking socket each: one appends each message to a file and calls `fdatasync` before it
    replies, the other reads the message and replies. An update that is durable before it is visible elsewhere cannot
    take less than both round trips in a row.
    """
    data, socks = os.urandom(size_bytes), list[socket.socket]()
    with ExitStack() as stack:
        for what, path in (("writer", str(folder / "floor")), ("reader", None)):
            worker = Child(f"{__name__}:_receive", f"the floor's {what}", size_bytes=size_bytes, path=path)
            stack.enter_context(worker)
            socks.append(stack.enter_context(socket.create_connection(("127.0.0.1", worker.ready["port"]))))
            socks[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def measure() -> float:
            begin_s = time.perf_counter()
            for sock in socks:
                sock.sendall(data)
                if not sock.recv(1):
                    raise ConnectionError("a process of the floor has ended")
            return (time.perf_counter() - begin_s) * 1000

        yield measure


def _paced(count: int) -> Iterator[int]:
    """Yield numbers at the trainer's interval. A late one does not make the next ones earlier: two would be a burst."""
    next_s = time.monotonic()
    for number in range(count):
        yield number
        next_s = max(next_s + _INTERVAL_S, time.monotonic())
        time.sleep(max(0.0, next_s - time.monotonic()))


def _receive(size_bytes: int, path: str | None) -> Worker:
    """Reply to each message on a connection; with a path, append it to the file and sync it before."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_reply, args=(listener, size_bytes, path), daemon=True).start()
    yield {"port": listener.getsockname()[1]}


def _reply(listener: socket.socket, size_bytes: int, path: str | None) -> None:
    buffer = memoryview(bytearray(size_bytes))
    file = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        filled = 0
        while filled < len(buffer):
            count = sock.recv_into(buffer[filled:])
            if not count:
                return
            filled += count
        if file is not None:
            os.write(file, buffer)
            os.fdatasync(file)
        sock.sendall(b"!")
