"""The chaos cycles of a server with a replicated log: nodes with standbys, and three servers of NATS.

Each node reaches the log through links of its own, and the servers of NATS each other, so that any of them can be cut.
Here nothing acked may be lost, whatever happens to one node or to any servers of NATS whose stores stay. While a shard
is taken from a process that still runs, that process is asked for rows all the time: an answer that lacks what was
acked before the question is stale.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from chaos_cycles import TROUBLE_S, TROUBLES, flip_byte, named
from chaos_ledger import Newest
from chaos_nodes import NODE_FAULTS, NodesChaos
from chaos_server import ChaosServer, Place
from chaos_trainer import RAW_ROWS, ROWS
from nats_servers import NatsServer, NatsServers
from processes import WAIT_S, ChaosError
from waiting import pause, wait_until

from headrace.paramserver.log.jetstream.nats_address import NatsLogAddress
from headrace.paramserver.log.jetstream.nats_stream import connect_any
from headrace.paramserver.reading.link import Dial
from headrace.schemas.errors import ProtocolMismatchError, UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.row_records import PRESENT

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from nats_cluster import Links, access_of, nats_cluster

__all__ = ["LAST_FAULTS", "REPLICATED_FAULTS", "ReplicatedChaos"]

_MIB = 1 << 20
_ASK_TIMEOUT_S = 1.0
_POLL_S = 0.1
_FULL_S = 3.0
_ROOM_BYTES = 64 << 10  # of a stream that is about to be full
# Longer than an election of the streams' leaders takes.
_LONGEST_OUTAGE_S = 8.0
_NUM_NATS = 3
_DIAL = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=WAIT_S, role=idl.Role.ADMIN)
_READER = replace(_DIAL, role=idl.Role.READER, timeout_s=WAIT_S / 2)


@dataclass
class _Target:
    """Where a server of NATS listens for the others; known once it is configured."""

    host: str = ""
    port: int = 0


class ReplicatedChaos(NodesChaos):
    """Nodes with standbys, whose log three servers of NATS hold.

    Attributes:
        nats: The servers.
        asked: How often a shard that was being taken over `answered`, or `refused`.
    """

    loses_disks: ClassVar[bool] = False

    def __init__(
        self,
        directory: Path,
        *,
        seed: int,
        num_nodes: int = 3,
        num_shards: int = 4,
        breakage: str = "none",
    ) -> None:
        """Start NATS, and prepare the rest in a directory that is new or empty."""
        self.asked: Counter[str] = Counter()
        self._stack = contextlib.ExitStack()
        try:
            targets = [_Target() for _ in range(_NUM_NATS)]
            self._routes = [self._stack.enter_context(Links(targets)) for _ in targets]

            def route_of(source: int, target: int, listens: tuple[str, int]) -> tuple[str, int]:
                targets[target].host, targets[target].port = listens
                return self._routes[source].addresses[target]

            self.nats: NatsServers = self._stack.enter_context(nats_cluster(directory / "nats", route_of=route_of))
            super().__init__(
                directory,
                seed=seed,
                num_nodes=num_nodes,
                num_shards=num_shards,
                breakage=breakage,
            )
        except BaseException:
            self._stack.close()
            raise

    def _choose_standbys(self, names: Sequence[str]) -> dict[str, list[int]]:
        standbys: dict[str, list[int]] = {name: [] for name in names}
        for shard in range(self._num_shards):
            owner, rounds = shard % self._num_nodes, shard // self._num_nodes
            standbys[names[(owner + 1 + rounds % (self._num_nodes - 1)) % self._num_nodes]].append(shard)
        self._links = {name: self._stack.enter_context(Links(self.nats.servers)) for name in names}
        self._of_cluster = {"log": self.nats.url}
        return standbys

    def _settings_of(self, name: str) -> dict[str, Any]:
        return {"log": self._links[name].url, "log_max_bytes": 512 * _MIB, "log_retention_bytes": 64 * _MIB}

    @property
    def menu(self) -> Mapping[str, Callable[[Any], None]]:
        """All faults, by name."""
        return super().menu | LAST_FAULTS

    def server_of(self, shard: int) -> ChaosServer:
        """Return the node that owns a shard at present."""
        return self._owner(shard)

    def __exit__(self, *exc_info: object) -> None:
        with self._stack:
            super().__exit__(*exc_info)

    def __enter__(self) -> Self:
        try:
            return super().__enter__()
        except BaseException:
            self.__exit__()
            raise

    def summary(self) -> str:
        return f"{super().summary()}\nasked while taken over: {dict(self.asked)}"

    # Faults.

    def kill_leader(self) -> None:
        """`kill -9` the server that leads a shard's stream, and start it again before or after the election."""
        with self._without_nats(self._leader(self._any_number())):
            pause(self.random.uniform(0, _LONGEST_OUTAGE_S))

    def kill_two_nats(self) -> None:
        """`kill -9` a majority of the servers of NATS, and start it again."""
        with self._without_nats(*self.random.sample(self.nats.servers, 2)):
            pause(self.random.uniform(0, _LONGEST_OUTAGE_S))

    def kill_all_nats(self) -> None:
        """`kill -9` all servers of NATS at once, and start them again."""
        with self._without_nats(*self.nats.servers):
            pause(self.random.uniform(0, TROUBLE_S))

    def pause_leader(self) -> None:
        """Stop the server that leads a shard's stream: when it goes on, it may answer from its old state."""
        server = self._leader(self._any_number())
        server.pause()
        try:
            pause(self.random.uniform(0, _LONGEST_OUTAGE_S))
        finally:
            server.resume()

    def pause_past_lease(self) -> None:
        """Stop a shard's owner until a standby has taken over; when it goes on it answers nothing from before."""
        shard = self._any_number()
        owner = self._owner(shard)
        with self._asking(owner, shard), owner.paused(shard):
            self._owner(shard, but=owner)

    def cut_engine(self) -> None:
        """Cut a node from NATS until its shard is taken over."""
        shard = self._any_number()
        owner = self._owner(shard)
        with self._asking(owner, shard), self._cut(owner):
            self._owner(shard, but=owner)

    def cut_minority(self) -> None:
        """Cut one server of NATS from the others, and with it a node, until that node's shard is taken over."""
        shard = self._any_number()
        owner, number = self._owner(shard), self.random.randrange(_NUM_NATS)
        with self._asking(owner, shard), self._isolated(number, owner):
            self._owner(shard, but=owner)

    def drop_acks(self) -> None:
        """Drop what NATS says to a node for a while; what the node says arrives."""
        links = self._links[str(self._owner(self._any_number()).node)]
        links.drop_replies()
        pause(self.random.uniform(0, 3.0))
        links.mend()

    def only_the_zombie(self) -> None:
        """Cut a node from NATS until its shard is taken over; then clients reach nobody but this node for a while."""
        shard = self._any_number()
        owner = self._owner(shard)
        with self._cut(owner):
            self._owner(shard, but=owner)
            with (
                self._asking(owner, shard),
                self.proxy.blocked(*(server.place.host for server in self.servers if server is not owner)),
            ):
                pause(2.0)

    def cut_clients(self) -> None:
        """Cut all clients, and the other nodes, from a node that goes on."""
        with self.proxy.blocked(self._owner(self._any_number()).place.host):
            pause(self.random.uniform(TROUBLE_S, 3.0))

    def kill_node(self) -> None:
        """`kill -9` a node, and start it again when its shard was taken over."""
        shard = self._any_number()
        owner = self._owner(shard)
        owner.kill()
        self._owner(shard, but=owner)
        owner.start()

    def kill_node_and_leader(self) -> None:
        """`kill -9` a node with the server that leads its shard's stream."""
        shard = self._any_number()
        owner = self._owner(shard)
        with self._without_nats(self._leader(shard)):
            owner.kill()
            self._owner(shard, but=owner)
        owner.start()

    def lose_node(self) -> None:
        """`kill -9` a node and remove its directory; it begins again, before or after the takeover.

        It begins with nothing, or with what the object store has: it must, where a stream has lost its first records.
        """
        shard = self._any_number()
        owner = self._owner(shard)
        owner.kill()
        shutil.rmtree(owner.data)
        if self.random.random() < 0.5:
            self._owner(shard, but=owner)
        self._begin(owner)
        owner.start()

    def lose_node_for_good(self) -> None:
        """`kill -9` a node and remove its directory; nothing comes in its place. The last fault of a run."""
        owner = self._owner(self._any_number())
        owner.kill()
        shutil.rmtree(owner.data)

    def promote_standby(self) -> None:
        """Move a shard to its standby, as an operator does."""
        shard = self._any_number()
        owner = self._owner(shard)
        target = next(server for server in self._copies(shard) if server is not owner)
        # The standby may have been started a moment ago; then the command says so, and the owner goes on.
        self._command("promote", "--shard", shard, "--to", target.node, "--server", self.address, num_tries=3)

    def start_twice(self) -> None:
        """Start a node a second time, with a directory of its own: one of the two owns each shard."""
        owner = self._owner(self._any_number())
        name = str(owner.node)
        elsewhere = next(place for place in self._places[name] if place.host != owner.place.host)
        self._num_copies += 1
        place = Place(elsewhere.host, owner.place.proxy_host, owner.place.port)
        second = self._node(self._directory / f"{name}-{self._num_copies}", name, place)
        self._begin(second)
        second.start()
        try:
            pause(self.random.uniform(0, 2.0))
        finally:
            second.close()
        shutil.rmtree(second.data)

    def fill_stream(self) -> None:
        """Let a shard's stream be full for a while: it takes nothing for longer than its owner is ever silent."""
        stream = self._stream(self._any_number())
        before = self._bound(stream)
        last_seq, now_s = -1, time.monotonic()
        since_s = bounded_s = now_s

        def is_full() -> bool:
            nonlocal last_seq, since_s, bounded_s
            seq, now_s = self._nats("INFO", stream)["state"]["last_seq"], time.monotonic()
            if seq != last_seq:
                last_seq, since_s = seq, now_s
            if now_s > bounded_s + _LONGEST_OUTAGE_S:  # its records were archived and removed meanwhile
                self._bound(stream)
                bounded_s = now_s
            return now_s > since_s + _FULL_S

        try:
            wait_until(is_full, f"a full {stream}", within_s=WAIT_S, poll_s=_POLL_S)
        finally:
            self._bound(stream, before)

    def flip_block_byte(self) -> None:
        """Flip a byte of a stream's block file at one server that does not lead it, and let that server lead it."""
        stream = self._stream(self._any_number())
        leader = self.nats.wait_leader(stream)
        victim = self.random.choice([server for server in self.nats.servers if server is not leader])
        with self._without_nats(victim):
            path = self.random.choice(sorted(victim.store.rglob(f"{stream}/msgs/*.blk")))
            at = self.random.randrange(path.stat().st_size)
            flip_byte(path, at)
        self.faults[f"byte {at} of {path.parent.parent.name}/{path.name}"] += 1
        order = {"placement": {"preferred": victim.name}}  # it may decline
        self._nats("LEADER.STEPDOWN", stream, order)
        self.faults["led by the damaged server"] += self.nats.wait_leader(stream) is victim

    # What they are made of.

    def _any_number(self) -> int:
        return self.random.randrange(self._num_shards)

    def _stream(self, shard: int) -> str:
        return NatsLogAddress.parse(self.nats.url).stream_name(self._server_id, shard)

    def _leader(self, shard: int) -> NatsServer:
        return self.nats.wait_leader(self._stream(shard))

    def _copies(self, shard: int) -> list[ChaosServer]:
        return [server for server in self.servers if shard in server.shards]

    def _owner(self, shard: int, *, but: ChaosServer | None = None) -> ChaosServer:
        """Return the node, other than `but`, that owns a shard, once there is one."""
        copies = [server for server in self._copies(shard) if server is not but]

        def find() -> ChaosServer | None:
            terms = asyncio.run(_terms_of(copies, shard))
            return copies[terms.index(max(terms))] if max(terms) > 0 else None

        def describe() -> str:
            said = "\n".join(f"node {server.node}: {server.tail()}" for server in copies)
            return f"nobody has taken shard {shard} over: {said}: that"

        owner = wait_until(find, describe, within_s=WAIT_S, poll_s=_POLL_S)
        assert owner is not None
        return owner

    @contextlib.contextmanager
    def _without_nats(self, *servers: NatsServer) -> Iterator[None]:
        for server in servers:
            server.kill()
        try:
            yield
        finally:
            for server in servers:
                server.start()
            for server in servers:
                server.wait_ready()

    @contextlib.contextmanager
    def _cut(self, server: ChaosServer) -> Iterator[None]:
        """Cut a node from NATS in one of three ways."""
        links = self._links[str(server.node)]
        self.random.choice((links.cut, links.silence, links.drop_replies))()
        try:
            yield
        finally:
            links.mend()

    @contextlib.contextmanager
    def _isolated(self, number: int, server: ChaosServer) -> Iterator[None]:
        """Cut a server of NATS from the others, and a node from those."""
        others = [other for other in range(_NUM_NATS) if other != number]
        ways = [(self._links[str(server.node)], others), (self._routes[number], others)]
        ways += [(self._routes[other], [number]) for other in others]
        how = self.random.choice(("cut", "silence"))
        for links, numbers in ways:
            getattr(links, how)(*numbers)
        try:
            yield
        finally:
            for links, _ in ways:
                links.mend()

    @contextlib.contextmanager
    def _asking(self, server: ChaosServer, shard: int) -> Iterator[None]:
        """Ask a copy of a shard for rows all the time, directly; raise if an answer was stale."""
        port = server.place.port + server.shards.index(shard)
        asker = _Asker(self, server.place.host, port, shard)
        asker.start()
        try:
            yield
        finally:
            asker.finish()
        self.asked += asker.counts
        self.found += Counter(stale=asker.counts["stale"])
        if asker.lines:
            raise ChaosError(f"shard {shard} at node {server.node}: " + "; ".join(asker.lines[:5]))

    def _nats(self, what: str, stream: str, order: Any = None) -> Any:
        """Return what NATS answers to a request about a stream."""

        async def ask() -> Any:
            client = await connect_any(access_of(self.nats))
            try:
                return await client.ask(f"STREAM.{what}", stream, *([order] if order else []), timeout_s=WAIT_S)
            finally:
                await client.close()

        return asyncio.run(ask())

    def _bound(self, stream: str, max_bytes: int | None = None) -> int:
        """Set the bound of a stream, by default a little more than it has; return the one before."""
        found = self._nats("INFO", stream)
        wanted = found["state"]["bytes"] + _ROOM_BYTES if max_bytes is None else max_bytes
        answer = self._nats("UPDATE", stream, found["config"] | {"max_bytes": wanted})
        if "error" in answer:
            raise ChaosError(f"the bound of {stream} cannot be {wanted}: {answer['error']}")
        return int(found["config"]["max_bytes"])

    def _begin(self, server: ChaosServer) -> None:
        """Make a node's missing directory from the object store, or leave it to the streams where they have all."""
        streams = [self._stream(shard) for shard in server.shards]
        lacks_begin = any(self._nats("INFO", stream)["state"]["first_seq"] > 1 for stream in streams)
        if lacks_begin or self.random.random() < 0.5:
            of_node = ("--cluster", self._cluster_file, "--node", server.node, "--data", server.data)
            self._command("restore", self._objects.url, *of_node)
            self.faults["node made from the object store"] += 1


async def _terms_of(copies: Sequence[ChaosServer], shard: int) -> list[int]:
    """Return the term in which each of some copies owns a shard; 0 for one that does not."""

    async def term_of(server: ChaosServer) -> int:
        with contextlib.suppress(UnavailableError, TimeoutError):
            async with asyncio.timeout(_ASK_TIMEOUT_S):  # as an admin, whom a standby answers too
                hello = await _DIAL.ask(server.place.host, server.place.port + server.shards.index(shard))
                return int(hello.term) if hello.shard == shard else 0
        return 0

    return await asyncio.gather(*(term_of(server) for server in copies))


class _Asker:
    """Asks one copy of a shard for rows, over and over, and compares with what was acked before each question."""

    def __init__(self, chaos: ReplicatedChaos, host: str, port: int, shard: int) -> None:
        self.counts: Counter[str] = Counter()
        self.lines: list[str] = []
        self._chaos, self._host, self._port, self._shard = chaos, host, port, shard
        self._done = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def finish(self) -> None:
        """Wait until all questions are answered, or refused."""
        self._done.wait(2 * TROUBLE_S)
        self._done.set()
        self._thread.join(2 * WAIT_S)
        assert not self._thread.is_alive(), "a question is neither answered nor refused"

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                number = 0
                while not self._done.is_set():
                    tasks.create_task(self._ask(list(ROWS)[number % len(ROWS)]))
                    number += 1
                    await asyncio.sleep(_POLL_S)
        except* Exception as failures:
            self.lines.append(f"the question failed: {failures.exceptions[0]!r}")

    async def _ask(self, fqn: str) -> None:
        with self._chaos.lock:  # what was acked until now is in every sound answer to what is asked from now on
            acked = self._chaos.ledger.newest(fqn, ROWS[fqn])
        try:
            async with asyncio.timeout(WAIT_S / 2):
                client, hello = await _READER.connect(self._host, self._port)
            async with asyncio.timeout(WAIT_S / 2), client:
                is_own = shards_of_rows(table_seed(fqn), acked.row_ids, len(hello.shards)) == self._shard
                acked = Newest(*(each[is_own] for each in acked))
                if not acked.row_ids.size:
                    return
                request = idl.GetEmbeddingsRequest(
                    fqn=fqn, row_ids=acked.row_ids.tobytes(), with_states=False, with_versions=True
                )
                reply = await client.get_embeddings(request, timeout_s=WAIT_S / 2)
        # A standby says hello, and gives no rows to whoever wants its owner's.
        except (UnavailableError, ProtocolMismatchError, TimeoutError):
            self.counts["refused"] += 1
            return
        self.counts["answered"] += 1
        epochs, steps = (np.frombuffer(data, np.int64) for data in (reply.epochs, reply.steps))
        is_stale = (epochs < acked.epochs) | ((epochs == acked.epochs) & (steps < acked.steps))
        if fqn in RAW_ROWS:  # a row that is missing was deleted, now or since
            is_stale &= np.frombuffer(reply.presence, np.uint8) == PRESENT
        if is_stale.any():
            at = int(np.flatnonzero(is_stale)[0])
            self.counts["stale"] += int(is_stale.sum())
            self.lines.append(
                f"stale: {fqn} row {acked.row_ids[at]}: acked ({acked.epochs[at]}, {acked.steps[at]}), told "
                f"({epochs[at]}, {steps[at]}); {int(is_stale.sum())} such rows"
            )


_OF_SERVERS = (
    "kill_shard kill_server kill_trainer pause_trainer kill_both grow pause_shard kill_served kill_trainer_and_served"
    " pause_served trouble_and_kill kill_all pause_node store_away_and_kill store_resets_and_snapshot snapshot"
)
_OF_LOGS = (
    "kill_leader kill_two_nats kill_all_nats pause_leader pause_past_lease cut_engine cut_minority drop_acks"
    " only_the_zombie cut_clients kill_node kill_node_and_leader lose_node promote_standby start_twice fill_stream"
)
REPLICATED_FAULTS = (
    {name: NODE_FAULTS[name] for name in (*TROUBLES, "store_away")}
    | named(ReplicatedChaos, _OF_SERVERS)
    | named(ReplicatedChaos, _OF_LOGS)
)
ReplicatedChaos.faults_of_runs = REPLICATED_FAULTS
LAST_FAULTS = named(ReplicatedChaos, "lose_node_for_good flip_block_byte")
"""Those that are no part of a run: nothing brings back what they take from the others."""
