"""The command `headrace doctor`: whether this machine, a configuration and a server are fit, and what to do if not."""

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

import typer
from rich.console import Console
from rich.markup import escape

from headrace.paramserver.config.process_flags import settings_sources
from headrace.paramserver.config.server_config import ENV_PREFIX, ServerConfig
from headrace.paramserver.metrics.metrics_problems import Severity, find_problems
from headrace.paramserver.metrics.status_client import StatusAccess, ask_shards
from headrace.paramserver.rpc.address import parse_address
from headrace.schemas.errors import HeadraceError
from headrace.scripts.doctor_checks import (
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
)
from headrace.scripts.server_flags import Access, with_server_flags

__all__ = ["check_clock", "doctor"]

_TIMEOUT_S = 5.0
_MAX_CLOCK_S = 1.0
_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.PROBLEM: "bold red"}


@with_server_flags
def doctor(
    *,
    data: Annotated[
        Path | None, typer.Option(help="Directory that a server has or will have.", metavar="DIR", show_default=False)
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="The server's YAML file; the environment counts as for `serve`.", metavar="FILE", show_default=False
        ),
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="Any shard of a running server.", metavar="HOST:PORT", show_default=False)
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(help="Its metrics port, to compare clocks with.", metavar="HOST:PORT", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.", show_default=False)] = False,
    access: Access,
) -> int:
    """Check this machine, a server's configuration and a running server, and say what to do about each finding.

    Nothing is changed. With --data or --config it checks what `headrace serve` would be given.

    Returns:
        0 when there is no problem, else 1.
    """
    findings = [*check_versions(), *check_gpu()]
    if data is not None or config is not None:
        findings += _check_server_settings(data, config)
    if server is not None:
        try:
            findings += _check_server(access(server, timeout_s=_TIMEOUT_S))
        except HeadraceError as exc:
            advice = "Is it running, is this its address, are token and TLS those it asks for?"
            findings.append(Finding(subject="server", level=Level.PROBLEM, text=str(exc), advice=advice))
    if metrics is not None:
        findings.append(check_clock(metrics))
    has_problem = any(finding.level is Level.PROBLEM for finding in findings)
    if as_json:
        told = [{**asdict(finding), "level": finding.level.value} for finding in findings]
        print(json.dumps({"is_fit": not has_problem, "findings": told}, indent=2))
    else:
        _show(findings, Console())
    return 1 if has_problem else 0


def _check_server_settings(data: Path | None, file: Path | None) -> Iterator[Finding]:
    environ, file = settings_sources(ENV_PREFIX, file, os.environ)
    try:
        settings = ServerConfig.load(flags={"data": data}, environ=environ, file=file)
    except HeadraceError as exc:
        yield Finding(
            subject="settings", level=Level.PROBLEM, text=str(exc), advice="`headrace serve` would not start."
        )
        return
    directory, num_shards = check_directory(settings)
    yield directory
    yield from check_open_files(settings.max_connections)
    yield from check_memory(settings, num_shards)
    yield from check_disk(settings, num_shards)
    yield from check_ports(settings, num_shards)
    yield from check_protection(settings, os.environ)


def _check_server(access: StatusAccess) -> Iterator[Finding]:
    answers = asyncio.run(ask_shards(access))
    ours = metadata.version("headrace")
    for version in sorted({answer.reply.version for answer in answers if answer.reply is not None} - {ours}):
        text, advice = f"it runs version {version}, this is {ours}", "Update the older one."
        yield Finding(subject="server", level=Level.NOTE, text=text, advice=advice)
    problems = find_problems([answer.state for answer in answers])
    for problem in problems:
        level = Level.NOTE if problem.severity is Severity.NOTE else Level.PROBLEM
        yield Finding(subject="server", level=level, text=problem.text, advice=problem.advice)
    if not problems:
        yield Finding(subject="server", level=Level.OK, text=f"{len(answers)} shards answer, and nothing is wrong")


def check_clock(address: str) -> Finding:
    """Compare this machine's clock with a server's, by its metrics port.

    Args:
        address: Host and port.

    Raises:
        ConfigError: It is no address.
    """
    host, port = parse_address(address, default_port=0)
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    begun_s = time.time()
    try:
        connection.request("GET", "/status.json")
        theirs_s = float(json.loads(connection.getresponse().read())["time_s"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, RecursionError) as exc:
        advice = "Is this its --metrics-port?"
        return Finding(
            subject="clock", level=Level.PROBLEM, text=f"{address} does not tell its time: {exc}", advice=advice
        )
    finally:
        connection.close()
    ended_s = time.time()
    # It was somewhere between our two looks.
    apart_s = max(begun_s - theirs_s, theirs_s - ended_s, 0.0)
    text = f"this clock and the server's are {'less than ' if apart_s < 0.001 else ''}{max(apart_s, 0.001):.3f} s apart"
    if apart_s > _MAX_CLOCK_S:
        advice = "Lags and the times of rows are told by both: keep them with NTP."
        return Finding(subject="clock", level=Level.PROBLEM, text=text, advice=advice)
    return Finding(subject="clock", level=Level.OK, text=text)


def _show(findings: list[Finding], console: Console) -> None:
    # Problems first: they are why somebody looks.
    order = [Level.PROBLEM, Level.NOTE, Level.OK]
    for finding in sorted(findings, key=lambda finding: order.index(finding.level)):
        style = _STYLES[finding.level]
        console.print(f"[{style}]{finding.level.value:8}[/{style}] {finding.subject}: {escape(finding.text)}")
        if finding.advice:
            console.print(f"         {escape(finding.advice)}")
