"""Which releases of torch, FBGEMM and TorchRec go together, and what to install where they do not.

FBGEMM is compiled against one minor release of torch: with any other, `import fbgemm_gpu` raises OSError, "Could not
load this library". No package says so in its requirements, so pip installs such pairs.

Source: `_fbgemm_torch_compat_table` in `fbgemm_gpu/__init__.py`, fbgemm-gpu 1.9.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

__all__ = [
    *("RELEASES", "TorchRelease", "explain_load_failure"),
    *("installed_fbgemm", "installed_version", "is_same_minor", "release_for"),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchRelease:
    """Versions that the suites of `scripts/check-versions` have passed with; their minor releases go together."""

    torch: str
    fbgemm: str
    torchrec: str


RELEASES = (
    TorchRelease(torch="2.12.1", fbgemm="1.7.0", torchrec="1.7.0"),
    TorchRelease(torch="2.13.0", fbgemm="1.8.0", torchrec="1.8.0"),
    TorchRelease(torch="2.14.1", fbgemm="1.9.0", torchrec="1.9.2"),
)
"""From the oldest torch on."""


def release_for(torch: str) -> TorchRelease | None:
    """Return what goes with a version of torch, such as `2.13.0+cpu`; None if it is not known."""
    return next((release for release in RELEASES if is_same_minor(release.torch, torch)), None)


def is_same_minor(one: str, other: str) -> bool:
    """Return whether two versions are of one minor release."""
    return one.split(".")[:2] == other.split(".")[:2]


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution; None if there is none of this name."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def installed_fbgemm(version_of: Callable[[str], str | None] = installed_version) -> tuple[str, str] | None:
    """Return name and version of the FBGEMM that is installed, for a GPU or a CPU; None without any."""
    names = ("fbgemm-gpu", "fbgemm-gpu-cpu")
    return next(((name, version) for name in names if (version := version_of(name)) is not None), None)


def explain_load_failure(error: BaseException, version_of: Callable[[str], str | None] = installed_version) -> str:
    """Return one line for an error of `import fbgemm_gpu`: with which torch, and what to install instead."""
    cause = " ".join(str(error.__cause__ or error).split())
    fbgemm, torch = installed_fbgemm(version_of), version_of("torch")
    if fbgemm is None or torch is None:
        return f"fbgemm_gpu cannot be loaded: {cause}"
    name, version = fbgemm
    failed = f"{name} {version} cannot be loaded with torch {torch}"
    release = release_for(torch)
    if release is None or is_same_minor(release.fbgemm, version):
        return f"{failed}: {cause}"
    return f"{failed}: pip install --no-deps {name}=={release.fbgemm} torchrec=={release.torchrec}"
