"""Settings from flags, environment and file: the nearest wins, and each mistake is one line with its place."""

from __future__ import annotations

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Renamed:
    turns: int = setting(1, kind=Kind.COUNT, former="rounds", help="Turns.")


def test_a_former_name_is_known_and_not_beside_the_present_one(tmp_path: Path) -> None:
    """In each source either name will do; with both in one, nothing says which is meant."""
    file = tmp_path / "gate.yaml"

    def merged(environ: dict[str, str], **flags: Any) -> int:
        return merge(_Renamed, flags=flags, environ=environ, prefix="GATE_", file=file).turns

    file.write_text("rounds: 2\n")
    assert (merged({}), merged({"GATE_TURNS": "3"}), merged({"GATE_ROUNDS": "4"}, turns=5)) == (2, 3, 5)
    for flags in ({"turns": 5, "rounds": 6}, {"rounds": 6, "turns": 5}):
        with pytest.raises(ConfigError, match="turns and rounds are two names of one setting: give one"):
            merged({}, **flags)
    with pytest.raises(ConfigError, match="turns and rounds are two names of one setting: give one"):
        merged({"GATE_TURNS": "3", "GATE_ROUNDS": "4"})


def _merge(file: Path | None = None, environ: dict[str, str] | None = None, **flags: Any) -> _Gate:
    return merge(_Gate, flags={"name": "n", **flags}, environ=environ or {}, prefix="GATE_", file=file)


def test_the_nearest_source_wins(tmp_path: Path) -> None:
    """Flags > environment > file > defaults, setting by setting."""
    file = tmp_path / "gate.yaml"
    file.write_text("turns: 2\nside: right\nwait_s: 1.5\nhome: /tmp\n")
    gate = _merge(file, {"GATE_TURNS": "3", "GATE_SIDE": "left", "PATH": "/bin"}, turns="4", wait_s=None)
    assert gate == _Gate(name="n", turns=4, side="left", wait_s=1.5, home=Path("/tmp"))


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
        ("flow_bytes", "64MB", "--flow-bytes: '64MB' is not a number of bytes, such as 64MiB"),
        ("flow_bytes", "1.0001KiB", "--flow-bytes: '1024.1024' is not a number of bytes, such as 64MiB"),
        ("flow_bytes", "2GiB", "--flow-bytes: 2GiB is more than 1GiB"),
        ("flow_bytes", -1, "--flow-bytes: -1 is less than 1KiB"),
        ("turns", "0", "--turns: 0 is less than 1"),
        ("turns", "1.5", "--turns: '1.5' is not a whole number"),
        ("turns", True, "--turns: 'True' is not a whole number"),
        ("turns", "", "--turns is empty"),
        ("wait_s", float("nan"), "--wait-s: nan is less than 0"),
        ("wait_s", "soon", "--wait-s: 'soon' is not a number of seconds, such as 10 or 24h"),
        ("flow_bytes", 10**400, "--flow-bytes: must be at most 2^100"),
        ("turns", 10**400, "--turns: must be at most 2^100"),
        ("wait_s", 10**400, "--wait-s: must be at most 2^100"),
        ("wait_s", "9" * 20, f"--wait-s: '{'9' * 20}' is not a number of seconds, such as 10 or 24h"),
        ("is_open", "maybe", "--is-open: 'maybe' is not true or false"),
        ("is_open", 1, "--is-open: '1' is not true or false"),
        ("side", "top", "--side: 'top' is not one of left, right"),
        ("name", "a\0b", "--name: must not contain a zero byte"),
        ("home", "a\0b", "--home: must not contain a zero byte"),
        ("side", ["left"], "--side: \"['left']\" is not a word"),
    ],
)
def test_wrong_values(name: str, raw: Any, problem: str) -> None:
    """The error names the flag of a wrong value and what would be right."""
    with pytest.raises(ConfigError) as raised:
        _merge(**{name: raw})
    assert str(raised.value) == problem


def test_wrong_variable() -> None:
    """The error names a wrong environment variable."""
    with pytest.raises(ConfigError, match=r"^GATE_TURNS: 'x' is not a whole number$"):
        _merge(environ={"GATE_TURNS": "x"})


@pytest.mark.parametrize("variable", ["GATE_TURN", "GATE_turns"])
def test_unknown_variable(variable: str) -> None:
    """An unknown variable with the prefix is an error with the nearest name."""
    with pytest.raises(ConfigError, match=f"^environment variable {variable} is no setting; did you mean GATE_TURNS"):
        _merge(environ={variable: "1"})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("turns: 1\nflow-byte: 3\n", ":2: unknown key 'flow-byte'; did you mean 'flow_bytes'?"),
        ("zzz: 1\n", ":1: unknown key 'zzz'"),
        ("turns: 1\nside: left\nturns: 2\n", ":3: turns is given twice"),
        ("turns:\n", ":1: turns has no value; leave the line out to get the default"),
        ("\nturns: ten\n", ":2: turns: 'ten' is not a whole number"),
        ("- turns\n", ":1: not a mapping of settings, as in `port: 7601`"),
        ("turns: [1\n", ":2: not YAML: expected ',' or ']', but got '<stream end>'"),
        ("turns: 1\n---\nturns: 2\n", ":2: not YAML: but found another document"),
        (
            "turns: !!python/object/apply:os.system [ls]\n",
            ":1: not YAML: could not determine a constructor for the tag",
        ),
        ("a: \x00\n", ": not YAML: "),
    ],
)
def test_wrong_file(tmp_path: Path, text: str, problem: str) -> None:
    """Errors name file and line, and no file runs code."""
    file = tmp_path / "gate.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        _merge(file)
    assert str(raised.value).startswith(f"{file}{problem}")
    assert "\n" not in str(raised.value)


def test_empty_file(tmp_path: Path) -> None:
    """A file of comments alone sets nothing."""
    file = tmp_path / "gate.yaml"
    file.write_text("# nothing yet\n")
    assert _merge(file) == _merge()


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    """The error names a file that is missing or no text."""
    with pytest.raises(ConfigError, match=r"^--config .*/absent.yaml: No such file or directory$"):
        _merge(tmp_path / "absent.yaml")
    file = tmp_path / "latin.yaml"
    file.write_bytes(b"name: \xff\n")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        _merge(file)


def test_required() -> None:
    """A setting without a default must be given."""
    with pytest.raises(ConfigError, match=r"^--name is missing$"):
        merge(_Gate, flags={}, environ={}, prefix="GATE_")


def test_checked_when_made_by_hand() -> None:
    """Bounds also hold for an instance that was not merged."""
    with pytest.raises(ConfigError, match=r"^turns: 10 is more than 9$"):
        _Gate(name="n", turns=10)


_RAW = st.text("09.-+eE truMiGBh[é", max_size=12) | st.integers() | st.floats() | st.booleans()


@given(st.dictionaries(st.sampled_from([f.name for f in fields(_Gate)]), _RAW))
def test_any_value(values: dict[str, Any]) -> None:
    """Whatever is given, the result is a checked configuration or a ConfigError."""
    try:
        gate = _merge(**values)
    except ConfigError:
        return
    check(gate)


@given(st.binary(max_size=60))
def test_any_file(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """Any file is a configuration or a ConfigError."""
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(data)
    try:
        _merge(file)
    except ConfigError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("name", "shown"), [("flow_bytes", "64MiB"), ("turns", ""), ("wait_s", "10"), ("is_open", "off"), ("name", "")]
)
def test_shows_defaults(name: str, shown: str) -> None:
    """A help page shows a default as it may be written."""
    field, known = next(item for item in settings.settings_of(_Gate) if item[0].name == name)
    assert settings.show_default(field, known) == shown
