"""Who else may write to the tables that a trainer compares with the server's, and whether they have meanwhile."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from headrace.paramserver.reading.reader import EmbeddingReader

__all__ = ["OtherWriters", "find_other_writers"]


@dataclass(frozen=True, slots=True)
class OtherWriters:
    """The clients of some runs.

    Attributes:
        batches: Of each that has written to a shard: shard, run, client, epoch, and its last batch.
        older_start: An earlier start of the trainer's own run that is connected, in words; empty if there is none.
    """

    batches: frozenset[tuple[int, str, str, int, int]] = frozenset()
    older_start: str = ""


async def find_other_writers(reader: EmbeddingReader, runs: Container[str], *, run: str, epoch: int) -> OtherWriters:
    """Return the clients of runs, but for a trainer's own start: its run and epoch. Cancellation: harmless."""
    clients = [
        (shard, client)
        for shard, status in enumerate(await reader.status())
        for client in status.clients
        if client.run in runs and (client.run, client.epoch) != (run, epoch)
    ]
    return OtherWriters(
        batches=frozenset(
            (shard, client.run, client.client, client.epoch, client.last_client_seq)
            for shard, client in clients
            if client.last_client_seq
        ),
        older_start=next(
            (
                f"{client.client} of epoch {client.epoch}"
                for _, client in clients
                if client.run == run and client.epoch < epoch and client.is_connected
            ),
            "",
        ),
    )
