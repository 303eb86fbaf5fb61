"""A server on three hosts of the loopback range: its cluster file, and the nodes of it that run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from held_ports import hold_ports

from headrace.paramserver.shard.launch import ServerProcess

__all__ = ["HOSTS", "SERVER_ID", "Cluster"]

SERVER_ID = "3f0c6e0e-8a55-4c6f-9f0f-2d6a6a1f7a11"
HOSTS = {"a": "127.0.0.1", "b": "127.0.0.2", "c": "127.0.0.3"}


class Cluster:
    """Nodes with directories of their own, `a`, `b` and `c` below a path, of which some run.

    Attributes:
        more: What the cluster file says besides.
        port: The first of each node.
        standbys: Of each node, by name; `place` puts them into the file.
        running: By name.
    """

    def __init__(self, path: Path, *, num_shards: int = 3, **more: Any) -> None:
        """Place one shard on each of three nodes; `place` changes that."""
        self.path, self.more = path, more
        self.port = hold_ports(4, hosts=tuple(HOSTS.values()))
        self.running: dict[str, ServerProcess] = {}
        self.standbys: dict[str, list[int]] = {}
        if num_shards == len(HOSTS):
            self.place(a=[0], b=[1], c=[2])

    def place(self, **shards: list[int]) -> None:
        """Write the cluster file."""
        nodes: dict[str, dict[str, Any]] = {}
        for name, host in HOSTS.items():
            copies = {"shards": shards.get(name), "standbys": self.standbys.get(name)}
            if given := {key: numbers for key, numbers in copies.items() if numbers}:
                nodes[name] = {"host": host, "port": self.port, **given}
        num_shards = 1 + max(shard for own in shards.values() for shard in own)
        values = {"server_id": SERVER_ID, "shards": num_shards, "nodes": nodes, **self.more}
        self.file.write_text(json.dumps(values))

    @property
    def file(self) -> Path:
        """The cluster file."""
        return self.path / "cluster.yaml"

    @property
    def seeds(self) -> str:
        """The first shard of each node."""
        return ",".join(f"{host}:{self.port}" for host in HOSTS.values())

    def start(self, name: str, data: Path | None = None, **settings: Any) -> ServerProcess:
        """Start a node; one with other `data` than its own is the caller's to stop."""
        server = ServerProcess.start(
            data or self.path / name,
            port=None,
            cluster=self.file,
            node=name,
            memtable_bytes="6MiB",
            block_cache_bytes="32MiB",
            **settings,
        )
        if data is None:
            self.running[name] = server
        return server

    def stop(self, name: str) -> None:
        """Stop a node, which must drain."""
        with self.running.pop(name) as server:
            assert server.stop() == 0

    def move(self, shard: int, source: str, target: str) -> None:
        """Move a shard's directory between nodes that do not run."""
        folder = f"shard-{shard:04d}"
        shutil.move(self.path / source / folder, self.path / target / folder)

    def close(self) -> None:
        """Kill what runs."""
        for server in self.running.values():
            server.close()
