"""Rows in fewer bits: the fast paths against the definition and FBGEMM, and the definition against its bounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels import row_quantization as rq
from headrace.kernels.row_quantization import PRECISIONS, Precision

PACKED: tuple[Precision, ...] = ("int8", "int4")
DIMS = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 511, 1000, 1023, 1024]))


@st.composite
def _rows(draw: st.DrawFn, *, only_finite: bool = False) -> torch.Tensor:
    """Rows of random scales and places, some constant, some zero, and unless told otherwise some not finite or huge."""
    num_rows, dim = draw(st.integers(0, 40)), draw(DIMS)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scale = 10.0 ** torch.empty(num_rows, 1).uniform_(-6, 3, generator=generator)
    rows = (torch.randn(num_rows, dim, generator=generator) + torch.randn(num_rows, 1, generator=generator)) * scale
    kinds = ["plain", "plain", "zero", "zeros", "constant", "tiny"]
    kinds += [] if only_finite else ["nan", "inf", "-inf", "huge", "both"]
    for row in rows:
        kind = draw(st.sampled_from(kinds))
        if kind in ("zero", "constant"):
            row[:] = 0.0 if kind == "zero" else float(row[0])
        elif kind == "zeros":  # the least value, of both signs
            row.abs_()
            row[torch.rand(dim, generator=generator) < 0.3] = 0.0
            row[torch.rand(dim, generator=generator) < 0.3] = -0.0
        elif kind == "tiny":
            row *= 1e-30
        elif kind == "both":
            row[0], row[-1] = -3e38, 3e38
        elif kind != "plain":
            row[draw(st.integers(0, dim - 1))] = 3e38 if kind == "huge" else float(kind)
    return rows


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(_bits(left), _bits(right))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # A NaN is a NaN, whatever its bits.
    tensor = tensor.contiguous()
    return tensor.nan_to_num(12345.0).view(torch.uint8) if tensor.is_floating_point() else tensor


@settings(max_examples=150)
@given(_rows(), st.sampled_from(PRECISIONS))
def test_fast_paths_are_the_definition(rows: torch.Tensor, precision: Precision) -> None:
    """Every row, finite or not, packs to the definition's bytes and reads as its numbers, alone and gathered."""
    dim = rows.shape[1]
    packed = rq.quantize_rows(rows, precision)
    assert _same_bits(packed, rq.quantize_rows_reference(rows, precision))
    read = rq.dequantize_rows(packed, precision, dim)
    assert read.dtype == torch.float32 and read.is_contiguous()
    assert _same_bits(read, rq.dequantize_rows_reference(packed, precision, dim))
    assert packed.nbytes == rows.shape[0] * rq.row_size_bytes(dim, precision)
    if rows.shape[0]:
        indices = torch.randint(0, rows.shape[0], (17,), generator=torch.Generator().manual_seed(rows.shape[0]))
        assert _same_bits(rq.gather_rows(packed, indices, precision, dim), read[indices])


@settings(max_examples=150)
@given(_rows(only_finite=True), st.sampled_from(PRECISIONS))
def test_errors_stay_below_the_bound(rows: torch.Tensor, precision: Precision) -> None:
    """No column of a finite row is further from what it was than `error_bound` says."""
    read = rq.dequantize_rows(rq.quantize_rows(rows, precision), precision, rows.shape[1])
    error = (read.double() - rows.double()).abs().amax(dim=1)
    assert bool((error <= rq.error_bound(rows, precision)).all())


@pytest.mark.parametrize("precision", PACKED)
def test_the_bound_is_not_loose(precision: Precision) -> None:
    """Random rows come to within three tenths of the bound: a path that is more precise than it says is another one."""
    rows = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    error = (rq.dequantize_rows(rq.quantize_rows(rows, precision), precision, 64).double() - rows).abs().amax(dim=1)
    assert bool((error >= 0.7 * rq.error_bound(rows, precision)).all())


@settings(max_examples=60)
@given(_rows(only_finite=True))
def test_packed_rows_are_fbgemms(rows: torch.Tensor) -> None:
    """Finite rows pack to the bytes of torch's own and FBGEMM's operators, but for the sign of a bias of zero."""
    if not rows.numel():
        return
    ops, is_even = torch.ops.quantized, rows.shape[1] % 2 == 0
    expected = {"int8": ops.embedding_bag_byte_prepack(rows)}
    if is_even:
        expected["int4"] = ops.embedding_bag_4bit_prepack(rows)
    for precision, packed in expected.items():
        bias = packed[:, -4 if precision == "int8" else -2 :]
        bias[:, -1][(bias & torch.tensor([*[0xFF] * (bias.shape[1] - 1), 0x7F], dtype=torch.uint8) == 0).all(dim=1)] = 0
        assert torch.equal(rq.quantize_rows_reference(rows, precision), packed)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", PACKED)
@pytest.mark.parametrize("least", [0.0, -0.0, -1e-30])
def test_a_bias_of_zero_has_one_sign(precision: Precision, least: float) -> None:
    """Whatever zeros a row has, in whatever order, its bias is +0 once it is zero in the bias's type."""
    zeros = [[least, 0.0, 1.0], [0.0, least, 1.0], [1.0, -0.0, least], [least] * 3]
    rows = torch.tensor([[*row, *row, *row] for row in zeros])
    packed = rq.quantize_rows(rows, precision)
    assert _same_bits(packed, rq.quantize_rows_reference(rows, precision))
    bias = (
        packed[:, -4:].clone().view(torch.float32) if precision == "int8" else packed[:, -2:].clone().view(torch.half)
    )
    assert bool((bias[:, 0] == least).all()) or precision == "int4"
    assert not bool(torch.signbit(bias[bias == 0]).any())


@pytest.mark.torchrec
@pytest.mark.parametrize("dim", [4, 12, 32, 64, 1000])
def test_packed_rows_are_those_of_fbgemm_gpu(dim: int) -> None:
    """The operators of fbgemm_gpu, where it is installed, give the same bytes and numbers."""
    pytest.importorskip("fbgemm_gpu")
    ops = torch.ops.fbgemm
    rows = torch.randn(500, dim, generator=torch.Generator().manual_seed(dim)) * 3
    int8, int4 = rq.quantize_rows(rows, "int8"), rq.quantize_rows(rows, "int4")
    assert torch.equal(int8, ops.FloatToFused8BitRowwiseQuantized(rows))
    assert torch.equal(int4, ops.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, 4))
    assert torch.equal(rq.dequantize_rows(int8, "int8", dim), ops.Fused8BitRowwiseQuantizedToFloat(int8))
    assert torch.equal(rq.dequantize_rows(int4, "int4", dim), ops.FusedNBitRowwiseQuantizedSBHalfToFloat(int4, 4))


def test_golden_bytes() -> None:
    """The layouts, byte by byte: codes, scale, bias."""
    rows = torch.tensor([[1.0, 3.0, 2.0, 4.0, 1.0]])
    assert rq.quantize_rows(rows[:, :3] * 127.5, "int8")[0].tolist() == [
        *(0, 255, 128),
        *(0x00, 0x00, 0x80, 0x3F),  # scale 1.0
        *(0x00, 0x00, 0xFF, 0x42),  # bias 127.5
    ]
    # Codes 0 10 5 15 0 at a scale of 0.2: two a byte, the first in the low half.
    assert rq.quantize_rows(rows, "int4")[0].tolist() == [0xA0, 0xF5, 0x00, 0x66, 0x32, 0x00, 0x3C]


@pytest.mark.parametrize("precision", PACKED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_a_row_that_cannot_be_held_reads_as_nan(precision: Precision, bad: float) -> None:
    """A NaN or an infinity, or a range beyond the scale, spoils its row visibly, and no other row."""
    rows = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    rows[1, 2], rows[1, 4] = bad, -3e38
    read = rq.dequantize_rows(rq.quantize_rows(rows, precision), precision, 6)
    assert bool(read[1].isnan().all())
    assert not bool(read[[0, 2]].isnan().any())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_zeros_and_constants(precision: Precision) -> None:
    """Zeros read as zeros, and small whole numbers that fill a row as themselves."""
    rows = torch.tensor([[0.0], [-3.0], [64.0]]).expand(3, 7)
    assert torch.equal(rq.dequantize_rows(rq.quantize_rows(rows, precision), precision, 7), rows)


@settings(max_examples=80)
@given(_rows(), st.sampled_from(PACKED), st.data())
def test_columns_split_without_loss(rows: torch.Tensor, precision: Precision, data: st.DataObject) -> None:
    """Columns that are cut out of packed rows read as they did, bit for bit, at odd places too."""
    dim = rows.shape[1]
    offset = data.draw(st.integers(0, dim - 1))
    width = data.draw(st.integers(1, dim - offset))
    packed = rq.quantize_rows(rows, precision)
    part = rq.split_columns(packed, precision, offset, width, dim)
    assert part.shape[1] == rq.row_size_bytes(width, precision)
    whole = rq.dequantize_rows(packed, precision, dim)
    assert _same_bits(rq.dequantize_rows(part, precision, width), whole[:, offset : offset + width])


@settings(max_examples=60)
@given(_rows(only_finite=True), st.sampled_from(PACKED), st.booleans(), st.data())
def test_sums_of_bags(rows: torch.Tensor, precision: Precision, is_weighted: bool, data: st.DataObject) -> None:
    """Bags summed from packed rows are those of the dequantized rows, up to the rounding of the sum."""
    num_rows, dim = rows.shape
    sizes = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=8)) if num_rows else [0, 0]
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    generator = torch.Generator().manual_seed(num_rows)
    indices = torch.randint(0, max(num_rows, 1), (int(offsets[-1]),), generator=generator)
    weights = torch.randn(indices.numel(), generator=generator) if is_weighted else None
    packed = rq.quantize_rows(rows, precision)
    sums = rq.sum_rows(packed, indices, offsets, precision, dim, weights)
    parts = rq.dequantize_rows(packed, precision, dim)[indices].double()
    parts = parts if weights is None else parts * weights[:, None]
    for bag, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        scale = parts[begin:end].abs().sum() + rows.abs().sum()  # codes times scale and the bias are added one by one
        assert float((sums[bag].double() - parts[begin:end].sum(dim=0)).abs().max()) <= 1e-5 * float(scale)


def test_rows_need_not_be_contiguous_or_float32() -> None:
    """Strided rows, and rows in bfloat16 or float64, are what they are as float32."""
    rows = torch.randn(6, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for precision in PRECISIONS:
        for given_rows in (rows[::2, ::2], rows.bfloat16(), rows.t()):
            expected = rq.quantize_rows_reference(given_rows.float(), precision)
            assert torch.equal(rq.quantize_rows(given_rows, precision), expected)
