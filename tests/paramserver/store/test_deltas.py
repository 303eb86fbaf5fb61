"""Deltas: each mistake of a client is refused before anything changes, and the error names it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from headrace.paramserver.store.catalog import Catalog
from headrace.paramserver.store.deltas import check_rows, decode_delta
from headrace.schemas.errors import NonFiniteError, RequestError, RowRangeError, SpecMismatchError, UnknownTableError
from headrace.schemas.idl import idl
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec

SPEC = TableSpec(
    fqn="items.weight",
    num_rows=100,
    dim=4,
    dtype=DType.FLOAT32,
    states=(StateSpec(name="sum", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1),),
)
WITH_IDS = dataclasses.replace(SPEC, fqn="ids.weight", has_identities=True)
BIG = TableSpec(fqn="big.weight", num_rows=0, dim=4, dtype=DType.FLOAT32)
BF16 = TableSpec(fqn="bf16.weight", num_rows=0, dim=2, dtype=DType.BFLOAT16)


@pytest.fixture
def catalog() -> Catalog:
    catalog = Catalog({})
    catalog.add([SPEC, WITH_IDS, BIG, BF16])
    return catalog


def _bytes(values: Any, dtype: str) -> memoryview:
    return memoryview(np.asarray(values, dtype).tobytes())


def _delta(spec: TableSpec = SPEC, rows: Any = (3, 99), **changes: Any) -> Any:
    num_rows = len(rows)
    fields: dict[str, Any] = {
        "fqn": spec.fqn,
        "fingerprint": spec.fingerprint,
        "column_offset": 0,
        "width": spec.dim,
        "row_ids": _bytes(rows, "<i8"),
        "weights": memoryview(bytes(num_rows * spec.dim * spec.dtype.size_bytes)),
        "states": [
            idl.StateColumn(name=s.name, dtype=int(s.dtype), width=1, data=memoryview(bytes(num_rows * 4)))
            for s in spec.states
        ],
        "identities": _bytes(rows, "<i8") if spec.has_identities else None,
    }
    return idl.TableDelta(**(fields | changes))


def test_a_good_delta_becomes_views_of_its_buffers(catalog: Catalog) -> None:
    """Nothing is copied, and a column shard takes the layout of its columns."""
    weights = _bytes([[1, 2], [3, 4]], "<f4")
    delta = decode_delta(catalog, _delta(column_offset=2, width=2, weights=weights))
    assert delta.columns["weights"] is weights
    assert (delta.layout.shard.offset, delta.layout.shard.width) == (2, 2)
    assert delta.row_ids.tolist() == [3, 99]
    assert delta.identities is None and delta.deleted_row_ids is None
    delta = decode_delta(catalog, _delta(rows=(), states=[], deleted_row_ids=_bytes([5, 6], "<i8")))
    assert delta.deleted_row_ids is not None and delta.deleted_row_ids.tolist() == [5, 6]  # these need no columns
    assert decode_delta(catalog, _delta(WITH_IDS)).identities is not None


def _state(**changes: Any) -> Any:
    return idl.StateColumn(**{"name": "sum", "dtype": 1, "width": 1, "data": memoryview(bytes(8))} | changes)


def _scalars(*given: tuple[str, int, int]) -> list[Any]:
    return [idl.TableScalar(name=name, dtype=dtype, data=memoryview(bytes(size))) for name, dtype, size in given]


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"fqn": "other.weight"}, UnknownTableError, "other.weight"),
        ({"fingerprint": 1}, SpecMismatchError, "fingerprint 1 "),
        ({"row_ids": _bytes([3, 100], "<i8")}, RowRangeError, "row id 100 is not in 0..99"),
        ({"row_ids": _bytes([-1, 3], "<i8")}, RowRangeError, "row id -1"),
        ({"row_ids": memoryview(bytes(15))}, RequestError, "15 bytes"),
        ({"deleted_row_ids": _bytes([200], "<i8")}, RowRangeError, "row id 200"),
        ({"column_offset": 2}, SpecMismatchError, "columns 2..5 of a dim of 4"),
        ({"column_offset": -1}, SpecMismatchError, "columns -1"),
        ({"width": 0}, SpecMismatchError, "of a dim of 4"),
        ({"weights": memoryview(bytes(31))}, RequestError, "weights has 31 bytes.* have 32"),
        ({"states": []}, SpecMismatchError, "states missing: sum"),
        ({"states": [_state(name="momentum")]}, SpecMismatchError, "'momentum' is unknown"),
        ({"states": [_state(dtype=2)]}, SpecMismatchError, r"is FLOAT16\[1\] a row, registered as FLOAT32\[1\]"),
        ({"states": [_state(dtype=77)]}, SpecMismatchError, "is type 77"),
        ({"states": [_state(width=4)]}, SpecMismatchError, r"is FLOAT32\[4\] a row"),
        ({"states": [_state(), _state()]}, SpecMismatchError, "given twice"),
        ({"scalars": _scalars(("step", 1, 3))}, RequestError, "'step' has 3 bytes, .* not one element of FLOAT32"),
        ({"scalars": _scalars(("step", 1, 8))}, RequestError, "'step' has 8 bytes"),
        ({"scalars": _scalars(("step", 2, 4))}, RequestError, "not one element of FLOAT16"),
        ({"scalars": _scalars(("step", 77, 4))}, RequestError, "not one element of type 77"),
        (
            {"scalars": _scalars(("step", 1, 4), ("lr", 1, 4), ("step", 1, 4))},
            RequestError,
            "a scalar is given twice",
        ),
        ({"identities": _bytes([1, 2], "<i8")}, SpecMismatchError, "has no identities"),
        ({"spec": WITH_IDS, "identities": None}, SpecMismatchError, "has identities"),  # lookups would miss the rows
        ({"spec": WITH_IDS, "identities": _bytes([1], "<i8")}, RequestError, "of identities for 2 rows"),
    ],
)
def test_messages(catalog: Catalog, changes: dict[str, Any], error: type[RequestError], says: str) -> None:
    """A bad delta is refused; each field that can be wrong has its own message."""
    with pytest.raises(error, match=says):
        decode_delta(catalog, _delta(**changes))


def test_scalars_outlive_the_frame(catalog: Catalog) -> None:
    """A scalar is copied out of the frame, whose buffer is reused."""
    frame = bytearray(_bytes([7.0], "<f4"))
    delta = decode_delta(catalog, _delta(scalars=[idl.TableScalar(name="step", dtype=1, data=memoryview(frame))]))
    frame[:] = bytes(4)
    assert delta.scalars == (("step", DType.FLOAT32, _bytes([7.0], "<f4").tobytes()),)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_values_are_refused_under_reject(catalog: Catalog, value: float) -> None:
    """The error names the row; under `accept` the same delta passes."""
    delta = _delta(weights=_bytes([[0, 0, 0, 0], [0, value, 0, 0]], "<f4"))
    decode_delta(catalog, delta)
    with pytest.raises(NonFiniteError, match="weights of row 99"):
        decode_delta(catalog, delta, reject_non_finite=True)
    state = idl.StateColumn(name="sum", dtype=1, width=1, data=_bytes([value, 0], "<f4"))
    with pytest.raises(NonFiniteError, match="sum of row 3"):
        decode_delta(catalog, _delta(states=[state]), reject_non_finite=True)


@pytest.mark.parametrize("at", [0, 1, 2, 49_999, 99_999])
def test_a_row_that_is_not_finite_is_found_by_halves(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The first such row of a large batch is named after reading each row a few times."""
    rows = np.arange(100_000)
    weights = np.zeros((rows.size, 4), "<f4")
    weights[at::3, 1] = np.nan
    looked_at = []
    is_finite = DType.is_finite

    def counting(dtype: DType, column: Any) -> bool:
        looked_at.append(len(column))
        return is_finite(dtype, column)

    monkeypatch.setattr(DType, "is_finite", counting)
    delta = _delta(BIG, rows=rows, weights=_bytes(weights, "<f4"))
    with pytest.raises(NonFiniteError, match=f"weights of row {at} "):
        decode_delta(catalog, delta, reject_non_finite=True)
    assert len(looked_at) < 40
    assert sum(looked_at) < 3 * rows.size


def test_bfloat16_is_checked_by_its_bits(catalog: Catalog) -> None:
    """numpy has no bfloat16, so its NaN and Inf are known by an exponent of ones."""
    good = _delta(BF16, weights=_bytes([0x3F80, 0x7F7F, 0xFF7F, 0], "<u2"))
    decode_delta(catalog, good, reject_non_finite=True)
    bad = _delta(BF16, weights=_bytes([0x3F80, 0x7FC0, 0, 0], "<u2"))
    with pytest.raises(NonFiniteError, match="row 3"):
        decode_delta(catalog, bad, reject_non_finite=True)


@pytest.mark.parametrize(
    ("rows", "deleted", "twice"),
    [((3, 5), (4,), None), ((5, 3), (), None), ((5, 3, 5), (), 5), ((7,), (9, 7), 7), ((), (8, 8), 8), ((), (), None)],
)
def test_rows_given_twice_are_refused(catalog: Catalog, rows: Any, deleted: Any, twice: int | None) -> None:
    """Duplicate rows are refused in any order, also when one is written and deleted at once."""
    delta = decode_delta(catalog, _delta(rows=rows, deleted_row_ids=_bytes(deleted, "<i8")))
    if twice is None:
        check_rows(delta)
    else:
        with pytest.raises(RequestError, match=f"'items.weight': row {twice} is given twice"):
            check_rows(delta)


def test_a_grown_table_takes_rows_under_both_fingerprints(catalog: Catalog) -> None:
    """Batches that were in flight when a table grew are accepted, and rows are checked against the grown number."""
    larger = dataclasses.replace(SPEC, num_rows=200)
    with pytest.raises(SpecMismatchError, match="is not the registered"):
        decode_delta(catalog, _delta(larger))
    catalog.grow(larger)
    assert decode_delta(catalog, _delta(SPEC)).spec == larger
    assert decode_delta(catalog, _delta(larger, rows=(3, 199))).row_ids.tolist() == [3, 199]
    with pytest.raises(RowRangeError, match=r"row id 200 is not in 0\.\.199"):
        decode_delta(catalog, _delta(SPEC, rows=(3, 200)))
