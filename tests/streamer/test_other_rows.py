"""A model that is not what the server has is refused before anything is sent, unless somebody says what counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks
from scripted_training import run_on
from set_back_training import Trainer
from text_scripts import Script, scripts
from two_starts import start_on_rank

from headrace.paramserver.reading.blocking_reader import BlockingReader
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError
from headrace.streamer import RawEmbeddingStreamer


@scripts(__file__, "other_rows")
@pytest.mark.filterwarnings("ignore:.*was frozen:RuntimeWarning")
def test_scripts(server: ServerProcess, script: Script, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Other rows than the server's are refused as the scripts say."""
    run_on(server.address, script, tmp_path, caplog)


def test_the_ways_on_are_named(server: ServerProcess) -> None:
    """The error says which tables and rows differ, and each way on."""
    for seed in (1, 2):
        trainer = Trainer("t", seed=seed)
        streamer = RawEmbeddingStreamer(server.address, run="ways", model="ways")
        streamer.attach(trainer.model, trainer.optimizer)
        if seed == 1:
            streamer.close()
    words = r"other rows of ways:t\.weight than the model, as in rows 0, .*restore.*load_state_dict.*'all'.*'updated'"
    with pytest.raises(ConfigError, match=words):
        streamer.flush()
    streamer.close()


def test_all_ranks_refuse_what_differs_on_one(server: ServerProcess) -> None:
    """The others would train on, and wait for it in the next step. None has registered what is new in its model."""
    assert run_ranks(start_on_rank, 2, server.address, False) == ["equal", "equal"]
    assert run_ranks(start_on_rank, 2, server.address, False) == ["equal", "equal"]
    for told in run_ranks(start_on_rank, 2, server.address, True):
        assert "other rows of" in told and "on rank 1" in told
    with BlockingReader(server.address) as reader:
        assert not [name for name in reader.tables if name.endswith(("1.weight", "1.bias"))]
