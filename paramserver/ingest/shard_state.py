"""A shard's tables and writers, and what each record of its log changes: a function of the log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import msgpack

from headrace.paramserver.log.interface import KIND_BATCH, KIND_HELLO, LogRecord, is_housekeeping, note_of
from headrace.paramserver.log.sessions import Session, Sessions
from headrace.paramserver.store.catalog import Catalog
from headrace.paramserver.store.deltas import Batch, RowDelta, decode_delta, tally_of
from headrace.schemas.errors import CorruptionError, HeadraceError, RequestError
from headrace.schemas.idl import idl
from headrace.schemas.messages import decode_header, decode_struct

__all__ = ["CLAIM", "Offer", "ShardState", "Taker", "empty_batch"]

# Python objects of one unapplied delta, on top of its frame; they are most of a very small delta's memory.
_DELTA_BYTES = 2048

CLAIM = "claim"
"""What a record is that takes its epoch for a trainer, see `note_header`. ON DISK: never rename."""

Taker = Literal["standby", "follower", "server"]
"""Who may take a shard over: a standby of the log that the offer is in; a follower, whose log is another one; a new
server in the place of this one. ON DISK: never rename."""

# In a store's metadata: seq and header of the record that `ShardState.offer` is from. ON DISK: never rename.
_META_OFFER = b"log/offer"

_Deltas = tuple[RowDelta, ...]
_Release = Callable[[], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """An offer of a shard that is in its log.

    Attributes:
        seq: Of its record, the last before the next term.
        to: Host and port of whoever may take over.
        id: Random; distinguishes offers.
        taker: What is at `to`.
        term: In which its owner made it.
        nonce: Of the owner's claim of that term in its object store; None where claims do not decide.
        num_shards: Of the server that takes the place of this one; None where a copy of the shard takes over.
        taken_term: In which it was taken; 0 for a new server, whose terms are its own. None before.
    """

    seq: int
    to: str
    id: str
    taker: Taker
    term: int
    nonce: str | None = None
    num_shards: int | None = None
    taken_term: int | None = None

    @property
    def is_elsewhere(self) -> bool:
        """Whether who takes over goes on in another log, and alone knows whether it has."""
        return self.taker != "standby"

    @property
    def is_taken(self) -> bool:
        """Whether the shard was taken over, for ever."""
        return self.taken_term is not None

    def to_note(self) -> dict[str, str]:
        """Return what `of_note` reads, but for the seq of a new offer."""
        note = {"to": self.to, "id": self.id, "taker": self.taker, "term": str(self.term)}
        note |= {} if self.nonce is None else {"nonce": self.nonce}
        note |= {} if self.num_shards is None else {"shards": str(self.num_shards)}
        return note | ({} if self.taken_term is None else {"offer": str(self.seq), "taken": str(self.taken_term)})

    @classmethod
    def of_note(cls, seq: int, header: Mapping[str, Any]) -> Self:
        """Return the offer in a record of `note_header`, or of which it says that it was taken.

        Raises:
            KeyError, ValueError: The record says neither.
        """
        if (taker := header["taker"]) not in get_args(Taker):
            raise ValueError(f"an offer to {taker!r}")
        return cls(
            seq=int(header.get("offer", seq)),
            to=str(header["to"]),
            id=str(header["id"]),
            taker=taker,
            term=int(header["term"]),
            nonce=None if (nonce := header.get("nonce")) is None else str(nonce),
            num_shards=int(header["shards"]) if "shards" in header else None,
            taken_term=int(header["taken"]) if "taken" in header else None,
        )


class ShardState:
    """What is known after a record of a shard's log, whether the shard has accepted it just now or reads it again.

    Not thread-safe, but for `decode`: tables are added and grow meanwhile.

    Attributes:
        catalog: The registered tables.
        sessions: The writers.
        offer: By which the log's owner offers the shard; None without one.
    """

    def __init__(self, meta: dict[bytes, bytes]) -> None:
        """Begin with what a store's metadata says; `CorruptionError` if that is unreadable."""
        self.catalog, self.sessions = Catalog(meta), Sessions(meta)
        known = meta.get(_META_OFFER)
        try:
            self.offer = None if known is None else Offer.of_note(*msgpack.unpackb(known))
        except (ValueError, TypeError, KeyError) as exc:
            raise CorruptionError(f"the store's offer of the shard is unreadable: {known!r}") from exc

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
                return self.batch_of_note(record.seq, record.header)
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

    def batch_of_note(self, seq: int, header: Mapping[str, Any]) -> Batch:
        """Take a record of `note_header`; return its batch."""
        offer = self.offer
        match note_of(header):
            case "offer" | "taken":
                offer = Offer.of_note(seq, header)
            case "withdrawal":
                offer = None
            # Who takes over in another log says by which offer. Who opens the next term of this one has it, too.
            case "open" if offer is not None and ("id" in header or not offer.is_elsewhere):
                offer = None
        batch = empty_batch(seq)
        if offer != self.offer:
            self.offer = offer
            batch.meta[_META_OFFER] = b"" if offer is None else msgpack.packb([offer.seq, offer.to_note()])
        return batch


def empty_batch(seq: int) -> Batch:
    """Return the batch of a record that changes nothing but the position and its mark."""
    return Batch(seq=seq, epoch=0, step=0, time_us=0, meta={})
