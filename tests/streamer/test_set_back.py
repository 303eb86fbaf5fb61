"""Trainers whose server was set back to an older copy of itself; with real servers."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from pathlib import Path

import pytest
from held_ports import hold_ports
from set_back_training import ROWS, Trainer, put_back

from headrace.paramserver.supervisor.launch import ServerProcess
from headrace.schemas.errors import StorageError
from headrace.streamer import RawEmbeddingStreamer


@pytest.mark.parametrize("knows_it", [True, False], ids=["of its epoch", "of before its epoch"])
def test_a_running_trainer_is_told(tmp_path: Path, knows_it: bool) -> None:
    """What was acked is not there any more, also where another run has written since: streaming ends and says why."""
    data, older, port = tmp_path / "data", tmp_path / "older", hold_ports(2)
    trainer, other = Trainer(), Trainer()
    with ServerProcess.start(data, shards=2, port=port) as server:
        pass
    if not knows_it:
        shutil.copytree(data, older)
    with ServerProcess.start(data, port=port) as server:
        streamer = RawEmbeddingStreamer(server.address, run="run")
        streamer.attach(trainer.model, trainer.optimizer)
        trainer.step(0, 50)
        streamer.flush()
    if knows_it:
        shutil.copytree(data, older)
    with ServerProcess.start(data, port=port):
        trainer.step(50, 100)
        streamer.flush()
    put_back(older, data)
    with ServerProcess.start(data) as server, RawEmbeddingStreamer(server.address, run="another") as another:
        another.attach(other.model, other.optimizer)
        for _ in range(5):
            other.step(100, 200)
            another.flush()
    with ServerProcess.start(data, port=port):
        with pytest.raises(StorageError, match=r"has lost acked data: .* set back to an older copy"):
            trainer.step(0, 50)
            streamer.flush()
        streamer.close()


@pytest.mark.parametrize(
    ("num_lost", "num_written"), [(20, 0), (1, 5)], ids=["its log ends before", "it has overtaken"]
)
def test_a_resumed_run_sends_what_was_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_lost: int, num_written: int
) -> None:
    """The checkpoint counts rows as sent that the store has lost since: they are sent again."""
    data, older, port = tmp_path / "data", tmp_path / "older", hold_ports(2)
    trainer, resumed, other = Trainer(), Trainer(), Trainer("other")
    with ServerProcess.start(data, shards=2, port=port) as server:
        streamer = RawEmbeddingStreamer(server.address, run="run")
        streamer.attach(trainer.model, trainer.optimizer)
        trainer.step(0, 100)
        streamer.flush()
        of_before = copy.deepcopy(streamer.state_dict())
    shutil.copytree(data, older)
    with ServerProcess.start(data, port=port):
        for _ in range(num_lost):
            trainer.step(50, 150)
            streamer.flush()
        saved, state = trainer.save(), json.loads(json.dumps(streamer.state_dict()))
        assert state["is_drained"]
        streamer.close()
    put_back(older, data)
    with ServerProcess.start(data) as server:
        with RawEmbeddingStreamer(server.address, run="another") as another:
            another.attach(other.model, other.optimizer)
            for _ in range(num_written):
                other.step(0, 100)
                another.flush()
        resumed.load(saved)
        with RawEmbeddingStreamer(server.address, run="run") as streamer:
            streamer.attach(resumed.model, resumed.optimizer)
            with caplog.at_level(logging.WARNING):
                assert streamer.load_state_dict(state) == ROWS - 50
            assert "the store was set back since the checkpoint" in caplog.text
            # A checkpoint that is saved now does not name places that the store has lost.
            assert [log_seq for _, log_seq in streamer.state_dict()["places"]] == [0, 0]
            streamer.flush()
            assert streamer.audit(only_present=False).num_rows == ROWS
            assert streamer.audit().is_equal
            caplog.clear()
            streamer.load_state_dict(of_before)  # the older copy has all of that
            assert streamer.load_state_dict(streamer.state_dict()) == 0
            assert "set back" not in caplog.text
            # Of a checkpoint that names no places: epochs only rise.
            streamer.load_state_dict({**of_before, "places": [], "epoch": streamer.epoch + 1})
            assert "set back" in caplog.text


def test_a_checkpoint_before_the_first_ack_knows_what_was_acked_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A resumed run that has sent nothing yet saves the places that it was resumed from, over several runs too."""
    data, older, port = tmp_path / "data", tmp_path / "older", hold_ports(2)
    trainer, resumed = Trainer(), Trainer()
    with ServerProcess.start(data, shards=2, port=port) as server:
        streamer = RawEmbeddingStreamer(server.address, run="run")
        streamer.attach(trainer.model, trainer.optimizer)
        trainer.step(0, 100)
        streamer.flush()
    shutil.copytree(data, older)
    with ServerProcess.start(data, port=port) as server:
        trainer.step(50, 150)
        streamer.flush()
        saved, state = trainer.save(), streamer.state_dict()
        streamer.close()
        resumed.load(saved)
        for _ in range(2):
            with RawEmbeddingStreamer(server.address, run="run") as streamer:
                streamer.attach(resumed.model, resumed.optimizer)
                assert streamer.load_state_dict(state) == 0
                state = json.loads(json.dumps(streamer.state_dict()))
                assert state["is_drained"]
    assert "set back" not in caplog.text
    put_back(older, data)
    with ServerProcess.start(data) as server:
        # Other trainers have taken as many epochs since.
        for _ in range(2):
            RawEmbeddingStreamer(server.address, run="run").close()
        with RawEmbeddingStreamer(server.address, run="run") as streamer:
            streamer.attach(resumed.model, resumed.optimizer)
            assert streamer.epoch >= state["epoch"]
            assert streamer.load_state_dict(state) == ROWS - 50
            assert "the store was set back since the checkpoint" in caplog.text
