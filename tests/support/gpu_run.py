"""Which of the files that run on a GPU have changed since they last ran there.

On a machine with a GPU `python tests/support/gpu_run.py` prints what `docs/results/gpu-run.json` keeps: the commit, the
GPU, and a digest of each file.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

__all__ = ["changed_files", "digests_of_files"]

_ROOT = Path(__file__).parents[2]
_PATTERNS = (
    "kernels/**/*.py",
    "kernels/**/*.cu",
    "kernels/**/*.cuh",
    "streamer/device/*.py",
    "streamer/flush/device_*.py",
    "streamer/taps/fbgemm.py",
)


def digests_of_files() -> dict[str, str]:
    """Return git's digest of each file that runs on a GPU, by path in the checkout."""
    paths = sorted({path for pattern in _PATTERNS for path in _ROOT.glob(pattern) if path.name != "__init__.py"})
    return {str(path.relative_to(_ROOT)): _git_digest(path.read_bytes()) for path in paths}


def changed_files(run: dict[str, str]) -> list[str]:
    """Return the files that differ from those of a run, or that it did not have, by path."""
    return [path for path, digest in digests_of_files().items() if run.get(path) != digest]


def _git_digest(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%s" % (len(data), data), usedforsecurity=False).hexdigest()


def _main() -> None:
    import torch

    commit = subprocess.run(
        ["git", "-C", _ROOT, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True
    )
    run = {"commit": commit.stdout.strip(), "device": torch.cuda.get_device_name(), "files": digests_of_files()}
    print(json.dumps(run, indent=1))


if __name__ == "__main__":
    _main()
