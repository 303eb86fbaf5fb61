"""docs/cluster.md works: its steps take a server from one machine to three while a trainer and a replica go on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from documented_blocks import Block, blocks_of, commands_of, missing_line
from held_ports import hold_ports
from set_back_training import ROWS, Trainer
from streamed_training import attached
from watched_server import WAIT_S, wait_until

from headrace.paramserver.config.data_dir import find_manifest
from headrace.paramserver.replica import EmbeddingReplica

_PAGE = (Path(__file__).resolve().parent.parent / "docs" / "cluster.md").read_text()
_HOSTS = {"ps-a.example": "127.0.0.1", "ps-b.example": "127.0.0.2", "ps-c.example": "127.0.0.3"}
_SERVER_ID = "3f0c6e0e-8a55-4c6f-9f0f-2d6a6a1f7a11"


def _section(title: str) -> list[Block]:
    found = re.search(rf"^## {title}$(.*?)^## ", _PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return blocks_of(found[1])


class _Hosts:
    """Hosts with a directory and an address each, on which blocks run whose title is the host's name."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path, self._stack = path, stack
        self.port = hold_ports(3, hosts=tuple(_HOSTS.values()))
        self.node_port = hold_ports(3, hosts=tuple(_HOSTS.values()))
        self.servers: dict[tuple[str, str], subprocess.Popen[bytes]] = {}  # by host and directory
        self.server_id = _SERVER_ID
        self.num_run = 0
        for name in _HOSTS:
            (path / name).mkdir()

    def data(self, host: str, name: str = "headrace-node") -> Path:
        return self.path / host / name

    def put_in(self, text: str, host: str) -> str:
        """Return what stands on the page as it is on a host here."""
        text = text.replace("/var/lib", str(self.path / host)).replace("s3://bucket", f"file://{self.path}/bucket")
        text = text.replace(_SERVER_ID, self.server_id)
        for name, address in _HOSTS.items():
            # Not in a path that was put in just now.
            text = re.sub(rf"(?<!/){re.escape(name)}", address, text)
        return re.sub(r"\b7601\b", str(self.port), re.sub(r"\b7611\b", str(self.node_port), text))

    def run(self, block: Block, between: Any) -> None:
        """Run a block, and call `between` after each command; a cluster file is copied to each host."""
        if block.language == "yaml":
            for host in _HOSTS:
                (self.path / host / block.title).write_text(self.put_in(block.text, host))
            return
        assert block.language == "console" and block.title in _HOSTS, block
        for command in commands_of(block):
            self.num_run += 1
            if command.text.startswith("headrace serve "):
                self.serve(block.title, command.text)
            else:
                self._finish(block.title, command.text, command.output)
            between()

    def serve(self, host: str, command: str) -> None:
        """Start a server and return when it is ready."""
        data = "headrace-node" if "--cluster" in command else "headrace"
        assert (host, data) not in self.servers, "the page has not stopped the server"
        ready, log = self.path / host / f"ready-{self.num_run}.json", self.path / host / f"{data}.log"
        port = "" if "--cluster" in command else f" --port {self.port}"
        more = f"{port} --watch-stdin --ready-file {ready} --memtable-bytes 6MiB --block-cache-bytes 32MiB"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {self.put_in(command, host)}{more}"],
                cwd=self.path / host,
                env=self._environ(),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._stack.callback(_stop, process)
        self.servers[host, data] = process
        wait_until(lambda: ready.exists() or process.poll() is not None, f"the ready file of {command}")
        assert process.poll() is None, f"{command}\n{log.read_text()}"

    def lose(self, host: str) -> None:
        """Kill a host's server, and delete its disk."""
        self.servers.pop((host, "headrace-node")).kill()
        self._finish(host, "flock /var/lib/headrace-node/LOCK rm -r /var/lib/headrace-node", ())

    def _finish(self, host: str, command: str, output: tuple[str, ...]) -> None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self.put_in(command, host)],
            cwd=self.path / host,
            env=self._environ(),
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        expected = tuple(self.put_in(line, host) for line in output)
        missing = missing_line(expected, done.stdout)
        assert missing is None, f"{command}: {missing!r} is not in what it prints:\n{done.stdout}"
        if command.startswith("kill "):
            assert self.servers.pop((host, "headrace")).wait(WAIT_S) == 0

    def _environ(self) -> dict[str, str]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {**environ, "PATH": path, "COLUMNS": "120"}


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait(WAIT_S)


def test_a_server_goes_from_one_machine_to_three(tmp_path: Path) -> None:
    """The steps of the page work as they stand while a trainer and a replica go on; no row is lost or wrong."""
    trainer = Trainer()
    with ExitStack() as stack:
        hosts = _Hosts(tmp_path, stack)
        hosts.serve("ps-a.example", "headrace serve --data /var/lib/headrace --host ps-a.example --shards 3")
        manifest = find_manifest(hosts.data("ps-a.example", "headrace"))
        assert manifest is not None
        hosts.server_id = manifest.server_id
        address = f"127.0.0.1:{hosts.port},127.0.0.1:{hosts.node_port}"
        streamer = stack.enter_context(attached(address, trainer, run="run", retry_max_s=0.2))
        trainer.step(0, ROWS)
        streamer.flush()
        replica = stack.enter_context(EmbeddingReplica(address, fetch_wait_s=0.2))

        def train() -> None:
            trainer.step(0, ROWS // 2)

        def settle() -> None:
            streamer.flush()
            assert streamer.audit().is_equal
            rows = trainer.table.weight.detach()
            wait_until(lambda: torch.equal(replica.lookup(trainer.fqn, torch.arange(ROWS)), rows), "an equal replica")

        for block in _section("From one machine to many"):
            hosts.run(block, train)
        assert hosts.num_run == 8
        settle()
        assert {host: sorted(path.name for path in hosts.data(host).glob("shard-*")) for host in _HOSTS} == {
            host: [f"shard-{shard:04d}"] for shard, host in enumerate(_HOSTS)
        }
        files = [hosts.path / host / "cluster.yaml" for host in _HOSTS]

        def restart(host: str, node: str) -> None:
            _stop(hosts.servers.pop((host, "headrace-node")))
            train()
            hosts.serve(host, f"headrace serve --cluster cluster.yaml --node {node}")

        # With `follow` and without it a node comes back as it was.
        restart("ps-b.example", "b")
        settle()
        line, moving = _section("Moving a shard")
        of_c = hosts.put_in(line.text, "ps-c.example").rstrip()
        for file in files:
            text = re.sub(r"  c: .*", lambda _: of_c, file.read_text())
            file.write_text(re.sub("follow: .*\n", "", text))
        restart("ps-b.example", "b")
        restart("ps-c.example", "c")
        train()
        hosts.run(moving, train)
        settle()
        hosts.lose("ps-b.example")
        train()
        (lost,) = _section("When a host is lost")
        hosts.run(lost, train)
        settle()
