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
    ├── OverloadedError         retriable: a limit is reached; wait `retry_after_s`
    ├── UnavailableError        retriable: no connection, a deadline, a shard that is stopping
    ├── UnauthorizedError       wrong or missing credentials, or a role that may not do this
    ├── ProtocolError           bytes that are not a message; the connection is closed
    ├── ProtocolMismatchError   the peers speak different protocol versions
    ├── GoneError               a log range or a snapshot has been removed
    │   └── SetBackError        the server was set back to an older copy of itself
    ├── InvariantError          rows were lost or changed between two parts of Headrace: a bug, or bad memory
    ├── LogFencedError          another process has taken over the shard's log; this one must stop
    └── StorageError            the disk failed or holds wrong data
        └── CorruptionError     a checksum or an invariant on disk does not hold

Users see the message of a `HeadraceError` as it is: one line that says what is wrong and where.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "ConfigError",
    "CorruptionError",
    "FencedError",
    "GoneError",
    "HeadraceError",
    "InvariantError",
    "LogFencedError",
    "NonFiniteError",
    "OverloadedError",
    "OwnedError",
    "ProtocolError",
    "ProtocolMismatchError",
    "RequestError",
    "ReshardedError",
    "RowRangeError",
    "SequenceGapError",
    "SetBackError",
    "SpecMismatchError",
    "StorageError",
    "UnauthorizedError",
    "UnavailableError",
    "UnknownTableError",
    "UnsupportedModelError",
]

# ON THE WIRE: never renumber (`ErrorCode` in paramserver.thrift).
_INTERNAL = 1


class HeadraceError(Exception):
    """The root of all errors that Headrace raises on purpose.

    What to do: Catch it where any of them would be handled alike. Raised itself, it says either that a server's disk
    failed or holds wrong data, and that server's log names the file; or it is a fault of Headrace's: the server's log
    has the traceback. Report it.

    Attributes:
        retriable: The same call may succeed later, unchanged.
        code: `ErrorCode` of this class on the wire.
    """

    retriable: ClassVar[bool] = False
    code: ClassVar[int] = _INTERNAL


class ConfigError(HeadraceError):
    """A flag, setting, file or environment is wrong.

    What to do: Change what the message names. `headrace doctor` checks a machine, a configuration and a server.
    """


class UnsupportedModelError(HeadraceError):
    """A model or its optimizer cannot be streamed exactly; the message says why.

    What to do: Change the model as the message says, or leave the table out: `tables=["!user.weight"]` at `attach`
    streams all others. `docs/taps.md` has all that can be streamed.
    """


class RequestError(HeadraceError):
    """The request is wrong; it changed nothing.

    What to do: Mend the call that the message names. The same call would fail again.
    """

    code = 2


class UnknownTableError(RequestError):
    """No table of that name is registered.

    What to do: Take a name from `headrace table list`; the message has the nearest. A table exists from the first
    `attach` or backfill that names it.
    """

    code = 3


class SpecMismatchError(RequestError):
    """Values have another layout than the registered table: dim, dtype, rows, states or identities differ.

    What to do: A table's shape is fixed, except for more rows. Give the changed model another name, as in
    `RawEmbeddingStreamer(..., model="other name")`, serve both, then drop the tables of the old one.
    """

    code = 4


class RowRangeError(RequestError):
    """A row id is negative or not below the table's number of rows.

    What to do: Check ids before the call. A table that has grown in the trainer grows on the server when it is
    attached.
    """

    code = 5


class NonFiniteError(RequestError):
    """NaN or Inf in a table whose policy is `reject`.

    What to do: Look for the step at which training diverged; the message names table and row. `--non-finite accept` of
    `headrace serve` takes such rows.
    """

    code = 6


class OwnedError(RequestError):
    """A table belongs to another run; the message names it.

    What to do: Give this run a model of its own with `model=`. To go on in the place of the other run, close it; if
    it was killed, pass `takes_over=True`. A backfill has to wait until the trainer has ended.
    """

    code = 14


class SequenceGapError(HeadraceError):
    """A batch arrived out of order.

    What to do: Nothing in a trainer, which sends again from `expected_seq`. A client of your own must do the same.

    Attributes:
        expected_seq: The client seq that is accepted next.
    """

    code = 7

    def __init__(self, message: str, *, expected_seq: int) -> None:
        super().__init__(message)
        self.expected_seq = expected_seq


class FencedError(HeadraceError):
    """A newer epoch holds the run: a later start of it has attached its model, or another run took its tables over.

    What to do: Stop this trainer. If it is the right one, stop the other, and start this one again from its
    checkpoint. In a notebook `attach(..., replace=True)` takes over from the streamer before.

    Attributes:
        epoch: The epoch that holds the run.
    """

    code = 8

    def __init__(self, message: str, *, epoch: int) -> None:
        super().__init__(message)
        self.epoch = epoch


class OverloadedError(HeadraceError):
    """A limit is reached; nothing changed.

    What to do: Nothing in trainers and replicas, which wait and try again. If it lasts, the message names the limit:
    give the server a faster disk, more shards, or a higher limit.

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

    What to do: Nothing in trainers and replicas, which try again until the server is back. Elsewhere, see whether the
    server runs and the address is right: `headrace status` shows its shards. TLS on one side only looks like this,
    too.

    Attributes:
        moves_to: The `idl.ShardAddress` where the shard is about to open; None if it stays.
    """

    retriable = True
    code = 10

    def __init__(self, message: str = "", *, moves_to: Any = None) -> None:
        super().__init__(message)
        self.moves_to = moves_to


class ReshardedError(UnavailableError):
    """Another server, with another number of shards, has taken the place of this one.

    What to do: Nothing in trainers and replicas, which go on there. Elsewhere, name the new server's address.

    Attributes:
        successor: Host and port of a shard of the new server.
    """

    retriable = False

    def __init__(self, message: str, *, successor: tuple[str, int]) -> None:
        super().__init__(message)
        self.successor = successor


class UnauthorizedError(HeadraceError):
    """Credentials are wrong or missing, or the role may not do this.

    What to do: Give the client the token, certificate or authority that the message names. `docs/security.md` has all
    refusals, and which role may do what.
    """

    code = 11


class ProtocolMismatchError(HeadraceError):
    """The peers speak different protocol versions.

    What to do: Install the same release on both; replicas first, then the server, then trainers.
    """

    code = 12


class GoneError(HeadraceError):
    """The requested data existed and has been removed: records of a log, a snapshot, or a shard's part of one.

    What to do: Nothing in replicas and followers, which begin again from a snapshot. Elsewhere, take a newer snapshot
    from `headrace snapshot list`, or make one. `--log-retention-bytes` keeps more log.
    """

    code = 13


class SetBackError(GoneError):
    """The server restarted from an older copy of itself, so its log differs from what the client has read.

    What to do: If that was not meant, put the newer copy back. Else, nothing in replicas, which copy anew. Trainers
    send that shard's rows again where its log is archived, or with `on_set_back="resend"`; start others again from
    their checkpoints.
    """


class ProtocolError(HeadraceError):
    """Bytes that are not a message of the protocol. The connection is closed.

    What to do: See what listens at the port: Headrace speaks Thrift, framed and strict binary, with TLS or without.
    """


class LogFencedError(HeadraceError):
    """Another process has taken over a shard's log: this one can write nothing more, and nothing is lost.

    What to do: Nothing where a standby took over. If both copies of a shard were started, keep the one that the
    message names.
    """


class StorageError(HeadraceError):
    """The disk failed or holds wrong data; or a trainer finds another store than before.

    Such a store was set up anew, perhaps with another number of shards, or set back.

    What to do: Make room if it is full; a server goes on by itself then. Mend or replace it if it failed, then start
    the server again. `docs/operations.md` goes through each case under "When something fails". If the server was set
    up anew or set back, the message says how the trainer goes on; with another number of shards, start it again.

    Attributes:
        is_disk_full: The disk, or a quota, had no room, so the same may work later.
    """

    def __init__(self, message: str = "", *, is_disk_full: bool = False) -> None:
        super().__init__(message)
        self.is_disk_full = is_disk_full


class InvariantError(HeadraceError):
    """Rows were lost or changed between two parts of Headrace; the message names both.

    What to do: Report it, and check the machine's memory. Nothing wrong goes on from there: a trainer stops streaming,
    a shard stops, a replica builds a new copy. The log has what was acked: start the process again.
    """


class CorruptionError(StorageError):
    """A checksum or an invariant on disk does not hold; the message names file and offset.

    What to do: Keep the files. Put back a sound copy of the named one, or restore a snapshot or the archive. `headrace
    log inspect` says what a log still has.
    """
