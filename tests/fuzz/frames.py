"""The long run of the frame fuzzer: as many malformed frames as it is told, against a real server of one shard.

    python tests/fuzz/frames.py --frames 1000000

A well-behaved client writes and reads all the while. The run fails when that client gets a wrong answer, an error or no
answer, when the shard's process dies or logs an error, when a connection is not closed in time, or when the shard's
memory grows beyond `--max-growth-mib`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from frame_fuzzer import FrameFuzzer, SteadyClient, attack, count_refused, memory_bytes

from headrace.paramserver.shard.launch import ServerProcess

TOKEN = "fuzzed-fuzzed-fuzzed"
MIB = 2**20
# What the shard takes once: its pool of buffers, RocksDB's memtable, the heap's slack.
WARM_UP_SHARE = 0.1
_REPORT_EVERY = 500


def main() -> int:
    """Run, and return 0 when the server has stood it."""
    parser = argparse.ArgumentParser(description="Send malformed frames to a real server while a client uses it.")
    parser.add_argument("--frames", type=int, default=1_000_000, help="malformed frames (default: one million)")
    parser.add_argument("--seed", type=int, default=1, help="of the random numbers (default: 1)")
    parser.add_argument("--workers", type=int, default=2, help="processes that send them (default: 2)")
    parser.add_argument("--max-growth-mib", type=float, default=64, help="memory the shard may grow by (default: 64)")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(*options.worker)
        return 0
    return _run(options)


def _work(host: str, port: str, num_frames: str, seed: str) -> None:
    """Attack; print how many frames and connections have been sent, now and then."""
    fuzzer, sent, num_connections = FrameFuzzer(int(seed), TOKEN), 0, 0
    while sent < int(num_frames):
        data, number = fuzzer.connection()
        # An address of its own each time: a port of one rests for a minute after its connection.
        source = f"127.{1 + int(seed) % 200}.{num_connections // 250 % 250}.{1 + num_connections % 250}"
        attack((host, int(port)), data, source=source)
        sent += number
        num_connections += 1
        if num_connections % _REPORT_EVERY == 0 or sent >= int(num_frames):
            print(sent, num_connections, flush=True)


def _run(options: Any) -> int:
    environ = {**os.environ, "HEADRACE_TOKEN": TOKEN}
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess.start(Path(folder) / "data", environ=environ) as server,
    ):
        return _attack(server, options)


def _attack(server: ServerProcess, options: Any) -> int:
    host, port = server.address.rsplit(":", 1)
    address, (pid,) = (host, int(port)), server.shard_pids
    share = -(-options.frames // options.workers)
    begin_s = time.monotonic()
    with SteadyClient(address, TOKEN) as client:
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", host, port, str(share), str(options.seed + number)],
                stdout=subprocess.PIPE,
            )
            for number in range(options.workers)
        ]
        samples = _watch(workers, pid, client, options.frames, begin_s)
        failed = [worker.returncode for worker in workers if worker.returncode]
    seconds = time.monotonic() - begin_s
    problems = [f"a worker ended with {code}" for code in failed]
    if client.error is not None:
        problems.append(f"the well-behaved client: {client.error!r}")
    if server.shard_pids != [pid]:
        problems.append("the shard was restarted")
    errors = [fact for fact in server.read_log() if fact.get("level") in ("error", "critical")]
    if errors:
        problems.append(f"the server logged {len(errors)} errors, the first: {errors[0]}")
    warm_bytes = next(memory for sent, _, memory in samples if sent >= WARM_UP_SHARE * options.frames)
    peak_bytes = max(memory for _, _, memory in samples)
    if peak_bytes - warm_bytes > options.max_growth_mib * MIB:
        problems.append(f"memory grew by {(peak_bytes - warm_bytes) / MIB:.0f} MiB")
    sent, num_connections, end_bytes = samples[-1]
    print(f"{sent:,} frames over {num_connections:,} connections in {seconds:.0f} s, seed {options.seed}")
    print(f"the shard refused {asyncio.run(count_refused(address, TOKEN)):,} times and logged {len(errors)} errors")
    print(
        f"its memory, MiB: {samples[0][2] / MIB:.0f} before, {warm_bytes / MIB:.0f} after a tenth, "
        f"{peak_bytes / MIB:.0f} at most, {end_bytes / MIB:.0f} at the end"
    )
    print(f"the well-behaved client made {client.num_calls:,} calls, the longest {client.worst_s * 1e3:.0f} ms")
    for problem in problems:
        print(f"FAILED: {problem}")
    return 1 if problems else 0


def _watch(
    workers: list[subprocess.Popen[bytes]], pid: int, client: SteadyClient, num_frames: int, begin_s: float
) -> list[tuple[int, int, int]]:
    """Show progress until the workers are done; return (frames, connections, the shard's memory) as they went."""
    samples, done = [(0, 0, memory_bytes(pid))], {worker.pid: (0, 0) for worker in workers}
    shown_s = begin_s
    running = list(workers)
    while running:
        for worker in list(running):
            assert worker.stdout is not None
            line = worker.stdout.readline()
            if line:
                done[worker.pid] = tuple(map(int, line.split()))  # type: ignore[assignment]
            else:
                worker.wait()
                worker.stdout.close()
                running.remove(worker)
        sent, num_connections = (sum(counts) for counts in zip(*done.values(), strict=True))
        samples.append((sent, num_connections, memory_bytes(pid)))
        now_s = time.monotonic()
        if now_s - shown_s > 5:
            shown_s = now_s
            rate = sent / (now_s - begin_s)
            print(
                f"{sent:>10,} of {num_frames:,} frames, {rate:,.0f} a second, shard {samples[-1][2] / MIB:.0f} MiB, "
                f"client {client.num_calls:,} calls",
                file=sys.stderr,
                flush=True,
            )
    return samples


if __name__ == "__main__":
    sys.exit(main())
