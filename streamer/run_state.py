"""What of a streamer travels in the trainer's checkpoint: a few numbers and names, ids of evicted rows, no values.

A trainer that starts again from a checkpoint may be behind its store (steps after the checkpoint had been acked) and
ahead of it (steps before it had not). So a resumed streamer does not count on numbers alone: it compares its rows with
the store's by digests, and sends those that differ. Rows that the store does not have at all are, in a run that sends
rows once they change, rows that never changed, as long as the checkpoint says that everything was acked when it was
made, and names no evicted rows, and the store was not set back since to a copy that lacks what had been acked then;
else they are sent too. A store that is not the one of the checkpoint gets every row. Evicted rows are deleted once
more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from headrace.schemas.errors import ConfigError

__all__ = ["RunState"]

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

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as `torch.save(weights_only=True)` and JSON take them."""
        values = {
            "server_ids": list(self.server_ids),
            "places": list(map(list, self.places)),
            "writers": list(map(list, self.writers)),
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
                step=int(state["step"]),
                acked_step=int(state["acked_step"]),
                is_drained=bool(state["is_drained"]),
                server_ids=tuple(map(str, state["server_ids"])),
                client=str(state.get("client", "")),
                places=tuple((int(client_seq), int(log_seq)) for client_seq, log_seq in state.get("places", ())),
                writers=tuple((int(epoch), str(client)) for epoch, client in state.get("writers", ())),
                evicted={str(fqn): list(map(int, rows)) for fqn, rows in state.get("evicted", {}).items()},
            )
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise ConfigError(f"a streamer's state lacks {exc}") from exc
