"""Releases of torch, FBGEMM and TorchRec that go together, and what is said of those that do not."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from headrace.paramserver.system.torch_releases import RELEASES, explain_load_failure, release_for

_UNDEFINED = OSError("Could not load this library: a.so")
_UNDEFINED.__cause__ = OSError("a.so: undefined\n symbol")


@pytest.mark.parametrize(
    ("installed", "end"),
    [
        ({"torch": "2.13.0+cpu", "fbgemm-gpu-cpu": "1.9.0"}, "fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0"),
        ({"torch": "2.14.0", "fbgemm-gpu": "1.8.0"}, "fbgemm-gpu==1.9.0 torchrec==1.9.2"),
        ({"torch": "2.14.0", "fbgemm-gpu": "1.9.3"}, "with torch 2.14.0: a.so: undefined symbol"),
        ({"torch": "2.99.0", "fbgemm-gpu": "1.9.0"}, "with torch 2.99.0: a.so: undefined symbol"),
        ({"torch": "2.13.0"}, "fbgemm_gpu cannot be loaded: a.so: undefined symbol"),
    ],
)
def test_what_is_said_of_a_pair_that_does_not_load(installed: dict[str, str], end: str) -> None:
    """A pair of other releases is told what to install; else the loader's own reason stands in the one line."""
    line = explain_load_failure(_UNDEFINED, installed.get)
    assert line.endswith(end) and "\n" not in line


def test_extras_allow_every_release() -> None:
    """What `headrace[torchrec]` asks for takes each release in the table, and constraints.txt names one of them."""
    root = Path(__file__).resolve().parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    asked = {each.name: each for each in map(Requirement, project["optional-dependencies"]["torchrec"])}
    assert all(asked["torch"].specifier.contains(release.torch) for release in RELEASES)
    assert all(asked["fbgemm-gpu-cpu"].specifier.contains(release.fbgemm) for release in RELEASES)
    pinned = dict(line.split("==") for line in (root / "constraints.txt").read_text().split() if "==" in line)
    tested = release_for(pinned["torch"])
    assert tested is not None
    assert (pinned["fbgemm-gpu-cpu"], pinned["torchrec"]) == (tested.fbgemm, tested.torchrec)
