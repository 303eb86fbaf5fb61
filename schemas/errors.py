"""The errors that Headrace raises, one tree, the same on both sides of the wire.

    HeadraceError
    ├── ConfigError             a flag, setting, file or environment is wrong; the user mends it
    ├── UnsupportedModelError   a model or optimizer cannot be streamed exactly
    ├── RequestError            the request is wrong; nothing was changed by it
    │   ├── UnknownTableError
    │   ├── SpecMismatchError   fingerprint, dim, dtype or state differs from what the table is
    │   ├── RowRangeError       a row id is negative or beyond the table
    │   └── NonFiniteError      NaN or Inf under the policy `reject`
    ├── SequenceGapError        a batch arrived out of order; `expected_seq` is accepted next
    ├── FencedError             a newer epoch holds the run; this client must stop
    ├── OverloadedError         retriable: a bound is reached; wait `retry_after_s`
    ├── UnavailableError        retriable: no connection, a deadline, a shard that is stopping
    ├── UnauthorizedError       wrong or missing credentials, or a role that may not do this
    ├── ProtocolError           bytes that are not a message; the connection is closed
    ├── ProtocolMismatchError   the peers speak different protocol versions
    ├── GoneError               what was asked for has been removed (a log range, a snapshot)
    │   └── SetBackError        the server was set back to an older copy of itself
    └── StorageError            the disk failed, or holds what it should not
        └── CorruptionError     a checksum or an invariant on disk does not hold

A `HeadraceError` is one readable line: it names what and where, and it is shown to users as it is.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "ConfigError",
    "CorruptionError",
    "FencedError",
    "GoneError",
    "HeadraceError",
    "NonFiniteError",
    "OverloadedError",
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
    "error_from_code",
]

# ON THE WIRE: never renumber (`ErrorCode` in paramserver.thrift).
_INTERNAL = 1


class HeadraceError(Exception):
    """Root of every error that Headrace raises on purpose.

    Attributes:
        retriable: The same call may succeed later without a change by the caller.
        code: `ErrorCode` that stands for this class on the wire.
    """

    retriable: ClassVar[bool] = False
    code: ClassVar[int] = _INTERNAL


class ConfigError(HeadraceError):
    """A flag, setting, file or environment is wrong."""


class UnsupportedModelError(HeadraceError):
    """A model or its optimizer cannot be streamed exactly; the message says why."""


class RequestError(HeadraceError):
    """The request is wrong; nothing was changed by it."""

    code = 2


class UnknownTableError(RequestError):
    """No table of that name is registered."""

    code = 3


class SpecMismatchError(RequestError):
    """Values are laid out for another table than the registered one."""

    code = 4


class RowRangeError(RequestError):
    """A row id is negative or not below the table's number of rows."""

    code = 5


class NonFiniteError(RequestError):
    """NaN or Inf in a table whose policy is `reject`."""

    code = 6


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
        epoch: The epoch that holds it.
    """

    code = 8

    def __init__(self, message: str, *, epoch: int) -> None:
        super().__init__(message)
        self.epoch = epoch


class OverloadedError(HeadraceError):
    """A bound is reached; nothing was changed.

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
    """

    retriable = True
    code = 10


class UnauthorizedError(HeadraceError):
    """Credentials are wrong or missing, or the role may not do this."""

    code = 11


class ProtocolMismatchError(HeadraceError):
    """The peers speak different protocol versions."""

    code = 12


class GoneError(HeadraceError):
    """What was asked for existed and has been removed."""

    code = 13


class SetBackError(GoneError):
    """The server was set back to an older copy of itself: its log is another one than what was taken of it."""


class ProtocolError(HeadraceError):
    """Bytes that are not a message of the protocol."""


class StorageError(HeadraceError):
    """The disk failed, or holds what it should not."""


class CorruptionError(StorageError):
    """A checksum or an invariant on disk does not hold; the message names file and offset."""


_PLAIN_BY_CODE: dict[int, type[HeadraceError]] = {
    cls.code: cls
    for cls in (
        RequestError,
        UnknownTableError,
        SpecMismatchError,
        RowRangeError,
        NonFiniteError,
        UnavailableError,
        UnauthorizedError,
        ProtocolMismatchError,
        GoneError,
    )
}


def error_from_code(
    code: int,
    message: str,
    *,
    expected_seq: int | None = None,
    retry_after_s: float | None = None,
    epoch: int | None = None,
    is_set_back: bool | None = None,
) -> HeadraceError:
    """Return the error that a peer reported by its wire code.

    Args:
        code: `ErrorCode` of the reply.
        message: One line for the user.
        expected_seq: With SEQUENCE_GAP.
        retry_after_s: With OVERLOADED, seconds.
        epoch: With FENCED.
        is_set_back: With GONE.

    Returns:
        An instance of the class that stands for `code`; plain `HeadraceError` for a code unknown here.
    """
    if code == SequenceGapError.code and expected_seq is not None:
        return SequenceGapError(message, expected_seq=expected_seq)
    if code == FencedError.code and epoch is not None:
        return FencedError(message, epoch=epoch)
    if code == SetBackError.code and is_set_back:
        return SetBackError(message)
    if code == OverloadedError.code:
        return OverloadedError(message, retry_after_s=retry_after_s or 0.0)
    return _PLAIN_BY_CODE.get(code, HeadraceError)(message)
