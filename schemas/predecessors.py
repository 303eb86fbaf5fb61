"""Servers with other numbers of shards, whose place a server has taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

__all__ = ["Predecessor"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Predecessor:
    """A server whose place another one has taken.

    Attributes:
        server_id: Its identity.
        seqs: Of each of its shards, the record of the offer that was accepted: all before it was taken over.
    """

    server_id: str
    seqs: tuple[int, ...]

    def lacking(self, seqs: Sequence[int]) -> list[int]:
        """Return the shards, by index, of which records up to these were not all taken over."""
        pairs = enumerate(zip(seqs, self.seqs, strict=True))
        return [shard for shard, (seq, last_seq) in pairs if seq > last_seq]

    def to_json(self) -> dict[str, Any]:
        """Return a form that `json` can write."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Return what `to_json` wrote; raises `KeyError`, `TypeError` or `ValueError` for anything else."""
        return cls(server_id=str(values["server_id"]), seqs=tuple(map(int, values["seqs"])))
