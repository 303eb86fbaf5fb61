"""A shard that lost rows it had acked amid training: `on_set_back="resend"` sends them again, with real servers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from held_ports import hold_ports
from set_back_training import ROWS, Trainer
from stored_rows import read_rows
from streamed_training import attached
from watched_server import wait_until

from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.idl import idl

EVICTED_BEFORE, EVICTED_AFTER, USED_AGAIN = [3, 4, 5], [10, 11, 12], 12


@pytest.mark.parametrize("num_lost_shards", [1, 2])
def test_rows_of_trainer_server_and_replica_are_equal_after_a_shard_was_set_back(
    tmp_path: Path, num_lost_shards: int
) -> None:
    """After the next flush every row is equal, bit for bit; rows that were evicted are gone again."""
    data, older, port = tmp_path / "data", tmp_path / "older", hold_ports(2)
    trainer = Trainer()
    with ServerProcess.start(data, shards=2, port=port) as server:
        streamer = attached(server.address, trainer, run="run", on_set_back="resend")
        trainer.step(0, 100)
        streamer.evict(trainer.fqn, EVICTED_BEFORE)
        streamer.flush()
    shutil.copytree(data, older)
    with ServerProcess.start(data, port=port) as server:
        trainer.step(50, 300)
        streamer.evict(trainer.fqn, EVICTED_AFTER)
        streamer.flush()
        trainer.train([USED_AGAIN])
        streamer.flush()
        replica = EmbeddingReplica(server.address, fetch_wait_s=0.2)
    for shard in range(num_lost_shards):
        shutil.rmtree(data / f"shard-000{shard}")
        shutil.copytree(older / f"shard-000{shard}", data / f"shard-000{shard}")
    with streamer, replica, ServerProcess.start(data, port=port) as server:
        trainer.step(200, 210)
        streamer.flush()
        assert streamer.audit().is_equal
        stored = read_rows(server.address, trainer.fqn, range(ROWS))
        evicted = [*EVICTED_BEFORE, *(row for row in EVICTED_AFTER if row != USED_AGAIN)]
        present = [row for row in range(ROWS) if stored.presence[row] == idl.RowPresence.PRESENT]
        assert not set(present) & set(evicted)
        assert set(present) >= set(range(300)) - set(evicted)
        assert torch.equal(torch.from_numpy(stored.weights[present]), trainer.table.weight.detach()[present])
        wanted = torch.zeros(ROWS, 4)
        wanted[present] = trainer.table.weight.detach()[present]
        wait_until(lambda: torch.equal(replica.lookup(trainer.fqn, torch.arange(ROWS)), wanted), "an equal replica")
