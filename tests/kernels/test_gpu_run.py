"""The page on kernels names the commit that last ran on a GPU, and each file that has changed since."""

from __future__ import annotations

import json
import re
from pathlib import Path

from gpu_run import changed_files

_ROOT = Path(__file__).parents[2]


def test_the_page_names_what_has_changed_since_a_gpu_ran_it() -> None:
    """A change of a file that runs on a GPU goes with a word on the page that claims that it passed there."""
    run = json.loads((_ROOT / "docs/results/gpu-run.json").read_text())
    page = (_ROOT / "docs/kernels.md").read_text()
    assert f"At commit {run['commit']}" in page
    _, _, claim = page.partition("**No GPU has run these files")
    claim, _, _ = claim.partition("The suite runs all of them")
    assert sorted(re.findall(r"`([^`]+)`", claim)) == changed_files(run["files"])
