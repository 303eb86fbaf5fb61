"""Admission: how many requests may be in flight, how many bytes, and who is next when there is no room.

A request asks before it is read (a long one) or before it is begun (a small one), and gets a `Ticket`. It returns the
ticket in two parts: its bytes when its buffer is free, its place when it is answered. Without room it waits, and its
connection is not read: the kernel's window closes, which slows the sender down.

Fairness: waiting accounts take turns, one request each. An account at its own bound stands aside until one of its
requests finishes, and delays nobody. Only when the next account's request does not fit the room left in total do all
wait for it; otherwise a long request would never find room. Small requests need no bytes and pass by.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from headrace.paramserver.system.limits import files_for_strangers
from headrace.schemas.errors import ConfigError
from headrace.schemas.idl import idl

__all__ = ["Account", "Admission", "ServerLimits", "Ticket", "Waiter"]

_MAY_BE_ZERO = {"max_idle_buffer_bytes", "retry_after_s", "idle_timeout_s"}
# Enough that slow networks hold up nobody; over TLS each may take half a MiB.
_MOST_TURNS = 128
_ASCENDING = [
    ("max_frame_bytes", "max_client_bytes"),
    ("max_client_bytes", "max_inflight_bytes"),
    ("max_client_requests", "max_inflight_requests"),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimits:
    """How much one server may hold, in bytes and counts, and how long it waits, in seconds.

    Memory, at most: `max_inflight_bytes` for requests, as much again for replies on their way, and as much again for
    what is in compressed requests; for strangers 256 KiB for each of `max_turns`, over TLS 768 KiB;
    `max_idle_buffer_bytes`; 16 KiB for each of `max_inflight_requests` short requests. And for each connection: 4 KiB,
    over TLS 320 KiB; 48 KiB while it waits for room or is inside a short frame; 384 KiB while its peer does not read.
    """

    max_frame_bytes: int = 64 * 2**20  # longest request or reply
    max_hello_bytes: int = 2**20  # longest frame before a successful hello
    max_client_bytes: int = 256 * 2**20  # of one client's requests in flight; as much for replies on their way
    max_client_requests: int = 256  # of one client, in flight
    max_inflight_bytes: int = 2**30  # of all clients' requests in flight; as much for replies on their way
    max_inflight_requests: int = 8192  # of all clients
    max_connections: int = 12_000  # that were let in
    # Connections that were not; beyond them one is closed for a newcomer.
    max_strangers: int = field(default_factory=files_for_strangers)
    max_idle_buffer_bytes: int = 128 * 2**20  # of buffers kept for the next frames
    admission_timeout_s: float = 10.0  # a request that waits longer for room gets `OverloadedError`
    retry_after_s: float = 0.5  # how long an overloaded reply asks the client to wait
    hello_timeout_s: float = 30.0  # from connecting to a hello; one that is refused changes nothing
    # From a frame's first byte to its last, without waits for room. For a client that has said hello, a long frame only
    # has to deliver its next 64 KiB in this time.
    frame_timeout_s: float = 30.0
    idle_timeout_s: float = 600.0  # a connection with nothing in flight is closed after this time; 0: never
    write_timeout_s: float = 30.0  # for a peer to take a reply, or the next 256 KiB of a long one

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 0 or (getattr(self, name) == 0 and name not in _MAY_BE_ZERO):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above zero")
        for small, large in _ASCENDING:
            if getattr(self, small) > getattr(self, large):
                raise ConfigError(f"{small} {getattr(self, small)} is above {large} {getattr(self, large)}")

    @property
    def max_turns(self) -> int:
        """Strangers that are in their TLS handshake or send their first call; others wait for their turn."""
        return min(self.max_strangers // 2, _MOST_TURNS)

    def to_idl(self) -> object:
        """Return the limits that `hello` reports to a client."""
        return idl.Limits(
            max_frame_bytes=self.max_frame_bytes,
            max_inflight_bytes=self.max_client_bytes,
            max_inflight_requests=self.max_client_requests,
        )


class Account:
    """What one client has in flight, over all of its connections; made by `Admission.open_account`."""

    __slots__ = ("key", "num_open", "num_requests", "reply_bytes", "size_bytes", "waiters")

    def __init__(self, key: Hashable) -> None:
        """Start with nothing in flight."""
        self.key = key
        self.num_open = 0
        self.num_requests = self.size_bytes = 0  # requests in flight
        self.reply_bytes = 0  # long replies that are not written yet
        self.waiters: deque[Waiter] = deque()


class Ticket:
    """One admitted request's share of the bounds, made by `Admission`. Both releases are idempotent."""

    __slots__ = ("_account", "_admission", "_has_place", "_size_bytes")

    def __init__(self, admission: Admission, account: Account, size_bytes: int) -> None:
        """Hold a place and `size_bytes`."""
        self._admission, self._account, self._size_bytes = admission, account, size_bytes
        self._has_place = True

    def release_bytes(self) -> None:
        """Give the bytes back: the request's buffer is free."""
        size_bytes, self._size_bytes = self._size_bytes, 0
        if size_bytes:
            self._admission._release(self._account, 0, size_bytes)

    def release(self) -> None:
        """Give the place back: the request is answered, or never will be. Its bytes may still be in use."""
        if self._has_place:
            self._has_place = False
            self._admission._release(self._account, 1, 0)


class Waiter:
    """A request that waits for room, made by `Admission`."""

    __slots__ = ("account", "on_grant", "size_bytes")

    def __init__(self, account: Account, size_bytes: int, on_grant: Callable[[Ticket], None]) -> None:
        """Wait for `on_grant` to be called."""
        self.account, self.size_bytes, self.on_grant = account, size_bytes, on_grant


class Admission:
    """The bounds of a group of accounts, and of each of them. Does no I/O.

    Thread: the loop's.
    """

    def __init__(self, *, max_requests: int, max_bytes: int, max_account_requests: int, max_account_bytes: int) -> None:
        """Start with nothing in flight; each bound on bytes holds for requests and for replies."""
        assert 0 < max_account_bytes <= max_bytes
        assert 0 < max_account_requests <= max_requests
        self._max_requests, self._max_bytes = max_requests, max_bytes
        self._max_account_requests, self._max_account_bytes = max_account_requests, max_account_bytes
        self.num_requests = self.size_bytes = 0  # requests in flight
        self.reply_bytes = 0  # long replies that are not written yet
        self._accounts: dict[Hashable, Account] = {}
        # Accounts whose first waiter fits their own bounds, in the order of their turns.
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
        """Close an account once; the last close forgets it, but its tickets stay valid."""
        account.num_open -= 1
        if not account.num_open:
            del self._accounts[account.key]

    def admit(self, account: Account, size_bytes: int, on_grant: Callable[[Ticket], None]) -> Ticket | Waiter:
        """Return a ticket if there is room now, else a waiter, whose ticket `on_grant` gets later.

        `size_bytes` is what the request will hold, at most an account's bound; 0 for a small one.
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
        """Remove a waiter that has no ticket yet from the line."""
        account = waiter.account
        was_first = account.waiters[0] is waiter
        account.waiters.remove(waiter)
        if was_first:
            self._turns.pop(account, None)
            self._line_up(account)
            self._grant()

    def admit_reply(self, account: Account, size_bytes: int) -> bool:
        """Take room for a finished reply; return whether there was any."""
        is_over = account.reply_bytes + size_bytes > self._max_account_bytes
        if is_over or self.reply_bytes + size_bytes > self._max_bytes:
            return False
        account.reply_bytes += size_bytes
        self.reply_bytes += size_bytes
        return True

    def release_reply(self, account: Account, size_bytes: int) -> None:
        """Give back the room that `admit_reply` took."""
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
        """Give an account a turn if its first waiter fits its own bounds."""
        waiters = account.waiters
        if waiters and account not in self._turns and self._fits_account(account, waiters[0].size_bytes):
            self._turns[account] = None

    def _grant(self) -> None:
        """Admit waiters in turn while they fit. A grant may release or admit others; the running loop sees those."""
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
                self._line_up(account)  # at the end of the line
                waiter.on_grant(ticket)
        finally:
            self._is_granting = False
