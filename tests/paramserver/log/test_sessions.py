"""Sessions: who may write, and which batch is next. No I/O."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from headrace.paramserver.expiry.policy import Horizon
from headrace.paramserver.log import sessions as sessions_module
from headrace.paramserver.log.sessions import Session, Sessions
from headrace.schemas.errors import CorruptionError, FencedError, RequestError, SequenceGapError
from headrace.schemas.version import last_epoch_after


def _accept(sessions: Sessions, client_seq: int, *, epoch: int = 5, client: str = "rank0") -> bool:
    session, is_new = sessions.accept("run", client, epoch, client_seq)
    if is_new:
        sessions.advance(
            session, client_seq=client_seq, step=client_seq, time_us=0, ends_step=True, is_exact_cut=client_seq % 2 == 0
        )
    return is_new


def _opened() -> Sessions:
    sessions = Sessions({})
    sessions.open("run", "rank0", 5, 0, 1)
    return sessions


def test_resends_have_no_effect_and_gaps_are_refused() -> None:
    """Each client seq takes effect once; a gap changes nothing, and its error has the expected seq."""
    sessions = _opened()
    assert [_accept(sessions, seq) for seq in (1, 1, 2, 1, 2)] == [True, False, True, False, False]
    with pytest.raises(SequenceGapError) as caught:
        _accept(sessions, 4)
    assert caught.value.expected_seq == 3
    assert _accept(sessions, 3)


def test_an_older_epoch_is_fenced_on_every_client_of_the_run() -> None:
    """Once one client of a run says hello in a newer epoch, no client of the older one may write."""
    sessions = _opened()
    sessions.open("run", "rank1", 5, 1, 2)
    sessions.open("run", "rank0", 6, 0, 1)
    for client in ("rank0", "rank1"):
        with pytest.raises(FencedError) as caught:
            _accept(sessions, 1, epoch=5, client=client)
        assert caught.value.epoch == 6
    with pytest.raises(FencedError):
        sessions.open("run", "rank1", 5, 1, 2)
    assert sessions.epoch_of("another run") == 0
    sessions.open("another run", "rank0", 2, 0, 1)
    assert sessions.highest_epoch == 6


def test_a_new_epoch_counts_from_one_again() -> None:
    """A restarted client begins at 1 in its new epoch."""
    sessions = _opened()
    _accept(sessions, 1)
    assert sessions.open("run", "rank0", 5, 0, 1).last_client_seq == 1
    assert sessions.open("run", "rank0", 6, 0, 1).last_client_seq == 0
    assert _accept(sessions, 1, epoch=6)


def test_a_client_must_say_hello_in_its_epoch() -> None:
    """An unknown client may not write, nor a known one in an epoch without its hello."""
    sessions = _opened()
    for who in ({"client": "rank7"}, {"epoch": 9}):
        with pytest.raises(RequestError, match="has not said hello"):
            _accept(sessions, 1, **who)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="below 1"):
        _accept(sessions, 0)


def test_sessions_come_back_from_metadata() -> None:
    """A restart needs only what `pack` saves; an unreadable entry stops it with the key."""
    sessions = _opened()
    for seq in (1, 2, 3):
        _accept(sessions, seq)
    meta: dict[bytes, bytes] = {b"other": b"x"}
    for session in sessions:
        meta |= session.pack()
    (restored,) = Sessions(meta)
    assert restored == Session("run", "rank0", 5, 0, 1, last_client_seq=3, step=3, exact_step=2, ended_client_seq=3)
    assert not _accept(Sessions(meta), 3)
    meta |= Session("run", "rank1", 4, 1, 2).pack()  # away since before the last restart of the run
    for order in (meta, dict(reversed(meta.items()))):
        assert Sessions(order).epoch_of("run") == 5
    with pytest.raises(CorruptionError, match="session/x"):
        Sessions({b"session/x": b"\xc1"})


def test_what_a_trainer_tells_of_its_cost_is_kept_in_memory() -> None:
    """The last cost that came with the end of a step counts; what is no finite number is ignored, and none is saved."""
    (session,) = sessions = _opened()
    told: list[tuple[bool, float | None, bool | None]] = [(False, 9.0, True), (True, 2.5, True), (True, None, None)]
    told += [(True, math.nan, False), (True, math.inf, False)]
    kept = []
    for seq, (ends_step, percent, is_bound) in enumerate(told, 1):
        more = {"cost_percent": percent, "is_cost_bound": is_bound}
        sessions.advance(session, client_seq=seq, step=seq, time_us=0, ends_step=ends_step, is_exact_cut=False, **more)
        kept.append((session.cost_percent, session.is_cost_bound))
    assert kept == [(None, None), *[(2.5, True)] * 4]
    (restored,) = Sessions(session.pack())
    assert (restored.step, restored.cost_percent) == (5, None)


def test_what_a_trainer_does_not_stream_is_as_of_its_last_step() -> None:
    """The number comes with each end of a step; none means that everything is streamed."""
    (session,) = sessions = _opened()
    kept = []
    for seq, (ends_step, told) in enumerate([(False, 3), (True, 2), (False, None), (True, None)], 1):
        place = {"client_seq": seq, "step": seq, "time_us": 0, "ends_step": ends_step, "is_exact_cut": False}
        sessions.advance(session, **place, num_unstreamed=told)
        kept.append(session.num_unstreamed)
    assert kept == [0, 2, 2, 0]


@given(st.lists(st.integers(0, 12), max_size=60))
def test_any_arrival_order_takes_effect_as_1_2_3(arrivals: list[int]) -> None:
    """Whatever is duplicated, reordered or skipped, the accepted batches are 1, 2, 3 …"""
    sessions = _opened()
    accepted = []
    for seq in arrivals:
        try:
            if _accept(sessions, seq):
                accepted.append(seq)
        except (SequenceGapError, RequestError):
            continue
    assert accepted == list(range(1, len(accepted) + 1))


def test_rows_brought_in_raise_the_epoch_that_a_new_trainer_takes() -> None:
    """A trainer that starts after a backfill or a replay has a higher epoch than all its rows, also after a restart."""
    sessions = _opened()
    meta = sessions.raise_version_epoch(9)
    sessions.raise_version_epoch(7)
    assert sessions.highest_epoch == 9
    assert Sessions(meta).highest_epoch == 9


def test_a_made_up_epoch_leaves_half_of_all_to_later_runs() -> None:
    """Epochs of the lower half are accepted at once, others only if they are not far above the highest."""
    sessions = _opened()
    for epoch in (1, 1_700_000_000, 2**31, last_epoch_after(0)):
        sessions.check_epoch(epoch)
    for epoch in (last_epoch_after(0) + 1, 2**32 - 1, 2**32, 2**63 - 1):
        with pytest.raises(RequestError, match="far above 5, the highest"):
            sessions.check_epoch(epoch)
    sessions.raise_version_epoch(last_epoch_after(0))
    sessions.check_epoch(sessions.highest_epoch + 1)
    sessions.raise_version_epoch(2**32 - 1)
    with pytest.raises(RequestError, match="up to 4294967295"):  # the greatest one: nothing wraps around
        sessions.check_epoch(2**32)


@given(st.lists(st.integers(1, 2**32 - 1), max_size=40))
def test_whatever_clients_make_up_the_next_trainer_has_an_epoch(epochs: list[int]) -> None:
    """After any hellos, accepted or refused, the next epoch after the highest is accepted."""
    sessions = Sessions({})
    for epoch in epochs:
        try:
            sessions.check_epoch(epoch)
        except RequestError:
            continue
        sessions.raise_version_epoch(epoch)
    sessions.check_epoch(sessions.highest_epoch + 1)
    assert 2**32 - sessions.highest_epoch > 2**31 - (len(epochs) + 1) * 2**20


def test_the_exact_step_is_one_that_all_ranks_have_ended() -> None:
    """A rank that is missing, at another step or past the cut prevents it; the watermark is the lowest step."""
    sessions = Sessions({})
    ranks = [sessions.open("run", "rank0", 5, 0, 2)]
    assert (sessions.exact_step_of(5), sessions.watermark_of(5)) == (None, -1)
    ranks.append(sessions.open("run", "rank1", 5, 1, 2))

    def write(rank: int, seq: int, step: int, *, ends: bool = True, exact: bool = True) -> None:
        sessions.advance(ranks[rank], client_seq=seq, step=step, time_us=0, ends_step=ends, is_exact_cut=exact)

    write(0, 1, 3)
    assert (sessions.exact_step_of(5), sessions.watermark_of(5)) == (None, -1)
    write(1, 1, 3)
    assert (sessions.exact_step_of(5), sessions.watermark_of(5)) == (3, 3)
    write(0, 2, 4, ends=False)
    assert (sessions.exact_step_of(5), sessions.watermark_of(5)) == (None, 3)
    write(0, 3, 4)
    write(1, 2, 4, exact=False)
    assert (sessions.exact_step_of(5), sessions.watermark_of(5)) == (None, 4)
    assert sessions.exact_step_of(4) is None


def test_a_step_that_ends_again_behind_newer_rows_is_no_cut_any_more() -> None:
    """A mark that is repeated after rows of later steps says that the step is complete, and not that it is exact."""
    sessions = _opened()
    session = sessions.find("run", "rank0")
    assert session is not None

    def write(seq: int, step: int, *, ends: bool, exact: bool = False) -> int | None:
        sessions.advance(session, client_seq=seq, step=step, time_us=0, ends_step=ends, is_exact_cut=exact)
        return sessions.exact_step_of(5)

    assert write(1, 300, ends=True, exact=True) == 300
    assert write(2, 301, ends=False) is None
    assert write(3, 300, ends=True) is None
    assert sessions.watermark_of(5) == 300
    assert write(4, 302, ends=True, exact=True) == 302
    assert write(5, 302, ends=True, exact=True) == 302


def test_a_client_that_is_no_trainer_holds_back_no_watermark() -> None:
    """A replay in the epoch of a trainer changes neither the trainer's watermark nor its exact step."""
    sessions = Sessions({})
    trainer = sessions.open("run", "rank0", 1, 0, 1)
    sessions.advance(trainer, client_seq=1, step=5, time_us=0, ends_step=True, is_exact_cut=True)
    brings = sessions.open("replay-1", "replay", 1, 0, 0)
    sessions.advance(brings, client_seq=1, step=3, time_us=0, ends_step=False, is_exact_cut=False)
    assert (trainer.is_trainer, brings.is_trainer) == (True, False)
    assert (sessions.exact_step_of(1), sessions.watermark_of(1)) == (5, 5)
    assert sessions.watermark_of(2) == -1


def _hello(sessions: Sessions, seq: int, run: str, client: str, epoch: int, world_size: int) -> dict[bytes, bytes]:
    return sessions.settle(sessions.open(run, client, epoch, 0, world_size), seq)


def test_clients_of_an_older_epoch_are_forgotten() -> None:
    """A rank without a hello in its run's newer epoch is forgotten, and does not keep old rows from expiry."""
    sessions = Sessions({})
    meta = _hello(sessions, 1, "run", "rank0", 5, 2) | _hello(sessions, 2, "run", "rank1", 5, 2)
    before_it_was_so = Sessions(meta | Session("run", "rank2", 4, 2, 3).pack())
    meta |= _hello(sessions, 3, "run", "rank0", 6, 1)
    assert [(s.client, s.epoch) for s in sessions] == [("rank0", 6)]
    assert [(s.client, s.epoch) for s in before_it_was_so] == [("rank0", 5), ("rank1", 5)]
    assert [key for key, value in meta.items() if not value] == [Session("run", "rank1", 5, 1, 2).meta_key]
    assert (sessions.newest_epoch_of(lambda _: True), sessions.epoch_of("run"), sessions.highest_epoch) == (6, 6, 6)
    assert sorted(Horizon.of(sessions, 3).runs) == [6]


def test_beyond_the_bound_the_one_silent_for_the_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Active sessions are remembered, and the next trainer's epoch is above the forgotten ones too."""
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 3)
    sessions = Sessions({})
    for seq, run in enumerate("abc", start=1):
        _hello(sessions, seq, run, "rank0", seq, 1)
    session, _ = sessions.accept("a", "rank0", 1, 1)
    sessions.advance(session, client_seq=1, step=1, time_us=0, ends_step=True, is_exact_cut=True)
    sessions.settle(session, 4)
    meta = _hello(sessions, 5, "d", "rank0", 4, 1)
    assert [(s.run, s.last_seq) for s in sessions] == [("c", 3), ("a", 4), ("d", 5)]
    assert meta[Session("b", "rank0", 2, 0, 1).meta_key] == b""
    for seq in (6, 7, 8):
        meta |= _hello(sessions, seq, f"replay-{seq}", "log", 1, 0)
    assert sessions.highest_epoch == 4 and sessions.newest_epoch_of(lambda _: True) == 0
    assert Sessions({key: value for key, value in meta.items() if value}).highest_epoch == 4


def test_what_a_forgotten_trainer_sends_again_is_not_taken_for_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer may not begin in an epoch that may have been forgotten; a replay may, because versions decide."""
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 2)
    sessions = Sessions({})
    meta = _hello(sessions, 1, "old", "rank0", 7, 1) | _hello(sessions, 2, "replay", "log", 1, 0)
    for seq, run in enumerate(("new", "newer"), start=3):
        meta |= _hello(sessions, seq, run, "rank0", 5 + seq, 1)
    for one in (sessions, Sessions({key: value for key, value in meta.items() if value})):
        with pytest.raises(RequestError, match="was forgotten since"):
            one.accept("old", "rank0", 7, 1)
        for run, client, epoch in (("old", "rank0", 7), ("old", "rank0", 6), ("new", "rank1", 7)):
            with pytest.raises(FencedError, match="start it again") as caught:
                one.check_remembered(run, client, epoch, 1)
            assert caught.value.epoch == 9
        one.check_remembered("new", "rank0", 8, 1)  # goes on
        one.check_remembered("old", "rank0", 10, 1)  # started again
        one.check_remembered("replay", "log", 1, 0)
        one.open("replay", "log", 1, 0, 0)
        with pytest.raises(FencedError, match="start it again"):  # in place of the replay
            one.check_remembered("replay", "log", 1, 1)


@pytest.mark.parametrize("epoch", [7, 8], ids=["in its own epoch", "in a newer one"])
def test_a_trainer_in_whose_place_another_writer_came_is_not_taken_for_new(
    epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer stays refused when the replay that took its place is forgotten too."""
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 2)
    sessions = Sessions({})
    meta = _hello(sessions, 1, "run", "rank0", 7, 1) | _hello(sessions, 2, "run", "rank0", epoch, 0)
    for seq in (3, 4):
        meta |= _hello(sessions, seq, f"another {seq}", "log", 1, 0)
    for one in (sessions, Sessions({key: value for key, value in meta.items() if value})):
        assert one.epoch_of("run") == 0
        with pytest.raises(FencedError, match="start it again"):
            one.check_remembered("run", "rank0", 7, 1)


_RECORDS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from(["rank0", "rank1"]), st.integers(1, 3), st.booleans()),
    max_size=40,
)


@given(_RECORDS, st.integers(0, 40))
def test_a_restart_and_a_follower_come_to_the_same_sessions(records: list[tuple[str, str, int, bool]], at: int) -> None:
    """Replaying the log from any position of the store yields the same sessions, and the store keeps no others."""

    def take(sessions: Sessions, meta: dict[bytes, bytes], seq: int, record: tuple[str, str, int, bool]) -> None:
        run, client, epoch, is_trainer = record
        session = sessions.find(run, client)
        if session is not None and session.epoch == epoch:
            sessions.advance(
                session, client_seq=seq, step=seq, time_us=seq, ends_step=is_trainer, is_exact_cut=is_trainer
            )
        elif epoch >= sessions.epoch_of(run):
            session = sessions.open(run, client, epoch, 0, int(is_trainer))
        else:
            return
        meta |= sessions.settle(session, seq)
        for key in [key for key, value in meta.items() if not value]:
            del meta[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions_module, "MAX_SESSIONS", 3)
        straight, meta = Sessions({}), dict[bytes, bytes]()
        stored = meta.copy()
        for seq, record in enumerate(records, start=1):
            take(straight, meta, seq, record)
            stored = meta.copy() if seq == at else stored
        restarted, seq_stored = Sessions(stored), at if at <= len(records) else 0
        for seq, record in enumerate(records[seq_stored:], start=seq_stored + 1):
            take(restarted, stored, seq, record)
        assert list(restarted) == list(straight) and len(list(straight)) <= 3
        assert restarted.highest_epoch == straight.highest_epoch
        assert stored == meta
        assert {key for key in meta if key.startswith(b"session/")} == {session.meta_key for session in straight}
