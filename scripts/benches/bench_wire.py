"""`headrace bench wire`: how fast the transport is, beside a bare loopback, thriftpy2 and gRPC in the same run.

Each contender has a server and a client process with one connection. The rounds alternate between the contenders, and
the ratios are of the medians, so that whatever else the machine does meets all alike.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Annotated, Any

import typer

from headrace.scripts.benches.bench_child import BenchChild
from headrace.scripts.benches.bench_peers import GRPC_HINT, has_grpc
from headrace.scripts.benches.bench_report import (
    JsonOption,
    OnStage,
    RoundsOption,
    check_json,
    conclude,
    say,
    show_progress,
)
from headrace.scripts.benches.bench_wire_peers import LONG_WRITE, WRITE_BYTES, WriteShape

__all__ = ["WireConfig", "WirePair", "WireResult", "contenders", "run", "wire", "wire_pair"]

_PROCESS = "headrace.scripts.benches.bench_wire_process"
# As a streamer sends and a reader asks: several calls at once. thriftpy2 can have one.
_WRITES_IN_FLIGHT, _READS_IN_FLIGHT = 4, 16
# Descriptors that a process needs besides its connections.
_SPARE_FILES = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class WireConfig:
    """How much is measured.

    Attributes:
        num_rounds: All is measured so often, in turn; the medians count.
        num_writes: Writes of 4 MiB a round; a fifth of them for thriftpy2, which takes several times as long.
        num_reads: Reads of 32 rows a round.
        num_idle: Idle connections.
        num_idle_clients: Processes that hold them.
    """

    num_rounds: int = 9
    num_writes: int = 80
    num_reads: int = 1600
    num_idle: int = 10_000
    num_idle_clients: int = 4

    @property
    def num_stages(self) -> int:
        """How often `on_stage` is called."""
        names = contenders()
        stages = len(names) + len(_pipelined(names)) + len(_readers(names))
        return self.num_rounds * stages + self.num_idle_clients


@dataclass(kw_only=True, slots=True)
class WireResult:
    """What was measured.

    Attributes:
        writes: By contender, bytes a second of each round, four writes in flight.
        single_writes: The same with one in flight.
        write_cpu: By contender, processor seconds of client and server together for a write, of each round.
        reads: By contender, reads a second of each round.
        num_idle: Idle connections that were open.
        idle_bytes: Memory that they took in the server's process, together.
    """

    writes: dict[str, list[float]] = field(default_factory=dict)
    single_writes: dict[str, list[float]] = field(default_factory=dict)
    write_cpu: dict[str, list[float]] = field(default_factory=dict)
    reads: dict[str, list[float]] = field(default_factory=dict)
    num_idle: int = 0
    idle_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the figures, the ratios of the medians first; None for a peer that is not installed."""
        return {
            "ratio_vs_loopback": _ratio(self.writes, "loopback"),
            "ratio_vs_thriftpy2": _ratio(self.writes, "thriftpy2"),
            "ratio_vs_grpc": _ratio(self.writes, "grpc"),
            "ratio_small_vs_thriftpy2": _ratio(self.reads, "thriftpy2"),
            "ratio_small_vs_grpc": _ratio(self.reads, "grpc"),
            "ratio_one_in_flight_vs_loopback": _ratio(self.single_writes, "loopback"),
            "ratio_one_in_flight_vs_grpc": _ratio(self.single_writes, "grpc"),
            "bytes_per_idle_connection": round(self.idle_bytes / self.num_idle) if self.num_idle else None,
            "num_idle_connections": self.num_idle,
            "write_message_bytes": WRITE_BYTES,
            "writes_in_flight": _WRITES_IN_FLIGHT,
            "reads_in_flight": _READS_IN_FLIGHT,
            "write_bytes_per_s": _medians(self.writes),
            "write_bytes_per_s_one_in_flight": _medians(self.single_writes),
            "write_cpu_ms": _medians(self.write_cpu, 1e3),
            "reads_per_s": _medians(self.reads),
            "rounds": {"write_bytes_per_s": self.writes, "reads_per_s": self.reads},
        }


def wire(
    *,
    json_path: JsonOption = None,
    rounds: RoundsOption = 9,
    writes: Annotated[int, typer.Option(min=_WRITES_IN_FLIGHT, help="Writes of 4 MiB a round.")] = 80,
    reads: Annotated[int, typer.Option(min=_READS_IN_FLIGHT, help="Reads of 32 rows a round.")] = 1600,
    idle: Annotated[
        int, typer.Option(min=4, help="Idle connections, as far as the limit of open files allows.")
    ] = 10_000,
) -> None:
    """Measure the transport: long writes, small reads, idle connections.

    Raises:
        ConfigError: A path cannot be written.
        UnavailableError: A process has ended.
    """
    check_json(json_path)
    config = WireConfig(num_rounds=rounds, num_writes=writes, num_reads=reads, num_idle=idle)
    if not has_grpc():
        say(GRPC_HINT)
    with show_progress("wire", config.num_stages) as on_stage:
        result = run(config, on_stage=on_stage)
    conclude(result.to_json(), json_path)


def run(config: WireConfig, *, on_stage: OnStage) -> WireResult:
    """Run all rounds, then open the idle connections.

    Args:
        config: How much.
        on_stage: Told what comes next, `config.num_stages` times.
    """
    result = WireResult()
    names = contenders()
    with ExitStack() as stack:
        pairs = {name: stack.enter_context(wire_pair(name)) for name in names}
        for pair in pairs.values():
            pair.write(8, 2)  # what is done once: connections, pools, caches
        for number in range(config.num_rounds):
            for name in names:
                on_stage(f"writes, round {number + 1}: {name}")
                num_calls = max(config.num_writes // 5, 1) if name == "thriftpy2" else config.num_writes
                seconds, cpu_s = pairs[name].write(num_calls)
                result.writes.setdefault(name, []).append(num_calls * WRITE_BYTES / seconds)
                result.write_cpu.setdefault(name, []).append(cpu_s / num_calls)
            for name in _pipelined(names):
                on_stage(f"single writes, round {number + 1}: {name}")
                seconds, _ = pairs[name].write(config.num_writes, 1)
                result.single_writes.setdefault(name, []).append(config.num_writes * WRITE_BYTES / seconds)
            for name in _readers(names):
                on_stage(f"reads, round {number + 1}: {name}")
                seconds = pairs[name].read(config.num_reads)
                result.reads.setdefault(name, []).append(config.num_reads / seconds)
    result.num_idle, result.idle_bytes = _measure_idle(config, on_stage)
    return result


def _measure_idle(config: WireConfig, on_stage: OnStage) -> tuple[int, int]:
    """Return how many idle connections were open, fewer when the system allows no more, and what memory they took."""
    num_idle = min(config.num_idle, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - _SPARE_FILES)
    share = num_idle // config.num_idle_clients
    with ExitStack() as stack:
        server = stack.enter_context(_start_server("headrace", LONG_WRITE))
        order = {"do": "idle", "port": server.ready["port"]}
        clients = [
            stack.enter_context(BenchChild(_PROCESS, "idle client", order)) for _ in range(config.num_idle_clients)
        ]
        clients[0].ask({"num_connections": 1})  # what the first connection costs is no connection's
        before_bytes = server.ask({})["memory_bytes"]
        for number, client in enumerate(clients):
            on_stage(f"idle connections: {(number + 1) * share}")
            client.ask({"num_connections": share})
        return share * len(clients), server.ask({})["memory_bytes"] - before_bytes


@dataclass(frozen=True, slots=True)
class WirePair:
    """The processes of a contender, connected.

    Attributes:
        server: Its server's.
        client: Its client's.
    """

    server: BenchChild
    client: BenchChild

    def write(self, num_calls: int, in_flight: int = _WRITES_IN_FLIGHT) -> tuple[float, float]:
        """Return the seconds, and the processor seconds of both processes, of so many writes."""
        before = self.server.ask({})
        answer = self.client.ask({"do": "write", "num_calls": num_calls, "in_flight": in_flight})
        return answer["seconds"], answer["cpu_s"] + self.server.ask({})["cpu_s"] - before["cpu_s"]

    def read(self, num_calls: int) -> float:
        """Return the seconds of so many reads."""
        answer = self.client.ask({"do": "read", "num_calls": num_calls, "in_flight": _READS_IN_FLIGHT})
        return float(answer["seconds"])


@contextmanager
def wire_pair(name: str, shape: WriteShape = LONG_WRITE) -> Iterator[WirePair]:
    """Run server and client of one of `contenders()`, for writes of a shape."""
    with _start_server(name, shape) as server:
        order = {"do": "drive", "name": name, "port": server.ready["port"], "shape": asdict(shape)}
        with BenchChild(_PROCESS, f"client of {name}", order) as client:
            yield WirePair(server, client)


def _start_server(name: str, shape: WriteShape) -> BenchChild:
    return BenchChild(_PROCESS, f"server of {name}", {"do": "serve", "name": name, "shape": asdict(shape)})


def contenders() -> list[str]:
    """Return the names of those that are installed, ours first."""
    return ["headrace", "loopback", "thriftpy2", *(["grpc"] if has_grpc() else [])]


def _pipelined(names: list[str]) -> list[str]:
    return [name for name in names if name != "thriftpy2"]


def _readers(names: list[str]) -> list[str]:
    return [name for name in names if name != "loopback"]


def _ratio(rates: dict[str, list[float]], peer: str) -> float | None:
    if peer not in rates:
        return None
    return round(median(rates["headrace"]) / median(rates[peer]), 3)


def _medians(rates: dict[str, list[float]], scale: float = 1.0) -> dict[str, float]:
    return {name: round(median(values) * scale, 3) for name, values in rates.items()}
