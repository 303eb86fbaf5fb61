"""Schedules of the log in a stream: none breaks a promise, and each planted fault is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from scripted_stream import ScriptedConnection, ScriptedEngine
from simulator import PlantedFaults, run_schedules
from stream_schedules import StreamSchedule

from headrace.paramserver.log.jetstream import stream_log
from headrace.paramserver.log.jetstream.appender import Appender, PendingAppend
from headrace.paramserver.log.jetstream.engine import PublishOutcome, PublishReply
from headrace.paramserver.log.jetstream.stream_log import JetStreamUpdateLog
from headrace.paramserver.log.jetstream.terms import Terms
from headrace.schemas.stream_records import StreamRecordKind

pytestmark = pytest.mark.timeout(600)
planted = PlantedFaults(StreamSchedule, within=300, at_once=20)
_NUM_CORE, _NUM_LONG = 40, 3000


def _check(seeds: range) -> None:
    total, findings = run_schedules(StreamSchedule, seeds)
    assert not findings, "\n".join(findings[:20])
    # The schedules are worth something: owners change, records are acked, and late records are accepted.
    num = len(seeds)
    assert total["takeovers"] > 2 * num and total["acked"] > 10 * num and total["voids"] >= num // 40


def test_no_schedule_breaks_a_promise() -> None:
    """No acked record is lost, moved, doubled, reordered or seen otherwise by any reader."""
    _check(range(1, 1 + _NUM_CORE))


def test_no_schedule_of_many_breaks_a_promise() -> None:
    """As above, in three thousand."""
    _check(range(1 + _NUM_CORE, 1 + _NUM_LONG))


@planted()
def no_expectation_on_publish(patch: pytest.MonkeyPatch) -> None:
    """Records that are published without an expected seq land where they should not."""
    publish = ScriptedConnection.publish

    def unconditional(self: ScriptedConnection, message: Any, *, expected_last: int, on_reply: Any) -> None:
        publish(self, message, expected_last=None, on_reply=on_reply)

    patch.setattr(ScriptedConnection, "publish", unconditional)


@planted("counts at")
def a_refusal_taken_for_an_ack(patch: pytest.MonkeyPatch) -> None:
    """'Wrong last sequence: N' with N at or above our seq counts proposals, which may be lost."""
    on_reply = Appender._on_reply

    def credulous(self: Appender, connection: Any, pending: PendingAppend, reply: PublishReply) -> None:
        if reply.outcome is PublishOutcome.WRONG_LAST and reply.seq >= pending.seq:
            reply = PublishReply(PublishOutcome.ACKED, pending.seq)
        on_reply(self, connection, pending, reply)

    patch.setattr(Appender, "_on_reply", credulous)


@planted("the oldest without one is")
def acks_behind_an_unresolved_record(patch: pytest.MonkeyPatch) -> None:
    """A PubAck alone acks nothing while a record before it is unresolved."""
    take_ack = Appender._take_ack

    def hasty(self: Appender, pending: PendingAppend, reply: PublishReply) -> None:
        take_ack(self, pending, reply)
        if pending.is_acked and (durable := pending.durable) is not None:
            pending.durable = None
            durable.set_result(None)

    settle = Appender._settle

    def settle_with_data(self: Appender) -> None:
        for pending in self._queue:  # what the log counts as data
            if pending.is_acked and pending.durable is None and pending.kind is StreamRecordKind.DATA:
                pending.durable = self._loop.create_future()  # type: ignore[assignment]
        settle(self)

    patch.setattr(Appender, "_take_ack", hasty)
    patch.setattr(Appender, "_settle", settle_with_data)


@planted("where the log has")
def void_records_that_are_applied(patch: pytest.MonkeyPatch) -> None:
    """A reader that takes late records of an owner before for data differs from the log."""
    take = Terms.take
    patch.setattr(Terms, "take", lambda self, record: take(self, record) or True)


@planted()
def a_takeover_without_an_open_record(patch: pytest.MonkeyPatch) -> None:
    """Records of a term that was not opened count for nothing, so acking them loses them."""
    encode = stream_log.encode_stream_note

    def padding_only(kind: StreamRecordKind, **fields: Any) -> bytes:
        fields.pop("previous", None)
        return encode(StreamRecordKind.PADDING, **fields)

    patch.setattr(stream_log, "encode_stream_note", padding_only)


@planted("void records, though takeovers pad")
def a_takeover_without_padding(patch: pytest.MonkeyPatch) -> None:
    """Behind a lone open record, late records of the owner before are accepted: the log is not clean."""
    open_term = JetStreamUpdateLog._open_term

    async def lone(self: JetStreamUpdateLog, *args: Any) -> Any:
        window, stream_log.MAX_IN_FLIGHT = stream_log.MAX_IN_FLIGHT, 1
        try:
            return await open_term(self, *args)
        finally:
            stream_log.MAX_IN_FLIGHT = max(window, stream_log.MAX_IN_FLIGHT)

    patch.setattr(JetStreamUpdateLog, "_open_term", lone)


@planted()
def a_purge_past_the_checked_part(patch: pytest.MonkeyPatch) -> None:
    """Who begins behind the newest checked part must find all that follows."""
    trim = JetStreamUpdateLog.trim
    patch.setattr(JetStreamUpdateLog, "trim", lambda self, before_seq: trim(self, before_seq + 10))


@planted()
def a_purge_without_lookback(patch: pytest.MonkeyPatch) -> None:
    """Who begins behind the newest checked part must find those before it that tell the term."""

    async def purge_all(self: ScriptedConnection, before_seq: int) -> None:
        await purge(self, before_seq + stream_log.MAX_IN_FLIGHT)

    purge = ScriptedConnection.purge
    patch.setattr(ScriptedConnection, "purge", purge_all)


@planted()
def terms_that_do_not_rise(patch: pytest.MonkeyPatch) -> None:
    """An owner that opens without a higher term than all before it does not own the log."""
    open_term = JetStreamUpdateLog._open_term

    async def ignorant(self: JetStreamUpdateLog, applied_seq: int, owner: str, above_term: int) -> Any:
        term = self._reader.terms.term
        self._reader.terms.term = 0
        try:
            return await open_term(self, applied_seq, owner, 0)
        finally:
            self._reader.terms.term = term

    patch.setattr(JetStreamUpdateLog, "_open_term", ignorant)


@planted("where the log has")
def readers_that_ignore_terms(patch: pytest.MonkeyPatch) -> None:
    """Every record that is not an open one counts, whatever its term."""

    def take(self: Terms, record: Any) -> bool:
        if record.kind is StreamRecordKind.OPEN:
            self.term, self.mark, self.owner = record.term, record.mark, record.owner
        self._num_until_known = max(0, self._num_until_known - 1)
        return True

    patch.setattr(Terms, "take", take)


class _ReconnectingConnection(ScriptedConnection):
    """A client that reconnects by itself, tells nobody, and then sends what it had not got an answer to."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._unanswered: dict[int, tuple[Sequence[bytes], int | None, Callable[[PublishReply], None]]] = {}
        self._is_closed = False

    def _tell(self, reason: str) -> None:
        if not self._is_closed:
            self._stream.loop.call_later(0.5, self._reconnect)

    def _reconnect(self) -> None:
        if not self._is_closed:
            self._drops = None
            for payloads, expected, on_reply in list(self._unanswered.values()):
                self.put_on_the_wire(payloads, expected, on_reply)

    async def close(self) -> None:
        self._is_closed = True
        if not self.lost.done():
            self.lost.set_result("closed")
        self.lose("closed")

    def put_on_the_wire(
        self, payloads: Sequence[bytes], expected: int | None, on_reply: Callable[[PublishReply], None]
    ) -> None:
        key = len(self._unanswered)
        self._unanswered[key] = payloads, expected, on_reply
        super().put_on_the_wire(payloads, expected, on_reply)


@planted("over a connection that had been lost")
def a_client_that_reconnects_by_itself(patch: pytest.MonkeyPatch) -> None:
    """What had been buffered for a lost connection must never leave over another one."""
    patch.setattr(ScriptedEngine, "connection_type", _ReconnectingConnection)


@planted("passed for the owner")
def a_lease_that_outlives_its_acks(patch: pytest.MonkeyPatch) -> None:
    """An owner that was not acked for long must not pass for one, when another has opened."""
    patch.setattr(Appender, "is_owner", lambda self: self.failed is None)


@planted("counts at")
def an_ack_for_a_record_that_is_only_in_memory(patch: pytest.MonkeyPatch) -> None:
    """Every reply taken for an ack is found at once."""
    on_reply = Appender._on_reply

    def credulous(self: Appender, connection: Any, pending: PendingAppend, reply: PublishReply) -> None:
        on_reply(self, connection, pending, dataclasses.replace(reply, outcome=PublishOutcome.ACKED, seq=pending.seq))

    patch.setattr(Appender, "_on_reply", credulous)


@pytest.mark.parametrize("fault", planted.names)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger finds a log, a client or an engine that breaks one of the rules."""
    planted.check_found(fault, monkeypatch)
