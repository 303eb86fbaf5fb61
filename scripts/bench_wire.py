"""`headrace bench wire`: how fast the transport is, beside a bare loopback, thriftpy2 and gRPC in the same run.

Each contender has a server and a client process with one connection. The rounds alternate between the contenders, and
the ratios are of the medians, so that whatever else the machine does meets all alike.
"""

from __future__ import annotations

import importlib.util
import json
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from headrace.scripts.bench_wire_peers import LONG_WRITE, WRITE_BYTES, WriteShape
from headrace.scripts.bench_wire_process import WireProcess

__all__ = ["GRPC_HINT", "WireConfig", "WirePair", "WireResult", "contenders", "measure", "wire", "wire_pair"]

GRPC_HINT = "gRPC is left out: pip install 'headrace[bench]'"
# As a streamer sends and a reader asks: several calls at once. thriftpy2 can have one.
_WRITES_IN_FLIGHT, _READS_IN_FLIGHT = 4, 16
# Descriptors that a process needs besides its connections.
_SPARE_FILES = 200

OnStage = Callable[[str], None]


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


def measure(config: WireConfig, on_stage: OnStage) -> WireResult:
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
        server = stack.enter_context(WireProcess.start("serve", "headrace", *_words(LONG_WRITE)))
        port = str(server.ask()["port"])
        clients = [stack.enter_context(WireProcess.start("idle", port)) for _ in range(config.num_idle_clients)]
        clients[0].ask(num_connections=1)  # what the first connection costs is no connection's
        before_bytes = server.ask()["memory_bytes"]
        for number, client in enumerate(clients):
            on_stage(f"idle connections: {(number + 1) * share}")
            client.ask(num_connections=share)
        return share * len(clients), server.ask()["memory_bytes"] - before_bytes


@dataclass(frozen=True, slots=True)
class WirePair:
    """The processes of a contender, connected.

    Attributes:
        server: Its server's.
        client: Its client's.
    """

    server: WireProcess
    client: WireProcess

    def write(self, num_calls: int, in_flight: int = _WRITES_IN_FLIGHT) -> tuple[float, float]:
        """Return the seconds, and the processor seconds of both processes, of so many writes."""
        before = self.server.ask()
        answer = self.client.ask(do="write", num_calls=num_calls, in_flight=in_flight)
        return answer["seconds"], answer["cpu_s"] + self.server.ask()["cpu_s"] - before["cpu_s"]

    def read(self, num_calls: int) -> float:
        """Return the seconds of so many reads."""
        return float(self.client.ask(do="read", num_calls=num_calls, in_flight=_READS_IN_FLIGHT)["seconds"])


@contextmanager
def wire_pair(name: str, shape: WriteShape = LONG_WRITE) -> Iterator[WirePair]:
    """Run server and client of one of `contenders()`, for writes of a shape."""
    with ExitStack() as stack:
        server = stack.enter_context(WireProcess.start("serve", name, *_words(shape)))
        client = stack.enter_context(WireProcess.start("drive", name, str(server.ask()["port"]), *_words(shape)))
        yield WirePair(server, client)


def _words(shape: WriteShape) -> tuple[str, str]:
    return str(shape.num_rows), str(shape.dim)


def contenders() -> list[str]:
    """Return the names of those that are installed, ours first."""
    return ["headrace", "loopback", "thriftpy2", *(["grpc"] if _has_grpc() else [])]


def _has_grpc() -> bool:
    return importlib.util.find_spec("grpc") is not None


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


_DEFAULTS = WireConfig()


def wire(
    *,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.", show_default=False)
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often all is measured.")] = WireConfig().num_rounds,
    writes: Annotated[
        int, typer.Option(min=_WRITES_IN_FLIGHT, help="Writes of 4 MiB a round.")
    ] = WireConfig().num_writes,
    reads: Annotated[
        int, typer.Option(min=_READS_IN_FLIGHT, help="Reads of 32 rows a round.")
    ] = WireConfig().num_reads,
    idle: Annotated[
        int, typer.Option(min=4, help="Idle connections, as far as the limit of open files allows.")
    ] = _DEFAULTS.num_idle,
) -> None:
    """Measure the transport: long writes, small reads, idle connections."""
    config = WireConfig(num_rounds=rounds, num_writes=writes, num_reads=reads, num_idle=idle)
    errors, console = Console(stderr=True), Console()
    if not _has_grpc():
        errors.print(GRPC_HINT, markup=False, highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("", total=config.num_stages)
        result = measure(config, lambda stage: progress.update(task, description=stage, advance=1))
    figures = result.to_json()
    for line in _describe(figures):
        console.print(line, highlight=False, soft_wrap=True)
    if json_path is not None:
        json_path.write_text(json.dumps(figures, indent=2) + "\n")


def _describe(figures: dict[str, Any]) -> Iterator[str]:
    reads, cpu = figures["reads_per_s"], figures["write_cpu_ms"]
    size = f"setEmbeddings of {WRITE_BYTES / 2**20:.1f} MiB on one connection"
    for what, key, ratio in (
        (f"{size}, {_WRITES_IN_FLIGHT} in flight (thriftpy2: 1, it cannot have more)", "", "ratio_vs_"),
        (f"{size}, one after the other", "_one_in_flight", "ratio_one_in_flight_vs_"),
    ):
        yield f"{what}:"
        for name, rate in figures[f"write_bytes_per_s{key}"].items():
            cost = "" if key else f"  {cpu[name]:6.2f} ms of processor time each"
            yield f"  {name:<10} {rate / 1e9:6.2f} GB/s{cost}{_show_ratio(figures, ratio, name)}"
    yield f"getEmbeddings of 32 rows on one connection, {_READS_IN_FLIGHT} in flight (thriftpy2: 1):"
    for name, rate in reads.items():
        yield f"  {name:<10} {rate:6,.0f} a second{_show_ratio(figures, 'ratio_small_vs_', name)}"
    yield (
        f"{figures['num_idle_connections']:,} idle connections: {figures['bytes_per_idle_connection']:,} bytes each "
        "in the server's process"
    )


def _show_ratio(figures: dict[str, Any], key: str, name: str) -> str:
    return "" if name == "headrace" else f"   headrace is {figures[key + name]:.2f} times as fast"
