"""Tables of files of tensors: row i of a table is row i of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.paramserver.store.catalog import unpack_spec
from headrace.paramserver.store.row_chunk import RowChunk
from headrace.schemas.errors import ConfigError, CorruptionError, RequestError, SpecMismatchError
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec
from headrace.scripts.table_sources.columns import Column, RefusedColumn
from headrace.scripts.table_sources.naming import IDENTITIES, Naming, find_states
from headrace.scripts.table_sources.source_table import SourceTable, Versions, check_against, check_wanted
from headrace.scripts.table_sources.tensors import TensorSource

__all__ = ["dense_tables"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Dense:
    """A table's tensors; a state that is None is zero."""

    name: str
    spec: TableSpec
    first_row: int
    weights: Column
    states: Mapping[str, Column | None]
    identities: Column | None


def dense_tables(
    source: TensorSource,
    *,
    naming: Naming,
    wanted: list[str] | None,
    known: Mapping[str, TableSpec] | None,
    zero_states: bool,
    versions: Versions,
) -> list[SourceTable]:
    """Return the tables of a source, every shape and type checked.

    Args:
        source: Of tensors.
        naming: The user's rules.
        wanted: Only these, by fqn; None for all.
        known: The target's tables; None when it is new.
        zero_states: States that the source lacks are zeros, and those that the target lacks are left out.
        versions: Of the rows.

    Raises:
        ConfigError: No table is there, or which tensors are tables is not clear.
        SpecMismatchError: A tensor is of another shape or type than its table.
        CorruptionError: The source's own notes are wrong.
        RequestError: A tensor of a table that is wanted cannot be read.
    """
    found = _described(source, naming) if source.notes is not None else _guessed(source, naming, wanted, known)
    names = [table.spec.fqn for table in found]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{source.path}: two of its tables would be {repeated[0]!r}")
    check_wanted(wanted, set(names), str(source.path))
    tables = []
    for table in found:
        if wanted is not None and table.spec.fqn not in wanted:
            continue
        target = None if known is None else known.get(table.spec.fqn)
        if target is not None:
            table = _fit(source, table, target, zero_states=zero_states)
        elif not table.spec.num_rows and source.notes is None:  # it would be a table of virtual ids
            raise SpecMismatchError(f"{source.path}: {table.name!r} has no rows, a new table has one or more")
        tables.append(_ready(table, versions))
    if not tables:
        raise ConfigError(f"{source.path}: no table in it; name its tensors with --map NAME=FQN")
    return tables


def _described(source: TensorSource, naming: Naming) -> list[_Dense]:
    """Return tables as `headrace export` has noted them."""
    assert source.notes is not None
    found = []
    try:
        for note in source.notes["tables"]:
            if note["precision"] is not None:
                raise RequestError(
                    f"{source.path}: exported as {note['precision']}, which is for serving; its rows cannot be brought "
                    "back"
                )
            packed = list(note["spec"])
            packed[0] = naming.target_of(packed[0]) or packed[0]
            spec, columns = unpack_spec(packed), source.columns
            identities = None if note["identities"] is None else columns[note["identities"]]
            states: dict[str, Column | None] = {name: columns[tensor] for name, tensor in note["states"].items()}
            spec = TableSpec(
                fqn=spec.fqn,
                num_rows=spec.num_rows,
                dim=spec.dim,
                dtype=spec.dtype,
                states=tuple(state for state in spec.states if state.name in states),
                has_identities=spec.has_identities,
            )
            table = _Dense(
                name=note["weights"],
                spec=spec,
                first_row=int(note["first_row"]),
                weights=columns[note["weights"]],
                states=states,
                identities=identities,
            )
            found.append(table)
            _check(source, table, part_of_rows=True)
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise CorruptionError(f"{source.path}: its notes on tables do not fit its tensors: {exc!r}") from exc
    return found


def _guessed(
    source: TensorSource, naming: Naming, wanted: list[str] | None, known: Mapping[str, TableSpec] | None
) -> list[_Dense]:
    """Return tables of files of others: those that rules, the target or `--table` name."""
    weights: dict[str, str] = {}
    mapped: dict[str, dict[str, str]] = {}
    candidates = {name for name, column in source.columns.items() if len(column.shape) == 2}
    for name in source.columns:
        target = naming.target_of(name)
        if target is not None:
            fqn, _, state = target.partition("/")
            place = mapped.setdefault(fqn, {}) if state else weights
            if place.setdefault(state or fqn, name) != name:
                raise ConfigError(f"--map: {place[state or fqn]!r} and {name!r} are both mapped to {target!r}")
        elif name in candidates and (name in (wanted or ()) or (known is not None and name in known)):
            weights.setdefault(name, name)
    if unused := sorted(mapped.keys() - weights.keys()):
        raise ConfigError(f"--map: a state of {unused[0]!r} is mapped, and no tensor is its weights")
    for name in sorted(set(wanted or ()) - weights.keys()):
        if name in source.columns and naming.target_of(name) is None:
            _check_two_dimensions(source, name)
    if not weights:
        check_wanted(wanted, candidates, str(source.path))
        names = ", ".join(sorted(candidates)[:6]) or "none"
        raise ConfigError(
            f"{source.path}: which tensors are tables? Those of two dimensions: {names}; say it with --table or --map"
        )
    found = []
    for fqn, name in weights.items():
        states = {**find_states(fqn, name, source.columns), **mapped.get(fqn, {})}
        # In the order of the file, which is that of the spec where we have written it.
        places = {tensor: place for place, tensor in enumerate(source.columns)}
        states = dict(sorted(states.items(), key=lambda item: places[item[1]]))
        columns = {state: source.columns[tensor] for state, tensor in states.items()}
        found.append(_guess(source, fqn, name, columns, columns.pop(IDENTITIES, None)))
    return found


def _guess(
    source: TensorSource, fqn: str, name: str, states: Mapping[str, Column], identities: Column | None
) -> _Dense:
    _check_two_dimensions(source, name)
    weights, specs = source.columns[name], []
    for state, column in states.items():
        is_pointwise = column.shape == weights.shape
        width = column.shape[1] if len(column.shape) == 2 else 1
        specs.append(
            StateSpec(
                name=state,
                kind=StateKind.POINTWISE if is_pointwise else StateKind.ROWWISE,
                dtype=column.dtype,
                width=0 if is_pointwise else width,
            )
        )
    spec = TableSpec(
        fqn=fqn,
        num_rows=weights.shape[0],
        dim=weights.shape[1],
        dtype=weights.dtype,
        states=tuple(specs),
        has_identities=identities is not None,
    )
    table = _Dense(name=name, spec=spec, first_row=0, weights=weights, states=dict(states), identities=identities)
    _check(source, table, part_of_rows=False)
    return table


def _check_two_dimensions(source: TensorSource, name: str) -> None:
    if len(shape := source.columns[name].shape) != 2:
        raise SpecMismatchError(f"{source.path}: {name!r} has shape {list(shape)}, weights have two dimensions")


def _fit(source: TensorSource, table: _Dense, target: TableSpec, *, zero_states: bool) -> _Dense:
    """Return the table as the target knows it."""
    states = dict(table.states)
    theirs, ours = {state.name for state in target.states}, set(states)
    if not zero_states:
        for state in sorted(theirs - ours):
            raise SpecMismatchError(
                f"{source.path}: no tensor for state {state!r} of table {target.fqn!r}: "
                f"--map NAME={target.fqn}/{state}, or --zero-states"
            )
        for state in sorted(ours - theirs):
            raise SpecMismatchError(
                f"{source.path}: table {target.fqn!r} has no state {state!r} on the server; --zero-states leaves it out"
            )
    found = TableSpec(
        fqn=target.fqn,
        # Of virtual ids any number of rows can be brought in; the file knows only how many it has.
        num_rows=target.num_rows if target.num_rows == 0 else table.spec.num_rows,
        dim=table.spec.dim,
        dtype=table.spec.dtype,
        states=tuple(_state_spec(state, states.get(state.name)) for state in target.states),
        has_identities=table.spec.has_identities,
    )
    check_against(target, found, str(source.path))
    fitted = _Dense(
        name=table.name,
        spec=target,
        first_row=table.first_row,
        weights=table.weights,
        states={state.name: states.get(state.name) for state in target.states},
        identities=table.identities,
    )
    _check(source, fitted, part_of_rows=source.notes is not None or target.num_rows == 0)
    return fitted


def _state_spec(target: StateSpec, column: Column | None) -> StateSpec:
    """Return the target's state with the type that a tensor has; its shape is looked at by `_check`."""
    dtype = target.dtype if column is None else column.dtype
    return StateSpec(name=target.name, kind=target.kind, dtype=dtype, width=target.width)


def _check(source: TensorSource, table: _Dense, *, part_of_rows: bool) -> None:
    """Check every shape of a table's tensors."""
    spec, num_rows = table.spec, table.weights.shape[0]
    layout = RecordLayout(spec, spec.whole)
    is_within = table.first_row >= 0 and (not spec.num_rows or table.first_row + num_rows <= spec.num_rows)
    if len(table.weights.shape) != 2 or not is_within or (not part_of_rows and num_rows != spec.num_rows):
        raise SpecMismatchError(
            f"{source.path}: {table.name!r} has shape {list(table.weights.shape)}, table {spec.fqn!r} has "
            f"{spec.num_rows} rows of {spec.dim}"
        )
    if table.weights.dtype is not spec.dtype or table.weights.shape[1] != spec.dim:
        raise SpecMismatchError(
            f"{source.path}: {table.name!r} is {table.weights.dtype.name} of {table.weights.shape[1]} columns, table "
            f"{spec.fqn!r} is {spec.dtype.name} of {spec.dim}"
        )
    for state in spec.states:
        column = table.states[state.name]
        if column is None:
            continue
        width = layout.columns[f"state:{state.name}"].width
        fits = column.shape == (num_rows, width) or (width == 1 and column.shape == (num_rows,))
        # Each part of a table that is split by columns has a rowwise state of its own: TorchRec saves one after the
        # other, and the first counts, as in the store.
        is_stacked = (
            state.kind is StateKind.ROWWISE
            and column.shape[0] == num_rows * table.weights.num_column_shards
            and column.shape[1:] in ((), (width,))
        )
        if column.dtype is not state.dtype or not (fits or is_stacked):
            raise SpecMismatchError(
                f"{source.path}: state {state.name!r} of {spec.fqn!r} is {column.dtype.name} of shape "
                f"{list(column.shape)}, not {state.dtype.name} of [{num_rows}, {width}]"
            )
    identities = table.identities
    if spec.has_identities != (identities is not None) or (identities and identities.shape != (num_rows,)):
        raise SpecMismatchError(f"{source.path}: identities of table {spec.fqn!r} are missing, or too many, or too few")
    if identities and identities.dtype is not DType.INT64:
        raise SpecMismatchError(
            f"{source.path}: identities of table {spec.fqn!r} are {identities.dtype.name}, not INT64"
        )


def _ready(table: _Dense, versions: Versions) -> SourceTable:
    for column in (table.weights, *table.states.values(), table.identities):
        if isinstance(column, RefusedColumn):
            raise column.refusal
    spec, num_rows = table.spec, table.weights.shape[0]
    layout = RecordLayout(spec, spec.whole)

    def chunks(max_bytes: int) -> Iterator[RowChunk]:
        step = max(1, max_bytes // layout.size_bytes)
        for first in range(0, num_rows, step):
            end = min(first + step, num_rows)
            columns: dict[str, Any] = {"weights": table.weights.read(first, end)}
            for name, column in table.states.items():
                of = layout.columns[f"state:{name}"]
                columns[f"state:{name}"] = (
                    np.zeros((end - first, of.width), of.dtype.numpy) if column is None else column.read(first, end)
                )
            yield RowChunk(
                row_ids=np.arange(table.first_row + first, table.first_row + end, dtype=np.int64),
                columns=columns,
                epochs=1 if versions.epoch is None else versions.epoch,
                steps=versions.step,
                times_us=versions.time_us,
                identities=None if table.identities is None else table.identities.read(first, end)[:, 0],
            )

    return SourceTable(name=table.name, spec=spec, num_rows=num_rows, chunks=chunks, check_ids=lambda: None)
