"""Sessions: who may write, and which batch is next. No I/O."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from text_scripts import Script, scripts

from headrace.paramserver.log import sessions as sessions_module
from headrace.paramserver.log.sessions import Session, Sessions
from headrace.schemas.errors import CorruptionError, FencedError, RequestError, SequenceGapError


class Clients:
    """The clients of a shard, its sessions, and what its store has of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sessions, self.meta, self._seq, self._patch = Sessions({}), dict[bytes, bytes](), 0, patch

    def _save(self, meta: dict[bytes, bytes]) -> None:
        self.meta = {key: value for key, value in (self.meta | meta).items() if value}

    def _settle(self, session: Session) -> None:
        self._seq += 1
        self._save(self.sessions.settle(session, self._seq))
        # A restart at this moment finds the same sessions, in whichever order the store lists them.
        for meta in (self.meta, dict(reversed(self.meta.items()))):
            again = Sessions(meta)
            assert [each.pack() for each in again] == [each.pack() for each in self.sessions]
            assert again.highest_epoch == self.sessions.highest_epoch

    def remember(self, number: int) -> None:
        """Remember at most so many sessions."""
        self._patch.setattr(sessions_module, "MAX_SESSIONS", number)

    def hello(self, client: str, epoch: int, *, run: str = "run", rank: int = 0, ranks: int = 1) -> str | None:
        """Say hello if the shard remembers enough to let the client begin; `ranks=0` is no trainer."""
        self.sessions.check_remembered(run, client, epoch, ranks)
        session = self.sessions.open(run, client, epoch, rank, ranks)
        self._settle(session)
        return f"goes on after {session.last_client_seq}" if session.last_client_seq else None

    def send(
        self,
        client: str,
        seqs: int | list[int],
        *,
        run: str = "run",
        epoch: int | None = None,
        step: int | None = None,
        ends: bool = True,
        exact: bool = True,
        **told: Any,
    ) -> str | None:
        """Send batches of the client's epoch, each of which ends the step of its number; tell of duplicates."""
        repeated = []
        for seq in [seqs] if isinstance(seqs, int) else seqs:
            found = self.sessions.find(run, client)
            session, is_new = self.sessions.accept(run, client, epoch or (found.epoch if found else 1), seq)
            if not is_new:
                repeated.append(seq)
                continue
            place = {"client_seq": seq, "step": seq if step is None else step, "time_us": 0}
            if "cost_percent" in told:
                told["cost_percent"] = float(told["cost_percent"])
            self.sessions.advance(session, **place, ends_step=ends, is_exact_cut=ends and exact, **told)
            self._settle(session)
        return f"had {repeated}" if repeated else None

    def bring(self, epoch: int) -> None:
        """Take rows of an epoch from elsewhere."""
        self._save(self.sessions.raise_epoch(epoch))

    def check(self, epoch: int) -> None:
        """Ask whether a client may make up this epoch."""
        self.sessions.check_epoch(epoch)

    def older_release(self, client: str, epoch: int, ranks: int) -> None:
        """Find in the store, after a restart, a session of its run's older epoch."""
        self.meta |= Session("run", client, epoch, 0, ranks).pack()
        self.restart()

    def restart(self) -> None:
        """Restore the sessions from the store."""
        self.sessions = Sessions(self.meta)

    def show(self) -> list[str]:
        """Return the sessions, the one that was silent for the longest first."""
        return [
            f"{each.run}/{each.client} epoch {each.epoch}, {each.world_size} ranks: batch {each.last_client_seq}, "
            f"step {each.step}, exact {each.exact_step}, record {each.last_seq}"
            for each in self.sessions
        ]

    def told(self) -> list[str]:
        """Return what each trainer has told of itself."""
        return [f"cost {each.cost_percent}, {each.num_unstreamed} unstreamed" for each in self.sessions]

    def epochs(self, run: str = "run") -> str:
        """Return the epoch of a run, the highest, a trainer's newest, and those of all trainers."""
        trainers = sorted({each.epoch for each in self.sessions if each.is_trainer})
        newest = self.sessions.newest_epoch_of(lambda _: True)
        return f"run {self.sessions.epoch_of(run)}, highest {self.sessions.highest_epoch}, newest {newest}, {trainers}"

    def steps(self, epoch: int) -> str:
        """Return how far the ranks of an epoch are."""
        return f"exact {self.sessions.exact_step_of(epoch)}, all {self.sessions.watermark_of(epoch)}"


@scripts(__file__, "sessions")
def test_sessions(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients come, send, restart and are forgotten; at any moment a restart finds the same sessions."""
    script.run(Clients(monkeypatch))


def test_metadata_that_is_no_session_stops_the_start() -> None:
    """The error names the key; other keys are none of the sessions' business."""
    assert not list(Sessions({b"other": b"x"}))
    with pytest.raises(CorruptionError, match="session/x"):
        Sessions({b"session/x": b"\xc1"})


@given(st.lists(st.integers(0, 12), max_size=60))
def test_any_arrival_order_takes_effect_as_1_2_3(arrivals: list[int]) -> None:
    """Whatever is duplicated, reordered or skipped, the accepted batches are 1, 2, 3 …"""
    sessions, accepted = Sessions({}), list[int]()
    sessions.open("run", "rank0", 5, 0, 1)
    for seq in arrivals:
        try:
            session, is_new = sessions.accept("run", "rank0", 5, seq)
        except (SequenceGapError, RequestError):
            continue
        if is_new:
            sessions.advance(session, client_seq=seq, step=seq, time_us=0, ends_step=True, is_exact_cut=True)
            accepted.append(seq)
    assert accepted == list(range(1, len(accepted) + 1))


@given(st.lists(st.integers(1, 2**32 - 1), max_size=40))
def test_whatever_clients_make_up_the_next_trainer_has_an_epoch(epochs: list[int]) -> None:
    """After any hellos, accepted or refused, the next epoch after the highest is accepted."""
    sessions = Sessions({})
    for epoch in epochs:
        try:
            sessions.check_epoch(epoch)
        except RequestError:
            continue
        sessions.raise_epoch(epoch)
    sessions.check_epoch(sessions.highest_epoch + 1)
    assert 2**32 - sessions.highest_epoch > 2**31 - (len(epochs) + 1) * 2**20


_RECORDS = st.lists(
    st.tuples(st.sampled_from("aaabcd"), st.sampled_from(["rank0", "rank1"]), st.integers(1, 3), st.booleans()),
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
        assert list(restarted) == list(straight)
        assert restarted.highest_epoch == straight.highest_epoch
        assert stored == meta
        kept = {key for key in meta if key.startswith((b"session/", b"former/"))}
        assert kept == {key for key in straight.packed() if key.startswith((b"session/", b"former/"))}
        assert sum(key.startswith(b"session/") for key in kept) <= 3


def test_a_step_that_ends_again_covers_no_later_update() -> None:
    """All updates before its first end are here; rows may have changed since."""
    sessions = Sessions({})
    session = sessions.open("run", "rank0", 1, 0, 1)
    for seq, (step, time_us, covered_us) in enumerate([(3, 10, 10), (3, 20, 10), (4, 30, 30)], 1):
        sessions.advance(session, client_seq=seq, step=step, time_us=time_us, ends_step=True, is_exact_cut=True)
        sessions.settle(session, seq)
        assert sessions.covered_us_of(1) == covered_us


def test_sessions_for_other_shards() -> None:
    """The highest epoch counts; a step comes over where all shards stand exactly at it, and batches never do."""
    at_step = {"last_client_seq": 7, "step": 5, "exact_step": 5, "ended_client_seq": 7}
    exact = [Session("exact", "rank0", 3, 0, 1, **at_step, time_us=time_us) for time_us in (10, 20)]
    amid = [Session("amid", "rank0", 4, 0, 1, **(at_step | {"step": step})) for step in (5, 6)]
    started = [Session("again", "rank0", epoch, 0, 1, **at_step) for epoch in (8, 2)]
    bringer = Session("fill", "log", 9, 0, 0, last_client_seq=4)
    metas = [exact[shard].pack() | amid[shard].pack() | started[shard].pack() for shard in range(2)]
    merged = Sessions(Sessions.merged([Sessions(metas[0] | bringer.pack()), Sessions(metas[1])]).packed())
    found = {each.run: (each.epoch, each.step, each.exact_step, each.time_us) for each in merged}
    assert found == {"exact": (3, 5, 5, 20), "amid": (4, -1, -1, 0), "again": (8, -1, -1, 0)}
    assert {each.last_client_seq for each in merged} == {0}
    assert merged.highest_epoch == 9
    with pytest.raises(FencedError):
        merged.fence("again", 2)
