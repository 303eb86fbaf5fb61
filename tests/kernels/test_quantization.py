"""Rows in fewer bits: the fast paths against the definition and FBGEMM, and the definition against its bounds."""

from __future__ import annotations

import pytest
import torch
from error_bounds import error_bound
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_inputs import DIMS, WARP_LAUNCHERS, examples, launcher_of, same_bits

from headrace.kernels import quantization as qz
from headrace.kernels.precisions import PRECISIONS, Precision, row_size_bytes

PACKED: tuple[Precision, ...] = ("int8", "int4")


_KINDS = ("plain", "plain", "zero", "zeros", "constant", "tiny", "large", "nan", "inf", "-inf", "huge", "both")
_NUM_BOUNDED = 6  # of these, the first that every precision can hold


def _rows(num_rows: int, dim: int, seed: int, *, only_finite: bool = False) -> torch.Tensor:
    """Rows of random scales and places, each of a kind in turn."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.empty(num_rows, 1).uniform_(-6, 3, generator=generator)
    rows = (torch.randn(num_rows, dim, generator=generator) + torch.randn(num_rows, 1, generator=generator)) * scale
    for number, row in enumerate(rows):
        kind = _KINDS[(number + seed) % (_NUM_BOUNDED if only_finite else len(_KINDS))]
        if kind in ("zero", "constant"):
            row[:] = 0.0 if kind == "zero" else float(row[0])
        elif kind == "zeros":  # the least value, of both signs
            row.abs_()
            row[torch.rand(dim, generator=generator) < 0.3] = 0.0
            row[torch.rand(dim, generator=generator) < 0.3] = -0.0
        elif kind in ("tiny", "large"):
            row *= 1e-30 if kind == "tiny" else 1e6
        elif kind == "both":
            row[0], row[-1] = -3e38, 3e38
        elif kind != "plain":
            row[seed % dim] = 3e38 if kind == "huge" else float(kind)
    return rows


_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
_SEEDS = st.integers(0, 2**32)
ROWS = st.builds(_rows, st.integers(0, 40), DIMS, _SEEDS)
FINITE_ROWS = st.builds(_rows, st.integers(0, 40), DIMS, _SEEDS, only_finite=st.just(True))


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """A NaN is a NaN, whatever its bits."""
    if left.is_floating_point() and right.is_floating_point():
        left, right = left.nan_to_num(12345.0), right.nan_to_num(12345.0)
    return same_bits(left, right)


@settings(max_examples=150)
@given(
    ROWS, st.sampled_from(PRECISIONS), st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64])
)
def test_rows_on_the_cpu_are_the_definitions(rows: torch.Tensor, precision: Precision, dtype: torch.dtype) -> None:
    """Rows of any type, finite or not, pack to the definition's bytes and read as its numbers, alone and gathered."""
    rows = rows.to(dtype)
    dim, expected = rows.shape[1], qz.quantize_rows_reference(rows, precision)
    packed, copied = qz.quantize_rows(rows, precision), qz.quantize(rows, precision)
    assert _same(packed, expected) and _same(copied, expected)
    assert copied.data_ptr() != rows.data_ptr() or not rows.numel()
    read = qz.dequantize_rows(packed, precision, dim)
    assert read.dtype == torch.float32 and read.is_contiguous()
    assert _same(read, qz.dequantize_rows_reference(packed, precision, dim))
    assert _same(qz.dequantize(copied, precision, dim), read)
    assert packed.nbytes == rows.shape[0] * row_size_bytes(dim, precision)
    if rows.shape[0]:
        indices = torch.randint(0, rows.shape[0], (17,), generator=torch.Generator().manual_seed(rows.shape[0]))
        assert _same(qz.gather_rows(packed, indices, precision, dim), read[indices])


@settings(max_examples=100)
@given(FINITE_ROWS)
def test_finite_rows(rows: torch.Tensor) -> None:
    """No column of a finite row is further from what it was than `error_bound` says.

    Such rows pack to the bytes of torch's own and FBGEMM's operators, but for the sign of a bias of zero.
    """
    ops, is_even = torch.ops.quantized, rows.shape[1] % 2 == 0
    for precision in PRECISIONS:
        packed = qz.quantize_rows(rows, precision)
        error = (qz.dequantize_rows(packed, precision, rows.shape[1]).double() - rows.double()).abs().amax(dim=1)
        assert bool((error <= error_bound(rows, precision)).all())
        if not rows.numel() or precision not in PACKED or (precision == "int4" and not is_even):
            continue
        prepack = ops.embedding_bag_byte_prepack if precision == "int8" else ops.embedding_bag_4bit_prepack
        expected = prepack(rows)
        bias = expected[:, -4 if precision == "int8" else -2 :]
        bias[:, -1][(bias & torch.tensor([*[0xFF] * (bias.shape[1] - 1), 0x7F], dtype=torch.uint8) == 0).all(dim=1)] = 0
        assert torch.equal(packed, expected)


@pytest.mark.parametrize("precision", PACKED)
def test_special_values(precision: Precision) -> None:
    """Whatever zeros a row has, in whatever order, its bias is +0 once it is zero in the bias's type.

    A NaN or an infinity, or a range beyond the scale, spoils its row visibly, and no other row.
    """
    for least in (0.0, -0.0, -1e-30):
        zeros = [[least, 0.0, 1.0], [0.0, least, 1.0], [1.0, -0.0, least], [least] * 3]
        rows = torch.tensor([[*row, *row, *row] for row in zeros])
        packed = qz.quantize_rows(rows, precision)
        assert _same(packed, qz.quantize_rows_reference(rows, precision))
        width, dtype = (4, torch.float32) if precision == "int8" else (2, torch.half)
        bias = packed[:, -width:].clone().view(dtype)
        assert bool((bias[:, 0] == least).all()) or precision == "int4"
        assert not bool(torch.signbit(bias[bias == 0]).any())
    for bad in (float("nan"), float("inf"), float("-inf"), 3e38):
        rows = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
        rows[1, 2], rows[1, 4] = bad, -3e38
        read = qz.dequantize_rows(qz.quantize_rows(rows, precision), precision, 6)
        assert bool(read[1].isnan().all()) and not bool(read[[0, 2]].isnan().any())


@pytest.mark.torchrec
@pytest.mark.parametrize("dim", [4, 12, 32, 64, 1000])
def test_packed_rows_are_those_of_fbgemm_gpu(dim: int) -> None:
    """The operators of fbgemm_gpu, where it is installed, give the same bytes and numbers."""
    pytest.importorskip("fbgemm_gpu")
    ops = torch.ops.fbgemm
    rows = torch.randn(500, dim, generator=torch.Generator().manual_seed(dim)) * 3
    int8, int4 = qz.quantize_rows(rows, "int8"), qz.quantize_rows(rows, "int4")
    assert torch.equal(int8, ops.FloatToFused8BitRowwiseQuantized(rows))
    assert torch.equal(int4, ops.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, 4))
    assert torch.equal(qz.dequantize_rows(int8, "int8", dim), ops.Fused8BitRowwiseQuantizedToFloat(int8))
    assert torch.equal(qz.dequantize_rows(int4, "int4", dim), ops.FusedNBitRowwiseQuantizedSBHalfToFloat(int4, 4))


def test_layouts_and_arguments() -> None:
    """The layouts, byte by byte: codes, scale, bias. Rows may be strided, of any floating type."""
    rows = torch.tensor([[1.0, 3.0, 2.0, 4.0, 1.0]])
    assert qz.quantize_rows(rows[:, :3] * 127.5, "int8")[0].tolist() == [
        *(0, 255, 128),
        *(0x00, 0x00, 0x80, 0x3F),  # scale 1.0
        *(0x00, 0x00, 0xFF, 0x42),  # bias 127.5
    ]
    # Codes 0 10 5 15 0 at a scale of 0.2: two a byte, the first in the low half.
    assert qz.quantize_rows(rows, "int4")[0].tolist() == [0xA0, 0xF5, 0x00, 0x66, 0x32, 0x00, 0x3C]
    rows = torch.randn(6, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for precision in PRECISIONS:
        for given_rows in (rows[::2, ::2], rows.bfloat16(), rows.t()):
            expected = qz.quantize_rows_reference(given_rows.float(), precision)
            assert torch.equal(qz.quantize_rows(given_rows, precision), expected)
    with pytest.raises(ValueError, match="floating"):
        qz.quantize(torch.zeros(3, 4, dtype=torch.int64), "int8")
    with pytest.raises(ValueError, match="no rows of 9 columns"):
        qz.dequantize(qz.quantize(torch.zeros(3, 8), "int8"), "int8", 9)


@settings(max_examples=80)
@given(ROWS, st.sampled_from(PACKED), st.data())
def test_columns_split_without_loss(rows: torch.Tensor, precision: Precision, data: st.DataObject) -> None:
    """Columns that are cut out of packed rows read as they did, bit for bit, at odd places too."""
    dim = rows.shape[1]
    offset = data.draw(st.integers(0, dim - 1))
    width = data.draw(st.integers(1, dim - offset))
    packed = qz.quantize_rows(rows, precision)
    part = qz.split_columns(packed, precision, offset, width, dim)
    assert part.shape[1] == row_size_bytes(width, precision)
    whole = qz.dequantize_rows(packed, precision, dim)
    assert _same(qz.dequantize_rows(part, precision, width), whole[:, offset : offset + width])


@settings(max_examples=60)
@given(FINITE_ROWS, st.sampled_from(PACKED), st.booleans(), st.data())
def test_sums_of_bags(rows: torch.Tensor, precision: Precision, is_weighted: bool, data: st.DataObject) -> None:
    """Bags summed from packed rows are those of the dequantized rows, up to the rounding of the sum."""
    num_rows, dim = rows.shape
    sizes = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=8)) if num_rows else [0, 0]
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    generator = torch.Generator().manual_seed(num_rows)
    indices = torch.randint(0, max(num_rows, 1), (int(offsets[-1]),), generator=generator)
    weights = torch.randn(indices.numel(), generator=generator) if is_weighted else None
    packed = qz.quantize_rows(rows, precision)
    sums = qz.sum_rows(packed, indices, offsets, precision, dim, weights)
    parts = qz.dequantize_rows(packed, precision, dim)[indices].double()
    parts = parts if weights is None else parts * weights[:, None]
    for bag, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        scale = parts[begin:end].abs().sum() + rows.abs().sum()  # codes times scale and the bias are added one by one
        assert float((sums[bag].double() - parts[begin:end].sum(dim=0)).abs().max()) <= 1e-5 * float(scale)


@pytest.mark.parametrize(("device", "lanes"), WARP_LAUNCHERS)
@examples(60)
@given(st.sampled_from([0, 1, 7, 8, 9, 40]), DIMS, st.sampled_from(["int8", "int4"]), st.integers(0, 2**32))
@example(8, 2, "int8", 0)  # a row of zeros of both signs
@example(9, 132, "int8", 1)  # a warp's lanes share a row and keep it
@example(7, 512, "int4", 2)
def test_kernels_are_the_definition(
    device: str, lanes: int, num_rows: int, dim: int, precision: Precision, seed: int
) -> None:
    """Every row, finite or not, packs to the definition's bytes and reads as its numbers."""
    launcher = launcher_of("quantize", device, lanes)
    rows = _rows(num_rows, dim, seed)
    expected = qz.quantize_rows_reference(rows, precision)
    packed = qz.launch_quantize(launcher, rows.to(device), precision)
    assert same_bits(packed, expected)
    read = qz.launch_dequantize(launcher, packed, precision, dim)
    assert _same(read.cpu(), qz.dequantize_rows_reference(expected, precision, dim))


@pytest.mark.parametrize(("precision", "dim", "num_rows"), [("int8", 33, 12), ("int4", 64, 40), ("int8", 260, 12)])
@pytest.mark.parametrize(("device", "lanes"), WARP_LAUNCHERS)
def test_several_blocks(device: str, lanes: int, precision: Precision, dim: int, num_rows: int) -> None:
    """Warps of several blocks quantize rows, which may share words with their neighbours, and read them back."""
    launcher, rows = launcher_of("quantize", device, lanes), _rows(num_rows, dim, 1)
    expected = qz.quantize_rows_reference(rows, precision)
    packed = qz.launch_quantize(launcher, rows.to(device), precision)
    assert same_bits(packed, expected)
    read = qz.launch_dequantize(launcher, packed, precision, dim)
    assert _same(read.cpu(), qz.dequantize_rows_reference(expected, precision, dim))
