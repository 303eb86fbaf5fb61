"""The cluster file: one YAML for all hosts of a server, which says what node runs which shards, and where.

    server_id: 3f0c…                  # a UUID that names the server
    shards: 4
    data: /var/lib/headrace           # of every node that names no other
    nodes:
      a: {host: ps-a.example, port: 7601, shards: [0, 1]}
      b: {host: ps-b.example, port: 7601, shards: [2, 3]}

Shard i of a node's list listens on the node's port + i. A node may also have `standbys: [2, 3]`, copies of other nodes'
shards, on the next ports. They take over when somebody lets them (`headrace promote`); with a replicated log
(`log: nats://…`) they do so by themselves when a shard is lost. With `follow: HOST:PORT` all shards are copies of
another server's, until they take over. Each mistake is one line.
"""

from __future__ import annotations

import difflib
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import yaml

from headrace.paramserver.config.server_settings import MAX_SHARDS
from headrace.paramserver.log.opening import check_log_url
from headrace.paramserver.rpc.address import DEFAULT_PORT, format_address, is_wildcard, parse_addresses, problem_of_host
from headrace.schemas.errors import ConfigError

__all__ = ["ClusterFile", "ClusterNode", "cluster_of", "settings_of_node"]

_KEYS = ("server_id", "object_store", "log", "follow", "shards", "data", "nodes")
_NODE_KEYS = ("host", "port", "data", "shards", "standbys")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterNode:
    """One host's part of a server."""

    name: str
    host: str  # by which clients and the other nodes reach it
    port: int  # of the first of `copies`; each next one has the next port
    data: Path | None  # its directory; None to give it with --data
    shards: tuple[int, ...]
    standbys: tuple[int, ...] = ()  # shards of other nodes of which it has a copy

    @property
    def copies(self) -> tuple[int, ...]:
        """The shards of which it has a copy: its own, then those of which it is a standby."""
        return self.shards + self.standbys

    @property
    def addresses(self) -> dict[int, tuple[str, int]]:
        """Host and port of each of its copies."""
        return {shard: (self.host, self.port + at) for at, shard in enumerate(self.copies)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFile:
    """A server over several hosts, checked: each shard is on exactly one node."""

    path: Path
    server_id: str
    num_shards: int
    object_store: str | None
    log: str | None  # URL of a replicated log; None for logs in the directories
    follow: str | None  # addresses of the server of which this one is a copy, or was before it took over
    nodes: dict[str, ClusterNode]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read and check a file.

        Raises:
            ConfigError: It cannot be read, or says something else than one server; the message is one line.
        """
        values = _read(path)
        _check_keys(f"{path}", values, _KEYS)
        num_shards = _number(path, values, "shards", 1, MAX_SHARDS)
        object_store = _text(path, values, "object_store") if "object_store" in values else None
        log = _checked(path, values, "log", check_log_url)
        follow = _checked(path, values, "follow", parse_addresses)
        given = values.get("nodes")
        if not isinstance(given, dict) or not given:
            raise ConfigError(f"{path}: nodes: give each node's host, port and shards by its name")
        data = Path(_text(path, values, "data")) if "data" in values else None
        nodes = {name: _node(path, name, of_node, data, num_shards) for name, of_node in given.items()}
        _check_shards(path, nodes, num_shards)
        if follow and log and (name := next((node.name for node in nodes.values() if node.standbys), None)):
            raise ConfigError(f"{path}: node {name}: standbys: leave them out until the shards have taken over")
        return cls(
            path=path,
            server_id=_server_id(path, values),
            num_shards=num_shards,
            object_store=object_store,
            log=log,
            follow=follow,
            nodes=nodes,
        )

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Host and port of each shard, by index."""
        return tuple(self.node_of(shard).addresses[shard] for shard in range(self.num_shards))

    @property
    def copies(self) -> tuple[tuple[int, str, int, str], ...]:
        """Shard, host, port and node of each place of a shard that has standbys."""
        several = {shard for node in self.nodes.values() for shard in node.standbys}
        places = [(shard, *place, node.name) for node in self.nodes.values() for shard, place in node.addresses.items()]
        return tuple(place for place in places if place[0] in several)

    def sources_of(self, node: ClusterNode, shard: int) -> str:
        """Return where a node's copy of a shard finds who has it: at its other copies, or by any of the other nodes.

        One that is no standby begins at the server to follow.
        """
        others = [other for other in self.nodes.values() if other is not node]
        copies = [other.addresses[shard] for other in others if shard in other.copies]
        seeds = [format_address(*address) for address in (*copies, *((other.host, other.port) for other in others))]
        return ",".join(dict.fromkeys(seeds if shard in node.standbys else [self.follow or "", *seeds]))

    @property
    def nodes_of_shards(self) -> tuple[str, ...]:
        """Name of each shard's node, by index."""
        return tuple(self.node_of(shard).name for shard in range(self.num_shards))

    def node(self, name: str | None) -> ClusterNode:
        """Return the node of a name, as `--node` gives it; `ConfigError` if there is none."""
        if name is None:
            raise ConfigError(f"--cluster {self.path}: which of its nodes is this? --node {' or '.join(self.nodes)}")
        if name not in self.nodes:
            others = _nearest(name, self.nodes) or f": {', '.join(self.nodes)}"
            raise ConfigError(f"--node {name}: {self.path} has no such node{others}")
        return self.nodes[name]

    def node_of(self, shard: int) -> ClusterNode:
        """Return the node that has a shard."""
        return next(node for node in self.nodes.values() if shard in node.shards)


def cluster_of(
    file: Path | None, node: str | None, *, environ: dict[str, str], env_prefix: str
) -> tuple[ClusterFile, ClusterNode] | tuple[None, None]:
    """Return the cluster file and the node that flags or the environment name; its two variables are removed there.

    Raises:
        ConfigError: The file is wrong, or only one of the two is named.
    """
    of_file, of_node = environ.pop(f"{env_prefix}CLUSTER", None), environ.pop(f"{env_prefix}NODE", None)
    path, name = file or (Path(of_file) if of_file else None), node or of_node
    if path is None:
        if name is not None:
            raise ConfigError(f"--node {name}: goes with --cluster FILE")
        return None, None
    cluster = ClusterFile.load(path)
    return cluster, cluster.node(name)


def settings_of_node(cluster: ClusterFile | None, node: ClusterNode | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of `ServerConfig` that a node's place gives if nothing else does, and those that it fixes."""
    if cluster is None or node is None:
        return {}, {}
    defaults: dict[str, Any] = {"host": node.host}
    if node.data is not None:
        defaults["data"] = node.data
    fixed = {"port": node.port, "advertise_host": node.host, "shards": None}
    if cluster.object_store is not None:
        fixed["object_store"] = cluster.object_store
    fixed |= {"log": cluster.log, "follow": cluster.follow}
    return defaults, fixed


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text("utf-8"), _StrictLoader)
    except OSError as exc:
        raise ConfigError(f"--cluster {path}: {exc.strerror}") from exc
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as exc:
        mark = getattr(exc, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not YAML: {getattr(exc, 'problem', None) or exc}".replace("\n", " ")) from exc
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not a mapping: see docs/cluster.md for a cluster file")
    return values


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice: YAML would silently keep the last one."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _server_id(path: Path, values: dict[str, Any]) -> str:
    given = values.get("server_id")
    if given is None:
        raise ConfigError(
            f"{path}: server_id is missing; here is a new one for a new server: server_id: {uuid.uuid4()} (an existing "
            "server's is in its headrace.json)"
        )
    try:
        return str(uuid.UUID(given))
    except (ValueError, AttributeError, TypeError) as exc:
        raise ConfigError(f"{path}: server_id: {given!r} is no UUID; here is a new one: {uuid.uuid4()}") from exc


def _node(path: Path, name: Any, values: Any, data: Path | None, num_shards: int) -> ClusterNode:
    where = f"{path}: node {name}"
    if not isinstance(name, str) or not name.isprintable() or not name:
        raise ConfigError(f"{where}: a node's name is text; put it in quotes")
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: give its host, port and shards")
    _check_keys(where, values, _NODE_KEYS)
    host = _text(where, values, "host")
    if problem := problem_of_host(host):
        raise ConfigError(f"{where}: host {host}: {problem}")
    if is_wildcard(host):
        raise ConfigError(f"{where}: host {host} is every address; give the one by which clients and other nodes come")
    shards, standbys = values.get("shards", []), values.get("standbys", [])
    has_copies = bool(shards or standbys)
    if not isinstance(shards, list) or not has_copies or not all(type(shard) is int for shard in shards):
        raise ConfigError(f"{where}: shards: give the numbers of its shards, such as [0, 1]")
    for shard in shards:
        if not 0 <= shard < num_shards:
            raise ConfigError(f"{where}: shard {shard}: with shards: {num_shards} they are 0 to {num_shards - 1}")
    if not isinstance(standbys, list) or not all(type(shard) is int for shard in standbys):
        raise ConfigError(f"{where}: standbys: give the numbers of shards of other nodes, such as [2, 3]")
    for shard in standbys:
        if not 0 <= shard < num_shards:
            raise ConfigError(f"{where}: standbys: {shard}: with shards: {num_shards} they are 0 to {num_shards - 1}")
        if shard in shards or standbys.count(shard) > 1:
            raise ConfigError(f"{where}: standbys: {shard} is on it already; name shards of other nodes, each once")
    port = _number(where, values, "port", 1, 65535) if "port" in values else DEFAULT_PORT
    last_port = port + len(shards) + len(standbys) - 1
    if last_port > 65535:
        raise ConfigError(f"{where}: port {port}: its last shard would listen on port {last_port}")
    own = Path(_text(where, values, "data")) if "data" in values else data
    return ClusterNode(name=name, host=host, port=port, data=own, shards=tuple(shards), standbys=tuple(standbys))


def _check_shards(path: Path, nodes: dict[str, ClusterNode], num_shards: int) -> None:
    holders: dict[int, str] = {}
    places: dict[tuple[str, int], tuple[str, int]] = {}
    for node in nodes.values():
        for at, shard in enumerate(node.copies):
            is_own = at < len(node.shards)
            if is_own and shard in holders:
                who = "twice to it" if holders[shard] == node.name else f"to node {holders[shard]} too"
                raise ConfigError(f"{path}: node {node.name}: shard {shard} is given {who}; name each shard once")
            if is_own:
                holders[shard] = node.name
            place = (node.host, node.port + at)
            if place in places:
                other, taken = places[place]
                raise ConfigError(
                    f"{path}: node {node.name}: shard {shard} would listen at {format_address(*place)}, and so would "
                    f"shard {taken} of node {other}"
                )
            places[place] = (node.name, shard)
    if missing := [shard for shard in range(num_shards) if shard not in holders]:
        raise ConfigError(f"{path}: no node has shard {missing[0]}; name each of the {num_shards} shards once")


def _check_keys(where: str, values: dict[str, Any], known: Collection[str]) -> None:
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}" + (_nearest(str(key), known) or ""))
        if value is None:
            raise ConfigError(f"{where}: {key} has no value")


def _nearest(name: str, known: Collection[str]) -> str | None:
    matches = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else None


def _number(where: Path | str, values: dict[str, Any], key: str, minimum: int, maximum: int) -> int:
    value = values.get(key)
    if type(value) is not int or not minimum <= value <= maximum:
        _refuse(where, values, key, f"a whole number from {minimum} to {maximum}")
    return value


def _checked(path: Path, values: dict[str, Any], key: str, check: Callable[[str], object]) -> str | None:
    """Return a text that `check` takes, which else raises ConfigError; None if the file has no such key."""
    if key not in values:
        return None
    text = _text(path, values, key)
    try:
        check(text)
    except ConfigError as exc:
        raise ConfigError(f"{path}: {key}: {exc}") from exc
    return text


def _text(where: Path | str, values: dict[str, Any], key: str) -> str:
    value = values.get(key)
    if not isinstance(value, str) or not value or "\0" in value:
        _refuse(where, values, key, "a text")
    return value


def _refuse(where: Path | str, values: dict[str, Any], key: str, wanted: str) -> NoReturn:
    if key not in values:
        raise ConfigError(f"{where}: {key} is missing: give {wanted}")
    raise ConfigError(f"{where}: {key}: {values[key]!r} is not {wanted}")
