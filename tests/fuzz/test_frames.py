"""Malformed frames, slow senders, half-open peers and floods against a real server. `frames.py` is the long run."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Iterator

import pytest
from frame_fuzzer import DEADLINE_S, FrameFuzzer, SteadyClient, attack, count_refused, flood, memory_bytes
from thrift_values import call, nasty_messages

from headrace.paramserver.shard.launch import ServerProcess

MIB = 2**20
TOKEN = "fuzzed-fuzzed-fuzzed"
NUM_FRAMES = 20_000
MAX_CONNECTIONS = 300


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of one shard, with a token, that takes 300 connections."""
    data = tmp_path_factory.mktemp("fuzz") / "data"
    environ = {**os.environ, "HEADRACE_TOKEN": TOKEN}
    with ServerProcess.start(data, max_connections=MAX_CONNECTIONS, environ=environ) as running:
        yield running


def address_of(server: ServerProcess) -> tuple[str, int]:
    host, port = server.address.rsplit(":", 1)
    return host, int(port)


def ask(sock: socket.socket, frame: bytes) -> bytes:
    """Send a frame and return what comes back first, nothing when the connection is closed."""
    try:
        sock.sendall(frame)
        return sock.recv(4096)
    except ConnectionError:
        return b""


def check_unharmed(server: ServerProcess, client: SteadyClient, before_calls: int) -> None:
    """The well-behaved client has gone on and is right, the process is the same one, and nothing in it broke."""
    client.check()
    assert client.num_calls > before_calls
    wrong = [fact for fact in server.read_log() if fact.get("level") in ("error", "critical")]
    assert not wrong


def test_malformed_frames_change_nothing(server: ServerProcess) -> None:
    """Each connection with malformed frames is closed, memory stays flat, and another client notices nothing."""
    address, pid = address_of(server), server.shard_pids[0]
    fuzzer = FrameFuzzer(seed=1, token=TOKEN)
    with SteadyClient(address, TOKEN) as client:
        for _, message in nasty_messages():
            attack(address, struct.pack(">I", len(message)) + message)
        before_bytes, before_calls = memory_bytes(pid), client.num_calls
        before_refused = asyncio.run(count_refused(address, TOKEN))
        num_frames = num_attacks = 0
        while num_frames < NUM_FRAMES:
            data, number = fuzzer.connection()
            attack(address, data)
            num_frames += number
            num_attacks += 1
        num_refused = asyncio.run(count_refused(address, TOKEN)) - before_refused
        grown_bytes, num_writes = memory_bytes(pid) - before_bytes, (client.num_calls - before_calls) // 2
    check_unharmed(server, client, before_calls)
    assert server.shard_pids == [pid]
    assert num_refused > num_attacks / 2  # the others were cut short, or Thrift by chance
    # The longer all this takes, the more of its log, a block for each write, does the shard keep in memory.
    assert grown_bytes < 32 * MIB + num_writes * 4096


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(b"", id="silent"),
        pytest.param(b"\0\0", id="half a length"),
        pytest.param(struct.pack(">I", 1000) + b"x", id="a small frame that drips"),
        pytest.param(struct.pack(">I", MIB) + b"x" * 5000, id="a long frame that drips"),
        pytest.param(struct.pack(">I", 19) + call(b"status", b"\0")[:18], id="all but one byte"),
    ],
)
def test_slow_and_half_open_peers_hold_up_nobody(server: ServerProcess, start: bytes) -> None:
    """Two hundred peers that stop in the middle cost a little memory, and a well-behaved client nothing."""
    address, pid = address_of(server), server.shard_pids[0]
    with SteadyClient(address, TOKEN) as client:
        before_bytes, before_calls = memory_bytes(pid), client.num_calls
        socks = flood(address, 200, start)
        try:
            for sock in socks[:50]:  # they go on, a byte at a time
                sock.sendall(b"\0")
            # An answer to a newcomer shows that the server has read what came before.
            attack(address, struct.pack(">I", 19) + call(b"status", b"\0"))
            grown_bytes = memory_bytes(pid) - before_bytes
        finally:
            for sock in socks:
                sock.close()
    check_unharmed(server, client, before_calls)
    # What strangers may send, and it is only as much as has really come.
    assert grown_bytes < 48 * MIB


def test_a_flood_of_connections_is_bounded(server: ServerProcess) -> None:
    """Beyond their limit connections are told so or closed; who was there goes on, and afterwards all may come."""
    address = address_of(server)
    status = struct.pack(">I", 19) + call(b"status", b"\0")
    with SteadyClient(address, TOKEN) as client:
        before_calls = client.num_calls
        socks = flood(address, MAX_CONNECTIONS + 200, b"")
        try:
            answers = [ask(sock, status) for sock in socks]
        finally:
            for sock in socks:
                sock.close()
        num_served = sum(b"before hello" in answer for answer in answers)
        assert 0 < num_served < MAX_CONNECTIONS  # the well-behaved client has one
        assert all(b"its limit" in answer for answer in answers if answer and b"before hello" not in answer)
        while True:  # the server takes note of each of them in its own time
            with socket.create_connection(address, timeout=DEADLINE_S) as sock:
                if b"before hello" in ask(sock, status):
                    break
    check_unharmed(server, client, before_calls)
