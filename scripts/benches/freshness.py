"""`headrace bench freshness`: from the optimizer's update in one process to visible in a replica in another.

Blocks of paced training take turns with blocks of `Floor`, which sends the same bytes.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Self, Unpack

import numpy as np
import typer

from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError
from headrace.scripts.benches.child import Child, Worker
from headrace.scripts.benches.harness import FolderOption, OnStage, RoundsOption, bench_command, bench_folder
from headrace.scripts.benches.observer import delays_of, observed_replica

if TYPE_CHECKING:
    from headrace.streamer.config import StreamerSettings

__all__ = ["Floor", "FreshnessConfig", "freshness", "make_figures", "measure"]

_ID_BYTES = 8
_NUM_WARM_STEPS = 50
_NUM_BATCHES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class FreshnessConfig:
    """How much `headrace bench freshness` measures."""

    num_rows: Annotated[int, typer.Option("--rows", min=10, help="Rows of the table.")] = 200_000
    dim: Annotated[int, typer.Option(min=1, max=4096, help="Its columns, float32.")] = 64
    rows_per_step: Annotated[int, typer.Option(min=10, help="Different rows that a step updates.")] = 1000
    rows_per_s: Annotated[int, typer.Option(min=10, help="Pace of the trainer.")] = 100_000
    num_steps: Annotated[
        int, typer.Option("--steps", min=1, help="Steps of a block, and round trips of a block of the floor.")
    ] = 500
    consistency: Annotated[str, typer.Option(help="Of the replica: latest or step.")] = "latest"
    freshness_s: Annotated[float, typer.Option(min=0, help="The streamer's setting.")] = 0.0
    max_cost_percent: Annotated[int, typer.Option(min=1, max=100, help="The streamer's setting.")] = 100
    num_warm_steps: int = _NUM_WARM_STEPS  # steps before the first block, which do not count
    num_rounds: RoundsOption = 3
    folder: FolderOption = None

    def __post_init__(self) -> None:
        if self.rows_per_step % 10 or not 10 <= self.rows_per_step <= self.num_rows:
            raise ConfigError(f"--rows-per-step {self.rows_per_step}: must be a multiple of 10 up to {self.num_rows}")
        if self.consistency not in ("latest", "step"):
            raise ConfigError(f"--consistency {self.consistency!r}: must be latest or step")

    @property
    def step_bytes(self) -> int:
        """Bytes that a step sends."""
        return self.rows_per_step * (self.dim * 4 + _ID_BYTES)


def measure(config: FreshnessConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure how long an update takes from the optimizer to a replica in another process.

    A trainer (torch, one table, SGD) streams at a steady pace through a server of one shard to a replica. The floor is
    one round trip of a step's bytes to a bare server that writes and syncs them, and one to a reader. The exit code is
    1 if the median is more than five times the floor's.
    """
    names = ("num_rows", "dim", "rows_per_step", "rows_per_s", "freshness_s", "max_cost_percent")
    trained = {name: getattr(config, name) for name in names}
    floor_ms: list[float] = []
    blocks: list[dict[str, Any]] = []
    with bench_folder(config.folder) as folder:
        on_stage("starting server, trainer and replica")
        with (
            ServerProcess.start(folder / "data", shards=1) as server,
            Child(f"{__name__}:_train", "the bench's trainer", address=server.address, **trained) as trainer,
            observed_replica(server.address, consistency=config.consistency) as replica,
            Floor(folder, config.step_bytes) as floor,
        ):
            _measure_block(trainer, replica, config.num_warm_steps)
            for number in range(config.num_rounds):
                on_stage(f"round {number + 1}: floor")
                floor_ms += floor.measure(config.num_steps, interval_s=config.rows_per_step / config.rows_per_s)
                on_stage(f"round {number + 1}: training, streaming, serving")
                blocks.append(_measure_block(trainer, replica, config.num_steps))
    return make_figures(config, blocks, floor_ms)


def _measure_block(trainer: Child, replica: Child, num_steps: int) -> dict[str, Any]:
    """Train one block; return what trainer and replica answered, and `delays_ms` of each step."""
    trained = trainer.ask(num_steps=num_steps)
    steps = range(trained["first_step"], trained["first_step"] + num_steps)
    shown = replica.ask(step=steps[-1])
    delays_ms = delays_of(steps, trained["updated_ns"], shown["seen"])
    return {**trained, **shown, "delays_ms": delays_ms, "load": os.getloadavg()[0]}


def make_figures(config: FreshnessConfig, blocks: list[dict[str, Any]], floor_ms: list[float]) -> dict[str, Any]:
    """Return the figures of all blocks."""
    delays_ms = [delay for block in blocks for delay in block["delays_ms"]]
    p50_ms, p99_ms = np.percentile(delays_ms, [50, 99]).tolist()
    floor_p50_ms, floor_p99_ms = np.percentile(floor_ms, [50, 99]).tolist()
    settings = {name: value for name, value in asdict(config).items() if name != "folder"}
    settings["settings"] = {name: settings.pop(name) for name in ("freshness_s", "max_cost_percent")}  # of the streamer
    return {
        "p50_ms": p50_ms,
        "p99_ms": p99_ms,
        "p50_vs_floor": p50_ms / floor_p50_ms,
        "floor_p50_ms": floor_p50_ms,
        "floor_p99_ms": floor_p99_ms,
        "rows_per_s": sum(block["num_rows_sent"] for block in blocks) / sum(block["took_s"] for block in blocks),
        "rows_per_s_wanted": config.rows_per_s,
        "flushes_per_step": sum(block["num_flushes"] for block in blocks) / len(delays_ms),
        "update_to_acked_p50_ms": blocks[-1]["ack_p50_ms"],
        "replica_histogram_p50_ms": blocks[-1]["histogram_p50_ms"],
        "step_bytes": config.step_bytes,
        "num_steps": len(delays_ms),
        "block_p50_ms": [median(block["delays_ms"]) for block in blocks],
        "load_average": [block["load"] for block in blocks],
        "config": settings,
    }


freshness = bench_command("freshness", FreshnessConfig, measure, has_bounds=True)


def _train(
    address: str, num_rows: int, dim: int, rows_per_step: int, rows_per_s: int, **settings: Unpack[StreamerSettings]
) -> Worker:
    """Train a small model at a steady pace and stream each step; an order is `num_steps` of a block."""
    import torch
    from torch import nn

    from headrace.streamer import RawEmbeddingStreamer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    batches = [
        torch.from_numpy(rng.choice(num_rows, rows_per_step, replace=False).reshape(-1, 10))
        for _ in range(_NUM_BATCHES)
    ]
    rows, top = nn.EmbeddingBag(num_rows, dim, mode="sum", sparse=True), nn.Linear(dim, 1)
    model = nn.ModuleDict({"rows": rows, "top": top})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    updated_ns: list[int] = []
    # Registered before the streamer's own hook, which flushes: this is the moment of the update.
    optimizer.register_step_post_hook(lambda *_: updated_ns.append(time.monotonic_ns()))
    streamer = RawEmbeddingStreamer(address, run="bench", **settings)
    streamer.attach(model, optimizer, publish="all")
    streamer.flush()
    answer: dict[str, Any] = {}
    while True:
        order = yield answer
        updated_ns.clear()
        before = streamer.stats()
        began_ns, next_s = time.monotonic_ns(), time.monotonic()
        for step in range(order["num_steps"]):
            optimizer.zero_grad()
            logits = top(rows(batches[step % _NUM_BATCHES])).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))
            torch.autograd.backward(loss)
            optimizer.step()
            # A late step does not make the next ones earlier: two at once would measure a burst.
            next_s = max(next_s + rows_per_step / rows_per_s, time.monotonic())
            time.sleep(max(0.0, next_s - time.monotonic()))
        took_s = (time.monotonic_ns() - began_ns) / 1e9
        streamer.flush()
        after = streamer.stats()
        answer = {
            "first_step": before.step + 1,
            "updated_ns": updated_ns,
            "took_s": took_s,
            "num_rows_sent": after.num_rows_sent - before.num_rows_sent,
            "num_flushes": after.num_flushes - before.num_flushes,
            "ack_p50_ms": None if after.lag_p50_s is None else after.lag_p50_s * 1000,
        }


class Floor:
    """The least that freshness can cost on a machine; use it with `with`.

    Two processes with one blocking socket each: one appends each message to a file and calls `fdatasync` before it
    replies, the other reads the message and replies. An update that is durable before it is visible elsewhere cannot
    take less than both round trips in a row.
    """

    def __init__(self, folder: Path, size_bytes: int) -> None:
        """Start and connect, for messages of a size; the file is in a folder on the disk of the server's log."""
        self._data = os.urandom(size_bytes)
        self._socks: list[socket.socket] = []
        with ExitStack() as stack:
            for what, path in (("writer", str(folder / "floor")), ("reader", None)):
                worker = Child(f"{__name__}:_receive", f"the floor's {what}", size_bytes=size_bytes, path=path)
                stack.enter_context(worker)
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", worker.ready["port"])))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._socks.append(sock)
            self._stack = stack.pop_all()

    def measure(self, num_rounds: int, *, interval_s: float) -> list[float]:
        """Return the time of each round trip to both, one after the other, milliseconds.

        They begin at an interval: a machine that sleeps in between is slower than one that does not.
        """
        found_ms = []
        next_s = time.monotonic()
        for _ in range(num_rounds):
            begin_s = time.perf_counter()
            for sock in self._socks:
                sock.sendall(self._data)
                if not sock.recv(1):
                    raise ConnectionError("a process of the floor has ended")
            found_ms.append((time.perf_counter() - begin_s) * 1000)
            next_s = max(next_s + interval_s, time.monotonic())
            time.sleep(max(0.0, next_s - time.monotonic()))
        return found_ms

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()


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
