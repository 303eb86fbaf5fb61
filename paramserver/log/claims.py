"""Claims: which copy of a shard is the right one. Every start of a shard takes the next term in the object store.

    claims/SHARD/TERM       JSON: who, when, and the last record that the copy begins with; put if absent, never changed
    DIR/shard-N/claim.json  JSON: the term that the directory holds, and the claims that it may go on from

A directory may take the next term only if it knows the highest claim: because it made that claim, or because it was
restored in the claim's place. An older copy of the directory, or one on another host, does not know it and is refused.
Every start draws a new nonce, so of two copies that start at once one is refused, and a running one finds a higher term
(`ShardClaim.check`). The directory names a claim before it is put, so a start that was killed in between, or whose
reply was lost, is recognized by the next one.

A replicated log gives the terms itself: its owner claims the one that it has been given, behind everything else.

Without an object store a shard's term is 0 until a follower takes it over: that holds the next one (`hold_term`).
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from headrace.paramserver.system.durable import disk_error, write_file
from headrace.paramserver.system.object_store import StoreRefusesError
from headrace.schemas.errors import (
    ConfigError,
    CorruptionError,
    GoneError,
    HeadraceError,
    LogFencedError,
    StorageError,
    UnavailableError,
)

__all__ = [
    "CLAIM_FILE",
    "Claim",
    "ClaimStore",
    "ClaimedStarts",
    "HeldClaims",
    "LateClaimError",
    "ShardClaim",
    "check_copy",
    "claim_shard",
    "claims_of",
    "highest_claim",
    "hold_term",
    "note_restored",
    "note_term",
]

CLAIM_FILE = "claim.json"
"""Name of the file in a shard's directory."""
# Starts in a row that were killed before they knew whether their claim had been put; older ones are forgotten.
_MAX_KNOWN = 64


class LateClaimError(HeadraceError):
    """A copy that could not claim at its start must start again, to take the next term: the store is back."""


class ClaimStore(Protocol):
    """What claims need of an `ObjectStore`."""

    where: str

    def get(self, path: str) -> bytes:
        """Return an object; `GoneError` if there is none."""

    def put_if_absent(self, path: str, data: bytes) -> bytes:
        """Put an object unless there is one; return what is there."""

    def list(self, prefix: str) -> Any:
        """Yield entries with a `path`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One copy's claim.

    Attributes:
        server_id: Whose shard it is.
        shard: Its number.
        term: Its term, from 1 on.
        nonce: Random; distinguishes claims of two copies that want the same term.
        owner: Who made it, for people: node and address.
        claimed_us: When, by the clock there, microseconds since 1970; for people.
        seq: Last record that the copy begins with. What a lower term adds behind it is void.
        mark: Mark of that record; None where the log has no record.
    """

    server_id: str
    shard: int
    term: int
    nonce: str
    owner: str
    claimed_us: int
    seq: int
    mark: int | None

    def encode(self) -> bytes:
        """Return the object's bytes, which say the same for the same claim."""
        return json.dumps(asdict(self), sort_keys=True).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes, where: str) -> Claim:
        """Return the claim in an object; `CorruptionError` if it is none."""
        try:
            values: Any = json.loads(data)
            claim = cls(**{name: _typed(values[name], kind) for name, kind in _CLAIM_FIELDS.items()})
            datetime.fromtimestamp(claim.claimed_us / 1e6, UTC)  # it is a time
            return claim
        except (ArithmeticError, ValueError, KeyError, TypeError, RecursionError) as exc:
            raise CorruptionError(f"{where}: not a claim: {exc!r}") from exc

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.claimed_us / 1e6, UTC)
        return f"term {self.term}, taken by {self.owner} at {when:%Y-%m-%d %H:%M:%S} UTC from seq {self.seq} on"


_CLAIM_FIELDS: dict[str, tuple[type, ...]] = {
    **{"server_id": (str,), "shard": (int,), "term": (int,), "nonce": (str,), "owner": (str,)},
    **{"claimed_us": (int,), "seq": (int,), "mark": (int, type(None))},
}


def _typed(value: Any, kinds: tuple[type, ...]) -> Any:
    if type(value) not in kinds or (type(value) is int and not -(2**63) <= value < 2**63):
        raise ValueError(f"{value!r} where {kinds[0].__name__} was expected")
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldClaims:
    """What a shard's directory knows of its claims.

    Attributes:
        server_id: Whose shard it is.
        shard: Its number.
        term: The highest term that it has held for sure; 0 before the first.
        known: (term, nonce) of each claim that it may go on from.
        is_cut: It was restored to a point that a user chose, and has not claimed a term yet: what is archived behind
            the point is given up.
    """

    server_id: str
    shard: int
    term: int = 0
    known: tuple[tuple[int, str], ...] = field(default=())
    is_cut: bool = False

    @property
    def highest_term(self) -> int:
        """The highest term that it knows of; 0 for none."""
        return max((self.term, *(term for term, _ in self.known)))

    @classmethod
    def read(cls, directory: Path, server_id: str, shard: int) -> HeldClaims:
        """Return what a directory says; a new one has claimed nothing.

        Raises:
            ConfigError: It is another shard's directory, or another server's.
            CorruptionError: The file cannot be understood.
            StorageError: It cannot be read.
        """
        path = directory / CLAIM_FILE
        try:
            values: Any = json.loads(path.read_bytes())
            known = tuple((_typed(term, (int,)), _typed(nonce, (str,))) for term, nonce in values["known"])
            held = cls(
                server_id=_typed(values["server_id"], (str,)),
                shard=_typed(values["shard"], (int,)),
                term=_typed(values["term"], (int,)),
                known=known,
                is_cut=_typed(values.get("is_cut", False), (bool,)),
            )
        except FileNotFoundError:
            return cls(server_id=server_id, shard=shard)
        except OSError as exc:
            raise StorageError(f"{path}: {exc.strerror or exc}") from exc
        except (ValueError, KeyError, TypeError, RecursionError) as exc:
            raise CorruptionError(f"{path}: cannot be understood: {exc!r}") from exc
        if (held.server_id, held.shard) != (server_id, shard):
            raise ConfigError(
                f"{directory}: is of shard {held.shard} of server {held.server_id}, not of shard {shard} of server "
                f"{server_id}: is another disk mounted there?"
            )
        return held

    def write(self, directory: Path) -> None:
        """Write it durably; `StorageError` if that fails."""
        try:
            write_file(directory / CLAIM_FILE, json.dumps(asdict(self)).encode() + b"\n")
        except OSError as exc:
            raise disk_error(f"{directory / CLAIM_FILE}: {exc.strerror or exc}", exc) from exc


def claim_shard(
    store: ClaimStore,
    directory: Path,
    *,
    server_id: str,
    shard: int,
    owner: str,
    seq: int,
    mark: int | None,
    may_claim: bool = True,
    on_away: Callable[[HeadraceError], None] = lambda exc: None,
) -> ShardClaim:
    """Take the next term for the copy of a shard in a directory.

    While the store is away or refuses us, a copy that has held a term goes on in it, as one that did not stop would:
    `on_away` is called with the error, and `ShardClaim.check` finds out later. Its clients refuse it if they know of a
    newer copy.

    Args:
        store: The server's object store.
        directory: The shard's, which no other process uses.
        server_id: Whose shard it is.
        shard: Its number.
        owner: Who claims, for people.
        seq: The log's last record.
        mark: Its mark; None if it has no record.
        may_claim: False goes on in the term that the copy has held, too: a claim voids what was archived behind `seq`,
            and the archive has not told yet what it has.
        on_away: See above.

    Raises:
        LogFencedError: Another copy has the shard; the message names both, and the way on.
        ConfigError: The directory is another shard's, or the prefix another server's; or the store refuses us, and the
            copy has never held a term.
        UnavailableError: The store is away, and the copy has never held a term.
        StorageError: The directory cannot be written.

    Thread: any; it blocks.
    """
    held = HeldClaims.read(directory, server_id, shard)
    try:
        if not may_claim:
            raise UnavailableError(f"{store.where}: the archive was not compared with the log")
        claim = _claim_next(store, directory, held, owner=owner, seq=seq, mark=mark)
    except (UnavailableError, StoreRefusesError) as exc:
        if not held.term:
            raise
        on_away(exc)
        unsure = HeldClaims.read(directory, server_id, shard).known
        return ShardClaim(store=store, shard=shard, term=held.term, unsure=frozenset(unsure), is_overdue=True)
    HeldClaims(server_id=server_id, shard=shard, term=claim.term, known=((claim.term, claim.nonce),)).write(directory)
    return ShardClaim(store=store, shard=shard, term=claim.term)


def note_term(
    store: ClaimStore, directory: Path, *, server_id: str, shard: int, term: int, owner: str, seq: int, mark: int | None
) -> None:
    """Claim the term that a replicated log has given, so that whoever restores the shard begins above it.

    Such a log decides who owns the shard, so this waits for nothing and refuses nobody but who has restored the shard
    beside the log. Safe to repeat.

    Raises:
        LogFencedError: Another copy has claimed the term; it goes on in another log.
        ConfigError: The directory is another shard's, or the prefix another server's.
        UnavailableError: The store is away.

    Thread: any; it blocks.
    """
    held = HeldClaims.read(directory, server_id, shard)
    if held.term < term:
        known = (*held.known, (term, secrets.token_hex(16)))[-_MAX_KNOWN:]
        held = replace(held, term=term, known=known, is_cut=False)
        held.write(directory)
    nonce = next((nonce for known, nonce in held.known if known == term), "")
    claim = Claim(
        server_id=server_id,
        shard=shard,
        term=term,
        nonce=nonce,
        owner=owner,
        claimed_us=time.time_ns() // 1000,
        seq=seq,
        mark=mark,
    )
    path = _path_of(shard, term)
    found = Claim.decode(store.put_if_absent(path, claim.encode()), f"{store.where}/{path}")
    if found.nonce != nonce:
        _check_known(store, directory, held, found)


def check_copy(store: ClaimStore, directory: Path, *, server_id: str, shard: int) -> None:
    """Check that the copy of a shard in a directory may claim the next term; it claims none.

    Raises:
        LogFencedError: Another copy has the shard.
        HeadraceError: As `claim_shard`.

    Thread: any; it blocks.
    """
    highest = highest_claim(store, shard)
    if highest is not None:
        _check_known(store, directory, HeldClaims.read(directory, server_id, shard), highest)


def _claim_next(
    store: ClaimStore, directory: Path, held: HeldClaims, *, owner: str, seq: int, mark: int | None
) -> Claim:
    highest = highest_claim(store, held.shard)
    while True:
        if highest is not None:
            _check_known(store, directory, held, highest)
        claim = Claim(
            server_id=held.server_id,
            shard=held.shard,
            term=max(held.term, highest.term if highest else 0) + 1,
            nonce=secrets.token_hex(16),
            owner=owner,
            claimed_us=time.time_ns() // 1000,
            seq=seq,
            mark=mark,
        )
        held = replace(held, known=(*held.known, (claim.term, claim.nonce))[-_MAX_KNOWN:])
        held.write(directory)
        path = _path_of(held.shard, claim.term)
        found = Claim.decode(store.put_if_absent(path, claim.encode()), f"{store.where}/{path}")
        if found == claim:
            return claim
        highest = found  # of another copy, or of a start before this one whose put has come late


def _check_known(store: ClaimStore, directory: Path, held: HeldClaims, highest: Claim) -> None:
    """Check that a copy may go on from the highest claim."""
    if highest.server_id != held.server_id:
        raise ConfigError(
            f"{store.where}: has claims of server {highest.server_id}: use another prefix for {held.server_id}"
        )
    if (highest.term, highest.nonce) not in held.known:
        ours = f"this copy, {directory}, has term {held.term}" if held.term else f"{directory} has never held a term"
        raise LogFencedError(
            f"another copy of shard {held.shard} is the right one: {highest}; {ours}: serve that copy, or if it is "
            f"lost, move this directory away and run headrace restore {store.where} --shard {held.shard} --data "
            f"{directory.parent}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardClaim:
    """The claim of a running copy.

    Attributes:
        store: Where it is.
        shard: The shard's number.
        term: Its term.
        unsure: (term, nonce) of claims that its directory named and never learned the fate of.
        is_overdue: It went on in an earlier start's term. Another copy of its directory may have done so, too.
    """

    store: ClaimStore
    shard: int
    term: int
    unsure: frozenset[tuple[int, str]] = frozenset()
    is_overdue: bool = False

    def check(self) -> None:
        """Check that no copy has a higher term; to be called before each upload, and every few seconds.

        Raises:
            LogFencedError: One has; this is not the right copy any more.
            LateClaimError: Its own claim of a higher term was put after all, or its claim is overdue.
            UnavailableError: The store is away.

        Thread: any; it blocks.
        """
        terms = _terms(self.store, self.shard)
        if not terms or terms[-1] <= self.term:
            if self.is_overdue:
                raise LateClaimError(
                    f"shard {self.shard} could not claim a term at its start: it starts again to do so"
                )
            return
        highest = _read(self.store, self.shard, terms[-1])
        if highest is not None and (highest.term, highest.nonce) in self.unsure:
            raise LateClaimError(f"a claim of shard {self.shard} was put while the object store seemed away: {highest}")
        raise LogFencedError(
            f"another copy of shard {self.shard} has taken over: {highest or f'term {terms[-1]}'}; this one has term "
            f"{self.term} and stops: what it has acked since is not in the other copy"
        )


class ClaimedStarts:
    """Where the copies of a server's shards began. What a term added behind the start of a higher one is void.

    Thread: any; everything blocks, and raises `UnavailableError` if the store is away, `CorruptionError` for a claim
    that cannot be understood.
    """

    def __init__(self, store: ClaimStore) -> None:
        """Know of none; `look` finds them."""
        self._store = store
        self._seqs: dict[tuple[int, int], int | None] = {}  # by shard and term; None before it was read

    def look(self) -> None:
        """Find claims that were made since the last look."""
        for found in self._store.list("claims/"):
            shard, _, term = found.path.removeprefix("claims/").partition("/")
            if shard.isdecimal() and term.isdecimal():
                self._seqs.setdefault((int(shard), int(term)), None)

    def is_void(self, shard: int, term: int, seq: int) -> bool:
        """Return whether a record that a copy of a term has, as of the last look, is void."""
        for of_shard, later in list(self._seqs):
            if of_shard == shard and later > term and self._seq_of(shard, later) < seq:
                return True
        return False

    def _seq_of(self, shard: int, term: int) -> float:
        seq = self._seqs[shard, term]
        if seq is None:
            claim = _read(self._store, shard, term)
            if claim is None:  # nobody removes claims but a person
                return math.inf
            seq = self._seqs[shard, term] = claim.seq
        return seq


def hold_term(directory: Path, *, server_id: str, shard: int, term: int) -> None:
    """Note that a shard's directory knows of a term, unless it knows of a higher one.

    Raises:
        ConfigError: The directory is another shard's.
        StorageError: The directory cannot be read or written.

    Thread: any; it blocks.
    """
    held = HeldClaims.read(directory, server_id, shard)
    if term > held.term:
        replace(held, term=term).write(directory)


def claims_of(store: ClaimStore, shard: int, *, above: int = 0) -> dict[int, Claim]:
    """Return a shard's claims of terms above one, by term, in order.

    Raises:
        CorruptionError: One cannot be understood.
        UnavailableError: The store is away.

    Thread: any; it blocks.
    """
    found = ((term, _read(store, shard, term)) for term in _terms(store, shard) if term > above)
    return {term: claim for term, claim in found if claim is not None}


def note_restored(
    store: ClaimStore, directory: Path, *, server_id: str, shard: int, is_cut: bool = False
) -> Claim | None:
    """Let a shard that was restored into a directory take over from the present highest claim, at its first start.

    See `HeldClaims.is_cut`.

    Call it before the directory gets its name. Returns that claim; None if there is none. If another copy takes a term
    meanwhile, the start is refused.

    Raises:
        UnavailableError: The store is away.
        StorageError: The directory cannot be written.

    Thread: any; it blocks.
    """
    highest = highest_claim(store, shard)
    known = () if highest is None else ((highest.term, highest.nonce),)
    HeldClaims(server_id=server_id, shard=shard, known=known, is_cut=is_cut).write(directory)
    return highest


def highest_claim(store: ClaimStore, shard: int) -> Claim | None:
    """Return a shard's claim with the highest term; None if nobody has claimed it.

    Raises:
        CorruptionError: It cannot be understood.
        UnavailableError: The store is away.

    Thread: any; it blocks.
    """
    claims = (_read(store, shard, term) for term in reversed(_terms(store, shard)))
    return next((claim for claim in claims if claim is not None), None)


def _read(store: ClaimStore, shard: int, term: int) -> Claim | None:
    path = _path_of(shard, term)
    try:
        return Claim.decode(store.get(path), f"{store.where}/{path}")
    except GoneError:  # nobody removes claims but a person
        return None


def _terms(store: ClaimStore, shard: int) -> list[int]:
    names = (found.path.rpartition("/")[2] for found in store.list(f"claims/{shard:04d}/"))
    return sorted(int(name) for name in names if name.isdecimal())


def _path_of(shard: int, term: int) -> str:
    return f"claims/{shard:04d}/{term:016d}"
