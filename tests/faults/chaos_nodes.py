"""The chaos cycles of a server on several hosts: nodes with an object store, and a follower, whose disks may be lost.

Each node has two addresses of the loopback range, of which one is in the cluster file, and so has the follower. A
node's lost disk is its directory moved away; `headrace restore` makes it again while the trainer goes on. Then the
ledger forgets what the node's shards had acked behind the end of the archive, which the names of its objects tell. The
trainer sends these rows again, and the comparison after its next flush excuses nothing.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import re
import shutil
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self
from unittest import mock

from chaos_cycles import FAULTS, TROUBLE_S, Chaos, named
from chaos_follower import ChaosFollower
from chaos_model import MODELS
from chaos_proxy import Route
from chaos_served import ServedCopies
from chaos_server import ChaosServer, Place
from chaos_shard import OBJECT_AGES
from held_ports import hold_ports
from processes import ChaosError

from headrace import cli
from headrace.paramserver.shard.child import EXIT_FENCED
from headrace.paramserver.snapshots import bucket

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from object_server import Fault, ObjectServer, Request
from waiting import pause, wait_until

__all__ = ["FOLLOWER_FAULTS", "NODE_FAULTS", "NodesChaos"]

_STORE_TROUBLE_S = 2.5
_SNAPSHOT_TIMEOUT_S = 30
_SNAPSHOTS_KEPT = 2
_RESTORED = re.compile(r"Shard (\d+): (?:empty;|.* up to record (\d+))")
_SEGMENT = re.compile(r"archive/\d{4}/(\d{20})-[0-9a-f]{16}-(\d{20})-(\d+)-\d+-[0-9a-f]{64}\.hrlog")

_SOUND = [None] * 12  # of fifteen requests
_StoreFault = Callable[[random.Random], Fault | None]
_STORE_TROUBLES: dict[str, _StoreFault] = {
    "store_away": lambda rng: Fault(resets=True),
    "store_slow": lambda rng: Fault(delay_s=1.0),
    "store_errors": lambda rng: Fault(status=503) if rng.random() < 0.7 else None,
    "store_resets": lambda rng: rng.choice((Fault(resets=True), Fault(loses_reply=True), Fault(cuts=True), *_SOUND)),
}


class NodesChaos(Chaos):
    """A server of several nodes with an object store, and perhaps a follower that some of the served copies follow."""

    loses_disks: ClassVar[bool] = True
    _of_cluster: Mapping[str, Any] = MappingProxyType({})  # what else is in the cluster file

    def __init__(
        self,
        directory: Path,
        *,
        seed: int,
        num_nodes: int,
        num_shards: int,
        has_follower: bool = False,
        breakage: str = "none",
    ) -> None:
        """Prepare in a directory that is new or empty."""
        self._num_nodes, self._num_shards = num_nodes, num_shards
        self._objects = ObjectServer()
        self._environ = mock.patch.dict(os.environ, self._objects.environ)
        self._cluster_file = directory / "cluster.yaml"
        self._server_id = str(uuid.uuid4())
        self._num_copies = 0
        super().__init__(directory, seed=seed, breakage=breakage, num_shards=num_shards)
        self.ledger.keep_journal()
        self._follower = None
        if has_follower:
            self._follower = ChaosFollower(
                directory / "follower",
                source=self.address,
                num_shards=num_shards,
                hosts=["127.0.2.1", "127.0.2.2"],
            )

    def _make_servers(self, directory: Path, breakage: str) -> tuple[list[ChaosServer], list[Route]]:
        names = [chr(ord("a") + number) for number in range(self._num_nodes)]
        self._own = {name: list(range(at, self._num_shards, self._num_nodes)) for at, name in enumerate(names)}
        self._standbys = self._choose_standbys(names)
        most = max(len(self._own[name]) + len(self._standbys[name]) for name in names)
        hosts = [(f"127.0.0.{number}", f"127.0.1.{number}") for number in range(11, 11 + 2 * self._num_nodes)]
        port = hold_ports(most, [host for pair in hosts for host in pair])
        places = [Place(host, proxy_host, port) for host, proxy_host in hosts]
        self._places = {name: places[2 * at : 2 * at + 2] for at, name in enumerate(names)}
        self._breakage = breakage
        servers = [self._node(directory / name, name) for name in names]
        routes = [
            Route(place.proxy_host, place.host, [place.port + at for at in range(len(server.shards))])
            for server in servers
            for place in self._places[str(server.node)]
        ]
        return servers, routes

    def _choose_standbys(self, names: Sequence[str]) -> dict[str, list[int]]:
        """Return the shards that each node stands by for."""
        return {name: [] for name in names}

    def _settings_of(self, name: str) -> dict[str, Any]:
        """Return settings of a node."""
        return {}

    def _node(self, directory: Path, name: str, place: Place | None = None) -> ChaosServer:
        """Return a node, or a second copy of it that listens elsewhere."""
        return ChaosServer(
            directory,
            shards=self._own[name] + self._standbys[name],
            place=place or self._places[name][0],
            breakage=self._breakage,
            cluster=self._cluster_file,
            node=name,
            settings=self._settings_of(name),
        )

    @property
    def menu(self) -> Mapping[str, Callable[[Any], None]]:
        """All faults, by name."""
        return super().menu | (FOLLOWER_FAULTS if self._follower is not None else {})

    @property
    def served_models(self) -> dict[str, tuple[str, Sequence[str]]]:
        """Without a follower as on one machine; with one it has a copy of each model, and the server the first."""
        if self._follower is None:
            return super().served_models
        return {"server": (self.address, MODELS[:1]), "follower": (self._follower.address, MODELS)}

    def __enter__(self) -> Self:
        self._environ.start()
        self._write_cluster_file()
        return super().__enter__()

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._objects.close)
            stack.callback(self._environ.stop)
            if self._follower is not None:
                stack.callback(self._follower.close)
            super().__exit__(*exc_info)

    # Faults.

    def kill_all(self) -> None:
        """`kill -9` all nodes at once."""
        for server in self.servers:
            server.kill()
        self._start_all()

    def pause_node(self) -> None:
        """Stop all processes of a node for a while."""
        with self.random.choice(self.servers).paused():
            pause(TROUBLE_S)

    def move_node(self) -> None:
        """Kill a node and start it at another address; the others learn it from the node, clients from any."""
        server = self.random.choice(self.servers)
        server.kill()
        self._move(server)
        self._write_cluster_file()
        server.start()

    def store_trouble(self, name: str) -> None:
        """Make trouble with the object store for a while."""
        with self._store_trouble(name):
            pause(_STORE_TROUBLE_S)

    def store_away_and_kill(self) -> None:
        """Kill a node and start it while the object store is away: it goes on in the term that it had."""
        with self._store_trouble("store_away"):
            self.kill_server()

    def store_resets_and_snapshot(self) -> None:
        """Make a snapshot while requests and replies of the object store are cut."""
        with self._store_trouble("store_resets"):
            self.snapshot()

    def snapshot(self) -> None:
        """Make a snapshot, and remove old ones with what only they named."""
        self.running_trainer()
        self._make_snapshot()
        with mock.patch.multiple(bucket, **OBJECT_AGES):
            self._command("snapshot", "prune", self._objects.url, "--keep", _SNAPSHOTS_KEPT)

    def snapshot_and_kill(self) -> None:
        """`kill -9` a shard while a snapshot is made; that may fail, the next one may not."""
        self.running_trainer()
        making = threading.Thread(target=lambda: self._make_snapshot(is_sure=False), daemon=True)
        making.start()
        pause(self.random.uniform(0, 0.5))
        self.kill_shard()
        making.join(2 * _SNAPSHOT_TIMEOUT_S)
        self._make_snapshot()

    def lose_disk(self) -> None:
        """Lose a node with its disk, and restore it from the object store at the same address."""
        shutil.rmtree(self._lose_disk(self.random.choice(self.servers), moves=False))

    def lose_disk_and_kill_trainer(self) -> None:
        """Lose a node with its disk and the trainer: what was acked since the archive's end is nowhere any more."""
        server = self.random.choice(self.servers)
        self.kill_trainer()
        shutil.rmtree(self._lose_disk(server, moves=False))

    def lose_disk_and_start_old(self) -> None:
        """Restore a node elsewhere, and start its old copy by the old cluster file: it must refuse, or step down."""
        server = self.random.choice(self.servers)
        place = server.place
        directory = self._lose_disk(server, moves=True)
        old = ChaosServer(
            directory, shards=server.shards, place=place, cluster=directory / "cluster.yaml", node=server.node
        )
        old.launch()
        self._wait_fenced(old)
        shutil.rmtree(directory)

    def take_over(self) -> None:
        """Restore a node elsewhere that only looks dead: when it runs again it must step down."""
        self.kill_trainer()  # until then it acks, which costs rows that are nowhere else
        at = self.random.randrange(len(self.servers))
        old = self.servers[at]
        with contextlib.closing(old):
            with old.paused():
                self._num_copies += 1
                name = str(old.node)
                directory = self._directory / f"{name}-{self._num_copies}"
                self.servers[at] = self._node(directory, name, self._other_place(old))
                self._restore(self.servers[at])
            self._wait_fenced(old)
        shutil.rmtree(old.data)

    def kill_follower(self) -> None:
        """`kill -9` the follower."""
        self.follower.kill()
        pause(self.random.uniform(0, 0.5))
        self.follower.start()

    def pause_follower(self) -> None:
        """Stop the follower for a while."""
        self.follower.pause(TROUBLE_S)

    def move_follower_and_node(self) -> None:
        """Start the follower and a node at other addresses."""
        self.follower.kill()
        self.follower.move()
        self.move_node()
        self.follower.start()

    def lose_follower_disk(self) -> None:
        """Lose the follower with all that it has."""
        self.follower.kill()
        shutil.rmtree(self.follower.data)
        self.follower.start()

    def lose_disk_without_follower(self) -> None:
        """Lose a node with its disk while the follower is away."""
        self.follower.kill()
        self.lose_disk()
        self.follower.start()

    # What they are made of.

    def _wait_fenced(self, old: ChaosServer) -> None:
        """Wait until an old copy of a node has stepped down."""
        with contextlib.closing(old):
            exit_code = old.wait_end()
        if exit_code != EXIT_FENCED:
            raise ChaosError(f"the old copy of {old.node} ended with {exit_code}, not {EXIT_FENCED}: {old.tail()}")

    @property
    def follower(self) -> ChaosFollower:
        """The follower."""
        assert self._follower is not None
        return self._follower

    def _running_served(self) -> list[ServedCopies]:
        if self._follower is not None and not self._follower.data.exists():
            self._make_snapshot()  # the log behind the first record may be gone
            self._follower.start()
        return super()._running_served()

    def _write_cluster_file(self) -> None:
        nodes = {}
        for server in self.servers:
            name, place = str(server.node), server.place
            nodes[name] = {"host": place.proxy_host, "port": place.port, "data": str(server.data)}
            nodes[name] |= {"shards": self._own[name]}
            if self._standbys[name]:
                nodes[name] |= {"standbys": self._standbys[name]}
        values = {"server_id": self._server_id, "shards": self._num_shards, "object_store": self._objects.url}
        self._cluster_file.write_text(json.dumps(values | self._of_cluster | {"nodes": nodes}))

    def _other_place(self, server: ChaosServer) -> Place:
        return next(place for place in self._places[str(server.node)] if place != server.place)

    def _move(self, server: ChaosServer) -> None:
        server.place = self._other_place(server)

    def _lose_disk(self, server: ChaosServer, *, moves: bool) -> Path:
        """Kill a node, restore and start it; return the folder to which its old directory was moved."""
        with self._store_trouble("store_away"):  # so that some of what is acked is not archived
            pause(self.random.uniform(0, TROUBLE_S))
            if self._trainer is not None:
                self._wait_acked(server)
            server.kill()
        self._num_copies += 1
        old = self._directory / f"old-{self._num_copies}"
        old.mkdir()
        server.data.rename(old / "data")
        shutil.copy(self._cluster_file, old)
        if moves:
            self._move(server)
        self._restore(server)
        return old

    def _wait_acked(self, server: ChaosServer) -> None:
        """Wait until a node has acked a batch more; a trainer may end or wait itself, so not for long."""
        num_before = self._num_acked(server)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: self._num_acked(server) > num_before, within_s=_STORE_TROUBLE_S)

    def _num_acked(self, server: ChaosServer) -> int:
        with self.lock:
            return sum(self.ledger.num_acked[shard] for shard in server.shards)

    def _restore(self, server: ChaosServer) -> None:
        """Make a node's directory from the object store, and start it."""
        self._write_cluster_file()
        # A frame from before the loss could take the place of the one that the trainer now sends with its number.
        self.proxy.forget_old()
        self.was_set_back = True
        said = self._command("restore", self._objects.url, "--cluster", self._cluster_file, "--node", server.node)
        restored = {int(shard): int(seq or 0) for shard, seq in _RESTORED.findall(said)}
        if restored.keys() != set(server.shards):
            raise ChaosError(f"node {server.node} was to be restored: {said}")
        for shard, seq in restored.items():
            if longer := self._archived_behind(shard, seq):
                raise ChaosError(f"shard {shard} was restored up to record {seq}, and {longer} is archived")
        with self.lock:
            self.ledger.set_back(restored, self._num_shards)
        server.start()

    def _archived_behind(self, shard: int, seq: int) -> str | None:
        """Return a segment that has the record behind `seq` of a shard's log, void ones aside."""
        claims = [json.loads(self._objects.data_of(key)) for key in self._objects.keys(f"claims/{shard:04d}/")]
        for key in self._objects.keys(f"archive/{shard:04d}/"):
            match = _SEGMENT.fullmatch(key)
            assert match is not None, key
            first_seq, last_seq, term = map(int, match.groups())
            last_seq = min([last_seq, *(claim["seq"] for claim in claims if claim["term"] > term)])
            if first_seq <= seq + 1 <= last_seq:
                return key
        return None

    @contextlib.contextmanager
    def _store_trouble(self, name: str) -> Iterator[None]:
        trouble, rng = _STORE_TROUBLES[name], random.Random(self.random.random())

        def fault(_: Request) -> Fault | None:
            return trouble(rng)

        before, self._objects.fault = self._objects.fault, fault
        try:
            yield
        finally:
            self._objects.fault = before

    def _make_snapshot(self, *, is_sure: bool = True) -> None:
        words = ("snapshot", "create", "--server", self.address, "--run", f"chaos-{MODELS[0]}")
        # A shard that could not claim its term starts again some time later, and a snapshot fails then.
        self._command(*words, "--timeout-s", _SNAPSHOT_TIMEOUT_S, num_tries=3 if is_sure else 1, is_sure=is_sure)

    def _command(self, *words: object, num_tries: int = 1, is_sure: bool = True) -> str:
        """Run a `headrace` command until it succeeds, or has failed so often; return what it prints."""
        for _ in range(num_tries):
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                exit_code = cli.main([str(word) for word in words])
            if not exit_code:
                return said.getvalue()
        if is_sure:
            raise ChaosError(f"headrace {' '.join(map(str, words))}: exit code {exit_code}: {said.getvalue()}")
        return said.getvalue()


NODE_FAULTS = (
    FAULTS
    | named(NodesChaos, "kill_all pause_node move_node store_away_and_kill store_resets_and_snapshot")
    | named(NodesChaos, "snapshot snapshot_and_kill")
    | {name: functools.partial(NodesChaos.store_trouble, name=name) for name in _STORE_TROUBLES}
    | {
        "lost_disk": NodesChaos.lose_disk,
        "lost_disk_and_kill_trainer": NodesChaos.lose_disk_and_kill_trainer,
        "lost_disk_and_old_copy": NodesChaos.lose_disk_and_start_old,
        "taken_over": NodesChaos.take_over,
    }
)
NodesChaos.faults_of_runs = NODE_FAULTS
FOLLOWER_FAULTS = named(NodesChaos, "kill_follower pause_follower move_follower_and_node") | {
    "lost_follower_disk": NodesChaos.lose_follower_disk,
    "lost_disk_without_follower": NodesChaos.lose_disk_without_follower,
}
