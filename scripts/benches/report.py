"""The report of `headrace bench all`: results.json, written anew after each part, and report.md made from it.

A second run with the same directory continues where the first one stopped. It must measure the same amounts: figures of
two scales do not belong into one report.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.schemas.errors import ConfigError
from headrace.scripts.benches.harness import machine_facts
from headrace.scripts.benches.targets import judge

__all__ = ["FAILED", "MEASURED", "NOT_MEASURED", "Results", "load_average", "render_page"]

MEASURED, FAILED, NOT_MEASURED = "measured", "failed", "not measured"
_RESULTS_NAME, _VERSION = "results.json", 1
_PACKAGES = "headrace torch torchrec fbgemm-gpu-cpu numpy rocksdict thriftpy2 grpcio redis hiredis matplotlib"


class Results:
    """What was measured so far, and the file that keeps it; `content` is the whole JSON."""

    def __init__(self, folder: Path, *, scale: float, rounds: int | None) -> None:
        """Read the results in a report's directory, or begin new ones; without `rounds`, with each part's own.

        Raises:
            ConfigError: The results there have other settings or come from another machine, or are not results.
        """
        self._path = folder / _RESULTS_NAME
        wanted = {"version": _VERSION, "scale": scale, "rounds": rounds, "machine": machine_facts()}
        if not self._path.exists():
            facts = {"processor": _processor(), "packages": _packages(), "begun": _now()}
            self.content: dict[str, Any] = {**wanted, **facts, "load_at_start": load_average(), "parts": {}}
            return
        try:
            self.content = json.loads(self._path.read_text("utf-8"))
            found = {name: self.content[name] for name in wanted}
        except (ValueError, KeyError, TypeError) as exc:
            raise ConfigError(
                f"--report {folder}: {_RESULTS_NAME} there is not of this bench: choose another directory"
            ) from exc
        for name, value in wanted.items():
            if found[name] != value:
                raise ConfigError(
                    f"--report {folder}: has figures of {name} {found[name]}, not {value}: choose another directory, "
                    f"or remove its {_RESULTS_NAME}"
                )

    def has(self, name: str) -> bool:
        """Return whether a part is measured."""
        return bool(self.content["parts"].get(name, {}).get("status") == MEASURED)

    @property
    def failed(self) -> list[str]:
        """Parts that failed."""
        return [name for name, part in self.content["parts"].items() if part["status"] == FAILED]

    def add(self, name: str, status: str, *, begun: float, load_before: list[float], **facts: Any) -> None:
        """Add the outcome of a part that began at `begun`, seconds since 1970, and write the file.

        `facts` are `figures` of a `MEASURED` part, otherwise the `reason`.
        """
        load = load_average()
        part = {"status": status, "seconds": time.time() - begun, "load_before": load_before, "load_after": load}
        self.content["parts"][name] = part | facts
        self.content["ended"], self.content["load_at_end"] = _now(), load
        new = self._path.with_suffix(".new")
        try:
            new.write_text(json.dumps(self.content, indent=1) + "\n", "utf-8")
            os.replace(new, self._path)
        except OSError as exc:
            raise ConfigError(f"--report: {self._path} cannot be written: {exc.strerror}") from exc


def load_average() -> list[float]:
    """Return the load average of the last 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


def _packages() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES.split():
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of an extra that is not installed
    return versions


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def render_page(
    content: Mapping[str, Any],
    titles: Mapping[str, str],
    charts: Mapping[str, Sequence[tuple[str, str]]],
    hints: Sequence[str],
) -> str:
    """Return the results' content as Markdown, in the order of `titles`, with (title, path) of each part's charts."""
    machine = content["machine"]
    rounds = "each bench's own rounds" if content["rounds"] is None else f"{content['rounds']} rounds"
    lines = [
        "# Headrace on this machine",
        "",
        f"- {machine['cores']} processors, {content['processor']}, {machine['memory_bytes'] / 2**30:.1f} GiB; "
        f"{machine['system']}; Python {machine['python']}",
        f"- {', '.join(f'{name} {version}' for name, version in content['packages'].items())}",
        f"- {content['begun']} to {content.get('ended', 'now')}; load average (1, 5, 15 minutes) at the start "
        f"{_loads(content['load_at_start'])}, at the end {_loads(content.get('load_at_end', []))}",
        f"- scale {content['scale']:g}, {rounds}; each part's own load is below its table",
        "",
    ]
    if hints:
        lines += ["Not measured, because it is not installed:", "", *(f"- {hint}" for hint in hints), ""]
    parts = {name: content["parts"][name] for name in titles if name in content["parts"]}
    lines += ["| | figures with a target | met | missed |", "|---|---|---|---|"]
    lines += [_summary(name, titles[name], part) for name, part in parts.items()]
    for name, part in parts.items():
        lines += ["", f"## {titles[name]}", "", *_section(name, part, charts.get(name, ()))]
    return "\n".join(lines).rstrip() + "\n"


def _summary(name: str, title: str, part: Mapping[str, Any]) -> str:
    if part["status"] != MEASURED:
        return f"| {title} | **{part['status']}** | | |"
    verdicts = [verdict for verdict in judge(name, part["figures"]) if verdict.is_met is not None]
    missed = [f"`{verdict.name}`" for verdict in verdicts if not verdict.is_met]
    return f"| {title} | {len(verdicts)} | {len(verdicts) - len(missed)} | {', '.join(missed)} |"


def _section(name: str, part: Mapping[str, Any], charts: Sequence[tuple[str, str]]) -> Iterator[str]:
    if part["status"] != MEASURED:
        yield f"{'**Failed**' if part['status'] == FAILED else 'Not measured'}: {part['reason']}"
        return
    if verdicts := judge(name, part["figures"]):
        yield from ("| figure | seen | target | met | of |", "|---|---|---|---|---|")
        for verdict in verdicts:
            met = {True: "yes", False: "**no**", None: ""}[verdict.is_met]
            yield f"| `{verdict.name}` | {verdict.value} | {verdict.target} | {met} | {verdict.ratio_of} |"
        yield ""
    before, after = _loads(part["load_before"]), _loads(part["load_after"])
    yield f"`{name}` took {part['seconds']:.0f} s; load before {before}, after {after}."
    for title, path in charts:
        yield from ("", f"![{title}]({path})")


def _loads(loads: Sequence[float]) -> str:
    return ", ".join(f"{load:.1f}" for load in loads)
