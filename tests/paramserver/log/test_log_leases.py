"""Leases on the update log: whose are kept apart, when they end, and how many there may be."""

from __future__ import annotations

import logging

import pytest

from headrace.paramserver.log.log_leases import LogLeases
from headrace.schemas.errors import RequestError


def _seqs(leases: LogLeases) -> list[int]:
    return sorted(lease.seq for lease in leases.held())


def test_leases_end() -> None:
    """A lease counts until its time is over, or until it is given back."""
    now_s = 0.0
    leases = LogLeases(clock=lambda: now_s)
    assert leases.held() == []
    leases.renew("a", 5, 10.0)
    leases.renew("b", 9, 20.0)
    assert (_seqs(leases), len(leases)) == ([5, 9], 2)
    leases.renew("a", 7, 10.0)
    assert _seqs(leases) == [7, 9]
    now_s = 10.0
    assert _seqs(leases) == [9]
    leases.renew("b", 9, 0.0)
    assert len(leases) == 0


def test_copies_of_one_name_have_leases_of_their_own() -> None:
    """What the slower one needs stays needed, whatever the faster one asks for."""
    leases = LogLeases(clock=lambda: 0.0)
    leases.renew("replica", 3, 10.0, copy_id="slow")
    leases.renew("replica", 8, 10.0, copy_id="fast")
    leases.renew("replica", 9, 10.0, copy_id="fast")
    leases.renew("replica", 7, 10.0)  # one that does not tell copies apart
    assert _seqs(leases) == [3, 7, 9]
    leases.renew("replica", 9, 0.0, copy_id="fast")
    assert _seqs(leases) == [3, 7]


def test_it_is_told_when_more_is_to_be_kept_than_before() -> None:
    """A new lease, one that goes back, and one that had ended keep more; one that goes on does not."""
    now_s = 0.0
    leases = LogLeases(clock=lambda: now_s)
    assert leases.renew("a", 5, 10.0)
    assert not leases.renew("a", 5, 10.0) and not leases.renew("a", 6, 10.0)
    assert leases.renew("a", 5, 10.0)
    now_s = 10.0
    assert leases.renew("a", 7, 10.0)
    assert not leases.renew("a", 1, 0.0)


def test_of_too_many_the_one_that_is_renewed_no_more_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    """Copies that died leave no lasting mark: there is room for one that lives, and those that are renewed stay."""
    leases = LogLeases(clock=lambda: 0.0)
    leases.renew("lives", 1, 600.0)
    for copy in range(1023):
        leases.renew("crashes", 2, 600.0, copy_id=str(copy))
    leases.renew("lives", 1, 600.0)
    with caplog.at_level(logging.WARNING):
        leases.renew("new", 3, 600.0)
    assert "too many leases" in caplog.text
    assert len(leases) == 1024 and _seqs(leases)[0] == 1 and _seqs(leases)[-1] == 3


@pytest.mark.parametrize(
    ("name", "lease_s", "copy_id"),
    [("", 1.0, ""), ("n" * 257, 1.0, ""), ("n", -1.0, ""), ("n", 86_401.0, ""), ("n", 1.0, "c" * 257)],
)
def test_what_is_no_lease_is_refused(name: str, lease_s: float, copy_id: str) -> None:
    """Names that are empty or endless, and times out of range, change nothing."""
    leases = LogLeases()
    with pytest.raises(RequestError):
        leases.renew(name, 1, lease_s, copy_id=copy_id)
    assert len(leases) == 0
