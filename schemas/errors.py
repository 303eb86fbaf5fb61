"""The errors that Headrace raises: one tree, the same on both sides of the wire.

    HeadraceError
    ├── ConfigError             a flag, setting, file or environment is wrong; the user fixes it
    ├── UnsupportedModelError   a model or optimizer cannot be streamed exactly
    ├── RequestError            the request is wrong; it changed nothing
    │   ├── UnknownTableError
    │   ├── SpecMismatchError   fingerprint, dim, dtype or state differs from the table's
    │   ├── RowRangeError       a row id is negative or beyond the table
    │   ├── NonFiniteError      NaN or Inf under the policy `reject`
    │   └── OwnedError          the table belongs to another run
    ├── SequenceGapError        a batch arrived out of order; `expected_seq` is accepted next
    ├── FencedError             a newer epoch holds the run; this client must stop
    ├── WrongRoutingError       rows of another shard; the newer map comes with it
    ├── OverloadedError         retriable: a limit is reached; wait `retry_after_s`
    ├── UnavailableError        retriable: no connection, a deadline, a shard that is stopping
    ├── UnauthorizedError       wrong or missing credentials, or a role that may not do this
    ├── ProtocolError           bytes that are not a message; the connection is closed
    ├── ProtocolMismatchError   the peers speak different protocol versions
    ├── GoneError               a log range or a snapshot has been removed
    │   └── SetBackError        the server was set back to an older copy of itself
    ├── LogFencedError          another process has taken over the shard's log; this one must stop
    └── StorageError            the disk failed or holds wrong data
        └── CorruptionError     a checksum or an invariant on disk does not hold

Users see the message of a `HeadraceError` as it is: one line that says what is wrong and where.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

__all__ = [
    "ConfigError",
    "CorruptionError",
    "FencedError",
    "GoneError",
    "HeadraceError",
    "LogFencedError",
    "NonFiniteError",
    "OverloadedError",
    "OwnedError",
    "ProtocolError",
    "ProtocolMismatchError",
    "RequestError",
    "RowRangeError",
    "SequenceGapError",
    "SetBackError",
    "SpecMismatchError",
    "StorageError",
    "UnauthorizedError",
    "UnavailableError",
    "UnknownTableError",
    "UnsupportedModelError",
    "WrongRoutingError",
]

# ON THE WIRE: never renumber (`ErrorCode` in paramserver.thrift).
_INTERNAL = 1


class HeadraceError(Exception):
    """The root of all errors that Headrace raises on purpose.

    Attributes:
        retriable: The same call may succeed later, unchanged.
        code: `ErrorCode` of this class on the wire.
    """

    retriable: ClassVar[bool] = False
    code: ClassVar[int] = _INTERNAL


class ConfigError(HeadraceError):
    """A flag, setting, file or environment is wrong."""


class UnsupportedModelError(HeadraceError):
    """A model or its optimizer cannot be streamed exactly; the message says why."""


class RequestError(HeadraceError):
    """The request is wrong; it changed nothing."""

    code = 2


class UnknownTableError(RequestError):
    """No table of that name is registered."""

    code = 3


class SpecMismatchError(RequestError):
    """Values have another layout than the registered table."""

    code = 4


class RowRangeError(RequestError):
    """A row id is negative or not below the table's number of rows."""

    code = 5


class NonFiniteError(RequestError):
    """NaN or Inf in a table whose policy is `reject`."""

    code = 6


class OwnedError(RequestError):
    """A table belongs to another run; the message names it."""

    code = 14


class SequenceGapError(HeadraceError):
    """A batch arrived out of order.

    Attributes:
        expected_seq: The client seq that is accepted next.
    """

    code = 7

    def __init__(self, message: str, *, expected_seq: int) -> None:
        super().__init__(message)
        self.expected_seq = expected_seq


class FencedError(HeadraceError):
    """A newer epoch holds the run.

    Attributes:
        epoch: The epoch that holds the run.
    """

    code = 8

    def __init__(self, message: str, *, epoch: int) -> None:
        super().__init__(message)
        self.epoch = epoch


class WrongRoutingError(HeadraceError):
    """Rows belong to another shard, or move there now; nothing changed. Route again by the map, and go on.

    Attributes:
        partitions: The shard's map, bytes of `PartitionMap.encode`.
        shards: Where the shards are, `idl.ShardAddress` each, as in a hello.
    """

    code = 15

    def __init__(self, message: str, *, partitions: bytes, shards: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.partitions = partitions
        self.shards = tuple(shards)


class OverloadedError(HeadraceError):
    """A limit is reached; nothing changed.

    Attributes:
        retry_after_s: Wait at least this long, seconds, ≥ 0.
    """

    retriable = True
    code = 9

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(HeadraceError):
    """The peer cannot be reached, did not answer in time, or is stopping.

    Whether the request took effect is unknown; every request is safe to repeat.

    Attributes:
        moves_to: The `idl.ShardAddress` where the shard is about to open; None if it stays.
    """

    retriable = True
    code = 10

    def __init__(self, message: str = "", *, moves_to: Any = None) -> None:
        super().__init__(message)
        self.moves_to = moves_to


class UnauthorizedError(HeadraceError):
    """Credentials are wrong or missing, or the role may not do this."""

    code = 11


class ProtocolMismatchError(HeadraceError):
    """The peers speak different protocol versions."""

    code = 12


class GoneError(HeadraceError):
    """The requested data existed and has been removed."""

    code = 13


class SetBackError(GoneError):
    """The server restarted from an older copy of itself, so its log differs from what the client has read."""


class ProtocolError(HeadraceError):
    """Bytes that are not a message of the protocol."""


class LogFencedError(HeadraceError):
    """Another process has taken over a shard's log: this one can write nothing more, and nothing is lost."""


class StorageError(HeadraceError):
    """The disk failed or holds wrong data."""


class CorruptionError(StorageError):
    """A checksum or an invariant on disk does not hold; the message names file and offset."""
