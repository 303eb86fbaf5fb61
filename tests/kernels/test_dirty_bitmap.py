"""Bitmaps of dirty rows: the CPU's way and the kernels against the definition, and the definition against a set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_inputs import ALL_WAYS, LAUNCHERS, WARP_LAUNCHERS, examples, launcher_of, moved

from headrace.kernels import dirty_bitmap as bm

# Around a word, a kernel's tile (65,536 rows) and several of them.
SIZES = st.sampled_from([1, 63, 64, 65, 255, 257, 4097, 65_536, 65_600, 200_001])


def _ids(num_rows: int, num_ids: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-max(1, num_rows // 8), num_rows, (num_ids,), generator=generator)
    return ids.to(dtype)


@pytest.mark.parametrize(("device", "lanes"), ALL_WAYS)
@examples(24)
@given(
    num_rows=SIZES,
    num_ids=st.sampled_from([0, 1, 31, 100, 5000, 60_000]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    max_rows=st.one_of(st.none(), st.integers(0, 5000)),
    seed=st.integers(0, 2**32),
)
@example(num_rows=200_001, num_ids=300_000, dtype=torch.int32, max_rows=100_000, seed=0)  # dense
def test_kernels_are_the_definition(
    device: str, lanes: int, num_rows: int, num_ids: int, dtype: torch.dtype, max_rows: int | None, seed: int
) -> None:
    """The CPU and the kernels mark and take what the definition does, and the definition's rows are a Python set's."""
    ids, plain = _ids(num_rows, num_ids, dtype, seed), bm.make_bitmap(num_rows)
    bm.mark_dirty_reference(plain, ids)
    expected = sorted({row for row in ids.tolist() if row >= 0})
    room = plain.numel() * 64 if max_rows is None else max_rows
    if device == "plain":
        bitmap = bm.make_bitmap(num_rows)
        bm.mark_dirty(bitmap, ids)
        assert torch.equal(bitmap, plain)
        taken, count = bm.take_dirty(bitmap, max_rows)
        assert taken.numel() == int(count)
    else:
        launcher, bitmap = launcher_of("bitmap", device, lanes), bm.make_bitmap(num_rows, device)
        bm.launch_mark_dirty(launcher, bitmap, ids.to(device))
        assert torch.equal(bitmap.cpu(), plain)
        taken, count = bm.launch_take_dirty(launcher, bitmap, room)
        assert taken.numel() == room
    plain_taken, plain_count = bm.take_dirty_reference(plain, max_rows)
    assert plain_taken.tolist() == expected[:max_rows] and int(count) == int(plain_count)
    assert torch.equal(taken[: int(count)].cpu(), plain_taken)
    assert torch.equal(bitmap.cpu(), plain)
    assert bm.take_dirty(plain)[0].tolist() == expected[int(count) :]


@st.composite
def _features(draw: st.DrawFn) -> tuple[torch.Tensor, ...]:
    """Return (bitmap, row ids, starts, first slots, rows) of features of some tables, one after the other."""
    num_rows = draw(st.lists(st.sampled_from([1, 64, 65, 1000]), max_size=6))
    lengths = [draw(st.sampled_from([0, 0, 1, 5, 300])) for _ in num_rows]
    before, behind, stride = draw(st.integers(0, 3)), draw(st.integers(0, 3)), draw(st.integers(1, 3))
    seed = draw(st.integers(0, 2**31))
    ids = [_ids(rows, length, torch.int64, seed) for rows, length in zip(num_rows, lengths, strict=True)]
    around = torch.full((before,), 10**6), torch.full((behind,), 10**6)  # of no feature
    row_ids = torch.cat([around[0], *ids, around[1]]).to(draw(st.sampled_from([torch.int32, torch.int64])))
    bounds = torch.tensor([0, *lengths]).cumsum(0) + before
    starts = bounds.repeat_interleave(stride).to(draw(st.sampled_from([torch.int32, torch.int64])))[::stride]
    slots, end = [], 64 * draw(st.integers(0, 2))
    for rows in num_rows:
        slots.append(draw(st.sampled_from([-1, end, end])))
        end += -(-rows // 64) * 64
    return bm.make_bitmap(end), row_ids, starts, torch.tensor(slots).long(), torch.tensor(num_rows).long()


@pytest.mark.parametrize("device", ["plain", *LAUNCHERS])
@examples(60)
@given(_features())
def test_marked_features_are_the_definitions(device: str, features: tuple[torch.Tensor, ...]) -> None:
    """Each streamed feature's ids, of any type and stride of the starts, are marked at its table's slots."""
    there, plain = [moved(tensor, "cpu" if device == "plain" else device) for tensor in features], features[0].clone()
    bm.mark_dirty_features_reference(plain, *features[1:])
    if device == "plain":
        there[0] = there[0].clone()
        bm.mark_dirty_features(*there)
    else:
        bm.launch_mark_dirty_features(launcher_of("bitmap", device), *there)
    assert torch.equal(there[0].cpu(), plain)
    _, row_ids, starts, first_slots, _ = features
    bounds, ids = starts.tolist(), row_ids.tolist()
    expected = {
        slot + row
        for feature, slot in enumerate(first_slots.tolist())
        for row in ids[bounds[feature] : bounds[feature + 1]]
        if slot >= 0 and row >= 0
    }
    assert bm.take_dirty(plain)[0].tolist() == sorted(expected)


_Tables = tuple[torch.Tensor, list[torch.Tensor], list[int], list[int]]


@st.composite
def _tables(draw: st.DrawFn) -> _Tables:
    """Return (bitmap, row ids, first slots, rows) of some tables, whose order is not that of their slots."""
    num_tables = draw(st.sampled_from([0, 1, 3, 15, 16, 17, 33]))
    num_rows = [draw(st.sampled_from([1, 64, 65, 1000])) for _ in range(num_tables)]
    row_ids, slots, end = [], [0] * len(num_rows), 64 * draw(st.integers(0, 2))
    for table in draw(st.permutations(range(len(num_rows)))):
        slots[table] = end
        end += -(-num_rows[table] // 64) * 64
    for rows in num_rows:
        ids = _ids(rows, draw(st.sampled_from([0, 1, 5, 300])), torch.int64, draw(st.integers(0, 2**31)))
        change = draw(st.sampled_from([None, None, "int32", "apart", "two-dimensional"]))
        if change == "int32":
            ids = ids.int()
        elif change == "apart":
            ids = ids.repeat_interleave(2)[::2]
        elif change == "two-dimensional":
            ids = ids[None]
        row_ids.append(ids)
    return bm.make_bitmap(end), row_ids, slots, num_rows


@pytest.mark.parametrize("device", ["plain", *LAUNCHERS])
@examples(60)
@given(_tables())
def test_marked_tables_are_the_definitions(device: str, tables: _Tables) -> None:
    """Each table's ids, of any type and layout, are marked at its slots, in launches of 16 tables."""
    plain, row_ids, first_slots, num_rows = tables
    bitmap = plain.clone()
    bm.mark_dirty_tables_reference(plain, row_ids, first_slots, num_rows)
    if device == "plain":
        bm.mark_dirty_tables(bitmap, row_ids, first_slots, num_rows)
    else:
        bitmap, there = moved(bitmap, device), [moved(ids, device) for ids in row_ids]
        bm.launch_mark_dirty_tables(launcher_of("bitmap", device), bitmap, there, first_slots, num_rows)
    assert torch.equal(bitmap.cpu(), plain)
    pairs = zip(row_ids, first_slots, strict=True)
    expected = {slot + row for ids, slot in pairs for row in ids.flatten().tolist() if row >= 0}
    assert bm.take_dirty(plain)[0].tolist() == sorted(expected)


@pytest.mark.parametrize("device", LAUNCHERS)
def test_several_blocks_mark_tables_and_features(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks mark the same words of several tables at once, and go on to further ids."""
    monkeypatch.setattr(bm, "_MAX_BLOCKS_PER_TABLE", 2)
    monkeypatch.setattr(bm, "_MARK_THREADS", 64)
    launcher, ids = launcher_of("bitmap", device), [_ids(200, 700, torch.int64, 1), _ids(70, 300, torch.int64, 2)]
    bitmap, plain = bm.make_bitmap(384, device), bm.make_bitmap(384)
    bm.launch_mark_dirty_tables(launcher, bitmap, [each.to(device) for each in ids], [128, 0], [200, 70])
    bm.mark_dirty_tables_reference(plain, ids, [128, 0], [200, 70])
    assert torch.equal(bitmap.cpu(), plain)
    features = (_ids(200, 1000, torch.int64, 1), *map(torch.tensor, ([0, 400, 900, 1000], [0, 256, 0], [200] * 3)))
    bitmap, plain = bm.make_bitmap(512, device), bm.make_bitmap(512)
    bm.launch_mark_dirty_features(launcher, bitmap, *(tensor.to(device) for tensor in features))
    bm.mark_dirty_features_reference(plain, *features)
    assert torch.equal(bitmap.cpu(), plain)


_IN_NEXT = [torch.tensor([1, 2]), torch.tensor([65, 3])], [128, 0], [70, 65]
_BEHIND = [torch.tensor([1, 2])], [256], [70]
_FEATURES = torch.tensor([1, 2, 65, 3]), torch.tensor([0, 2, 4]), torch.tensor([64, 0]), torch.tensor([70, 65])


@pytest.mark.parametrize(
    ("operation", "args", "said"),
    [
        ("mark_dirty", (torch.tensor([1, 200]),), None),
        ("mark_dirty_tables", _IN_NEXT, "row 65"),
        ("mark_dirty_tables", _BEHIND, None),
        ("mark_dirty_features", _FEATURES, "row 65"),
    ],
)
def test_a_row_beyond_its_table_is_an_error(operation: str, args: tuple[object, ...], said: str | None) -> None:
    """A row behind the bitmap or in the next table's slots raises on the CPU, marking nothing, and stops the kernel."""
    bitmap = bm.make_bitmap(192)
    for name in (operation, f"{operation}_reference")[: 1 if operation == "mark_dirty" else 2]:
        with pytest.raises(IndexError, match=said):
            getattr(bm, name)(bitmap, *args)
        assert not bitmap.any()
    with pytest.raises(IndexError, match="trap"):
        getattr(bm, f"launch_{operation}")(launcher_of("bitmap", "cpu"), bitmap, *args)


@pytest.mark.parametrize("device", LAUNCHERS)
def test_a_slice_of_a_bitmap_is_a_bitmap(device: str) -> None:
    """Rows are marked in a slice that begins at any word, and taken from it."""
    bitmap = bm.make_bitmap(64 * 3000, device)
    launcher, ids = launcher_of("bitmap", device), torch.tensor([0, 70, 64 * 2000 + 5])
    bm.launch_mark_dirty(launcher, bitmap[1:], ids.to(device))
    taken, count = bm.launch_take_dirty(launcher, bitmap[1:], 10)
    assert taken[: int(count)].tolist() == ids.tolist()
    assert not bitmap.any()


@pytest.mark.parametrize(("device", "lanes"), WARP_LAUNCHERS)
def test_several_blocks(device: str, lanes: int) -> None:
    """Blocks mark the same words at once, and write their tiles' rows, few or many, behind those of other blocks."""
    launcher, num_rows = launcher_of("bitmap", device, lanes), 3 * 65_536 - 70
    ids = torch.cat([_ids(300, 600, torch.int32, 1), _ids(num_rows, 400, torch.int32, 2)])
    plain = bm.make_bitmap(num_rows)
    bm.mark_dirty_reference(plain, torch.arange(65_536 + 5, 65_536 + 10_000))  # a dense part
    bitmap = plain.to(device, copy=True)
    bm.launch_mark_dirty(launcher, bitmap, ids.to(device))
    bm.mark_dirty_reference(plain, ids)
    assert torch.equal(bitmap.cpu(), plain)
    for max_rows in (10_100, num_rows):
        taken, count = bm.launch_take_dirty(launcher, bitmap, max_rows)
        expected, _ = bm.take_dirty_reference(plain, max_rows)
        assert expected.numel() and torch.equal(taken[: int(count)].cpu(), expected)
        assert torch.equal(bitmap.cpu(), plain)


@pytest.mark.parametrize(("device", "lanes"), WARP_LAUNCHERS)
def test_a_tile_looks_back_over_many(device: str, lanes: int) -> None:
    """A tile's place is behind the rows of those before it, up to one that knows all before itself."""
    num_tiles, knowing, own, up_to_here = 150, 45, 2**62, -(2**63)
    bitmap = bm.make_bitmap(num_tiles * 65_536)
    bitmap[-1] = 0b1010
    # What the others have told, and that the next block to start is the last tile's.
    told = [own + 10**6] * knowing + [up_to_here + 1000] + [own + 3] * (num_tiles - knowing - 2) + [0]
    state, count = torch.tensor([*told, num_tiles - 1]).to(device), torch.tensor(-1).to(device)
    row_ids, bitmap = torch.full((2000,), -1, device=device), bitmap.to(device)
    arguments = (bitmap, bitmap.numel(), state, num_tiles, 2000, row_ids, count)
    launcher_of("bitmap", device, lanes).launch("take_dirty_kernel", 1, 256, *arguments)
    before = 1000 + 3 * (num_tiles - knowing - 2)
    assert state[num_tiles - 1 :].tolist() == [up_to_here + before + 2, num_tiles]
    assert int(count) == before + 2
    last = num_tiles * 65_536 - 64
    assert row_ids[before : before + 2].tolist() == [last + 1, last + 3]
    assert (row_ids == -1).sum() == 1998 and not bitmap.any()


def test_bad_arguments_are_named() -> None:
    """Another type or layout is an error that says what is needed."""
    with pytest.raises(ValueError, match="int32 or int64"):
        bm.mark_dirty(bm.make_bitmap(10), torch.zeros(1))
    with pytest.raises(ValueError, match="contiguous int64"):
        bm.take_dirty(torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ValueError, match="negative"):
        bm.take_dirty(bm.make_bitmap(10), -1)
    starts, numbers = torch.tensor([0, 1]), torch.tensor([0])
    for args, said in (
        ((torch.zeros(1), starts, numbers, numbers), "row_ids is"),
        ((numbers, starts.short(), numbers, numbers), "starts is"),
        ((numbers, starts, starts, numbers), r"first_slots is .* int64\[1\]"),
        ((numbers, starts, numbers, numbers.int()), "num_rows is"),
        ((numbers, starts.to("meta"), numbers, numbers), "several devices: cpu, meta"),
    ):
        with pytest.raises(ValueError, match=said):
            bm.mark_dirty_features(bm.make_bitmap(10), *args)
    for row_ids, slots, rows, said in (
        ([numbers, numbers.short()], [0, 0], [1, 1], "row_ids of table 1 is torch.int16 on cpu"),
        ([numbers.to("meta")], [0], [1], "row_ids of table 0 is torch.int64 on meta"),
        ([numbers], [0, 0], [1], "1 row_ids, 2 first_slots and 1 num_rows"),
        ([numbers], [-64], [1], "first slot -64 is negative"),
    ):
        with pytest.raises(ValueError, match=said):
            bm.mark_dirty_tables(bm.make_bitmap(10), row_ids, slots, rows)
