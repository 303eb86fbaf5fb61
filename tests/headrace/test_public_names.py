"""The front door: every public name is there, and documented. (That none costs torch before use: `test_cli.py`.)"""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import headrace
from headrace import res, streamer
from headrace.paramserver import replica
from headrace.schemas import errors
from headrace.schemas.extras import install_command

_PAGES = Path(__file__).parents[2] / "docs" / "api"
# Where users import from.
_PACKAGES = (headrace, res, streamer, replica, errors)


def test_every_public_name_is_there() -> None:
    """Each name of `__all__` can be imported and is listed; others are not."""
    for name in headrace.__all__:
        assert getattr(headrace, name) is not None and name in dir(headrace)
    assert not hasattr(headrace, "Nothing")


_HIDE = """
import sys
from importlib.abc import MetaPathFinder
class Hidden(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
"""


def _run_without(module: str, program: str) -> list[str]:
    """Return the lines that a program prints where a module is not installed."""
    command = [sys.executable, "-c", _HIDE.format(module=module) + program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_name_that_needs_torch_says_so() -> None:
    """Where torch is not installed, the error is one line with what to do; names for readers are there all the same."""
    program = """
from headrace import EmbeddingReader, HeadraceError, ReplicaConfig, ServerProcess, client_tls_context, load_token
for name in ("EmbeddingReplica", "serve_model", "RawEmbeddingStreamer", "StreamerConfig"):
    try:
        exec(f"from headrace import {name}")
    except ImportError as exc:
        print(exc)
"""
    assert _run_without("torch", program) == [
        f"headrace.{name} needs PyTorch: {install_command('torch')}"
        for name in ("EmbeddingReplica", "serve_model", "RawEmbeddingStreamer", "StreamerConfig")
    ]


def test_another_module_that_is_missing_is_named() -> None:
    """To install torch helps nobody whose installation lacks something else."""
    program = """
try:
    from headrace import EmbeddingReader
except ModuleNotFoundError as exc:
    print(exc)
"""
    assert _run_without("thriftpy2", program) == ["No module named 'thriftpy2'"]


def _documented() -> Iterator[Any]:
    """Everything that the Python pages have mkdocstrings show: objects, and of a module all its public names."""
    for page in _PAGES.glob("*.md"):
        for path in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
            try:
                module = importlib.import_module(path)
            except ModuleNotFoundError as exc:
                if not str(exc.name).startswith("headrace"):
                    continue  # an integration whose framework is not installed
                home, _, name = path.rpartition(".")
                yield getattr(importlib.import_module(home), name)
            else:
                yield from (getattr(module, name) for name in module.__all__)


def test_every_public_name_is_in_the_reference() -> None:
    """What can be imported from the public packages, errors too, has its place in `docs/api/`."""
    public = {
        f"{package.__name__}.{name}": getattr(package, name)
        for package in _PACKAGES
        for name in package.__all__
        if name != "__version__"
    }
    documented = list(_documented())
    missing = [name for name, value in public.items() if not any(value is one for one in documented)]
    assert missing == []


def test_what_is_in_the_reference_says_what_it_does() -> None:
    """Classes, public methods and functions have docstrings; coroutines say what cancellation leaves."""
    silent, uncancelled = [], []
    for value in _documented():
        members = inspect.getmembers_static(value) if inspect.isclass(value) else []
        found = [(name, getattr(member, "__func__", member)) for name, member in members if not name.startswith("_")]
        for name, member in [*found, ("", value)]:
            of_ours = getattr(member, "__module__", "headrace").startswith("headrace")
            if not (inspect.isfunction(member) or inspect.isclass(member)) or not of_ours:
                continue
            text = inspect.getdoc(member) or ""
            where = f"{getattr(value, '__name__', value)}.{name}"
            if not text:
                silent.append(where)
            if inspect.iscoroutinefunction(member) and "Cancellation:" not in text:
                uncancelled.append(where)
    assert silent == []
    assert uncancelled == []
