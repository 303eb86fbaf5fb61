"""`headrace bench wire`: how fast the transport is, next to a bare loopback, thriftpy2 and gRPC in the same run.

Each contender has a server and a client process with one connection. Rounds alternate between the contenders and the
ratios are of medians, so that other work on the machine affects all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import typer

from headrace.scripts.benches.child import AsyncWorker, Child
from headrace.scripts.benches.harness import OnStage, Rounds, RoundsOption, bench_command
from headrace.scripts.benches.peers import GRPC_HINT, has_grpc
from headrace.scripts.benches.wire_peers import CONTENDERS, WRITE_BYTES

__all__ = ["measure", "wire", "wire_client"]

# As a streamer sends and a reader asks: several calls at once. thriftpy2 can have only one.
_IN_FLIGHT = {"write": 4, "read": 16}


def measure(
    on_stage: OnStage,
    *,
    # A fifth of the writes for thriftpy2, which takes several times as long.
    num_writes: Annotated[int, typer.Option("--writes", min=4, help="Writes of 4 MiB a round.")] = 80,
    num_reads: Annotated[int, typer.Option("--reads", min=16, help="Reads of 32 rows a round.")] = 1600,
    num_rounds: RoundsOption = 9,
) -> dict[str, Any]:
    """Measure the transport: writes of 4 MiB, and reads of 32 rows."""
    writes, reads = Rounds(), Rounds()
    with ExitStack() as stack:
        names = [name for name in CONTENDERS if name != "grpc" or has_grpc()]
        clients = {name: stack.enter_context(wire_client(name)) for name in names}
        for client in clients.values():
            client.ask(call="write", num_calls=8)  # connections, pools, caches
        for number in range(num_rounds):
            for name, client in clients.items():
                on_stage(f"writes, round {number + 1}: {name}")
                num_calls = max(num_writes // 5, 4) if name == "thriftpy2" else num_writes
                writes.add(name, num_calls * WRITE_BYTES / client.ask(call="write", num_calls=num_calls)["seconds"])
            for name, client in clients.items():
                if name != "loopback":
                    on_stage(f"reads, round {number + 1}: {name}")
                    seconds = client.ask(call="read", num_calls=num_reads)["seconds"]
                    reads.add(name, num_reads / seconds)
    return {
        "ratio_vs_loopback": writes.ratio("headrace", "loopback"),
        "ratio_vs_thriftpy2": writes.ratio("headrace", "thriftpy2"),
        "ratio_vs_grpc": writes.ratio("headrace", "grpc"),
        "ratio_small_vs_thriftpy2": reads.ratio("headrace", "thriftpy2"),
        "ratio_small_vs_grpc": reads.ratio("headrace", "grpc"),
        "write_message_bytes": WRITE_BYTES,
        "write_bytes_per_s": writes.medians(),
        "reads_per_s": reads.medians(),
        "rounds": {"write_bytes_per_s": writes, "reads_per_s": reads},
    }


wire = bench_command("wire", measure, hints=lambda: [] if has_grpc() else [GRPC_HINT])


@contextmanager
def wire_client(name: str) -> Iterator[Child]:
    """Run server and client of a contender; asked for `num_calls` of a `call`, the client answers with `seconds`."""
    with (
        Child(f"{__name__}:_serve", f"the server of {name}", name=name) as server,
        Child(f"{__name__}:_drive", f"the client of {name}", name=name, port=server.ready["port"]) as client,
    ):
        yield client


async def _serve(name: str) -> AsyncWorker:
    yield {"port": await CONTENDERS[name].serve()}


async def _drive(name: str, port: int) -> AsyncWorker:
    calls = await CONTENDERS[name].connect(port)
    answer: dict[str, Any] = {}
    while True:
        order = yield answer
        began_s = time.perf_counter()
        await calls[order["call"]](order["num_calls"], _IN_FLIGHT[order["call"]])
        answer = {"seconds": time.perf_counter() - began_s}
