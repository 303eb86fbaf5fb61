"""Seeded schedules of the log in a stream: owners take over from each other while servers, networks and processes fail.

    python tests/faults/stream_schedules.py --schedules 100000 --seed 1 --jobs 2

A schedule is one seed: two or three processes of a shard, a follower, a stream that misbehaves in every way that
`scripted_stream.py` knows, all in virtual time. At its end the servers are well again, one process takes over and
appends, and `stream_ledger.py` checks what must be true. A finding names its seed; `--schedules 1 --seed SEED` repeats
it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "support")]

from memory_mirror import MemoryMirror
from scripted_stream import ScriptedEngine, ScriptedStream, Weather
from simulator import Finding, Schedule, main
from stream_ledger import Owner, StreamLedger

from headrace.paramserver.log.interface import UpdateLogConfig
from headrace.paramserver.log.jetstream import appender, stream_log, stream_reader, terms
from headrace.paramserver.log.jetstream.appender import StreamTimes
from headrace.paramserver.log.jetstream.engine import PublishOutcome, PublishReply
from headrace.paramserver.log.jetstream.stream_log import JetStreamUpdateLog
from headrace.schemas.errors import GoneError, HeadraceError, LogFencedError, OverloadedError, UnavailableError
from headrace.schemas.stream_records import (
    StreamRecordKind,
    decode_stream_record,
    encode_stream_note,
    encode_stream_record,
)

__all__ = ["StreamSchedule"]

# A small window reaches its edges often, and padding costs less.
_WINDOW = 6
# Coarse polls: a schedule costs what its events cost.
_TIMES = StreamTimes(poll_s=0.5, idle_poll_s=2.0, close_s=0.5)
_CONFIG = UpdateLogConfig(max_pending_bytes=2000)


@contextmanager
def _surroundings() -> Iterator[None]:
    """Let owners have few records on their way, and say nothing of all that fails."""
    modules: tuple[Any, ...] = (terms, appender, stream_log, stream_reader)
    log = logging.getLogger("headrace")
    before, level = terms.MAX_IN_FLIGHT, log.level
    try:
        log.setLevel(logging.CRITICAL + 1)
        for module in modules:
            module.MAX_IN_FLIGHT = _WINDOW
        yield
    finally:
        log.setLevel(level)
        for module in modules:
            module.MAX_IN_FLIGHT = before


def _weather(rng: random.Random) -> Weather:
    """Draw how bad it is, from nearly calm to very bad."""
    bad = rng.choice((0.0, 0.2, 1.0))
    return Weather(
        delay_s=(0.001, rng.choice((0.003, 0.05, 0.3))),
        spike=0.03 * bad,
        spike_s=3.0,
        commit_s=rng.choice((0.002, 0.05, 0.3)),
        lose_request=0.03 * bad,
        lose_reply=0.05 * bad,
        duplicate=0.05 * bad,
        late=rng.choice((0.2, 0.9)),
        late_s=rng.choice((0.2, 6.0)),
        behind=rng.choice((0.0, 0.3)),
        missing=rng.choice((0.0, 0.1)),
        misroute=rng.choice((0.0, 0.5)),
    )


class StreamSchedule(Schedule):
    """One seed: the stream, the processes, what befalls them, and the ledger."""

    least_faults, faults_s, settle_s = 1, 6.0, 120.0  # in the end silence, a takeover, one server after the other
    surroundings = _surroundings

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.stream = ScriptedStream(rng=self.rng, weather=_weather(self.rng))
        self.ledger = StreamLedger(self.stream, lease_s=_TIMES.lease_s)
        self.checked_seq = 0  # position of the newest checked part: readers must be able to begin behind it
        self._has_plain_owners = self.rng.random() < 0.3
        self._shards = [_Shard(self, f"s{number}") for number in range(self.rng.choice((2, 2, 2, 3)))]

    def begin(self) -> None:
        rng = self.rng
        self.work(*(shard.run() for shard in self._shards))
        if self._has_plain_owners:
            self.work(*(self._own_plainly(number) for number in range(rng.randint(1, 3))))
        if rng.random() < 0.3:
            self._shards.append(_Shard(self, "follower"))
            self.work(self._shards[-1].follow())

    def heal(self) -> None:
        self.stream.heal()
        for shard in self._shards:
            shard.engine.is_cut = False

    async def settle(self) -> None:
        """Let one process take over and append, and all of them, and a new one, read up to there."""
        last = self.rng.choice(self._shards)
        await last.end_as_owner()
        end_seq = self.stream.last_seq
        for shard in (*self._shards, _Shard(self, "late")):
            if shard is not last:
                await shard.read_up_to(end_seq)

    def check(self) -> None:
        ledger = self.ledger
        ledger.check(may_have_voids=self._has_plain_owners)
        self.did.update(
            acked=ledger.num_acked,
            committed=self.stream.last_seq,
            voids=ledger.num_voids,
            takeovers=ledger.num_takeovers,
        )

    def befall(self) -> None:
        rng, stream = self.rng, self.stream
        election_s = rng.choice((0.1, 1.0, 4.0))
        match rng.randrange(9):
            case 0:
                stream.kill_leader(down_s=rng.uniform(0.5, 6), election_s=election_s)
            case 1:
                stream.pause_leader(pause_s=rng.uniform(0.2, 4), stale_s=rng.uniform(0.5, 4), election_s=election_s)
            case 2 | 3:
                stream.cut_leader(cut_s=rng.uniform(1, 6), election_s=election_s)
            case 4:
                stream.elect(election_s=election_s)
            case 5:
                stream.drop_connections()
            case 6:
                engine = rng.choice(self._shards).engine
                engine.is_cut = True
                engine.lose("cut")
                stream.loop.call_later(rng.uniform(0.5, 5), setattr, engine, "is_cut", False)
            case 7:
                stream.kill_server(rng.randrange(3), down_s=rng.uniform(0.5, 3))
                if stream.leader is not None and stream.servers[stream.leader.server].is_down:
                    stream.elect(election_s=election_s)
            case _:
                stream.is_full = True
                stream.loop.call_later(rng.uniform(0.2, 3), setattr, stream, "is_full", False)

    async def _own_plainly(self, number: int) -> None:
        """Take over with an open record alone, so that late records of the owner before are accepted behind it.

        It knows the log at once, as no process can, and gives up at anything but an ack.
        """
        stream, rng = self.stream, self.rng
        await asyncio.sleep(rng.uniform(0.5, self.faults_s - 1))
        opened: asyncio.Future[tuple[Owner, int, list[PublishReply]]] = stream.loop.create_future()

        def open_amid(leader: Any) -> None:
            """Open when an owner has some records on their way, of which the first will come too late."""
            if len(leader.proposals) > 1 and all(len(each.payloads) == 1 for each in leader.proposals):
                stream.on_propose = None
                opened.set_result(self._open_plainly(leader, f"plain{number}"))

        if stream.on_propose is not None:
            return
        stream.on_propose = open_amid
        await asyncio.wait([opened], timeout=4)
        stream.on_propose = None
        if opened.done():
            await asyncio.sleep(2)
            owner, open_seq, acks = opened.result()
            for reply, place in zip(acks, (open_seq, *owner.seqs), strict=False):  # in order, the open record's first
                if (reply.outcome, reply.seq) != (PublishOutcome.ACKED, place):
                    break
                if place > open_seq:
                    self.ledger.note_ack(owner, owner.seqs.index(place))

    def _open_plainly(self, leader: Any, name: str) -> tuple[Owner, int, list[PublishReply]]:
        """Put an open record before what the owner has proposed, and three records behind what of that still fits."""
        stream, owner, acks = self.stream, self.ledger.add_owner(name), list[PublishReply]()
        last_seq, term, mark, nonce = stream.last_seq, 0, 0, 0
        for seq in range(1, last_seq + 1):
            record = decode_stream_record(memoryview(stream.history[seq]), seq=seq)
            if record.kind is StreamRecordKind.OPEN and record.term > term:
                term, mark = record.term, record.mark
            nonce = mark if (record.term, record.mark) == (term, mark) else (mark ^ record.mark) or 1
        term, mark = term + 1, self.rng.getrandbits(62) + 1
        late = leader.proposals[1:]
        leader.proposals.clear()
        leader.last_seq = last_seq
        message = encode_stream_note(
            StreamRecordKind.OPEN, term=term, mark=mark, seq=last_seq + 1, owner=name, previous=(last_seq, nonce)
        )
        stream.propose(leader, [message], last_seq, acks.append)
        for proposal in late:
            stream.propose(leader, proposal.payloads, proposal.first_seq - 1, proposal.reply)
        for count in range(3):
            body, place = f"{name}:{count}".encode(), leader.last_seq + 1
            data = encode_stream_record(
                kind=StreamRecordKind.DATA, term=term, mark=mark, seq=place, epoch=1, header=b"\x80", body=[body]
            )
            owner.bodies.append(body)
            owner.seqs.append(place)
            stream.propose(leader, [data], place - 1, acks.append)
        return owner, last_seq + 1, acks


class _Shard:
    """One process of a shard: follows, takes over, appends, dies and comes back."""

    def __init__(self, schedule: StreamSchedule, name: str) -> None:
        self.schedule, self.name, self.rng = schedule, name, schedule.rng
        self.engine = ScriptedEngine(schedule.stream)
        self.log: JetStreamUpdateLog | None = None
        self.mirror: MemoryMirror | None = None
        self.applied_seq = 0
        self._num_terms = 0

    async def _open(self) -> JetStreamUpdateLog:
        """Open the log again, on what the last life left of the mirror."""
        if self.log is not None:
            await self._end()
        if self.mirror is not None and self.rng.random() < 0.2:
            self.mirror = None
        if self.mirror is None:
            self.applied_seq = self.schedule.checked_seq
        kept = None if self.mirror is None else self.mirror.survivor()
        begin_seq = self.applied_seq + 1

        async def open_mirror(seq: int, *, anew: bool) -> MemoryMirror:
            self.mirror = kept if kept is not None and not anew else MemoryMirror(seq, disk_s=0.02)
            return self.mirror

        try:
            self.log = await JetStreamUpdateLog.open_on(
                self.engine,
                open_mirror,
                begin_seq=begin_seq,
                config=_CONFIG,
                times=_TIMES,
                draw_mark=lambda: self.rng.getrandbits(62) + 1,
            )
        except GoneError as exc:
            if begin_seq > self.schedule.checked_seq:
                raise Finding(f"{self.name} cannot begin behind {begin_seq - 1}, a checked part: {exc}") from exc
            self.mirror = None
            return await self._open()
        except HeadraceError as exc:
            raise Finding(f"{self.name} cannot open: {exc!r}") from exc
        return self.log

    async def _end(self) -> None:
        """Die, or stop in order."""
        assert self.log is not None
        self._apply()
        if isinstance(self.log.failed, GoneError) and self.applied_seq < self.schedule.checked_seq:
            self.mirror = None  # it was away for too long: others let go of what it had not read
        else:
            self.schedule.ledger.note_failure(self.name, self.log.failed)
        if self.rng.random() < 0.5:
            self.engine.lose()
        await self.log.close()
        self.log = None

    def _apply(self) -> None:
        """Read on, and tell the ledger."""
        log = self.log
        assert log is not None
        if log.last_seq > self.applied_seq:
            records = list(log.read(self.applied_seq + 1))
            if not records or records[-1].seq != log.last_seq:
                raise Finding(
                    f"{self.name} reads {len(records)} records behind {self.applied_seq}, not to {log.last_seq}"
                )
            self.schedule.ledger.note_read(self.name, self.applied_seq + 1, records)
            self.applied_seq = records[-1].seq

    async def run(self) -> None:
        """Live until the schedule settles."""
        while not self.schedule.is_settling:
            log = await self._open()
            await self._live(log)

    async def _live(self, log: JetStreamUpdateLog) -> None:
        schedule, rng = self.schedule, self.rng
        while not schedule.is_settling and log.failed is None:
            if rng.random() < 0.6:
                await asyncio.sleep(rng.uniform(0, 3))  # as a planned takeover, that waits for no silence
            else:
                await _first_of(log.wait_silent(), asyncio.sleep(5))
            if schedule.is_settling or log.failed is not None:
                return
            if await self._take_over(log):
                await self._serve(log, schedule.ledger.add_owner(f"{self.name}.{self._num_terms}"))
                return

    async def _take_over(self, log: JetStreamUpdateLog) -> bool:
        self._apply()
        try:
            is_ours = await asyncio.wait_for(log.take_over(self.applied_seq, owner=self.name), 20)
        except TimeoutError:
            return False
        except LogFencedError:
            return False
        except HeadraceError as exc:
            raise Finding(f"{self.name} cannot take over: {exc!r}") from exc
        self._num_terms += is_ours
        return is_ours

    async def _serve(self, log: JetStreamUpdateLog, owner: Owner) -> None:
        """Append in bursts, until another one takes over or this life ends."""
        rng = self.rng
        for _ in range(rng.randint(2, 7)):
            for _ in range(rng.choice((1, 2, 5, 12))):
                self._append(log, owner)
            await asyncio.sleep(rng.choice((0.0, 0.02, 0.3, 1.5)))
            if log.failed is not None:
                break
            self._look(log, owner)
            if rng.random() < 0.15:
                self._checkpoint(log)
        if rng.random() < 0.7:
            # Fenced or not: what passes for an owner later counts too.
            for _ in range(3):
                await asyncio.sleep(rng.uniform(0.2, 2.5))
                self._look(log, owner)

    def _look(self, log: JetStreamUpdateLog, owner: Owner) -> None:
        try:
            log.check_owned()
        except UnavailableError:
            return
        owner.owned_s.append(asyncio.get_running_loop().time())

    def _append(self, log: JetStreamUpdateLog, owner: Owner) -> asyncio.Future[None] | None:
        number = len(owner.bodies)
        body = f"{owner.name}:{number}".encode()
        try:
            append = log.append(epoch=1, header={}, body=[body])
        except (OverloadedError, LogFencedError):
            return None
        owner.bodies.append(body)
        owner.seqs.append(append.seq)
        append.durable.add_done_callback(partial(self._on_done, owner, number))
        return append.durable

    def _on_done(self, owner: Owner, number: int, durable: asyncio.Future[None]) -> None:
        error = durable.exception()
        try:
            if error is None:
                self.schedule.ledger.note_ack(owner, number)
            else:
                owner.is_over = True
                if not isinstance(error, (LogFencedError, UnavailableError)):
                    raise Finding(f"record {number} of {owner.name} failed: {error!r}")
        except Finding as exc:
            self.schedule.fail(exc)

    def _checkpoint(self, log: JetStreamUpdateLog) -> None:
        """Have a checked part, and let go of what is before the one before it."""
        self._apply()
        checked_seq = self.applied_seq - self.rng.choice((0, 1, 3, 12))
        if checked_seq > self.schedule.checked_seq:
            self.schedule.checked_seq = checked_seq
            log.trim(checked_seq + 1)

    async def follow(self) -> None:
        """Only read, from the beginning on."""
        log = await self._open()
        while not self.schedule.is_settling:
            await asyncio.sleep(self.rng.uniform(0.5, 3))
            if log.failed is not None:
                log = await self._open()
            self._apply()

    async def end_as_owner(self) -> None:
        """Take over and append, after all."""
        while True:
            log = self.log
            if log is None or log.is_owner or log.failed is not None:
                log = await self._open()
            while log.failed is None and not await self._take_over(log):
                await _first_of(log.wait_beyond(self.applied_seq), log.wait_failed())
            if log.failed is None:
                owner = self.schedule.ledger.add_owner(f"{self.name}.last")
                if (durable := self._append(log, owner)) is not None:
                    await asyncio.wait([durable])
                if owner.num_acked:
                    return

    async def read_up_to(self, seq: int) -> None:
        """Read all that there is."""
        while self.applied_seq < seq:
            log = self.log
            if log is None or log.is_owner or log.failed is not None:
                log = await self._open()
            await _first_of(log.wait_beyond(seq - 1), log.wait_failed())
            self._apply()


async def _first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    tasks = [asyncio.ensure_future(each) for each in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    sys.exit(main(StreamSchedule, __doc__))
