"""Which rows of its tables a trainer sends at first, as all its ranks agree.

A rank asks nobody whether its rows are there: it sends an incomplete table whole, whoever began it. The choice itself
does no I/O.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from headrace.paramserver.system.text import counted
from headrace.schemas.errors import ConfigError, HeadraceError, SpecMismatchError
from headrace.schemas.table_names import model_of
from headrace.schemas.tables import TableSpec, mismatch
from headrace.streamer.delivery.rendezvous import Store
from headrace.streamer.world import World

__all__ = ["Beside", "FirstRows", "Publish", "agree_on_first_rows", "choose_first_rows"]

Publish = Literal["auto", "updated", "all"]
"""Which rows go out at first, see `RawEmbeddingStreamer.attach`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstRows:
    """What an attach sends of its tables at first.

    Attributes:
        names: Names of the tables of all ranks.
        filled: Those of which all rows are sent, because the server lacks some.
        grown: By name, the first row to send of tables of which the server has all rows before, but for deleted ones.
        updated_only: Those of which the user wants updated rows only, now or since a run before.
        complete: Those of which all shards have all rows.
        after_step: The highest step of which any rank has submitted rows or a mark; -1 for none.
        replaced: Dense tensors of the server that look otherwise, in the place of which come the model's.
        alike: By name of a table that the server lacks, the one there that it may be under its earlier name.
        writers: Runs whose trainers and backfills may write to the tables until they are registered.
    """

    names: frozenset[str]
    filled: frozenset[str]
    grown: Mapping[str, int] = field(default_factory=dict)
    updated_only: frozenset[str] = frozenset()
    complete: frozenset[str] = frozenset()
    after_step: int = -1
    replaced: frozenset[str] = frozenset()
    alike: Mapping[str, str] = field(default_factory=dict)
    writers: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """What else a rank knows of a model.

    Attributes:
        run: The run that trains it.
        dense: Its dense tensors.
        names: Whole names of all that is in it, and of all that its run streams.
    """

    run: str
    dense: Sequence[TableSpec] = ()
    names: frozenset[str] = frozenset()


def choose_first_rows(
    specs: Iterable[TableSpec], store: Store, *, publish: Publish, beside: Beside | None = None
) -> FirstRows:
    """Return which rows of tables are sent, given what the server has.

    Raises:
        SpecMismatchError: The server has a table of that name with another shape, which is not merely fewer rows; or
            dense tensors differ, and not all rows are to be sent; or tables are in the place of dense tensors.
    """
    specs = list(specs)
    num_rows = {spec.fqn: spec.num_rows for spec in specs}
    _check_shapes(specs, store)
    names = frozenset(num_rows)
    lacking = store.filling - store.filling_from.keys()  # rows that they do not merely grow by
    updated_only = names if publish == "updated" else names & store.updated_only if publish == "auto" else frozenset()
    filled = frozenset(
        name for name in names - updated_only if name in lacking | store.updated_only or name not in store.tables
    )
    grown = {
        name: first_row
        for name in sorted(names - filled - (updated_only if publish == "updated" else frozenset()))
        if (first_row := store.filling_from.get(name, store.tables[name].num_rows)) < num_rows[name]
        and not store.tables[name].is_dense
    }
    complete = frozenset(name for name in names if name in store.tables and name not in store.filling)
    return FirstRows(
        names=names,
        filled=filled,
        grown=grown,
        updated_only=updated_only,
        complete=complete,
        replaced=frozenset() if beside is None else _replaced(beside.dense, store, publishes_all=publish == "all"),
        alike={} if beside is None else _alike(specs, store, beside),
        writers=frozenset(runs[name] for runs in (store.owners, store.backfills) for name in names & runs.keys()),
    )


def _check_shapes(specs: Sequence[TableSpec], store: Store) -> None:
    """Raise an error that lists all tables that differ from the server's in more than the number of rows."""
    pairs = [(store.tables[spec.fqn], spec) for spec in specs if spec.fqn in store.tables]
    # The server decides on the number of rows.
    changed = [(known, spec) for known, spec in pairs if dataclasses.replace(spec, num_rows=known.num_rows) != known]
    if changed:
        raise mismatch(changed)


def _replaced(dense: Iterable[TableSpec], store: Store, *, publishes_all: bool) -> frozenset[str]:
    """Return which dense tensors the server has with another spec; raise an error that lists all of them."""
    pairs = [(spec, store.tables[spec.fqn]) for spec in dense if spec.fqn in store.tables]
    if tables := [spec.fqn for spec, known in pairs if not known.is_dense]:
        raise SpecMismatchError(
            f"the server has tables in the place of {counted(len(tables), 'dense tensor')} of the model, as after a "
            f"backfill that took layers' weights for tables: drop them (headrace table drop {' '.join(tables)}) and "
            "attach again, or publish others (dense=[…])"
        )
    named = {spec.fqn: spec for spec, _ in pairs}
    changed = {spec.fqn: known.describe_difference(spec) for spec, known in pairs if known.is_dense and known != spec}
    if changed and not publishes_all:
        only_states = [
            name
            for name in changed
            if not named[name].states and dataclasses.replace(store.tables[name], states=()) == named[name]
        ]
        way_on = (
            "attach with dense_states=True, which publishes their states too; or "
            if len(only_states) == len(changed)
            else ""
        )
        listed = ", ".join(f"{name!r} ({difference})" for name, difference in changed.items())
        raise SpecMismatchError(
            f"{counted(len(changed), 'dense tensor')} of the server differ from the model's (registered ≠ yours): "
            f"{listed}; {way_on}attach with publish='all' to replace them, or give your model another name (model=…)"
        )
    return frozenset(changed)


def _alike(specs: Iterable[TableSpec], store: Store, beside: Beside) -> dict[str, str]:
    """Return by name of a table that is new the one of a module that may have been renamed; none for two.

    It has the same rows, dim, dtype and states, and the model has nothing of its name. Of several, the one whose name
    begins and ends most like the new one.
    """
    named, owners = {spec.fqn for spec in specs}, store.owners
    left = {
        name: spec
        for name, spec in store.tables.items()
        if not (spec.is_dense or name in named | beside.names) and owners.get(name, beside.run) == beside.run
    }
    pairs = [
        (spec.fqn, name)
        for spec in specs
        if spec.fqn not in store.tables
        for name, each in left.items()
        if model_of(name) == model_of(spec.fqn) and dataclasses.replace(each, fqn=spec.fqn) == spec
    ]
    found: dict[str, str] = {}
    for new, old in sorted(pairs, key=lambda pair: (-_common(*pair), pair)):
        if new not in found and left.pop(old, None) is not None:
            found[new] = old
    return found


def _common(name: str, other: str) -> int:
    """Return how many characters two names begin and end with in common."""
    ends = zip(name, other, strict=False), zip(reversed(name), reversed(other), strict=False)
    return sum(len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))) for pairs in ends)


def agree_on_first_rows(
    world: World,
    specs: Iterable[TableSpec],
    find_store: Callable[[], Store],
    *,
    publish: Publish,
    last_step: int,
    beside: Beside | None = None,
) -> FirstRows:
    """Return what all ranks send, as rank 0 chooses it for the tables of all; all ranks call it together.

    `last_step` is the last one of which this rank has submitted rows or a mark. `beside` is rank 0's.

    Raises as `choose_first_rows` and `find_store`, on all ranks.
    """
    reports = world.gather(({spec.fqn: spec for spec in specs}, last_step))
    chosen: FirstRows | HeadraceError | None = None
    if world.rank == 0:
        merged = {name: spec for of_rank, _ in reports for name, spec in of_rank.items()}
        try:
            for rank, (of_rank, _) in enumerate(reports):
                for name, spec in of_rank.items():
                    if difference := spec.describe_difference(merged[name]):
                        raise ConfigError(
                            f"table {name!r} differs between ranks (rank {rank} ≠ the last one): {difference}; give "
                            "all ranks the same model and arguments"
                        )
            chosen = choose_first_rows(merged.values(), find_store(), publish=publish, beside=beside)
            chosen = dataclasses.replace(chosen, after_step=max(step for _, step in reports))
        except HeadraceError as exc:
            if world.size == 1:
                raise
            chosen = exc
    agreed = cast(FirstRows | HeadraceError, world.share(chosen))
    if isinstance(agreed, HeadraceError):
        raise agreed
    return agreed
