"""Settings from flags, environment and file: the nearest wins, and each mistake is one line with its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.paramserver.system import settings
from headrace.paramserver.system.settings import REQUIRED, Kind, check, merge, setting
from headrace.schemas.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gate:
    name: str = setting(REQUIRED, kind=Kind.TEXT, help="Whose it is.")
    flow_bytes: int = setting(64 * 2**20, kind=Kind.BYTES, minimum=1024, maximum=2**30, help="Bytes.")
    turns: int | None = setting(None, kind=Kind.COUNT, minimum=1, maximum=9, help="Turns.")
    wait_s: float = setting(10.0, kind=Kind.SECONDS, minimum=0, help="Seconds.")
    is_open: bool = setting(False, kind=Kind.SWITCH, help="Whether.")
    side: str = setting("left", kind=Kind.CHOICE, choices=("left", "right"), help="Which.")
    home: Path = setting(Path("/"), kind=Kind.PATH, help="Where.")  # noqa: RUF009

    def __post_init__(self) -> None:
        check(self)


def _merge(file: Path | None = None, environ: dict[str, str] | None = None, **flags: Any) -> _Gate:
    return merge(_Gate, flags={"name": "n", **flags}, environ=environ or {}, prefix="GATE_", file=file)


def test_the_nearest_source_wins(tmp_path: Path) -> None:
    """Flags > environment > file > defaults, setting by setting; a file of comments alone sets nothing."""
    file = tmp_path / "gate.yaml"
    file.write_text("turns: 2\nside: right\nwait_s: 1.5\nhome: /tmp\n")
    gate = _merge(file, {"GATE_TURNS": "3", "GATE_SIDE": "left", "PATH": "/bin"}, turns="4", wait_s=None)
    assert gate == _Gate(name="n", turns=4, side="left", wait_s=1.5, home=Path("/tmp"))
    file.write_text("# nothing yet\n")
    assert _merge(file) == _merge()


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("flow_bytes", "2048", 2048),
        ("flow_bytes", "1.5 KiB", 1536),
        ("flow_bytes", "1GiB", 2**30),
        ("turns", " 9 ", 9),
        ("wait_s", "250ms", 0.25),
        ("wait_s", "2h", 7200.0),
        ("wait_s", 3, 3.0),
        ("is_open", "Yes", True),
        ("is_open", "off", False),
        ("is_open", True, True),
        ("home", "a b", Path("a b")),
    ],
)
def test_values(name: str, raw: Any, value: Any) -> None:
    """A value may be text, as in a flag, or a YAML value, and may have a unit."""
    parsed = getattr(_merge(**{name: raw}), name)
    assert parsed == value
    assert type(parsed) is type(value) or isinstance(value, Path)


@pytest.mark.parametrize(
    ("name", "raw", "problem"),
    [
        ("flow_bytes", "64MB", "'64MB' is not a number of bytes, such as 64MiB"),
        ("flow_bytes", "1.0001KiB", "'1024.1024' is not a number of bytes, such as 64MiB"),
        ("flow_bytes", "2GiB", "2GiB is more than 1GiB"),
        ("flow_bytes", -1, "-1 is less than 1KiB"),
        ("turns", "0", "0 is less than 1"),
        ("turns", "1.5", "'1.5' is not a whole number"),
        ("turns", True, "'True' is not a whole number"),
        ("wait_s", float("nan"), "nan is less than 0"),
        ("wait_s", "soon", "'soon' is not a number of seconds, such as 10 or 24h"),
        *((name, 10**400, "must be at most 2^100") for name in ("flow_bytes", "turns", "wait_s")),
        ("wait_s", "9" * 20, f"'{'9' * 20}' is not a number of seconds, such as 10 or 24h"),
        ("is_open", "maybe", "'maybe' is not true or false"),
        ("is_open", 1, "'1' is not true or false"),
        ("side", "top", "'top' is not one of left, right"),
        *((name, "a\0b", "must not contain a zero byte") for name in ("name", "home")),
        ("side", ["left"], "\"['left']\" is not a word"),
    ],
)
def test_wrong_values(name: str, raw: Any, problem: str) -> None:
    """The error names the flag of a wrong value and what would be right."""
    with pytest.raises(ConfigError) as raised:
        _merge(**{name: raw})
    assert str(raised.value) == f"--{name.replace('_', '-')}: {problem}"


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: _merge(turns=""), "--turns is empty"),
        (lambda: _merge(environ={"GATE_TURNS": "x"}), "GATE_TURNS: 'x' is not a whole number"),
        *(
            (
                lambda name=name: _merge(environ={name: "1"}),
                f"environment variable {name} is no setting; did you mean GATE_TURNS?",
            )
            for name in ("GATE_TURN", "GATE_turns")
        ),
        (lambda: merge(_Gate, flags={}, environ={}, prefix="GATE_"), "--name is missing"),
        (lambda: _Gate(name="n", turns=10), "turns: 10 is more than 9"),  # not merged
        (lambda: _merge(Path("/absent.yaml")), "--config /absent.yaml: No such file or directory"),
    ],
)
def test_messages(make: Callable[[], Any], problem: str) -> None:
    """The error names a variable, one that is no setting with the nearest name, what is missing, and the file."""
    with pytest.raises(ConfigError) as raised:
        make()
    assert str(raised.value) == problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"turns: 1\nflow-byte: 3\n", ":2: unknown key 'flow-byte'; did you mean 'flow_bytes'?"),
        (b"zzz: 1\n", ":1: unknown key 'zzz'"),
        (b"turns: 1\nside: left\nturns: 2\n", ":3: turns is given twice"),
        (b"turns:\n", ":1: turns has no value; leave the line out to get the default"),
        (b"\nturns: ten\n", ":2: turns: 'ten' is not a whole number"),
        (b"- turns\n", ":1: not a mapping of settings, as in `port: 7601`"),
        (b"turns: [1\n", ":2: not YAML: expected ',' or ']', but got '<stream end>'"),
        (b"turns: 1\n---\nturns: 2\n", ":2: not YAML: but found another document"),
        (
            b"turns: !!python/object/apply:os.system [ls]\n",
            ":1: not YAML: could not determine a constructor for the tag",
        ),
        (b"a: \x00\n", ": not YAML: "),
        (b"name: \xff\n", ": not UTF-8 text"),
    ],
)
def test_wrong_file(tmp_path: Path, text: bytes, problem: str) -> None:
    """Errors name file and line, and no file runs code."""
    file = tmp_path / "gate.yaml"
    file.write_bytes(text)
    with pytest.raises(ConfigError) as raised:
        _merge(file)
    assert str(raised.value).removeprefix("--config ").startswith(f"{file}{problem}")
    assert "\n" not in str(raised.value)


_RAW = st.text("09.-+eE truMiGBh[é", max_size=12) | st.integers() | st.floats() | st.booleans()


@given(st.dictionaries(st.sampled_from([f.name for f in fields(_Gate)]), _RAW), st.none() | st.binary(max_size=60))
def test_any_value_and_any_file(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any], data: bytes | None
) -> None:
    """Whatever is given, the result is a checked configuration or a ConfigError."""
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(data or b"")
    try:
        gate = _merge(file if data is not None else None, **values)
    except ConfigError as error:
        assert str(error)
        return
    check(gate)


def test_shows_defaults() -> None:
    """A help page shows a default as it may be written."""
    shown = {field.name: settings.show_default(field, known) for field, known in settings.settings_of(_Gate)}
    expected = {"flow_bytes": "64MiB", "turns": "", "wait_s": "10", "is_open": "off", "name": ""}
    assert {name: shown[name] for name in expected} == expected
