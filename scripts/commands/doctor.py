"""`headrace doctor`: check this machine, a configuration and a running server, and advise on problems."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.markup import escape

from headrace.paramserver.config.server_settings import ENV_PREFIX, ServerConfig
from headrace.paramserver.observe.problems import Severity, find_problems
from headrace.paramserver.observe.status_query import StatusAccess, ask_shards
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.system.flags import settings_sources
from headrace.schemas.errors import HeadraceError
from headrace.scripts.commands.doctor_checks import (
    Finding,
    Level,
    check_directory,
    check_disk,
    check_gpu,
    check_memory,
    check_open_files,
    check_ports,
    check_protection,
    check_versions,
    note,
    ok,
    problem,
)
from headrace.scripts.commands.server_flags import Access, AsJson, ServerAddress, option, with_server_flags

__all__ = ["check_clock", "doctor"]

_TIMEOUT_S = 5.0
_MAX_CLOCK_S = 1.0
_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.PROBLEM: "bold red"}


@with_server_flags
def doctor(
    *,
    data: Annotated[Path | None, option("Data directory of a server.", "DIR")] = None,
    config: Annotated[
        Path | None, option("The server's YAML file; environment variables apply as for `serve`.", "FILE")
    ] = None,
    server: ServerAddress = None,
    metrics: Annotated[str | None, option("Its metrics port, to compare the clocks.", "HOST:PORT")] = None,
    as_json: AsJson = False,
    access: Access,
) -> int:
    """Check this machine, a server's configuration and a running server, and advise on each finding.

    Nothing is changed. --data and --config check what `headrace serve` would use. The exit code is 1 if there is a
    problem.
    """
    findings = [*check_versions(), *check_gpu()]
    if data is not None or config is not None:
        findings += _check_server_settings(data, config)
    if server is not None:
        try:
            findings += _check_server(access(server, timeout_s=_TIMEOUT_S))
        except HeadraceError as exc:
            advice = "Is it running, is this its address, are token and TLS those it asks for?"
            findings.append(problem("server", str(exc), advice))
    if metrics is not None:
        findings.append(check_clock(metrics))
    has_problem = any(finding.level is Level.PROBLEM for finding in findings)
    if as_json:
        facts = [{**asdict(finding), "level": finding.level.value} for finding in findings]
        print(json.dumps({"is_fit": not has_problem, "findings": facts}, indent=2))
    else:
        _show(findings, Console())
    return 1 if has_problem else 0


def _check_server_settings(data: Path | None, file: Path | None) -> Iterator[Finding]:
    environ, file = settings_sources(ENV_PREFIX, file, os.environ)
    try:
        settings = ServerConfig.load(flags={"data": data}, environ=environ, file=file)
    except HeadraceError as exc:
        yield problem("settings", str(exc), "`headrace serve` would not start.")
        return
    directory, num_shards = check_directory(settings)
    yield directory
    yield from check_open_files(settings.max_connections)
    yield from check_memory(settings, num_shards)
    yield from check_disk(settings, num_shards)
    yield from check_ports(settings, num_shards)
    yield from check_protection(settings, os.environ)


def _check_server(access: StatusAccess) -> Iterator[Finding]:
    states = asyncio.run(ask_shards(access))
    ours = metadata.version("headrace")
    for version in sorted({state.sample.version for state in states if state.sample is not None} - {ours}):
        yield note("server", f"it runs version {version}, this is {ours}", "Update the older one.")
    problems = find_problems(states)
    for found in problems:
        level = Level.NOTE if found.severity is Severity.NOTE else Level.PROBLEM
        yield Finding(subject="server", level=level, text=found.text, advice=found.advice)
    if not problems:
        yield ok("server", f"{len(states)} shards answer, and nothing is wrong")


def check_clock(address: str) -> Finding:
    """Compare this machine's clock with the one that a server's metrics port reports.

    Raises:
        ConfigError: `address` is not a host and port.
    """
    host, port = parse_address(address, default_port=0)
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    begun_s = time.time()
    try:
        connection.request("GET", "/status.json")
        theirs_s = float(json.loads(connection.getresponse().read())["time_s"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, RecursionError) as exc:
        return problem("clock", f"{address} does not tell its time: {exc}", "Is this its --metrics-port?")
    finally:
        connection.close()
    ended_s = time.time()
    # The server read its clock between our two readings.
    apart_s = max(begun_s - theirs_s, theirs_s - ended_s, 0.0)
    text = f"this clock and the server's are {'less than ' if apart_s < 0.001 else ''}{max(apart_s, 0.001):.3f} s apart"
    if apart_s > _MAX_CLOCK_S:
        advice = "Lags and the times of rows are told by both: keep them with NTP."
        return problem("clock", text, advice)
    return ok("clock", text)


def _show(findings: list[Finding], console: Console) -> None:
    # Problems first, because they are why somebody runs this.
    order = [Level.PROBLEM, Level.NOTE, Level.OK]
    for finding in sorted(findings, key=lambda finding: order.index(finding.level)):
        style = _STYLES[finding.level]
        console.print(f"[{style}]{finding.level.value:8}[/{style}] {finding.subject}: {escape(finding.text)}")
        if finding.advice:
            console.print(f"         {escape(finding.advice)}")
