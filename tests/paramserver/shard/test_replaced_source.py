"""A follower, with real servers."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fake_shard import hosted, replaced_at
from set_back_training import ROWS, Trainer
from stored_rows import read_rows
from waiting import wait_until

from headrace.paramserver.shard.launch import ServerProcess
from headrace.streamer import RawEmbeddingStreamer, StreamerConfig
from headrace.streamer.resume import ask_store


def following_of(address: str) -> Any:
    """Return the `idl.FollowingStatus` of a server's first shard."""
    (status,) = ask_store(address, StreamerConfig(), lambda reader: reader.status(), None)
    return status.following


def test_a_follower_whose_source_was_replaced_says_so_and_answers_with_what_it_has(tmp_path: Path) -> None:
    """Its status names the server that has other shards by now."""
    trainer, successor = Trainer(), "127.0.0.1:7999"
    with ExitStack() as stack:
        with ServerProcess.start(tmp_path / "data") as source:
            with RawEmbeddingStreamer(source.address, run="run") as streamer:
                streamer.attach(trainer.model, trainer.optimizer, publish="all")
                trainer.step(0, 10)
            copy = stack.enter_context(ServerProcess.start(tmp_path / "copy", follow=source.address))

            def is_equal() -> bool:
                rows = read_rows(copy.address, trainer.fqn, range(ROWS))
                return bool((rows.weights == trainer.table.weight.detach().numpy()).all())

            wait_until(is_equal, "the copy")
        stack.enter_context(hosted(replaced_at(source.address, by=successor)))
        wait_until(lambda: successor in (following_of(copy.address).failure or ""), "a failure that names it")
        assert is_equal()
