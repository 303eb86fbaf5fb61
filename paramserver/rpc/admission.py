"""Admission: how many requests, and bytes of them, may be in flight, and who is next when there is no room.

A request asks before it is read (a long one) or before it is begun (a small one), gets a `Ticket`, and returns it in
two parts: its bytes when its buffer is free, its place when it is answered. Past a bound it waits, which means that its
connection is not read: the kernel's window closes and the sender feels it.

Fair: waiting accounts take turns, one request each. An account that has reached its own bound stands aside until it has
finished something, and holds up nobody. Only when the next account's request does not fit what is left of the whole do
all wait for it, else a long request would never find its room. Small requests need no bytes and pass by.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from headrace.schemas.errors import ConfigError
from headrace.schemas.idl import idl

__all__ = ["Account", "Admission", "ServerLimits", "Ticket", "Waiter"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimits:
    """What one server may hold, and how long it waits.

    Memory, at most: `max_inflight_bytes` for requests and as much again for replies that are not written; twice
    `max_stranger_bytes` for the same of connections before their hello; `max_idle_buffer_bytes`; 16 KiB for each of
    `max_inflight_requests` short requests, and as much again for strangers'. And for each connection: 4 KiB; 48 KiB
    while it is made to wait or stands in the middle of a short frame; 384 KiB while its peer does not read.

    Attributes:
        max_frame_bytes: Longest request or reply, bytes.
        max_hello_bytes: Longest frame before a successful hello, bytes.
        max_client_bytes: Requests that one client may have in flight, bytes; as much for replies on their way.
        max_client_requests: Requests that one client may have in flight.
        max_inflight_bytes: Requests in flight of all clients, bytes; as much for replies on their way.
        max_inflight_requests: Requests in flight of all clients.
        max_stranger_bytes: Requests in flight of all connections that have not said hello, bytes.
        max_connections: Connections; a few more are told so, the rest are closed at once.
        max_idle_buffer_bytes: Buffers kept for the next frames, bytes.
        admission_timeout_s: A request that waits longer for room is answered with `OverloadedError`, seconds.
        retry_after_s: What an overloaded answer tells the client to wait, seconds.
        hello_timeout_s: A connection must have said hello by then, seconds.
        frame_timeout_s: A frame must be whole this long after its first byte, waits for room not counted, seconds; of a
            long one, of a client that has said hello, the next 64 KiB must have come.
        idle_timeout_s: A connection with nothing in flight is closed after this time, seconds; 0: never.
        write_timeout_s: A peer must have taken a reply by then, of a long one the next 256 KiB, seconds.
    """

    max_frame_bytes: int = 64 * 2**20
    max_hello_bytes: int = 2**20
    max_client_bytes: int = 256 * 2**20
    max_client_requests: int = 256
    max_inflight_bytes: int = 2**30
    max_inflight_requests: int = 8192
    max_stranger_bytes: int = 32 * 2**20
    max_connections: int = 12_000
    max_idle_buffer_bytes: int = 128 * 2**20
    admission_timeout_s: float = 10.0
    retry_after_s: float = 0.5
    hello_timeout_s: float = 30.0
    frame_timeout_s: float = 30.0
    idle_timeout_s: float = 600.0
    write_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 0 or (getattr(self, name) == 0 and name not in _MAY_BE_ZERO):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above zero")
        for small, large in _ASCENDING:
            if getattr(self, small) > getattr(self, large):
                raise ConfigError(f"{small} {getattr(self, small)} is above {large} {getattr(self, large)}")

    def to_idl(self) -> object:
        """Return what `hello` tells a client of these."""
        return idl.Limits(
            max_frame_bytes=self.max_frame_bytes,
            max_inflight_bytes=self.max_client_bytes,
            max_inflight_requests=self.max_client_requests,
        )


_MAY_BE_ZERO = {"max_idle_buffer_bytes", "retry_after_s", "idle_timeout_s"}
_ASCENDING = [
    ("max_frame_bytes", "max_client_bytes"),
    ("max_client_bytes", "max_inflight_bytes"),
    ("max_client_requests", "max_inflight_requests"),
]


class Account:
    """What one client has in flight, over however many connections.

    Attributes:
        num_requests: Its requests in flight.
        size_bytes: Bytes of them.
        reply_bytes: Long replies to it that are not written yet.
    """

    __slots__ = ("key", "num_open", "num_requests", "reply_bytes", "size_bytes", "waiters")

    def __init__(self, key: Hashable) -> None:
        """Start with nothing in flight; made by `Admission.open_account`."""
        self.key = key
        self.num_open = 0
        self.num_requests = 0
        self.size_bytes = 0
        self.reply_bytes = 0
        self.waiters: deque[Waiter] = deque()


class Ticket:
    """One admitted request's share of the bounds. Both releases are harmless when repeated."""

    __slots__ = ("_account", "_admission", "_has_place", "_size_bytes")

    def __init__(self, admission: Admission, account: Account, size_bytes: int) -> None:
        """Hold a place and `size_bytes`; made by `Admission`."""
        self._admission = admission
        self._account = account
        self._size_bytes = size_bytes
        self._has_place = True

    def release_bytes(self) -> None:
        """The request's buffer is free."""
        size_bytes, self._size_bytes = self._size_bytes, 0
        if size_bytes:
            self._admission._release(self._account, 0, size_bytes)

    def release(self) -> None:
        """The request is answered, or never will be; its bytes may still be held."""
        if self._has_place:
            self._has_place = False
            self._admission._release(self._account, 1, 0)


class Waiter:
    """A request that waits; `Admission.cancel` takes it back."""

    __slots__ = ("account", "on_grant", "size_bytes")

    def __init__(self, account: Account, size_bytes: int, on_grant: Callable[[Ticket], None]) -> None:
        """Call `on_grant` when it is its turn; made by `Admission`."""
        self.account = account
        self.size_bytes = size_bytes
        self.on_grant = on_grant


class Admission:
    """The bounds of a group of accounts, and of each of them.

    Thread: the loop's. Does no I/O.

    Attributes:
        num_requests: Requests in flight.
        size_bytes: Bytes of them.
        reply_bytes: Long replies that are not written yet.
    """

    def __init__(self, *, max_requests: int, max_bytes: int, max_account_requests: int, max_account_bytes: int) -> None:
        """Start with nothing in flight.

        Args:
            max_requests: Requests in flight together.
            max_bytes: Bytes of them together, and bytes of replies together.
            max_account_requests: Requests in flight of one account.
            max_account_bytes: Bytes of them, and of replies to them; no request may be longer.
        """
        assert 0 < max_account_bytes <= max_bytes
        assert 0 < max_account_requests <= max_requests
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._max_account_requests = max_account_requests
        self._max_account_bytes = max_account_bytes
        self.num_requests = 0
        self.size_bytes = 0
        self.reply_bytes = 0
        self._accounts: dict[Hashable, Account] = {}
        # Accounts whose first waiter fits their own bounds, in the order of their turns (a dict for its order).
        self._turns: dict[Account, None] = {}
        self._is_granting = False

    def open_account(self, key: Hashable) -> Account:
        """Return the account of `key`; close it as often as it was opened."""
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = Account(key)
        account.num_open += 1
        return account

    def close_account(self, account: Account) -> None:
        """Forget an account that nobody else has open; its tickets stay good."""
        account.num_open -= 1
        if not account.num_open:
            del self._accounts[account.key]

    def admit(self, account: Account, size_bytes: int, on_grant: Callable[[Ticket], None]) -> Ticket | Waiter:
        """Ask for room.

        Args:
            account: Who asks.
            size_bytes: What the request will hold, at most an account's bound; 0 for a small one.
            on_grant: Called with the ticket later, when there is no room now.

        Returns:
            The ticket, or the waiter that stands in line.
        """
        assert size_bytes <= self._max_account_bytes
        is_next = not account.waiters and not (self._turns and size_bytes)
        if is_next and self._fits_account(account, size_bytes) and self._fits_all(size_bytes):
            return self._take(account, size_bytes)
        waiter = Waiter(account, size_bytes, on_grant)
        account.waiters.append(waiter)
        self._line_up(account)
        return waiter

    def cancel(self, waiter: Waiter) -> None:
        """Take a waiter that was not granted out of the line."""
        account = waiter.account
        was_first = account.waiters[0] is waiter
        account.waiters.remove(waiter)
        if was_first:
            self._turns.pop(account, None)
            self._line_up(account)
            self._grant()

    def admit_reply(self, account: Account, size_bytes: int) -> bool:
        """Take room for a reply that is ready, or say that there is none."""
        if account.reply_bytes + size_bytes > self._max_account_bytes:
            return False
        if self.reply_bytes + size_bytes > self._max_bytes:
            return False
        account.reply_bytes += size_bytes
        self.reply_bytes += size_bytes
        return True

    def release_reply(self, account: Account, size_bytes: int) -> None:
        """Give back what `admit_reply` took."""
        account.reply_bytes -= size_bytes
        self.reply_bytes -= size_bytes

    def _fits_account(self, account: Account, size_bytes: int) -> bool:
        return (
            account.num_requests < self._max_account_requests
            and account.size_bytes + size_bytes <= self._max_account_bytes
        )

    def _fits_all(self, size_bytes: int) -> bool:
        return self.num_requests < self._max_requests and self.size_bytes + size_bytes <= self._max_bytes

    def _take(self, account: Account, size_bytes: int) -> Ticket:
        account.num_requests += 1
        account.size_bytes += size_bytes
        self.num_requests += 1
        self.size_bytes += size_bytes
        return Ticket(self, account, size_bytes)

    def _release(self, account: Account, num_requests: int, size_bytes: int) -> None:
        account.num_requests -= num_requests
        account.size_bytes -= size_bytes
        self.num_requests -= num_requests
        self.size_bytes -= size_bytes
        self._line_up(account)
        self._grant()

    def _line_up(self, account: Account) -> None:
        """Give an account a turn when its first waiter fits its own bounds."""
        if (
            account.waiters
            and account not in self._turns
            and self._fits_account(account, account.waiters[0].size_bytes)
        ):
            self._turns[account] = None

    def _grant(self) -> None:
        """Let in whoever is next and fits. A grant may release or admit others: they are seen by this very loop."""
        if self._is_granting:
            return
        self._is_granting = True
        try:
            while self._turns:
                account = next(iter(self._turns))
                waiter = account.waiters[0]
                if not self._fits_all(waiter.size_bytes):
                    break
                del self._turns[account]
                account.waiters.popleft()
                ticket = self._take(account, waiter.size_bytes)
                self._line_up(account)  # at the end: the others come first
                waiter.on_grant(ticket)
        finally:
            self._is_granting = False
