"""`headrace bench wire`: how fast the transport is, next to a bare loopback, thriftpy2 and gRPC in the same run.

Each contender has a server and a client process with one connection. Rounds alternate between the contenders and the
ratios are of medians, so that other work on the machine affects all of them alike.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.paramserver.rpc.client import ParamServerClient
from headrace.schemas.idl import idl
from headrace.scripts.benches.child import AsyncWorker, Child
from headrace.scripts.benches.harness import OnStage, Rounds, RoundsOption, bench_command
from headrace.scripts.benches.peers import GRPC_HINT, has_grpc
from headrace.scripts.benches.wire_peers import CONTENDERS, LONG_WRITE, WRITE_BYTES, WriteShape
from headrace.scripts.benches.workload import hello_request

__all__ = ["WireConfig", "WirePair", "contenders", "measure", "wire", "wire_pair"]

# As a streamer sends and a reader asks: several calls at once. thriftpy2 can have only one.
_WRITES_IN_FLIGHT, _READS_IN_FLIGHT = 4, 16
# File descriptors that a process needs besides its connections.
_SPARE_FILES = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class WireConfig:
    """How much `headrace bench wire` measures."""

    # A fifth of the writes for thriftpy2, which takes several times as long.
    num_writes: Annotated[int, typer.Option("--writes", min=_WRITES_IN_FLIGHT, help="Writes of 4 MiB a round.")] = 80
    num_reads: Annotated[int, typer.Option("--reads", min=_READS_IN_FLIGHT, help="Reads of 32 rows a round.")] = 1600
    num_idle: Annotated[
        int, typer.Option("--idle", min=4, help="Idle connections, as far as the limit of open files allows.")
    ] = 10_000
    num_rounds: RoundsOption = 9


def measure(config: WireConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure the transport: long writes, small reads, idle connections."""
    writes, single_writes, write_cpu_s, reads = Rounds(), Rounds(), Rounds(), Rounds()
    with ExitStack() as stack:
        pairs = {name: stack.enter_context(wire_pair(name)) for name in contenders()}
        for pair in pairs.values():
            pair.write(8, 2)  # connections, pools, caches
        for number in range(config.num_rounds):
            for name, pair in pairs.items():
                on_stage(f"writes, round {number + 1}: {name}")
                num_calls = max(config.num_writes // 5, 1) if name == "thriftpy2" else config.num_writes
                seconds, cpu_s = pair.write(num_calls)
                writes.add(name, num_calls * WRITE_BYTES / seconds)
                write_cpu_s.add(name, cpu_s / num_calls)
                if name != "thriftpy2":
                    seconds, _ = pair.write(config.num_writes, 1)
                    single_writes.add(name, config.num_writes * WRITE_BYTES / seconds)
            for name, pair in pairs.items():
                if name != "loopback":
                    on_stage(f"reads, round {number + 1}: {name}")
                    reads.add(name, config.num_reads / pair.read(config.num_reads))
    num_idle, idle_bytes = _measure_idle(config.num_idle, on_stage)
    return {
        "ratio_vs_loopback": writes.ratio("headrace", "loopback"),
        "ratio_vs_thriftpy2": writes.ratio("headrace", "thriftpy2"),
        "ratio_vs_grpc": writes.ratio("headrace", "grpc"),
        "ratio_small_vs_thriftpy2": reads.ratio("headrace", "thriftpy2"),
        "ratio_small_vs_grpc": reads.ratio("headrace", "grpc"),
        "ratio_one_in_flight_vs_loopback": single_writes.ratio("headrace", "loopback"),
        "ratio_one_in_flight_vs_grpc": single_writes.ratio("headrace", "grpc"),
        "bytes_per_idle_connection": round(idle_bytes / num_idle),
        "num_idle_connections": num_idle,
        "write_message_bytes": WRITE_BYTES,
        "writes_in_flight": _WRITES_IN_FLIGHT,
        "reads_in_flight": _READS_IN_FLIGHT,
        "write_bytes_per_s": writes.medians(),
        "write_bytes_per_s_one_in_flight": single_writes.medians(),
        "write_cpu_ms": write_cpu_s.medians(1e3),
        "reads_per_s": reads.medians(),
        "rounds": {"write_bytes_per_s": writes, "reads_per_s": reads},
    }


wire = bench_command("wire", WireConfig, measure, hints=lambda: [] if has_grpc() else [GRPC_HINT])


def contenders() -> list[str]:
    """Return the names of the contenders that are installed, Headrace first."""
    return [name for name in CONTENDERS if name != "grpc" or has_grpc()]


@dataclass(frozen=True, slots=True)
class WirePair:
    """Server and client process of a contender, connected."""

    server: Child
    client: Child

    def write(self, num_calls: int, in_flight: int = _WRITES_IN_FLIGHT) -> tuple[float, float]:
        """Make writes; return their seconds, and the processor seconds of both processes."""
        before = self.server.ask()
        answer = self.client.ask(call="write", num_calls=num_calls, in_flight=in_flight)
        return answer["seconds"], answer["cpu_s"] + self.server.ask()["cpu_s"] - before["cpu_s"]

    def read(self, num_calls: int) -> float:
        """Make reads; return their seconds."""
        answer = self.client.ask(call="read", num_calls=num_calls, in_flight=_READS_IN_FLIGHT)
        return float(answer["seconds"])


@contextmanager
def wire_pair(name: str, shape: WriteShape = LONG_WRITE) -> Iterator[WirePair]:
    """Run server and client of one of `contenders()`, for writes of a shape."""
    with (
        _start_server(name, shape) as server,
        Child(f"{__name__}:_drive", f"the client of {name}", **server.ready, name=name, shape=asdict(shape)) as client,
    ):
        yield WirePair(server, client)


def _start_server(name: str, shape: WriteShape) -> Child:
    return Child(f"{__name__}:_serve", f"the server of {name}", name=name, shape=asdict(shape))


def _measure_idle(num_idle: int, on_stage: OnStage) -> tuple[int, int]:
    """Return how many idle connections were open, fewer if the system allows no more, and the memory that they took."""
    num_idle = min(num_idle, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - _SPARE_FILES)
    with (
        _start_server("headrace", LONG_WRITE) as server,
        Child(f"{__name__}:_idle", "the idle client", port=server.ready["port"]) as client,
    ):
        client.ask(num_connections=1)  # the first connection also pays for what is done once
        before_bytes = server.ask()["memory_bytes"]
        on_stage(f"{num_idle} idle connections")
        client.ask(num_connections=num_idle)
        return num_idle, server.ask()["memory_bytes"] - before_bytes


async def _serve(name: str, shape: dict[str, int]) -> AsyncWorker:
    """Run a contender's server; answer any order with its memory and processor time."""
    _raise_file_limit()
    yield {"port": await CONTENDERS[name].serve(WriteShape(**shape))}
    while True:
        yield {"memory_bytes": _memory_bytes(), "cpu_s": time.process_time()}


async def _drive(name: str, port: int, shape: dict[str, int]) -> AsyncWorker:
    """Run a contender's client; an order names the call, how many of them, and how many at once."""
    calls = await CONTENDERS[name].connect(port, WriteShape(**shape))
    answer: dict[str, Any] = {}
    while True:
        order = yield answer
        call, num_calls, in_flight = (order[key] for key in ("call", "num_calls", "in_flight"))
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        await calls[call](num_calls, in_flight)
        answer = {"seconds": time.perf_counter() - began_s, "cpu_s": time.process_time() - began_cpu_s}


async def _idle(port: int) -> AsyncWorker:
    """Open connections that say hello and then nothing; an order is how many more."""
    _raise_file_limit()
    clients: list[ParamServerClient] = []
    while True:
        order = yield {"num_connections": len(clients)}
        for _ in range(order["num_connections"]):
            clients.append(await ParamServerClient.connect("127.0.0.1", port))
            await clients[-1].hello(hello_request(role=idl.Role.READER))


def _raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _memory_bytes() -> int:
    """Return the memory that is this process's alone."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))
