"""Checkpoints of one rank and of several, and what a resumed run sends, with real servers."""

from __future__ import annotations

import copy
import gc
import json
import logging
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from held_ports import hold_ports
from ranks import run_ranks
from resumed_training import ROWS as RANK_ROWS
from resumed_training import Saved, resume_on_rank, resumed_on_rank, train_on_rank
from scripted_training import run_on
from set_back_training import ROWS, Trainer, put_back
from stored_rows import read_rows
from streamed_training import attached
from text_scripts import Script, scripts
from torch import distributed as dist
from torch.distributed import checkpoint as dcp

from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import (
    ConfigError,
    RowRangeError,
    StorageError,
    UnavailableError,
    UnknownTableError,
    UnsupportedModelError,
)
from headrace.schemas.predecessors import Predecessor
from headrace.streamer import RawEmbeddingStreamer, api
from headrace.streamer.api import detach
from headrace.streamer.delivery.rendezvous import Store
from headrace.streamer.resume import Resumption, RunState, digest_of


@scripts(__file__, "resume")
def test_scripts(server: ServerProcess, script: Script, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run goes on as the scripts say."""
    run_on(server.address, script, tmp_path, caplog)


def test_wrong_states_are_refused(server: ServerProcess) -> None:
    """The error says what is wrong with a state."""
    with RawEmbeddingStreamer(server.address, run="c") as streamer:
        state = streamer.state_dict()
        with pytest.raises(ConfigError, match="attach the model"):
            streamer.load_state_dict(state)
        trainer = Trainer("c")
        streamer.attach(trainer.model, trainer.optimizer, publish="updated")
        for wrong, message in (
            (state | {"run": "other"}, "run 'other'"),
            (state | {"version": 7}, "version 7"),
            (state | {"step": 2**70}, f"step {2**70} after"),
            ({"version": 1, "run": "c"}, "lacks 'epoch'"),
            ("", "load the checkpoint"),
        ):
            with pytest.raises(ConfigError, match=message):
                streamer.load_state_dict(wrong)


def test_a_distributed_checkpoint_keeps_the_state(server: ServerProcess, tmp_path: Path) -> None:
    """It flattens dicts and lists, and has to find each key again when it loads."""
    trainer = Trainer("kept")
    with attached(server.address, trainer, run="kept") as streamer:
        trainer.train([1, 2])
        streamer.flush()
        text = streamer.state_of_all_ranks()
        dcp.save({"model": trainer.model.state_dict(), "streamer": text}, checkpoint_id=tmp_path / "saved")
        trainer.train([2, 3])
        streamer.flush()
    state = {"model": trainer.model.state_dict(), "streamer": ""}
    dcp.load(state, checkpoint_id=tmp_path / "saved")
    assert state["streamer"] == text
    trainer.model.load_state_dict(state["model"])
    with attached(server.address, trainer, run="kept") as streamer:
        assert streamer.load_state_dict(state["streamer"]) == 2


def test_a_streamer_that_is_replaced(server: ServerProcess) -> None:
    """As when a notebook's cell runs again: the new one sends what the old one has left, and the old one is closed.

    Also of a second model, and after an attach that failed.
    """
    trainer, second = Trainer("again"), Trainer("second")
    old = attached(server.address, trainer, run="again")
    old.attach(second.model, second.optimizer, publish="updated")
    for each in (trainer, second):
        each.train([1, 2, 3])
    old.flush()
    old.pause()
    trainer.train([3, 4])
    second.train([5])
    old.evict("again.weight", [2])
    assert "4 rows to send" in repr(old)
    new = RawEmbeddingStreamer(server.address, run="again")
    with pytest.raises(UnsupportedModelError, match="replace=True"):
        new.attach(trainer.model, trainer.optimizer, publish="updated")
    with pytest.raises(ConfigError, match="typo"):
        new.attach(trainer.model, trainer.optimizer, replace=True, tables=["typo"])
    assert repr(old).endswith(": closed>")
    for each in (trainer, second):
        new.attach(each.model, each.optimizer, replace=True, publish="updated")
    trainer.train([6])  # the old one would raise that it is fenced
    assert new.stats().step == old.stats().step + 1
    report = new.audit()
    assert report.is_equal, str(report)
    assert report.num_rows == 2 * ROWS - 1
    assert read_rows(server.address, "again.weight", [2]).presence.tolist() != [1]
    with pytest.raises(ConfigError, match="streams the model already"):
        new.attach(trainer.model, trainer.optimizer, replace=True, publish="updated")
    assert "0 rows to send" in repr(new)
    assert "<td>again.weight</td>" in new._repr_html_()
    new.close()


def test_a_streamer_of_another_run_is_replaced(server: ServerProcess) -> None:
    """It flushes first, and so does one that only the model knows any more; a newer one of its run is not replaced."""
    trainer = Trainer("moved")
    first = attached(server.address, trainer, run="moved", model="one")
    first.pause()
    trainer.train([1, 2, 3])
    with RawEmbeddingStreamer(server.address, run="moved-on", model="two") as second:
        second.attach(trainer.model, trainer.optimizer, replace=True, publish="updated")
        assert (read_rows(server.address, "one:moved.weight", [1, 2, 3]).presence == 1).all()
        second.pause()
        trainer.train([7])
        assert detach(trainer.model) == 1
        assert (read_rows(server.address, "two:moved.weight", [7]).presence == 1).all()
        assert detach(trainer.model) == 0
    older, newer = (RawEmbeddingStreamer(server.address, run="moved-on", model="two") for _ in range(2))
    newer.attach(trainer.model, trainer.optimizer, publish="updated")
    with newer:
        with pytest.raises(ConfigError, match="has a newer streamer"):
            older.attach(trainer.model, trainer.optimizer, replace=True, publish="updated")
        older.close(flush=False)


def test_a_streamer_of_the_same_run_at_another_server_is_replaced(server: ServerProcess, tmp_path: Path) -> None:
    """It is not fenced, and flushes; if it cannot, it goes on."""
    trainer = Trainer("there")
    with ServerProcess.start(tmp_path / "data") as other:
        first = attached(other.address, trainer, run="there", model="there")
        first.pause()
        trainer.train([1, 2])
        here = RawEmbeddingStreamer(server.address, run="there", model="there")
        here.attach(trainer.model, trainer.optimizer, replace=True, publish="updated")
        assert (read_rows(other.address, "there:there.weight", [1, 2]).presence == 1).all()
        here.close()
        second = attached(other.address, trainer, run="there", model="there", flush_timeout_s=0.5)
        second.pause()
        trainer.train([3])
        other.kill()
    here = RawEmbeddingStreamer(server.address, run="there", model="there")
    with pytest.raises(UnavailableError):
        here.attach(trainer.model, trainer.optimizer, replace=True, publish="updated")
    assert "1 table" in repr(second)
    second.close(flush=False)
    here.close()


def test_a_streamer_that_is_lost_is_replaced(server: ServerProcess) -> None:
    """One that nobody has closed, and that went with its optimizer, may have left anything: all rows are sent."""
    trainer = Trainer("lost")
    streamer = attached(server.address, trainer, run="lost", model="lost")
    streamer.pause()
    trainer.train([1, 2])
    trainer.optimizer = torch.optim.Adagrad(trainer.model.parameters(), lr=0.1)
    lost = weakref.ref(streamer)
    del streamer
    gc.collect()
    assert lost() is None
    assert detach(trainer.model) == 0
    with RawEmbeddingStreamer(server.address, run="lost", model="lost") as streamer:
        streamer.attach(trainer.model, trainer.optimizer, publish="updated")
        assert streamer.audit(only_present=False).is_equal


def test_fetch(server: ServerProcess) -> None:
    """`fetch` returns present rows in the order of the ids, which may repeat."""
    trainer = Trainer("d")
    with attached(server.address, trainer, run="d") as streamer:
        trainer.train([7, 8])
        rows = streamer.fetch("d.weight", torch.tensor([[8, 399], [8, 7]], dtype=torch.int32))
        ids = torch.tensor([8, 399, 8, 7])
        assert torch.equal(rows.row_ids, ids)
        assert torch.equal(rows.weights, trainer.table.weight[ids])
        assert torch.equal(rows.states["sum"], trainer.optimizer.state[trainer.table.weight]["sum"][ids])
        assert rows.columns == ((0, 4),)
        with pytest.raises(RowRangeError, match="row 400"):
            streamer.fetch("d.weight", torch.tensor([1, 400]))
        with pytest.raises(UnknownTableError, match=r"the nearest is 'd\.weight'"):
            streamer.fetch("d.wait", torch.tensor([1]))


MISSING, PRESENT, TRAINED = 0, 1, list(range(0, RANK_ROWS, 5))
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


def _train(server: ServerProcess, run: str, *, paused_rank: int = -1, evicted: tuple[int, ...] = ()) -> list[Saved]:
    return run_ranks(train_on_rank, 2, server.address, run, paused_rank, list(evicted))


def _presence(server: ServerProcess, run: str) -> list[int]:
    return read_rows(server.address, f"{run}.weight", range(RANK_ROWS)).presence.tolist()


def _state(**changes: Any) -> RunState:
    fields = {"run": "r", "epoch": 2, "step": 3, "acked_step": 3, "is_drained": True, "server_ids": ("a",)}
    fields |= {"client": "rank0", "world_size": 1, "tables": (digest_of("t"),), "layout": "l"}
    return RunState(**(fields | changes))


def _check_rows(server: ServerProcess, run: str, saved: Saved, rows: list[int]) -> None:
    stored = read_rows(server.address, f"{run}.weight", rows)
    assert stored.presence.tolist() == [PRESENT] * len(rows)
    assert np.array_equal(stored.weights, saved.weights[rows])


# By case: the state, or states, that each rank goes on from, of those that the two ranks have saved.
GIVEN: dict[str, Callable[[list[Any]], list[Any]]] = {
    "one rank, all states": lambda states: [states],
    "one rank, all states in a text": lambda states: [json.dumps(states)],
    "one rank, rank 0's state": lambda states: states[:1],
    "each its own": lambda states: states,
    "both rank 0's state": lambda states: [states[0]] * 2,
}


@pytest.mark.parametrize("case", GIVEN)
def test_rows_that_a_rank_had_not_sent_are_sent(server: ServerProcess, case: str) -> None:
    """A run that resumes sends what rank 1 had not sent, whatever states its ranks are given."""
    run = f"unsent-{[*GIVEN].index(case)}"
    saved = _train(server, run, paused_rank=1)
    assert [one.state["is_drained"] for one in saved] == [True, False]
    missing = [row for row, presence in enumerate(_presence(server, run)) if row in TRAINED and presence != PRESENT]
    assert 0 < len(missing) < len(TRAINED)
    given = GIVEN[case]([one.state for one in saved])
    if len(given) == 1:
        resume_on_rank(0, server.address, run, saved[0].weights, given)
    else:
        marked = run_ranks(resume_on_rank, 2, server.address, run, saved[0].weights, given)
        assert case != "each its own" or (marked[0] == 0 and marked[1] > 0)
    _check_rows(server, run, saved[0], TRAINED)


def test_only_what_differs_is_sent_by_another_number_of_ranks(server: ServerProcess) -> None:
    """With the states of all ranks, all drained, other numbers of ranks have nothing to send."""
    run = "drained"
    saved = _train(server, run)
    states = saved[0].all_states
    assert states == saved[1].all_states
    assert resume_on_rank(0, server.address, run, saved[0].weights, [states]) == 0
    assert run_ranks(resume_on_rank, 3, server.address, run, saved[0].weights, [states] * 3) == [0, 0, 0]
    assert _presence(server, run).count(PRESENT) == len(TRAINED)


def test_evictions_of_all_ranks_stay(server: ServerProcess) -> None:
    """A run that goes on alone, from the states of all ranks, has the rows deleted that any of them had evicted."""
    run = "evicted"
    saved = _train(server, run, evicted=(5, 95))
    assert [one.state["evicted"] for one in saved] == [{f"{run}.weight": [5]}, {f"{run}.weight": [95]}]
    resume_on_rank(0, server.address, run, saved[0].weights, [[one.state for one in saved]])
    presence = _presence(server, run)
    assert [presence[5], presence[95]] == [MISSING, MISSING]
    _check_rows(server, run, saved[0], [row for row in TRAINED if row not in (5, 95)])


def test_each_rank_has_found_the_new_store_at_its_own_moment(server: ServerProcess) -> None:
    """Where a rank had not met the new store yet that another had, whoever goes on with its rows sends them all."""
    run = "moments"
    saved = _train(server, run)
    states = [saved[0].state, saved[1].state | {"server_ids": ["gone", saved[1].state["server_ids"][1]]}]
    ranks = run_ranks(resume_on_rank, 2, server.address, run, saved[0].weights, [states] * 2)
    assert ranks[0] == 0
    assert 0 < ranks[1] < RANK_ROWS
    assert resume_on_rank(0, server.address, run, saved[0].weights, [states]) == RANK_ROWS


def test_the_last_acked_places_of_all_ranks_go_on(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next checkpoint names each shard's last acked place on any rank, checked with one query."""
    run = "places"
    saved = _train(server, run)
    states = [RunState.from_dict(one.state) for one in saved]
    asked: list[Any] = []
    ask = api.ask_store
    monkeypatch.setattr(api, "ask_store", lambda *args: asked.append(args) or ask(*args))
    with resumed_on_rank(server.address, run, saved[0].weights) as streamer:
        assert streamer.load_state_dict([one.state for one in saved], timeout_s=60) == 0
        found = RunState.from_dict(streamer.state_dict())
    assert len(asked) == 1
    for shard in range(2):
        last = max(states, key=lambda state: state.places[shard][1])
        assert (found.places[shard], found.writer_of(shard)) == (last.places[shard], last.writer_of(shard))
    assert "sending rows that the store lacks" not in caplog.text
    # A place that the server never had: it was set back, which either rank's state alone shows.
    for rank in range(2):
        caplog.clear()
        ahead = [one.state for one in saved]
        ahead[rank] = ahead[rank] | {"places": [(9, 10**6), (9, 10**6)]}
        resume_on_rank(0, server.address, run, saved[0].weights, [ahead])
        assert "the store was set back since the checkpoint" in caplog.text


@pytest.mark.parametrize(
    ("server_ids", "places", "lacks"),
    [
        (("new",) * 3, ((1, 2),) * 3, False),
        (("old",) * 2, ((9, 20), (9, 30)), False),  # just what the new server has
        (("old",) * 2, ((9, 20), (9, 31)), True),  # acked, and not there
        (("older",), ((5, 7),), False),
        (("old",) * 2, (), None),
        (("old", "new"), ((9, 20), (9, 30)), None),
        (("gone",) * 2, ((0, 0),) * 2, None),
    ],
)
def test_a_checkpoint_of_before_another_number_of_shards_counts_as_the_servers(
    server_ids: tuple[str, ...], places: tuple[tuple[int, int], ...], lacks: bool | None
) -> None:
    """What a predecessor had acked is on the new server up to the positions that this one names for it."""
    predecessors = Predecessor(server_id="older", seqs=(7,)), Predecessor(server_id="old", seqs=(20, 30))
    store = Store(shards=(), highest_epoch=1, predecessors=predecessors)
    resumption = Resumption.of([_state(server_ids=server_ids, places=places)], client="rank0", world_size=1, layout="l")
    assert resumption.lacks_acked(("new",) * 3, store) is lacks


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"world_size": 2}, "1 of 2 ranks' states"),
        ({"layout": "other"}, None),
        ({"client": "rank9"}, None),
        ({"is_drained": False}, "still on their way"),
        ({"evicted": {"u": [1]}}, "evict"),
        ({"tables": (digest_of("u"),)}, "was not streamed"),
    ],
)
def test_a_checkpoint_that_does_not_say_what_changed_tells_why(changes: dict[str, Any], reason: str | None) -> None:
    """Each reason to send rows that the store lacks has its own text."""
    resumption = Resumption.of([_state(**changes)], client="rank0", world_size=1, layout="l")
    doubt = resumption.why_incomplete("t")
    assert doubt is None if reason is None else doubt is not None and reason in doubt


def test_only_a_rank_with_the_rows_of_then_goes_on_from_its_state_alone() -> None:
    """Another rank, another number of ranks or other rows need the states of all ranks."""
    mine = _state(world_size=2)
    other = _state(client="rank1", world_size=2, is_drained=False, step=8)
    own = Resumption.of([other, mine], client="rank0", world_size=2, layout="l")
    assert (own.continues_rank, own.relevant, own.first, own.step) == (True, (mine,), mine, 8)
    assert own.why_incomplete("t") is None
    for changed in ({"client": "rank9"}, {"world_size": 1}, {"layout": "other"}):
        place: Any = {"client": "rank0", "world_size": 2, "layout": "l"} | changed
        all_told = Resumption.of([other, mine], **place)
        assert not all_told.continues_rank
        assert set(map(id, all_told.relevant)) == {id(mine), id(other)}
        assert "still on their way" in (all_told.why_incomplete("t") or "")
    twice = Resumption.of([mine, mine], client="rank0", world_size=1, layout="l")
    assert "1 of 2 ranks' states" in (twice.why_incomplete("t") or "")


def test_states_of_different_checkpoints_are_refused(server: ServerProcess) -> None:
    """States of different runs or epochs are refused together."""
    for states in ([], [_state(), _state(epoch=3)], [_state(), _state(run="s")]):
        with pytest.raises(ConfigError, match=r"no state to resume from|not of one checkpoint"):
            Resumption.of(states, client="rank0", world_size=1, layout="")
    with RawEmbeddingStreamer(server.address, run="none") as streamer, pytest.raises(ConfigError, match="no state"):
        streamer.load_state_dict([])


@pytest.mark.parametrize("wrong", [None, "text", 3, [None], [{"version": 1}, 4]])
def test_what_is_no_state_is_refused(wrong: Any) -> None:
    """Anything else than a state, or a list of states, is a `ConfigError`."""
    with pytest.raises(ConfigError, match="a streamer's state"):
        RunState.from_any(wrong)


@pytest.mark.parametrize("knows_it", [True, False], ids=["of its epoch", "of before its epoch"])
def test_a_running_trainer_is_told(tmp_path: Path, knows_it: bool) -> None:
    """Streaming ends with a reason if acked data is gone, also if another run has written since."""
    data, older, port = tmp_path / "data", tmp_path / "older", hold_ports()
    trainer, other = Trainer(), Trainer()
    if not knows_it:
        ServerProcess.start(data, port=port).close()
        shutil.copytree(data, older)
    with ServerProcess.start(data, port=port) as server:
        streamer = attached(server.address, trainer, run="run")
        trainer.step(0, 50)
        streamer.flush()
    if knows_it:
        shutil.copytree(data, older)
    with ServerProcess.start(data, port=port):
        trainer.step(50, 100)
        streamer.flush()
    put_back(older, data)
    with ServerProcess.start(data) as server, RawEmbeddingStreamer(server.address, run="another", model="a") as another:
        another.attach(other.model, other.optimizer, publish="updated")
        other.step(100, 200)
        another.flush()
    with ServerProcess.start(data, port=port):
        with pytest.raises(StorageError, match=r"has lost acked data: .* set back to an older copy"):
            trainer.step(0, 50)
            streamer.flush()
        streamer.close()


@pytest.mark.parametrize(("num_lost", "num_written"), [(3, 0), (1, 3)], ids=["its log ends before", "it has overtaken"])
def test_a_resumed_run_sends_what_was_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_lost: int, num_written: int
) -> None:
    """Rows that the checkpoint counts as sent, and that the store has lost since, are sent again."""
    data, older, port = tmp_path / "data", tmp_path / "older", hold_ports(2)
    trainer, resumed, other = Trainer(), Trainer(), Trainer("other")
    with ServerProcess.start(data, shards=2, port=port) as server:
        streamer = attached(server.address, trainer, run="run")
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
        with attached(server.address, other, run="another") as another:
            for _ in range(num_written):
                other.step(0, 100)
                another.flush()
        resumed.load(saved)
        with attached(server.address, resumed, run="run") as streamer:
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
    """A resumed run that has sent nothing saves the places that it was resumed from, also over several runs."""
    data, older, port = tmp_path / "data", tmp_path / "older", hold_ports(2)
    trainer, resumed = Trainer(), Trainer()
    with ServerProcess.start(data, shards=2, port=port) as server:
        streamer = attached(server.address, trainer, run="run")
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
            with attached(server.address, resumed, run="run") as streamer:
                assert streamer.load_state_dict(state) == 0
                state = json.loads(json.dumps(streamer.state_dict()))
                assert state["is_drained"]
    assert "set back" not in caplog.text
    put_back(older, data)
    with ServerProcess.start(data) as server:
        # Other trainers have taken as many epochs since.
        for _ in range(2):
            RawEmbeddingStreamer(server.address, run="run").close()
        with attached(server.address, resumed, run="run") as streamer:
            assert streamer.epoch >= state["epoch"]
            assert streamer.load_state_dict(state) == ROWS - 50
            assert "the store was set back since the checkpoint" in caplog.text
