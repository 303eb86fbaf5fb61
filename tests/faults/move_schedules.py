"""Seeded schedules of moves: partitions go from shard to shard while trainers write and everything fails.

    python tests/faults/move_schedules.py --schedules 100000 --seed 1 --jobs 2

A schedule is one seed: two or three shards, a coordinator with an old map, trainers, a replay, a reader and a replica,
all in virtual time. At its end everything is well again, the moves end, the trainer sends what it has, and
`move_ledger.py` checks what must be true. A finding names its seed; `--schedules 1 --seed SEED` repeats it.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "support")]

from move_ledger import MoveLedger
from move_replica import Replica
from move_shards import NUM_PARTITIONS, ROWS, Key, ModelShard, partition_of
from simulator import Finding, Schedule, main

from headrace.paramserver.log.interface import KIND_BATCH
from headrace.paramserver.reshard.destination import DestinationMove
from headrace.schemas.errors import (
    CorruptionError,
    FencedError,
    HeadraceError,
    RequestError,
    SequenceGapError,
    UnavailableError,
    WrongRoutingError,
)
from headrace.schemas.move_records import Move, MoveStep
from headrace.schemas.partition_map import PartitionMap

__all__ = ["Batch", "MoveSchedule", "Writer"]

_TIMEOUT_S = 0.6
_uids = itertools.count(1)


class Network:
    """Carries calls: late, lost, or twice, the second time much later.

    But not to a shard that was set back meanwhile, which would take a batch that it has lost for the one that now has
    its number. TCP does not do that either: a connection ends with the process.
    """

    def __init__(self, schedule: MoveSchedule) -> None:
        rng = schedule.rng
        bad = rng.choice((0.0, 0.3, 1.0))
        self._schedule, self._rng = schedule, rng
        self.delay_s = rng.choice((0.002, 0.02, 0.15))
        self.lose_request = self.lose_reply = 0.06 * bad
        self.duplicate = 0.1 * bad

    def heal(self) -> None:
        self.delay_s, self.lose_request, self.lose_reply, self.duplicate = 0.002, 0.0, 0.0, 0.0

    async def call(self, number: int, handler: Callable[[ModelShard], Awaitable[Any]], terms: dict[int, int]) -> Any:
        """Call a shard; `terms` is the highest term of each that the caller has seen."""
        rng, loop = self._rng, asyncio.get_running_loop()
        shard = self._schedule.shards[number]
        await asyncio.sleep(rng.uniform(0, self.delay_s))
        if rng.random() < self.duplicate and shard.is_serving:  # nothing reaches a process that is yet to start
            loop.call_later(rng.uniform(0, 3), self._repeat, shard, shard.num_setbacks, handler)
        if rng.random() < self.lose_request or not shard.is_serving:
            await asyncio.sleep(0.05)
            raise UnavailableError("no answer")
        term = shard.term
        task = shard.spawn(handler(shard))  # type: ignore[arg-type]
        try:
            done, _ = await asyncio.wait({task}, timeout=_TIMEOUT_S)
            if not done or task.cancelled():
                raise UnavailableError("no answer")
            result = task.result()
        finally:
            task.add_done_callback(_retrieve)
        await asyncio.sleep(rng.uniform(0, self.delay_s))
        if rng.random() < self.lose_reply:
            raise UnavailableError("no answer")
        if term < terms.get(number, 0):
            raise UnavailableError("an answer of a term before")
        terms[number] = term
        return result

    def _repeat(self, shard: ModelShard, setbacks: int, handler: Callable[[ModelShard], Awaitable[Any]]) -> None:
        if shard.is_serving and shard.num_setbacks == setbacks:
            shard.spawn(handler(shard)).add_done_callback(_retrieve)  # type: ignore[arg-type]


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) and not isinstance(error, HeadraceError):
        raise error


class RemoteSource:
    """A `MoveSource` over the network; both sides tell their maps in every call, as in a hello."""

    def __init__(self, schedule: MoveSchedule, shard: ModelShard, source: int) -> None:
        self._schedule, self._shard, self._source = schedule, shard, source

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any) -> Any:
            told = self._shard.partitions.known

            async def handle(source: ModelShard) -> Any:
                source.hear(told)
                self._schedule.heard_from(source, args[0])
                result = await getattr(source.source, name)(*args)
                # What an answer says is durable, and so is the map that it tells.
                return result, source.partitions.known

            result, known = await self._schedule.network.call(self._source, handle, self._shard.terms)  # type: ignore[attr-defined]
            if name not in ("release", "follow"):
                self._shard.hear(known)
            return result

        return call


@dataclass(eq=False, slots=True)
class Batch:
    """Rows of one step for one shard."""

    step: int
    rows: dict[Key, tuple[int | None, int]]
    ends: bool
    is_exact: bool = False  # with `ends`: no newer row was sent
    is_conditional: bool = False
    after: list[Batch] = field(default_factory=list)
    acked: tuple[int, int] | None = None  # shard and seq
    is_elsewhere: bool = False  # all of it is in `after`
    is_sent: bool = False  # it has a number: what the shard takes under that is this, as it was or as it is
    is_resent: bool = False

    @property
    def is_done(self) -> bool:
        """Its rows are acked, wherever they have gone."""
        return (self.acked is not None or self.is_elsewhere) and all(each.is_done for each in self.after)

    def places(self) -> list[tuple[int, int]]:
        """Return shard and seq of every part of it. REQUIRES: done."""
        return [place for each in self.after for place in each.places()] + ([self.acked] if self.acked else [])


class Writer:
    """A client that writes: a trainer, or a replay of old rows. It routes by its own map, which it renews when told."""

    def __init__(self, schedule: MoveSchedule, client: str, epoch: int, *, version_epoch: int | None = None) -> None:
        self.schedule, self.client, self.epoch = schedule, client, epoch
        self.version_epoch = version_epoch or epoch
        self.is_trainer = version_epoch is None
        self.map = schedule.first
        self.queues: dict[int, list[Batch]] = {}
        self.step = self.ended_step = -1
        self.is_fenced = False
        self.last: dict[Key, tuple[int, int | None, int]] = {}  # what it wrote last: step, value, identity
        self._terms: dict[int, int] = {}
        self._acked: dict[Key, tuple[int, int | None, int, int]] = {}  # of `last`, what is acked, and by which shard
        self._wake: dict[int, asyncio.Event] = {}
        self._open: dict[int, bool] = {}  # a session is open
        self._joined: dict[int, int] = {}  # steps from here on end at the shard anyway

    def write(self, rows: dict[Key, tuple[int | None, int]], *, ends: bool = True) -> None:
        """Send some rows of a step, and `ends` it: then a shard that it has written to gets the end, rows or not.

        Rows of a step that it does not end belong to the next one that it ends.
        """
        self.step += 1
        ends &= self.is_trainer
        if ends:
            self.ended_step = self.step
        for key, (value, identity) in rows.items():
            self.last[key] = self.step, value, identity
        self.schedule.ledger.sent(self, self.step, rows)
        shards = set(self.queues) | set(self.map.owners.tolist())
        for shard in sorted(shards):
            own = {key: row for key, row in rows.items() if self._owner(key) == shard}
            if own or ends:
                queue = self._queue(shard, is_writing=True)
                batch = Batch(self.step, own, ends, is_exact=ends, is_conditional=not self.is_trainer)
                # Rows of steps before may move away from there, and then come behind the end.
                batch.after += [each for each in queue if not each.ends] if ends else []
                queue.append(batch)

    def _owner(self, key: Key) -> int:
        return int(self.map.owners[partition_of(key)])

    def _queue(self, shard: int, *, is_writing: bool = False) -> list[Batch]:
        if shard not in self.queues:
            self.queues[shard] = []
            self._joined[shard] = self.step if is_writing else self.step + 1
            self._wake[shard], self._open[shard] = asyncio.Event(), False
            self.schedule.run_beside(self._send(shard))
        self._wake[shard].set()
        return self.queues[shard]

    async def drain(self) -> None:
        """Say hello everywhere, and wait until all is acked."""
        for shard, wake in self._wake.items():
            self._open[shard] = False
            wake.set()
        while not self.is_fenced and (any(self.queues.values()) or not all(self._open.values())):  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def _send(self, shard: int) -> None:
        """Send a shard's batches, one after the other, for ever."""
        network, last = self.schedule.network, 0
        while not self.is_fenced:
            try:
                if not self._open[shard]:
                    session = await network.call(
                        shard, lambda to: to.hello(self.client, self.client, self.epoch), self._terms
                    )
                    if session.epoch != self.epoch:
                        continue
                    queue = self.queues[shard]
                    if session.last_client_seq < last:  # the shard was set back: send all again
                        self._resend(shard)
                    elif session.last_client_seq > last:  # the head was accepted, its ack was lost
                        self._take_ack(shard, queue.pop(0), session.last_client_seq)
                    last, self._open[shard] = session.last_client_seq, True
                last += await self._send_head(shard, last)
            except FencedError:
                self.is_fenced = True
            except WrongRoutingError as exc:
                assert exc.partitions is not None
                self.map = self.map.merged(PartitionMap.decode(exc.partitions))
                if all(self._owner(key) == shard for key in self.queues[shard][0].rows):
                    await asyncio.sleep(0.05)  # sealed: a late copy of the batch may yet be taken, so it stays as it is
                    continue
                self._recut(shard)
            except (UnavailableError, SequenceGapError, RequestError):
                self._open[shard] = False
                await asyncio.sleep(0.05)

    async def _send_head(self, shard: int, last: int) -> bool:
        """Send the head once it may be sent; return False after a wait, in which the queue may have changed."""
        queue = self.queues[shard]
        if not queue or (queue[0].ends and any(not each.is_done for each in queue[0].after)):
            self._wake[shard].clear()
            await self._wake[shard].wait()
            return False
        batch = queue[0]
        batch.is_sent = True
        header = {
            **{"kind": KIND_BATCH, "run": self.client, "client": self.client, "client_seq": last + 1},
            **{"step": batch.step, "ends_step": batch.ends, "is_exact_cut": batch.is_exact},
            "version_epoch": self.version_epoch,
            **{"conditional": batch.is_conditional, "uid": next(_uids), "trains": self.is_trainer},
            "is_resent": batch.is_resent,
            "after": [place for each in batch.after for place in each.places()],
        }
        body = tuple((*key, value, identity) for key, (value, identity) in batch.rows.items())
        await self.schedule.network.call(shard, lambda to: to.write(header, self.epoch, body), self._terms)
        self._take_ack(shard, queue.pop(0), last + 1)
        return True

    def _take_ack(self, shard: int, batch: Batch, client_seq: int) -> None:
        seq = self._seq_of(shard, client_seq)
        batch.acked = shard, seq or 0
        for key, row in batch.rows.items():
            if key not in self._acked or self._acked[key][0] <= batch.step:
                self._acked[key] = batch.step, *row, shard
        if seq is not None:  # or the shard has lost it meanwhile
            self.schedule.ledger.acked(self, batch)
        for each in self._wake.values():  # ends of steps may wait for it
            each.set()

    def _seq_of(self, shard: int, client_seq: int) -> int | None:
        """Return the record of an acked batch, which acks and hellos tell; None if the shard has lost it since."""
        log = self.schedule.shards[shard].log
        for seq in range(len(log), 0, -1):
            header = log[seq - 1].header
            is_own = header.get("client") == self.client and log[seq - 1].epoch == self.epoch
            if is_own and header.get("client_seq") == client_seq:
                return seq
        return None

    def _recut(self, shard: int) -> None:
        """Give rows of a shard's queue that it no longer owns to their owners, conditional: a newer one may be there.

        The end of a step at the shard waits until the new owners have acked its rows, and names their places. A batch
        that was sent keeps its number, if nothing is left of it too: the shard may yet take it as it was.
        """
        left = []
        for batch in self.queues[shard]:
            gone: dict[int, dict[Key, tuple[int | None, int]]] = {}
            for key in [key for key in batch.rows if self._owner(key) != shard]:
                gone.setdefault(self._owner(key), {})[key] = batch.rows.pop(key)
            for owner, rows in sorted(gone.items()):
                moved = Batch(batch.step, rows, ends=False, is_conditional=True)
                queue = self._queue(owner)
                # Before ends of steps that wait: with moves both ways, each shard's would wait for the other's. Behind
                # rows that are sent again: those are older, and count whatever is there.
                is_behind = [each.is_sent or (each.is_resent and not each.ends) for each in queue]
                queue.insert([*is_behind, False].index(False), moved)
                if batch.ends and batch.step < self._joined[owner]:
                    queue.append(Batch(batch.step, {}, ends=True))
                batch.after.append(moved)
            if batch.ends and gone and (batch.rows or batch.is_sent):
                rest = Batch(batch.step, batch.rows, ends=False, is_conditional=batch.is_conditional)
                rest.is_sent, batch.is_sent, batch.rows = batch.is_sent, False, {}
                left.append(rest)
                batch.after.append(rest)  # whose rows may move too
            if batch.rows or batch.ends or batch.is_sent:
                left.append(batch)
            else:  # all of it is elsewhere
                batch.is_elsewhere = True
        self.queues[shard][:] = left
        if self.is_trainer:
            self._end_again()

    def _end_again(self) -> None:
        """End the last step on all shards again: rows have moved in front of ends that wait, which are no cuts now."""
        for shard, queue in self.queues.items():
            for batch in queue:
                batch.is_exact &= batch.is_sent
            queue.append(Batch(self.ended_step, {}, ends=True, is_exact=self.step == self.ended_step))
            self._wake[shard].set()

    def _resend(self, shard: int) -> None:
        """Send again, before what waits, all rows whose newest ack was of a shard that has lost acked rows.

        They go to their owners of now, to which the loss may have gone. They are not conditional: below a floor, rows
        that are not there would not count. So rows that a batch in flight has newer are left to it.
        """
        again: dict[tuple[int, int], dict[Key, tuple[int | None, int]]] = {}
        for key, (step, value, identity, acked_by) in self._acked.items():
            if acked_by == shard:
                again.setdefault((self._owner(key), step), {})[key] = value, identity
        resent: list[Batch] = []
        for (owner, step), rows in sorted(again.items(), reverse=True):
            queue = self._queue(owner)
            in_flight = queue[:1] if owner != shard and queue and queue[0].is_sent else []
            rows = {
                key: row for key, row in rows.items() if not any(key in b.rows and b.step > step for b in in_flight)
            }
            batch = Batch(step, rows, ends=False, is_conditional=not self.is_trainer, is_resent=True)
            queue.insert(len(in_flight), batch)
            resent += [batch, *in_flight]
            self._wake[owner].set()
        own = self.queues[shard]
        for batch in own:
            batch.is_sent = False  # to a process that is gone
            if batch.ends:  # before the loss was known: it is no end of its step any more
                resent += batch.after
                batch.ends, batch.is_exact, batch.after = False, False, []
            batch.is_elsewhere = not batch.rows
        own[:] = [batch for batch in own if batch.rows]
        if self.is_trainer and self.step >= 0:
            own.append(Batch(self.ended_step, {}, ends=True, is_resent=True, after=[*resent, *own]))
        self._wake[shard].set()


class MoveSchedule(Schedule):
    """One seed: shards, clients, what befalls them, and the ledger."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng = self.rng
        self.first = PartitionMap.first(2, NUM_PARTITIONS)
        self.network = Network(self)
        self.shards: list[ModelShard] = []
        self.ledger = MoveLedger(self)
        self._heard_s: dict[tuple[int, str], float] = {}
        self._may_end: set[str] = set()  # moves that somebody has asked to give up, or that ownership forbids
        self._silence_s = rng.choice((0.1, 0.25, 1.5))
        commit_s = rng.choice((0.001, 0.02, 0.1))
        for number in range(rng.choice((2, 3, 3))):
            shard = ModelShard(number, self.first, rng, commit_s)
            shard.on_take, shard.on_start = self.ledger.took, self._started
            shard.terms = {}  # type: ignore[attr-defined]
            shard.is_serving = True
            self.shards.append(shard)
        self.moves: list[Move] = []
        self.trainer: Writer | None = None

    def _started(self, shard: ModelShard) -> None:
        shard.terms = {}  # type: ignore[attr-defined]
        for each in shard.partitions.moves:
            if each.move.destination == shard.number and each.step in (MoveStep.COPY, MoveStep.ACTIVATE):
                self._drive(shard, each.move)
            elif each.step is MoveStep.SEAL:
                self.heard_from(shard, each.move)

    def heard_from(self, source: ModelShard, move: Move) -> None:
        """Note that a destination is alive; a source that has not heard of it for long lets its seal lapse."""
        loop = asyncio.get_running_loop()
        key = source.number, move.move_id
        self._heard_s[key] = loop.time()
        loop.call_later(self._silence_s, self._expire, source, source.term, move)

    def _expire(self, source: ModelShard, term: int, move: Move) -> None:
        silent_s = asyncio.get_running_loop().time() - self._heard_s[source.number, move.move_id]
        if source.is_serving and source.term == term and silent_s > self._silence_s - 0.05:
            source.spawn(source.source.expire(move)).add_done_callback(_retrieve)

    def _drive(self, shard: ModelShard, move: Move) -> None:
        if move.move_id not in shard.running:
            shard.running.add(move.move_id)
            shard.spawn(self._run_move(shard, move)).add_done_callback(self.note_end)

    async def _run_move(self, shard: ModelShard, move: Move) -> None:
        while not shard.is_serving:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        while True:
            driver = DestinationMove(move, shard, RemoteSource(self, shard, move.source))  # type: ignore[arg-type]
            try:
                is_moved = await driver.run()
                if not is_moved and move.move_id not in self._may_end:
                    raise Finding(f"move {move.move_id} is given up, and nobody has asked for that")
                self.did["moved" if is_moved else "given up"] += 1
            except UnavailableError:
                await asyncio.sleep(0.1)
                continue
            except CorruptionError as exc:
                raise Finding(f"a copy differs: {exc}") from exc
            except RequestError:
                progress = shard.partitions.moves.find(move.move_id)
                if progress is None:
                    self.did["refused"] += 1
                else:
                    if progress.step is not MoveStep.COPY:
                        raise
                    self._may_end.add(move.move_id)
                    shard.aborts.add(move.move_id)
                    await asyncio.sleep(0.05)
                    continue
            shard.running.discard(move.move_id)
            return

    # What befalls them.

    def befall(self) -> None:
        rng = self.rng
        shard = rng.choice(self.shards)
        loop = asyncio.get_running_loop()
        if not shard.is_up:
            return
        what = rng.choice(("kill", "kill", "lose tail"))
        self.did[what] += 1
        shard.kill()
        if what == "lose tail":
            shard.lose_tail()
            self.ledger.set_back(shard)
        loop.call_later(rng.uniform(0.05, 1.5), self._restart, shard)

    def _restart(self, shard: ModelShard) -> None:
        shard.start()
        shard.spawn(self._serve(shard)).add_done_callback(self.note_end)

    async def _serve(self, shard: ModelShard) -> None:
        """Ask all peers, because the shard may have been set back to before a release; then serve."""
        for peer in self.shards:
            while peer is not shard:
                term, known = shard.term, shard.partitions.known

                async def tell(to: ModelShard, term: int = term, known: PartitionMap = known) -> PartitionMap:
                    to.hear(known)
                    to.terms[shard.number] = max(term, to.terms.get(shard.number, 0))  # type: ignore[attr-defined]
                    for each in to.partitions.moves:  # it may have lost that it has purged
                        if each.step is MoveStep.ACTIVATE and each.move.source == shard.number:
                            self._drive(to, each.move)
                    await to.durable(len(to.log))
                    return to.partitions.known

                try:
                    if peer.is_up and not peer.is_serving:  # it asks too
                        shard.hear(await tell(peer))
                    else:
                        shard.hear(await self.network.call(peer.number, tell, shard.terms))  # type: ignore[attr-defined]
                    break
                except UnavailableError:
                    await asyncio.sleep(0.1)
        shard.is_serving = True

    async def _coordinate(self, number: int) -> None:
        """Ask for a move, by a map that may be old; ask again until it is known there, and sometimes abort it."""
        rng = self.rng
        await asyncio.sleep(rng.uniform(0.1, self.faults_s * 0.8))
        seen = rng.choice([self.first, *(shard.partitions.known for shard in self.shards)])
        if self.moves and rng.random() < 0.4:  # back to where they came from
            last = rng.choice(self.moves)
            partitions, destination = last.partitions, last.source
            await asyncio.sleep(rng.uniform(0.2, 1.0))
            seen = self.shards[last.destination].partitions.known
        else:
            source = rng.choice([int(each) for each in set(seen.owners.tolist())])
            owned = seen.partitions_of(source).tolist()
            partitions = tuple(sorted(rng.sample(owned, rng.randint(1, len(owned)))))
            destination = rng.choice([each.number for each in self.shards if each.number != source])
        try:
            move = Move.of_map(seen, partitions, move_id=f"m{number}", destination=destination)
        except RequestError:
            return
        self.moves.append(move)
        self.did["asked"] += 1
        for _ in range(20):
            try:
                await self.network.call(destination, lambda to: self._begin(to, move), {})
                break
            except UnavailableError:
                await asyncio.sleep(0.2)
        if rng.random() < 0.2:
            await asyncio.sleep(rng.uniform(0, 0.5))
            self._may_end.add(move.move_id)
            self.shards[destination].aborts.add(move.move_id)

    async def _begin(self, shard: ModelShard, move: Move) -> None:
        self._drive(shard, move)

    async def _train(self) -> None:
        """Make steps; sometimes a new trainer takes over, and the old one does not know."""
        rng, epoch = self.rng, 2
        trainer = self.trainer = Writer(self, "train", epoch)
        ends_s = asyncio.get_running_loop().time() + self.faults_s
        restart_at = rng.uniform(0.5, self.faults_s) if rng.random() < 0.4 else None
        began_s = asyncio.get_running_loop().time()
        pace_s = rng.choice((0.05, 0.15, 0.4))
        while (now_s := asyncio.get_running_loop().time()) < ends_s:
            rows: dict[Key, tuple[int | None, int]] = {}
            for _ in range(rng.randint(0, 5)):
                key = ("a", rng.choice(ROWS))
                rows[key] = (None if rng.random() < 0.25 else rng.getrandbits(30)), rng.randrange(5)
            trainer.write(rows, ends=trainer.step < 0 or rng.random() < 0.7)
            if restart_at is not None and now_s - began_s > restart_at:
                restart_at = None
                zombie, epoch = trainer, epoch + 1
                self.run_beside(self._haunt(zombie))
                trainer = self.trainer = Writer(self, "train", epoch)
                self.ledger.forget_steps()
                # It restores its model and sends all of it.
                trainer.write({key: row[1:] for key, row in zombie.last.items()})
                self.did["restarts"] += 1
            await asyncio.sleep(rng.uniform(0, 2 * pace_s))

    async def _haunt(self, zombie: Writer) -> None:
        """Let a trainer go on that another one has replaced; it may have heard of moves before that one."""
        known = list(zombie.last)  # the new trainer has these
        for _ in range(10):
            await asyncio.sleep(self.rng.uniform(0, 0.4))
            if zombie.is_fenced or self.is_settling:
                break
            if keys := [key for key in known if key in zombie.last]:
                zombie.write({self.rng.choice(keys): (self.rng.getrandbits(30), 9)})
        zombie.is_fenced = True

    async def _replay(self) -> None:
        """Bring in old rows, of which those count that have nothing newer; now and then, with a map that is old."""
        rng = self.rng
        replay = self.replay = Writer(self, "replay", 1, version_epoch=1)
        while not self.is_settling:
            await asyncio.sleep(rng.uniform(0.1, 0.8))
            rows: dict[Key, tuple[int | None, int]] = {("b", rng.choice(ROWS)): (rng.getrandbits(30), 1)}
            trained = [key for key in self.ledger.acked_versions if key[0] == "a"]
            if trained:
                rows[rng.choice(trained)] = rng.getrandbits(30), 5
            replay.write(rows)

    async def _collect(self) -> None:
        """Drop old tombstones: raise the floor on all shards, one after the other."""
        rng = self.rng
        await asyncio.sleep(rng.uniform(1, self.faults_s))
        if self.trainer is None or self.trainer.epoch != 2:
            return
        waiting = [each.step for queue in self.trainer.queues.values() for each in queue]
        floor = 2, min(waiting, default=self.trainer.step + 1) - 1
        for shard in self.shards:
            for _ in range(10):
                try:
                    await self.network.call(shard.number, lambda to: to.hello("expiry", "expiry", 1, {"a": floor}), {})
                    self.did["floors"] += 1
                    break
                except HeadraceError:
                    await asyncio.sleep(0.1)

    async def _read(self) -> None:
        """Read rows of any shard; whoever answers has all that was acked before."""
        rng = self.rng
        while not self.is_settling:
            await asyncio.sleep(rng.uniform(0, 0.15))
            key, shard = ("a", rng.choice(ROWS)), rng.choice(self.shards)
            least = self.ledger.acked_versions.get(key)
            setbacks = self.ledger.num_setbacks
            try:
                row = await self.network.call(shard.number, lambda to: to.read(key), {})  # noqa: B023
            except HeadraceError:
                continue
            if setbacks == self.ledger.num_setbacks:
                self.did["reads"] += 1
                self.ledger.check_read(shard, key, row, least)

    def begin(self) -> None:
        self.work(*(self._coordinate(n) for n in range(self.rng.randint(1, 4))))
        self.work(*(each() for each in (self._train, self._replay, self._read, self._collect)))
        self._replica, self._late = Replica(self), Replica(self)
        self.run_beside(self._replica.run())
        self.run_beside(self._begin_late(self._late))

    def heal(self) -> None:
        self.network.heal()

    async def settle(self) -> None:
        rng, trainer = self.rng, self.trainer
        assert trainer is not None
        trainer.write({("a", rng.choice(ROWS)): (rng.getrandbits(30), 1)})
        self.replay.write({("b", rng.choice(ROWS)): (rng.getrandbits(30), 1)})
        await trainer.drain()
        await self.replay.drain()
        is_over = False
        while not is_over:
            while self._is_moving:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            await trainer.drain()
            await self._replica.reach_end()
            await self._late.reach_end()
            is_over = not self._is_moving  # a call that comes twice may have begun a move anew

    def check(self) -> None:
        self.ledger.check_end(self._replica)
        self.ledger.check_end(self._late)

    async def _begin_late(self, replica: Replica) -> None:
        """Build a replica amid the moves, of the rows and the sessions that the shards have."""
        await asyncio.sleep(self.rng.uniform(0.5, self.faults_s))
        await replica.run()

    @property
    def _is_moving(self) -> bool:
        return self.failure is None and any(shard.running or not shard.is_serving for shard in self.shards)

    def describe(self) -> str:
        shards = [
            (s.is_serving, sorted(s.running), [(m.move.move_id, str(m.step)) for m in s.partitions.moves])
            for s in self.shards
        ]
        queues = self.trainer and {n: len(q) for n, q in self.trainer.queues.items()}
        return f"{shards}, trainer {queues}"


if __name__ == "__main__":
    sys.exit(main(MoveSchedule, __doc__))
