"""Malformed frames, slow senders, half-open peers and floods against a real server.

The long run: `HEADRACE_FUZZ_FRAMES=1000000 python -m pytest -s tests/fuzz/test_frames.py -k malformed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Iterator

import pytest
from frame_fuzzer import DEADLINE_S, FrameFuzzer, SteadyClient, attack, count_refused, flood, memory_bytes
from thrift_values import call, nasty_messages

from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.shard.launch import ServerProcess

MIB = 2**20
TOKEN = "fuzzed-fuzzed-fuzzed"
NUM_FRAMES = int(os.environ.get("HEADRACE_FUZZ_FRAMES", "20000"))
MAX_CONNECTIONS = 300
STATUS = struct.pack(">I", 19) + call(b"status", b"\0")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of one shard, with a token, that takes 300 connections."""
    data = tmp_path_factory.mktemp("fuzz") / "data"
    environ = {**os.environ, "HEADRACE_TOKEN": TOKEN}
    with ServerProcess.start(data, max_connections=MAX_CONNECTIONS, environ=environ) as running:
        yield running


@contextlib.contextmanager
def _unharmed(server: ServerProcess, address: tuple[str, int]) -> Iterator[SteadyClient]:
    """Check that a well-behaved client goes on, with right answers, and that nothing breaks in the server."""
    with SteadyClient(address, TOKEN) as client:
        before_calls = client.num_calls
        yield client
    client.check()
    assert client.num_calls > before_calls
    assert not [fact for fact in server.read_log() if fact.get("level") in ("error", "critical")]


@pytest.mark.timeout(0 if "HEADRACE_FUZZ_FRAMES" in os.environ else 600)
def test_malformed_frames_change_nothing(server: ServerProcess) -> None:
    """Each connection with malformed frames is closed, memory stays flat, and another client notices nothing."""
    address, pid = parse_address(server.address), server.shard_pids[0]
    fuzzer = FrameFuzzer(seed=int(os.environ.get("HEADRACE_FUZZ_SEED", "1")), token=TOKEN)
    with _unharmed(server, address) as client:
        for _, message in nasty_messages():
            attack(address, struct.pack(">I", len(message)) + message)
        before_bytes, before_calls = memory_bytes(pid), client.num_calls
        before_refused = asyncio.run(count_refused(address, TOKEN))
        num_frames = num_attacks = 0
        while num_frames < NUM_FRAMES:
            data, number = fuzzer.connection()
            # An address of its own each time: a port of one rests for a minute after its connection.
            attack(address, data, source=f"127.2.{num_attacks // 250 % 250}.{1 + num_attacks % 250}")
            num_frames += number
            num_attacks += 1
        num_refused = asyncio.run(count_refused(address, TOKEN)) - before_refused
        grown_bytes, num_writes = memory_bytes(pid) - before_bytes, (client.num_calls - before_calls) // 2
        shown = f"{num_frames:,} frames over {num_attacks:,} connections, {num_refused:,} refusals"
        print(f"{shown}, {grown_bytes / MIB:.0f} MiB more, longest call {client.worst_s * 1e3:.0f} ms")
    assert server.shard_pids == [pid]
    assert num_refused > num_attacks / 2  # the others were cut short, or Thrift by chance
    # The longer all this takes, the more of its log, a block for each write, does the shard keep in memory.
    assert grown_bytes < 32 * MIB + num_writes * 4096


@pytest.mark.parametrize(
    "start",
    [b"", b"\0\0", struct.pack(">I", 1000) + b"x", struct.pack(">I", MIB) + b"x" * 5000, STATUS[:-1]],
    ids=["silent", "half a length", "a small frame that drips", "a long frame that drips", "all but one byte"],
)
def test_slow_and_half_open_peers_hold_up_nobody(server: ServerProcess, start: bytes) -> None:
    """Two hundred peers that stop in the middle cost a little memory, and a well-behaved client nothing."""
    address, pid = parse_address(server.address), server.shard_pids[0]
    with _unharmed(server, address):
        before_bytes = memory_bytes(pid)
        with flood(address, 200, start) as socks:
            for sock in socks[:50]:  # they go on, a byte at a time
                sock.sendall(b"\0")
            # An answer to a newcomer shows that the server has read what came before.
            attack(address, STATUS)
            grown_bytes = memory_bytes(pid) - before_bytes
    # What strangers may send, and it is only as much as has really come.
    assert grown_bytes < 48 * MIB


def test_a_flood_of_connections_is_bounded(server: ServerProcess) -> None:
    """Beyond their limit the oldest strangers are closed; who was let in goes on, and afterwards all may come."""

    def ask(sock: socket.socket) -> bytes:
        with contextlib.suppress(ConnectionError):  # nothing when it is closed
            sock.sendall(STATUS)
            return sock.recv(4096)
        return b""

    address = parse_address(server.address)
    with _unharmed(server, address):
        with flood(address, MAX_CONNECTIONS + 200, b"") as socks:
            answers = [ask(sock) for sock in socks]
        assert any(answers)
        assert all(b"before hello" in answer for answer in answers if answer)
        is_open = False
        while not is_open:  # the server takes note of each of them in its own time
            with socket.create_connection(address, timeout=DEADLINE_S) as sock:
                is_open = b"before hello" in ask(sock)
