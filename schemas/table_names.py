"""Names of tables on a server: `model:path`, or the path alone under the default model.

The path is the table's name within its model, as in `state_dict`. The whole name is what the wire, the log, the store
and snapshots call the table's fqn, so releases that know nothing of models read and write tables of the default one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from headrace.schemas.errors import ConfigError, RequestError

__all__ = [
    "CONTROLS",
    "DEFAULT_MODEL",
    "TableNames",
    "check_model",
    "has_controls",
    "is_among",
    "matches",
    "model_of",
    "name_in",
    "path_of",
    "table_name",
]

DEFAULT_MODEL = "default"
"""The model of tables whose name has none."""

CONTROLS = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""What moves a terminal's cursor, ends a line or reorders it: C0, DEL, C1, Unicode's line ends and bidi overrides."""

# ON THE WIRE and ON DISK: never change it.
_SEPARATOR = ":"
_MAX_MODEL_BYTES = 256


def has_controls(name: str) -> bool:
    """Return whether a name has control characters, which no server takes in any name."""
    return CONTROLS.search(name) is not None


def table_name(model: str, path: str) -> str:
    """Return the name of a model's table on the server."""
    return path if model == DEFAULT_MODEL else f"{model}{_SEPARATOR}{path}"


def model_of(name: str) -> str:
    """Return the model that a table's name says."""
    model, separator, _ = name.partition(_SEPARATOR)
    return model if separator else DEFAULT_MODEL


def path_of(name: str) -> str:
    """Return a table's name within its model."""
    model, separator, path = name.partition(_SEPARATOR)
    return path if separator else model


def name_in(names: Mapping[str, str], path: str) -> str | None:
    """Return the name on the server of what is at a path in a model, without the model; None if none is given.

    `names` has names by paths of tensors, and of modules for all inside of them: the longest path counts. The empty
    path is the model itself, and the empty name leaves a module's path out.
    """
    start = path
    while start not in names:
        if not start:
            return None
        start = start.rpartition(".")[0]
    inside = path[len(start) :] if start else f".{path}"
    return f"{names[start]}{inside}".removeprefix(".")


def is_among(name: str, wanted: Iterable[str]) -> bool:
    """Return whether a table is meant by one of the names, paths and patterns that a user wants."""
    return any(matches(name, pattern) for pattern in wanted)


def matches(name: str, pattern: str) -> bool:
    """Return whether a table is meant by a name, by a path, or by a pattern (`*`, `?`, `[…]`) of either.

    A name with brackets means itself, too.
    """
    path = path_of(name)
    return pattern in (name, path) or fnmatchcase(name, pattern) or fnmatchcase(path, pattern)


def check_model(model: str) -> None:
    """Raise ConfigError unless a model's name is printable, of 1 to 256 bytes, and without `:`."""
    if not isinstance(model, str):
        raise ConfigError(f"model {model!r} is not text: give the model a name")
    # isprintable() also refuses lone surrogates, which cannot be encoded.
    if not model.isprintable() or not 1 <= len(model.encode()) <= _MAX_MODEL_BYTES or _SEPARATOR in model:
        raise ConfigError(
            f"model {model[:40]!r} is empty, over {_MAX_MODEL_BYTES} bytes or has {_SEPARATOR!r} or control "
            "characters: pass another one as model=…"
        )


class TableNames:
    """The names of the tables that exist, to find the one that a user means by a name or a path."""

    def __init__(self, names: Iterable[str], *, model: str | None = None) -> None:
        """Index names, of one model only if `model` is given."""
        self._names = {name for name in names if model is None or model_of(name) == model}
        self._by_path: dict[str, list[str]] = {}
        for name in sorted(self._names):
            self._by_path.setdefault(path_of(name), []).append(name)

    def find(self, wanted: str) -> str | None:
        """Return the table of a name, or else of a path that one model only has; None if there is none.

        Raises:
            RequestError: Several models have the path; the message names them.
        """
        if wanted in self._names:
            return wanted
        found = self._by_path.get(wanted, ())
        if len(found) > 1:
            models = ", ".join(model_of(name) for name in found)
            raise RequestError(f"several models have a table {wanted!r} ({models}): name one, as in {found[0]!r}")
        return found[0] if found else None
