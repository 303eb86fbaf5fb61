"""Looking after a server on three hosts: what each node shows of the others, and what one failure leaves."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_nodes import HOSTS, Cluster
from command_line import CommandLine
from hellos import hello_of_nobody, hello_of_writer
from set_embeddings import delta_of, request_of
from watched_server import get_json, scrape, wait_until

from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.security import client_tls_context
from headrace.schemas.errors import HeadraceError
from headrace.schemas.routing import shards_of_rows
from headrace.schemas.tables import DType, TableSpec

TLS = Path(__file__).parents[2] / "paramserver" / "tls"
SPEC = TableSpec(fqn="items.weight", num_rows=0, dim=4, dtype=DType.FLOAT32)
NODES = ["a", "a", "b", "c"]
"""The node of each shard."""


class Watched(Cluster):
    """A cluster whose nodes have status pages."""

    def start(self, name: str, data: Path | None = None, **settings: Any) -> Any:
        return super().start(name, data, metrics_port=0, **settings)

    def metrics_of(self, name: str) -> str:
        """Return the address of a node's page."""
        (address,) = [f["address"] for f in self.running[name].read_log() if f["message"] == "metrics are served"]
        return str(address)

    def page_of(self, name: str) -> Any:
        """Return what a node's status page says."""
        return get_json(self.metrics_of(name), "/status.json")

    def page_when(self, name: str, is_so: Callable[[Any], bool], what: str) -> Any:
        """Return a node's status page once it is so: it may be a second old, and waits two for the other nodes."""
        pages: list[Any] = []

        def look() -> bool:
            pages[:] = [self.page_of(name)]
            return is_so(pages[0])

        wait_until(look, f"{what} on the page of node {name}")
        return pages[0]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Four shards on three nodes, which each test leaves running, with an object store."""
    folder = tmp_path_factory.mktemp("operation")
    made = Watched(folder, num_shards=4, object_store=f"file://{folder}/bucket")
    made.place(a=[0, 1], b=[2], c=[3])
    try:
        for name in HOSTS:
            made.start(name)
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("HEADRACE_TOKEN", raising=False)


def _silent(page: Any) -> list[int]:
    """Return the shards of a status page that do not answer."""
    return [shard["shard"] for shard in page["shards"] if shard["error"]]


def test_every_node_shows_all_shards(cluster: Watched, run: CommandLine) -> None:
    """The page of each node, `status` and `top` have all shards with their nodes; metrics have a node's own."""
    for name in HOSTS:
        page = cluster.page_when(name, lambda page: not _silent(page), "every shard")
        assert page["node"] == name
        assert [(shard["shard"], shard["node"], shard["error"]) for shard in page["shards"]] == [
            (shard, node, None) for shard, node in enumerate(NODES)
        ]
        # Only of its own shards a node knows what is not told to clients.
        assert [shard["detail"] is not None for shard in page["shards"]] == [node == name for node in NODES]
        own = {(("shard", str(shard)),) for shard, node in enumerate(NODES) if node == name}
        assert scrape(cluster.metrics_of(name))["headrace_shard_up"].keys() == own
    status = run.json("status", "--server", cluster.seeds)
    assert [shard["node"] for shard in status["shards"]] == NODES
    lines = run("status", "--server", f"127.0.0.2:{cluster.port}").splitlines()
    rows = [line.split()[:2] for line in lines if line.strip()[:1].isdecimal()]
    assert [row for row in rows if row[1] in HOSTS] == [[str(n), node] for n, node in enumerate(NODES)]


def test_a_node_that_does_not_answer(cluster: Watched, run: CommandLine) -> None:
    """A node that is down is named by the pages of the others, `status` and `doctor`, and found again after."""
    cluster.stop("c")
    for name in ("a", "b"):
        problem = cluster.page_when(name, lambda page: _silent(page) == [3], "the silence of c")["problems"][0]
        assert problem["severity"] == "critical"
        refused = f"no connection to 127.0.0.3:{cluster.port}"
        assert problem["text"].startswith(f"node c does not answer, with shard 3: {refused}")
    seeds = cluster.seeds.rpartition(",")[2] + "," + cluster.seeds  # the first is the one that is down
    status = run.json("status", "--server", seeds, code=1)
    assert [shard["node"] for shard in status["shards"] if shard["error"]] == ["c"]
    text = run("status", "--server", seeds, code=1)
    assert "node c does not answer, with shard 3: " in text
    assert "no answer" in text
    line = run.refused("status", "--server", f"127.0.0.3:{cluster.port}")
    assert f"127.0.0.3:{cluster.port}" in line

    cluster.start("c")
    cluster.page_when("a", lambda page: not _silent(page), "node c")


def test_doctor_looks_into_the_object_store(cluster: Watched, run: CommandLine, tmp_path: Path) -> None:
    """It puts and removes an object."""
    told = run.json("doctor", "--cluster", cluster.file, "--node", "a", "--data", cluster.path / "a", code=None)
    (store,) = [finding for finding in told["findings"] if finding["subject"] == "object store"]
    assert store["level"] == "ok" and "keeps an object that is there" in store["text"]
    assert not list((cluster.path / "bucket" / "doctor").glob("*"))
    other = tmp_path / "cluster.yaml"
    other.write_text(cluster.file.read_text().replace(f"{cluster.path}/bucket", "/proc/nowhere"))
    told = run.json("doctor", "--cluster", other, "--node", "a", "--data", cluster.path / "a", code=1)
    assert ("object store", "problem") in {(finding["subject"], finding["level"]) for finding in told["findings"]}


def test_mistakes_are_one_line(cluster: Watched, run: CommandLine) -> None:
    """Wrong arguments end in one line that says which."""
    file = cluster.file
    for arguments, line in (
        (("serve", "--cluster", file, "--node", "d"), "--node d: "),
        (("serve", "--cluster", file), "which of its nodes is this? --node a or b or c"),
        (("serve", "--cluster", file, "--node", "a", "--tls-peer-authority", file), "needs --tls-certificate"),
        (("status", "--server", "127.0.0.2:1"), "127.0.0.2:1"),
        (("status", "--server", "nowhere.invalid:1"), "nowhere.invalid"),
    ):
        data = ("--data", cluster.path / "a") if arguments[0] == "serve" else ()
        assert line in run.refused(*arguments, *data)
    told = run.json("doctor", "--cluster", file, "--node", "d", code=1)
    assert any("--node d" in finding["text"] for finding in told["findings"])


class Writer:
    """Writes rows to the shards of a cluster, and checks what a reader sees of them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._value = cluster, 0.0
        self._rows = np.arange(64, dtype=np.int64)
        self._shards = shards_of_rows(SPEC.seed, self._rows, len(NODES))

    async def write(self, *shards: int) -> None:
        """Write all rows of some shards."""
        self._value += 1
        for shard in shards:
            port = self._cluster.port + (shard if NODES[shard] == "a" else 0)
            async with await ParamServerClient.connect(HOSTS[NODES[shard]], port) as client:
                reply = await client.hello(hello_of_writer(SPEC))
                delta = delta_of(SPEC, self._rows[self._shards == shard], self._value)
                await client.set_embeddings(request_of(delta, client_seq=reply.last_client_seq + 1))

    async def check(self, reader: EmbeddingReader, *shards: int) -> None:
        """Check that all rows of some shards have the last value."""
        found = await reader.get(SPEC.fqn, self._rows[np.isin(self._shards, shards)])
        assert (found.weights == self._value).all()


async def test_one_shards_storage_error_stops_that_shard(cluster: Watched, run: CommandLine) -> None:
    """Its node's other shard, the other nodes and readers go on; pages, alert and `status` name the shard."""
    writer = Writer(cluster)
    await writer.write(0, 1, 2, 3)
    async with await EmbeddingReader.connect(cluster.seeds) as reader:
        await writer.check(reader, 0, 1, 2, 3)
        # The shard's next write fails, as on a broken disk.
        resource.prlimit(cluster.running["a"].shard_pids[1], resource.RLIMIT_FSIZE, (1, 1))
        with pytest.raises(HeadraceError, match="update log has failed"):
            await writer.write(1)
        await asyncio.to_thread(wait_until, lambda: _has_stopped(cluster, 1), "the end of the shard")
        await writer.write(0, 2, 3)
        await writer.check(reader, 0, 2, 3)
        await asyncio.to_thread(_check_that_it_is_named, cluster, run)
        await asyncio.to_thread(_restart_after_failure, cluster)
        await writer.write(0, 1, 2, 3)
        await writer.check(reader, 0, 1, 2, 3)


def _has_stopped(cluster: Watched, shard: int) -> bool:
    # The alert HeadraceShardStopped is on this metric.
    return scrape(cluster.metrics_of("a")).get("headrace_shard_stopped", {}).get((("shard", str(shard)),)) == 1


def _check_that_it_is_named(cluster: Watched, run: CommandLine) -> None:
    for name, says in (("a", "shard 1: it has stopped for good"), ("b", "shard 1 does not answer: ")):
        problem = cluster.page_when(name, lambda page: _silent(page) == [1], "the end of shard 1")["problems"][0]
        assert problem["severity"] == "critical" and says in problem["text"]
    text = run("status", "--server", cluster.seeds, code=1)
    assert "shard 1 does not answer" in text and "node a does not answer" not in text


def _restart_after_failure(cluster: Watched) -> None:
    with cluster.running.pop("a") as server:
        assert server.stop() == 3
    cluster.start("a")


def test_nodes_of_different_authorities(tmp_path: Path, run: CommandLine) -> None:
    """Nodes whose certificates are of different authorities find each other, and a wrong authority is told by name."""
    cluster = Watched(tmp_path, num_shards=2, object_store=f"file://{tmp_path}/bucket")
    cluster.place(a=[0], b=[1])
    both, token = tmp_path / "both.pem", tmp_path / "token"
    both.write_text((TLS / "authority.pem").read_text() + (TLS / "other-authority.pem").read_text())
    token.touch(mode=0o600)
    token.write_text("correct-horse-battery\n")
    shared = {"tls_client_authority": both, "token_file": token}
    of_a = {"tls_certificate": TLS / "server.pem", "tls_key": TLS / "server.key.pem", **shared}
    of_b = {"tls_certificate": TLS / "other.pem", "tls_key": TLS / "other.key.pem", **shared}
    client = ["--tls-authority", both, "--tls-certificate", TLS / "client.pem", "--tls-key", TLS / "client.key.pem"]
    client += ["--token-file", token]

    try:
        cluster.start("a", tls_peer_authority=TLS / "other-authority.pem", **of_a)
        cluster.start("b", tls_peer_authority=TLS / "authority.pem", **of_b)
        # A node knows the other's term only from itself.
        address = f"127.0.0.1:{cluster.port}"
        context = client_tls_context(authority=both, certificate=TLS / "client.pem", key=TLS / "client.key.pem")

        async def terms() -> list[int | None]:
            async with await ParamServerClient.connect("127.0.0.1", cluster.port, ssl_context=context) as asked:
                hello = await asked.hello(hello_of_nobody(token="correct-horse-battery"))
                return [place.term for place in hello.shards]

        wait_until(lambda: asyncio.run(terms()) == [1, 1], "what node b says")
        for name in ("a", "b"):
            cluster.page_when(name, lambda page: [s["error"] for s in page["shards"]] == [None, None], "both shards")
        assert run.json("status", "--server", address, *client)["shards"][1]["node"] == "b"

        cluster.stop("b")
        cluster.start("b", tls_peer_authority=TLS / "other-authority.pem", **of_b)
        refused = f"TLS with {address}: its certificate is refused: "

        def has_said() -> bool:
            return any(refused in fact["message"] for fact in cluster.running["b"].read_log())

        wait_until(has_said, "the line in node b's log")
        problem = cluster.page_when("b", lambda page: _silent(page) == [0], "the silence of a")["problems"][0]
        assert problem["text"].startswith("node a does not answer, with shard 0: ") and refused in problem["text"]
        cluster.stop("b")
        with pytest.raises(HeadraceError, match=f"exit code 1: .*TLS authority {tmp_path}/nowhere.pem"):
            cluster.start("b", tls_peer_authority=tmp_path / "nowhere.pem", **of_b)
    finally:
        cluster.close()
