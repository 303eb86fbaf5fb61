"""Tables as tensors: row i of a table is row i of its tensors. Missing rows are zeros and have no identity."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.store.catalog import unpack_spec
from headrace.paramserver.store.row_chunk import RowChunk
from headrace.schemas.errors import ConfigError, CorruptionError, RequestError, SpecMismatchError
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.table_names import is_among, path_of
from headrace.schemas.tables import DType, StateKind, TableSpec
from headrace.scripts.table_io.columns import Column, RefusedColumn, TensorSource, is_scalar
from headrace.scripts.table_io.exported import ExportRows, ExportTable, ExportTensor
from headrace.scripts.table_io.source import Selection, SourceTable, TableScalars, noted_scalars, state_of

__all__ = [
    "FIRST_STATE",
    "IDENTITIES",
    "blank_column",
    "check_dense",
    "check_names",
    "columns_of",
    "dense_pieces",
    "dense_tables",
    "dense_windows",
    "find_states",
    "names_of",
    "names_of_tensor",
]

IDENTITIES = "identities"
FIRST_STATE = "momentum1"
"""What TorchRec calls the first state of any optimizer in a checkpoint; the others have their own names."""
# Stands for a state's name where a tensor holds the rows' identities; no state has this name.
_IDENTITIES_NAME = f"{IDENTITIES}:"
_NO_IDENTITY = -1
# In the `state_dict` of a torch optimizer.
_NUMBERED_STATE = re.compile(r"(?:.*\.)?state\.\d+\.[^.]+")
_NAMED_STATE = re.compile(r"(?:.*\.)?state\.(.+)\.[^.]+")
# A piece never spans more rows than this, if some are missing.
_ROWS_PER_PIECE = 65_536

_Array = npt.NDArray[Any]
_Columns = dict[str, _Array]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Dense:
    """A table's tensors; a state that is None is zero."""

    name: str
    spec: TableSpec
    first_row: int
    weights: Column
    states: Mapping[str, Column | None]
    identities: Column | None
    scalars: TableScalars = ()


def dense_tables(source: TensorSource, selection: Selection) -> tuple[list[SourceTable], list[str], list[str]]:
    """Return the tables of a source, with every shape and type checked, and what a rule with `*` matches besides.

    That is the dense tensors, which it leaves out, and tensors of two dimensions that look like no tables.

    Raises:
        ConfigError: The source has no table, or it is ambiguous which tensors are tables.
        SpecMismatchError: A tensor has another shape or type than its table.
        CorruptionError: The source's own notes are wrong.
        RequestError: A tensor of a wanted table cannot be read.
    """
    dense, not_taken = list(source.noted_dense), list[str]()
    found = _described(source, selection) if source.notes is not None else _guessed(source, selection, dense, not_taken)
    names = [table.spec.fqn for table in found]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{source.path}: two of its tables would be {repeated[0]!r}")
    for fqn in sorted(set(selection.config.tables or ()) & set(dense)):
        raise ConfigError(f"--table {fqn!r}: a dense tensor in {source.path}, which only a trainer publishes")
    selection.check_wanted(set(names), str(source.path))
    tables = []
    for table in found:
        if not selection.takes(table.spec.fqn):
            continue
        target = selection.known.get(table.spec.fqn)
        if target is not None:
            table = _fit(source, table, target, selection)
        elif not table.spec.num_rows and source.notes is None:  # it would become a table of virtual ids
            raise SpecMismatchError(f"{source.path}: {table.name!r} has no rows, a new table has one or more")
        tables.append(_ready(table, selection))
    if not tables and dense:
        raise ConfigError(f"{source.path}: has dense tensors only, which a trainer publishes: load them into its model")
    if not tables:
        raise ConfigError(f"{source.path}: no table in it; name its tensors with --map NAME=FQN")
    return tables, dense, not_taken


def find_states(fqn: str, name: str, names: Iterable[str]) -> Mapping[str, str]:
    """Return the tensors that hold a table's optimizer states, by state, and its identities, by `identities:`.

    States go by the names that `headrace export` writes (`FQN/STATE`), and by those in checkpoints of optimizers
    (`….state.FQN.STATE`; TorchRec puts the table's short name in between).

    `name` is that of the weights in the file, `names` are all tensors of the file.
    """
    own, optimizers = re.compile(rf"{re.escape(name)}/([^/]+)"), _states_of(fqn, name)
    found: dict[str, str] = {}
    for other in names:
        match = own.fullmatch(other) or optimizers.fullmatch(other)
        if match and not is_scalar(match[1]):
            if match[1] in found:
                raise ConfigError(
                    f"{found[match[1]]!r} and {other!r} both look like state {match[1]!r} of {fqn!r}: say which with "
                    f"--map NAME={fqn}/{match[1]}"
                )
            found[match[1]] = other
    return found


def _states_of(fqn: str, name: str) -> re.Pattern[str]:
    """Return what the names of a table's states in a checkpoint of an optimizer fit; the group is the state's."""
    stems = "|".join(re.escape(stem) for stem in dict.fromkeys((fqn, path_of(fqn), name)))
    return re.compile(rf"(?:.*\.)?state\.(?:{stems})\.(?:[^.]+\.)?([^.]+)")


def _described(source: TensorSource, selection: Selection) -> list[_Dense]:
    """Return the tables that the notes of `headrace export` describe."""
    assert source.notes is not None
    found, columns = [], source.columns
    try:
        for note in source.notes["tables"]:
            if note["precision"] is not None:
                raise RequestError(
                    f"{source.path}: exported as {note['precision']}, which is for serving; its rows cannot be brought "
                    "back"
                )
            packed = list(note["spec"])
            packed[0] = selection.naming.target_of(packed[0]) or packed[0]
            spec = unpack_spec(packed)
            states: dict[str, Column | None] = {name: columns[tensor] for name, tensor in note["states"].items()}
            table = _Dense(
                name=note["weights"],
                spec=replace(spec, states=tuple(state for state in spec.states if state.name in states)),
                first_row=int(note["first_row"]),
                weights=columns[note["weights"]],
                states=states,
                identities=None if note["identities"] is None else columns[note["identities"]],
                scalars=noted_scalars(note),
            )
            found.append(table)
            _check(source, table, part_of_rows=True)
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise CorruptionError(f"{source.path}: its notes on tables do not fit its tensors: {exc!r}") from exc
    return found


def _guessed(source: TensorSource, selection: Selection, dense: list[str], not_taken: list[str]) -> list[_Dense]:
    """Return the tables of a file without notes: those that rules, the target or `--table` name.

    A rule with `*` also matches what cannot be a table, such as biases; their names are added to `dense`. It takes no
    weights of layers and no states of an optimizer's parameters by number either, unless something names them; those
    are added to `not_taken`.
    """
    naming, wanted, known = selection.naming, selection.config.tables or (), selection.known
    weights: dict[str, str] = {}
    mapped: dict[str, dict[str, str]] = {}
    scalars: dict[str, dict[str, str]] = {}
    for name in source.scalars:
        fqn, _, scalar = (naming.target_of(name) or "").partition("/")
        if is_scalar(scalar):
            scalars.setdefault(fqn, {})[scalar] = name
    candidates = {name for name, column in source.columns.items() if len(column.shape) == 2}
    for name in source.columns:
        target = naming.target_of(name)
        if target is not None:
            fqn, _, state = target.partition("/")
            is_named = bool(state) or naming.has_exactly(name) or fqn in known or is_among(fqn, wanted)
            if not is_named and _looks_like_no_table(source, name):
                not_taken.append(name)
                continue
            if not state and name not in candidates and not naming.has_exactly(name):
                dense.append(name)
                continue
            place = mapped.setdefault(fqn, {}) if state else weights
            if place.setdefault(state or fqn, name) != name:
                raise ConfigError(f"--map: {place[state or fqn]!r} and {name!r} are both mapped to {target!r}")
        elif name in candidates and (name in known or is_among(name, wanted)):
            weights.setdefault(name, name)
    # A pattern of tables also matches their states, which are no tables.
    of_states = {tensor for fqn, name in weights.items() for tensor in find_states(fqn, name, source.columns).values()}
    of_states -= {*wanted, *known}
    weights = {fqn: name for fqn, name in weights.items() if fqn != name or name not in of_states}
    if unused := sorted(mapped.keys() - weights.keys()):
        raise ConfigError(f"--map: a state of {unused[0]!r} is mapped, and no tensor is its weights")
    for name in sorted(set(wanted) - weights.keys()):
        if name in source.columns and naming.target_of(name) is None:
            _check_two_dimensions(source, name)
    if not weights:
        selection.check_wanted(candidates, str(source.path))
        names = ", ".join(sorted(candidates)[:6]) or "none"
        raise ConfigError(
            f"{source.path}: which tensors are tables? Those of two dimensions: {names}; name them, as in --table "
            f"{min(candidates, default='NAME')}, or with --map"
        )
    dense[:] = [name for name in dense if name not in of_states]
    not_taken[:] = [name for name in not_taken if name not in of_states]
    selection.check_wanted(set(weights), str(source.path))
    found = []
    for fqn, name in weights.items():
        if not selection.takes(fqn):
            continue
        states = _by_own_names(find_states(fqn, name, source.columns), known.get(fqn)) | mapped.get(fqn, {})
        # In the file's order, which is the spec's order in our own files.
        places = {tensor: place for place, tensor in enumerate(source.columns)}
        states = dict(sorted(states.items(), key=lambda item: places[item[1]]))
        columns = {state: source.columns[tensor] for state, tensor in states.items()}
        table = _guess(source, fqn, name, columns, columns.pop(_IDENTITIES_NAME, None))
        found.append(replace(table, scalars=_scalars_of(source, table, scalars.get(fqn, {}))))
    return found


def _by_own_names(states: Mapping[str, str], target: TableSpec | None) -> dict[str, str]:
    """Return a table's states by the names that a trainer streams them under, where a checkpoint has TorchRec's."""
    first, found = states.get(FIRST_STATE), dict(states)
    if first is None or first.endswith(f"/{FIRST_STATE}"):
        return found
    theirs = [state.name for state in target.states] if target is not None else []
    # Moments come in pairs; of the optimizers with one state all but LARS call it the sum.
    own = theirs[0] if theirs else "exp_avg" if "exp_avg_sq" in found else "sum"
    if own not in found and FIRST_STATE not in theirs:
        found[own] = found.pop(FIRST_STATE)
    return found


def _scalars_of(source: TensorSource, table: _Dense, mapped: Mapping[str, str]) -> TableScalars:
    """Return what an optimizer has once for a table with states: values named as those are, or mapped."""
    if not table.states:
        return ()
    fits = _states_of(table.spec.fqn, table.name).fullmatch
    found = {str(match[1]): name for name in source.scalars if (match := fits(name))}
    return tuple((scalar, *source.scalars[name]) for scalar, name in sorted((found | dict(mapped)).items()))


def _looks_like_no_table(source: TensorSource, name: str) -> bool:
    """Return whether a tensor is a state of an optimizer's parameter, or has a bias beside it, as in layers.

    A state goes by number, or by the name of a tensor of the file, as `find_states` says. `fc.weight` has `fc.bias`,
    `attention.in_proj_weight` has `attention.in_proj_bias`: no embedding table has one.
    """
    if _NUMBERED_STATE.fullmatch(name):
        return True
    if state := _NAMED_STATE.fullmatch(name):
        owners = state[1], state[1].rpartition(".")[0]
        if any(other == owner or other.endswith(f".{owner}") for other in source.columns for owner in owners if owner):
            return True
    module, dot, own = name.rpartition(".")
    weight, bias = source.columns[name], source.columns.get(f"{module}{dot}{own.replace('weight', 'bias')}")
    return bias is not None and len(bias.shape) == 1 < len(weight.shape) and bias.shape[0] in weight.shape


def _guess(
    source: TensorSource, fqn: str, name: str, states: Mapping[str, Column], identities: Column | None
) -> _Dense:
    _check_two_dimensions(source, name)
    weights = source.columns[name]
    specs = [
        state_of(
            state,
            column.dtype,
            column.shape[1] if len(column.shape) == 2 else 1,
            is_pointwise=column.shape == weights.shape,
        )
        for state, column in states.items()
    ]
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


def _fit(source: TensorSource, table: _Dense, target: TableSpec, selection: Selection) -> _Dense:
    """Return the table with the target's spec."""
    states = dict(table.states)
    theirs, ours = {state.name for state in target.states}, set(states)
    if not selection.config.zero_states:
        for state in sorted(theirs - ours):
            raise SpecMismatchError(
                f"{source.path}: no tensor for state {state!r} of table {target.fqn!r}: "
                f"--map NAME={target.fqn}/{state}, or --zero-states"
            )
        for state in sorted(ours - theirs):
            raise SpecMismatchError(
                f"{source.path}: table {target.fqn!r} has no state {state!r} on the server; --zero-states leaves it out"
            )
    types = {name: column.dtype for name, column in states.items() if column is not None}
    found = replace(
        table.spec,
        # A table of virtual ids takes any number of rows; the file only knows how many it has.
        num_rows=0 if target.num_rows == 0 else table.spec.num_rows,
        # With the tensors' types; `_check` compares their shapes.
        states=tuple(replace(state, dtype=types.get(state.name, state.dtype)) for state in target.states),
    )
    selection.check_fits(found, str(source.path))
    fitted = replace(table, spec=target, states={state.name: states.get(state.name) for state in target.states})
    _check(source, fitted, part_of_rows=source.notes is not None or target.num_rows == 0)
    return fitted


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
        # Each part of a table split by columns has its own copy of a rowwise state. TorchRec saves one after the other;
        # the first counts, as in the store.
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


def _ready(table: _Dense, selection: Selection) -> SourceTable:
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
                epochs=1,
                steps=0,
                times_us=selection.time_us,
                identities=None if table.identities is None else table.identities.read(first, end)[:, 0],
            )

    return SourceTable(
        name=table.name,
        spec=spec,
        num_rows=num_rows,
        chunks=chunks,
        check_ids=lambda: None,
        scalars=table.scalars,
    )


def check_dense(tables: list[ExportTable], format_name: str) -> None:
    """Raise ConfigError for a table with virtual ids, which cannot be a tensor."""
    for table in tables:
        if table.end_row is None:
            raise ConfigError(
                f"--format {format_name}: table {table.spec.fqn!r} has virtual ids, and would be 2^63 rows long; take "
                "parquet, or some --rows"
            )


def check_names(tables: list[ExportTable], tensors: Sequence[ExportTensor], format_name: str, reserved: str) -> None:
    """Raise ConfigError if two tensors have the same name, or one has the name that the format uses itself."""
    taken = {reserved}
    found = [(f"table {table.spec.fqn!r}", names_of(table)) for table in tables]
    found += [(f"dense tensor {tensor.name!r}", names_of_tensor(tensor)) for tensor in tensors]
    for what, names in found:
        for name in names.values():
            if name in taken:
                raise ConfigError(
                    f"--format {format_name}: {what} needs the name {name!r}, which something else in the file has; "
                    "take parquet, or other tables with --table"
                )
            taken.add(name)


def columns_of(table: ExportTable) -> dict[str, tuple[DType, list[int]]]:
    """Return type and shape of each tensor of a table, by field, with `identities` if it has them."""
    columns = {field: (dtype, table.shape_of(field)) for field, (dtype, _) in table.fields.items()}
    if table.spec.has_identities:
        columns[IDENTITIES] = (DType.INT64, [table.num_rows])
    return columns


def names_of(table: ExportTable) -> dict[str, str]:
    """Return the tensors' names by field: `FQN`, `FQN/STATE` and `FQN/identities:`, which no state is called."""
    fqn = table.spec.fqn
    names = {field: fqn if field == "weights" else f"{fqn}/{field.removeprefix('state:')}" for field in table.fields}
    if table.spec.has_identities:
        names[IDENTITIES] = f"{fqn}/{_IDENTITIES_NAME}"
    return names


def names_of_tensor(tensor: ExportTensor) -> dict[str, str]:
    """Return the names by column of what a dense tensor has: `NAME` and `NAME/STATE`."""
    return {
        field: tensor.name if field == "weights" else f"{tensor.name}/{field.removeprefix('state:')}"
        for field in tensor.columns
    }


def blank_column(field: str, num_rows: int, width: int, dtype: npt.DTypeLike) -> _Array:
    """Return a column `[num_rows, width]` of missing rows: zeros, or -1 for identities, because 0 is a valid one."""
    return np.full((num_rows, width), _NO_IDENTITY if field == IDENTITIES else 0, dtype)


def dense_pieces(rows: ExportRows) -> Iterator[tuple[int, _Columns]]:
    """Yield (row id of the first row, columns) of pieces without gaps, ascending."""
    columns = dict(rows.columns)
    if rows.identities is not None:
        columns[IDENTITIES] = rows.identities[:, None]
    ids = rows.row_ids
    if ids[-1] - ids[0] + 1 == ids.size:
        yield int(ids[0]), columns
        return
    windows = ids // _ROWS_PER_PIECE
    bounds = np.flatnonzero(np.diff(windows, prepend=-1, append=-1)).tolist()
    for start, end in pairwise(bounds):
        first, span = int(ids[start]), int(ids[end - 1] - ids[start] + 1)
        at = ids[start:end] - first
        piece = {}
        for field, column in columns.items():
            piece[field] = blank_column(field, span, column.shape[1], column.dtype)
            piece[field][at] = column[start:end]
        yield first, piece


def dense_windows(
    table: ExportTable, field: str, rows_per_window: int, *, on_rows: Callable[[int], None] | None = None
) -> Iterator[tuple[int, _Array]]:
    """Yield (first row within the range, values) of one column, window after window, to the end of the range.

    REQUIRES: the table has an end. The last window may have fewer rows. For `on_rows` see `ExportTable.rows`.
    """
    dtype, width = (DType.INT64, 1) if field == IDENTITIES else table.fields[field]
    wanted = [] if field == IDENTITIES else [field]

    def blank(first: int) -> _Array:
        return blank_column(field, min(rows_per_window, table.num_rows - first), width, dtype.numpy)

    first, window = 0, blank(0)
    for rows in table.rows(wanted, on_rows=on_rows):
        for row, columns in dense_pieces(rows):
            values, at = columns[field], row - table.first_row
            while len(values):
                while at >= first + rows_per_window:
                    yield first, window
                    first += rows_per_window
                    window = blank(first)
                end = min(at + len(values), first + rows_per_window)
                window[at - first : end - first] = values[: end - at]
                values, at = values[end - at :], end
    while first < table.num_rows:
        yield first, window
        first += rows_per_window
        if first < table.num_rows:
            window = blank(first)
