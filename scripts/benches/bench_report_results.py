"""The raw figures of `headrace bench all`: one JSON file, written anew after each part, so that a kill loses one part.

A second run with the same directory goes on where the first has ended. It has to measure the same amounts: figures of
two scales do not belong into one report.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import time
from pathlib import Path
from typing import Any

from headrace.schemas.errors import ConfigError
from headrace.scripts.benches.bench_report import machine_facts

__all__ = ["FAILED", "MEASURED", "NOT_MEASURED", "RESULTS_NAME", "Results", "load_average"]

RESULTS_NAME = "results.json"
MEASURED, FAILED, NOT_MEASURED = "measured", "failed", "not measured"

_VERSION = 1
_PACKAGES = (
    *("headrace", "torch", "torchrec", "fbgemm-gpu-cpu", "numpy", "rocksdict", "thriftpy2", "grpcio", "redis"),
    *("hiredis", "matplotlib"),
)


class Results:
    """What was measured so far, and where it is kept.

    Attributes:
        content: The whole JSON.
    """

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        """Use `open`."""
        self._path = path
        self.content = content

    @classmethod
    def open(cls, folder: Path, *, scale: float, rounds: int | None) -> Results:
        """Read the results in a directory, or begin some.

        Args:
            folder: The report's directory, which exists.
            scale: Of what will be measured.
            rounds: Of it; None for each part's own.

        Raises:
            ConfigError: What is there was measured with other settings or on another machine, or is no such file.
        """
        path = folder / RESULTS_NAME
        wanted = {"version": _VERSION, "scale": scale, "rounds": rounds, "machine": machine_facts()}
        if not path.exists():
            facts = {
                "processor": _processor(),
                "packages": _packages(),
                "begun": _now(),
                "load_at_start": load_average(),
            }
            return cls(path, {**wanted, **facts, "parts": {}})
        try:
            content = json.loads(path.read_text("utf-8"))
            found = {name: content[name] for name in wanted}
        except (ValueError, KeyError, TypeError) as exc:
            raise ConfigError(f"--report {folder}: {RESULTS_NAME} there is not of this bench: choose another") from exc
        for name, value in wanted.items():
            if found[name] != value:
                raise ConfigError(
                    f"--report {folder}: has figures of {name} {found[name]}, not {value}: choose another directory, "
                    f"or remove its {RESULTS_NAME}"
                )
        return cls(path, content)

    def has(self, name: str) -> bool:
        """Whether a part is measured."""
        return bool(self.content["parts"].get(name, {}).get("status") == MEASURED)

    @property
    def failed(self) -> list[str]:
        """Parts that failed."""
        return [name for name, part in self.content["parts"].items() if part["status"] == FAILED]

    def note(self, name: str, status: str, *, begun: float, load_before: list[float], **facts: Any) -> None:
        """Keep what a part has given, and write the file.

        Args:
            name: Of the part.
            status: `MEASURED` with `figures`, `FAILED` or `NOT_MEASURED` with `reason`.
            begun: When it began, seconds since 1970.
            load_before: Load averages then.
            facts: What else there is.

        Raises:
            ConfigError: The file cannot be written.
        """
        seconds = time.time() - begun
        self.content["parts"][name] = {
            "status": status,
            "seconds": seconds,
            "load_before": load_before,
            "load_after": load_average(),
            **facts,
        }
        self.content["ended"], self.content["load_at_end"] = _now(), load_average()
        new = self._path.with_suffix(".new")
        try:
            new.write_text(json.dumps(self.content, indent=1) + "\n", "utf-8")
            os.replace(new, self._path)
        except OSError as exc:
            raise ConfigError(f"--report: {self._path} cannot be written: {exc.strerror}") from exc


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


def load_average() -> list[float]:
    """Return the load average of the last 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def _packages() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an extra
    return versions


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"
