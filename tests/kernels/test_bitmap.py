"""Bitmaps of dirty rows: the CPU's way and the kernels against the definition, and the definition against a set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_inputs import LAUNCHERS, launcher_of

from headrace.kernels import bitmap as bm

# Around a word, a kernel's tile (65 536 rows) and several of them.
SIZES = st.sampled_from([1, 63, 64, 65, 255, 257, 4097, 65_536, 65_600, 200_001])


def _ids(num_rows: int, num_ids: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-max(1, num_rows // 8), num_rows, (num_ids,), generator=generator)
    return ids.to(dtype)


@settings(max_examples=80, deadline=None)
@given(
    num_rows=SIZES,
    num_ids=st.sampled_from([0, 1, 31, 100, 5000, 60_000]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    max_rows=st.one_of(st.none(), st.integers(0, 5000)),
    seed=st.integers(0, 2**32),
)
def test_cpu_is_the_definition(
    num_rows: int, num_ids: int, dtype: torch.dtype, max_rows: int | None, seed: int
) -> None:
    """Marking and taking give the definition's bits and rows, and the definition's are those of a Python set."""
    ids = _ids(num_rows, num_ids, dtype, seed)
    fast, plain = bm.make_bitmap(num_rows), bm.make_bitmap(num_rows)
    bm.mark_dirty(fast, ids)
    bm.mark_dirty_reference(plain, ids)
    assert torch.equal(fast, plain)
    expected = sorted({row for row in ids.tolist() if row >= 0})
    taken, count = bm.take_dirty(fast, max_rows)
    plain_taken, plain_count = bm.take_dirty_reference(plain, max_rows)
    assert taken.tolist() == plain_taken.tolist() == expected[:max_rows]
    assert int(count) == int(plain_count) == taken.numel()
    assert torch.equal(fast, plain)
    assert bm.take_dirty(fast)[0].tolist() == expected[taken.numel() :]


@pytest.mark.parametrize("device", LAUNCHERS)
@settings(max_examples=25, deadline=None)
@given(
    num_rows=SIZES,
    num_ids=st.sampled_from([0, 1, 31, 100, 5000, 60_000]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    max_rows=st.one_of(st.none(), st.integers(0, 5000)),
    seed=st.integers(0, 2**32),
)
@example(num_rows=200_001, num_ids=300_000, dtype=torch.int32, max_rows=100_000, seed=0)  # dense
def test_kernels_are_the_definition(
    device: str, num_rows: int, num_ids: int, dtype: torch.dtype, max_rows: int | None, seed: int
) -> None:
    """The kernels mark and take what the definition does, also when they take a part."""
    launcher = launcher_of("bitmap", device)
    ids = _ids(num_rows, num_ids, dtype, seed)
    bitmap, plain = bm.make_bitmap(num_rows, device), bm.make_bitmap(num_rows)
    bm.launch_mark_dirty(launcher, bitmap, ids.to(device))
    bm.mark_dirty_reference(plain, ids)
    assert torch.equal(bitmap.cpu(), plain)
    room = plain.numel() * 64 if max_rows is None else max_rows
    taken, count = bm.launch_take_dirty(launcher, bitmap, room)
    expected, _ = bm.take_dirty_reference(plain, max_rows)
    assert taken.numel() == room and int(count) == expected.numel()
    assert torch.equal(taken[: int(count)].cpu(), expected)
    assert torch.equal(bitmap.cpu(), plain)


def test_a_kernel_stops_at_a_row_beyond_the_bitmap() -> None:
    """The kernel does not skip a row that lies outside: it stops."""
    with pytest.raises(IndexError, match="trap"):
        bm.launch_mark_dirty(launcher_of("bitmap", "cpu"), bm.make_bitmap(64), torch.tensor([3, 64]))


def test_a_row_beyond_the_bitmap_is_an_error() -> None:
    """On the CPU an id that is out of range marks nothing."""
    bitmap = bm.make_bitmap(64)
    with pytest.raises(IndexError):
        bm.mark_dirty(bitmap, torch.tensor([1, 64]))
    assert not bitmap.any()


def test_bad_arguments_are_named() -> None:
    """Another type or layout is an error that says what is needed."""
    with pytest.raises(ValueError, match="int32 or int64"):
        bm.mark_dirty(bm.make_bitmap(10), torch.zeros(1))
    with pytest.raises(ValueError, match="contiguous int64"):
        bm.take_dirty(torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ValueError, match="negative"):
        bm.take_dirty(bm.make_bitmap(10), -1)


def test_operators_are_registered_rightly() -> None:
    """The operators' schemas, and what they say to a tracer, are true."""
    torch.library.opcheck(bm._mark_dirty, (bm.make_bitmap(100), torch.tensor([5, -1])))
    torch.library.opcheck(bm._take_dirty, (torch.full((3,), 5), 4))
