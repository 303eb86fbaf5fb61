"""Who has to go when strangers have no room, and who is let in."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket

import pytest
from fake_service import batch, hello_request, serve
from hellos import hello_of_nobody, hello_of_writer
from loop_clock import ClockAhead
from raw_peer import LIMITS, MIB, call_frame, dial, frame_of, reframed

from headrace.paramserver.rpc.door import Door, Visit
from headrace.paramserver.rpc.security import AccessPolicy, Token
from headrace.schemas.errors import RequestError, UnauthorizedError
from headrace.schemas.idl import idl, spec_to_idl
from headrace.schemas.messages import CALL, encode_message
from headrace.schemas.tables import DType, TableSpec

SECRET, OTHER = "correct-horse-battery", "staple-staple-staple"


def _tables(number: int) -> list[TableSpec]:
    return [
        TableSpec(fqn=f"{'t' * 100}{n}", num_rows=9, dim=4, dtype=DType.FLOAT32, states=(), has_identities=False)
        for n in range(number)
    ]


# `a+` and `b+` are newcomers of two addresses, called a1, a2, b1 in their order; `a1?` has sent something and waits for
# its turn, `next` gives a turn, `a1<` is let in, `a1-` leaves, `3s` pass. Expected: whose turn begins (`a1!`), who has
# to go (`a1x`), and who is not let in (`a1~`).
_SCRIPTS = {
    "turns are in order of arrival": ("a+ a+ a2? a1? next next next", "a2! a1!"),
    "addresses alternate": ("a+ a+ a+ b+ a1? a2? a3? b1? next next a1- next", "a1! b1! a2!"),
    "two have a turn at once": ("a+ a+ a+ a1? a2? a3? next next next", "a1! a2!"),
    "who was let in has none": ("a+ a+ a+ a1? a2? a3? next next a1< next", "a1! a2! a3!"),
    "who has left has none": ("a+ a+ a+ a1? a2? a3? next next a2- next", "a1! a2! a3!"),
    "who leaves before has none": ("a+ a+ a1? a2? a1- next next", "a2!"),
    "a turn that is over goes on while nobody waits": ("a+ a+ a+ a1? a2? next next 3s a3? a2< next", "a1! a2! a3!"),
    "a turn that is over ends for who waits": ("a+ a+ a+ a1? a2? next next 3s a3? next next", "a1! a2! a3! a1x"),
    "a turn that has lasted for a second is not over": ("a+ a+ a+ a1? a2? next next 1s a3? next", "a1! a2!"),
    "a turn that is not over does not": ("a+ a1? next 1s a+ a2? next 1s a+ a3? next", "a1! a2! a3! a1x"),
    "there is room": ("a+ a+ b+ b+", ""),
    "who has been silent for longest, of the address with most, goes for a newcomer": ("b+ a+ a+ a+ a1? a+", "a2x"),
    "then who came last": ("a+ a+ a+ a+ a1? a3? a2? a4? b+", "a4x"),
    "who has a turn does not go for a newcomer": ("a+ a1? next a+ a+ a+ a+", "a1! a2x"),
    "an address alone has all the room": ("a+ a+ a+ a+ a+ a+", "a1x a2x"),
    "who has left makes room": ("a+ a+ a+ b+ a1- b+", ""),
    "who was let in makes room, and does not go": ("a+ a+ a+ a+ a1? next a1< a+ a+", "a1! a2x"),
    "few are let in": ("a+ a+ a+ a1? a2? next next a1< a2< a3? next a3<", "a1! a2! a3! a3~"),
    "who leaves makes room inside": ("a+ a+ a+ a1? a2? next next a1< a2< a1- a3? next a3<", "a1! a2! a3!"),
    "who had to go has nothing": ("a+ a+ a+ a+ b+ a1- b+", "a1x a2x"),
    "a network of IPv6 is one address": ("1::1+ 2::1+ 1::2+ 2::2+ 1::3+", "1::1x"),
    "when it closes, all go that have no turn": ("a+ a+ b+ a1? a2? next close next", "a1! b1x a2x"),
}


@pytest.mark.parametrize(("script", "expected"), _SCRIPTS.values(), ids=_SCRIPTS.keys())
def test_door(script: str, expected: str) -> None:
    """Strangers have room for four connections and two turns of two seconds, and two are let in."""
    calls, now_s = list[None](), 100.0
    door = Door(max_inside=2, max_strangers=4, max_turns=2, call_next=lambda: calls.append(None))
    visits, told = dict[str, Visit](), list[str]()

    def tell(visit: Visit | None, what: str) -> None:
        told.extend(f"{name}{what}" for name, each in visits.items() if each is visit)

    for word in script.split():
        name, act = word[:-1], word[-1]
        if word == "next":
            visit, gone = door.next_turn(now_s)
            tell(visit, "!")
            tell(gone, "x")
        elif word == "close":
            for visit in door.close():
                tell(visit, "x")
        elif act == "s":
            now_s += int(name)
        elif act == "+":
            host = name
            name = host if ":" in host else f"{host}{sum(each.startswith(host) for each in visits) + 1}"
            visits[name], gone = door.enter(host if ":" in host else f"10.0.0.{ord(host)}")
            tell(gone, "x")
        elif act == "?":
            door.wait(visits[name])
            assert calls.pop() is None
        elif act == "-":
            door.leave(visits[name])
        elif not door.let_in(visits[name]):
            tell(visits[name], "~")
    assert sorted(told) == sorted(expected.split())
    assert [each for each in told if each[-1] == "!"] == [each for each in expected.split() if each[-1] == "!"]
    for visit in visits.values():
        door.leave(visit)
        door.leave(visit)
    assert (door.num_strangers, door.num_inside, door.next_turn(now_s)) == (0, 0, (None, None))


@pytest.mark.parametrize(
    "frame",
    [
        call_frame("hello", 1, hello_request(token=OTHER)),
        call_frame("hello", 1, hello_of_nobody(fills=["x" * 1000] * 200))[:70_000],
        call_frame("status", 1),
        call_frame("setEmbeddings", 1, batch(1, size_bytes=MIB // 2))[:70_000],
        call_frame("findRows", 1, idl.FindRowsRequest(fqn="t", identities=b"")),
    ],
    ids=["wrong token", "long hello, not sent to its end", "call", "long call, not sent to its end", "unserved method"],
)
async def test_a_refused_stranger_is_closed(frame: bytes) -> None:
    """Without a token the first 64 KiB of the first call are answered UNAUTHORIZED, and the connection is closed."""
    async with serve(access=AccessPolicy(Token(SECRET))) as served, dial(served) as raw:
        await raw.send(frame)
        answer = await raw.frame()
        assert b"token" in answer or b"before hello" in answer
        await raw.ended()
        assert served.server.stats.num_unauthorized == 1
        assert served.server.inflight_bytes == served.pool.lent_bytes == 0


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("num_tables", [3, 100, 600])
async def test_the_token_is_in_the_first_bytes(num_tables: int, is_late: bool) -> None:
    """A hello with many tables comes in by the token at its beginning; a token behind 64 KiB is not seen."""
    hello = hello_of_writer(*_tables(num_tables), token=SECRET)
    message = call_frame("hello", 1, hello)[4:]
    if is_late:  # as clients write it that know nothing of this
        token = b"\x0b\x00\x09" + len(SECRET).to_bytes(4) + SECRET.encode()
        message = message.replace(token, b"")[:-2] + token + b"\0\0"
    is_seen = not is_late or len(message) <= 2**16
    async with serve(access=AccessPolicy(Token(SECRET))) as served, dial(served) as raw:
        await raw.send(reframed(message) + call_frame("status", 2))
        assert (b"a token is required for role writer" in await raw.frame()) is not is_seen
        if is_seen:
            assert b"before hello" not in await raw.frame()


async def test_a_long_hello_is_decoded_off_the_loop() -> None:
    """While a hello with thousands of names is decoded, another client's calls are answered; what follows it waits."""
    hello = hello_of_writer(*_tables(600), token=SECRET, fills=["x"] * 60_000)
    async with (
        serve(access=AccessPolicy(Token(SECRET))) as served,
        await served.connect(says_hello=False) as client,
        dial(served) as raw,
    ):
        await client.hello(hello_request(token=SECRET))
        await raw.send(call_frame("hello", 1, hello))
        await raw.send(call_frame("setEmbeddings", 2, batch(1, size_bytes=2 * MIB)))
        answered = asyncio.create_task(raw.frame())
        num_calls = 0
        while not answered.done():
            await client.status()
            num_calls += 1
        assert num_calls > 10
        assert b"server_id" not in await answered
        await raw.frame()
        assert served.service.begun == [1]


async def test_without_tokens_a_call_before_hello_has_few_elements() -> None:
    """Whoever has not said hello cannot make the loop decode thousands of elements, even if everybody may come in."""
    more = [idl.RowsWanted(fqn="t", row_ids=b"x") for _ in range(4000)]
    request = idl.GetEmbeddingsRequest(fqn="t", row_ids=b"x", with_states=False, with_versions=False, more=more)
    async with serve() as served:
        async with dial(served) as raw:
            await raw.send(call_frame("getEmbeddings", 1, request))
            await raw.ended()
        async with dial(served, client="") as raw:
            await raw.send(call_frame("getEmbeddings", 1, request))
            await raw.frame()
        assert served.server.stats.num_malformed == 1


async def test_a_readers_call_has_few_elements() -> None:
    """A reader cannot make the loop decode tens of thousands of elements; as many tables as are answered come in."""
    async with serve() as served:
        for num_tables, is_read in ((1024, True), (3000, False)):
            more = [idl.RowsWanted(fqn="t", row_ids=b"x")] * (num_tables - 1)
            request = idl.GetEmbeddingsRequest(fqn="t", row_ids=b"x", with_states=False, with_versions=False, more=more)
            async with dial(served) as raw:
                await raw.send(call_frame("hello", 0, hello_request(role=idl.Role.READER)))
                await raw.frame()
                await raw.send(call_frame("getEmbeddings", 1, request))
                await (raw.frame() if is_read else raw.ended())
        assert served.server.stats.num_malformed == 1


CONTROLS = ["a\x1b[2J", "a\nb", "a\x7f", "a\x9b31m"]


@pytest.mark.parametrize("name", CONTROLS)
async def test_names_with_control_characters_are_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """No run, client or table brings them into logs and terminals, and the refusal escapes them; nor does a method."""
    spec = spec_to_idl(_tables(1)[0])
    spec.fqn = name
    async with serve() as served, await served.connect(says_hello=False) as client:
        for fields in ({"run": name}, {"client": name}, {"tables": [spec]}):
            with pytest.raises(RequestError, match="control characters") as error:
                await client.hello(hello_of_nobody(**fields))
            assert name not in str(error.value)
        async with dial(served, client="") as raw:
            await raw.send(frame_of(encode_message("status", CALL, 1, idl.ParameterServer.status_args())))
            await raw.frame()
            other = encode_message("x" * len(name.encode()), CALL, 1, idl.ParameterServer.status_args())
            await raw.send(frame_of(other).replace(b"x" * len(name.encode()), name.encode()))
            await raw.ended()
    assert not any(name in message for message in caplog.messages)


async def test_strangers_hold_no_connection_of_clients() -> None:
    """However many silent strangers are there, clients come in; the oldest strangers are closed for newcomers."""
    async with (
        serve(limits=dataclasses.replace(LIMITS, max_connections=2, max_strangers=64)) as served,
        contextlib.AsyncExitStack() as stack,
    ):
        raws = [await stack.enter_async_context(dial(served)) for _ in range(100)]
        async with await served.connect(), await served.connect():
            for raw in raws[:30]:
                await raw.ended()
            await raws[-1].send(call_frame("status", 1))
            assert b"2 connections" in await raws[-1].frame()
        assert served.server.stats.num_connections_refused > 30


@pytest.mark.parametrize("sent", [b"\0", MIB.to_bytes(4), MIB.to_bytes(4) + bytes(60_000)])
async def test_strangers_that_stop_in_their_first_call_have_a_turn(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They keep a long hello waiting no longer than until a turn of theirs is over, and have that time to go on."""
    clock = ClockAhead(monkeypatch, stands_still=True)
    limits = dataclasses.replace(LIMITS, max_connections=2, max_strangers=64)
    async with serve(limits=limits) as served, contextlib.AsyncExitStack() as stack:
        raws = [await stack.enter_async_context(dial(served)) for _ in range(limits.max_turns)]
        for raw in raws:
            await raw.send(sent)
        while served.server.num_connections < limits.max_turns:  # noqa: ASYNC110 (its connections)
            await asyncio.sleep(0)
        client = await served.connect(says_hello=False)
        hello = asyncio.create_task(client.hello(hello_of_nobody(fills=["x" * 1000] * 200)))
        for _ in range(3):
            await clock.pass_by(0.5)
        assert served.server.stats.num_connections_refused == 0 and not hello.done()
        await clock.pass_by(1)
        assert served.server.stats.num_connections_refused == 1
        await hello
        await raws[0].ended()
        await client.close()


async def test_clients_that_come_at_once_all_come_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than have a turn at once, each has its turn until the rest of its hello has come, and none is closed."""
    clock = ClockAhead(monkeypatch, stands_still=True)
    limits = dataclasses.replace(LIMITS, max_strangers=8)
    hello = call_frame("hello", 1, hello_request())
    async with serve(limits=limits) as served, contextlib.AsyncExitStack() as stack:
        raws = [await stack.enter_async_context(dial(served)) for _ in range(limits.max_strangers)]
        for part, num_begun in ((hello[:-1], limits.max_turns), (hello[-1:], limits.max_strangers)):
            for raw in raws:
                await raw.send(part)
            for _ in range(8):
                await clock.pass_by(0.1)
            assert served.server.num_connections == num_begun
        for raw in raws:
            assert b"fake" in await raw.frame()
        assert served.server.stats.num_connections_refused == 0


@pytest.mark.parametrize("drips", [False, True])
async def test_a_hello_has_a_deadline(drips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger is closed so long after it has connected, whatever it sends."""
    clock = ClockAhead(monkeypatch)
    limits = dataclasses.replace(LIMITS, hello_timeout_s=100.0, frame_timeout_s=1000.0)
    async with serve(limits=limits) as served, dial(served) as raw:
        for _ in range(3):
            if drips:
                await raw.send(b"\0")
            await clock.pass_by(40)
        await raw.ended()


async def test_a_refused_stranger_that_has_hung_up_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """Its connection is closed at once, and the log has its line and no traceback."""
    async with serve(access=AccessPolicy(Token(SECRET))) as served:
        with socket.create_connection((served.host, served.port)) as peer:
            peer.sendall(call_frame("status", 1))
        await served.service.wait_gone(1)
    # asyncio warns of slow callbacks on a busy machine.
    assert [each.levelname for each in caplog.records if each.name.startswith("headrace.")] == ["WARNING"]


async def test_only_writers_say_long_hellos() -> None:
    """A reader's token opens no long hello, the first or a later one; the connection goes on."""
    tokens = {idl.Role.READER: Token(OTHER), idl.Role.ADMIN: Token(SECRET)}
    long = hello_of_nobody(token=OTHER, fills=["x" * 1000] * 20)
    async with serve(access=AccessPolicy(tokens)) as served, await served.connect(says_hello=False) as client:
        for _ in range(2):
            with pytest.raises(UnauthorizedError, match="reader"):
                await client.hello(long)
            await client.hello(hello_of_nobody(token=OTHER))
        await client.hello(hello_of_nobody(token=SECRET, fills=["x" * 1000] * 20))
        assert served.server.inflight_bytes == served.server.inflight_requests == 0


async def test_a_shape_counts_for_little() -> None:
    """A first hello of a dense model comes in whatever the dimensions of its tensors."""
    specs = [
        TableSpec(fqn=f"d{n}", num_rows=1, dim=64, dtype=DType.FLOAT32, states=(), has_identities=False)
        for n in range(50)
    ]
    tables = [spec_to_idl(spec) for spec in specs]
    async with serve() as served, await served.connect(says_hello=False) as client:
        for table in tables:
            table.shape = [1, 2, 2, 2, 2, 4] * 4
        await client.hello(hello_of_nobody(tables=tables))
