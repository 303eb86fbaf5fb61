"""A supervisor gets samples over a socket pair, whatever the shard process does."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest
from metric_samples import SAMPLE

from headrace.paramserver.metrics.metrics_channel import SampleAsker, SampleTeller
from headrace.paramserver.metrics.metrics_sample import ShardSample
from headrace.schemas.errors import ProtocolError, StorageError, UnavailableError


async def test_asks_and_tells() -> None:
    """Each question is answered with a sample of its time; two at once share one."""
    num_told = 0

    async def sample() -> ShardSample:
        nonlocal num_told
        num_told += 1
        return SAMPLE

    ours, theirs = socket.socketpair()
    async with SampleTeller(theirs, sample), SampleAsker(ours) as asker:
        assert await asker.ask() == SAMPLE
        assert await asyncio.gather(asker.ask(), asker.ask()) == [SAMPLE, SAMPLE]
        assert num_told == 2


async def test_late_answer_is_that_of_the_next_question() -> None:
    """A shard that is late is asked again only when it has answered."""
    may_tell, num_asked = asyncio.Event(), 0

    async def sample() -> ShardSample:
        nonlocal num_asked
        num_asked += 1
        await may_tell.wait()
        return SAMPLE

    ours, theirs = socket.socketpair()
    async with SampleTeller(theirs, sample), SampleAsker(ours, timeout_s=0.05) as asker:
        for _ in range(3):
            with pytest.raises(UnavailableError, match=r"within 0\.05 s"):
                await asker.ask()
        # From here on the answer is waited for: if it came late once more, the next question would be another one.
        asker._timeout_s = 60.0
        may_tell.set()
        assert await asker.ask() == SAMPLE
        assert num_asked == 1


@pytest.mark.parametrize(
    "error", [StorageError("the disk is gone"), OSError(errno.EMFILE, "Too many open files")], ids=["store", "system"]
)
async def test_a_failure_to_tell_passes(error: Exception) -> None:
    """A shard that cannot tell, also for want of a file descriptor, says so, and is asked again."""
    fails = True

    async def sample() -> ShardSample:
        if fails:
            raise error
        return SAMPLE

    ours, theirs = socket.socketpair()
    async with SampleTeller(theirs, sample), SampleAsker(ours) as asker:
        with pytest.raises(UnavailableError, match="its log says why"):
            await asker.ask()
        fails = False
        assert await asker.ask() == SAMPLE


async def test_end_of_the_process() -> None:
    """When the other end is closed while a question is on its way, that and later ones fail at once."""
    ours, theirs = socket.socketpair()
    async with SampleAsker(ours) as asker:
        asking = asyncio.create_task(asker.ask())
        await asyncio.get_running_loop().sock_recv(_non_blocking(theirs), 1)
        theirs.close()
        with pytest.raises(UnavailableError):
            await asking
        with pytest.raises(UnavailableError, match="any more"):
            await asker.ask()


@pytest.mark.parametrize("text", [b"{}", b"[1]", b"nonsense"])
async def test_something_else(text: bytes) -> None:
    """An answer that is no sample is an error of the protocol."""
    ours, theirs = socket.socketpair()
    with theirs:
        async with SampleAsker(ours) as asker:
            theirs.sendall(len(text).to_bytes(4, "little") + text)
            asking = asyncio.create_task(asker.ask())
            await asyncio.get_running_loop().sock_recv(_non_blocking(theirs), 1)
            theirs.setblocking(True)
            theirs.sendall(len(text).to_bytes(4, "little") + text)
            with pytest.raises(ProtocolError):
                await asking


async def test_endless_answer() -> None:
    """An answer of a senseless length ends the channel, and nothing is allocated for it."""
    ours, theirs = socket.socketpair()
    with theirs:
        async with SampleAsker(ours) as asker:
            theirs.sendall(b"\xff\xff\xff\xff")
            with pytest.raises(UnavailableError):
                await asker.ask()


def _non_blocking(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    return sock
