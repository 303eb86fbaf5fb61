"""A virtual loop on which several hosts live: processes that are killed and paused, and a network between them.

Code under test runs as it is: it opens connections, serves sockets and calls threads on the loop that runs. What a task
does belongs to the host in whose context it began. A killed host changes nothing any more: its tasks are cancelled, and
unwind without reaching disk or network. A paused one stands still, and finds later that time has passed.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import os
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from virtual_loop import VirtualLoop

__all__ = ["Host", "HostLoop", "Listener", "host_here"]

_HOST: contextvars.ContextVar[Host | None] = contextvars.ContextVar("host", default=None)
_RETRANSMIT_S = 0.2
# Code takes some time: who waits for a deadline that rounding puts a little later would wait for no time, for ever.
_STEP_S = 1e-7


def host_here() -> Host | None:
    """Return the host whose code runs now; None outside of all."""
    return _HOST.get()


class Host:
    """One life of a process. Begin it with `run`.

    Attributes:
        machine: Where it runs: cuts of the network are between machines.
        is_dead: It was killed.
        is_paused: It stands still.
        rng: Its own chance, so that nothing depends on the order in which hosts draw.
        on_kill: Called as it is killed, before anything of it ends.
    """

    def __init__(self, loop: HostLoop, machine: str) -> None:
        self.machine, self.is_dead, self.is_paused = machine, False, False
        self.rng = loop.draw_rng()
        self._loop = loop
        self._context = contextvars.copy_context()
        self._context.run(_HOST.set, self)
        self.held: list[asyncio.Handle] = []
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.listeners: list[Listener] = []
        self.ends: dict[_End, None] = {}
        self.on_kill: list[Callable[[], None]] = []

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run its main coroutine."""
        return self._loop.create_task(work, context=self._context)

    def kill(self) -> None:
        """End it at once."""
        for call in self.on_kill:
            call()
        self.is_dead = True
        for listener in list(self.listeners):
            listener.close()
        for end in list(self.ends):
            end.abort()
        for task in list(self.tasks):
            task.cancel()
        self.resume()

    def pause(self) -> None:
        """Let it stand still until `resume`; others can still connect to it."""
        self.is_paused = True

    def resume(self) -> None:
        """Let it go on."""
        self.is_paused = False
        held, self.held = self.held, []
        self._loop.put_back(held)


class HostLoop(VirtualLoop):
    """The loop, and the network.

    Attributes:
        latency_s: Bounds of the time that bytes take.
        thread_s: The longest time that a slow call in a thread takes; one in four is slow.
        cuts: Pairs of machines between which nothing gets through.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begin_anew(random.Random(0))

    def begin_anew(self, rng: random.Random) -> None:
        """Forget all hosts and connections."""
        self._seed, self._num_rngs = rng.getrandbits(64), 0
        self.latency_s, self.thread_s = (0.0005, 0.002), 0.02
        self.cuts: set[frozenset[str]] = set()
        self._listeners: dict[int, Listener] = {}
        self._ends: dict[_End, None] = {}
        self._num_ports = 40_000

    def draw_rng(self) -> random.Random:
        """Return a source of chance of its own."""
        self._num_rngs += 1
        return random.Random(self._seed + self._num_rngs)

    # Hosts.

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> asyncio.Task[Any]:
        """Note whose it is."""
        host = _HOST.get() if context is None else context.get(_HOST)
        task: asyncio.Task[Any] = super().create_task(coro, name=name, context=context)
        if host is not None:
            host.tasks[task] = None
            task.add_done_callback(host.tasks.pop)
            if host.is_dead:
                task.add_done_callback(_ignore)
                task.cancel()
        return task

    def put_back(self, handles: list[asyncio.Handle]) -> None:
        """Let what was held run soon."""
        self._ready.extend(handles)  # type: ignore[attr-defined]

    def _advance(self) -> None:
        super()._advance()
        self._now_s += _STEP_S

    def _run_once(self) -> None:
        ready = self._ready  # type: ignore[attr-defined]
        if not ready:
            self._advance()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            host = handle._context.get(_HOST)
            if host is not None and host.is_paused:
                host.held.append(handle)
            else:
                handle._run()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Leave out what nobody takes from the killed."""
        if "never retrieved" not in context["message"]:
            super().call_exception_handler(context)

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Call a function that is meant for a thread, at once or somewhat later."""
        host = _HOST.get()
        done: asyncio.Future[Any] = self.create_future()

        def call() -> None:
            try:
                if host is not None and host.is_dead:
                    raise OSError(errno.EIO, "the process was killed")
                result = func(*args)
            except Exception as exc:
                if not done.done():
                    done.set_exception(exc)
                    done.exception() if host is not None and host.is_dead else None
            else:
                if not done.done():
                    done.set_result(result)

        if host is not None and host.rng.random() < 0.25:
            self.call_later(host.rng.uniform(0.0, self.thread_s), call)
        else:
            call()
        return done

    # The network.

    def is_cut(self, one: str, other: str) -> bool:
        """Return whether nothing gets through between two machines."""
        return frozenset((one, other)) in self.cuts

    def drop_connections(self, machine: str) -> None:
        """Reset all connections of a machine."""
        for end in [end for end in self._ends if machine in (end.machine, end.peer.machine)]:
            end.abort()

    def listen(self, port: int) -> Listener:
        """Return what a server of the host that runs now takes for a bound socket."""
        host = _HOST.get()
        assert host is not None and port not in self._listeners, port
        listener = self._listeners[port] = Listener(self, host, port)
        host.listeners.append(listener)
        return listener

    def stop_listening(self, listener: Listener) -> None:
        """Refuse connections from now on."""
        if self._listeners.get(listener.port) is listener:
            del self._listeners[listener.port]

    async def create_connection(  # type: ignore[override]
        self, factory: Callable[[], Any], host: str, port: int, **options: Any
    ) -> tuple[Any, Any]:
        """Connect the host that runs now to a port."""
        here = _HOST.get()
        assert here is not None
        await asyncio.sleep(here.rng.uniform(*self.latency_s))
        listener = await self._reach(here.machine, port)
        if listener is None or here.is_dead:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        self._num_ports += 1
        near, far = _End(self, here), _End(self, listener.host)
        near.peer, far.peer = far, near
        near.peername, far.peername = ("127.0.0.1", port), ("127.0.0.1", self._num_ports)
        protocol = factory()
        near.attach(protocol)
        listener.take(_Accepted(far))
        return near, protocol

    async def _reach(self, machine: str, port: int) -> Listener | None:
        for attempt in range(1 << 30):
            if attempt:
                await asyncio.sleep(_RETRANSMIT_S)
            listener = self._listeners.get(port)
            if listener is None or not self.is_cut(machine, listener.host.machine):
                return listener
        raise AssertionError("it waits for ever")

    def keep_end(self, end: _End) -> None:
        """Take an end of a connection."""
        self._ends[end] = None

    def drop_end(self, end: _End) -> None:
        """Forget one."""
        self._ends.pop(end, None)

    async def connect_accepted_socket(  # type: ignore[override]
        self, factory: Callable[[], Any], sock: _Accepted, **options: Any
    ) -> tuple[Any, Any]:
        """Turn what `Listener.accept` has returned into a connection."""
        protocol = factory()
        sock.end.attach(protocol)
        return sock.end, protocol

    def add_reader(self, sock: Any, callback: Callable[..., object], *args: Any) -> None:  # type: ignore[override]
        """Call back when a socket has something to read."""
        self.remove_reader(sock)
        context = contextvars.copy_context()
        sock.on_readable = lambda: sock.calls.append(self.call_soon(callback, *args, context=context))
        if sock.is_readable:
            sock.on_readable()

    def remove_reader(self, sock: Any) -> bool:  # type: ignore[override]
        """Undo it."""
        had, sock.on_readable = sock.on_readable is not None, None
        while sock.calls:
            sock.calls.pop().cancel()
        return had


class Listener:
    """What a server takes for a bound socket."""

    def __init__(self, loop: HostLoop, host: Host, port: int) -> None:
        self.host, self.port = host, port
        self.on_readable: Callable[[], object] | None = None
        self.calls: list[asyncio.Handle] = []
        self._loop, self._waiting = loop, deque[_Accepted]()

    @property
    def is_readable(self) -> bool:
        """Whether a connection waits."""
        return bool(self._waiting)

    def take(self, sock: _Accepted) -> None:
        """Let a connection wait until it is accepted."""
        self._waiting.append(sock)
        if self.on_readable is not None:
            self.on_readable()

    def setblocking(self, flag: bool) -> None:
        """Do nothing."""

    def listen(self, backlog: int) -> None:
        """Do nothing: connections wait since it was made."""

    def accept(self) -> tuple[_Accepted, tuple[str, int]]:
        """Return a connection and where it comes from."""
        if not self._waiting:
            raise BlockingIOError
        sock = self._waiting.popleft()
        return sock, sock.end.peername

    def close(self) -> None:
        """Refuse connections; those that wait are reset."""
        self._loop.stop_listening(self)
        while self._waiting:
            self._waiting.popleft().close()


class _Accepted:
    """What a server takes for a connected socket."""

    def __init__(self, end: _End) -> None:
        self.end = end
        self.calls: list[asyncio.Handle] = []

    @property
    def is_readable(self) -> bool:
        return bool(self.end.received) or self.end.is_over

    @property
    def on_readable(self) -> Callable[[], object] | None:
        return self.end.on_readable

    @on_readable.setter
    def on_readable(self, call: Callable[[], object] | None) -> None:
        self.end.on_readable = call

    def setblocking(self, flag: bool) -> None:
        pass

    def setsockopt(self, *args: Any) -> None:
        pass

    def shutdown(self, how: int) -> None:
        self.end.abort()

    def close(self) -> None:
        self.end.abort()


class _End(asyncio.Transport):
    """One end of a connection: bytes arrive in order, late, or not before a cut is over."""

    peer: _End
    peername: tuple[str, int]

    def __init__(self, loop: HostLoop, host: Host) -> None:
        super().__init__()
        self.machine = host.machine
        self.received = deque[bytes]()
        self.on_readable: Callable[[], object] | None = None
        self.is_over = False  # nothing more will come
        self._loop, self._host, self._rng = loop, host, loop.draw_rng()
        self._context = contextvars.copy_context()
        self._protocol: Any = None
        self._is_closing = self._is_lost = self._is_read_paused = False
        self._on_the_way: deque[tuple[float, bytes | None]] = deque()  # to the peer; None is the end
        loop.keep_end(self)
        host.ends[self] = None

    def attach(self, protocol: Any) -> None:
        """Begin."""
        self._protocol = protocol
        self._context = contextvars.copy_context()
        protocol.connection_made(self)
        self._loop.call_soon(self._deliver, context=self._context)
        if self._is_closing:
            self._loop.call_soon(self._lose, context=self._context)

    # As asyncio has it.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.peername if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return self._is_closing

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self._is_read_paused = True

    def resume_reading(self) -> None:
        self._is_read_paused = False
        self._loop.call_soon(self._deliver, context=self._context)

    def write(self, data: Any) -> None:
        if not self._is_closing:
            self._send(bytes(data))

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._send(None)
            self._loop.call_soon(self._lose, context=self._context)

    abort = close

    # What the wire does.

    def _send(self, data: bytes | None) -> None:
        loop = self._loop
        arrives_s = loop.time() + self._rng.uniform(*loop.latency_s)
        if self._on_the_way:
            self._on_the_way.append((max(arrives_s, self._on_the_way[-1][0]), data))
        else:
            self._on_the_way.append((arrives_s, data))
            loop.call_at(arrives_s, self._arrive, context=_OUTSIDE)

    def _arrive(self) -> None:
        """Hand on what has arrived at the peer by now."""
        loop, waiting = self._loop, self._on_the_way
        if loop.is_cut(self.machine, self.peer.machine):
            loop.call_later(_RETRANSMIT_S * (1 + self._rng.random()), self._arrive, context=_OUTSIDE)
            return
        while waiting and waiting[0][0] <= loop.time():
            self.peer._take(waiting.popleft()[1])
        if waiting:
            loop.call_at(waiting[0][0], self._arrive, context=_OUTSIDE)

    def _take(self, data: bytes | None) -> None:
        if self._is_closing:
            return
        if data is None:
            self.is_over = True
        else:
            self.received.append(data)
        if self._protocol is not None:
            self._loop.call_soon(self._deliver, context=self._context)
        elif self.on_readable is not None:
            self.on_readable()

    def _deliver(self) -> None:
        while self.received and not self._is_read_paused and not self._is_closing:
            data = memoryview(self.received.popleft())
            while data and not self._is_closing:
                buffer = self._protocol.get_buffer(-1)
                size = min(len(buffer), len(data))
                buffer[:size] = data[:size]
                data = data[size:]
                self._protocol.buffer_updated(size)
                if self._is_read_paused and data:
                    self.received.appendleft(bytes(data))
                    return
        if self.is_over and not self.received and not self._is_closing:
            self._is_closing = True
            self._lose()

    def _lose(self) -> None:
        self._loop.drop_end(self)
        self._host.ends.pop(self, None)
        if self._protocol is not None and not self._is_lost:
            self._is_lost = True
            self._protocol.connection_lost(None)


_OUTSIDE = contextvars.Context()


def _ignore(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()
