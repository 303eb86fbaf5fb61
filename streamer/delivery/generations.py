"""Which generation of each table a trainer streams, and which of its rows at first, as all its ranks agree.

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
from headrace.schemas.table_names import generation_of, model_of, next_generation, plain_name
from headrace.schemas.tables import TableSpec
from headrace.streamer.delivery.rendezvous import Store
from headrace.streamer.world import World

__all__ = ["Beside", "Generations", "Publish", "agree_on_generations", "choose_generations"]

Publish = Literal["auto", "updated", "all"]
"""Which rows go out at first, see `RawEmbeddingStreamer.attach`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generations:
    """What an attach streams.

    Attributes:
        names: By plain name, the table's name on the server.
        filled: Those names of which all rows are sent, because the server lacks some.
        grown: By name, the first row to send of tables of which the server has all rows before, but for deleted ones.
        updated_only: Those names of which the user wants updated rows only, now or since a run before.
        complete: Those names of which all shards have all rows.
        seeds: Of those names that the server has given to older tables, the seed by which their rows are routed.
        after_step: The highest step of which any rank has submitted rows or a mark; -1 for none.
        replaced: Dense tensors of the server that look otherwise, in the place of which come the model's.
        alike: By plain name of a table that the server lacks, the one there that it may be under its earlier name.
    """

    names: Mapping[str, str]
    filled: frozenset[str]
    grown: Mapping[str, int] = field(default_factory=dict)
    updated_only: frozenset[str] = frozenset()
    complete: frozenset[str] = frozenset()
    seeds: Mapping[str, int]
    after_step: int = -1
    replaced: frozenset[str] = frozenset()
    alike: Mapping[str, str] = field(default_factory=dict)


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


def choose_generations(
    specs: Iterable[TableSpec], store: Store, *, publish: Publish, beside: Beside | None = None
) -> Generations:
    """Return the newest generations that fit tables with plain names, or the next ones if all their rows are sent.

    Older generations than the newest complete one do not count: replicas would not show them.

    Raises:
        SpecMismatchError: None fits, or dense tensors differ, and not all rows are to be sent.
    """
    specs = list(specs)
    names: dict[str, str] = {}
    num_rows: dict[str, int] = {}
    lacking = store.filling - store.filling_from.keys()  # rows that they do not merely grow by
    for spec in specs:
        known = {name: table for name, table in store.tables.items() if plain_name(name) == spec.fqn}
        newest_first = sorted(known, key=generation_of, reverse=True)
        newest = next((name for name in newest_first if name not in lacking), None)
        candidates = newest_first if newest is None else newest_first[: newest_first.index(newest) + 1]
        fitting = (name for name in candidates if _fits(dataclasses.replace(spec, fqn=name), known[name]))
        name = next(fitting, None) or next_generation(spec.fqn, known)
        if name not in known and known:
            _check_next(spec, known[newest or newest_first[0]], store, publishes_all=publish == "all")
        names[spec.fqn] = name
        num_rows[name] = spec.num_rows
    only = names.values() if publish == "updated" else store.updated_only if publish == "auto" else ()
    # Replicas do not show a later generation before all of it is there.
    updated_only = frozenset(name for name in names.values() if name in only and generation_of(name) == 1)
    filled = frozenset(
        name
        for name in names.values()
        if name not in updated_only and (name in lacking | store.updated_only or name not in store.tables)
    )
    grown = {
        name: first_row
        for name in names.values()
        if not (name in filled or (publish == "updated" and name in updated_only))
        and (first_row := store.filling_from.get(name, store.tables[name].num_rows)) < num_rows[name]
        and not store.tables[name].is_dense
    }
    complete = frozenset(name for name in names.values() if name in store.tables and name not in store.filling)
    known_seeds = {name: store.tables[name].renamed_seed for name in names.values() if name in store.tables}
    seeds = {name: seed for name, seed in known_seeds.items() if seed is not None}
    return Generations(
        names=names,
        filled=filled,
        grown=grown,
        updated_only=updated_only,
        complete=complete,
        seeds=seeds,
        replaced=frozenset() if beside is None else _replaced(beside.dense, store, publishes_all=publish == "all"),
        alike={} if beside is None else _alike(specs, store, beside),
    )


def _replaced(dense: Iterable[TableSpec], store: Store, *, publishes_all: bool) -> frozenset[str]:
    """Return which dense tensors the server has with another spec; raise an error that lists all of them."""
    pairs = [(spec, store.tables[spec.fqn]) for spec in dense if spec.fqn in store.tables]
    changed = {spec.fqn: known.describe_difference(spec) for spec, known in pairs if known.is_dense and known != spec}
    if changed and not publishes_all:
        listed = ", ".join(f"{name!r} ({difference})" for name, difference in changed.items())
        raise SpecMismatchError(
            f"{counted(len(changed), 'dense tensor')} of the server differ from the model's (registered ≠ yours): "
            f"{listed}; attach with publish='all' to replace them, or give your model another name (model=…)"
        )
    return frozenset(changed)


def _alike(specs: Iterable[TableSpec], store: Store, beside: Beside) -> dict[str, str]:
    """Return by plain name of a table that is new the one of a module that may have been renamed; none for two.

    It has the same rows, dim, dtype and states, and the model has nothing of its name. Of several, the one whose name
    begins and ends most like the new one.
    """
    named = {spec.fqn for spec in specs}
    owners = store.owners or {}
    known = {plain_name(name): spec for name, spec in sorted(store.tables.items(), key=lambda t: generation_of(t[0]))}
    left = {
        name: spec
        for name, spec in known.items()
        if not (spec.is_dense or name in named | beside.names) and owners.get(spec.fqn, beside.run) == beside.run
    }
    pairs = [
        (spec.fqn, name)
        for spec in specs
        if spec.fqn not in known
        for name, each in left.items()
        if model_of(name) == model_of(spec.fqn) and dataclasses.replace(each, fqn=spec.fqn, renamed_seed=None) == spec
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


def _fits(spec: TableSpec, known: TableSpec) -> bool:
    """Return whether the server decides: they are the same but for the number of rows, or one is a dense tensor."""
    return known.is_dense or dataclasses.replace(spec, num_rows=known.num_rows) == _with_own_seed(known)


def _check_next(spec: TableSpec, known: TableSpec, store: Store, *, publishes_all: bool) -> None:
    what = f"table {known.fqn!r} is registered with another spec (registered ≠ yours): "
    what += dataclasses.replace(_with_own_seed(known), fqn=spec.fqn).describe_difference(spec)
    if not store.knows_generations:
        raise SpecMismatchError(f"{what}; the server is of a release that knows no generations: update it first")
    if not publishes_all:
        raise SpecMismatchError(
            f"{what}; attach with publish='all' to go on with another generation of the table, which replicas show "
            "once all of it is there, or give your model another name (model=…)"
        )


def _with_own_seed(known: TableSpec) -> TableSpec:
    return dataclasses.replace(known, renamed_seed=None)


def agree_on_generations(
    world: World,
    specs: Iterable[TableSpec],
    find_store: Callable[[], Store],
    *,
    publish: Publish,
    last_step: int,
    beside: Beside | None = None,
) -> Generations:
    """Return what all ranks stream, as rank 0 chooses it for the tables of all; all ranks call it together.

    `last_step` is the last one of which this rank has submitted rows or a mark. `beside` is rank 0's.

    Raises as `choose_generations` and `find_store`, on all ranks.
    """
    reports = world.gather(({spec.fqn: spec for spec in specs}, last_step))
    chosen: Generations | HeadraceError | None = None
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
            chosen = choose_generations(merged.values(), find_store(), publish=publish, beside=beside)
            chosen = dataclasses.replace(chosen, after_step=max(step for _, step in reports))
        except HeadraceError as exc:
            if world.size == 1:
                raise
            chosen = exc
    agreed = cast(Generations | HeadraceError, world.share(chosen))
    if isinstance(agreed, HeadraceError):
        raise agreed
    return agreed
