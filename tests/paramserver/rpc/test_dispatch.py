"""What becomes of a request: its order, its answer, the errors it may end in, and the frame that it came in."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from typing import Any

import pytest
from fake_service import POISON, FakeService, batch, hello_request, read, serve
from hellos import hello_of_nobody
from raw_peer import LIMITS, MIB, call_frame, dial, frame_of

from headrace.paramserver.rpc.dispatch import Dispatcher, Peer, ServerStats
from headrace.paramserver.rpc.frames import Frame
from headrace.paramserver.rpc.security import AccessPolicy
from headrace.paramserver.system.log_lines import WarningThrottle
from headrace.schemas.errors import (
    CorruptionError,
    HeadraceError,
    RequestError,
    SequenceGapError,
    UnavailableError,
)
from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, encode_message


async def test_declared_errors_arrive_with_what_they_carry() -> None:
    """An error of the service is raised at the client as its class, with its fields."""
    async with serve() as served, await served.connect() as client:
        served.service.errors["gap"] = SequenceGapError("gap", expected_seq=7)
        with pytest.raises(SequenceGapError, match=r"^gap$") as gap:
            await client.get_embeddings(read("gap"))
        assert gap.value.expected_seq == 7


async def test_damage_that_a_read_meets_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever runs the server is told of it, and not its reader alone, whom the names of its files do not concern."""
    async with serve() as served, await served.connect() as client:
        served.service.errors["rows"] = CorruptionError("store s is damaged: block checksum mismatch")
        with pytest.raises(HeadraceError) as error:
            await client.get_embeddings(read("rows"))
        assert type(error.value) is HeadraceError and "store s" not in str(error.value)
        assert (served.server.stats.num_storage, served.server.num_refused) == (1, 1)
        await client.hello(hello_request(role=idl.Role.ADMIN))
        with pytest.raises(HeadraceError, match="store s is damaged"):
            await client.get_embeddings(read("rows"))
    assert "storage: getEmbeddings: store s is damaged: block checksum mismatch" in caplog.text


async def test_a_bug_is_one_failed_call(caplog: pytest.LogCaptureFixture) -> None:
    """Any other exception is an INTERNAL answer and a traceback in the log; the connection goes on."""
    async with serve() as served, await served.connect() as client:
        served.service.errors["bug"] = ZeroDivisionError("secret detail")
        with pytest.raises(HeadraceError, match="ZeroDivisionError") as error:
            await client.get_embeddings(read("bug"))
        assert type(error.value) is HeadraceError
        assert "secret detail" not in str(error.value)
        await client.status()
        assert served.server.stats.num_failed == 1
    (record,) = [r for r in caplog.records if r.levelno >= logging.ERROR and r.name.startswith("headrace.")]
    assert record.exc_info is not None


async def test_a_reply_that_cannot_be_encoded_is_a_failed_call() -> None:
    """A service that returns the wrong thing costs one INTERNAL answer."""

    class Wrong(FakeService):
        async def status(self, call: Any) -> Any:
            return idl.StatusReply(server_id="only")

    async with serve(Wrong()) as served, await served.connect() as client:
        with pytest.raises(HeadraceError, match="failed inside the server"):
            await client.status()
        await client.get_embeddings(read("t"))


async def test_unknown_method_is_answered_as_thrift_does() -> None:
    """A method that the IDL lacks gets a TApplicationException and the connection goes on."""
    async with serve() as served, dial(served) as raw:
        await raw.send(frame_of(encode_message("noSuch", CALL, 5, idl.ParameterServer.status_args())))
        answer = await raw.frame()
        assert answer[:4] == b"\x80\x01\x00\x03"
        assert b"noSuch" in answer
        await raw.send(call_frame("status", 6))
        assert (await raw.frame())[:4] == b"\x80\x01\x00\x02"


async def test_held_frames_stay_and_count_as_in_flight() -> None:
    """A buffer that the service holds is not reused, and its bytes are counted until it is released."""
    async with serve() as served, await served.connect() as client:
        await client.set_embeddings(batch(0, size_bytes=MIB))
        assert (served.server.inflight_bytes, served.pool.lent_bytes) == (0, 0), "nobody held it"
        served.service.holds = True
        for seq in (1, 2):
            await client.set_embeddings(batch(seq, size_bytes=MIB))
        assert served.server.inflight_requests == 0
        assert served.server.inflight_bytes == served.pool.lent_bytes > 2 * MIB
        (first, release), (second, _) = served.service.held
        assert (bytes(first).count(1), bytes(second).count(2)) > (MIB, MIB)
        release()
        release()
        assert bytes(first[-100:]) == bytes([POISON]) * 100
        assert bytes(second).count(2) > MIB
        served.service.release_all()
        assert served.server.inflight_bytes == served.pool.lent_bytes == 0


async def test_a_reply_over_the_frame_limit_is_an_error() -> None:
    """The service may return more than a frame holds: the client is told to ask for less."""
    limits = dataclasses.replace(LIMITS, max_frame_bytes=MIB)
    async with serve(limits=limits) as served, await served.connect() as client:
        served.service.reply_bytes = 2 * MIB
        with pytest.raises(RequestError, match="ask for less"):
            await client.get_embeddings(read("t", b"x"))
        served.service.reply_bytes = MIB // 2
        assert len((await client.get_embeddings(read("t", b"x"))).weights) == MIB // 2


@pytest.mark.parametrize("refuses", [False, True])
async def test_an_answer_is_checked_once_it_is_there(refuses: bool) -> None:
    """What a service finds wrong after the reply was encoded is what the client gets; a process that may not answer
    any more refuses nothing for good either."""

    class Owned(FakeService):
        def check_answer(self, method: str) -> None:
            checked.append(method)
            if is_lost:
                raise UnavailableError("not owned now")

    checked: list[str] = []
    is_lost = False
    async with serve(Owned()) as served, await served.connect() as client:
        if refuses:
            served.service.errors["rows"] = RequestError("no such table")
        with pytest.raises(RequestError) if refuses else contextlib.nullcontext():
            await client.get_embeddings(read("rows"))
        is_lost = True
        with pytest.raises(UnavailableError, match="not owned now"):
            await client.get_embeddings(read("rows"))
        assert checked == ["hello", "getEmbeddings", "getEmbeddings"]


async def test_hosts_take_turns_to_have_long_hellos_decoded() -> None:
    """One hello is decoded at a time, and a host's first one before the second one of another host."""
    refusals = WarningThrottle(logging.getLogger(__name__))
    dispatcher = Dispatcher(FakeService(), access=AccessPolicy(), stats=ServerStats(), refusals=refusals)
    decoded = []

    async def decode(address: str, num_fills: int) -> None:
        message = call_frame("hello", 1, hello_of_nobody(fills=["x"] * num_fills))[4:]
        await dispatcher.decode_aside(Peer(address), Frame[Any](memoryview(message), None, None, None))
        decoded.append(address)

    async with asyncio.TaskGroup() as group:
        for address, num_fills in {"a:1": 5000, "a:2": 1, "a:3": 1, "b:1": 1}.items():
            group.create_task(decode(address, num_fills))
    assert decoded == ["a:1", "b:1", "a:2", "a:3"]
