"""A shard's stream: what it must be like, how it is made, and how an existing one differs from that."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace.paramserver.log.jetstream.nats_address import NatsAccess, subject_of
from headrace.paramserver.log.jetstream.nats_client import NatsClient
from headrace.paramserver.log.jetstream.nats_engine import NatsEngine
from headrace.paramserver.system.text import counted, format_size
from headrace.schemas.errors import ConfigError, UnavailableError

__all__ = ["Drift", "StreamConfig", "connect_any", "find_drift", "open_engine"]

_NOT_FOUND, _NO_PEERS = 10059, 10005
# An account's limit, a server's resources, a server's disk.
_NO_ROOM = {10002, 10023, 10047}
# What the engine says, with that code, where nothing else is wrong. A server that starts is offline for about a second.
_ONLY_OFFLINE = "no suitable peers for placement, peer offline"
_OPEN_TIMEOUT_S = 20.0
_RETRY_S = 0.2
_LEAST_MAX_BYTES = 1 << 20
# What cannot be changed once a stream is made.
_FIXED = {
    "storage",
    "retention",
    "mirror",
    "deny_purge",
    "allow_msg_ttl",
    "allow_msg_counter",
    "persist_mode",
    "sealed",
}
_NAME = re.compile(r"[A-Za-z0-9_-]{1,200}")


@dataclass(frozen=True, slots=True)
class Drift:
    """A field of a stream's configuration that is not as the log needs it.

    Attributes:
        stream: Its name.
        field: As the engine calls it.
        value: What it is; None if it is not set.
        wanted: What it must be, for messages.
        advice: What to do.
    """

    stream: str
    field: str
    value: Any
    wanted: str
    advice: str

    def __str__(self) -> str:
        return f"stream {self.stream}: {self.field} is {_text_of(self.value)}, must be {self.wanted}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamConfig:
    """What a shard's stream must be like.

    Attributes:
        name: Of the stream.
        num_replicas: Servers that hold each message.
        max_bytes: The stream's bound: at least twice what comes between two snapshots. A full stream refuses appends.
        first_seq: Of the first message, when it is made.
    """

    name: str
    num_replicas: int
    max_bytes: int
    first_seq: int = 1

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"stream {self.name!r}: a name has 1 to 200 letters, digits, - or _")
        if self.max_bytes < _LEAST_MAX_BYTES:
            raise ConfigError(f"stream {self.name}: max_bytes is {self.max_bytes}, the least is {_LEAST_MAX_BYTES}")

    def wanted(self) -> dict[str, Any]:
        """Return the fields that the log depends on. One that is missing in a stream counts as off."""
        return {
            "subjects": [subject_of(self.name)],
            "storage": "file",
            "num_replicas": self.num_replicas,
            "retention": "limits",
            # A full stream refuses what is new. Nothing is removed but by our own purges.
            "discard": "new",
            "max_age": 0,
            "max_msgs": -1,
            "max_msgs_per_subject": -1,
            "max_msg_size": -1,
            "deny_delete": True,
            "deny_purge": False,
            "allow_rollup_hdrs": False,
            "allow_msg_ttl": False,
            "allow_msg_counter": False,
            "sealed": False,
            # Takeovers send their records in one batch; readers ask any server.
            "allow_atomic": True,
            "allow_direct": True,
        }

    def order(self) -> dict[str, Any]:
        """Return the configuration for a new stream."""
        # Without ids there is nothing to find twice: keep no window of them.
        kept = {"name": self.name, "max_bytes": self.max_bytes, "first_seq": self.first_seq, "compression": "none"}
        return {**{key: value for key, value in self.wanted().items() if value is not False}, **kept}


def find_drift(config: StreamConfig, found: dict[str, Any]) -> Iterator[Drift]:
    """Yield each field of a stream's configuration that differs from what the log needs.

    Other fields are the operator's: placement, description, compression. So is a larger bound.
    """
    if found.get("sealed"):  # which sets others, too
        yield _drift_of(config, "sealed", True, False, "false")
        return
    for name, wanted in config.wanted().items():
        value = found.get(name)
        if (value or False) == wanted or value == wanted:
            continue
        yield _drift_of(config, name, value, wanted, _text_of(wanted))
    if not found.get("max_bytes", -1) >= config.max_bytes:
        yield _drift_of(config, "max_bytes", found.get("max_bytes"), config.max_bytes, f"{config.max_bytes} or more")
    # What comes in by itself takes seqs, and what is rewritten is not what was sent.
    for name in ("mirror", "sources", "subject_transform"):
        if value := found.get(name):
            yield _drift_of(config, name, value, None, "left out")
    if found.get("persist_mode") not in (None, "", "default"):
        yield _drift_of(config, "persist_mode", found["persist_mode"], "default", "default")


def _drift_of(config: StreamConfig, name: str, value: Any, wanted: Any, text: str) -> Drift:
    if name in _FIXED:
        advice = "It cannot be changed: remove the stream if it is empty, else restore the shard into a new one."
    else:
        change = f"del(.{name})" if wanted is None else f".{name} = {_text_of(wanted)}"
        advice = (
            f"nats stream info {config.name} -j | jq '.config | {change}' > s.json && "
            f"nats stream edit {config.name} --config s.json"
        )
    return Drift(config.name, name, value, text, advice)


def _text_of(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, str)):
        return str(value).replace("'", '"') if isinstance(value, list) else f'"{value}"'
    return str(value)


async def connect_any(access: NatsAccess) -> NatsClient:
    """Connect to any server that answers.

    Raises:
        UnavailableError: None does.
        ConfigError: One refuses our credentials.
    """
    reasons = []
    for host, port in random.sample(access.address.servers, len(access.address.servers)):
        try:
            return await NatsClient.connect(access, host, port)
        except UnavailableError as exc:
            reasons.append(str(exc))
    raise UnavailableError("; ".join(reasons))


async def stream_config(client: NatsClient, stream: str) -> dict[str, Any] | None:
    """Return a stream's configuration as it is; None if there is no such stream.

    Raises:
        UnavailableError: The engine does not say.
    """
    answer = await client.ask("STREAM.INFO", stream)
    if (error := answer.get("error")) is None:
        found: dict[str, Any] = answer["config"]
        return found
    if error.get("err_code") == _NOT_FOUND:
        return None
    raise UnavailableError(f"{client.server}: stream {stream}: {error.get('description')}")


async def open_engine(
    access: NatsAccess,
    *,
    server_id: str,
    shard: int,
    max_bytes: int,
    first_seq: int = 1,
    timeout_s: float = _OPEN_TIMEOUT_S,
) -> NatsEngine:
    """Make a shard's stream if it is missing, else check it.

    Args:
        access: How to reach the engine.
        server_id: Of our server.
        shard: Number of the shard.
        max_bytes: The stream's bound.
        first_seq: Of the first record of a new stream.
        timeout_s: How long to ask again, over any server: nobody answers while the engine elects its leader.

    Raises:
        ConfigError: The engine refuses the stream, or a field of it has drifted; the message says what to do.
        UnavailableError: The engine does not answer, or has no leader; or too few servers are up to make the stream.

    Cancellation: the stream may have been made.
    """
    name = access.address.stream_name(server_id, shard)
    config = StreamConfig(name=name, num_replicas=access.address.num_replicas, max_bytes=max_bytes, first_seq=first_seq)
    loop = asyncio.get_running_loop()
    found, deadline_s = None, loop.time() + timeout_s
    while found is None:
        try:
            found = await _find_or_make(access, config)
        except UnavailableError:
            if loop.time() >= deadline_s:
                raise
            await asyncio.sleep(_RETRY_S)
    for drift in find_drift(config, found):
        raise ConfigError(f"{drift}: {drift.advice}")
    return NatsEngine(access, name)


def _is_only_offline(error: dict[str, Any]) -> bool:
    """Return whether a stream has no place only because a server is offline: it may come back."""
    return error.get("err_code") == _NO_PEERS and error.get("description") == _ONLY_OFFLINE


async def _find_or_make(access: NatsAccess, config: StreamConfig) -> dict[str, Any]:
    """Return a stream's configuration; make the stream if there is none. Making it twice changes nothing."""
    client = await connect_any(access)
    try:
        if (found := await stream_config(client, config.name)) is not None:
            return found
        answer = await client.ask("STREAM.CREATE", config.name, config.order())
        if (error := answer.get("error")) is None:
            made: dict[str, Any] = answer["config"]
            return made
        if error.get("code") == 503 or _is_only_offline(error):
            raise UnavailableError(f"{client.server}: stream {config.name}: {error.get('description')}")
        # Another shard process may have made it meanwhile, with another bound.
        if (found := await stream_config(client, config.name)) is not None:
            return found
        refused = f"{client.server} refuses stream {config.name}: {error.get('description')}"
        if error.get("err_code") in _NO_ROOM or "storage" in str(error.get("description")):
            refused += (
                f"; it reserves {format_size(config.max_bytes)} on each of {counted(config.num_replicas, 'server')}: "
                "lower --log-max-bytes, or give the servers, or our account there, more room (max_file)"
            )
        raise ConfigError(refused)
    finally:
        await client.close()
