"""Names of archived segments, and which of them make up a log."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from archived_log import archive_in
from hypothesis import given, settings

from headrace.paramserver.archive.objects import (
    ArchivedSegment,
    Piece,
    chain_of,
    check_history,
    num_shards_of,
    usable_end,
)
from headrace.paramserver.system.object_store import Content
from headrace.schemas.errors import ConfigError, CorruptionError, GoneError
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotManifest


def segment(first_seq: int, last_seq: int, *, term: int = 0, mark: int = 9) -> ArchivedSegment:
    return ArchivedSegment(
        shard=3, first_seq=first_seq, last_seq=last_seq, mark=mark, term=term, content=Content(12, "ab" * 32)
    )


def test_names_never_change(tmp_path: Path) -> None:
    """ON DISK: a listing of a later release reads these names; others are skipped."""
    archive = archive_in(tmp_path / "store", shard=3)
    known = segment(1, 17, term=2, mark=-2)
    assert known.path == (
        "archive/0003/00000000000000000001-fffffffffffffffe-00000000000000000017-2-12-" + "ab" * 32 + ".hrlog"
    )
    archive.store.put(known.path, b"any")
    archive.store.put("archive/0003/of-a-later-release", b"")
    (found,) = archive.segments()
    assert found.put_at.year > 2000
    assert (found.path, found.mark, found.term, found.content) == (known.path, -2, 2, known.content)


def test_the_number_of_shards_is_noted_once(tmp_path: Path) -> None:
    """A restore without a snapshot knows how many shards the server has."""
    archive = archive_in(tmp_path / "store")
    with pytest.raises((GoneError, ConfigError)):
        num_shards_of(archive.store)
    archive.announce(4)
    archive.announce(4)
    assert num_shards_of(archive.store) == 4
    archive.store.put("archive/shards.json", b"{}")
    with pytest.raises(CorruptionError, match="no number of shards"):
        num_shards_of(archive.store)


@pytest.mark.parametrize("number", ["null", '"4"', "4.0", "1e400", "0", "-1", "1000000000", "[4]", "true"])
def test_a_number_of_shards_that_is_none(tmp_path: Path, number: str) -> None:
    """What a store's object has for a number of shards is damage if it is none: a billion shards take gigabytes."""
    store = archive_in(tmp_path / "store").store
    store.put("archive/shards.json", f'{{"num_shards": {number}}}'.encode())
    with pytest.raises(CorruptionError):
        num_shards_of(store)
    store.put("archive/shards.json", number.encode())
    with pytest.raises(CorruptionError):
        num_shards_of(store)


@pytest.mark.parametrize(
    ("term", "begins", "expected"),
    [
        (0, {}, 20),
        (0, {1: 15}, 15),
        (1, {1: 15}, 20),
        (1, {1: 15, 2: 30}, 20),
        (1, {2: 18, 3: 12}, 12),
        (0, {1: 4}, 4),
    ],
)
def test_a_higher_term_makes_void_what_lower_ones_added(term: int, begins: dict[int, int], expected: int) -> None:
    """Records behind the position from which a copy of a higher term began do not count."""
    assert usable_end(segment(10, 20, term=term), begins) == expected


def test_claims_of_terms_that_archived_nothing_are_not_read(tmp_path: Path) -> None:
    """Each start leaves a claim, and with a slow store a start waits a second for each that it reads."""
    archive = archive_in(tmp_path / "store", shard=3)
    archive.store.put(segment(1, 9, term=4).path, b"any")
    for term in range(1, 5):
        archive.store.put(f"claims/0003/{term:016d}", b"not read")
    assert [piece.last_seq for piece in archive.pieces()] == [9]
    archive.store.put(f"claims/0003/{5:016d}", b"read")
    with pytest.raises(CorruptionError, match="not a claim"):
        archive.pieces()


@given(
    spans=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 20)), max_size=12),
    from_seq=st.integers(1, 60),
)
@settings(max_examples=200, deadline=None)
def test_a_chain_has_every_record_up_to_the_first_gap(spans: list[tuple[int, int]], from_seq: int) -> None:
    """Whatever overlaps, the chain covers what is there without a gap, with no piece that adds nothing."""
    pieces = [Piece(segment(first, first + more), first + more) for first, more in sorted(spans)]
    chain = chain_of(pieces, from_seq)
    there = {seq for piece in pieces for seq in range(piece.segment.first_seq, piece.last_seq + 1)}
    end = from_seq
    while end in there:
        end += 1
    covered = {seq for piece in chain for seq in range(piece.segment.first_seq, piece.last_seq + 1)}
    assert set(range(from_seq, end)) <= covered
    assert max(covered, default=0) == (end - 1 if chain else 0)
    firsts = [piece.segment.first_seq for piece in chain]
    assert firsts == sorted(set(firsts))
    lasts = [piece.last_seq for piece in chain]
    assert lasts == sorted(set(lasts))


def _manifest(name: str, created_s: float, seq: int) -> SnapshotManifest:
    part = ShardPart(shard=0, server_id="s", seq=seq, epoch=0, step=-1, tables=(), files=())
    return SnapshotManifest(name=name, created_us=int(created_s * 1e6), parts=(part,))


@pytest.mark.parametrize(
    ("snapshots", "left"),
    [
        ({}, [1, 11, 21, 31]),
        ({100: 25}, [21, 31]),  # the only one is old: what it has is not needed
        ({3: 25}, [21, 31]),  # all that is before it is older than the retention, too
        ({200: 12, 100: 25, 3: 40}, [21, 31]),  # the newest of the old ones
        ({100: 5}, [1, 11, 21, 31]),
    ],
)
def test_what_no_restore_needs_is_pruned(tmp_path: Path, snapshots: dict[int, int], left: list[int]) -> None:
    """Segments stay that a restore to any moment of the retention needs."""
    archive = archive_in(tmp_path / "store")
    for first in (1, 11, 21, 31):
        each = replace(segment(first, first + 9), shard=0)
        archive.store.put(each.path, b"any")
        old = time.time() - 1000
        os.utime(tmp_path / "store" / each.path, (old, old))
    manifests = [_manifest(f"s{age}", time.time() - age, seq) for age, seq in snapshots.items()]
    num_gone = archive.prune(manifests, keep_s=50)
    assert [found.first_seq for found in archive.segments()] == left
    assert num_gone == 4 - len(left)


def test_what_is_young_is_not_pruned(tmp_path: Path) -> None:
    """Before the first snapshot is as old as the retention, a restore to before it needs all of the log."""
    archive = archive_in(tmp_path / "store")
    each = replace(segment(1, 10), shard=0)
    archive.store.put(each.path, b"any")
    assert archive.prune([_manifest("s", time.time() - 100, 20)], keep_s=50) == 0


def test_segments_of_two_histories_are_told() -> None:
    """Two copies that ran at once in one term archived other records under the same seqs: no chain is made of both."""
    one, other = segment(1, 30), segment(31, 60, mark=8)
    nested, again = segment(5, 10), segment(21, 40)
    pieces = [Piece(each, each.last_seq) for each in (one, nested, again)]
    check_history(pieces, "store")
    check_history([Piece(one, 30), Piece(other, 60)], "store")
    with pytest.raises(CorruptionError, match=r"store: \S+0040\S+ and \S+0060\S+ are of two histories"):
        check_history([Piece(again, 40), Piece(other, 60)], "store")
    with pytest.raises(CorruptionError, match="two histories"):
        check_history([Piece(one, 30), Piece(nested, 10), Piece(segment(12, 14, mark=8), 14)], "store")
    # A claim makes the other one void.
    check_history([Piece(one, 30), Piece(again, 30), Piece(other, 60)], "store")
