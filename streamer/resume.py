"""Save a streamer's state, without values, in the trainer's checkpoint, and find what a resumed trainer has to send.

A resumed trainer may be behind its store (later steps were acked) and ahead of it (earlier steps were not). So a
resumed streamer compares its rows with the store's by digests and sends those that differ. Rows that the store lacks
entirely are usually rows that never changed. They are sent only if the checkpoint cannot rule out otherwise
(`Resumption.why_incomplete`), or if the store was set back since and lacks what it had acked then. A store other than
the checkpoint's gets every row. One that has taken that one's place, with another number of shards, counts as the same
store: it names its predecessors, and up to which record of their logs it has all. Evicted rows are deleted once more.

Each rank's state describes the rows that this rank had, which suffices for a rank with the same rows again. After a
change of ranks or sharding, or with another rank's state, the states of all ranks are needed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self, TypeVar

from headrace.paramserver.reading.link import ShardLink, retry
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.system.text import first_of, format_seconds
from headrace.schemas.errors import ConfigError, GoneError, SetBackError, UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.log_records import unpack_header
from headrace.streamer.audit import mark_what_differs
from headrace.streamer.config import StreamerConfig, step_number
from headrace.streamer.delivery.rendezvous import Store, tls_context, token_of
from headrace.streamer.taps.tapped_table import TappedTable

__all__ = ["Resumption", "RunState", "ask_store", "digest_of", "layout_of", "mark_for_resume"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# ON DISK, in checkpoints: a field's meaning never changes.
_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """One rank's streamer at the time of a checkpoint.

    Attributes:
        run: Name of the run.
        epoch: Epoch of the run.
        step: Last step that has ended.
        acked_step: Last step of which every change was durable on every shard; -1 before the first.
        is_drained: Nothing was dirty or on its way.
        server_ids: Identities of the shards.
        client: Name of the rank within the run.
        places: By shard, client seq and log seq of a batch that was acked; see `ShardChannel.place`.
        writers: By shard, epoch and client of that batch; those of the state itself if missing.
        evicted: By fqn, global ids of this rank's rows that were evicted and not used since.
        world_size: Ranks of the run.
        tables: Digests of the names of the tables streamed on any rank.
        layout: Digest of the rows and columns of all tables on this rank.
    """

    run: str
    epoch: int
    step: int
    acked_step: int
    is_drained: bool
    server_ids: tuple[str, ...]
    client: str = ""
    places: tuple[tuple[int, int], ...] = ()
    writers: tuple[tuple[int, str], ...] = ()
    evicted: Mapping[str, Sequence[int]] = field(default_factory=dict)
    world_size: int = 1
    tables: tuple[str, ...] = ()
    layout: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, which `torch.save(weights_only=True)` and JSON can hold."""
        values = {
            "server_ids": list(self.server_ids),
            "places": list(map(list, self.places)),
            "writers": list(map(list, self.writers)),
            "tables": list(self.tables),
        }
        return {"version": _VERSION, **asdict(self), **values, "evicted": dict(self.evicted)}

    def writer_of(self, shard: int) -> tuple[int, str]:
        """Return epoch and client of the writer of the batch at a shard's place."""
        return self.writers[shard] if shard < len(self.writers) else (self.epoch, self.client)

    def with_places_of(self, resumed: RunState | None) -> Self:
        """Return this state, with the resumed state's places for shards that have acked nothing since."""
        if resumed is None or resumed.server_ids != self.server_ids or len(resumed.places) != len(self.places):
            return self
        return self._with_places([self if log_seq else resumed for _, log_seq in self.places])

    def _with_places(self, by_shard: Sequence[RunState]) -> Self:
        places = tuple(state.places[shard] for shard, state in enumerate(by_shard))
        return replace(self, places=places, writers=tuple(s.writer_of(shard) for shard, s in enumerate(by_shard)))

    @classmethod
    def from_any(cls, state: Any) -> list[Self]:
        """Read one rank's `to_dict`, a list of several ranks', or such a list in JSON; raises like `from_dict`."""
        if isinstance(state, str):
            try:
                state = json.loads(state)
            except ValueError as exc:
                raise ConfigError(
                    f"a streamer's state is {state!r:.60}: load the checkpoint first, and give what "
                    "state_of_all_ranks() returned"
                ) from exc
        states = list(state) if isinstance(state, Iterable) and not isinstance(state, Mapping) else [state]
        return [cls.from_dict(each) for each in states]

    @classmethod
    def from_dict(cls, state: Any) -> Self:
        """Read the result of `to_dict`.

        Raises:
            ConfigError: It is something else, or of a newer version.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(
                f"a streamer's state is a dict, or a list of dicts by rank: give what state_dict() returned, not "
                f"{state!r:.60}"
            )
        if state.get("version") != _VERSION:
            raise ConfigError(
                f"a streamer's state of version {state.get('version')!r}; this release reads {_VERSION}: take the "
                "release that saved it"
            )
        try:
            return cls(
                run=str(state["run"]),
                epoch=int(state["epoch"]),
                step=step_number(state["step"], after=-1),
                acked_step=int(state["acked_step"]),
                is_drained=bool(state["is_drained"]),
                server_ids=tuple(map(str, state["server_ids"])),
                client=str(state.get("client", "")),
                places=tuple((int(client_seq), int(log_seq)) for client_seq, log_seq in state.get("places", ())),
                writers=tuple((int(epoch), str(client)) for epoch, client in state.get("writers", ())),
                evicted={str(fqn): list(map(int, rows)) for fqn, rows in state.get("evicted", {}).items()},
                world_size=int(state["world_size"]),
                tables=tuple(map(str, state.get("tables", ()))),
                layout=str(state.get("layout", "")),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise ConfigError(f"a streamer's state lacks {exc}: give what state_dict() returned") from exc


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """The states that a rank resumes from: its own, or those of several ranks.

    Attributes:
        states: At least one, all of one run and epoch; the rank's own first, if there. Their stores may differ:
            each rank notices at its own time that a store was replaced.
        continues_rank: The first state is this rank's, and the rank has the same rows of the same tables again.
    """

    states: tuple[RunState, ...]
    continues_rank: bool

    @classmethod
    def of(cls, states: Sequence[RunState], *, client: str, world_size: int, layout: str) -> Self:
        """Order states for the rank with this client name and layout.

        Raises:
            ConfigError: There is none, or their runs or epochs differ.
        """
        if not states:
            raise ConfigError("no state to resume from was given: give what state_dict() returned")
        if len({(state.run, state.epoch) for state in states}) > 1:
            raise ConfigError("the states are not of one checkpoint: their runs or epochs differ; give those of one")
        first, *others = sorted(states, key=lambda state: state.client != client)
        continues_rank = (first.client, first.world_size, first.layout) == (client, world_size, layout)
        return cls(states=(first, *others), continues_rank=continues_rank)

    @property
    def first(self) -> RunState:
        """The rank's own state, or any."""
        return self.states[0]

    @property
    def relevant(self) -> tuple[RunState, ...]:
        """The states that describe rows that this rank has now."""
        return self.states[:1] if self.continues_rank else self.states

    @property
    def step(self) -> int:
        """Last step that has ended on any rank."""
        return max(state.step for state in self.states)

    @property
    def evicted(self) -> dict[str, list[int]]:
        """By fqn, the rows that were evicted on any of these ranks and not used since."""
        found: dict[str, set[int]] = {}
        for state in self.states:
            for fqn, rows in state.evicted.items():
                found.setdefault(fqn, set()).update(rows)
        return {fqn: sorted(rows) for fqn, rows in found.items()}

    def last_acked(self, server_ids: Sequence[str]) -> RunState | None:
        """Return the first relevant state of a server, with its last acked place of each shard; None without one."""
        num_shards = len(server_ids)
        states = [s for s in self.relevant if s.server_ids == tuple(server_ids) and len(s.places) == num_shards]
        if not states:
            return None
        last = [max(states, key=lambda state: state.places[shard][1]) for shard in range(num_shards)]
        return states[0]._with_places(last)

    def lacks_acked(self, server_ids: Sequence[str], store: Store) -> bool | None:
        """Return whether a server lacks what a predecessor of it had acked when a relevant state was saved.

        `server_ids` are those of its shards. None if such a state is neither of the server nor of a predecessor.
        """
        lacks = False
        for state in self.relevant:
            if state.server_ids == tuple(server_ids):
                continue
            predecessor = store.predecessor(state.server_ids, state.places)
            if predecessor is None:
                return None
            lacks |= bool(predecessor.lacking([seq for _, seq in state.places]))
        return lacks

    def why_incomplete(self, fqn: str) -> str | None:
        """Return why the store may have lacked changed rows of a table that this rank has now.

        None if the states show that it had them all when they were saved.
        """
        num_ranks = len({state.client for state in self.states})
        if not self.continues_rank and num_ranks < self.first.world_size:
            return f"{num_ranks} of {self.first.world_size} ranks' states are here, and this rank has other rows now"
        if not all(state.is_drained for state in self.relevant):
            return "changes were still on their way when the checkpoint was made"
        if any(state.evicted for state in self.relevant):
            return "the run evicts rows, and those that it evicted after the checkpoint are missing"
        if digest_of(fqn) not in self.first.tables:
            return "the table was not streamed when the checkpoint was made"
        return None


def digest_of(text: str) -> str:
    """Return a 64-bit digest in hexadecimal digits, so that a checkpoint holds no names that it does not need."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def layout_of(tables: Iterable[TappedTable]) -> str:
    """Return a digest of the rows and columns of all tables on a rank."""
    parts = [
        (table.spec.fqn, table.row_offset, table.num_local_rows, table.shard.offset, table.shard.width)
        if table.index is None  # with virtual ids all present rows are sent
        else (table.spec.fqn,)
        for table in tables
    ]
    return digest_of(repr(sorted(parts)))


def ask_store(
    address: str,
    config: StreamerConfig,
    ask: Callable[[EmbeddingReader], Awaitable[_T]],
    timeout_s: float | None,
) -> _T:
    """Run a coroutine with a reader of all shards, on a thread of its own; raise UnavailableError after the timeout."""

    async def run() -> _T:
        async with (
            asyncio.timeout(timeout_s),
            await EmbeddingReader.connect(
                address, timeout_s=config.request_timeout_s, ssl_context=tls_context(config), token=token_of(config)
            ) as reader,
        ):
            return await ask(reader)

    # The calling thread may have a running event loop, as in a notebook.
    with ThreadPoolExecutor(1, "headrace-ask") as pool:
        try:
            return pool.submit(asyncio.run, run()).result()
        except TimeoutError as exc:
            assert timeout_s is not None
            raise UnavailableError(f"the store has not been compared within {format_seconds(timeout_s)}") from exc


async def mark_for_resume(
    tables: Sequence[TappedTable],
    resumption: Resumption,
    epoch: int,
    reader: EmbeddingReader,
    *,
    lacks_acked: bool = False,
) -> bool:
    """Mark the rows that a resumed trainer has to send: those that differ in the store.

    Also marks the rows that the store lacks, if it may have lacked or lost changes of them, and logs which. It has if
    it `lacks_acked` of a predecessor's. REQUIRES: the tables are not trained meanwhile, and the relevant states are of
    this store or of its predecessors.

    Returns:
        Whether the store still has what it had acked at the checkpoint, or its logs cannot tell.
    """
    acked = resumption.last_acked([link.hello.server_id for link in reader.links])
    has_acked = not lacks_acked and epoch >= resumption.first.epoch
    has_acked = has_acked and (acked is None or await _has_acked(acked, reader))
    by_reason: dict[str, list[str]] = {}
    if has_acked:
        for fqn in dict.fromkeys(table.spec.fqn for table in tables if table.index is None and table.num_local_rows):
            if (reason := resumption.why_incomplete(fqn)) is not None:
                by_reason.setdefault(reason, []).append(fqn)
        if by_reason:
            reasons = "; ".join(f"{first_of(names)}: {reason}" for reason, names in by_reason.items())
            _log.warning("sending rows that the store lacks, also those that never changed: %s", reasons)
    else:
        _log.warning("the store was set back since the checkpoint: sending the rows that it has lost")
    incomplete = {fqn for names in by_reason.values() for fqn in names}
    await mark_what_differs(tables, reader, marks_absent=lambda fqn: not has_acked or fqn in incomplete)
    return has_acked


async def _has_acked(saved: RunState, reader: EmbeddingReader) -> bool:
    for shard, (link, (client_seq, log_seq)) in enumerate(zip(reader.links, saved.places, strict=False)):
        if log_seq and not await _has_batch(link, saved.run, *saved.writer_of(shard), client_seq, log_seq):
            return False
    return True


async def _has_batch(link: ShardLink, run: str, epoch: int, client: str, client_seq: int, log_seq: int) -> bool:
    """Return whether a shard's log still has a batch at the place that an ack once named."""
    request = idl.FetchUpdatesRequest(server_id=link.hello.server_id, from_seq=log_seq, max_bytes=1, wait_ms=0)
    try:
        reply = await retry(lambda: link.fetch_updates(request))
    except SetBackError:
        return False
    except GoneError:  # retention removed the record, so nothing can tell
        return True
    if not reply.records:
        return False
    record = reply.records[0]
    header = unpack_header(record.header)
    found = record.epoch, header.get("run"), header.get("client"), header.get("client_seq")
    return found == (epoch, run, client, client_seq)
