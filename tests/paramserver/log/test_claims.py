"""Claims of shards: one copy at a time, whatever is killed, copied, restored or lost on the way."""

from __future__ import annotations

import functools
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.paramserver.log import claims
from headrace.paramserver.log.claims import (
    CLAIM_FILE,
    Claim,
    ClaimedStarts,
    HeldClaims,
    LateClaimError,
    ShardClaim,
    claim_shard,
    claims_of,
    hold_term,
    note_restored,
    note_term,
)
from headrace.paramserver.system.durable import write_file
from headrace.paramserver.system.object_store import ObjectStore
from headrace.schemas.errors import (
    ConfigError,
    CorruptionError,
    GoneError,
    HeadraceError,
    LogFencedError,
    UnavailableError,
)

_SHARD = 3


class _KilledError(BaseException):
    """The process is gone at this point."""


class _Store:
    """An object store in memory. `fault` is called with each step's name and may raise."""

    where = "mem://store"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.fault: Callable[[str], None] = lambda step: None

    def get(self, path: str) -> bytes:
        self.fault("get")
        if path not in self.objects:
            raise GoneError(path)
        return self.objects[path]

    def put_if_absent(self, path: str, data: bytes) -> bytes:
        self.fault("before put")
        found = self.objects.setdefault(path, data)
        self.fault("after put")
        return found

    def list(self, prefix: str) -> Iterator[Any]:
        self.fault("list")
        return iter([SimpleNamespace(path=path) for path in list(self.objects) if path.startswith(prefix)])


def _start(store: Any, directory: Path, *, server_id: str = "s", owner: str = "node a", **more: Any) -> ShardClaim:
    return claim_shard(store, directory, server_id=server_id, shard=_SHARD, owner=owner, seq=7, mark=9, **more)


def _check(store: Any, shard: int, term: int) -> None:
    ShardClaim(store=store, shard=shard, term=term).check()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shard").mkdir()
    return tmp_path / "shard"


def _away(step: str) -> None:
    raise UnavailableError(step)


def test_claims_in_an_object_store(folder: Path, tmp_path: Path) -> None:
    """Each claim says who began where; a copy that is away from the store says so once."""
    store: Any = ObjectStore.of_url(f"file://{tmp_path}/bucket")
    assert [_start(store, folder, owner=f"node {name}").term for name in "abc"] == [1, 2, 3]
    found = [(term, claim.owner, claim.seq, claim.mark) for term, claim in claims_of(store, _SHARD).items()]
    assert found == [(1, "node a", 7, 9), (2, "node b", 7, 9), (3, "node c", 7, 9)]
    _check(store, _SHARD, 3)
    _check(store, _SHARD + 1, 0)


def test_a_store_that_is_away(folder: Path) -> None:
    """A copy that has held a term goes on in it and says so, even if its claim was put: it is to start again then."""
    store, told = _Store(), list[Any]()
    store.fault = _away
    with pytest.raises(UnavailableError):
        _start(store, folder)
    store.fault = lambda step: None
    assert _start(store, folder).term == 1
    store.fault = lambda step: _away(step) if step == "after put" else None
    running = _start(store, folder, on_away=told.append)
    assert (running.term, [type(error) for error in told]) == (1, [UnavailableError])
    with pytest.raises(LateClaimError, match="was put while the object store seemed away: term 2"):
        running.check()
    store.fault = lambda step: None
    assert _start(store, folder).term == 3


def test_messages(folder: Path, tmp_path: Path) -> None:
    """Who is refused is told which copy is the right one, and the way on; `TestClaims` has who that is."""
    store = _Store()
    _start(store, folder)
    shutil.copytree(folder, tmp_path / "backup")
    (tmp_path / "empty").mkdir()
    _start(store, folder, owner="node b (10.0.0.2:7601)")
    for refused, text in (
        (lambda: _check(store, _SHARD, 1), r"shard 3 has taken over: term 2, taken by node b .* has term 1"),
        (
            lambda: _start(store, tmp_path / "backup"),
            r"term 2, taken by node b \(10\.0\.0\.2:7601\) at .*backup, has term 1: .*headrace restore ",
        ),
        (lambda: _start(store, tmp_path / "empty"), "empty has never held a term"),
    ):
        with pytest.raises(LogFencedError, match=text):
            refused()
    assert len(store.objects) == 2
    with pytest.raises(ConfigError, match=r"mem://store: has claims of server s: use another prefix for t"):
        _start(store, tmp_path / "empty", server_id="t")
    with pytest.raises(ConfigError, match=r"is of shard 3 of server s, not of shard 3 of server t"):
        _start(_Store(), folder, server_id="t")


def test_what_a_term_added_behind_a_higher_start_is_void(tmp_path: Path) -> None:
    """A record is void once a copy of a higher term has begun before it; each claim is read once."""
    store = _Store()
    starts = ClaimedStarts(store)
    for seq in (0, 100, 50):
        directory = tmp_path / str(seq)
        directory.mkdir()
        note_restored(store, directory, server_id="s", shard=_SHARD)
        claim_shard(store, directory, server_id="s", shard=_SHARD, owner="a", seq=seq, mark=None)
    assert not starts.is_void(_SHARD, 1, 51)  # nobody has looked yet
    starts.look()
    assert [starts.is_void(_SHARD, term, 51) for term in (1, 2, 3)] == [True, True, False]
    assert [starts.is_void(_SHARD, term, 50) for term in (1, 2, 3)] == [False] * 3
    assert not starts.is_void(_SHARD + 1, 1, 51)
    store.fault = _away
    assert starts.is_void(_SHARD, 1, 51)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"term": "x"}', '{"known": [[1]]}', "[" * 100_000])
def test_damage(folder: Path, text: str) -> None:
    """A claim or a file that cannot be understood is damage, with its name."""
    store = _Store()
    store.objects[f"claims/{_SHARD:04d}/{1:016d}"] = text.encode()
    with pytest.raises(CorruptionError, match=r"mem://store/claims/0003/0000000000000001: not a claim"):
        _start(store, folder)
    (folder / CLAIM_FILE).write_text(text)
    with pytest.raises(CorruptionError, match=r"claim\.json: cannot be understood"):
        _start(_Store(), folder)


def test_terms_without_an_object_store(folder: Path) -> None:
    """The highest term that was noted is held from then on. No term writes nothing."""

    def hold(term: int) -> int:
        hold_term(folder, server_id="s", shard=_SHARD, term=term)
        return HeldClaims.read(folder, "s", _SHARD).term

    assert hold(0) == 0 and not (folder / CLAIM_FILE).exists()
    assert [hold(2), hold(2), hold(5), hold(4), hold(0)] == [2, 2, 5, 5, 5]
    assert _start(_Store(), folder).term == 6


class ClaimMachine(RuleBasedStateMachine):
    """Copies of one shard start, are killed at each step, lose replies, are copied and restored.

    The model: an attempt is the nonce that a start draws. A directory may start if its history, with that of the one
    that it was copied from, has the attempt of the store's highest claim.
    """

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.store = _Store()
        self.nonces = (str(number) for number in itertools.count())
        self.histories: dict[Path, set[str]] = {}
        self.running: dict[Path, ShardClaim] = {}
        self.late: list[tuple[str, bytes]] = []
        self.terms: set[int] = set()
        self._new({"none"})

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    def _new(self, history: set[str]) -> Path:
        path = self.root / str(len(self.histories))
        path.mkdir()
        self.histories[path] = history
        return path

    def _pick(self, data: st.DataObject) -> Path:
        return data.draw(st.sampled_from(sorted(self.histories)))

    def _highest(self) -> str:
        if not self.store.objects:
            return "none"
        path = max(self.store.objects)
        return Claim.decode(self.store.objects[path], path).nonce

    @rule(data=st.data(), fault_at=st.integers(0, 8), how=st.sampled_from(["kill", "away", "late", "none"]))
    def start(self, data: st.DataObject, fault_at: int, how: str) -> None:
        path = self._pick(data)
        self.running.pop(path, None)  # the directory's lock: one process at a time
        steps = itertools.count()
        written: list[str] = []

        def fault(step: str) -> None:
            if how == "none" or (how == "away" and "write" in step) or next(steps) != fault_at:
                return
            raise _KilledError if how in ("kill", "late") else UnavailableError(step)

        def token_hex(_: int) -> str:
            written.append(next(self.nonces))
            return written[-1]

        put = self.store.put_if_absent

        def put_late(name: str, content: bytes) -> bytes:
            try:
                return put(name, content)
            except _KilledError:
                self.late.append((name, content))  # it is still on its way
                raise

        write = HeldClaims.write

        def write_or_die(held: HeldClaims, directory: Path) -> None:
            fault("before write")
            write(held, directory)
            self.histories[path].update(nonce for _, nonce in held.known)
            fault("after write")

        may_start = self._highest() in self.histories[path]
        held_before = HeldClaims.read(path, "s", _SHARD).term
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(claims.secrets, "token_hex", token_hex)
            patch.setattr(HeldClaims, "write", write_or_die)
            patch.setattr(claims, "write_file", functools.partial(write_file, is_durable=False))
            if how == "late":
                patch.setattr(self.store, "put_if_absent", put_late)
            self.store.fault = fault
            try:
                claim = _start(self.store, path)
            except _KilledError:
                return
            except UnavailableError:
                assert how == "away" and not held_before
                return
            except LogFencedError:
                assert not may_start, "a copy that made the highest claim, or was restored in its place, was refused"
                return
            finally:
                self.store.fault = lambda step: None
        self.running[path] = claim
        if how == "away" and claim.term == held_before:
            return
        assert may_start, "a copy that does not know the highest claim has started"
        assert claim.term not in self.terms, "two copies have one term"
        self.terms.add(claim.term)

    @rule(data=st.data())
    @precondition(lambda self: len(self.histories) < 6)
    def copy(self, data: st.DataObject) -> None:
        source = self._pick(data)
        target = self._new(set(self.histories[source]))
        shutil.copytree(source, target, dirs_exist_ok=True)

    @rule()
    @precondition(lambda self: len(self.histories) < 6)
    def restore(self) -> None:
        target = self._new({self._highest()})
        note_restored(self.store, target, server_id="s", shard=_SHARD)

    @rule()
    @precondition(lambda self: self.late)
    def arrive(self) -> None:
        self.store.objects.setdefault(*self.late.pop(0))

    @invariant()
    def one_copy_goes_on(self) -> None:
        """Of the copies that run, at most one is not told to stop by its next look, and it has the highest term."""
        unfenced = []
        for path, claim in self.running.items():
            try:
                claim.check()
                unfenced.append(claim.term)
            except LogFencedError:
                continue
            except HeadraceError:
                assert self._highest() in self.histories[path], "it would start again, and be refused"
        assert len(unfenced) == len(set(unfenced)) and len(unfenced) <= 1


TestClaims = ClaimMachine.TestCase
TestClaims.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_the_claim_of_a_replicated_log_follows_its_term(folder: Path, tmp_path: Path) -> None:
    """The log's term is claimed as it is, again without effect; whoever restores the shard begins above it."""
    store, other = _Store(), tmp_path / "other"
    other.mkdir()
    note = functools.partial(note_term, server_id="s", shard=_SHARD, owner="node a", seq=7, mark=9)
    note(store, folder, term=4)
    note(store, folder, term=4)
    note(store, other, term=6)  # another node owned the log meanwhile
    note(store, folder, term=7)
    assert list(claims_of(store, _SHARD)) == [4, 6, 7]
    assert HeldClaims.read(folder, "s", _SHARD).highest_term == 7
    with pytest.raises(LogFencedError, match="has taken over: term 7"):
        _check(store, _SHARD, 6)
    restored = tmp_path / "restored"
    restored.mkdir()
    note_restored(store, restored, server_id="s", shard=_SHARD)
    assert HeldClaims.read(restored, "s", _SHARD).highest_term == 7  # above which it opens its log
    with pytest.raises(LogFencedError, match="another copy of shard 3 is the right one"):
        note(store, other, term=7)  # of another log than that of the first


def test_a_lost_reply_to_a_claim_of_a_term_is_made_up_for(folder: Path) -> None:
    """A claim that was put while the store seemed away is recognized."""
    store = _Store()
    note = functools.partial(note_term, store, folder, server_id="s", shard=_SHARD, term=2, owner="a", mark=9)
    store.fault = lambda step: _away(step) if step == "after put" else None
    with pytest.raises(UnavailableError):
        note(seq=7)
    store.fault = lambda step: None
    note(seq=8)
    assert [claim.seq for claim in claims_of(store, _SHARD).values()] == [7]
