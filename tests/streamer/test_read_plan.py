"""Each row that ranks hold is read once, and what measured costs say decides who reads it."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from row_boxes import COLUMNS, WORLDS

from headrace.schemas.tables import ColumnShard, DType, TableSpec
from headrace.streamer.read_plan import ReadCosts, RowBox, in_rounds, plan_reads, seconds_of

SPECS = {name: TableSpec(fqn=name, num_rows=40, dim=6, dtype=DType.FLOAT32, states=()) for name in "tu"}
ROW_BYTES = 24 + 4 * 6
PIECE_BYTES = 8 * ROW_BYTES
SECONDS = st.floats(0, 10, allow_subnormal=False)


@st.composite
def costs_of(draw: st.DrawFn, num_ranks: int) -> ReadCosts:
    """Draw costs of so many ranks."""
    by_rank = st.tuples(*[SECONDS] * num_ranks)
    return ReadCosts(
        start_s=draw(SECONDS),
        request_s=draw(by_rank),
        read=draw(by_rank),
        store=draw(SECONDS),
        send=draw(st.tuples(*[by_rank] * num_ranks)),
    )


@given(boxes=WORLDS, data=st.data(), piece_rows=st.integers(1, 50))
def test_every_row_is_read_once(boxes: list[list[RowBox]], data: st.DataObject, piece_rows: int) -> None:
    """Whatever costs are, no row is read twice, none that nobody holds, and all who hold parts of it get these.

    Without costs only ranks that hold parts read, and shares of the same rows differ by at most one row.
    """
    costs = data.draw(st.one_of(st.none(), costs_of(len(boxes))))
    plan = plan_reads(boxes, SPECS, costs, piece_bytes=piece_rows * ROW_BYTES)
    held = [Counter({(b.name, row) for b in of_rank for row in range(b.first_row, b.end_row)}) for of_rank in boxes]
    read = [[(r.name, row) for r in of_rank for row in range(r.first_row, r.end_row)] for of_rank in plan]
    counts = Counter(row for of_rank in read for row in of_rank)
    assert counts.keys() == set().union(*held)
    assert set(counts.values()) <= {1}
    for rank, of_rank in enumerate(plan):
        for each in of_rank:
            holders = [rank for rank, _ in each.holders]
            assert costs is not None or rank in holders
            for row in range(each.first_row, each.end_row):
                assert holders == [r for r, rows in enumerate(held) if (each.name, row) in rows]


@given(num_rows=st.integers(1, 50), world=st.integers(1, 6))
def test_columns_split_over_ranks_are_read_in_equal_shares(num_rows: int, world: int) -> None:
    """Ranks that hold columns of the same rows read as many rows as each other, within one."""
    boxes = [
        [RowBox(name="t", first_row=0, end_row=num_rows, columns=ColumnShard(offset=rank, width=1))]
        for rank in range(world)
    ]
    sizes = [sum(r.num_rows for r in reads) for reads in plan_reads(boxes, SPECS)]
    assert sum(sizes) == num_rows
    assert max(sizes) - min(sizes) <= 1


def random_box(rng: random.Random) -> RowBox:
    """Return some rows and columns of a table."""
    first, end = sorted((rng.randint(0, 40), rng.randint(0, 40)))
    offset, last = rng.choice(COLUMNS)
    return RowBox(
        name=rng.choice("tu"),
        first_row=first,
        end_row=end,
        columns=ColumnShard(offset=offset, width=last - offset),
    )


def best_s(boxes: list[list[RowBox]], costs: ReadCosts) -> float:
    """Return the time of the fastest of all ways to give each piece to a rank."""
    reads = [read for of_rank in plan_reads(boxes, SPECS) for read in of_rank]
    pieces = [piece for read in reads for piece in read.pieces(PIECE_BYTES)]
    ranks = range(len(boxes))
    return min(
        seconds_of(
            [[piece for piece, reader in zip(pieces, readers, strict=True) if reader == rank] for rank in ranks],
            costs,
            piece_bytes=PIECE_BYTES,
        )
        for readers in itertools.product(ranks, repeat=len(pieces))
    )


def test_the_plan_is_near_the_best_of_all() -> None:
    """Over random layouts and costs the plan is never slower than even shares, and close to the fastest there is."""
    rng = random.Random(7)
    ratios: list[float] = []
    while len(ratios) < 80:
        num_ranks, spread, link = rng.choice([2, 3]), rng.choice([1, 3, 10]), rng.choice([0.05, 0.3, 1, 3])
        boxes = [[random_box(rng) for _ in range(rng.randint(0, 2))] for _ in range(num_ranks)]
        even = plan_reads(boxes, SPECS)
        if not 0 < sum(len(list(read.pieces(PIECE_BYTES))) for of_rank in even for read in of_rank) < 7:
            continue

        def some(mean: float, num_ranks: int = num_ranks, spread: int = spread) -> tuple[float, ...]:
            return tuple(mean * spread ** rng.uniform(-1, 1) for _ in range(num_ranks))

        costs = ReadCosts(
            start_s=0.0,
            request_s=some(10.0),
            read=some(1.0),
            store=rng.choice([0.0, 0.3]),
            send=tuple(some(link) for _ in range(num_ranks)),
        )
        plan = plan_reads(boxes, SPECS, costs, piece_bytes=PIECE_BYTES)
        time_s = seconds_of(plan, costs, piece_bytes=PIECE_BYTES)
        assert time_s <= seconds_of(even, costs, piece_bytes=PIECE_BYTES)
        ratios.append(time_s / best_s(boxes, costs))
    assert max(ratios) < 1.5
    assert statistics.mean(ratios) < 1.05


def test_times_that_cancel_leave_nothing() -> None:
    """What is added and taken away again may leave a little below zero, which counts as nothing."""
    boxes = [[], [RowBox(name=name, first_row=0, end_row=40, columns=ColumnShard(offset=0, width=6)) for name in "tu"]]
    costs = ReadCosts(
        start_s=0, request_s=(0.0, 1e-100), read=(0.0, 0.1), store=2.7, send=((0.0, 1e-200), (0.0, 1e-200))
    )
    plan = plan_reads(boxes, SPECS, costs, piece_bytes=3 * ROW_BYTES)
    assert sum(read.num_rows for of_rank in plan for read in of_rank) == 80


def test_a_rank_that_holds_nothing_helps_only_where_sending_is_cheap() -> None:
    """One rank has the only table; how much others read for it follows from the cost of sending."""
    boxes = [[RowBox(name="t", first_row=0, end_row=40, columns=ColumnShard(offset=0, width=6))], [], []]
    shares = {}
    for link in (0.01, 1.5):
        costs = ReadCosts(start_s=0, request_s=(0, 0, 0), read=(1, 1, 1), store=0, send=((link,) * 3,) * 3)
        plan = plan_reads(boxes, SPECS, costs, piece_bytes=ROW_BYTES)
        shares[link] = [sum(read.num_rows for read in of_rank) for of_rank in plan]
    assert max(shares[0.01]) <= 15
    assert shares[1.5] == [40, 0, 0]


@given(boxes=WORLDS, piece_rows=st.integers(1, 15))
def test_rounds_have_one_piece_of_each_rank(boxes: list[list[RowBox]], piece_rows: int) -> None:
    """Each piece that travels has a round of its own on its reader, pieces are in order, and each round is needed."""
    reads = plan_reads(boxes, SPECS)
    num_rounds, pieces = in_rounds(reads, piece_bytes=piece_rows * ROW_BYTES)
    sent = [[due for due, piece in of_rank if piece.receivers(rank)] for rank, of_rank in enumerate(pieces)]
    assert num_rounds == max(map(len, sent))
    for of_rank, rounds, own in zip(pieces, sent, reads, strict=True):
        assert [due for due, _ in of_rank] == sorted(due for due, _ in of_rank)
        assert len(rounds) == len(set(rounds))
        assert sum(piece.num_rows for _, piece in of_rank) == sum(read.num_rows for read in own)
        assert all(piece.num_rows <= piece_rows for _, piece in of_rank)
