"""Quantizing on any device: the kernels against the definition in `row_quantization.py`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_inputs import DIMS, WARP_LAUNCHERS, launcher_of, same_bits

from headrace.kernels import quantize as qz
from headrace.kernels import row_quantization as rq
from headrace.kernels.row_quantization import PRECISIONS, Precision

_KINDS = ("plain", "zero", "zeros", "constant", "tiny", "large", "nan", "inf", "-inf", "huge", "both")


def _rows(num_rows: int, dim: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of random scales and places, one in ten of each kind."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.empty(num_rows, 1).uniform_(-6, 3, generator=generator)
    rows = (torch.randn(num_rows, dim, generator=generator) + torch.randn(num_rows, 1, generator=generator)) * scale
    for number, row in enumerate(rows):
        kind = _KINDS[(number + seed) % len(_KINDS)]
        if kind in ("zero", "constant"):
            row[:] = 0.0 if kind == "zero" else float(row[0])
        elif kind == "zeros":  # the least value, of both signs
            row[:] = row.abs() * torch.randint(-1, 2, (dim,), generator=generator).clamp(max=0).neg()
            row[torch.rand(dim, generator=generator) < 0.3] = -0.0
        elif kind in ("tiny", "large"):
            row *= 1e-30 if kind == "tiny" else 1e6
        elif kind == "both":
            row[0], row[-1] = -3e38, 3e38
        elif kind != "plain":
            row[seed % dim] = 3e38 if kind == "huge" else float(kind)
    return rows.to(dtype)


def _same_numbers(left: torch.Tensor, right: torch.Tensor) -> bool:
    """A NaN is a NaN, whatever its bits."""
    return same_bits(left.nan_to_num(12345.0), right.nan_to_num(12345.0))


@pytest.mark.parametrize(("device", "lanes"), WARP_LAUNCHERS)
@settings(max_examples=80)
@given(st.sampled_from([0, 1, 7, 8, 9, 40]), DIMS, st.sampled_from(["int8", "int4"]), st.integers(0, 2**32))
@example(8, 2, "int8", 0)  # a row of zeros of both signs
def test_kernels_are_the_definition(
    device: str, lanes: int, num_rows: int, dim: int, precision: Precision, seed: int
) -> None:
    """Every row, finite or not, packs to the definition's bytes and reads as its numbers."""
    launcher = launcher_of("quantize", device, lanes)
    rows = _rows(num_rows, dim, seed)
    expected = rq.quantize_rows_reference(rows, precision)
    packed = qz.launch_quantize(launcher, rows.to(device), precision)
    assert same_bits(packed, expected)
    read = qz.launch_dequantize(launcher, packed, precision, dim)
    assert _same_numbers(read.cpu(), rq.dequantize_rows_reference(expected, precision, dim))


@pytest.mark.parametrize(("precision", "dim"), [("int8", 33), ("int4", 64)])
@pytest.mark.parametrize(("device", "lanes"), WARP_LAUNCHERS)
def test_several_blocks(device: str, lanes: int, precision: Precision, dim: int) -> None:
    """Warps of several blocks quantize rows, which may share words with their neighbours, and read them back."""
    launcher, rows = launcher_of("quantize", device, lanes), _rows(20, dim, 1)
    expected = rq.quantize_rows_reference(rows, precision)
    packed = qz.launch_quantize(launcher, rows.to(device), precision)
    assert same_bits(packed, expected)
    read = qz.launch_dequantize(launcher, packed, precision, dim)
    assert _same_numbers(read.cpu(), rq.dequantize_rows_reference(expected, precision, dim))


@settings(max_examples=60)
@given(
    st.integers(0, 20),
    DIMS,
    st.sampled_from(PRECISIONS),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    st.integers(0, 2**32),
)
def test_cpu_is_the_definition(num_rows: int, dim: int, precision: Precision, dtype: torch.dtype, seed: int) -> None:
    """On the CPU it is `row_quantization.py`, whatever the rows' type."""
    rows = _rows(num_rows, dim, seed, dtype)
    packed = qz.quantize(rows, precision)
    assert packed.data_ptr() != rows.data_ptr() or not rows.numel()
    expected = rq.quantize_rows_reference(rows, precision)
    same = _same_numbers if packed.is_floating_point() else same_bits
    assert same(packed, expected)
    assert _same_numbers(qz.dequantize(packed, precision, dim), rq.dequantize_rows_reference(expected, precision, dim))


def test_bad_arguments_are_named() -> None:
    """Rows of another type, and packed rows of another dim, are errors."""
    with pytest.raises(ValueError, match="floating"):
        qz.quantize(torch.zeros(3, 4, dtype=torch.int64), "int8")
    with pytest.raises(ValueError, match="no rows of 9 columns"):
        qz.dequantize(qz.quantize(torch.zeros(3, 8), "int8"), "int8", 9)


def test_operators_are_registered_rightly() -> None:
    """The operators' schemas, and what they say to a tracer, are true."""
    rows = torch.randn(3, 5)
    for precision in PRECISIONS:
        torch.library.opcheck(qz._quantize, (rows, precision))
        torch.library.opcheck(qz._dequantize, (qz.quantize(rows, precision), precision, 5))
