"""Samples over a socket pair, whatever the shard process does."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import socket

import pytest
from metric_samples import SAMPLE

from headrace.paramserver.observe.sample import LogSample, ShardSample, receive_samples, send_samples
from headrace.schemas.errors import ProtocolError, StorageError, UnavailableError


async def test_concurrent_requests_share_a_sample() -> None:
    """Each request gets a new sample, and concurrent ones share it."""
    num_samples = 0

    async def sample() -> ShardSample:
        nonlocal num_samples
        num_samples += 1
        return SAMPLE

    ours, theirs = socket.socketpair()
    async with send_samples(theirs, sample), receive_samples(ours) as receiver:
        assert await receiver.ask() == SAMPLE
        assert await asyncio.gather(receiver.ask(), receiver.ask()) == [SAMPLE, SAMPLE]
        assert num_samples == 2


async def test_a_late_reply_answers_the_next_request() -> None:
    """A late shard gets no second request before it has replied."""
    may_reply, num_asked = asyncio.Event(), 0

    async def sample() -> ShardSample:
        nonlocal num_asked
        num_asked += 1
        await may_reply.wait()
        return SAMPLE

    ours, theirs = socket.socketpair()
    async with send_samples(theirs, sample), receive_samples(ours, timeout_s=0.05) as receiver:
        for _ in range(3):
            with pytest.raises(UnavailableError, match=r"within 0\.05 s"):
                await receiver.ask()
        # From here on, wait: a reply that is late once more would answer another request.
        receiver._timeout_s = 60.0
        may_reply.set()
        assert await receiver.ask() == SAMPLE
        assert num_asked == 1


@pytest.mark.parametrize(
    "error", [StorageError("the disk is gone"), OSError(errno.EMFILE, "Too many open files")], ids=["store", "system"]
)
async def test_a_failed_sample_is_temporary(error: Exception) -> None:
    """A shard that cannot make a sample says so and can be asked again."""
    fails = True

    async def sample() -> ShardSample:
        if fails:
            raise error
        return SAMPLE

    ours, theirs = socket.socketpair()
    async with send_samples(theirs, sample), receive_samples(ours) as receiver:
        with pytest.raises(UnavailableError, match="its log says why"):
            await receiver.ask()
        fails = False
        assert await receiver.ask() == SAMPLE


async def test_end_of_the_process() -> None:
    """When the other end closes, present and later requests fail at once."""
    ours, theirs = socket.socketpair()
    async with receive_samples(ours) as receiver:
        asking = asyncio.create_task(receiver.ask())
        await _asked(theirs)
        theirs.close()
        with pytest.raises(UnavailableError):
            await asking
        with pytest.raises(UnavailableError, match="has closed"):
            await receiver.ask()


@pytest.mark.parametrize("text", [b"{}", b"[1]", b"nonsense", None])
async def test_a_reply_that_is_not_a_sample(text: bytes | None) -> None:
    """Any other reply is a protocol error; an absurd length ends the channel before anything is allocated."""
    ours, theirs = socket.socketpair()
    with theirs:
        async with receive_samples(ours) as receiver:
            frame = b"\xff\xff\xff\xff" if text is None else len(text).to_bytes(4, "little") + text
            theirs.sendall(frame)
            asking = asyncio.create_task(receiver.ask())
            if text is not None:
                await _asked(theirs)
                theirs.setblocking(True)
                theirs.sendall(frame)
            with pytest.raises(UnavailableError if text is None else ProtocolError):
                await asking


async def _asked(sock: socket.socket) -> None:
    """Return when a request has come."""
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_recv(sock, 1)


def test_the_sample_of_a_replicated_log_travels_whole() -> None:
    """Over the wire to clients nothing of it is lost, what the servers do not tell included."""
    assert SAMPLE.log is not None
    for log in (SAMPLE.log, dataclasses.replace(SAMPLE.log, leader=None, peer_lag=None, standbys=(), refusals={})):
        assert LogSample.of_status(log.to_idl()) == log
