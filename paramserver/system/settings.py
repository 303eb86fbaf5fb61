"""Settings: dataclass fields that a flag, an environment variable or a YAML file can set.

A field made by `setting` or its shorthands has a kind, bounds and a help text. `merge` takes each value from the first
source that has it: flags, environment, file, the field's default. It parses each value once; a wrong one raises a
one-line error that names its source.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from headrace.paramserver.system.text import BYTES_BY_UNIT, SECONDS_BY_UNIT
from headrace.schemas.errors import ConfigError

__all__ = [
    "REQUIRED",
    "Kind",
    "Setting",
    "check",
    "check_names",
    "choice_setting",
    "count_setting",
    "flag_of",
    "merge",
    "path_setting",
    "seconds_setting",
    "setting",
    "settings_of",
    "show_default",
    "show_value",
    "size_setting",
    "switch_setting",
    "text_setting",
]

REQUIRED: Any = dataclasses.MISSING
"""Default of a setting that must be given."""

_T = TypeVar("_T")
_KEY = "headrace.setting"
_QUANTITY = re.compile(r"(?P<number>[0-9]{1,19}(?:\.[0-9]{1,19})?) ?(?P<unit>[A-Za-z]*)")
# YAML allows whole numbers that no float can hold and that Python refuses to print.
_MAX_NUMBER = 2**100
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


class Kind(enum.Enum):
    """Type of a setting; the value is its name on a help page."""

    BYTES = "BYTES"  # a whole number, or one with a unit: `64MiB`
    CHOICE = "CHOICE"
    COUNT = "N"
    PATH = "PATH"
    RULES = "RULES"  # `PATTERN: KEY=VALUE, …; …`; in a file also a mapping of patterns to mappings
    SECONDS = "SECONDS"  # a number, or one with a unit: `250ms`, `24h`
    SWITCH = "SWITCH"
    TEXT = "TEXT"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Metadata of one field."""

    kind: Kind
    help: str  # one or two sentences: what it does and what it costs
    minimum: float | None = None  # inclusive
    maximum: float | None = None  # inclusive
    choices: tuple[str, ...] = ()  # allowed words of a CHOICE
    default_text: str | None = None  # shown as the default if that is computed later
    short: str | None = None  # its flag with one letter, such as `-s`


def setting(default: Any, **metadata: Any) -> Any:
    """Return a dataclass field that `merge` can fill, with the fields of `Setting` as keyword arguments.

    A default of `REQUIRED` makes it mandatory.
    """
    return dataclasses.field(default=default, metadata={_KEY: Setting(**metadata)})


def _quantity_setting(kind: Kind, default: Any, minimum: float, maximum: float, help: str, **more: Any) -> Any:
    return setting(default, kind=kind, minimum=minimum, maximum=maximum, help=help, **more)


size_setting = functools.partial(_quantity_setting, Kind.BYTES)
count_setting = functools.partial(_quantity_setting, Kind.COUNT)
seconds_setting = functools.partial(_quantity_setting, Kind.SECONDS)


def _plain_setting(kind: Kind, default: Any, help: str, **more: Any) -> Any:
    return setting(default, kind=kind, help=help, **more)


path_setting = functools.partial(_plain_setting, Kind.PATH)
text_setting = functools.partial(_plain_setting, Kind.TEXT)
switch_setting = functools.partial(_plain_setting, Kind.SWITCH)


def choice_setting(default: str | None, choices: tuple[str, ...], help: str, **more: Any) -> Any:
    """Return a field that takes one of some words; see `setting`."""
    return setting(default, kind=Kind.CHOICE, choices=choices, help=help, **more)


def settings_of(cls: type[Any]) -> Iterator[tuple[dataclasses.Field[Any], Setting]]:
    """Yield the settings among a dataclass's fields, in order."""
    for field in dataclasses.fields(cls):
        if _KEY in field.metadata:
            yield field, field.metadata[_KEY]


def flag_of(name: str) -> str:
    """Return a setting's flag: `--max-frame-bytes` for `max_frame_bytes`."""
    return "--" + name.replace("_", "-")


def show_default(field: dataclasses.Field[Any], known: Setting) -> str:
    """Return a setting's default as a help page shows it; empty if there is none."""
    if known.default_text is not None:
        return known.default_text
    if field.default is dataclasses.MISSING or field.default is None:
        return ""
    return show_value(known, field.default)


def show_value(known: Setting, value: Any) -> str:
    """Return a checked value of a setting as a file may have it."""
    if known.kind is Kind.BYTES:
        return _show_bytes(value)
    if known.kind is Kind.SWITCH:
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def check(config: Any) -> None:
    """Raise `ConfigError` if a setting of a dataclass instance is out of bounds; for `__post_init__`."""
    for field, known in settings_of(type(config)):
        value = getattr(config, field.name)
        if value is None and field.default is None:
            continue
        problem = _problem(known, value)
        if problem:
            raise ConfigError(f"{field.name}: {problem}")


def check_names(cls: type[Any], settings: Iterable[str]) -> None:
    """Raise `ConfigError` with the nearest name if a dataclass has no field of one of these names."""
    known = {field.name for field in dataclasses.fields(cls)}
    for name in sorted(set(settings) - known):
        nearest = difflib.get_close_matches(name, known, n=1)
        raise ConfigError(f"{name!r} is no setting" + (f"; did you mean {nearest[0]!r}?" if nearest else ""))


def merge(
    cls: type[_T],
    *,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    prefix: str,
    file: Path | None = None,
    flag: Callable[[str], str] = flag_of,
    defaults: Mapping[str, Any] | None = None,
    fixed: Mapping[str, Any] | None = None,
    origins: dict[str, str] | None = None,
    may_lack: bool = False,
) -> _T:
    """Return an instance filled from flags, environment, file and defaults; the first that has a value wins.

    Args:
        cls: Dataclass whose fields are made by `setting`.
        flags: Values by field name; None for an absent flag.
        environ: The environment. A variable with `prefix` that names no setting is an error.
        prefix: Such as `HEADRACE_SERVE_`; a field's name in capitals follows it.
        file: YAML file: a mapping of field names.
        flag: Returns how errors name a value of `flags`, given the field's name.
        defaults: Values, checked already, for what no source gives. A function is called for its value if none does.
        fixed: Values, checked already, of fields that no source may give.
        origins: Gets, for each field that a source has, the flag, the variable, or the file and its line.
        may_lack: For showing settings: a required value that no source has gets a stand-in, and the origin `required`.

    Raises:
        ConfigError: A key is unknown, a value is wrong, or a required value is missing.
    """
    known_by_name = {field.name: known for field, known in settings_of(cls)}
    values: dict[str, Any] = {}
    given = ((name, flag(name), raw) for name, raw in flags.items() if raw is not None)
    for source in (_from_file(file, known_by_name), _from_environ(environ, prefix, known_by_name), given):
        for name, where, raw in source:
            if name in (fixed or {}):
                raise ConfigError(f"{where}: leave it out: the cluster file says it")
            values[name] = _parse(known_by_name[name], raw, where)
            if origins is not None:
                origins[name] = where.removesuffix(f": {name}")
    for name, default in (defaults or {}).items():
        if name not in values:
            values[name] = default() if callable(default) else default
    values |= fixed or {}
    for field, known in settings_of(cls):
        if field.default is dataclasses.MISSING and field.name not in values:
            if not may_lack or origins is None:
                raise ConfigError(f"{flag(field.name)} is missing")
            values[field.name] = Path("required") if known.kind is Kind.PATH else "required"
            origins[field.name] = "required"
    return cls(**values)


def _from_environ(
    environ: Mapping[str, str], prefix: str, known: Mapping[str, Setting]
) -> Iterator[tuple[str, str, Any]]:
    for variable, raw in sorted(environ.items()):
        if variable.startswith(prefix):
            name = variable.removeprefix(prefix).lower()
            if name not in known or variable != prefix + name.upper():
                nearest = _nearest(name, known)
                raise ConfigError(
                    f"environment variable {variable} is no setting"
                    + (f"; did you mean {prefix}{nearest.upper()}?" if nearest else "")
                )
            yield name, variable, raw


def _from_file(file: Path | None, known: Mapping[str, Setting]) -> Iterator[tuple[str, str, Any]]:
    if file is None:
        return
    seen: set[str] = set()
    for name, line, raw in _read_mapping(file):
        where = f"{file}:{line}"
        if name not in known:
            nearest = _nearest(name, known)
            raise ConfigError(f"{where}: unknown key {name!r}" + (f"; did you mean {nearest!r}?" if nearest else ""))
        if name in seen:
            raise ConfigError(f"{where}: {name} is given twice")
        seen.add(name)
        if raw is None:
            raise ConfigError(f"{where}: {name} has no value; leave the line out to get the default")
        yield name, f"{where}: {name}", raw


def _read_mapping(file: Path) -> Iterator[tuple[str, int, Any]]:
    """Yield key, line and value of the top-level mapping of a YAML file."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"--config {file}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"--config {file}: not UTF-8 text ({exc.reason} at byte {exc.start})") from exc
    try:
        # A plain load would lose line numbers and silently keep the last of two equal keys.
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{file}:{root.start_mark.line + 1}: not a mapping of settings, as in `port: 7601`")
        for key, value in root.value:
            yield str(key.value), key.start_mark.line + 1, loader.construct_object(value, deep=True)
    except (yaml.YAMLError, ValueError, RecursionError) as exc:  # the latter two: scalars or nesting beyond Python's
        mark = getattr(exc, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark else str(file)
        problem = getattr(exc, "problem", None) or getattr(exc, "reason", None) or exc
        raise ConfigError(f"{where}: not YAML: {problem}") from exc


def _nearest(name: str, known: Mapping[str, Setting]) -> str | None:
    matches = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1, cutoff=0.5)
    return matches[0] if matches else None


def _parse(known: Setting, raw: Any, where: str) -> Any:
    text = raw.strip() if isinstance(raw, str) else raw
    if text == "":
        raise ConfigError(f"{where} is empty")
    parse = _PARSERS.get(known.kind)
    value = parse(text) if parse else text
    problem = _problem(known, value)
    if problem:
        raise ConfigError(f"{where}: {problem}")
    return value


def _parse_count(raw: Any) -> Any:
    return int(raw) if isinstance(raw, str) and re.fullmatch(r"-?[0-9]{1,19}", raw) else raw


def _parse_bytes(raw: Any) -> Any:
    size = _parse_quantity(raw, BYTES_BY_UNIT)
    return int(size) if isinstance(size, float) and size.is_integer() else size


def _parse_seconds(raw: Any) -> Any:
    seconds = _parse_quantity(raw, SECONDS_BY_UNIT)
    is_whole = isinstance(seconds, int) and not isinstance(seconds, bool)
    return float(seconds) if is_whole and abs(seconds) <= _MAX_NUMBER else seconds


def _parse_quantity(raw: Any, units: Mapping[str, float]) -> Any:
    match = _QUANTITY.fullmatch(raw) if isinstance(raw, str) else None
    if match is None or match["unit"] not in units:
        return raw
    number = float(match["number"]) if "." in match["number"] else int(match["number"])
    return number * units[match["unit"]]


def _parse_rules(raw: Any) -> Any:
    if not isinstance(raw, dict) or not all(isinstance(keys, dict) for keys in raw.values()):
        return raw
    rules = (f"{name}: " + ", ".join(f"{key}={value}" for key, value in keys.items()) for name, keys in raw.items())
    return "; ".join(rules)


def _parse_switch(raw: Any) -> Any:
    return _WORDS.get(raw.lower(), raw) if isinstance(raw, str) else raw


_PARSERS = {
    Kind.BYTES: _parse_bytes,
    Kind.COUNT: _parse_count,
    Kind.PATH: lambda raw: Path(raw) if isinstance(raw, str) else raw,
    Kind.RULES: _parse_rules,
    Kind.SECONDS: _parse_seconds,
    Kind.SWITCH: _parse_switch,
}
_TYPES: dict[Kind, tuple[type | tuple[type, ...], str]] = {
    Kind.BYTES: (int, "a number of bytes, such as 64MiB"),
    Kind.CHOICE: (str, "a word"),
    Kind.COUNT: (int, "a whole number"),
    Kind.PATH: (Path, "a path"),
    Kind.RULES: (str, "rules such as `*: max_rows=1000000`"),
    Kind.SECONDS: ((int, float), "a number of seconds, such as 10 or 24h"),
    Kind.SWITCH: (bool, "true or false"),
    Kind.TEXT: (str, "a text"),
}


def _problem(known: Setting, value: Any) -> str | None:
    """Return what is wrong with a parsed value, or None."""
    types, what = _TYPES[known.kind]
    # To Python a bool is an int, but `port: true` is a mistake.
    if not isinstance(value, types) or (isinstance(value, bool) and known.kind is not Kind.SWITCH):
        return f"{str(value)!r} is not {what}"
    if isinstance(value, str | Path) and "\0" in str(value):
        return "must not contain a zero byte"  # system calls would raise ValueError and not OSError
    if isinstance(value, int) and abs(value) > _MAX_NUMBER:
        return "must be at most 2^100"
    if isinstance(value, int | float):
        return _out_of_bounds(known, value)
    if known.choices and value not in known.choices:
        return f"{str(value)!r} is not one of {', '.join(known.choices)}"
    return None


def _out_of_bounds(known: Setting, value: float) -> str | None:
    show = _show_bytes if known.kind is Kind.BYTES else "{:g}".format
    # `not >=` instead of `<`, so that NaN fails too.
    if known.minimum is not None and not value >= known.minimum:
        return f"{show(value)} is less than {show(known.minimum)}"
    if known.maximum is not None and not value <= known.maximum:
        return f"{show(value)} is more than {show(known.maximum)}"
    return None


def _show_bytes(size_bytes: float) -> str:
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes and size_bytes % BYTES_BY_UNIT[unit] == 0:
            return f"{size_bytes / BYTES_BY_UNIT[unit]:g}{unit}"
    return f"{size_bytes:.0f}"
