"""Checkpoints of several ranks, from which as many, fewer or other ones go on; with a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from evicting_training import read_rows
from ranks import run_ranks
from resumed_training import ROWS, Saved, resume_on_rank, resumed_on_rank, train_on_rank
from torch import distributed as dist

from headrace.paramserver.supervisor.launch import ServerProcess
from headrace.schemas.errors import ConfigError
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.run_state import Resumption, RunState, digest_of
from headrace.streamer.store_inquiry import StoreInquiry

PRESENT, DELETED, TRAINED = 1, 2, list(range(0, ROWS, 5))
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess.start(tmp_path_factory.mktemp("resume") / "data", shards=2) as server:
        yield server


def _train(server: ServerProcess, run: str, *, paused_rank: int = -1, evicted: tuple[int, ...] = ()) -> list[Saved]:
    return run_ranks(train_on_rank, 2, server.address, run, paused_rank, list(evicted))


def _presence(server: ServerProcess, run: str) -> list[int]:
    return read_rows(server.address, f"{run}.weight", range(ROWS)).presence.tolist()


def _state(**changes: Any) -> RunState:
    fields = {"run": "r", "epoch": 2, "step": 3, "acked_step": 3, "is_drained": True, "server_ids": ("a",)}
    fields |= {"client": "rank0", "world_size": 1, "tables": (digest_of("t"),), "layout": "l"}
    return RunState(**(fields | changes))


def _check_rows(server: ServerProcess, run: str, saved: Saved, rows: list[int]) -> None:
    stored = read_rows(server.address, f"{run}.weight", rows)
    assert stored.presence.tolist() == [PRESENT] * len(rows)
    assert np.array_equal(stored.weights, saved.weights[rows])


@pytest.mark.parametrize("which", ["all", "first"])
def test_rows_that_another_rank_had_not_sent_are_sent(server: ServerProcess, which: str) -> None:
    """A run that goes on alone sends what rank 1 had not, also where it is given rank 0's state only."""
    run = f"unsent-{which}"
    saved = _train(server, run, paused_rank=1)
    assert [one.state["is_drained"] for one in saved] == [True, False]
    missing = [row for row, presence in enumerate(_presence(server, run)) if row in TRAINED and presence != PRESENT]
    assert missing
    assert len(missing) < len(TRAINED)
    states = [one.state for one in saved]
    resume_on_rank(0, server.address, run, saved[0].weights, [states if which == "all" else states[0]])
    _check_rows(server, run, saved[0], TRAINED)


def test_only_what_differs_is_sent_by_another_number_of_ranks(server: ServerProcess) -> None:
    """With the states of all ranks, which had sent everything, other ranks have nothing to send."""
    run = "drained"
    saved = _train(server, run)
    states = [one.state for one in saved]
    assert resume_on_rank(0, server.address, run, saved[0].weights, [states]) == 0
    assert run_ranks(resume_on_rank, 3, server.address, run, saved[0].weights, [states] * 3) == [0, 0, 0]
    assert _presence(server, run).count(PRESENT) == len(TRAINED)


def test_each_rank_goes_on_from_its_own(server: ServerProcess) -> None:
    """As many ranks as before, each with its own state: rank 1 sends its rows, rank 0 has nothing to send."""
    run = "own"
    saved = _train(server, run, paused_rank=1)
    marked = run_ranks(resume_on_rank, 2, server.address, run, saved[0].weights, [one.state for one in saved])
    assert marked[0] == 0
    assert marked[1] > 0
    _check_rows(server, run, saved[0], TRAINED)


def test_a_rank_that_is_given_another_ones_state_does_not_trust_it(server: ServerProcess) -> None:
    """Where rank 0's state alone was saved, rank 1 sends the rows that the store lacks."""
    run = "foreign"
    saved = _train(server, run, paused_rank=1)
    run_ranks(resume_on_rank, 2, server.address, run, saved[0].weights, [saved[0].state] * 2)
    _check_rows(server, run, saved[0], TRAINED)


def test_evictions_of_all_ranks_stay(server: ServerProcess) -> None:
    """A run that goes on alone, from the states of all ranks, has the rows deleted that any of them had evicted."""
    run = "evicted"
    saved = _train(server, run, evicted=(5, 95))
    assert [one.state["evicted"] for one in saved] == [{f"{run}.weight": [5]}, {f"{run}.weight": [95]}]
    resume_on_rank(0, server.address, run, saved[0].weights, [[one.state for one in saved]])
    presence = _presence(server, run)
    assert [presence[5], presence[95]] == [DELETED, DELETED]
    _check_rows(server, run, saved[0], [row for row in TRAINED if row not in (5, 95)])


def test_each_rank_has_found_the_new_store_at_its_own_moment(server: ServerProcess) -> None:
    """Where a rank had not met the new store yet that another had, whoever goes on with its rows sends them all."""
    run = "moments"
    saved = _train(server, run)
    states = [saved[0].state, saved[1].state | {"server_ids": ["gone", saved[1].state["server_ids"][1]]}]
    ranks = run_ranks(resume_on_rank, 2, server.address, run, saved[0].weights, [states] * 2)
    assert ranks[0] == 0
    assert 0 < ranks[1] < ROWS
    assert resume_on_rank(0, server.address, run, saved[0].weights, [states]) == ROWS


def test_the_last_acked_places_of_all_ranks_go_on(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next checkpoint names of each shard what was acked last to any rank; one inquiry checks it."""
    run = "places"
    saved = _train(server, run)
    states = [RunState.from_dict(one.state) for one in saved]
    asked: list[Any] = []
    ask = StoreInquiry._ask
    monkeypatch.setattr(StoreInquiry, "_ask", lambda self, *args: asked.append(args) or ask(self, *args))
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


_OLDER = {"world_size": 0, "tables": (), "layout": ""}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        (_OLDER, "is of an older version"),
        ({"world_size": 2}, "1 of 2 ranks' states"),
        ({"layout": "other"}, None),
        ({"client": "rank9"}, None),
        ({"is_drained": False}, "still on their way"),
        ({"evicted": {"u": [1]}}, "evict"),
        ({"tables": (digest_of("u"),)}, "was not streamed"),
    ],
)
def test_a_checkpoint_that_does_not_say_what_changed_tells_why(changes: dict[str, Any], reason: str | None) -> None:
    """Each reason for which rows that a store lacks are sent has its words."""
    resumption = Resumption.of([_state(**changes)], client="rank0", world_size=1, layout="l")
    doubt = resumption.doubt_about("t")
    assert doubt is None if reason is None else doubt is not None and reason in doubt


def test_only_a_rank_with_the_rows_of_then_goes_on_from_its_state_alone() -> None:
    """As another rank, of another number, or with other rows it has to ask what all of them had sent."""
    mine = _state(world_size=2)
    other = _state(client="rank1", world_size=2, is_drained=False, step=8)
    own = Resumption.of([other, mine], client="rank0", world_size=2, layout="l")
    assert (own.is_own, own.told, own.first, own.step) == (True, (mine,), mine, 8)
    assert own.doubt_about("t") is None
    for changed in ({"client": "rank9"}, {"world_size": 1}, {"layout": "other"}):
        place: Any = {"client": "rank0", "world_size": 2, "layout": "l"} | changed
        all_told = Resumption.of([other, mine], **place)
        assert not all_told.is_own
        assert set(map(id, all_told.told)) == {id(mine), id(other)}
        assert "still on their way" in (all_told.doubt_about("t") or "")
    twice = Resumption.of([mine, mine], client="rank0", world_size=1, layout="l")
    assert "1 of 2 ranks' states" in (twice.doubt_about("t") or "")


def test_states_of_different_checkpoints_are_refused(server: ServerProcess) -> None:
    """States of two runs, or of two epochs of one, say nothing together."""
    for states in ([], [_state(), _state(epoch=3)], [_state(), _state(run="s")]):
        with pytest.raises(ConfigError, match=r"no state to go on from|not of one checkpoint"):
            Resumption.of(states, client="rank0", world_size=1, layout="")
    with RawEmbeddingStreamer(server.address, run="none") as streamer, pytest.raises(ConfigError, match="no state"):
        streamer.load_state_dict([])


@pytest.mark.parametrize("wrong", [None, "text", 3, [None], [{"version": 1}, 4]])
def test_what_is_no_state_is_refused(wrong: Any) -> None:
    """What a checkpoint has where a state is expected, and is none, is an error of ours, whatever it is."""
    with pytest.raises(ConfigError, match="a streamer's state"):
        RunState.from_any(wrong)
