"""Schedules of builds: none breaks a promise, and each planted fault is found."""

from __future__ import annotations

import pytest
from build_schedules import BuildSchedule
from simulator import PlantedFaults, run_schedules

from headrace.paramserver.shard.hand_over import HandOver

pytestmark = pytest.mark.timeout(900)
planted = PlantedFaults(BuildSchedule, within=300, at_once=10)
_NUM_CORE, _NUM_LONG = 2, 100


def _check(seeds: range) -> None:
    total, findings = run_schedules(BuildSchedule, seeds)
    assert not findings, "\n".join(findings[:20])
    assert total["builds"] >= len(seeds)


def test_no_build_breaks_a_promise() -> None:
    """A server of another number of shards begins exactly where the old one ends, with all rows."""
    _check(range(1, 1 + _NUM_CORE))


def test_no_build_of_many_breaks_a_promise() -> None:
    """As above, in some hundreds."""
    _check(range(1 + _NUM_CORE, 1 + _NUM_LONG))


@planted()
def an_offer_that_a_start_forgets(patch: pytest.MonkeyPatch) -> None:
    """Whoever builds the new server may have published it meanwhile."""
    patch.setattr(HandOver, "resume", lambda self, offer: None)


@pytest.mark.parametrize("fault", planted.names)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger finds an old server or a builder that breaks one of the rules."""
    planted.check_found(fault, monkeypatch)
