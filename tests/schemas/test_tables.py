"""Table specs: checks, fingerprints, messages; and row ids as callers pass them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headrace.schemas.errors import RequestError, RowRangeError
from headrace.schemas.tables import (
    MAX_DIM,
    ColumnShard,
    DType,
    StateKind,
    StateSpec,
    TableSpec,
    as_ids,
    row_ids_of,
)

_LONG = (2**62,) * 30_000
STATE = StateSpec(name="momentum1", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1)
SPEC = TableSpec(fqn="user.weight", num_rows=1000, dim=128, dtype=DType.FLOAT32, states=(STATE,))


_DENSE = TableSpec.of_tensor("w", (30, 70), DType.FLOAT32)
_OTHER_STATES: list[dict[str, Any]] = [{"name": "momentum2"}, {"dtype": DType.FLOAT16}, {"width": 2}]
_OTHER_STATES.append({"kind": StateKind.POINTWISE, "width": 0})


def test_golden_numbers() -> None:
    """Fingerprints and sizes of elements never change: they are on the wire and on disk. States have their widths.

    A dense tensor has rows of at most 1,024 elements; the last one may have zeros behind them."""
    assert SPEC.fingerprint == -233598665764703252
    assert TableSpec(fqn="é", num_rows=0, dim=1, dtype=DType.UINT8).fingerprint == 8772440156363928289
    assert TableSpec.of_tensor("mlp.0.weight", (30, 70), DType.FLOAT32).fingerprint == -3603715472984742720
    assert [dtype.size_bytes for dtype in DType] == [4, 2, 2, 8, 8, 4, 1, 1, 2, 1]
    pointwise = StateSpec(name="exp_avg", kind=StateKind.POINTWISE, dtype=DType.FLOAT32)
    assert [state.width_in(ColumnShard(offset=32, width=16)) for state in (STATE, pointwise)] == [1, 16]
    spec = TableSpec.of_tensor("mlp.0.weight", (30, 70), DType.FLOAT32)
    assert (spec.num_rows, spec.dim, spec.num_elements, spec.is_dense) == (3, 1024, 2100, True)
    scalar = TableSpec.of_tensor("norm.num_batches_tracked", (), DType.INT64)
    assert (scalar.num_rows, scalar.dim, scalar.num_elements, scalar.is_dense) == (1, 1, 1, True)
    assert not SPEC.is_dense and SPEC.num_elements == 128_000
    assert spec.of_weights == spec


@pytest.mark.parametrize(
    "change",
    [
        {"fqn": "user.weights"},
        {"num_rows": 1001},
        {"dim": 64},
        {"dtype": DType.BFLOAT16},
        {"states": ()},
        *({"states": (dataclasses.replace(STATE, **state),)} for state in _OTHER_STATES),
        {"has_identities": True},
        {"shape": (1000, 128), "states": ()},
    ],
)
def test_every_field_counts(change: dict[str, Any]) -> None:
    """A change of any field changes the fingerprint and is described."""
    other = dataclasses.replace(SPEC, **change)
    assert other.fingerprint != SPEC.fingerprint
    assert SPEC.describe_difference(other)
    assert SPEC.describe_difference(dataclasses.replace(SPEC)) == ""


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (SPEC, [{"fqn": fqn} for fqn in ("", "a\x1fb", "x" * 1025, "é" * 513, "half\ud800")]),
        (SPEC, [{"num_rows": -1}, {"num_rows": 2**63}, {"dim": 0}, {"dim": MAX_DIM + 1}, {"states": (STATE, STATE)}]),
        (STATE, [{"name": ""}, {"width": 0}, {"width": MAX_DIM + 1}, {"kind": StateKind.POINTWISE}]),
        (_DENSE, [{"num_rows": 4}, {"num_rows": 2}, {"has_identities": True}, {"states": (STATE,)}]),
        (_DENSE, [{"shape": (30, 0)}, {"shape": (-30, 70)}]),
    ],
)
def test_bad_specs_are_refused(spec: Any, changes: list[dict[str, Any]]) -> None:
    """A table or state out of range cannot be made, nor a dense tensor whose shape does not fill its rows."""
    for change in changes:
        with pytest.raises(RequestError, match="dense tensor" if spec is _DENSE else None):
            dataclasses.replace(spec, **change)
    with pytest.raises(RequestError, match=r"not in 1\.\."):
        TableSpec.of_tensor("w", (30, 0), DType.FLOAT32)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TableSpec.of_tensor("w", _LONG, DType.FLOAT32),
        lambda: TableSpec(fqn="w", num_rows=1, dim=1, dtype=DType.FLOAT32, shape=_LONG),
    ],
    ids=["a tensor", "a spec"],
)
def test_a_tensor_of_too_many_dimensions(make: Callable[[], TableSpec]) -> None:
    """Too many dimensions are refused before their sizes are multiplied, which would take seconds."""
    TableSpec.of_tensor("w", (1,) * 64, DType.FLOAT32)
    with pytest.raises(RequestError):
        TableSpec.of_tensor("w", (1,) * 65, DType.FLOAT32)
    begin_s = time.process_time()
    with pytest.raises(RequestError):
        make()
    assert time.process_time() - begin_s < 1


@pytest.mark.parametrize("bad", [-1, 1000, 2**63 - 1])
def test_row_out_of_range_is_named(bad: int) -> None:
    """The first row id out of range is in the message; a table of no fixed size takes every id from 0."""
    SPEC.check_row_ids(np.array([0, 999], np.int64))
    SPEC.check_row_ids(np.empty(0, np.int64))
    virtual = dataclasses.replace(SPEC, num_rows=0)
    virtual.check_row_ids(np.array([0, max(bad, 0)], np.int64))
    for spec in (SPEC, virtual)[: 2 if bad < 0 else 1]:
        with pytest.raises(RowRangeError, match=f"row id {bad} "):
            spec.check_row_ids(np.array([0, bad, 5], np.int64))


@pytest.mark.parametrize("dtype", list(DType))
def test_finite(dtype: DType) -> None:
    """NaN and infinity are found in every floating type, bfloat16 by its bits."""
    column = np.zeros((2, 3), dtype.numpy)
    assert dtype.is_finite(column)
    if dtype is DType.BFLOAT16:
        bad = [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81]
        column[0] = [0x7F7F, 0xFF7F, 0x0001]
        assert dtype.is_finite(column)
    elif column.dtype.kind == "f":
        bad = [np.nan, np.inf, -np.inf]
    else:
        bad = []
    for value in bad:
        column[1, 2] = value
        assert not dtype.is_finite(column)


@pytest.mark.parametrize(
    "given",
    [
        3,
        [3, 1, 3],
        [[3], [4]],
        [],
        np.array([3, 9, 1, 9, 3, 9], ">u2")[::2],
        torch.tensor([[3], [1], [3]], dtype=torch.uint8),
        torch.empty(0, 2),
        [torch.tensor(3), np.int8(1), 3],
    ],
    ids=repr,
)
def test_integers_of_any_kind_are_ids(given: Any) -> None:
    """Integers of any type and shape become int64 of that shape; empty lists, which numpy takes for floats, as well."""
    ids, expected = as_ids(given), np.asarray(given)
    assert (ids.dtype, ids.flags.c_contiguous, ids.shape) == (np.dtype(np.int64), True, expected.shape)
    assert ids.tolist() == expected.tolist() and row_ids_of(given).tolist() == expected.reshape(-1).tolist()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.zeros(3, dtype=torch.bool), "row ids are bool, not integers; pass mask.nonzero"),
        ([True, False], "row ids are bool"),
        (np.array([1.0]), "row ids are float64, not integers"),
        (torch.ones(2, requires_grad=True), "row ids are float32, not integers"),
        (torch.ones(2, dtype=torch.bfloat16), "row ids of a Tensor are not integers"),
        ([[1], [1, 2]], "row ids of a list are not integers"),
        (["a"], "row ids are <U1, not integers"),
        ([2**70], "row ids are object, not integers"),
        ([2**63], "row ids: 9223372036854775808 is beyond 2**63 - 1"),
        (None, "row ids are object, not integers"),
    ],
    ids=repr,
)
def test_ids_that_are_not_integers_are_refused(given: Any, words: str) -> None:
    """Masks, fractions and other objects are refused in one line."""
    with pytest.raises(RequestError) as caught:
        row_ids_of(given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_growth_is_more_rows_and_nothing_else() -> None:
    """Fewer or equal rows, virtual ids, another dim and dense tensors are no growth."""
    larger = dataclasses.replace(SPEC, num_rows=1001)
    assert larger.is_growth_of(SPEC)
    assert not SPEC.is_growth_of(larger) and not SPEC.is_growth_of(SPEC)
    assert not dataclasses.replace(larger, dim=64).is_growth_of(SPEC)
    virtual = dataclasses.replace(SPEC, num_rows=0)
    assert not virtual.is_growth_of(SPEC) and not SPEC.is_growth_of(virtual)
    small, large = (TableSpec.of_tensor("mlp.weight", (rows, 1024), DType.FLOAT32) for rows in (2, 3))
    assert not large.is_growth_of(small)
