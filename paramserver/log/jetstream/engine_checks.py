"""Whether the engine keeps what it acks, and has room: settings of every server that `serve` and `doctor` insist on.

Servers are asked over HTTP, on their monitoring port: nothing else tells whether they sync each message.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from headrace.paramserver.log.jetstream.nats_address import NatsAccess, NatsLogAddress
from headrace.paramserver.log.jetstream.nats_client import NatsClient
from headrace.paramserver.log.jetstream.nats_stream import Drift, StreamConfig, connect_any, find_drift
from headrace.paramserver.log.opening import DEFAULT_MAX_BYTES
from headrace.paramserver.system.text import counted, format_size
from headrace.schemas.errors import ConfigError, HeadraceError, UnavailableError

__all__ = [
    "MIN_MAX_PAYLOAD_BYTES",
    "MIN_VERSION",
    "EngineFacts",
    "EngineFault",
    "check_engine",
    "choose_bound",
    "fit_streams",
    "inspect_engine",
]

_log = logging.getLogger(__name__)

MIN_VERSION = (2, 14)
MIN_MAX_PAYLOAD_BYTES = 1 << 20

_MIB = 1 << 20
# Of the servers' room, what streams take by default: later ones, of more shards, need some too.
_PART = 0.75

_HTTP_TIMEOUT_S = 2.0
_LOOK_AGAIN_S = 2.0
_LEADER_S, _RETRY_S = 15.0, 0.2
# A server that the cluster's leader has not heard of for so long is away; leaders and followers speak each second.
_AWAY_NS = 3_000_000_000
_VERSION = re.compile(r"v?(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class EngineFault:
    """What is wrong with the engine, and what to do.

    `is_away`: A server is away, so nobody knows its settings. A shard starts all the same, because a lost server must
    not stop the others from starting it.
    """

    text: str
    advice: str
    is_away: bool = False

    def __str__(self) -> str:
        return f"{self.text}: {self.advice[0].lower()}{self.advice[1:].rstrip('.')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFacts:
    """What was found.

    Attributes:
        servers: Names of the servers that were asked.
        version: The lowest version among them; empty if none answers.
        streams: Names of the server's streams that were compared.
        faults: What is wrong; empty if the engine is fit.
    """

    servers: tuple[str, ...]
    version: str
    streams: tuple[str, ...]
    faults: tuple[EngineFault, ...]


async def inspect_engine(access: NatsAccess, *, monitors: Sequence[str] = ()) -> EngineFacts:
    """Ask every server and look at every stream of the address's prefix.

    Args:
        access: How to reach the engine.
        monitors: URLs of all servers' monitoring; empty takes port 8222 of the same hosts.

    Raises:
        ConfigError: A URL is none, or a file of ours is unfit.
    """
    urls = tuple(monitors) or access.address.default_monitors()
    for url in urls:
        _check_url(url)
    servers, faults = await _inspect_servers(access.address, urls)
    if any(fault.is_away for fault in faults):  # a new leader has heard of nobody yet: look again
        await asyncio.sleep(_LOOK_AGAIN_S)
        servers, faults = await _inspect_servers(access.address, urls)
    # Servers that are unfit may never elect a leader.
    is_fit = all(fault.is_away for fault in faults)
    streams, of_streams = await _inspect_streams(access, _LEADER_S if is_fit else 0.0)
    versions = [str(answer["varz"].get("version", "")) for answer in servers.values()]
    return EngineFacts(
        servers=tuple(sorted(servers)),
        version=min(versions, key=_version_of, default=""),
        streams=streams,
        faults=(*faults, *of_streams),
    )


async def _inspect_servers(
    address: NatsLogAddress, urls: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], list[EngineFault]]:
    """Ask all servers; return what they say, by name, and what is wrong."""
    servers: dict[str, dict[str, Any]] = {}
    answers = await asyncio.gather(*(asyncio.to_thread(_ask_server, url) for url in urls))
    silent: list[str] = []
    for url, answer in zip(urls, answers, strict=True):
        if isinstance(answer, str):
            silent.append(f"{url} does not answer ({answer})")
        else:
            servers[str(answer["varz"].get("server_name", url))] = answer
    faults = [fault for name, answer in servers.items() for fault in _faults_of_server(name, answer)]
    return servers, [*faults, *_faults_of_cluster(address, servers, silent)]


async def check_engine(access: NatsAccess, *, monitors: Sequence[str] = ()) -> None:
    """Check that every server of the engine keeps what it acks; `headrace serve` refuses to start otherwise.

    A server that is away by what the others say is logged; who starts it again checks it with `headrace doctor`.

    Raises:
        ConfigError: One does not, or does not say; the message tells what to set.
    """
    facts = await inspect_engine(access, monitors=monitors)
    for fault in facts.faults:
        if fault.is_away:
            _log.warning("--log %s: %s", access.address, fault)
    faults = [fault for fault in facts.faults if not fault.is_away]
    if faults:
        more = f" (and {len(faults) - 1} more: headrace doctor --log)" if len(faults) > 1 else ""
        raise ConfigError(f"--log {access.address}: {faults[0]}{more}")


async def fit_streams(
    access: NatsAccess, *, server_id: str, num_shards: int, max_bytes: int, monitors: Sequence[str] = ()
) -> int:
    """Return the bound of each stream of a server: `max_bytes`, or with 0 what the engine's servers have room for.

    Streams that exist keep theirs, and with 0 new ones take the least of them. An account's limit is not asked for.

    Raises:
        ConfigError: The servers have no room for the streams that are missing; or a URL is none.
        UnavailableError: The engine does not say which streams there are.
    """
    names = {access.address.stream_name(server_id, shard) for shard in range(num_shards)}
    client = await connect_any(access)
    try:
        # Before the servers are asked: a stream that is made meanwhile counts as room that is taken.
        bounds = [int(config["max_bytes"]) for config in await _all_streams(client) if config["name"] in names]
    finally:
        await client.close()
    if len(bounds) == num_shards:
        return max_bytes or max(min(bounds), _MIB)
    urls = tuple(monitors) or access.address.default_monitors()
    for url in urls:
        _check_url(url)
    servers, _ = await _inspect_servers(access.address, urls)
    rooms = {name: _room_of(answer["jsz"]) for name, answer in servers.items() if answer["jsz"].get("config")}
    num_silent = max(len(urls), access.address.num_replicas) - len(rooms)
    wanted = max_bytes or (max(min(bounds), _MIB) if bounds else 0)
    num_missing, num_replicas = num_shards - len(bounds), access.address.num_replicas
    try:
        return choose_bound(rooms, num_silent, num_streams=num_missing, num_replicas=num_replicas, wanted=wanted)
    except ConfigError as exc:
        raise ConfigError(f"--log {access.address}: {exc}") from None


def choose_bound(rooms: Mapping[str, int], num_silent: int, *, num_streams: int, num_replicas: int, wanted: int) -> int:
    """Return the bound with which some streams are made: `wanted`, or with 0 the largest that leaves servers room.

    Args:
        rooms: Bytes that nothing has reserved, by name of the server.
        num_silent: Servers that do not say. None of them keeps a wanted bound from being tried.
        num_streams: Streams to make.
        num_replicas: Servers that hold each, all of them others.
        wanted: Bytes; 0 for what fits.

    Raises:
        ConfigError: The servers have no room for them; the message says how much is reserved and how much there is.
    """
    if not rooms:
        return wanted or DEFAULT_MAX_BYTES

    def fits(bound: int, part: float) -> bool:
        # A server holds a stream once: there is a placement exactly if all of them find this many places.
        places = [min(num_streams, int(room * part) // bound) for room in rooms.values()]
        # With 0, one that does not say counts as the least of the others.
        places += [num_streams if wanted else min(places)] * num_silent
        return sum(places) >= num_streams * num_replicas

    def largest(part: float) -> int:
        # The largest one fills a server, or is the default.
        counts = range(1, num_streams + 1)
        tried = {int(room * part) // count // _MIB * _MIB for room in rooms.values() for count in counts}
        tried = {bound for bound in {*tried, DEFAULT_MAX_BYTES} if _MIB <= bound <= DEFAULT_MAX_BYTES}
        return max((bound for bound in tried if fits(bound, part)), default=0)

    if wanted and fits(wanted, 1.0):
        return wanted
    if not wanted and (bound := largest(_PART)):
        return bound
    free = ", ".join(f"{name} {format_size(room)}" for name, room in sorted(rooms.items()))
    streams = f"{counted(num_streams, 'stream')} on {counted(num_replicas, 'server')} each"
    advice = "give the servers more disk (max_file)"
    if wanted and (most := largest(1.0)):
        advice = f"give --log-max-bytes {most // _MIB}MiB or less, leave it out for what fits, or {advice}"
    wanted = wanted or _MIB
    total = format_size(wanted * num_streams * num_replicas)
    raise ConfigError(
        f"--log-max-bytes: {format_size(wanted)} for {streams} reserve {total} in all, and the servers have too little "
        f"left ({free}): {advice}"
    )


def _room_of(jsz: Mapping[str, Any]) -> int:
    taken = max(int(jsz.get("reserved_storage") or 0), int(jsz.get("storage") or 0))
    return max(int(jsz["config"].get("max_storage") or 0) - taken, 0)


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--log-monitor {url}: must be the URL of a server's monitoring, such as http://host1:8222")


def _ask_server(url: str) -> dict[str, Any] | str:
    """Return what a server says of itself, or why it does not. Thread: a worker's; blocks."""
    answer = {}
    for what, path in (("varz", "/varz"), ("jsz", "/jsz?config=1")):
        try:
            with urllib.request.urlopen(url.rstrip("/") + path, timeout=_HTTP_TIMEOUT_S) as response:
                answer[what] = json.loads(response.read())
        except (http.client.HTTPException, ValueError):
            return "this is no monitoring of a NATS server"
        except OSError as exc:
            reason = exc.reason if isinstance(exc, urllib.error.URLError) else exc
            return str(getattr(reason, "strerror", None) or reason)
        if not isinstance(answer[what], dict):
            return "this is no monitoring of a NATS server"
    return answer


def _version_of(text: str) -> tuple[int, int]:
    match = _VERSION.match(text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _faults_of_server(name: str, answer: dict[str, Any]) -> list[EngineFault]:
    varz, jsz = answer["varz"], answer["jsz"]
    version, faults = str(varz.get("version", "")), []
    if _version_of(version) < MIN_VERSION:
        wanted = ".".join(map(str, MIN_VERSION))
        faults.append(EngineFault(f"server {name} is nats-server {version}", f"Update it to {wanted} or newer."))
    if jsz.get("disabled") or not jsz.get("config"):
        advice = 'Add `jetstream { store_dir: "…", sync_interval: always }` to its configuration and restart it.'
        return [*faults, EngineFault(f"server {name} has no JetStream", advice)]
    # Left out when it is off.
    if jsz["config"].get("sync_always") is not True:
        text = f"server {name} acks before its disk has the message (sync_always is off)"
        faults.append(EngineFault(text, "Set `sync_interval: always` in its `jetstream` block and restart it."))
    if (max_payload := int(varz.get("max_payload", 0))) < MIN_MAX_PAYLOAD_BYTES:
        text = f"server {name} takes messages of {format_size(max_payload)} (max_payload)"
        faults.append(EngineFault(text, "Set `max_payload: 1MB` or more in its configuration and reload it."))
    return faults


def _faults_of_cluster(
    address: NatsLogAddress, servers: dict[str, dict[str, Any]], silent: Sequence[str]
) -> list[EngineFault]:
    """Compare the servers that told us of themselves with those that the cluster knows."""
    known, away, size = set(servers), set[str](), 1
    for name, answer in servers.items():
        cluster = answer["jsz"].get("meta_cluster") or {}
        size = max(size, int(cluster.get("cluster_size", 1)))
        peers = cluster.get("replicas") or ()
        known |= {str(peer.get("name")) for peer in peers}
        if cluster.get("leader") == name:  # who hears of all others
            away |= {str(peer.get("name")) for peer in peers if _is_away(peer)}
    unasked = sorted(known - set(servers))
    if unasked and away.issuperset(unasked) and len(silent) <= len(unasked):
        text = f"server {', '.join(unasked)} is away, and nobody knows whether it syncs: {'; '.join(silent)}"
        return [EngineFault(text, "Start it, or remove it from the cluster (nats server cluster peer-remove).", True)]
    advice = "Every server must say that it syncs: give it `http_port: 8222`, or its URL in --log-monitor."
    faults = [EngineFault(text, advice) for text in silent]
    if servers and size < address.num_replicas:
        text = f"the engine has {size} of the {address.num_replicas} servers that hold each record"
        faults.append(EngineFault(text, "Start the others in the same cluster, or lower replicas= in --log."))
    if unasked and not silent:
        text = f"the cluster has {', '.join(unasked)}, whose settings nobody has seen"
        faults.append(EngineFault(text, "Name the monitoring of every server in --log-monitor."))
    return faults


def _is_away(peer: dict[str, Any]) -> bool:
    """Return whether the cluster's leader has not heard of a server for a while, or not since it leads."""
    active_ns = int(peer.get("active", 0))
    return not peer.get("current") and (active_ns == 0 or active_ns > _AWAY_NS)


async def _inspect_streams(access: NatsAccess, timeout_s: float) -> tuple[tuple[str, ...], list[EngineFault]]:
    """Compare all streams that the prefix names with what the log needs."""
    loop = asyncio.get_running_loop()
    configs, deadline_s = None, loop.time() + timeout_s
    while configs is None:
        try:
            configs = await _streams_of(access)
        except UnavailableError as exc:  # perhaps the engine elects its leader
            if loop.time() >= deadline_s:
                return (), [EngineFault(str(exc), "A majority of the servers must run; look at their logs.")]
            await asyncio.sleep(_RETRY_S)
        except HeadraceError as exc:
            advice = "Are servers and credentials those of --log and --log-credentials?"
            return (), [EngineFault(str(exc), advice)]
    drifts: list[Drift] = []
    for name, found in configs.items():
        # Whether the bound is the one that its server wants is checked when the shard starts.
        wanted = StreamConfig(name=name, num_replicas=access.address.num_replicas, max_bytes=1 << 20)
        drifts += find_drift(wanted, found)
    return tuple(configs), [EngineFault(str(drift), drift.advice) for drift in drifts]


async def _streams_of(access: NatsAccess) -> dict[str, dict[str, Any]]:
    """Return the configuration of each stream of the prefix, by name."""
    client = await connect_any(access)
    try:
        configs = await _all_streams(client)
    finally:
        await client.close()
    name = re.compile(rf"{re.escape(access.address.prefix)}-.+-\d+")
    return {config["name"]: config for config in configs if name.fullmatch(config["name"])}


async def _all_streams(client: NatsClient) -> list[dict[str, Any]]:
    configs: list[dict[str, Any]] = []
    while True:
        answer = await client.ask("STREAM.LIST", order={"offset": len(configs)})
        if (error := answer.get("error")) is not None:
            raise UnavailableError(f"{client.server}: streams: {error.get('description')}")
        page = answer.get("streams") or []
        configs += [stream["config"] for stream in page]
        if not page or len(configs) >= int(answer.get("total", 0)):
            return configs
