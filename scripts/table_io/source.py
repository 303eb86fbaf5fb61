"""Open the source of a backfill, whatever its format: find its tables and check them; rows are read later."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from headrace.paramserver.store.row_chunk import RowChunk
from headrace.paramserver.system.text import describe_near
from headrace.schemas.errors import ConfigError, RequestError, SpecMismatchError, StorageError
from headrace.schemas.extras import install_command
from headrace.schemas.table_names import (
    DEFAULT_MODEL,
    TableNames,
    check_model,
    is_among,
    matches,
    model_of,
    path_of,
    table_name,
)
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec
from headrace.scripts.table_io.columns import TensorSource, map_file_errors

__all__ = [
    "BackfillConfig",
    "Naming",
    "OpenSource",
    "Selection",
    "SourceTable",
    "TableScalars",
    "import_with_extra",
    "noted_scalars",
    "state_of",
]

# By suffix: module and function.
_READERS = {
    ".pt": "torch_reader:open_torch_file",
    ".pth": "torch_reader:open_torch_file",
    ".ckpt": "torch_reader:open_torch_file",
    ".safetensors": "safetensors_file:open_safetensors",
}
_NON_FINITE = ("refuse", "skip", "keep")
# Library: the extra that installs it.
_EXTRAS = {"torch": "torch", "pyarrow": "tools", "safetensors": "tools"}


TableScalars = tuple[tuple[str, DType, bytes], ...]
"""Name, element type and bytes of each."""


class Naming:
    """Rules `NAME=FQN` or `NAME=FQN/STATE`; each `*` stands for any characters, the same ones on both sides."""

    def __init__(self, rules: Iterable[str]) -> None:
        """Parse the rules; the first one that matches a name counts.

        Raises:
            ConfigError: A rule is malformed.
        """
        self._rules: list[tuple[re.Pattern[str], str]] = []
        self._unused: dict[int, str] = {}
        self._exact: set[str] = set()
        for rule in rules:
            name, sign, target = rule.partition("=")
            if not (name and sign and target) or target.count("*") > name.count("*"):
                raise ConfigError(f"--map {rule!r}: not NAME=FQN or NAME=FQN/STATE, with no more * on the right")
            pattern = "(.*)".join(map(re.escape, name.split("*")))
            if "*" not in name:
                self._exact.add(name)
            self._unused[len(self._rules)] = rule
            self._rules.append((re.compile(pattern), target))

    def target_of(self, name: str) -> str | None:
        """Return what a name is mapped to; None if no rule matches."""
        found = None
        for number, (pattern, target) in enumerate(self._rules):
            match = pattern.fullmatch(name)
            if match:
                self._unused.pop(number, None)
                if found is None:
                    parts = target.split("*")
                    groups = [*match.groups()][: len(parts) - 1]
                    found = "".join(a + b for a, b in zip(parts, [*groups, ""], strict=True))
        return found

    def has_exactly(self, name: str) -> bool:
        """Return whether a rule without `*` is for a name."""
        return name in self._exact

    def check_used(self, where: str) -> None:
        """Check that each rule matched a name; one that matched none is misspelled.

        Raises:
            ConfigError: A rule matched nothing.
        """
        for rule in self._unused.values():
            raise ConfigError(f"--map {rule!r}: fits nothing in {where}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BackfillConfig:
    """The rows to take from a source."""

    maps: tuple[str, ...] = ()  # rules `NAME=FQN` and `NAME=FQN/STATE`
    tables: tuple[str, ...] | None = None  # only these tables, by their names in the source; None for all
    model: str | None = None  # whose tables they are; None: the target's table of that path, else the default model's
    zero_states: bool = False  # fill states that the source lacks with zeros, and skip those that the target lacks
    non_finite: str = "refuse"  # what to do with NaN and infinities: `refuse` all, `skip` their rows, or `keep` them

    def __post_init__(self) -> None:
        if self.model is not None:
            check_model(self.model)
        if self.non_finite not in _NON_FINITE:
            raise ConfigError(f"--non-finite {self.non_finite!r}: one of {', '.join(_NON_FINITE)}")

    def open(self, path: Path, known: Mapping[str, TableSpec] | None) -> OpenSource:
        """Open a file or directory and check all its tables.

        Args:
            path: A `.pt`, `.safetensors` or `.parquet` file, a checkpoint's directory or one of Parquet files.
            known: The target's tables, by fqn; None for a new one.

        Raises:
            ConfigError: There is nothing to read, or a library for it is missing.
            HeadraceError: The source is damaged, or does not fit the target.
        """
        names = TableNames(known or {}, model=self.model)
        naming, parquet = Naming(self.maps), _parquet_files(path)
        tensors = None if parquet is not None else _open_tensors(path)
        files = tensors.files if tensors is not None else parquet or []
        with map_file_errors(path):
            stamp = [_stamp_of(file) for file in files]
        time_us = max(changed_ns for _, _, changed_ns in stamp) // 1000
        here = _called_here(known or {}, names)
        selection = Selection(config=self, naming=naming, known=here, time_us=time_us)
        dense, not_taken = list[str](), list[str]()
        if tensors is None:
            tables = import_with_extra("parquet:parquet_tables", what="this")(parquet, selection)
        else:
            tables, dense, not_taken = import_with_extra("dense:dense_tables", what="this")(tensors, selection)
        naming.check_used(str(path))
        known, found = known or {}, []
        for table in tables:
            fqn = names.find(table.spec.fqn) or self._new_name(table.spec.fqn)
            if (target := known.get(fqn)) is None or not target.is_dense:
                found.append(table.named(fqn))
            elif self.tables is None and not naming.has_exactly(table.name):
                dense.append(table.name)
            else:
                raise SpecMismatchError(
                    f"{path}: {table.name!r} would be {fqn!r}, a dense tensor of the server, which only a trainer "
                    "publishes; name the tables with --table"
                )
        if not found:
            raise ConfigError(f"{path}: has dense tensors only, which a trainer publishes: load them into its model")
        tables = sorted(found, key=lambda table: table.spec.fqn)
        if repeated := [table for table, after in pairwise(tables) if table.spec.fqn == after.spec.fqn]:
            raise ConfigError(f"{path}: two of its tables would be {repeated[0].spec.fqn!r}")
        is_told = self.tables is not None or tensors is None or tensors.notes is not None
        guessed = [table for table in tables if not (is_told or naming.has_exactly(table.name))]
        return OpenSource(
            config=self,
            tables=tables,
            dense=tuple(dense),
            not_taken=tuple(not_taken),
            guessed=tuple(table.spec.fqn for table in guessed if table.spec.fqn not in known),
            files=files,
            stamp=stamp,
        )

    def _new_name(self, name: str) -> str:
        if self.model is None or model_of(name) == self.model:
            return name
        if model_of(name) != DEFAULT_MODEL:
            raise ConfigError(
                f"--model {self.model!r}: the source has table {name!r} of another model; name it with --map"
            )
        return table_name(self.model, name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What the reader of a format takes from a source."""

    config: BackfillConfig  # the user's choice
    naming: Naming  # its rules, parsed
    known: Mapping[str, TableSpec]  # the target's tables, by their names in the source
    time_us: int  # wall clock of rows that have none: the source's last change, microseconds since 1970

    def takes(self, fqn: str) -> bool:
        """Return whether a table is wanted."""
        return self.config.tables is None or is_among(fqn, self.config.tables)

    def check_wanted(self, found: set[str], where: str) -> None:
        """Raise ConfigError if a requested table is not among those found."""
        for wanted in self.config.tables or ():
            if not any(matches(fqn, wanted) for fqn in found):
                raise ConfigError(f"--table {wanted!r}: no such table in {where}; {describe_near(wanted, found)}")

    def check_fits(self, found: TableSpec, where: str) -> None:
        """Raise SpecMismatchError if the target's table of this name is another one."""
        known = self.known.get(found.fqn)
        if known is not None and (difference := known.describe_difference(found)):
            raise SpecMismatchError(
                f"{where}: table {found.fqn!r} is another one (the server's ≠ the file's): {difference}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceTable:
    """One table of a source, checked."""

    name: str  # name in the source, for messages
    spec: TableSpec  # its spec in the target
    num_rows: int  # number of rows in the source
    chunks: Callable[[int], Iterator[RowChunk]]  # yields the rows, ascending, about so many bytes at a time
    check_ids: Callable[[], None]  # reads and checks ids, versions and deletions, if the file lists them
    scalars: TableScalars = ()  # values that the optimizer has once per table; of the version of the newest row

    def named(self, fqn: str) -> SourceTable:
        """Return the table under its name in the target."""
        return replace(self, spec=replace(self.spec, fqn=fqn))


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenSource:
    """The checked tables of a source."""

    config: BackfillConfig  # which rows to take
    tables: list[SourceTable]  # ordered by name
    dense: tuple[str, ...]  # dense tensors that are left out; only a trainer publishes those
    not_taken: tuple[str, ...]  # tensors that a rule with `*` matches, and that look like no tables
    guessed: tuple[str, ...]  # tables that the target lacks, and that only a rule with `*` says are tables
    files: list[Path]  # the files that it was opened from
    stamp: list[Any]  # name, size and modification time of each file; another stamp means other contents

    def check_unchanged(self) -> None:
        """Check that the files did not change since they were opened.

        Raises:
            RequestError: A file is gone.
            StorageError: A file changed, so the rows that were read may be a mixture.
        """
        for file, expected in zip(self.files, self.stamp, strict=True):
            with map_file_errors(file):
                if _stamp_of(file) != expected:
                    raise StorageError(f"{file}: changed while it was read; run it again when it is at rest")


def _called_here(known: Mapping[str, TableSpec], names: TableNames) -> dict[str, TableSpec]:
    """Return the target's tables by what a source may call them: their names, and paths that one model only has.

    Its dense tensors are none: a checkpoint has the same ones, and they stay as they are.
    """
    here = {}
    for name in {*known, *map(path_of, known)}:
        with contextlib.suppress(RequestError):  # several models have the path
            if (fqn := names.find(name)) is not None and not known[fqn].is_dense:
                here[name] = replace(known[fqn], fqn=name)
    return here


def noted_scalars(note: Mapping[str, Any]) -> TableScalars:
    """Return the scalars in a table's note by `headrace export`.

    Raises:
        KeyError, TypeError, ValueError: The note is damaged.
    """
    scalars = tuple((str(name), DType(dtype), bytes.fromhex(data)) for name, dtype, data in note.get("scalars", ()))
    for name, dtype, data in scalars:
        if len(data) != dtype.size_bytes:
            raise ValueError(f"scalar {name!r} has {len(data)} bytes")
    return scalars


def state_of(name: str, dtype: DType, width: int, *, is_pointwise: bool) -> StateSpec:
    """Return the spec of a state that a file has; `width` counts only for rowwise ones."""
    kind = StateKind.POINTWISE if is_pointwise else StateKind.ROWWISE
    return StateSpec(name=name, kind=kind, dtype=dtype, width=0 if is_pointwise else width)


def _stamp_of(path: Path) -> list[Any]:
    stat = path.stat()
    return [path.name, stat.st_size, stat.st_mtime_ns]


def _parquet_files(path: Path) -> list[Path] | None:
    if path.is_file() and path.suffix == ".parquet":
        return [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix == ".parquet" and file.name[0] != ".")
        return files or None
    return None


def _open_tensors(path: Path) -> TensorSource:
    if path.is_dir():
        if not (path / ".metadata").exists():
            raise ConfigError(f"{path}: neither a checkpoint (no .metadata) nor a directory of .parquet files")
        reader = "dcp:open_checkpoint"
    elif not path.exists():
        raise ConfigError(f"{path}: there is no such file or directory")
    elif path.suffix in _READERS:
        reader = _READERS[path.suffix]
    else:
        raise ConfigError(
            f"{path}: unknown ending {path.suffix!r}; .pt, .pth, .ckpt, .safetensors and .parquet files and "
            "directories of checkpoints are read"
        )
    source: TensorSource = import_with_extra(reader, what="this")(path)
    return source


def import_with_extra(function: str, *, what: str) -> Callable[..., Any]:
    """Return the function `module:function` of this folder, whose library may be missing.

    Raises:
        ConfigError: A library that an extra installs is missing; `what` needs it.
    """
    try:
        module, _, name = function.partition(":")
        found: Callable[..., Any] = getattr(importlib.import_module(f"headrace.scripts.table_io.{module}"), name)
        return found
    except ModuleNotFoundError as exc:
        library = (exc.name or "").partition(".")[0]
        if library not in _EXTRAS:
            raise
        raise ConfigError(f"{what} needs {library}: {install_command(_EXTRAS[library])}") from exc
