"""Drains of dirty rows: the CPU's way and the kernels against the definition, and the definition against a set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_inputs import (
    ALL_WAYS,
    DIMS,
    DTYPES,
    WARP_LAUNCHERS,
    launcher_of,
    moved,
    poisoned,
    random_rows,
    same_bits,
)
from sanitizers import WATCHER

from headrace.kernels import dirty_drain as dd
from headrace.kernels.dirty_bitmap import make_bitmap, mark_dirty
from headrace.kernels.dirty_drain import HEADER_WORDS, DrainPlan, DrainTable, header_words
from headrace.kernels.packing import layout_of
from headrace.schemas.routing import shards_of_rows


@dataclasses.dataclass
class _Inputs:
    """Tables with dirty rows, and a buffer for them."""

    tables: list[DrainTable]
    bitmap: torch.Tensor
    num_shards: int
    out_bytes: int
    start: int

    def to(self, device: str) -> DrainPlan:
        moved_tables = [
            dataclasses.replace(table, columns=tuple(moved(column, device) for column in table.columns))
            for table in self.tables
        ]
        return DrainPlan(moved_tables, self.num_shards)


@dataclasses.dataclass
class _Drain:
    """What a drain writes."""

    bitmap: torch.Tensor
    cursor: torch.Tensor
    out: torch.Tensor
    header: torch.Tensor

    @classmethod
    def of(cls, inputs: _Inputs, device: str = "cpu") -> _Drain:
        num_words = header_words(len(inputs.tables), inputs.num_shards)
        return cls(
            bitmap=inputs.bitmap.to(device, copy=True),
            cursor=torch.tensor([inputs.start], device=device),
            out=poisoned(inputs.out_bytes).to(device),
            header=torch.full((num_words,), -1, device=device),
        )

    def same(self, other: _Drain) -> bool:
        return all(
            torch.equal(getattr(self, field.name).cpu(), getattr(other, field.name).cpu())
            for field in dataclasses.fields(self)
        )


def _table(draw: st.DrawFn, first_slot: int, num_rows: int) -> DrainTable:
    """Columns of any types and widths; some are columns of wider ones, so that their rows begin anywhere."""
    seed = draw(st.integers(0, 2**31))
    dims = DIMS if num_rows <= 100 else st.integers(1, 3)

    def column() -> torch.Tensor:
        dtype, dim = draw(st.sampled_from(DTYPES)), draw(dims)
        before, behind = draw(st.sampled_from([(0, 0), (0, 0), (1, 0), (2, 3), (8, 8)]))
        return random_rows((num_rows, before + dim + behind), dtype, seed)[:, before : before + dim]

    return DrainTable(
        first_slot=first_slot,
        num_rows=num_rows,
        row_offset=draw(st.sampled_from([0, 7, 2**40])),
        seed=draw(st.integers(0, 2**64 - 1)),
        columns=tuple(column() for _ in range(draw(st.integers(1, 3)))),
    )


@st.composite
def _inputs(draw: st.DrawFn, shards: tuple[int, ...] = (1, 2, 3, 8, 37, 257, 2048)) -> _Inputs:
    """Few tables or many rows: sizes around a word, and dirty rows of one to all."""
    tables: list[DrainTable] = []
    sizes = [0, 1, 63, 64, 65, 100] if draw(st.booleans()) else [3, 4096, 5000]
    end = 0
    for _ in range(draw(st.integers(1, 4))):
        tables.append(_table(draw, end + 64 * draw(st.integers(0, 2)), draw(st.sampled_from(sizes))))
        end = tables[-1].end_slot
    bitmap = make_bitmap(end + 64 * draw(st.integers(0, 2)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    for table in tables:
        density = draw(st.sampled_from([0, 0.01, 0.3, 1]))
        rows = torch.rand(table.num_rows, generator=generator) < density
        mark_dirty(bitmap, rows.nonzero() + table.first_slot)
    longest = max(table.row_bytes + (1 + len(table.columns)) * 64 for table in tables)
    room = draw(st.sampled_from([0, 1, 100, 1000, 10_000, 10**6]))
    start = draw(st.one_of(st.just(0), st.integers(0, end + 100)))
    return _Inputs(tables, bitmap, draw(st.sampled_from(shards)), longest + room, start)


def _large(density: float, out_bytes: int, start: int = 0, *, is_narrow: bool = False) -> _Inputs:
    """Several tiles of the bitmap, and of the rows taken, in one table; another behind it."""
    tables = []
    for first_slot, num_rows in ((64, 140_000), (64 * 2200, 9000)):
        columns = (random_rows((num_rows, 1), torch.float32, 1), random_rows((num_rows, 3), torch.uint8, 2))
        columns = columns[1:] if is_narrow else columns
        tables.append(
            DrainTable(first_slot=first_slot, num_rows=num_rows, row_offset=5, seed=2**63 + first_slot, columns=columns)
        )
    bitmap = make_bitmap(tables[-1].end_slot)
    for table in tables:
        rows = torch.rand(table.num_rows, generator=torch.Generator().manual_seed(3)) < density
        mark_dirty(bitmap, rows.nonzero() + table.first_slot)
    return _Inputs(tables, bitmap, 3, out_bytes, start)


def _first_table_fits() -> _Inputs:
    """The first table fits whole, and no row of the second one."""
    columns = (torch.randn(64, 1),)
    tables = [DrainTable(first_slot=slot, num_rows=64, row_offset=0, seed=1, columns=columns) for slot in (0, 128)]
    return _Inputs(tables, torch.tensor([-1, 0, -1]), 2, 64 * tables[0].row_bytes + 2 * 64, 0)


def _small() -> _Inputs:
    table = DrainTable(first_slot=64, num_rows=70, row_offset=0, seed=1, columns=(torch.randn(70, 4),))
    bitmap = make_bitmap(table.end_slot)
    mark_dirty(bitmap, torch.tensor([64, 70, 133]))
    return _Inputs([table], bitmap, 2, 4096, 0)


def _two_tables() -> _Inputs:
    """Two tables on three shards, with room for less than half of their rows; the first drain begins amid the first."""
    tables = [
        DrainTable(first_slot=slot, num_rows=100, row_offset=7, seed=slot, columns=(torch.randn(100, 4),))
        for slot in (64, 256)
    ]
    bitmap = make_bitmap(tables[-1].end_slot)
    for table in tables:
        mark_dirty(bitmap, torch.arange(0, 100, 2) + table.first_slot)
    return _Inputs(tables, bitmap, 3, 40 * tables[0].row_bytes + 4 * 64, 110)


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Let torch fill what is not written yet: a kernel that relies on zeros is found."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _launch(plan: DrainPlan, state: _Drain, device: str, lanes: int) -> None:
    launchers = launcher_of("dirty_drain", device, lanes), launcher_of("row_packing", device, lanes)
    args = plan.numbers, plan.num_shards, plan.descriptors, state.out, state.header
    with _poisoned_memory(), pytest.MonkeyPatch.context() as patch:
        if WATCHER is not None:
            patch.setattr(dd, "_scratch", _scratch_apart)
        dd.launch_drain_dirty(launchers, state.bitmap, state.cursor, *args)


def _scratch_apart(sizes: list[int], device: torch.device) -> tuple[torch.Tensor, ...]:
    """An allocation for each, so that a sanitizer sees where each ends."""
    return tuple(torch.empty(size, dtype=torch.int64, device=device) for size in sizes)


def _define(inputs: _Inputs, state: _Drain) -> None:
    dd.drain_dirty_reference(state.bitmap, state.cursor, inputs.tables, inputs.num_shards, state.out, state.header)


@pytest.mark.parametrize(("device", "lanes"), ALL_WAYS)
@settings(max_examples=25)
@given(_inputs())
@example(_first_table_fits())
@example(_large(0.2, 10**6))
@example(_large(1, 700_000, start=64 * 1100 + 3))
@example(_large(0.01, 10_000))
def test_kernels_are_the_definition(device: str, lanes: int, inputs: _Inputs) -> None:
    """Buffer, header, cursor and bitmap of the CPU and the kernels are the definition's, also of a second drain."""
    there, plain = _Drain.of(inputs, "cpu" if device == "plain" else device), _Drain.of(inputs)
    plan = inputs.to("cpu" if device == "plain" else device)
    for _ in range(2):
        if device == "plain":
            dd.drain_dirty(there.bitmap, there.cursor, plan, there.out, there.header)
        else:
            _launch(plan, there, device, lanes)
        _define(inputs, plain)
        assert there.same(plain)


@pytest.mark.parametrize(("num_shards", "out_bytes"), [(3, 75_000), (2048, 50_000)])
@pytest.mark.parametrize(("device", "lanes"), WARP_LAUNCHERS)
def test_several_blocks(device: str, lanes: int, num_shards: int, out_bytes: int) -> None:
    """Several tiles of a bitmap, and of the rows taken, are drained: all rows tables, or of what fits."""
    inputs = dataclasses.replace(_large(0.04, out_bytes, start=200, is_narrow=True), num_shards=num_shards)
    there, plain = _Drain.of(inputs, device), _Drain.of(inputs)
    _launch(inputs.to(device), there, device, lanes)
    _define(inputs, plain)
    assert there.same(plain)
    assert bool(int(plain.cursor)) == (out_bytes == 50_000)


def _rows_of(inputs: _Inputs, state: _Drain) -> list[list[int]]:
    """Return the rows of each table in a drain, having checked that they are in order, and their columns."""
    size_bytes, _, _, *counts = state.header.tolist()
    per_shard = np.array(counts).reshape(len(inputs.tables), inputs.num_shards)
    places, end = layout_of(
        [table.columns[0] for table in inputs.tables],
        per_shard.sum(1).tolist(),
        [table.columns[1:] for table in inputs.tables],
    )
    assert end == size_bytes <= state.out.numel()
    found = []
    for table, place, its_counts in zip(inputs.tables, places, per_shard, strict=True):
        global_ids = state.out[place.row_ids.offset : place.row_ids.end].view(torch.int64)
        ids = global_ids - table.row_offset
        for column, source in zip(place.columns, table.columns, strict=True):
            rows = state.out[column.offset : column.end].view(source.dtype).view(ids.numel(), source.shape[1])
            assert same_bits(rows, source[ids])
        shards = shards_of_rows(table.seed, global_ids.numpy(), inputs.num_shards)
        assert np.bincount(shards, minlength=inputs.num_shards).tolist() == its_counts.tolist()
        pairs = list(zip(shards.tolist(), ids.tolist(), strict=True))
        assert pairs == sorted(set(pairs))
        found.append(ids.tolist())
    return found


@pytest.mark.parametrize("way", ["definition", "CPU"])
@settings(max_examples=60)
@given(inputs=_inputs())
@example(inputs=_first_table_fits())
def test_drains_take_every_dirty_row_once(way: str, inputs: _Inputs) -> None:
    """Drain by drain, each dirty row comes once, with its values, in its shard's order, until none is left."""
    _check_drains(way, inputs)


@pytest.mark.parametrize("way", ["definition", "CPU"])
@pytest.mark.parametrize("make", [_small, _first_table_fits, _two_tables])
def test_drains_of_a_bitmap_take_every_dirty_row_once(make: Callable[[], _Inputs], way: str) -> None:
    """The same of a few bitmaps, which take one drain and several."""
    _check_drains(way, make())


def _check_drains(way: str, inputs: _Inputs) -> None:
    slots = set(_dirty_slots(inputs.bitmap))
    # At least some thirtieth of all in each, or one row.
    all_bytes = sum(table.packed_bytes(table.num_rows) for table in inputs.tables)
    inputs = dataclasses.replace(inputs, out_bytes=max(inputs.out_bytes, all_bytes // 30))
    state, plan = _Drain.of(inputs), inputs.to("cpu")
    for _ in range(len(slots) + 2):
        start = int(state.cursor)
        if way == "CPU":
            dd.drain_dirty(state.bitmap, state.cursor, plan, state.out, state.header)
        else:
            _define(inputs, state)
        taken = {
            table.first_slot + row
            for table, rows in zip(inputs.tables, _rows_of(inputs, state), strict=True)
            for row in rows
        }
        ahead = sorted(slot for slot in slots if slot >= start)
        assert sorted(taken) == ahead[: len(taken)]
        assert taken or not ahead
        slots -= taken
        _, num_left, next_slot, *_ = state.header.tolist()
        assert num_left == len(slots) and next_slot == int(state.cursor)
        assert next_slot == (0 if len(taken) == len(ahead) else max(taken) + 1)
        assert _dirty_slots(state.bitmap) == sorted(slots)
        if not slots:
            return
    raise AssertionError(f"{len(slots)} rows were never taken")


def _dirty_slots(bitmap: torch.Tensor) -> list[int]:
    bits = np.unpackbits(bitmap.numpy().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def test_five_launches_and_no_order_for_one_shard() -> None:
    """A drain is five launches; with one shard four, as rows are in its order already."""
    started: list[str] = []

    class _Recorder:
        def launch(self, kernel: str, blocks: int, threads: int, *args: torch.Tensor | int) -> None:
            started.extend([kernel] if blocks else [])

    for num_shards in (2, 1):
        inputs = dataclasses.replace(_small(), num_shards=num_shards)
        plan, state = inputs.to("cpu"), _Drain.of(inputs)
        args = plan.numbers, plan.num_shards, plan.descriptors, state.out, state.header
        dd.launch_drain_dirty((_Recorder(), _Recorder()), state.bitmap, state.cursor, *args)
    routed = ["count_dirty_kernel", "plan_drain_kernel", "take_rows_kernel", "route_rows_kernel", "pack_rows_kernel"]
    assert started == routed + [kernel for kernel in routed if kernel != "route_rows_kernel"]


def _drain_in(way: str, inputs: _Inputs) -> _Drain:
    state = _Drain.of(inputs)
    if way == "definition":
        _define(inputs, state)
    elif way == "CPU":
        dd.drain_dirty(state.bitmap, state.cursor, inputs.to("cpu"), state.out, state.header)
    else:
        _launch(inputs.to("cpu"), state, "cpu", 32)
    return state


@pytest.mark.parametrize("way", ["definition", "CPU", "kernels"])
def test_bits_that_are_no_rows(way: str) -> None:
    """Words of no table are neither taken nor counted; a bit behind a last row is an error or stops the kernels."""
    inputs = _small()
    inputs.bitmap[0] = -1
    state = _drain_in(way, inputs)
    assert state.bitmap.tolist() == [-1, 0, 0]
    assert state.header.tolist()[1:3] == [0, 0] and sum(state.header.tolist()[HEADER_WORDS:]) == 3
    mark_dirty(inputs.bitmap, torch.tensor([64 + 70]))
    with pytest.raises(
        (IndexError, RuntimeError) if way == "CPU" else IndexError, match="trap" if way == "kernels" else None
    ):
        _drain_in(way, inputs)


def test_bad_arguments_are_named() -> None:
    """Buffers that are too short, askew or of another type are errors before a row is taken."""
    inputs = _small()
    plan, state = inputs.to("cpu"), _Drain.of(inputs)
    for change, said in (
        ({"bitmap": state.bitmap[:2]}, "no slot 191"),
        ({"bitmap": state.bitmap.int()}, "contiguous int64"),
        ({"cursor": state.cursor.int()}, r"cursor is .* int64\[1\]"),
        ({"header": state.header[1:]}, r"header is .* int64\[5\]"),
        ({"out": state.out.view(torch.int8)}, "contiguous uint8"),
        ({"out": state.out[:151]}, "152 to"),
        ({"out": state.out[1:]}, "multiple of 64"),
        ({"header": state.header.to("meta")}, "tensors are on meta"),
    ):
        bad = dataclasses.replace(state, **change)
        with pytest.raises(ValueError, match=said):
            dd.drain_dirty(bad.bitmap, bad.cursor, plan, bad.out, bad.header)
    assert torch.equal(state.bitmap, inputs.bitmap)


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    """On a GPU neither a plan nor a drain synchronizes."""
    inputs = _large(0.2, 10**6)
    state, expected = _Drain.of(inputs, "cuda"), _Drain.of(inputs)
    columns = [tuple(moved(column, "cuda") for column in table.columns) for table in inputs.tables]
    for _ in range(2):  # the first one compiles, loads and allocates
        state = _Drain.of(inputs, "cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            tables = [dataclasses.replace(t, columns=c) for t, c in zip(inputs.tables, columns, strict=True)]
            dd.drain_dirty(state.bitmap, state.cursor, DrainPlan(tables, inputs.num_shards), state.out, state.header)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    _define(inputs, expected)
    assert state.same(expected)


def _plan_table(first_slot: int, num_rows: int, *columns: torch.Tensor) -> DrainTable:
    given = columns or (torch.zeros(num_rows, 3), torch.zeros(num_rows, 1))
    return DrainTable(first_slot=first_slot, num_rows=num_rows, row_offset=0, seed=2**64 - 1, columns=given)


def test_sizes_of_a_plan() -> None:
    """Header, buffer and bitmap are as long as tables, longest row and last word make them; what fits does."""
    plan = DrainPlan([_plan_table(64, 65), _plan_table(256, 3, torch.zeros(3, 1000))], 5)
    assert plan.header_words == header_words(2, 5) == 13
    assert plan.min_out_bytes == 8 + 4000 + 2 * 64
    assert plan.end_slot == 256 + 64
    table = _plan_table(0, 200)
    for num_rows in (0, 1, 7, 100):
        assert table.rows_that_fit(num_rows * table.row_bytes + 3 * 64) == num_rows
        assert table.packed_bytes(num_rows) == layout_of([table.columns[0]], [num_rows], [table.columns[1:]])[1]
        assert table.packed_bytes(num_rows) <= num_rows * table.row_bytes + 3 * 64
    assert table.rows_that_fit(-1000) == 0


_GOOD = _plan_table(0, 65)


@pytest.mark.parametrize(
    ("tables", "num_shards", "said"),
    [
        *(([_GOOD, _plan_table(slot, 3)], 2, "multiple of 64, or not behind") for slot in (65, 64)),
        *(
            ([_plan_table(0, 65, column)], 2, r"\[65, width\] on cpu")
            for column in (torch.zeros(64, 3), torch.zeros(65))
        ),
        ([_plan_table(0, 3, torch.zeros(5, 3).t())], 2, "contiguous"),
        *(([dataclasses.replace(_GOOD, seed=seed)], 2, "out of range") for seed in (2**64, -1)),
        ([dataclasses.replace(_GOOD, row_offset=-1)], 2, "out of range"),
        *(([_GOOD], num_shards, f"{num_shards} shards") for num_shards in (0, 2**16 + 1)),
        ([], 2, "a drain needs a table"),
        ([dataclasses.replace(_GOOD, columns=())], 2, "each table a column"),
    ],
)
def test_bad_tables_are_named(tables: list[DrainTable], num_shards: int, said: str) -> None:
    """Slots that overlap, columns of other lengths or layouts, and numbers out of range are errors."""
    with pytest.raises(ValueError, match=said):
        DrainPlan(tables, num_shards)
