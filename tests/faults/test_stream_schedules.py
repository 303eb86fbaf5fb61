"""Schedules of the log in a stream: none breaks a promise, and each planted fault is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from scripted_stream import ScriptedConnection, ScriptedEngine
from stream_schedules import run_schedules

from headrace.paramserver.log.jetstream import stream_log
from headrace.paramserver.log.jetstream.appender import Appender, PendingAppend
from headrace.paramserver.log.jetstream.engine import PublishOutcome, PublishReply
from headrace.paramserver.log.jetstream.stream_log import JetStreamUpdateLog
from headrace.paramserver.log.jetstream.terms import Terms
from headrace.schemas.stream_records import StreamRecordKind

pytestmark = pytest.mark.timeout(400)  # half a minute of a processor, which others may use
_NUM_IN_CI = 2000
# A planted fault shows within so many schedules.
_NUM_PLANTED = 300


def test_no_schedule_breaks_a_promise() -> None:
    """In two thousand schedules no acked record is lost, moved, doubled, reordered or seen otherwise by any reader."""
    total, findings = run_schedules(range(1, 1 + _NUM_IN_CI))
    assert not findings, "\n".join(findings[:20])
    # The schedules are worth something: owners change, records are acked, and late records are accepted.
    assert total["takeovers"] > 2 * _NUM_IN_CI and total["acked"] > 10 * _NUM_IN_CI and total["voids"] > 50


def test_a_seed_is_a_schedule() -> None:
    """The same seed does the same, to the last message."""
    assert run_schedules(range(7, 17)) == run_schedules(range(7, 17))


def _found(about: str = "") -> None:
    """Assert that the checker finds what was planted; `about` is in one of the findings."""
    findings: list[str] = []
    for begin in range(1, _NUM_PLANTED, 20):
        findings += run_schedules(range(begin, begin + 20))[1]
        if any(about in each for each in findings):
            return
    pytest.fail(f"not found in {_NUM_PLANTED} schedules: {findings[:5]}")


def test_no_expectation_on_publish_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that are published without an expected seq land where they should not."""
    publish = ScriptedConnection.publish

    def unconditional(self: ScriptedConnection, message: Any, *, expected_last: int, on_reply: Any) -> None:
        publish(self, message, expected_last=None, on_reply=on_reply)

    monkeypatch.setattr(ScriptedConnection, "publish", unconditional)
    _found()


def test_a_refusal_taken_for_an_ack_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """'Wrong last sequence: N' with N at or above our seq counts proposals, which may be lost."""
    on_reply = Appender._on_reply

    def credulous(self: Appender, connection: Any, pending: PendingAppend, reply: PublishReply) -> None:
        if reply.outcome is PublishOutcome.WRONG_LAST and reply.seq >= pending.seq:
            reply = PublishReply(PublishOutcome.ACKED, pending.seq)
        on_reply(self, connection, pending, reply)

    monkeypatch.setattr(Appender, "_on_reply", credulous)
    _found("counts at")


def test_acks_behind_an_unresolved_record_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setattr(Appender, "_take_ack", hasty)
    monkeypatch.setattr(Appender, "_settle", settle_with_data)
    _found("the oldest without one is")


def test_void_records_that_are_applied_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that takes late records of an owner before for data differs from the log."""
    take = Terms.take
    monkeypatch.setattr(Terms, "take", lambda self, record: take(self, record) or True)
    _found("where the log has")


def test_a_takeover_without_an_open_record_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of a term that was not opened count for nothing, so acking them loses them."""
    encode = stream_log.encode_stream_note

    def padding_only(kind: StreamRecordKind, **fields: Any) -> bytes:
        fields.pop("previous", None)
        return encode(StreamRecordKind.PADDING, **fields)

    monkeypatch.setattr(stream_log, "encode_stream_note", padding_only)
    _found()


def test_a_takeover_without_padding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a lone open record, late records of the owner before are accepted: the log is not clean."""
    open_term = JetStreamUpdateLog._open_term

    async def lone(self: JetStreamUpdateLog, *args: Any) -> Any:
        window, stream_log.MAX_IN_FLIGHT = stream_log.MAX_IN_FLIGHT, 1
        try:
            return await open_term(self, *args)
        finally:
            stream_log.MAX_IN_FLIGHT = max(window, stream_log.MAX_IN_FLIGHT)

    monkeypatch.setattr(JetStreamUpdateLog, "_open_term", lone)
    _found("void records, though takeovers pad")


def test_a_purge_past_the_checked_part_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who begins behind the newest checked part must find all that follows."""
    trim = JetStreamUpdateLog.trim
    monkeypatch.setattr(JetStreamUpdateLog, "trim", lambda self, before_seq: trim(self, before_seq + 10))
    _found()


def test_a_purge_without_lookback_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who begins behind the newest checked part must find those before it that tell the term."""

    async def purge_all(self: ScriptedConnection, before_seq: int) -> None:
        await purge(self, before_seq + stream_log.MAX_IN_FLIGHT)

    purge = ScriptedConnection.purge
    monkeypatch.setattr(ScriptedConnection, "purge", purge_all)
    _found()


def test_terms_that_do_not_rise_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that opens without a higher term than all before it does not own the log."""
    open_term = JetStreamUpdateLog._open_term

    async def ignorant(self: JetStreamUpdateLog, applied_seq: int, owner: str, above_term: int) -> Any:
        term = self._reader.terms.term
        self._reader.terms.term = 0
        try:
            return await open_term(self, applied_seq, owner, 0)
        finally:
            self._reader.terms.term = term

    monkeypatch.setattr(JetStreamUpdateLog, "_open_term", ignorant)
    _found()


def test_readers_that_ignore_terms_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record that is not an open one counts, whatever its term."""

    def take(self: Terms, record: Any) -> bool:
        if record.kind is StreamRecordKind.OPEN:
            self.term, self.mark, self.owner = record.term, record.mark, record.owner
        self._num_until_known = max(0, self._num_until_known - 1)
        return True

    monkeypatch.setattr(Terms, "take", take)
    _found("where the log has")


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


def test_a_client_that_reconnects_by_itself_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What had been buffered for a lost connection must never leave over another one."""
    monkeypatch.setattr(ScriptedEngine, "connection_type", _ReconnectingConnection)
    _found("over a connection that had been lost")


def test_a_lease_that_outlives_its_acks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that was not acked for long must not pass for one, when another has opened."""
    monkeypatch.setattr(Appender, "is_owner", lambda self: self.failed is None)
    _found("passed for the owner")


def test_an_ack_for_a_record_that_is_only_in_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reply taken for an ack is found at once."""
    on_reply = Appender._on_reply

    def credulous(self: Appender, connection: Any, pending: PendingAppend, reply: PublishReply) -> None:
        on_reply(self, connection, pending, dataclasses.replace(reply, outcome=PublishOutcome.ACKED, seq=pending.seq))

    monkeypatch.setattr(Appender, "_on_reply", credulous)
    _found("counts at")
