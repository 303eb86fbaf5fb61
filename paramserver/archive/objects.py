"""Archived segments as objects: their names say what they hold, so a listing is all that a reader needs.

    archive/shards.json     JSON: the number of shards of the server; put if absent
    archive/SHARD/FIRSTSEQ-MARK-LASTSEQ-TERM-SIZE-SHA256.hrlog     an excerpt of the shard's log, see `log/excerpt.py`

A name tells the content, so an object is never written twice with other bytes, and each reader can check it. A copy of
a shard that begins with a claim (`log/claims.py`) makes void what lower terms have added behind its first position.
Where nobody claims, all terms are 0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from headrace.paramserver.config.server_settings import MAX_SHARDS
from headrace.paramserver.log.claims import claims_of
from headrace.paramserver.log.excerpt import LogExcerpt
from headrace.paramserver.system.object_store import Content, ContentHash, ObjectStore
from headrace.schemas.errors import CorruptionError
from headrace.schemas.snapshot_manifest import SnapshotManifest

__all__ = ["ArchivedSegment", "Piece", "ShardArchive", "chain_of", "check_history", "num_shards_of", "usable_end"]

# ON DISK: never change.
_NAME = re.compile(r"(\d{20})-([0-9a-f]{16})-(\d{20})-(\d+)-(\d+-[0-9a-f]{64})\.hrlog")
_SHARDS = "archive/shards.json"
_NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchivedSegment:
    """One archived segment.

    Attributes:
        shard: Index of the shard.
        first_seq, last_seq: Its records.
        mark: `UpdateLog.nonce_of` of each of them.
        term: Term of the copy of the shard that archived it; 0 without claims.
        content: Length and checksum.
        put_at: When, by the store's clock.
    """

    shard: int
    first_seq: int
    last_seq: int
    mark: int
    term: int
    content: Content
    put_at: datetime = _NEVER

    @property
    def path(self) -> str:
        """Path of the object."""
        seqs = f"{self.first_seq:020d}-{self.mark % 2**64:016x}-{self.last_seq:020d}"
        return f"{_folder(self.shard)}{seqs}-{self.term}-{self.content}.hrlog"


@dataclass(frozen=True, slots=True)
class Piece:
    """What counts of an archived segment: its records up to `last_seq`."""

    segment: ArchivedSegment
    last_seq: int


class ShardArchive:
    """The archived log of one shard under the prefix of its server. Thread: any; everything blocks.

    Methods raise as `ObjectStore`.
    """

    def __init__(self, store: ObjectStore, shard: int) -> None:
        """Use the objects of one shard."""
        self.store, self.shard = store, shard

    def announce(self, num_shards: int) -> None:
        """Note how many shards the server has, for a restore without a snapshot."""
        self.store.put_if_absent(_SHARDS, json.dumps({"num_shards": num_shards}).encode() + b"\n")

    def seal(self, excerpt: LogExcerpt, *, term: int, now_us: int) -> tuple[ArchivedSegment, memoryview]:
        """Return what an excerpt is called as an object, and its bytes, for `send`."""
        first_seq, last_seq, mark = excerpt.first_seq, excerpt.last_seq, excerpt.mark
        data = excerpt.seal(now_us)
        sha = ContentHash()
        sha.update(data)
        segment = ArchivedSegment(
            shard=self.shard, first_seq=first_seq, last_seq=last_seq, mark=mark, term=term, content=sha.content()
        )
        return segment, data

    def send(self, segment: ArchivedSegment, data: memoryview) -> None:
        """Put a segment, if absent, and read it back.

        Raises:
            CorruptionError: What is there now is something else, and was deleted: send it again.
        """
        self.store.create(segment.path, data)
        if not self.store.has(segment.path, data):
            self.store.delete(segment.path)
            raise CorruptionError(f"{self.store.where}/{segment.path}: other bytes came back than were put")

    def read(self, segment: ArchivedSegment) -> Iterator[memoryview]:
        """Yield the bytes of a segment in order, checked at the end; see `ObjectStore.download`."""
        return self.store.download(segment.path, segment.content)

    def segments(self) -> list[ArchivedSegment]:
        """Return all segments by first seq; objects with other names are skipped."""
        found = []
        for stored in self.store.list(_folder(self.shard)):
            match = _NAME.fullmatch(stored.path.rpartition("/")[2])
            if match is None:
                continue
            first_seq, mark, last_seq, term, content = match.groups()
            nonce = int(mark, 16)
            found.append(
                ArchivedSegment(
                    shard=self.shard,
                    first_seq=int(first_seq),
                    last_seq=int(last_seq),
                    mark=nonce - 2**64 if nonce >= 2**63 else nonce,
                    term=int(term),
                    content=Content.parse(content),
                    put_at=stored.put_at,
                )
            )
        return sorted(found, key=lambda segment: (segment.first_seq, segment.last_seq))

    def prune(self, manifests: Iterable[SnapshotManifest], keep_s: float) -> int:
        """Delete segments that no restore to a moment of the last `keep_s` seconds needs; return how many.

        Such a restore begins with the newest snapshot that was made before the moment. So all segments go that are
        older, and end before the newest snapshot from before that time; without one, before the oldest snapshot.
        """
        oldest = self.store.now() - timedelta(seconds=keep_s)
        made = [(m.created_us / 1e6, m.parts[self.shard].seq) for m in manifests if self.shard < len(m.parts)]
        if not made:
            return 0
        before = [seq for created_s, seq in made if created_s <= oldest.timestamp()]
        base_seq = max(before) if before else min(seq for _, seq in made)
        gone = [found for found in self.segments() if found.last_seq <= base_seq and found.put_at < oldest]
        for segment in gone:
            self.store.delete(segment.path)
        return len(gone)

    def pieces(self) -> list[Piece]:
        """Return what counts of all segments, by first seq."""
        segments = self.segments()
        # Of a claim for each start, most are older than all segments, and each is a request.
        lowest = min((segment.term for segment in segments), default=0)
        begins = {term: claim.seq for term, claim in claims_of(self.store, self.shard, above=lowest).items()}
        pieces = (Piece(segment, usable_end(segment, begins)) for segment in segments)
        return [piece for piece in pieces if piece.last_seq >= piece.segment.first_seq]


def num_shards_of(store: ObjectStore) -> int:
    """Return how many shards the server has that archives here.

    Raises:
        GoneError: None does.
        CorruptionError: The object cannot be read.
    """
    try:
        num_shards = json.loads(store.get(_SHARDS))["num_shards"]
        if type(num_shards) is not int or not 1 <= num_shards <= MAX_SHARDS:
            raise ValueError(f"{num_shards!r}: not 1 to {MAX_SHARDS}")
        return num_shards
    except (KeyError, RecursionError, TypeError, ValueError) as exc:
        raise CorruptionError(f"{store.where}/{_SHARDS}: no number of shards: {exc}") from exc


def usable_end(segment: ArchivedSegment, begins: Mapping[int, int]) -> int:
    """Return the last seq of a segment that no copy of a higher term has made void."""
    return min([segment.last_seq, *(seq for term, seq in begins.items() if term > segment.term)])


def chain_of(pieces: Iterable[Piece], from_seq: int) -> list[Piece]:
    """Return pieces that have every record from `from_seq` on, in order, as far as there is no gap."""
    chain: list[Piece] = []
    next_seq = from_seq
    best: Piece | None = None
    for piece in pieces:  # by first seq
        if piece.segment.first_seq > next_seq:
            if best is None or best.last_seq < next_seq:
                break
            chain.append(best)
            next_seq = best.last_seq + 1
            if piece.segment.first_seq > next_seq:
                break
        if best is None or piece.last_seq > best.last_seq:
            best = piece
    if best is not None and best.last_seq >= next_seq and (not chain or chain[-1] is not best):
        chain.append(best)
    return chain


def check_history(pieces: Iterable[Piece], where: str) -> None:
    """Check that pieces, by first seq, are of one history: those that have the same record have one mark.

    Raises:
        CorruptionError: Two copies of the shard have archived in one term, while neither could see the other's claim.
    """
    longest: Piece | None = None
    for piece in pieces:
        if longest is not None and longest.last_seq >= piece.segment.first_seq:
            if longest.segment.mark != piece.segment.mark:
                raise CorruptionError(
                    f"{where}: {longest.segment.path} and {piece.segment.path} are of two histories: two copies of the "
                    "shard ran at once; remove the objects of one of them behind the last common record"
                )
            if longest.last_seq >= piece.last_seq:
                continue
        longest = piece


def _folder(shard: int) -> str:
    return f"archive/{shard:04d}/"
