"""`headrace doctor`: check this machine, a configuration and a running server, and advise on problems.

Each check returns findings, and changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from headrace.paramserver.config.cluster_file import cluster_of, settings_of_node
from headrace.paramserver.config.data_dir import check_data_dir, is_in_use
from headrace.paramserver.config.server_settings import ENV_PREFIX, ServerConfig
from headrace.paramserver.log.jetstream.nats_address import NatsAccess, NatsLogAddress
from headrace.paramserver.log.opening import kind_of_log
from headrace.paramserver.observe.problems import Severity, find_problems
from headrace.paramserver.observe.status_query import StatusAccess, ask_shards
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.security import Protection
from headrace.paramserver.system.flags import settings_sources
from headrace.paramserver.system.limits import FILES_OF_STORE, machine_memory_bytes
from headrace.paramserver.system.text import counted, format_size
from headrace.paramserver.system.torch_releases import installed_fbgemm, installed_version, is_same_minor, release_for
from headrace.schemas.errors import HeadraceError
from headrace.schemas.extras import install_command
from headrace.scripts.commands.finding import Finding, Level, note, ok, problem
from headrace.scripts.commands.remote_checks import check_clock, check_log_engine, check_object_store
from headrace.scripts.commands.terminal import (
    Access,
    AsJson,
    ServerOrOtherFlag,
    escape,
    option,
    output_console,
    server_unless,
    with_server_flags,
)

__all__ = ["check_disk", "check_gpu", "check_memory", "check_open_files", "check_ports", "check_versions", "doctor"]

_TIMEOUT_S = 5.0
_PROCESS_BYTES = 600 << 20
# What a shard with a trainer takes besides memtable and cache: process 60, log's tail 32, trainer's window 32 MiB. The
# sum was within 6 % of what was measured (docs/operations.md).
_USUAL_BYTES = 124 << 20
_NUM_SYNCS, _SYNC_BYTES = 32, 256 << 10
_SLOW_SYNC_S = 0.05
_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.PROBLEM: "bold red"}


def check_versions(version_of: Callable[[str], str | None] = installed_version) -> Iterator[Finding]:
    """Compare the versions of distributions that must fit together; `version_of` returns None for a missing one."""
    yield ok("versions", f"Headrace {version_of('headrace')}, Python {sys.version.split()[0]}")
    torch = version_of("torch")
    if torch is None:
        advice = f"Trainers and EmbeddingReplica need it: {install_command('torch')}."
        yield note("versions", "torch is not installed: enough for servers and `headrace replica`", advice)
        return
    release = release_for(torch)
    if release is None:
        yield note("versions", f"torch {torch} is not tested", "`streamer.audit()` compares every row.")
        return
    yield ok("versions", f"torch {torch}")
    torchrec, fbgemm = version_of("torchrec"), installed_fbgemm(version_of)
    if torchrec is None and fbgemm is None:
        yield note("versions", "torchrec and fbgemm are not installed: enough for torch.optim models")
        return
    of_fbgemm = fbgemm or ("fbgemm-gpu-cpu", None)
    for name, version, fits in (("torchrec", torchrec, release.torchrec), (*of_fbgemm, release.fbgemm)):
        if version is None or not is_same_minor(version, fits):
            text = f"{name} is {version or 'missing'}; torch {torch} goes with {fits}"
            yield problem("versions", text, f"pip install --no-deps {name}=={fits}")
        else:
            yield ok("versions", f"{name} {version}")


def check_gpu() -> Iterator[Finding]:
    """Check for a GPU and kernels for it."""
    try:
        import torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        yield ok("gpu", "none seen; everything runs on processors")
        return
    from headrace.kernels.runtime.cuda_module import FAMILIES, KernelsUnavailableError
    from headrace.kernels.runtime.dispatch import gpu_module

    name = torch.cuda.get_device_name()
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        for family in FAMILIES:
            gpu_module(family, device)
    except KernelsUnavailableError as exc:
        yield note("gpu", f"{name}, without kernels for it, so torch's own operations are used: {exc}")
    else:
        yield ok("gpu", f"{name}, with kernels for it")


def check_open_files(max_connections: int) -> Iterator[Finding]:
    """Compare the limit of open files with the number that a shard may need."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + FILES_OF_STORE
    text = f"the limit is {hard}, a shard may need {wanted}"
    advice = f"Raise it (ulimit -Hn {wanted}, LimitNOFILE= in systemd), or lower --max-connections."
    is_fit = hard == resource.RLIM_INFINITY or hard >= wanted
    yield ok("open files", text) if is_fit else problem("open files", text, advice)


def check_memory(config: ServerConfig, num_shards: int, memory_bytes: int | None = None) -> Iterator[Finding]:
    """Tell what memory the server takes; compare what it may take with the machine's, `memory_bytes` if not None.

    A block cache of 0 counts as the fraction of the machine's memory that it will be.
    """
    memory_bytes = machine_memory_bytes() if memory_bytes is None else memory_bytes
    cache = config.block_cache_bytes or memory_bytes // 4 // num_shards
    shard = cache + config.memtable_bytes + 2 * config.max_inflight_bytes
    shard += config.max_log_pending_bytes + config.max_backlog_bytes + _PROCESS_BYTES
    total = shard * num_shards
    usual = num_shards * (config.memtable_bytes + _USUAL_BYTES)
    filled = usual + num_shards * cache
    text = (
        f"{counted(num_shards, 'shard')} take{'s' * (num_shards == 1)} about {format_size(usual)}, and "
        f"{format_size(filled)} once reads have filled the block cache; at most {format_size(total)}; "
        f"the machine has {format_size(memory_bytes)}"
    )
    if total > memory_bytes:
        advice = "Lower --max-inflight-bytes, --max-backlog-bytes or --block-cache-bytes, or take fewer shards."
        yield problem("memory", text, advice)
    else:
        yield ok("memory", text)


def check_ports(config: ServerConfig, num_shards: int) -> Iterator[Finding]:
    """Check that the ports of the server are free."""
    wanted = [(config.host, config.port + shard, "--port") for shard in range(num_shards) if config.port]
    if config.metrics_port:
        wanted.append((config.metrics_host, config.metrics_port, "--metrics-port"))
    if config.data.is_dir() and is_in_use(config.data):
        yield note("ports", "a server runs in --data, and may have them")
    elif taken := [(port, flag) for host, port, flag in wanted if not _is_free(host, port)]:
        for port, flag in taken:
            yield problem("ports", f"port {port} is taken", f"End who has it (ss -ltnp), or choose another {flag}.")
    else:
        yield ok("ports", f"free: {', '.join(str(port) for _, port, _ in wanted) or 'the system chooses'}")


def _is_free(host: str, port: int) -> bool:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(1)
    except OSError:
        return False
    return True


def check_disk(config: ServerConfig, num_shards: int) -> Iterator[Finding]:
    """Check the room in the data directory's file system, and by a file of 8 MiB there how long a sync takes."""
    place = config.data.absolute()
    while not place.is_dir():
        place = place.parent
    files, log = os.statvfs(place), config.log_hold_bytes * num_shards
    free = files.f_bavail * files.f_frsize
    text = f"{format_size(free)} free at {place}; logs may take {format_size(log)}, rows come on top"
    advice = "Lower --log-hold-bytes and --log-retention-bytes, or add disk."
    yield problem("disk", text, advice) if free < log else ok("disk", text)
    block, times_s = os.urandom(_SYNC_BYTES), []
    try:
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:
            for _ in range(_NUM_SYNCS):
                begun_s = time.perf_counter()
                file.write(block)
                os.fdatasync(file.fileno())
                times_s.append(time.perf_counter() - begun_s)
    except OSError as exc:
        advice = "Let the server's user write there, or choose another --data."
        yield problem("disk", f"writing to {place}: {exc.strerror}", advice)
        return
    median_s, rate = sorted(times_s)[len(times_s) // 2], _NUM_SYNCS * _SYNC_BYTES / sum(times_s)
    text = f"a write of 256 KiB with its sync takes {median_s * 1000:.1f} ms, {format_size(rate)} a second"
    advice = "Each ack waits for a sync: choose a faster disk."
    yield problem("disk", text, advice) if median_s > _SLOW_SYNC_S else ok("disk", text)


@with_server_flags
def doctor(
    *,
    data: Annotated[Path | None, option("Data directory of a server.", "DIR")] = None,
    config: Annotated[
        Path | None, option("The server's YAML file; environment variables apply as for `serve`.", "FILE")
    ] = None,
    cluster: Annotated[Path | None, option("The server's cluster file.", "FILE")] = None,
    node: Annotated[str | None, option("The node of the cluster that runs here.", "NAME")] = None,
    server: ServerOrOtherFlag = None,
    log: Annotated[str | None, option("Servers of a replicated log: nats://HOST,HOST,HOST.", "URL")] = None,
    log_monitor: Annotated[
        str | None, option("Their monitoring, with commas; by default port 8222 of each.", "URLS")
    ] = None,
    as_json: AsJson = False,
    access: Access,
) -> int:
    """Check this machine, a server's configuration and a running server, and advise on each finding.

    Nothing is changed. --data, --config and --cluster with --node check what `headrace serve` would use, and without
    --server that its ports are free. The server of HEADRACE_SERVER is asked only without them. The exit code is 1 if
    there is a problem.
    """
    findings = [*check_versions(), *check_gpu()]
    settings = next((given for given in (data, config, cluster, node) if given is not None), None)
    if settings is not None:
        findings += _check_server_settings(data, config, cluster, node, has_server=server is not None)
    # The server of these settings may not run yet, so only --server asks one.
    if (server := server_unless(settings, server)) is not None:
        try:
            findings += _check_server(access(server, timeout_s=_TIMEOUT_S))
        except HeadraceError as exc:
            advice = "Is it running, is this its address, are token and TLS those it asks for?"
            findings.append(problem("server", str(exc), advice))
    if log is not None:
        access_to_log = NatsAccess(address=NatsLogAddress.parse(log), environ=os.environ)
        findings += check_log_engine(access_to_log, [] if log_monitor is None else log_monitor.split(","))
    findings.sort(key=lambda finding: list(Level).index(finding.level))  # problems are why somebody runs this
    has_problem = findings[0].level is Level.PROBLEM
    if as_json:
        print(json.dumps({"is_fit": not has_problem, "findings": [asdict(finding) for finding in findings]}, indent=2))
        return int(has_problem)
    for finding in findings:
        style = _STYLES[finding.level]
        line = f"[{style}]{finding.level.value:8}[/{style}] {finding.subject}: {escape(finding.text)}"
        output_console().print(line + (f"\n         {escape(finding.advice)}" if finding.advice else ""))
    return int(has_problem)


def _check_server_settings(
    data: Path | None, file: Path | None, cluster: Path | None, node: str | None, *, has_server: bool
) -> Iterator[Finding]:
    environ, file = settings_sources(ENV_PREFIX, file, os.environ)
    try:
        of_cluster, of_node = cluster_of(cluster, node, environ=environ, env_prefix=ENV_PREFIX)
        defaults, fixed = settings_of_node(of_cluster, of_node)
        settings = ServerConfig.load(flags={"data": data}, environ=environ, file=file, defaults=defaults, fixed=fixed)
        Protection.load(settings, os.environ)
    except HeadraceError as exc:
        yield problem("settings", str(exc), "`headrace serve` would not start.")
        return
    if settings.object_store is not None:
        yield from check_object_store(settings.object_store)
    num_shards = len(of_node.copies) if of_node is not None else settings.shards or 1
    found: Any = {
        "num_shards": settings.shards,
        "cluster": of_cluster,
        "node": of_node,
        "log": kind_of_log(settings.log),
    }
    try:
        manifest = check_data_dir(settings.data, **found)
        num_shards = num_shards if manifest is None else len(manifest.shards)
        store = "no store yet, a start makes it" if manifest is None else f"a store of {counted(num_shards, 'shard')}"
        yield ok("directory", f"{settings.data}: {store}")
    except HeadraceError as exc:
        yield problem("directory", str(exc), "`headrace serve` would not start.")
    yield from check_open_files(settings.max_connections)
    yield from check_memory(settings, num_shards)
    yield from check_disk(settings, num_shards)
    if not has_server:  # else the one that has them may be the server that is asked
        yield from check_ports(settings, num_shards)


def _check_server(access: StatusAccess) -> Iterator[Finding]:
    states = asyncio.run(ask_shards(access))
    ours = metadata.version("headrace")
    for version in sorted({state.sample.version for state in states if state.sample is not None} - {ours}):
        yield note("server", f"it runs version {version}, this is {ours}", "Update the older one.")
    problems = find_problems(states)
    for found in problems:
        level = Level.NOTE if found.severity is Severity.NOTE else Level.PROBLEM
        yield Finding(level, "server", found.text, found.advice)
    if not problems:
        yield ok("server", f"{counted(len(states), 'shard')} answer{'s' * (len(states) == 1)}, and nothing is wrong")
    for address in [state.address for state in states if state.sample is not None][:1]:
        yield asyncio.run(check_clock(access.dial(), *parse_address(address, default_port=0)))
