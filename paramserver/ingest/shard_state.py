"""A shard's tables and writers, and what each record of its log changes: a function of the log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from headrace.paramserver.log.interface import KIND_BATCH, KIND_HELLO, LogRecord, LogSource, is_housekeeping, note_of
from headrace.paramserver.log.sessions import Session, Sessions
from headrace.paramserver.store.catalog import Catalog
from headrace.paramserver.store.deltas import Batch, RowDelta, decode_delta, tally_of
from headrace.schemas.errors import CorruptionError, HeadraceError, RequestError
from headrace.schemas.idl import idl
from headrace.schemas.messages import decode_header, decode_struct

__all__ = ["CLAIM", "Offer", "ShardState", "empty_batch", "offer_at"]

# Python objects of one unapplied delta, on top of its frame; they are most of a very small delta's memory.
_DELTA_BYTES = 2048

CLAIM = "claim"
"""What a record is that takes its epoch for a trainer, see `note_header`. ON DISK: never rename."""

_Deltas = tuple[RowDelta, ...]
_Release = Callable[[], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """An offer of a shard that is in its log.

    Attributes:
        seq: Of its record, the last before the next term.
        to: Host and port of the follower or standby that may take over.
        id: Random; distinguishes offers.
        claim: Term and nonce of the owner's claim in its object store; None where claims do not decide.
        num_shards: Of the server that takes the place of this one; None where a copy of the shard takes over.
        is_taken: That server has taken the place.
    """

    seq: int
    to: str
    id: str
    claim: tuple[int, str] | None = None
    num_shards: int | None = None
    is_taken: bool = False

    @classmethod
    def of_note(cls, seq: int, header: Mapping[str, Any]) -> Self:
        """Return the offer in a record of `note_header`, or of which it says that it was taken.

        Raises:
            KeyError, ValueError: The record says neither.
        """
        claim = (int(header["term"]), str(header["nonce"])) if "nonce" in header else None
        shards = int(header["shards"]) if "shards" in header else None
        to, is_taken = str(header["to"]), "offer" in header
        seq = int(header["offer"]) if is_taken else seq
        return cls(seq=seq, to=to, id=str(header["id"]), claim=claim, num_shards=shards, is_taken=is_taken)


class ShardState:
    """What is known after a record of a shard's log, whether the shard has accepted it just now or reads it again.

    Not thread-safe, but for `decode`: tables are added and grow meanwhile.

    Attributes:
        catalog: The registered tables.
        sessions: The writers.
        offer: By which the log's owner offers the shard; None without one.
    """

    def __init__(self, meta: dict[bytes, bytes]) -> None:
        """Begin with what a store's metadata says."""
        self.catalog, self.sessions = Catalog(meta), Sessions(meta)
        self.offer: Offer | None = None

    def decode(self, request: Any, *, reject_non_finite: bool = False) -> _Deltas:
        """Return the rows of an `idl.SetEmbeddingsRequest`; raises as `decode_delta`. Thread: any."""
        return tuple(decode_delta(self.catalog, delta, reject_non_finite=reject_non_finite) for delta in request.deltas)

    def batch_of_request(
        self, seq: int, request: Any, session: Session, deltas: _Deltas, size_bytes: int, release: _Release
    ) -> Batch:
        """Take an accepted `idl.SetEmbeddingsRequest` with its rows; return its batch, which calls `release`."""
        epoch = request.epoch
        # A session of no trainer may be forgotten with its epoch.
        meta = {} if session.is_trainer else self.sessions.raise_epoch(epoch)
        for delta in deltas:
            if delta.scalars:
                meta |= self.catalog.set_scalars(delta.spec.fqn, delta.scalars, epoch, request.step)
            if delta.deleted_row_ids is not None and delta.deleted_row_ids.size:
                meta |= self.catalog.note_deletes(delta.spec.fqn)
        self.sessions.advance(
            session,
            client_seq=request.client_seq,
            step=request.step,
            time_us=request.time_us,
            ends_step=request.ends_step,
            is_exact_cut=request.is_exact_cut,
            cost_percent=request.cost_percent,
            is_cost_bound=request.is_cost_bound,
            num_unstreamed=request.num_unstreamed,
        )
        if request.ends_step:
            meta |= self.catalog.end_filling(self.sessions.watermark_of)[1]
            meta |= self.catalog.note_first_steps(self.sessions.watermark_of)
        return Batch(
            seq=seq,
            epoch=epoch,
            step=request.step,
            time_us=request.time_us,
            deltas=deltas,
            meta=meta | self.sessions.settle(session, seq),
            size_bytes=size_bytes + _DELTA_BYTES * len(deltas),
            release=release,
            tally=tally_of(request),
        )

    def batch_of_hello(self, seq: int, epoch: int, header: dict[str, Any]) -> Batch:
        """Take a hello, by its record's header; return its batch."""
        known = map(self.catalog.get, header.get("dropped", ()))
        dropped = tuple(table.table_id for table in known if table is not None)
        meta = self.catalog.take_hello(header, epoch)
        session = self.sessions.open(header["run"], header["client"], epoch, header["rank"], header["world_size"])
        if header.get("ends_run"):
            session.has_ended = True
            if self.sessions.has_ended(session.run):
                meta |= self.catalog.end_run(session.run)
        meta |= self.sessions.settle(session, seq)
        return Batch(seq=seq, epoch=epoch, step=0, time_us=0, meta=meta, dropped=dropped)

    def batch_of_claim(self, seq: int, epoch: int) -> Batch:
        """Take an epoch that a trainer has claimed; return the batch of the record."""
        return Batch(seq=seq, epoch=0, step=0, time_us=0, meta=self.sessions.raise_epoch(epoch))

    def batch_of_record(self, record: LogRecord) -> Batch:
        """Repeat what accepting this record changed; `CorruptionError` if it is not a shard's next record."""
        kind = record.header.get("kind")
        try:
            if note_of(record.header) == CLAIM:
                return self.batch_of_claim(record.seq, record.epoch)
            if is_housekeeping(record.header):
                self.take_note(record.seq, record.header)
                return empty_batch(record.seq)
            if kind == KIND_HELLO:
                return self.batch_of_hello(record.seq, record.epoch, record.header)
            if kind == KIND_BATCH:
                offset = decode_header(record.body).body_offset
                request = decode_struct(idl.ParameterServer.setEmbeddings_args, record.body, offset).request
                session, is_new = self.sessions.accept(request.run, request.client, request.epoch, request.client_seq)
                if not is_new:
                    raise RequestError(f"client seq {request.client_seq} is in the log twice")
                # No setting applies here: an accepted batch stays accepted, even if stricter settings would refuse it.
                return self.batch_of_request(
                    record.seq, request, session, self.decode(request), len(record.body), lambda: None
                )
        except (HeadraceError, ValueError, TypeError, KeyError) as exc:
            raise CorruptionError(f"log record {record.seq} cannot be applied: {exc}") from exc
        raise CorruptionError(f"log record {record.seq} is of kind {kind!r}, which this version does not know")

    def take_note(self, seq: int, header: Mapping[str, Any]) -> None:
        """Take a record of `note_header`."""
        match note_of(header):
            case "offer" | "taken":
                self.offer = Offer.of_note(seq, header)
            case "withdrawal" | "open":
                self.offer = None


def offer_at(log: LogSource, seq: int) -> Offer | None:
    """Return the offer that a record of a log makes or says to be taken; None if it does not, or is not there."""
    if not log.first_seq <= seq <= log.last_seq:
        return None
    record, state = next(log.read(seq, seq)), ShardState({})
    if is_housekeeping(record.header):
        state.take_note(seq, record.header)
    return state.offer


def empty_batch(seq: int) -> Batch:
    """Return the batch of a record that changes nothing but the position and its mark."""
    return Batch(seq=seq, epoch=0, step=0, time_us=0, meta={})
