"""Admission: bounds, turns and fairness."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.paramserver.rpc.admission import Account, Admission, ServerLimits, Ticket, Waiter
from headrace.schemas.errors import ConfigError


def small_admission() -> Admission:
    """Return bounds of 4 requests and 100 bytes, 2 requests and 60 bytes an account."""
    return Admission(max_requests=4, max_bytes=100, max_account_requests=2, max_account_bytes=60)


def finish(ticket: Ticket) -> None:
    """Answer a request and free its buffer; a second time changes nothing."""
    for _ in range(2):
        ticket.release_bytes()
        ticket.release()


class Asker:
    """Asks for one account and records its grants."""

    def __init__(self, admission: Admission, key: object) -> None:
        self.admission = admission
        self.account = admission.open_account(key)
        self.tickets: list[Ticket] = []
        self.waiters: list[Waiter] = []

    def ask(self, size_bytes: int) -> bool:
        """Ask, and return whether there was room at once."""
        answer = self.admission.admit(self.account, size_bytes, self._granted)
        if isinstance(answer, Ticket):
            self.tickets.append(answer)
            return True
        self.waiters.append(answer)
        return False

    def _granted(self, ticket: Ticket) -> None:
        self.waiters.pop(0)
        self.tickets.append(ticket)


_SCRIPTS = {
    "an account at its own bound waits alone": "a60 a10? b40",
    "accounts take turns, however many requests one has lined up": "a60 b40 b20? b20? b20? c60? b-b a-bc",
    "what was given back counts once": "a60 b40 a- c60 a60?",
    "a long request is not overtaken for ever": "a60 b60? c10? a-bc",
    "a request without bytes passes by long ones": "a60 b60? c0",
    "requests of one account keep their order": "a60 b60? b0?",
    "the number of requests is bounded, of one and of all; turns go round": "a0 a0 a0? b0 b0 b0? c0? c0? c0? a-c",
    "one that leaves the head of the line lets the next one in": "a60 b60? c10? b<c",
}


@pytest.mark.parametrize("script", _SCRIPTS.values(), ids=_SCRIPTS.keys())
def test_turns(script: str) -> None:
    """Step by step: `a60` asks for account a, and `?` says that it waits; `a-bc` ends a's oldest, `a<bc` takes a's
    oldest out of the line, and b and c are granted."""
    admission, askers = small_admission(), dict[str, Asker]()
    for step in script.split():
        asker = askers.setdefault(step[0], Asker(admission, step[0]))
        if step[1] not in "-<":
            assert asker.ask(int(step[1:].rstrip("?"))) != step.endswith("?"), step
            continue
        before = {name: len(each.tickets) for name, each in askers.items()}
        finish(asker.tickets[0]) if step[1] == "-" else admission.cancel(asker.waiters[0])
        granted = [name for name, each in askers.items() for _ in each.tickets[before[name] :]]
        assert granted == list(step[2:]), step


def test_accounts_are_shared_by_key_and_forgotten() -> None:
    """Two connections of one client share its bounds, and nothing is kept when both are gone."""
    admission = small_admission()
    one, again = Asker(admission, "client"), Asker(admission, "client")
    assert one.account is again.account
    assert one.ask(60)
    assert not again.ask(10)
    admission.close_account(one.account)
    assert admission.open_account("client") is again.account
    for _ in range(2):
        admission.close_account(again.account)
    assert admission.open_account("client") is not again.account


def test_replies_have_bounds_of_their_own() -> None:
    """Unwritten replies are bounded per account and in total, apart from requests."""
    admission = small_admission()
    one, two = Asker(admission, "1"), Asker(admission, "2")
    one.ask(60)
    assert admission.admit_reply(one.account, 60)
    assert not admission.admit_reply(one.account, 1)
    assert admission.admit_reply(two.account, 40)
    assert not admission.admit_reply(two.account, 1)
    admission.release_reply(one.account, 60)
    assert admission.admit_reply(two.account, 20)


@pytest.mark.parametrize(
    "wrong",
    [{"max_frame_bytes": 0}, {"idle_timeout_s": -1.0}, {"max_client_bytes": 1}, {"max_inflight_requests": 1}],
)
def test_contradictory_limits(wrong: dict[str, float]) -> None:
    """A limit that could never be met is a `ConfigError` that names it."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        dataclasses.replace(ServerLimits(), **wrong)


class AdmissionMachine(RuleBasedStateMachine):
    """Any order of asking, finishing and leaving, against the bounds and a count of open grants."""

    accounts = st.integers(0, 3)

    def __init__(self) -> None:
        super().__init__()
        self.admission = small_admission()
        self.opened: list[Account] = [self.admission.open_account(key) for key in range(4)]
        self.live: list[tuple[Ticket, Account, int]] = []
        self.waiting: list[tuple[Waiter, int]] = []

    @rule(key=accounts, size_bytes=st.sampled_from([0, 0, 1, 20, 50, 60]))
    def ask(self, key: int, size_bytes: int) -> None:
        account = self.opened[key]

        def granted(ticket: Ticket) -> None:
            self.waiting.remove(entry)
            self.live.append((ticket, account, size_bytes))

        answer = self.admission.admit(account, size_bytes, granted)
        if isinstance(answer, Ticket):
            self.live.append((answer, account, size_bytes))
        else:
            entry = (answer, size_bytes)
            self.waiting.append(entry)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), repeats=st.booleans())
    def finish(self, data: st.DataObject, repeats: bool) -> None:
        entry = data.draw(st.sampled_from(self.live))
        self.live.remove(entry)
        for _ in range(1 + repeats):
            finish(entry[0])

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(entry)
        self.admission.cancel(entry[0])

    @invariant()
    def counts_are_true_and_bounds_hold(self) -> None:
        assert self.admission.num_requests == len(self.live) <= 4
        assert self.admission.size_bytes == sum(size for _, _, size in self.live) <= 100
        for account in self.opened:
            mine = [size for _, owner, size in self.live if owner is account]
            assert account.num_requests == len(mine) <= 2
            assert account.size_bytes == sum(mine) <= 60

    @invariant()
    def nobody_waits_in_an_empty_room(self) -> None:
        assert self.live or not self.waiting

    @invariant()
    def the_first_in_line_really_has_no_room(self) -> None:
        for account in self.opened:
            if account.waiters and account.num_requests < 2:
                size = account.waiters[0].size_bytes
                if account.size_bytes + size <= 60:
                    others_wait = any(a.waiters for a in self.opened if a is not account)
                    assert others_wait or len(self.live) == 4 or self.admission.size_bytes + size > 100


AdmissionMachine.TestCase.settings = settings(stateful_step_count=30)
TestAdmission = AdmissionMachine.TestCase
