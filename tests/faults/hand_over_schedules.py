"""Seeded schedules of hand-overs: a shard goes from server to server while processes, machines and networks fail.

    python tests/faults/hand_over_schedules.py --schedules 20000 --seed 1 --jobs 2

A schedule is one seed: two or three servers of a shard that follow each other, two trainers, a reader, an operator who
promotes, aborts and forces at random moments, and in some an object store that has the claims. The servers are the
product's, from the Thrift server down to the log's interface, in virtual time (`simulated_servers.py`). At its end all
is well again; `hand_over_ledger.py` checks what must be true. `--schedules 1 --seed SEED` repeats a finding.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "support")]

from hand_over_ledger import Account, HandOverLedger
from hellos import hello_of_nobody, hello_of_writer
from host_loop import Host, HostLoop
from set_embeddings import delta_of, request_of
from simulated_servers import SimulatedServer, World, surroundings
from simulator import Finding, Schedule, main

from headrace.paramserver.log.interface import KIND_BATCH, note_of
from headrace.paramserver.reading.link import Dial, ShardLink
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.shard_places import STANDBY, ShardPlaces
from headrace.paramserver.shard.follower_service import FollowingShard
from headrace.paramserver.shard.service import Shard
from headrace.schemas.errors import (
    HeadraceError,
    OverloadedError,
    ReshardedError,
    SequenceGapError,
    StorageError,
    UnavailableError,
)
from headrace.schemas.idl import idl
from headrace.schemas.tables import DType, TableSpec
from headrace.scripts.commands.promote import promote_shard

__all__ = ["ADMIN_DIAL", "SPEC", "HandOverSchedule", "read_rows"]

ADMIN_DIAL = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=5.0, role=idl.Role.ADMIN)
SPEC = TableSpec(fqn="items.weight", num_rows=0, dim=1, dtype=DType.FLOAT32)
_NUM_TRAINERS, _NUM_ROWS, _WINDOW = 2, 6, 4
_PATIENCE_S = 8.0
_LOOK_S = 3.0


class HandOverSchedule(Schedule):
    """One seed: servers, clients, operator, what befalls them, and the ledger."""

    least_faults, faults_s, settle_s = 1, 9.0, 240.0
    surroundings = surroundings
    loop_type: ClassVar[Any] = HostLoop
    chance_of_claims: ClassVar[float] = 0.35
    may_lose: ClassVar[bool] = True  # machines, for good

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng, loop = self.rng, asyncio.get_running_loop()
        assert isinstance(loop, HostLoop)
        loop.begin_anew(rng)
        loop.latency_s = rng.choice(((0.0005, 0.002), (0.001, 0.05), (0.005, 0.3)))
        loop.thread_s = rng.choice((0.005, 0.1))
        self.loop, self.world, self.ledger = loop, World(), HandOverLedger()
        self.has_claims = rng.random() < self.chance_of_claims
        first = self.add_server(None)
        second = self.add_server([first])
        if rng.random() < 0.6:
            self.add_server(rng.choice(([first], [second], [second, first])))
        self._chance = self.draw_rng()  # of the operator
        self._promoting = Counter[SimulatedServer]()
        self.trainers = [_Trainer(self, rank) for rank in range(_NUM_TRAINERS)]
        self.final: tuple[dict[int, float | None], dict[int, tuple[str, int]]] | None = None

    def draw_rng(self) -> random.Random:
        """Return a source of chance for one who takes part: who draws first must not matter."""
        return random.Random(self.rng.getrandbits(64))

    def add_server(self, sources: list[SimulatedServer] | None) -> SimulatedServer:
        """Add a server, which follows others."""
        if sources is None:
            self.servers: list[SimulatedServer] = []
        number = len(self.servers)
        follow = None if sources is None else ",".join(each.address for each in sources)
        server = SimulatedServer(self.loop, "abc"[number], 7001 + number, follow=follow, has_claims=self.has_claims)
        self.servers.append(server)
        return server

    def begin(self) -> None:
        for server in self.servers:
            self.start(server)
        for trainer in self.trainers:
            self.work(self._in_host(trainer.name, trainer.run()))
        for server in self.servers:
            self.run_beside(self._in_host("reader", _Reader(self, server).run()))
        self.run_beside(self._in_host("operator", self._operate()))

    def start(self, server: SimulatedServer) -> None:
        """Start a server that is down, unless its machine is lost."""
        if server.host is None and not server.is_lost:
            server.start()
            server.running.add_done_callback(partial(self._take_end, server))

    def _take_end(self, server: SimulatedServer, task: asyncio.Future[Any]) -> None:
        if isinstance(server.fatal, StorageError):
            self.fail(Finding(f"{server.name} has ended: {server.fatal}"))
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, OSError):
            self.fail(error)

    async def _in_host(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        await Host(self.loop, name).run(work)

    # What befalls them.

    def befall(self) -> None:
        rng, loop = self.rng, self.loop
        server = rng.choice(self.servers)
        match rng.randrange(8):
            case 0 | 1:
                self._kill(server)
            case 2 | 3:
                self._pause(server)
            case 4 | 5:
                names = [each.name for each in (*self.servers, *self.trainers)] + ["operator", "reader"]
                others = [name for name in rng.sample(names, rng.randint(1, 3)) if name != server.name]
                self._cut(server.name, *others, longest_s=rng.choice((0.5, 3.0, 8.0)))
            case 6:
                loop.drop_connections(server.name)
            case _:
                claims = self.world.claims
                claims.is_away = True
                loop.call_later(rng.choice((1.0, 8.0)) * rng.random(), setattr, claims, "is_away", False)

    def _kill(self, server: SimulatedServer) -> None:
        rng = self.rng
        self.did["kills"] += 1
        server.kill()
        self.loop.call_later(rng.choice((0.05, 1.0, 7.0)) * rng.random(), self.start, server)

    def _pause(self, server: SimulatedServer) -> None:
        rng = self.rng
        if (host := server.host) is not None:
            self.did["pauses"] += 1
            host.pause()
            self.loop.call_later(rng.choice((0.5, 2.0, 8.0)) * rng.random(), host.resume)

    def _cut(self, name: str, *others: str, longest_s: float) -> None:
        self.did["cuts"] += 1
        loop, cuts = self.loop, {frozenset((name, other)) for other in others}
        loop.cuts |= cuts
        loop.call_later(longest_s * self.rng.random(), loop.cuts.difference_update, cuts)

    def _strike(self, target: SimulatedServer) -> None:
        """Let something fail while a server takes over."""
        owners = [each for each in self.servers if isinstance(each.shard, Shard) and each is not target]
        if self.is_settling or not owners:
            return
        owner = self.rng.choice(owners)
        match self.rng.randrange(6):
            case 0 | 1:
                self._kill(owner)
            case 2:
                self._kill(target)
            case 3:
                self._pause(self.rng.choice((owner, target)))
            case 4:
                self._cut(owner.name, target.name, longest_s=8.0)
            case _:
                self.befall()

    def heal(self) -> None:
        self.loop.cuts.clear()
        self.world.claims.is_away = False
        for server in self.servers:
            if server.host is not None and server.host.is_paused:
                server.host.resume()
            self.start(server)

    # The operator.

    async def _operate(self) -> None:
        rng = self._chance
        for _ in range(rng.randint(1, 5)):
            await asyncio.sleep(rng.uniform(0.3, 3.0))
            if self.is_settling:
                break
            followers = [each for each in self.servers if isinstance(each.shard, FollowingShard)]
            server = rng.choice(followers if followers and rng.random() < 0.8 else self.servers)
            match rng.randrange(12):
                case 0 | 1 | 2 | 3 | 4 | 5:
                    if rng.random() < 0.6:
                        strike_s = rng.choice((0.1, 1.0, 4.0)) * rng.random()
                        self.loop.call_later(strike_s, self._strike, server)
                    self.run_beside(self._in_host("operator", self._promote(server)))
                    if rng.random() < 0.3:
                        self.run_beside(self._in_host("operator", self._change_its_mind()))
                case 6 if self.may_lose:
                    await self._try(self._give_up_follower(server))
                case 7 | 8 | 9 if self.may_lose:
                    await self._try(self._force(server))
                case _:
                    await self._try(self._replace(server))
        while True:
            await asyncio.sleep(_LOOK_S)
            if self.is_settling:
                await self._try(self._mend())

    async def _try(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do something; return whether it was not refused."""
        try:
            async with asyncio.timeout(30):
                await work
        except (HeadraceError, TimeoutError):
            self.did["refusals"] += 1
            return False
        return True

    async def _with_link(self, server: SimulatedServer, work: Callable[[ShardLink], Awaitable[Any]]) -> Any:
        link = ShardLink(ADMIN_DIAL, "127.0.0.1", server.port)
        try:
            await link.refresh()
            return await work(link)
        finally:
            await link.close()

    async def _promote(self, server: SimulatedServer) -> None:
        await self._try(self._do_promote(server))

    async def _do_promote(self, server: SimulatedServer) -> None:
        self.did["offers"] += 1
        self._promoting[server] += 1
        try:
            await self._with_link(server, lambda link: promote_shard(ADMIN_DIAL, link, 0))
        finally:
            self._promoting[server] -= 1
        self.did["promoted"] += 1

    async def _abort(self, server: SimulatedServer, *, forces: bool) -> None:
        request = idl.PromoteShardRequest(shard=0, aborts=True, forces=forces or None)
        await self._with_link(server, lambda link: link.promote_shard(request))
        self.did["aborts"] += 1

    async def _change_its_mind(self) -> None:
        await asyncio.sleep(self._chance.choice((0.3, 2.5)) * self._chance.random())
        for server in self.servers:
            if isinstance(server.shard, Shard):
                await self._try(self._abort(server, forces=False))

    async def _give_up_follower(self, server: SimulatedServer) -> None:
        """Let an owner go on whose follower is lost for good, and has never taken over."""
        if server.config.follow is None or isinstance(server.shard, Shard) or self._only_owner() is None:
            return
        if not _has_accepted(server):
            server.lose()
            for other in self.servers:
                if isinstance(other.shard, Shard):
                    await self._try(self._abort(other, forces=True))

    async def _force(self, server: SimulatedServer) -> None:
        """Let a follower take over from a source that is lost for good; with claims it may only seem so."""
        following, source = server.shard, self._only_owner()
        if not isinstance(following, FollowingShard) or source is None:
            return
        status = await self._with_link(server, lambda link: link.status())
        if status.following is None or status.following.source != source.address:
            return  # only who follows the owner itself can take over
        if self._chance.random() < 0.7:  # it lacks what others have
            cut = {frozenset((source.name, server.name))}
            self.loop.cuts |= cut
            await asyncio.sleep(self._chance.uniform(0.3, 2.5))
            self.loop.cuts -= cut
        if server.shard is not following or self._only_owner() is not source or self._others_may_open(server):
            return
        if self.has_claims and self._chance.random() < 0.5:
            cut = {frozenset((source.name, server.name))}
            self.loop.cuts |= cut
            self.loop.call_later(self._chance.uniform(7, 15), self.loop.cuts.difference_update, cut)
            self.ledger.has_lost = True
        else:
            source.lose()
        for other in self.servers:  # it may come back behind where it and the new owner part
            if isinstance(other.shard, FollowingShard) and other is not server and self._chance.random() < 0.5:
                self._kill(other)
        await self._take_by_force(server)

    def _only_owner(self) -> SimulatedServer | None:
        owners = [each for each in self.servers if isinstance(each.shard, Shard)]
        return owners[0] if len(owners) == 1 else None

    def _others_may_open(self, server: SimulatedServer) -> bool:
        """Return whether somebody else may have been offered the shard: then nobody is forced, by the rules."""
        for other in self.servers:
            if other is not server and not other.is_lost and not isinstance(other.shard, Shard):
                if other.shard is None or self._promoting[other]:
                    return True
                log = other.shard.log
                last = list(log.read(log.last_seq)) if log.last_seq >= log.first_seq else []
                if last and note_of(last[0].header) == "offer":
                    return True
        return False

    async def _take_by_force(self, server: SimulatedServer) -> None:
        self.ledger.note_force()
        request = idl.PromoteShardRequest(shard=0, forces=True)
        await self._with_link(server, lambda link: link.promote_shard(request))
        self.did["forced"] += 1

    async def _replace(self, server: SimulatedServer) -> None:
        """Let a machine that has nothing more begin anew, as a follower of the owner."""
        owners = [each for each in self.servers if each is not server and isinstance(each.shard, Shard)]
        has_nothing = server.is_lost or (isinstance(server.shard, Shard) and await self.leads_on(server.shard))
        if owners and has_nothing:
            server.kill()
            server.use_new_directory(self._chance.choice(owners).address)
            self.start(server)
            self.did["replaced"] += 1

    async def _mend(self) -> None:
        """Do what the rules leave to the operator, once all is well."""
        hellos: dict[SimulatedServer, Any] = {}
        for server in self.servers:
            self.start(server)
            if server.host is not None:
                await self._try(self._hello(server, hellos))
        owners = [each for each, hello in hellos.items() if hello.shard == 0 and isinstance(each.shard, Shard)]
        followers = sorted(
            (each for each in self.servers if isinstance(each.shard, FollowingShard)),
            key=lambda each: -each.shard.log.last_seq,
        )
        are_known = all(each.is_lost or each in hellos or each.fatal is not None for each in self.servers)
        if not owners and are_known:
            for server in followers:
                if await self._try(self._take_by_force(server)):
                    break
        elif any(each.is_lost for each in self.servers):
            for server in owners:
                await self._try(self._abort(server, forces=True))
        if len(owners) == 1 and (owner := owners[0].shard) is not None:
            for server in self.servers:
                is_behind = server.shard is None or server.shard.log.last_seq < owner.log.last_seq
                if server.config.follow is not None and is_behind and not isinstance(server.shard, Shard):
                    self._point(server, owners[0])

    def _point(self, server: SimulatedServer, owner: SimulatedServer) -> None:
        """Let a follower whose source is gone follow the owner."""
        if server.config.follow != owner.address:
            server.kill()
            server.follow(owner.address)
            self.start(server)

    async def _hello(self, server: SimulatedServer, hellos: dict[SimulatedServer, Any]) -> None:
        hellos[server] = await self._with_link(server, lambda link: link.refresh())

    # The end.

    async def settle(self) -> None:
        """Wait until one server is the owner, and all others have what it has."""
        await self._in_host("operator", self._settle())

    async def _settle(self) -> None:
        has_ended = False
        while not has_ended:
            await asyncio.sleep(1.0)
            with contextlib.suppress(UnavailableError):
                has_ended = await self.end()

    async def end(self) -> bool:
        """Return whether one owner has all, and all others have what it has; note it then."""
        shards = [each.shard for each in self.servers if each.host is not None]
        owners = [each for each in shards if isinstance(each, Shard) and not await self.leads_on(each)]
        followers = [each for each in shards if isinstance(each, FollowingShard)]
        if None in shards or len(owners) != 1:
            return False
        (owner,) = owners
        server = next(each for each in self.servers if each.shard is owner)
        for trainer in self.trainers:
            await trainer.finish(server)
        last_seq = owner.log.last_seq
        mark = owner.log.nonce_of(last_seq)
        if any((each.log.last_seq, each.log.nonce_of(last_seq)) != (last_seq, mark) for each in followers):
            return False
        await owner.applied()
        for follower in followers:
            await follower.applied()
            if _facts(owner, follower) != _facts(follower, owner):
                raise Finding("a follower has another log than the owner")
            if dict(follower.store.scan(b"")) != dict(owner.store.scan(b"")):
                raise Finding("a follower has other rows than the owner")
        values = await read_rows(server, self.ledger.rows)
        placed = {
            record.seq: (record.header["client"], record.header["client_seq"])
            for record in owner.log.read(owner.log.first_seq)
            if record.header["kind"] == KIND_BATCH
        }
        self.final = dict(zip(self.ledger.rows, values, strict=True)), placed
        return True

    async def leads_on(self, shard: Shard) -> bool:
        """Return whether a server says that the shard is elsewhere; `ReshardedError` once all shards are."""
        server = next(each for each in self.servers if each.shard is shard)
        client = await ParamServerClient.connect("127.0.0.1", server.port)
        async with client:
            return bool((await client.hello(hello_of_nobody())).shard == STANDBY)

    def check(self) -> None:
        assert self.final is not None
        self.ledger.check_end(*self.final)
        self.did.update(acked=sum(each.account.num_acked for each in self.trainers), reads=self.ledger.num_reads)

    def describe(self) -> str:
        return "; ".join(
            f"{each.name}: {'lost' if each.is_lost else type(each.shard).__name__}, {each.fatal or each.failures[-1:]}"
            for each in self.servers
        )


def _has_accepted(server: SimulatedServer) -> bool:
    """Return whether a follower's directory says that it takes over."""
    path = server.config.directory / "follow.json"
    return path.exists() and json.loads(path.read_bytes())["accepted"] is not None


def _facts(shard: Shard | FollowingShard, other: Shard | FollowingShard) -> list[Any]:
    """Return all records that both may have."""
    from_seq = max(shard.log.first_seq, other.log.first_seq)
    return [(r.seq, shard.log.nonce_of(r.seq), r.epoch, r.header, bytes(r.body)) for r in shard.log.read(from_seq)]


async def read_rows(server: SimulatedServer, rows: list[int]) -> list[float | None]:
    """Return rows as a server answers them."""
    client = await ParamServerClient.connect("127.0.0.1", server.port)
    async with client:
        await client.hello(hello_of_nobody())
        return await _rows_at(client, rows)


async def _rows_at(client: ParamServerClient, rows: list[int]) -> list[float | None]:
    request = idl.GetEmbeddingsRequest(
        fqn=SPEC.fqn, row_ids=np.asarray(rows, "<i8"), with_states=False, with_versions=False
    )
    reply = await client.get_embeddings(request, timeout_s=2.0)
    weights = np.frombuffer(reply.weights, "<f4")
    return [float(w) if is_there else None for w, is_there in zip(weights, bytes(reply.presence), strict=True)]


class _Trainer:
    """Sends batches in windows, goes to whoever takes them, and resumes where the owner says."""

    def __init__(self, schedule: HandOverSchedule, rank: int) -> None:
        self.name = f"rank{rank}"
        self.account = Account(self.name)
        self._schedule, self._rank, self._rng = schedule, rank, schedule.draw_rng()
        self._requests: list[Any] = []
        self._places: ShardPlaces | None = None
        self._has_moved = False  # to another server, where its story is another one
        self._stay_s = self._rng.choice((100.0, 100.0, 3.0, 1.0))  # with one server, at most

    async def run(self) -> None:
        schedule = self._schedule
        self._making = asyncio.create_task(self._make())
        while not self._is_over:
            server = self._rng.choice(schedule.servers)
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    client = await ParamServerClient.connect("127.0.0.1", server.port)
                async with client:
                    await self._send_to(client, server)
            except ReshardedError:
                self._has_moved = True
                self._making.cancel()
            except (UnavailableError, OverloadedError, SequenceGapError, TimeoutError):
                schedule.did["resends"] += 1
            await asyncio.sleep(0.05)

    async def finish(self, server: SimulatedServer) -> None:
        """Ask the last owner what it has, and send what it lacks."""
        client = await ParamServerClient.connect("127.0.0.1", server.port)
        async with client:
            await self._send_to(client, server)

    async def _make(self) -> None:
        schedule, rng = self._schedule, self._rng
        pace_s = rng.choice((0.4, 1.0, 3.0))
        while not schedule.is_settling:
            await asyncio.sleep(pace_s * rng.random())
            number = len(self._requests) + 1
            rows = [self._rank * 100 + each for each in rng.sample(range(_NUM_ROWS), rng.randint(1, 3))]
            deleted = [rows.pop()] if len(rows) > 1 and rng.random() < 0.3 else []
            schedule.ledger.note_made(
                self.account, number, dict.fromkeys(rows, float(number)) | dict.fromkeys(deleted, None)
            )
            more = {"deleted_row_ids": np.asarray(deleted, "<i8")} if deleted else {}
            delta = delta_of(SPEC, rows, float(number), **more)
            self._requests.append(request_of(delta, client_seq=number, client=self.name))

    @property
    def _is_over(self) -> bool:
        return self._has_moved or (self._making.done() and self.account.num_acked == len(self._requests))

    async def _send_to(self, client: ParamServerClient, server: SimulatedServer) -> None:
        ledger, account = self._schedule.ledger, self.account
        client.places = self._places
        hello = await client.hello(
            hello_of_writer(SPEC, client=self.name, rank=self._rank, world_size=_NUM_TRAINERS), timeout_s=_PATIENCE_S
        )
        if self._places is None:
            self._places = ShardPlaces.of_hello(hello, "127.0.0.1", server.port)
        if hello.shard != 0:
            return
        ledger.note_hello(
            account, hello.last_client_seq, term=hello.term or 0, may_be_set_back=bool(hello.may_be_set_back)
        )
        sending: dict[asyncio.Task[None], None] = {}
        next_number = hello.last_client_seq + 1
        loop = asyncio.get_running_loop()
        leaves_s = math.inf if self._schedule.is_settling else loop.time() + self._rng.uniform(0.0, self._stay_s)
        try:
            while not self._is_over and loop.time() < leaves_s:
                while next_number <= len(self._requests) and len(sending) < _WINDOW:
                    account.num_sent = max(account.num_sent, next_number)
                    sending[asyncio.create_task(self._send(client, next_number))] = None
                    next_number += 1
                if sending:
                    await asyncio.wait(sending, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.sleep(0.1)
                for task in [task for task in sending if task.done()]:
                    del sending[task]
                    task.result()
        finally:
            for task in sending:
                task.cancel()
            if sending:
                await asyncio.wait(sending)

    async def _send(self, client: ParamServerClient, number: int) -> None:
        reply = await client.set_embeddings(self._requests[number - 1], timeout_s=_PATIENCE_S)
        self._schedule.ledger.note_ack(
            self.account, number, term=reply.term or 0, seq=reply.seq, is_duplicate=reply.is_duplicate
        )


class _Reader:
    """Asks a server for rows all the time, while it is an owner."""

    def __init__(self, schedule: HandOverSchedule, server: SimulatedServer) -> None:
        self._schedule, self._server, self._rng = schedule, server, schedule.draw_rng()

    async def run(self) -> None:
        while True:
            try:
                client = await ParamServerClient.connect("127.0.0.1", self._server.port, timeout_s=1.0)
                async with client:
                    hello = await client.hello(hello_of_nobody(), timeout_s=1.0)
                    while hello.knowledge_age_ms is None and hello.shard == 0:
                        if hello.tables:
                            await self._read(client)
                        await self._pause()
                        hello = hello if hello.tables else await client.hello(hello_of_nobody(), timeout_s=1.0)
            except HeadraceError:
                pass
            await self._pause()

    async def _pause(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.1, 0.8))

    async def _read(self, client: ParamServerClient) -> None:
        ledger = self._schedule.ledger
        rows, acked, num_forced = ledger.rows, ledger.acked(), ledger.num_forced
        values = await _rows_at(client, rows)
        if num_forced == ledger.num_forced and not ledger.has_lost:
            ledger.check_answer(self._server.name, rows, values, acked)


if __name__ == "__main__":
    sys.exit(main(HandOverSchedule, __doc__))
