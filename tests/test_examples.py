"""The examples run as they stand, from a checkout, and each says at its top how to run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
_WITH_HEADER = (
    "two_tower.py",
    "dlrm_torchrec.py",
    "quickstart.ipynb",
    "compose/compose.yaml",
    "node/headrace.js",
    "cpp/headrace.cpp",
)
_ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


def _run(name: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], cwd=folder, env=_ENVIRON, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", _WITH_HEADER)
def test_each_example_says_how_to_run_it(name: str) -> None:
    """The first lines have a command with the example's own name."""
    head = "".join((EXAMPLES / name).read_text().splitlines(keepends=True)[:16])
    assert f"examples/{name}" in head


def test_two_tower_retrieves_with_rows_that_are_fresh(tmp_path: Path) -> None:
    """The model that reads from the replica gets better while the trainer trains, and ends with the trainer's rows."""
    told = _run("two_tower.py", tmp_path)
    rates = [float(rate) for rate in re.findall(r"^part +\d+: +([\d.]+)%", told, re.MULTILINE)]
    assert len(rates) == 10
    assert sum(rates[-3:]) / 3 > rates[0] + 10
    assert re.search(r"rows visible after \d+ ms", told)
    assert "rows of trainer, server and replica are equal" in told


@pytest.mark.torchrec
def test_dlrm_is_served_as_it_was_trained(tmp_path: Path) -> None:
    """The served DLRM computes what the trained one does, and no row differs."""
    told = _run("dlrm_torchrec.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", told)]
    assert losses[-1] < losses[0]
    assert "served equals trained at step 200 of epoch 1, bit for bit\n" in told
    assert "trainer = server: True, server = replica: True" in told


@pytest.mark.filterwarnings("ignore")  # of Jupyter's
def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell of the notebook runs, in order, in a kernel of this environment."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient and ipykernel are not installed")
    pytest.importorskip("ipykernel", reason="nbclient and ipykernel are not installed")
    nbformat = pytest.importorskip("nbformat")
    for name, value in _ENVIRON.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=100, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    told = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "an update was visible after" in told
