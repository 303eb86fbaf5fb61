"""Load a model's tables back from a server or a snapshot, so that training goes on as if it had never stopped.

    tap ──▶ this rank's rows ──▶ read, some megabytes at a time ──▶ weights and states ──▶ replicas on other ranks
                                      └─▶ columns of the same rows that other ranks hold

The tap finds the tables, whatever trains or shards them, and is removed again. All ranks first compare their tables
with what is stored and agree, so that a model that does not fit is left as it is.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from headrace.kernels.dtypes import TORCH_DTYPES, is_smaller_float
from headrace.kernels.module_walk import named_tensors
from headrace.kernels.plain_context import in_plain_context
from headrace.paramserver.reading.dense_parts import DensePart
from headrace.paramserver.reading.reader import Rows
from headrace.paramserver.system.text import describe_near, first_of
from headrace.schemas.errors import ConfigError, SpecMismatchError, UnsupportedModelError
from headrace.schemas.row_records import PRESENT, RecordLayout
from headrace.schemas.table_names import (
    DEFAULT_MODEL,
    check_model,
    model_of,
    path_of,
    table_name,
)
from headrace.schemas.tables import ColumnShard, DType, StateKind, TableSpec
from headrace.streamer.config import StreamerConfig
from headrace.streamer.dense_restore import DenseTargets, RestoredDense
from headrace.streamer.read_plan import ReadCosts, RowBox, RowRead, plan_reads
from headrace.streamer.restore_costs import MAX_SAMPLE_BYTES, measure_costs
from headrace.streamer.restore_plan import RestorePlan, RowCopy, describe_plan
from headrace.streamer.restore_source import RestoreSource, Scalars, Step, StoredTables, restore_source
from headrace.streamer.row_reads import SharedReading
from headrace.streamer.taps.attach import Tap, tap_model
from headrace.streamer.taps.local_parts import TableCopy
from headrace.streamer.taps.model_tree import inner_optimizers, names_by_path
from headrace.streamer.taps.tapped_table import Holder, TappedTable
from headrace.streamer.world import World, current_world, together, warn_when_late

__all__ = ["RestorePlan", "RestoreReport", "RestoredDense", "RestoredTable", "restore"]

_log = logging.getLogger(__name__)
_together = partial(together, cannot="could not restore its tables")

# A hundredth of what a rank reads may be read to measure costs. Fewer bytes than these tell too little.
_SAMPLE_SHARE = 100
_MIN_SAMPLE_BYTES = 2**20


@dataclass(kw_only=True, slots=True)
class RestoredTable:
    """What became of one table, on all ranks together.

    Attributes:
        name: The table's name on the server.
        num_rows: Rows of the table.
        num_restored: Rows that were read back.
        epoch: Epoch of the newest of them that a step of training has sent; 0 if there is none.
        step: Its step: the last step of training that these rows are of. Rows of a backfill are of none. 0 if all are.
        scalars: Values kept once per table that were read back, such as the optimizer's `step`, which counts its
            own updates.
        repeated_states: Rowwise states of a table that is split by columns. The trainer keeps one for each part, and
            the store answers with that of the first columns, which all parts have now.
    """

    name: str
    num_rows: int
    num_restored: int = 0
    epoch: int = 0
    step: int = 0
    scalars: dict[str, float] = field(default_factory=dict)
    repeated_states: tuple[str, ...] = ()

    @property
    def num_kept(self) -> int:
        """Rows that the store lacks; they keep the model's values."""
        return self.num_rows - self.num_restored

    def __str__(self) -> str:
        """Describe the table in one line."""
        text = f"{self.name}: {self.num_restored} rows restored, {self.num_kept} kept"
        text += "".join(f", optimizer's {name} {value:g}" for name, value in self.scalars.items())
        if self.repeated_states:
            text += f"; of the first columns in all parts: {', '.join(self.repeated_states)}"
        return text


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreReport:
    """What `restore` has done, the same on every rank.

    Attributes:
        tables: The restored tables, by name.
        skipped: With `strict=False`, the tables and dense tensors that were left as they are, and why.
        dense: What became of dense parameters and buffers.
        bytes_read: Of tables' rows, by rank. Each row is read by one rank, but for a hundredth or two that is read
            before, to measure, where ranks have much to read.
        plan: With `plan=True` what would be done. Then nothing else is in the report but `skipped`.
    """

    tables: tuple[RestoredTable, ...]
    skipped: Mapping[str, str]
    dense: RestoredDense = field(default_factory=RestoredDense)
    bytes_read: tuple[int, ...] = ()
    plan: RestorePlan | None = None

    @property
    def num_restored(self) -> int:
        """Rows that were read back."""
        return sum(table.num_restored for table in self.tables)

    @property
    def num_kept(self) -> int:
        """Rows of restored tables that the store lacks; they keep the model's values."""
        return sum(table.num_kept for table in self.tables)

    @property
    def epoch(self) -> int:
        """Epoch of `step`; 0 if nothing that was read back is of a step of training."""
        return self._newest[0]

    @property
    def step(self) -> int:
        """The last step of training that rows and dense tensors read back are of; 0 if all come from backfills.

        It is the run's last step if training ended with a flush. Steps count on from it.
        """
        return self._newest[1]

    @property
    def _newest(self) -> tuple[int, int]:
        found = [(self.dense.epoch, self.dense.step), *((table.epoch, table.step) for table in self.tables)]
        return max((each for each in found if each[1]), default=(0, 0))

    def __str__(self) -> str:
        """Describe each table in one line, and all dense tensors together; or the plan."""
        lines = [*map(str, self.tables), *str(self.dense).splitlines(), *str(self.plan or "").splitlines()]
        lines += [*(f"{path}: left as it is: {why}" for path, why in self.skipped.items())]
        return "\n".join(lines)


@in_plain_context
def restore(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    address: str | None = None,
    *,
    snapshot: str | os.PathLike[str] | None = None,
    model_name: str | None = None,
    step: Step = "newest",
    tables: Iterable[str] | None = None,
    dense: bool | None = None,
    states: bool = True,
    strict: bool = True,
    names: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    config: StreamerConfig | None = None,
    plan: bool = False,
) -> RestoreReport:
    """Load a model's embedding tables and dense parameters back from a running server or from a snapshot.

        report = restore(model, optimizer, "127.0.0.1:7601")
        streamer.attach(model, optimizer)
        streamer.step(report.step)  # steps count on from here

    Restores weights, the optimizer's states of each row, and its scalars, such as Adam's `step`; also parameters and
    buffers that are no tables, with their optimizer's states, as far as the trainer published them. If the last trainer
    ended with a flush, training goes on as if it had never stopped, on any number of ranks and in any sharding. If it
    was killed, rows are of different steps: to go on from one step exactly, give a snapshot.

    Rows that the store lacks keep the model's values, as do those by which a table has grown: build the model with the
    seed of the first run. Only tables that an optimizer has are restored. Everything else comes from the trainer's own
    checkpoint: learning rates and their schedules, random generators, and the place in the data.

    With `torch.distributed` initialized, all ranks must call it together. Each row is read by one rank, which sends it
    to others that hold parts of it, or copies. Rank 0 reads dense tensors, all of one step, for all ranks. It streams
    nothing and leaves no hook. Call it before `attach`, which then sends only rows that change from then on, and to a
    new server every row first.

    Args:
        model: The model as it trains, as for `RawEmbeddingStreamer.attach`, with its weights in memory.
        optimizer: The optimizers that train the tables, new ones or used ones; None if the tables have fused ones.
        address: `host:port` of any shard; without it and a snapshot, that of the variable `HEADRACE_SERVER`. REQUIRES:
            nothing trains the tables there meanwhile.
        snapshot: Instead of an address, the directory of a snapshot, or of several, that every rank can read; or the
            URL of an object store, `s3://bucket/prefix`, whose files are fetched to each machine's temporary directory.
        model_name: The model's name on the server; None takes the only one that has tables of these names.
        step: "newest", or a step of the run that owns the tables: a server has to be at that step exactly, as after a
            flush; of several snapshots that of the step is taken.
        tables: Names of tables, or patterns such as `*.users.weight`, to restore only these; behind `!`, to leave these
            out. None for all.
        dense: None restores dense parameters and buffers if they are stored, True refuses a store that lacks some of
            the model's, False leaves them as they are.
        states: False restores weights alone, for training with another optimizer.
        strict: False leaves tables and dense tensors that are not stored, or do not fit, as they are, and reports them.
        names: By what names modules, tables and dense tensors are stored, by their paths, as for `attach`.
        timeout_s: How long each reply of a server may take, seconds; None takes `request_timeout_s`.
        config: TLS, token and timeouts; None reads the environment (`HEADRACE_STREAMER_…`) and the defaults.
        plan: True changes nothing. It measures what reading and sending rows costs, by a few megabytes a rank. The
            report has which rank would read which rows and send them to whom, and how long that would take.

    Returns:
        Rows restored and kept of each table, and the step that training goes on from; or only the plan.

    Raises:
        ConfigError: An argument is wrong, several models have tables of these names, or nothing is at the step; nothing
            was changed.
        SpecMismatchError: Tables or dense tensors are missing or differ; the message lists all of them, and nothing was
            changed.
        UnsupportedModelError: As for `attach`; also if the model is streamed already. Nothing was changed.
        UnavailableError: The server does not answer, or its dense tensors are not of one step in time. Unless the
            message says otherwise, restore again: some rows may have been restored.
        HeadraceError: The snapshot is damaged, or another rank has failed.
    """
    source = restore_source(address, snapshot, timeout_s, config or StreamerConfig.load())
    if model_name is not None:
        check_model(model_name)
    given: Any = step
    if given != "newest" and not (isinstance(given, int) and given >= 0):
        raise ConfigError(f"step={step!r}: must be 'newest' or the number of a step")
    optimizers = () if optimizer is None else inner_optimizers(optimizer)
    wanted = _Wanted(
        model=model,
        optimizers=optimizers,
        model_name=model_name,
        step=step,
        dense=dense,
        states=states,
        strict=strict,
        names=names,
    )
    world, has_dense = current_world(), dense is not False
    with warn_when_late("restore(...)", rank=world.rank, world_size=world.size):
        tap = tap_model(model, optimizers, lambda: None, tables=tables, is_streamed=False, has_dense=has_dense)
    try:
        with warn_when_late("restore(...)", rank=world.rank, world_size=world.size):
            agreed = _agree(world, tap, source, wanted)
        agreed = dataclasses.replace(agreed, source=_with_files(world, source, agreed.source))
        parts = [table for table in tap.tables if table.spec.fqn in agreed.stored]
        if plan:
            planned = _plan(world, source, agreed, parts, tap.copies(), with_states=states)
            return RestoreReport(tables=(), skipped=agreed.skipped, plan=planned)
        return _restore(world, source, agreed, parts, with_states=states)
    finally:
        tap.close()
        source.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    """Arguments of `restore`."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    model_name: str | None
    step: Step
    dense: bool | None
    states: bool
    strict: bool
    names: Mapping[str, str] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Agreed:
    """What all ranks restore: by path, the stored tables' names and scalars, and why others are skipped."""

    source: StoredTables
    model_name: str
    dense: DenseTargets | None
    stored: dict[str, str]
    scalars: dict[str, Scalars]
    skipped: dict[str, str]


def _agree(world: World, tap: Tap, source: RestoreSource, wanted: _Wanted) -> _Agreed:
    """Compare all ranks' tables with what is stored; every rank raises if one's do not fit."""
    described = _together(world, lambda: source.describe(wanted.step) if world.rank == 0 else None)[0]
    assert described is not None, "rank 0 describes"
    specs, place = described.specs, described.place
    paths = [each.path for each in named_tensors(wanted.model)]
    called = _together(world, partial(names_by_path, wanted.names, tap.names, paths))[0]
    model = wanted.model_name
    if model is None:
        model = _model_with([called.get(path, path) for path in tap.names or paths], specs, place)
    if wanted.step != "newest":
        described.check_step(model, wanted.step)
    dense_specs = {} if wanted.dense is False else described.dense_of(model)
    by_path = {path: table_name(model, called.get(path, path)) for path in sorted(tap.names)}
    stored = {path: name for path, name in by_path.items() if name not in dense_specs}
    dense: DenseTargets | None = None

    def misfits_here() -> dict[str, str]:
        nonlocal dense
        tables = [table for table in tap.tables if table.spec.fqn in stored]
        found = {t.spec.fqn: _misfit(t, specs, stored[t.spec.fqn], with_states=wanted.states) for t in tables}
        if wanted.dense is not False:
            dense = DenseTargets(
                wanted.model,
                wanted.optimizers,
                dense_specs,
                table_paths=tap.names,
                called=called,
                with_states=wanted.states,
            )
            found |= dense.misfits()
            if wanted.dense:
                found |= dict.fromkeys(dense.kept, "is not stored: its trainer has not published it (dense=…)")
        return {path: reason for path, reason in found.items() if reason is not None}

    misfits: dict[str, str] = {}
    for of_rank in _together(world, misfits_here):
        misfits |= of_rank
    misfits = dict(sorted(misfits.items()))
    if not stored and not dense_specs and not misfits:
        raise UnsupportedModelError(
            f"the model has no embedding table that is trained, and {place} has no dense tensors of model {model!r}: "
            "give a model that has some, or its name there, model_name=…"
        )
    num_wanted = len(stored) + len(dense_specs)
    if misfits and (wanted.strict or len(misfits) >= num_wanted):
        kinds = {path: "table" if path in stored else "dense tensor" for path in misfits}
        reasons = "; ".join(f"{kinds[path]} {path!r} {reason}" for path, reason in misfits.items())
        advice = "" if len(misfits) >= num_wanted else ", or pass strict=False to leave these tables as they are"
        raise SpecMismatchError(
            f"the model does not fit {place}, and nothing was changed: {reasons}; restore into a model of the same "
            f"tables and optimizer{advice}"
        )
    return _Agreed(
        source=described,
        model_name=model,
        dense=dense,
        stored={path: name for path, name in stored.items() if path not in misfits},
        scalars={path: described.scalars.get(name, {}) for path, name in stored.items()},
        skipped=misfits,
    )


def _with_files(world: World, source: RestoreSource, stored: StoredTables) -> StoredTables:
    """Return what is stored with its directory on this machine, which one rank of each machine fetches if need be."""
    machines = world.gather(socket.gethostname())
    first_here = machines.index(machines[world.rank])
    folders = _together(world, lambda: source.folder(stored) if world.rank == first_here else None)
    here = dataclasses.replace(stored, folder=folders[first_here])
    # Containers may have the name of their machine in common, and no files.
    return dataclasses.replace(here, folder=_together(world, lambda: source.folder(here))[world.rank])


def _model_with(paths: Iterable[str], names: Iterable[str], place: str) -> str:
    """Return the only model that has tables of these paths; the default one if none has."""
    wanted = set(paths)
    models = sorted({model_of(name) for name in names if path_of(name) in wanted})
    if len(models) > 1:
        raise ConfigError(f"several models in {place} have these tables ({first_of(models)}): pass model_name=…")
    return models[0] if models else DEFAULT_MODEL


def _misfit(table: TappedTable, specs: Mapping[str, TableSpec], name: str, *, with_states: bool) -> str | None:
    """Return why a table cannot be restored from the one of a name, or None."""
    if name not in specs:
        return f"is not there under the name {name!r} ({describe_near(name, specs)})"
    stored = specs[name]
    here = dataclasses.replace(table.spec, fqn=name)
    if not with_states:
        here, stored = dataclasses.replace(here, states=()), dataclasses.replace(stored, states=())
    # A table that has got rows since keeps the values that those have.
    if not here.is_growth_of(stored) and (difference := here.describe_difference(stored)):
        is_rounded = is_smaller_float(TORCH_DTYPES[stored.dtype], TORCH_DTYPES[here.dtype])
        way_on = " (weights that were rounded come from the trainer's checkpoint)" if is_rounded else ""
        if with_states and _misfit(table, specs, name, with_states=False) is None:
            way_on = " (restore(states=False) loads the weights alone)"
        return f"differs (model ≠ stored): {difference}{way_on}"
    if table.weights().is_meta:
        return "is on the meta device: materialize the model first"
    if table.spec.has_identities:
        return (
            "maps raw ids to rows (zero-collision hashing), and the counts that its module evicts by are not stored: "
            "load it from the trainer's checkpoint, and name the other tables in tables=…"
        )
    return None


def _restore(
    world: World, source: RestoreSource, agreed: _Agreed, parts: Sequence[TappedTable], *, with_states: bool
) -> RestoreReport:
    """Read this rank's rows, set scalars, share rows with replicas, write dense tensors. REQUIRES: all of them fit."""
    targets = None if agreed.dense is None else sorted(set(agreed.dense.paths) - agreed.skipped.keys())
    part: DensePart | None = None
    dense_scalars: dict[str, Scalars] = {}

    def read_dense() -> tuple[int, int]:
        nonlocal part, dense_scalars
        if targets and world.rank == 0:
            part, dense_scalars = source.read_dense(agreed.source, agreed.model_name, with_states=with_states)
        return (0, 0) if part is None else part.version

    # First, as it may fail: nothing is changed yet.
    dense_version = _together(world, read_dense)[0]
    found = {path: RestoredTable(name=name, num_rows=0) for path, name in agreed.stored.items()}
    planned = _plan_reads(world, source, agreed, parts, with_states=with_states)
    reading = SharedReading(
        world,
        planned.specs,
        planned.boxes,
        planned.reads,
        lambda index, rows: _write(parts[index], rows, found[parts[index].spec.fqn], with_states=with_states),
    )
    for table in parts:
        result = found[table.spec.fqn]
        result.num_rows = table.spec.num_rows
        if with_states and table.shard != table.spec.whole:
            result.repeated_states = tuple(s.name for s in table.spec.states if s.kind is StateKind.ROWWISE)

    def read() -> dict[str, RestoredTable]:
        reading.run(partial(source.read, agreed.source, with_states=with_states))
        for device in {table.weights().device for table in parts}:
            if device.type == "cuda":  # another thread, with another current stream, may have written
                torch.cuda.synchronize(device)
        return found

    totals = {path: RestoredTable(name=name, num_rows=0) for path, name in agreed.stored.items()}
    for of_rank in _together(world, read):
        for path, result in of_rank.items():
            _add(totals[path], result)
    bytes_read = tuple(world.gather(source.bytes_read))
    if with_states:
        _finish_states(parts, agreed, totals)
    if world.rank == 0 and (split := [total for total in totals.values() if total.repeated_states]):
        _log.warning(
            "%s: split by columns, each part gets the rowwise states (%s) of the first columns; if the stored run had "
            "split them too, losses differ from those of a run that never stopped: use row-wise or table-wise sharding "
            "with rowwise optimizers",
            first_of([total.name for total in split]),
            ", ".join(sorted({state for total in split for state in total.repeated_states})),
        )
    for holder in _holders(parts):
        holder.share_rows()
    dense = RestoredDense()
    if agreed.dense is not None and targets is not None:
        agreed.dense.restore(world, part, world.share(dense_scalars), targets)
        dense = RestoredDense(
            tensors=tuple(targets),
            epoch=dense_version[0],
            step=dense_version[1],
            without_states=tuple(path for path in agreed.dense.without_states if path in targets),
            kept=tuple(path for path in agreed.dense.kept if path not in agreed.skipped),
        )
    return RestoreReport(tables=tuple(totals.values()), skipped=agreed.skipped, dense=dense, bytes_read=bytes_read)


class _Planned(NamedTuple):
    """What each rank holds and reads, by rank; the tables by name, and what was measured."""

    boxes: list[list[RowBox]]
    reads: list[list[RowRead]]
    specs: dict[str, TableSpec]
    costs: ReadCosts | None


def _plan_reads(
    world: World,
    source: RestoreSource,
    agreed: _Agreed,
    parts: Sequence[TappedTable],
    *,
    with_states: bool,
    is_dry: bool = False,
) -> _Planned:
    """Divide the reading among ranks, by costs if it is large enough to measure them; if it `is_dry` in any case."""
    boxes = world.gather([_box_of(table, agreed) for table in parts])
    specs = {name: agreed.source.specs[name] for name in {box.name for of_rank in boxes for box in of_rank}}
    if not with_states:
        specs = {name: dataclasses.replace(spec, states=()) for name, spec in specs.items()}
    reads = plan_reads(boxes, specs)
    size_bytes = sum(read.size_bytes for of_rank in reads for read in of_rank)
    sample_bytes = min(MAX_SAMPLE_BYTES, size_bytes // (_SAMPLE_SHARE * world.size))
    if not size_bytes or not (is_dry or (world.size > 1 and sample_bytes >= _MIN_SAMPLE_BYTES)):
        return _Planned(boxes, reads, specs, None)
    costs = measure_costs(
        world,
        partial(source.read, agreed.source, with_states=with_states),
        boxes,
        specs,
        hosts=world.gather(socket.gethostname()),
        sample_bytes=MAX_SAMPLE_BYTES if is_dry else sample_bytes,
    )
    # On one rank: what a search does with fractions may differ from one processor to another.
    found = _together(world, lambda: plan_reads(boxes, specs, costs) if world.rank == 0 else None)[0]
    assert found is not None, "rank 0 plans"
    return _Planned(boxes, found, specs, costs)


def _plan(
    world: World,
    source: RestoreSource,
    agreed: _Agreed,
    parts: Sequence[TappedTable],
    copies: Iterable[TableCopy],
    *,
    with_states: bool,
) -> RestorePlan:
    """Measure, plan and describe; change nothing."""
    planned = _plan_reads(world, source, agreed, parts, with_states=with_states, is_dry=True)
    widths: dict[str, dict[ColumnShard, int]] = {}
    for table in parts:
        spec = planned.specs[agreed.stored[table.spec.fqn]]
        widths.setdefault(table.spec.fqn, {})[table.shard] = RecordLayout(spec, table.shard).size_bytes
    here = [
        RowCopy(agreed.stored[copy.fqn], copy.ranks, copy.num_rows * sum(widths[copy.fqn].values()))
        for copy in copies
        if copy.fqn in widths
    ]
    found = dict.fromkeys(copy for of_rank in world.gather(here) for copy in of_rank)
    return describe_plan(planned.boxes, planned.reads, found, planned.costs)


def _box_of(table: TappedTable, agreed: _Agreed) -> RowBox:
    """Return what a table on this rank takes of the stored one, which may have fewer rows."""
    name = agreed.stored[table.spec.fqn]
    end_row = table.row_offset + table.num_local_rows
    if stored_rows := agreed.source.specs[name].num_rows:
        end_row = max(min(end_row, stored_rows), table.row_offset)
    return RowBox(name=name, first_row=table.row_offset, end_row=end_row, columns=table.shard)


def _write(table: TappedTable, rows: Rows, result: RestoredTable, *, with_states: bool) -> None:
    """Copy rows of a table's columns that are present to their places in the live tensors, and count them."""
    present = np.flatnonzero(rows.presence == PRESENT)
    if not present.size:
        return
    spec = table.spec
    assert table.holder is not None, "`tap_model` finds no other tables"
    places = torch.from_numpy(rows.row_ids[present] - table.row_offset)

    def taken(values: Any, dtype: DType) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values[present])).view(TORCH_DTYPES[dtype])

    if with_states:
        table.holder.create_states()
    table.write_weights(places, taken(rows.weights, spec.dtype))
    if with_states:
        live = table.states()
        for state in spec.states:
            target, values = live[state.name], taken(rows.states[state.name], state.dtype)
            target.index_copy_(0, places.to(target.device), values.to(target.device))
    if table.shard.offset == 0:  # each row once, though every part of its columns is read
        result.num_restored += int(present.size)
    assert rows.epochs is not None and rows.steps is not None
    trained = present[rows.steps[present] > 0]
    if trained.size:
        epoch = int(rows.epochs[trained].max())
        step = int(rows.steps[trained][rows.epochs[trained] == epoch].max())
        result.epoch, result.step = max((result.epoch, result.step), (epoch, step))


def _add(total: RestoredTable, part: RestoredTable) -> None:
    """Add one rank's result to that of all ranks."""
    total.num_rows = max(total.num_rows, part.num_rows)
    total.num_restored += part.num_restored
    total.epoch, total.step = max((total.epoch, total.step), (part.epoch, part.step))
    total.repeated_states = total.repeated_states or part.repeated_states


def _finish_states(parts: Sequence[TappedTable], agreed: _Agreed, totals: Mapping[str, RestoredTable]) -> None:
    """Create the states that other ranks' rows have created there, and set scalars."""
    for path, total in totals.items():
        total.scalars = dict(agreed.scalars[path])
    for holder in _holders(parts):
        paths = [table.spec.fqn for table in parts if table.holder is holder]
        # Tables of one fused module share its count of steps; each has it as of its last changed row.
        scalars: Scalars = {}
        for path in paths:
            scalars |= {name: max(value, scalars.get(name, value)) for name, value in totals[path].scalars.items()}
        if scalars or any(totals[path].num_restored for path in paths):
            holder.create_states()
        holder.set_scalars(scalars)
    for table in parts:
        total = totals[table.spec.fqn]
        for name, value in table.scalars().items() if total.num_restored else ():
            if name not in total.scalars:
                _log.warning("%s: the store has no %s, which stays at %g", total.name, name, value.item())


def _holders(parts: Iterable[TappedTable]) -> list[Holder]:
    """Return what holds the tables, each once, in the order of names, in which all ranks share rows."""
    in_order = sorted(parts, key=lambda table: table.spec.fqn)
    return list({id(table.holder): table.holder for table in in_order if table.holder is not None}.values())
