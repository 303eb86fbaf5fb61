"""Each refusal of `attach`, `restore` and `res.install` names a way on."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

STREAMER = Path(__file__).parents[3] / "streamer"
FILES = [
    *("api.py", "dense_restore.py", "res_stand_in.py", "restore.py", "restore_source.py", "resume.py"),
    *("table_source.py", "device/dirty_rows.py", "flush/device_pipeline.py", "flush/flusher.py"),
    *(path.relative_to(STREAMER).as_posix() for path in sorted((STREAMER / "taps").rglob("*.py"))),
]
# What ends a refusal: the argument that leaves the table out, or what to do.
WAY_ON = re.compile(
    r"or_without\(|\{(without|instead|advice)\}|describe_near\(|close\(|docs/|(dense|tables|model_name|step)=|neither|"
    r"must be|\b(attach|build|call|cut|give|leave|make|omit|pass|publish|raise it|return|say|set|take|train|use)\b"
)
# Raised again by their callers, who know the table.
IN_PARTS = {"rule_of", "load_fbgemm"}


def refusals() -> list[tuple[str, str]]:
    """Return where each refusal is, and its source."""
    found = []
    for name in FILES:
        text = (STREAMER / name).read_text()
        for function in ast.walk(ast.parse(text)):
            if not isinstance(function, ast.FunctionDef) or function.name in IN_PARTS:
                continue
            for each in ast.walk(function):
                if isinstance(each, ast.Raise) and isinstance(each.exc, ast.Call):
                    source = ast.get_source_segment(text, each.exc) or ""
                    if re.match("(UnsupportedModel|Config|SpecMismatch)Error", source):
                        found.append((f"{name}:{function.name}:{each.lineno - function.lineno}", source))
    return found


@pytest.mark.parametrize(("where", "source"), [pytest.param(*each, id=each[0]) for each in refusals()])
def test_each_refusal_names_a_way_on(where: str, source: str) -> None:
    """A refusal that says only what is wrong leaves its reader alone."""
    message = "".join(
        part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else ""
        for part in ast.walk(ast.parse(source))
    )
    assert WAY_ON.search(message) or WAY_ON.search(source), f"{where} says no way on: {source}"
