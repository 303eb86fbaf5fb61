"""A server with another number of shards takes the place of the one that replicas follow; with real servers."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from fake_shard import hosted, replaced_at
from set_back_training import ROWS, Trainer
from waiting import wait_until

from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ReshardedError
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.resume import ask_store

NAME = "replaced"


def test_replicas_answer_from_the_old_copy_until_they_have_one_of_the_new_server(
    tmp_path: Path, server: ServerProcess
) -> None:
    """Replicas of each kind go over to the new server by themselves, once a trainer has ended a step there."""
    trainer, rows = Trainer(NAME), torch.arange(ROWS)

    def stream(address: str) -> RawEmbeddingStreamer:
        streamer = RawEmbeddingStreamer(address, run=NAME, model=NAME)
        streamer.attach(trainer.model, trainer.optimizer, publish="all")
        return streamer

    def shows(replica: EmbeddingReplica) -> bool:
        return torch.equal(replica.lookup(trainer.fqn, rows), trainer.table.weight.detach())

    with ExitStack() as stack:
        with ServerProcess.start(tmp_path / "data") as old:
            with stream(old.address) as streamer:
                trainer.step(0, 100)
            replicas = [
                stack.enter_context(EmbeddingReplica(old.address, model=NAME, fetch_wait_s=0.2, consistency=kind))
                for kind in ("latest", "step")
            ]
            assert all(map(shows, replicas))
        streamer = stack.enter_context(stream(server.address))
        front = stack.enter_context(hosted(replaced_at(old.address, by=server.address)))
        streamer.flush()
        for replica in replicas:
            wait_until(lambda replica=replica: shows(replica) and replica.failure is None, "the new server")
            assert server.address in repr(replica)
            assert len(replica.freshness()) == 2
            assert replica.audit().is_equal
        trainer.step(50, 200)
        streamer.flush()
        for replica in replicas:
            wait_until(lambda replica=replica: shows(replica), "what came afterwards")
        with pytest.raises(ReshardedError):  # what is no trainer and no replica is told
            ask_store(front.address, streamer.config, lambda reader: reader.status(), None)
