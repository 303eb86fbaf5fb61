"""`headrace bench relay`: what a relay saves its shard, and how much later its followers see an update.

A writer, a shard, a relay and followers on this machine. What leaves the shard is counted by two plain forwarders, one
before the relay and one before a follower that needs none; the server tells clients the first one's address.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from headrace.paramserver.reading.follower import ShardFollower
from headrace.paramserver.reading.link import Dial, ShardLink
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import UnavailableError
from headrace.scripts.benches.harness import FolderOption, OnStage, RoundsOption, bench_command, bench_folder
from headrace.scripts.benches.workload import BenchRows, RowsConfig, hello_request

__all__ = ["FanOutConfig", "Forwarder", "fan_out", "measure"]

_TIMEOUT_S = 60.0
_CHUNK_BYTES = 1 << 18
# The fast rate's batches are so many times longer, at the same interval: 5 MB/s by default.
_FAST_FACTOR = 5
# Every address of 127.0.0.0/8 is this machine: the same port, another listener.
_BEFORE_RELAY, _BEFORE_FOLLOWER = "127.0.0.2", "127.0.0.3"


@dataclass(frozen=True, kw_only=True, slots=True)
class FanOutConfig:
    """How much `headrace bench relay` measures."""

    num_followers: Annotated[int, typer.Option("--followers", min=1, max=1024, help="Followers of the relay.")] = 64
    num_batches: Annotated[
        int, typer.Option("--batches", min=2, help="Batches of a block, and updates whose delay is measured.")
    ] = 100
    num_lookups: Annotated[
        int, typer.Option("--lookups", min=1, help="Ids that a batch draws; at the fast rate five times as many.")
    ] = 100
    interval_s: Annotated[float, typer.Option(min=0.001, help="Between batches, seconds.")] = 0.05
    num_rounds: RoundsOption = 3
    folder: FolderOption = None


class Forwarder:
    """Forwards connections to another address of this machine, and counts the bytes that come back.

    Attributes:
        received_bytes: Bytes that the target has sent so far.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.received_bytes = 0
        self._target = target

    @asynccontextmanager
    async def listening(self, host: str) -> AsyncIterator[None]:
        """Listen at the target's port of another address during the block."""
        async with await asyncio.start_server(self._forward, host, self._target[1]):
            yield

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            their_reader, their_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        try:
            await asyncio.gather(
                self._pump(reader, their_writer, is_counted=False), self._pump(their_reader, writer, is_counted=True)
            )
        except asyncio.CancelledError:
            pass  # the loop ends; streams log the exception of a connection's task
        finally:
            for each in (writer, their_writer):
                each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_counted: bool) -> None:
        try:
            while data := await reader.read(_CHUNK_BYTES):
                if is_counted:
                    self.received_bytes += len(data)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # the other direction ends by itself
        finally:
            writer.transport.abort()


def measure(config: FanOutConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure what a relay saves its shard, and how much later its followers see an update.

    The ratio is of the bytes that leave the shard for a relay with all its followers, and for one follower without a
    relay, of the same records at the same time. The hop is the time between the arrivals of one record at a follower
    of the shard and at one of the relay, both in this process.
    """
    with bench_folder(config.folder) as folder:
        on_stage("starting server and relay")
        with ServerProcess.start(folder / "data", shards=1, advertise_host=_BEFORE_RELAY) as server:
            return asyncio.run(_measure(config, server, folder, on_stage))


async def _measure(config: FanOutConfig, server: ServerProcess, folder: Path, on_stage: OnStage) -> dict[str, Any]:
    port = parse_address(server.address)[1]
    before_relay, before_follower = Forwarder(("127.0.0.1", port)), Forwarder(("127.0.0.1", port))
    rows, fast_rows = (
        BenchRows(RowsConfig(ids="uniform", num_batches=64, num_lookups=factor * config.num_lookups))
        for factor in (1, _FAST_FACTOR)
    )
    hops_ms: list[float] = []
    fast_hops_ms: list[float] = []
    all_hops_ms: list[float] = []
    ratios: list[float] = []
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(before_relay.listening(_BEFORE_RELAY))
        await stack.enter_async_context(before_follower.listening(_BEFORE_FOLLOWER))
        writer = await _Writer.connect(port, rows)
        stack.push_async_callback(writer.close)
        await writer.write(1)
        address = await stack.enter_async_context(_relay(f"{_BEFORE_RELAY}:{port}", folder))
        host, relay_port = parse_address(address)
        direct = await _Arrivals.connect(stack, _BEFORE_FOLLOWER, port)
        first = await _Arrivals.connect(stack, host, relay_port)
        await _all_reach([direct, first], writer.seq)
        for number in range(config.num_rounds):
            on_stage(f"round {number + 1}: one follower of the relay, beside one of the shard")
            hops_ms += await _measure_hops(writer, config, direct, [first])
            on_stage(f"round {number + 1}: the same at {_FAST_FACTOR} times the rate")
            writer.rows = fast_rows
            fast_hops_ms += await _measure_hops(writer, config, direct, [first])
            writer.rows = rows
        on_stage(f"{config.num_followers - 1} more followers begin")
        others = [await _Arrivals.connect(stack, host, relay_port) for _ in range(config.num_followers - 1)]
        followers = [first, *others]
        await _all_reach(followers, writer.seq)
        for number in range(config.num_rounds):
            on_stage(f"round {number + 1}: {config.num_followers} followers of the relay")
            sent = [before_relay.received_bytes, before_follower.received_bytes]
            all_hops_ms += await _measure_hops(writer, config, direct, followers)
            relayed, directly = before_relay.received_bytes - sent[0], before_follower.received_bytes - sent[1]
            ratios.append(relayed / directly)
    settings = {name: value for name, value in asdict(config).items() if name != "folder"}
    return {
        "relay_64_upstream_ratio": median(ratios),
        "relay_hop_p50_ms": float(np.percentile(hops_ms, 50)),
        "relay_hop_p99_ms": float(np.percentile(hops_ms, 99)),
        "relay_fast_hop_p50_ms": float(np.percentile(fast_hops_ms, 50)),
        "relay_fast_hop_p99_ms": float(np.percentile(fast_hops_ms, 99)),
        "relay_64_hop_p50_ms": float(
            np.percentile(all_hops_ms, 50)
        ),  # all of them in this process, so mostly its own work
        "round_ratios": ratios,
        "num_hops": len(hops_ms),
        "config": settings,
    }


async def _measure_hops(
    writer: _Writer, config: FanOutConfig, direct: _Arrivals, followers: Sequence[_Arrivals]
) -> list[float]:
    """Write a block, and return how much later each record came to each follower than to the direct one."""
    first_seq = writer.seq + 1
    last_seq = await writer.write(config.num_batches, config.interval_s)
    await _all_reach([direct, *followers], last_seq)
    return [
        (follower.at_s[seq] - direct.at_s[seq]) * 1000
        for follower in followers
        for seq in range(first_seq, last_seq + 1)
    ]


fan_out = bench_command("relay", FanOutConfig, measure, has_bounds=True)


@asynccontextmanager
async def _relay(server: str, folder: Path) -> AsyncIterator[str]:
    """Run a relay; yield its address."""
    ready = folder / "relay.json"
    command = [sys.executable, "-m", "headrace", "relay", f"--server={server}", f"--data={folder}/relay", "--port=0"]
    command += ["--watch-stdin", "--log-level=error", f"--ready-file={ready}"]
    with _process(command) as process:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise UnavailableError("the bench's relay has not started")
            await asyncio.sleep(0.02)
        yield json.loads(ready.read_text())["address"]


@contextmanager
def _process(command: Sequence[str]) -> Any:
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


class _Writer:
    """Writes batches one by one, each when the one before is acked."""

    def __init__(self, client: ParamServerClient, rows: BenchRows) -> None:
        self.seq = 0  # last one that was acked
        self.rows = rows  # of one spec always
        self._client, self._client_seq = client, 0

    @classmethod
    async def connect(cls, port: int, rows: BenchRows) -> _Writer:
        client = await ParamServerClient.connect("127.0.0.1", port, timeout_s=_TIMEOUT_S)
        await client.hello(hello_request(rows.specs), timeout_s=_TIMEOUT_S)
        return cls(client, rows)

    async def write(self, num_batches: int, interval_s: float = 0.0) -> int:
        """Write batches, and return the seq of the last."""
        for _ in range(num_batches):
            self._client_seq += 1
            number = self._client_seq % self.rows.config.num_batches
            reply = await self._client.set_embeddings(self.rows.request(number, client_seq=self._client_seq))
            self.seq = reply.seq
            await asyncio.sleep(interval_s)
        return self.seq

    async def close(self) -> None:
        await self._client.close()


class _Arrivals:
    """A follower that notes when each record comes; `at_s` is by seq, monotonic seconds."""

    def __init__(self, follower: ShardFollower) -> None:
        self.at_s: dict[int, float] = {}
        self.follower = follower
        self.came = asyncio.Event()

    @classmethod
    async def connect(cls, stack: AsyncExitStack, host: str, port: int) -> _Arrivals:
        dial = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=_TIMEOUT_S)
        link = ShardLink(dial, host, port)
        stack.push_async_callback(link.close)
        await link.refresh()
        arrivals = cls(ShardFollower(link, from_seq=1))
        task = asyncio.create_task(arrivals._follow(), name="headrace-bench-follow")
        stack.push_async_callback(_cancel, task)
        return arrivals

    async def _follow(self) -> None:
        while True:
            for update in await self.follower.fetch():
                self.at_s[update.seq] = time.monotonic()
            self.came.set()

    async def reach(self, seq: int) -> None:
        while self.follower.next_seq <= seq:
            self.came.clear()
            await self.came.wait()


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def _all_reach(followers: Sequence[_Arrivals], seq: int) -> None:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await asyncio.gather(*(each.reach(seq) for each in followers))
    except TimeoutError as exc:
        raise UnavailableError(f"a follower of the bench has not got seq {seq} in {_TIMEOUT_S:g} s") from exc
