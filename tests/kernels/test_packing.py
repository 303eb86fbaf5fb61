"""Packed rows: the CPU's way and the kernels against the definition, and the layout against the streamer's buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import DIMS, DTYPES, LAUNCHERS, examples, launcher_of, moved, poisoned, random_rows, same_bits

from headrace.kernels import packing as rp
from headrace.kernels.runtime import dispatch


@dataclass
class _Tables:
    weights: list[torch.Tensor]
    row_ids: list[torch.Tensor]
    states: list[list[torch.Tensor]]
    offsets: list[int]

    def to(self, device: str) -> _Tables:
        return _Tables(
            [moved(table, device) for table in self.weights],
            [ids.to(device) for ids in self.row_ids],
            [[moved(state, device) for state in states] for states in self.states],
            self.offsets,
        )


@st.composite
def _tables(draw: st.DrawFn) -> _Tables:
    """Tables of any types and widths; some are columns of wider ones, so that their rows begin anywhere."""
    found = _Tables([], [], [], [])
    for _ in range(draw(st.integers(1, 4))):
        num_rows, num_ids = draw(st.integers(1, 50)), draw(st.sampled_from([0, 1, 2, 7, 33]))
        seed = draw(st.integers(0, 2**31))

        def source(num_rows: int = num_rows, seed: int = seed) -> torch.Tensor:
            dtype, dim = draw(st.sampled_from(DTYPES)), draw(DIMS)
            before, behind = draw(st.sampled_from([(0, 0), (0, 0), (1, 0), (2, 3), (8, 8)]))
            return random_rows((num_rows, before + dim + behind), dtype, seed)[:, before : before + dim]

        states = [source() for _ in range(draw(st.integers(0, 2)))]
        if draw(st.booleans()):
            states.append(random_rows((num_rows,), torch.float32, seed))
        found.weights.append(source())
        found.states.append(states)
        found.row_ids.append(torch.randint(0, num_rows, (num_ids,), generator=torch.Generator().manual_seed(seed)))
        found.offsets.append(draw(st.sampled_from([0, 7, 2**40])))
    return found


def _size_bytes(tables: _Tables) -> int:
    return rp.layout_of(tables.weights, [ids.numel() for ids in tables.row_ids], tables.states)[1]


@pytest.mark.parametrize("device", [pytest.param("plain", id="on the CPU"), *LAUNCHERS])
@examples(60)
@given(_tables())
def test_pack_kernel_is_the_definition(device: str, tables: _Tables) -> None:
    """One launch packs all columns to their places with their bits; nothing between or behind them is written."""
    args, expected = (tables.weights, tables.row_ids, tables.states), poisoned(_size_bytes(tables) + 128)
    packed = rp.pack_rows_reference(*args, expected, row_offsets=tables.offsets)
    out = poisoned(expected.numel())
    if device == "plain":
        assert rp.pack_rows(*args, out, row_offsets=tables.offsets) == packed
    else:
        out, there = out.to(device), tables.to(device)
        columns = zip(there.weights, there.states, strict=True)
        sources = [rp._as_rows(source) for weights, states in columns for source in (weights, *states)]
        counts = [1 + len(states) for states in there.states]
        rp.launch_pack_rows(launcher_of("row_packing", device), sources, there.row_ids, counts, there.offsets, out)
    assert torch.equal(out.cpu(), expected)
    for number, (place, ids) in enumerate(zip(packed, tables.row_ids, strict=True)):
        there_ids = expected[place.row_ids.offset : place.row_ids.end].view(torch.int64)
        assert there_ids.tolist() == [row + tables.offsets[number] for row in ids.tolist()]
        for column, source in zip(place.columns, (tables.weights[number], *tables.states[number]), strict=True):
            assert column.offset % 64 == 0
            rows = expected[column.offset : column.end].view(source.dtype).view(ids.numel(), *source.shape[1:])
            assert same_bits(rows, source[ids])


@pytest.mark.gpu
@pytest.mark.parametrize("has_kernels", [True, False])
@examples(30)
@given(_tables())
def test_pinned_memory_is_packed_into(has_kernels: bool, tables: _Tables) -> None:
    """Rows of a GPU come to pinned memory behind an event, written by the kernel or, without it, copied by torch."""
    expected = poisoned(_size_bytes(tables) + 128)
    args = tables.weights, tables.row_ids, tables.states
    rp.pack_rows_reference(*args, expected, row_offsets=tables.offsets)
    out, there = poisoned(expected.numel()).pin_memory(), tables.to("cuda")
    args = there.weights, there.row_ids, there.states
    with mock.patch.object(dispatch, "launcher_for", dispatch.launcher_for if has_kernels else lambda *operation: None):
        rp.pack_rows(*args, out, row_offsets=there.offsets)
    torch.cuda.current_stream().record_event().synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("device", LAUNCHERS)
@pytest.mark.parametrize(("dim", "dtype"), [(128, torch.float32), (129, torch.bfloat16), (131, torch.uint8)])
def test_several_blocks(device: str, dim: int, dtype: torch.dtype) -> None:
    """Blocks pack parts of two tables' columns that other blocks go on with, and write them back."""
    table, ids = random_rows((150, dim), dtype, 1), torch.randperm(150, generator=torch.Generator().manual_seed(1))
    states: list[list[torch.Tensor]] = [[table], []]
    _, size_bytes = rp.layout_of([table] * 2, [150, 150], states)
    expected, launcher = poisoned(size_bytes), launcher_of("row_packing", device)
    places = rp.pack_rows_reference([table] * 2, [ids] * 2, states, expected)
    out, there, ids = poisoned(size_bytes).to(device), table.to(device), ids.to(device)
    rp.launch_pack_rows(launcher, [there] * 3, [ids] * 2, [2, 1], [0, 0], out)
    assert torch.equal(out.cpu(), expected)
    rows = out[places[0].columns[0].offset :].view(dtype)[: 9 * dim].view(9, dim)
    rp.launch_unpack_rows(launcher, there.zero_(), ids[:9], rows)
    assert same_bits(there[ids[:9]].cpu(), table[ids[:9].cpu()])


@pytest.mark.parametrize("device", [pytest.param("plain", id="on the CPU"), *LAUNCHERS])
@examples(60)
@given(
    dim=DIMS,
    dtype=st.sampled_from(DTYPES),
    before=st.integers(0, 3),
    num_rows=st.integers(1, 60),
    seed=st.integers(0, 2**32),
)
def test_unpacked_rows_are_the_packed_ones(
    device: str, dim: int, dtype: torch.dtype, before: int, num_rows: int, seed: int
) -> None:
    """Rows are written back bit for bit, and their neighbours stay."""
    ids = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))[: num_rows // 2]
    packed = random_rows((ids.numel(), dim), dtype, seed)
    whole = random_rows((num_rows, dim + 2 * before), dtype, seed + 1)
    expected = whole.clone()
    rp.unpack_rows_reference(expected[:, before : before + dim], ids, packed)
    if device == "plain":
        rp.unpack_rows(whole[:, before : before + dim], ids, packed)
    else:
        whole = whole.to(device)
        table = whole[:, before : before + dim]
        rp.launch_unpack_rows(launcher_of("row_packing", device), table, ids.to(device), packed.to(device))
    assert same_bits(whole, expected)


@pytest.mark.parametrize("row", [-1, 5])
def test_a_row_that_is_none_is_an_error(row: int) -> None:
    """Ids outside of the table raise on the CPU and stop the kernels; none is taken from the end or skipped."""
    table, ids, out = torch.zeros(5, 3), torch.tensor([0, row]), poisoned(256)
    with pytest.raises((IndexError, RuntimeError)):
        rp.pack_rows([table], [ids], [[]], out)
    with pytest.raises(IndexError):
        rp.unpack_rows(table, ids, torch.ones(2, 3))
    kernels = launcher_of("row_packing", "cpu")
    with pytest.raises(IndexError, match="trap"):
        rp.launch_pack_rows(kernels, [table], [ids], [1], [0], out)
    with pytest.raises(IndexError, match="trap"):
        rp.launch_unpack_rows(kernels, table, ids, torch.ones(2, 3))


_TABLE, _IDS = torch.zeros(5, 3), torch.arange(5)
_AWAY, _AWAY_IDS = _TABLE.to("meta"), _IDS.to("meta")


@pytest.mark.parametrize(
    ("tables", "row_ids", "states", "out", "said"),
    [
        ([_TABLE], [_IDS], [[]], poisoned(127), r"uint8\[128\]"),
        ([_TABLE], [_IDS], [[]], poisoned(512)[1:], "multiple of 64"),
        ([_TABLE], [_IDS], [[torch.zeros(4)]], poisoned(512), "rows"),
        ([torch.zeros(3, 5).t()], [_IDS], [[]], poisoned(512), "contiguous"),
        ([_TABLE, _AWAY], [_IDS, _IDS], [[], []], poisoned(512), "several devices: cpu, meta"),
        ([_TABLE], [_AWAY_IDS], [[]], poisoned(512), "several devices: cpu, meta"),
        ([_AWAY], [_AWAY_IDS], [[]], poisoned(512), "only out may differ, in pinned host memory"),
    ],
)
def test_bad_arguments_are_named(
    tables: list[torch.Tensor], row_ids: list[torch.Tensor], states: list[Any], out: torch.Tensor, said: str
) -> None:
    """A buffer that is too small, askew or not where a kernel can write, and other states, are errors."""
    with pytest.raises(ValueError, match=said):
        rp.pack_rows(tables, row_ids, states, out)
    with pytest.raises(ValueError, match="are not 5 rows"):
        rp.unpack_rows(_TABLE, _IDS, torch.zeros(5, 4))
    if tables[0] is _AWAY:
        with mock.patch.object(torch.Tensor, "is_pinned", lambda tensor: tensor is out):
            rp.pack_rows(tables, row_ids, states, out)
            with pytest.raises(ValueError, match="several devices"):
                rp.pack_rows(tables, [_IDS], states, out)


def test_more_than_32_bits_can_count_is_refused() -> None:
    """A buffer in which the kernels' numbers of rows and units would begin anew is an error."""
    ids = torch.empty(2**31, dtype=torch.int64, device="meta")
    table, out = (torch.empty(size, dtype=torch.uint8, device="meta") for size in ((5, 1), 2**35))
    rp.pack_rows([table], [ids[: 2**30]], [[]], out)
    with pytest.raises(ValueError, match="largest buffer"):
        rp.pack_rows([table], [ids], [[]], out)


def test_what_comes_from_the_host_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside of a CUDA graph, whose replays would read the host's memory again, a copy to the GPU is an error."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
        rp.to_device(torch.zeros(3, dtype=torch.int64), torch.device("cuda", 0))
