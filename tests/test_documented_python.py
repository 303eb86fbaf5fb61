"""What the pages show in Python is there: names, methods and arguments, also where the suite runs no snippet."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from documented_blocks import blocks_of

import headrace
from headrace import EmbeddingReader, EmbeddingReplica, RawEmbeddingStreamer, ReplicaConfig, StreamerConfig

ROOT = Path(__file__).resolve().parent.parent
_PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
# How the pages call their objects.
_OBJECTS: dict[str, type[Any]] = {
    "streamer": RawEmbeddingStreamer,
    "replica": EmbeddingReplica,
    "reader": EmbeddingReader,
}
# Whose fields a constructor takes as its other arguments.
_SETTINGS: dict[object, type[Any]] = {RawEmbeddingStreamer: StreamerConfig, EmbeddingReplica: ReplicaConfig}
_SPAN = re.compile(rf"(?<!`)`([A-Za-z_][\w.]*\([^`\n]*\)|(?:{'|'.join(_OBJECTS)})\.\w+)`(?!`)")


def _wrong(code: str) -> Iterator[str]:
    """Yield what a snippet uses of Headrace and is not there; raise SyntaxError if it is not Python."""
    tree = compile(textwrap.dedent(code), "snippet", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names: dict[str, object] = dict(_OBJECTS) | {name: getattr(headrace, name) for name in headrace.__all__}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "headrace":
            try:
                module = importlib.import_module(str(node.module))
            except ModuleNotFoundError as missing:
                if str(missing.name).startswith("headrace"):
                    yield str(node.module)
                continue  # an integration, whose framework is not installed
            names |= {alias.asname or alias.name: getattr(module, alias.name, None) for alias in node.names}
            yield from (f"{node.module}.{alias.name}" for alias in node.names if not hasattr(module, alias.name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = names.get(node.value.id)
            if owner is not None and not hasattr(owner, node.attr):
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Call):
            yield from _wrong_arguments(node, names)


def _wrong_arguments(call: ast.Call, names: dict[str, object]) -> Iterator[str]:
    called = ast.unparse(call.func)
    owner, _, method = called.rpartition(".")
    function: Any = getattr(names.get(owner), method, None) if owner else names.get(called)
    if not callable(function):
        return
    # The pages write methods behind their class too.
    has_self = inspect.isclass(names.get(owner)) and inspect.isfunction(inspect.getattr_static(names[owner], method))
    given = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
    positions = [argument for argument in call.args if not _is_left_out(argument)]
    is_whole = len(positions) == len(call.args) and len(given) == len(call.keywords)
    signature = inspect.signature(function)
    bind = signature.bind if is_whole else signature.bind_partial
    try:
        bind(*([None] * has_self), *positions, **given)
    except TypeError as error:
        yield f"{called}: {error}"
    if settings := _SETTINGS.get(function):
        known = {*signature.parameters, *settings.__dataclass_fields__}
        yield from (f"{called}: no setting {name}" for name in given if name not in known)


def _is_left_out(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Starred) or (isinstance(argument, ast.Constant) and argument.value is ...)


@pytest.mark.parametrize("page", _PAGES)
def test_snippets_use_what_there_is(page: str) -> None:
    """Python blocks compile; what they, and code amid the text, use of Headrace is there and takes these arguments."""
    text = (ROOT / page).read_text()
    wrong = [
        f"{page}:{block.line}: {what}"
        for block in blocks_of(text)
        if block.language == "python"
        for what in _wrong(block.text)
    ]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    wrong += [f"{page}: `{span}`: {what}" for span in _spans(prose) for what in _wrong(span)]
    assert wrong == []


def _spans(prose: str) -> Iterator[str]:
    """Yield the code amid a text that is a Python expression."""
    for span in _SPAN.findall(prose):
        with contextlib.suppress(SyntaxError):
            ast.parse(span)
            yield span


def test_what_is_not_there_is_found() -> None:
    """A wrong import, method, argument, setting or syntax is told; what is left out with `...` is not asked for."""
    assert list(_wrong("from headrace.streamer import instal")) == ["headrace.streamer.instal"]
    assert list(_wrong("from headrace.streamers import install")) == ["headrace.streamers"]
    assert list(_wrong("streamer.flsh()")) == ["streamer.flsh"]
    assert list(_wrong("rows = await reader.get('t')")) == ["reader.get: missing a required argument: 'row_ids'"]
    assert list(_wrong("streamer.attach(model, optimizer, publishes='all')")) == [
        "streamer.attach: got an unexpected keyword argument 'publishes'"
    ]
    assert list(_wrong("RawEmbeddingStreamer(address, run='r', tsl=True)")) == ["RawEmbeddingStreamer: no setting tsl"]
    assert list(_wrong("RawEmbeddingStreamer(..., device_pipeline=True)")) == []
    with pytest.raises(SyntaxError):
        list(_wrong("streamer.flush("))
    assert list(_spans("`streamer.step()`, `f(x` and `replica.lookup`, not `headrace serve` or `x.y`")) == [
        "streamer.step()",
        "replica.lookup",
    ]
