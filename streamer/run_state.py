"""What of a streamer travels in the trainer's checkpoint: a few numbers and names, ids of evicted rows, no values.

A trainer that starts again from a checkpoint may be behind its store (steps after the checkpoint had been acked) and
ahead of it (steps before it had not). So a resumed streamer does not count on numbers alone: it compares its rows with
the store's by digests, and sends those that differ. Rows that the store does not have at all are, in a run that sends
rows once they change, rows that never changed, as long as the checkpoint says so (`Resumption.doubt_about`), and
the store was not set back since to a copy that lacks what had been acked then; else they are sent too. A store that is
not the one of the checkpoint gets every row. Evicted rows are deleted once more.

Each rank's state tells of the rows that this rank had. It is enough for a rank that has the same rows again; where
ranks or shardings have changed, or a rank is given the state of another, only the states of all ranks together are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from headrace.schemas.errors import ConfigError
from headrace.streamer.call_arguments import step_number
from headrace.streamer.taps.tapped_table import TappedTable

__all__ = ["Resumption", "RunState", "digest_of", "layout_of"]

# ON DISK, in checkpoints: a field's meaning never changes.
_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """A streamer at the time of a checkpoint.

    Attributes:
        run: Its name.
        epoch: In which it was.
        step: Last step boundary.
        acked_step: Last step of which every change was durable on every shard; -1 before the first.
        is_drained: Nothing was dirty or on its way.
        server_ids: Identities of the shards.
        client: Name of the rank within the run.
        places: By shard, client seq and place in its log of a batch that was acked, as of `ShardChannel.place`.
        writers: By shard, epoch and client of that batch; of the state itself where it names none.
        evicted: By fqn, global ids of this rank's rows that were evicted and not used since.
        world_size: Ranks of the run; 0 where that is not known.
        tables: Digests of the names of the tables that were streamed, on any rank.
        layout: Digest of which rows and columns of which tables this rank had.
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
    world_size: int = 0
    tables: tuple[str, ...] = ()
    layout: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as `torch.save(weights_only=True)` and JSON take them."""
        values = {
            "server_ids": list(self.server_ids),
            "places": list(map(list, self.places)),
            "writers": list(map(list, self.writers)),
            "tables": list(self.tables),
        }
        return {"version": _VERSION, **asdict(self), **values, "evicted": dict(self.evicted)}

    def writer_of(self, shard: int) -> tuple[int, str]:
        """Return who has written the batch at a shard's place: epoch and client."""
        return self.writers[shard] if shard < len(self.writers) else (self.epoch, self.client)

    def with_places_of(self, resumed: RunState | None) -> Self:
        """Return this with the places of the state that it goes on from, of shards that have acked nothing since."""
        if resumed is None or resumed.server_ids != self.server_ids or len(resumed.places) != len(self.places):
            return self
        states = [self if log_seq else resumed for _, log_seq in self.places]
        return replace(
            self,
            places=tuple(state.places[shard] for shard, state in enumerate(states)),
            writers=tuple(state.writer_of(shard) for shard, state in enumerate(states)),
        )

    @classmethod
    def from_any(cls, state: Any) -> list[Self]:
        """Read what one rank's `to_dict` has made, or a list of what several ranks' have.

        Raises:
            ConfigError: See `from_dict`.
        """
        states = [state] if isinstance(state, Mapping) else list(state) if isinstance(state, Iterable) else [state]
        for one in states:
            if not isinstance(one, Mapping):
                raise ConfigError(f"a streamer's state is a dict, or a list of dicts by rank; here is {one!r:.60}")
        return [cls.from_dict(one) for one in states]

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """Read what `to_dict` has made.

        Raises:
            ConfigError: It is something else, or of a newer version.
        """
        if state.get("version") != _VERSION:
            raise ConfigError(f"a streamer's state of version {state.get('version')!r}, this one reads {_VERSION}")
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
                world_size=int(state.get("world_size", 0)),
                tables=tuple(map(str, state.get("tables", ()))),
                layout=str(state.get("layout", "")),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise ConfigError(f"a streamer's state lacks {exc}") from exc


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """What a rank goes on from: its own state of a checkpoint, or those of several ranks.

    Attributes:
        states: At least one, all of one run and epoch; the rank's own first, if it is among them. Their stores may
            differ: where one was replaced, each rank has found that at its own moment.
        is_own: The first is of this rank, and it has the same rows of the same tables as then.
    """

    states: tuple[RunState, ...]
    is_own: bool

    @classmethod
    def of(cls, states: Sequence[RunState], *, client: str, world_size: int, layout: str) -> Self:
        """Look at states as a rank that is called so, and has this layout.

        Raises:
            ConfigError: There is none, or they are of different runs or epochs.
        """
        if not states:
            raise ConfigError("no state to go on from was given")
        if len({(state.run, state.epoch) for state in states}) > 1:
            raise ConfigError("the states are not of one checkpoint: their runs or epochs differ")
        first, *others = sorted(states, key=lambda state: state.client != client)
        is_own = (first.client, first.world_size, first.layout) == (client, world_size, layout)
        return cls(states=(first, *others), is_own=is_own)

    @property
    def first(self) -> RunState:
        """The rank's own state, or any."""
        return self.states[0]

    @property
    def told(self) -> tuple[RunState, ...]:
        """The states that tell of rows that this rank has now."""
        return self.states[:1] if self.is_own else self.states

    @property
    def step(self) -> int:
        """Last step boundary of any rank."""
        return max(state.step for state in self.states)

    @property
    def evicted(self) -> dict[str, list[int]]:
        """By fqn, rows that were evicted and not used since, of all these ranks."""
        found: dict[str, set[int]] = {}
        for state in self.states:
            for fqn, rows in state.evicted.items():
                found.setdefault(fqn, set()).update(rows)
        return {fqn: sorted(rows) for fqn, rows in found.items()}

    @property
    def last_acked(self) -> RunState:
        """The first state, with the last place of each shard that any of `told` names: no later one was acked."""
        told = [state for state in self.told if len(state.places) == len(self.first.server_ids)]
        if not told:
            return self.first
        last = [max(told, key=lambda state: state.places[shard][1]) for shard in range(len(self.first.server_ids))]
        return replace(
            self.first,
            places=tuple(state.places[shard] for shard, state in enumerate(last)),
            writers=tuple(state.writer_of(shard) for shard, state in enumerate(last)),
        )

    def doubt_about(self, fqn: str) -> str | None:
        """Return why the store may have lacked rows of a table, of those that this rank has now, that had changed.

        None where the states show that it had them all when they were made.
        """
        num_ranks = len({state.client for state in self.states})
        if any(not state.world_size for state in self.states):
            return "the state is of an older version, and does not say which rows it is of"
        if not self.is_own and num_ranks < self.first.world_size:
            return f"{num_ranks} of {self.first.world_size} ranks' states are here, and other rows are on this rank now"
        if not all(state.is_drained for state in self.told):
            return "changes were still on their way when the checkpoint was made"
        if any(state.evicted for state in self.told):
            return "the run evicts rows, and those that it evicted after the checkpoint are missing"
        if digest_of(fqn) not in self.first.tables:
            return "the table was not streamed when the checkpoint was made"
        return None


def digest_of(text: str) -> str:
    """Return 64 bits of a digest, in hexadecimal digits: a checkpoint has no names that it need not have."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def layout_of(tables: Iterable[TappedTable]) -> str:
    """Return a digest of which rows and columns of which tables a rank has."""
    parts = [
        (table.spec.fqn, table.row_offset, table.num_local_rows, table.shard.offset, table.shard.width)
        if table.index is None  # of virtual ids all rows are sent that are held
        else (table.spec.fqn,)
        for table in tables
    ]
    return digest_of(repr(sorted(parts)))
