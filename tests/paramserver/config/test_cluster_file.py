"""The cluster file: what it says, and one clear line for each mistake in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.paramserver.config.cluster_file import ClusterFile, cluster_of, settings_of_node
from headrace.paramserver.config.server_settings import ENV_PREFIX, ServerConfig
from headrace.schemas.errors import ConfigError

SERVER_ID = "3f0c6e0e-8a55-4c6f-9f0f-2d6a6a1f7a11"
_GONE = object()


def _values(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "server_id": SERVER_ID,
        "shards": 3,
        "data": "/var/lib/headrace",
        "nodes": {
            "a": {"host": "ps-a", "port": 7601, "shards": [2, 0]},
            "b": {"host": "::1", "data": "/srv/b", "shards": [1]},
        },
    }
    return {key: value for key, value in {**values, **changes}.items() if value is not _GONE}


def _load(tmp_path: Path, text: str | None = None, **changes: Any) -> ClusterFile:
    path = tmp_path / "cluster.yaml"
    path.write_text(text if text is not None else yaml.safe_dump(_values(**changes)))
    return ClusterFile.load(path)


def _nodes(**changes: Any) -> dict[str, Any]:
    """Return the nodes with changes to the first."""
    nodes = _values()["nodes"]
    nodes["a"] = {key: value for key, value in {**nodes["a"], **changes}.items() if value is not _GONE}
    return {"nodes": nodes}


def test_a_cluster(tmp_path: Path) -> None:
    """Shard i of a node's list is at the node's port + i; what a node does not say is the file's.

    Standbys have the ports behind the node's own shards; all places of a shard are told, with its node."""
    cluster = _load(tmp_path)
    assert cluster.addresses == (("ps-a", 7602), ("::1", 7601), ("ps-a", 7601))
    assert (cluster.server_id, cluster.num_shards, cluster.object_store) == (SERVER_ID, 3, None)
    assert [node.data for node in cluster.nodes.values()] == [Path("/var/lib/headrace"), Path("/srv/b")]
    assert cluster.node_of(1).name == "b"
    with pytest.raises(ConfigError, match=r"cluster\.yaml: server_id is missing; .*: server_id: \S{36} \(") as caught:
        _load(tmp_path, server_id=_GONE)
    made = str(caught.value).partition("server_id: ")[2].split()[0]  # a fresh one, to put into the file
    assert _load(tmp_path, server_id=made).server_id == made
    assert _load(tmp_path, object_store="s3://bucket/ads").object_store == "s3://bucket/ads"
    nodes = _values()["nodes"]
    nodes["b"]["standbys"] = [0]
    cluster = _load(tmp_path, nodes=nodes, log="nats://n1,n2,n3")
    assert cluster.addresses == (("ps-a", 7602), ("::1", 7601), ("ps-a", 7601))
    assert (cluster.node_of(0).name, cluster.node("b").copies) == ("a", (1, 0))
    assert cluster.copies == ((0, "ps-a", 7602, "a"), (0, "::1", 7602, "b"))
    assert settings_of_node(cluster, cluster.node("b"))[1]["log"] == "nats://n1,n2,n3"
    nodes["c"] = {"host": "ps-c", "standbys": [1, 0]}  # no shard of its own
    cluster = _load(tmp_path, nodes=nodes)
    assert cluster.sources_of(cluster.node("c"), 0) == "ps-a:7602,[::1]:7602,ps-a:7601,[::1]:7601"
    following = _load(tmp_path, nodes=nodes, follow="h:1,i:2")
    assert following.sources_of(following.node("b"), 1).startswith("h:1,i:2,ps-c:7601,")
    assert following.sources_of(following.node("b"), 0) == cluster.sources_of(cluster.node("b"), 0)
    assert cluster.sources_of(cluster.node("b"), 0) == "ps-a:7602,ps-c:7602,ps-a:7601,ps-c:7601"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"server_id": "mine"}, r"server_id: 'mine' is no UUID"),
        ({"shard": 3}, r"unknown key 'shard'; did you mean 'shards'\?"),
        ({"shards": 0}, r"shards: 0 is not a whole number from 1 to 1024"),
        ({"shards": _GONE}, r"shards is missing"),
        ({"shards": True}, r"shards: True is not a whole number"),
        ({"shards": 2}, r"node a: shard 2: with shards: 2 they are 0 to 1"),
        ({"shards": 4}, r"no node has shard 3; name each of the 4 shards once"),
        ({"term": 1}, r"unknown key 'term'"),
        ({"data": ""}, r"data: '' is not a text"),
        ({"data": None}, r"data has no value"),
        ({"nodes": {}}, r"nodes: give each node's host"),
        ({"nodes": {"a": None}}, r"node a: give its host"),
        ({"nodes": {7: {"host": "h", "shards": [0]}}}, r"node 7: a node's name is text"),
        (_nodes(hosts="h"), r"node a: unknown key 'hosts'; did you mean 'host'\?"),
        (_nodes(host=_GONE), r"node a: host is missing"),
        (_nodes(host="0.0.0.0"), r"node a: host 0\.0\.0\.0 is every address"),
        (_nodes(host="ps:7601"), r"node a: host ps:7601: give a host's name or address alone"),
        (_nodes(port=65535), r"node a: port 65535: its last shard would listen on port 65536"),
        (_nodes(port="x"), r"node a: port: 'x' is not a whole number"),
        (_nodes(shards=[0, 2, 0]), r"node a: shard 0 is given twice to it"),
        (_nodes(shards=[0, 2, 1]), r"node b: shard 1 is given to node a too; name each shard once"),
        (_nodes(shards=[0]), r"no node has shard 2"),
        (_nodes(shards=[]), r"node a: shards: give the numbers"),
        (_nodes(shards=["0"]), r"node a: shards: give the numbers"),
        ({"log": "file:///x"}, r"log: --log file:///x: "),
        ({"follow": "h:x"}, r"follow: "),
        ({**_nodes(standbys=[1]), "log": "nats://n", "follow": "h:1"}, r"node a: standbys: leave them out until"),
        (_nodes(standbys=[0]), r"node a: standbys: 0 is on it already"),
        (_nodes(standbys=[3]), r"node a: standbys: 3: with shards: 3 they are 0 to 2"),
        (_nodes(standbys=1), r"node a: standbys: give the numbers"),
        (_nodes(shards=_GONE, standbys=[1]), r"no node has shard 0"),
        (
            _nodes(host="::1", port=7600),
            r"node b: shard 1 would listen at \[::1\]:7601, and so would shard 0",
        ),
    ],
)
def test_mistakes(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    """Each mistake is one line with the file, the node and what to do."""
    with pytest.raises(ConfigError, match=rf"cluster\.yaml: {problem}") as caught:
        _load(tmp_path, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nodes:\n  a: {}\n  a: {}\n", r"cluster\.yaml:3: not YAML: 'a' is given twice"),
        ("shards: 1\nshards: 2\n", r"cluster\.yaml:2: not YAML: 'shards' is given twice"),
        ("nodes: [\n", r"cluster\.yaml:2: not YAML"),
        ("? [a, b]\n: c\n", r"cluster\.yaml: not YAML"),
        ("- a\n", r"cluster\.yaml: not a mapping"),
        ("", r"cluster\.yaml: not a mapping"),
        (None, r"^--cluster .*/cluster\.yaml: No such file"),
    ],
)
def test_texts_that_are_no_cluster(tmp_path: Path, text: str | None, problem: str) -> None:
    """What YAML would take in silence, a key that is given twice, is refused with its line."""
    with pytest.raises(ConfigError, match=problem):
        ClusterFile.load(tmp_path / "cluster.yaml") if text is None else _load(tmp_path, text)


def test_flags_and_environment_name_the_node(tmp_path: Path) -> None:
    """Flags win over the environment, whose two variables are no settings; one without the other is refused."""
    path = _load(tmp_path).path
    environ = {f"{ENV_PREFIX}CLUSTER": str(path), f"{ENV_PREFIX}NODE": "b", "OTHER": "x"}
    _, node = cluster_of(None, None, environ=environ, env_prefix=ENV_PREFIX)
    assert node is not None and node.name == "b" and environ == {"OTHER": "x"}
    _, node = cluster_of(path, "a", environ={f"{ENV_PREFIX}NODE": "b"}, env_prefix=ENV_PREFIX)
    assert node is not None and node.name == "a"
    assert cluster_of(None, None, environ={}, env_prefix=ENV_PREFIX) == (None, None)
    for file, name, problem in (
        (path, None, r"^--cluster .*: which of its nodes is this\? --node a or b$"),
        (path, "c", r"^--node c: .* has no such node: a, b$"),
        (None, "a", r"^--node a: goes with --cluster FILE$"),
    ):
        with pytest.raises(ConfigError, match=problem):
            cluster_of(file, name, environ={}, env_prefix=ENV_PREFIX)


def test_settings_of_a_node(tmp_path: Path) -> None:
    """A node listens where its file says, unless told to listen on another address; its place is the file's alone."""
    cluster = _load(tmp_path)
    defaults, fixed = settings_of_node(cluster, cluster.node("b"))
    config = ServerConfig.load(flags={}, environ={}, defaults=defaults, fixed=fixed)
    assert (config.data, config.host, config.port, config.client_host) == (Path("/srv/b"), "::1", 7601, "::1")
    flags = {"host": "0.0.0.0", "data": "/elsewhere"}
    config = ServerConfig.load(flags=flags, environ={}, defaults=defaults, fixed=fixed)
    assert (config.data, config.host, config.client_host) == (Path("/elsewhere"), "0.0.0.0", "::1")
    for name in ("port", "shards", "advertise_host"):
        with pytest.raises(ConfigError, match=rf"^{ENV_PREFIX}{name.upper()}: leave it out: the cluster file says it"):
            environ = {f"{ENV_PREFIX}{name.upper()}": "1"}
            ServerConfig.load(flags={}, environ=environ, defaults=defaults, fixed=fixed)
